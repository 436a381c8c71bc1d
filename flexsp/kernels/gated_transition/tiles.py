"""How pairs of a chunk's tokens are decayed by way of the row between two halves of a block of rows."""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.gated_keys.tiles import rows_of


@triton.jit
def factors(own, running, level, cols, C: tl.constexpr, K: tl.constexpr):
    """(e^{b_i - b_r} of second halves, e^{b_r - b_i} of first halves) with r the last row of the first half of a block
    of 2 << level rows; elsewhere 0. `own` is b_i, all rows are in `running` [C, K]."""
    i = tl.arange(0, C)
    reference = rows_of(running, ((i >> (level + 1)) << (level + 1)) + (1 << level) - 1, cols, K)
    second = (((i >> level) & 1) == 1)[:, None]
    up = tl.exp(tl.where(second, own - reference, float("-inf")))
    return up, tl.exp(tl.where(second, float("-inf"), reference - own))


@triton.jit
def within(level, C: tl.constexpr):
    """Pairs of rows of one block of 2 << level."""
    i = tl.arange(0, C)
    return (i[:, None] >> (level + 1)) == (i[None, :] >> (level + 1))
