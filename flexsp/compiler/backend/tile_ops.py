"""Device functions of generated kernels, besides `flexsp.kernels.primitives`.

Rows of a tile past the chunk's length and columns past a size may hold anything unless said otherwise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.primitives import GATE_MIN, mm

HORIZON = tl.constexpr(-104.0)
"""Logarithm of a decay that float32 cannot hold."""
_SMALL = tl.constexpr(2048)  # in tiles of up to so many numbers a thread may hold one number along an axis


@triton.jit
def product(a, b, length, DOT: tl.constexpr, PREC: tl.constexpr, APART: tl.constexpr):
    """`mm`. With APART it stands in a branch, where Triton does not see that products feed each other.

    Triton distributes the warps of such products over rows alone, and with more than four warps two of them would then
    compute the same rows.
    """
    if APART:
        if length >= 0:  # always
            x = mm(a, b, DOT, PREC)
        else:
            x = tl.zeros([a.shape[0], b.shape[1]], tl.float32)
    else:
        x = mm(a, b, DOT, PREC)
    return x


@triton.jit
def add_product(x, a, b, length, DOT: tl.constexpr, PREC: tl.constexpr, APART: tl.constexpr):
    """x + `product`."""
    if APART:
        if length >= 0:  # always
            x = tl.dot(a.to(DOT), b.to(DOT), x, input_precision=PREC)
    else:
        x = tl.dot(a.to(DOT), b.to(DOT), x, input_precision=PREC)
    return x


@triton.jit
def keep_rows(x, n, other: tl.constexpr = 0.0):
    """x [R, ...] where row < n, else `other`."""
    rows = tl.arange(0, x.shape[0])
    if len(x.shape) == 2:
        rows = rows[:, None]
    return tl.where(rows < n, x, other)


@triton.jit
def keep_cols(x, n, other: tl.constexpr = 0.0):
    """x [R, S] where column < n, else `other`."""
    return tl.where(tl.arange(0, x.shape[1])[None, :] < n, x, other)


@triton.jit
def clamped(g):
    """Log gates in fp32, those whose decay is 0 as the lowest one (`flexsp.kernels.gates`)."""
    return tl.maximum(g.to(tl.float32), GATE_MIN, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def where_open(g, x):
    """x, the gradient of what `clamped` gives: 0 where that is the lowest."""
    return tl.where(g.to(tl.float32) <= GATE_MIN, 0.0, x)


@triton.jit
def larger(a, b):
    """The larger number; NaN if either is, as in PyTorch, where a GPU's instruction returns the other number."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    """The smaller number; NaN if either is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x, axis: tl.constexpr):
    """The largest number of x along an axis; NaN if x has one there."""
    return tl.reduce(x, axis, larger)


@triton.jit
def smallest(x, axis: tl.constexpr):
    """The smallest number of x along an axis; NaN if x has one there."""
    return tl.reduce(x, axis, smaller)


@triton.jit
def sum_over(x, axis: tl.constexpr):
    """The sum of x over an axis.

    Lanes exchange their numbers and add them. Where x is a product, it would be fused with the first addition, and each
    lane would round the other's product and not its own: all lanes must hold the same sum. `+ 0.0` is fused instead.
    """
    size: tl.constexpr = x.shape[0] * (x.shape[1] if len(x.shape) == 2 else 1)
    if size <= _SMALL:
        x += 0.0
    return tl.sum(x, axis=axis)


@triton.jit
def row_of(x, at):
    """Row `at` of x: [S] of [R, S], a number of [R]."""
    rows = tl.arange(0, x.shape[0])
    if len(x.shape) == 2:
        rows = rows[:, None]
    return tl.sum(tl.where(rows == at, x, 0.0), axis=0)


@triton.jit
def col_of(x, at):
    """Column `at` [R] of x [R, S]."""
    return tl.sum(tl.where(tl.arange(0, x.shape[1])[None, :] == at, x, 0.0), axis=1)


@triton.jit
def only_row(x, at, R: tl.constexpr):
    """[R, S] that is x [S] at row `at` and 0 elsewhere: the adjoint of `row_of`."""
    return tl.where((tl.arange(0, R) == at)[:, None], x[None, :], 0.0)


@triton.jit
def only_col(x, at, S: tl.constexpr):
    """[R, S] that is x [R] at column `at` and 0 elsewhere: the adjoint of `col_of`."""
    return tl.where((tl.arange(0, S) == at)[None, :], x[:, None], 0.0)


@triton.jit
def _sum_after(a, h, b, y):
    """Two runs of rows, the first before the second: the product of their gates, and their decayed sum."""
    return a * b, b * h + y


@triton.jit
def decayed_sums(x, g):
    """h_i = e^{g_i} h_{i-1} + x_i along the rows of x and g [R, S], which are zero past the chunk's length."""
    return tl.associative_scan((tl.exp(g), x), 0, _sum_after)[1]


@triton.jit
def _earlier_after(a, h, p, b, y, r):
    """As `_sum_after`, and the sum without the last row's own x."""
    return a * b, b * h + y, b * h + r


@triton.jit
def earlier_sums(x, g):
    """e^{g_i} h_{i-1} of `decayed_sums`."""
    return tl.associative_scan((tl.exp(g), x, tl.zeros_like(x)), 0, _earlier_after)[2]


@triton.jit
def _later_before(b, q, y, a, p, x):
    """Two runs of rows, the first BEHIND the second: the gate of the upper row, the product of all others, the sum."""
    return a, p * b * q, x + p * b * y


@triton.jit
def later_sums(x, g):
    """y_i = x_i + e^{g_{i+1}} y_{i+1}: the adjoint of `decayed_sums`."""
    return tl.associative_scan((tl.exp(g), tl.full(x.shape, 1.0, tl.float32), x), 0, _later_before, reverse=True)[2]


@triton.jit
def below(C: tl.constexpr, D: tl.constexpr, diagonal):
    """[C, D], true where column <= row + diagonal."""
    return tl.arange(0, D)[None, :] <= tl.arange(0, C)[:, None] + diagonal


@triton.jit
def eye(C: tl.constexpr, D: tl.constexpr):
    """The unit matrix [C, D]."""
    return (tl.arange(0, C)[:, None] == tl.arange(0, D)[None, :]).to(tl.float32)
