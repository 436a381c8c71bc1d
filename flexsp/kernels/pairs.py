"""Rows of tokens in tiles of pairs of channels, which rotations turn.

Pairs are channels 2 p and 2 p + 1, or with HALVES p and p + K / 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["load_pairs", "load_turned", "partner_of", "store_pairs"]


@triton.jit
def load_pairs(rows, there, shift, FIRST: tl.constexpr, K: tl.constexpr, BP: tl.constexpr, HALVES: tl.constexpr):
    """fp32 tiles [BT, BP] of the first and the second channels of the pairs from FIRST on, of rows of K numbers at
    `rows` [BT]; 0 outside. shift: further pairs."""
    BT: tl.constexpr = rows.shape[0]
    if HALVES:
        p = FIRST + shift + tl.arange(0, BP)
        inside = there[:, None] & (p < K // 2)[None, :]
        at = rows[:, None] + p[None, :]
        one, two = tl.load(at, mask=inside, other=0.0), tl.load(at + K // 2, mask=inside, other=0.0)
    else:
        k = 2 * (FIRST + shift) + tl.arange(0, 2 * BP)
        tile = tl.load(rows[:, None] + k[None, :], mask=there[:, None] & (k < K)[None, :], other=0.0)
        one, two = tl.split(tl.reshape(tile, [BT, BP, 2]))
    return one.to(tl.float32), two.to(tl.float32)


@triton.jit
def store_pairs(
    rows, there, one, two, shift, FIRST: tl.constexpr, K: tl.constexpr, BP: tl.constexpr, HALVES: tl.constexpr
):
    """Stores the tiles that `load_pairs` would read."""
    BT: tl.constexpr = rows.shape[0]
    one, two = one.to(rows.dtype.element_ty), two.to(rows.dtype.element_ty)
    if HALVES:
        p = FIRST + shift + tl.arange(0, BP)
        inside = there[:, None] & (p < K // 2)[None, :]
        at = rows[:, None] + p[None, :]
        tl.store(at, one, mask=inside)
        tl.store(at + K // 2, two, mask=inside)
    else:
        k = 2 * (FIRST + shift) + tl.arange(0, 2 * BP)
        tile = tl.reshape(tl.join(one, two), [BT, 2 * BP])
        tl.store(rows[:, None] + k[None, :], tile, mask=there[:, None] & (k < K)[None, :])


@triton.jit
def load_turned(
    base, stride_t, length, col0, C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, HALVES: tl.constexpr
):
    """The tile [C, BK] of `load_rows` with pairs turned by a quarter back: (x, y) becomes (y, -x)."""
    rows = tl.arange(0, C)[:, None]
    k = col0 + tl.arange(0, BK)
    other, second = partner_of(k, K, HALVES)
    inside = (rows < length) & ((k < K) & (other < K))[None, :]
    x = tl.load(base + rows * stride_t + other[None, :], mask=inside, other=0.0)
    return tl.where(second[None, :], -x, x)


@triton.jit
def partner_of(k, K: tl.constexpr, HALVES: tl.constexpr):
    """(the other channel of the pair, whether k is the second one) of channels k; no channel where K is odd and k its
    last one."""
    if HALVES:
        second = k >= K // 2
        other = tl.where(second, k - K // 2, k + K // 2)
    else:
        second = k % 2 == 1
        other = tl.where(second, k - 1, k + 1)
    return other, second
