"""The exclusive scan of (A, F) over the ranks with torch.distributed: rank after rank, in pieces, or by all-gather.

These run on CPUs and for dtypes that the kernel does not scan, and the kernel (scan/propagate.py) is measured against
them. docs/math.md, section 14 has their costs.
"""

from __future__ import annotations

import torch

from flexsp.comm.group import SequenceParallel, ranks_call
from flexsp.comm.process_group import Message, begin_call, of_all_ranks, post, wait_all
from flexsp.comm.signature import Signature, facts_of
from flexsp.scan.transitions import Transition

__all__ = ["PIECES", "SCHEDULES", "incoming_state"]

SCHEDULES = ("chain", "serial", "pipelined", "all_gather")
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
        if sp.schedule == "all_gather":
            return _all_gather(F, transition, sp, reverse, signature)
        return _hop(F, transition, sp, reverse, PIECES if sp.schedule == "pipelined" else 1, signature)


def _hop(
    F: torch.Tensor, transition: Transition, sp: SequenceParallel, reverse: bool, pieces: int, signature: Signature
) -> torch.Tensor:
    """Receives from one neighbour, applies A, and sends to the other, in ``pieces``.

    The next piece arrives while the one before it leaves.
    """
    source, target = sp.neighbours(reverse)
    call = begin_call(sp, signature, F, source, target)
    parts = transition.split(F, pieces)
    arriving = [call.buffer(part) for part, _ in parts]
    pending = []
    for i in range(-1, len(parts)):
        messages = []
        if i >= 0 and call.target is not None:
            part, through = parts[i]
            leaving = part if source is None else through.apply(call.data(arriving[i], part), part)
            messages.append(Message("send", call.sealed(leaving), call.target))
        if i + 1 < len(parts) and source is not None:
            messages.append(Message("recv", arriving[i + 1], source))
        started = post(sp, *messages)
        wait_all(sp, [item for item in started if item.message.op == "recv"])
        if i + 1 < len(parts) and source is not None:
            call.look_at(arriving[i + 1], source)
        pending += [item for item in started if item.message.op == "send"]
    wait_all(sp, pending)
    if source is None:
        return call.end(torch.full_like(F, transition.neutral))
    arrived = [call.data(buffer, part) for buffer, (part, _) in zip(arriving, parts, strict=True)]
    return call.end(transition.join(arrived, F.shape))


def _all_gather(
    F: torch.Tensor, transition: Transition, sp: SequenceParallel, reverse: bool, signature: Signature
) -> torch.Tensor:
    """Sends every rank's (A, F) to every rank. Each one then folds those on its incoming side."""
    mine = transition.packed(F)
    call = begin_call(sp, signature, mine)
    everyone = of_all_ranks(sp, call.sealed(mine))
    state = torch.full_like(F, transition.neutral)
    for r in range(sp.world_size):
        call.look_at(everyone[r], r)
    for r in range(sp.world_size - 1, sp.rank, -1) if reverse else range(sp.rank):
        state = transition.apply_packed(call.data(everyone[r], mine), state)
    return call.end(state)
