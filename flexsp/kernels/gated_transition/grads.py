"""Gradients of a chunk's inputs, from the state that enters it and the gradient of the one that leaves."""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.gated_keys.tiles import last_row, running_gates, up_to_last_large
from flexsp.kernels.gated_transition.tiles import factors, within
from flexsp.kernels.primitives import GATE_MIN, chunk_info, load_rows, mm, store_rows
from flexsp.runtime.launch import begin


@triton.jit(do_not_specialize=["T", "H"])
def value_grads(
    do, u, w, inverse, gated_k, gated_b, q_k, q_b, a_k, entering, leaving, reads, solved, dv, table, do_sb, do_st,
    do_sh, T, H, scale, K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gradients of v; and what the rank one reads of each state, u + w S, and its gradient times the inverse^T, `solved`,
    of which `operand_grads` makes all others (docs/math.md, section 7, "RWKV-7")."""
    begin(PDL)
    c = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    batch, h = row // H, row % H
    chunk = row * tl.num_programs(0) + c
    start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
    do += batch * do_sb + h * do_sh + start * do_st
    entering += chunk * K * V
    leaving += chunk * K * V
    w += chunk * C * K
    gated_k += chunk * C * K
    gated_b += chunk * C * K
    square = chunk * C * C
    for v0 in range(0, V, BV):
        do_c = load_rows(do, do_st, length, v0, C, V, BV)
        read = load_rows(u + chunk * C * V, V, length, v0, C, V, BV).to(tl.float32)
        to_read = mm(tl.trans(load_rows(q_b + square, C, length, 0, C, C, C)), do_c, DOT, PREC) * scale
        to_v = mm(tl.trans(load_rows(q_k + square, C, length, 0, C, C, C)), do_c, DOT, PREC) * scale
        for at in range(0, K, BN):
            S = load_rows(entering + at * V, V, K - at, v0, BN, V, BV)
            dS = load_rows(leaving + at * V, V, K - at, v0, BN, V, BV)
            read += mm(load_rows(w, K, length, at, C, K, BN), S, DOT, PREC)
            to_read += mm(load_rows(gated_b, K, length, at, C, K, BN), dS, DOT, PREC)
            to_v += mm(load_rows(gated_k, K, length, at, C, K, BN), dS, DOT, PREC)
        store_rows(reads + chunk * C * V, read, V, C, v0, C, V, BV)
        back = mm(tl.trans(load_rows(inverse + square, C, length, 0, C, C, C)), to_read, DOT, PREC).to(DOT)
        store_rows(solved + chunk * C * V, back, V, C, v0, C, V, BV)
        to_v += mm(tl.trans(load_rows(a_k + square, C, length, 0, C, C, C)), back, DOT, PREC)
        store_rows(dv + ((batch * T + start) * H + h) * V, to_v, H * V, length, v0, C, V, BV)


@triton.jit
def _of_scores(
    do, v, reads, solved, do_st, v_st, length, scale, C: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Gradients of the scores of q with k and b and, a row earlier, of a with k and b."""
    q_k = tl.zeros([C, C], tl.float32)
    q_b = tl.zeros([C, C], tl.float32)
    a_k = tl.zeros([C, C], tl.float32)
    a_b = tl.zeros([C, C], tl.float32)
    for v0 in range(0, V, BV):
        do_c = load_rows(do, do_st, length, v0, C, V, BV)
        back = load_rows(solved + V, V, length - 1, v0, C, V, BV)
        values = tl.trans(load_rows(v, v_st, length, v0, C, V, BV))
        read = tl.trans(load_rows(reads, V, length, v0, C, V, BV))
        q_k += mm(do_c, values, DOT, PREC)
        q_b += mm(do_c, read, DOT, PREC)
        a_k += mm(back, values, DOT, PREC)
        a_b += mm(back, read, DOT, PREC)
    return scale * q_k, scale * q_b, a_k, a_b


@triton.jit
def _through(x, x_st, state, length, at, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr,
             BV: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """x S^T, of rows at.. of a state."""
    found = tl.zeros([C, BN], tl.float32)
    for v0 in range(0, V, BV):
        S = load_rows(state + at * V, V, K - at, v0, BN, V, BV)
        found += mm(load_rows(x, x_st, length, v0, C, V, BV), tl.trans(S), DOT, PREC)
    return found


@triton.jit
def _kept(entering, leaving, at, K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr):
    """S dS, summed over columns, of rows at.. of the states."""
    found = tl.zeros([BN], tl.float32)
    for v0 in range(0, V, BV):
        S = load_rows(entering + at * V, V, K - at, v0, BN, V, BV).to(tl.float32)
        dS = load_rows(leaving + at * V, V, K - at, v0, BN, V, BV).to(tl.float32)
        found += tl.sum(S * dS + 0.0, axis=1)
    return found


@triton.jit
def _first(
    solved, entering, da, length, at, K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """The gradient of a chunk's first row of `a`, which no gate of the chunk decays."""
    cols = at + tl.arange(0, BN)
    found = tl.zeros([BN], tl.float32)
    for v0 in range(0, V, BV):
        S = load_rows(entering + at * V, V, K - at, v0, BN, V, BV).to(tl.float32)
        columns = v0 + tl.arange(0, BV)
        back = tl.load(solved + columns, mask=(columns < V) & (length > 0), other=0.0).to(tl.float32)
        found += tl.sum(S * back[None, :] + 0.0, axis=1)
    tl.store(da + cols, found.to(da.dtype.element_ty), mask=(cols < K) & (length > 0))


@triton.jit
def _of_later(
    x, x_st, k, k_st, b, b_st, with_k, with_b, to_x, own, running, length, n, at, C: tl.constexpr, K: tl.constexpr,
    BN: tl.constexpr, LEVELS: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """(to_x and the gradient of x, n rows that later tokens have of pairs, and what pairs add to their sums of gates)."""
    of_gates = tl.zeros([C, BN], tl.float32)
    for level in range(0, LEVELS):
        up, down = factors(own, running, level, at + tl.arange(0, BN), C, K)
        near = within(level, C)
        kc = (load_rows(k, k_st, length, at, C, K, BN) * down).to(DOT)
        new = mm(tl.where(near, with_k, 0.0), kc, DOT, PREC)
        bc = (load_rows(b, b_st, length, at, C, K, BN) * down).to(DOT)
        new = tl.dot(tl.where(near, with_b, 0.0).to(DOT), bc, new)
        to_x += new * up
        of_gates += new * (load_rows(x, x_st, n, at, C, K, BN) * up).to(DOT).to(tl.float32)
    return to_x, of_gates


@triton.jit
def _of_earlier(
    x, x_st, q, q_st, a, a_st, with_q, with_a, to_x, own, running, length, at, C: tl.constexpr, K: tl.constexpr,
    BN: tl.constexpr, LEVELS: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The same of x that earlier tokens have; the rows of `a` are taken one earlier."""
    of_gates = tl.zeros([C, BN], tl.float32)
    for level in range(0, LEVELS):
        up, down = factors(own, running, level, at + tl.arange(0, BN), C, K)
        near = within(level, C)
        qc = (load_rows(q, q_st, length, at, C, K, BN) * up).to(DOT)
        new = mm(tl.trans(tl.where(near, with_q, 0.0)), qc, DOT, PREC)
        ac = (load_rows(a, a_st, length - 1, at, C, K, BN) * up).to(DOT)
        new = tl.dot(tl.trans(tl.where(near, with_a, 0.0).to(DOT)), ac, new)
        to_x += new * down
        of_gates -= new * (load_rows(x, x_st, length, at, C, K, BN) * down).to(DOT).to(tl.float32)
    return to_x, of_gates


@triton.jit
def _of_chunk(
    q, k, a, b, g, v, do, reads, solved, running, entering, leaving, dq, dk, da, db, dg, table, q_sb, q_st, q_sh, k_sb,
    k_st, k_sh, a_sb, a_st, a_sh, b_sb, b_st, b_sh, g_sb, g_st, g_sh, v_sb, v_st, v_sh, do_sb, do_st, do_sh, T, H,
    n_chunks, scale, c, at, K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr, SMALL_GATES: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k, a, b and the gates, of channels at.. of a chunk.

    What a pair of tokens adds to gates is a product of the same three numbers for both tokens, operands with their
    decays as they were rounded: so what does not straddle a gate cancels to fp32. Operands are loaded anew for each
    use: registers would not hold them.
    """
    row = tl.program_id(1).to(tl.int64)
    batch, h = row // H, row % H
    chunk = row * n_chunks + c
    start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
    q += batch * q_sb + h * q_sh + start * q_st
    k += batch * k_sb + h * k_sh + start * k_st
    a += batch * a_sb + h * a_sh + start * a_st
    b += batch * b_sb + h * b_sh + start * b_st
    g += batch * g_sb + h * g_sh + start * g_st
    v += batch * v_sb + h * v_sh + start * v_st
    do += batch * do_sb + h * do_sh + start * do_st
    reads += chunk * C * V
    solved += chunk * C * V
    running += chunk * C * K
    entering += chunk * K * V
    leaving += chunk * K * V
    to = ((batch * T + start) * H + h) * K
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    of_qk, of_qb, of_ak, of_ab = _of_scores(do, v, reads, solved, do_st, v_st, length, scale, C, V, BV, DOT, PREC)
    qk_alone = tl.sum(tl.where(i == j, of_qk, 0.0), axis=1)[:, None]
    qb_alone = tl.sum(tl.where(i == j, of_qb, 0.0), axis=1)[:, None]
    ak_alone = tl.sum(tl.where(i == j, of_ak, 0.0), axis=1)[:, None]
    ab_alone = tl.sum(tl.where(i == j, of_ab, 0.0), axis=1)[:, None]
    of_qk = tl.where(i > j, of_qk, 0.0).to(DOT)
    of_qb = tl.where(i > j, of_qb, 0.0).to(DOT)
    of_ak = tl.where(i > j, of_ak, 0.0).to(DOT)
    of_ab = tl.where(i > j, of_ab, 0.0).to(DOT)
    _first(solved, entering, da + to, length, at, K, V, BN, BV)
    a += a_st  # what it reads before a token's gate is what it would read after that of the token before
    solved += V
    later = length - 1
    own = running_gates(g, g_st, length, at, C, K, BN)
    end = last_row(own, C)
    if SMALL_GATES:
        half = 0.5 * end[None, :]
        rest = tl.exp(half)
        x = (load_rows(k, k_st, length, at, C, K, BN) * tl.exp(half - own)).to(DOT)
        y = (load_rows(b, b_st, length, at, C, K, BN) * tl.exp(half - own)).to(DOT)
        to_q = _through(do, do_st, entering, length, at, C, K, V, BN, BV, DOT, PREC) * (scale * rest)
        to_q = tl.dot(of_qb, y, tl.dot(of_qk, x, to_q))
        of_read = (load_rows(q, q_st, length, at, C, K, BN) * tl.exp(own - half)).to(DOT)
        of_sums = to_q * of_read.to(tl.float32)
        to_q *= tl.exp(own - half)
    else:
        left = tl.exp(end[None, :] - own)
        to_q = _through(do, do_st, entering, length, at, C, K, V, BN, BV, DOT, PREC) * (scale * tl.exp(own))
        of_sums = to_q * load_rows(q, q_st, length, at, C, K, BN)
        to_q, more = _of_later(
            q, q_st, k, k_st, b, b_st, of_qk, of_qb, to_q, own, running, length, length, at, C, K, BN, LEVELS, DOT, PREC
        )  # fmt: skip
        of_sums += more
    to_q += qk_alone * load_rows(k, k_st, length, at, C, K, BN)
    to_q += qb_alone * load_rows(b, b_st, length, at, C, K, BN)
    store_rows(dq + to, to_q, H * K, length, at, C, K, BN)
    if SMALL_GATES:
        to_a = _through(solved, V, entering, later, at, C, K, V, BN, BV, DOT, PREC) * rest
        to_a = tl.dot(of_ab, y, tl.dot(of_ak, x, to_a))
        of_removed = (load_rows(a, a_st, later, at, C, K, BN) * tl.exp(own - half)).to(DOT)
        of_sums += to_a * of_removed.to(tl.float32)
        to_a *= tl.exp(own - half)
    else:
        to_a = _through(solved, V, entering, later, at, C, K, V, BN, BV, DOT, PREC) * tl.exp(own)
        of_sums += to_a * load_rows(a, a_st, later, at, C, K, BN)
        to_a, more = _of_later(
            a, a_st, k, k_st, b, b_st, of_ak, of_ab, to_a, own, running, length, later, at, C, K, BN, LEVELS, DOT, PREC
        )  # fmt: skip
        of_sums += more
    to_a += ak_alone * load_rows(k, k_st, length, at, C, K, BN)
    to_a += ab_alone * load_rows(b, b_st, length, at, C, K, BN)
    store_rows(da + to + H * K, to_a, H * K, later, at, C, K, BN)
    if SMALL_GATES:
        to_k = _through(v, v_st, leaving, length, at, C, K, V, BN, BV, DOT, PREC) * rest
        whole = tl.sum(to_k * x.to(tl.float32) + 0.0, axis=0)
        to_k = tl.dot(tl.trans(of_ak), of_removed, tl.dot(tl.trans(of_qk), of_read, to_k))
        of_sums -= to_k * x.to(tl.float32)
        to_k *= tl.exp(half - own)
    else:
        to_k = _through(v, v_st, leaving, length, at, C, K, V, BN, BV, DOT, PREC) * left
        written = to_k * load_rows(k, k_st, length, at, C, K, BN)
        whole = tl.sum(written + 0.0, axis=0)
        to_k, more = _of_earlier(
            k, k_st, q, q_st, a, a_st, of_qk, of_ak, to_k, own, running, length, at, C, K, BN, LEVELS, DOT, PREC
        )  # fmt: skip
        of_sums += more - written
    to_k += qk_alone * load_rows(q, q_st, length, at, C, K, BN)
    to_k += ak_alone * load_rows(a, a_st, later, at, C, K, BN)
    store_rows(dk + to, to_k, H * K, length, at, C, K, BN)
    if SMALL_GATES:
        to_b = _through(reads, V, leaving, length, at, C, K, V, BN, BV, DOT, PREC) * rest
        whole += tl.sum(to_b * y.to(tl.float32) + 0.0, axis=0)
        to_b = tl.dot(tl.trans(of_ab), of_removed, tl.dot(tl.trans(of_qb), of_read, to_b))
        of_sums -= to_b * y.to(tl.float32)
        to_b *= tl.exp(half - own)
    else:
        to_b = _through(reads, V, leaving, length, at, C, K, V, BN, BV, DOT, PREC) * left
        written = to_b * load_rows(b, b_st, length, at, C, K, BN)
        whole += tl.sum(written + 0.0, axis=0)
        to_b, more = _of_earlier(
            b, b_st, q, q_st, a, a_st, of_qb, of_ab, to_b, own, running, length, at, C, K, BN, LEVELS, DOT, PREC
        )  # fmt: skip
        of_sums += more - written
    to_b += qb_alone * load_rows(q, q_st, length, at, C, K, BN)
    to_b += ab_alone * load_rows(a, a_st, later, at, C, K, BN)
    store_rows(db + to, to_b, H * K, length, at, C, K, BN)
    whole += tl.exp(end) * _kept(entering, leaving, at, K, V, BN, BV)
    of_gates = tl.cumsum(of_sums, axis=0, reverse=True) + whole[None, :]
    given = load_rows(g, g_st, length, at, C, K, BN).to(tl.float32)
    store_rows(dg + to, tl.where(given <= GATE_MIN, 0.0, of_gates), H * K, length, at, C, K, BN)


@triton.jit(do_not_specialize=["T", "H", "n_chunks"])
def operand_grads_small(
    q, k, a, b, g, v, do, reads, solved, running, small_gates, entering, leaving, dq, dk, da, db, dg, table, q_sb, q_st,
    q_sh, k_sb, k_st, k_sh, a_sb, a_st, a_sh, b_sb, b_st, b_sh, g_sb, g_st, g_sh, v_sb, v_st, v_sh, do_sb, do_st,
    do_sh, T, H, n_chunks, scale, K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr,
    PARTS: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k, a, b and gates: a program for each BN channels of a chunk.

    Of use where its gates are small: elsewhere `operand_grads` leaves all anew."""
    begin(PDL)
    _of_chunk(
        q, k, a, b, g, v, do, reads, solved, running, entering, leaving, dq, dk, da, db, dg, table, q_sb, q_st, q_sh, k_sb,
        k_st, k_sh, a_sb, a_st, a_sh, b_sb, b_st, b_sh, g_sb, g_st, g_sh, v_sb, v_st, v_sh, do_sb, do_st, do_sh, T, H,
        n_chunks, scale, tl.program_id(0) // PARTS, tl.program_id(0) % PARTS * BN, K, V, BN, BV, C, 0, True, PACKED, DOT,
        PREC,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "H", "n_chunks"])
def operand_grads(
    q, k, a, b, g, v, do, reads, solved, running, small_gates, entering, leaving, dq, dk, da, db, dg, table, q_sb, q_st,
    q_sh, k_sb, k_st, k_sh, a_sb, a_st, a_sh, b_sb, b_st, b_sh, g_sb, g_st, g_sh, v_sb, v_st, v_sh, do_sb, do_st,
    do_sh, T, H, n_chunks, scale, K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr,
    PARTS: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, RUN: tl.constexpr, PACKED: tl.constexpr,
    DOT: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same of those chunks whose gates are not small: a program has BN channels of RUN chunks."""
    begin(PDL)
    at = tl.program_id(0) // PARTS * RUN
    small_gates += tl.program_id(1).to(tl.int64) * n_chunks
    for n in range(up_to_last_large(small_gates, at, n_chunks, RUN)):
        if up_to_last_large(small_gates, at + n, at + n + 1, RUN) > 0:
            _of_chunk(
                q, k, a, b, g, v, do, reads, solved, running, entering, leaving, dq, dk, da, db, dg, table, q_sb, q_st, q_sh, k_sb,
                k_st, k_sh, a_sb, a_st, a_sh, b_sb, b_st, b_sh, g_sb, g_st, g_sh, v_sb, v_st, v_sh, do_sb, do_st, do_sh, T, H,
                n_chunks, scale, at + n, tl.program_id(0) % PARTS * BN, K, V, BN, BV, C, LEVELS, False, PACKED,
                DOT, PREC,
            )  # fmt: skip
