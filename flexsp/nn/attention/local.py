"""Attention on this device: which keys a query sees, and which kernel computes the outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from flexsp.nn.attention.blocks import attend_in_blocks

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["BACKENDS", "Sight", "attend", "choose_backend"]

BACKENDS = ("auto", "sdpa", "flex", "blocks")
_HALVES = (torch.float16, torch.bfloat16)
_BLOCK = 128  # queries and keys of a block of flex_attention's mask
_LEAST_HEAD, _LARGEST_HEAD = 16, 256  # head sizes that the kernels of flex_attention and SDPA take
_LARGEST_HEAD_OF_FP32 = 128  # flex_attention's float32 tiles of larger heads do not fit in shared memory


class Sight(NamedTuple):
    """Which keys the queries see.

    Attributes:
        is_causal: no key after the query.
        window: the last ``window`` keys up to the query and, if not causal, as many from the query on; None: all keys.
        cu_seqlens: boundaries of documents in the whole sequence, or None.
        total: tokens of the whole sequence.
        start: place of the first query in the whole sequence.
        first: place of the first key.
    """

    is_causal: bool
    window: int | None
    cu_seqlens: torch.Tensor | None
    total: int
    start: int = 0
    first: int = 0

    def ranges(self, queries: int, keys: int, device: torch.device) -> torch.Tensor:
        """int64 [2, queries]: the first key that each query sees, and the one after the last. Neither decreases from
        one query to the next, because documents, causality and windows all select a contiguous range of keys."""
        at = torch.arange(queries, device=device) + self.start
        begin, end = torch.zeros_like(at), torch.full_like(at, self.total)
        if self.cu_seqlens is not None:
            bounds = torch.nn.functional.pad(self.cu_seqlens.to(torch.int64), (0, 1), value=self.total)
            document = (torch.searchsorted(bounds, at, right=True) - 1).clamp(0, bounds.numel() - 2)
            begin, end = bounds[document], bounds[document + 1]  # the tail is taken for one more document
        if self.is_causal:
            end = at + 1
        if self.window is not None:
            begin, end = begin.maximum(at - self.window + 1), end.minimum(at + self.window)
        return (torch.stack([begin, end]) - self.first).clamp(0, keys)


def choose_backend(q: torch.Tensor, v: torch.Tensor, sight: Sight, keys: int) -> str:
    """The backend that ``backend="auto"`` means. It depends on device, dtype and sizes alone.

    ``blocks`` on CPU, in float64, for head sizes that the kernels do not take, and for empty tensors. Else ``sdpa`` in
    half precision, if queries see all keys or all keys before them and K = V. Else ``flex``.
    """
    sizes = q.shape[-1], v.shape[-1]
    largest = _LARGEST_HEAD if q.dtype in _HALVES else _LARGEST_HEAD_OF_FP32
    fits = min(sizes) >= _LEAST_HEAD and max(sizes) <= largest
    if not q.is_cuda or q.dtype == torch.float64 or not fits or q.numel() == 0 or keys == 0:
        return "blocks"
    plain = q.dtype in _HALVES and sizes[0] == sizes[1]
    return "sdpa" if plain and _is_plain(q.shape[1], keys, sight) else "flex"


def _is_plain(queries: int, keys: int, sight: Sight) -> bool:
    square = queries == keys or not sight.is_causal
    return square and sight.window is None and sight.cu_seqlens is None


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sight: Sight, scale: float, backend: str) -> torch.Tensor:
    """softmax(scale q k^T) v of q [B, TQ, H, K], k [B, TK, HK, K] and v [B, TK, HK, V], as [B, TQ, H, V]."""
    if backend == "auto":
        backend = choose_backend(q, v, sight, k.shape[1])
    elif q.numel() == 0 or k.shape[1] == 0:
        backend = "blocks"
    if backend == "sdpa":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        o = F.scaled_dot_product_attention(q, k, v, is_causal=sight.is_causal, scale=scale, enable_gqa=grouped)
        return o.transpose(1, 2)
    ranges = sight.ranges(q.shape[1], k.shape[1], q.device)
    if backend == "flex":
        return _flex(q, k, v, ranges, scale)
    return attend_in_blocks(q, k, v, ranges, scale, sight.start - sight.first, sight.is_causal, sight.window)


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: torch.Tensor, scale: float) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    mask = block_mask(ranges, k.shape[1])
    run: Callable[..., Any] = flex_attention
    if q.is_cuda and not torch.compiler.is_compiling():
        run = _compiled_flex_attention()
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return run(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped).transpose(1, 2)


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    """flex_attention as one kernel. Not compiled, it would hold all scores in memory."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def block_mask(ranges: torch.Tensor, keys: int) -> BlockMask:
    """The mask of `Sight.ranges` for flex_attention, made block by block on the device, without synchronising.

    A block of keys is needed if it overlaps the range from the first query's first key to the last query's last key. It
    needs no mask if it lies in the range that all queries see, from the last query's first key to the first query's
    last key.
    """
    from torch.nn.attention.flex_attention import BlockMask

    queries, device = ranges.shape[1], ranges.device
    begin, end = ranges.to(torch.int32)
    top = torch.arange(0, queries, _BLOCK, device=device)
    bottom = (top + _BLOCK - 1).clamp(max=queries - 1)
    block = torch.arange(-(-keys // _BLOCK), device=device) * _BLOCK
    touched = (block + _BLOCK > begin[top, None]) & (block < end[bottom, None])
    whole = (block >= begin[bottom, None]) & (block + _BLOCK <= end[top, None])

    def sees(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key >= begin[query]) & (key < end[query])

    some, all_of = _listed(touched & ~whole), _listed(whole)
    return BlockMask.from_kv_blocks(*some, *all_of, _BLOCK, sees, (queries, keys))


def _listed(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each block of queries, the number of chosen blocks of keys, and a list of all blocks that begins with these;
    both int32."""
    order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]
