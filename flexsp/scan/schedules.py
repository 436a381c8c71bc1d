"""The exclusive scan of (A, F) over the ranks with torch.distributed, by the schedule of the group: rank after rank, in
pieces, by all-gather, or between hosts apart from inside them (scan/hierarchical.py).

These run on CPUs and for dtypes that the kernel does not scan, and the kernel (scan/propagate.py) is measured against
them. docs/math.md, section 14 has their costs. Each is a generator of its messages (flexsp/comm/steps.py).
"""

from __future__ import annotations

import torch

from flexsp.comm.group import SequenceParallel, ranks_call
from flexsp.comm.process_group import Call, Message, begin_call
from flexsp.comm.signature import Signature, facts_of
from flexsp.comm.steps import Gather, Step, Steps, drive
from flexsp.scan.composing import applied
from flexsp.scan.hierarchical import hierarchical
from flexsp.scan.transitions import Transition

__all__ = ["PIECES", "SCHEDULES", "incoming_state", "steps_of"]

SCHEDULES = ("chain", "serial", "pipelined", "all_gather", "hierarchical")
OF_ALL_RANKS = ("all_gather", "hierarchical")  # in which ranks hear from more than their neighbours
PIECES = 8


@ranks_call
def incoming_state(
    F: torch.Tensor, transition: Transition, sp: SequenceParallel, reverse: bool = False, call: str = ""
) -> torch.Tensor:
    """The state that arrives at this rank where every rank maps S to `transition.apply(S, F)`. Collective, no autograd.

    Args:
        F: [B, H, *state] fp32 or fp64, this rank's own contribution (the first rank's includes the initial state).
        transition: what this rank does to the state that enters it; of one kind on all ranks.
        reverse: scan from the last rank to the first with A^T (the adjoint) instead.
        call: the op that needs it, the same text on every rank.

    Returns:
        The shape of F; on the rank that has no neighbour on the incoming side zeros, -inf of "max-plus".
    """
    transition.check_composes()
    if sp.world_size == 1:
        return torch.full_like(F, transition.neutral, memory_format=torch.contiguous_format)
    if sp.schedule not in SCHEDULES:
        raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {sp.schedule!r}")
    with torch.no_grad(), torch.autocast(F.device.type, enabled=False):
        F = F.contiguous()
        signature = Signature("state exchange", call, facts_of((F,)), transition.kind, reverse, sp.schedule)
        transition = transition.adjoint() if reverse else transition
        among = (None, None) if sp.schedule in OF_ALL_RANKS else sp.neighbours(reverse)
        begun = begin_call(sp, signature, F, *among)
        return drive(sp, steps_of(F, transition, sp, reverse, begun))


def steps_of(
    F: torch.Tensor, transition: Transition, sp: SequenceParallel, reverse: bool, call: Call
) -> Steps[torch.Tensor]:
    """The messages of `incoming_state` by the group's schedule, several ranks, and what it returns.

    Args:
        transition: in ``reverse`` already the adjoint.
        call: the exchange that `begin_call` began. Where nothing is sent, a `Call` made by hand does too, whose target
            is the second one of ``sp.neighbours(reverse)``.
    """
    if sp.schedule == "hierarchical":
        return hierarchical(F, transition, sp, reverse, call)
    if sp.schedule == "all_gather":
        return _all_gather(F, transition, sp, reverse, call)
    return _hop(F, transition, sp, reverse, PIECES if sp.schedule == "pipelined" else 1, call)


def _hop(
    F: torch.Tensor, transition: Transition, sp: SequenceParallel, reverse: bool, pieces: int, call: Call
) -> Steps[torch.Tensor]:
    """Receives from one neighbour, applies A, and sends to the other, in ``pieces``.

    The next piece arrives while the one before it leaves.
    """
    source, _ = sp.neighbours(reverse)
    parts = transition.split(F, pieces)
    arriving = [call.buffer(part) for part, _ in parts]
    sent: list[Message] = []
    for i in range(-1, len(parts)):
        sends, receives = [], []
        if i >= 0 and call.target is not None:
            part, through = parts[i]
            leaving = part if source is None else through.apply(call.data(arriving[i], part), part)
            sends = [Message("send", call.sealed(leaving), call.target)]
        if i + 1 < len(parts) and source is not None:
            receives = [Message("recv", arriving[i + 1], source)]
        if sends or receives:
            yield Step((*sends, *receives), until=tuple(receives))
        if receives and source is not None:
            call.look_at(arriving[i + 1], source)
        sent += sends
    yield Step(until=tuple(sent))
    if source is None:
        return call.end(torch.full_like(F, transition.neutral))
    arrived = [call.data(buffer, part) for buffer, (part, _) in zip(arriving, parts, strict=True)]
    return call.end(transition.join(arrived, F.shape))


def _all_gather(
    F: torch.Tensor, transition: Transition, sp: SequenceParallel, reverse: bool, call: Call
) -> Steps[torch.Tensor]:
    """Sends every rank's (A, F) to every rank. Each one then folds those on its incoming side."""
    mine = transition.packed(F)
    everyone = yield Gather(call.sealed(mine.view(-1)))
    assert everyone is not None
    state = torch.full_like(transition.in_packed(mine)[1], transition.neutral, memory_format=torch.contiguous_format)
    for r in range(sp.world_size):
        call.look_at(everyone[r], r)
    for r in range(sp.world_size - 1, sp.rank, -1) if reverse else range(sp.rank):
        state = applied(transition, call.data(everyone[r], mine), state)
    return call.end(transition.unpacked(state, F.shape))
