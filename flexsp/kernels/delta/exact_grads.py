"""Gradients of chunks of the segments that `exact` does token by token."""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.delta.exact import GROUP_OF_CHUNKS, _decay, _decayed, _number, _row
from flexsp.kernels.delta.walks import CHANNEL, SCALAR
from flexsp.kernels.primitives import GATE_MIN, chunk_info, load_rows, load_state, store_rows
from flexsp.runtime.launch import begin


@triton.jit
def _put(tile, i, row):
    """tile [C, N] with its row i."""
    return tl.where((tl.arange(0, tile.shape[0]) == i)[:, None], row[None, :], tile)


@triton.jit
def _get(tile, i):
    return tl.sum(tl.where((tl.arange(0, tile.shape[0]) == i)[:, None], tile, 0.0), axis=0)


@triton.jit(do_not_specialize=["T", "H", "n_chunks", "before", "count", "held"])
def exact_grads(
    q, k, v, beta, g, do, exact, entering, leaving, dq, dk, dv, dbeta, dg, table, q_sb, q_st, q_sh, k_sb, k_st, k_sh,
    v_sb, v_st, v_sh, beta_sb, beta_st, beta_sh, g_sb, g_st, g_sh, do_sb, do_st, do_sh, T, H, n_chunks, before, count,
    held, scale, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    TILES: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """dq, dk and dv of `count` chunks behind those `before`, a few chunks a program; entering and leaving S^T
    [B H, held, V, K].

    With a gate a channel also dg [B, T, H, K] and dbeta [TILES, B, T, H], all but the first zeros; else dbeta is
    `parts` of `grads`, with as many tiles, zeros likewise.

    With D of the token behind it, a gate's gradient is D + q dq - v dv, summed over channels, and for each channel
    D + q dq - k (beta D' e + S y), where D' and S are as the module has them: dk is the difference of the last two.
    """
    begin(PDL)
    row = tl.program_id(1).to(tl.int64)
    b = row // H
    h = row % H
    c0 = tl.program_id(0) * GROUP_OF_CHUNKS
    some = c0 + tl.arange(0, GROUP_OF_CHUNKS)
    flags = tl.load(exact + row * n_chunks + before + some, mask=some < count, other=0)
    if tl.max(flags, axis=0) == 0:
        return
    q += b * q_sb + h // GROUP * q_sh
    k += b * k_sb + h // GROUP * k_sh
    v += b * v_sb + h * v_sh
    do += b * do_sb + h * do_sh
    beta += b * beta_sb + h * beta_sh
    g += b * g_sb + h * g_sh
    dq += (b * (T // STEPS) * H + h) * K
    rows = tl.arange(0, BK)
    cols = tl.arange(0, BV)
    index = tl.arange(0, C)
    for c in range(before + c0, before + tl.minimum(c0 + GROUP_OF_CHUNKS, count)):
        at, place = row * n_chunks + c, row * held + c - before
        if tl.load(exact + at) != 0:
            start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
            errors = tl.zeros([C, BV], tl.float32)
            S = tl.trans(load_state(entering + place * V * K, 0, 0, True, V, K, BV, BK))
            for i in range(0, length):
                n = start + i
                S = _decayed(S, _decay(g, n, g_st, rows, True, K, GATED, STEPS), GATED)
                kn = _row(k, n, k_st, rows, K, True)
                error = _row(v, n, v_st, cols, V, True) - tl.sum(S * kn[:, None], axis=0)
                S += kn[:, None] * (error * _number(beta, n, beta_st, True))[None, :]
                errors = _put(errors, i, error)

            of_values = tl.zeros([C, BV], tl.float32)
            of_keys = tl.zeros([C, BK], tl.float32)
            of_beta = tl.zeros([C], tl.float32)
            of_gate = tl.zeros([C], tl.float32)
            dS = tl.trans(load_state(leaving + place * V * K, 0, 0, True, V, K, BV, BK))
            for j in range(0, length):
                i = length - 1 - j
                n = start + i
                kn = _row(k, n, k_st, rows, K, True)
                bn = _number(beta, n, beta_st, True)
                reads = n % STEPS == STEPS - 1
                of_output = _row(do, n // STEPS, do_st, cols, V, reads) * scale
                dS += _row(q, n // STEPS, q_st, rows, K, reads)[:, None] * of_output[None, :]
                error = _get(errors, i)
                p = tl.sum(dS * kn[:, None], axis=0)
                of_beta = tl.where(index == i, tl.sum(p * error, axis=0), of_beta)
                of_keys = _put(of_keys, i, tl.sum(dS * error[None, :], axis=1) * bn)
                of_values = _put(of_values, i, p * bn)
                if GATED == SCALAR:
                    of_gate -= tl.where(index == i, tl.sum(_row(v, n, v_st, cols, V, True) * p * bn, axis=0), 0.0)
                dS -= kn[:, None] * (p * bn)[None, :]
                dS = _decayed(dS, _decay(g, n, g_st, rows, True, K, GATED, STEPS), GATED)
            store_rows(dv + ((b * T + start) * H + h) * V, of_values, H * V, length, 0, C, V, BV)

            of_gates = of_keys
            if GATED == CHANNEL:
                of_gates = -of_keys * load_rows(k + start * k_st, k_st, length, 0, C, K, BK).to(tl.float32)
            S = tl.trans(load_state(entering + place * V * K, 0, 0, True, V, K, BV, BK))
            for i in range(0, length):
                n = start + i
                S = _decayed(S, _decay(g, n, g_st, rows, True, K, GATED, STEPS), GATED)
                kn = _row(k, n, k_st, rows, K, True)
                read = tl.sum(S * _get(of_values, i)[None, :], axis=1)
                of_keys -= tl.where((index == i)[:, None], read[None, :], 0.0)
                error = _row(v, n, v_st, cols, V, True) - tl.sum(S * kn[:, None], axis=0)
                S += kn[:, None] * (error * _number(beta, n, beta_st, True))[None, :]
                reads = n % STEPS == STEPS - 1
                found = tl.sum(S * _row(do, n // STEPS, do_st, cols, V, reads)[None, :], axis=1) * scale
                to = dq + n // STEPS * H * K + rows
                tl.store(to, found.to(dq.dtype.element_ty), mask=(rows < K) & reads)
                qn = _row(q, n // STEPS, q_st, rows, K, reads)
                if GATED == SCALAR:
                    of_gate += tl.where(index == i, tl.sum(found * qn, axis=0), 0.0)
                if GATED == CHANNEL:
                    of_gates += tl.where((index == i)[:, None], (found * qn - kn * read)[None, :], 0.0)
            store_rows(dk + ((b * T + start) * H + h) * K, of_keys, H * K, length, 0, C, K, BK)

            both = S * tl.trans(load_state(leaving + place * V * K, 0, 0, True, V, K, BV, BK))
            if GATED == CHANNEL:
                of_gates = tl.cumsum(of_gates, axis=0, reverse=True) + tl.sum(both, axis=1)[None, :]
                given = load_rows(g + start * g_st, g_st, length, 0, C, K, BK).to(tl.float32)
                to = dg + ((b * T + start) * H + h) * K
                store_rows(to, tl.where(given < GATE_MIN, 0.0, of_gates), H * K, length, 0, C, K, BK)
                to = dbeta + (b * T + start + index) * H + h
                for tile in tl.static_range(TILES):
                    skipped = tl.num_programs(1).to(tl.int64) * T * tile
                    found = of_beta if tile == 0 else tl.zeros([C], tl.float32)
                    tl.store(to + skipped, found.to(dbeta.dtype.element_ty), mask=index < length)
            else:
                to = dbeta + at * C + index
                tile_size = (n_chunks * C).to(tl.int64) * tl.num_programs(1)
                for tile in tl.static_range(TILES):
                    zeros = tl.zeros([C], tl.float32)
                    tl.store(to + tile * tile_size, of_beta if tile == 0 else zeros)
                    if GATED == SCALAR:
                        end = tl.where(index == length - 1, tl.sum(tl.sum(both, axis=1), axis=0), 0.0)
                        tl.store(to + (TILES + tile) * tile_size, of_gate + end if tile == 0 else zeros)
                        tl.store(to + (2 * TILES + tile) * tile_size, zeros)
