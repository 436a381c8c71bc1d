"""Whether kernels under Triton's interpreter touch memory that they were not given, or lack a barrier."""

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
    """The kernel that runs: its name, from where to where its tensors reach, and what its program has done to each of
    them since its last barrier: loads and stores, as addresses and masks."""

    def launched(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        self.name = name
        extents = np.array(sorted(map(_extent, tensors)), dtype=np.uint64).reshape(-1, 2)
        self.begins, self.ends = extents[:, 0], np.maximum.accumulate(extents[:, 1])

    def ordered(self) -> None:
        self.done: dict[int, tuple[list[Any], list[Any]]] = {}

    def touched(self, what: str, addresses: Any, nbytes: int, mask: Any, there_already: Any) -> None:
        if self.name in _BY_ADDRESS or not addresses.size:
            return
        at = addresses.astype(np.uint64)
        i = np.searchsorted(self.begins, at, side="right")
        outside = (i == 0) | (at + np.uint64(nbytes) > self.ends[np.maximum(i, 1) - 1])
        if outside.any():
            raise AssertionError(f"{self.name}: {outside.sum()} of {at.size} elements of a {what} lie outside tensors")
        self._alone(what, int(i.flat[0]), at, mask, there_already)

    def _alone(self, what: str, tensor: int, at: Any, mask: Any, there_already: Any) -> None:
        """AssertionError where other threads may have done something else to the same memory."""
        loads, stores = self.done.setdefault(tensor, ([], []))
        (loads if what == "load" else stores).append((at, mask))
        if not stores:
            return
        first, last = at.min(), at.max()
        others = [("store", x) for x in stores] + ([("load", x) for x in loads] if what == "store" else [])
        for kind, (places, there) in others:
            if places is at or places.min() > last or places.max() < first or not np.isin(at, places).any():
                continue
            if kind == what and np.array_equal(there, mask) and np.array_equal(places, at):
                continue  # threads store once more over their own numbers
            if kind == "store" or not there_already():
                said = f"a {what} behind a {kind} of the same memory, with no barrier between them"
                raise AssertionError(f"{self.name}: {said}")


@contextmanager
def within_tensors() -> Iterator[None]:
    """AssertionError, inside of Triton's InterpreterError, where a kernel loads or stores outside of its tensors, or
    loads what its program has stored, or stores over what that has loaded or stored, without a barrier in between:
    other threads may do either.

    Its tensors are those that it is launched with, as far as their shapes and strides reach; what is masked is not
    looked at, nor atomics, nor what the scan does in memory of other ranks, whose addresses are numbers.
    """
    running = _Running()
    with watching_interpreter(running.launched, running.ordered, running.touched):
        yield
