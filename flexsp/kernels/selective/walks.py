"""The walks of the selective scan: what segments add to the state, the outputs, and the same for the backward pass.

A program is one warp and walks the tokens of a segment, with the states [BD, BN] of some channels in registers. Tokens
come in groups of four, whose inputs are loaded before the first of them is computed. Places of a group without a token
have dt = 0 and all else 0: a state passes them. Log decays are in base 2. Nothing but states at the edges of segments,
and in the backward pass at those of chunks, goes to memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.primitives import LOG2E, chunk_info
from flexsp.runtime.launch import begin

_NEAR_ZERO = tl.constexpr(0.25)
_GROUP = tl.constexpr(4)
_LN2 = tl.constexpr(0.6931471805599453)


# Tiles ----------------------------------------------------------------------------------------------------------------


@triton.jit
def place(d0, D: tl.constexpr, P: tl.constexpr, BD: tl.constexpr):
    """Channels, whether they are there, and their heads and places in these."""
    d = d0 + tl.arange(0, BD)
    return d, d < D, (d // P).to(tl.int64), d % P


@triton.jit
def row_of(base, t, left, st, at, valid):
    """fp32 [*] of token t, 0 where there is none: `left` tokens are there."""
    return tl.load(base + t * st + at, mask=valid & (left > 0), other=0.0).to(tl.float32)


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
def step_of(x, shift, there, SOFTPLUS: tl.constexpr):
    """dt [BD] of a row of delta, and its derivative after it."""
    x += shift
    slope = tl.full(x.shape, 1.0, tl.float32)
    if SOFTPLUS:
        slope = tl.sigmoid(x)
        small = tl.exp(-tl.abs(x))
        one = 1.0 + small
        rest = tl.where(one == 1.0, small, tl.log(one) * (small / tl.where(one == 1.0, 1.0, one - 1.0)))  # log1p
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + rest
    return tl.where(there, x, 0.0), tl.where(there, slope, 0.0)


@triton.jit
def steps_of(delta, shift, t, left, st, at, valid, SOFTPLUS: tl.constexpr):
    """dt of the four tokens from t on."""
    x0, x1, x2, x3 = rows_of(delta, t, left, st, at, valid)
    dt0, _ = step_of(x0, shift, valid & (left > 0), SOFTPLUS)
    dt1, _ = step_of(x1, shift, valid & (left > 1), SOFTPLUS)
    dt2, _ = step_of(x2, shift, valid & (left > 2), SOFTPLUS)
    dt3, _ = step_of(x3, shift, valid & (left > 3), SOFTPLUS)
    return dt0, dt1, dt2, dt3


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
    """The sum over an axis; `+ 0.0` has all lanes round alike, as in the `sum_over` of generated kernels."""
    return tl.sum(x + 0.0, axis=axis)


@triton.jit
def state_at(base, d, n, N: tl.constexpr):
    """Addresses of a tile of a state [D, N]."""
    return base + d[:, None] * N + n[None, :]


@triton.jit
def after(h, dt, A, A2, u, B, ZOH: tl.constexpr):
    """The state behind a token."""
    return decay_of(dt, A2) * h + given_of(dt, A, u, B, ZOH)


@triton.jit
def after_group(h, u, delta, B, shift, A, A2, t, left, u_st, u_at, e_st, e_at, b_st, n, valid, there_n,
                SOFTPLUS: tl.constexpr, ZOH: tl.constexpr):  # fmt: skip
    """The state behind the four tokens from t on, and the sum of their dt."""
    dt0, dt1, dt2, dt3 = steps_of(delta, shift, t, left, e_st, e_at, valid, SOFTPLUS)
    u0, u1, u2, u3 = rows_of(u, t, left, u_st, u_at, valid)
    b0, b1, b2, b3 = rows_of(B, t, left, b_st, n, there_n)
    h = after(h, dt0, A, A2, u0, b0, ZOH)
    h = after(h, dt1, A, A2, u1, b1, ZOH)
    h = after(h, dt2, A, A2, u2, b2, ZOH)
    h = after(h, dt3, A, A2, u3, b3, ZOH)
    return h, (dt0 + dt1) + (dt2 + dt3)


@triton.jit
def read(h, C, u, weight, z, GATE: tl.constexpr):
    """The output [BD] of a token, of the state behind it."""
    y = over(h * C[None, :], 1) + u * weight
    if GATE:
        gate, _ = silu_of(z)
        y *= gate
    return y


@triton.jit
def before(g, dt, A2, C, do, z, GATE: tl.constexpr):
    """The gradient of the state before a token, of that behind it."""
    if GATE:
        gate, _ = silu_of(z)
        do *= gate
    return decay_of(dt, A2) * (g + do[:, None] * C[None, :])


@triton.jit
def kept_and_after(h, dt, A, A2, u, B, ZOH: tl.constexpr):
    """What a token keeps of the state, and the state behind it."""
    kept = decay_of(dt, A2) * h
    return kept, kept + given_of(dt, A, u, B, ZOH)


@triton.jit
def kept_of_group(h, u, delta, B, shift, A, A2, t, left, u_st, u_at, e_st, e_at, b_st, n, valid, there_n,
                  SOFTPLUS: tl.constexpr, ZOH: tl.constexpr):  # fmt: skip
    """What the four tokens from t on keep of the state, of the state that enters the first."""
    dt0, dt1, dt2, dt3 = steps_of(delta, shift, t, left, e_st, e_at, valid, SOFTPLUS)
    u0, u1, u2, u3 = rows_of(u, t, left, u_st, u_at, valid)
    b0, b1, b2, b3 = rows_of(B, t, left, b_st, n, there_n)
    k0, h = kept_and_after(h, dt0, A, A2, u0, b0, ZOH)
    k1, h = kept_and_after(h, dt1, A, A2, u1, b1, ZOH)
    k2, h = kept_and_after(h, dt2, A, A2, u2, b2, ZOH)
    return k0, k1, k2, decay_of(dt3, A2) * h


@triton.jit
def back_through(g, kept, dt, slope, A, A2, u, B, C, do, z, weight, ZOH: tl.constexpr, GATE: tl.constexpr):
    """The way back through a token, from g of the state behind it: g of the state before it, and the gradients of A
    [BD, BN], of B and C by these channels [BN], and of u, delta, z and, for dskip, of what u is multiplied by [BD]."""
    h = kept + given_of(dt, A, u, B, ZOH)
    dz = do
    if GATE:
        gate, gate_slope = silu_of(z)
        dz = do * (over(h * C[None, :], 1) + u * weight) * gate_slope
        do *= gate
    dC = over(h * do[:, None], 0)
    back = g + do[:, None] * C[None, :]
    through = back * kept  # the gradient of the exponent
    a = decay_of(dt, A2)
    to_A = through * dt[:, None]
    mine = back * B[None, :]
    if ZOH:
        phi, phi_slope = phi_of(dt[:, None] * A)
        entry = phi * dt[:, None]
        to_A += back * (u * dt * dt)[:, None] * B[None, :] * phi_slope
        du = over(mine * entry, 1)
        dB = over(back * entry * u[:, None], 0)
        ddt = over(through * A + mine * a * u[:, None], 1)
    else:
        read = over(mine, 1)
        du = read * dt
        dB = over(back * (dt * u)[:, None], 0)
        ddt = over(through * A2, 1) * _LN2 + read * u
    return a * back, to_A, dB, dC, du + do * weight, ddt * slope, dz, do * u


@triton.jit
def written_by(u, delta, B, shift, t, left, u_st, u_at, e_st, e_at, b_st, n, valid, there_n, SOFTPLUS: tl.constexpr):
    """u, dt with its derivative, and B of token t."""
    dt, slope = step_of(row_of(delta, t, left, e_st, e_at, valid), shift, valid & (left > 0), SOFTPLUS)
    return row_of(u, t, left, u_st, u_at, valid), dt, slope, row_of(B, t, left, b_st, n, there_n)


@triton.jit
def read_by(C, do, z, t, left, c_st, o_st, z_st, n, o_at, z_at, there_n, valid, GATE: tl.constexpr):
    """C, the output's gradient and z of token t."""
    c = row_of(C, t, left, c_st, n, there_n)
    dy = row_of(do, t, left, o_st, o_at, valid)
    gate = dy
    if GATE:
        gate = row_of(z, t, left, z_st, z_at, valid)
    return c, dy, gate


@triton.jit
def put(to, at, token, x, there):
    """Stores a row of a token."""
    tl.store(to + token + at, x.to(to.dtype.element_ty), mask=there)


# Kernels --------------------------------------------------------------------------------------------------------------


@triton.jit
def summarize_kernel(
    u, delta, A, B, bias, states, decay, cut, initial, table,
    u_sb, u_st, u_sh, e_sb, e_st, e_sh, b_sb, b_st, b_sh, T, n_seg, n_chunks, per_seg,
    D: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, C: tl.constexpr,
    SOFTPLUS: tl.constexpr, BIAS: tl.constexpr, ZOH: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr,
    ZERO: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """states [batch, n_seg + 1, D, N]: what segment s adds in slot s + 1; its log decay in decay [batch, n_seg, D, N].

    ZERO: nothing enters the rank, so slot 0 becomes 0. initial [docs, D, N]: states before packed documents.
    """
    begin(PDL)
    d, valid, head, p = place(tl.program_id(0) * BD, D, P, BD)
    b = tl.program_id(1).to(tl.int64)
    seg = tl.program_id(2)
    n = tl.arange(0, BN)
    there_n = n < N
    steps = delta + b * e_sb
    e_at = head * e_sh + p
    inside = valid[:, None] & there_n[None, :]
    shift = shift_of(bias, d, valid, BD, BIAS)
    rates = tl.load(state_at(A, d, n, N), mask=inside, other=0.0)
    rates2 = rates * LOG2E
    h = tl.zeros([BD, BN], tl.float32)
    total = tl.zeros([BD], tl.float32)
    cuts = 0
    for c in range(seg * per_seg, tl.minimum(seg * per_seg + per_seg, n_chunks)):
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        if PACKED:
            cuts = cuts | first.to(tl.int32)
            if first:
                h = tl.zeros([BD, BN], tl.float32)
                total = tl.zeros([BD], tl.float32)
                if INITIAL:
                    from_state = state_at(initial + doc.to(tl.int64) * D * N, d, n, N)
                    h = tl.load(from_state, mask=inside, other=0.0)
        for q in range(0, length, _GROUP):
            h, dt = after_group(
                h, u + b * u_sb, steps, B + b * b_sb, shift, rates, rates2, start + q, length - q, u_st,
                head * u_sh + p, e_st, e_at, b_st, n, valid, there_n, SOFTPLUS, ZOH,
            )  # fmt: skip
            total += dt
    to = state_at(states + (b * (n_seg + 1) + seg + 1) * D * N, d, n, N)
    tl.store(to, h, mask=inside)
    if ZERO:
        tl.store(to - D * N, tl.zeros([BD, BN], tl.float32), mask=inside & (seg == 0))
    to = state_at(decay + (b * n_seg + seg) * D * N, d, n, N)
    tl.store(to, total[:, None] * rates, mask=inside)
    if PACKED:
        tl.store(cut + b * n_seg + seg, cuts, mask=tl.program_id(0) == 0)


@triton.jit
def output_kernel(
    u, delta, A, B, Cs, skip, z, bias, o, states, initial, final, table,
    u_sb, u_st, u_sh, e_sb, e_st, e_sh, b_sb, b_st, b_sh, c_sb, c_st, c_sh, z_sb, z_st, z_sh, T, n_seg, n_chunks,
    per_seg,
    D: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, C: tl.constexpr,
    SOFTPLUS: tl.constexpr, BIAS: tl.constexpr, ZOH: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr,
    FINAL: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """o [batch, T, D] = (C h + D u) silu(z), and the final states of packed documents."""
    begin(PDL)
    d, valid, head, p = place(tl.program_id(0) * BD, D, P, BD)
    b = tl.program_id(1).to(tl.int64)
    seg = tl.program_id(2)
    n = tl.arange(0, BN)
    there_n = n < N
    steps = delta + b * e_sb
    e_at = head * e_sh + p
    inside = valid[:, None] & there_n[None, :]
    shift = shift_of(bias, d, valid, BD, BIAS)
    rates = tl.load(state_at(A, d, n, N), mask=inside, other=0.0)
    rates2 = rates * LOG2E
    weight = tl.zeros([BD], tl.float32)
    if SKIP:
        weight = tl.load(skip + d, mask=valid, other=0.0).to(tl.float32)
    from_state = state_at(states + (b * (n_seg + 1) + seg) * D * N, d, n, N)
    h = tl.load(from_state, mask=inside, other=0.0)
    for c in range(seg * per_seg, tl.minimum(seg * per_seg + per_seg, n_chunks)):
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        at_doc = doc.to(tl.int64) * D * N if PACKED else 0
        if PACKED:  # noqa: SIM102 (a constexpr, then a value)
            if first:
                h = tl.zeros([BD, BN], tl.float32)
                if INITIAL:
                    from_state = state_at(initial + at_doc, d, n, N)
                    h = tl.load(from_state, mask=inside, other=0.0)
        for q in range(0, length, _GROUP):
            t, left = start + q, length - q
            dt0, dt1, dt2, dt3 = steps_of(steps, shift, t, left, e_st, e_at, valid, SOFTPLUS)
            u0, u1, u2, u3 = rows_of(u + b * u_sb, t, left, u_st, head * u_sh + p, valid)
            b0, b1, b2, b3 = rows_of(B + b * b_sb, t, left, b_st, n, there_n)
            c0, c1, c2, c3 = rows_of(Cs + b * c_sb, t, left, c_st, n, there_n)
            z0, z1, z2, z3 = u0, u1, u2, u3
            if GATE:
                z0, z1, z2, z3 = rows_of(z + b * z_sb, t, left, z_st, head * z_sh + p, valid)
            to = o + (b * T + t) * D + d
            h = after(h, dt0, rates, rates2, u0, b0, ZOH)
            tl.store(to, read(h, c0, u0, weight, z0, GATE).to(o.dtype.element_ty), mask=valid)
            h = after(h, dt1, rates, rates2, u1, b1, ZOH)
            tl.store(to + D, read(h, c1, u1, weight, z1, GATE).to(o.dtype.element_ty), mask=valid & (left > 1))
            h = after(h, dt2, rates, rates2, u2, b2, ZOH)
            tl.store(to + 2 * D, read(h, c2, u2, weight, z2, GATE).to(o.dtype.element_ty), mask=valid & (left > 2))
            h = after(h, dt3, rates, rates2, u3, b3, ZOH)
            tl.store(to + 3 * D, read(h, c3, u3, weight, z3, GATE).to(o.dtype.element_ty), mask=valid & (left > 3))
        if PACKED and FINAL:  # noqa: SIM102
            if last:
                to_state = state_at(final + at_doc, d, n, N)
                tl.store(to_state, h, mask=inside)


@triton.jit
def collect_kernel(
    delta, A, Cs, z, bias, do, dstates, dfinal, table,
    e_sb, e_st, e_sh, c_sb, c_st, c_sh, z_sb, z_st, z_sh, o_sb, o_st, o_sh, T, n_seg, n_chunks, per_seg,
    D: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, C: tl.constexpr,
    SOFTPLUS: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr, ZERO: tl.constexpr,
    GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dstates [batch, n_seg + 1, D, N]: what segment s adds, from right to left, to the gradient of the state before it
    in slot s. ZERO: nothing enters, so slot n_seg becomes 0. dfinal: of packed documents."""
    begin(PDL)
    d, valid, head, p = place(tl.program_id(0) * BD, D, P, BD)
    b = tl.program_id(1).to(tl.int64)
    seg = tl.program_id(2)
    n = tl.arange(0, BN)
    there_n = n < N
    steps = delta + b * e_sb
    e_at = head * e_sh + p
    inside = valid[:, None] & there_n[None, :]
    shift = shift_of(bias, d, valid, BD, BIAS)
    rates = tl.load(state_at(A, d, n, N), mask=inside, other=0.0)
    rates2 = rates * LOG2E
    g = tl.zeros([BD, BN], tl.float32)
    chunk = seg * per_seg
    until = tl.minimum(chunk + per_seg, n_chunks)
    for i in range(0, until - chunk):
        start, length, doc, first, last = chunk_info(table, until - 1 - i, T, C, PACKED)
        if PACKED:  # noqa: SIM102
            if last:
                g = tl.zeros([BD, BN], tl.float32)
                if FINAL:
                    from_state = state_at(dfinal + doc.to(tl.int64) * D * N, d, n, N)
                    g = tl.load(from_state, mask=inside, other=0.0)
        for back in range(0, length, _GROUP):
            q = (length - 1) // _GROUP * _GROUP - back
            t, left = start + q, length - q
            dt0, dt1, dt2, dt3 = steps_of(steps, shift, t, left, e_st, e_at, valid, SOFTPLUS)
            c0, c1, c2, c3 = rows_of(Cs + b * c_sb, t, left, c_st, n, there_n)
            y0, y1, y2, y3 = rows_of(do + b * o_sb, t, left, o_st, head * o_sh + p, valid)
            z0, z1, z2, z3 = y0, y1, y2, y3
            if GATE:
                z0, z1, z2, z3 = rows_of(z + b * z_sb, t, left, z_st, head * z_sh + p, valid)
            g = before(g, dt3, rates2, c3, y3, z3, GATE)
            g = before(g, dt2, rates2, c2, y2, z2, GATE)
            g = before(g, dt1, rates2, c1, y1, z1, GATE)
            g = before(g, dt0, rates2, c0, y0, z0, GATE)
        if PACKED:
            g = tl.where(first, 0.0, g)  # nothing flows back past a document's start
    to = state_at(dstates + (b * (n_seg + 1) + seg) * D * N, d, n, N)
    tl.store(to, g, mask=inside)
    if ZERO:
        tl.store(to + D * N, tl.zeros([BD, BN], tl.float32), mask=inside & (seg == n_seg - 1))


@triton.jit
def chunks_kernel(
    u, delta, A, B, bias, states, initial, chunks, table,
    u_sb, u_st, u_sh, e_sb, e_st, e_sh, b_sb, b_st, b_sh, T, n_seg, n_chunks, per_seg,
    D: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, C: tl.constexpr,
    SOFTPLUS: tl.constexpr, BIAS: tl.constexpr, ZOH: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """chunks [batch, n_chunks, D, N]: the states that enter the chunks."""
    begin(PDL)
    d, valid, head, p = place(tl.program_id(0) * BD, D, P, BD)
    b = tl.program_id(1).to(tl.int64)
    seg = tl.program_id(2)
    n = tl.arange(0, BN)
    there_n = n < N
    steps = delta + b * e_sb
    e_at = head * e_sh + p
    inside = valid[:, None] & there_n[None, :]
    shift = shift_of(bias, d, valid, BD, BIAS)
    rates = tl.load(state_at(A, d, n, N), mask=inside, other=0.0)
    rates2 = rates * LOG2E
    from_state = state_at(states + (b * (n_seg + 1) + seg) * D * N, d, n, N)
    h = tl.load(from_state, mask=inside, other=0.0)
    for c in range(seg * per_seg, tl.minimum(seg * per_seg + per_seg, n_chunks)):
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        if PACKED:  # noqa: SIM102
            if first:
                h = tl.zeros([BD, BN], tl.float32)
                if INITIAL:
                    from_state = state_at(initial + doc.to(tl.int64) * D * N, d, n, N)
                    h = tl.load(from_state, mask=inside, other=0.0)
        to = state_at(chunks + (b * n_chunks + c) * D * N, d, n, N)
        tl.store(to, h, mask=inside)
        for q in range(0, length, _GROUP):
            h, _ = after_group(
                h, u + b * u_sb, steps, B + b * b_sb, shift, rates, rates2, start + q, length - q, u_st,
                head * u_sh + p, e_st, e_at, b_st, n, valid, there_n, SOFTPLUS, ZOH,
            )  # fmt: skip


@triton.jit
def grads_kernel(
    u, delta, A, B, Cs, skip, z, bias, do, chunks, dstates, dfinal, dinitial,
    du, ddelta, dA, dB, dC, dskip, dz, dbias, table,
    u_sb, u_st, u_sh, e_sb, e_st, e_sh, b_sb, b_st, b_sh, c_sb, c_st, c_sh, z_sb, z_st, z_sh, o_sb, o_st, o_sh,
    T, n_seg, n_chunks, per_seg,
    D: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, C: tl.constexpr,
    SOFTPLUS: tl.constexpr, BIAS: tl.constexpr, ZOH: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr,
    INITIAL: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All gradients, from right to left: du, ddelta, dz [batch, T, D]; dA, dskip and dbias of each segment; dB and dC
    of each program's channels [batch, programs, T, N]; and those of initial states of packed documents."""
    begin(PDL)
    d, valid, head, p = place(tl.program_id(0) * BD, D, P, BD)
    b = tl.program_id(1).to(tl.int64)
    seg = tl.program_id(2)
    n = tl.arange(0, BN)
    there_n = n < N
    steps = delta + b * e_sb
    e_at = head * e_sh + p
    inside = valid[:, None] & there_n[None, :]
    shift = shift_of(bias, d, valid, BD, BIAS)
    rates = tl.load(state_at(A, d, n, N), mask=inside, other=0.0)
    rates2 = rates * LOG2E
    weight = tl.zeros([BD], tl.float32)
    if SKIP:
        weight = tl.load(skip + d, mask=valid, other=0.0).to(tl.float32)
    from_state = state_at(dstates + (b * (n_seg + 1) + seg + 1) * D * N, d, n, N)
    g = tl.load(from_state, mask=inside, other=0.0)
    sum_A = tl.zeros([BD, BN], tl.float32)
    sum_skip = tl.zeros([BD], tl.float32)
    sum_bias = tl.zeros([BD], tl.float32)
    chunk = seg * per_seg
    until = tl.minimum(chunk + per_seg, n_chunks)
    part = (b * tl.num_programs(0) + tl.program_id(0)) * T
    u_at, z_at, o_at = head * u_sh + p, head * z_sh + p, head * o_sh + p
    for i in range(0, until - chunk):
        c = until - 1 - i
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        at_doc = doc.to(tl.int64) * D * N if PACKED else 0
        if PACKED:  # noqa: SIM102
            if last:
                g = tl.zeros([BD, BN], tl.float32)
                if FINAL:
                    from_state = state_at(dfinal + at_doc, d, n, N)
                    g = tl.load(from_state, mask=inside, other=0.0)
        from_state = state_at(chunks + (b * n_chunks + c) * D * N, d, n, N)
        for reached in range(0, length, _GROUP):
            q = (length - 1) // _GROUP * _GROUP - reached
            h = tl.load(from_state, mask=inside, other=0.0)
            for earlier in range(0, q, _GROUP):
                h, _ = after_group(
                    h, u + b * u_sb, steps, B + b * b_sb, shift, rates, rates2, start + earlier, length - earlier, u_st,
                    head * u_sh + p, e_st, e_at, b_st, n, valid, there_n, SOFTPLUS, ZOH,
                )  # fmt: skip
            t, left = start + q, length - q
            row, of_part = b * T + t, part + t
            kept = kept_of_group(
                h, u + b * u_sb, steps, B + b * b_sb, shift, rates, rates2, t, left, u_st, u_at, e_st, e_at, b_st, n,
                valid, there_n, SOFTPLUS, ZOH,
            )  # fmt: skip
            for I in tl.static_range(3, -1, -1):
                there, there_part = valid & (left > I), there_n & (left > I)
                ut, dt, slope, bt = written_by(
                    u + b * u_sb, steps, B + b * b_sb, shift, t + I, left - I, u_st, u_at, e_st, e_at, b_st, n, valid,
                    there_n, SOFTPLUS,
                )  # fmt: skip
                ct, dy, zt = read_by(
                    Cs + b * c_sb, do + b * o_sb, z + b * z_sb, t + I, left - I, c_st, o_st, z_st, n, o_at, z_at,
                    there_n, valid, GATE,
                )  # fmt: skip
                g, to_A, dB_t, dC_t, du_t, ddt_t, dz_t, dskip_t = back_through(
                    g, kept[I], dt, slope, rates, rates2, ut, bt, ct, dy, zt, weight, ZOH, GATE
                )
                put(du, d, (row + I) * D, du_t, there)
                put(ddelta, d, (row + I) * D, ddt_t, there)
                if GATE:
                    put(dz, d, (row + I) * D, dz_t, there)
                put(dB, n, (of_part + I) * N, dB_t, there_part)
                put(dC, n, (of_part + I) * N, dC_t, there_part)
                sum_A += to_A
                sum_skip += dskip_t
                sum_bias += ddt_t
        if PACKED and INITIAL:
            to_state = state_at(dinitial + at_doc, d, n, N)
            tl.store(to_state, g, mask=inside & first)
    of_segment = (b * (D // P) + head) * n_seg + seg
    tl.store(dA + (of_segment * P + p)[:, None] * N + n[None, :], sum_A, mask=inside)
    if SKIP:
        tl.store(dskip + of_segment * P + p, sum_skip, mask=valid)
    if BIAS:
        tl.store(dbias + of_segment * P + p, sum_bias, mask=valid)
