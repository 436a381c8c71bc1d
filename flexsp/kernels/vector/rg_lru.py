"""The gates of the RG-LRU, made in registers: log gates g = rate sigmoid(r), inputs sqrt(1 - e^{2 g}) sigmoid(i) x.

`rate`, of a channel, is -c softplus(Lambda). The first token of a text may have a weight of 1 in the place of the root
(docs/math.md, section 9).
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.primitives import GATE_MIN, LOG2E

_NEAR_ZERO = tl.constexpr(-0.5)
_LEAST = tl.constexpr(1.1754943508222875e-38)  # a normal number


@triton.jit
def starts_of(unit, c, b, doc, first, PACKED: tl.constexpr, UNIT: tl.constexpr):
    """Whether a text starts with chunk c whose first token has a weight of 1; `unit` says it of every text, or not."""
    starts = False
    if UNIT:
        if PACKED:
            starts = first & (tl.load(unit + doc, mask=first, other=0) != 0)
        else:
            starts = (c == 0) & (tl.load(unit + b) != 0)
    return starts


@triton.jit
def sigmoid(x):
    """As `tl.sigmoid`, without what that does for results too small for normal numbers."""
    return 1.0 / (1.0 + tl.exp2(-x * LOG2E))


@triton.jit
def gate_of(r, rate, there):
    """sigmoid(r) and the log gate; where there is no token, a gate of 0."""
    opened = sigmoid(r)
    g = tl.maximum(rate * opened, GATE_MIN, propagate_nan=tl.PropagateNan.ALL)
    return opened, tl.where(there, g, 0.0)


@triton.jit
def weight_of(g, starts, MAY_START: tl.constexpr):
    """sqrt(1 - e^{2 g}) and its derivative, both 0 where the root's argument has underflowed.

    Near 0 the argument is a series, since 1 - e^{2 g} cancels there.
    """
    a = tl.exp2(g * LOG2E)
    z = 2.0 * g
    series = 1 / 120 + z * (1 / 720 + z * (1 / 5040 + z * (1 / 40320)))
    series = -z * (1.0 + z * (1 / 2 + z * (1 / 6 + z * (1 / 24 + z * series))))
    rest = tl.where(z > _NEAR_ZERO, series, 1.0 - a * a)
    there = rest >= _LEAST
    inverse = tl.where(there, tl.rsqrt(tl.where(there, rest, 1.0)), 0.0)
    weight = rest * inverse  # NaN stays
    slope = -a * a * inverse
    if MAY_START:
        weight = tl.where(starts, 1.0, weight)
        slope = tl.where(starts, 0.0, slope)
    return weight, slope


@triton.jit
def token_of(x, r, e, rate, there, starts, MAY_START: tl.constexpr):
    """A token's log gate and sigmoid(r); what it adds to the state for each x, w = weight sigmoid(e); and the
    derivatives of w x after e and after the log gate."""
    opened, g = gate_of(r, rate, there)
    weight, slope = weight_of(g, starts, MAY_START)
    entry = sigmoid(e)
    w = weight * entry
    return g, opened, w, w * x * (1.0 - entry), slope * entry * x


@triton.jit
def made_of(xs, rs, es, rate, starts, length, C: tl.constexpr, UNIT: tl.constexpr):
    """What is added to the state, and the log gates, of every place of a chunk, of its rows of x, r and i."""
    added: tl.tuple = ()
    gates: tl.tuple = ()
    for i in tl.static_range(C):
        g, _, w, _, _ = token_of(xs[i], rs[i], es[i], rate, i < length, starts, UNIT and i == 0)
        added = added + (w * xs[i],)  # noqa: RUF005 (Triton knows no unpacking)
        gates = gates + (g,)  # noqa: RUF005
    return added, gates


@triton.jit
def gates_of(rs, rate, length, C: tl.constexpr):
    """The log gates alone."""
    gates: tl.tuple = ()
    for i in tl.static_range(C):
        _, g = gate_of(rs[i], rate, i < length)
        gates = gates + (g,)  # noqa: RUF005
    return gates


@triton.jit
def through_gate(dg, g, opened, there):
    """The gradients of r and, by this token, of the rate, of that of the log gate."""
    return dg * g * (1.0 - opened), tl.where(there, dg * opened, 0.0)
