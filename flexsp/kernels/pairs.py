"""Rows of tokens in tiles of pairs of channels, which rotations turn.

Pairs are channels 2 p and 2 p + 1, or with HALVES p and p + K / 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["load_pairs", "of_pairs", "quarter_turn", "store_pairs", "turn_across"]


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
def quarter_turn(x):
    """x [N, M] with pairs of channels side by side turned by a quarter: (x, y) becomes (-y, x)."""
    x, y = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return tl.reshape(tl.join(-y, x), [x.shape[0], 2 * x.shape[1]])


@triton.jit
def of_pairs(x):
    """Of a tile [N, M] of channels the sums of pairs side by side, [N, M / 2]."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), axis=2)


@triton.jit
def turn_across(state, other, k0, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Of a state's tile [BK, BV >= V] from row k0 on, and the K x V state at `other`, <S, J S'> of each pair of rows:
    [BK / 2]. J turns pairs of rows by a quarter."""
    k = k0 + tl.arange(0, BK)
    partner = k + 1 - 2 * (k % 2)
    v = tl.arange(0, BV)
    inside = ((k < K) & (partner < K))[:, None] & (v < V)[None, :]
    x = tl.load(other + partner[:, None] * V + v[None, :], mask=inside, other=0.0)
    sign = tl.where(k % 2 == 0, -1.0, 1.0)
    sums = tl.sum(state * x, axis=1) * sign
    return tl.sum(tl.reshape(sums, [BK // 2, 2]), axis=1)
