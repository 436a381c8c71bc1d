"""The three functions run in PyTorch, on any device: all chunks of one length at once, then the states between them.

Every chunk has its true length, so the functions never see padding. Differentiated by autograd.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.func import vmap

from flexsp.comm.derivatives import joined
from flexsp.comm.group import SequenceParallel
from flexsp.compiler.frontend.check import Program, call
from flexsp.compiler.frontend.meta import CHUNK_STATE, STATE
from flexsp.compiler.frontend.trace import CompileError, Traced, first_line
from flexsp.scan.chunks import states_between
from flexsp.scan.exchange import exchange, tie
from flexsp.scan.relay import Relay
from flexsp.scan.transitions import Transition

__all__ = ["rehearse", "run"]

Tensors = dict[str, torch.Tensor]
Numbers = dict[str, float]
States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Chunk:
    start: int
    length: int
    doc: int
    first: bool
    last: bool


def _cut(bounds: list[int] | None, start: int, stop: int, C: int, last_rank: bool) -> list[_Chunk]:
    """The chunks of tokens [start, stop), in order; they never straddle documents. Empty documents have length 0."""
    if bounds is None:
        return [_Chunk(t, min(C, stop - start - t), 0, False, False) for t in range(0, stop - start, C)]
    chunks = []
    for doc, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if begin == end:
            if start <= begin < stop or (last_rank and begin >= stop):
                chunks.append(_Chunk(min(begin, stop) - start, 0, doc, True, True))
            continue
        low, high = max(begin, start), min(end, stop)
        for t in range(low, high, C):
            chunks.append(_Chunk(t - start, min(C, high - t), doc, t == begin, min(t + C, high) == end))
    return chunks


class _Local:
    """One call on this rank's tokens [B, T, H, ...]. Chunks of one length are computed at once; states come as
    [B, H, chunks, *state], chunks in order."""

    def __init__(
        self, program: Program, tokens: Tensors, params: Tensors, numbers: Numbers, chunks: list[_Chunk],
        zero: torch.Tensor,
    ) -> None:  # fmt: skip
        x = next(iter(tokens.values()))
        self.program, self.params, self.numbers, self.chunks = program, params, numbers, chunks
        self.tokens, self.device = tokens, x.device
        self.lead = x.shape[0], x.shape[2]
        self.zero, self.begins = zero, any(chunk.first for chunk in chunks)
        members: dict[int, list[int]] = defaultdict(list)
        for i, chunk in enumerate(chunks):
            members[chunk.length].append(i)
        self.groups = {length: slots for length, slots in members.items() if length}
        self.counts = [len(slots) for slots in self.groups.values()]
        by_length = [i for slots in self.groups.values() for i in slots]
        self.places = _Order([*by_length, *members[0]], self.device)
        tokens_of = [
            torch.tensor([chunks[i].start for i in slots])[:, None] + torch.arange(length)
            for length, slots in self.groups.items()
        ]
        in_order = by_length == sorted(by_length)
        self.order = _Order([] if in_order else torch.cat([x.flatten() for x in tokens_of]).tolist(), self.device)
        sizes = [length * n for length, n in zip(self.groups, self.counts, strict=True)]
        cuts = {name: self.order.sorted_in(x, 1).split(sizes, 1) for name, x in tokens.items()}
        self.inputs = [
            {name: self._in_chunks(parts[g], n) for name, parts in cuts.items()} for g, n in enumerate(self.counts)
        ]

    def _in_chunks(self, x: torch.Tensor, n: int) -> torch.Tensor:
        """Tokens [B, n C, H, ...] as [B H n, C, ...]."""
        return x.unflatten(1, (n, x.shape[1] // n)).movedim(3, 1).flatten(0, 2).contiguous()

    def _on_chunks(self, traced: Traced, values: Tensors, n: int) -> tuple[torch.Tensor, Tensors]:
        """One function on values [B H n, ...] of n chunks of each head."""
        B, H = self.lead
        tensors = {name: values[name] for name in traced.arguments if name in values}
        for name in traced.arguments:
            if name in self.params:
                x = self.params[name]
                tensors[name] = x[None, :, None].expand(B, H, n, *x.shape[1:]).flatten(0, 2)

        def one(x: Tensors) -> tuple[torch.Tensor, Tensors]:
            return call(traced, {**self.numbers, **x})

        if B:
            return vmap(one)(tensors)
        # vmap over nothing fails for some functions of numbers, so one chunk of zeros is computed and left out
        o, cached = vmap(one)({name: torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for name, x in tensors.items()})
        return o[:0], {name: x[:0] for name, x in cached.items()}

    def _in_order(self, parts: list[torch.Tensor], empty: torch.Tensor) -> torch.Tensor:
        """[B, H, chunks, ...] of what groups have [B H n, ...], and chunks without tokens: `empty` [B, H, 1, ...]."""
        found = [x.unflatten(0, (*self.lead, n)) for x, n in zip(parts, self.counts, strict=True)]
        none = len(self.chunks) - sum(self.counts)
        if none or not found:
            found.append(empty.expand(*self.lead, none, *empty.shape[3:]))
        return self.places.undone_in(torch.cat(found, 2) if len(found) > 1 else found[0], 2)

    def _by_group(self, states: torch.Tensor) -> list[torch.Tensor]:
        """[B H n, *state] for each group of what `_in_order` gives."""
        sizes = [*self.counts, len(self.chunks) - sum(self.counts)]
        return [x.flatten(0, 2) for x in self.places.sorted_in(states, 2).split(sizes, 2)[:-1]]

    def contribute(self) -> None:
        """Phase 1: what every chunk adds to the state, and what it caches."""
        for values, n in zip(self.inputs, self.counts, strict=True):
            F, cached = self._on_chunks(self.program.chunk, values, n)
            values.update({**cached, CHUNK_STATE: F})

    @functools.cached_property
    def factors(self) -> torch.Tensor | None:
        """A of every chunk, S' = A S + F, where decay_mode is affine.

        None where it is 1, [B, H, chunks, K, K] where it is dense, else broadcastable to the states of chunks.
        """
        kind = self.program.transition
        if kind == "none":
            return None
        thin = kind in ("scalar", "vector") and self.zero.dim() == 4 and not self.program.parts  # one factor a row
        factors = []
        for values, n in zip(self.inputs, self.counts, strict=True):
            a = self._factors_of(values, n, kind == "dense")
            factors.append(a[..., :1] if thin else a)
        one = _one(self.zero, kind == "dense").unsqueeze(2)
        return self._in_order(factors, one[..., :1] if thin else one)

    def _factors_of(self, values: Tensors, n: int, dense: bool) -> torch.Tensor:
        """A [B H n, ...] of a group's chunks."""
        assert self.program.linear is not None
        zero = self.zero.new_zeros(values[CHUNK_STATE].shape[0], *self.zero.shape[2:])
        if not dense:
            return self._on_chunks(self.program.linear, {**values, STATE: zero + 1}, n)[0]
        M, K, V = zero.shape
        columns = torch.nn.functional.pad(torch.eye(K, dtype=zero.dtype, device=zero.device), (0, -K % V))
        blocks = [block.expand(M, K, V).contiguous() for block in columns.split(V, dim=1)]
        found = [self._on_chunks(self.program.linear, {**values, STATE: S}, n)[0] for S in blocks]
        return torch.cat(found, dim=2)[..., :K]

    def through(self) -> Transition:
        """What all chunks do to a state, where decay_mode is affine; nothing passes where a document begins."""
        dense = self.program.transition == "dense"
        one = _one(self.zero, dense)
        if self.begins:
            return Transition.linear(self.zero, torch.zeros_like(one), dense)
        A = self.factors
        if A is not None:
            nothing = torch.zeros_like(one).unsqueeze(2).expand(-1, -1, A.shape[2], *one.shape[2:])
            one = states_between(A, nothing, one, None, dense)[:, :, -1]
        return Transition.linear(self.zero, one, dense)

    def states(self, initial: torch.Tensor | None) -> Callable[[torch.Tensor], States]:
        """Phase 2: of the state that enters the shard the states that enter the chunks, those that leave them, and the
        one that leaves the shard; `initial` are those of documents.

        A dense A would round what decay_mode does not, so those are walked.
        """
        if self.program.transition in ("dense", "not affine"):
            return functools.partial(self.walk, initial)
        A, F, cut, begun = self.factors, self._added(), None, None
        if self.begins:
            cut = torch.tensor([chunk.first for chunk in self.chunks], device=self.device)
            elsewhere = ~cut.view(-1, *[1] * (F.dim() - 3))
            if initial is not None:
                docs = torch.tensor([chunk.doc for chunk in self.chunks], device=self.device)
                begun = initial.index_select(0, docs).transpose(0, 1).unsqueeze(0).masked_fill(elsewhere, 0.0)
                F = F + (begun if A is None else A * begun)

        def scan(entering: torch.Tensor) -> States:
            found = states_between(A, F, entering, cut)
            before = found[:, :, :-1] if cut is None else found[:, :, :-1].masked_fill(~elsewhere, 0.0)
            return before if begun is None else before + begun, found[:, :, 1:], found[:, :, -1]

        return scan

    def _added(self) -> torch.Tensor:
        """F of every chunk: the state after it where it is 0 before."""
        F = []
        for values, n in zip(self.inputs, self.counts, strict=True):
            zero = self.zero.new_zeros(values[CHUNK_STATE].shape[0], *self.zero.shape[2:])
            F.append(self._on_chunks(self.program.decay, {**values, STATE: zero}, n)[0])
        return self._in_order(F, self.zero.unsqueeze(2))

    def walk(self, initial: torch.Tensor | None, entering: torch.Tensor) -> States:
        """Phase 2 of any map, chunk after chunk."""
        S, before, after = entering, [], []
        values: list[Tensors] = [{} for _ in self.chunks]
        for slots, of_group in zip(self.groups.values(), self.inputs, strict=True):
            for name in self.program.decay.arguments:
                if name in of_group:
                    parts = of_group[name].unflatten(0, (*self.lead, len(slots))).unbind(2)
                    for i, x in zip(slots, parts, strict=True):
                        values[i][name] = x.flatten(0, 1)
        for chunk, x in zip(self.chunks, values, strict=True):
            if chunk.first:
                S = torch.zeros_like(S) if initial is None else initial[chunk.doc : chunk.doc + 1]
            before.append(S)
            if chunk.length:
                S = self._on_chunks(self.program.decay, {**x, STATE: S.flatten(0, 1)}, 1)[0].unflatten(0, self.lead)
            after.append(S)
        if not before:
            none = entering.unsqueeze(2)[:, :, :0]
            return none, none, entering
        return torch.stack(before, 2), torch.stack(after, 2), S

    def merge(self, before: torch.Tensor) -> torch.Tensor:
        """Phase 3: outputs [B, T, H, V]. `before` are the states that enter the chunks."""
        o = []
        for values, S, n in zip(self.inputs, self._by_group(before), self.counts, strict=True):
            found = self._on_chunks(self.program.merge, {**values, CHUNK_STATE: S}, n)[0]
            o.append(found.unflatten(0, (*self.lead, n)).flatten(2, 3))
        if o:
            return self.order.undone_in(torch.cat(o, 2) if len(o) > 1 else o[0], 2).transpose(1, 2)
        given = [*self.tokens.values(), *self.params.values()]
        nothing = torch.stack([y.sum() for y in given]).sum()  # so that all have gradients
        return self._one_token()[:, :0] + nothing

    @torch.no_grad()
    def _one_token(self) -> torch.Tensor:
        """Output of a token of zeros, which tells the width where there are no tokens."""
        zeros = {name: x.new_zeros(x.shape[0], 1, *x.shape[2:]) for name, x in self.tokens.items()}
        one = _Local(self.program, zeros, self.params, self.numbers, [_Chunk(0, 1, 0, False, False)], self.zero)
        one.contribute()
        return one.merge(self.zero.unsqueeze(2))


class _Order:
    """An order of things, by their numbers."""

    def __init__(self, numbers: list[int], device: torch.device) -> None:
        self.there = self.back = None
        if numbers != list(range(len(numbers))):
            self.there = torch.tensor(numbers, device=device)
            self.back = self.there.argsort()

    def sorted_in(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        return x if self.there is None else x.index_select(axis, self.there)

    def undone_in(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        return x if self.back is None else x.index_select(axis, self.back)


def _one(like: torch.Tensor, dense: bool) -> torch.Tensor:
    """What changes no state like this one [B, H, *state]."""
    if not dense:
        return torch.ones_like(like)
    return torch.eye(like.shape[2], dtype=like.dtype, device=like.device).expand(*like.shape[:2], -1, -1)


def rehearse(program: Program, tokens: Tensors, params: Tensors, initial: torch.Tensor, C: int) -> None:
    """One call; CompileError where the functions, seen to work on one chunk, fail on many at once."""
    T = next(iter(tokens.values())).shape[1]
    chunks = _cut(None, 0, T, C, True)
    local = _Local(program, tokens, params, program.meta.numbers, chunks, torch.zeros_like(initial))
    with _many("chunk_mode", program.chunk):
        local.contribute()
    with _many("decay_mode", program.decay):
        before = local.states(None)(initial)[0]
        if program.transition != "not affine":
            local.through()
    with _many("merge_mode", program.merge):
        local.merge(before)


@contextmanager
def _many(role: str, traced: Traced) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        text = f"runs on one chunk of one head, but not on many heads and chunks at once: {first_line(error)}"
        raise CompileError(role, traced.name, text) from error


def run(
    program: Program, tokens: Tensors, params: Tensors, numbers: Numbers, initial: torch.Tensor, *,
    given: bool, bounds: list[int] | None, C: int, sp: SequenceParallel | None, rows: int = 1, call_text: str = "",
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Outputs [B, T, H, V] and final states; `initial` are the states [N, H, *state], zeros unless `given`.

    `rows` of tokens here make one of `SequenceParallel.lengths`. `call_text` is what ranks compare of the call.
    """
    x = next(iter(tokens.values()))
    B, T = x.shape[:2]
    start, stop, _ = (0, T, T) if sp is None else sp.shard_range(T, rows)
    ranks = sp if sp is not None and sp.world_size > 1 else None
    anchor = None
    if ranks is not None:
        anchor, initial, *given_tensors = joined(ranks, initial, *tokens.values(), *params.values())
        tokens = dict(zip(tokens, given_tensors, strict=False))
        params = dict(zip(params, given_tensors[len(tokens) :], strict=True))
    chunks = _cut(bounds, start, stop, C, sp is None or sp.is_last)
    zero = initial.new_zeros(B, *initial.shape[1:])
    local = _Local(program, tokens, params, numbers, chunks, zero)
    local.contribute()
    entering = initial if bounds is None and (sp is None or sp.is_first) else zero
    in_walk = initial if bounds is not None and given else None
    states = local.states(in_walk)
    arrived = relay = None
    if ranks is not None and anchor is not None and program.transition == "not affine":
        relay = Relay(ranks, anchor, call_text)
        arrived = entering = relay.from_left(entering)
    elif ranks is not None and anchor is not None:
        arrived = exchange(states(entering)[2], local.through(), ranks, call_text, anchor)
        entering = entering + arrived
    before, after, leaving = states(entering)
    o = local.merge(before)
    final = _final(initial, after, leaving, chunks, bounds, sp)
    if relay is not None and arrived is not None:
        return relay.to_right(o, final, leaving, arrived)
    if arrived is not None:
        for other in (arrived, *(() if in_walk is None else (in_walk,))):  # documents may all start elsewhere
            o, final = tie(o, other), None if final is None else tie(final, other)
    return o, final


def _final(
    initial: torch.Tensor, after: torch.Tensor, leaving: torch.Tensor, chunks: list[_Chunk], bounds: list[int] | None,
    sp: SequenceParallel | None,
) -> torch.Tensor | None:  # fmt: skip
    if bounds is None:
        return leaving.clone() if sp is None or sp.is_last else None  # not the caller's, nor a part of all states
    ended = [(chunk.doc, slot) for slot, chunk in enumerate(chunks) if chunk.last]
    docs, slots = torch.tensor(ended, dtype=torch.int64, device=initial.device).view(-1, 2).unbind(1)
    return torch.zeros_like(initial).index_copy(0, docs, after[0].index_select(1, slots).transpose(0, 1))
