"""Triton code of these graphs, in which every value is a tile."""
