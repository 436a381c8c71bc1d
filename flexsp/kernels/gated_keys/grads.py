"""Gradients of queries, keys, values and gates, from the states that enter chunks and the gradients of those that
leave."""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.gated_keys.tiles import half, rows_of, running_gates, up_to_last_large
from flexsp.kernels.primitives import GATE_MIN, chunk_info, load_rows, mm, store_rows
from flexsp.runtime.launch import begin


@triton.jit
def _read_back(do, entering, do_st, length, at, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr,
               BV: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """do S^T, of rows at.. of the state that enters."""
    to_q = tl.zeros([C, BN], tl.float32)
    for v0 in range(0, V, BV):
        do_c = load_rows(do, do_st, length, v0, C, V, BV)
        S = load_rows(entering + at * V, V, K - at, v0, BN, V, BV)
        to_q += mm(do_c, tl.trans(S), DOT, PREC)
    return to_q


@triton.jit
def _written_back(
    v, do, entering, leaving, v_st, do_st, length, at, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BN: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """(do v^T, v dS^T, S dS summed over columns), of rows at.. of the states that enter and leave."""
    scores = tl.zeros([C, C], tl.float32)
    to_k = tl.zeros([C, BN], tl.float32)
    kept = tl.zeros([BN], tl.float32)
    for v0 in range(0, V, BV):
        do_c = load_rows(do, do_st, length, v0, C, V, BV)
        v_c = load_rows(v, v_st, length, v0, C, V, BV)
        S = load_rows(entering + at * V, V, K - at, v0, BN, V, BV)
        dS = load_rows(leaving + at * V, V, K - at, v0, BN, V, BV)
        scores += mm(do_c, tl.trans(v_c), DOT, PREC)
        to_k += mm(v_c, tl.trans(dS), DOT, PREC)
        kept += tl.sum(S.to(tl.float32) * dS.to(tl.float32) + 0.0, axis=1)
    return scores, to_k, kept


@triton.jit
def _of_keys(
    q, k, g, v, do, b, entering, leaving, dq, dk, dg, q_st, k_st, g_st, v_st, do_st, stride, length, at, scale,
    K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k and gates, of channels at.. .

    What a pair of tokens adds to gates is a product of the same three numbers for both tokens, queries and keys with
    their decays as sums of two roundings: so what does not straddle a gate cancels to fp32.
    """
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    cols = at + tl.arange(0, BN)
    d, to_k, kept = _written_back(v, do, entering, leaving, v_st, do_st, length, at, C, K, V, BN, BV, DOT, PREC)
    diagonal = scale * tl.sum(tl.where(i == j, d, 0.0), axis=1)[:, None]
    both = tl.where(i > j, scale * d, 0.0).to(DOT)
    both += tl.trans(both)
    own = rows_of(b, tl.arange(0, C), cols, K)
    end = tl.load(b + (C - 1) * K + cols, mask=cols < K, other=0.0)
    to_k *= tl.exp(end[None, :] - own)
    to_q = _read_back(do, entering, do_st, length, at, C, K, V, BN, BV, DOT, PREC) * (scale * tl.exp(own))
    qc = load_rows(q, q_st, length, at, C, K, BN)
    kc = load_rows(k, k_st, length, at, C, K, BN)
    of_gates = to_k * kc.to(tl.float32)
    whole = tl.sum(of_gates + 0.0, axis=0) + tl.exp(end) * kept
    of_gates = to_q * qc.to(tl.float32) - of_gates
    for level in range(0, LEVELS):
        x, decay, second = half(qc, kc, own, b, level, cols, C, K)
        apart = ((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) != (j >> level))
        pairs = tl.where(apart, both, 0.0)
        first = x.to(DOT)
        new = mm(pairs, first, DOT, PREC)
        of_gates += tl.where(second, new, -new) * first.to(tl.float32)
        if tl.float32 != DOT:
            # What x lost in rounding. With strong gates few pairs count, and their roundings do not average out. The
            # product goes into of_gates step by step, so that fewer registers are live.
            rest = (x - first.to(tl.float32)).to(DOT)
            more = mm(pairs, rest, DOT, PREC)
            of_gates += tl.where(second, more, -more) * first.to(tl.float32)
            new += more
            of_gates += tl.where(second, new, -new) * rest.to(tl.float32)
        new *= decay
        to_q += tl.where(second, new, 0.0)
        to_k += tl.where(second, 0.0, new)
    store_rows(dk, to_k + diagonal * qc.to(tl.float32), stride, length, at, C, K, BN)
    store_rows(dq, to_q + diagonal * kc.to(tl.float32), stride, length, at, C, K, BN)
    of_gates = tl.cumsum(of_gates, axis=0, reverse=True) + whole[None, :]
    given = load_rows(g, g_st, length, at, C, K, BN).to(tl.float32)
    store_rows(dg, tl.where(given <= GATE_MIN, 0.0, of_gates), stride, length, at, C, K, BN)


@triton.jit
def _of_keys_small(
    q, k, g, v, do, b, entering, leaving, dq, dk, dg, q_st, k_st, g_st, v_st, do_st, stride, length, at, scale,
    K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """The same of small gates, of which none is below -104: with r half of what they add up to, q e^{b - r} and
    k e^{r - b} are what pairs read. Gradients of gates are sums of products with these, as they were rounded."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    cols = at + tl.arange(0, BN)
    d, to_k, kept = _written_back(v, do, entering, leaving, v_st, do_st, length, at, C, K, V, BN, BV, DOT, PREC)
    diagonal = scale * tl.sum(tl.where(i == j, d, 0.0), axis=1)[:, None]
    below = tl.where(i > j, scale * d, 0.0).to(DOT)
    half = 0.5 * tl.load(b + (C - 1) * K + cols, mask=cols < K, other=0.0)
    rest = tl.exp(half)[None, :]
    beyond = running_gates(g, g_st, length, at, C, K, BN) - half[None, :]
    kc = load_rows(k, k_st, length, at, C, K, BN)
    down = tl.exp(-beyond)
    kc = (kc * down).to(DOT)
    to_k *= rest
    whole = tl.sum(kc.to(tl.float32) * to_k + 0.0, axis=0) + tl.exp(2.0 * half) * kept
    qc = load_rows(q, q_st, length, at, C, K, BN)
    to_k = tl.dot(tl.trans(below), (qc * tl.exp(beyond)).to(DOT), to_k)
    of_gates = -to_k * kc.to(tl.float32)
    store_rows(dk, to_k * down + diagonal * qc.to(tl.float32), stride, length, at, C, K, BN)
    to_q = _read_back(do, entering, do_st, length, at, C, K, V, BN, BV, DOT, PREC) * (scale * rest)
    # Loaded and made anew: registers would not hold it.
    kc = load_rows(k, k_st, length, at, C, K, BN)
    beyond = running_gates(g, g_st, length, at, C, K, BN) - half[None, :]
    to_q = tl.dot(below, (kc * tl.exp(-beyond)).to(DOT), to_q)
    qc = load_rows(q, q_st, length, at, C, K, BN)
    up = tl.exp(beyond)
    of_gates += to_q * (qc * up).to(DOT).to(tl.float32)
    store_rows(dq, to_q * up + diagonal * kc.to(tl.float32), stride, length, at, C, K, BN)
    store_rows(dg, tl.cumsum(of_gates, axis=0, reverse=True) + whole[None, :], stride, length, at, C, K, BN)


@triton.jit
def _of_values(
    do, gated_k, scores, leaving, dv, do_st, stride, length, scale, K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Gradients of v."""
    pairs = load_rows(scores, C, length, 0, C, C, C)
    for v0 in range(0, V, BV):
        do_c = load_rows(do, do_st, length, v0, C, V, BV)
        to_v = mm(tl.trans(pairs), do_c, DOT, PREC) * scale
        for at in range(0, K, BN):
            gated = load_rows(gated_k, K, length, at, C, K, BN)
            dS = load_rows(leaving + at * V, V, K - at, v0, BN, V, BV)
            to_v += mm(gated, dS, DOT, PREC)
        store_rows(dv, to_v, stride, length, v0, C, V, BV)


@triton.jit
def _of_chunk(
    q, k, g, v, do, b, gated_k, scores, entering, leaving, dq, dk, dg, dv, table, q_sb, q_st, q_sh, k_sb, k_st, k_sh,
    g_sb, g_st, g_sh, v_sb, v_st, v_sh, do_sb, do_st, do_sh, T, H, n_chunks, scale, c, part,
    K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr, SMALL_GATES: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One part: that of BN channels of keys or, the last one, that of values."""
    row = tl.program_id(1).to(tl.int64)
    batch, h = row // H, row % H
    chunk = row * n_chunks + c
    start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
    do += batch * do_sb + h * do_sh + start * do_st
    entering += chunk * K * V
    leaving += chunk * K * V
    token = (batch * T + start) * H + h
    if part < PARTS - 1:
        q += batch * q_sb + h * q_sh + start * q_st
        k += batch * k_sb + h * k_sh + start * k_st
        g += batch * g_sb + h * g_sh + start * g_st
        v += batch * v_sb + h * v_sh + start * v_st
        b += chunk * C * K
        if SMALL_GATES:
            _of_keys_small(
                q, k, g, v, do, b, entering, leaving, dq + token * K, dk + token * K, dg + token * K, q_st, k_st, g_st,
                v_st, do_st, H * K, length, part * BN, scale, K, V, BN, BV, C, DOT, PREC,
            )  # fmt: skip
        else:
            _of_keys(
                q, k, g, v, do, b, entering, leaving, dq + token * K, dk + token * K, dg + token * K, q_st, k_st, g_st,
                v_st, do_st, H * K, length, part * BN, scale, K, V, BN, BV, C, LEVELS, DOT, PREC,
            )  # fmt: skip
    else:
        _of_values(
            do, gated_k + chunk * C * K, scores + chunk * C * C, leaving, dv + token * V, do_st, H * V, length,
            scale, K, V, BN, BV, C, DOT, PREC,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "H", "n_chunks"])
def key_grads_small(
    q, k, g, v, do, b, gated_k, scores, small_gates, entering, leaving, dq, dk, dg, dv, table, q_sb, q_st, q_sh, k_sb,
    k_st, k_sh, g_sb, g_st, g_sh, v_sb, v_st, v_sh, do_sb, do_st, do_sh, T, H, n_chunks, scale, K: tl.constexpr,
    V: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk of o = scale (q e^b S + scores v): a program for each BN channels of keys, and one for dv.

    Of use where its gates are small: elsewhere `key_grads` leaves all anew."""
    begin(PDL)
    _of_chunk(
        q, k, g, v, do, b, gated_k, scores, entering, leaving, dq, dk, dg, dv, table, q_sb, q_st, q_sh, k_sb, k_st,
        k_sh, g_sb, g_st, g_sh, v_sb, v_st, v_sh, do_sb, do_st, do_sh, T, H, n_chunks, scale,
        tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, K, V, BN, BV, PARTS, C, LEVELS, True, PACKED, DOT, PREC,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "H", "n_chunks"])
def key_grads(
    q, k, g, v, do, b, gated_k, scores, small_gates, entering, leaving, dq, dk, dg, dv, table, q_sb, q_st, q_sh, k_sb,
    k_st, k_sh, g_sb, g_st, g_sh, v_sb, v_st, v_sh, do_sb, do_st, do_sh, T, H, n_chunks, scale, K: tl.constexpr,
    V: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    RUN: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for any gates, of those chunks whose gates are not small: a program has a part of RUN of them. With RUN
    = 1 of all chunks."""
    begin(PDL)
    at = tl.program_id(0) // PARTS * RUN
    small_gates += tl.program_id(1).to(tl.int64) * n_chunks
    for n in range(up_to_last_large(small_gates, at, n_chunks, RUN)):
        if up_to_last_large(small_gates, at + n, at + n + 1, RUN) > 0:
            _of_chunk(
                q, k, g, v, do, b, gated_k, scores, entering, leaving, dq, dk, dg, dv, table, q_sb, q_st, q_sh, k_sb,
                k_st, k_sh, g_sb, g_st, g_sh, v_sb, v_st, v_sh, do_sb, do_st, do_sh, T, H, n_chunks, scale, at + n,
                tl.program_id(0) % PARTS, K, V, BN, BV, PARTS, C, LEVELS, False, PACKED, DOT, PREC,
            )  # fmt: skip
