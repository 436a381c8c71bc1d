"""Attention over ranks, by one of two exchanges. Both are calls of `exchange_rows`.

heads  each rank gets all tokens of some heads, and returns the outputs: two exchanges
keys   each rank gets the keys and values that its queries see: one exchange
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flexsp.comm.collectives import exchange_rows
from flexsp.comm.derivatives import share_backward
from flexsp.comm.group import SequenceParallel
from flexsp.nn.attention.local import Sight, attend

__all__ = ["EXCHANGES", "attend_over_ranks", "choose_exchange"]

EXCHANGES = ("auto", "heads", "keys")


def choose_exchange(heads: int, window: int | None, lengths: Sequence[int]) -> str:
    """The exchange that ``exchange="auto"`` means. It depends only on what all ranks know.

    ``keys`` if the number of ranks does not divide the heads, or if the window is not longer than an average shard, so
    that few tokens travel. Else ``heads``, which gives every rank the same work.
    """
    near = window is not None and window * len(lengths) <= sum(lengths)
    return "keys" if heads % len(lengths) or near else "heads"


def attend_over_ranks(
    q: Tensor, k: Tensor, v: Tensor, sight: Sight, scale: float, backend: str, exchange: str, call: str,
    sp: SequenceParallel, lengths: Sequence[int],
) -> Tensor:  # fmt: skip
    """`attend` of this rank's queries to the keys of all ranks. Collective over ``sp``.

    Args:
        sight: the mask of the whole sequence.
        call: a description of the call, which ranks compare before they exchange rows.
        lengths: tokens of each rank.
    """
    _, q, k, v = share_backward(sp, q, k, v)
    if exchange == "heads":
        return _exchanging_heads(q, k, v, lambda q, k, v: attend(q, k, v, sight, scale, backend), call, sp, lengths)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _exchanging_keys(q, k, v, sight, scale, backend, call, sp, lengths)

    if torch.is_grad_enabled():  # saves no keys of other ranks: the backward pass exchanges them again
        return checkpoint(run, q, k, v, use_reentrant=False, preserve_rng_state=False)
    return run(q, k, v)


# ------------------------------------------------------------------------------------------------------ heads


def _repeats(heads: int, key_heads: int, ranks: int) -> int:
    """How often each key head is sent, so that all ranks get equally many, and those that their query heads read.

    Once if a rank has whole groups of query heads; once for each rank if several ranks share a group evenly; else once
    for each query head.
    """
    mine, group = heads // ranks, heads // key_heads
    if mine % group == 0:
        return 1
    return group // mine if group % mine == 0 else group


def _repeated(x: Tensor, times: int) -> Tensor:
    """[B, T, HK * times, D]: each head repeated ``times`` times in a row."""
    return x if times == 1 else x.unsqueeze(3).expand(-1, -1, -1, times, -1).flatten(2, 3)


def _exchanging_heads(
    q: Tensor, k: Tensor, v: Tensor, run: Callable[[Tensor, Tensor, Tensor], Tensor], call: str, sp: SequenceParallel,
    lengths: Sequence[int],
) -> Tensor:  # fmt: skip
    (B, T, H, K), V, ranks = q.shape, v.shape[-1], len(lengths)
    times = _repeats(H, k.shape[2], ranks)
    k, v = _repeated(k, times), _repeated(v, times)
    mine, few = H // ranks, k.shape[2] // ranks
    rows = torch.cat([_dealt_out(x, ranks) for x in (q, k, v)], -1)
    arrived = exchange_rows(rows.flatten(2).flatten(0, 1), [T] * ranks, lengths, f"queries, keys and values {call}", sp)
    sizes = mine * K, few * K, few * V
    whole = arrived.unflatten(1, (B, sum(sizes))).transpose(0, 1).split(sizes, -1)
    o = run(*(x.unflatten(-1, (n, -1)) for x, n in zip(whole, (mine, few, few), strict=True)))
    back = o.transpose(0, 1).reshape(sum(lengths), B * mine * V)
    arrived = exchange_rows(back, lengths, [T] * ranks, f"outputs {call}", sp)
    return arrived.view(ranks, T, B, mine, V).permute(2, 1, 0, 3, 4).reshape(B, T, H, V)


def _dealt_out(x: Tensor, ranks: int) -> Tensor:
    """[B, T, H, D] as [ranks, T, B, H / ranks * D]."""
    B, T, H, D = x.shape
    return x.reshape(B, T, ranks, H // ranks * D).permute(2, 1, 0, 3)


# ------------------------------------------------------------------------------------------------------- keys


def seen_keys(sight: Sight, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last + 1) of the keys that each rank's queries may see, regardless of documents, whose boundaries are on
    the device."""
    found = []
    for length, stop in zip(lengths, accumulate(lengths), strict=True):
        first, last = 0, stop if sight.is_causal else sight.total
        if sight.window is not None:
            first, last = max(0, stop - length - sight.window + 1), min(last, stop - 1 + sight.window)
        found.append((first, last) if length else (0, 0))
    return found


def _exchanging_keys(
    q: Tensor, k: Tensor, v: Tensor, sight: Sight, scale: float, backend: str, call: str, sp: SequenceParallel,
    lengths: Sequence[int],
) -> Tensor:  # fmt: skip
    (B, T, HK, K), V, stops = k.shape, v.shape[-1], list(accumulate(lengths))
    start, seen = stops[sp.rank] - T, seen_keys(sight, lengths)
    first, last = seen[sp.rank]
    cuts = [(max(a, start) - start, min(b, start + T) - start) for a, b in seen]
    cuts = [(a, max(a, b)) for a, b in cuts]
    received = [max(0, min(last, stop) - max(first, stop - n)) for n, stop in zip(lengths, stops, strict=True)]
    rows = torch.cat([k.flatten(2), v.flatten(2)], -1).transpose(0, 1).reshape(T, B * HK * (K + V))
    parts = torch.cat([rows[a:b] for a, b in cuts])
    arrived = exchange_rows(parts, [b - a for a, b in cuts], received, f"keys and values {call}", sp)
    keys, values = arrived.unflatten(1, (B, HK * (K + V))).transpose(0, 1).split([HK * K, HK * V], -1)
    mine = sight._replace(start=start, first=first)
    return attend(q, keys.unflatten(-1, (HK, K)), values.unflatten(-1, (HK, V)), mine, scale, backend)
