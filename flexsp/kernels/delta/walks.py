"""Walks of the delta engine over the chunks of a segment, with the state in registers.

A chunk leaves the state e^{b_C} S + K^T (beta e^{b_C - b} N), with v_new N = U - W S: U, W, beta, the scores of
queries and the cumulative gates b come from `wy_inverse` and `wy_transform`. Where each channel has a gate, keys and
queries come from `channel_scores`, decayed and with beta and scale in them. A state of 64 columns or more is held
transposed, [BV, BK], so that it enters products from registers; narrower ones are not, since products have 64 rows at
least. All that has the state's columns is held likewise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.delta.tokens import load_tokens, store_tokens, store_turned_tokens
from flexsp.kernels.delta.wy_transform import mm_of_keys
from flexsp.kernels.primitives import chunk_info, load_rows, load_state, mm, power, store_state
from flexsp.runtime.launch import begin

HORIZON = tl.constexpr(-104.0 * 1.4426950408889634)  # log2 of a decay that fp32 cannot hold
_MANY = tl.constexpr(128)
_TURNED = tl.constexpr(64)
_LONG = tl.constexpr(128)
NONE = tl.constexpr(0)
SCALAR = tl.constexpr(1)
CHANNEL = tl.constexpr(2)
"""What decays a state, GATED below: nothing, a gate a token, a gate a token and key channel. In all kernels of the
engine GROUP: so many heads in a row have the same queries and keys; STEPS: a token has so many keys (`tokens`)."""


@triton.jit
def load_gates(gates, chunk, C: tl.constexpr, GATED: tl.constexpr):
    """Cumulative log2 decay [C] of a chunk, and its last value; zeros where no gate is that of a token."""
    if GATED == SCALAR:
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
def begins(table, c0, c1):
    """Whether a document begins in one of the chunks c0 to c1: what was before does not pass them, be it NaN."""
    found = 0
    for block in range(c0, c1, _MANY):
        c = block + tl.arange(0, _MANY)
        found += tl.sum(tl.load(table + c * 5 + 3, mask=c < c1, other=0), axis=0)
    return found != 0


@triton.jit(do_not_specialize=["H", "n_seg", "n_chunks", "per_seg"])
def horizons(
    bounds, transition_nonzero, chunks_within_horizon, table, H, n_seg, n_chunks, per_seg, GATED: tl.constexpr,
    PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`within_horizon` of every segment: transition_nonzero [B, n_seg, H], and chunks_within_horizon [2, B H, n_seg]
    forward and backward."""
    begin(PDL)
    row, seg = tl.program_id(0).to(tl.int64), tl.program_id(1)
    bounds += row * 2 * n_chunks
    c0 = seg * per_seg
    c1 = tl.minimum(c0 + per_seg, n_chunks)
    near, far, lives = c1 - c0, c1 - c0, c1 >= c0
    if GATED:
        near, lives = within_horizon(bounds, n_chunks, c0, c1, False)
        far, same = within_horizon(bounds, n_chunks, c0, c1, True)
    if PACKED:
        lives = lives & ~begins(table, c0, c1)
    tl.store(transition_nonzero + (row // H * n_seg + seg) * H + row % H, lives.to(tl.int32))
    tl.store(chunks_within_horizon + row * n_seg + seg, near)
    tl.store(chunks_within_horizon + (tl.num_programs(0) + row) * n_seg + seg, far)


# A state, or what has its columns: [BV, N], or [N, BV] where it is narrow


@triton.jit
def _turned(x):
    """[BV, N] of [N, BV] in memory, where states are held transposed."""
    return tl.trans(x) if x.shape[1] >= _TURNED else x


@triton.jit
def _by_token(x, BV: tl.constexpr):
    """A number a token [C], to multiply with."""
    return x[None, :] if BV >= _TURNED else x[:, None]


@triton.jit
def _state(base, v0, when, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    return load_state(base, 0, v0, when, K, V, BK, BV, BV >= _TURNED)


@triton.jit
def _zeros(BK: tl.constexpr, BV: tl.constexpr):
    return tl.zeros([BV, BK] if BV >= _TURNED else [BK, BV], tl.float32)


@triton.jit
def _put_state(base, S, v0, when, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    store_state(base, S, 0, v0, when, K, V, BK, BV, BV >= _TURNED)


@triton.jit
def _keep(base, x, v0, V: tl.constexpr, BV: tl.constexpr, N: tl.constexpr, BN: tl.constexpr):
    """Stores it transposed, [V, N]."""
    store_state(base, x, v0, 0, True, V, N, BV, BN, BV < _TURNED)


@triton.jit
def _put_tokens(
    base, x, stride, start, length, v0, C: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, STEPS: tl.constexpr
):  # fmt: skip
    if BV >= _TURNED:
        store_turned_tokens(base, x, stride, start, length, v0, C, V, BV, STEPS)
    else:
        store_tokens(base, x, stride, start, length, v0, C, V, BV, STEPS)


@triton.jit
def _read(S, rows, BV: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr):
    """rows [C, K] of the state."""
    return mm(S, tl.trans(rows), DOT, PREC) if BV >= _TURNED else mm_of_keys(rows, S, DOT, PREC)


@triton.jit
def _written(x, rows, BV: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr):
    """rows^T x, as it is added to a state, for rows [C, K] or [C, C]."""
    return mm(x, rows, DOT, PREC) if BV >= _TURNED else mm(tl.trans(rows), x, DOT, PREC)


@triton.jit
def _scores(base, length, C: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr):
    """Scores [C, C] of a chunk. Beside long rows and decays of channels there is no room to copy them ahead, which a
    branch prevents."""
    i = tl.arange(0, C)
    place = base + i[:, None] * C + i[None, :]
    if BK > _LONG and GATED == CHANNEL:
        found = tl.zeros([C, C], base.dtype.element_ty)
        if length >= 0:  # always
            found = tl.load(place)
    else:
        found = tl.load(place)
    return found


@triton.jit
def _keys(
    base, start, stride_t, length, chunk, C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr,
    STEPS: tl.constexpr = 1,
):  # fmt: skip
    """Keys [C, K] of a chunk, or queries of STEPS keys each."""
    if GATED == CHANNEL:
        rows = load_rows(base + chunk * C * K, K, C, 0, C, K, BK)
    else:
        rows = load_tokens(base, stride_t, start, length, 0, C, K, BK, STEPS)
    return rows


@triton.jit
def _beta(chunk_beta, chunk, C: tl.constexpr, GATED: tl.constexpr):
    """The beta of each token, in fp32; with gates of channels it is in the keys."""
    if GATED == CHANNEL:
        found = tl.full([C], 1.0, tl.float32)
    else:
        found = tl.load(chunk_beta + chunk * C + tl.arange(0, C))
    return found


@triton.jit
def _gates(gates, chunk, C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr):
    """As `load_gates`; with gates of channels what is left of each [BK], in place of the last value."""
    if GATED == CHANNEL:
        rows = tl.arange(0, BK)
        b = tl.zeros([C], tl.float32)
        end = tl.load(gates + chunk * K + rows, mask=rows < K, other=0.0)
    else:
        b, end = load_gates(gates, chunk, C, GATED)
    return b, end


@triton.jit
def _decayed(S, end, BV: tl.constexpr, GATED: tl.constexpr):
    """The state after a chunk that writes nothing."""
    if GATED == CHANNEL:
        S = S * (end[None, :] if BV >= _TURNED else end[:, None])
    elif GATED == SCALAR:
        S = S * power(end)
    return S


@triton.jit
def _v_new(S, uc, wc, BV: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr):
    """U - W S."""
    return _turned(uc).to(tl.float32) - _read(S, wc, BV, DOT, PREC)


@triton.jit
def _after(
    S, kc, v_new, beta, b, end, BV: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """The state after a chunk."""
    S = _decayed(S, end, BV, GATED)
    if GATED == SCALAR:
        beta = beta * power(end - b)
    if GATED != CHANNEL:
        v_new = v_new * _by_token(beta, BV)
    return S + _written(v_new, kc, BV, DOT, PREC)


@triton.jit(do_not_specialize=["T", "H", "n_seg", "n_chunks", "per_seg"])
def summarize(
    k, chunk_beta, u, w, gates, bounds, states, boundary, A, transition_nonzero, table, k_sb, k_st, k_sh, T, H, n_seg,
    n_chunks, per_seg, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    BOUNDARY: tl.constexpr, NONZERO: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr,
    PREC: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr,
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
    k += b * k_sb + h // GROUP * k_sh
    slot = states + ((b * (n_seg + 1) + seg) * H + h) * K * V
    unit = _turned((v0 + tl.arange(0, BV))[None, :] == tl.arange(0, BK)[:, None])
    S = tl.where(unit & (not of_state), 1.0, 0.0)
    c0 = seg * per_seg
    c1 = tl.minimum(c0 + per_seg, n_chunks)
    n0 = c0
    if NONZERO:
        walked, lives = c1 - c0, c1 >= c0
        if GATED == SCALAR:
            walked, lives = within_horizon(bounds + row * 2 * n_chunks, n_chunks, c0, c1, False)
        if PACKED:
            lives = lives & ~begins(table, c0, c1)
        tl.store(transition_nonzero + (b * n_seg + seg) * H + h, lives.to(tl.int32), mask=panel == 0)
        n0 = c1 - walked if of_state else c0 if lives else c1
        S = tl.where(lives, S, 0.0)
    for c in range(n0, c1):
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        at = row * n_chunks + c
        if PACKED:  # noqa: SIM102 (a constexpr, then a value)
            if first:
                S = _zeros(BK, BV)
                if BOUNDARY:
                    S = _state(boundary + (doc * H + h) * K * V, v0, of_state, K, V, BK, BV)
        bc, end = _gates(gates, at, C, K, BK, GATED)
        beta = _beta(chunk_beta, at, C, GATED)
        kc = _keys(k, start, k_st, length, at, C, K, BK, GATED)
        uc = load_rows(u + at * C * V, V, C if of_state else 0, v0, C, V, BV)
        wc = load_rows(w + at * C * K, K, C, 0, C, K, BK)
        v_new = _v_new(S, uc, wc, BV, DOT, PREC)
        S = _after(S, kc, v_new, beta, bc, end, BV, DOT, PREC, GATED)
    if of_state:
        _put_state(slot + H * K * V, S, v0, True, K, V, BK, BV)
        if seg == 0:
            edge = _zeros(BK, BV)
            if BOUNDARY and not PACKED:
                edge = _state(boundary + row * K * V, v0, True, K, V, BK, BV)
            _put_state(slot, edge, v0, True, K, V, BK, BV)
    else:
        _put_state(A + ((b * n_seg + seg) * H + h) * K * K, S, v0, True, K, K, BK, BV)


@triton.jit(do_not_specialize=["T", "H", "n_seg", "n_chunks", "per_seg"])
def output(
    q, k, chunk_beta, u, w, scores, gates, o, states, initial, final, table, q_sb, q_st, q_sh, k_sb, k_st, k_sh, T, H,
    n_seg, n_chunks, per_seg, scale,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, ENTERS: tl.constexpr,
    BOUNDARY: tl.constexpr, LEAVES: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr,
    PREC: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """o = scores N + scale e^b q S."""
    begin(PDL)
    v0, row, seg = tl.program_id(0) * BV, tl.program_id(1).to(tl.int64), tl.program_id(2)
    b = row // H
    h = row % H
    q += b * q_sb + h // GROUP * q_sh
    k += b * k_sb + h // GROUP * k_sh
    S = _zeros(BK, BV)
    if ENTERS:
        S = _state(states + ((b * (n_seg + 1) + seg) * H + h) * K * V, v0, True, K, V, BK, BV)
    elif BOUNDARY and not PACKED:
        S = _state(initial + row * K * V, v0, True, K, V, BK, BV)
    for c in range(seg * per_seg, tl.minimum((seg + 1) * per_seg, n_chunks)):
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        at = row * n_chunks + c
        if PACKED:  # noqa: SIM102 (a constexpr, then a value)
            if first:
                S = _zeros(BK, BV)
                if BOUNDARY:
                    S = _state(initial + (doc * H + h) * K * V, v0, True, K, V, BK, BV)
        bc, end = _gates(gates, at, C, K, BK, GATED)
        beta = _beta(chunk_beta, at, C, GATED)
        kc = _keys(k, start, k_st, length, at, C, K, BK, GATED)
        uc = load_rows(u + at * C * V, V, C, v0, C, V, BV)
        wc = load_rows(w + at * C * K, K, C, 0, C, K, BK)
        qc = _keys(q, start, q_st, length, at, C, K, BK, GATED, STEPS)
        oc = _read(S, qc, BV, DOT, PREC)
        if GATED != CHANNEL:
            oc = oc * _by_token(power(bc) * scale, BV)
        v_new = _v_new(S, uc, wc, BV, DOT, PREC)
        pc = _scores(scores + at * C * C, length, C, BK, GATED)
        oc += _written(v_new, tl.trans(pc), BV, DOT, PREC)
        S = _after(S, kc, v_new, beta, bc, end, BV, DOT, PREC, GATED)
        _put_tokens(o + (b * (T // STEPS) * H + h) * V, oc, H * V, start, length, v0, C, V, BV, STEPS)
        if PACKED and LEAVES:
            _put_state(final + (doc * H + h) * K * V, S, v0, last, K, V, BK, BV)
    if LEAVES and not PACKED:
        _put_state(final + row * K * V, S, v0, seg == n_seg - 1, K, V, BK, BV)


@triton.jit(do_not_specialize=["T", "H", "n_seg", "n_chunks", "per_seg"])
def chunk_states(
    k, chunk_beta, u, w, gates, kept_v_new, states, initial, entering, table, k_sb, k_st, k_sh, T, H, n_seg, n_chunks,
    per_seg, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    ENTERS: tl.constexpr, BOUNDARY: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr,
    PREC: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The state that enters each chunk, transposed: entering [B H, chunks, V, K]; and v_new N^T [.., V, C]."""
    begin(PDL)
    v0, row, seg = tl.program_id(0) * BV, tl.program_id(1).to(tl.int64), tl.program_id(2)
    b = row // H
    h = row % H
    k += b * k_sb + h // GROUP * k_sh
    S = _zeros(BK, BV)
    if ENTERS:
        S = _state(states + ((b * (n_seg + 1) + seg) * H + h) * K * V, v0, True, K, V, BK, BV)
    elif BOUNDARY and not PACKED:
        S = _state(initial + row * K * V, v0, True, K, V, BK, BV)
    for c in range(seg * per_seg, tl.minimum((seg + 1) * per_seg, n_chunks)):
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        at = row * n_chunks + c
        if PACKED:  # noqa: SIM102 (a constexpr, then a value)
            if first:
                S = _zeros(BK, BV)
                if BOUNDARY:
                    S = _state(initial + (doc * H + h) * K * V, v0, True, K, V, BK, BV)
        bc, end = _gates(gates, at, C, K, BK, GATED)
        beta = _beta(chunk_beta, at, C, GATED)
        kc = _keys(k, start, k_st, length, at, C, K, BK, GATED)
        uc = load_rows(u + at * C * V, V, C, v0, C, V, BV)
        wc = load_rows(w + at * C * K, K, C, 0, C, K, BK)
        v_new = _v_new(S, uc, wc, BV, DOT, PREC)
        _keep(entering + at * V * K, S, v0, V, BV, K, BK)
        _keep(kept_v_new + at * V * C, v_new, v0, V, BV, C, C)
        S = _after(S, kc, v_new, beta, bc, end, BV, DOT, PREC, GATED)


@triton.jit
def _before(
    dS, qc, kc, wc, pc, of_outputs, beta, b, end, scale, BV: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Gradients of the state before a chunk, and of v_new; of_outputs [C, BV] is that of its outputs."""
    given = _turned(of_outputs)
    dN = _read(dS, kc, BV, DOT, PREC)
    if GATED == CHANNEL:
        weighted = given
    else:
        weighted = given.to(tl.float32) * _by_token(power(b) * scale, BV)
        if GATED == SCALAR:
            beta = beta * power(end - b)
        dN = dN * _by_token(beta, BV)
    dN += _written(given, pc, BV, DOT, PREC)
    dS = _decayed(dS, end, BV, GATED)
    dS += _written(weighted, qc, BV, DOT, PREC)
    dS -= _written(dN, wc, BV, DOT, PREC)
    return dS, dN


@triton.jit(do_not_specialize=["T", "H", "n_seg", "n_chunks", "per_seg"])
def summarize_backward(
    q, k, do, chunk_beta, w, scores, gates, bounds, dstates, boundary, table, q_sb, q_st, q_sh, k_sb, k_st, k_sh,
    do_sb, do_st, do_sh, T, H, n_seg, n_chunks, per_seg, scale,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, BOUNDARY: tl.constexpr,
    GATED: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, GROUP: tl.constexpr,
    STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What each segment adds to the gradient of the state that enters it, into its slot of dstates."""
    begin(PDL)
    v0, row, seg = tl.program_id(0) * BV, tl.program_id(1).to(tl.int64), tl.program_id(2)
    b = row // H
    h = row % H
    q += b * q_sb + h // GROUP * q_sh
    k += b * k_sb + h // GROUP * k_sh
    do += b * do_sb + h * do_sh
    slot = dstates + ((b * (n_seg + 1) + seg) * H + h) * K * V
    dS = _zeros(BK, BV)
    c0 = seg * per_seg
    c1 = tl.minimum(c0 + per_seg, n_chunks)
    if GATED == SCALAR:
        walked, lives = within_horizon(bounds + row * 2 * n_chunks, n_chunks, c0, c1, True)
        c1 = c0 + walked
    for n in range(c0, c1):
        c = c1 - 1 - (n - c0)
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        at = row * n_chunks + c
        if PACKED:  # noqa: SIM102 (a constexpr, then a value)
            if last:
                dS = _zeros(BK, BV)
                if BOUNDARY:
                    dS = _state(boundary + (doc * H + h) * K * V, v0, True, K, V, BK, BV)
        bc, end = _gates(gates, at, C, K, BK, GATED)
        beta = _beta(chunk_beta, at, C, GATED)
        qc = _keys(q, start, q_st, length, at, C, K, BK, GATED, STEPS)
        kc = _keys(k, start, k_st, length, at, C, K, BK, GATED)
        oc = load_tokens(do, do_st, start, length, v0, C, V, BV, STEPS)
        wc = load_rows(w + at * C * K, K, C, 0, C, K, BK)
        pc = _scores(scores + at * C * C, length, C, BK, GATED)
        dS, dN = _before(dS, qc, kc, wc, pc, oc, beta, bc, end, scale, BV, DOT, PREC, GATED)
        if PACKED:
            dS = tl.where(first, 0.0, dS)
    _put_state(slot, dS, v0, True, K, V, BK, BV)
    if seg == n_seg - 1:
        edge = _zeros(BK, BV)
        if BOUNDARY and not PACKED:
            edge = _state(boundary + row * K * V, v0, True, K, V, BK, BV)
        _put_state(slot + H * K * V, edge, v0, True, K, V, BK, BV)


@triton.jit(do_not_specialize=["T", "H", "n_seg", "n_chunks", "per_seg"])
def output_backward(
    q, k, do, chunk_beta, w, scores, gates, dv_new, dstates, dfinal, dinitial, leaving, table, q_sb, q_st, q_sh,
    k_sb, k_st, k_sh, do_sb, do_st, do_sh, T, H, n_seg, n_chunks, per_seg, scale,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, ENTERS: tl.constexpr,
    BOUNDARY: tl.constexpr, LEAVES: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr,
    PREC: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gradients of v_new, [B H, chunks, V, C], and of the state that leaves each chunk, transposed: [.., V, K]."""
    begin(PDL)
    v0, row, seg = tl.program_id(0) * BV, tl.program_id(1).to(tl.int64), tl.program_id(2)
    b = row // H
    h = row % H
    q += b * q_sb + h // GROUP * q_sh
    k += b * k_sb + h // GROUP * k_sh
    do += b * do_sb + h * do_sh
    dS = _zeros(BK, BV)
    if ENTERS:
        dS = _state(dstates + ((b * (n_seg + 1) + seg + 1) * H + h) * K * V, v0, True, K, V, BK, BV)
    elif BOUNDARY and not PACKED:
        dS = _state(dfinal + row * K * V, v0, True, K, V, BK, BV)
    c1 = tl.minimum((seg + 1) * per_seg, n_chunks)
    for n in range(seg * per_seg, c1):
        c = c1 - 1 - (n - seg * per_seg)
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        at = row * n_chunks + c
        if PACKED:  # noqa: SIM102 (a constexpr, then a value)
            if last:
                dS = _zeros(BK, BV)
                if BOUNDARY:
                    dS = _state(dfinal + (doc * H + h) * K * V, v0, True, K, V, BK, BV)
        _keep(leaving + at * V * K, dS, v0, V, BV, K, BK)
        bc, end = _gates(gates, at, C, K, BK, GATED)
        beta = _beta(chunk_beta, at, C, GATED)
        qc = _keys(q, start, q_st, length, at, C, K, BK, GATED, STEPS)
        kc = _keys(k, start, k_st, length, at, C, K, BK, GATED)
        oc = load_tokens(do, do_st, start, length, v0, C, V, BV, STEPS)
        wc = load_rows(w + at * C * K, K, C, 0, C, K, BK)
        pc = _scores(scores + at * C * C, length, C, BK, GATED)
        dS, dN = _before(dS, qc, kc, wc, pc, oc, beta, bc, end, scale, BV, DOT, PREC, GATED)
        _keep(dv_new + at * V * C, dN, v0, V, BV, C, C)
        if PACKED:
            if LEAVES:
                _put_state(dinitial + (doc * H + h) * K * V, dS, v0, first, K, V, BK, BV)
            dS = tl.where(first, 0.0, dS)
    if LEAVES and not PACKED:
        _put_state(dinitial + row * K * V, dS, v0, seg == 0, K, V, BK, BV)
