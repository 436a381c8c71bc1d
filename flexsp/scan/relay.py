"""States under a transition of the kind "sequential": each rank waits for the one before, as nothing composes."""

from __future__ import annotations

from typing import Any

import torch

from flexsp.comm.derivatives import ON_ONE_RANK, first_only
from flexsp.comm.group import SequenceParallel
from flexsp.comm.process_group import Call, Message, begin_call, post, wait_all
from flexsp.comm.signature import Signature, facts_of

__all__ = ["Relay"]

_NAME = "a variant whose states travel over ranks"
RELAYED = ("chain", "serial")  # schedules that hand states from rank to rank


class Relay:
    """Hands states from rank to rank where each rank can only start when its left neighbour is done.

    One object serves one call of the op `call`, the same text on every rank, which neighbours compare first. `anchor`
    is the one that `share_backward` gives beside the inputs of the call.
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
        signature = Signature("relay", self.call, facts_of((like,)), "sequential", reverse, self.sp.schedule)
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
