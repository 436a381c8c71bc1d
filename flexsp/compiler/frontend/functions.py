"""The three functions in PyTorch: a step of `flexsp.kernels.reference`, all chunks of one length at once.

Every chunk has its true length, so the functions never see padding.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.func import vmap

from flexsp.comm.derivatives import share_backward
from flexsp.comm.group import SequenceParallel
from flexsp.compiler.frontend.meta import CHUNK_STATE, STATE
from flexsp.compiler.frontend.program import Program, call, has_parts, widths
from flexsp.compiler.frontend.running_sums import NARROW
from flexsp.compiler.frontend.trace import Traced, first_line
from flexsp.exceptions import CompileError
from flexsp.kernels import reference
from flexsp.kernels.reference import Documents, States
from flexsp.kernels.table import chunk_table
from flexsp.scan.chunks import states_between
from flexsp.scan.maxima import Maxima, finite, maxima_of, settled
from flexsp.scan.transitions import Transition

__all__ = ["LocalChunks", "rehearse", "run", "unit_transition"]

Tensors = dict[str, torch.Tensor]
Numbers = dict[str, float]


class _Chunk(NamedTuple):
    """A row of `chunk_table`."""

    start: int
    length: int
    doc: int = 0
    first: int = 0
    last: int = 0


def _cut(T: int, C: int) -> list[_Chunk]:
    """The chunks of tokens without document boundaries."""
    return [_Chunk(t, min(C, T - t)) for t in range(0, T, C)]


class LocalChunks:
    """One call on this rank's tokens [B, T, H, ...]. All chunks of one length are computed at once. States are
    [B, H, chunks, *state], with chunks in the order of tokens."""

    def __init__(
        self, program: Program, tokens: Tensors, params: Tensors, numbers: Numbers, chunks: list[_Chunk],
        zero: torch.Tensor, documents: Documents | None = None,
    ) -> None:  # fmt: skip
        x = next(iter(tokens.values()))
        self.program, self.params, self.numbers, self.chunks = program, params, numbers, chunks
        self.tokens, self.device = tokens, x.device
        self.lead = x.shape[0], x.shape[2]
        self.zero, self.documents, self.begins = zero, documents, any(chunk.first for chunk in chunks)
        self.maxima: Maxima | None = None
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
            return call(traced, {**self.numbers, **x}, wide_sums=self.zero.dtype == NARROW)

        if B:
            return vmap(one)(tensors)
        # vmap over zero chunks fails for some functions of numbers, so one chunk of zeros is computed and dropped
        o, cached = vmap(one)({name: torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for name, x in tensors.items()})
        return o[:0], {name: x[:0] for name, x in cached.items()}

    def in_order(self, parts: list[torch.Tensor], empty: torch.Tensor) -> torch.Tensor:
        """[B, H, chunks, ...] from tensors [B H n, ...] of groups; chunks without tokens get `empty` [B, H, 1, ...]."""
        found = [x.unflatten(0, (*self.lead, n)) for x, n in zip(parts, self.counts, strict=True)]
        none = len(self.chunks) - sum(self.counts)
        if none or not found:
            found.append(empty.expand(*self.lead, none, *empty.shape[3:]))
        return self.places.undone_in(torch.cat(found, 2) if len(found) > 1 else found[0], 2)

    def _by_group(self, states: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of `in_order`: [B H n, *state] for each group."""
        sizes = [*self.counts, len(self.chunks) - sum(self.counts)]
        return [x.flatten(0, 2) for x in self.places.sorted_in(states, 2).split(sizes, 2)[:-1]]

    def contribute(self) -> None:
        """Phase 1: chunk_mode of every chunk, with the values that it caches."""
        for values, n in zip(self.inputs, self.counts, strict=True):
            F, cached = self._on_chunks(self.program.chunk, values, n)
            values.update({**cached, CHUNK_STATE: F})

    @functools.cached_property
    def factors(self) -> torch.Tensor | None:
        """A of every chunk, S' = A S + F, for an affine decay_mode.

        None if A is 1, [B, H, chunks, K, K] if it is dense, else broadcastable to the states of chunks.
        """
        kind = self.program.transition
        if kind == "none":
            return None
        if self.maxima is not None:
            return self.maxima.factors
        thin = kind in ("scalar", "vector") and self.zero.dim() == 4  # one factor a row
        thin = thin and not has_parts(self.program.decay)  # beside which it is 0
        factors = []
        for values, n in zip(self.inputs, self.counts, strict=True):
            a = self._factors_of(values, n, kind == "dense")
            factors.append(a[..., :1] if thin else a)
        one = unit_transition(self.zero, kind == "dense").unsqueeze(2)
        return self.in_order(factors, one[..., :1] if thin else one)

    def find_maxima(self, initial: torch.Tensor | None, sp: SequenceParallel | None) -> None:
        """Finds which operand each maximum took, as a factor 1, 0, or 1/2 if both are equal (`flexsp.scan.maxima`).

        Collective over ``sp``.
        """
        assert self.program.linear is not None
        shifts, brought = [], []
        for values, n in zip(self.inputs, self.counts, strict=True):
            zero = self.zero.new_zeros(values[CHUNK_STATE].shape[0], *self.zero.shape[2:])
            shifts.append(self._on_chunks(self.program.linear, {**values, STATE: zero}, n)[0])
            brought.append(self._on_chunks(self.program.decay, {**values, STATE: zero - torch.inf}, n)[0])
        none = self.zero.unsqueeze(2)
        a, F = self.in_order(shifts, none), self.in_order(brought, none - torch.inf)
        start, begun, first = self.zero, None, None
        if self.documents is None:
            start = start if initial is None else initial
        else:
            table, n = self.documents
            first = table[:, 3].bool()
            own = self.zero.new_zeros(n, *self.zero.shape[1:]) if initial is None else initial
            begun = own.index_select(0, table[:, 2]).transpose(0, 1).unsqueeze(0)
        self.maxima = maxima_of(a, F, start, begun, first, sp)

    def _factors_of(self, values: Tensors, n: int, dense: bool) -> torch.Tensor:
        """A [B H n, ...] of a group's chunks."""
        assert self.program.linear is not None
        zero = self.zero.new_zeros(values[CHUNK_STATE].shape[0], *self.zero.shape[2:])
        if not dense:
            return self._on_chunks(self.program.linear, {**values, STATE: zero + 1}, n)[0]
        M, K, V = zero.shape
        eye, found = torch.eye(K, dtype=zero.dtype, device=zero.device), list[torch.Tensor]()
        for rows in _rows_of_units(widths(self.program.decay, K, V)):
            units = torch.nn.functional.pad(eye[:, rows[0] : rows[-1] + 1], (0, V - len(rows)))
            S = units.expand(M, K, V).contiguous()
            found.append(self._on_chunks(self.program.linear, {**values, STATE: S}, n)[0][..., : len(rows)])
        return torch.cat(found, dim=2)

    def through(self) -> Transition:
        """The transition of all chunks together. It is 0 if a document begins in them."""
        if self.program.transition == "sequential":
            return Transition("sequential")
        dense = self.program.transition == "dense"
        kind = "dense" if dense else "elementwise"
        one = unit_transition(self.zero, dense)
        if self.begins:
            return Transition.of(self.zero, torch.zeros_like(one), kind=kind)
        A = self.factors
        if A is not None:
            nothing = torch.zeros_like(one).unsqueeze(2).expand(-1, -1, A.shape[2], *one.shape[2:])
            one = states_between(A, nothing, one, None, dense)[:, :, -1]
        return Transition.of(self.zero, one, kind=kind)

    def states(self, initial: torch.Tensor | None) -> Callable[[torch.Tensor], States]:
        """Phase 2: states around chunks. Dense ones are walked, since a matrix A would round more than decay_mode."""
        if self.program.transition in ("dense", "sequential"):
            return functools.partial(self.walk, initial)
        return reference.states_of(self.factors, self._added(), initial, self.documents if self.begins else None)

    def _added(self) -> torch.Tensor:
        """F of every chunk: decay_mode of a state of zeros."""
        if self.maxima is not None:
            return self.maxima.added
        F = []
        for values, n in zip(self.inputs, self.counts, strict=True):
            zero = self.zero.new_zeros(values[CHUNK_STATE].shape[0], *self.zero.shape[2:])
            F.append(self._on_chunks(self.program.decay, {**values, STATE: zero}, n)[0])
        return self.in_order(F, self.zero.unsqueeze(2))

    def walk(self, initial: torch.Tensor | None, entering: torch.Tensor) -> States:
        """Phase 2 for any decay_mode, chunk after chunk."""
        S, before, around = entering, [], [entering]
        values: list[Tensors] = [{} for _ in self.chunks]
        for slots, of_group in zip(self.groups.values(), self.inputs, strict=True):
            for name in self.program.decay.arguments:
                if name in of_group:
                    parts = of_group[name].unflatten(0, (*self.lead, len(slots))).unbind(2)
                    for i, x in zip(slots, parts, strict=True):
                        values[i][name] = x.flatten(0, 1)
        for at, (chunk, x) in enumerate(zip(self.chunks, values, strict=True)):
            if chunk.first:
                S = torch.zeros_like(S) if initial is None else initial[chunk.doc : chunk.doc + 1]
            before.append(S)
            if chunk.length:
                S = self._on_chunks(self.program.decay, {**x, STATE: S.flatten(0, 1)}, 1)[0].unflatten(0, self.lead)
                S = self.behind(at, S)
            around.append(S)
        found = torch.stack(around, 2)
        return torch.stack(before, 2) if before else found[:, :, :0], found

    def behind(self, chunk: int, S: torch.Tensor) -> torch.Tensor:
        """The state that a chunk leaves; subclasses may change how gradients pass there."""
        return S

    def merge(self, entering: torch.Tensor) -> torch.Tensor:
        """Phase 3: merge_mode of every chunk, as outputs [B, T, H, V]."""
        o = []
        if self.maxima is not None:
            entering = settled(entering, self.maxima.before)
        for values, S, n in zip(self.inputs, self._by_group(entering), self.counts, strict=True):
            found = self._on_chunks(self.program.merge, {**values, CHUNK_STATE: S}, n)[0]
            o.append(found.unflatten(0, (*self.lead, n)).flatten(2, 3))
        if o:
            return self.order.undone_in(torch.cat(o, 2) if len(o) > 1 else o[0], 2).transpose(1, 2)
        given = [*self.tokens.values(), *self.params.values()]
        nothing = torch.stack([y.sum() for y in given]).sum()  # so that every input has a gradient
        return self._one_token()[:, :0] + nothing

    @torch.no_grad()
    def _one_token(self) -> torch.Tensor:
        """Output of one token of zeros, which has the width of the outputs if there are no tokens."""
        zeros = {name: x.new_zeros(x.shape[0], 1, *x.shape[2:]) for name, x in self.tokens.items()}
        one = LocalChunks(self.program, zeros, self.params, self.numbers, [_Chunk(0, 1, 0, False, False)], self.zero)
        one.contribute()
        return one.merge(self.zero.unsqueeze(2))


class _Order:
    """A permutation of an axis, given by the old index of each new place."""

    def __init__(self, numbers: list[int], device: torch.device) -> None:
        self.there = self.back = None
        if numbers != list(range(len(numbers))):
            self.there = torch.tensor(numbers, device=device)
            self.back = self.there.argsort()

    def sorted_in(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        return x if self.there is None else x.index_select(axis, self.there)

    def undone_in(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        return x if self.back is None else x.index_select(axis, self.back)


def _rows_of_units(widths: list[int]) -> list[list[int]]:
    """The columns of the unit matrix [K, K] spread over as few states as `widths` allows.

    For each state, the list of rows that hold the ones of its columns. Row i of a state has `widths[i]` columns.
    """
    states: list[list[int]] = []
    for row, free in enumerate(widths):
        if not states or len(states[-1]) >= free:
            states.append([])
        states[-1].append(row)
    return states


def unit_transition(like: torch.Tensor, dense: bool = True) -> torch.Tensor:
    """The transition that changes no state, for states like this one [B, H, *state]."""
    if not dense:
        return torch.ones_like(like)
    return torch.eye(like.shape[2], dtype=like.dtype, device=like.device).expand(*like.shape[:2], -1, -1)


def rehearse(program: Program, tokens: Tensors, params: Tensors, initial: torch.Tensor, C: int) -> None:
    """Runs one call; CompileError if the functions, which work on one chunk, fail on many at once."""
    T = next(iter(tokens.values())).shape[1]
    local = LocalChunks(program, tokens, params, program.meta.numbers, _cut(T, C), torch.zeros_like(initial))
    with _many("chunk_mode", program.chunk):
        local.contribute()
    with _many("decay_mode", program.decay):
        if program.transition == "max-plus":
            local.find_maxima(initial, None)
        before, _ = local.states(None)(initial)
        if program.transition != "sequential":
            _ = local.factors  # runs the linear part of decay_mode, which ranks need
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
    program: Program, tokens: Tensors, params: Tensors, initial: torch.Tensor | None, state: tuple[int, ...],
    bounds: list[int] | None, C: int, sp: SequenceParallel | None, rows: int, description: str,
    made: Callable[..., LocalChunks] = LocalChunks,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Outputs [B, T, H, V] and final states; `initial` are states [N, H, *state], None for zeros.

    `rows` of tokens here make one of `SequenceParallel.lengths`. `description` is what ranks compare of the call.
    `made` makes the step that runs the call's chunks.
    """
    x, anchor = next(iter(tokens.values())), None
    B, T, H = x.shape[:3]
    if sp is not None and sp.world_size > 1:
        anchor, initial, *given = share_backward(sp, initial, *tokens.values(), *params.values())
        tokens = dict(zip(tokens, given, strict=False))
        params = dict(zip(params, given[len(tokens) :], strict=True))
    chunks, documents, tail = _cut(T, C), None, 0
    if bounds is not None:
        start, stop = (0, T) if sp is None else sp.shard_range(T, rows)[:2]
        tail = min(T, max(0, stop - bounds[-1]))
        tokens = {name: y[:, : T - tail] for name, y in tokens.items()} if tail else tokens
        table = chunk_table(torch.tensor(bounds), start, stop, C, sp is None or sp.is_last)
        found = [_Chunk(*row) for row in table.tolist()]
        chunks = [chunk for chunk in found if chunk.length or chunk.first]
        documents = Documents(table[: len(chunks)].to(x.device), len(bounds) - 1)
    zero = x.new_zeros(B, H, *state)
    local = made(program, tokens, params, program.meta.numbers, chunks, zero, documents)
    local.contribute()
    if program.transition == "max-plus":
        local.find_maxima(initial, sp)
        initial = None if initial is None else finite(initial)
    o, final = reference.run(local, zero, initial, documents, sp, anchor, description)
    if local.maxima is not None and final is not None:
        final = settled(final, reference.final_states(local.maxima.around, documents))
    return torch.nn.functional.pad(o, (0, 0, 0, 0, 0, tail)) if tail else o, final
