"""Calls of kernels over ranks that were asked for the same bits whatever their number is (``bitwise``).

Segments of the sequence, of as many tokens wherever shards begin, have launches of their own, of the same sizes on
whichever rank they are. All that needs no state of the segment before is done for all segments at once, on all ranks.
Then states go from segment to segment and from rank to rank, always one step S' = A S + F for each segment, and then
the rest is done. `flexsp.scan.in_order` does the same with calls that cannot be taken apart like this.

Needs Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from flexsp.comm.derivatives import IN_PYTORCH, first_only
from flexsp.comm.group import SequenceParallel
from flexsp.exceptions import NotAvailable, checks_wanted
from flexsp.kernels.executable import Executable, SegmentScan
from flexsp.kernels.launch_plan import LaunchPlan
from flexsp.runtime.steps import Frame, Step, run_steps
from flexsp.scan.in_order import (
    NAME,
    Segment,
    from_message,
    in_one_message,
    look_for_order,
    owned,
    rows_joined,
    rows_of,
    save_for_order,
    segments_of,
    sum_of_segments,
)  # fmt: skip
from flexsp.scan.relay import Relay

__all__ = ["run_in_segments"]

Optional = torch.Tensor | None
Make = Callable[[Sequence[torch.Tensor]], Executable[Any]]


class _Call(NamedTuple):
    """A call: its segments, on which axis tokens are, which tensors are parameters, the executable of each segment, and
    that of no tokens, which knows what outputs and states look like."""

    what: str
    sp: SequenceParallel
    segments: list[Segment]
    axis: int
    shared: tuple[bool, ...]
    make: Make
    empty: Executable[Any]

    def parts(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The tensors of each segment."""
        return [
            [
                owned(x if shared else x.narrow(*rows_of(x, segment, self.segments, self.axis)))
                for x, shared in zip(tensors, self.shared, strict=True)
            ]
            for segment in self.segments
        ]

    def relay(self, of: str = "") -> Relay:
        return Relay(self.sp, self.sp.anchor, f"{self.what} in segments of {self.sp.segment}{of}")


def run_in_segments(
    sp: SequenceParallel, tensors: Sequence[torch.Tensor], shared: Sequence[bool], initial: Optional, make: Make,
    want_final: bool, axis: int = 1, rows: int = 1,
) -> tuple[torch.Tensor, Optional]:  # fmt: skip
    """Outputs and final states of a call that is not packed, differentiable.

    Args:
        shared: which tensors are parameters; the others have a row a token along `axis`, or several.
        make: the executable of some of the tokens, at a place `Between` others.
        rows: of tensors for a token, at most; a tensor may have fewer.
    """
    empty = make([x if of_all else x.narrow(axis, 0, 0) for x, of_all in zip(tensors, shared, strict=True)])
    what = str(empty.plan.description)
    T = max(x.shape[axis] for x, of_all in zip(tensors, shared, strict=True) if not of_all) // rows
    call = _Call(what, sp, segments_of(sp, sp.lengths_for(T), what), axis, tuple(shared), make, empty)
    o, final = _Function.apply(call, sp.anchor if sp.world_size > 1 else None, initial, *tensors)
    return o, final if want_final and sp.is_last else None


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Optional, initial: Optional, *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.number = call, call.sp.number()
        parts = call.parts(tensors)
        made = [call.make(part) for part in parts]
        frames: list[Frame] = []

        def later(steps: Sequence[Step], frame: Frame, device: torch.device) -> bool:
            frames.append(frame)
            return True

        begun = [each.run_forward(part, None, None, run=later) for each, part in zip(made, parts, strict=True)]
        device = tensors[0].device
        scans = _until_scan([each.forward for each in made], frames, device, call.what)
        state = torch.zeros(call.empty.edge, dtype=torch.float32, device=device)
        state = state if initial is None else initial.to(torch.float32).contiguous()
        relay = call.relay()
        if call.sp.world_size > 1:
            message = in_one_message([state])
            relay.begin(message, False)
            source, target = call.sp.neighbours(False)
            arrived = relay.receive(message, source)
            state = state if source is None else from_message(arrived, [state])[0]
        for scan, frame in zip(scans, frames, strict=True):
            state = scan.run(frame, state, device)
        if call.sp.world_size > 1:
            relay.send(in_one_message([state]), target)
        for each, frame in zip(made, frames, strict=True):
            run_steps(_behind_scan(each.forward), frame, device)
            if type(each.plan).look is not LaunchPlan.look and checks_wanted():
                each.plan.look(frame)
        outputs = [o for o, _, _ in begun]
        o = torch.cat(outputs, call.axis) if outputs else call.empty.empty(*call.empty.out, dtype=call.empty.dtype)
        ctx.made, ctx.shapes, ctx.state = made, [(x.shape, x.dtype) for x in tensors], state.shape
        ctx.has_initial = initial is not None
        save_for_order(ctx, *[x for part in parts for x in part], *[saved for _, _, saved in begun])
        return o, state.clone()

    @staticmethod
    def backward(ctx: Any, do: Optional, dfinal: Optional) -> Any:
        first_only(NAME, IN_PYTORCH)
        call, made, n = ctx.call, ctx.made, len(ctx.shapes)
        device, kept = call.empty.device, look_for_order(ctx)
        parts = [kept[i * n : (i + 1) * n] for i in range(len(made))]
        wants = ctx.needs_input_grad[3:]
        names = frozenset(name for name, wanted in zip(call.empty.names, wants, strict=True) if wanted)
        begun = []
        for i, (each, part, segment) in enumerate(zip(made, parts, call.segments, strict=True)):
            if do is None:
                mine = each.empty(*each.out, dtype=each.dtype).zero_()
            else:
                mine = owned(do.narrow(*rows_of(do, segment, call.segments, call.axis)))
            begun.append(each.begun_backward(part, None, kept[len(made) * n + i], None, mine, None, False, names))
        frames = [x[0] for x in begun]
        scans = _until_scan([x[1].steps for x in begun], frames, device, call.what)
        dstate = torch.zeros(ctx.state, dtype=torch.float32, device=device)
        dstate = dstate if dfinal is None else dfinal.to(torch.float32).contiguous()
        relay = call.relay()
        if call.sp.world_size > 1:
            message = in_one_message([dstate])
            with call.sp.answering(ctx.number):
                relay.begin(message, True)
            source, target = call.sp.neighbours(True)
            arrived = relay.receive(message, source)
            dstate = dstate if source is None else from_message(arrived, [dstate])[0]
        for scan, frame in zip(reversed(scans), reversed(frames), strict=True):
            dstate = scan.run(frame, dstate, device)
        if call.sp.world_size > 1:
            relay.send(in_one_message([dstate]), target)
        grads = []
        for each, part, (frame, back, _) in zip(made, parts, begun, strict=True):
            run_steps(_behind_scan(back.steps), frame, device)
            grads.append(each.gradients_in(frame, back, part))
        return None, None, dstate if ctx.has_initial else None, *_joined(call, ctx.shapes, grads, device)


def _joined(
    call: _Call, shapes: Sequence[tuple[torch.Size, torch.dtype]], grads: list[list[Optional]], device: torch.device
) -> list[torch.Tensor]:
    """Gradients of the call's tensors, of those of its segments."""
    found: list[torch.Tensor] = []
    wide, places = [], []
    for i, (shape, dtype) in enumerate(shapes):
        of_segments = [x[i] for x in grads]
        if call.shared[i]:
            wide.append(torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=device))
            places.append(i)
            found.append(wide[-1])
        else:
            like = torch.empty(0, dtype=dtype, device=device)
            found.append(rows_joined(like, shape, of_segments, call.segments, call.axis))
    sums = sum_of_segments(call.relay(", parameters"), wide, [[x[i] for x in grads] for i in places])
    for i, x in zip(places, sums, strict=True):
        found[i] = x.to(shapes[i][1])
    return found


def _until_scan(
    steps: Sequence[Sequence[Step]], frames: Sequence[Frame], device: torch.device, what: str
) -> list[SegmentScan]:
    """Runs what is before the scans of all segments; these."""
    for each in steps:
        if len(found := [x for x in each if isinstance(x, SegmentScan)]) != 1:
            raise NotAvailable(f"{what}: bitwise needs kernels with one scan in a pass, got {len(found)}")
    for each, frame in zip(steps, frames, strict=True):
        run_steps(each[: _place(each)], frame, device)
    return [x for each in steps for x in each if isinstance(x, SegmentScan)]


def _behind_scan(steps: Sequence[Step]) -> Sequence[Step]:
    return steps[_place(steps) + 1 :]


def _place(steps: Sequence[Step]) -> int:
    return next(i for i, x in enumerate(steps) if isinstance(x, SegmentScan))
