"""Softmax attention in PyTorch, a block of queries at a time, with its backward pass.

Only one block's scores are in memory at a time. The backward pass computes them again. Sums and softmax are in float32
(float64 for float64 inputs).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flexsp.comm.derivatives import first_only, untransformed
from flexsp.comm.process_group import define_op
from flexsp.ops._validate import accumulation_dtype

__all__ = ["attend_in_blocks"]

_SCORES = 1 << 22  # scores in a block at most: 16 MiB in float32
_ROWS = 256  # queries in a block at most
_NAME = "scaled_dot_product_attention"
_INSTEAD = "torch.nn.functional.scaled_dot_product_attention has them, on one rank"


def attend_in_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: torch.Tensor, scale: float, offset: int, causal: bool,
    window: int | None,
) -> torch.Tensor:  # fmt: skip
    """softmax(scale q k^T) v of q [B, TQ, H, K], k [B, TK, HK, K] and v [B, TK, HK, V], as [B, TQ, H, V].

    Args:
        ranges: int64 [2, TQ]; query t sees the keys ``ranges[0, t]`` to ``ranges[1, t] - 1``. Neither decreases with t.
        offset: the first query's place among the keys.
        causal: with ``offset`` and ``window`` it bounds ``ranges`` on the host, where its values are not known.
    """
    untransformed(_NAME, _INSTEAD, q, k, v)
    return _BlocksFunction.apply(q, k, v, ranges, scale, offset, causal, -1 if window is None else window)


def _blocks(
    shape: tuple[int, int, int], keys: int, ranges: torch.Tensor, offset: int, causal: bool, window: int
) -> Iterator[tuple[int, int, int, int]]:
    """(first query, last + 1, first key, last + 1) of every block; ``shape`` is (B, TQ, H).

    On a GPU the bounds follow from offset, causal and window alone: reading ``ranges`` would synchronise.
    """
    B, T, H = shape
    seen = keys if window < 0 else min(keys, 2 * window + _ROWS)
    rows = max(1, min(_ROWS, _SCORES // max(1, B * H * seen)))
    for start in range(0, T, rows):
        stop = min(T, start + rows)
        if ranges.device.type == "cpu":
            yield start, stop, int(ranges[0, start]), int(ranges[1, stop - 1])
            continue
        first = 0 if window < 0 else max(0, offset + start - window + 1)
        last = stop if causal else keys if window < 0 else stop - 1 + window
        yield start, stop, first, min(keys, offset + last)


def _grouped(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, T, H, D] as [B, heads, H // heads, T, D], in the dtype that is summed in."""
    return x.to(accumulation_dtype(x)).unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)


def _by_heads(x: torch.Tensor) -> torch.Tensor:
    return x.to(accumulation_dtype(x)).transpose(1, 2)


def _weights(q: torch.Tensor, k: torch.Tensor, ranges: torch.Tensor, first: int) -> torch.Tensor:
    """softmax(q k^T) [B, HK, G n, m] of n scaled queries [B, HK, G, n, K] and the m keys from `first` on."""
    scores = q.flatten(2, 3) @ k.mT
    at = torch.arange(first, first + k.shape[2], device=k.device)
    hidden = (at < ranges[0, :, None]) | (at >= ranges[1, :, None])
    scores.unflatten(2, q.shape[2:4]).masked_fill_(hidden, -torch.inf)
    return scores.softmax(-1)


def _run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: torch.Tensor, scale: float, *bounds: Any
) -> torch.Tensor:
    B, T, H, _ = q.shape
    groups, keys, values = _grouped(q, k.shape[2]) * scale, _by_heads(k), _by_heads(v)
    o = q.new_empty(B, T, H, v.shape[-1])
    for start, stop, first, last in _blocks((B, T, H), k.shape[1], ranges, *bounds):
        here = groups[:, :, :, start:stop]
        weights = _weights(here, keys[:, :, first:last], ranges[:, start:stop], first)
        found = weights @ values[:, :, first:last]
        o[:, start:stop] = found.unflatten(2, here.shape[2:4]).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return o


def _run_backward(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: torch.Tensor, scale: float,
    *bounds: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    B, T, H, K = q.shape
    groups, keys, values = _grouped(q, k.shape[2]) * scale, _by_heads(k), _by_heads(v)
    d_out, dq = _grouped(do, k.shape[2]), q.new_empty(B, T, H, K)
    dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (keys, values))
    for start, stop, first, last in _blocks((B, T, H), k.shape[1], ranges, *bounds):
        here, d_here = groups[:, :, :, start:stop], d_out[:, :, :, start:stop].flatten(2, 3)
        weights = _weights(here, keys[:, :, first:last], ranges[:, start:stop], first)
        dv[:, :, first:last] += weights.mT @ d_here
        d_weights = d_here @ values[:, :, first:last].mT
        d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))
        dk[:, :, first:last] += d_scores.mT @ here.flatten(2, 3)
        found = d_scores @ keys[:, :, first:last] * scale
        dq[:, start:stop] = found.unflatten(2, here.shape[2:4]).permute(0, 3, 1, 2, 4).flatten(2, 3)
    dk, dv = (x.transpose(1, 2).to(q.dtype).contiguous() for x in (dk, dv))
    return dq, dk, dv


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
    return q.new_empty(*q.shape[:3], v.shape[-1])


def _fake_backward(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_ARGUMENTS = "Tensor ranges, float scale, SymInt offset, bool causal, SymInt window"
_attend = define_op(f"attend(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> Tensor", _run, _fake)
_attend_backward = define_op(
    f"attend_backward(Tensor do_, Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)


class _BlocksFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        """Arguments as of `_run`."""
        ctx.numbers = arguments[4:]
        ctx.save_for_backward(*arguments[:4])
        return _attend(*arguments)

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        first_only(_NAME, _INSTEAD)
        untransformed(_NAME, _INSTEAD, do)
        return *_attend_backward(do, *ctx.saved_tensors, *ctx.numbers), None, None, None, None, None
