"""Step 3 forward: walk each segment again from its incoming state and write the outputs."""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.primitives import (
    chunk_info,
    group_of,
    load_rows,
    load_state,
    mm,
    power,
    rows_of,
    sees,
    store_columns,
    store_state,
    token_weights,
)
from flexsp.runtime.launch import begin


@triton.jit
def _scores(q, k, bc, into, seen, scale, GATED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr):
    """Transposed: of queries that see the keys of their rows, decayed. Keys have the gates `into`."""
    found = mm(k, tl.trans(q), DOT, PREC)
    if GATED:
        found = found * (power(tl.where(seen, bc[None, :] - into[:, None], float("-inf"))) * scale)
    else:
        found = tl.where(seen, found * scale, 0.0)
    return found


@triton.jit
def output_kernel(
    q,
    k,
    v,
    gate,
    writing,
    skip,
    o,
    states,
    initial,
    final,
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
    g_sb,
    g_sh,
    o_sb,
    o_st,
    o_sh,
    w_sb,
    w_st,
    w_sh,
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
    FINAL: tl.constexpr,
    ALIKE: tl.constexpr,
    GATED: tl.constexpr,
    STEPS: tl.constexpr,
    SKIP: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    STRICT: tl.constexpr,
    GROUP: tl.constexpr,
    DOT: tl.constexpr,
    PREC: tl.constexpr,
    PDL: tl.constexpr,
):
    """o = scale (tril(q k^T . E) v + e^b q S), docs/math.md, section 2.

    GROUP heads share rows of q and of k. STEPS: keys have gates of their own, `writing` (see `step_kernel`). SKIP: o
    has skip [H] times v besides, or skip [B, T, H] times v (BY_TOKEN). STRICT: as of `sees`.

    The state is held transposed, [BV, BK >= K]: so it enters its product from registers, and o leaves transposed.
    """
    begin(PDL)
    v0 = tl.program_id(0) * BV
    b = tl.program_id(1) // H
    h = (tl.program_id(1) % H).to(tl.int64)
    seg = tl.program_id(2)
    q += b.to(tl.int64) * q_sb + group_of(h, GROUP) * q_sh
    k += b.to(tl.int64) * k_sb + group_of(h, GROUP) * k_sh
    v += b.to(tl.int64) * v_sb + h * v_sh
    o += b.to(tl.int64) * o_sb + h * o_sh
    gate += b.to(tl.int64) * g_sb + h * g_sh
    writing += b.to(tl.int64) * g_sb + h * g_sh
    if BY_TOKEN:
        skip += b.to(tl.int64) * w_sb + h * w_sh
    elif SKIP:
        weight = tl.load(skip + h).to(tl.float32)

    if ALIKE:
        k_st = q_st
        v_st = q_st
        o_st = q_st
    rows = tl.arange(0, C)
    seen = sees(rows[None, :], rows[:, None], STRICT)
    c0 = seg * per_seg
    c1 = tl.minimum(c0 + per_seg, n_chunks)
    slot = (b * (n_seg + 1) + seg).to(tl.int64) * H + h
    S = load_state(states + slot * K * V, 0, v0, True, K, V, BK, BV, True)
    for c in range(c0, c1):
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        at_doc = (doc * H + h).to(tl.int64) * K * V if PACKED else 0
        if PACKED:  # noqa: SIM102 (a constexpr, then a value)
            if first:
                S = tl.zeros([BV, BK], tl.float32)
                if INITIAL:
                    S = load_state(initial + at_doc, 0, v0, True, K, V, BK, BV, True)
        bc, b_end = 0.0, 0.0
        if GATED:
            bc, b_end = DECAY(gate, c, C)
        written_at = rows_of(writing, c, C) if STEPS else bc
        held = S.to(DOT)
        qc = load_rows(q + start * q_st, q_st, length, 0, C, K, BK)
        kc = load_rows(k + start * k_st, k_st, length, 0, C, K, BK)
        vc = load_rows(v + start * v_st, v_st, length, v0, C, V, BV)
        if BY_TOKEN:
            weights = token_weights(skip + start * w_st, w_st, length, C)
        if length >= 0:  # always; Triton splits a product in a branch over all warps (see ARCHITECTURE.md, "Walks")
            p = _scores(qc, kc, bc, written_at, seen, scale, GATED, DOT, PREC)
            if BY_TOKEN:  # as what a token reads of itself: there are no registers for one more sum
                p += tl.where(rows[None, :] == rows[:, None], weights[None, :], 0.0)
            p = p.to(DOT)
        else:
            p = tl.zeros([C, C], DOT)
        oc = mm(held, tl.trans(qc), DOT, PREC)
        if GATED:
            oc = oc * (power(bc) * scale)[None, :]
        else:
            oc = oc * scale
        oc += mm(tl.trans(vc), p, DOT, PREC)
        if SKIP and not BY_TOKEN:
            oc += tl.trans(vc).to(tl.float32) * weight
        # Here, where p is no longer needed, so that both lie in the same shared memory: two blocks then fit.
        if GATED:
            S = S * power(b_end)
            S += mm(tl.trans(vc) * power(b_end - written_at)[None, :], kc, DOT, PREC)
        else:
            S += mm(tl.trans(vc), kc, DOT, PREC)
        store_columns(o + start * o_st, oc, o_st, length, v0, C, V, BV)
        if PACKED and FINAL:  # noqa: SIM102
            if last:
                store_state(final + at_doc, S, 0, v0, True, K, V, BK, BV, True)
