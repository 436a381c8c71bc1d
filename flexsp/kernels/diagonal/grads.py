"""Step 3 backward (docs/math.md, section 5): dq walks left to right with S in registers, dk, dv right to left with dS.

The gate gradient of token p sums A.dA over all pairs (write j < p, read i >= p). The usual reverse cumulative sum of
q.dq - k.dk subtracts nearly equal numbers, which leaves noise at closed gates; here each pair is counted once: both
ends in the chunk (`pairs`), read here but written before (`reads`), written here but read later (`writes`). Pairs that
straddle the whole chunk are carried from the segment's edge, where they are <S, dS> in fp32 (`edges`).
`gate_grad_kernel` puts the four together.

A tile leaves these sums in parts, as many as the warps between which its matrix products split the summed axis: adding
them up later costs less than a barrier a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.primitives import chunk_info, load_rows, load_state, mm, power, store_rows, store_state
from flexsp.runtime.launch import begin


@triton.jit
def _row_sums(to, x, C: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr):
    """to [PARTS, C] = sums of x [C, N] over N, in parts."""
    at = tl.arange(0, PARTS)[None, :] * C + tl.arange(0, C)[:, None]
    tl.store(to + at, tl.sum(tl.reshape(x, [C, PARTS, N // PARTS]), axis=2))


@triton.jit
def dq_kernel(
    q, k, v, do, gate, dq, reads, states, initial, table,
    q_sb, q_st, q_sh, k_sb, k_st, k_sh, v_sb, v_st, v_sh, do_sb, do_st, do_sh, g_sb, g_sh, dq_sb, dq_st, dq_sh,
    T, H, n_seg, n_chunks, per_seg, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr, READS: tl.constexpr, PARTS: tl.constexpr,
    ALIKE: tl.constexpr, GATED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):
    """dq_i = scale (sum_j dA_ij E_ij k_j + e^{b_i} S do_i), state tile [BK, BV >= V].

    reads [B, H, chunks, K tiles, PARTS, C] fp32: <q_i, the inter-chunk part of dq_i>.
    """
    begin(PDL)
    tile = tl.program_id(0)
    k0 = tile * BK
    b = tl.program_id(1) // H
    h = (tl.program_id(1) % H).to(tl.int64)
    seg = tl.program_id(2)
    q += b.to(tl.int64) * q_sb + h * q_sh
    k += b.to(tl.int64) * k_sb + h * k_sh
    v += b.to(tl.int64) * v_sb + h * v_sh
    do += b.to(tl.int64) * do_sb + h * do_sh
    dq += b.to(tl.int64) * dq_sb + h * dq_sh
    gate += b.to(tl.int64) * g_sb + h * g_sh
    SUMS: tl.constexpr = PARTS * C
    per_chunk = tl.num_programs(0).to(tl.int64)
    reads += (tl.program_id(1) * n_chunks * per_chunk + tile) * SUMS

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
        if length >= 0:  # always; Triton splits products in a branch over all warps (see ARCHITECTURE.md, "Walks")
            da = mm(oc, tl.trans(vc), DOT, PREC)
            dqc = mm(oc, held, DOT, PREC)
            if GATED:
                da = da * (power(tl.where(causal, bc[:, None] - bc[None, :], float("-inf"))) * scale)
                dqc = dqc * (power(bc) * scale)[:, None]
            else:
                da = tl.where(causal, da * scale, 0.0)
                dqc = dqc * scale
            da = da.to(DOT)
            if READS:
                _row_sums(reads + c * per_chunk * SUMS, qc.to(tl.float32) * dqc, C, BK, PARTS)
        else:
            da = tl.zeros([C, C], DOT)
            dqc = tl.zeros([C, BK], tl.float32)
        if GATED:
            S = S * power(b_end)
            S += mm(tl.trans(kc) * power(b_end - bc)[None, :], vc, DOT, PREC)
        else:
            S += mm(tl.trans(kc), vc, DOT, PREC)
        dqc += mm(da, kc, DOT, PREC)
        store_rows(dq + start * dq_st, dqc, dq_st, length, k0, C, K, BK)


@triton.jit
def dkv_kernel(
    q, k, v, do, gate, dk, dv, pairs, writes, edges, states, dstates, dfinal, dinitial, table,
    q_sb, q_st, q_sh, k_sb, k_st, k_sh, v_sb, v_st, v_sh, do_sb, do_st, do_sh, g_sb, g_sh,
    dk_sb, dk_st, dk_sh, dv_sb, dv_st, dv_sh,
    T, H, n_seg, n_chunks, per_seg, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr, INITIAL: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DG: tl.constexpr, PARTS: tl.constexpr,
    ALIKE: tl.constexpr, GATED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):
    """dk_j = scale sum_i dA_ij E_ij q_i + e^{b_C - b_j} dS v_j and dv_j = sum_i A_ij do_i + e^{b_C - b_j} k_j dS.

    Right to left. DK needs a tile of dS with all of V, DV one with all of K; both at once, all of dS. DG goes with DK:
    pairs and writes [B, H, chunks, K tiles, PARTS, C] and edges [K tiles, B, n_seg, H], all fp32, are then this tile's
    channels of those sums. dinitial [N, H, K, V] (with DV): dS at the start of packed documents.
    """
    begin(PDL)
    tile = tl.program_id(0)
    k0 = tile * BK if DK else 0
    v0 = tile * BV if DV else 0
    b = tl.program_id(1) // H
    h = (tl.program_id(1) % H).to(tl.int64)
    seg = tl.program_id(2)
    q += b.to(tl.int64) * q_sb + h * q_sh
    k += b.to(tl.int64) * k_sb + h * k_sh
    v += b.to(tl.int64) * v_sb + h * v_sh
    do += b.to(tl.int64) * do_sb + h * do_sh
    dk += b.to(tl.int64) * dk_sb + h * dk_sh
    dv += b.to(tl.int64) * dv_sb + h * dv_sh
    gate += b.to(tl.int64) * g_sb + h * g_sh
    SUMS: tl.constexpr = PARTS * C
    per_chunk = tl.num_programs(0).to(tl.int64)
    sums = tl.program_id(1) * n_chunks * per_chunk + tile

    if ALIKE:
        k_st = q_st
        v_st = q_st
        do_st = q_st
        dk_st = q_st
        dv_st = q_st
    rows = tl.arange(0, C)
    later = rows[None, :] >= rows[:, None]
    before = (rows[None, :] < rows[:, None]).to(DOT)
    c0 = seg * per_seg
    c1 = tl.minimum(c0 + per_seg, n_chunks)
    slot = ((b * (n_seg + 1) + seg + 1).to(tl.int64) * H + h) * K * V
    dS = load_state(dstates + slot, k0, v0, True, K, V, BK, BV)
    if DG:
        S = load_state(states + slot, k0, v0, True, K, V, BK, BV)
        edge = tl.sum(tl.sum(S * dS, axis=1), axis=0)
        tl.store(edges + (tile * (tl.num_programs(1) // H) + b) * n_seg * H + seg * H + h, edge)
    for n in range(c0, c1):
        c = c1 - 1 - (n - c0)
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        at_doc = (doc * H + h).to(tl.int64) * K * V if PACKED else 0
        if PACKED:  # noqa: SIM102 (a constexpr, then a value)
            if last:
                dS = tl.zeros([BK, BV], tl.float32)
                if FINAL:
                    dS = load_state(dfinal + at_doc, k0, v0, True, K, V, BK, BV)
        if GATED:
            bc, b_end = DECAY(gate, c, C)
        held = dS.to(DOT)
        at_sums = sums + c * per_chunk
        qc = load_rows(q + start * q_st, q_st, length, k0, C, K, BK)
        oc = load_rows(do + start * do_st, do_st, length, v0, C, V, BV)
        if DK:
            vc = load_rows(v + start * v_st, v_st, length, v0, C, V, BV)
        if DV or DG:
            kc = load_rows(k + start * k_st, k_st, length, k0, C, K, BK)
        a = tl.zeros([C, C], DOT)
        da = tl.zeros([C, C], DOT)
        pair = tl.zeros([C, C], DOT)
        if length >= 0:  # always; Triton splits products in a branch over all warps (see ARCHITECTURE.md, "Walks")
            if GATED:
                decay = power(tl.where(later, bc[None, :] - bc[:, None], float("-inf"))) * scale
            else:
                decay = tl.where(later, scale, 0.0)
            if DK:
                dac = mm(vc, tl.trans(oc), DOT, PREC)
                da = (dac * decay).to(DOT)
            if DV or DG:
                ac = mm(kc, tl.trans(qc), DOT, PREC) * decay
                a = ac.to(DOT)
            if DG:
                pair = (ac * dac).to(DOT)
        if DG:  # noqa: SIM102
            if length >= 0:  # of the pairs written before p, those read at p or later
                both = tl.where(later, mm(before, pair, DOT, PREC), 0.0)
                _row_sums(pairs + at_sums * SUMS, both, C, C, PARTS)
        if GATED:
            into = power(b_end - bc)
        if DK:
            dkc = tl.zeros([C, BK], tl.float32)
            if length >= 0:
                dkc = mm(vc, tl.trans(held), DOT, PREC)
                if GATED:
                    dkc = dkc * into[:, None]
                if DG:
                    _row_sums(writes + at_sums * SUMS, dkc * kc.to(tl.float32), C, BK, PARTS)
        if GATED:
            dS = dS * power(b_end)
            dS += mm(tl.trans(qc) * (power(bc) * scale)[None, :], oc, DOT, PREC)
        else:
            dS += mm(tl.trans(qc) * scale, oc, DOT, PREC)
        if DK:
            dkc += mm(da, qc, DOT, PREC)
            store_rows(dk + start * dk_st, dkc, dk_st, length, k0, C, K, BK)
        if DV:
            dvc = tl.zeros([C, BV], tl.float32)
            if length >= 0:
                dvc = mm(kc, held, DOT, PREC)
                if GATED:
                    dvc = dvc * into[:, None]
            dvc += mm(a, oc, DOT, PREC)
            store_rows(dv + start * dv_st, dvc, dv_st, length, v0, C, V, BV)
        if PACKED and INITIAL:  # noqa: SIM102
            if first:
                store_state(dinitial + at_doc, dS, k0, v0, True, K, V, BK, BV)


@triton.jit
def gate_grad_kernel(
    pairs, reads, writes, edges, doc_edges, gate, dg, table, g_sb, g_sh,
    T, H, n_seg, n_chunks, per_seg,
    TILES: tl.constexpr, READ_TILES: tl.constexpr, PARTS: tl.constexpr, READ_PARTS: tl.constexpr,
    C: tl.constexpr, DROP: tl.constexpr, ROUNDING: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr,
    FINAL: tl.constexpr, PDL: tl.constexpr,
):
    """dg [B, H, T]: right to left over a segment's chunks, carrying `straddle` = <S, dS> at the chunk's edge.

    What is left of it behind a chunk that decays strongly is dropped if it is no more than the rounding carried so far,
    ROUNDING of what each token added: true values there may be smaller than it by any factor.
    """
    begin(PDL)
    row = tl.program_id(0)
    b = row // H
    h = row % H
    seg = tl.program_id(1)
    gate += b.to(tl.int64) * g_sb + h * g_sh
    rows = tl.arange(0, C)
    c0 = seg * per_seg
    c1 = tl.minimum(c0 + per_seg, n_chunks)
    straddle = 0.0
    for i in tl.static_range(TILES):
        straddle += tl.load(edges + (i * (tl.num_programs(0) // H) + b) * n_seg * H + seg * H + h)
    carried = straddle * straddle  # squares of what went into it
    for n in tl.range(c0, c1, num_stages=4):
        c = c1 - 1 - (n - c0)
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        at = (row.to(tl.int64) * n_chunks + c) * C
        if PACKED:
            edge = 0.0
            if FINAL:
                edge = tl.load(doc_edges + doc * H + h)
            straddle = tl.where(last, edge, straddle)
            carried = tl.where(last, edge * edge, carried)
        bc, b_end = DECAY(gate, c, C)
        valid = rows < length
        pair = tl.zeros([C], tl.float32)
        write = tl.zeros([C], tl.float32)
        previous = tl.zeros([C], tl.float32)  # writes of the token before: their running sum leaves a token's own out
        read = tl.zeros([C], tl.float32)
        for i in tl.static_range(TILES * PARTS):
            pair += tl.load(pairs + at * (TILES * PARTS) + i * C + rows, mask=valid, other=0.0)
            part_of = writes + at * (TILES * PARTS) + i * C + rows
            write += tl.load(part_of, mask=valid, other=0.0)
            previous += tl.load(part_of - 1, mask=valid & (rows > 0), other=0.0)
        for i in tl.static_range(READ_TILES * READ_PARTS):
            read += tl.load(reads + at * (READ_TILES * READ_PARTS) + i * C + rows, mask=valid, other=0.0)
        carried += tl.sum(tl.where(valid, write * write, 0.0), axis=0)  # not fused with the sum: see `sum_over`
        straddle -= tl.sum(write, axis=0)
        noise = (b_end < DROP) & (straddle * straddle <= ROUNDING * ROUNDING * carried)
        straddle = tl.where(noise, 0.0, straddle)
        carried = tl.where(noise, 0.0, carried)
        after = pair + tl.cumsum(read, axis=0, reverse=True)
        to = dg + row.to(tl.int64) * T + start + rows
        tl.store(to, after + tl.cumsum(previous, axis=0) + straddle, mask=valid)
        carried += tl.sum(tl.where(valid, read * read, 0.0), axis=0)
        straddle += tl.sum(read, axis=0)
