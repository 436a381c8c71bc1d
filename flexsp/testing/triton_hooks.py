"""What tests use of Triton that is not its public interface; `flexsp.runtime.triton_private` has the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from triton.runtime.jit import JITFunction

__all__ = [
    "SharedMemory", "compiling_to_shared_memory", "interpreter", "record_launches", "watching_interpreter",
]  # fmt: skip


@contextmanager
def record_launches() -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """Collects (kernel, args, kwargs) of every Triton launch in the block instead of running it."""
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    original: Callable[..., Any] = JITFunction.__getitem__

    def record(self: Any, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: launches.append((self, args, kwargs))

    JITFunction.__getitem__ = record
    try:
        yield launches
    finally:
        JITFunction.__getitem__ = original


class SharedMemory(Exception):
    """How many bytes of it a kernel takes."""


@contextmanager
def compiling_to_shared_memory() -> Iterator[None]:
    """Compilations end in `SharedMemory` as soon as that is known, before PTX is made."""
    from triton.backends.nvidia.compiler import CUDABackend

    def stop(self: Any, src: Any, metadata: dict[str, Any], *rest: Any) -> None:
        raise SharedMemory(metadata["shared"])

    original, CUDABackend.make_ptx = CUDABackend.make_ptx, stop
    try:
        yield
    finally:
        CUDABackend.make_ptx = original


IN_ORDER = ("_propagate_kernel", "_propagate_both_kernel")
"""Kernels whose programs wait for those of lower numbers."""


def interpreter() -> Any:
    """Triton's module that interprets kernels; it needs TRITON_INTERPRET=1."""
    from triton.runtime import interpreter

    return interpreter


@contextmanager
def watching_interpreter(
    launched: Callable[[str, list[Any]], None], ordered: Callable[[], None], touched: Callable[..., None]
) -> Iterator[None]:
    """Under the interpreter, calls `launched(kernel's name, its tensors)` before each launch, `ordered()` where a
    program begins and at each barrier, and before each access through pointers `touched("load" or "store", addresses
    of what is not masked, bytes of an element, mask, a function that says whether memory has what is stored)`.

    Of a kernel's launches every other one, beginning with the first, has its last program run first: a GPU orders
    them as it likes, and the interpreter by their numbers.
    """
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    barrier, program = InterpreterBuilder.create_barrier, InterpreterBuilder.set_grid_idx
    start, turned, running = GridExecutor._init_args_hst, dict[str, bool](), list[str]()

    def told(what: str, pointers: Any, mask: Any, there_already: Any = None) -> None:
        nbytes = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        there = _broadcast(mask.data, pointers.data.shape)
        touched(what, pointers.data[there], nbytes, there, there_already)

    def told_barrier(self: Any) -> None:
        ordered()
        barrier(self)

    def told_program(self: Any, *index: int) -> None:
        ordered()
        last_first = turned[running[0]]
        program(self, *[n - 1 - i if last_first else i for i, n in zip(index, self.grid_dim, strict=True)])

    def told_start(self: Any, args: Any, kwargs: Any) -> Any:
        given = start(self, args, kwargs)
        running[:] = [self.fn.__name__]
        turned[running[0]] = running[0] not in IN_ORDER and not turned.get(running[0], False)
        launched(self.fn.__name__, [x for x in (*given[0], *given[1].values()) if hasattr(x, "data_ptr")])
        return given

    def told_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        told("load", pointers, mask)
        return load(self, pointers, mask, *rest)

    def told_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        def there_already() -> bool:
            there = _broadcast(mask.data, pointers.data.shape)
            found = load(self, pointers, mask, None, None, None, False).data[there]
            return bool((found == value.data[there]).all())

        told("store", pointers, mask, there_already)
        return store(self, pointers, value, mask, *rest)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = told_load, told_store
    InterpreterBuilder.create_barrier, InterpreterBuilder.set_grid_idx = told_barrier, told_program
    GridExecutor._init_args_hst = told_start
    try:
        yield
    finally:
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
        InterpreterBuilder.create_barrier, InterpreterBuilder.set_grid_idx = barrier, program
        GridExecutor._init_args_hst = start


def _broadcast(mask: Any, shape: tuple[int, ...]) -> Any:
    import numpy as np

    if mask.shape == shape and mask.dtype == bool:
        return mask
    return np.broadcast_to(mask, shape).astype(bool)
