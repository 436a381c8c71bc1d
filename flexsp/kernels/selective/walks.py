"""The walks of the selective scan: what segments add to the state, the outputs, and the same for the backward pass.

A program walks a segment's chunks with the states [BD, BN] of some channels in registers. Within a chunk all tokens are
computed at once, [C, BD, BN]. Places of a chunk without a token have dt = 0 and all else 0: a state passes them.
Log decays are in base 2. Nothing but states at the edges of segments, and in the backward pass at those of chunks, goes
to memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.primitives import LOG2E, chunk_info
from flexsp.runtime.launch import begin

_NEAR_ZERO = tl.constexpr(0.25)


# Tiles ----------------------------------------------------------------------------------------------------------------


@triton.jit
def place(d0, D: tl.constexpr, P: tl.constexpr, BD: tl.constexpr):
    """Channels, whether they are there, and their heads and places in these."""
    d = d0 + tl.arange(0, BD)
    return d, d < D, (d // P).to(tl.int64), d % P


@triton.jit
def rows_of(base, start, length, st, at, valid, row):
    """fp32 [C, *] of the tokens at these places of a chunk, 0 where there is none."""
    where = base + (start + row)[:, None] * st + at[None, :]
    return tl.load(where, mask=(row < length)[:, None] & valid[None, :], other=0.0).to(tl.float32)


@triton.jit
def steps_of(delta, bias, start, length, st, at, d, valid, row, SOFTPLUS: tl.constexpr, BIAS: tl.constexpr):
    """dt [C, BD] of the tokens at these places of a chunk, and its derivative after delta."""
    x = rows_of(delta, start, length, st, at, valid, row)
    if BIAS:
        x += tl.load(bias + d, mask=valid, other=0.0).to(tl.float32)[None, :]
    slope = tl.full(x.shape, 1.0, tl.float32)
    if SOFTPLUS:
        slope = tl.sigmoid(x)
        small = tl.exp(-tl.abs(x))
        one = 1.0 + small
        rest = tl.where(one == 1.0, small, tl.log(one) * (small / tl.where(one == 1.0, 1.0, one - 1.0)))  # log1p
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + rest
    there = (row < length)[:, None] & valid[None, :]
    return tl.where(there, x, 0.0), tl.where(there, slope, 0.0)


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
    """What tokens add to the state [C, BD, BN], of dt, u [C, BD], natural-log rates A [BD, BN] and B [C, BN]."""
    if ZOH:
        phi, _ = phi_of(dt[:, :, None] * A[None, :, :])
        x = phi * (dt * u)[:, :, None] * B[:, None, :]
    else:
        x = (dt * u)[:, :, None] * B[:, None, :]
    return x


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
def _after(a, h, p, b, y, r):
    """Two runs of tokens, the first before the second: the decay, the sum, and the sum without the last token's own."""
    return a * b, b * h + y, b * h + r


@triton.jit
def kept_and_states(a, x, h):
    """a_t h_{t-1} and h_t [C, BD, BN] of h_t = a_t h_{t-1} + x_t, from h [BD, BN]."""
    first = (tl.arange(0, a.shape[0]) == 0)[:, None, None]
    own = tl.where(first, a * h[None, :, :], 0.0)
    _, states, kept = tl.associative_scan((a, x + own, own), 0, _after)
    return kept, states


@triton.jit
def state_after(dt, dt_next, rates, x, h):
    """The state [BD, BN] behind all tokens, from h; dt_next are the steps of the tokens one place later."""
    later = tl.cumsum(dt_next, axis=0, reverse=True)
    rates = rates * LOG2E
    h = tl.exp2(tl.sum(dt, axis=0)[:, None] * rates) * h
    return h + tl.sum(tl.exp2(later[:, :, None] * rates[None, :, :]) * x, axis=0)


@triton.jit
def adjoint_before(dt, rates, x, g):
    """The gradient [BD, BN] of the state before all tokens, of x of the states of tokens and g of the last one."""
    until = tl.cumsum(dt, axis=0)
    rates = rates * LOG2E
    g = tl.exp2(tl.sum(dt, axis=0)[:, None] * rates) * g
    return g + tl.sum(tl.exp2(until[:, :, None] * rates[None, :, :]) * x, axis=0)


@triton.jit
def _onto(a, y, b, x):
    """Two runs of tokens, the first nearer to where it begins: the decay and the sum."""
    return a * b, b * y + x


@triton.jit
def adjoints(a, x, g):
    """y_t = x_t + a_{t+1} y_{t+1} [C, BD, BN], where g [BD, BN] comes in behind the last token.

    x and the a of the tokens one place later come with the last token first: a reverse scan would turn its operands in
    the registers of all lanes, each by as many shuffles as a warp has halves.
    """
    x += tl.where((tl.arange(0, a.shape[0]) == 0)[:, None, None], g[None, :, :], 0.0)
    return tl.flip(tl.associative_scan((a, x), 0, _onto)[1], 0)


@triton.jit
def token_of(x, at: tl.constexpr):
    """x [C, BD, BN] of one token."""
    return tl.sum(tl.where((tl.arange(0, x.shape[0]) == at)[:, None, None], x, 0.0), axis=0)


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
    row = tl.arange(0, C)
    steps = delta + b * e_sb
    in_row = head * e_sh + p
    inside = valid[:, None] & (n < N)[None, :]
    rates = tl.load(state_at(A, d, n, N), mask=inside, other=0.0)
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
        dt, slope = steps_of(steps, bias, start, length, e_st, in_row, d, valid, row, SOFTPLUS, BIAS)
        dt_next, slope_next = steps_of(steps, bias, start, length, e_st, in_row, d, valid, row + 1, SOFTPLUS, BIAS)
        uc = rows_of(u + b * u_sb, start, length, u_st, head * u_sh + p, valid, row)
        bc = rows_of(B + b * b_sb, start, length, b_st, n, n < N, row)
        h = state_after(dt, dt_next, rates, given_of(dt, rates, uc, bc, ZOH), h)
        total += tl.sum(dt, axis=0)
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
    row = tl.arange(0, C)
    steps = delta + b * e_sb
    in_row = head * e_sh + p
    inside = valid[:, None] & (n < N)[None, :]
    rates = tl.load(state_at(A, d, n, N), mask=inside, other=0.0)
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
        dt, slope = steps_of(steps, bias, start, length, e_st, in_row, d, valid, row, SOFTPLUS, BIAS)
        uc = rows_of(u + b * u_sb, start, length, u_st, head * u_sh + p, valid, row)
        bc = rows_of(B + b * b_sb, start, length, b_st, n, n < N, row)
        cc = rows_of(Cs + b * c_sb, start, length, c_st, n, n < N, row)
        a = tl.exp2(dt[:, :, None] * (rates * LOG2E)[None, :, :])
        kept, run = kept_and_states(a, given_of(dt, rates, uc, bc, ZOH), h)
        h = token_of(run, C - 1)
        y = over(run * cc[:, None, :], 2)
        if SKIP:
            y += uc * tl.load(skip + d, mask=valid, other=0.0).to(tl.float32)[None, :]
        if GATE:
            gate, gate_slope = silu_of(rows_of(z + b * z_sb, start, length, z_st, head * z_sh + p, valid, row))
            y *= gate
        to = o + (b * T + start + row)[:, None] * D + d[None, :]
        tl.store(to, y.to(o.dtype.element_ty), mask=(row < length)[:, None] & valid[None, :])
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
    row = tl.arange(0, C)
    steps = delta + b * e_sb
    in_row = head * e_sh + p
    inside = valid[:, None] & (n < N)[None, :]
    rates = tl.load(state_at(A, d, n, N), mask=inside, other=0.0)
    g = tl.zeros([BD, BN], tl.float32)
    c0 = seg * per_seg
    c1 = tl.minimum(c0 + per_seg, n_chunks)
    for i in range(0, c1 - c0):
        start, length, doc, first, last = chunk_info(table, c1 - 1 - i, T, C, PACKED)
        if PACKED:  # noqa: SIM102
            if last:
                g = tl.zeros([BD, BN], tl.float32)
                if FINAL:
                    from_state = state_at(dfinal + doc.to(tl.int64) * D * N, d, n, N)
                    g = tl.load(from_state, mask=inside, other=0.0)
        dt, slope = steps_of(steps, bias, start, length, e_st, in_row, d, valid, row, SOFTPLUS, BIAS)
        cc = rows_of(Cs + b * c_sb, start, length, c_st, n, n < N, row)
        dy = rows_of(do + b * o_sb, start, length, o_st, head * o_sh + p, valid, row)
        if GATE:
            gate, gate_slope = silu_of(rows_of(z + b * z_sb, start, length, z_st, head * z_sh + p, valid, row))
            dy *= gate
        g = adjoint_before(dt, rates, dy[:, :, None] * cc[:, None, :], g)
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
    row = tl.arange(0, C)
    steps = delta + b * e_sb
    in_row = head * e_sh + p
    inside = valid[:, None] & (n < N)[None, :]
    rates = tl.load(state_at(A, d, n, N), mask=inside, other=0.0)
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
        dt, slope = steps_of(steps, bias, start, length, e_st, in_row, d, valid, row, SOFTPLUS, BIAS)
        dt_next, slope_next = steps_of(steps, bias, start, length, e_st, in_row, d, valid, row + 1, SOFTPLUS, BIAS)
        uc = rows_of(u + b * u_sb, start, length, u_st, head * u_sh + p, valid, row)
        bc = rows_of(B + b * b_sb, start, length, b_st, n, n < N, row)
        h = state_after(dt, dt_next, rates, given_of(dt, rates, uc, bc, ZOH), h)


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
    row = tl.arange(0, C)
    steps = delta + b * e_sb
    in_row = head * e_sh + p
    inside = valid[:, None] & (n < N)[None, :]
    rates = tl.load(state_at(A, d, n, N), mask=inside, other=0.0)
    weight = tl.zeros([BD], tl.float32)
    if SKIP:
        weight = tl.load(skip + d, mask=valid, other=0.0).to(tl.float32)
    from_state = state_at(dstates + (b * (n_seg + 1) + seg + 1) * D * N, d, n, N)
    g = tl.load(from_state, mask=inside, other=0.0)
    sum_A = tl.zeros([BD, BN], tl.float32)
    sum_skip = tl.zeros([BD], tl.float32)
    sum_bias = tl.zeros([BD], tl.float32)
    c0 = seg * per_seg
    c1 = tl.minimum(c0 + per_seg, n_chunks)
    part = (b * tl.num_programs(0) + tl.program_id(0)) * T
    for i in range(0, c1 - c0):
        c = c1 - 1 - i
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        at_doc = doc.to(tl.int64) * D * N if PACKED else 0
        if PACKED:  # noqa: SIM102
            if last:
                g = tl.zeros([BD, BN], tl.float32)
                if FINAL:
                    from_state = state_at(dfinal + at_doc, d, n, N)
                    g = tl.load(from_state, mask=inside, other=0.0)
        from_state = state_at(chunks + (b * n_chunks + c) * D * N, d, n, N)
        h = tl.load(from_state, mask=inside, other=0.0)
        dt, slope = steps_of(steps, bias, start, length, e_st, in_row, d, valid, row, SOFTPLUS, BIAS)
        uc = rows_of(u + b * u_sb, start, length, u_st, head * u_sh + p, valid, row)
        bc = rows_of(B + b * b_sb, start, length, b_st, n, n < N, row)
        cc = rows_of(Cs + b * c_sb, start, length, c_st, n, n < N, row)
        dy = rows_of(do + b * o_sb, start, length, o_st, head * o_sh + p, valid, row)
        there = (row < length)[:, None] & valid[None, :]
        to_tokens = (b * T + start + row)[:, None]
        exponent = dt[:, :, None] * rates[None, :, :]
        a = tl.exp2(exponent * LOG2E)
        kept, run = kept_and_states(a, given_of(dt, rates, uc, bc, ZOH), h)
        if GATE:
            zc = rows_of(z + b * z_sb, start, length, z_st, head * z_sh + p, valid, row)
            gate, gate_slope = silu_of(zc)
            y = over(run * cc[:, None, :], 2) + uc * weight[None, :]
            tl.store(dz + to_tokens * D + d[None, :], (dy * y * gate_slope).to(dz.dtype.element_ty), mask=there)
            dy *= gate
        to_part = (part + start + row)[:, None] * N + n[None, :]
        there_n = (row < length)[:, None] & (n < N)[None, :]
        tl.store(dC + to_part, over(run * dy[:, :, None], 1), mask=there_n)
        dt_next, slope_next = steps_of(steps, bias, start, length, e_st, in_row, d, valid, C - row, SOFTPLUS, BIAS)
        cr = rows_of(Cs + b * c_sb, start, length, c_st, n, n < N, C - 1 - row)
        dyr = rows_of(do + b * o_sb, start, length, o_st, head * o_sh + p, valid, C - 1 - row)
        if GATE:
            gate, gate_slope = silu_of(rows_of(z + b * z_sb, start, length, z_st, head * z_sh + p, valid, C - 1 - row))
            dyr *= gate
        a_next = tl.exp2(dt_next[:, :, None] * (rates * LOG2E)[None, :, :])
        back = adjoints(a_next, dyr[:, :, None] * cr[:, None, :], g)
        through = back * kept  # the gradient of the exponent
        if ZOH:
            phi, phi_slope = phi_of(exponent)
            entry = phi * dt[:, :, None]
            entry_dt = a
            through_A = through * dt[:, :, None] + back * (uc * dt * dt)[:, :, None] * bc[:, None, :] * phi_slope
        else:
            entry = tl.zeros([C, BD, BN], tl.float32) + dt[:, :, None]
            entry_dt = tl.full([C, BD, BN], 1.0, tl.float32)
            through_A = through * dt[:, :, None]
        sum_A += tl.sum(through_A, axis=0)
        tl.store(dB + to_part, over(back * entry * uc[:, :, None], 1), mask=there_n)
        read = back * bc[:, None, :]
        du_c = over(read * entry, 2) + dy * weight[None, :]
        tl.store(du + to_tokens * D + d[None, :], du_c.to(du.dtype.element_ty), mask=there)
        ddt = over(through * rates[None, :, :] + read * entry_dt * uc[:, :, None], 2) * slope
        tl.store(ddelta + to_tokens * D + d[None, :], ddt.to(ddelta.dtype.element_ty), mask=there)
        sum_skip += over(dy * uc, 0)
        sum_bias += over(ddt, 0)
        g = token_of(a * back, 0)
        if PACKED:
            if INITIAL:
                to_state = state_at(dinitial + at_doc, d, n, N)
                tl.store(to_state, g, mask=inside & first)
            g = tl.where(first, 0.0, g)
    of_segment = (b * (D // P) + head) * n_seg + seg
    tl.store(dA + (of_segment * P + p)[:, None] * N + n[None, :], sum_A, mask=inside)
    if SKIP:
        tl.store(dskip + of_segment * P + p, sum_skip, mask=valid)
    if BIAS:
        tl.store(dbias + of_segment * P + p, sum_bias, mask=valid)
