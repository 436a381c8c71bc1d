"""Gradients of chunks of the segments that `exact` does token by token."""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.delta.exact import (
    GROUP_OF_CHUNKS,
    _decay,
    _decayed,
    _inverse_norm,
    _key,
    _reading,
    _row,
    _step,
    of_head,
)
from flexsp.kernels.delta.walks import CHANNEL, SCALAR
from flexsp.kernels.delta.wy_transform import sum_over
from flexsp.kernels.primitives import GATE_MIN, chunk_info, load_state
from flexsp.runtime.launch import begin


@triton.jit
def _add(base, i, x, N: tl.constexpr, index, more, PANELS: tl.constexpr):
    """Adds x to row i of rows of N numbers, which are set if not `more`, of the first of several PANELS."""
    at = base + i * N + index
    if PANELS:
        x += tl.load(at, mask=(index < N) & more, other=0.0)
        tl.debug_barrier()  # all threads that hold a number have read it before one writes over it
    tl.store(at, x, mask=index < N)


@triton.jit
def _panel(
    q, k, v, beta, g, do, entering, leaving, dv, rows_of_chunk, start, length, v0, H, of_beta, of_gate, q_st, k_st,
    v_st, beta_st, g_st, do_st, scale, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, GATED: tl.constexpr, STEPS: tl.constexpr, NORM: tl.constexpr, ERASES: tl.constexpr,
):  # fmt: skip
    """What BV columns of the values from v0 on add to the rows A, B and those of dq, each [C, K]; to dbeta and to that
    of a gate a token, -v dv, both [C]; and the products of the states that leave, summed [BK]."""
    rows = tl.arange(0, BK)
    cols = v0 + tl.arange(0, BV)
    index = tl.arange(0, C)
    to_a, to_b = rows_of_chunk, rows_of_chunk + C * K
    to_q, errors, of_values = rows_of_chunk + 2 * C * K, rows_of_chunk + 3 * C * K, rows_of_chunk + 3 * C * K + C * BV
    panel = tl.arange(0, BV)
    S = tl.trans(load_state(entering, v0, 0, True, V, K, BV, BK))
    for i in range(0, length):
        n = start + i
        S = _decayed(S, _decay(g, n, g_st, rows, True, K, GATED, STEPS), GATED)
        kn = _key(k, n, k_st, rows, K, True, NORM)
        read = _reading(kn, beta, n, beta_st, rows, True, K, ERASES)
        error = _row(v, n, v_st, cols, V, True) - sum_over(S * read[:, None], 0)
        S += kn[:, None] * (error * _step(beta, n, beta_st, True, ERASES))[None, :]
        tl.store(errors + i * BV + panel, error)
    tl.debug_barrier()  # rows are read by other threads than those that stored them
    dS = tl.trans(load_state(leaving, v0, 0, True, V, K, BV, BK))
    kept = sum_over(S * dS, 1)
    for j in range(0, length):
        i = length - 1 - j
        n = start + i
        kn = _key(k, n, k_st, rows, K, True, NORM)
        bn = _step(beta, n, beta_st, True, ERASES)
        reads = n % STEPS == STEPS - 1
        of_output = _row(do, n // STEPS, do_st, cols, V, reads) * scale
        dS += _key(q, n // STEPS, q_st, rows, K, reads, NORM)[:, None] * of_output[None, :]
        error = tl.load(errors + i * BV + panel)
        p = sum_over(dS * kn[:, None], 0)
        y = p * bn
        if not ERASES:
            of_beta += tl.where(index == i, sum_over(p * error, 0), 0.0)
        if GATED == SCALAR:
            of_gate -= tl.where(index == i, sum_over(_row(v, n, v_st, cols, V, True) * y, 0), 0.0)
        _add(to_a, i, sum_over(dS * error[None, :], 1) * bn, K, rows, v0 > 0, V > BV)
        tl.store(of_values + i * BV + panel, y)
        tl.store(dv + n * H * V + cols, y.to(dv.dtype.element_ty), mask=cols < V)
        read = _reading(kn, beta, n, beta_st, rows, True, K, ERASES)
        dS = _decayed(dS - read[:, None] * y[None, :], _decay(g, n, g_st, rows, True, K, GATED, STEPS), GATED)
    tl.debug_barrier()  # gradients of values are read by other threads than those that stored them
    S = tl.trans(load_state(entering, v0, 0, True, V, K, BV, BK))
    for i in range(0, length):
        n = start + i
        S = _decayed(S, _decay(g, n, g_st, rows, True, K, GATED, STEPS), GATED)
        kn = _key(k, n, k_st, rows, K, True, NORM)
        y = tl.load(of_values + i * BV + panel)
        _add(to_b, i, sum_over(S * y[None, :], 1), K, rows, v0 > 0, V > BV)
        error = tl.load(errors + i * BV + panel)
        S += kn[:, None] * (error * _step(beta, n, beta_st, True, ERASES))[None, :]
        of_output = _row(do, n // STEPS, do_st, cols, V, n % STEPS == STEPS - 1) * scale
        _add(to_q, i, sum_over(S * of_output[None, :], 1), K, rows, v0 > 0, V > BV)
    tl.debug_barrier()  # the next panel writes over errors and gradients of values
    return of_beta, of_gate, kept


@triton.jit
def _chunk(
    q, k, v, beta, g, do, entering, leaving, rows_of_chunk, dq, dk, dv, dbeta, dg, table, q_sb, q_st, q_sh, k_sb, k_st,
    k_sh, v_sb, v_st, v_sh, beta_sb, beta_st, beta_sh, g_sb, g_st, g_sh, do_sb, do_st, do_sh, row, c, place, heads, T,
    H, n_chunks, scale, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    TILES: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr,
    NORM: tl.constexpr, ERASES: tl.constexpr,
):  # fmt: skip
    b = row // H
    h = row % H
    q = of_head(q, b, h, q_sb, q_sh, GROUP)
    k = of_head(k, b, h, k_sb, k_sh, GROUP)
    v = of_head(v, b, h, v_sb, v_sh)
    do = of_head(do, b, h, do_sb, do_sh)
    beta = of_head(beta, b, h, beta_sb, beta_sh)
    g = of_head(g, b, h, g_sb, g_sh)
    dq += (b * (T // STEPS) * H + h) * K
    dk += (b * T * H + h) * K
    dv += (b * T * H + h) * V
    rows = tl.arange(0, BK)
    index = tl.arange(0, C)
    start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
    of_beta = tl.zeros([C], tl.float32)
    of_gate = tl.zeros([C], tl.float32)
    behind = tl.zeros([BK], tl.float32)
    for v0 in range(0, V, BV):
        of_beta, of_gate, kept = _panel(
            q, k, v, beta, g, do, entering + place * V * K, leaving + place * V * K, dv, rows_of_chunk, start, length,
            v0, H, of_beta, of_gate, q_st, k_st, v_st, beta_st, g_st, do_st, scale, K, BK, V, BV, C, GATED, STEPS,
            NORM, ERASES,
        )  # fmt: skip
        behind += kept
    if GATED == SCALAR:
        of_gate += tl.where(index == length - 1, tl.sum(behind, axis=0), 0.0)
    for j in range(0, length):
        i = length - 1 - j
        n = start + i
        reads = n % STEPS == STEPS - 1
        a = _row(rows_of_chunk, i, K, rows, K, True)
        read = _row(rows_of_chunk + C * K, i, K, rows, K, True)
        of_query = _row(rows_of_chunk + 2 * C * K, i, K, rows, K, True)
        if ERASES:
            to_read, strength = read, _row(beta, n, beta_st, rows, K, True)
            read = strength * to_read
        of_key, key, query = a - read, _row(k, n, k_st, rows, K, True), _row(q, n // STEPS, q_st, rows, K, reads)
        if NORM:
            of_one_key, of_one_query = _inverse_norm(key), _inverse_norm(query)
            if GATED == CHANNEL:
                key *= of_one_key
                query *= of_one_query
            else:
                of_key *= of_one_key
                of_query *= of_one_query
        tl.store(dk + n * H * K + rows, of_key.to(dk.dtype.element_ty), mask=rows < K)
        tl.store(dq + n // STEPS * H * K + rows, of_query.to(dq.dtype.element_ty), mask=(rows < K) & reads)
        of_query *= query
        if GATED == SCALAR:
            of_gate += tl.where(index == i, sum_over(of_query, 0), 0.0)
        if GATED == CHANNEL:
            behind += of_query - key * (a + read)
            found = tl.where(_row(g, n, g_st, rows, K, True) <= GATE_MIN, 0.0, behind)
            tl.store(dg + ((b * T + n) * H + h) * K + rows, found.to(dg.dtype.element_ty), mask=rows < K)
        if ERASES:
            to = dbeta + ((b * T + n) * H + h) * K + rows
            tl.store(to, (-key * to_read).to(dbeta.dtype.element_ty), mask=rows < K)
    zeros = tl.zeros([C], tl.float32)
    for tile in tl.static_range(0 if ERASES else TILES):
        found = of_beta if tile == 0 else zeros
        if GATED == CHANNEL:
            to = dbeta + ((tile * (heads // H) + b) * T + start + index) * H + h
            tl.store(to, found.to(dbeta.dtype.element_ty), mask=index < length)
        else:
            tile_size = (n_chunks * C).to(tl.int64) * heads
            to = dbeta + tile * tile_size + (row * n_chunks + c) * C + index
            tl.store(to, found)
            if GATED == SCALAR:
                tl.store(to + TILES * tile_size, of_gate if tile == 0 else zeros)
                tl.store(to + 2 * TILES * tile_size, zeros)
    tl.debug_barrier()  # the rows are read before they are written over


@triton.jit(do_not_specialize=["T", "H", "n_chunks", "before", "count", "held", "groups"])
def exact_grads(
    q, k, v, beta, g, do, exact, entering, leaving, scratch, dq, dk, dv, dbeta, dg, table, q_sb, q_st, q_sh, k_sb, k_st,
    k_sh, v_sb, v_st, v_sh, beta_sb, beta_st, beta_sh, g_sb, g_st, g_sh, do_sb, do_st, do_sh, T, H, n_chunks, before,
    count, held, groups, scale, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    TILES: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr,
    NORM: tl.constexpr, ERASES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dq, dk and dv of `count` chunks behind those `before`; entering and leaving S^T [B H, held, V, K].

    NORM: q and k are divided by their norms, and so are the dq and dk of these, but with a gate a channel.

    With a gate a channel also dg [B, T, H, K] and dbeta [TILES, B, T, H], all but the first zeros; else dbeta is
    `parts` of `grads`, with as many tiles, zeros likewise. ERASES: beta and dbeta are [B, T, H, K], as in
    `exact.exact_forward`; keys that read are beta k, and dbeta is -k B.

    dk is the difference of the rows A = beta D' e and B = S y, where e, y, S (decayed) and D' (before y) are as `exact`
    has them. A gate's gradient is that of the gate behind it, decayed, and q dq - v dv, or for each channel
    q dq - k (A + B): behind the last it is the product of the states.

    A program does one group of chunks in so many as there are programs. Rows of a chunk are in `scratch` of its own.
    """
    begin(PDL)
    heads = groups // ((count + GROUP_OF_CHUNKS - 1) // GROUP_OF_CHUNKS)
    rows_of_chunk = scratch + tl.program_id(0).to(tl.int64) * C * (3 * K + 2 * BV)
    for group in range(tl.program_id(0), groups, tl.num_programs(0)):
        row = (group % heads).to(tl.int64)
        c0 = group // heads * GROUP_OF_CHUNKS
        some = c0 + tl.arange(0, GROUP_OF_CHUNKS)
        flags = tl.load(exact + row * n_chunks + before + some, mask=some < count, other=0)
        some_are = tl.max(flags, axis=0)
        for c in range(before + c0, before + tl.where(some_are != 0, tl.minimum(c0 + GROUP_OF_CHUNKS, count), c0)):
            if tl.load(exact + row * n_chunks + c) != 0:
                _chunk(
                    q, k, v, beta, g, do, entering, leaving, rows_of_chunk, dq, dk, dv, dbeta, dg, table, q_sb, q_st,
                    q_sh, k_sb, k_st, k_sh, v_sb, v_st, v_sh, beta_sb, beta_st, beta_sh, g_sb, g_st, g_sh, do_sb, do_st,
                    do_sh, row, c, row * held + c - before, heads, T, H, n_chunks, scale, K, BK, V, BV, C, TILES, GATED,
                    PACKED, GROUP, STEPS, NORM, ERASES,
                )  # fmt: skip
