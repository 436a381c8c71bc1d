"""The rank scan of any affine map S -> A S + F, and the chain for maps that are not: in the linear domain.

For states that PyTorch functions compute. The fused kernel and `scan/exchange.py` carry diagonal decays as logarithms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from flexsp.comm.group import SequenceParallel, get_sp
from flexsp.comm.process_group import Message, greet, post, stamp, wait_all

__all__ = ["Relay", "affine_exchange", "dense_over_process_group", "tie"]


def _receive(like: torch.Tensor, peer: int | None, sp: SequenceParallel, text: str) -> torch.Tensor:
    state = torch.zeros_like(like, memory_format=torch.contiguous_format)
    if peer is not None:
        greet(sp, text, peer, None, state)
        wait_all(sp, post(sp, Message("recv", state, peer)))
    return state


def _send(state: torch.Tensor, peer: int | None, sp: SequenceParallel, text: str) -> None:
    if peer is not None:
        pending = greet(sp, text, None, peer, state)
        wait_all(sp, pending + post(sp, Message("send", state.contiguous(), peer)))


def _hop(F: torch.Tensor, A: torch.Tensor, sp: SequenceParallel, dense: bool, reverse: bool) -> torch.Tensor:
    """State that arrives here when every rank maps S to A S + F."""
    source, target = sp.neighbours(reverse)
    text = stamp(sp, f"affine scan ({'backward' if reverse else 'forward'})", F, A)
    arrived = _receive(F, source, sp, text)
    _send(F + (A @ arrived if dense else A * arrived), target, sp, text)
    return arrived


def dense_over_process_group(states: torch.Tensor, A: torch.Tensor, reverse: bool, sp: SequenceParallel) -> None:
    """What `propagate` does with a dense A [B, NSEG, H, K, K], NSEG 0 or 1, by send and receive, rank after rank."""
    enters, leaves = (-1, 0) if reverse else (0, -1)
    first = sp.neighbours(reverse)[0] is None
    with torch.autocast(states.device.type, enabled=False):
        if A.shape[1]:
            a, F = A[:, 0].mT if reverse else A[:, 0], states[:, leaves].clone()
        else:
            F = torch.zeros_like(states[:, 0])
            a = torch.eye(A.shape[-1], device=A.device).expand(A.shape[0], *A.shape[2:])
        leaving = a @ states[:, enters] + F if first else F
        arrived = _hop(leaving, a, sp, True, reverse)
        if not first:
            states[:, enters] = arrived
            leaving = a @ arrived + F
        if A.shape[1]:
            states[:, leaves] = leaving


class _AffineExchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, F: torch.Tensor, A: torch.Tensor, anchor: torch.Tensor, sp_id: int, dense: bool
    ) -> torch.Tensor:
        arrived = _hop(F, A, get_sp(sp_id), dense, False)
        ctx.sp_id, ctx.dense = sp_id, dense
        ctx.save_for_backward(A, arrived)
        return arrived

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        A, arrived = ctx.saved_tensors
        dF = _hop(grad.contiguous(), A.mT if ctx.dense else A, get_sp(ctx.sp_id), ctx.dense, True)
        dA = dF @ arrived.mT if ctx.dense else dF * arrived
        return dF, dA, None, None, None


def affine_exchange(F: torch.Tensor, A: torch.Tensor, sp: SequenceParallel, *, dense: bool = False) -> torch.Tensor:
    """State that enters this rank's shard when every rank maps S to A S + F, differentiable. Collective over ``sp``.

    Args:
        F: [B, H, *state], this shard's state from zero; on the first rank from its initial state.
        A: the shape of F, elementwise; if ``dense`` [B, H, K, K] for states [K, V], and A S is a matrix product. Zero
            where a document starts in the shard.

    Returns:
        The shape of F, zeros on the first rank. `tie` it to the output, so that every rank's backward passes here.
    """
    return _AffineExchange.apply(F, A, sp.anchor, sp.id, dense)


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(other)
        return o.view_as(o)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, torch.zeros_like(ctx.saved_tensors[0])


def tie(o: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``o``, whose backward pass goes through ``other`` too, since neighbours wait there whether o needs it or not."""
    return _Tie.apply(o, other)


class Relay:
    """States handed from rank to rank by maps that are not affine: each rank starts when its left neighbour is done.

    One object serves one call; the same text is compared at both ends of a hop.
    """

    def __init__(self, sp: SequenceParallel) -> None:
        self.sp = sp
        self.text = ""

    def from_left(self, own: torch.Tensor) -> torch.Tensor:
        """The left neighbour's state once it is done; ``own`` on the first rank. Differentiable."""
        return _FromLeft.apply(own, self.sp.anchor, self)

    def to_right(
        self, o: torch.Tensor, final: torch.Tensor | None, leaving: torch.Tensor, arrived: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sends the state that leaves this shard; returns ``o`` and ``final``.

        The backward pass of either waits for the right neighbour, before that of ``arrived`` serves the left one.
        """
        leaving = leaving.to(arrived.dtype).expand(arrived.shape)
        return _ToRight.apply(o, final, leaving, arrived, self.sp.anchor, self)


class _FromLeft(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, anchor: torch.Tensor, relay: Relay) -> torch.Tensor:
        ctx.relay = relay
        relay.text = stamp(relay.sp, "relay (forward)", own)
        source, _ = relay.sp.neighbours(False)
        return own.clone() if source is None else _receive(own, source, relay.sp, relay.text)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        source, _ = ctx.relay.sp.neighbours(False)
        if source is None:
            return grad, None, None
        _send(grad, source, ctx.relay.sp, ctx.relay.text)
        return torch.zeros_like(grad), None, None


class _ToRight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, o: torch.Tensor, final: torch.Tensor | None, leaving: torch.Tensor, arrived: torch.Tensor,
        anchor: torch.Tensor, relay: Relay,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        ctx.relay = relay
        ctx.save_for_backward(leaving)
        _, target = relay.sp.neighbours(False)
        _send(leaving, target, relay.sp, relay.text)
        return o.view_as(o), None if final is None else final.view_as(final)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, dfinal: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (leaving,) = ctx.saved_tensors
        relay = ctx.relay
        relay.text = stamp(relay.sp, "relay (backward)", leaving)
        _, target = relay.sp.neighbours(False)
        return grad, dfinal, _receive(leaving, target, relay.sp, relay.text), torch.zeros_like(leaving), None, None
