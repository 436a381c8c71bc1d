"""Step 1 of both directions: what each segment adds to the state, walked with the state in registers.

Left to right (forward) F = sum_j e^{b_end - b_j} k_j v_j^T, right to left (backward)
G = sum_i e^{b_i} scale q_i do_i^T, both `X^T (w * Y)` per chunk. Only the segment's result and log decay go to memory.

Chunks behind the horizon, whose part decays below 2^-150 until the segment's end, are not walked (docs/math.md,
section 3).
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.diagonal.tiles import MOST_CHUNKS
from flexsp.kernels.primitives import (
    LN2,
    chunk_info,
    group_of,
    load_rows,
    load_state,
    power,
    rows_of,
    store_state,
    weighted,
    written,
)
from flexsp.runtime.launch import begin

HORIZON = tl.constexpr(-104.0 * 1.4426950408889634)  # log2 of a decay that fp32 cannot hold
_MOST = tl.constexpr(MOST_CHUNKS)


@triton.jit
def within_horizon(gate, table, c0, c1, C: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr):
    """Of a segment's chunks c0 to c1: how many to walk, the nearest to its end (to its start if REVERSE); the log2
    decay of them all; whether a document starts in one, unless REVERSE."""
    i = tl.arange(0, _MOST)
    c = c0 + i if REVERSE else c1 - 1 - i
    inside = i < c1 - c0
    nearer = c - 1 if REVERSE else c + 1
    decay = tl.load(gate + nearer * C + C - 1, mask=inside & (i > 0), other=0.0).to(tl.float32)
    reached = tl.cumsum(decay, axis=0)
    walked = tl.max(tl.where(inside & ~(reached <= HORIZON), i + 1, 0), axis=0)
    last = c1 - 1 if REVERSE else c0
    total = tl.sum(decay, axis=0) + tl.load(gate + last * C + C - 1).to(tl.float32)
    cuts = 0
    if PACKED and not REVERSE:
        cuts = tl.max(tl.load(table + c * 5 + 3, mask=inside, other=0).to(tl.int32), axis=0)
    return walked, total, cuts


@triton.jit
def behind_chunk(
    S, x, y, bc, b_end, scale, V: tl.constexpr, REVERSE: tl.constexpr, GATED: tl.constexpr, TURNED: tl.constexpr,
    DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The state behind a chunk, of the one before it; of gradients if REVERSE, from right to left. TURNED: made of
    weighted rows of y, as the walks in `flexsp.kernels.diagonal.grads` have it then."""
    if GATED:
        w = power(bc) * scale if REVERSE else power(b_end - bc)
        S = S * power(b_end)
    elif TURNED:
        w = (scale if REVERSE else 1.0) + tl.zeros([x.shape[0]], tl.float32)
    if TURNED:
        S += written(x, None, weighted(y, w, V, DOT), V, DOT, PREC)
    elif GATED:
        S += written(x, w, y, V, DOT, PREC)
    elif REVERSE:
        S += written(x, None, y, V, DOT, PREC) * scale
    else:
        S += written(x, None, y, V, DOT, PREC)
    return S


@triton.jit
def summarize_kernel(
    x,
    y,
    gate,
    writing,
    states,
    log_a,
    cut,
    boundary,
    table,
    x_sb,
    x_st,
    x_sh,
    y_sb,
    y_st,
    y_sh,
    g_sb,
    g_sh,
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
    REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
    BOUNDARY: tl.constexpr,
    ZERO: tl.constexpr,
    ONWARD: tl.constexpr,
    GATED: tl.constexpr,
    STEPS: tl.constexpr,
    TURNED: tl.constexpr,
    X_GROUP: tl.constexpr,
    DOT: tl.constexpr,
    PREC: tl.constexpr,
    PDL: tl.constexpr,
):
    """states [B, n_seg + 1, H, K, V]: F of segment s into slot s + 1, or G into slot s if REVERSE.

    boundary [N, H, K, V]: initial states (or gradients of final states if REVERSE) of packed documents. ZERO: nothing
    enters the rank, so slot 0 (slot n_seg if REVERSE) becomes 0. Unless ONWARD nobody reads what the last segment (the
    first if REVERSE) adds, and it adds 0. X_GROUP heads share rows of x. STEPS: keys have gates of their own, `writing`
    (see `step_kernel`). TURNED: as of `behind_chunk`.
    """
    begin(PDL)
    tile = tl.program_id(0)
    n_v: tl.constexpr = (V + BV - 1) // BV
    k0 = (tile // n_v) * BK
    v0 = (tile % n_v) * BV
    b = tl.program_id(1) // H
    h = (tl.program_id(1) % H).to(tl.int64)
    seg = tl.program_id(2)
    x += b.to(tl.int64) * x_sb + group_of(h, X_GROUP) * x_sh
    y += b.to(tl.int64) * y_sb + h * y_sh
    gate += b.to(tl.int64) * g_sb + h * g_sh
    writing += b.to(tl.int64) * g_sb + h * g_sh

    c0 = seg * per_seg
    c1 = tl.minimum(c0 + per_seg, n_chunks)
    total = 0.0
    cuts = 0
    n0 = c0
    n1 = c1
    if GATED:
        walked, total, cuts = within_horizon(gate, table, c0, c1, C, REVERSE, PACKED)
        if REVERSE:
            n1 = c0 + walked
        else:
            n0 = c1 - walked
    if not ONWARD:
        n0 = tl.where(seg == (0 if REVERSE else n_seg - 1), n1, n0)
    S = tl.zeros([BK, BV], tl.float32)
    for n in range(n0, n1):
        c = n1 - 1 - (n - n0) if REVERSE else n
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        if PACKED:
            reset = last if REVERSE else first
            if reset:
                S = tl.zeros([BK, BV], tl.float32)
                if BOUNDARY:
                    S = load_state(boundary + (doc * H + h).to(tl.int64) * K * V, k0, v0, True, K, V, BK, BV)
            if not GATED:
                cuts = cuts | first.to(tl.int32)
        bc, b_end = 0.0, 0.0
        if GATED:
            bc, b_end = DECAY(gate, c, C)
        xc = load_rows(x + start * x_st, x_st, length, k0, C, K, BK)
        yc = load_rows(y + start * y_st, y_st, length, v0, C, V, BV)
        if STEPS:
            bc = rows_of(writing, c, C)
        S = behind_chunk(S, xc, yc, bc, b_end, scale, V, REVERSE, GATED, TURNED, DOT, PREC)
        if PACKED and REVERSE:
            S = tl.where(first, 0.0, S)  # nothing flows back past a document's start

    slot = (b * (n_seg + 1) + seg + (0 if REVERSE else 1)).to(tl.int64) * H + h
    store_state(states + slot * K * V, S, k0, v0, True, K, V, BK, BV)
    if ZERO:
        enters = seg == (n_seg - 1 if REVERSE else 0)
        beside = slot + H if REVERSE else slot - H
        store_state(states + beside * K * V, tl.zeros([BK, BV], tl.float32), k0, v0, enters, K, V, BK, BV)
    if not REVERSE:
        at = b * n_seg + seg
        if GATED:
            tl.store(log_a + at * H + h, total * LN2, mask=tile == 0)
        if PACKED:
            tl.store(cut + at, cuts, mask=(tile == 0) & (h == 0))
