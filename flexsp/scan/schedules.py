"""Exclusive scan of (A, F) over the ranks with torch.distributed: rank after rank, in pieces, or all-gather.

These are the CPU path and the baselines of the fused kernel (scan/propagate.py). Costs in MATH §10.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from flexsp.comm.group import SequenceParallel
from flexsp.comm.process_group import Message, compare_text, greet, group_for, peer_errors, post, stamp, wait_all
from flexsp.scan.transitions import Transition

__all__ = ["PIECES", "SCHEDULES", "incoming_state"]

SCHEDULES = ("chain", "serial", "pipelined", "all_gather")
PIECES = 8


def incoming_state(
    F: torch.Tensor,
    log_a: torch.Tensor | None,
    cut: torch.Tensor | None,
    sp: SequenceParallel,
    reverse: bool = False,
) -> torch.Tensor:
    """State that arrives at this rank when every rank r maps S to e^{log_a_r} S + F_r (F_r alone where cut).

    Args:
        F: [B, H, K, V] fp32 or fp64, this rank's own contribution (the first rank's includes the initial state).
        log_a: None, [B, H] or [B, H, K]: natural log of the decay over the whole shard.
        cut: None or [B], nonzero where a document starts in this shard.
        reverse: scan from the last rank to the first (adjoint) instead.

    Returns:
        [B, H, K, V]; zeros on the rank that has no neighbour on the incoming side. Collective, no autograd.
    """
    if F.dim() != 4:
        raise ValueError(f"F: expected [B, H, K, V], got shape {tuple(F.shape)}")
    transition = Transition.of(F, log_a, cut)
    if sp.world_size == 1:
        return torch.zeros_like(F, memory_format=torch.contiguous_format)
    if sp.schedule not in SCHEDULES:
        raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {sp.schedule!r}")
    with torch.no_grad():
        F = F.contiguous()
        text = stamp(sp, f"state exchange ({'backward' if reverse else 'forward'}, {sp.schedule})", F)
        if sp.schedule == "all_gather":
            return _all_gather(F, transition, sp, reverse, text)
        return _hop(F, transition, sp, reverse, PIECES if sp.schedule == "pipelined" else 1, text)


def _hop(
    F: torch.Tensor, transition: Transition, sp: SequenceParallel, reverse: bool, pieces: int, text: str
) -> torch.Tensor:
    """Receive from one neighbour, apply, send to the other, in ``pieces`` of rows of [B*H*K, V].

    The next piece arrives while the one before it leaves.
    """
    source, target = sp.neighbours(reverse)
    state = torch.zeros_like(F)
    rows = F.shape[:3].numel()
    arriving, leaving = (list(t.view(rows, F.shape[3]).chunk(pieces)) for t in (state, F))
    factor = transition.transpose().factor(F) if reverse else transition.factor(F)
    factors = None if factor is None else factor.expand(*F.shape[:3], 1).reshape(rows, 1).chunk(pieces)
    pending = greet(sp, text, source, target, F)
    for i in range(-1, len(leaving)):
        messages = []
        if i >= 0 and target is not None:
            out = leaving[i]
            if source is not None:
                out = out + (arriving[i] if factors is None else factors[i] * arriving[i])
            messages.append(Message("send", out, target))
        if i + 1 < len(arriving) and source is not None:
            messages.append(Message("recv", arriving[i + 1], source))
        started = post(sp, *messages)
        wait_all(sp, [item for item in started if item.message.op == "recv"])
        pending += [item for item in started if item.message.op == "send"]
    wait_all(sp, pending)
    return state


def _all_gather(
    F: torch.Tensor, transition: Transition, sp: SequenceParallel, reverse: bool, text: str
) -> torch.Tensor:
    """Everybody's (A, F) to everybody, then each rank folds those on its incoming side."""
    factor = transition.factor(F)
    a_shape = (*F.shape[:3], 1) if transition.kind == "vector" else (*F.shape[:2], 1, 1)
    a = torch.ones(a_shape, dtype=F.dtype, device=F.device) if factor is None else factor.expand(a_shape)
    mine = torch.cat([a.reshape(-1), F.reshape(-1)])
    if not F.is_cuda:
        compare_text(sp, text)
    everyone = [torch.empty_like(mine) for _ in range(sp.world_size)]
    with peer_errors(sp, None, "all_gather"):
        dist.all_gather(everyone, mine, group=group_for(sp, mine))
    state = torch.zeros_like(F)
    for r in range(sp.world_size - 1, sp.rank, -1) if reverse else range(sp.rank):
        a_r, F_r = everyone[r].split([a.numel(), F.numel()])
        state = a_r.view(a_shape) * state + F_r.view(F.shape)
    return state
