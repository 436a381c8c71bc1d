"""States S' = max(S + a, F) over tokens or chunks, documents and ranks, in plain PyTorch.

Values come from a scan of pairs (a, F), without derivatives. Two stretches compose to the shift a_1 + a_2 and the
larger of F_1 + a_2 and F_2. A shift of -inf is where a document begins. Sums are made in a tree and are never
subtracted, so they lose no precision over long sequences.

Once the values are known, so is what each maximum chose, and with it a linear recurrence of the same states:
S' = w S + w a + (1 - w) F, where w is 1 if S + a is the larger one, 0 if F is, and 1/2 if they are equal, as in
PyTorch's derivative. That recurrence goes over chunks and ranks as any other with a factor for each number, and has the
derivatives.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from flexsp.comm.group import SequenceParallel
from flexsp.scan.exchange import exchange
from flexsp.scan.transitions import Transition

__all__ = ["Maxima", "enters", "finite", "maxima_between", "maxima_of", "scan", "settled"]

_CHUNK = 64
Optional = torch.Tensor | None


class Maxima(NamedTuple):
    """Values of the states that enter chunks [B, H, chunks, *state], and of those before and after all of them, both
    without derivatives, as `flexsp.kernels.reference.States`; and w and w a + (1 - w) F of every chunk."""

    before: torch.Tensor
    around: torch.Tensor
    factors: torch.Tensor
    added: torch.Tensor


def maxima_of(
    a: torch.Tensor, F: torch.Tensor, start: torch.Tensor, begun: Optional, first: Optional,
    sp: SequenceParallel | None,
) -> Maxima:  # fmt: skip
    """Collective over ``sp``, once, without derivatives.

    Args:
        a, F: [B, H, chunks, *state].
        start: [B, H, *state], what enters the first rank.
        begun: [1, H, chunks, *state], what enters the chunks where documents begin; None without documents.
        first: bool [chunks], true there.
    """
    with torch.no_grad():
        own = None if begun is None else begun.detach().movedim(2, -1)
        found = maxima_between(a.detach().movedim(2, -1), F.detach().movedim(2, -1), start.detach(), own, first, sp)
        before, around = (x.movedim(-1, 2) for x in found)
        reached = before + a
        w = torch.where(reached > F, 1.0, torch.where(reached < F, 0.0, 0.5)).to(F.dtype)
    return Maxima(before, around, w, w * finite(a) + (1 - w) * finite(F))


def maxima_between(
    a: torch.Tensor, F: torch.Tensor, start: torch.Tensor, begun: Optional, first: Optional,
    sp: SequenceParallel | None, call: str = "maxima",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The states that enter tokens or chunks [B, H, ..., n], and those before and after all of them [B, H, ..., n + 1].

    Collective over ``sp``. Arguments are as in `maxima_of`, but for the axis of tokens or chunks, which is the last.
    """
    shift, cut = a, None
    if begun is not None and first is not None:
        F, shift = torch.where(first, torch.maximum(F, a + begun), F), a.masked_fill(first, -torch.inf)
        start, cut = start.new_full(a.shape[:-1], -torch.inf), first.any().expand(a.shape[0])
    total, until = scan(shift, F)
    if sp is not None and sp.world_size > 1:
        start = enters(_last(total, 0.0), _last(until, -torch.inf), start, cut, sp, call)
    after = _then(start.unsqueeze(-1), total, until)
    around = torch.cat([start.unsqueeze(-1), after], -1)
    before = around[..., :-1] if begun is None or first is None else torch.where(first, begun, around[..., :-1])
    return before, around


def enters(
    a: torch.Tensor, F: torch.Tensor, start: torch.Tensor, cut: Optional, sp: SequenceParallel, call: str
) -> torch.Tensor:
    """The state [B, H, *state] that enters this rank. Collective over ``sp``, without derivatives.

    Args:
        a, F: of all of this rank's tokens in one, in the shape of the state.
        start: what enters the first rank.
        cut: bool [B], whether a document begins on this rank; None without documents.
    """
    through = Transition.of(F, a, cut, "max-plus")
    arrived = exchange(through.apply(start, F) if sp.is_first else F, through, sp, call)
    return start if sp.is_first else arrived


def scan(a: torch.Tensor, F: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The shift and F of every stretch composed with all before it, along the last axis. Without derivatives.

    In a graph of torch.compile it is one node, since its steps depend on how many elements there are.
    """
    if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
        return torch.ops.flexsp.max_plus_scan(a, F)
    T = a.shape[-1]
    if T <= _CHUNK:
        return _doubled(a, F)
    n = -(-T // _CHUNK)
    inside = _doubled(*(x.unflatten(-1, (n, _CHUNK)) for x in _shifted(a, F, 0, n * _CHUNK - T)))
    before = _shifted(*scan(*(x[..., -1] for x in inside)), 1, -1)
    found = _composed(before[0].unsqueeze(-1), before[1].unsqueeze(-1), *inside)
    return found[0].flatten(-2)[..., :T], found[1].flatten(-2)[..., :T]


def _then(S: torch.Tensor, a: torch.Tensor, F: torch.Tensor) -> torch.Tensor:
    """max(S + a, F)."""
    return Transition("max-plus", a).apply(S, F)


def _composed(
    a: torch.Tensor, F: torch.Tensor, later_a: torch.Tensor, later_F: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return Transition("max-plus", later_a).apply(a), _then(F, later_a, later_F)


def _shifted(a: torch.Tensor, F: torch.Tensor, left: int, right: int) -> tuple[torch.Tensor, torch.Tensor]:
    """With stretches that do nothing at the ends; a negative number takes some away."""
    return pad(a, (left, right)), pad(F, (left, right), value=-torch.inf)


def _last(x: torch.Tensor, neutral: float) -> torch.Tensor:
    return x[..., -1] if x.shape[-1] else x.new_full(x.shape[:-1], neutral)


def _doubled(a: torch.Tensor, F: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    reach = 1
    while reach < a.shape[-1]:
        a, F = _composed(*_shifted(a, F, reach, -reach), a, F)
        reach *= 2
    return a, F


def finite(x: torch.Tensor) -> torch.Tensor:
    """x with 0 for what is infinite, which has no derivative."""
    return x.masked_fill(x.isinf(), 0.0)


def settled(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The value, with the derivatives of x."""
    return value + (x - x.detach())


def _operator(a: torch.Tensor, F: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple([x.clone(memory_format=torch.contiguous_format) for x in scan(a, F)])


def _fake_operator(a: torch.Tensor, F: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return a.new_empty(a.shape), F.new_empty(F.shape)


_lib = torch.library.Library("flexsp", "FRAGMENT")
_lib.define("max_plus_scan(Tensor a, Tensor F) -> (Tensor, Tensor)")
_lib.impl("max_plus_scan", _operator, "CompositeExplicitAutograd")
torch.library.register_fake("flexsp::max_plus_scan", _fake_operator, lib=_lib)
