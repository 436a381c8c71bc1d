"""Launches that are worked out once for calls that look alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flexsp.runtime.kept import keep
from flexsp.runtime.launch import KernelLaunch
from flexsp.runtime.steps import Frame, Workspace, run_steps

__all__ = ["Launch", "power_of_2", "run", "run_in_order"]

_CALLS = 1024  # that are kept
_launches: dict[Any, tuple[list[KernelLaunch], Workspace]] = {}


def power_of_2(n: int) -> int:
    """The least that is at least n >= 1. Triton's own function takes the host ten times as long."""
    return 1 << (n - 1).bit_length()


class Launch(NamedTuple):
    """A kernel whose arguments are the named tensors, the numbers and the constants, in this order."""

    kernel: Any
    grid: tuple[int, ...]
    names: Sequence[str]
    numbers: Sequence[int | float]
    constants: Mapping[str, Any]
    warps: int = 4


def run(
    kernel: Any, grid: tuple[int, ...], tensors: Mapping[str, torch.Tensor], numbers: Sequence[int | float],
    constants: Mapping[str, Any], warps: int = 4,
) -> None:  # fmt: skip
    """Launches a kernel whose arguments are the tensors, the numbers and the constants, in this order, if there are
    programs."""
    if math.prod(grid):
        key = (kernel, grid, *numbers, len(constants), *constants, *constants.values())
        run_in_order(key, tensors, lambda: ([Launch(kernel, grid, [*tensors], numbers, constants, warps)], Workspace()))


def run_in_order(
    key: tuple[Any, ...], tensors: Mapping[str, torch.Tensor],
    make: Callable[[], tuple[Sequence[Launch], Workspace]],
) -> None:  # fmt: skip
    """Runs several launches, and sets aside the memory that they share.

    Args:
        key: all that what is made depends on, but for dtypes, devices and alignments of the tensors.
        tensors: by the names that launches have for them.
        make: gives the launches, and the memory whose names they use besides.
    """
    given = tensors.values()
    looks = [(x.dtype, x.data_ptr() % 16 == 0) for x in given]
    device = next(iter(given)).device
    key = (*key, device, *tensors, *looks)
    found = _launches.get(key)
    if found is None:
        launches, scratch = make()
        steps = [
            KernelLaunch(x.kernel, x.grid, tuple(x.names), x.numbers, dict(x.constants), {"num_warps": x.warps})
            for x in launches
        ]
        found = steps, scratch
        keep(_launches, key, found, _CALLS)
    steps, scratch = found
    memory = []
    if scratch.places:
        memory.append((scratch, torch.empty(scratch.nbytes, dtype=torch.uint8, device=device)))
    run_steps(steps, Frame(dict(tensors), memory), device)
