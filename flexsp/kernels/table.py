"""The chunk table: which tokens of a shard form which chunk when documents are packed."""

from __future__ import annotations

import torch

__all__ = ["chunk_table"]


def chunk_table(cu_seqlens: torch.Tensor, start: int, stop: int, C: int, last_rank: bool = True) -> torch.Tensor:
    """Cuts the tokens [start, stop) of a packed sequence into chunks that never straddle documents.

    Built with tensor operations on the device of ``cu_seqlens`` from host integers only: nothing synchronises.

    Args:
        cu_seqlens: int32 or int64 [N+1], non-decreasing global document boundaries, first entry 0. Tokens from the last
            entry on belong to no document: they are the tail, which no slot has.
        start, stop: the shard's token range in the packed sequence; ``start == stop`` is an empty shard.
        C: largest chunk length.
        last_rank: whether this shard owns the empty documents that lie at the very end of the sequence.

    Returns:
        int32 [ceil((stop - start) / C) + N, 5], one row a slot, in token order:
        ``(t0, length, doc, first, last)``. ``t0`` is the slot's first token, counted from ``start``; ``length`` is
        0..C; ``first`` (``last``) is 1 where the document starts (ends) in this slot. An empty document has one
        slot of length 0 with first = last = 1 on the shard that holds its position. Slots that are not needed come
        last: they have length 0 and first = last = 0, so a state passes through them unchanged, and ``t0`` is the
        shard's first token of the tail. A shard with tokens has at least one of them, the last one.
    """
    device = cu_seqlens.device
    bounds = cu_seqlens.to(torch.int64)
    begin, end = bounds[:-1], bounds[1:]
    n_docs, n_slots = begin.numel(), -(-(stop - start) // C) + begin.numel()
    if n_slots == 0 or n_docs == 0:
        return torch.zeros(n_slots, 5, dtype=torch.int32, device=device)
    local_begin = begin.clamp(start, stop)
    tokens = end.clamp(start, stop) - local_begin
    here = (begin >= start) & (begin < stop)
    if last_rank:
        here = here | (begin >= stop)
    n_chunks = torch.where(begin == end, here.to(torch.int64), (tokens + (C - 1)) // C)
    slots_end = n_chunks.cumsum(0)

    slot = torch.arange(n_slots, device=device)
    used = slot < slots_end[-1]
    doc = torch.searchsorted(slots_end, slot, right=True).clamp(max=n_docs - 1)
    chunk = slot - (slots_end - n_chunks)[doc]
    t0 = local_begin[doc] - start + chunk * C
    length = (tokens[doc] - chunk * C).clamp(0, C)
    first = (chunk == 0) & (begin[doc] >= start)
    last = (chunk == n_chunks[doc] - 1) & (end[doc] <= stop)
    rows = torch.stack([t0, length, doc, first.to(torch.int64), last.to(torch.int64)], dim=1)
    tail = torch.nn.functional.pad((bounds[-1:].clamp(start, stop) - start), (0, 4))
    return torch.where(used[:, None], rows, tail).to(torch.int32)
