"""The rank scan as a differentiable op, for engines whose chunk work is plain PyTorch (docs/math.md, section 3)."""

from __future__ import annotations

from typing import Any

import torch

from flexsp.comm.derivatives import ON_ONE_RANK, first_only, untransformed
from flexsp.comm.group import SequenceParallel, get_sp, ranks_call
from flexsp.comm.process_group import define_op
from flexsp.scan.schedules import incoming_state
from flexsp.scan.transitions import Transition, times

__all__ = ["exchange"]

_NAME = "the exchange of states between ranks"


@ranks_call
def exchange(
    F: torch.Tensor, log_a: torch.Tensor | None, cut: torch.Tensor | None, sp: SequenceParallel, call: str = ""
) -> torch.Tensor:
    """State that enters this rank's shard, differentiable. Collective over ``sp``.

    Args:
        F: [B, H, K, V], the state this shard produces from zero; on the first rank from its initial state.
        log_a: None, [B, H] or [B, H, K], natural log of the shard's total decay.
        cut: None or [B], nonzero where a document starts in this shard (what came before does not pass).
        call: the op that needs it, the same text on every rank.

    Returns:
        S_in [B, H, K, V], zeros on the first rank. In grad mode the node exists on every rank, even where neither F nor
        log_a requires grad, because the neighbours' backward passes need this rank's answer. Gradients:
        dF = dS_out and dlog_a = <dS_out, e^{log_a} S_in> with dS_out what the later ranks send back.
    """
    if F.dim() != 4:
        raise ValueError(f"F: expected [B, H, K, V], got shape {tuple(F.shape)}")
    Transition.of(F, log_a, cut)
    if sp.world_size == 1:
        return torch.zeros_like(F)
    untransformed(_NAME, ON_ONE_RANK)
    return _ExchangeFunction.apply(F, log_a, cut, sp.anchor, sp.id, call)


def _run(
    F: torch.Tensor,
    log_a: torch.Tensor | None,
    cut: torch.Tensor | None,
    order: torch.Tensor,
    sp_id: int,
    reverse: bool,
    call: str,
) -> torch.Tensor:
    return incoming_state(F, log_a, cut, get_sp(sp_id), reverse, call)


def _fake(
    F: torch.Tensor,
    log_a: torch.Tensor | None,
    cut: torch.Tensor | None,
    order: torch.Tensor,
    sp_id: int,
    reverse: bool,
    call: str,
) -> torch.Tensor:
    return F.new_empty(F.shape)


_incoming_state = define_op(
    "incoming_state(Tensor F, Tensor? log_a, Tensor? cut, Tensor(o!) order, int sp_id, bool reverse, str call)"
    " -> Tensor",
    _run,
    _fake,
)


class _ExchangeFunction(torch.autograd.Function):
    """Keeps the sp id: recompute under checkpointing runs without any ambient context, on CUDA on another thread."""

    @staticmethod
    def forward(
        ctx: Any,
        F: torch.Tensor,
        log_a: torch.Tensor | None,
        cut: torch.Tensor | None,
        anchor: torch.Tensor,
        sp_id: int,
        call: str,
    ) -> torch.Tensor:
        state = _incoming_state(F, log_a, cut, get_sp(sp_id).order, sp_id, False, call)
        ctx.sp_id, ctx.call, ctx.number = sp_id, call, get_sp(sp_id).number()
        # Saved even where log_a is None: unpacking in backward makes a checkpointed region recompute, on every rank,
        # before this node talks to its neighbours.
        ctx.save_for_backward(state, log_a, cut)
        return state

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        first_only(_NAME, ON_ONE_RANK)
        state, log_a, cut = ctx.saved_tensors
        sp = get_sp(ctx.sp_id)
        with sp.answering(ctx.number):
            dF = _incoming_state(grad, log_a, cut, sp.order, ctx.sp_id, True, ctx.call)
        dlog_a = None
        if log_a is not None:
            passed = Transition.of(state, log_a, cut).apply(state)
            dims = (-2, -1) if log_a.dim() == state.dim() - 2 else (-1,)
            dlog_a = times(passed, dF).sum(dims).to(log_a.dtype)
        return dF, dlog_a, None, None, None, None
