"""Stage 6: generated kernels, in a file named by the hash of their source, run as one autograd function."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from torch.autograd.function import once_differentiable

from flexsp.comm.group import SequenceParallel, get_sp
from flexsp.compiler.check import Program
from flexsp.compiler.differentiate import Intrinsic, Step, differentiate
from flexsp.compiler.plan import Launch, Plan, make_plan
from flexsp.compiler.rewrite import dims
from flexsp.compiler.skeleton import WALKS, Kernel, Layout, make_kernel
from flexsp.compiler.stages import make_stages, split_gradients
from flexsp.compiler.values import NotEmittable
from flexsp.kernels.table import chunk_table
from flexsp.scan.affine import dense_hop
from flexsp.scan.launch import launch, newer_assembler
from flexsp.scan.propagate import propagate

__all__ = ["Generated", "run"]

Tensors = dict[str, torch.Tensor]
_IMPORTS = """
import triton
import triton.language as tl

from flexsp.compiler.tile_ops import (
    below, col_of, eye, keep_cols, keep_rows, only_col, only_row, row_of,
)
from flexsp.kernels.primitives import chunk_info, load_rows, load_state, mm, store_columns, store_rows, store_state
from flexsp.scan.launch import begin
"""
_INVERSE_WARPS = 1
_RESERVED = {"C", "T", "B", "S", "dS", "do", "o"}


class Generated:
    """The kernels of one program: their sources, and the module they were written to."""

    def __init__(self, program: Program, code_dir: str | None = None, chunk_size: int | None = None) -> None:
        self.program, self.code_dir, self.chunk = program, code_dir, chunk_size
        if chunk_size not in (None, 16, 32, 64, 128):
            raise NotEmittable(f"chunk_size = {chunk_size}: kernels are generated for 16, 32, 64 and 128")
        self.dense = program.transition == "dense"
        if program.transition in ("not affine", "elementwise"):
            raise NotEmittable(f"no kernels are generated for a transition that is {program.transition}")
        if len(program.meta.state_sizes) != 2:
            raise NotEmittable("no kernels are generated for vector states yet")
        step = differentiate(program)
        self.stages = make_stages(step)
        given = [*self._saved(step), *(name for stage in self.stages if stage.backward for name in stage.leaves)]
        gradients = [f"d_{name}" for name in (*step.tokens, *step.params)]
        self.saved = self._saved(step)
        self.step, self.parts, self.small, self.sums = split_gradients(step, gradients, given)
        self.layout = self._layout()
        self.kernels: dict[str, Kernel] = self._make()

    def _layout(self) -> Layout:
        graph = self.step.graph
        found = {node.name: dims(node) for node in graph.nodes if node.op == "placeholder"}
        end = next(node for node in graph.nodes if node.op == "output").args[0]
        named = dict(zip(self.step.outputs, end, strict=True))
        kept = {name: dims(named[f"keep_{name}"]) for name in (*self.step.kept, *self.sums)}
        rows, cols = found["S"]
        tokens = {name: found[name] for name in self.step.tokens} | {"do": found["do"]}
        params = {name: found[name] for name in self.step.params}
        sizes = {s for x in (*found.values(), *kept.values()) for s in x if s != "C"}
        bad = sorted(s for s in sizes if s.isdigit() or s in _RESERVED)
        clash = sorted((_RESERVED | {rows, cols}) & {*tokens, *params} - {"do"})
        if bad or clash or rows == cols or found["do"] != ("C", cols):
            raise NotEmittable(
                "kernels need a state [K, V] of two ConstExprs and outputs [C, V], no sizes that are plain numbers and "
                f"none of the names {sorted(_RESERVED)}; in the way: {bad + clash or [rows, cols, *found['do']]}"
            )
        return Layout(rows, cols, tuple(sorted(sizes)), tokens, params, kept)

    def _make(self) -> dict[str, Kernel]:
        step, alone = self.step, self.dense
        decays = self.program.transition != "none" and not alone
        kept = self.saved
        of_stages = [name for stage in self.stages if stage.backward for name in stage.leaves]
        wanted: dict[str, tuple[list[list[str]], Sequence[str]]] = {}
        for stage in self.stages:
            if stage.writes:
                wanted[stage.kind] = ([[f"keep_{name}" for name in stage.writes]], stage.given)
        wanted["summarize"] = ([["S", *(["A"] if decays else [])]], kept)
        wanted["collect"] = ([["d_S"]], kept)
        wanted |= {"output": ([["o", "S"]], kept), "states": ([["S"]], kept), "back": ([["d_S"]], kept)}
        wanted["grads"] = (self.parts, [*kept, *of_stages])
        if self.small:
            wanted["gather"] = ([self.small], [*kept, *of_stages, *self.sums])
        return {
            kind: make_kernel(step, self.layout, kind, parts, given, alone) for kind, (parts, given) in wanted.items()
        }

    def _saved(self, step: Step) -> tuple[str, ...]:
        """Kept values that the forward leaves for the walks and the backward."""
        for_backward = {name for x in step.intrinsics if x.backward for name in x.args}
        found = [name for stage in self.stages if not stage.backward for name in stage.leaves]
        scratch = {n for x in step.intrinsics for n in x.args} - for_backward
        return tuple(name for name in found if name not in scratch or name.startswith("gates"))

    @property
    def split(self) -> bool:
        """Whether every walk works on each of the state's columns alone."""
        walks = [kernel for kind, kernel in self.kernels.items() if kind in WALKS]
        return all(self.layout.cols not in kernel.contracted for kernel in walks)

    def refuses(self, sizes: Mapping[str, int], dtype: torch.dtype, on_gpu: bool) -> str | None:
        """Why a call with these sizes runs in PyTorch, or None."""
        if on_gpu and torch.cuda.get_device_capability()[0] == 9 and newer_assembler() is None:
            return "ptxas before 12.9 miscompiles kernels for Hopper; set TRITON_PTXAS_PATH to a newer one"
        try:
            self.plan({name: sizes[name] for name in self.layout.sizes}, 1, 1, 0, dtype)
        except (NotEmittable, KeyError) as error:
            return str(error)
        return None

    def plan(self, sizes: Mapping[str, int], heads: int, T: int, docs: int, dtype: torch.dtype) -> Plan:
        return make_plan(self.layout, sizes, heads, T, docs, dtype, self.dense, self.split, self.chunk)

    def explain(self) -> list[str]:
        """The kernels with what each reads and writes, and the file they are in."""
        lines = [f"file: {self.path}"]
        for kind, kernel in self.kernels.items():
            parts = f" in {kernel.parts} parts" if kernel.parts > 1 else ""
            reads = ", ".join([*kernel.tokens, *kernel.kept, *kernel.params])
            lines.append(f"    {kind}{parts}: reads {reads}; writes {', '.join(kernel.writes) or 'states'}")
        for x in self.step.intrinsics:
            lines.append(f"    {x.kind}: reads {', '.join(x.args)}; writes {', '.join(x.results)}")
        return lines

    @cached_property
    def source(self) -> str:
        program = self.program
        names = [f"{role}: {x.name}" for role, x in zip(("chunk", "decay", "merge"),
                 (program.chunk, program.decay, program.merge), strict=True)]  # fmt: skip
        body = _IMPORTS + "".join(f"\n\n{self.kernels[kind].source}" for kind in self.kernels)
        digest = hashlib.sha256((body + triton.__version__).encode()).hexdigest()[:16]
        header = f'"""Generated by flexsp from {", ".join(names)}.\n\nTriton {triton.__version__}, {digest}.\n"""\n'
        return header + body

    @cached_property
    def path(self) -> Path:
        digest = hashlib.sha256(self.source.encode()).hexdigest()[:16]
        default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "flexsp" / "generated"
        folder = Path(self.code_dir) if self.code_dir else Path(os.environ.get("FLEXSP_CODE_DIR", default))
        return folder / f"{self.program.merge.name}_{digest}.py"

    @cached_property
    def module(self) -> ModuleType:
        """The generated module, written first where it is not there yet (whole, by renaming)."""
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, suffix=".tmp", delete=False) as file:
                file.write(self.source)
            os.replace(file.name, self.path)
        spec = importlib.util.spec_from_file_location(f"flexsp_generated_{self.path.stem}", self.path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


# One call -------------------------------------------------------------------------------------------------------------


@dataclass
class _Call:
    """One call of the kernels on tensors [B, T, H, ...]."""

    code: Generated
    tokens: Tensors
    params: Tensors
    initial: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    sp: SequenceParallel | None

    def __post_init__(self) -> None:
        self.tokens = {name: _rows(x) for name, x in self.tokens.items()}
        self.params = {name: x.contiguous() for name, x in self.params.items()}
        lead = next(iter(self.tokens.values()))
        self.B, self.T, self.H = lead.shape[:3]
        self.device, self.dtype = lead.device, lead.dtype
        self.docs = 0 if self.cu_seqlens is None else self.cu_seqlens.numel() - 1
        layout = self.code.layout
        self.sizes: dict[str, int] = {}
        for name, x in (*self.tokens.items(), *self.params.items()):
            named = layout.tokens[name][1:] if name in layout.tokens else layout.params[name]
            self.sizes.update(zip(named, x.shape[3:] if name in layout.tokens else x.shape[1:], strict=True))
        if self.initial is not None:
            self.initial = self.initial.to(torch.float32).contiguous()
            self.sizes.update(zip((layout.rows, layout.cols), self.initial.shape[2:], strict=True))
        self.sizes = {name: self.sizes[name] for name in layout.sizes}
        self.plan = self.code.plan(self.sizes, self.B * self.H, self.T, self.docs, self.dtype)
        self.K, self.V = self.sizes[layout.rows], self.sizes[layout.cols]

    @property
    def packed(self) -> bool:
        return self.docs > 0

    @property
    def chained(self) -> bool:
        return self.sp is not None and self.sp.world_size > 1

    def f32(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self.device, dtype=torch.float32)

    def table(self) -> torch.Tensor:
        if self.cu_seqlens is None:
            return torch.empty(0, device=self.device, dtype=torch.int32)
        start, stop, last = 0, self.T, True
        if self.sp is not None:
            start, stop, _ = self.sp.shard_range(self.T)
            last = self.sp.rank == self.sp.world_size - 1
        return chunk_table(self.cu_seqlens, start, stop, self.plan.chunk, last)

    def empty(self, name: str) -> torch.Tensor:
        """Room for a kept value: C rows of every chunk; sums and what inverses and gradients pass on in fp32."""
        named = self.code.layout.kept[name]
        shape = [self.plan.chunk if s == "C" else self.sizes[s] for s in named]
        wide = name.startswith(("gates", "f32")) or len(shape) < 2
        return torch.empty(
            self.B * self.H, self.plan.n_chunks, *shape, device=self.device,
            dtype=torch.float32 if wide else self.dtype,
        )  # fmt: skip

    def run_stages(self, backward: bool, memory: Tensors, table: torch.Tensor, others: list[Any], do: Any) -> Tensors:
        """Runs the stages of one direction; `memory` has what there is so far and gets what they leave."""
        for stage in self.code.stages:
            if stage.backward == backward:
                if stage.writes:
                    memory |= {name: self.empty(name) for name in stage.writes}
                    self.launch(stage.kind, self.plan.whole, memory, memory, [*others, table], do)
                for x in stage.intrinsics:
                    self.intrinsic(x, memory, table)
        return memory

    def intrinsic(self, what: Intrinsic, memory: Tensors, table: torch.Tensor) -> None:
        from flexsp.compiler import intrinsic_kernels as kernels

        plan, C = self.plan, self.plan.chunk
        grid = (plan.n_chunks, self.B * self.H)
        memory |= {name: self.empty(name) for name in what.results}
        if not plan.n_chunks:
            return
        if what.kind == "inverse":
            launch(
                kernels.inverse_kernel, grid, (memory[what.args[0]], memory[what.results[0]], table, self.T),
                {"C": C, "PACKED": self.packed}, {"num_warps": _INVERSE_WARPS},
            )  # fmt: skip
            return
        *da, q, k, b = what.args
        size = self.code.layout.kept[b][1]
        tensors = [memory[x] if x in memory else self.tokens[x] for x in (q, k)]
        n = self.sizes[size]
        shape = {"N": n, "BN": dict(plan.blocks)[size], "C": C, "LEVELS": C.bit_length() - 1,
                 "Q_KEPT": q in memory, "K_KEPT": k in memory, "PACKED": self.packed, **_dots(self.dtype)}  # fmt: skip
        strides = [
            s
            for x, name in zip(tensors, (q, k), strict=True)
            for s in ((0, 0, 0) if name in memory else x.stride()[:3])
        ]
        if what.kind == "scores":
            args = (*tensors, memory[b], memory[what.results[0]], table, *strides, self.T, self.H)
            launch(kernels.scores_kernel, grid, args, shape, {"num_warps": 8, "num_stages": 1})
            return
        names = [f"{what.results[0][:-1]}{i}" for i in range(2)]
        both = [memory[x] if x in memory else torch.empty_like(memory[what.results[0]]) for x in names]
        to_both = (memory[da[0]], *tensors, memory[b], *both, table, *strides, self.T, self.H)
        launch(kernels.scores_grad_kernel, grid, to_both, shape, {"num_warps": 8, "num_stages": 1})

    def launch(
        self, kind: str, how: Launch, written: Tensors, kept: Tensors, others: list[Any],
        do: torch.Tensor | None = None, width: int | None = None, **flags: bool,
    ) -> None:  # fmt: skip
        """Launches one kernel. `width`: columns of the state, where they are not the call's."""
        kernel, plan = self.code.kernels[kind], self.plan
        tokens = self.tokens if do is None else self.tokens | {"do": do}
        used = [tokens[name] for name in kernel.tokens]
        pointers = [*used, *(kept[x] for x in kernel.kept), *(self.params[x] for x in kernel.params)]
        pointers += [*(written[x] for x in kernel.writes), *others]
        strides = [n for x in used for n in x.stride()[:3]]
        walks = kind in WALKS
        grid: tuple[int, ...] = (plan.n_chunks * kernel.parts, self.B * self.H)
        numbers = [self.T, self.H, plan.n_chunks]
        if walks:
            grid = (-(-(width or self.V) // how.cols), self.B * self.H, plan.n_seg)
            numbers = [self.T, self.H, plan.n_seg, plan.n_chunks, plan.per_seg]
        constants: dict[str, Any] = {}
        for name, block in plan.blocks:
            constants[name] = width or self.V if name == self.code.layout.cols else self.sizes[name]
            constants[f"B{name}"] = how.cols if name == self.code.layout.cols else block
        constants |= {"C": plan.chunk, **flags, "PACKED": self.packed, **_dots(self.dtype)}
        if plan.n_chunks:
            launch(
                getattr(self.code.module, kind), grid, (*pointers, *strides, *numbers), constants,
                {"num_warps": how.warps, "num_stages": how.stages},
            )  # fmt: skip


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 or x.dim() == 3 else x.contiguous()


def _dots(dtype: torch.dtype) -> dict[str, Any]:
    import triton.language as tl

    return {"DOT": tl.bfloat16 if dtype == torch.bfloat16 else tl.float32, "PREC": "tf32x3"}


def _or(x: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if x is None else x


def _forward(call: _Call, want_final: bool) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """(o, final, what the backward reads)."""
    plan, code = call.plan, call.code
    states = call.f32(call.B, plan.n_seg + 1, call.H, call.K, call.V)
    table = call.table()
    in_walk = call.initial if call.packed else None
    memory = call.run_stages(False, {}, table, [], None)
    kept = {name: memory[name] for name in code.saved}
    del memory
    decay, cut = _summaries(call, states, kept, table, in_walk)
    _enter(call, states[:, 0], None if call.packed else call.initial)
    A = None
    if not code.dense:
        propagate(states, decay, cut, call.sp)
    elif call.chained:
        A = _transition(call, kept, table)
        _dense_scan(call, states, A, in_walk, kept, table, None)
    if code.dense and not plan.n_chunks:
        states[:, 1] = states[:, 0]
    o = torch.empty(call.B, call.T, call.H, call.V, device=call.device, dtype=call.dtype)
    final = call.f32(0)
    if call.packed and want_final:
        final = call.f32(call.docs, call.H, call.K, call.V).zero_()
    others = [states, _or(in_walk, states), final, table]
    call.launch(
        "output", plan.walk, {"o": o}, kept, others, BOUNDARY=in_walk is not None, LEAVES=call.packed and want_final
    )
    if want_final and not call.packed:
        final = states[:, plan.n_seg].clone()
    saved = {"states": states, "table": table, **({} if decay is None else {"decay": decay}),
             **({} if cut is None else {"cut": cut}), **({} if A is None else {"A": A})}  # fmt: skip
    return o, final, saved | kept


def _transition(call: _Call, kept: Tensors, table: torch.Tensor) -> torch.Tensor:
    """A^T of the shard, [B, H, K, K]: the adjoint walk without outputs, from the unit matrix (MATH 8, [0 | I])."""
    K = call.K
    walks = call.f32(call.B, 2, call.H, K, K)
    walks[:] = torch.eye(K, device=call.device)
    nothing = torch.zeros(K, device=call.device, dtype=call.dtype).expand(call.B, call.T, call.H, K)
    call.launch("collect", call.plan.walk, {}, kept, [walks, walks, table], nothing, width=K, BOUNDARY=False)
    return walks[:, 0]


def _dense_scan(
    call: _Call, states: torch.Tensor, At: torch.Tensor, in_walk: torch.Tensor | None, kept: Tensors,
    table: torch.Tensor, do: torch.Tensor | None,
) -> None:  # fmt: skip
    """Puts what arrives from the neighbour where the walk starts: the state, or its gradient where `do` is given."""
    reverse = do is not None
    start, end = (1, 0) if reverse else (0, 1)
    others = [states, _or(in_walk, states), table]
    if not reverse:
        others.insert(2, torch.empty(call.B, 1, device=call.device, dtype=torch.int32))  # cuts, which nobody reads
    kind = "collect" if reverse else "summarize"
    call.launch(kind, call.plan.walk, {}, kept, others, do, BOUNDARY=in_walk is not None)
    if not call.plan.n_chunks:
        states[:, end] = states[:, start]
    assert call.sp is not None
    states[:, start] += dense_hop(states[:, end], At if reverse else At.mT, call.sp, reverse)


def _enter(call: _Call, slot: torch.Tensor, given: torch.Tensor | None) -> None:
    slot.zero_() if given is None else slot.copy_(given)


def _summaries(
    call: _Call, states: torch.Tensor, kept: Tensors, table: torch.Tensor, in_walk: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Leaves every segment's F in `states`; its log decay and cuts."""
    plan = call.plan
    if call.code.dense:
        return None, None
    decay = None if call.code.program.transition == "none" else call.f32(call.B, plan.n_seg, call.H, call.K)
    cut = torch.empty(call.B, plan.n_seg, device=call.device, dtype=torch.int32) if call.packed else None
    others = [states, _or(in_walk, states), *([] if decay is None else [decay]), _or(cut, states), table]
    if plan.n_chunks:
        call.launch("summarize", plan.walk, {}, kept, others, BOUNDARY=in_walk is not None)
    else:
        for x in (states, decay, cut):
            if x is not None:
                x.zero_()
    return decay, cut


def _backward(
    call: _Call, saved: Tensors, do: torch.Tensor, dfinal: torch.Tensor | None, want_dinitial: bool
) -> tuple[Tensors, Tensors, torch.Tensor | None]:
    """Gradients of tokens, of parameters, and of the initial states."""
    plan, code = call.plan, call.code
    kept = {name: saved[name] for name in code.saved}
    states, table = saved["states"], saved["table"]
    do = do if do.stride(-1) == 1 else do.contiguous()
    in_walk = dfinal if call.packed else None
    dstates = call.f32(call.B, plan.n_seg + 1, call.H, call.K, call.V)
    if not code.dense:
        if plan.n_chunks:
            others = [dstates, _or(in_walk, dstates), table]
            call.launch("collect", plan.walk, {}, kept, others, do, BOUNDARY=in_walk is not None)
        else:
            dstates.zero_()
    _enter(call, dstates[:, plan.n_seg], None if call.packed else dfinal)
    if not code.dense:
        propagate(dstates, saved.get("decay"), saved.get("cut"), call.sp, reverse=True)
    elif call.chained:
        _dense_scan(call, dstates, saved["A"], in_walk, kept, table, do)
    if code.dense and not plan.n_chunks:
        dstates[:, 0] = dstates[:, 1]
    of_chunks: dict[str, Any] = {
        "device": call.device,
        "dtype": call.dtype if call.dtype == torch.bfloat16 else torch.float32,
    }
    entering, leaving = (torch.empty(call.B * call.H, plan.n_chunks, call.K, call.V, **of_chunks) for _ in range(2))
    first = call.initial if call.packed else None
    call.launch(
        "states", plan.walk, {}, kept, [states, _or(first, states), entering, table], BOUNDARY=first is not None
    )
    dinitial = call.f32(0)
    if call.packed and want_dinitial:
        dinitial = call.f32(call.docs, call.H, call.K, call.V).zero_()
    call.launch(
        "back", plan.walk, {}, kept, [dstates, _or(in_walk, dstates), dinitial, leaving, table], do,
        BOUNDARY=in_walk is not None, LEAVES=dinitial.numel() > 0,
    )  # fmt: skip
    if want_dinitial and not call.packed:
        dinitial = dstates[:, 0].clone()
    kept = call.run_stages(True, kept, table, [entering, leaving], do)
    grads = {f"d_{name}": torch.empty(x.shape, device=x.device, dtype=x.dtype) for name, x in call.tokens.items()}
    partial = {f"d_{name}": call.f32(call.B, call.H, plan.n_chunks, *x.shape[1:]) for name, x in call.params.items()}
    sums_of = {name: call.empty(name) for name in code.sums}
    call.launch("grads", plan.part, grads | partial | sums_of, kept, [entering, leaving, table], do)
    if code.small:
        call.launch("gather", plan.small, grads | partial, kept | sums_of, [entering, leaving, table], do)
    sums = {name: x.sum((0, 2)) for name, x in partial.items()}
    return grads, sums, dinitial if want_dinitial else None


class _Function(torch.autograd.Function):
    """`anchor` makes autograd record the node on every rank under `sp`."""

    @staticmethod
    def forward(ctx: Any, code, names, params, cu_seqlens, sp_id, want_final, anchor, initial, *tensors):  # type: ignore[no-untyped-def]
        given = dict(zip(names, tensors, strict=True))
        call = _call(code, given, params, initial, cu_seqlens, sp_id)
        o, final, saved = _forward(call, want_final)
        ctx.save_for_backward(*tensors, initial, cu_seqlens, *saved.values())
        ctx.what = (code, names, params, sp_id, list(saved))
        ctx.set_materialize_grads(False)
        return o, final if want_final else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do, dfinal):  # type: ignore[no-untyped-def]
        code, names, params, sp_id, keys = ctx.what
        n = len(names)
        tensors, (initial, cu_seqlens), rest = (
            ctx.saved_tensors[:n], ctx.saved_tensors[n : n + 2], ctx.saved_tensors[n + 2 :]
        )  # fmt: skip
        call = _call(code, dict(zip(names, tensors, strict=True)), params, initial, cu_seqlens, sp_id)
        if do is None:
            do = torch.zeros(call.B, call.T, call.H, call.V, device=call.device, dtype=call.dtype)
        if dfinal is not None:
            dfinal = dfinal.to(torch.float32).contiguous()
        want = initial is not None and ctx.needs_input_grad[7]
        grads, sums, dinitial = _backward(call, dict(zip(keys, rest, strict=True)), do, dfinal, want)
        found = grads | sums
        return (
            *[None] * 7,
            dinitial,
            *(found[f"d_{name}"].to(x.dtype) for name, x in zip(names, tensors, strict=True)),
        )


def _call(code: Generated, given: Tensors, params: set[str], initial: Any, cu_seqlens: Any, sp_id: int) -> _Call:
    tokens = {name: x for name, x in given.items() if name not in params}
    of_heads = {name: x for name, x in given.items() if name in params}
    return _Call(code, tokens, of_heads, initial, cu_seqlens, get_sp(sp_id) if sp_id >= 0 else None)


@torch.compiler.disable
def run(
    code: Generated, tokens: Tensors, params: Tensors, initial: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    sp: SequenceParallel | None, want_final: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Outputs [B, T, H, V] and final states of generated kernels, differentiable."""
    if sp is not None and cu_seqlens is None:
        want_final = want_final and sp.rank == sp.world_size - 1
    anchor = sp.anchor if sp is not None and torch.is_grad_enabled() else None
    names = [*tokens, *params]
    o, final = _Function.apply(
        code, names, set(params), cu_seqlens, -1 if sp is None else sp.id, want_final, anchor, initial,
        *tokens.values(), *params.values(),
    )  # fmt: skip
    return o, final
