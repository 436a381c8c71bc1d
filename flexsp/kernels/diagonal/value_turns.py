"""The gradient of turns by which tokens rotate the state's columns, from those of values, of outputs and of states.

What a token turns, it turns for itself and for all later tokens. That is the same as turning back the state that it
finds. So the gradient is a sum over the later tokens of the same segment, and what the state at the segment's right
edge tells, <S, J dS> (docs/math.md, section 18). No rounding is carried from segment to segment.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.pairs import load_pairs
from flexsp.kernels.primitives import chunk_info
from flexsp.runtime.launch import begin

__all__ = ["value_turns_kernel"]

_TURN = tl.constexpr(6.283185307179586)


@triton.jit
def _across_columns(S, dS, p0, K: tl.constexpr, V: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr):
    """<S, J dS> of pairs of columns from p0 on, [BP], of states K x V. J turns pairs of columns by a quarter."""
    found = tl.zeros([BP], tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        one, two = load_pairs(S + k * V, k < K, p0, 0, V, BP, False)
        d_one, d_two = load_pairs(dS + k * V, k < K, p0, 0, V, BP, False)
        found += tl.sum(two * d_one - one * d_two, axis=0)
    return found


@triton.jit
def value_turns_kernel(
    v, dv, o, do, states, dstates, ended, dfinal, turns, table, v_sb, v_st, v_sh, do_sb, do_st, do_sh,
    T, H, n_seg, n_chunks, per_seg,
    K: tl.constexpr, V: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    FINAL: tl.constexpr, PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """turns [B, T, H, S] fp32, the gradients of turns, in turns of 2 pi: of one segment and BP pairs of columns.

    o are the outputs as the forward pass left them, and do [B, T, H, V] their gradient; dv is that of v. states,
    dstates [B, n_seg + 1, H, K, V]: at the edges of segments. ended, dfinal [N, H, K, V] (FINAL): the final states of
    packed documents and their gradients.
    """
    begin(PDL)
    p0 = tl.program_id(0) * BP
    row = tl.program_id(1).to(tl.int64)
    b, h = row // H, row % H
    seg = tl.program_id(2)
    v += b * v_sb + h * v_sh
    do += b * do_sb + h * do_sh
    p = p0 + tl.arange(0, BP)
    c0 = seg * per_seg
    c1 = tl.minimum(c0 + per_seg, n_chunks)
    slot = ((b * (n_seg + 1) + seg + 1) * H + h) * K * V
    carried = _across_columns(states + slot, dstates + slot, p0, K, V, BP, BK)
    for n in range(c0, c1):
        start, length, doc, first, last = chunk_info(table, c1 - 1 - (n - c0), T, C, PACKED)
        if PACKED:  # noqa: SIM102 (a constexpr, then a value)
            if last:
                carried = tl.zeros([BP], tl.float32)
                if FINAL:
                    at_doc = (doc.to(tl.int64) * H + h) * K * V
                    carried = _across_columns(ended + at_doc, dfinal + at_doc, p0, K, V, BP, BK)
        i = tl.arange(0, C)
        there = i < length
        at = (b * T + start + i) * H + h
        x1, x2 = load_pairs(v + (start + i) * v_st, there, p0, 0, V, BP, False)
        u1, u2 = load_pairs(dv + at * V, there, p0, 0, V, BP, False)
        found = u2 * x1 - u1 * x2
        x1, x2 = load_pairs(o + at * V, there, p0, 0, V, BP, False)
        u1, u2 = load_pairs(do + (start + i) * do_st, there, p0, 0, V, BP, False)
        found -= u2 * x1 - u1 * x2
        later = tl.cumsum(found, axis=0, reverse=True) + carried[None, :]
        tl.store(turns + at[:, None] * S + p[None, :], later * _TURN, mask=there[:, None] & (p < S)[None, :])
        carried += tl.sum(found, axis=0)
