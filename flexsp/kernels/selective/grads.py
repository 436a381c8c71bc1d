"""The selective scan's gradients, from right to left; tiles, lanes and groups of tokens as in `walks`."""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.primitives import chunk_info
from flexsp.kernels.selective.walks import (
    after_group,
    begun,
    channels_of,
    chunk_at,
    decay_of,
    given_of,
    number_of,
    numbers_of,
    over,
    phi_of,
    row_of,
    rows_of,
    silu_of,
    state_at,
    step_of,
    steps_of,
)
from flexsp.runtime.launch import begin

_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def kept_and_after(h, dt, A, A2, u, B, ZOH: tl.constexpr):
    """What a token keeps of the state, and the state behind it."""
    kept = decay_of(dt, A2) * h
    return kept, kept + given_of(dt, A, u, B, ZOH)


@triton.jit
def kept_of_group(h, dt, u, B, A, A2, ZOH: tl.constexpr):
    """What four tokens keep of the state, of the state that enters the first."""
    k0, h = kept_and_after(h, dt[0], A, A2, u[0], B[0], ZOH)
    k1, h = kept_and_after(h, dt[1], A, A2, u[1], B[1], ZOH)
    k2, h = kept_and_after(h, dt[2], A, A2, u[2], B[2], ZOH)
    return k0, k1, k2, decay_of(dt[3], A2) * h


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
    dC = h * do[:, None]
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
        dB = back * entry * u[:, None]
        ddt = over(through * A + mine * a * u[:, None], 1)
    else:
        read = over(mine, 1)
        du = read * dt
        dB = back * (dt * u)[:, None]
        ddt = over(through * A2, 1) * _LN2 + read * u
    return a * back, to_A, dB, dC, du + do * weight, ddt * slope, dz, do * u


@triton.jit
def read_by(C, do, z, t, left, o_st, z_st, o_at, z_at, valid, BN: tl.constexpr, PACKED: tl.constexpr,
            GATE: tl.constexpr):  # fmt: skip
    """C, the output's gradient and z of token t."""
    dy = row_of(do, t, left, o_st, o_at, valid).to(tl.float32)
    gate = dy
    if GATE:
        gate = row_of(z, t, left, z_st, z_at, valid).to(tl.float32)
    return number_of(C, t, left, BN, PACKED), dy, gate


@triton.jit
def across(x, bit: tl.constexpr):
    """x [lanes, n] of the lanes whose numbers differ in a bit."""
    lane = tl.arange(0, x.shape[0]) ^ bit
    return tl.gather(x, tl.broadcast_to(lane[:, None], x.shape), 0)


@triton.jit
def kept_of_two(low, high, bit: tl.constexpr):
    """The sum over lanes that differ in a bit: of `low` where it is 0, of `high` where it is 1."""
    upper = ((tl.arange(0, low.shape[0]) & bit) != 0)[:, None]
    return tl.where(upper, high, low) + across(tl.where(upper, low, high), bit)


@triton.jit
def halved(x, bit: tl.constexpr):
    """The sum of x [lanes, n] over lanes that differ in a bit: of the lower half of the numbers where it is 0, of the
    upper one where it is 1; of a single number in both."""
    if x.shape[1] > 1:
        low, high = tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))
        x = kept_of_two(low, high, bit)
    else:
        x = x + across(x, bit)
    return x


@triton.jit
def put_sums(to, x, y, there, N: tl.constexpr, BN: tl.constexpr):
    """Stores the sums [2, BN] over channels of x and y [BD, BN].

    With 32 channels a lane ends with one sum: it passes on what it does not keep, 31 numbers, where it would pass on
    five times as many if all lanes were to have all sums.
    """
    if x.shape[0] == 32 and BN <= 16:
        z = halved(halved(halved(halved(kept_of_two(x, y, 16), 8), 4), 2), 1)
        lane = tl.arange(0, 32)
        n = lane % 16 // (16 // BN)
        there = there & (lane % (16 // BN) == 0) & (n < N)
        tl.store(to + lane // 16 * BN + n, tl.reshape(z, [32]), mask=there)
    else:
        n = tl.arange(0, BN)
        tl.store(to + n, over(x, 0), mask=there & (n < N))
        tl.store(to + BN + n, over(y, 0), mask=there & (n < N))


@triton.jit
def put(to, at, token, x, there):
    """Stores a row of a token."""
    tl.store(to + token + at, x.to(to.dtype.element_ty), mask=there)


@triton.jit
def grads_kernel(
    u, delta, A, B, Cs, skip, z, bias, do, chunks, dstates, dfinal, dinitial,
    du, ddelta, dA, parts, dskip, dz, dbias, table,
    u_sb, u_st, u_sh, e_sb, e_st, e_sh, z_sb, z_st, z_sh, o_sb, o_st, o_sh,
    T, n_seg, n_chunks, per_seg,
    D: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, C: tl.constexpr,
    SOFTPLUS: tl.constexpr, BIAS: tl.constexpr, ZOH: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr,
    INITIAL: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All gradients, from right to left: du, ddelta, dz [batch, T, D]; dA, dskip and dbias of each segment; those of B
    and C by each program's channels in parts [batch, programs, T, 2, BN]; and of initial states of packed documents."""
    begin(PDL)
    d, valid, head, p, b, seg, padded, steps, e_at, inside, shift, rates, rates2 = channels_of(
        delta, A, bias, e_sb, e_sh, T, D, N, P, BD, BN, C, BIAS
    )
    weight = tl.zeros([BD], tl.float32)
    if SKIP:
        weight = tl.load(skip + d, mask=valid, other=0.0).to(tl.float32)
    from_state = state_at(dstates + (b * (n_seg + 1) + seg + 1) * D * N, d, N, BN)
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
        if PACKED:
            g = begun(g, last, dfinal, doc, d, inside, D, N, BN, FINAL)
        from_state = chunk_at(chunks + (b * n_chunks + c) * D * N, d, D, BN)
        for reached in range(0, length, 4):
            q = (length - 1) // 4 * 4 - reached
            h = tl.load(from_state, mask=inside, other=0.0)
            for earlier in range(0, q, 4):
                e0, e1, e2, e3 = rows_of(steps, start + earlier, length - earlier, e_st, e_at, valid)
                u0, u1, u2, u3 = rows_of(u + b * u_sb, start + earlier, length - earlier, u_st, u_at, valid)
                dt, _ = steps_of(e0, e1, e2, e3, shift, length - earlier, valid, SOFTPLUS)
                h = after_group(
                    h, dt, u0, u1, u2, u3, B + padded, rates, rates2, start + earlier, length - earlier, BN, PACKED, ZOH
                )
            t, left = start + q, length - q
            row, of_part = b * T + t, part + t
            e0, e1, e2, e3 = rows_of(steps, t, left, e_st, e_at, valid)
            dt, _ = steps_of(e0, e1, e2, e3, shift, left, valid, SOFTPLUS)
            ut = rows_of(u + b * u_sb, t, left, u_st, u_at, valid)
            bt = numbers_of(B + padded, t, left, BN, PACKED)
            kept = kept_of_group(h, dt, ut, bt, rates, rates2, ZOH)
            for I in tl.static_range(3, -1, -1):
                there = valid & (left > I)
                # All rows of a token again: kept for the group, they would take more registers than there are.
                e_t = row_of(steps, t + I, left - I, e_st, e_at, valid)
                dt_t, slope_t = step_of(e_t, shift, there, SOFTPLUS)
                u_t = row_of(u + b * u_sb, t + I, left - I, u_st, u_at, valid).to(tl.float32)
                b_t = number_of(B + padded, t + I, left - I, BN, PACKED)
                ct, dy, zt = read_by(
                    Cs + padded, do + b * o_sb, z + b * z_sb, t + I, left - I, o_st, z_st, o_at, z_at, valid, BN,
                    PACKED, GATE,
                )  # fmt: skip
                g, to_A, dB_t, dC_t, du_t, ddt_t, dz_t, dskip_t = back_through(
                    g, kept[I], dt_t, slope_t, rates, rates2, u_t, b_t, ct, dy, zt, weight, ZOH, GATE
                )
                put(du, d, (row + I) * D, du_t, there)
                put(ddelta, d, (row + I) * D, ddt_t, there)
                if GATE:
                    put(dz, d, (row + I) * D, dz_t, there)
                put_sums(parts + (of_part + I) * 2 * BN, dB_t, dC_t, left > I, N, BN)
                sum_A += to_A
                sum_skip += dskip_t
                sum_bias += ddt_t
        if PACKED and INITIAL:
            to_state = state_at(dinitial + at_doc, d, N, BN)
            tl.store(to_state, g, mask=inside & first)
    of_segment = (b * (D // P) + head) * n_seg + seg
    tl.store(state_at(dA, of_segment * P + p, N, BN), sum_A, mask=inside)
    if SKIP:
        tl.store(dskip + of_segment * P + p, sum_skip, mask=valid)
    if BIAS:
        tl.store(dbias + of_segment * P + p, sum_bias, mask=valid)
