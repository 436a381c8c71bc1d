"""Step 3 backward: dq walks left to right with S in registers; dk, dv and dg walk right to left with dS (MATH 1.D).

The gate gradient of token p sums A.dA over all pairs (write j < p, read i >= p). Within a chunk both ends come from the
same fp32 products, so the two cumulative sums cancel exactly; reads of the incoming state (`reads`, from the dq walk) and
writes to the outgoing one only add; what is left, pairs that straddle the whole chunk, is carried from the segment's edge,
where it is <S, dS> in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.primitives import chunk_info, load_rows, load_state, mm, store_rows, store_state


@triton.jit
def dq_kernel(
    q,
    k,
    v,
    do,
    gate,
    dq,
    reads,
    states,
    initial,
    table,
    q_sb,
    q_st,
    q_sh,
    k_sb,
    k_st,
    k_sh,
    v_sb,
    v_st,
    v_sh,
    do_sb,
    do_st,
    do_sh,
    g_sb,
    g_sh,
    dq_sb,
    dq_st,
    dq_sh,
    T,
    H,
    n_seg,
    n_chunks,
    per_seg,
    scale,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    PACKED: tl.constexpr,
    INITIAL: tl.constexpr,
    READS: tl.constexpr,
    GATED: tl.constexpr,
    DOT: tl.constexpr,
    PREC: tl.constexpr,
):
    """dq_i = scale (sum_j dA_ij E_ij k_j + e^{b_i} S do_i), state tile [BK, BV >= V].

    reads [K tiles, B, H, T] fp32: <q_i, the inter-chunk part of dq_i> over this tile's channels.
    """
    tile = tl.program_id(0)
    k0 = tile * BK
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    seg = tl.program_id(2)
    q += b.to(tl.int64) * q_sb + h * q_sh
    k += b.to(tl.int64) * k_sb + h * k_sh
    v += b.to(tl.int64) * v_sb + h * v_sh
    do += b.to(tl.int64) * do_sb + h * do_sh
    dq += b.to(tl.int64) * dq_sb + h * dq_sh
    gate += b.to(tl.int64) * g_sb + h * g_sh
    n_b = tl.num_programs(1) // H
    reads += ((tile * n_b + b) * H + h).to(tl.int64) * T

    rows = tl.arange(0, C)
    causal = rows[:, None] >= rows[None, :]
    c0 = seg * per_seg
    c1 = tl.minimum(c0 + per_seg, n_chunks)
    slot = (b * (n_seg + 1) + seg).to(tl.int64) * H + h
    S = load_state(states + slot * K * V, k0, 0, True, K, V, BK, BV)
    for c in range(c0, c1):
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        if PACKED:
            fresh = tl.zeros([BK, BV], tl.float32)
            if INITIAL:
                fresh = load_state(initial + (doc * H + h).to(tl.int64) * K * V, k0, 0, first, K, V, BK, BV)
            S = tl.where(first, fresh, S)
        kc = load_rows(k + start * k_st, k_st, length, k0, C, K, BK)
        vc = load_rows(v + start * v_st, v_st, length, 0, C, V, BV)
        doc_ = load_rows(do + start * do_st, do_st, length, 0, C, V, BV)
        da = mm(doc_, tl.trans(vc), DOT, PREC) * scale
        dqc = mm(doc_, tl.trans(S), DOT, PREC)
        if GATED:
            bc, b_end = DECAY(gate, start, length, C)
            da = da * tl.exp2(tl.where(causal, bc[:, None] - bc[None, :], float("-inf")))
            dqc = dqc * (tl.exp2(bc) * scale)[:, None]
            S = S * tl.exp2(b_end)
            S += mm(tl.trans((kc * tl.exp2(b_end - bc)[:, None]).to(DOT)), vc, DOT, PREC)
        else:
            da = tl.where(causal, da, 0.0)
            dqc = dqc * scale
            S += mm(tl.trans(kc), vc, DOT, PREC)
        if READS:
            qc = load_rows(q + start * q_st, q_st, length, k0, C, K, BK).to(tl.float32)
            tl.store(reads + start + rows, tl.sum(qc * dqc, axis=1), mask=rows < length)
        dqc += mm(da, kc, DOT, PREC)
        store_rows(dq + start * dq_st, dqc, dq_st, length, k0, C, K, BK)


@triton.jit
def dkdv_kernel(
    q,
    k,
    v,
    do,
    gate,
    dk,
    dv,
    dg,
    reads,
    states,
    dstates,
    final,
    dfinal,
    dinitial,
    table,
    q_sb,
    q_st,
    q_sh,
    k_sb,
    k_st,
    k_sh,
    v_sb,
    v_st,
    v_sh,
    do_sb,
    do_st,
    do_sh,
    g_sb,
    g_sh,
    dk_sb,
    dk_st,
    dk_sh,
    dv_sb,
    dv_st,
    dv_sh,
    T,
    H,
    n_seg,
    n_chunks,
    per_seg,
    scale,
    n_reads,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DG: tl.constexpr,
    DROP: tl.constexpr,
    DECAY: tl.constexpr,
    PACKED: tl.constexpr,
    FINAL: tl.constexpr,
    INITIAL: tl.constexpr,
    GATED: tl.constexpr,
    DOT: tl.constexpr,
    PREC: tl.constexpr,
):
    """Right to left with the tile [BK, BV] of dS in registers.

    DV needs BK >= K: dv_j = sum_i A_ij do_i + e^{b_C - b_j} k_j dS.  DK needs BV >= V: dk_j = sum_i dA_ij E_ij q_i +
    e^{b_C - b_j} dS v_j.  Both at once where the whole state fits.  DG (with DV): dg [V tiles, B, H, T] fp32, this tile's part.
    """
    tile = tl.program_id(0)
    n_v: tl.constexpr = (V + BV - 1) // BV
    k0 = (tile // n_v) * BK
    v0 = (tile % n_v) * BV
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    seg = tl.program_id(2)
    q += b.to(tl.int64) * q_sb + h * q_sh
    k += b.to(tl.int64) * k_sb + h * k_sh
    v += b.to(tl.int64) * v_sb + h * v_sh
    do += b.to(tl.int64) * do_sb + h * do_sh
    dk += b.to(tl.int64) * dk_sb + h * dk_sh
    dv += b.to(tl.int64) * dv_sb + h * dv_sh
    gate += b.to(tl.int64) * g_sb + h * g_sh
    n_b = tl.num_programs(1) // H
    dg += ((tile * n_b + b) * H + h).to(tl.int64) * T
    reads += (b * H + h).to(tl.int64) * T

    rows = tl.arange(0, C)
    later = rows[None, :] >= rows[:, None]
    c0 = seg * per_seg
    c1 = tl.minimum(c0 + per_seg, n_chunks)
    slot = ((b * (n_seg + 1) + seg + 1).to(tl.int64) * H + h) * K * V
    dS = load_state(dstates + slot, k0, v0, True, K, V, BK, BV)
    straddle = 0.0
    if DG:
        straddle = tl.sum(tl.sum(load_state(states + slot, k0, v0, True, K, V, BK, BV) * dS, axis=1), axis=0)
    for n in range(c0, c1):
        c = c1 - 1 - (n - c0)
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        at_doc = (doc * H + h).to(tl.int64) * K * V if PACKED else 0
        if PACKED:
            fresh = tl.zeros([BK, BV], tl.float32)
            if FINAL:
                fresh = load_state(dfinal + at_doc, k0, v0, last, K, V, BK, BV)
            dS = tl.where(last, fresh, dS)
            if DG:
                edge = 0.0
                if FINAL:
                    held = load_state(final + at_doc, k0, v0, last, K, V, BK, BV)
                    edge = tl.sum(tl.sum(held * fresh, axis=1), axis=0)
                straddle = tl.where(last, edge, straddle)
        qc = load_rows(q + start * q_st, q_st, length, k0, C, K, BK)
        kc = load_rows(k + start * k_st, k_st, length, k0, C, K, BK)
        vc = load_rows(v + start * v_st, v_st, length, v0, C, V, BV)
        oc = load_rows(do + start * do_st, do_st, length, v0, C, V, BV)
        if GATED:
            bc, b_end = DECAY(gate, start, length, C)
            E = tl.exp2(tl.where(later, bc[None, :] - bc[:, None], float("-inf"))) * scale
            out = tl.exp2(b_end - bc)
        else:
            E = tl.where(later, scale, 0.0)
        if DV:
            a = mm(kc, tl.trans(qc), DOT, PREC) * E
            dvc = mm(kc, dS, DOT, PREC)
            if GATED:
                dvc = dvc * out[:, None]
            if DG:
                writes = tl.sum(dvc * vc.to(tl.float32), axis=1)
            dvc += mm(a, oc, DOT, PREC)
            store_rows(dv + start * dv_st, dvc, dv_st, length, v0, C, V, BV)
        if DK or DG:
            da = mm(vc, tl.trans(oc), DOT, PREC)
            if DG:
                m = a * da
                inner = tl.sum(m, axis=0) - tl.sum(m, axis=1)
        if DK:
            dkc = mm(vc, tl.trans(dS), DOT, PREC)
            if GATED:
                dkc = dkc * out[:, None]
            dkc += mm(da * E, qc, DOT, PREC)
            store_rows(dk + start * dk_st, dkc, dk_st, length, k0, C, K, BK)
        if DG:
            read = tl.zeros([C], tl.float32)
            if v0 == 0:
                for r in range(n_reads):
                    read += tl.load(
                        reads + r * (n_b * H).to(tl.int64) * T + start + rows, mask=rows < length, other=0.0
                    )
            straddle = tl.where(b_end < DROP, 0.0, straddle - tl.sum(writes, axis=0))
            u = inner + read
            part = tl.sum(u, axis=0) - tl.cumsum(u, axis=0) + u + tl.cumsum(writes, axis=0) - writes + straddle
            tl.store(dg + start + rows, part, mask=rows < length)
            straddle += tl.sum(read, axis=0)
        if GATED:
            dS = dS * tl.exp2(b_end)
            if BK < BV:
                dS += mm(tl.trans((qc * (tl.exp2(bc) * scale)[:, None]).to(DOT)), oc, DOT, PREC)
            else:
                dS += mm(tl.trans(qc), oc * (tl.exp2(bc) * scale)[:, None], DOT, PREC)
        else:
            dS += mm(tl.trans(qc), oc, DOT, PREC) * scale
        if PACKED and INITIAL:
            store_state(dinitial + at_doc, dS, k0, v0, first, K, V, BK, BV)
