"""States S' = max(S + a, F) between chunks, over documents and ranks, in plain PyTorch.

Their values are those of a max-plus scan (`flexsp.scan.max_plus`). Once these are known, so is what each maximum chose,
and with it a linear recurrence of the same states: S' = w S + w a + (1 - w) F, where w is 1 if S + a is the larger one,
0 if F is, and 1/2 if they are equal, as in PyTorch's derivative. That recurrence goes over chunks and ranks as any
other with a factor for each number, and has the derivatives.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flexsp.comm.group import SequenceParallel
from flexsp.scan.max_plus import Elements, enters, scan, together

__all__ = ["Maxima", "finite", "maxima_of", "settled"]

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
        own = None if begun is None else begun.detach()
        before, around = _values(a.detach(), F.detach(), start.detach(), own, first, sp)
        reached = before + a
        w = torch.where(reached > F, 1.0, torch.where(reached < F, 0.0, 0.5)).to(F.dtype)
    return Maxima(before, around, w, w * finite(a) + (1 - w) * finite(F))


def _values(
    a: torch.Tensor, F: torch.Tensor, start: torch.Tensor, begun: Optional, first: Optional,
    sp: SequenceParallel | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The states that enter chunks, and those before and after all of them."""
    a, c, cut, own = a.movedim(2, -1), F.movedim(2, -1), None, None
    if begun is not None and first is not None:
        own, cut = begun.movedim(2, -1), first.expand_as(a)
        c = torch.where(cut, torch.maximum(c, a + own), c)
        start = torch.full_like(start, -torch.inf)
    until = scan(Elements(a, c, cut))
    if sp is not None and sp.world_size > 1:
        start = enters(together(until), start, sp)
    m = torch.maximum(until.c, until.passing(start.unsqueeze(-1)))
    around = torch.cat([start.unsqueeze(-1), m], -1)
    before = around[..., :-1] if own is None or cut is None else torch.where(cut, own, around[..., :-1])
    return before.movedim(-1, 2), around.movedim(-1, 2)


def finite(x: torch.Tensor) -> torch.Tensor:
    """x with 0 for what is infinite, which has no derivative."""
    return x.masked_fill(x.isinf(), 0.0)


def settled(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The value, with the derivatives of x."""
    return value + (x - x.detach())
