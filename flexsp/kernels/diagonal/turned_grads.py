"""The gradient of the angles by which the caller has turned the pairs of queries' and keys' channels.

Mamba-3 turns both by running sums of angles, and states by these lie in the frame that the sums begin in. A token's own
angle then has the gradient <dq, J q> + <dk, J k>, where J turns pairs by a quarter, and an angle that is added to a sum
has that of all later tokens. Of these sums little is left: where a token reads what another wrote, both turn, and their
parts cancel. Products of rounded rows and states do not cancel as exact ones do. What is left over would grow with the
number of later tokens (a random walk), and a sum over angles would add that up.

So the parts of a chunk are made to add up to what they add up to in exact numbers; what is missing from its sum is
shared by its tokens (`turned_grad_kernel`). By section 18 of docs/math.md that is <J S', dS'> - <J S, dS>, of the
state S and its gradient as they enter the chunk and S', dS' behind it. With what the chunk adds to both, S' = a S + W
and dS = a dS' + R, it is <J W, dS'> - <J S, R>: the walk of dq has S and R, the walk of dk has dS' and W, in fp32 and
of the very products that states are made of. So the terms of neighbouring chunks cancel to fp32 rounding, and errors of
sums over tokens are those of a chunk or two, however long the text.

Where other kernels make dq and dk, walks tell <J S, dS> of every chunk (`turn_edges_kernel`); the number of one edge
serves the chunks on both sides.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.diagonal.summarize import behind_chunk
from flexsp.kernels.pairs import load_pairs, partner_of
from flexsp.kernels.primitives import chunk_info, group_of, load_rows, load_state
from flexsp.runtime.launch import begin

_PI2 = tl.constexpr(6.283185307179586)


@triton.jit
def _store_turned(
    to, S, dS, k0, v0, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, HALVES: tl.constexpr
):
    """to [K] = rows of <J S, dS>, of S at the pointer S and the tile dS [BK, BV]: sums over these columns."""
    k = k0 + tl.arange(0, BK)
    other, second = partner_of(k, K, HALVES)
    columns = v0 + tl.arange(0, BV)[None, :]
    inside = ((k < K) & (other < K))[:, None] & (columns < V)
    turned = tl.load(S + other[:, None] * V + columns, mask=inside, other=0.0).to(tl.float32)
    by_row = tl.sum(turned * dS, axis=1)
    tl.store(to + k, tl.where(second, by_row, -by_row), mask=k < K)


@triton.jit
def turn_edges_kernel(
    q, do, gate, entering, states, dstates, dfinal, final, edges, ends, table,
    q_sb, q_st, q_sh, do_sb, do_st, do_sh, g_sb, g_sh,
    first_seg, kept, T, H, n_seg, n_chunks, per_seg, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr, GATED: tl.constexpr, HALVES: tl.constexpr,
    GROUP: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """edges [B, H, n_chunks + 1, V tiles, K]: rows of <J S, dS> as they enter each chunk and behind the last one, for
    the segments from `first_seg` on. S is `entering` [B, kept, H, K, V], which `chunk_states_kernel` left, or lies in
    `states` before the first chunk and behind the last one; dS is walked right to left as there.

    FINAL: packed documents have gradients of final states, `dfinal` [N, H, K, V]; ends [N, H, V tiles, K] are rows of
    <J S, dfinal> of those that end here, whose last states are `final`.
    """
    begin(PDL)
    tile = tl.program_id(0)
    n_v: tl.constexpr = (V + BV - 1) // BV
    v_tile = tile % n_v
    k0 = (tile // n_v) * BK
    v0 = v_tile * BV
    b = tl.program_id(1) // H
    h = (tl.program_id(1) % H).to(tl.int64)
    seg = first_seg + tl.program_id(2)
    q += b.to(tl.int64) * q_sb + group_of(h, GROUP) * q_sh
    do += b.to(tl.int64) * do_sb + h * do_sh
    gate += b.to(tl.int64) * g_sb + h * g_sh
    edges += (tl.program_id(1).to(tl.int64) * (n_chunks + 1) * n_v + v_tile) * K
    entering += h * K * V
    c0 = seg * per_seg
    c1 = tl.minimum(c0 + per_seg, n_chunks)
    slot = ((b * (n_seg + 1) + seg + 1).to(tl.int64) * H + h) * K * V
    dS = load_state(dstates + slot, k0, v0, True, K, V, BK, BV)
    if seg == n_seg - 1:
        _store_turned(edges + (h - h + n_chunks) * n_v * K, states + slot, dS, k0, v0, K, V, BK, BV, HALVES)
    for n in range(c0, c1):
        c = c1 - 1 - (n - c0)
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        if PACKED:  # noqa: SIM102 (a constexpr, then a value)
            if last:
                dS = tl.zeros([BK, BV], tl.float32)
                if FINAL:
                    at_doc = (doc * H + h).to(tl.int64)
                    dS = load_state(dfinal + at_doc * K * V, k0, v0, True, K, V, BK, BV)
                    of_doc = ends + (at_doc * n_v + v_tile) * K
                    _store_turned(of_doc, final + at_doc * K * V, dS, k0, v0, K, V, BK, BV, HALVES)
        bc, b_end = 0.0, 0.0
        if GATED:
            bc, b_end = DECAY(gate, c, C)
        qc = load_rows(q + start * q_st, q_st, length, k0, C, K, BK)
        oc = load_rows(do + start * do_st, do_st, length, v0, C, V, BV)
        dS = behind_chunk(dS, qc, oc, bc, b_end, scale, V, True, GATED, DOT, PREC)
        at = (b.to(tl.int64) * kept + c - first_seg * per_seg) * H * K * V
        _store_turned(edges + c.to(tl.int64) * n_v * K, entering + at, dS, k0, v0, K, V, BK, BV, HALVES)
        # What comes from tokens before the first one, of another rank perhaps: in fp32, as that rank has it behind its
        # last chunk. Were it rounded here, the sums of all tokens before would have the difference in them.
        if (c == 0) & (not first):
            came = states + ((b * (n_seg + 1)).to(tl.int64) * H + h) * K * V
            _store_turned(edges, came, dS, k0, v0, K, V, BK, BV, HALVES)


@triton.jit
def _of_pairs(rows, p, K: tl.constexpr, S: tl.constexpr, TILES: tl.constexpr, HALVES: tl.constexpr):
    """[BP]: sums over tiles and both channels of the pairs p, of rows [TILES, K]."""
    first = p if HALVES else 2 * p
    second = first + (K // 2 if HALVES else 1)
    total = tl.zeros(p.shape, tl.float32)
    for i in tl.static_range(TILES):
        at = rows + i * K
        total += tl.load(at + first, mask=p < S, other=0.0) + tl.load(at + second, mask=p < S, other=0.0)
    return total


@triton.jit
def turned_grad_kernel(
    q, k, dq, dk, edges, ends, to, table, q_sb, q_st, q_sh, k_sb, k_st, k_sh, T, H, n_chunks,
    K: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, C: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr,
    HALVES: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr, IN_WALKS: tl.constexpr, READ_ROWS: tl.constexpr,
    WRITTEN_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """to [B, T, G, S]: gradients of the turns by which rows of q and k [B, T, G, K] were turned, of one chunk and BP
    pairs. They add up to what `edges` and `ends` tell (see `turn_edges_kernel`) of the GROUP heads that share a row;
    IN_WALKS: to what `turn_reads` and `turn_writes` of the walks of dq and dk do, given in their place. dq, dk
    [B, T, G, K]."""
    begin(PDL)
    c = tl.program_id(0)
    G = H // GROUP
    b = (tl.program_id(1) // G).to(tl.int64)
    group = (tl.program_id(1) % G).to(tl.int64)
    start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
    shift = tl.program_id(2) * BP
    p = shift + tl.arange(0, BP)
    i = tl.arange(0, C)
    there = i < length
    at = (b * T + start + i) * G + group
    q1, q2 = load_pairs(q + b * q_sb + group * q_sh + (start + i) * q_st, there, shift, 0, K, BP, HALVES)
    u1, u2 = load_pairs(dq + at * K, there, shift, 0, K, BP, HALVES)
    found = u2 * q1 - u1 * q2
    k1, k2 = load_pairs(k + b * k_sb + group * k_sh + (start + i) * k_st, there, shift, 0, K, BP, HALVES)
    u1, u2 = load_pairs(dk + at * K, there, shift, 0, K, BP, HALVES)
    found += u2 * k1 - u1 * k2
    missing = -tl.sum(found, axis=0)
    for n in tl.static_range(GROUP):
        h = group * GROUP + n
        if IN_WALKS:
            at_chunk = (b * H + h) * n_chunks + c
            missing -= _of_pairs(edges + at_chunk * READ_ROWS, p, K, S, 1, HALVES)
            missing -= _of_pairs(ends + at_chunk * WRITTEN_ROWS, p, K, S, 1, HALVES)
        else:
            of_chunk = edges + ((b * H + h) * (n_chunks + 1) + c) * TILES * K
            missing -= _of_pairs(of_chunk, p, K, S, TILES, HALVES)
            behind = of_chunk + TILES * K
            if PACKED:
                if last:
                    if FINAL:
                        missing += _of_pairs(ends + (doc * H + h) * TILES * K, p, K, S, TILES, HALVES)
                else:
                    missing += _of_pairs(behind, p, K, S, TILES, HALVES)
            else:
                missing += _of_pairs(behind, p, K, S, TILES, HALVES)
    found += (missing / tl.maximum(length, 1).to(tl.float32))[None, :]
    tl.store(to + (at * S)[:, None] + p[None, :], _PI2 * found, mask=there[:, None] & (p < S)[None, :])
