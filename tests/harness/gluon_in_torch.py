"""Kernels in Gluon on the CPU: their own source, with a Gluon made of PyTorch. Triton's interpreter has none.

Copies to shared memory leave NaN where they go until they are waited for. A product is computed when it begins and once
more when it is waited for: both must be the same, or its operands were written over. Addresses outside of a tensor are
found. Layouts, barriers and fences are not looked at: see `flexsp/testing/races.py`.
"""

from __future__ import annotations

import ast
import functools
import itertools
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["Kernel", "install"]

_KERNELS = Path(__file__).parents[2] / "flexsp" / "kernels"
_NAME = "flexsp.kernels.diagonal.hopper_walks"
launched: set[str] = set()  # names of the kernels that ran in this process
_LAYOUTS = (
    "BlockedLayout", "NVMMADistributedLayout", "SliceLayout", "DotOperandLayout", "SwizzledSharedLayout",
    "DistributedLinearLayout",
)  # fmt: skip
Tensor = torch.Tensor


class _Pointer:
    """Numbers of a tensor's memory from `at` on."""

    def __init__(self, memory: Tensor, at: Any, name: str) -> None:
        self.memory, self.at, self.name = memory, at, name

    def __add__(self, more: Any) -> _Pointer:
        return _Pointer(self.memory, self.at + more, self.name)

    def __sub__(self, less: Any) -> _Pointer:
        return self + -less

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.memory.dtype)

    def places(self, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        at = torch.as_tensor(self.at)
        at, here = torch.broadcast_tensors(at, torch.ones_like(at, dtype=torch.bool) if mask is None else mask)
        wrong = here & ((at < 0) | (at >= len(self.memory)))
        assert not wrong.any(), f"{self.name}: {at[wrong].min()} to {at[wrong].max()} of {len(self.memory)}"
        return torch.where(here, at, 0), here


def _load(pointer: _Pointer, mask: Tensor | None = None, other: Any = 0.0, cache_modifier: str = "") -> Tensor:
    at, here = pointer.places(mask)
    memory = pointer.memory
    found = memory[at] if len(memory) else torch.zeros(at.shape, dtype=memory.dtype)
    return torch.where(here, found, torch.as_tensor(other, dtype=memory.dtype))


def _store(pointer: _Pointer, x: Any, mask: Tensor | None = None) -> None:
    at, here = pointer.places(mask)
    x = torch.broadcast_to(torch.as_tensor(x).to(pointer.memory.dtype), at.shape)
    pointer.memory[at[here]] = x[here]


def _atomic_add(pointer: _Pointer, x: int, sem: str, scope: str) -> Tensor:
    assert (sem, scope) == ("acq_rel", "gpu")
    found = _load(pointer).clone()
    _store(pointer, found + x)
    return found


class _Shared:
    """Shared memory, which begins as NaN, or as the least integer."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def _keep_alive(self) -> None: ...

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
    assert is_async
    left, right = _data(a), _data(b)

    def compute() -> Tensor:
        found = left.float() @ right.float()
        if use_acc:
            found = found + (sums.done() if isinstance(sums, _Product) else sums)
        return found

    return _Product(compute)


def _multiply_at_once(a: Tensor, b: Tensor, sums: Tensor, input_precision: str | None = None) -> Tensor:
    assert a.dtype == b.dtype == (torch.float32 if input_precision else torch.bfloat16)
    return a.float() @ b.float() + sums


def _wait(outstanding: int, products: Sequence[Any]) -> Any:
    found = (*(x.done() if isinstance(x, _Product) else x for x in products),)
    return found[0] if len(found) == 1 else found


def _power(x: Tensor) -> Tensor:
    found = torch.exp2(x)
    return torch.where(found.abs() < 2.0**-126, 0.0, found)


_INSTRUCTIONS: dict[str, Callable[..., Tensor]] = {
    "ex2.approx.ftz.f32": _power, "setp.eq.u32": lambda x, y: x == y, "and.b32": lambda x, y: x & y,
    "or.b32": lambda x, y: x | y, "xor.b32": lambda x, y: x ^ y,
    "selp.b32": lambda x, y, which: torch.where(which, x, y),
}  # fmt: skip


def _assembly(
    text: str, constraints: str, args: Sequence[Tensor], dtype: torch.dtype, is_pure: bool, pack: int
) -> Tensor:  # fmt: skip
    """Registers of numbers in float32, or else of 32 bits, which lie in int64. Of numbers of 16 bits two are in one."""
    registers, n = {}, 1
    for x in args:
        parts = x.reshape(-1, pack)
        if x.dtype.itemsize == 2:
            low, high = (parts.view(torch.int16).long() & 0xFFFF).unbind(1)
            parts = (low | high << 16).unsqueeze(1)
        for part in parts.unbind(1):
            registers[f"${n}"] = part if part.dtype.is_floating_point else part.long() & 0xFFFFFFFF
            n += 1
    for line in text.strip("{} ").split(";"):
        name, _, rest = line.strip().partition(" ")
        if name and name != ".reg":
            to, *names = rest.split(", ")
            given = [registers[x] if x in registers else torch.tensor(int(x, 0)) for x in names]
            registers[to] = _INSTRUCTIONS[name](*given)
    found = registers["$0"]
    if dtype.itemsize == 2:
        found = torch.stack([found << 48 >> 48, found << 32 >> 48], 1).to(torch.int16).view(dtype)
    assert found.dtype == dtype
    return found.reshape(args[0].shape)


def _both(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Tensors; one of them may be a number."""
    kind = next((z.dtype for z in (x, y) if isinstance(z, Tensor)), None)
    found = [z if isinstance(z, Tensor) else torch.tensor(z, dtype=kind) for z in (x, y)]
    return found[0], found[1]


def _larger(x: Any, y: Any, propagate_nan: Any = None) -> Tensor:
    x, y = _both(x, y)
    return torch.maximum(x, y) if propagate_nan or not x.dtype.is_floating_point else torch.fmax(x, y)


def _smaller(x: Any, y: Any) -> Tensor:
    x, y = _both(x, y)
    return torch.fmin(x, y)


def _scan(x: Tensor, axis: int, combine: Callable[[Tensor, Tensor], Tensor], reverse: bool = False) -> Tensor:
    given = x.flip(axis) if reverse else x
    found = torch.stack([*itertools.accumulate(given.unbind(axis), combine)], axis)
    return found.flip(axis) if reverse else found


def _reduce(x: Tensor, axis: int, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return functools.reduce(combine, x.unbind(axis))


def _shared(dtype: torch.dtype, shape: Sequence[int], layout: Any = None, value: Tensor | None = None) -> _Shared:
    unset = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min
    found = _Shared(torch.full(tuple(shape), unset, dtype=dtype))
    if value is not None:
        found.store(value)
    return found


def _decorated(function: Any = None, **options: Any) -> Any:
    return function if function is not None else lambda kernel: kernel


class _InPyTorch(ast.NodeTransformer):
    """Values are not changed in place, and layouts are None."""

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        assert isinstance(node.target, ast.Name)
        before = ast.Name(node.target.id, ast.Load())
        return ast.Assign([node.target], ast.BinOp(before, node.op, self.visit(node.value)))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        return node if node.module == "__future__" else None

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "layout":
            return ast.Constant(None)
        if node.attr == "primitive_bitwidth":
            return ast.BinOp(ast.Constant(8), ast.Mult(), ast.Attribute(node.value, "itemsize", ast.Load()))
        return node.value if node.attr == "value" else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if any(x.arg == "bitcast" for x in node.keywords):
            assert isinstance(node.func, ast.Attribute)
            node.func.attr, node.keywords = "view", []
        return node


class Kernel:
    """A kernel of a file, launched as Triton's are, one program after the other.

    Attributes:
        names: what the file defines, and imports.
        program, grid: the program that runs, and how many there are.
    """

    def __init__(self, file: str, name: str) -> None:
        self.__name__ = name
        self.program, self.grid = [0, 0, 0], [1, 1, 1]
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.groups: list[list[tuple[Tensor, Tensor]]] = []
        self.names = self._names()
        shared = "gluon.py", "delta/hopper_gates.py", "delta/hopper_states.py"
        for path in (_KERNELS / name for name in (*shared, file)):
            tree = ast.fix_missing_locations(_InPyTorch().visit(ast.parse(path.read_text())))
            exec(compile(tree, path, "exec"), self.names)
        self.kernel = self.names[name]
        self.arg_names = list(self.kernel.__code__.co_varnames[: self.kernel.__code__.co_argcount])

    def _names(self) -> dict[str, Any]:
        from flexsp.kernels import alike_keys
        from flexsp.kernels.delta.exact import ALIKE, LEAST_BETA
        from flexsp.kernels.keys_in_pytorch import EPS
        from flexsp.kernels.primitives import GATE_MIN, LOG2E

        gl: Any = types.SimpleNamespace(
            constexpr=lambda x: x, float32=torch.float32, bfloat16=torch.bfloat16, int64=torch.int64, int32=torch.int32,
            program_id=lambda i: torch.tensor(self.program[i]), num_programs=lambda i: torch.tensor(self.grid[i]),
            arange=lambda start, end, layout=None: torch.arange(start, end, dtype=torch.int32),
            load=_load, store=_store,
            zeros=lambda shape, dtype, layout=None: torch.zeros(tuple(shape), dtype=dtype),
            full=lambda shape, x, dtype, layout=None: torch.full(tuple(shape), x, dtype=dtype), exp2=torch.exp2,
            where=lambda mask, x, y: torch.where(torch.as_tensor(mask), x, y), abs=torch.abs, log2=torch.log2,
            rsqrt=torch.rsqrt, atomic_add=_atomic_add,
            sum=lambda x, axis: x.sum(axis, dtype=x.dtype), max=lambda x, axis: x.amax(axis), reduce=_reduce,
            associative_scan=_scan, minimum=_smaller, maximum=_larger, inline_asm_elementwise=_assembly,
            reshape=lambda x, shape: x.reshape(tuple(shape)), permute=lambda x, order: x.permute(order),
            convert_layout=lambda x, layout, assert_trivial=False: x, static_range=range,
            allocate_shared_memory=_shared, thread_barrier=lambda: None,
            NVMMASharedLayout=types.SimpleNamespace(get_default_for=lambda shape, kind: None),
            PaddedSharedLayout=types.SimpleNamespace(with_identity_for=lambda *args: None),
        )  # fmt: skip
        for name in _LAYOUTS:
            setattr(gl, name, lambda *args: None)
        copies = types.SimpleNamespace(
            async_copy_global_to_shared=self._copy, commit_group=self._commit, wait_group=self._wait
        )  # fmt: skip
        return {
            "gl": gl, "gluon": types.SimpleNamespace(jit=_decorated, constexpr_function=_decorated),
            "tl": types.SimpleNamespace(PropagateNan=types.SimpleNamespace(ALL=True)),
            "async_copy": copies, "fence_async_shared": lambda: None, "warpgroup_mma": _multiply,
            "warpgroup_mma_wait": _wait, "GATE_MIN": GATE_MIN.value, "LOG2E": LOG2E.value, "ALIKE": ALIKE.value,
            "LEAST_BETA": LEAST_BETA.value, "EPS": EPS, "mma_v2": _multiply_at_once,
            **{x: getattr(alike_keys, x).value for x in ("FEW_KEYS", "GOLDEN", "NEARER")},
        }  # fmt: skip

    def _copy(self, to: _Shared, pointer: _Pointer, mask: Tensor | None = None) -> None:
        found = _load(pointer, mask)
        to.data.fill_(torch.nan)
        self.copies.append((to.data, found))

    def _commit(self) -> None:
        self.groups.append(self.copies)
        self.copies = []

    def _wait(self, outstanding: int) -> None:
        while len(self.groups) > outstanding:
            for to, found in self.groups.pop(0):
                to.copy_(found)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            given = [_memory(x, name) for name, x in zip(self.arg_names, args, strict=False)]
            constants = {name: x for name, x in constants.items() if name in self.arg_names}
            self.grid[:] = (*grid, 1, 1)[:3]
            launched.add(self.kernel.__name__)
            for place in itertools.product(*map(range, self.grid)):
                self.program[:] = place
                self.kernel(*given, **constants)
                assert not self.copies and not any(self.groups)
                self.groups.clear()

        return launch


def _memory(x: Any, name: str) -> Any:
    """A tensor as a pointer to its memory."""
    if not isinstance(x, Tensor):
        return x
    x = x.detach()
    size = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
    return _Pointer(torch.as_strided(x, (size,), (1,)), 0, name)


def install_delta() -> None:
    """In this process, calls of the delta engine run its kernels in Gluon where these run such calls."""
    from flexsp.kernels.delta import calls
    from flexsp.runtime import triton_private

    found = {
        "hopper_walks": ("forward", "backward"), "hopper_grads": ("grads",),
        "hopper_wy_transform": ("wy_inverse", "inverse"), "hopper_channels": ("channel_scores", "channel_grads"),
        "hopper_horizon": ("segment_horizon",),
    }  # fmt: skip
    for file, names in found.items():
        module: Any = types.ModuleType(f"flexsp.kernels.delta.{file}")
        for name in names:
            setattr(module, name, Kernel(f"delta/{file}.py", name))
        sys.modules[module.__name__] = module
    triton_private.runs_gluon = calls.runs_gluon = lambda: True


def install() -> None:
    """In this process, large states of bfloat16 are walked by that kernel in Triton's interpreter."""
    from flexsp.runtime import triton_private

    module: Any = types.ModuleType(_NAME)
    module.COLUMNS, module.WARPS = 128, 8
    module.walk_kernel = Kernel("diagonal/hopper_walks.py", "walk_kernel")
    sys.modules[_NAME] = module
    triton_private.runs_gluon = lambda: True
