"""Calls whose bits do not depend on how a sequence is cut over ranks.

The sequence is cut into segments of as many tokens, wherever the ranks' shards begin and end. A segment is a call of
its own on one rank, of the same sizes on whichever rank it is, and its tensors are contiguous. The state that leaves a
segment is the initial state of the next one, which may be on the next rank. So every rank computes what one rank would
have computed, in the same order, and ranks work one after the other.

The gradient of a parameter, which all segments share, is the sum of what they give, from the last segment to the
first. What a rank has summed up goes on to the rank before it, so that the first rank has the whole sum; the others
have zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flexsp.comm.derivatives import ON_ONE_RANK, first_only, untransformed
from flexsp.comm.group import SequenceParallel
from flexsp.scan.exchange import add_backward_dependency
from flexsp.scan.relay import Relay

__all__ = [
    "NAME", "Arguments", "Segment", "begin_segments", "from_message", "in_one_message", "join_segments",
    "look_for_order", "owned", "rows_joined", "rows_of", "run_in_order", "save_for_order", "segments_of",
    "sum_of_segments",
]  # fmt: skip

Tensors = Sequence[torch.Tensor]
Named = dict[str, torch.Tensor]
Optional = torch.Tensor | None
NAME = "calls over ranks that keep their bits (bitwise)"
_WORD = 8  # bytes: messages are float64 numbers, whatever lies in them


class Segment(NamedTuple):
    """Tokens [start, stop) of the sequence, and on which rank they are from ``start - begin`` to ``stop - begin``.

    Attributes:
        last: it is the last one of the last rank.
    """

    start: int
    stop: int
    begin: int
    last: bool


class Arguments(NamedTuple):
    """What the call of one segment is given.

    Attributes:
        tokens, shared: tensors by name.
        states: the states that enter, None for none; of all documents if they are packed.
        bounds: of documents, counted from the segment's first token.
        entered: whether something enters: of one sequence a flag, of documents [N], which of them.
    """

    tokens: Mapping[str, torch.Tensor]
    shared: Mapping[str, torch.Tensor]
    states: list[torch.Tensor] | None
    bounds: Optional
    entered: Any


Call = Callable[[Arguments], tuple[torch.Tensor, list[torch.Tensor]]]
"""A call on this rank alone, of one segment: outputs, and all final states."""


def segments_of(sp: SequenceParallel, lengths: Sequence[int], what: str) -> list[Segment]:
    """This rank's segments, of shards of these lengths.

    Raises:
        ValueError: a shard begins or ends inside of a segment, on all ranks alike.
    """
    size, at = sp.segment, 0
    for rank, length in enumerate(lengths):
        if length and at % size:
            raise ValueError(
                f"{what}: with bitwise expected shards of whole segments of {size} tokens, but for the end of the "
                f"sequence; rank {rank} begins at token {at}, with shards of {lengths}"
            )
        at += length
    begin = sum(lengths[: sp.rank])
    stop = begin + lengths[sp.rank]
    return [
        Segment(start, min(start + size, stop), begin, sp.is_last and start + size >= stop)
        for start in range(begin, stop, size)
    ]


def run_in_order(
    call: Call, what: str, sp: SequenceParallel, tokens: Mapping[str, torch.Tensor],
    shared: Mapping[str, torch.Tensor], states: list[torch.Tensor] | None, cu_seqlens: Optional, axis: int = 1,
) -> tuple[torch.Tensor, list[torch.Tensor] | None]:  # fmt: skip
    """Outputs of this rank's tokens, and final states: of documents, or of one sequence on the last rank.

    Args:
        what: the op, the same text on every rank.
        tokens: with rows of tokens along ``axis``. The first one has a row a token; others may have several.
        shared: parameters, which are the same on all ranks. The first rank gets their gradients.
        states: initial states [N, ...], None for zeros. Of one sequence the first rank gives them.
    """
    untransformed(f"{what}: {NAME}", ON_ONE_RANK)
    T = next(iter(tokens.values())).shape[axis]
    lengths = sp.lengths_for(T)
    segments = segments_of(sp, lengths, what)
    without = {name: x.narrow(axis, 0, 0) for name, x in tokens.items()}
    with torch.no_grad():  # looks of outputs and states; and the op refuses bad arguments before anything is sent
        bounds = None if cu_seqlens is None else torch.zeros_like(cu_seqlens)
        no_output, likes = call(Arguments(without, shared, states, bounds, False))
    packed = cu_seqlens is not None
    if sp.is_last and not segments and (packed or not sum(lengths)):
        # Documents without tokens behind all tokens, or a sequence of none: what the op does to states without a token.
        segments = [Segment(sum(lengths), sum(lengths), sum(lengths), True)]
    likes = [x[:1] for x in likes] if packed else likes
    chained = sp.world_size > 1
    relays = [Relay(sp, sp.anchor, f"{what} in segments of {sp.segment}{end}") for end in ("", ", parameters")]
    anchor, cut, copies, begun = begin_segments(relays[1], segments, tokens, shared, states, packed, axis)
    entering: Any = begun[0] if states is not None and not packed else None
    if chained:
        own = entering if entering is not None else [x.new_zeros(x.shape) for x in likes]
        arrived = _EnterFunction.apply(relays[0], anchor, *own)
        # The first segment of all has what the caller gave, or nothing; a rank without tokens has to pass something on.
        entering = entering if sp.is_first and segments else list(arrived)
    documents = None if cu_seqlens is None else _Documents(cu_seqlens, likes)
    outputs = []
    for i, segment in enumerate(segments):
        if documents is None:
            given = Arguments(cut[i], copies[i], entering, None, entering is not None and segment.start > 0)
        else:
            given = documents.enter(cut[i], copies[i], entering, begun[i] if begun else None, segment)
        o, found = call(given)
        outputs.append(o)
        found = list(_EdgeFunction.apply(anchor, *found))
        entering = found if documents is None else documents.leave(found, segment)
    o = join_segments(outputs, axis) if outputs else no_output
    final = entering if documents is None else documents.final
    if not chained:
        # Over ranks the last states have gradients of zeros where the caller has none. With none ops would add up other
        # parts of gradients than with zeros.
        for x in entering or []:
            o = add_backward_dependency(o, x) if x.requires_grad else o
        return o, final
    leaving = entering if entering is not None else [x.new_zeros(x.shape) for x in likes]
    returned = final if packed or sp.is_last else []
    o, *last = _LeaveFunction.apply(relays[0], len(leaving), anchor, *leaving, o, *(returned or []))
    return o, last if packed or sp.is_last else None


# The ends of a rank ------------------------------------------------------------------------------------------------


def begin_segments(
    relay: Relay, segments: list[Segment], tokens: Mapping[str, torch.Tensor], shared: Mapping[str, torch.Tensor],
    states: list[torch.Tensor] | None, packed: bool, axis: int, reach: int = 0,
) -> tuple[torch.Tensor, list[Named], list[Named], list[list[torch.Tensor]]]:  # fmt: skip
    """(anchor, tokens of each segment, parameters for each, initial states for each: of one sequence for the first).

    Args:
        reach: the number of rows before its own that each segment is given too. Tokens have as many before the first.
    """
    n, initial = len(segments), states or []
    plan = _Plan(relay, segments, axis, len(tokens), len(shared), n if packed else 1, reach)
    found = iter(_BeginFunction.apply(plan, relay.anchor, *tokens.values(), *shared.values(), *initial))
    anchor = next(found)
    cut: list[Named] = [{} for _ in segments]
    copies: list[Named] = [{} for _ in segments]
    for names, places in ((tokens, cut), (shared, copies)):
        for name in names:
            for place in places:
                place[name] = next(found)
    begun: list[list[torch.Tensor]] = [[] for _ in range(plan.starts)]
    for _ in initial:
        for states_of in begun:
            states_of.append(next(found))
    return anchor, cut, copies, begun if initial else []


class _Plan(NamedTuple):
    """How `_BeginFunction` spreads its tensors: tokens, then parameters, by their numbers, then states, `starts` times.

    `reach` is that of `begin_segments`.
    """

    relay: Relay
    segments: list[Segment]
    axis: int
    tokens: int
    shared: int
    starts: int
    reach: int


class _BeginFunction(torch.autograd.Function):
    """Every segment's own tensors. The gradients of what segments share are summed up from the last one to the first.

    All paths of gradients lead here, as in `flexsp.comm.derivatives.share_backward`.
    """

    @staticmethod
    def forward(ctx: Any, plan: _Plan, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.likes, ctx.shapes = plan, [x.new_empty(0) for x in tensors], [x.shape for x in tensors]
        made = [anchor.view_as(anchor)]
        for i, x in enumerate(tensors):
            if i < plan.tokens:
                made += [owned(x.narrow(*rows_of(x, s, plan.segments, plan.axis, plan.reach))) for s in plan.segments]
            elif i < plan.tokens + plan.shared:
                one = owned(x)
                made += [one.view_as(one) for _ in plan.segments]
            else:
                made += [owned(x) for _ in range(plan.starts)]
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, _: Any, *grads: Optional) -> tuple[Any, ...]:
        first_only(NAME, ON_ONE_RANK)
        plan, at = ctx.plan, 0
        found: list[torch.Tensor] = []
        parts: list[Sequence[Optional]] = []
        sums: list[torch.Tensor] = []
        for i, (like, shape) in enumerate(zip(ctx.likes, ctx.shapes, strict=True)):
            some = grads[at : at + _copies(plan, i)]
            at += len(some)
            if i < plan.tokens:
                found.append(rows_joined(like, shape, some, plan.segments, plan.axis, plan.reach))
            else:
                sums.append(like.new_zeros(shape, dtype=torch.promote_types(like.dtype, torch.float32)))
                parts.append(some)
        shared = sum_of_segments(plan.relay, sums[: plan.shared], parts[: plan.shared])
        own = [_added(x, some) for x, some in zip(sums[plan.shared :], parts[plan.shared :], strict=True)]
        sums = [x.to(like.dtype) for x, like in zip([*shared, *own], ctx.likes[plan.tokens :], strict=True)]
        return None, None, *found, *sums


def _copies(plan: _Plan, i: int) -> int:
    return len(plan.segments) if i < plan.tokens + plan.shared else plan.starts


def rows_of(
    x: torch.Tensor, segment: Segment, segments: Sequence[Segment], axis: int, reach: int = 0
) -> tuple[int, int, int]:  # fmt: skip
    """The axis of x, the first row of a segment's tokens, and how many there are: arguments of `narrow`. `reach` rows
    before them are among these."""
    T = segments[-1].stop - segment.begin
    every = (x.shape[axis] - reach) // max(T, 1)
    return axis, (segment.start - segment.begin) * every, (segment.stop - segment.start) * every + reach


def rows_joined(
    like: torch.Tensor, shape: torch.Size, grads: Sequence[Optional], segments: Sequence[Segment], axis: int,
    reach: int = 0,
) -> torch.Tensor:  # fmt: skip
    """The gradient of all tokens of those of segments; None is zeros. Rows that two segments were given have a sum."""
    whole = like.new_zeros(shape)
    for dx, segment in zip(grads, segments, strict=True):
        if dx is not None:
            mine = whole.narrow(*rows_of(whole, segment, segments, axis, reach))
            mine.copy_(dx) if reach == 0 else mine.add_(dx)
    return whole


def sum_of_segments(relay: Relay, zeros: Tensors, parts: Sequence[Sequence[Optional]]) -> list[torch.Tensor]:
    """For each parameter the sum of what segments gave, from the last one to the first, over all ranks. Collective.

    The first rank returns it, the others `zeros`, in whose dtype it is summed up.
    """
    sums, chained = [*zeros], relay.sp.world_size > 1 and len(zeros) > 0
    source, target = relay.sp.neighbours(True)
    if chained:
        message = in_one_message(zeros)
        relay.begin(message, True)
        sums = from_message(relay.receive(message, source), zeros)
    sums = [_added(x, some) for x, some in zip(sums, parts, strict=True)]
    if chained:
        relay.send(in_one_message(sums), target)
    return sums if target is None else [*zeros]


def _added(x: torch.Tensor, parts: Sequence[Optional]) -> torch.Tensor:
    for dx in reversed(parts):
        if dx is not None:
            x = x + dx.to(x.dtype)
    return x


class _EdgeFunction(torch.autograd.Function):
    """States between two segments, and their gradients, as they would lie if they came from another rank."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple([owned(x) for x in states])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Optional, ...]:
        return None, *[owned(x) for x in grads]


def join_segments(parts: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    """Outputs of all segments, one behind the other."""
    return _JoinFunction.apply(axis, *parts)  # type: ignore[no-any-return]


class _JoinFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: int, *parts: torch.Tensor) -> torch.Tensor:
        ctx.axis, ctx.sizes = axis, [x.shape[axis] for x in parts]
        return torch.cat(parts, axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Optional, ...]:
        return None, *[owned(x) for x in grad.split(ctx.sizes, ctx.axis)]


class _EnterFunction(torch.autograd.Function):
    """The states that the rank before hands on; on the first one `own`. Backward it hands their gradients back."""

    @staticmethod
    def forward(ctx: Any, relay: Relay, anchor: torch.Tensor, *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.relay, packed = relay, in_one_message(own)
        relay.begin(packed, False)
        source, _ = relay.sp.neighbours(False)
        arrived = relay.receive(packed, source)
        return tuple([owned(x) for x in (own if source is None else from_message(arrived, own))])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Optional, ...]:
        source, _ = ctx.relay.sp.neighbours(False)
        ctx.relay.send(in_one_message(grads), source)
        return None, None, *(grads if source is None else [None] * len(grads))


class _LeaveFunction(torch.autograd.Function):
    """Hands states on to the next rank. Backward, from any of the outputs, it waits for their gradients."""

    @staticmethod
    def forward(
        ctx: Any, relay: Relay, n: int, anchor: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.relay, ctx.number, states, through = relay, relay.sp.number(), tensors[:n], tensors[n:]
        save_for_order(ctx, anchor)
        ctx.likes = [x.new_empty(()).expand(x.shape) for x in states]
        _, target = relay.sp.neighbours(False)
        relay.send(in_one_message(states), target)
        return tuple([x.view_as(x) for x in through])

    @staticmethod
    def backward(ctx: Any, *grads: Optional) -> tuple[Any, ...]:
        first_only(NAME, ON_ONE_RANK)
        look_for_order(ctx)
        relay, likes = ctx.relay, ctx.likes
        packed = in_one_message([x.contiguous() for x in likes])
        with relay.sp.answering(ctx.number):
            relay.begin(packed, True)
        _, target = relay.sp.neighbours(False)
        arrived = relay.receive(packed, target)
        states = [None] * len(likes) if target is None else [owned(x) for x in from_message(arrived, likes)]
        return None, None, None, *states, *grads


def save_for_order(ctx: Any, *tensors: torch.Tensor) -> None:
    """Saves tensors, at least one. Checkpointed code is computed again where its first saved tensor is looked at: on a
    rank without tokens too that must be before the messages of the backward pass."""
    ctx.save_for_backward(*(tensors or (torch.empty(0),)))


def look_for_order(ctx: Any) -> Tensors:
    """What `save_for_order` saved. First statement of a backward pass that sends messages, or leads to some."""
    return ctx.saved_tensors  # type: ignore[no-any-return]


def owned(x: torch.Tensor) -> torch.Tensor:
    """In memory of its own, contiguous: how numbers lie can decide in which order they are summed up."""
    return x.clone(memory_format=torch.contiguous_format)


def in_one_message(tensors: Tensors) -> torch.Tensor:
    """All of them in one message."""
    parts = []
    for x in tensors:
        body = x.detach().contiguous().view(-1).view(torch.uint8)
        parts += [body, body.new_zeros(-body.numel() % _WORD)]
    return torch.cat(parts).view(torch.float64)


def from_message(message: torch.Tensor, likes: Tensors) -> list[torch.Tensor]:
    found, at, content = [], 0, message.contiguous().view(torch.uint8)
    for like in likes:
        size = math.prod(like.shape) * like.dtype.itemsize
        found.append(content[at : at + size].view(like.dtype).view(like.shape))
        at += size + -size % _WORD
    return found


# Documents ---------------------------------------------------------------------------------------------------------


class _Documents:
    """States of packed documents, of which one at most goes on from segment to segment.

    Attributes:
        final: the states behind the documents that end in the segments so far, zeros of the others.
    """

    def __init__(self, bounds: torch.Tensor, likes: Tensors) -> None:
        self.begin, self.end = bounds[:-1].to(torch.int64), bounds[1:].to(torch.int64)
        self.none = [x.new_zeros(len(self.begin), *x.shape[1:]) for x in likes]
        self.final = self.none

    def enter(
        self, tokens: Mapping[str, torch.Tensor], shared: Mapping[str, torch.Tensor],
        entering: list[torch.Tensor] | None, own: list[torch.Tensor] | None, segment: Segment,
    ) -> Arguments:  # fmt: skip
        """What a segment is given: `entering` for the document that goes on in it, their `own` for the others."""
        going_on = (self.begin < segment.start) & (self.end > segment.start)
        states = self.none
        if own is not None:  # whose other rows may be anything
            here = self._begins_in(segment)
            states = [torch.where(_like(here, x), x, y) for x, y in zip(own, states, strict=True)]
        if entering is not None:
            states = [torch.where(_like(going_on, x), x, y) for x, y in zip(entering, states, strict=True)]
        bounds = torch.cat([self.begin[:1], self.end]).clamp(segment.start, segment.stop) - segment.start
        return Arguments(tokens, shared, states, bounds, going_on)

    def _begins_in(self, segment: Segment) -> torch.Tensor:
        return (self.begin >= segment.start) & ((self.begin < segment.stop) | segment.last)

    def leave(self, found: list[torch.Tensor], segment: Segment) -> list[torch.Tensor]:
        """The state of the document that goes on behind a segment, zeros if none does; its final states are `found`."""
        empty = self.begin == self.end
        ended = (self.end > segment.start) & (self.end <= segment.stop)
        ended = torch.where(empty, self._begins_in(segment), ended)
        self.final = [torch.where(_like(ended, x), x, y) for x, y in zip(found, self.final, strict=True)]
        goes_on = (self.begin < segment.stop) & (self.end > segment.stop)
        place = goes_on.to(torch.int64).argmax().unsqueeze(0)
        return [x.index_select(0, place).masked_fill(~_like(goes_on.any().view(1), x), 0.0) for x in found]


def _like(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return mask.view(-1, *[1] * (x.dim() - 1))

