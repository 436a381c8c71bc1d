"""Whether kernels under Triton's interpreter touch memory that they were not given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from flexsp.testing.triton_hooks import watching_interpreter

__all__ = ["within_tensors"]

_BY_ADDRESS = ("_propagate_kernel",)


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and behind the last one."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + ((last + 1) * x.element_size() if x.numel() else 0)


class _Running:
    """The kernel that runs: its name, and from where to where its tensors reach."""

    def launched(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        self.name = name
        extents = np.array(sorted(map(_extent, tensors)), dtype=np.uint64).reshape(-1, 2)
        self.begins, self.ends = extents[:, 0], np.maximum.accumulate(extents[:, 1])

    def touched(self, what: str, addresses: Any, nbytes: int) -> None:
        if self.name in _BY_ADDRESS:
            return
        at = addresses.astype(np.uint64)
        i = np.searchsorted(self.begins, at, side="right")
        outside = (i == 0) | (at + np.uint64(nbytes) > self.ends[np.maximum(i, 1) - 1])
        if outside.any():
            raise AssertionError(f"{self.name}: {outside.sum()} of {at.size} elements of a {what} lie outside tensors")


@contextmanager
def within_tensors() -> Iterator[None]:
    """AssertionError, inside of Triton's InterpreterError, where a kernel loads or stores outside of its tensors.

    Its tensors are those that it is launched with, as far as their shapes and strides reach; what is masked is not
    looked at, nor atomics, nor what the scan does in memory of other ranks, whose addresses are numbers.
    """
    running = _Running()
    with watching_interpreter(running.launched, running.touched):
        yield
