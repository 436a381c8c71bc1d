"""Whether kernels under Triton's interpreter touch memory that they were not given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["within_tensors"]

_BY_ADDRESS = ("_propagate_kernel",)


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and behind the last one."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + ((last + 1) * x.element_size() if x.numel() else 0)


class _Kernel:
    """What is running: its name, and from where to where its tensors reach."""

    def __init__(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        self.name = name
        extents = np.array(sorted(map(_extent, tensors)), dtype=np.uint64).reshape(-1, 2)
        self.begins, self.ends = extents[:, 0], np.maximum.accumulate(extents[:, 1])

    def check(self, what: str, pointers: Any, mask: Any) -> None:
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        at = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)].astype(np.uint64)
        i = np.searchsorted(self.begins, at, side="right")
        outside = (i == 0) | (at + size > self.ends[np.maximum(i, 1) - 1])
        if outside.any():
            raise AssertionError(f"{self.name}: {outside.sum()} of {at.size} elements of a {what} lie outside tensors")


@contextmanager
def within_tensors() -> Iterator[None]:
    """AssertionError, inside of Triton's InterpreterError, where a kernel loads or stores outside of its tensors.

    Its tensors are those that it is launched with, as far as their shapes and strides reach; what is masked is not
    looked at, nor atomics, nor what the scan does in memory of other ranks, whose addresses are numbers.
    """
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, start = builder.create_masked_load, builder.create_masked_store, executor._init_args_hst
    running: list[_Kernel] = []

    def started(self: Any, args: Any, kwargs: Any) -> Any:
        given = start(self, args, kwargs)
        tensors = [x for x in (*given[0], *given[1].values()) if isinstance(x, torch.Tensor)]
        running[:] = [] if self.fn.__name__ in _BY_ADDRESS else [_Kernel(self.fn.__name__, tensors)]
        return given

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        for kernel in running:
            kernel.check("load", pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        for kernel in running:
            kernel.check("store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    executor._init_args_hst = started
    try:
        yield
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
        executor._init_args_hst = start
