"""The rank scan as a differentiable op, for engines whose chunk work is plain PyTorch (MATH §0)."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from flexsp.comm.group import SequenceParallel, get_sp
from flexsp.comm.process_group import define_op
from flexsp.scan.schedules import incoming_state
from flexsp.scan.transitions import Transition

__all__ = ["exchange"]


def exchange(
    F: torch.Tensor, log_a: torch.Tensor | None, cut: torch.Tensor | None, sp: SequenceParallel
) -> torch.Tensor:
    """State that enters this rank's shard, differentiable. Collective over ``sp``.

    Args:
        F: [B, H, K, V], the state this shard produces from zero; on the first rank from its initial state.
        log_a: None, [B, H] or [B, H, K], natural log of the shard's total decay.
        cut: None or [B], nonzero where a document starts in this shard (what came before does not pass).

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
    return _ExchangeFunction.apply(F, log_a, cut, sp.anchor, sp.id)


def _run(
    F: torch.Tensor,
    log_a: torch.Tensor | None,
    cut: torch.Tensor | None,
    order: torch.Tensor,
    sp_id: int,
    reverse: bool,
) -> torch.Tensor:
    return incoming_state(F, log_a, cut, get_sp(sp_id), reverse)


def _fake(
    F: torch.Tensor,
    log_a: torch.Tensor | None,
    cut: torch.Tensor | None,
    order: torch.Tensor,
    sp_id: int,
    reverse: bool,
) -> torch.Tensor:
    return F.new_empty(F.shape)


_incoming_state = define_op(
    "incoming_state(Tensor F, Tensor? log_a, Tensor? cut, Tensor(o!) order, int sp_id, bool reverse) -> Tensor",
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
    ) -> torch.Tensor:
        state = _incoming_state(F, log_a, cut, get_sp(sp_id).order, sp_id, False)
        ctx.sp_id = sp_id
        # Saved even where log_a is None: unpacking in backward makes a checkpointed region recompute, on every rank,
        # before this node talks to its neighbours.
        ctx.save_for_backward(state, log_a, cut)
        return state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        state, log_a, cut = ctx.saved_tensors
        dF = _incoming_state(grad, log_a, cut, get_sp(ctx.sp_id).order, ctx.sp_id, True)
        dlog_a = None
        if log_a is not None:
            passed = Transition.of(state, log_a, cut).apply(state)
            dims = (-2, -1) if log_a.dim() == state.dim() - 2 else (-1,)
            dlog_a = (dF * passed).sum(dims).to(log_a.dtype)
        return dF, dlog_a, None, None, None
