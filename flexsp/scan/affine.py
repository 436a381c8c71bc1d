"""The rank scan of any affine map S -> A S + F, and the chain for maps that are not: in the linear domain.

For states that PyTorch functions compute. The fused kernel and `scan/exchange.py` carry diagonal decays as logarithms.
"""

from __future__ import annotations

from typing import Any

import torch

from flexsp.comm.derivatives import ON_ONE_RANK, first_only
from flexsp.comm.group import SequenceParallel, get_sp, ranks_call
from flexsp.comm.process_group import Call, Message, begin_call, post, wait_all
from flexsp.comm.signature import Signature, facts_of
from flexsp.scan.schedules import scan_ranks
from flexsp.scan.transitions import Transition

__all__ = ["Relay", "affine_exchange", "dense_over_process_group", "tie"]

_NAME = "a variant whose states travel over ranks"
RELAYED = ("chain", "serial")  # schedules that hand states from rank to rank


def _exchange(
    F: torch.Tensor, A: torch.Tensor, sp: SequenceParallel, dense: bool, reverse: bool, call: str
) -> torch.Tensor:
    """State that arrives here when every rank maps S to A S + F, in reverse to A^T S + F."""
    return scan_ranks(F, Transition.linear(F, A, dense), sp, reverse, call)


def dense_over_process_group(
    states: torch.Tensor, A: torch.Tensor, reverse: bool, sp: SequenceParallel, call: str = ""
) -> None:
    """What `propagate` does with a dense A [B, NSEG, H, K, K], NSEG 0 or 1, over torch.distributed."""
    enters, leaves = (-1, 0) if reverse else (0, -1)
    first = sp.neighbours(reverse)[0] is None
    with torch.autocast(states.device.type, enabled=False):
        if A.shape[1]:
            a, F = A[:, 0], states[:, leaves].clone()
        else:
            F = torch.zeros_like(states[:, 0])
            a = torch.eye(A.shape[-1], device=A.device).expand(A.shape[0], *A.shape[2:])
        through = Transition.linear(F, a.mT if reverse else a, True)
        leaving = through.apply(states[:, enters], F) if first else F
        arrived = _exchange(leaving, a, sp, True, reverse, call)
        if not first:
            states[:, enters] = arrived
            leaving = through.apply(arrived, F)
        if A.shape[1]:
            states[:, leaves] = leaving


class _AffineExchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, F: torch.Tensor, A: torch.Tensor, anchor: torch.Tensor, sp_id: int, dense: bool, call: str
    ) -> torch.Tensor:
        arrived = _exchange(F, A, get_sp(sp_id), dense, False, call)
        ctx.sp_id, ctx.dense, ctx.call = sp_id, dense, call
        ctx.number = get_sp(sp_id).number()
        ctx.save_for_backward(A, arrived)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        first_only(_NAME, ON_ONE_RANK)
        A, arrived = ctx.saved_tensors
        sp = get_sp(ctx.sp_id)
        with sp.answering(ctx.number):
            dF = _exchange(grad, A, sp, ctx.dense, True, ctx.call)
        with torch.autocast(grad.device.type, enabled=False):
            dA = dF @ arrived.mT if ctx.dense else dF * arrived
        return dF, dA, None, None, None, None


@ranks_call
def affine_exchange(
    F: torch.Tensor, A: torch.Tensor, sp: SequenceParallel, anchor: torch.Tensor, *, dense: bool = False, call: str = ""
) -> torch.Tensor:
    """State that enters this rank's shard when every rank maps S to A S + F, differentiable. Collective over ``sp``.

    Args:
        F: [B, H, *state], this shard's state from zero; on the first rank from its initial state.
        A: the shape of F, elementwise; if ``dense`` [B, H, K, K] for states [K, V], and A S is a matrix product. Zero
            where a document starts in the shard.
        anchor: the one that `joined` gives beside the inputs of the call.
        call: the op that needs it, the same text on every rank.

    Returns:
        The shape of F, zeros on the first rank. `tie` it to the output, so that every rank's backward passes here.
    """
    return _AffineExchange.apply(F, A, anchor, sp.id, dense, call)


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(other)
        return o.view_as(o)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, torch.zeros_like(ctx.saved_tensors[0])


def tie(o: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``o``, whose backward pass goes through ``other`` too, since neighbours wait there whether o needs it or not."""
    return _Tie.apply(o, other)


class Relay:
    """States handed from rank to rank by maps that are not affine: each rank starts when its left neighbour is done.

    One object serves one call of the op `call`, the same text on every rank. Neighbours compare it before they start.
    `anchor` is the one that `joined` gives beside the inputs of the call.
    """

    def __init__(self, sp: SequenceParallel, anchor: torch.Tensor, call: str = "") -> None:
        if sp.schedule not in RELAYED:
            raise ValueError(
                f"schedule: expected {' or '.join(RELAYED)} for a variant that is not affine in its state, whose ranks "
                f"can only run one after the other; got {sp.schedule!r}"
            )
        self.sp, self.anchor, self.call = sp, anchor, call
        self._begun: Call | None = None

    def begin(self, like: torch.Tensor, reverse: bool) -> None:
        """Starts to hand states along, from right to left in `reverse`."""
        source, target = self.sp.neighbours(reverse)
        signature = Signature("relay", self.call, facts_of((like,)), "not affine", reverse, self.sp.schedule)
        self._begun = begin_call(self.sp, signature, like, source, target)

    def receive(self, like: torch.Tensor, source: int | None) -> torch.Tensor:
        """The neighbour's state, zeros without one; PeerMismatch where it is in another call."""
        call = self._begun
        assert call is not None
        buffer = call.buffer(like)
        if source is not None:
            wait_all(self.sp, post(self.sp, Message("recv", buffer, source)))
            call.look_at(buffer, source)
        return call.end(call.data(buffer, like))

    def send(self, state: torch.Tensor, target: int | None) -> None:
        """Hands the state of this rank on."""
        assert self._begun is not None
        if target is not None:
            wait_all(self.sp, post(self.sp, Message("send", self._begun.sealed(state), target)))

    def from_left(self, own: torch.Tensor) -> torch.Tensor:
        """The left neighbour's state once it is done; ``own`` on the first rank. Differentiable."""
        return _FromLeft.apply(own, self.anchor, self)

    def to_right(
        self, o: torch.Tensor, final: torch.Tensor | None, leaving: torch.Tensor, arrived: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sends the state that leaves this shard; returns ``o`` and ``final``.

        The backward pass of either waits for the right neighbour, before that of ``arrived`` serves the left one.
        """
        leaving = leaving.to(arrived.dtype).expand(arrived.shape)
        return _ToRight.apply(o, final, leaving, arrived, self.anchor, self)


class _FromLeft(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, anchor: torch.Tensor, relay: Relay) -> torch.Tensor:
        ctx.relay = relay
        relay.begin(own, False)
        source, _ = relay.sp.neighbours(False)
        arrived = relay.receive(own, source)
        return own.clone() if source is None else arrived

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        first_only(_NAME, ON_ONE_RANK)
        source, _ = ctx.relay.sp.neighbours(False)
        if source is None:
            return grad, None, None
        ctx.relay.send(grad, source)
        return torch.zeros_like(grad), None, None


class _ToRight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, o: torch.Tensor, final: torch.Tensor | None, leaving: torch.Tensor, arrived: torch.Tensor,
        anchor: torch.Tensor, relay: Relay,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        ctx.relay, ctx.number = relay, relay.sp.number()
        ctx.save_for_backward(leaving)
        _, target = relay.sp.neighbours(False)
        relay.send(leaving, target)
        return o.view_as(o), None if final is None else final.view_as(final)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, dfinal: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        first_only(_NAME, ON_ONE_RANK)
        (leaving,) = ctx.saved_tensors
        relay = ctx.relay
        with relay.sp.answering(ctx.number):
            relay.begin(leaving, True)
        _, target = relay.sp.neighbours(False)
        return grad, dfinal, relay.receive(leaving, target), torch.zeros_like(leaving), None, None
