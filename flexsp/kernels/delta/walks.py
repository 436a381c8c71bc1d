"""Walks of the delta engine over the chunks of a segment, with the state in registers.

A chunk leaves the state e^{b_C} S + K^T (beta e^{b_C - b} N), with errors N = U - W S: U, W and the cumulative
gates b come from `prepare`. States are held transposed, [BV, BK >= K], so they enter products from
registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.primitives import (
    chunk_info,
    load_rows,
    load_state,
    mm,
    power,
    store_columns,
    store_state,
)
from flexsp.runtime.launch import begin

HORIZON = tl.constexpr(-104.0 * 1.4426950408889634)  # log2 of a decay that fp32 cannot hold
_MANY = tl.constexpr(128)


@triton.jit
def load_gates(gates, chunk, C: tl.constexpr, GATED: tl.constexpr):
    """Cumulative log2 decay [C] of a chunk, and its last value; zeros where nothing decays."""
    if GATED:
        b = tl.load(gates + chunk * C + tl.arange(0, C))
        end = tl.load(gates + chunk * C + C - 1)
    else:
        b = tl.zeros([C], tl.float32)
        end = 0.0
    return b, end


@triton.jit
def within_horizon(bounds, n_chunks, c0, c1, REVERSE: tl.constexpr):
    """Of a segment's chunks c0 to c1: how many to walk, the nearest to its end (to its start if REVERSE), since what
    comes from beyond them decays below 2^-150; and whether the segment's matrix does not (docs/math.md, section 3).

    bounds [2, chunks]: log2 of how a chunk changes a state at most, and of how it makes one grow at most.
    """
    walked = 0
    total = 0.0
    for block in range(0, c1 - c0, _MANY):
        i = block + tl.arange(0, _MANY)
        c = c0 + i if REVERSE else c1 - 1 - i
        inside = i < c1 - c0
        nearer = tl.load(bounds + (c - 1 if REVERSE else c + 1), mask=inside & (i > 0), other=0.0)
        growth = tl.load(bounds + n_chunks + c, mask=inside, other=0.0)
        reached = total + tl.cumsum(nearer, axis=0)
        gone = reached + growth <= HORIZON
        walked = tl.maximum(walked, tl.max(tl.where(inside & ~gone, i + 1, 0), axis=0))
        total += tl.sum(nearer, axis=0)
    last = c1 - 1 if REVERSE else c0
    total += tl.load(bounds + last, mask=c1 > c0, other=0.0)
    return walked, ~(total <= HORIZON)


@triton.jit
def _scores(qc, kc, b, later, scale, length, DOT: tl.constexpr, PREC: tl.constexpr, GATED: tl.constexpr):
    """scale k q^T decayed, zero where a query is before its key: [keys, queries]."""
    if length >= 0:  # always; Triton splits a product in a branch over all warps (see ARCHITECTURE.md, "Walks")
        x = mm(kc, tl.trans(qc), DOT, PREC)
        if GATED:
            x = x * (power(tl.where(later, b[None, :] - b[:, None], float("-inf"))) * scale)
        else:
            x = tl.where(later, x * scale, 0.0)
        x = x.to(DOT)
    else:
        x = tl.zeros([kc.shape[0], kc.shape[0]], DOT)
    return x


@triton.jit
def _errors(S, uc, wc, DOT: tl.constexpr, PREC: tl.constexpr):
    """N^T = U^T - S^T W^T, [BV, C]."""
    return tl.trans(uc).to(tl.float32) - mm(S, tl.trans(wc), DOT, PREC)


@triton.jit
def _after(S, kc, errors, beta, b, end, DOT: tl.constexpr, PREC: tl.constexpr, GATED: tl.constexpr):
    """The state after a chunk."""
    if GATED:
        S = S * power(end)
        beta = beta * power(end - b)
    return S + mm(errors * beta[None, :], kc, DOT, PREC)


@triton.jit(do_not_specialize=["T", "H", "n_seg", "n_chunks", "per_seg"])
def summarize(
    k, strengths, u, w, gates, bounds, states, boundary, A, alive, table, k_sb, k_st, k_sh, T, H,
    n_seg, n_chunks, per_seg, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    BOUNDARY: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """What each segment leaves of a state of zeros, into the slot behind it, and its matrix A [B, n_seg, H, K, K].

    Programs beyond the panels of the state's columns walk the unit matrix, with values of zeros: what it becomes is A.
    """
    begin(PDL)
    panel, row, seg = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    panels: tl.constexpr = (V + BV - 1) // BV
    of_state = panel < panels
    v0 = (panel if of_state else panel - panels) * BV
    b = row // H
    h = row % H
    k += b * k_sb + h * k_sh
    slot = states + ((b * (n_seg + 1) + seg) * H + h) * K * V
    unit = (v0 + tl.arange(0, BV))[:, None] == tl.arange(0, BK)[None, :]
    S = tl.where(unit & (not of_state), 1.0, 0.0)
    c0 = seg * per_seg
    c1 = tl.minimum(c0 + per_seg, n_chunks)
    n0 = c0
    if GATED:
        walked, lives = within_horizon(bounds + row * 2 * n_chunks, n_chunks, c0, c1, False)
        tl.store(alive + (b * n_seg + seg) * H + h, lives.to(tl.int32), mask=panel == 0)
        n0 = c1 - walked if of_state else c0 if lives else c1
        S = tl.where(lives, S, 0.0)
    for c in range(n0, c1):
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        at = row * n_chunks + c
        if PACKED:  # noqa: SIM102 (a constexpr, then a value)
            if first:
                S = tl.zeros([BV, BK], tl.float32)
                if BOUNDARY:
                    S = load_state(boundary + (doc * H + h) * K * V, 0, v0, of_state, K, V, BK, BV, True)
        bc, end = load_gates(gates, at, C, GATED)
        strength = tl.load(strengths + at * C + tl.arange(0, C))
        kc = load_rows(k + start * k_st, k_st, length, 0, C, K, BK)
        uc = load_rows(u + at * C * V, V, C if of_state else 0, v0, C, V, BV)
        wc = load_rows(w + at * C * K, K, C, 0, C, K, BK)
        errors = _errors(S, uc, wc, DOT, PREC)
        S = _after(S, kc, errors, strength, bc, end, DOT, PREC, GATED)
    if of_state:
        store_state(slot + H * K * V, S, 0, v0, True, K, V, BK, BV, True)
        if seg == 0:
            edge = tl.zeros([BV, BK], tl.float32)
            if BOUNDARY and not PACKED:
                edge = load_state(boundary + row * K * V, 0, v0, True, K, V, BK, BV, True)
            store_state(slot, edge, 0, v0, True, K, V, BK, BV, True)
    else:
        store_state(A + ((b * n_seg + seg) * H + h) * K * K, S, 0, v0, True, K, K, BK, BV, True)


@triton.jit(do_not_specialize=["T", "H", "n_seg", "n_chunks", "per_seg"])
def output(
    q, k, strengths, u, w, gates, o, states, initial, final, table, q_sb, q_st, q_sh, k_sb, k_st, k_sh, T, H, n_seg, n_chunks, per_seg, scale,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, ENTERS: tl.constexpr,
    BOUNDARY: tl.constexpr, LEAVES: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr,
    PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """o = scale (tril(q k^T . E) beta N + e^b q S)."""
    begin(PDL)
    v0, row, seg = tl.program_id(0) * BV, tl.program_id(1).to(tl.int64), tl.program_id(2)
    b = row // H
    h = row % H
    q += b * q_sb + h * q_sh
    k += b * k_sb + h * k_sh
    rows = tl.arange(0, C)
    later = rows[None, :] >= rows[:, None]
    S = tl.zeros([BV, BK], tl.float32)
    if ENTERS:
        S = load_state(states + ((b * (n_seg + 1) + seg) * H + h) * K * V, 0, v0, True, K, V, BK, BV, True)
    elif BOUNDARY and not PACKED:
        S = load_state(initial + row * K * V, 0, v0, True, K, V, BK, BV, True)
    for c in range(seg * per_seg, tl.minimum((seg + 1) * per_seg, n_chunks)):
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        at = row * n_chunks + c
        if PACKED:  # noqa: SIM102 (a constexpr, then a value)
            if first:
                S = tl.zeros([BV, BK], tl.float32)
                if BOUNDARY:
                    S = load_state(initial + (doc * H + h) * K * V, 0, v0, True, K, V, BK, BV, True)
        bc, end = load_gates(gates, at, C, GATED)
        strength = tl.load(strengths + at * C + tl.arange(0, C))
        kc = load_rows(k + start * k_st, k_st, length, 0, C, K, BK)
        uc = load_rows(u + at * C * V, V, C, v0, C, V, BV)
        wc = load_rows(w + at * C * K, K, C, 0, C, K, BK)
        qc = load_rows(q + start * q_st, q_st, length, 0, C, K, BK)
        scores = _scores(qc, kc, bc, later, scale, length, DOT, PREC, GATED)
        oc = mm(S, tl.trans(qc), DOT, PREC) * (power(bc) * scale)[None, :]
        errors = _errors(S, uc, wc, DOT, PREC)
        oc += mm(errors * strength[None, :], scores, DOT, PREC)
        S = _after(S, kc, errors, strength, bc, end, DOT, PREC, GATED)
        store_columns(o + ((b * T + start) * H + h) * V, oc, H * V, length, v0, C, V, BV)
        if PACKED and LEAVES:
            store_state(final + (doc * H + h) * K * V, S, 0, v0, last, K, V, BK, BV, True)
    if LEAVES and not PACKED:
        store_state(final + row * K * V, S, 0, v0, seg == n_seg - 1, K, V, BK, BV, True)


@triton.jit(do_not_specialize=["T", "H", "n_seg", "n_chunks", "per_seg"])
def states(
    k, strengths, u, w, gates, kept_errors, states, initial, entering, table, k_sb, k_st, k_sh, T,
    H, n_seg, n_chunks, per_seg,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, ENTERS: tl.constexpr,
    BOUNDARY: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The state that enters each chunk, transposed: entering [B H, chunks, V, K]; and its errors N^T [.., V, C]."""
    begin(PDL)
    v0, row, seg = tl.program_id(0) * BV, tl.program_id(1).to(tl.int64), tl.program_id(2)
    b = row // H
    h = row % H
    k += b * k_sb + h * k_sh
    S = tl.zeros([BV, BK], tl.float32)
    if ENTERS:
        S = load_state(states + ((b * (n_seg + 1) + seg) * H + h) * K * V, 0, v0, True, K, V, BK, BV, True)
    elif BOUNDARY and not PACKED:
        S = load_state(initial + row * K * V, 0, v0, True, K, V, BK, BV, True)
    for c in range(seg * per_seg, tl.minimum((seg + 1) * per_seg, n_chunks)):
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        at = row * n_chunks + c
        if PACKED:  # noqa: SIM102 (a constexpr, then a value)
            if first:
                S = tl.zeros([BV, BK], tl.float32)
                if BOUNDARY:
                    S = load_state(initial + (doc * H + h) * K * V, 0, v0, True, K, V, BK, BV, True)
        bc, end = load_gates(gates, at, C, GATED)
        strength = tl.load(strengths + at * C + tl.arange(0, C))
        kc = load_rows(k + start * k_st, k_st, length, 0, C, K, BK)
        uc = load_rows(u + at * C * V, V, C, v0, C, V, BV)
        wc = load_rows(w + at * C * K, K, C, 0, C, K, BK)
        errors = _errors(S, uc, wc, DOT, PREC)
        store_state(entering + at * V * K, S, v0, 0, True, V, K, BV, BK)
        store_state(kept_errors + at * V * C, errors, v0, 0, True, V, C, BV, C)
        S = _after(S, kc, errors, strength, bc, end, DOT, PREC, GATED)


@triton.jit
def _before(
    dS, qc, kc, wc, doc_, beta, b, end, scale, later, length, DOT: tl.constexpr, PREC: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Gradients of the state before a chunk, and of its errors [BV, C]; doc_ [C, BV] is that of its outputs."""
    scores = _scores(qc, kc, b, later, scale, length, DOT, PREC, GATED)
    dN = mm(dS, tl.trans(kc), DOT, PREC)
    given = tl.trans(doc_)
    if GATED:
        dN = dN * power(end - b)[None, :]
        weighted = given.to(tl.float32) * (power(b) * scale)[None, :]
        dS = dS * power(end)
    else:
        weighted = given.to(tl.float32) * scale
    dN += mm(given, tl.trans(scores), DOT, PREC)
    dN = dN * beta[None, :]
    dS += mm(weighted, qc, DOT, PREC)
    dS -= mm(dN, wc, DOT, PREC)
    return dS, dN


@triton.jit(do_not_specialize=["T", "H", "n_seg", "n_chunks", "per_seg"])
def collect(
    q, k, do, strengths, w, gates, bounds, dstates, boundary, table, q_sb, q_st, q_sh, k_sb, k_st, k_sh, do_sb, do_st, do_sh,
    T, H, n_seg, n_chunks, per_seg, scale,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, BOUNDARY: tl.constexpr,
    GATED: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What each segment adds to the gradient of the state that enters it, into its slot of dstates."""
    begin(PDL)
    v0, row, seg = tl.program_id(0) * BV, tl.program_id(1).to(tl.int64), tl.program_id(2)
    b = row // H
    h = row % H
    q += b * q_sb + h * q_sh
    k += b * k_sb + h * k_sh
    do += b * do_sb + h * do_sh
    rows = tl.arange(0, C)
    later = rows[None, :] >= rows[:, None]
    slot = dstates + ((b * (n_seg + 1) + seg) * H + h) * K * V
    dS = tl.zeros([BV, BK], tl.float32)
    c0 = seg * per_seg
    c1 = tl.minimum(c0 + per_seg, n_chunks)
    if GATED:
        walked, lives = within_horizon(bounds + row * 2 * n_chunks, n_chunks, c0, c1, True)
        c1 = c0 + walked
    for n in range(c0, c1):
        c = c1 - 1 - (n - c0)
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        at = row * n_chunks + c
        if PACKED:  # noqa: SIM102 (a constexpr, then a value)
            if last:
                dS = tl.zeros([BV, BK], tl.float32)
                if BOUNDARY:
                    dS = load_state(boundary + (doc * H + h) * K * V, 0, v0, True, K, V, BK, BV, True)
        bc, end = load_gates(gates, at, C, GATED)
        strength = tl.load(strengths + at * C + tl.arange(0, C))
        qc = load_rows(q + start * q_st, q_st, length, 0, C, K, BK)
        kc = load_rows(k + start * k_st, k_st, length, 0, C, K, BK)
        oc = load_rows(do + start * do_st, do_st, length, v0, C, V, BV)
        wc = load_rows(w + at * C * K, K, C, 0, C, K, BK)
        dS, dN = _before(dS, qc, kc, wc, oc, strength, bc, end, scale, later, length, DOT, PREC, GATED)
        if PACKED:
            dS = tl.where(first, 0.0, dS)
    store_state(slot, dS, 0, v0, True, K, V, BK, BV, True)
    if seg == n_seg - 1:
        edge = tl.zeros([BV, BK], tl.float32)
        if BOUNDARY and not PACKED:
            edge = load_state(boundary + row * K * V, 0, v0, True, K, V, BK, BV, True)
        store_state(slot + H * K * V, edge, 0, v0, True, K, V, BK, BV, True)


@triton.jit(do_not_specialize=["T", "H", "n_seg", "n_chunks", "per_seg"])
def back(
    q, k, do, strengths, w, gates, derrors, dstates, dfinal, dinitial, leaving, table, q_sb, q_st, q_sh, k_sb, k_st, k_sh,
    do_sb, do_st, do_sh, T, H, n_seg, n_chunks, per_seg, scale,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, ENTERS: tl.constexpr,
    BOUNDARY: tl.constexpr, LEAVES: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr,
    PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gradients of the errors, [B H, chunks, V, C], and of the state that leaves each chunk, transposed: [.., V, K]."""
    begin(PDL)
    v0, row, seg = tl.program_id(0) * BV, tl.program_id(1).to(tl.int64), tl.program_id(2)
    b = row // H
    h = row % H
    q += b * q_sb + h * q_sh
    k += b * k_sb + h * k_sh
    do += b * do_sb + h * do_sh
    rows = tl.arange(0, C)
    later = rows[None, :] >= rows[:, None]
    dS = tl.zeros([BV, BK], tl.float32)
    if ENTERS:
        dS = load_state(dstates + ((b * (n_seg + 1) + seg + 1) * H + h) * K * V, 0, v0, True, K, V, BK, BV, True)
    elif BOUNDARY and not PACKED:
        dS = load_state(dfinal + row * K * V, 0, v0, True, K, V, BK, BV, True)
    c1 = tl.minimum((seg + 1) * per_seg, n_chunks)
    for n in range(seg * per_seg, c1):
        c = c1 - 1 - (n - seg * per_seg)
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        at = row * n_chunks + c
        if PACKED:  # noqa: SIM102 (a constexpr, then a value)
            if last:
                dS = tl.zeros([BV, BK], tl.float32)
                if BOUNDARY:
                    dS = load_state(dfinal + (doc * H + h) * K * V, 0, v0, True, K, V, BK, BV, True)
        store_state(leaving + at * V * K, dS, v0, 0, True, V, K, BV, BK)
        bc, end = load_gates(gates, at, C, GATED)
        strength = tl.load(strengths + at * C + tl.arange(0, C))
        qc = load_rows(q + start * q_st, q_st, length, 0, C, K, BK)
        kc = load_rows(k + start * k_st, k_st, length, 0, C, K, BK)
        oc = load_rows(do + start * do_st, do_st, length, v0, C, V, BV)
        wc = load_rows(w + at * C * K, K, C, 0, C, K, BK)
        dS, dN = _before(dS, qc, kc, wc, oc, strength, bc, end, scale, later, length, DOT, PREC, GATED)
        store_state(derrors + at * V * C, dN, v0, 0, True, V, C, BV, C)
        if PACKED:
            if LEAVES:
                store_state(dinitial + (doc * H + h) * K * V, dS, 0, v0, first, K, V, BK, BV, True)
            dS = tl.where(first, 0.0, dS)
    if LEAVES and not PACKED:
        store_state(dinitial + row * K * V, dS, 0, v0, seg == 0, K, V, BK, BV, True)
