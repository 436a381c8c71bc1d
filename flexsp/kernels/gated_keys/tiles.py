"""Running gates of a chunk, and how pairs of its tokens are decayed."""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.primitives import GATE_MIN, load_rows

_MUCH = tl.constexpr(-80.0)  # a sum of gates: e^40 is no large factor


@triton.jit
def rows_of(b, i, cols, N: tl.constexpr):
    """Rows i of columns of b [C, N]."""
    return tl.load(b + i[:, None] * N + cols[None, :], mask=(cols < N)[None, :], other=0.0)


@triton.jit
def decays(own, b, level, cols, C: tl.constexpr, N: tl.constexpr):
    """(e^{|b_i - b_r|} <= 1 with r the last row of the first half of a block of 2 << level rows, whether i is in the
    second half). `own` is b_i, all rows are in b [C, N]."""
    i = tl.arange(0, C)
    reference = rows_of(b, ((i >> (level + 1)) << (level + 1)) + (1 << level) - 1, cols, N)
    second = (((i >> level) & 1) == 1)[:, None]
    return tl.exp(tl.where(second, own - reference, reference - own)), second


@triton.jit
def half(q, k, own, b, level, cols, C: tl.constexpr, N: tl.constexpr):
    """(x, decay, second) with those of `decays`; x is q decay in second halves, k decay in first ones.

    So x_i x_j is what a pair of rows of the two halves of a block adds to the scores.
    """
    decay, second = decays(own, b, level, cols, C, N)
    return tl.where(second, q, k) * decay, decay, second


@triton.jit
def running_gates(g, g_st, length, at, C: tl.constexpr, K: tl.constexpr, BN: tl.constexpr):
    """Running sums b of gates, of channels at.. of a chunk; gates below -104 act as that."""
    given = load_rows(g, g_st, length, at, C, K, BN).to(tl.float32)
    return tl.cumsum(tl.maximum(given, GATE_MIN, propagate_nan=tl.PropagateNan.ALL), axis=0)


@triton.jit
def last_row(b, C: tl.constexpr):
    """b_C of b [C, N]."""
    return tl.sum(tl.where(tl.arange(0, C)[:, None] == C - 1, b, 0.0), axis=0)


@triton.jit
def far_apart(end):
    """In how many channels gates add up to so much, `end`, that half of it is a large factor: 0 where gates are small.
    NaN is much."""
    return tl.sum((~(end >= _MUCH)).to(tl.int32), axis=0)


@triton.jit
def up_to_last_large(small_gates, at, end, RUN: tl.constexpr):
    """How many of the RUN chunks from `at` on, which end before `end`, there are up to the last one whose gates are not
    small. 1 where RUN is 1: then `small_gates` is not read."""
    count = 1
    if RUN > 1:
        c = tl.arange(0, RUN)
        said = tl.load(small_gates + at + c, mask=at + c < end, other=1)
        count = tl.max(tl.where(said == 0, c + 1, 0), axis=0)
    return count
