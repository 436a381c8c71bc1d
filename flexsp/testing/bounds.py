"""Whether kernels under Triton's interpreter touch memory that they were not given, or lack a barrier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from flexsp.testing.triton_hooks import watching_interpreter

__all__ = ["within_tensors"]

_BY_ADDRESS = ("_propagate_kernel", "_propagate_both_kernel")


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and behind the last one."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + ((last + 1) * x.element_size() if x.numel() else 0)


class _Access(NamedTuple):
    """Addresses of what is not masked, the first and the last of them, and the mask."""

    at: Any
    first: Any
    last: Any
    mask: Any


class _Running:
    """The kernel that runs: its name, from where to where its tensors reach, and what its program has done to each of
    them since its last barrier: loads and stores."""

    def launched(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        self.name = name
        extents = np.array(sorted(map(_extent, tensors)), dtype=np.uint64).reshape(-1, 2)
        self.begins, self.ends = extents[:, 0], np.maximum.accumulate(extents[:, 1])

    def ordered(self) -> None:
        self.done: dict[int, tuple[list[_Access], list[_Access]]] = {}

    def touched(self, what: str, addresses: Any, nbytes: int, mask: Any, there_already: Any) -> None:
        if self.name in _BY_ADDRESS or not addresses.size:
            return
        at = addresses.astype(np.uint64, copy=False)
        first, last = at.min(), at.max()
        i = int(np.searchsorted(self.begins, first, side="right"))
        if i == 0 or last + np.uint64(nbytes) > self.ends[i - 1]:
            self._not_in_one(what, at, nbytes)
        self._alone(what, i, _Access(at, first, last, mask), there_already)

    def _not_in_one(self, what: str, at: Any, nbytes: int) -> None:
        """AssertionError: elements lie in no tensor, or in several. What is not masked at a tensor's edge may reach the
        one behind."""
        i = np.searchsorted(self.begins, at, side="right")
        outside = (i == 0) | (at + np.uint64(nbytes) > self.ends[np.maximum(i, 1) - 1])
        if outside.any():
            raise AssertionError(f"{self.name}: {outside.sum()} of {at.size} elements of a {what} lie outside tensors")
        raise AssertionError(f"{self.name}: the {at.size} elements of a {what} lie in several tensors")

    def _alone(self, what: str, tensor: int, it: _Access, there_already: Any) -> None:
        """AssertionError where other threads may have done something else to the same memory."""
        loads, stores = self.done.setdefault(tensor, ([], []))
        (loads if what == "load" else stores).append(it)
        if not stores:
            return
        others = [("store", x) for x in stores] + ([("load", x) for x in loads] if what == "store" else [])
        for kind, other in others:
            apart = other.first > it.last or other.last < it.first
            if other is it or apart or not np.isin(it.at, other.at).any():
                continue
            if kind == what and np.array_equal(other.mask, it.mask) and np.array_equal(other.at, it.at):
                continue  # threads store once more over their own numbers
            if kind == "store" or not there_already():
                said = f"a {what} behind a {kind} of the same memory, with no barrier between them"
                raise AssertionError(f"{self.name}: {said}")


@contextmanager
def within_tensors() -> Iterator[None]:
    """AssertionError, inside of Triton's InterpreterError, where a kernel loads or stores outside of its tensors, or in
    several of them at once, or loads what its program has stored, or stores over what that has loaded or stored,
    without a barrier in between: other threads may do either.

    Its tensors are those that it is launched with, as far as their shapes and strides reach; what is masked is not
    looked at, nor atomics, nor what the scan does in memory of other ranks, whose addresses are numbers.
    """
    running = _Running()
    with watching_interpreter(running.launched, running.ordered, running.touched):
        yield
