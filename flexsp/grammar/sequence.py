"""Where this rank's tokens stand in the whole sequence, and what reaches them from tokens before.

Sums and positions go on over the ranks (``sp``) and start anew with every document (``cu_seqlens``). All but
`positions` are collective over ``sp``.
"""

from __future__ import annotations

import torch

from flexsp.comm.group import SequenceParallel
from flexsp.scan.exchange import exchange
from flexsp.scan.transitions import Transition

__all__ = ["positions", "previous", "running_sum"]

Ranks = SequenceParallel | None


def _places(
    T: int, device: torch.device, cu_seqlens: torch.Tensor | None, sp: Ranks
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(place in the whole sequence, place where the document starts) [T] of every token here; place of the first."""
    start = 0 if sp is None else sp.shard_range(T)[0]
    place = torch.arange(start, start + T, device=device)
    if cu_seqlens is None:
        return place, torch.zeros_like(place), start
    return place, cu_seqlens[torch.searchsorted(cu_seqlens, place, right=True) - 1].to(place.dtype), start


def positions(T: int, device: torch.device, cu_seqlens: torch.Tensor | None, sp: Ranks) -> torch.Tensor:
    """Positions [T] of this rank's T tokens, from 0 at the start of the sequence, of each document where packed."""
    place, begin, _ = _places(T, device, cu_seqlens, sp)
    return place - begin


def running_sum(x: torch.Tensor, cu_seqlens: torch.Tensor | None, sp: Ranks) -> torch.Tensor:
    """x [B, T, H, ...] summed up from the start of the sequence or document to each token, itself included.

    In float32, or float64 for float64; added up in float64. What is not finite stays in its document.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    T = x.shape[1]
    place, begin, start = _places(T, x.device, cu_seqlens, sp)
    total = x.to(torch.float64)
    total = total.cumsum(1) if cu_seqlens is None else _sums_of_documents(total, place - begin)
    total = total.to(wide)
    if sp is None or sp.world_size == 1:
        return total
    mine = total[:, -1] if T else total.sum(1)
    cut = None
    if cu_seqlens is not None:
        starts = cu_seqlens[:-1]
        cut = ((starts >= start) & (starts < start + T)).any().to(torch.int32).expand(x.shape[0])
    arrived = _arrived(mine, cut, sp, "a running sum")
    return total + _where(begin < start, arrived.expand_as(total))


def previous(x: torch.Tensor, cu_seqlens: torch.Tensor | None, sp: Ranks) -> torch.Tensor:
    """x [B, T, H, ...] of the token before; 0 at the start of the sequence or document."""
    T = x.shape[1]
    place, begin, _ = _places(T, x.device, cu_seqlens, sp)
    first = x.new_zeros(x.shape[0], 1, *x.shape[2:])
    if sp is not None and sp.world_size > 1:
        mine = x[:, -1] if T else x.sum(1)  # zeros, with a gradient
        cut = torch.full((x.shape[0],), int(T > 0), dtype=torch.int32, device=x.device)
        first = _arrived(mine, cut, sp, "the token before")
    return _where(place > begin, torch.cat([first, x], 1)[:, :T])


def _arrived(mine: torch.Tensor, cut: torch.Tensor | None, sp: SequenceParallel, what: str) -> torch.Tensor:
    """[B, 1, H, ...]: the sum of `mine` [B, H, ...] over the ranks before, back to the last one with a cut."""
    states = mine.reshape(*mine.shape[:2], 1, -1).contiguous()
    return exchange(states, Transition.of(states, None, cut), sp, what).view(mine.shape).unsqueeze(1)


def _sums_of_documents(x: torch.Tensor, since: torch.Tensor) -> torch.Tensor:
    """Running sums of x [B, T, ...] that never meet a document's neighbours; ``since`` [T] precede each in its own."""
    step = 1
    while step < x.shape[1]:
        before = torch.cat([torch.zeros_like(x[:, :step]), x[:, :-step]], 1)
        x = x + _where(since >= step, before)
        step *= 2
    return x


def _where(keep: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x [B, T, ...] where ``keep`` [T] holds, else 0, whatever stands there."""
    return x.masked_fill(~keep.view(1, -1, *[1] * (x.dim() - 2)), 0.0)
