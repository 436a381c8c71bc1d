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
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from flexsp.comm.derivatives import IN_PYTORCH, changed, first_only, same_place, untransformed
from flexsp.comm.group import SequenceParallel, get_sp
from flexsp.compiler import intrinsic_kernels
from flexsp.compiler.engine import Generated
from flexsp.compiler.launches import PROPAGATE, Call, LaunchSpec, Plan
from flexsp.devices import MOST_HEADS, of_device
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
    """How calls of one signature run: the launches of `call`, with the strides of their tensors and with memory."""

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
        if self.chained:  # a plan that was tuned on one rank
            self.plan = replace(self.plan, schedule="segmented")
        self.call = Call(
            code, self.plan, self.sizes, self.B, self.H, self.T, self.docs, self.dtype, self.given, self.ends
        )
        self.state = self.call.state
        self.K, self.V = (*self.state, 1)[:2]  # as the scan over segments sees the state
        self.out = (*lead.shape[: 2 + self.batched], self.sizes[layout.cols])
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

    def _reserve(self, launches: Sequence[LaunchSpec], workspace_for: Callable[[str], Workspace]) -> None:
        """Memory for what the launches need besides what they are given."""
        for name, x in self.call.memory(launches).items():
            if name not in self.saved.places:
                workspace_for(name).add(name, x.dtype, *x.shape)

    def _launch(self, spec: LaunchSpec, do: Strides) -> list[Step]:
        """`do`: strides of the outputs' gradient."""
        if spec.kind == PROPAGATE:
            return [self._propagate(spec)]
        if not self.plan.n_chunks * self.B * self.H:
            return []
        strides = self.strides | {"do": do}
        numbers = [n for x in spec.numbers for n in (strides[x] if isinstance(x, str) else (x,))]
        kernel = getattr(intrinsic_kernels if spec.intrinsic else self.code.module, spec.kind)
        return [KernelLaunch(kernel, spec.grid, spec.pointers, numbers, dict(spec.constants), dict(spec.options))]

    def _propagate(self, spec: LaunchSpec) -> Step:
        states, carried, cut = spec.pointers
        kind = "dense" if carried == "@A" else "none" if carried is None else "vector"
        shape = self.B, self.plan.n_seg, self.H, self.K, self.V
        call = self.code.program.call_text(self.dtype, self.docs > 0)
        sp_id = self.sp_id if self.chained else -1
        return propagate_step(str(states), carried, cut, shape, kind, spec.constants["REVERSE"], sp_id, call)

    def _forward(self) -> list[Step]:
        launches = self.call.forward()
        self._reserve(launches, lambda name: self.saved if self.call.saved(name) else self.scratch)
        steps = [step for x in launches for step in self._launch(x, (0, 0, 0))]
        if self.plan.n_chunks:
            return steps
        initial = "@initial" if self.given else None
        steps = [self._unit, lambda frame: self._nothing(frame, "@states", 0, initial), *steps]
        if self.ends:
            steps.append(lambda frame: copy(frame["@final"], frame["@states"][:, -1]))
        return steps

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
        launches, workspace = self.call.backward(dfinal, dinitial), Workspace()
        self._reserve(launches, lambda name: workspace)
        strides = self._strides(do)
        steps = [step for x in launches for step in self._launch(x, strides)]
        if not self.plan.n_chunks:
            after = "@dfinal" if dfinal else None
            steps = [lambda frame: self._nothing(frame, "@dstates", -1, after), *steps]
            if dinitial:
                steps.append(lambda frame: copy(frame["@dinitial"], frame["@dstates"][:, 0]))
        return Backward(steps, workspace)

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
