"""Tiles of states under a dense transition S' = A S + F: all rows and some columns, with one K x K product a hop.

A column of A S depends on that column of S alone, so tiles of some columns do not depend on each other.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["MOST", "load_dense", "through"]

MOST = 256  # rows of a state at most: a tile of 256 rows has 16 columns, the fewest that tl.dot takes

_BLOCK = tl.constexpr(32)
_UNROLLED = tl.constexpr(128)


@triton.jit
def load_dense(
    states, A, b, h, offsets, mask, nseg, H, K: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """(F, its address, the address of A) of the only segment; F is zero where there is none."""
    at = states + ((b.to(tl.int64) * (nseg + 1) + (0 if REVERSE else 1)) * H + h) * (K * V) + offsets
    return tl.load(at, mask=mask & (nseg > 0), other=0.0), at, A + (b.to(tl.int64) * H + h) * (K * K)


@triton.jit
def _add_product(
    new, some, A, from_, stride, rows, cols, i, live, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """new + what rows i.. of S add to A S, to A^T S if REVERSE; and `some` + how many numbers of A are not 0."""
    inner = i + tl.arange(0, BLOCK)
    if REVERSE:
        place = inner[None, :] * K + rows[:, None]
    else:
        place = rows[:, None] * K + inner[None, :]
    a = tl.load(A + place, mask=(rows < K)[:, None] & (inner < K)[None, :] & live, other=0.0)
    inside = (inner < K)[:, None] & (cols < V)[None, :]
    s = tl.load(from_ + inner[:, None] * stride, mask=inside, other=0.0, cache_modifier=".cg")
    some += tl.sum(tl.sum((a != 0).to(tl.int32), 1), 0)
    return tl.dot(a, s, new, input_precision="tf32x3"), some


@triton.jit
def through(
    A, from_, stride, S, F, rows, cols, live, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """A S + F, or A^T S + F if REVERSE; S where not `live`.

    The product goes over blocks of rows of S, since A as a whole would not fit the registers. These blocks are read
    again from where S [BK, BV] was loaded: `from_` are pointers [1, BV], and rows are `stride` apart. An A of zeros,
    as where a document begins, lets nothing pass, not even NaN.
    """
    BLOCK: tl.constexpr = min(BK, _BLOCK)
    new = F
    some = 0
    if BK > _UNROLLED:  # unrolled, the loads of all rounds would be in flight together, and would not fit either
        for i in range(0, BK, BLOCK):
            new, some = _add_product(new, some, A, from_, stride, rows, cols, i, live, K, V, BLOCK, REVERSE)
    else:
        for i in tl.static_range(0, BK, BLOCK):
            new, some = _add_product(new, some, A, from_, stride, rows, cols, i, live, K, V, BLOCK, REVERSE)
    return tl.where(live, tl.where(some > 0, new, F), S)
