"""Sizes of a run that names none: the README's on a GPU, small ones on a CPU, where a run is to end in seconds."""

from __future__ import annotations

import argparse

__all__ = ["DEFAULTS", "choose"]

# Argument -> its value on a GPU, its value on a CPU.
DEFAULTS: dict[str, tuple[object, object]] = {
    "H": (32, 2),
    "K": (128, 32),
    "V": (128, 32),
    "dtype": ("bfloat16", "float32"),
    "warmup": (5, 1),
    "iterations": (50, 5),
    "T": ([4096, 16384, 65536], [128, 512]),
    "T_local": ([8192, 32768, 65536], [128, 512]),
    "lengths": ([4096, 32768, 131072], [64]),
    "check": (1024, 64),
    "cold": (["simple_gla"], []),
    "repeats": (5, 2),
    "out": ("benchmarks/results", "runs/bench"),
}


def choose(args: argparse.Namespace, device_type: str) -> None:
    """Fill in what the command line left open, for the type of device that the run takes."""
    column = 0 if device_type == "cuda" else 1
    for name, values in DEFAULTS.items():
        if getattr(args, name, ...) is None:
            setattr(args, name, values[column])
