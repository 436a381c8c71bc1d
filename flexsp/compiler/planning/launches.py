"""Stage 4a: a plan, and the launches of a call that follow from it, in order.

This is the one list of them. The runner (`flexsp.kernels.executable`) puts strides and addresses in place of names. The
cost model (`flexsp.compiler.planning.model`) adds up what each reads and writes; plans, `explain` and the traffic check
use it.

Besides the names of buffers in `flexsp.kernels.launches`, ``kept.x`` is a value kept of every chunk.
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
from flexsp.compiler.graphs.differentiate import Intrinsic, Saved
from flexsp.compiler.graphs.stages import Stage
from flexsp.compiler.graphs.values import is_state
from flexsp.compiler.planning.capacity import copied_over
from flexsp.compiler.planning.exact import again, choose, grads, rounds, scratch
from flexsp.kernels.launches import Buffer, Facts, Launch, LaunchSpec, copied, named, nothing, ones, scan, unit, zeroed
from flexsp.kernels.primitives import dots

__all__ = ["GeneratedCall", "Plan"]

_F32 = torch.float32
_SAVED = ("@states", "@A", "@decay", "@cut", "@exact")
_OWN = (*_SAVED, "@passed", "@dstates", "@entering", "@leaving", "@gain", "@scratch")


@dataclass(frozen=True)
class Plan:
    """Chunks, segments and tiles of one call; `blocks` are padded sizes by name.

    `schedule`: "fused" is one walk over all chunks of a head, without `summarize`, `collect` and the scan that joins
    segments; "segmented" has them. A fused plan has one segment, at least one chunk and no ranks.
    `sure`: by estimate, a block has the shared memory that each kernel needs; else only compiling them tells.
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
class GeneratedCall:
    """A call of generated kernels, as `flexsp.kernels.launches.Call` describes it.

    Attributes:
        sizes: of the state and the inputs, by name; beside them B sequences of T tokens of H heads.
        docs: packed documents, 0 if not packed.
        initial: initial states are given on this rank.
        ends: final states leave on this rank.
    """

    code: Generated
    plan: Plan
    sizes: Mapping[str, int]
    B: int
    H: int
    T: int
    docs: int
    dtype: torch.dtype
    initial: bool = False
    ends: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "code", self.code.sized(self.sizes))

    @cached_property
    def facts(self) -> Facts:
        plan, program = self.plan, self.code.program
        kind = "vector" if program.transition == "scalar" else program.transition
        rows, cols = (*self.state, 1)[:2]
        return Facts(
            program.merge.name, program.call_text(self.dtype, self.docs > 0), self.B, self.T, self.H, self.docs,
            plan.chunk, plan.n_chunks, plan.n_seg, (kind, rows, cols), self.ends,
            sparse=bool(self.code.layout.parts), sure=plan.sure,
        )  # fmt: skip

    @property
    def products(self) -> torch.dtype:
        return self.code.products(self.dtype)

    @property
    def _maxima(self) -> bool:
        """Whether states are max(S + a, F). Then `collect` leaves what passes a segment backward, "@passed"."""
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
        logarithms = self._carries == "@decay" and not (self._maxima or self.facts.scan[0] == "elementwise")
        if self.scanned and logarithms and bool(frame["@decay"].isnan().any()):
            raise ValueError(
                f"{self.code.program.decay.name}: expected to multiply the state by no negative number and by no NaN, "
                "since kernels carry the logarithm from segment to segment; some input of the call makes it one"
            )

    @property
    def scanned(self) -> bool:
        """Whether states enter segments from elsewhere: several segments, or ranks."""
        return self.plan.schedule == "segmented"

    @property
    def state(self) -> tuple[int, ...]:
        return self.code.layout.numbers(self.sizes)

    # Buffers

    def buffer(self, name: str) -> Buffer:
        """The tensor of this name."""
        plan, rows, heads, layout = self.plan, self.state[0], self.B * self.H, self.code.layout
        if name.startswith("own.") and self.lowering is not None:
            return self.lowering.buffer(self, name)
        of_segments = (self.B, plan.n_seg, self.H)
        if name.startswith("kept."):
            kept = self._kept(name.removeprefix("kept."))
            shape = [plan.chunk if s == "C" else self.sizes[s] for s in kept.dims]
            # Where products are of fp32, an inverse, and what is made with it, is not rounded on the way.
            wide = kept.wide or (self.code.inverts and self.products != torch.bfloat16)
            return Buffer(_F32 if wide else self.dtype, (heads, plan.n_chunks, *shape))
        if name in ("@gain", "@exact"):
            return Buffer(_F32 if name == "@gain" else torch.int32, (heads, plan.n_chunks))
        if name == "@scratch":
            return Buffer(_F32, scratch(self))
        if name in ("@states", "@dstates"):
            return Buffer(_F32, (self.B, plan.n_seg + 1, self.H, *self.state))
        if name in ("@entering", "@leaving"):
            half = self.dtype == torch.bfloat16 and not self._maxima
            return Buffer(self.dtype if half else _F32, (heads, plan.n_chunks, *(*self.state, 1)[:2]))
        if name in ("@initial", "@final", "@dinitial", "@dfinal"):
            return Buffer(_F32, (self.docs or self.B, self.H, *self.state))
        if name in ("@A", "@decay", "@passed"):
            kind, _, cols = self.facts.scan
            more = (rows,) if name == "@A" else (cols,) if kind in ("elementwise", "max-plus") else ()
            return Buffer(_F32, (*of_segments, rows, *more))
        if name == "@cut":
            return Buffer(torch.int32, of_segments[:2])
        source = {"@o": "do", "@do": "do"}.get(name, name.removeprefix("d."))
        if source in layout.params:
            chunks = (plan.n_chunks,) if name.startswith("d.") else ()
            return Buffer(_F32, (self.B, self.H, *chunks, *(self.sizes[s] for s in layout.params[source])))
        sizes = [self.sizes[s] for s in layout.tokens[source][1:]]
        return Buffer(self._dtype(source), (self.B, self.T, self.H, *sizes))

    def _kept(self, name: str) -> Saved:
        """Of the gradients of an intrinsic some may be those of constants, which nothing reads."""
        kept = self.code.layout.kept
        return kept[name] if name in kept else next(kept[x] for x in _gradients(name[:-1]) if x in kept)

    def _dtype(self, token: str) -> torch.dtype:
        """That of the call, for inputs that share the first one's type in the metadata."""
        tokens = self.code.program.meta.tokens
        if token == "do" or tokens[token].dtype == next(iter(tokens.values())).dtype:
            return self.dtype
        return tokens[token].dtype

    def own(self, name: str) -> bool:
        of_param = name.startswith("d.") and name.removeprefix("d.") in self.code.layout.params
        return name.startswith(("kept.", "own.")) or name in _OWN or of_param

    def saved(self, name: str) -> bool:
        if name.startswith("own."):
            return self.lowering is not None and name in self.lowering.saved
        return name in _SAVED or name.removeprefix("kept.") in self.code.saved

    # Launches

    def forward(self) -> list[LaunchSpec]:
        generated = self._forward()
        return generated if self.lowering is None else self.lowering.forward(self, generated)

    def backward(self, dfinal: bool, dinitial: bool, wanted: Collection[str] = ()) -> list[LaunchSpec]:
        """All gradients of inputs are computed, whichever are `wanted`."""
        generated = self._backward(dfinal, dinitial)
        return generated if self.lowering is None else self.lowering.backward(self, generated)

    def _forward(self) -> list[LaunchSpec]:
        launches = [*self._stages(False, []), *choose(self)]
        if self.scanned:
            launches += [*self._around_parts("@states"), *self._summarize(), self._propagate("@states", False)]
        given = "@initial" if self.initial and (self.docs > 0 or not self.scanned) else None
        states, final = "@states" if self.scanned else None, "@final" if self.ends else None
        output = self._walk(
            "output", [states, given, final, self._table], named(states, given), named(final),
            ENTERS=self.scanned, BOUNDARY=given is not None, LEAVES=self.ends,
        )  # fmt: skip
        launches += output
        return launches if self.plan.n_chunks else self._of_no_tokens(launches)

    def _of_no_tokens(self, launches: list[LaunchSpec]) -> list[LaunchSpec]:
        """The forward pass of a shard without tokens, whose transition is the unit."""
        factors = self.code.program.transition == "elementwise"
        carried = ("@cut",) if factors else ("@decay", "@cut")
        names = ["@states", *(x for x in named(*self._summarize()[0].pointers) if x in carried)]
        units = [unit("@A")] if self.code.dense else [ones("@decay")] if factors else []
        steps = [*units, zeroed(*names), *([nothing("@states")] if self._maxima else [])]
        if self.initial and not self.docs:
            steps.append(copied("@states", "@initial", 0))
        return [*steps, *launches, *([copied("@final", "@states", None, -1)] if self.ends else [])]

    def _backward(self, dfinal: bool, dinitial: bool) -> list[LaunchSpec]:
        code, plan, in_walk = self.code, self.plan, self.docs > 0 or not self.scanned
        initial = "@initial" if self.initial and in_walk else None
        after = "@dfinal" if dfinal else None
        last = after if in_walk else None
        states, dstates = ("@states", "@dstates") if self.scanned else (None, None)
        entering = self._walk(
            "states", [states, initial, "@entering", self._table], named(states, initial), ("@entering",),
            ENTERS=self.scanned, BOUNDARY=initial is not None,
        )  # fmt: skip
        middle: list[LaunchSpec] = []
        if self.scanned:
            passed = ["@passed"] if self._maxima else []
            others = ["@dstates", after, *passed, *self._entering("collect"), self._table]
            reads = named(after, *self._entering("collect"))
            middle = [
                *self._around_parts("@dstates"),
                *self._walk("collect", others, reads, ("@dstates", *passed), BOUNDARY=after is not None),
                self._propagate("@dstates", True),
            ]
        dinitial_of = "@dinitial" if dinitial else None
        back = self._walk(
            "back", [dstates, last, dinitial_of, "@leaving", *self._entering("back"), self._table],
            named(dstates, last, *self._entering("back")), named(dinitial_of, "@leaving"),
            ENTERS=self.scanned, BOUNDARY=last is not None, LEAVES=dinitial,
        )  # fmt: skip
        early = code.kernels["collect"].entering
        launches = [*entering, *middle, *back] if early else [*middle, *entering, *back]
        of_chunk = ["@entering", "@leaving"]
        launches += self._stages(True, of_chunk)
        launches.append(self._chunkwise("grads", plan.part, of_chunk))
        launches += [self._chunkwise("gather", plan.small, of_chunk)] if code.small else []
        launches += grads(self)
        if plan.n_chunks:
            return launches
        given = [copied("@dstates", "@dfinal", -1)] if dfinal and not self.docs else []
        left = [copied("@dinitial", "@dstates", None, 0)] if dinitial else []
        return [zeroed("@dstates"), *([ones("@passed")] if self._maxima else []), *given, *launches, *left]

    @property
    def _table(self) -> str | None:
        return "@table" if self.docs else None

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
            carried = [*decay, "@cut" if self.docs else None]
        others = ["@states", initial, *carried, self._table]
        writes = ("@states", *(x for x in named(*carried) if x != "@cut"))
        return self._walk("summarize", others, named(initial), writes, BOUNDARY=self.initial)

    def _around_parts(self, states: str) -> list[LaunchSpec]:
        """Zeros where a state of parts holds nothing: a matrix multiplies those too."""
        holds = [len(x.sizes) == 2 or x.sizes == self.code.layout.state[1:] for x in self.code.layout.places()]
        return [zeroed(states)] if self.code.dense and not all(holds) else []

    def _propagate(self, states: str, reverse: bool) -> LaunchSpec:
        cut = "@cut" if self.docs and not self.code.dense else None
        return scan(states, "@passed" if reverse and self._maxima else self._carries, cut, reverse=reverse)

    def _written(self, name: str) -> str:
        if name in self.code.layout.kept:
            return f"kept.{name}"
        return "@o" if name == "o" else f"d.{name.removeprefix('d_')}"

    def _generated(
        self, kind: str, how: Launch, grid: tuple[int, ...], others: Sequence[str | None], reads: Sequence[str],
        writes: Sequence[str], flags: Mapping[str, Any],
    ) -> LaunchSpec:  # fmt: skip
        """A launch of a generated kernel; `others` are its last pointers, which it `reads` and `writes` besides."""
        kernel = self.code.kernels[kind]
        given = [*("@do" if x == "do" else x for x in kernel.tokens), *(f"kept.{x}" for x in kernel.kept)]
        given += kernel.params
        written = [self._written(x) for x in kernel.writes]
        pointers, numbers = (*given, *written, *others), self._numbers(kernel, kind.removeprefix(EXACT) in WALKS)
        return LaunchSpec(
            kind, how, grid, pointers, (*given, *reads), (*written, *writes), numbers,
            self._constants(how) | {"PACKED": self.docs > 0, **dots(self.products)} | {**flags}, how.options,
        )  # fmt: skip

    def of_tokens(
        self, kind: str, how: Launch, grid: tuple[int, ...], others: Sequence[str | None], reads: Sequence[str],
        writes: Sequence[str], flags: Mapping[str, bool],
    ) -> LaunchSpec:  # fmt: skip
        """As `_generated`, of an exact kernel: a chunk is a token, and products are of fp32."""
        constants = {**flags, "C": 1, "EXACT_C": self.plan.chunk, **dots(_F32)}
        return self._generated(kind, how, grid, others, [*reads, "@exact"], writes, constants)

    def _numbers(self, kernel: Kernel, walks: bool) -> tuple[int | str, ...]:
        plan = self.plan
        chunks = (plan.n_seg, plan.n_chunks, plan.per_seg) if walks else (plan.n_chunks,)
        return (*kernel.tokens, self.T, self.H, *chunks)

    def _constants(self, how: Launch) -> dict[str, Any]:
        """Sizes, and those of tiles."""
        found: dict[str, Any] = {}
        for name, block in self.plan.blocks:
            found[name] = self.sizes[name]
            found[f"B{name}"] = how.cols if name == self.code.layout.cols else block
        return found | {"C": self.plan.chunk}

    def _walk(
        self, kind: str, others: Sequence[str | None], reads: Sequence[str], writes: Sequence[str], **flags: bool
    ) -> list[LaunchSpec]:
        """A walk, and that of the segments which are done again."""
        plan, how = self.plan, self.plan.walk
        if any(copied_over(nodes, HELD[kind]) for nodes in self.code.kernels[kind].nodes):
            how = replace(how, stages=1)
        panels = -(-self.sizes[self.code.layout.cols] // plan.walk.cols)
        if kind == "summarize" and self.code.dense:  # panels of A^T beside those of the state
            panels += -(-self.state[0] // plan.walk.cols)
        grid = (panels, self.B * self.H, plan.n_seg)
        first = self._generated(kind, how, grid, others, reads, writes, flags)
        return [first, *again(self, kind, others, reads, writes, flags)]

    def _chunkwise(self, kind: str, how: Launch, others: Sequence[str]) -> LaunchSpec:
        kernel = self.code.kernels[kind]
        panels = 1 if self.code.pieces else -(-self.sizes[self.code.layout.cols] // how.cols)
        grid = (self.plan.n_chunks * kernel.parts, self.B * self.H, panels)
        reads = [x for x in others if x in _states_of(kernel)]
        return self._generated(kind, how, grid, [*others, self._table], reads, (), {"APART": how.warps > 4})

    def _stages(self, backward: bool, others: Sequence[str]) -> list[LaunchSpec]:
        launches: list[LaunchSpec] = []
        for stage in self.code.stages:
            if stage.backward == backward:
                launches += self._stage(stage, others)
        return launches

    def _stage(self, stage: Stage, others: Sequence[str]) -> list[LaunchSpec]:
        first = [self._chunkwise(stage.kind, self.plan.whole, others)] if stage.writes else []
        return [*first, *(self._intrinsic(x) for x in stage.intrinsics)]

    def _intrinsic(self, what: Intrinsic) -> LaunchSpec:
        args = [x if x in self.code.layout.tokens else f"kept.{x}" for x in what.args]
        results = [f"kept.{x}" for x in what.results]
        written = results
        if what.kind == "scores_grad":
            written = _gradients(results[0][:-1])
        pointers = (*args, *written, self._table)
        grid = (self.plan.n_chunks, self.B * self.H, 1)
        how = Launch(0, intrinsic_kernels.warps(what.kind, self.products == torch.bfloat16), 1)
        constants: dict[str, Any] = {"C": self.plan.chunk, "PACKED": self.docs > 0}
        numbers: tuple[int | str, ...] = (self.T,)
        options = {"num_warps": how.warps}
        if what.kind == "inverse":
            gain = rounds(self)
            constants |= {"GAIN": gain, "MORE": gain and what is not self._inverses[0]}
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
        columns = dict(self.plan.blocks)[size]
        return {
            "N": self.sizes[size], "BN": intrinsic_kernels.columns(what.kind, columns, self.products == torch.bfloat16),
            "LEVELS": self.plan.chunk.bit_length() - 1, "Q_KEPT": q not in tokens, "K_KEPT": k not in tokens,
            **dots(self.products),
        }  # fmt: skip


def _gradients(name: str) -> list[str]:
    """Of queries, keys and running gates of scores."""
    return [f"{name}{i}" for i in range(3)]


def _states_of(kernel: Kernel) -> set[str]:
    """Which states of chunks a chunkwise kernel reads: the one that enters, and the gradient of the one that leaves."""
    names = {node.name for part in kernel.nodes for node in part if node.op == "placeholder" and is_state(node.name)}
    return {"@leaving" if name.startswith("d") else "@entering" for name in names}
