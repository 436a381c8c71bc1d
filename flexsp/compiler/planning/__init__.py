"""Chunks, segments and tiles of a call, its launches, and what they are predicted to cost."""
