"""Stage 4a: a plan, and the launches of a call that follow from it, in order.

This is the one list of them. The runner (`flexsp.kernels.executable`) puts strides and addresses in place of names. The
cost model (`flexsp.compiler.planning.model`) adds up what each reads and writes; plans, `explain` and the traffic check
use it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from flexsp.compiler.backend import intrinsic_kernels
from flexsp.compiler.backend.body import Kernel
from flexsp.compiler.backend.exact import EXACT
from flexsp.compiler.backend.generated_kernels import Generated
from flexsp.compiler.backend.walks import HELD, WALKS
from flexsp.compiler.graphs.differentiate import ChunkTensor, Intrinsic
from flexsp.compiler.graphs.stages import Stage
from flexsp.compiler.graphs.values import is_state
from flexsp.compiler.planning.capacity import copied_over
from flexsp.compiler.planning.exact import ExactSegments
from flexsp.exceptions import fail
from flexsp.kernels.launch_plan import Buffer, Role, gradient_of
from flexsp.kernels.launch_spec import Launch, LaunchSpec, minus_infinity, named, ones, scan, unit, zeroed
from flexsp.kernels.primitives import dots

__all__ = ["GeneratedPlan", "Tiling"]

_F32 = torch.float32


@dataclass(frozen=True)
class Tiling:
    """Chunks, segments and tiles of one call; `blocks` are padded sizes by name.

    `schedule`: "fused" is one walk over all chunks of a head, without `summarize`, `summarize_backward` and the scan
    that joins segments; "segmented" has them. A fused plan has one segment, at least one chunk and no ranks. `sure`: by
    estimate, a block has the shared memory that each kernel needs; else only compiling them tells.
    """

    chunk: int
    blocks: tuple[tuple[str, int], ...]
    n_chunks: int
    per_seg: int
    n_seg: int
    walk: Launch
    whole: Launch
    part: Launch
    small: Launch
    schedule: str
    sure: bool = True


@dataclass(frozen=True)
class GeneratedPlan(ExactSegments):
    """A call of generated kernels.

    Buffers have the names that values have in the kernels: inputs, "o", "do", values kept of every chunk, and
    gradients "d_x" of inputs.

    Attributes:
        sizes: of the state and the inputs, by name; beside them B sequences of T tokens of H heads.
    """

    code: Generated
    tiling: Tiling
    sizes: Mapping[str, int]
    B: int
    H: int
    T: int
    n_docs: int
    dtype: torch.dtype
    initial: bool = False
    returns_final: bool = True

    def __post_init__(self) -> None:
        code, tiling = self.code.sized(self.sizes, self.dtype), self.tiling
        vars(self).update(
            code=code, name=code.program.merge.name, description=code.program.description(self.dtype, self.n_docs > 0),
            chunk=tiling.chunk, n_chunks=tiling.n_chunks, n_seg=tiling.n_seg, sparse=bool(code.layout.parts),
            surely_fits=tiling.sure, scanned=tiling.schedule == "segmented",
        )  # fmt: skip

    @property
    def scan_shape(self) -> tuple[str, tuple[int, int, int, int, int]]:
        rows, cols = (*self.state, 1)[:2]
        return self._kind, (self.B, self.n_seg, self.H, rows, cols)

    @property
    def _kind(self) -> str:
        """Of the transition, as the scan knows it."""
        return "vector" if self.code.program.transition == "scalar" else self.code.program.transition

    @property
    def products(self) -> torch.dtype:
        return self.code.products(self.dtype)

    @property
    def _maxima(self) -> bool:
        """Whether states are max(S + a, F). Then `summarize_backward` leaves what passes a segment backward,
        "@passed"."""
        return self.code.program.transition == "max-plus"

    @property
    def _carries(self) -> str | None:
        return "@A" if self.code.dense else None if self.code.program.transition == "none" else "@decay"

    def kernel(self, spec: LaunchSpec) -> Any:
        return getattr(intrinsic_kernels if spec.intrinsic else self.code.module, spec.kind)

    @cached_property
    def lowering(self) -> Any:
        """The `Lowering` that replaces some of the generated launches, None if none does."""
        return next((x for x in self.code.program.lowerings if x.refuses(self) is None), None)

    def look(self, frame: Any) -> None:
        """ValueError where a segment's decay has no logarithm. Synchronises."""
        logarithms = self._carries == "@decay" and not (self._maxima or self._kind == "elementwise")
        if self.scanned and logarithms and bool(frame["@decay"].isnan().any()):
            raise ValueError(
                f"{self.code.program.decay.name}: expected to multiply the state by no negative number and by no NaN, "
                "since kernels carry the logarithm from segment to segment; some input of the call makes it one"
            )

    @property
    def state(self) -> tuple[int, ...]:
        return self.code.layout.numbers(self.sizes)

    # Buffers

    def declare(self) -> list[Buffer]:
        heads, state = self.B * self.H, self.state
        of_segments, of_chunks = (self.B, self.n_seg, self.H), (heads, self.n_chunks)
        states = (self.B, self.n_seg + 1, self.H, *state)
        half = self.dtype == torch.bfloat16 and not self._maxima
        of_chunk = self.dtype if half else _F32, (*of_chunks, *(*state, 1)[:2])
        carried = (*of_segments, state[0], *self._columns)
        return [
            *self._of_inputs(),
            *(Buffer(name, self._role(name), *self._kept(x)) for name, x in self._kept_values().items()),
            Buffer("@states", Role.SAVED, _F32, states),
            Buffer("@dstates", Role.SCRATCH, _F32, states),
            Buffer("@A", Role.SAVED, _F32, (*of_segments, state[0], state[0])),
            Buffer("@decay", Role.SAVED, _F32, carried),
            Buffer("@passed", Role.SCRATCH, _F32, carried),
            Buffer("@cut", Role.SAVED, torch.int32, of_segments[:2]),
            Buffer("@entering", Role.SCRATCH, *of_chunk),
            Buffer("@leaving", Role.SCRATCH, *of_chunk),
            Buffer("@exact", Role.SAVED, torch.int32, of_chunks),
            Buffer("@gain", Role.SCRATCH, _F32, of_chunks),
            Buffer("@scratch", Role.SCRATCH, _F32, self.scratch()),
        ]

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """All of them, with those of the lowering, which may be made in the likeness of the others."""
        found = super().buffers  # which is what the lowering sees
        own = {} if self.lowering is None else {x.name: x for x in self.lowering.buffers(self)}
        if taken := sorted(own.keys() & found.keys()):
            fail("lowering.buffers", "names that no other buffer of the plan has", ", ".join(taken))
        return found | own

    @property
    def _columns(self) -> tuple[int, ...]:
        """Of the factors or shifts of a segment, which are numbers a row otherwise."""
        *_, cols = self.scan_shape[1]
        return (cols,) if self._kind in ("elementwise", "max-plus") else ()

    def _of_inputs(self) -> list[Buffer]:
        """Inputs and gradients; those of parameters are left for every chunk."""
        layout, found = self.code.layout, []
        for name, sizes in layout.tokens.items():
            like = self._dtype(name), (self.B, self.T, self.H, *(self.sizes[s] for s in sizes[1:]))
            found.append(Buffer(name, Role.INPUT, *like))
            given = name == "do"
            found.append(Buffer("o" if given else gradient_of(name), Role.OUTPUT if given else Role.GRADIENT, *like))
        for name, sizes in layout.params.items():
            shape = [self.sizes[s] for s in sizes]
            found.append(Buffer(name, Role.INPUT, _F32, (self.H, *shape)))
            of_chunks = self.B, self.H, self.n_chunks, *shape
            found.append(Buffer(gradient_of(name), Role.SCRATCH, _F32, of_chunks))
        return found

    def _kept_values(self) -> dict[str, ChunkTensor]:
        """Values kept of every chunk. Of the gradients of an intrinsic some may be those of constants, which nothing
        reads; they are like the others."""
        kept = self.code.layout.kept
        found = dict(kept)
        for x in self.code.step.intrinsics:
            if x.kind == "scores_grad":
                names = _gradients(x.results[0][:-1])
                found |= dict.fromkeys(names, next(kept[y] for y in names if y in kept)) | found
        return found

    def _role(self, kept: str) -> Role:
        return Role.SAVED if kept in self.code.saved else Role.SCRATCH

    def _kept(self, kept: ChunkTensor) -> tuple[torch.dtype, tuple[int, ...]]:
        # Where products are of fp32, an inverse, and what is made with it, is not rounded on the way.
        wide = kept.wide or (self.code.inverts and self.products != torch.bfloat16)
        shape = [self.chunk if s == "C" else self.sizes[s] for s in kept.dims]
        return _F32 if wide else self.dtype, (self.B * self.H, self.n_chunks, *shape)

    def _dtype(self, token: str) -> torch.dtype:
        """That of the call, for inputs that share the first one's type in the metadata."""
        tokens = self.code.program.meta.tokens
        if token == "do" or tokens[token].dtype == next(iter(tokens.values())).dtype:
            return self.dtype
        return tokens[token].dtype

    # Launches

    def forward(self) -> list[LaunchSpec]:
        generated = self._forward()
        return generated if self.lowering is None else self.lowering.forward(self, generated)

    def backward(self, dfinal: bool, dinitial: bool, wanted: Collection[str] = ()) -> list[LaunchSpec]:
        """All gradients of inputs are computed, whichever are `wanted`."""
        generated = self._backward(dfinal, dinitial)
        return generated if self.lowering is None else self.lowering.backward(self, generated)

    def _forward(self) -> list[LaunchSpec]:
        launches = [*self._stages(False, []), *self.choose()]
        given, final = "@initial" if self.initial else None, "@final" if self.returns_final else None
        if self.scanned:
            launches += [*self._around_parts("@states"), *self._summarize(), self._propagate("@states", False)]
        states, given = "@states" if self.scanned else None, self.in_walk(given)
        launches += self._walk(
            "output", [states, given, final, self._table], named(states, given), named(final),
            ENTERS=self.scanned, BOUNDARY=given is not None, LEAVES=self.returns_final,
        )  # fmt: skip
        return launches if self.n_chunks else self.without_tokens(launches, self._unit())

    def _unit(self) -> list[LaunchSpec]:
        """The transition of a shard without tokens."""
        factors = self.code.program.transition == "elementwise"
        carried = ("@cut",) if factors else ("@decay", "@cut")
        names = ["@states", *(x for x in named(*self._summarize()[0].pointers) if x in carried)]
        units = [unit("@A")] if self.code.dense else [ones("@decay")] if factors else []
        return [*units, zeroed(*names), *([minus_infinity("@states")] if self._maxima else [])]

    def _backward(self, dfinal: bool, dinitial: bool) -> list[LaunchSpec]:
        code, plan = self.code, self.tiling
        initial = self.in_walk("@initial" if self.initial else None)
        after = "@dfinal" if dfinal else None
        last = self.in_walk(after)
        states, dstates = ("@states", "@dstates") if self.scanned else (None, None)
        entering = self._walk(
            "chunk_states", [states, initial, "@entering", self._table], named(states, initial), ("@entering",),
            ENTERS=self.scanned, BOUNDARY=initial is not None,
        )  # fmt: skip
        middle: list[LaunchSpec] = []
        passed = ["@passed"] if self._maxima else []
        if self.scanned:
            others = ["@dstates", after, *passed, *self._entering("summarize_backward"), self._table]
            reads = named(after, *self._entering("summarize_backward"))
            middle = [
                *self._around_parts("@dstates"),
                *self._walk("summarize_backward", others, reads, ("@dstates", *passed), BOUNDARY=after is not None),
                self._propagate("@dstates", True),
            ]
        dinitial_of = "@dinitial" if dinitial else None
        back = self._walk(
            "output_backward",
            [dstates, last, dinitial_of, "@leaving", *self._entering("output_backward"), self._table],
            named(dstates, last, *self._entering("output_backward")), named(dinitial_of, "@leaving"),
            ENTERS=self.scanned, BOUNDARY=last is not None, LEAVES=dinitial,
        )  # fmt: skip
        early = code.kernels["summarize_backward"].entering
        launches = [*entering, *middle, *back] if early else [*middle, *entering, *back]
        of_chunk = ["@entering", "@leaving"]
        launches += self._stages(True, of_chunk)
        launches.append(self._chunkwise("grads", plan.part, of_chunk))
        launches += [self._chunkwise("reduce_gate_grads", plan.small, of_chunk)] if code.small else []
        launches += self.grads()
        if self.n_chunks:
            return launches
        first = [zeroed("@dstates"), *(ones(x) for x in passed)]
        return self.backward_without_tokens(launches, first, dfinal, dinitial)

    @property
    def _table(self) -> str | None:
        return "@table" if self.n_docs else None

    def _entering(self, kind: str) -> list[str]:
        """What walks from right to left may read besides."""
        return ["@entering"] if self.code.kernels[kind].entering else []

    def _summarize(self) -> list[LaunchSpec]:
        """What segments leave."""
        initial = "@initial" if self.initial else None
        if self.code.dense:
            carried: list[str | None] = ["@A"]
        else:
            decay = [] if self.code.program.transition == "none" else ["@decay"]
            carried = [*decay, "@cut" if self.n_docs else None]
        others = ["@states", initial, *carried, self._table]
        writes = ("@states", *(x for x in named(*carried) if x != "@cut"))
        return self._walk("summarize", others, named(initial), writes, BOUNDARY=self.initial)

    def _around_parts(self, states: str) -> list[LaunchSpec]:
        """Zeros where a state of parts holds nothing: a matrix multiplies those too."""
        holds = [len(x.sizes) == 2 or x.sizes == self.code.layout.state[1:] for x in self.code.layout.places()]
        return [zeroed(states)] if self.code.dense and not all(holds) else []

    def _propagate(self, states: str, reverse: bool) -> LaunchSpec:
        cut = "@cut" if self.n_docs and not self.code.dense else None
        return scan(states, "@passed" if reverse and self._maxima else self._carries, cut, reverse=reverse)

    def _generated(
        self, kind: str, how: Launch, grid: tuple[int, ...], others: Sequence[str | None], reads: Sequence[str],
        writes: Sequence[str], flags: Mapping[str, Any],
    ) -> LaunchSpec:  # fmt: skip
        """A launch of a generated kernel; `others` are its last pointers, which it `reads` and `writes` besides."""
        kernel = self.code.kernels[kind]
        given = [*kernel.tokens, *kernel.kept, *kernel.params]
        pointers, numbers = (*given, *kernel.writes, *others), self._numbers(kernel, kind.removeprefix(EXACT) in WALKS)
        return LaunchSpec(
            kind, how, grid, pointers, (*given, *reads), (*kernel.writes, *writes), numbers,
            self._constants(how) | {"PACKED": self.n_docs > 0, **dots(self.products)} | {**flags}, how.options,
        )  # fmt: skip

    def of_tokens(
        self, kind: str, how: Launch, grid: tuple[int, ...], others: Sequence[str | None], reads: Sequence[str],
        writes: Sequence[str], flags: Mapping[str, bool],
    ) -> LaunchSpec:  # fmt: skip
        """As `_generated`, of an exact kernel: a chunk is a token, and products are of fp32."""
        constants = {**flags, "C": 1, "EXACT_C": self.chunk, **dots(_F32)}
        return self._generated(kind, how, grid, others, [*reads, "@exact"], writes, constants)

    def _numbers(self, kernel: Kernel, walks: bool) -> tuple[int | str, ...]:
        plan = self.tiling
        chunks = (plan.n_seg, plan.n_chunks, plan.per_seg) if walks else (plan.n_chunks,)
        return (*kernel.tokens, self.T, self.H, *chunks)

    def _constants(self, how: Launch) -> dict[str, Any]:
        """Sizes, and those of tiles."""
        found: dict[str, Any] = {}
        for name, block in self.tiling.blocks:
            found[name] = self.sizes[name]
            found[f"B{name}"] = how.cols if name == self.code.layout.cols else block
        return found | {"C": self.chunk}

    def _walk(
        self, kind: str, others: Sequence[str | None], reads: Sequence[str], writes: Sequence[str], **flags: bool
    ) -> list[LaunchSpec]:
        """A walk, and that of the segments which are done again."""
        plan, how = self.tiling, self.tiling.walk
        if any(copied_over(nodes, HELD[kind]) for nodes in self.code.kernels[kind].nodes):
            how = replace(how, stages=1)
        panels = -(-self.sizes[self.code.layout.cols] // plan.walk.cols)
        if kind == "summarize" and self.code.dense:  # panels of A^T beside those of the state
            panels += -(-self.state[0] // plan.walk.cols)
        grid = (panels, self.B * self.H, plan.n_seg)
        first = self._generated(kind, how, grid, others, reads, writes, flags)
        return [first, *self.again(kind, others, reads, writes, flags)]

    def _chunkwise(self, kind: str, how: Launch, others: Sequence[str]) -> LaunchSpec:
        kernel = self.code.kernels[kind]
        panels = 1 if self.code.pieces else -(-self.sizes[self.code.layout.cols] // how.cols)
        grid = (self.n_chunks * kernel.parts, self.B * self.H, panels)
        reads = [x for x in others if x in _states_of(kernel)]
        return self._generated(kind, how, grid, [*others, self._table], reads, (), {"APART": how.warps > 4})

    def _stages(self, backward: bool, others: Sequence[str]) -> list[LaunchSpec]:
        launches: list[LaunchSpec] = []
        for stage in self.code.stages:
            if stage.backward == backward:
                launches += self._stage(stage, others)
        return launches

    def _stage(self, stage: Stage, others: Sequence[str]) -> list[LaunchSpec]:
        first = [self._chunkwise(stage.kind, self.tiling.whole, others)] if stage.writes else []
        return [*first, *(self._intrinsic(x) for x in stage.intrinsics)]

    def _intrinsic(self, what: Intrinsic) -> LaunchSpec:
        args, results = what.args, [*what.results]
        written = results
        if what.kind == "scores_grad":
            written = _gradients(results[0][:-1])
        pointers = (*args, *written, self._table)
        grid = (self.n_chunks, self.B * self.H, 1)
        how = Launch(0, intrinsic_kernels.warps(what.kind, self.products == torch.bfloat16), 1)
        constants: dict[str, Any] = {"C": self.chunk, "PACKED": self.n_docs > 0}
        numbers: tuple[int | str, ...] = (self.T,)
        options = {"num_warps": how.warps}
        if what.kind == "inverse":
            gain = self.rounds
            constants |= {"GAIN": gain, "MORE": gain and what is not self._inverses[0]}
            constants |= {"REPEATS": gain and what.exact_repeats, "DITHERED": self.products == torch.bfloat16}
            pointers = (*args, *written, "@gain" if gain else None, self._table)
            results += ["@gain"] if gain else []
        else:
            numbers = (*self._scored(what), self.T, self.H)
            constants |= self._scores(what)
            options = how.options
        return LaunchSpec(
            f"{what.kind}_kernel", how, grid, pointers, tuple(args), tuple(results), numbers, constants, options, what
        )

    @property
    def _inverses(self) -> list[Intrinsic]:
        return [x for x in self.code.step.intrinsics if x.kind == "inverse"]

    def _scored(self, what: Intrinsic) -> list[int | str]:
        """Strides of queries and keys, which may be kept values."""
        return [n for x in what.args[-3:-1] for n in ([x] if x in self.code.layout.tokens else [0, 0, 0])]

    def _scores(self, what: Intrinsic) -> dict[str, Any]:
        """Constants of scores and their gradient."""
        tokens = self.code.layout.tokens
        *_, q, k, b = what.args
        size = self.code.layout.kept[b].dims[1]
        columns = dict(self.tiling.blocks)[size]
        return {
            "N": self.sizes[size], "BN": intrinsic_kernels.columns(what.kind, columns, self.products == torch.bfloat16),
            "LEVELS": self.chunk.bit_length() - 1, "Q_KEPT": q not in tokens, "K_KEPT": k not in tokens,
            **dots(self.products),
        }  # fmt: skip


def _gradients(name: str) -> list[str]:
    """Of queries, keys and running gates of scores."""
    return [f"{name}{i}" for i in range(3)]


def _states_of(kernel: Kernel) -> set[str]:
    """Which states of chunks a chunkwise kernel reads: the one that enters, and the gradient of the one that leaves."""
    names = {node.name for part in kernel.nodes for node in part if node.op == "placeholder" and is_state(node.name)}
    return {"@leaving" if name.startswith("d") else "@entering" for name in names}
