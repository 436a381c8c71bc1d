"""Step 3 backward: dq walks left to right with S in registers; dk and dv walk right to left with dS (MATH 1.D).

The gate gradient of token p sums A.dA over all pairs (write j < p, read i >= p). The usual reverse cumulative sum of
q.dq - k.dk subtracts nearly equal numbers; here each pair is counted once: both ends in the chunk (`inner`), read here
but written before (`reads`), written here but read later (`writes`). Pairs that straddle the whole chunk are carried
from the segment's edge, where they are <S, dS> in fp32 (`edges`). `gate_grad_kernel` puts the four together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.primitives import chunk_info, load_rows, load_state, mm, power, store_rows, store_state


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
    ALIKE: tl.constexpr, GATED: tl.constexpr,
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

    if ALIKE:
        k_st = q_st
        v_st = q_st
        do_st = q_st
        dq_st = q_st
    rows = tl.arange(0, C)
    causal = rows[:, None] >= rows[None, :]
    c0 = seg * per_seg
    c1 = tl.minimum(c0 + per_seg, n_chunks)
    slot = (b * (n_seg + 1) + seg).to(tl.int64) * H + h
    S = load_state(states + slot * K * V, k0, 0, True, K, V, BK, BV)
    for c in range(c0, c1):
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        if PACKED:  # noqa: SIM102 (a constexpr, then a value)
            if first:
                S = tl.zeros([BK, BV], tl.float32)
                if INITIAL:
                    S = load_state(initial + (doc * H + h).to(tl.int64) * K * V, k0, 0, True, K, V, BK, BV)
        if GATED:
            bc, b_end = DECAY(gate, c, C)
        held = tl.trans(S.to(DOT))
        kc = load_rows(k + start * k_st, k_st, length, k0, C, K, BK)
        vc = load_rows(v + start * v_st, v_st, length, 0, C, V, BV)
        oc = load_rows(do + start * do_st, do_st, length, 0, C, V, BV)
        if READS:
            qc = load_rows(q + start * q_st, q_st, length, k0, C, K, BK)
        if GATED:
            into = power(b_end - bc)
            out_of = power(bc) * scale
        dqc = mm(oc, held, DOT, PREC)
        da = mm(oc, tl.trans(vc), DOT, PREC)
        if GATED:
            dqc = dqc * out_of[:, None]
            da = da * (power(tl.where(causal, bc[:, None] - bc[None, :], float("-inf"))) * scale)
            S = S * power(b_end)
            S += mm(tl.trans((kc * into[:, None]).to(DOT)), vc, DOT, PREC)
        else:
            da = tl.where(causal, da * scale, 0.0)
            dqc = dqc * scale
            S += mm(tl.trans(kc), vc, DOT, PREC)
        if READS:
            tl.store(reads + start + rows, tl.sum(qc.to(tl.float32) * dqc, axis=1), mask=rows < length)
        dqc += mm(da, kc, DOT, PREC)
        store_rows(dq + start * dq_st, dqc, dq_st, length, k0, C, K, BK)


@triton.jit
def dk_kernel(
    q, k, v, do, gate, dk, inner, writes, edges, states, dstates, dfinal, table,
    q_sb, q_st, q_sh, k_sb, k_st, k_sh, v_sb, v_st, v_sh, do_sb, do_st, do_sh, g_sb, g_sh, dk_sb, dk_st, dk_sh,
    T, H, n_seg, n_chunks, per_seg, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr, DG: tl.constexpr,
    ALIKE: tl.constexpr, GATED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):
    """dk_j = scale sum_i dA_ij E_ij q_i + e^{b_C - b_j} dS v_j, right to left, tile [BK, BV >= V] of dS.

    With DG, this tile's channels of inner, writes [K tiles, B, H, T] and edges [K tiles, B, n_seg, H], all fp32.
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
    dk += b.to(tl.int64) * dk_sb + h * dk_sh
    gate += b.to(tl.int64) * g_sb + h * g_sh
    n_b = tl.num_programs(1) // H
    vectors = ((tile * n_b + b) * H + h).to(tl.int64) * T

    if ALIKE:
        k_st = q_st
        v_st = q_st
        do_st = q_st
        dk_st = q_st
    rows = tl.arange(0, C)
    later = rows[None, :] >= rows[:, None]
    before = (rows[None, :] < rows[:, None]).to(DOT)
    c0 = seg * per_seg
    c1 = tl.minimum(c0 + per_seg, n_chunks)
    slot = ((b * (n_seg + 1) + seg + 1).to(tl.int64) * H + h) * K * V
    dS = load_state(dstates + slot, k0, 0, True, K, V, BK, BV)
    if DG:
        S = load_state(states + slot, k0, 0, True, K, V, BK, BV)
        edge = tl.sum(tl.sum(S * dS, axis=1), axis=0)
        tl.store(edges + ((tile * n_b + b) * n_seg + seg) * H + h, edge)
    for n in range(c0, c1):
        c = c1 - 1 - (n - c0)
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        if PACKED:  # noqa: SIM102 (a constexpr, then a value)
            if last:
                dS = tl.zeros([BK, BV], tl.float32)
                if FINAL:
                    dS = load_state(dfinal + (doc * H + h).to(tl.int64) * K * V, k0, 0, True, K, V, BK, BV)
        if GATED:
            bc, b_end = DECAY(gate, c, C)
        held = tl.trans(dS.to(DOT))
        qc = load_rows(q + start * q_st, q_st, length, k0, C, K, BK)
        vc = load_rows(v + start * v_st, v_st, length, 0, C, V, BV)
        oc = load_rows(do + start * do_st, do_st, length, 0, C, V, BV)
        if DG:
            kc = load_rows(k + start * k_st, k_st, length, k0, C, K, BK)
        if GATED:
            into = power(b_end - bc)
            out_of = power(bc) * scale
        dkc = mm(vc, held, DOT, PREC)
        da = mm(vc, tl.trans(oc), DOT, PREC)
        if GATED:
            dkc = dkc * into[:, None]
            da = da * (power(tl.where(later, bc[None, :] - bc[:, None], float("-inf"))) * scale)
            dS = dS * power(b_end)
            dS += mm(tl.trans((qc * out_of[:, None]).to(DOT)), oc, DOT, PREC)
        else:
            da = tl.where(later, da * scale, 0.0)
            dS += mm(tl.trans(qc), oc, DOT, PREC) * scale
        if DG:
            tl.store(writes + vectors + start + rows, tl.sum(dkc * kc.to(tl.float32), axis=1), mask=rows < length)
            pairs = mm(before, mm(kc, tl.trans(qc), DOT, PREC) * da, DOT, PREC)
            tl.store(
                inner + vectors + start + rows, tl.sum(tl.where(later, pairs, 0.0), axis=1), mask=rows < length
            )
        dkc += mm(da, qc, DOT, PREC)
        store_rows(dk + start * dk_st, dkc, dk_st, length, k0, C, K, BK)


@triton.jit
def dv_kernel(
    q, k, do, gate, dv, dstates, dfinal, dinitial, table,
    q_sb, q_st, q_sh, k_sb, k_st, k_sh, do_sb, do_st, do_sh, g_sb, g_sh, dv_sb, dv_st, dv_sh,
    T, H, n_seg, n_chunks, per_seg, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr, INITIAL: tl.constexpr,
    ALIKE: tl.constexpr, GATED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):
    """dv_j = sum_i A_ij do_i + e^{b_C - b_j} k_j dS, right to left, dS held transposed, [BV, BK >= K].

    dinitial [N, H, K, V]: dS at the start of packed documents.
    """
    v0 = tl.program_id(0) * BV
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    seg = tl.program_id(2)
    q += b.to(tl.int64) * q_sb + h * q_sh
    k += b.to(tl.int64) * k_sb + h * k_sh
    do += b.to(tl.int64) * do_sb + h * do_sh
    dv += b.to(tl.int64) * dv_sb + h * dv_sh
    gate += b.to(tl.int64) * g_sb + h * g_sh

    if ALIKE:
        k_st = q_st
        do_st = q_st
        dv_st = q_st
    rows = tl.arange(0, C)
    causal = rows[:, None] >= rows[None, :]
    c0 = seg * per_seg
    c1 = tl.minimum(c0 + per_seg, n_chunks)
    slot = ((b * (n_seg + 1) + seg + 1).to(tl.int64) * H + h) * K * V
    dS = load_state(dstates + slot, 0, v0, True, K, V, BK, BV, True)
    for n in range(c0, c1):
        c = c1 - 1 - (n - c0)
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        at_doc = (doc * H + h).to(tl.int64) * K * V if PACKED else 0
        if PACKED:  # noqa: SIM102 (a constexpr, then a value)
            if last:
                dS = tl.zeros([BV, BK], tl.float32)
                if FINAL:
                    dS = load_state(dfinal + at_doc, 0, v0, True, K, V, BK, BV, True)
        if GATED:
            bc, b_end = DECAY(gate, c, C)
        held = dS.to(DOT)
        qc = load_rows(q + start * q_st, q_st, length, 0, C, K, BK)
        kc = load_rows(k + start * k_st, k_st, length, 0, C, K, BK)
        oc = load_rows(do + start * do_st, do_st, length, v0, C, V, BV)
        if GATED:
            into = power(b_end - bc)
            out_of = power(bc) * scale
        dvc = mm(held, tl.trans(kc), DOT, PREC)
        a = mm(qc, tl.trans(kc), DOT, PREC)
        if GATED:
            dvc = dvc * into[None, :]
            a = a * (power(tl.where(causal, bc[:, None] - bc[None, :], float("-inf"))) * scale)
            dS = dS * power(b_end)
            dS += mm(tl.trans((oc * out_of[:, None]).to(DOT)), qc, DOT, PREC)
        else:
            a = tl.where(causal, a * scale, 0.0)
            dS += mm(tl.trans(oc), qc, DOT, PREC) * scale
        dvc += mm(tl.trans(oc), a, DOT, PREC)
        store_rows(dv + start * dv_st, tl.trans(dvc), dv_st, length, v0, C, V, BV)
        if PACKED and INITIAL:  # noqa: SIM102
            if first:
                store_state(dinitial + at_doc, dS, 0, v0, True, K, V, BK, BV, True)


@triton.jit
def gate_grad_kernel(
    inner, reads, writes, edges, doc_edges, gate, dg, table, g_sb, g_sh,
    T, H, n_seg, n_chunks, per_seg,
    TILES: tl.constexpr, C: tl.constexpr, DROP: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr,
    FINAL: tl.constexpr,
):
    """dg [B, H, T]: right to left over a segment's chunks, carrying `straddle` = <S, dS> at the chunk's edge.

    A chunk whose total log2 decay is below DROP lets nothing measurable straddle it: the carried rounding ends there.
    """
    b = tl.program_id(0) // H
    h = tl.program_id(0) % H
    seg = tl.program_id(1)
    n_b = tl.num_programs(0) // H
    gate += b.to(tl.int64) * g_sb + h * g_sh
    row = (b * H + h).to(tl.int64) * T
    stride = (n_b * H).to(tl.int64) * T
    rows = tl.arange(0, C)
    c0 = seg * per_seg
    c1 = tl.minimum(c0 + per_seg, n_chunks)
    straddle = 0.0
    for i in tl.static_range(TILES):
        straddle += tl.load(edges + ((i * n_b + b) * n_seg + seg) * H + h)
    for n in tl.range(c0, c1, num_stages=4):
        c = c1 - 1 - (n - c0)
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        if PACKED:
            edge = 0.0
            if FINAL:
                edge = tl.load(doc_edges + doc * H + h)
            straddle = tl.where(last, edge, straddle)
        bc, b_end = DECAY(gate, c, C)
        at = row + start + rows
        valid = rows < length
        within = tl.zeros([C], tl.float32)
        write = tl.zeros([C], tl.float32)
        read = tl.zeros([C], tl.float32)
        for i in tl.static_range(TILES):
            within += tl.load(inner + i * stride + at, mask=valid, other=0.0)
            write += tl.load(writes + i * stride + at, mask=valid, other=0.0)
            read += tl.load(reads + i * stride + at, mask=valid, other=0.0)
        total = tl.sum(read, axis=0)
        straddle = tl.where(b_end < DROP, 0.0, straddle - tl.sum(write, axis=0))
        after = total - tl.cumsum(read, axis=0) + read
        tl.store(dg + at, within + after + tl.cumsum(write, axis=0) - write + straddle, mask=valid)
        straddle += total
