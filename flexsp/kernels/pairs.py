"""Rows of tokens in tiles of pairs of channels, which rotations turn.

Pairs are channels 2 p and 2 p + 1, or with HALVES p and p + K / 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["load_pairs", "load_quarter", "of_pairs", "store_pairs", "store_turns"]

_PI2 = tl.constexpr(6.283185307179586)


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
def load_quarter(
    rows, base, stride_t, length, col0, C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, HALVES: tl.constexpr
):
    """The tile `rows` [C, BK] that `load_rows` has read, with pairs turned by a quarter: (x, y) becomes (-y, x).

    Channels side by side change places in registers. Halves may lie in tiles of other programs: they are read once
    more, in blocks that lie side by side in memory where sizes allow that.
    """
    HALF: tl.constexpr = K // 2
    BLOCK: tl.constexpr = min(BK, HALF)
    if not HALVES:
        x, y = tl.split(tl.reshape(rows, [C, BK // 2, 2]))
        found = tl.reshape(tl.join(-y, x), [C, BK])
    elif K % 2 == 0 and HALF % BLOCK == 0 and BK % BLOCK == 0:
        t = tl.arange(0, C)[:, None, None]
        n = col0 // BLOCK + tl.arange(0, BK // BLOCK)[None, :, None]
        second = n >= HALF // BLOCK
        other = tl.where(second, n - HALF // BLOCK, n + HALF // BLOCK)
        at = base + t * stride_t + other * BLOCK + tl.arange(0, BLOCK)[None, None, :]
        x = tl.load(at, mask=(t < length) & (n < K // BLOCK), other=0.0)
        found = tl.reshape(tl.where(second, x, -x), [C, BK])
    else:
        t = tl.arange(0, C)[:, None]
        k = col0 + tl.arange(0, BK)
        second = k >= HALF
        other = tl.where(second, k - HALF, k + HALF)
        x = tl.load(base + t * stride_t + other[None, :], mask=(t < length) & (k < 2 * HALF)[None, :], other=0.0)
        found = tl.where(second[None, :], x, -x)
    return found


@triton.jit
def of_pairs(x, HALVES: tl.constexpr):
    """Of a tile [C, BK] of channels the sums of pairs [C, BK / 2]; of halves, which may lie in tiles of other programs,
    the tile itself."""
    if HALVES:
        found = x
    else:
        found = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), axis=2)
    return found


@triton.jit
def store_turns(to, x, more, stride_t, length, col0, K: tl.constexpr, S: tl.constexpr, HALVES: tl.constexpr):
    """Stores what `of_pairs` made of the first S pairs, times 2 pi: rows of S numbers, or 2 S of HALVES, those of first
    channels and then those of second ones. Adds what lies in the same places at `more`, if that is not None."""
    N: tl.constexpr = x.shape[1]
    t = tl.arange(0, x.shape[0])[:, None]
    if HALVES:
        k = col0 + tl.arange(0, N)
        second = k >= K // 2
        p = tl.where(second, k - K // 2, k)
        column = tl.where(second, S + p, p)
    else:
        p = col0 // 2 + tl.arange(0, N)
        column = p
    at = t * stride_t + column[None, :]
    inside = (t < length) & (p < S)[None, :]
    found = _PI2 * x
    if more is not None:
        found += tl.load(more + at, mask=inside, other=0.0)
    tl.store(to + at, found, mask=inside)
