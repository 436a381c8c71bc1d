"""The combinations of Triton release and GPU on which the GPU tests have passed.

Compilers differ in what they get wrong: a kernel that is right on one GPU under one release says little of another.
This file imports neither Triton nor a GPU.
"""

from __future__ import annotations

import functools
import re
import warnings
from typing import NamedTuple

import torch

from flexsp.exceptions import UncoveredWarning

__all__ = ["COVERED", "GLUON", "Run", "uncovered", "warn_if_uncovered"]


class Run(NamedTuple):
    """A run of `make test-gpu` in which every test passed."""

    triton: str
    capability: tuple[int, int]
    gpu: str
    commit: str
    passed: int


# With 3.9.0, 827 tests at 130a2c1, whose kernels are the same, and the others at a03ce10.
COVERED: tuple[Run, ...] = (
    Run("3.6.0", (9, 0), "NVIDIA H200", "5f9294f", 972),
    Run("3.9.0", (9, 0), "NVIDIA H200", "a03ce10", 972),
)

GLUON: frozenset[str] = frozenset({"3.6"})
"""Releases of Triton with which the kernels in Gluon passed tests/gpu/test_delta_engine_gpu.py and
tests/gpu/test_large_states_gpu.py; with others those in Triton run instead."""


def uncovered(triton: str, capability: tuple[int, int], gpu: str) -> str | None:
    """None if a run covered this combination, else a warning that says what to do.

    A run counts for its release of Triton (3.6.0 and 3.6.0+cu13 are one) and for all GPUs of its compute capability.
    """
    release = re.split(r"[+-]", triton)[0]
    if any(run.triton == release and run.capability == capability for run in COVERED):
        return None
    runs = dict.fromkeys(f"Triton {run.triton} on {run.gpu} (sm_{_sm(run.capability)})" for run in COVERED)
    return (
        f"flexsp's GPU tests have not passed with Triton {release} on {gpu} (sm_{_sm(capability)}), and compilers "
        "differ in what they get wrong. `make test-gpu` in a checkout of flexsp runs them, `flexsp doctor` a quick "
        f"self-test. They passed with {', '.join(runs) or 'no combination yet'}."
    )


def _sm(capability: tuple[int, int]) -> str:
    return f"{capability[0]}{capability[1]}"


@functools.lru_cache(maxsize=64)
def warn_if_uncovered(triton: str, device: int) -> None:
    """Warns of a combination that no run covered, once for all equal GPUs."""
    _warn(triton, torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))


@functools.lru_cache(maxsize=64)
def _warn(triton: str, capability: tuple[int, int], gpu: str) -> None:
    text = uncovered(triton, capability, gpu)
    if text is not None:
        warnings.warn(text, UncoveredWarning, stacklevel=3)
