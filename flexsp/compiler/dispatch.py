"""Stage 6: a call worked out once for its signature (buffers, launches), then run with little host time.

A signature is what a call's tensors look like: shapes, strides, dtypes, alignment. For each there is a `Recipe`: where
every buffer lies in one allocation, and the launches with their numbers. A repeated call fills in addresses. Another
length T makes another recipe, but compiles nothing: no kernel is specialised on T.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from flexsp.comm.derivatives import IN_PYTORCH, changed, first_only, same_place, untransformed
from flexsp.comm.group import SequenceParallel, get_sp
from flexsp.compiler import intrinsic_kernels
from flexsp.compiler.differentiate import Intrinsic
from flexsp.compiler.engine import Generated
from flexsp.compiler.plan import Launch, Plan
from flexsp.compiler.walks import WALKS
from flexsp.devices import MOST_HEADS, of_device
from flexsp.kernels.primitives import dots
from flexsp.kernels.table import chunk_table
from flexsp.runtime.launch import KernelLaunch, outcome
from flexsp.runtime.steps import Frame, Step, Workspace, copy, launches_of, run_steps
from flexsp.scan.step import propagate_step

__all__ = ["Recipe", "run", "table_of"]

Tensors = dict[str, torch.Tensor]
Strides = tuple[int, int, int]
_F32 = torch.float32


@dataclass(frozen=True)
class Backward:
    """Steps of one backward pass; `scratch` holds its buffers."""

    steps: list[Step]
    scratch: Workspace


class Recipe:
    """How calls of one signature run. Buffers: ``x`` an input, ``d.x`` its gradient, ``kept.x`` kept by chunk, ``@x``
    all others. `states` is None where no state enters a segment from elsewhere: one segment and one rank."""

    def __init__(
        self, code: Generated, given: Tensors, initial: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
        sp: SequenceParallel | None, plan: Plan | None = None,
    ) -> None:  # fmt: skip
        layout = code.layout
        self.code, self.names = code, tuple(given)
        self.dtypes = [x.dtype for x in given.values()]
        self.others: dict[Any, Recipe] = {}
        first = next(name for name in given if name in layout.tokens)
        lead = given[first]
        fake = isinstance(lead, FakeTensor)  # without an address
        self.input_layout = None if fake else _layout_of(given.values(), initial)
        self.device, self.dtype = lead.device, lead.dtype
        self.batched = lead.dim() == len(layout.tokens[first]) + 2
        self.B = lead.shape[0] if self.batched else 1
        self.T, self.H = lead.shape[self.batched : self.batched + 2]
        if self.B * self.H > MOST_HEADS:
            raise ValueError(f"inputs: expected B * H <= {MOST_HEADS} (a grid's second axis), got {self.B * self.H}")
        self.docs = 0 if cu_seqlens is None else cu_seqlens.numel() - 1
        self.given = initial is not None
        self.sp_id = -1 if sp is None else sp.id
        self.chained = sp is not None and sp.world_size > 1
        self.ends = sp is None or self.docs > 0 or sp.rank == sp.world_size - 1
        self.copied = [name for name, x in given.items() if not self._lies_well(name, x)]
        given = given | {name: given[name].contiguous() for name in self.copied}
        self.strides = {name: self._strides(x) for name, x in given.items() if name in layout.tokens}
        self.sizes = self._sizes(given, initial)
        self.plan = plan or code.plan(
            self.sizes, self.B * self.H, self.T, self.docs, self.dtype, self.chained, of_device(self.device)
        )
        self.state = layout.numbers(self.sizes)
        self.K, self.V = (*self.state, 1)[:2]  # as the scan over segments sees the state
        self.out = (*lead.shape[: 2 + self.batched], self.sizes[layout.cols])
        self.scanned = self.chained or self.plan.n_seg > 1 or self.plan.n_chunks == 0
        self.states = "@states" if self.scanned else None
        self.table = "@table" if self.docs else None
        self.run_steps: Callable[[Sequence[Step], Frame, torch.device], None] = run_steps
        self.saved, self.scratch = Workspace(), Workspace()
        self.forward = self._forward()
        self.backwards: dict[Any, Backward] = {}
        self.precompiled = 0  # passes: the forward one, and the backward one

    def _lies_well(self, name: str, x: torch.Tensor) -> bool:
        if name not in self.code.layout.tokens:
            return x.is_contiguous()
        return len(self.code.layout.tokens[name]) == 1 or x.stride(-1) == 1 or x.shape[-1] == 1

    def _strides(self, x: torch.Tensor) -> Strides:
        """Elements from sequence to sequence, token to token, head to head."""
        b, t, h = x.stride()[:3] if self.batched else (0, *x.stride()[:2])
        return (b if self.B > 1 else 0, t, h)

    def _sizes(self, given: Tensors, initial: torch.Tensor | None) -> dict[str, int]:
        layout = self.code.layout
        found: dict[str, int] = {}
        for name, x in given.items():
            if name in layout.tokens:
                found.update(zip(layout.tokens[name][1:], x.shape[2 + self.batched :], strict=True))
            else:
                found.update(zip(layout.params[name], x.shape[1:], strict=True))
        if initial is not None and not layout.parts:
            found.update(zip(layout.state, initial.shape[2:], strict=True))
        return {name: found[name] for name in layout.sizes}

    # Steps

    def _reserve(self, name: str, workspace: Workspace, like: str | None = None) -> str:
        """Memory for a kept value: C rows of every chunk; sums and what inverses and gradients pass on in fp32."""
        kept = self.code.layout.kept[like or name]
        shape = [self.plan.chunk if s == "C" else self.sizes[s] for s in kept.dims]
        dtype = _F32 if kept.wide else self.dtype
        return workspace.add(f"kept.{name}", dtype, self.B * self.H, self.plan.n_chunks, *shape)

    def _launch(
        self, kind: str, how: Launch, others: Sequence[str | None], do: Strides = (0, 0, 0),
        columns: int | None = None, **flags: bool,
    ) -> list[Step]:  # fmt: skip
        """One launch of a generated kernel. `do`: strides of the outputs' gradient. `columns` that the programs of a
        walk share out, where it is not the state's."""
        kernel, plan = self.code.kernels[kind], self.plan
        if not plan.n_chunks * self.B * self.H:
            return []
        pointers: list[str | None] = ["@do" if x == "do" else x for x in kernel.tokens]
        pointers += [f"kept.{x}" for x in kernel.kept] + list(kernel.params)
        pointers += [self._written(x) for x in kernel.writes] + list(others)
        numbers = [n for x in kernel.tokens for n in (do if x == "do" else self.strides[x])]
        if kind in WALKS:
            grid = (-(-(columns or self.out[-1]) // how.cols), self.B * self.H, plan.n_seg)
            numbers += [self.T, self.H, plan.n_seg, plan.n_chunks, plan.per_seg]
        else:
            grid = (plan.n_chunks * kernel.parts, self.B * self.H, -(-self.out[-1] // how.cols))
            numbers += [self.T, self.H, plan.n_chunks]
        constants: dict[str, Any] = {}
        for name, block in plan.blocks:
            constants[name] = self.sizes[name]
            constants[f"B{name}"] = how.cols if name == self.code.layout.cols else block
        if kind not in WALKS:
            flags = {"APART": how.warps > 4}
        constants |= {"C": plan.chunk, **flags, "PACKED": self.docs > 0, **dots(self.dtype)}
        options = {"num_warps": how.warps, "num_stages": how.stages}
        if how.registers is not None:
            options["maxnreg"] = how.registers
        return [KernelLaunch(getattr(self.code.module, kind), grid, pointers, numbers, constants, options)]

    def _written(self, name: str) -> str:
        if name in self.code.layout.kept:
            return f"kept.{name}"
        return "@o" if name == "o" else f"d.{name.removeprefix('d_')}"

    def _stages(
        self, backward: bool, where: Callable[[str], Workspace], others: list[str | None], do: Strides = (0, 0, 0)
    ) -> list[Step]:
        steps: list[Step] = []
        for stage in self.code.stages:
            if stage.backward == backward:
                for name in stage.leaves:
                    self._reserve(name, where(name))
                if stage.writes:
                    steps += self._launch(stage.kind, self.plan.whole, [*others, self.table], do)
                for x in stage.intrinsics:
                    steps += self._intrinsic(x, where)
        return steps

    def _intrinsic(self, what: Intrinsic, where: Callable[[str], Workspace]) -> list[Step]:
        plan, C = self.plan, self.plan.chunk
        grid = (plan.n_chunks, self.B * self.H, 1)
        warps = {"num_warps": intrinsic_kernels.WARPS[what.kind]}
        if not plan.n_chunks * self.B * self.H:
            return []
        if what.kind == "inverse":
            pointers = [f"kept.{what.args[0]}", f"kept.{what.results[0]}", self.table]
            constants: dict[str, Any] = {"C": C, "PACKED": self.docs > 0}
            return [KernelLaunch(intrinsic_kernels.inverse_kernel, grid, pointers, [self.T], constants, warps)]
        *da, q, k, b = what.args
        size = self.code.layout.kept[b].dims[1]
        kept = [x not in self.strides for x in (q, k)]
        of_tokens: list[str | None] = [f"kept.{x}" if is_kept else x for x, is_kept in zip((q, k), kept, strict=True)]
        strides = [n for x in (q, k) for n in self.strides.get(x, (0, 0, 0))]
        columns = dict(plan.blocks)[size]
        constants = {
            "N": self.sizes[size], "BN": columns, "C": C, "LEVELS": C.bit_length() - 1,
            "Q_KEPT": kept[0], "K_KEPT": kept[1], "PACKED": self.docs > 0, **dots(self.dtype),
        }  # fmt: skip
        if what.kind == "scores":
            kernel = intrinsic_kernels.scores_kernel
            constants["BN"] = min(columns, intrinsic_kernels.COLUMNS)
            pointers = [*of_tokens, f"kept.{b}", f"kept.{what.results[0]}", self.table]
        else:
            kernel = intrinsic_kernels.scores_grad_kernel
            one = what.results[0]  # the other one may be the gradient of a constant, which nothing reads
            both = [self._reserve(f"{one[:-1]}{i}", where(one), one) for i in range(2)]
            pointers = [f"kept.{da[0]}", *of_tokens, f"kept.{b}", *both, self.table]
        return [KernelLaunch(kernel, grid, pointers, [*strides, self.T, self.H], constants, warps | {"num_stages": 1})]

    def _of_states(self, name: str, workspace: Workspace) -> None:
        workspace.add(name, _F32, self.B, self.plan.n_seg + 1, self.H, *self.state)

    def _forward(self) -> list[Step]:
        code, plan = self.code, self.plan
        steps = self._stages(False, lambda name: self.saved if name in code.saved else self.scratch, [])
        if self.scanned:
            self._of_states("@states", self.saved)
            steps += self._scan()
        in_walk = self.given and (self.docs > 0 or not self.scanned)
        steps += self._launch(
            "output", plan.walk,
            [self.states, "@initial" if in_walk else None, "@final" if self.ends else None, self.table],
            ENTERS=self.scanned, BOUNDARY=in_walk, LEAVES=self.ends,
        )  # fmt: skip
        if self.ends and not plan.n_chunks:
            steps.append(lambda frame: copy(frame["@final"], frame["@states"][:, -1]))
        return steps

    def _scan(self) -> list[Step]:
        """What segments leave, and the scan over segments and ranks."""
        plan, B, H, K = self.plan, self.B, self.H, self.K
        carried: list[str | None] = []
        width = None
        if self.code.dense:
            carried.append(self.saved.add("@A", _F32, B, plan.n_seg, H, K, K))
            width = -(-self.out[-1] // plan.walk.cols) * plan.walk.cols + K  # panels of A^T beside those of the state
        else:
            if self.code.program.transition != "none":
                carried.append(self.saved.add("@decay", _F32, B, plan.n_seg, H, K))
            carried.append(self.saved.add("@cut", torch.int32, B, plan.n_seg) if self.docs else None)
        initial = "@initial" if self.given else None
        steps = self._launch(
            "summarize", plan.walk, ["@states", initial, *carried, self.table], columns=width, BOUNDARY=self.given
        )
        if not plan.n_chunks:
            steps += [self._unit, lambda frame: self._nothing(frame, "@states", 0, initial)]
        return [*steps, self._propagate("@states", False)]

    def _unit(self, frame: Frame) -> None:
        """The transition of a shard without tokens. Backward passes find it saved, and leave it as it is."""
        for name in ("@decay", "@cut"):
            if name in self.saved.places:
                frame[name].zero_()
        if self.code.dense:
            frame["@A"][:] = torch.eye(self.K, device=self.device)

    def _nothing(self, frame: Frame, states: str, slot: int, given: str | None) -> None:
        """What a shard without tokens adds to the states, or to their gradients."""
        frame[states].zero_()
        if given is not None and not self.docs:
            frame[states][:, slot] = frame[given]

    def _propagate(self, states: str, reverse: bool) -> Step:
        decay, cut, A = (name if name in self.saved.places else None for name in ("@decay", "@cut", "@A"))
        kind = "dense" if A is not None else "none" if decay is None else "vector"
        shape = self.B, self.plan.n_seg, self.H, self.K, self.V
        call = self.code.program.call_text(self.dtype, self.docs > 0)
        return propagate_step(states, decay or A, cut, shape, kind, reverse, self.sp_id if self.chained else -1, call)

    def of(self, tensors: Sequence[torch.Tensor], initial: torch.Tensor | None) -> Recipe:
        """The recipe to go on with: another where hooks on saved tensors gave back tensors that lie otherwise."""
        layout = _layout_of(tensors, initial)
        if layout == self.input_layout:
            return self
        if layout not in self.others:
            if len(self.others) >= 16:
                self.others.clear()
            bounds = torch.empty(self.docs + 1, dtype=torch.int64, device="meta") if self.docs else None
            sp = get_sp(self.sp_id) if self.sp_id >= 0 else None
            given = dict(zip(self.names, tensors, strict=True))
            self.others[layout] = Recipe(self.code, given, initial, bounds, sp, self.plan)
        return self.others[layout]

    def backward(self, do: torch.Tensor, dfinal: torch.Tensor | None, dinitial: bool) -> Backward:
        """Steps for gradients of outputs and final states that lie so, with or without those of initial states."""
        key = (*(None if x is None else (x.stride(), x.data_ptr() % 16 == 0) for x in (do, dfinal)), dinitial)
        found = self.backwards.get(key)
        if found is None:
            if len(self.backwards) >= 16:
                self.backwards.clear()
            found = self.backwards[key] = self._backward(do, dfinal is not None, dinitial)
        return found

    def _backward(self, do: torch.Tensor, dfinal: bool, dinitial: bool) -> Backward:
        code, plan, workspace = self.code, self.plan, Workspace()
        strides = self._strides(do)
        of_chunks = self.dtype if self.dtype == torch.bfloat16 else _F32
        for name in ("@entering", "@leaving"):
            workspace.add(name, of_chunks, self.B * self.H, plan.n_chunks, self.K, self.V)
        after = "@dfinal" if dfinal else None
        dstates = "@dstates" if self.scanned else None
        first, last = (x and (self.docs > 0 or not self.scanned) for x in (self.given, dfinal))
        others = [self.states, "@initial" if first else None, "@entering", self.table]
        entering = self._launch("states", plan.walk, others, ENTERS=self.scanned, BOUNDARY=first)
        steps: list[Step] = []
        if self.scanned:
            self._of_states("@dstates", workspace)
            steps = self._scan_back(after, strides)
        steps = [*entering, *steps] if code.kernels["collect"].entering else [*steps, *entering]
        steps += self._launch(
            "back", plan.walk,
            [dstates, after if last else None, "@dinitial" if dinitial else None, "@leaving", *self._entering("back")],
            strides, ENTERS=self.scanned, BOUNDARY=last, LEAVES=dinitial,
        )  # fmt: skip
        if dinitial and not plan.n_chunks:
            steps.append(lambda frame: copy(frame["@dinitial"], frame["@dstates"][:, 0]))
        of_chunk: list[str | None] = ["@entering", "@leaving"]
        steps += self._stages(True, lambda name: workspace, of_chunk, strides)
        for name in code.layout.params:
            sizes = [self.sizes[s] for s in code.layout.params[name]]
            workspace.add(f"d.{name}", _F32, self.B, self.H, plan.n_chunks, *sizes)
        for name in code.sums:
            self._reserve(name, workspace)
        steps += self._launch("grads", plan.part, [*of_chunk, self.table], strides)
        if code.small:
            steps += self._launch("gather", plan.small, [*of_chunk, self.table], strides)
        return Backward(steps, workspace)

    def _entering(self, kind: str) -> list[str | None]:
        """The last arguments of a walk from right to left."""
        return [*(["@entering"] if self.code.kernels[kind].entering else []), self.table]

    def _scan_back(self, after: str | None, strides: Strides) -> list[Step]:
        others = ["@dstates", after, *self._entering("collect")]
        steps = self._launch("collect", self.plan.walk, others, strides, BOUNDARY=after is not None)
        if not self.plan.n_chunks:
            steps.append(lambda frame: self._nothing(frame, "@dstates", -1, after))
        return [*steps, self._propagate("@dstates", True)]

    # Calls

    def launches(
        self, tensors: Sequence[torch.Tensor], initial: torch.Tensor | None, backward: bool
    ) -> Iterator[tuple[KernelLaunch, Frame]]:
        """The launches of a call and, without their memory, what they are compiled for.

        Of the backward pass for contiguous gradients of the outputs and none of final states; where the plan is not
        sure to fit, also for those.
        """

        def like(*shape: int, dtype: torch.dtype = _F32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        given = dict(zip(self.names, tensors, strict=True))
        given |= {name: like(1, dtype=given[name].dtype) for name in self.copied}
        given |= {"@o": like(*self.out, dtype=self.dtype), "@table": like(1, dtype=torch.int32)}
        given |= dict.fromkeys(("@final", "@dinitial"), like(1))
        given["@initial"] = initial if initial is not None and initial.is_contiguous() else like(1)
        saved = self.saved, like(self.saved.nbytes, dtype=torch.uint8)
        scratch = self.scratch, like(self.scratch.nbytes, dtype=torch.uint8)
        for each in launches_of(self.forward):
            yield each, Frame(given, (saved, scratch))
        if backward:
            given["@do"] = given["@o"]
            given |= {f"d.{name}": like(1, dtype=x.dtype) for name, x in given.items() if name in self.strides}
            given["@dfinal"] = like(1)
            for dfinal in (None,) if self.plan.sure else (None, given["@dfinal"]):
                back = self.backward(given["@do"], dfinal, initial is not None and initial.requires_grad)
                frame = Frame(given, (saved, (back.scratch, like(back.scratch.nbytes, dtype=torch.uint8))))
                for each in launches_of(back.steps):
                    yield each, frame

    def precompile(
        self, tensors: Sequence[torch.Tensor], initial: torch.Tensor | None, backward: bool = True
    ) -> list[Future[Any]]:
        """Starts to compile, once and on a GPU, what a call and its backward pass launch. Where the plan is not sure to
        fit, this waits for it: that a kernel of the backward pass does not is said before the first is launched."""
        if self.precompiled > backward or self.device.type != "cuda":
            return []
        found = [each.prepare(frame, self.device.index) for each, frame in self.launches(tensors, initial, backward)]
        if not self.plan.sure:
            for each in found:
                outcome(each)
        self.precompiled = 1 + backward
        return found

    def empty(self, *shape: int, dtype: torch.dtype = _F32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def inputs(
        self, tensors: Sequence[torch.Tensor], initial: torch.Tensor | None, table: torch.Tensor | None
    ) -> Tensors:
        found = dict(zip(self.names, tensors, strict=True))
        for name in self.copied:
            found[name] = found[name].contiguous()
        if initial is not None:
            found["@initial"] = initial.contiguous()
        if table is not None:
            found["@table"] = table
        return found

    def run_forward(
        self, tensors: Sequence[torch.Tensor], initial: torch.Tensor | None, table: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """(o, final states, what the backward pass reads)."""
        given = self.inputs(tensors, initial, table)
        o = given["@o"] = self.empty(*self.out, dtype=self.dtype)
        final = None
        if self.ends:
            final = given["@final"] = self._edge()
        saved = self.empty(self.saved.nbytes, dtype=torch.uint8)
        workspaces = [(self.saved, saved)]
        if self.scratch.nbytes:
            workspaces.append((self.scratch, self.empty(self.scratch.nbytes, dtype=torch.uint8)))
        frame = Frame(given, workspaces)
        self.run_steps(self.forward, frame, self.device)
        if os.environ.get("FLEXSP_CHECK") == "1" and "@decay" in self.saved.places:
            self._look_at_decays(frame["@decay"])
        return o, final, saved

    def _look_at_decays(self, log_decay: torch.Tensor) -> None:
        """ValueError where a segment's decay has no logarithm. Synchronises."""
        if bool(log_decay.isnan().any()):
            name = self.code.program.decay.name
            raise ValueError(
                f"{name}: expected to multiply the state by no negative number and by no NaN, since kernels carry the "
                "logarithm from segment to segment; some input of the call makes it one"
            )

    def _edge(self) -> torch.Tensor:
        """States of documents or sequences; zero where documents end on other ranks, and beside the parts of one."""
        x = self.empty(self.docs or self.B, self.H, *self.state)
        return x.zero_() if (self.docs and self.chained) or self.code.layout.parts else x

    def run_backward(
        self, tensors: Sequence[torch.Tensor], initial: torch.Tensor | None, saved: torch.Tensor,
        table: torch.Tensor | None, do: torch.Tensor, dfinal: torch.Tensor | None, want_dinitial: bool,
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:  # fmt: skip
        """Gradients of the inputs, and of the initial states."""
        do = do if do.stride(-1) == 1 or do.shape[-1] == 1 else do.contiguous()
        given = self.inputs(tensors, initial, table) | {"@do": do}
        if dfinal is not None:
            given["@dfinal"] = dfinal.to(_F32).contiguous()
        dinitial = None
        if want_dinitial:
            dinitial = given["@dinitial"] = self._edge()
        for name, x in zip(self.names, tensors, strict=True):
            if name in self.strides:
                given[f"d.{name}"] = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        back = self.backward(do, given.get("@dfinal"), want_dinitial)
        scratch = self.empty(back.scratch.nbytes, dtype=torch.uint8)
        frame = Frame(given, ((self.saved, saved), (back.scratch, scratch)))
        self.run_steps(back.steps, frame, self.device)
        grads = [
            frame[f"d.{name}"] if name in self.strides else frame[f"d.{name}"].sum((0, 2)).to(x.dtype)
            for name, x in zip(self.names, tensors, strict=True)
        ]
        return grads, dinitial


def _layout_of(tensors: Iterable[torch.Tensor], initial: torch.Tensor | None) -> tuple[Any, ...]:
    """How tensors lie in memory."""
    return tuple([None if x is None else (x.stride(), x.data_ptr() % 16 == 0) for x in (*tensors, initial)])


class _Function(torch.autograd.Function):
    """`anchor` makes autograd record the node on every rank under `sp`."""

    @staticmethod
    def forward(ctx: Any, recipe: Recipe, table, anchor, initial, *tensors):  # type: ignore[no-untyped-def]
        o, final, saved = recipe.run_forward(tensors, initial, table)
        ctx.save_for_backward(*tensors, initial, saved, table)
        ctx.recipe = recipe
        ctx.number = get_sp(recipe.sp_id).number() if recipe.sp_id >= 0 else 0
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    def backward(ctx: Any, do, dfinal):  # type: ignore[no-untyped-def]
        first_only(ctx.recipe.code.program.merge.name, IN_PYTORCH)
        untransformed(ctx.recipe.code.program.merge.name, IN_PYTORCH, do, dfinal)
        do, dfinal = (x if x is None else x.resolve_neg() for x in (do, dfinal))
        *tensors, initial, saved, table = ctx.saved_tensors
        same_place(ctx.recipe.device, *tensors, initial, saved, table)
        if [x.dtype for x in tensors] != ctx.recipe.dtypes:
            changed("dtypes", ctx.recipe.dtypes, [x.dtype for x in tensors])
        recipe: Recipe = ctx.recipe.of(tensors, initial)
        if do is None:
            do = recipe.empty(*recipe.out, dtype=recipe.dtype).zero_()
        want = initial is not None and ctx.needs_input_grad[3]
        sp = get_sp(recipe.sp_id) if ctx.number else None
        with nullcontext() if sp is None else sp.answering(ctx.number):
            grads, dinitial = recipe.run_backward(tensors, initial, saved, table, do, dfinal, want)
        return None, None, None, dinitial, *grads


def table_of(
    recipe: Recipe, cu_seqlens: torch.Tensor | None, shard: tuple[int, int, int]
) -> torch.Tensor | None:  # fmt: skip
    """The chunks of packed documents. `shard`: its first token, its end, of how many."""
    if cu_seqlens is None:
        return None
    last = recipe.sp_id < 0 or get_sp(recipe.sp_id).is_last
    return chunk_table(cu_seqlens, *shard[:2], recipe.plan.chunk, last)


def run(
    recipe: Recipe, tensors: Sequence[torch.Tensor], initial: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    shard: tuple[int, int, int],
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Outputs and final states of generated kernels, differentiable. `shard`: its first token, its end, of how many."""
    sp = get_sp(recipe.sp_id) if recipe.sp_id >= 0 else None
    table = table_of(recipe, cu_seqlens, shard)
    backward = torch.is_grad_enabled() and (
        recipe.chained or any([x.requires_grad for x in tensors]) or (initial is not None and initial.requires_grad)
    )
    if backward or not recipe.plan.sure:
        recipe.precompile(tensors, initial, backward)
    if backward:
        anchor = sp.anchor if sp is not None and recipe.chained else None
        return _Function.apply(recipe, table, anchor, initial, *tensors)
    return recipe.run_forward(tensors, initial, table)[:2]
