"""Step 3 backward (docs/math.md, section 5): dq walks left to right with S in registers, dk, dv right to left with dS.

The gate gradient of token p sums A.dA over all pairs (write j < p, read i >= p). Each kind of pair is counted on its
own: both ends in the chunk, read here but written before (`reads`), written here but read later (`writes`), and one end
on either side of the chunk. The last is a number a chunk, <S, dS> less what the chunk reads or writes. It is carried
from the segment's edge, where <S, dS> is taken of states in fp32 (`edges`), or from a packed document's (`ends`).

What is carried goes into every token of a segment: its rounding would grow with the segment's length, and a sum over
tokens would add that up. In bf16 the tokens' own numbers take states rounded to 8 bits, and their errors stay in one
chunk. What is carried takes the sums <S, Q^T dO> and <dS, K^T V> from the fp32 states and from the very products that
dS and S are made of (`read_sums`, `write_sums`), so that the terms of neighbouring chunks cancel to fp32 rounding.
`summarize_kernel` rounds the same operands, so that <S, dS> at the edges agrees with them. `output_kernel` does not,
so that `ends` are of the state that the walk of dq has, not of the final states.

Turns (TURNED, docs/math.md, section 18): tokens may rotate pairs of the state's rows, and q and k come rotated by sums
of these turns. The gradient of a turn is <S, J dS> of the states before its token, J a rotation by a quarter. It is
taken of fp32 states at a segment's right edge, or of those of a packed document's end (`turn_ends`), and carried from
there: a token adds <dq, J q> + <dk, J k>, where pairs on one side of it must cancel. So these products are taken of
gradients in registers. What a chunk reads of S and what it adds to dS are made of the same operands, weighted rows of
values that are rounded once. States enter products in two parts in bf16, which keeps 16 bits. Then tokens' own numbers
serve for what is carried to gates, too, and `read_sums` are not needed.

A tile leaves sums over channels in parts, as many as the warps between which its matrix products split the summed axis:
adding them up later costs less than a barrier a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.pairs import of_pairs, quarter_turn, turn_across
from flexsp.kernels.primitives import (
    chunk_info,
    group_of,
    load_rows,
    load_state,
    mm,
    power,
    rows_of,
    sees,
    store_rows,
    store_state,
    token_weights,
    weighted,
    written,
)
from flexsp.runtime.launch import begin

_PI2 = tl.constexpr(6.283185307179586)


@triton.jit
def _row_sums(to, x, C: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr):
    """to [PARTS, C] = sums of x [C, N] over N, in parts."""
    at = tl.arange(0, PARTS)[None, :] * C + tl.arange(0, C)[:, None]
    tl.store(to + at, tl.sum(tl.reshape(x, [C, PARTS, N // PARTS]), axis=2))


@triton.jit
def _column_sums(to, x, C: tl.constexpr, N: tl.constexpr):
    """to [C / 16, N] = sums of x [C, N] over 16 rows each, which one warp holds."""
    at = tl.arange(0, C // 16)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(to + at, tl.sum(tl.reshape(x, [C // 16, 16, N]), axis=1))


@triton.jit
def _inner_by_rows(to, x, y, N: tl.constexpr):
    """to [N] = sums over columns of x y, both [N, M]. One sum of all would need a barrier."""
    tl.store(to + tl.arange(0, N), tl.sum(x * y, axis=1))


@triton.jit
def _store_pairs_of(to, x, k0, N: tl.constexpr, BK: tl.constexpr):
    """Stores x [BK / 2], numbers of the pairs of a tile's rows from k0 on, of which there are N."""
    pair = k0 // 2 + tl.arange(0, BK // 2)
    tl.store(to + pair, x, mask=pair < N)


@triton.jit
def _in_two(S, DOT: tl.constexpr):
    """A state in fp32 as two parts in bf16, which keep 16 bits between them.

    The first is cut off after its 8 bits, which integers do. Rounded to bf16 and back it would take a conversion a
    number, of which a multiprocessor does few at a time.
    """
    first = (S.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return first.to(DOT), (S - first).to(DOT)


@triton.jit
def _sums_onward(x, carried):
    """Sums of x [C, N] over each row and those behind it, and over all rows [N], on top of carried [N].

    As what the rows before leave of all: a running sum from the other end would take twice as many exchanges between
    lanes, which put rows in reverse order and back.
    """
    total = carried + tl.sum(x, axis=0)
    return total[None, :] - (tl.cumsum(x, axis=0) - x), total


@triton.jit
def dq_kernel(
    q, k, v, do, gate, writing, dq, reads, read_sums, turn_reads, ends, turn_ends, states, initial, dfinal, table,
    q_sb, q_st, q_sh, k_sb, k_st, k_sh, v_sb, v_st, v_sh, do_sb, do_st, do_sh, g_sb, g_sh, dq_sb, dq_st, dq_sh,
    T, H, n_seg, n_chunks, per_seg, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr, READS: tl.constexpr, FINAL: tl.constexpr,
    PARTS: tl.constexpr, EXACT: tl.constexpr, ALIKE: tl.constexpr, GATED: tl.constexpr, STEPS: tl.constexpr,
    STRICT: tl.constexpr, TURNED: tl.constexpr, TURNS: tl.constexpr, GROUP: tl.constexpr,
    DOT: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):
    """dq_i = scale (sum_j dA_ij E_ij k_j + e^{b_i} S do_i), state tile [BK, BV >= V].

    reads [B, H, chunks, K tiles, PARTS, C] fp32: <q_i, the inter-chunk part of dq_i>. read_sums [B, H, chunks, K tiles,
    BK] fp32 (EXACT): rows of <S, what the chunk adds to dS>, S as it enters. ends [N, H, K tiles, BK] fp32 (FINAL):
    rows of <S, dfinal> of packed documents that end here. GROUP heads share rows of q and of k; dq has a row a head.
    STEPS: keys have gates of their own, `writing` (see `step_kernel`). STRICT: as of `sees`. TURNS: turn_reads
    [B, T, H, S] fp32 are <dq, J q> of the first S = TURNS pairs of channels, turn_ends [N, H, S] (FINAL) <S, J dfinal>
    of packed documents that end here.
    """
    begin(PDL)
    tile = tl.program_id(0)
    k0 = tile * BK
    b = tl.program_id(1) // H
    h = (tl.program_id(1) % H).to(tl.int64)
    seg = tl.program_id(2)
    q += b.to(tl.int64) * q_sb + group_of(h, GROUP) * q_sh
    k += b.to(tl.int64) * k_sb + group_of(h, GROUP) * k_sh
    v += b.to(tl.int64) * v_sb + h * v_sh
    do += b.to(tl.int64) * do_sb + h * do_sh
    dq += b.to(tl.int64) * dq_sb + h * dq_sh
    gate += b.to(tl.int64) * g_sb + h * g_sh
    writing += b.to(tl.int64) * g_sb + h * g_sh
    SUMS: tl.constexpr = PARTS * C
    per_chunk = tl.num_programs(0).to(tl.int64)
    reads += (tl.program_id(1) * n_chunks * per_chunk + tile) * SUMS
    read_sums += (tl.program_id(1) * n_chunks * per_chunk + tile) * BK
    of_turns = (b.to(tl.int64) * T * H + h) * TURNS

    if ALIKE:
        k_st = q_st
        v_st = q_st
        do_st = q_st
        dq_st = q_st
    rows = tl.arange(0, C)
    seen = sees(rows[:, None], rows[None, :], STRICT)
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
            written_at = rows_of(writing, c, C) if STEPS else bc
        kc = load_rows(k + start * k_st, k_st, length, k0, C, K, BK)
        vc = load_rows(v + start * v_st, v_st, length, 0, C, V, BV)
        oc = load_rows(do + start * do_st, do_st, length, 0, C, V, BV)
        if GATED:
            read_weight = power(bc) * scale
            write_weight = power(b_end - written_at)
        else:
            read_weight = scale + tl.zeros([C], tl.float32)
            write_weight = tl.full([C], 1.0, tl.float32)
        if READS or TURNS > 0:
            qc = load_rows(q + start * q_st, q_st, length, k0, C, K, BK)
        if READS and EXACT and not TURNED:
            added = written(qc, read_weight, oc, V, DOT, PREC)
            _inner_by_rows(read_sums + c * per_chunk * BK, S, added, BK)
        if TURNED:
            reading = weighted(oc, read_weight, V, DOT).to(DOT)
        if TURNED and EXACT:
            held, rest = _in_two(S, DOT)
        else:
            held = S.to(DOT)
        if length >= 0:  # always; Triton splits products in a branch over all warps (see ARCHITECTURE.md, "Walks")
            da = mm(oc, tl.trans(vc), DOT, PREC)
            if TURNED:
                dqc = mm(reading, tl.trans(held), DOT, PREC)
                if EXACT:
                    dqc = tl.dot(reading, tl.trans(rest), dqc)
            else:
                dqc = mm(oc, tl.trans(held), DOT, PREC) * read_weight[:, None]
            if GATED:
                da = da * (power(tl.where(seen, bc[:, None] - written_at[None, :], float("-inf"))) * scale)
            else:
                da = tl.where(seen, da * scale, 0.0)
            da = da.to(DOT)
            if READS:
                _row_sums(reads + c * per_chunk * SUMS, qc.to(tl.float32) * dqc, C, BK, PARTS)
        else:
            da = tl.zeros([C, C], DOT)
            dqc = tl.zeros([C, BK], tl.float32)
        if GATED:
            S = S * power(b_end)
        if TURNED:
            S += written(kc, None, weighted(vc, write_weight, V, DOT), V, DOT, PREC)
        elif GATED:
            S += written(kc, write_weight, vc, V, DOT, PREC)
        else:
            S += written(kc, None, vc, V, DOT, PREC)
        if FINAL:  # noqa: SIM102 (a constexpr, then a value)
            if last:
                at_doc = (doc * H + h).to(tl.int64)
                end = load_state(dfinal + at_doc * K * V, k0, 0, True, K, V, BK, BV)
                if READS:
                    _inner_by_rows(ends + (at_doc * per_chunk + tile) * BK, S, end, BK)
                if TURNS > 0:
                    across = turn_across(S, dfinal + at_doc * K * V, k0, K, V, BK, BV)
                    _store_pairs_of(turn_ends + at_doc * TURNS, across, k0, TURNS, BK)
        dqc += mm(da, kc, DOT, PREC)
        if TURNS > 0:  # noqa: SIM102 (a constexpr, then a value)
            if k0 < 2 * TURNS:  # channels behind do not turn
                here = of_pairs(quarter_turn(qc).to(tl.float32) * dqc)
                to = turn_reads + of_turns + start.to(tl.int64) * H * TURNS
                store_rows(to, here, H * TURNS, length, k0 // 2, C, TURNS, BK // 2)
        store_rows(dq + start * dq_st, dqc, dq_st, length, k0, C, K, BK)


@triton.jit
def dkv_kernel(
    q, k, v, do, gate, writing, skip, dk, dv, pairs, writes, write_sums, turn_reads, turn_ends, turns, edges, of_steps,
    of_skip, states, dstates, dfinal, dinitial, table,
    q_sb, q_st, q_sh, k_sb, k_st, k_sh, v_sb, v_st, v_sh, do_sb, do_st, do_sh, g_sb, g_sh,
    dk_sb, dk_st, dk_sh, dv_sb, dv_st, dv_sh, w_sb, w_st, w_sh,
    T, H, n_seg, n_chunks, per_seg, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr, INITIAL: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DG: tl.constexpr, PARTS: tl.constexpr, EXACT: tl.constexpr,
    ALIKE: tl.constexpr, GATED: tl.constexpr, STEPS: tl.constexpr, SKIP: tl.constexpr, DSKIP: tl.constexpr,
    BY_TOKEN: tl.constexpr, STRICT: tl.constexpr, TURNED: tl.constexpr, TURNS: tl.constexpr,
    GROUP: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):
    """dk_j = scale sum_i dA_ij E_ij q_i + e^{b_C - b_j} dS v_j and dv_j = sum_i A_ij do_i + e^{b_C - b_j} k_j dS.

    Right to left. DK needs a tile of dS with all of V, DV one with all of K; both at once, all of dS. DG goes with DK:
    writes [B, H, chunks, K tiles, PARTS, C], pairs [B, H, chunks, K tiles, C / 16, C], edges [K tiles, B, n_seg, H] and
    write_sums [B, H, chunks, K tiles, BK] (EXACT; rows of <dS, what the chunk adds to S>, dS as it enters), all fp32,
    are then this tile's channels of those sums. EXACT: `writes` are <v_j, dv_j>, or <k_j, dk_j> in a walk without dv:
    what j wrote for all tokens that read it; `pairs` are what i reads of its own chunk, of the same rounded scores, so
    that the pairs before a token cancel. Else `pairs` [B, H, chunks, K tiles, PARTS, C] are the pairs on both sides of
    a token, each counted once: a product more, but the gradient of a nearly closed gate, of pairs that are far smaller
    than those that cancel, keeps its fp32 digits. dinitial [N, H, K, V] (with DV): dS at the start of packed documents.

    GROUP heads share rows of q and of k; dk has a row a head. STEPS: keys have gates of their own, `writing` (see
    `step_kernel`), and of_steps [B, H, chunks, K tiles, PARTS, C] (DG, not EXACT) are <k_j, dk_j>. SKIP (with DV): o
    has skip [H] times v besides, or skip [B, T, H] times v (BY_TOKEN), which `writes` leave out. DSKIP: of_skip [B, H,
    chunks, tiles, PARTS, C] are <v_j, do_j>. STRICT: as of `sees`. TURNS (with DK): turns [B, T, H, S] fp32 are the
    gradients of turns, in turns of 2 pi; turn_reads and turn_ends are as of `dq_kernel`.
    """
    begin(PDL)
    tile = tl.program_id(0)
    k0 = tile * BK if DK else 0
    v0 = tile * BV if DV else 0
    b = tl.program_id(1) // H
    h = (tl.program_id(1) % H).to(tl.int64)
    seg = tl.program_id(2)
    q += b.to(tl.int64) * q_sb + group_of(h, GROUP) * q_sh
    k += b.to(tl.int64) * k_sb + group_of(h, GROUP) * k_sh
    v += b.to(tl.int64) * v_sb + h * v_sh
    do += b.to(tl.int64) * do_sb + h * do_sh
    dk += b.to(tl.int64) * dk_sb + h * dk_sh
    dv += b.to(tl.int64) * dv_sb + h * dv_sh
    gate += b.to(tl.int64) * g_sb + h * g_sh
    writing += b.to(tl.int64) * g_sb + h * g_sh
    SUMS: tl.constexpr = PARTS * C
    per_chunk = tl.num_programs(0).to(tl.int64)
    sums = tl.program_id(1) * n_chunks * per_chunk + tile
    of_turns = (b.to(tl.int64) * T * H + h) * TURNS

    if ALIKE:
        k_st = q_st
        v_st = q_st
        do_st = q_st
        dk_st = q_st
        dv_st = q_st
    if BY_TOKEN:
        skip += b.to(tl.int64) * w_sb + h * w_sh
    elif SKIP:
        weight = tl.load(skip + h).to(tl.float32)
    rows = tl.arange(0, C)
    seen = sees(rows[None, :], rows[:, None], STRICT)
    if DG and not EXACT:
        later = rows[None, :] >= rows[:, None]
        before = (rows[None, :] < rows[:, None]).to(DOT)
    c0 = seg * per_seg
    c1 = tl.minimum(c0 + per_seg, n_chunks)
    slot = ((b * (n_seg + 1) + seg + 1).to(tl.int64) * H + h) * K * V
    dS = load_state(dstates + slot, k0, v0, True, K, V, BK, BV)
    if DG or TURNS > 0:
        S = load_state(states + slot, k0, v0, True, K, V, BK, BV)
    if TURNS > 0:
        carried = turn_across(S, dstates + slot, k0, K, V, BK, BV)
    if DG:
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
                if TURNS > 0:
                    carried = tl.zeros([BK // 2], tl.float32)
                    if FINAL:
                        pair = k0 // 2 + tl.arange(0, BK // 2)
                        carried = tl.load(turn_ends + (doc * H + h) * TURNS + pair, mask=pair < TURNS, other=0.0)
        if GATED:
            bc, b_end = DECAY(gate, c, C)
            written_at = rows_of(writing, c, C) if STEPS else bc
        at_sums = sums + c * per_chunk
        qc = load_rows(q + start * q_st, q_st, length, k0, C, K, BK)
        oc = load_rows(do + start * do_st, do_st, length, v0, C, V, BV)
        if DK or DSKIP:
            vc = load_rows(v + start * v_st, v_st, length, v0, C, V, BV)
        if DV or DG or TURNS > 0:
            kc = load_rows(k + start * k_st, k_st, length, k0, C, K, BK)
        if BY_TOKEN:
            weights = token_weights(skip + start * w_st, w_st, length, C)
        if GATED:
            into = power(b_end - written_at)
        if DG and EXACT and not TURNED:
            added = written(kc, into, vc, V, DOT, PREC)
            _inner_by_rows(write_sums + at_sums * BK, dS, added, BK)
        if DK and TURNED:
            writing_rows = weighted(vc, into if GATED else tl.full([C], 1.0, tl.float32), V, DOT).to(DOT)
        if DK and TURNED and EXACT:
            held, rest = _in_two(dS, DOT)
        else:
            held = dS.to(DOT)
        a = tl.zeros([C, C], DOT)
        da = tl.zeros([C, C], DOT)
        if DG and not EXACT:
            pair = tl.zeros([C, C], tl.float32)
        if length >= 0:  # always; Triton splits products in a branch over all warps (see ARCHITECTURE.md, "Walks")
            if GATED:
                decay = power(tl.where(seen, bc[None, :] - written_at[:, None], float("-inf"))) * scale
            else:
                decay = tl.where(seen, scale, 0.0)
            if DK:
                dac = mm(vc, tl.trans(oc), DOT, PREC)
                da = (dac * decay).to(DOT)
            if DV or DG:
                ac = mm(kc, tl.trans(qc), DOT, PREC)
                a = (ac * decay).to(DOT)
            if DG and not EXACT:
                pair = ac * decay * dac
            elif DG and DV:
                _column_sums(pairs + at_sums * (C // 16) * C, a.to(tl.float32) * dac, C, C)
            elif DG:
                _column_sums(pairs + at_sums * (C // 16) * C, da.to(tl.float32) * ac, C, C)
        if DG and not EXACT:  # noqa: SIM102
            if length >= 0:  # of the pairs written before p, those read at p or later
                both = tl.where(later, mm(before, pair, DOT, PREC), 0.0)
                _row_sums(pairs + at_sums * SUMS, both, C, C, PARTS)
        if DK:
            dkc = tl.zeros([C, BK], tl.float32)
            if length >= 0:
                if TURNED:
                    dkc = mm(writing_rows, tl.trans(held), DOT, PREC)
                    if EXACT:
                        dkc = tl.dot(writing_rows, tl.trans(rest), dkc)
                        if DG:
                            _row_sums(write_sums + at_sums * SUMS, kc.to(tl.float32) * dkc, C, BK, PARTS)
                else:
                    dkc = mm(vc, tl.trans(held), DOT, PREC)
                    if GATED:
                        dkc = dkc * into[:, None]
                if DG and not EXACT:
                    _row_sums(writes + at_sums * SUMS, dkc * kc.to(tl.float32), C, BK, PARTS)
        # Weighted without gates, too, so that it is taken from registers: products that take both operands from shared
        # memory run on into the next turn, and those tiles would need a third buffer, which does not fit.
        read_weight = power(bc) * scale if GATED else scale + tl.zeros([C], tl.float32)
        if GATED:
            dS = dS * power(b_end)
        if TURNED:
            dS += written(qc, None, weighted(oc, read_weight, V, DOT), V, DOT, PREC)
        else:
            dS += written(qc, read_weight, oc, V, DOT, PREC)
        if DK:
            dkc += mm(da, qc, DOT, PREC)
            if DG and EXACT and not DV:
                _row_sums(writes + at_sums * SUMS, dkc * kc.to(tl.float32), C, BK, PARTS)
            if DG and STEPS and not EXACT:
                _row_sums(of_steps + at_sums * SUMS, dkc * kc.to(tl.float32), C, BK, PARTS)
            if TURNS > 0:  # noqa: SIM102
                if k0 < 2 * TURNS:
                    at_turns = of_turns + start.to(tl.int64) * H * TURNS
                    here = load_rows(turn_reads + at_turns, H * TURNS, length, k0 // 2, C, TURNS, BK // 2)
                    here += of_pairs(quarter_turn(kc).to(tl.float32) * dkc)
                    since, carried = _sums_onward(here, carried)
                    store_rows(turns + at_turns, since * _PI2, H * TURNS, length, k0 // 2, C, TURNS, BK // 2)
            store_rows(dk + start * dk_st, dkc, dk_st, length, k0, C, K, BK)
        if DV:
            dvc = tl.zeros([C, BV], tl.float32)
            if length >= 0:
                dvc = mm(kc, held, DOT, PREC)
                if GATED:
                    dvc = dvc * into[:, None]
            dvc += mm(a, oc, DOT, PREC)
            if DG and EXACT:
                _row_sums(writes + at_sums * SUMS, dvc * vc.to(DOT).to(tl.float32), C, BV, PARTS)
            if SKIP:
                read = oc.to(tl.float32)
                if BY_TOKEN:
                    dvc += read * weights[:, None]
                else:
                    dvc += read * weight
                if DSKIP:
                    _row_sums(of_skip + at_sums * SUMS, read * vc.to(tl.float32), C, BV, PARTS)
            store_rows(dv + start * dv_st, dvc, dv_st, length, v0, C, V, BV)
        if PACKED and INITIAL:  # noqa: SIM102
            if first:
                store_state(dinitial + at_doc, dS, k0, v0, True, K, V, BK, BV)


@triton.jit
def _all_of(x, chunk, TILES: tl.constexpr, N: tl.constexpr):
    """Sum of x [chunks, TILES, N] of one chunk."""
    total = 0.0
    for i in tl.static_range(TILES):
        total += tl.sum(tl.load(x + (chunk * TILES + i) * N + tl.arange(0, N)), axis=0)
    return total


@triton.jit
def gate_grad_kernel(
    pairs, reads, read_sums, writes, write_sums, edges, ends, gate, dg, table, g_sb, g_sh,
    T, H, n_seg, n_chunks, per_seg,
    TILES: tl.constexpr, READ_TILES: tl.constexpr, PARTS: tl.constexpr, READ_PARTS: tl.constexpr,
    BK: tl.constexpr, READ_BK: tl.constexpr, EXACT: tl.constexpr, TURNED: tl.constexpr,
    C: tl.constexpr, DROP: tl.constexpr, ROUNDING: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr,
    FINAL: tl.constexpr, PDL: tl.constexpr,
):
    """dg [B, H, T]: right to left over a segment's chunks, carrying `straddle` = <S, dS> at the chunk's edge.

    EXACT: read_sums and write_sums are given, rows of BK and READ_BK numbers. Else products are exact enough for sums
    over tokens. What is left of `straddle` behind a chunk that decays strongly is dropped if it is no more than the
    rounding carried so far, ROUNDING of what went into it: true values there may be smaller than it by any factor.
    """
    begin(PDL)
    row = tl.program_id(0)
    b = row // H
    h = (row % H).to(tl.int64)
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
                here = ends + (doc * H + h) * (READ_TILES * READ_BK)
                for i in tl.static_range(READ_TILES):
                    edge += tl.sum(tl.load(here + i * READ_BK + tl.arange(0, READ_BK), mask=last, other=0.0), axis=0)
            straddle = tl.where(last, edge, straddle)
            carried = tl.where(last, edge * edge, carried)
        bc, b_end = DECAY(gate, c, C)
        valid = rows < length
        # Of the token before: their running sum leaves a token's own out.
        before = valid & (rows > 0)
        write = tl.zeros([C], tl.float32)
        previous = tl.zeros([C], tl.float32)
        read = tl.zeros([C], tl.float32)
        pair = tl.zeros([C], tl.float32)
        for i in tl.static_range(TILES * PARTS):
            term = writes + at * (TILES * PARTS) + i * C + rows
            previous += tl.load(term - 1, mask=before, other=0.0)
            if not EXACT:
                write += tl.load(term, mask=valid, other=0.0)
                pair += tl.load(pairs + at * (TILES * PARTS) + i * C + rows, mask=valid, other=0.0)
        if EXACT:
            for i in tl.static_range(TILES * (C // 16)):
                previous -= tl.load(pairs + at * (TILES * (C // 16)) + i * C + rows - 1, mask=before, other=0.0)
        for i in tl.static_range(READ_TILES * READ_PARTS):
            read += tl.load(reads + at * (READ_TILES * READ_PARTS) + i * C + rows, mask=valid, other=0.0)
        if EXACT:
            departed = _all_of(write_sums, at // C, TILES, BK)
            carried += departed * departed
        else:
            departed = tl.sum(write, axis=0)
            carried += tl.sum(tl.where(valid, write * write, 0.0), axis=0)  # not fused with the sum: see `sum_over`
        straddle -= departed
        noise = (b_end < DROP) & (straddle * straddle <= ROUNDING * ROUNDING * carried)
        straddle = tl.where(noise, 0.0, straddle)
        carried = tl.where(noise, 0.0, carried)
        to = dg + row.to(tl.int64) * T + start + rows
        after = pair + tl.cumsum(read, axis=0, reverse=True)
        tl.store(to, after + tl.cumsum(previous, axis=0) + straddle, mask=valid)
        if EXACT and not TURNED:
            arrived = _all_of(read_sums, at // C, READ_TILES, READ_BK)
            carried += arrived * arrived
        else:
            arrived = tl.sum(read, axis=0)
            carried += tl.sum(tl.where(valid, read * read, 0.0), axis=0)
        straddle += arrived


@triton.jit
def token_sums_kernel(
    x, to, table, T, n_chunks, PARTS: tl.constexpr, PER: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """to [B, H, T] = sums of x [B, H, chunks, PARTS, C] over PARTS, of PER chunks of a head."""
    begin(PDL)
    row = tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, C)
    for n in tl.static_range(PER):
        c = tl.minimum(tl.program_id(0) * PER + n, n_chunks - 1)  # the last one more than once
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        total = tl.zeros([C], tl.float32)
        for part in tl.static_range(PARTS):
            at = ((row * n_chunks + c) * PARTS + part) * C + rows
            total += tl.load(x + at, mask=rows < length, other=0.0)
        tl.store(to + row * T + start + rows, total, mask=rows < length)
