"""Gradients of a chunk's q, k, beta and g, given the states around it (docs/math.md, section 7)."""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.delta.prepare import load_numbers
from flexsp.kernels.delta.walks import load_gates
from flexsp.kernels.primitives import GATE_MIN, chunk_info, load_rows, load_state, mm, power, store_rows
from flexsp.runtime.launch import begin


@triton.jit(do_not_specialize=["T", "H", "n_chunks"])
def grads(
    q, k, do, g, strength, inverse, errors, derrors, gates, entering, leaving, dq, dk, dv, dbeta, dg, table,
    q_sb, q_st, q_sh, k_sb, k_st, k_sh, do_sb, do_st, do_sh, g_sb, g_st, g_sh, T, H, n_chunks, scale,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dq, dk [B, T, H, K], dv [B, T, H, V], dbeta and dg [B, T, H], a chunk a program.

    Of every chunk: errors N^T and their gradients, entering S^T and leaving dS^T are [B H, chunks, V, C or K].
    """
    begin(PDL)
    c, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b = row // H
    h = row % H
    start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
    at = row * n_chunks + c
    bc, end = load_gates(gates, at, C, GATED)
    i = tl.arange(0, C)
    w = tl.load(strength + at * C + i)
    state = at * V * K
    of_outputs = do + b * do_sb + h * do_sh + start * do_st
    to_q = tl.zeros([C, BK], tl.float32)
    to_k = tl.zeros([C, BK], tl.float32)
    to_p = tl.zeros([C, BK], tl.float32)
    reads = tl.zeros([C, C], tl.float32)
    pairs = tl.zeros([C, C], tl.float32)
    kept = tl.zeros([BV], tl.float32)
    turned = tl.trans(tl.load(inverse + at * C * C + i[:, None] * C + i[None, :]))
    columns = tl.where(length >= 0, V, 0)  # V: Triton splits products over all warps in loops, which this one stays
    for v0 in range(0, columns, BV):
        oc = load_rows(of_outputs, do_st, length, v0, C, V, BV)
        dN = load_state(derrors + at * V * C, v0, 0, True, V, C, BV, C).to(derrors.dtype.element_ty)
        N = load_state(errors + at * V * C, v0, 0, True, V, C, BV, C).to(errors.dtype.element_ty)
        S = load_state(entering + state, v0, 0, True, V, K, BV, BK).to(entering.dtype.element_ty)
        dS = load_state(leaving + state, v0, 0, True, V, K, BV, BK).to(leaving.dtype.element_ty)
        y = mm(turned, tl.trans(dN), DOT, PREC)
        store_rows(dv + ((b * T + start) * H + h) * V, y, H * V, length, v0, C, V, BV)
        y = y.to(DOT)
        reads += mm(oc, N, DOT, PREC)
        pairs += mm(y, N, DOT, PREC)
        to_q += mm(oc, S, DOT, PREC)
        to_k += mm(y, S, DOT, PREC)
        to_p += mm(tl.trans(N), dS, DOT, PREC)
        if GATED:
            kept += tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=1)
    below = i[:, None] > i[None, :]
    qc = load_rows(q + b * q_sb + h * q_sh + start * q_st, q_st, length, 0, C, K, BK)
    kc = load_rows(k + b * k_sb + h * k_sh + start * k_st, k_st, length, 0, C, K, BK)
    pc = (kc * w[:, None]).to(DOT)  # rounded once: what pairs of tokens add to dg cancels in the sums below
    own = tl.sum(tl.where(i[:, None] == i[None, :], reads, 0.0), axis=1) * scale  # of no gate: a token and itself
    through = tl.zeros([C], tl.float32)
    if GATED:
        decay = power(tl.where(below, bc[:, None] - bc[None, :], float("-inf")))
        reads = (reads * decay * scale).to(DOT)
        pairs = (-pairs * decay).to(DOT)
        to_q = to_q * (power(bc) * scale)[:, None]
        to_k = to_k * (-power(bc))[:, None]
        to_p = to_p * power(end - bc)[:, None]
        left = tl.sum(to_p * pc.to(tl.float32), axis=1)
        through = tl.sum(tl.where(below, left[None, :], 0.0), axis=1) + tl.sum(kept, axis=0) * power(end)
    else:
        reads = tl.where(below, reads * scale, 0.0).to(DOT)
        pairs = tl.where(below, -pairs, 0.0).to(DOT)
        to_q = to_q * scale
        to_k = -to_k
    to_q += mm(reads, pc, DOT, PREC)
    sums = tl.sum(to_q * qc.to(tl.float32), axis=1)
    to_q += own[:, None] * pc.to(tl.float32)
    store_rows(dq + ((b * T + start) * H + h) * K, to_q, H * K, length, 0, C, K, BK)
    by_pairs = mm(tl.trans(reads), qc, DOT, PREC)
    by_pairs += mm(tl.trans(pairs), kc, DOT, PREC)
    sums -= tl.sum(by_pairs * pc.to(tl.float32), axis=1)
    to_p += by_pairs + own[:, None] * qc.to(tl.float32)
    to = (b * T + start + i) * H + h
    written = tl.sum(to_p * kc.to(tl.float32), axis=1)
    tl.store(dbeta + to, written.to(dbeta.dtype.element_ty), mask=i < length)
    to_k += mm(pairs, pc, DOT, PREC)
    sums += tl.sum(to_k * kc.to(tl.float32), axis=1)
    store_rows(dk + ((b * T + start) * H + h) * K, to_k + to_p * w[:, None], H * K, length, 0, C, K, BK)
    if GATED:
        to_g = tl.cumsum(sums, axis=0, reverse=True) + through
        gate = load_numbers(g + b * g_sb + h * g_sh + start * g_st, g_st, length, C).to(tl.float32)
        tl.store(dg + to, tl.where(gate < GATE_MIN, 0.0, to_g).to(dg.dtype.element_ty), mask=i < length)
