"""The rank scan as a differentiable op, for states that PyTorch computes (docs/math.md, section 3)."""

from __future__ import annotations

from typing import Any

import torch

from flexsp.comm.derivatives import ON_ONE_RANK, first_only, untransformed
from flexsp.comm.group import SequenceParallel, get_sp, ranks_call
from flexsp.comm.process_group import define_op
from flexsp.scan.by_kernel import goes_by_kernel, incoming_by_kernel
from flexsp.scan.schedules import incoming_state
from flexsp.scan.transitions import KINDS, Transition

__all__ = ["add_backward_dependency", "exchange"]

_NAME = "the exchange of states between ranks"
Optional = torch.Tensor | None


@ranks_call
def exchange(
    F: torch.Tensor, transition: Transition, sp: SequenceParallel, call: str = "", anchor: Optional = None,
    reverse: bool = False,
) -> torch.Tensor:  # fmt: skip
    """State that enters this rank's shard, differentiable. Collective over ``sp``.

    The kernel of `flexsp.scan.propagate` sends it where `goes_by_kernel` says so, else torch.distributed.

    Args:
        F: [B, H, *state], the state this shard produces from zero; on the first rank from its initial state.
        transition: what the shard does to the state that enters it; of one kind on all ranks. "max-plus" has no
            derivatives: `flexsp.scan.maxima` gives those.
        call: the op that needs it, the same text on every rank.
        anchor: the one that `share_backward` gives beside the inputs of the call. It is needed where F may not depend
            on them.
        reverse: from the last rank to the first, each of which does A^T S + F.

    Returns:
        S_in, the shape of F; on the first rank (on the last one in ``reverse``) zeros, -inf of "max-plus". In grad mode
        the node exists on every rank, even where neither F nor the transition requires grad, because the neighbours'
        backward passes need this rank's answer. Gradients: dF = dS_out, dA = dS_out S_in^T (in ``reverse``
        S_in dS_out^T) and dlog_a = <dS_out, e^{log_a} S_in>; dS_out is what the ranks that S_out reaches send back.
    """
    if sp.world_size == 1:
        return torch.full_like(F, transition.neutral)
    untransformed(_NAME, ON_ONE_RANK)
    t, anchor = transition, sp.anchor if anchor is None else anchor
    if KINDS[t.kind].adjoint != t.kind:
        with torch.no_grad():
            return _incoming_state(F, t.a, t.cut, get_sp(sp.id).order, t.kind, sp.id, reverse, call)
    return _ExchangeFunction.apply(F, t.a, t.cut, anchor, t.kind, sp.id, call, reverse)


def _run(
    F: torch.Tensor, a: Optional, cut: Optional, order: torch.Tensor, kind: str, sp_id: int, reverse: bool,
    call: str,
) -> torch.Tensor:  # fmt: skip
    sp, transition = get_sp(sp_id), Transition(kind, a, cut)
    send = incoming_by_kernel if goes_by_kernel(F, transition, sp) else incoming_state
    return send(F, transition, sp, reverse, call)


def _fake(F: torch.Tensor, *others: Any) -> torch.Tensor:
    return F.new_empty(F.shape)


_incoming_state = define_op(
    "incoming_state(Tensor F, Tensor? a, Tensor? cut, Tensor(o!) order, str kind, int sp_id, bool reverse, "
    "str call) -> Tensor",
    _run,
    _fake,
)


class _ExchangeFunction(torch.autograd.Function):
    """Keeps the sp id: recompute under checkpointing runs without any ambient context, on CUDA on another thread."""

    @staticmethod
    def forward(
        ctx: Any, F: torch.Tensor, a: Optional, cut: Optional, anchor: torch.Tensor, kind: str, sp_id: int,
        call: str, reverse: bool,
    ) -> torch.Tensor:  # fmt: skip
        state = _incoming_state(F, a, cut, get_sp(sp_id).order, kind, sp_id, reverse, call)
        ctx.kind, ctx.sp_id, ctx.call, ctx.reverse, ctx.number = kind, sp_id, call, reverse, get_sp(sp_id).number()
        # Saved even where nothing decays: unpacking in backward makes a checkpointed region recompute, on every rank,
        # before this node talks to its neighbours.
        ctx.save_for_backward(state, a, cut)
        return state

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        first_only(_NAME, ON_ONE_RANK)
        state, *transition = ctx.saved_tensors
        sp = get_sp(ctx.sp_id)
        with sp.answering(ctx.number):
            dF = _incoming_state(grad, *transition, sp.order, ctx.kind, ctx.sp_id, not ctx.reverse, ctx.call)
        with torch.autocast(grad.device.type, enabled=False):
            da = Transition(ctx.kind, *transition).gradient(state, dF, ctx.reverse)
        return dF, da, None, None, None, None, None, None


class _BackwardDependency(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(other)
        return o.view_as(o)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, torch.zeros_like(ctx.saved_tensors[0])


def add_backward_dependency(o: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``o``, whose backward pass goes through ``other`` too, since neighbours wait there whether o needs it or not."""
    return _BackwardDependency.apply(o, other)
