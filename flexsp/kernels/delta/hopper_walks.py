"""Walks of the delta engine on Hopper GPUs, over the chunks of a segment, with 64 columns of the state a program.

The state is S^T [64, K] in the registers of four warps, as a left operand of products; BK columns, of which those
behind K are zero. A chunk leaves

    N^T = (V^T - e^b S^T K^T) M^-T,   S'^T = e^{b_C} S^T + (beta e^{b_C - b} N^T) K,

with M^-1 of `wy_inverse`; U and W are never made. Backward,

    Y^T = (beta e^{b_C - b} dS'^T K^T + dO^T P) M^-1,
    dS^T = e^{b_C} dS'^T + (scale e^b dO^T) Q - (e^b Y^T) K,

and Y is the gradient of v (docs/math.md, section 7). Where each channel has a gate, `channel_scores` has left
scale e^b Q for Q, e^b K for K that reads and beta e^{b_C - b} K for K that writes, and e^{b_C} is that of channels.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flexsp.kernels.delta.hopper_states import (
    complete,
    keep,
    leave,
    loaded,
    loaded_or,
    of_chunk,
    read,
    readable,
    rooms,
    times,
    unless,
    write,
    zeros,
)
from flexsp.kernels.gluon import (
    arrived,
    begin,
    begun,
    by_sum,
    chunk_at,
    copy,
    copy_numbers,
    copy_tokens,
    narrower,
    nothing,
    numbers,
    operand,
    store,
    store_turned_tokens,
    tiles,
)

__all__ = ["backward", "forward"]

SCALAR = gl.constexpr(1)
CHANNEL = gl.constexpr(2)
"""What decays a state, as `walks` has it."""


@gluon.jit
def _fetch(
    c, to, row, q, k, values, given, inverse, decays, qs, ks, rows, inverses, betas, sums, table, q_st, k_st,
    stride, T, n_chunks, K: gl.constexpr, BK: gl.constexpr, C: gl.constexpr, READS: gl.constexpr, GATED: gl.constexpr,
    NORM: gl.constexpr, PACKED: gl.constexpr, STEPS: gl.constexpr, EVERY: gl.constexpr, FORWARD: gl.constexpr,
):  # fmt: skip
    """Begins to copy chunk c to the places `to`; `rows` get 64 columns of `values`, or zeros where none are given.

    STEPS, EVERY: keys for each row of queries and of `values`.
    """
    PARTS: gl.constexpr = (K + BK - 1) // BK
    start, length, doc, first, last = chunk_at(table, c, T, C, PACKED)
    at = row * n_chunks + c
    zero = gl.minimum(c, 0) * 16  # offsets of rows that depend on c are not kept in registers from chunk to chunk
    copy_tokens(rows.index(to), values, start, length if given else 0, C, 64, stride + zero, EVERY)
    copy(inverses.index(to), inverse + at * C * C, C, C, C, C)
    if GATED == CHANNEL:
        copy(ks[0].index(to), k + at * C * K, C, C, K, K + zero)
        copy_numbers(sums.index(to), decays + at * K, K)
    else:
        for n in gl.static_range(PARTS):
            copy(
                ks[n].index(to), k + start * k_st + n * BK, length, C, BK, k_st + zero,
                width=narrower(K - n * BK, BK),
            )  # fmt: skip
        copy_numbers(betas.index(to), _factors(decays, 1, at, n_chunks, C, GATED, NORM), C)
        if FORWARD:
            _fetch_sums(sums.index(to), at, n_chunks, decays, C, GATED, NORM)
        if READS:
            _fetch_queries(qs, to, q, start, length, q_st, zero, C, K, BK, STEPS)


@gluon.jit
def _fetch_queries(
    qs, to, q, start, length, stride, zero, C: gl.constexpr, K: gl.constexpr, BK: gl.constexpr, STEPS: gl.constexpr
):  # fmt: skip
    PARTS: gl.constexpr = (K + BK - 1) // BK
    for n in gl.static_range(PARTS):
        copy_tokens(
            qs[n].index(to), q + n * BK, start, length, C, BK, stride + zero, STEPS, narrower(K - n * BK, BK)
        )  # fmt: skip


@gluon.jit
def _factors(decays, which: gl.constexpr, at, n_chunks, C: gl.constexpr, GATED: gl.constexpr, NORM: gl.constexpr):
    """Where a chunk's factors are that `wy_inverse` left."""
    each = gl.num_programs(1).to(gl.int64) * n_chunks * C
    return decays + (which * each if NORM or GATED else 0) + at * C


@gluon.jit
def _fetch_sums(to, at, n_chunks, decays, C: gl.constexpr, GATED: gl.constexpr, NORM: gl.constexpr):
    """Begins to copy what products with keys that read are multiplied by."""
    if NORM or GATED:
        copy_numbers(to, _factors(decays, 2 if NORM else 0, at, n_chunks, C, GATED, NORM), C)


@gluon.jit
def _fetch_later(
    c, to, row, scores, pairs, q, qs, keys, ws, decays, sums, asks, table, q_st, T, n_chunks, K: gl.constexpr,
    BK: gl.constexpr, C: gl.constexpr, READS: gl.constexpr, QUERIES: gl.constexpr, GATED: gl.constexpr,
    NORM: gl.constexpr, PACKED: gl.constexpr, STEPS: gl.constexpr, FORWARD: gl.constexpr,
):  # fmt: skip
    """Begins to copy what chunk c needs when its first product is done."""
    at = row * n_chunks + c
    zero = gl.minimum(c, 0) * 16
    if READS:
        copy(pairs.index(to), scores + at * C * C, C, C, C, C)
        if NORM:
            copy_numbers(asks.index(to), _factors(decays, 3, at, n_chunks, C, GATED, NORM), C)
        if GATED != CHANNEL and not FORWARD:
            _fetch_sums(sums.index(to), at, n_chunks, decays, C, GATED, NORM)
    if GATED == CHANNEL:
        copy(ws[0].index(to), keys + at * C * K, C, C, K, K + zero)
    if QUERIES and GATED == CHANNEL:
        copy(qs[0].index(to), q + at * C * K, C, C, K, K + zero)
    elif QUERIES:
        start, length, doc, first, last = chunk_at(table, c, T, C, PACKED)
        _fetch_queries(qs, to, q, start, length, q_st, zero, C, K, BK, STEPS)


@gluon.jit
def _of_sums(sums, C: gl.constexpr, GATED: gl.constexpr, NORM: gl.constexpr):
    """What products with keys that read are multiplied by: e^b, with NORM divided by norms, a column [64, C]."""
    columns: gl.constexpr = gl.SliceLayout(0, by_sum(C))
    found = gl.full([C], 1.0, gl.float32, columns)
    if NORM or GATED == SCALAR:
        found = sums.load(columns)
    return found


@gluon.jit
def _of_gates(sums, betas, decays, at, K: gl.constexpr, C: gl.constexpr, GATED: gl.constexpr):
    """What products with keys that write are multiplied by: beta e^{b_C - b}, with NORM divided by norms, a column [64,
    C]. And e^{b_C}, as S^T is multiplied with it."""
    columns: gl.constexpr = gl.SliceLayout(0, by_sum(C))
    to_end = gl.full([C], 1.0, gl.float32, columns)
    decay = 1.0
    if GATED == CHANNEL:
        decay = sums.load(gl.SliceLayout(0, by_sum(K)))[None, :]
    else:
        to_end = betas.load(columns)
        if GATED == SCALAR:
            decay = gl.load(decays + at * C + C - 1)
    return to_end, decay


@gluon.jit
def _reached(chunks_within_horizon, row, seg, n_seg, K: gl.constexpr):
    """The most that `segment_horizon` found for all channels."""
    found = gl.load(chunks_within_horizon + row * n_seg + seg)
    for panel in gl.static_range(1, K // 64):
        found = gl.maximum(found, gl.load(chunks_within_horizon + (panel * gl.num_programs(1) + row) * n_seg + seg))
    return found


@gluon.jit(do_not_specialize=["T", "H", "n_seg", "n_chunks", "per_seg", "before", "held"])
def forward(
    q, k, written, v, decays, inverse, scores, o, v_new, entering, states, A, transition_nonzero, chunks_within_horizon,
    initial, final, table, q_sb, q_st, q_sh, k_sb, k_st, k_sh, v_sb, v_st, v_sh, T, H, n_seg, n_chunks, per_seg, before,
    held, scale, K: gl.constexpr, BK: gl.constexpr, V: gl.constexpr, C: gl.constexpr, READS: gl.constexpr,
    KEEPS: gl.constexpr, SUMS: gl.constexpr, NONZERO: gl.constexpr, ENTERS: gl.constexpr, BOUNDARY: gl.constexpr,
    LEAVES: gl.constexpr, GATED: gl.constexpr, NORM: gl.constexpr, DEEP: gl.constexpr, PACKED: gl.constexpr,
    GROUP: gl.constexpr, STEPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A walk from the first chunk to the last.

    READS: writes o [B, T, H, V]. KEEPS: writes the S^T that enters each chunk [B H, held, V, K] and its N^T
    [.., V, C], of the segments behind those `before`: the others are another launch's. SUMS: writes what the segment
    leaves of a state of zeros into the slot behind it; where states decay, of its last `chunks_within_horizon` chunks
    alone; with a gate a channel `chunks_within_horizon` is what `hopper_horizon` found, and transition_nonzero [B,
    n_seg, H] is written: whether A is anything. NONZERO: with another gate, or none, transition_nonzero is given.
    Programs beyond the columns of V walk the unit matrix, with values of zeros; what it becomes is the segment's matrix
    A [B, n_seg, H, K, K].

    decays: beta of tokens; with a gate a token, or with NORM, [2, B H, chunks, C] or [4, ..], as `wy_inverse` left
    them; with a gate a channel e^{b_C} [B H, chunks, K], and then queries and keys are `channel_scores`' [B H, chunks,
    C, K].

    NORM: queries and keys are to be divided by their norms, which is in `decays`.

    DEEP: copies go two chunks ahead, for programs that have a multiprocessor to themselves.
    """
    begin(PDL)
    panel, row, seg = gl.program_id(0), gl.program_id(1).to(gl.int64), before + gl.program_id(2)
    of_state = panel < V // 64
    v0 = (panel if of_state else panel - V // 64) * 64
    b = row // H
    h = row % H
    if GATED != CHANNEL:
        q += b * q_sb + h // GROUP * q_sh
        k += b * k_sb + h // GROUP * k_sh
    v += b * v_sb + h * v_sh + v0
    PARTS: gl.constexpr = (K + BK - 1) // BK
    SK: gl.constexpr = by_sum(BK)
    c0 = seg * per_seg
    c1 = gl.minimum(c0 + per_seg, n_chunks)
    slot = states + ((b * (n_seg + 1) + seg) * H + h) * K * V
    S = zeros(BK, PARTS)
    if ENTERS:
        S = loaded(slot + v0, K, BK, V)
    elif BOUNDARY and not PACKED and not SUMS:
        S = loaded(initial + row * K * V + v0, K, BK, V)
    if SUMS:
        lives = True
        if NONZERO and GATED != CHANNEL:
            lives = gl.load(transition_nonzero + (b * n_seg + seg) * H + h) != 0
            nearest = c1 - gl.load(chunks_within_horizon + row * n_seg + seg)
            c0 = nearest if of_state else (c0 if lives else c1)
        elif GATED == CHANNEL:
            near = _reached(chunks_within_horizon, row, seg, n_seg, K)
            lives = near > c1 - c0
            if panel == 0:
                gl.store(transition_nonzero + (b * n_seg + seg) * H + h, lives.to(gl.int32))
            c0 = gl.maximum(c0, c1 - near) if of_state else (c0 if lives else c1)
        rows = v0 + gl.arange(0, 64, gl.SliceLayout(1, SK))
        S = nothing()
        for tile in gl.static_range(PARTS):
            unit = rows[:, None] == (tile * BK + gl.arange(0, BK, gl.SliceLayout(0, SK)))[None, :]
            S = S + (gl.where(unit & (lives & (not of_state)), 1.0, 0.0),)
    FIRST: gl.constexpr = 3 if DEEP else 2  # chunks there is room for of what is read first
    THEN: gl.constexpr = 2 if DEEP else 1  # and of the rest
    LATER: gl.constexpr = DEEP or READS or GATED == CHANNEL
    QUERIES: gl.constexpr = READS and (DEEP or GATED == CHANNEL)  # are of the rest
    ks, vs, inverses = rooms(FIRST, C, BK, PARTS), tiles(FIRST, C, 64), tiles(FIRST, C, C)
    betas, sums = numbers(FIRST, C), numbers(FIRST, K if GATED == CHANNEL else C)
    qs, pairs = rooms(THEN if QUERIES or not READS else FIRST, C, BK, PARTS), tiles(THEN, C, C)
    asks = numbers(THEN, C) if NORM and READS else betas
    ws = rooms(THEN, C, BK, PARTS) if GATED == CHANNEL else ks
    room = ks if PARTS == 1 else rooms(1, 64, BK, PARTS)
    gl.thread_barrier()
    if c0 < c1:
        _fetch(
            c0, 0, row, q, k, v, of_state, inverse, decays, qs, ks, vs, inverses, betas, sums, table,
            q_st, k_st, v_st, T, n_chunks, K, BK, C, READS and not QUERIES, GATED, NORM, PACKED, STEPS, 1, True,
        )  # fmt: skip
    async_copy.commit_group()
    if LATER:
        if c0 < c1:
            _fetch_later(
                c0, 0, row, scores, pairs, q, qs, written, ws, decays, sums, asks, table, q_st, T, n_chunks, K, BK, C,
                READS, QUERIES, GATED, NORM, PACKED, STEPS, True,
            )  # fmt: skip
        async_copy.commit_group()
    if DEEP:
        if c0 + 1 < c1:
            _fetch(
                c0 + 1, 1, row, q, k, v, of_state, inverse, decays, qs, ks, vs, inverses, betas, sums, table,
                q_st, k_st, v_st, T, n_chunks, K, BK, C, False, GATED, NORM, PACKED, STEPS, 1, True,
            )  # fmt: skip
        async_copy.commit_group()
    for n in range(0, c1 - c0):
        s, then = n % FIRST, n % THEN
        c = c0 + n
        arrived(2 if DEEP else 1 if LATER else 0)
        start, length, doc, first, last = chunk_at(table, c, T, C, PACKED)
        at, place = row * n_chunks + c, row * held + c - before * per_seg
        if PACKED:
            S = unless(S, first, PARTS)
            if BOUNDARY:  # noqa: SIM102 (a constexpr, then a value)
                if PARTS > 1:
                    S = loaded_or(S, initial + (doc * H + h) * K * V + v0, first & of_state, K, BK, V)
                elif first & of_state:
                    S = loaded(initial + (doc * H + h) * K * V + v0, K, BK, V)
        kc, turned = of_chunk(ks, s, PARTS), inverses.index(s).permute((1, 0))
        state = readable(S, room, C, PARTS)
        X = read(state, kc, C, PARTS)
        if PARTS == 1:
            N = begun(vs.index(s).permute((1, 0)), turned, C)
        if DEEP:
            if c + 1 < c1:
                _fetch_later(
                    c + 1, 1 - then, row, scores, pairs, q, qs, written, ws, decays, sums, asks, table, q_st, T,
                    n_chunks, K, BK, C, READS, QUERIES, GATED, NORM, PACKED, STEPS, True,
                )  # fmt: skip
            async_copy.commit_group()
        if c + FIRST - 1 < c1:
            _fetch(
                c + FIRST - 1, (n + FIRST - 1) % FIRST, row, q, k, v, of_state, inverse, decays, qs, ks, vs, inverses,
                betas, sums, table, q_st, k_st, v_st, T, n_chunks, K, BK, C, READS and not QUERIES, GATED, NORM,
                PACKED, STEPS, 1, True,
            )  # fmt: skip
        async_copy.commit_group()
        if KEEPS:
            keep(entering + place * V * K + v0 * K, S, room, K, BK)
        from_start = _of_sums(sums.index(s), C, GATED, NORM)
        to_end, decay = _of_gates(sums.index(s), betas.index(s), decays, at, K, C, GATED)
        if PARTS == 1:
            X = warpgroup_mma_wait(1, [X])
        else:  # a larger state leaves no registers for both while the next chunk is copied
            X = warpgroup_mma_wait(0, [X])
            N = begun(vs.index(s).permute((1, 0)), turned, C)
        N = warpgroup_mma(operand(X * -from_start[None, :], C), turned, N, is_async=True)
        if QUERIES or GATED == CHANNEL:
            arrived(3 if DEEP else 1)
        if READS:
            out = read(state, of_chunk(qs, then if QUERIES else s, PARTS), C, PARTS)
        N = warpgroup_mma_wait(PARTS if READS else 0, [N])
        kc = of_chunk(ws, then if GATED == CHANNEL else s, PARTS)
        S = write(operand(N * to_end[None, :], BK), kc, times(S, decay, PARTS), PARTS)
        if READS:
            if not QUERIES:
                arrived(1)
            out = warpgroup_mma_wait(PARTS, [out])
            if NORM:
                out = out * asks.index(then).load(gl.SliceLayout(0, by_sum(C)))[None, :]
            elif GATED != CHANNEL:
                if PARTS > 1:  # loaded once more: no register is left to keep it in
                    from_start = _of_sums(sums.index(s), C, GATED, NORM)
                out = out * (from_start * scale)[None, :]
            out = warpgroup_mma(operand(N, C), pairs.index(then).permute((1, 0)), out, is_async=True)
            found = warpgroup_mma_wait(0, S + (out,))
            S, out = found[:PARTS], found[PARTS]
        else:
            if KEEPS:
                store(v_new + place * V * C + v0 * C, N, 64, 64, C, C)
            S = complete(S, PARTS)
        if LATER and not DEEP:
            gl.thread_barrier()  # all warps have read what the next copies write over
            if c + 1 < c1:
                _fetch_later(
                    c + 1, 0, row, scores, pairs, q, qs, written, ws, decays, sums, asks, table, q_st, T, n_chunks,
                    K, BK, C, READS, QUERIES, GATED, NORM, PACKED, STEPS, True,
                )  # fmt: skip
            async_copy.commit_group()
        if READS:
            to_o = o + (b * (T // STEPS) * H + h) * V + v0
            store_turned_tokens(to_o, out, start, length, 64, C, H * V, STEPS)
        if PACKED and LEAVES:  # noqa: SIM102 (a constexpr, then a value)
            if last:
                leave(final + (doc * H + h) * K * V + v0, S, K, BK, V)
    arrived(0)
    if LEAVES and not PACKED:  # noqa: SIM102 (a constexpr, then a value)
        if seg == n_seg - 1:
            leave(final + row * K * V + v0, S, K, BK, V)
    if SUMS:
        if of_state:
            leave(slot + H * K * V + v0, S, K, BK, V)
            if seg == 0:
                edge = zeros(BK, PARTS)
                if BOUNDARY and not PACKED:
                    edge = loaded(initial + row * K * V + v0, K, BK, V)
                leave(slot + v0, edge, K, BK, V)
        else:
            leave(A + ((b * n_seg + seg) * H + h) * K * K + v0, S, K, BK, K, None if K % 64 == 0 else K - v0)


@gluon.jit(do_not_specialize=["T", "H", "n_seg", "n_chunks", "per_seg", "before", "held"])
def backward(
    q, k, written, do, decays, inverse, scores, dv, leaving, dstates, chunks_within_horizon, dfinal, dinitial, table,
    q_sb, q_st, q_sh, k_sb, k_st, k_sh, do_sb, do_st, do_sh, T, H, n_seg, n_chunks, per_seg, before, held, scale,
    K: gl.constexpr, BK: gl.constexpr, V: gl.constexpr, C: gl.constexpr, SUMS: gl.constexpr, ENTERS: gl.constexpr,
    BOUNDARY: gl.constexpr, LEAVES: gl.constexpr, GATED: gl.constexpr, NORM: gl.constexpr, DEEP: gl.constexpr,
    PACKED: gl.constexpr, GROUP: gl.constexpr, STEPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A walk from the last chunk to the first: dv [B, T, H, V] and the dS^T that leaves each chunk [B H, held, V, K],
    of the segments behind those `before`.

    SUMS: writes neither, but what the segment adds to the gradient of the state that enters it, into its slot; where
    states decay of the first `chunks_within_horizon` chunks alone.
    """
    begin(PDL)
    v0, row, seg = gl.program_id(0) * 64, gl.program_id(1).to(gl.int64), before + gl.program_id(2)
    b = row // H
    h = row % H
    if GATED != CHANNEL:
        q += b * q_sb + h // GROUP * q_sh
        k += b * k_sb + h // GROUP * k_sh
    do += b * do_sb + h * do_sh + v0
    PARTS: gl.constexpr = (K + BK - 1) // BK
    SK: gl.constexpr = by_sum(BK)
    c0 = seg * per_seg
    c1 = gl.minimum(c0 + per_seg, n_chunks)
    slot = dstates + ((b * (n_seg + 1) + seg) * H + h) * K * V
    dS = zeros(BK, PARTS)
    if ENTERS:
        dS = loaded(slot + H * K * V + v0, K, BK, V)
    elif BOUNDARY and not PACKED and not SUMS:
        dS = loaded(dfinal + row * K * V + v0, K, BK, V)
    if SUMS and GATED == SCALAR:
        c1 = c0 + gl.load(chunks_within_horizon + (gl.num_programs(1) + row) * n_seg + seg)
    elif SUMS and GATED == CHANNEL:
        c1 = gl.minimum(c1, c0 + _reached(chunks_within_horizon, row, seg, n_seg, K))
    first_keys = written if GATED == CHANNEL else k
    FIRST: gl.constexpr = 3 if DEEP else 2
    THEN: gl.constexpr = 2 if DEEP else 1
    QUERIES: gl.constexpr = DEEP or GATED == CHANNEL
    ks, os, inverses = rooms(FIRST, C, BK, PARTS), tiles(FIRST, C, 64), tiles(FIRST, C, C)
    betas = numbers(FIRST, C)
    sums = numbers(FIRST, K) if GATED == CHANNEL else numbers(THEN, C)
    asks = numbers(THEN, C) if NORM else betas
    qs, pairs = rooms(THEN if QUERIES else FIRST, C, BK, PARTS), tiles(THEN, C, C)
    ws = rooms(THEN, C, BK, PARTS) if GATED == CHANNEL else ks
    room = ks if PARTS == 1 else rooms(1, 64, BK, PARTS)
    gl.thread_barrier()
    if c0 < c1:
        _fetch(
            c1 - 1, 0, row, q, first_keys, do, True, inverse, decays, qs, ks, os, inverses, betas, sums, table,
            q_st, k_st, do_st, T, n_chunks, K, BK, C, not QUERIES, GATED, NORM, PACKED, STEPS, STEPS, False,
        )  # fmt: skip
    async_copy.commit_group()
    if c0 < c1:
        _fetch_later(
            c1 - 1, 0, row, scores, pairs, q, qs, k, ws, decays, sums, asks, table, q_st, T, n_chunks, K, BK, C, True,
            QUERIES, GATED, NORM, PACKED, STEPS, False,
        )  # fmt: skip
    async_copy.commit_group()
    if DEEP:
        if c0 + 1 < c1:
            _fetch(
                c1 - 2, 1, row, q, first_keys, do, True, inverse, decays, qs, ks, os, inverses, betas, sums, table,
                q_st, k_st, do_st, T, n_chunks, K, BK, C, False, GATED, NORM, PACKED, STEPS, STEPS, False,
            )  # fmt: skip
        async_copy.commit_group()
    for n in range(0, c1 - c0):
        s, then = n % FIRST, n % THEN
        c = c1 - 1 - n
        arrived(2 if DEEP else 1)
        start, length, doc, first, last = chunk_at(table, c, T, C, PACKED)
        at, place = row * n_chunks + c, row * held + c - before * per_seg
        if PACKED:
            dS = unless(dS, last, PARTS)
            if BOUNDARY:  # noqa: SIM102 (a constexpr, then a value)
                if PARTS > 1:
                    dS = loaded_or(dS, dfinal + (doc * H + h) * K * V + v0, last, K, BK, V)
                elif last:
                    dS = loaded(dfinal + (doc * H + h) * K * V + v0, K, BK, V)
        given = os.index(s).permute((1, 0))
        qc = of_chunk(qs, then if QUERIES else s, PARTS)
        kc = of_chunk(ws, then if GATED == CHANNEL else s, PARTS)
        X = read(readable(dS, room, C, PARTS), of_chunk(ks, s, PARTS), C, PARTS)
        if DEEP:
            if c > c0:
                _fetch_later(
                    c - 1, 1 - then, row, scores, pairs, q, qs, k, ws, decays, sums, asks, table, q_st, T, n_chunks,
                    K, BK, C, True, QUERIES, GATED, NORM, PACKED, STEPS, False,
                )  # fmt: skip
            async_copy.commit_group()
        if c - FIRST + 1 >= c0:
            _fetch(
                c - FIRST + 1, (n + FIRST - 1) % FIRST, row, q, first_keys, do, True, inverse, decays, qs, ks, os,
                inverses, betas, sums, table, q_st, k_st, do_st, T, n_chunks, K, BK, C, not QUERIES, GATED, NORM,
                PACKED, STEPS, STEPS, False,
            )  # fmt: skip
        async_copy.commit_group()
        if not SUMS:
            keep(leaving + place * V * K + v0 * K, dS, room, K, BK)
        late = s if GATED == CHANNEL else then
        to_end, decay = _of_gates(sums.index(late), betas.index(s), decays, at, K, C, GATED)
        arrived(3 if DEEP else 1)
        from_start = _of_sums(sums.index(late), C, GATED, NORM)
        X = warpgroup_mma_wait(0, [X]) * to_end[None, :]
        dN = warpgroup_mma(given, pairs.index(then), X, is_async=True)
        if GATED == CHANNEL:
            dS = write(given, qc, times(dS, decay, PARTS), PARTS)
        else:
            of_rows: gl.constexpr = gl.SliceLayout(0, gl.DotOperandLayout(0, SK, 2))
            weights = asks.index(then).load(of_rows) if NORM else gl.convert_layout(from_start * scale, of_rows)
            weighted = given.load(gl.DotOperandLayout(0, SK, 2)).to(gl.float32) * weights[None, :]
            dS = write(weighted.to(gl.bfloat16), qc, times(dS, decay, PARTS), PARTS)
        dN = warpgroup_mma_wait(PARTS, [dN])
        y = begun(operand(dN, C), inverses.index(s), C)
        found = warpgroup_mma_wait(0, dS + (y,))
        dS, y = found[:PARTS], found[PARTS]
        if GATED != CHANNEL and not DEEP:
            gl.thread_barrier()  # all warps have read what the next copies write over
            if c > c0:
                _fetch_later(
                    c - 1, 0, row, scores, pairs, q, qs, k, ws, decays, sums, asks, table, q_st, T, n_chunks, K, BK, C,
                    True, QUERIES, GATED, NORM, PACKED, STEPS, False,
                )  # fmt: skip
            async_copy.commit_group()
        dS = write(operand(y * -from_start[None, :], BK), kc, dS, PARTS)
        if not SUMS:
            store_turned_tokens(dv + (b * T * H + h) * V + v0, y, start, length, 64, C, H * V, 1)
        dS = complete(dS, PARTS)
        if GATED == CHANNEL and not DEEP:
            gl.thread_barrier()  # all warps have read what the next copies write over
            if c > c0:
                _fetch_later(
                    c - 1, 0, row, scores, pairs, q, qs, k, ws, decays, sums, asks, table, q_st, T, n_chunks, K, BK, C,
                    True, QUERIES, GATED, NORM, PACKED, STEPS, False,
                )  # fmt: skip
            async_copy.commit_group()
        if PACKED:
            if LEAVES:  # noqa: SIM102 (a constexpr, then a value)
                if first:
                    leave(dinitial + (doc * H + h) * K * V + v0, dS, K, BK, V)
            dS = unless(dS, first, PARTS)
    arrived(0)
    if SUMS:
        leave(slot + v0, dS, K, BK, V)
        if seg == n_seg - 1:
            edge = zeros(BK, PARTS)
            if BOUNDARY and not PACKED:
                edge = loaded(dfinal + row * K * V + v0, K, BK, V)
            leave(slot + H * K * V + v0, edge, K, BK, V)
    if LEAVES and not PACKED:  # noqa: SIM102 (a constexpr, then a value)
        if seg == 0:
            leave(dinitial + row * K * V + v0, dS, K, BK, V)
