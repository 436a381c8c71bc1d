"""The exclusive scan of (A, F) over ranks of several hosts, in which every network card carries its part.

The ranks of one host stand next to each other in the sequence. The rows of the state, or the heads where A is dense,
are cut into *shares*. One rank of each host owns a share, and the owners of the same share on all hosts stand at the
same place in their hosts, so that each of them may use a network card of its own. For a share:

1. Every rank of a host sends its (A, F) of the share to the owner there, which composes them in order.
2. The owners of the share on all hosts scan what their hosts do, in log2(hosts) steps: with step d a host sends what
   it and the d - 1 hosts before it do to the host d further on.
3. The owner works out the states that enter the ranks of its host, and sends each rank its own.

Large shares are cut into pieces. A piece is one step behind the piece before it, so that one piece travels between
hosts while the next one is gathered inside them. All messages that may proceed together are one step, the same on all
ranks: so a rank never waits for a message that its sender would start only later.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from flexsp.comm.group import SequenceParallel
from flexsp.comm.process_group import Call, Message
from flexsp.comm.steps import Step, Steps
from flexsp.scan.composing import applied, composed
from flexsp.scan.transitions import Transition

__all__ = ["MOST_PIECES", "PIECE_BYTES", "hierarchical", "pieces_of"]

MOST_PIECES = 8
PIECE_BYTES = 1 << 19  # of a piece of a share at least: a network card sends them in about the latency of a message


def pieces_of(nbytes: float) -> int:
    """How many pieces a share of `nbytes` bytes is cut into."""
    return max(1, min(MOST_PIECES, int(nbytes // PIECE_BYTES)))


class _Place(NamedTuple):
    """Where a rank stands, in the direction of the scan.

    Attributes:
        local: the ranks of this host.
        at: place of this host among the hosts.
        starts: of each host, the lowest rank. The ranks from there on own the shares, one each.
        shares: how many there are.
        share: that this rank owns, None where it owns none.
    """

    local: list[int]
    at: int
    starts: list[int]
    shares: int
    share: int | None


@functools.lru_cache(maxsize=64)
def _place(hosts: tuple[int, ...], rank: int, reverse: bool) -> _Place:
    starts, shares = [0, *itertools.accumulate(hosts)], min(hosts)
    at = bisect.bisect_right(starts, rank) - 1
    local = list(range(starts[at], starts[at + 1]))
    share = rank - starts[at] if rank - starts[at] < shares else None
    if not reverse:
        return _Place(local, at, starts[:-1], shares, share)
    return _Place(local[::-1], len(hosts) - 1 - at, starts[-2::-1], shares, share)


def hierarchical(
    F: torch.Tensor, transition: Transition, sp: SequenceParallel, reverse: bool, call: Call
) -> Steps[torch.Tensor]:
    """The messages of this schedule, and the state that arrives."""
    place = _place(sp.hosts, sp.rank, reverse)
    shares = place.shares
    packed = transition.packed(F, shares)
    pieces = min(pieces_of(packed.numel() * packed.element_size() / shares), max(1, len(packed) // shares))
    parts = packed.tensor_split(shares * pieces)
    cuts = range(0, len(parts), shares)
    runs = [_piece(parts[i : i + shares], transition, sp.rank, place, call) for i in cuts]
    arrived = yield from _one_behind_another(runs)
    if place.at == 0 and sp.rank == place.local[0]:
        return call.end(torch.full_like(F, transition.neutral))
    return call.end(transition.unpacked(torch.cat(arrived) if pieces > 1 else arrived[0], F.shape))


def _one_behind_another(runs: Sequence[Steps[torch.Tensor]]) -> Steps[list[torch.Tensor]]:
    """Generators side by side, each one step behind the one before it; what they start together is one step."""
    results: dict[int, torch.Tensor] = {}
    running: dict[int, Steps[torch.Tensor]] = {}
    sent: list[Message] = []
    for tick in itertools.count():
        if tick < len(runs):
            running[tick] = runs[tick]
        if not running:
            break
        messages: list[Message] = []
        until: list[Message] = []
        for i, run in list(running.items()):
            try:
                step = next(run)
            except StopIteration as end:
                results[i] = end.value
                del running[i]
            else:
                assert isinstance(step, Step)
                messages += step.messages
                until += step.until
        if messages:
            yield Step(tuple(messages), tuple(until))
            sent += [message for message in messages if message.op == "send"]
    yield Step(until=tuple(sent))
    return [results[i] for i in range(len(runs))]


def _piece(
    mine: Sequence[torch.Tensor], transition: Transition, rank: int, place: _Place, call: Call
) -> Steps[torch.Tensor]:
    """One piece of every share; ``mine`` is what this rank does to them, packed. As many steps on every rank.

    Returns the states of all shares that enter this rank; nothing on the first rank of all.
    """
    local, start = place.local, place.starts[place.at]
    owners = range(start, start + place.shares)
    own = None if place.share is None else mine[place.share]
    others = [(part, owner) for part, owner in zip(mine, owners, strict=True) if owner != rank]
    # To the owners
    peers = [] if own is None else [r for r in local if r != rank]
    arrived = yield from _exchange(call, others, [(own, r) for r in peers if own is not None])
    upto: torch.Tensor | None = None  # what the ranks of the host up to each one do, packed
    if own is not None:
        parts = dict(zip(peers, arrived, strict=True)) | {rank: own}
        upto = _running([parts[r] for r in local], transition)
    entering = yield from _between_hosts(None if upto is None else upto[-1], transition, place, call)
    # From the owners
    first = local[0] if place.at == 0 else None
    states: dict[int, torch.Tensor] = {}
    if upto is not None and entering is None:
        states = dict(zip(local[1:], transition.in_packed(upto[:-1])[1], strict=True))
    elif upto is not None and entering is not None:
        states = dict(zip(local, [entering, *applied(transition, upto[:-1], entering)], strict=True))
    leaving = [(state, r) for r, state in states.items() if r != rank]
    wanted = [] if rank == first else [(transition.in_packed(part)[1], owner) for part, owner in others]
    arrived = yield from _exchange(call, leaving, wanted)
    if rank == first:
        return mine[0]
    found = dict(zip([owner for _, owner in others], arrived, strict=True))
    return torch.cat([states[rank] if owner == rank else found[owner] for owner in owners])


def _running(parts: Sequence[torch.Tensor], transition: Transition) -> torch.Tensor:
    """What each of the parts and those before it do, [parts, ...]."""
    upto, d = torch.stack([*parts]), 1
    while d < len(parts):
        upto = torch.cat([upto[:d], composed(transition, upto[d:], upto[:-d])])
        d *= 2
    return upto


def _between_hosts(
    through: torch.Tensor | None, transition: Transition, place: _Place, call: Call
) -> Steps[torch.Tensor | None]:
    """The state that enters this host, of the share that this rank owns: None on the first host, and without a share.

    ``through`` is what the host does, packed; None without a share.
    """
    at, hosts = place.at, len(place.starts)
    leaving: torch.Tensor | None = None  # once nothing is missing before it, the state that leaves this host
    entering: torch.Tensor | None = None
    heard: torch.Tensor | None = None  # what the hosts before this one do, as far as heard of, and with this one behind
    if through is not None and at == 0:
        leaving = transition.in_packed(through)[1]
    for step in range((hosts - 1).bit_length()):
        d = 1 << step
        sends, receives = [], []
        if through is not None and place.share is not None:
            if at + d < hosts:
                sends = [(through if leaving is None else leaving, place.starts[at + d] + place.share)]
            if at >= d:
                state = transition.in_packed(through)[1]
                receives = [(state if at < 2 * d else through, place.starts[at - d] + place.share)]
        arrived = yield from _exchange(call, sends, receives)
        if not arrived or through is None:
            continue
        if at < 2 * d:
            if heard is None:
                entering, leaving = arrived[0], applied(transition, through, arrived[0])
            else:
                entering, leaving = applied(transition, heard, arrived[0])
        else:
            if heard is None:
                heard = torch.stack([arrived[0], composed(transition, through, arrived[0])])
            else:
                heard = composed(transition, heard, arrived[0])
            through = heard[1]
    return entering


def _exchange(
    call: Call, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
) -> Steps[list[torch.Tensor]]:
    """One step: tensors to ranks, and from ranks what looks like these tensors. Nothing is sent of empty ones."""
    sends = [(x, peer) for x, peer in sends if x.numel()]
    sealed = call.all_sealed([x for x, _ in sends])
    leaving = [Message("send", message, peer) for message, (_, peer) in zip(sealed, sends, strict=True)]
    buffers = call.buffers([like for like, _ in receives])
    until = [Message("recv", x, peer) for x, (like, peer) in zip(buffers, receives, strict=True) if like.numel()]
    yield Step((*leaving, *until), tuple(until))
    for message in until:
        call.look_at(message.buffer, message.peer)
    return [call.data(buffer, like) for buffer, (like, _) in zip(buffers, receives, strict=True)]
