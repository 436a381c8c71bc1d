"""The walks of the selective scan: what segments add to the state, the outputs, and the same for the backward pass.

A program is one warp and walks the tokens of a segment, with the states [BD, BN] of some channels in registers. Tokens
come in groups of four, whose inputs are loaded while the group before is computed. Places of a group without a token
have dt = 0 and all else 0: a state passes them. Log decays are in base 2. Nothing but states at the edges of segments,
and in the backward pass at those of chunks, goes to memory. The gradients are in `grads`.

A lane holds all numbers of a channel, so that nothing passes between lanes. Triton lays a tile out as its loads from
memory suit best, so `place` and `state_at` tell it that neighbours in the tile are none in memory. B and C come as
[batch, T + C, BN] with zeros in the places that are none: their rows are read by all lanes, without a mask where there
are no documents.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.primitives import LOG2E, chunk_info, step_of
from flexsp.runtime.launch import begin

_NEAR_ZERO = tl.constexpr(0.25)


# Tiles ----------------------------------------------------------------------------------------------------------------


@triton.jit
def place(d0, D: tl.constexpr, P: tl.constexpr, BD: tl.constexpr):
    """Channels, whether they are there, and their heads and places in these."""
    d = tl.max_contiguous(d0 + tl.arange(0, BD), 1)
    return d, d < D, (d // P).to(tl.int64), d % P


@triton.jit
def group_of(table, group, T, C: tl.constexpr, PACKED: tl.constexpr):
    """The first token of a group of four, how many of its chunk are there from it on (or none), its document, and
    whether this starts or ends with the group."""
    start, length, doc, first, last = chunk_info(table, group // (C // 4), T, C, PACKED)
    at = group % (C // 4) * 4
    return start + at, length - at, doc, first & (at == 0), last & (at == C - 4)


@triton.jit
def row_of(base, t, left, st, at, valid):
    """[*] of token t, 0 where there is none: `left` tokens are there."""
    return tl.load(base + t * st + at, mask=valid & (left > 0), other=0.0)


@triton.jit
def rows_of(base, t, left, st, at, valid):
    """The rows of the four tokens from t on."""
    return (
        row_of(base, t, left, st, at, valid),
        row_of(base, t + 1, left - 1, st, at, valid),
        row_of(base, t + 2, left - 2, st, at, valid),
        row_of(base, t + 3, left - 3, st, at, valid),
    )


@triton.jit
def number_of(base, t, left, BN: tl.constexpr, PACKED: tl.constexpr):
    """The row [BN] of B or C of token t, 0 where there is none: `left` tokens are there."""
    n = tl.arange(0, BN)
    if PACKED:
        x = tl.load(base + t * BN + n, mask=left > 0, other=0.0)
    else:
        x = tl.load(base + t * BN + n)
    return x.to(tl.float32)


@triton.jit
def numbers_of(base, t, left, BN: tl.constexpr, PACKED: tl.constexpr):
    """The rows of the four tokens from t on."""
    return (
        number_of(base, t, left, BN, PACKED),
        number_of(base, t + 1, left - 1, BN, PACKED),
        number_of(base, t + 2, left - 2, BN, PACKED),
        number_of(base, t + 3, left - 3, BN, PACKED),
    )


@triton.jit
def steps_of(x0, x1, x2, x3, shift, left, valid, SOFTPLUS: tl.constexpr):
    """dt of four tokens, and their derivatives."""
    dt0, slope0 = step_of(x0, shift, valid & (left > 0), SOFTPLUS)
    dt1, slope1 = step_of(x1, shift, valid & (left > 1), SOFTPLUS)
    dt2, slope2 = step_of(x2, shift, valid & (left > 2), SOFTPLUS)
    dt3, slope3 = step_of(x3, shift, valid & (left > 3), SOFTPLUS)
    return (dt0, dt1, dt2, dt3), (slope0, slope1, slope2, slope3)


@triton.jit
def shift_of(bias, d, valid, BD: tl.constexpr, BIAS: tl.constexpr):
    """What is added to delta, [BD]."""
    shift = tl.zeros([BD], tl.float32)
    if BIAS:
        shift = tl.load(bias + d, mask=valid, other=0.0).to(tl.float32)
    return shift


@triton.jit
def phi_of(z):
    """(e^z - 1) / z and its derivative."""
    near = tl.abs(z) < _NEAR_ZERO
    small = tl.where(near, z, 0.0)
    large = tl.where(near, 1.0, z)
    series = 1.0 + small / 5 * (1.0 + small / 6 * (1.0 + small / 7))
    series = 1.0 + small / 2 * (1.0 + small / 3 * (1.0 + small / 4 * series))
    slopes = 0.5 + small * (1 / 3 + small * (1 / 8 + small * (1 / 30 + small * (1 / 144 + small / 840))))
    e = tl.exp(large)
    phi = tl.where(near, series, (e - 1.0) / large)
    return phi, tl.where(near, slopes, (e - phi) / large)


@triton.jit
def given_of(dt, A, u, B, ZOH: tl.constexpr):
    """What a token adds to the state [BD, BN], of dt, u [BD], natural-log rates A [BD, BN] and B [BN]."""
    u = u.to(tl.float32)
    if ZOH:
        phi, _ = phi_of(dt[:, None] * A)
        x = phi * (dt * u)[:, None] * B[None, :]
    else:
        x = (dt * u)[:, None] * B[None, :]
    return x


@triton.jit
def decay_of(dt, A2):
    """2^{dt A2} [BD, BN], of rates in base 2."""
    return tl.exp2(dt[:, None] * A2)


@triton.jit
def silu_of(z):
    """silu(z) and its derivative."""
    s = tl.sigmoid(z)
    return z * s, s * (1.0 + z * (1.0 - s))


@triton.jit
def over(x, axis: tl.constexpr):
    """The sum of x [BD, BN] over an axis.

    Where lanes share it, `+ 0.0` has all of them round alike, as in the `sum_over` of generated kernels. With 32
    channels and more a lane holds all numbers of one, and asks no other.
    """
    if axis == 0 or x.shape[0] < 32:
        x = x + 0.0
    return tl.sum(x, axis=axis)


@triton.jit
def state_at(base, d, N: tl.constexpr, BN: tl.constexpr):
    """Addresses of a tile of a state [D, N]."""
    n = tl.max_contiguous(tl.arange(0, BN), 1)
    return base + d[:, None] * N + n[None, :]


@triton.jit
def chunk_at(base, d, D: tl.constexpr, BN: tl.constexpr):
    """Addresses of a tile of a state [N, D]: the lanes' channels are neighbours there."""
    n = tl.max_contiguous(tl.arange(0, BN), 1)
    return base + n[None, :] * D + d[:, None]


@triton.jit
def after(h, dt, A, A2, u, B, ZOH: tl.constexpr):
    """The state behind a token."""
    return decay_of(dt, A2) * h + given_of(dt, A, u, B, ZOH)


@triton.jit
def after_group(h, dt, u0, u1, u2, u3, B, A, A2, t, left, BN: tl.constexpr, PACKED: tl.constexpr,
                ZOH: tl.constexpr):  # fmt: skip
    """The state behind the four tokens from t on."""
    b0, b1, b2, b3 = numbers_of(B, t, left, BN, PACKED)
    h = after(h, dt[0], A, A2, u0, b0, ZOH)
    h = after(h, dt[1], A, A2, u1, b1, ZOH)
    h = after(h, dt[2], A, A2, u2, b2, ZOH)
    return after(h, dt[3], A, A2, u3, b3, ZOH)


@triton.jit
def read(h, C, u, weight, z, GATE: tl.constexpr):
    """The output [BD] of a token, of the state behind it."""
    y = over(h * C[None, :], 1) + u.to(tl.float32) * weight
    if GATE:
        gate, _ = silu_of(z.to(tl.float32))
        y *= gate
    return y


@triton.jit
def before(g, dt, A2, C, do, z, GATE: tl.constexpr):
    """The gradient of the state before a token, of that behind it."""
    do = do.to(tl.float32)
    if GATE:
        gate, _ = silu_of(z.to(tl.float32))
        do *= gate
    return decay_of(dt, A2) * (g + do[:, None] * C[None, :])


@triton.jit
def channels_of(
    delta, A, bias, e_sb, e_sh, T, D: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BD: tl.constexpr,
    BN: tl.constexpr, C: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """What a walk begins with: `place` of its channels; the sequence and the segment; where rows of B and C begin;
    delta, and where its rows are; which numbers are there [BD, BN]; what is added to delta [BD]; A [BD, BN], and A in
    base 2."""
    d, valid, head, p = place(tl.program_id(0) * BD, D, P, BD)
    b = tl.program_id(1).to(tl.int64)
    seg = tl.program_id(2)
    padded = b * (T + C) * BN
    steps = delta + b * e_sb
    e_at = head * e_sh + p
    inside = valid[:, None] & (tl.arange(0, BN) < N)[None, :]
    shift = shift_of(bias, d, valid, BD, BIAS)
    rates = tl.load(state_at(A, d, N, BN), mask=inside, other=0.0)
    return d, valid, head, p, b, seg, padded, steps, e_at, inside, shift, rates, rates * LOG2E


@triton.jit
def begun(h, starts, given, doc, d, inside, D: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, GIVEN: tl.constexpr):
    """The state h [BD, BN]; where a document starts, its own of `given` [n_docs, D, N] or zeros."""
    if starts:
        h = tl.zeros(h.shape, tl.float32)
        if GIVEN:
            h = tl.load(state_at(given + doc.to(tl.int64) * D * N, d, N, BN), mask=inside, other=0.0)
    return h


# Kernels --------------------------------------------------------------------------------------------------------------


@triton.jit
def summarize_kernel(
    u, delta, A, B, bias, states, decay, cut, initial, table,
    u_sb, u_st, u_sh, e_sb, e_st, e_sh, T, n_seg, n_chunks, per_seg,
    D: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, C: tl.constexpr,
    SOFTPLUS: tl.constexpr, BIAS: tl.constexpr, ZOH: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr,
    ZERO: tl.constexpr, ONWARD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """states [batch, n_seg + 1, D, N]: what segment s adds in slot s + 1; its log decay in decay [batch, n_seg, D, N].

    ZERO: nothing enters the rank, so slot 0 becomes 0. Unless ONWARD nobody reads what the last segment leaves: it is
    not walked. initial [n_docs, D, N]: states before packed documents.
    """
    begin(PDL)
    d, valid, head, p, b, seg, padded, steps, e_at, inside, shift, rates, rates2 = channels_of(
        delta, A, bias, e_sb, e_sh, T, D, N, P, BD, BN, C, BIAS
    )
    h = tl.zeros([BD, BN], tl.float32)
    total = tl.zeros([BD], tl.float32)
    cuts = 0
    group = seg * per_seg * (C // 4)
    until = tl.minimum(seg * per_seg + per_seg, n_chunks) * (C // 4)
    t, left, doc, first, last = group_of(table, group, T, C, PACKED)
    u0, u1, u2, u3 = rows_of(u + b * u_sb, t, left, u_st, head * u_sh + p, valid)
    e0, e1, e2, e3 = rows_of(steps, t, left, e_st, e_at, valid)
    if not ONWARD:
        until = tl.where(seg == n_seg - 1, group, until)
    for i in range(group, until):
        at, there = t, left
        if PACKED:
            cuts = cuts | first.to(tl.int32)
            if first:
                total = tl.zeros([BD], tl.float32)
            h = begun(h, first, initial, doc, d, inside, D, N, BN, INITIAL)
        v0, v1, v2, v3 = u0, u1, u2, u3
        dt, _ = steps_of(e0, e1, e2, e3, shift, left, valid, SOFTPLUS)
        t, left, doc, first, last = group_of(table, tl.minimum(i + 1, until - 1), T, C, PACKED)
        u0, u1, u2, u3 = rows_of(u + b * u_sb, t, left, u_st, head * u_sh + p, valid)
        e0, e1, e2, e3 = rows_of(steps, t, left, e_st, e_at, valid)
        h = after_group(h, dt, v0, v1, v2, v3, B + padded, rates, rates2, at, there, BN, PACKED, ZOH)
        total += (dt[0] + dt[1]) + (dt[2] + dt[3])
    to = state_at(states + (b * (n_seg + 1) + seg + 1) * D * N, d, N, BN)
    tl.store(to, h, mask=inside)
    if ZERO:
        tl.store(to - D * N, tl.zeros([BD, BN], tl.float32), mask=inside & (seg == 0))
    to = state_at(decay + (b * n_seg + seg) * D * N, d, N, BN)
    tl.store(to, total[:, None] * rates, mask=inside)
    if PACKED:
        tl.store(cut + seg, cuts, mask=tl.program_id(0) == 0)  # of packed documents there is one sequence


@triton.jit
def output_kernel(
    u, delta, A, B, Cs, skip, z, bias, o, states, initial, final, table,
    u_sb, u_st, u_sh, e_sb, e_st, e_sh, z_sb, z_st, z_sh, T, n_seg, n_chunks,
    per_seg,
    D: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, C: tl.constexpr,
    SOFTPLUS: tl.constexpr, BIAS: tl.constexpr, ZOH: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr,
    FINAL: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """o [batch, T, D] = (C h + D u) silu(z), and the final states of packed documents."""
    begin(PDL)
    d, valid, head, p, b, seg, padded, steps, e_at, inside, shift, rates, rates2 = channels_of(
        delta, A, bias, e_sb, e_sh, T, D, N, P, BD, BN, C, BIAS
    )
    weight = tl.zeros([BD], tl.float32)
    if SKIP:
        weight = tl.load(skip + d, mask=valid, other=0.0).to(tl.float32)
    from_state = state_at(states + (b * (n_seg + 1) + seg) * D * N, d, N, BN)
    h = tl.load(from_state, mask=inside, other=0.0)
    group = seg * per_seg * (C // 4)
    until = tl.minimum(seg * per_seg + per_seg, n_chunks) * (C // 4)
    t, left, doc, first, last = group_of(table, group, T, C, PACKED)
    u0, u1, u2, u3 = rows_of(u + b * u_sb, t, left, u_st, head * u_sh + p, valid)
    e0, e1, e2, e3 = rows_of(steps, t, left, e_st, e_at, valid)
    z0, z1, z2, z3 = u0, u1, u2, u3
    if GATE:
        z0, z1, z2, z3 = rows_of(z + b * z_sb, t, left, z_st, head * z_sh + p, valid)
    for i in range(group, until):
        at, there, at_doc, ends = t, left, doc.to(tl.int64) * D * N if PACKED else 0, last
        if PACKED:
            h = begun(h, first, initial, doc, d, inside, D, N, BN, INITIAL)
        v0, v1, v2, v3 = u0, u1, u2, u3
        w0, w1, w2, w3 = z0, z1, z2, z3
        dt, _ = steps_of(e0, e1, e2, e3, shift, left, valid, SOFTPLUS)
        t, left, doc, first, last = group_of(table, tl.minimum(i + 1, until - 1), T, C, PACKED)
        u0, u1, u2, u3 = rows_of(u + b * u_sb, t, left, u_st, head * u_sh + p, valid)
        e0, e1, e2, e3 = rows_of(steps, t, left, e_st, e_at, valid)
        if GATE:
            z0, z1, z2, z3 = rows_of(z + b * z_sb, t, left, z_st, head * z_sh + p, valid)
        b0, b1, b2, b3 = numbers_of(B + padded, at, there, BN, PACKED)
        c0, c1, c2, c3 = numbers_of(Cs + padded, at, there, BN, PACKED)
        to = o + (b * T + at) * D + d
        h = after(h, dt[0], rates, rates2, v0, b0, ZOH)
        tl.store(to, read(h, c0, v0, weight, w0, GATE).to(o.dtype.element_ty), mask=valid & (there > 0))
        h = after(h, dt[1], rates, rates2, v1, b1, ZOH)
        tl.store(to + D, read(h, c1, v1, weight, w1, GATE).to(o.dtype.element_ty), mask=valid & (there > 1))
        h = after(h, dt[2], rates, rates2, v2, b2, ZOH)
        tl.store(to + 2 * D, read(h, c2, v2, weight, w2, GATE).to(o.dtype.element_ty), mask=valid & (there > 2))
        h = after(h, dt[3], rates, rates2, v3, b3, ZOH)
        tl.store(to + 3 * D, read(h, c3, v3, weight, w3, GATE).to(o.dtype.element_ty), mask=valid & (there > 3))
        if PACKED and FINAL:  # noqa: SIM102 (a constexpr, then a value)
            if ends:
                to_state = state_at(final + at_doc, d, N, BN)
                tl.store(to_state, h, mask=inside)


@triton.jit
def summarize_backward_kernel(
    delta, A, Cs, z, bias, do, dstates, dfinal, table,
    e_sb, e_st, e_sh, z_sb, z_st, z_sh, o_sb, o_st, o_sh, T, n_seg, n_chunks, per_seg,
    D: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, C: tl.constexpr,
    SOFTPLUS: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr, ZERO: tl.constexpr,
    ONWARD: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dstates [batch, n_seg + 1, D, N]: what segment s adds, from right to left, to the gradient of the state before it
    in slot s. ZERO: nothing enters, so slot n_seg becomes 0. Unless ONWARD nobody reads what the first segment leaves:
    it is not walked. dfinal: of packed documents."""
    begin(PDL)
    d, valid, head, p, b, seg, padded, steps, e_at, inside, shift, rates, rates2 = channels_of(
        delta, A, bias, e_sb, e_sh, T, D, N, P, BD, BN, C, BIAS
    )
    g = tl.zeros([BD, BN], tl.float32)
    group = seg * per_seg * (C // 4)
    until = tl.minimum(seg * per_seg + per_seg, n_chunks) * (C // 4)
    t, left, doc, first, last = group_of(table, tl.maximum(until - 1, group), T, C, PACKED)
    o_at, z_at = head * o_sh + p, head * z_sh + p
    y0, y1, y2, y3 = rows_of(do + b * o_sb, t, left, o_st, o_at, valid)
    e0, e1, e2, e3 = rows_of(steps, t, left, e_st, e_at, valid)
    z0, z1, z2, z3 = y0, y1, y2, y3
    if GATE:
        z0, z1, z2, z3 = rows_of(z + b * z_sb, t, left, z_st, z_at, valid)
    if not ONWARD:
        until = tl.where(seg == 0, group, until)
    for i in range(group, until):
        at, there, begins = t, left, first
        if PACKED:
            g = begun(g, last, dfinal, doc, d, inside, D, N, BN, FINAL)
        x0, x1, x2, x3 = y0, y1, y2, y3
        w0, w1, w2, w3 = z0, z1, z2, z3
        dt, _ = steps_of(e0, e1, e2, e3, shift, left, valid, SOFTPLUS)
        t, left, doc, first, last = group_of(table, tl.maximum(until - 2 - (i - group), group), T, C, PACKED)
        y0, y1, y2, y3 = rows_of(do + b * o_sb, t, left, o_st, o_at, valid)
        e0, e1, e2, e3 = rows_of(steps, t, left, e_st, e_at, valid)
        if GATE:
            z0, z1, z2, z3 = rows_of(z + b * z_sb, t, left, z_st, z_at, valid)
        c0, c1, c2, c3 = numbers_of(Cs + padded, at, there, BN, PACKED)
        g = before(g, dt[3], rates2, c3, x3, w3, GATE)
        g = before(g, dt[2], rates2, c2, x2, w2, GATE)
        g = before(g, dt[1], rates2, c1, x1, w1, GATE)
        g = before(g, dt[0], rates2, c0, x0, w0, GATE)
        if PACKED:
            g = tl.where(begins, 0.0, g)  # nothing flows back past a document's start
    to = state_at(dstates + (b * (n_seg + 1) + seg) * D * N, d, N, BN)
    tl.store(to, g, mask=inside)
    if ZERO:
        tl.store(to + D * N, tl.zeros([BD, BN], tl.float32), mask=inside & (seg == n_seg - 1))


@triton.jit
def chunk_states_kernel(
    u, delta, A, B, bias, states, initial, chunks, table,
    u_sb, u_st, u_sh, e_sb, e_st, e_sh, T, n_seg, n_chunks, per_seg,
    D: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, C: tl.constexpr,
    SOFTPLUS: tl.constexpr, BIAS: tl.constexpr, ZOH: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """chunks [batch, n_chunks, N, D]: the states that enter the chunks."""
    begin(PDL)
    d, valid, head, p, b, seg, padded, steps, e_at, inside, shift, rates, rates2 = channels_of(
        delta, A, bias, e_sb, e_sh, T, D, N, P, BD, BN, C, BIAS
    )
    from_state = state_at(states + (b * (n_seg + 1) + seg) * D * N, d, N, BN)
    h = tl.load(from_state, mask=inside, other=0.0)
    group = seg * per_seg * (C // 4)
    until = tl.minimum(seg * per_seg + per_seg, n_chunks) * (C // 4)
    t, left, doc, first, last = group_of(table, group, T, C, PACKED)
    u0, u1, u2, u3 = rows_of(u + b * u_sb, t, left, u_st, head * u_sh + p, valid)
    e0, e1, e2, e3 = rows_of(steps, t, left, e_st, e_at, valid)
    for i in range(group, until):
        at, there = t, left
        if PACKED:
            h = begun(h, first, initial, doc, d, inside, D, N, BN, INITIAL)
        to = chunk_at(chunks + (b * n_chunks + i // (C // 4)) * D * N, d, D, BN)
        tl.store(to, h, mask=inside & (i % (C // 4) == 0))
        v0, v1, v2, v3 = u0, u1, u2, u3
        dt, _ = steps_of(e0, e1, e2, e3, shift, left, valid, SOFTPLUS)
        t, left, doc, first, last = group_of(table, tl.minimum(i + 1, until - 1), T, C, PACKED)
        u0, u1, u2, u3 = rows_of(u + b * u_sb, t, left, u_st, head * u_sh + p, valid)
        e0, e1, e2, e3 = rows_of(steps, t, left, e_st, e_at, valid)
        h = after_group(h, dt, v0, v1, v2, v3, B + padded, rates, rates2, at, there, BN, PACKED, ZOH)
