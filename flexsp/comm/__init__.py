"""Ranks, transports and symmetric memory."""
