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
    """Gradients of v; and what `a` reads of each state, u + w S, and the inverse's transpose times its gradient,
    `solved`, of which `operand_grads` makes all others (docs/math.md, section 19)."""
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
    do, v, reads, back, do_st, v_st, length, C: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Gradients of the scores of q with k and b and, a row earlier, of a with k and b."""
    q_k = tl.zeros([C, C], tl.float32)
    q_b = tl.zeros([C, C], tl.float32)
    a_k = tl.zeros([C, C], tl.float32)
    a_b = tl.zeros([C, C], tl.float32)
    for v0 in range(0, V, BV):
        do_c = load_rows(do, do_st, length, v0, C, V, BV)
        of_read = load_rows(back, V, length - 1, v0, C, V, BV)
        values = tl.trans(load_rows(v, v_st, length, v0, C, V, BV))
        read = tl.trans(load_rows(reads, V, length, v0, C, V, BV))
        q_k += mm(do_c, values, DOT, PREC)
        q_b += mm(do_c, read, DOT, PREC)
        a_k += mm(of_read, values, DOT, PREC)
        a_b += mm(of_read, read, DOT, PREC)
    return q_k, q_b, a_k, a_b


@triton.jit
def _of_pairs(
    x, x_st, rows, y, y_st, length, C: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """(what of x y^T is below the diagonal, what is on it), gradients of scores; x has `rows` rows."""
    found = tl.zeros([C, C], tl.float32)
    for v0 in range(0, V, BV):
        xc = load_rows(x, x_st, rows, v0, C, V, BV)
        found += mm(xc, tl.trans(load_rows(y, y_st, length, v0, C, V, BV)), DOT, PREC)
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    return tl.where(i > j, found, 0.0), tl.sum(tl.where(i == j, found, 0.0), axis=1)[:, None]


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
def _back(
    pairs, x, x_st, rows, y, y_st, to_x, to_y, of_sums, own, running, length, at, C: tl.constexpr, K: tl.constexpr,
    BN: tl.constexpr, LEVELS: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """to_x, to_y and of_sums with what gradients of scores, `pairs`, add to x, to y and to running sums of gates."""
    for level in range(0, LEVELS):
        up, down = factors(own, running, level, at + tl.arange(0, BN), C, K)
        near = tl.where(within(level, C), pairs, 0.0).to(DOT)
        xc = (load_rows(x, x_st, rows, at, C, K, BN) * up).to(DOT)
        yc = (load_rows(y, y_st, length, at, C, K, BN) * down).to(DOT)
        new = mm(near, yc, DOT, PREC)
        to_x += new * up
        of_sums += new * xc.to(tl.float32)
        new = mm(tl.trans(near), xc, DOT, PREC)
        to_y += new * down
        of_sums -= new * yc.to(tl.float32)
    return to_x, to_y, of_sums


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
    later = length - 1
    # What `a` reads before a token's gate is what it would read after that of the token before.
    removes, back = a + a_st, solved + V
    if SMALL_GATES:
        i = tl.arange(0, C)[:, None]
        j = tl.arange(0, C)[None, :]
        of_qk, of_qb, of_ak, of_ab = _of_scores(do, v, reads, back, do_st, v_st, length, C, V, BV, DOT, PREC)
        of_qk = tl.where(i >= j, scale * of_qk, 0.0).to(DOT)
        of_qb = tl.where(i >= j, scale * of_qb, 0.0).to(DOT)
        of_ak = tl.where(i >= j, of_ak, 0.0).to(DOT)
        of_ab = tl.where(i >= j, of_ab, 0.0).to(DOT)
        own = running_gates(g, g_st, length, at, C, K, BN)
        end = last_row(own, C)
        half = 0.5 * end[None, :]
        rest = tl.exp(half)
        x = (load_rows(k, k_st, length, at, C, K, BN) * tl.exp(half - own)).to(DOT)
        y = (load_rows(b, b_st, length, at, C, K, BN) * tl.exp(half - own)).to(DOT)
        to_q = _through(do, do_st, entering, length, at, C, K, V, BN, BV, DOT, PREC) * (scale * rest)
        to_q = tl.dot(of_qb, y, tl.dot(of_qk, x, to_q))
        of_read = (load_rows(q, q_st, length, at, C, K, BN) * tl.exp(own - half)).to(DOT)
        of_sums = to_q * of_read.to(tl.float32)
        store_rows(dq + to, to_q * tl.exp(own - half), H * K, length, at, C, K, BN)
        to_a = _through(back, V, entering, later, at, C, K, V, BN, BV, DOT, PREC) * rest
        to_a = tl.dot(of_ab, y, tl.dot(of_ak, x, to_a))
        of_removed = (load_rows(removes, a_st, later, at, C, K, BN) * tl.exp(own - half)).to(DOT)
        of_sums += to_a * of_removed.to(tl.float32)
        store_rows(da + to + H * K, to_a * tl.exp(own - half), H * K, later, at, C, K, BN)
        to_k = _through(v, v_st, leaving, length, at, C, K, V, BN, BV, DOT, PREC) * rest
        whole = tl.sum(to_k * x.to(tl.float32) + 0.0, axis=0)
        to_k = tl.dot(tl.trans(of_ak), of_removed, tl.dot(tl.trans(of_qk), of_read, to_k))
        of_sums -= to_k * x.to(tl.float32)
        store_rows(dk + to, to_k * tl.exp(half - own), H * K, length, at, C, K, BN)
        to_b = _through(reads, V, leaving, length, at, C, K, V, BN, BV, DOT, PREC) * rest
        whole += tl.sum(to_b * y.to(tl.float32) + 0.0, axis=0)
        to_b = tl.dot(tl.trans(of_ab), of_removed, tl.dot(tl.trans(of_qb), of_read, to_b))
        of_sums -= to_b * y.to(tl.float32)
        store_rows(db + to, to_b * tl.exp(half - own), H * K, length, at, C, K, BN)
    else:
        # Gradients of scores one after the other, each of use at once. Pairs without decay are not rounded.
        own = running_gates(g, g_st, length, at, C, K, BN)
        end = last_row(own, C)
        left = tl.exp(end[None, :] - own)
        to_q = _through(do, do_st, entering, length, at, C, K, V, BN, BV, DOT, PREC) * (scale * tl.exp(own))
        to_k = _through(v, v_st, leaving, length, at, C, K, V, BN, BV, DOT, PREC) * left
        to_b = _through(reads, V, leaving, length, at, C, K, V, BN, BV, DOT, PREC) * left
        of_sums = to_k * load_rows(k, k_st, length, at, C, K, BN) + to_b * load_rows(b, b_st, length, at, C, K, BN)
        whole = tl.sum(of_sums + 0.0, axis=0)
        of_sums = to_q * load_rows(q, q_st, length, at, C, K, BN) - of_sums
        pairs, qk_alone = _of_pairs(do, do_st, length, v, v_st, length, C, V, BV, DOT, PREC)
        to_q, to_k, of_sums = _back(
            scale * pairs, q, q_st, length, k, k_st, to_q, to_k, of_sums, own, running, length, at, C, K, BN, LEVELS,
            DOT, PREC,
        )  # fmt: skip
        tl.debug_barrier()
        pairs, qb_alone = _of_pairs(do, do_st, length, reads, V, length, C, V, BV, DOT, PREC)
        to_q, to_b, of_sums = _back(
            scale * pairs, q, q_st, length, b, b_st, to_q, to_b, of_sums, own, running, length, at, C, K, BN, LEVELS,
            DOT, PREC,
        )  # fmt: skip
        qk_alone *= scale
        qb_alone *= scale
        to_q += qk_alone * load_rows(k, k_st, length, at, C, K, BN)
        to_q += qb_alone * load_rows(b, b_st, length, at, C, K, BN)
        store_rows(dq + to, to_q, H * K, length, at, C, K, BN)
        to_a = _through(back, V, entering, later, at, C, K, V, BN, BV, DOT, PREC) * tl.exp(own)
        of_sums += to_a * load_rows(removes, a_st, later, at, C, K, BN)
        tl.debug_barrier()
        pairs, ak_alone = _of_pairs(back, V, later, v, v_st, length, C, V, BV, DOT, PREC)
        to_a, to_k, of_sums = _back(
            pairs, removes, a_st, later, k, k_st, to_a, to_k, of_sums, own, running, length, at, C, K, BN, LEVELS, DOT,
            PREC,
        )  # fmt: skip
        tl.debug_barrier()
        pairs, ab_alone = _of_pairs(back, V, later, reads, V, length, C, V, BV, DOT, PREC)
        to_a, to_b, of_sums = _back(
            pairs, removes, a_st, later, b, b_st, to_a, to_b, of_sums, own, running, length, at, C, K, BN, LEVELS, DOT,
            PREC,
        )  # fmt: skip
        to_a += ak_alone * load_rows(k, k_st, length, at, C, K, BN)
        to_a += ab_alone * load_rows(b, b_st, length, at, C, K, BN)
        store_rows(da + to + H * K, to_a, H * K, later, at, C, K, BN)
        to_k += qk_alone * load_rows(q, q_st, length, at, C, K, BN)
        to_k += ak_alone * load_rows(removes, a_st, later, at, C, K, BN)
        store_rows(dk + to, to_k, H * K, length, at, C, K, BN)
        to_b += qb_alone * load_rows(q, q_st, length, at, C, K, BN)
        to_b += ab_alone * load_rows(removes, a_st, later, at, C, K, BN)
        store_rows(db + to, to_b, H * K, length, at, C, K, BN)
    _first(solved, entering, da + to, length, at, K, V, BN, BV)
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
        q, k, a, b, g, v, do, reads, solved, running, entering, leaving, dq, dk, da, db, dg, table, q_sb, q_st, q_sh,
        k_sb, k_st, k_sh, a_sb, a_st, a_sh, b_sb, b_st, b_sh, g_sb, g_st, g_sh, v_sb, v_st, v_sh, do_sb, do_st, do_sh,
        T, H, n_chunks, scale, tl.program_id(0) // PARTS, tl.program_id(0) % PARTS * BN, K, V, BN, BV, C, 0, True,
        PACKED, DOT, PREC,
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
                q, k, a, b, g, v, do, reads, solved, running, entering, leaving, dq, dk, da, db, dg, table, q_sb, q_st,
                q_sh, k_sb, k_st, k_sh, a_sb, a_st, a_sh, b_sb, b_st, b_sh, g_sb, g_st, g_sh, v_sb, v_st, v_sh, do_sb,
                do_st, do_sh, T, H, n_chunks, scale, at + n, tl.program_id(0) % PARTS * BN, K, V, BN, BV, C, LEVELS,
                False, PACKED, DOT, PREC,
            )  # fmt: skip
