"""Calls in PyTorch, on any device: a step computes their chunks, and all else is here.

A step says what each chunk does to the state, and makes outputs of the states that enter. In between, states go from
chunk to chunk and from rank to rank, and documents begin and end. Autograd differentiates all of it.

What is not finite stays in its document: where nothing passes, a state is replaced by zeros and never multiplied by
zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from flexsp.comm.group import SequenceParallel
from flexsp.exceptions import NotAvailable
from flexsp.scan.chunks import Turned, states_between
from flexsp.scan.transitions import Transition

__all__ = ["Documents", "Frames", "States", "Step", "final_states", "run", "states_of"]

Optional = torch.Tensor | None
States = tuple[torch.Tensor, torch.Tensor]
"""What enters the chunks, [B, H, chunks, *state], and what is before and after all of them, [B, H, chunks + 1, *state]:
the same but for starts of documents, before which the latter has what the chunks before leave."""


class Frames(NamedTuple):
    """How ranks exchange states: in a frame that is not that of the shard.

    Attributes:
        sent: a shard's last state [B, H, *state] as it is sent.
        taken: a state that arrived, as it enters the shard.
    """

    sent: Callable[[torch.Tensor], torch.Tensor]
    taken: Callable[[torch.Tensor], torch.Tensor]


class Documents(NamedTuple):
    """Packed tokens: the `chunk_table` of their chunks, and how many documents there are over all ranks."""

    table: torch.Tensor
    n: int


class Step(Protocol):
    """The chunks of one call."""

    def states(self, initial: Optional) -> Callable[[torch.Tensor], States]:
        """States of the one that enters the shard; `initial` are those of documents."""

    def through(self) -> Transition:
        """The transition of all chunks together; "sequential" if chunks do not compose: ranks then run one by one."""

    def merge(self, entering: torch.Tensor) -> torch.Tensor:
        """Outputs [B, T, H, V] of the states that enter the chunks."""


def states_of(
    A: Optional, F: torch.Tensor, initial: Optional, documents: Documents | None, turned: Turned | None = None
) -> Callable[[torch.Tensor], States]:  # fmt: skip
    """`Step.states` of A and F as `states_between` takes them, but for F, which is to be turned, too."""
    cut = begun = elsewhere = None
    if documents is not None:
        cut = documents.table[:, 3].bool()
        elsewhere = ~cut.view(-1, *[1] * (F.dim() - 3))
        if initial is not None:
            begun = initial.index_select(0, documents.table[:, 2]).transpose(0, 1).unsqueeze(0)
            begun = begun.masked_fill(elsewhere, 0.0)
            F = F + (begun if A is None else A * begun)
    F = F if turned is None else turned.turn(F, turned.angles)

    def found(entering: torch.Tensor) -> States:
        around = states_between(A, F, entering, cut, turned=turned)
        before = around[:, :, :-1]
        if elsewhere is not None:
            before = before.masked_fill(~elsewhere, 0.0)
        return before if begun is None else before + begun, around

    return found


def run(
    step: Step, zero: torch.Tensor, initial: Optional, documents: Documents | None, sp: SequenceParallel | None,
    anchor: Optional, call: str, want_final: bool = True, frames: Frames | None = None,
) -> tuple[torch.Tensor, Optional]:  # fmt: skip
    """Outputs, and the final states [N, H, *state] or None.

    Args:
        zero: a state [B, H, *state].
        initial: [N, H, *state], None for zeros.
        documents: None for tokens that are not packed.
        anchor: the one that `share_backward` gives beside the inputs of a call over ranks.
        call: what ranks compare of the call.
        frames: None where states are exchanged as they are; not with "sequential" transitions.
    """
    if sp is not None and sp.segment:
        raise NotAvailable(f"{call}: bitwise is not available for calls in PyTorch that are not cut into segments")
    ends, own = (sp is None or sp.is_last), initial if documents is None and (sp is None or sp.is_first) else None
    entering, of_documents = zero if own is None else own, None if documents is None else initial
    states = step.states(of_documents)
    if sp is None or sp.world_size == 1:
        before, around = states(entering)
        return step.merge(before), _final(around, documents, ends) if want_final else None
    from flexsp.scan.exchange import add_backward_dependency, exchange
    from flexsp.scan.relay import Relay

    assert anchor is not None
    transition = step.through()
    relay = Relay(sp, anchor, call) if transition.kind == "sequential" else None
    if relay is None:
        mine = states(entering)[1][:, :, -1]
        arrived = exchange(mine if frames is None else frames.sent(mine), transition, sp, call, anchor)
        entering = entering + (arrived if frames is None else frames.taken(arrived))
    else:
        arrived = entering = relay.from_left(entering)
    before, around = states(entering)
    o, final = step.merge(before), _final(around, documents, ends) if want_final else None
    if relay is not None:
        return relay.to_right(o, final, around[:, :, -1], arrived)
    for other in (arrived, of_documents):  # neither may reach this rank's tokens
        if other is not None:
            o = add_backward_dependency(o, other)
            final = None if final is None else add_backward_dependency(final, other)
    return o, final


def _final(around: torch.Tensor, documents: Documents | None, ends: bool) -> Optional:
    return final_states(around, documents) if ends or documents is not None else None


def final_states(around: torch.Tensor, documents: Documents | None) -> torch.Tensor:
    """The last of states before and after all chunks, or those after the ends of documents [N, H, *state]."""
    if documents is None:  # no part of all states, which would stay
        return around[:, :, -1].clone()
    table, n = documents
    slot = torch.arange(1, table.shape[0] + 1, device=table.device)
    ended = torch.where(table[:, 4] > 0, table[:, 2].to(torch.int64), n)
    after = torch.zeros(n + 1, dtype=torch.int64, device=table.device).scatter(0, ended, slot)[:n]
    found = around[0].index_select(1, after).transpose(0, 1)
    return found.masked_fill((after == 0).view(-1, *[1] * (found.dim() - 1)), 0.0)
