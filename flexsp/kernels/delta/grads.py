"""Gradients of a chunk's q, k, v, beta and g, given the states around it (docs/math.md, section 7)."""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.delta.exact import by_errors
from flexsp.kernels.delta.tokens import load_tokens, of_gates, store_tokens
from flexsp.kernels.delta.walks import load_gates
from flexsp.kernels.primitives import GATE_MIN, chunk_info, load_rows, load_state, mm, power, store_rows
from flexsp.runtime.launch import begin


@triton.jit(do_not_specialize=["T", "H", "n_chunks"])
def grads(
    q, k, do, chunk_beta, inverse, v_new, dv_new, gates, gain, entering, leaving, dq, dk, dv, parts, table,
    q_sb, q_st, q_sh, k_sb, k_st, k_sh, do_sb, do_st, do_sh, T, H, n_chunks, scale,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """dk [B, T, H, K] and dq [B, T / STEPS, H, K], a chunk and BK columns of K a program; dv [B, T, H, V] by those of
    the first columns.

    Of every chunk: v_new N^T and its gradient, entering S^T and leaving dS^T are [B H, chunks, V, C or K]. What the
    columns of K add goes into parts [3, tiles, B H, chunks, C]: to the gradient of beta; to that of the gate of a token
    and all before it; and to that of the gates of all after it.
    """
    begin(PDL)
    TILES: tl.constexpr = (K + BK - 1) // BK
    c, tile, row = tl.program_id(0) // TILES, tl.program_id(0) % TILES, tl.program_id(1).to(tl.int64)
    k0 = tile * BK
    b = row // H
    h = row % H
    start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
    at = row * n_chunks + c
    bc, end = load_gates(gates, at, C, GATED)
    i = tl.arange(0, C)
    w = tl.load(chunk_beta + at * C + i)
    of_outputs = do + b * do_sb + h * do_sh
    turned = tl.trans(tl.load(inverse + at * C * C + i[:, None] * C + i[None, :]))
    reads = tl.zeros([C, C], tl.float32)
    pairs = tl.zeros([C, C], tl.float32)
    to_k = tl.zeros([C, BK], tl.float32)
    for v0 in range(0, V, BV):
        dN = load_state(dv_new + at * V * C, v0, 0, True, V, C, BV, C).to(dv_new.dtype.element_ty)
        y = mm(turned, tl.trans(dN), DOT, PREC)
        if tile == 0:
            store_rows(dv + ((b * T + start) * H + h) * V, y, H * V, length, v0, C, V, BV)
        y = y.to(DOT)
        oc = load_tokens(of_outputs, do_st, start, length, v0, C, V, BV, STEPS)
        N = load_state(v_new + at * V * C, v0, 0, True, V, C, BV, C).to(v_new.dtype.element_ty)
        S = load_state(entering + at * V * K, v0, k0, True, V, K, BV, BK).to(entering.dtype.element_ty)
        reads += mm(oc, N, DOT, PREC)
        pairs += mm(y, N, DOT, PREC)
        to_k += mm(y, S, DOT, PREC)
    own = tl.sum(tl.where(i[:, None] == i[None, :], reads, 0.0), axis=1) * scale  # of no gate: a token and itself
    part = parts + (tile * tl.num_programs(1) + row) * n_chunks * C + c * C + i
    if tl.bfloat16 == DOT:  # stored at once, and as the diagonal that it is: sums would take registers
        chosen = by_errors(gain, at, length, w)
        of_errors = tl.where(tile == 0, pairs / tl.where(chosen, w, 1.0)[:, None], 0.0)
        place = part[:, None] + tl.zeros([C, C], tl.int32)
        tl.store(place, of_errors, mask=(i[:, None] == i[None, :]) & chosen[:, None])
    below = i[:, None] > i[None, :]
    decay = tl.where(below, 1.0, 0.0)
    if GATED:
        decay = power(tl.where(below, bc[:, None] - bc[None, :], float("-inf")))
    reads = (reads * decay * scale).to(DOT)
    pairs = (pairs * -decay).to(DOT)
    to_k = to_k * -power(bc)[:, None]
    to_q = tl.zeros([C, BK], tl.float32)
    to_p = tl.zeros([C, BK], tl.float32)
    kept = 0.0
    for v0 in range(0, V, BV):
        N = load_state(v_new + at * V * C, v0, 0, True, V, C, BV, C).to(v_new.dtype.element_ty)
        dS = load_state(leaving + at * V * K, v0, k0, True, V, K, BV, BK).to(leaving.dtype.element_ty)
        to_p += mm(tl.trans(N), dS, DOT, PREC)
        S = load_state(entering + at * V * K, v0, k0, True, V, K, BV, BK).to(entering.dtype.element_ty)
        if GATED:
            kept += tl.sum(tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=1), axis=0)
        oc = load_tokens(of_outputs, do_st, start, length, v0, C, V, BV, STEPS)
        to_q += mm(oc, S, DOT, PREC)
    to_p = to_p * power(end - bc)[:, None]
    to_q = to_q * (power(bc) * scale)[:, None]
    kc = load_rows(k + b * k_sb + h // GROUP * k_sh + start * k_st, k_st, length, k0, C, K, BK)
    qc = load_tokens(q + b * q_sb + h // GROUP * q_sh, q_st, start, length, k0, C, K, BK, STEPS)
    pc = (kc * w[:, None]).to(DOT)  # rounded once: what pairs of tokens add to dg cancels in the sums below
    to_q += mm(reads, pc, DOT, PREC)
    sums = tl.sum(to_q * qc.to(tl.float32), axis=1)
    to_q += own[:, None] * pc.to(tl.float32)
    store_tokens(dq + (b * (T // STEPS) * H + h) * K, to_q, H * K, start, length, k0, C, K, BK, STEPS)
    to_k += mm(pairs, pc, DOT, PREC)
    sums += tl.sum(to_k * kc.to(tl.float32), axis=1)
    left = tl.sum(to_p * pc.to(tl.float32), axis=1)
    by_pairs = mm(tl.trans(reads), qc, DOT, PREC)
    by_pairs += mm(tl.trans(pairs), kc, DOT, PREC)
    sums -= tl.sum(by_pairs * pc.to(tl.float32), axis=1)
    to_p += by_pairs + own[:, None] * qc.to(tl.float32)
    by_keys = i >= 0
    if tl.bfloat16 == DOT:
        by_keys = ~by_errors(gain, at, length, w)
    tl.store(part, tl.sum(to_p * kc.to(tl.float32), axis=1), mask=by_keys)
    store_rows(dk + ((b * T + start) * H + h) * K, to_k + to_p * w[:, None], H * K, length, k0, C, K, BK)
    if GATED:
        of_gates = (TILES * n_chunks * C).to(tl.int64) * tl.num_programs(1)
        tl.store(part + of_gates, sums + tl.where(i == length - 1, kept * power(end), 0.0))
        tl.store(part + 2 * of_gates, left)


@triton.jit(do_not_specialize=["T", "H", "n_chunks"])
def reduce_gate_grads(
    g, parts, dbeta, dg, table, g_sb, g_st, g_sh, T, H, n_chunks,
    TILES: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr,
    STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dbeta [B, T, H] and dg [B, T / STEPS, H] of a chunk and HEADS heads a program, from what `grads` left in
    parts."""
    begin(PDL)
    c, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
    i = tl.arange(0, C)[:, None]
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :]
    inside = (i < length) & (h < H)
    heads = (tl.num_programs(2) * H).to(tl.int64)
    at = parts + ((b * H + h) * n_chunks + c) * C + i
    to = (b * T + start + i) * H + h
    to_beta = tl.zeros([C, HEADS], tl.float32)
    until = tl.zeros([C, HEADS], tl.float32)
    after = tl.zeros([C, HEADS], tl.float32)
    for tile in tl.static_range(TILES):
        to_beta += tl.load(at + tile * heads * n_chunks * C, mask=inside, other=0.0)
        if GATED:
            until += tl.load(at + (TILES + tile) * heads * n_chunks * C, mask=inside, other=0.0)
            before = at - 1 + (2 * TILES + tile) * heads * n_chunks * C
            after += tl.load(before, mask=inside & (i > 0), other=0.0)
    tl.store(dbeta + to, to_beta.to(dbeta.dtype.element_ty), mask=inside)
    if GATED:
        gate = tl.cumsum(until, axis=0, reverse=True) + tl.cumsum(after, axis=0)
        token, there = of_gates(start, length, C, STEPS)
        token = start // STEPS + token[:, None]
        inside = there[:, None] & (h < H)
        given = tl.load(g + b * g_sb + token * g_st + h * g_sh, mask=inside, other=0.0).to(tl.float32)
        to = (b * (T // STEPS) + token) * H + h
        tl.store(dg + to, tl.where(given <= GATE_MIN, 0.0, gate).to(dg.dtype.element_ty), mask=inside)
