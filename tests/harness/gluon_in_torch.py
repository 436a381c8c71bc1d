"""The walk of large states on the CPU: its own source, with a Gluon made of PyTorch. Triton's interpreter has none.

Copies to shared memory leave NaN where they go until they are waited for. A product is computed when it begins and once
more when it is waited for: both must be the same, or its operands were written over. Addresses outside of a tensor are
found. Layouts, barriers and fences are not looked at: see `flexsp/testing/races.py`.
"""

from __future__ import annotations

import itertools
import re
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["install"]

_KERNELS = Path(__file__).parents[2] / "flexsp" / "kernels"
_NAME = "flexsp.kernels.diagonal.hopper_walks"
_LAYOUTS = (
    "BlockedLayout", "NVMMADistributedLayout", "SliceLayout", "DotOperandLayout", "SwizzledSharedLayout",
)  # fmt: skip
_NOT_HERE = re.compile(r"^from (?:triton|flexsp)[^(\n]*(?:\([^)]*\))?$", re.MULTILINE)
Tensor = torch.Tensor


class _Pointer:
    """Numbers of a tensor's memory from `at` on."""

    def __init__(self, memory: Tensor, at: Any, name: str) -> None:
        self.memory, self.at, self.name = memory, at, name

    def __add__(self, more: Any) -> _Pointer:
        return _Pointer(self.memory, self.at + more, self.name)

    def __sub__(self, less: Any) -> _Pointer:
        return self + -less

    def places(self, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        at = torch.as_tensor(self.at)
        at, here = torch.broadcast_tensors(at, torch.ones_like(at, dtype=torch.bool) if mask is None else mask)
        wrong = here & ((at < 0) | (at >= len(self.memory)))
        assert not wrong.any(), f"{self.name}: {at[wrong].min()} to {at[wrong].max()} of {len(self.memory)}"
        return torch.where(here, at, 0), here


def _load(pointer: _Pointer, mask: Tensor | None = None, other: float = 0.0) -> Tensor:
    at, here = pointer.places(mask)
    memory = pointer.memory
    found = memory[at] if len(memory) else torch.zeros(at.shape, dtype=memory.dtype)
    return torch.where(here, found, torch.tensor(other, dtype=memory.dtype))


def _store(pointer: _Pointer, x: Any, mask: Tensor | None = None) -> None:
    at, here = pointer.places(mask)
    x = torch.broadcast_to(torch.as_tensor(x).to(pointer.memory.dtype), at.shape)
    pointer.memory[at[here]] = x[here]


class _Shared:
    """Shared memory, which begins as NaN."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def index(self, i: Any) -> _Shared:
        return _Shared(self.data[int(i)])

    def permute(self, order: Sequence[int]) -> _Shared:
        return _Shared(self.data.permute(*order))

    def slice(self, start: int, length: int, dim: int = 0) -> _Shared:
        return _Shared(self.data.narrow(dim, start, length))

    def load(self, layout: Any) -> Tensor:
        return self.data.clone()

    def store(self, x: Tensor) -> None:
        assert (x.dtype, x.shape) == (self.data.dtype, self.data.shape)
        self.data.copy_(x)


class _Product:
    """A product that goes on by itself."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self.compute, self.begun = compute, compute()

    def done(self) -> Tensor:
        found = self.compute()
        same = torch.equal(found.nan_to_num(1e30), self.begun.nan_to_num(1e30))
        assert same, "a product's operands were written over before it was done"
        return found


def _data(x: Any) -> Tensor:
    found: Tensor = x.data if isinstance(x, _Shared) else x
    assert found.dtype == torch.bfloat16
    return found


def _multiply(a: Any, b: Any, sums: Any, use_acc: bool = True, is_async: bool = False) -> _Product:
    assert is_async and not isinstance(sums, _Product)
    left, right = _data(a), _data(b)
    return _Product(lambda: left.float() @ right.float() + (sums if use_acc else 0.0))


def _wait(outstanding: int, products: Sequence[Any]) -> Any:
    found = [x.done() if isinstance(x, _Product) else x for x in products]
    return found[0] if len(found) == 1 else found


def _power(x: Any) -> Tensor:
    found = torch.exp2(torch.as_tensor(x).float())
    return torch.where(found.abs() < 2.0**-126, 0.0, found)


def _shared(dtype: torch.dtype, shape: Sequence[int], layout: Any = None) -> _Shared:
    return _Shared(torch.full(tuple(shape), torch.nan, dtype=dtype))


def _decorated(function: Any = None, **options: Any) -> Any:
    return function if function is not None else lambda kernel: kernel


class _Kernel:
    """`walk_kernel`, launched as Triton's kernels are, one program after the other."""

    __name__ = "walk_kernel"

    def __init__(self) -> None:
        self.program, self.grid = [0, 0, 0], [1, 1, 1]
        self.pending: list[tuple[Tensor, Tensor]] = []
        names = self._names()
        for file, what in (("gluon.py", r"@gluon\.jit\ndef chunk_at\(.*?\n\n\n"), ("diagonal/hopper_walks.py", r".*")):
            source = re.search(what, (_KERNELS / file).read_text(), re.DOTALL)
            assert source is not None
            text = re.sub(r"\w+\.type\.layout", "None", _NOT_HERE.sub("", source[0]))
            if not text.startswith('"""'):
                text = f"from __future__ import annotations\n{text}"
            exec(compile(text, file, "exec"), names)
        self.kernel = names["walk_kernel"]
        self.arg_names = list(self.kernel.__code__.co_varnames[: self.kernel.__code__.co_argcount])

    def _names(self) -> dict[str, Any]:
        gl: Any = types.SimpleNamespace(
            constexpr=lambda x: x, float32=torch.float32, bfloat16=torch.bfloat16, int64=torch.int64, int32=torch.int32,
            program_id=lambda i: torch.tensor(self.program[i]), num_programs=lambda i: torch.tensor(self.grid[i]),
            arange=lambda start, end, layout=None: torch.arange(start, end), load=_load, store=_store,
            zeros=lambda shape, dtype, layout=None: torch.zeros(tuple(shape), dtype=dtype),
            where=lambda mask, x, y: torch.where(torch.as_tensor(mask), x, y), sum=lambda x, axis: x.sum(axis),
            reshape=lambda x, shape: x.reshape(tuple(shape)), convert_layout=lambda x, layout: x,
            minimum=lambda x, y: torch.minimum(torch.as_tensor(x), torch.as_tensor(y)), thread_barrier=lambda: None,
        )  # fmt: skip
        for name in _LAYOUTS:
            setattr(gl, name, lambda *args: None)
        copies = types.SimpleNamespace(async_copy_global_to_shared=self._copy, commit_group=lambda: None)
        return {
            "gl": gl, "gluon": types.SimpleNamespace(jit=_decorated, constexpr_function=_decorated),
            "async_copy": copies, "warpgroup_mma": _multiply, "warpgroup_mma_wait": _wait, "power": _power,
            "arrived": self._arrived, "begin": lambda pdl: None, "visible": lambda: None,
            "tiles": lambda count, rows, columns: _shared(torch.bfloat16, (count, rows, columns)),
            "numbers": lambda count, n: _shared(torch.float32, (count, n)),
        }  # fmt: skip

    def _copy(self, to: _Shared, pointer: _Pointer, mask: Tensor | None = None) -> None:
        found = _load(pointer, mask)
        to.data.fill_(torch.nan)
        self.pending.append((to.data, found))

    def _arrived(self, groups: int) -> None:
        for to, found in self.pending:
            to.copy_(found)
        self.pending.clear()

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            given = [_memory(x, name) for name, x in zip(self.arg_names, args, strict=False)]
            constants = {name: x for name, x in constants.items() if name in self.arg_names}
            self.grid[:] = (*grid, 1, 1)[:3]
            for place in itertools.product(*map(range, self.grid)):
                self.program[:] = place
                self.kernel(*given, **constants)
                assert not self.pending

        return launch


def _memory(x: Any, name: str) -> Any:
    """A tensor as a pointer to its memory."""
    if not isinstance(x, Tensor):
        return x
    x = x.detach()
    size = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
    return _Pointer(torch.as_strided(x, (size,), (1,)), 0, name)


def install() -> None:
    """In this process, large states of bfloat16 are walked by that kernel in Triton's interpreter."""
    from flexsp.runtime import triton_private

    module: Any = types.ModuleType(_NAME)
    module.COLUMNS, module.WARPS, module.walk_kernel = 128, 8, _Kernel()
    sys.modules[_NAME] = module
    triton_private.runs_gluon = lambda: True
