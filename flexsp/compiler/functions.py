"""The three functions run in PyTorch, on any device: all chunks at once, the states chunk after chunk.

Every chunk has its true length, so the functions never see padding. Differentiated by autograd.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.func import jvp, vmap

from flexsp.comm.derivatives import joined
from flexsp.comm.group import SequenceParallel
from flexsp.compiler.check import Program, call
from flexsp.compiler.meta import CHUNK_STATE, STATE
from flexsp.compiler.trace import CompileError, Traced, first_line
from flexsp.scan.exchange import exchange, tie
from flexsp.scan.relay import Relay
from flexsp.scan.transitions import Transition

__all__ = ["rehearse", "run"]

Tensors = dict[str, torch.Tensor]
Numbers = dict[str, float]


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
    """One call on this rank's tokens [B, T, H, ...]; states are [B, H, ...]."""

    def __init__(
        self, program: Program, tokens: Tensors, params: Tensors, numbers: Numbers, chunks: list[_Chunk]
    ) -> None:
        self.program, self.params, self.numbers, self.chunks = program, params, numbers, chunks
        self.tokens = tokens
        self.inputs: list[Tensors] = [{} for _ in chunks]
        groups: dict[int, list[int]] = defaultdict(list)
        for i, chunk in enumerate(chunks):
            groups[chunk.length].append(i)
        self.groups = {length: members for length, members in groups.items() if length}
        for length, members in self.groups.items():
            at = torch.tensor([list(range(chunks[i].start, chunks[i].start + length)) for i in members])
            for name, x in tokens.items():
                cut = x[:, at.to(x.device)].movedim(3, 1)  # [B, H, n, C, ...]
                for i, part in zip(members, cut.unbind(2), strict=True):
                    self.inputs[i][name] = part

    def _on_heads(self, traced: Traced, values: Tensors, many: bool = False) -> tuple[torch.Tensor, Tensors]:
        """One function on values [B, H, ...] of one chunk, or [B, H, n, ...] of n chunks of one length if `many`."""
        tensors = {name: values[name] for name in traced.arguments if name in values}
        params = {name: x for name, x in self.params.items() if name in traced.arguments}

        def one(x: Tensors, p: Tensors) -> tuple[torch.Tensor, Tensors]:
            return call(traced, {**self.numbers, **p, **x})

        mapped: Callable[..., tuple[torch.Tensor, Tensors]] = one
        if many:
            mapped = vmap(mapped, in_dims=(0, None))
        mapped = vmap(mapped, in_dims=(0, 0))  # heads
        return vmap(mapped, in_dims=(0, None))(tensors, params)

    def _over_chunks(self, traced: Traced, values: list[Tensors]) -> tuple[list[torch.Tensor | None], list[Tensors]]:
        results: list[torch.Tensor | None] = [None] * len(self.chunks)
        cached: list[Tensors] = [{} for _ in self.chunks]
        for members in self.groups.values():
            names = [name for name in traced.arguments if name in values[members[0]]]
            stacked = {name: torch.stack([values[i][name] for i in members], dim=2) for name in names}
            result, kept = self._on_heads(traced, stacked, many=True)
            for at, i in enumerate(members):
                results[i] = result[:, :, at]
                cached[i] = {name: x[:, :, at] for name, x in kept.items()}
        return results, cached

    def contribute(self) -> None:
        """Phase 1: what every chunk adds to the state, and what it caches."""
        F, cached = self._over_chunks(self.program.chunk, self.inputs)
        for i, f in enumerate(F):
            if f is not None:
                self.inputs[i] = {**self.inputs[i], **cached[i], CHUNK_STATE: f}

    def walk(
        self, entering: torch.Tensor, initial: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        """Phase 2: (state entering each chunk, state leaving it, state leaving the shard)."""
        S, before, after = entering, [], []
        for chunk, values in zip(self.chunks, self.inputs, strict=True):
            if chunk.first:
                S = torch.zeros_like(S) if initial is None else initial[chunk.doc : chunk.doc + 1]
            before.append(S)
            if chunk.length:
                S = self._on_heads(self.program.decay, {**values, STATE: S})[0]
            after.append(S)
        return before, after, S

    def transition(self, like: torch.Tensor) -> torch.Tensor:
        """A of the whole shard: [B, H, *state], or [B, H, K, K] where it is dense (docs/math.md, section 8)."""
        dense = self.program.transition == "dense"
        K = like.shape[2]
        X = torch.ones_like(like)
        if dense:
            X = torch.eye(K, dtype=like.dtype, device=like.device).expand(*like.shape[:2], K, K)
        for chunk, values in zip(self.chunks, self.inputs, strict=True):
            if chunk.first:
                return torch.zeros_like(X)
            if chunk.length:
                X = self._push(X, values, like, dense)
        return X

    def _push(self, X: torch.Tensor, values: Tensors, like: torch.Tensor, dense: bool) -> torch.Tensor:
        def step(S: torch.Tensor) -> torch.Tensor:
            return self._on_heads(self.program.decay, {**values, STATE: S})[0]

        def linear(block: torch.Tensor) -> torch.Tensor:
            return jvp(step, (torch.zeros_like(like),), (block,))[1]

        if not dense:
            return linear(X)
        V, K = like.shape[3], X.shape[3]
        padded = torch.nn.functional.pad(X, (0, -K % V))
        return torch.cat([linear(block) for block in padded.split(V, dim=3)], dim=3)[..., :K]

    def merge(self, before: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Phase 3: outputs [B, T, H, V]. `like` is a state."""
        values = [{**x, CHUNK_STATE: S} for x, S in zip(self.inputs, before, strict=True)]
        o, _ = self._over_chunks(self.program.merge, values)
        parts = [x for x in o if x is not None]
        if parts:
            return torch.cat(parts, dim=2).transpose(1, 2)
        given = [*self.tokens.values(), *self.params.values()]
        nothing = torch.stack([y.sum() for y in given]).sum()  # so that all have gradients
        return self._one_token(like)[:, :0] + nothing

    @torch.no_grad()
    def _one_token(self, like: torch.Tensor) -> torch.Tensor:
        """Output of a token of zeros, which tells the width where there are no tokens."""
        zeros = {name: x.new_zeros(x.shape[0], 1, *x.shape[2:]) for name, x in self.tokens.items()}
        one = _Local(self.program, zeros, self.params, self.numbers, [_Chunk(0, 1, 0, False, False)])
        one.contribute()
        return one.merge([torch.zeros_like(like)], like)


def rehearse(program: Program, tokens: Tensors, params: Tensors, initial: torch.Tensor, C: int) -> None:
    """One call; CompileError where the functions, seen to work on one chunk, fail on many at once."""
    T = next(iter(tokens.values())).shape[1]
    local = _Local(program, tokens, params, program.meta.numbers, _cut(None, 0, T, C, True))
    with _many("chunk_mode", program.chunk):
        local.contribute()
    with _many("decay_mode", program.decay):
        before = local.walk(initial, None)[0]
        if program.transition != "not affine":
            local.transition(initial)
    with _many("merge_mode", program.merge):
        local.merge(before, initial)


@contextmanager
def _many(role: str, traced: Traced) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        text = f"runs on one chunk of one head, but not on many heads and chunks at once: {first_line(error)}"
        raise CompileError(role, traced.name, text) from error


def run(
    program: Program, tokens: Tensors, params: Tensors, numbers: Numbers, initial: torch.Tensor, *,
    given: bool, bounds: list[int] | None, C: int, sp: SequenceParallel | None, call_text: str = "",
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Outputs [B, T, H, V] and final states; `initial` are the states [N, H, *state], zeros unless `given`.

    `call_text` is what ranks compare of the call.
    """
    x = next(iter(tokens.values()))
    B, T = x.shape[:2]
    start, stop, _ = (0, T, T) if sp is None else sp.shard_range(T)
    ranks = sp if sp is not None and sp.world_size > 1 else None
    anchor = None
    if ranks is not None:
        anchor, initial, *given_tensors = joined(ranks, initial, *tokens.values(), *params.values())
        tokens = dict(zip(tokens, given_tensors, strict=False))
        params = dict(zip(params, given_tensors[len(tokens) :], strict=True))
    chunks = _cut(bounds, start, stop, C, sp is None or sp.is_last)
    local = _Local(program, tokens, params, numbers, chunks)
    local.contribute()
    zero = initial.new_zeros(B, *initial.shape[1:])
    entering = initial if bounds is None and (sp is None or sp.is_first) else zero
    in_walk = initial if bounds is not None and given else None
    arrived = relay = None
    if ranks is not None and anchor is not None and program.transition == "not affine":
        relay = Relay(ranks, anchor, call_text)
    if relay is not None:
        arrived = relay.from_left(entering)
        entering = arrived
    elif ranks is not None and anchor is not None:
        F = local.walk(entering, in_walk)[2]
        dense = program.transition == "dense"
        through = Transition.linear(F, local.transition(zero), dense)
        arrived = exchange(F, through, ranks, call_text, anchor)
        entering = entering + arrived
    before, after, leaving = local.walk(entering, in_walk)
    o = local.merge(before, zero)
    final = _final(initial, after, leaving, chunks, bounds, sp)
    final = final.clone() if final is initial else final
    if relay is not None and arrived is not None:
        return relay.to_right(o, final, leaving, arrived)
    if arrived is not None:
        return tie(o, arrived), None if final is None else tie(final, arrived)
    return o, final


def _final(
    initial: torch.Tensor, after: list[torch.Tensor], leaving: torch.Tensor, chunks: list[_Chunk],
    bounds: list[int] | None, sp: SequenceParallel | None,
) -> torch.Tensor | None:  # fmt: skip
    if bounds is None:
        return leaving if sp is None or sp.is_last else None
    rows = list(torch.zeros_like(initial).unbind(0))
    for chunk, S in zip(chunks, after, strict=True):
        if chunk.last:
            rows[chunk.doc] = S[0]
    return torch.stack(rows)
