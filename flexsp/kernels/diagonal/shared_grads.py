"""Kernels that take a chunk each instead of walking: gradients where heads share keys (docs/math.md, section 5), and
outputs and gradients of states of one column.

The gradients of q and k are sums over the heads of a group. Walks have one head each, and would leave rows of q and k
for every head: at the sizes of Mamba-2 half of what a backward pass reads and writes. Here a program has one chunk and
goes through heads instead, and sums stay in registers. What heads need are the states at the edges of chunks, which
walks leave in bf16: S as it enters each, and dS behind each (`chunk_states_kernel`). There is memory for those of a
piece of the tokens at a time. `shared_values_kernel` makes the scores q k^T once for all heads, dv, and sum_h dA_h, of
which dq and dk take their part within the chunk; `shared_keys_kernel` makes these. Both at once need more registers
than there are.

The gradient of the gates is exact at both edges of every chunk (`chunk_gate_grad_kernel`): what passes a chunk is
<a S, dS> of its own edges, so no error goes from chunk to chunk. Within a chunk, pairs that cancel leave roundings of
fp32, which is too much for inputs in fp32: these have walks.

A state of one column (V == 1), as normalisers of mLSTM and linear attention have it, has so few numbers that all
states at the edges of chunks are kept, in fp32, and nothing is a product of tiles but the scores: what others are
divided by is exact to fp32 then. `column_output_kernel` makes such outputs for inputs of every type, and gradients
are those of one head a group, in bf16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.diagonal.summarize import behind_chunk
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
)
from flexsp.runtime.launch import begin


@triton.jit
def chunk_states_kernel(
    x, y, gate, writing, states, edges, boundary, left, table,
    x_sb, x_st, x_sh, y_sb, y_st, y_sh, g_sb, g_sh,
    first_seg, kept, T, H, n_seg, n_chunks, per_seg, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr, BOUNDARY: tl.constexpr, LEFT: tl.constexpr,
    GATED: tl.constexpr, STEPS: tl.constexpr, GROUP: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """edges [B, kept, H, K, V], of the segments from `first_seg` on: the state as it enters each chunk, or dS behind
    each if REVERSE, of the states at the edges of segments.

    Adds up what `summarize_kernel` does. boundary [N, H, K, V] (BOUNDARY): initial states of packed documents, or
    gradients of their final ones. left [N, H, K, V] (LEFT, with REVERSE): dS at the start of documents.
    """
    begin(PDL)
    tile = tl.program_id(0)
    n_v: tl.constexpr = (V + BV - 1) // BV
    k0 = (tile // n_v) * BK
    v0 = (tile % n_v) * BV
    b = tl.program_id(1) // H
    h = (tl.program_id(1) % H).to(tl.int64)
    seg = first_seg + tl.program_id(2)
    x += b.to(tl.int64) * x_sb + group_of(h, GROUP) * x_sh
    y += b.to(tl.int64) * y_sb + h * y_sh
    gate += b.to(tl.int64) * g_sb + h * g_sh
    writing += b.to(tl.int64) * g_sb + h * g_sh
    c0 = seg * per_seg
    edges += h * K * V
    c1 = tl.minimum(c0 + per_seg, n_chunks)
    slot = (b * (n_seg + 1) + seg + (1 if REVERSE else 0)).to(tl.int64) * H + h
    S = load_state(states + slot * K * V, k0, v0, True, K, V, BK, BV)
    for n in range(c0, c1):
        c = c1 - 1 - (n - c0) if REVERSE else n
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        at_doc = (doc * H + h).to(tl.int64) * K * V if PACKED else 0
        if PACKED:
            reset = last if REVERSE else first
            if reset:
                S = tl.zeros([BK, BV], tl.float32)
                if BOUNDARY:
                    S = load_state(boundary + at_doc, k0, v0, True, K, V, BK, BV)
        xc = load_rows(x + start * x_st, x_st, length, k0, C, K, BK)
        yc = load_rows(y + start * y_st, y_st, length, v0, C, V, BV)
        at = (b.to(tl.int64) * kept + c - first_seg * per_seg) * H * K * V
        store_state(edges + at, S.to(edges.dtype.element_ty), k0, v0, True, K, V, BK, BV)
        bc, b_end = 0.0, 0.0
        if GATED:
            bc, b_end = DECAY(gate, c, C)
        if STEPS:
            bc = rows_of(writing, c, C)
        S = behind_chunk(S, xc, yc, bc, b_end, scale, V, REVERSE, GATED, False, DOT, PREC)
        if PACKED and LEFT:
            ends = first if REVERSE else last
            if ends:
                store_state(left + at_doc, S, k0, v0, True, K, V, BK, BV)


@triton.jit
def _row_sums(x, C: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr):
    """[C, PARTS]: sums of x [C, N] over N, in parts: as many as the warp groups that hold the columns."""
    return tl.sum(tl.reshape(x, [C, PARTS, N // PARTS]), axis=2)


@triton.jit
def _load_edge(base, k0, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Tile [BK, BV] of a state that `chunk_states_kernel` left, in its type."""
    rows = k0 + tl.arange(0, BK)[:, None]
    cols = tl.arange(0, BV)[None, :]
    at = base + rows * V + cols
    if K % BK == 0 and V == BV:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=(rows < K) & (cols < V), other=0.0)
    return found


@triton.jit
def _load_column(base, i, stride, length):
    """Rows 0..length-1 of values of one channel, in fp32."""
    return tl.load(base + i * stride, mask=i < length, other=0.0).to(tl.float32)


@triton.jit
def _load_vector(base, k0, K: tl.constexpr, BK: tl.constexpr):
    """BK rows of a state of one column, in fp32."""
    rows = k0 + tl.arange(0, BK)
    return tl.load(base + rows, mask=rows < K, other=0.0).to(tl.float32)


@triton.jit
def column_output_kernel(
    q, k, v, gate, writing, skip, o, entering, table,
    q_sb, q_st, q_sh, k_sb, k_st, k_sh, v_sb, v_st, v_sh, g_sb, g_sh, o_sb, o_st, o_sh, T, H, kept, scale,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr, STEPS: tl.constexpr, SKIP: tl.constexpr,
    STRICT: tl.constexpr, GROUP: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, PACKED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """o of one chunk where V is 1, as `output_kernel` makes it, of the states `entering` [B, kept, H, K].

    Nothing is rounded between the inputs and o, which mLSTM and linear attention divide by.
    """
    begin(PDL)
    c = tl.program_id(0)
    b = tl.program_id(1) // H
    h = (tl.program_id(1) % H).to(tl.int64)
    start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
    i = tl.arange(0, C)
    qc = load_rows(q + b.to(tl.int64) * q_sb + group_of(h, GROUP) * q_sh + start * q_st, q_st, length, 0, C, K, BK)
    kc = load_rows(k + b.to(tl.int64) * k_sb + group_of(h, GROUP) * k_sh + start * k_st, k_st, length, 0, C, K, BK)
    value = _load_column(v + b.to(tl.int64) * v_sb + h * v_sh + start * v_st, i, v_st, length)
    S = _load_vector(entering + ((b.to(tl.int64) * kept + c) * H + h) * K, 0, K, BK)
    here = tl.sum(qc.to(tl.float32) * S[None, :] + 0.0, axis=1) * scale
    scores = tl.zeros([C, C], tl.float32)
    if length >= 0:  # always; Triton splits a product in a branch over all warps (see ARCHITECTURE.md, "Walks")
        scores = tl.where(sees(i[:, None], i[None, :], STRICT), mm(qc, tl.trans(kc), DOT, PREC) * scale, 0.0)
    if GATED:
        bc = rows_of(gate + b.to(tl.int64) * g_sb + h * g_sh, c, C)
        into = bc
        if STEPS:
            into = rows_of(writing + b.to(tl.int64) * g_sb + h * g_sh, c, C)
        here = here * power(bc)
        seen = sees(i[:, None], i[None, :], STRICT)
        scores = scores * power(tl.where(seen, bc[:, None] - into[None, :], float("-inf")))
    here += tl.sum(scores * value[None, :] + 0.0, axis=1)
    if SKIP:
        here += value * tl.load(skip + h).to(tl.float32)
    tl.store(o + b.to(tl.int64) * o_sb + h * o_sh + (start + i) * o_st, here.to(o.dtype.element_ty), mask=i < length)


@triton.jit
def shared_values_kernel(
    q, k, v, do, gate, writing, skip, leaving, dv, dscores, sums, table,
    q_sb, q_st, q_sh, k_sb, k_st, k_sh, v_sb, v_st, v_sh, do_sb, do_st, do_sh, g_sb, g_sh, dv_sb, dv_st, dv_sh,
    first_chunk, T, H, n_chunks, kept, heads, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, SUMS: tl.constexpr, PARTS: tl.constexpr, GATED: tl.constexpr, STEPS: tl.constexpr,
    SKIP: tl.constexpr, STRICT: tl.constexpr, GROUP: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """dv_j = sum_i A_ij do_i + e^{b_C - b_j} k_j dS of one chunk, for `heads` of the GROUP heads that share rows of q
    and k.

    Of the chunks from `first_chunk` on; leaving and dscores have `kept` chunks. dscores [B, kept, groups, blocks, C,
    C]: scale sum_h (do_i . v_j) E_ij. SUMS: sums [B, H, chunks, C, PARTS, 4], over parts of the channels: <v_j, dv_j>
    without the skip; what i reads of its own chunk, of the same rounded scores, so that pairs that both end before a
    token cancel; <v_i, do_i>; 0. STRICT: as of `sees`.
    """
    begin(PDL)
    c = first_chunk + tl.program_id(0)
    block = tl.program_id(1)
    groups = H // GROUP
    b = tl.program_id(2) // groups
    group = (tl.program_id(2) % groups).to(tl.int64)
    start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
    q += b.to(tl.int64) * q_sb + group * q_sh + start * q_st
    k += b.to(tl.int64) * k_sb + group * k_sh + start * k_st
    v += b.to(tl.int64) * v_sb + start * v_st
    do += b.to(tl.int64) * do_sb + start * do_st
    dv += b.to(tl.int64) * dv_sb + start * dv_st
    row = b.to(tl.int64) * H
    held = b.to(tl.int64) * kept + tl.program_id(0)
    i = tl.arange(0, C)
    seen = sees(i[:, None], i[None, :], STRICT)
    qc = load_rows(q, q_st, length, 0, C, K, BK)
    kc = load_rows(k, k_st, length, 0, C, K, BK)
    scores = tl.zeros([C, C], tl.float32)
    if length >= 0:  # always; Triton splits a product in a branch over all warps (see ARCHITECTURE.md, "Walks")
        scores = tl.where(seen, mm(qc, tl.trans(kc), DOT, PREC) * scale, 0.0)
    total = tl.zeros([C, C], tl.float32)
    first_head = group * GROUP + block * heads
    for h in range(first_head, tl.minimum(first_head + heads, group * GROUP + GROUP)):
        at = (row + h) * n_chunks + c
        if V == 1:
            vc = _load_column(v + h * v_sh, i, v_st, length)
            oc = _load_column(do + h * do_sh, i, do_st, length)
            dS = _load_vector(leaving + (held * H + h) * K, 0, K, BK)
            dac = oc[:, None] * vc[None, :]
            of_state = tl.sum(kc.to(tl.float32) * dS[None, :] + 0.0, axis=1)
        else:
            vc = load_rows(v + h * v_sh, v_st, length, 0, C, V, BV)
            oc = load_rows(do + h * do_sh, do_st, length, 0, C, V, BV)
            dS = _load_edge(leaving + (held * H + h) * K * V, 0, K, V, BK, BV)
            dac = mm(oc, tl.trans(vc), DOT, PREC)
            of_state = mm(kc, dS, DOT, PREC)
        if GATED:
            bc = rows_of(gate, at, C)
            b_end = tl.load(gate + at * C + C - 1)
            written_at = rows_of(writing, at, C) if STEPS else bc
            decay = power(tl.where(seen, bc[:, None] - written_at[None, :], float("-inf")))
            a = scores * decay
            total += dac * decay
            left = power(b_end - written_at)
            of_state = of_state * (left if V == 1 else left[:, None])
        else:
            a = scores
            total += dac
        if V > 1:
            a = a.to(DOT)
        if SUMS:
            pairs = _row_sums(a.to(tl.float32) * dac, C, C, PARTS)
            same = (oc * vc)[:, None]
            if V > 1:
                same = _row_sums(tl.where(i[:, None] == i[None, :], dac, 0.0), C, C, PARTS)
        # Not added up within the product: Triton would take both for a chain, and split none of them over all warps.
        if V == 1:
            dvc = tl.sum(a * oc[:, None] + 0.0, axis=0) + of_state
        else:
            dvc = tl.where((i < length)[:, None], mm(tl.trans(a), oc, DOT, PREC), 0.0) + of_state
        if SUMS:
            writes = (dvc * vc)[:, None]
            if V > 1:
                writes = _row_sums(dvc * vc.to(DOT).to(tl.float32), C, BV, PARTS)
            found = tl.join(tl.join(writes, same), tl.join(pairs, tl.zeros([C, PARTS], tl.float32)))
            n = tl.arange(0, PARTS * 4)[None, :]
            tl.store(sums + at * C * PARTS * 4 + i[:, None] * (PARTS * 4) + n, tl.reshape(found, [C, PARTS * 4]))
        if SKIP:
            dvc += oc.to(tl.float32) * tl.load(skip + h).to(tl.float32)
        if V == 1:
            tl.store(dv + h * dv_sh + i * dv_st, dvc.to(dv.dtype.element_ty), mask=i < length)
        else:
            store_rows(dv + h * dv_sh, dvc, dv_st, length, 0, C, V, BV)
    to = dscores + ((held * groups + group) * tl.num_programs(1) + block) * C * C + i[:, None] * C + i[None, :]
    tl.store(to, tl.where(seen, total * scale, 0.0).to(dscores.dtype.element_ty))


@triton.jit
def shared_keys_kernel(
    q, k, v, do, gate, writing, entering, leaving, dscores, dq, dk, reads, passes, table,
    q_sb, q_st, q_sh, k_sb, k_st, k_sh, v_sb, v_st, v_sh, do_sb, do_st, do_sh, g_sb, g_sh,
    first_chunk, T, H, n_chunks, kept, heads, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, SUMS: tl.constexpr, PARTS: tl.constexpr, GATED: tl.constexpr, STEPS: tl.constexpr,
    GROUP: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dq, dk [B, T, groups, blocks, K] of one chunk and BK channels, sums over `heads` of the GROUP heads that share
    rows of q and k: dq_i = scale sum_h e^{b_i} S do_i + sum_j dscores_ij k_j and dk_j = sum_h e^{b_C - b_j} dS v_j +
    sum_i dscores_ij q_i.

    Of the chunks from `first_chunk` on; entering, leaving and dscores have `kept` chunks. SUMS, in parts that are to be
    added up: reads [B, H, chunks, K tiles, C, PARTS], <do_i, what i reads of S>, and passes [B, H, chunks, K tiles],
    e^{b_C} <S, dS>.
    """
    begin(PDL)
    n_k: tl.constexpr = (K + BK - 1) // BK
    tile = tl.program_id(0) % n_k
    c = first_chunk + tl.program_id(0) // n_k
    k0 = tile * BK
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    groups = H // GROUP
    b = tl.program_id(2) // groups
    group = (tl.program_id(2) % groups).to(tl.int64)
    start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
    q += b.to(tl.int64) * q_sb + group * q_sh + start * q_st
    k += b.to(tl.int64) * k_sb + group * k_sh + start * k_st
    v += b.to(tl.int64) * v_sb + start * v_st
    do += b.to(tl.int64) * do_sb + start * do_st
    row = b.to(tl.int64) * H
    held = b.to(tl.int64) * kept + tl.program_id(0) // n_k
    i = tl.arange(0, C)
    N: tl.constexpr = min(BK, BV)
    diagonal = tl.arange(0, N)[None, :] == tl.arange(0, N)[:, None]
    qc = load_rows(q, q_st, length, k0, C, K, BK)
    dqc = tl.zeros([C, BK], tl.float32)
    dkc = tl.zeros([C, BK], tl.float32)
    first_head = group * GROUP + block * heads
    for h in range(first_head, tl.minimum(first_head + heads, group * GROUP + GROUP)):
        at = (row + h) * n_chunks + c
        if GATED:
            bc = rows_of(gate, at, C)
            b_end = tl.load(gate + at * C + C - 1)
            written_at = rows_of(writing, at, C) if STEPS else bc
        if V == 1:
            read = _load_column(do + h * do_sh, i, do_st, length)
            put = _load_column(v + h * v_sh, i, v_st, length)
            S = _load_vector(entering + (held * H + h) * K, k0, K, BK)
            dS = _load_vector(leaving + (held * H + h) * K, k0, K, BK)
            if GATED:
                read = read * power(bc)
                put = put * power(b_end - written_at)
            dqc += read[:, None] * S[None, :]
            dkc += put[:, None] * dS[None, :]
            if SUMS:
                at = at * n_k + tile
                found = tl.sum(qc.to(tl.float32) * S[None, :] + 0.0, axis=1) * (read * scale)
                tl.store(reads + at * C + i, found)
                through = tl.sum(S * dS + 0.0, axis=0)
                tl.store(passes + at, through * power(b_end) if GATED else through)
        else:
            vc = load_rows(v + h * v_sh, v_st, length, 0, C, V, BV)
            oc = load_rows(do + h * do_sh, do_st, length, 0, C, V, BV)
            S = _load_edge(entering + (held * H + h) * K * V, k0, K, V, BK, BV)
            dS = _load_edge(leaving + (held * H + h) * K * V, k0, K, V, BK, BV)
            read = oc
            put = vc
            if GATED:
                read = (oc * power(bc)[:, None]).to(DOT)
                put = (vc * power(b_end - written_at)[:, None]).to(DOT)
            dqc = tl.dot(read.to(DOT), tl.trans(S).to(DOT), dqc, input_precision=PREC)
            dkc = tl.dot(put.to(DOT), tl.trans(dS).to(DOT), dkc, input_precision=PREC)
            if SUMS:
                at = at * n_k + tile
                found = _row_sums(mm(qc, S, DOT, PREC) * (read.to(tl.float32) * scale), C, BV, PARTS)
                tl.store(reads + at * C * PARTS + i[:, None] * PARTS + tl.arange(0, PARTS)[None, :], found)
                # The sum of all of S dS, from its product's diagonal: no state has to come into registers for that.
                products = mm(S, tl.trans(dS), DOT, PREC) if BK < BV else mm(tl.trans(S), dS, DOT, PREC)
                through = tl.sum(tl.sum(tl.where(diagonal, products, 0.0), axis=1), axis=0)
                tl.store(passes + at, through * power(b_end) if GATED else through)
    from_scores = dscores + ((held * groups + group) * blocks + block) * C * C
    ds = tl.load(from_scores + i[:, None] * C + i[None, :])
    kc = load_rows(k, k_st, length, k0, C, K, BK)
    dqc = dqc * scale + mm(ds, kc, DOT, PREC)
    dkc = dkc + mm(tl.trans(ds), qc, DOT, PREC)
    stride = groups.to(tl.int64) * blocks * K
    to = (b.to(tl.int64) * T + start) * stride + (group * blocks + block) * K
    store_rows(dq + to, dqc, stride, length, k0, C, K, BK)
    store_rows(dk + to, dkc, stride, length, k0, C, K, BK)


@triton.jit
def chunk_gate_grad_kernel(
    sums, reads, passes, dg, writes, skips, table, T, H,
    PARTS: tl.constexpr, READ_PARTS: tl.constexpr, TILES: tl.constexpr, C: tl.constexpr, STEPS: tl.constexpr,
    SKIP: tl.constexpr, PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dg [B, H, T] of one chunk: at token p what passes the whole chunk, what tokens from p on read of the state that
    enters it, and what tokens before p wrote for tokens from p on. STEPS, SKIP: adds up the parts that steps and skips
    have gradients from, [B, H, chunks, C]."""
    begin(PDL)
    c = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, C)
    start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
    at = row * tl.num_programs(0) + c
    before = (i > 0) & (i < length)
    through = 0.0
    read = tl.zeros([C], tl.float32)
    previous = tl.zeros([C], tl.float32)
    write = tl.zeros([C], tl.float32)
    same = tl.zeros([C], tl.float32)
    for n in tl.static_range(TILES):
        through += tl.load(passes + at * TILES + n)
        for m in tl.static_range(READ_PARTS):
            of = reads + ((at * TILES + n) * C + i) * READ_PARTS + m
            read += tl.load(of, mask=i < length, other=0.0)
    for n in tl.static_range(PARTS):
        of = sums + (at * C + i) * (PARTS * 4) + n * 4
        earlier = of - PARTS * 4
        previous += tl.load(earlier, mask=before, other=0.0) - tl.load(earlier + 1, mask=before, other=0.0)
        if STEPS:
            write += tl.load(of, mask=i < length, other=0.0)
        if SKIP:
            same += tl.load(of + 2, mask=i < length, other=0.0)
    found = through + tl.cumsum(read, axis=0, reverse=True) + tl.cumsum(previous, axis=0)
    tl.store(dg + row * T + start + i, found, mask=i < length)
    if STEPS:
        tl.store(writes + at * C + i, write)
    if SKIP:
        tl.store(skips + at * C + i, same)
