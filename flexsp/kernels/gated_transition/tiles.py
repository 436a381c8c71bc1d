"""How pairs of a chunk's tokens are decayed, where some read the state before their own gate and others after it."""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.gated_keys.tiles import last_row, rows_of
from flexsp.kernels.primitives import GATE_MIN, load_rows


@triton.jit
def both_gates(g, g_st, length, at, C: tl.constexpr, K: tl.constexpr, BN: tl.constexpr):
    """(b_i, b_i - g_i, b_C) of running sums b of gates, of channels at.. of a chunk; gates below -104 act as that."""
    given = load_rows(g, g_st, length, at, C, K, BN).to(tl.float32)
    given = tl.maximum(given, GATE_MIN, propagate_nan=tl.PropagateNan.ALL)
    after = tl.cumsum(given, axis=0)
    return after, after - given, last_row(after, C)


@triton.jit
def factors(after, before, running, level, cols, C: tl.constexpr, K: tl.constexpr):
    """(e^{b_i - b_r}, e^{b_i - g_i - b_r}, e^{b_r - b_i}) with r the last row of the first half of a block of 2 << level
    rows. The first two are of second halves, the last one is of first halves; elsewhere they are 0. All rows of b are
    in `running` [C, K]."""
    i = tl.arange(0, C)
    reference = rows_of(running, ((i >> (level + 1)) << (level + 1)) + (1 << level) - 1, cols, K)
    second = (((i >> level) & 1) == 1)[:, None]
    up = tl.exp(tl.where(second, after - reference, float("-inf")))
    earlier = tl.exp(tl.where(second, before - reference, float("-inf")))
    return up, earlier, tl.exp(tl.where(second, float("-inf"), reference - after))


@triton.jit
def within(level, C: tl.constexpr):
    """Pairs of rows of one block of 2 << level."""
    i = tl.arange(0, C)
    return (i[:, None] >> (level + 1)) == (i[None, :] >> (level + 1))
