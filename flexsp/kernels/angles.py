"""The gradient of what each token adds to the angle by which rows are turned, from those of rows and of states.

An angle that a token adds turns its own rows and those of all later tokens. That is the same as turning back the state
that the token finds. So the gradient is the sum over the later tokens of the same chunk, and of all others what the
state behind the chunk tells, -<J S, dS> (docs/math.md, section 18). No rounding is carried from chunk to chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.pairs import load_pairs
from flexsp.kernels.primitives import chunk_info
from flexsp.runtime.launch import begin


@triton.jit
def _token_sums(
    found, x, dx, x_sb, x_st, x_sh, b, h, start, there, p0, T, H, K: tl.constexpr, BP: tl.constexpr, C: tl.constexpr
):
    """found [C, BP] and <dx, J x> of every pair, of rows x and their gradients [B, T, H, K]."""
    i = start + tl.arange(0, C)
    x1, x2 = load_pairs(x + b * x_sb + h * x_sh + i * x_st, there, p0, 0, K, BP, False)
    u1, u2 = load_pairs(dx + ((b * T + i) * H + h) * K, there, p0, 0, K, BP, False)
    return found + u2 * x1 - u1 * x2


@triton.jit
def _of_state(S, dS, there, p0, K: tl.constexpr, V: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr):
    """<J S, dS> [BP] of the pairs of rows from p0 on; 0 unless `there`."""
    found = tl.zeros([BP], tl.float32)
    p = p0 + tl.arange(0, BP)
    for v0 in range(0, V, BV):
        v = v0 + tl.arange(0, BV)
        inside = (p < K // 2)[:, None] & (v < V)[None, :] & there
        at = 2 * p[:, None] * V + v[None, :]
        one = tl.load(S + at, mask=inside, other=0.0).to(tl.float32)
        two = tl.load(S + at + V, mask=inside, other=0.0).to(tl.float32)
        d_one = tl.load(dS + at, mask=inside, other=0.0).to(tl.float32)
        d_two = tl.load(dS + at + V, mask=inside, other=0.0).to(tl.float32)
        found += tl.sum(one * d_two - two * d_one, axis=1)
    return found


@triton.jit(do_not_specialize=["T", "H", "n_chunks", "n_seg"])
def angle_grads(
    x0, dx0, x1, dx1, x2, dx2, entering, leaving, states, ended, to, table, x0_sb, x0_st, x0_sh, x1_sb, x1_st, x1_sh,
    x2_sb, x2_st, x2_sh, T, H, n_chunks, n_seg,
    K: tl.constexpr, V: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, THIRD: tl.constexpr,
    SEGMENTS: tl.constexpr, PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """to [B, T, H, K/2]: of one chunk and BP pairs of channels.

    x0 to x2 are rows that were turned, dx0 to dx2 their gradients; without THIRD there are two. entering, leaving
    [B H, n_chunks, K, V]: the states that enter chunks, and the gradients of those that leave. The state that leaves
    the last chunk is the last one of `states` [B, n_seg + 1, H, K, V] if there are SEGMENTS; without, and of each
    document that ends here, it lies in `ended` [N, H, K, V].
    """
    begin(PDL)
    c = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    p0 = tl.program_id(2) * BP
    b, h = row // H, row % H
    start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
    i, p = tl.arange(0, C), p0 + tl.arange(0, BP)
    there = i < length
    found = tl.zeros([C, BP], tl.float32)
    found = _token_sums(found, x0, dx0, x0_sb, x0_st, x0_sh, b, h, start, there, p0, T, H, K, BP, C)
    found = _token_sums(found, x1, dx1, x1_sb, x1_st, x1_sh, b, h, start, there, p0, T, H, K, BP, C)
    if THIRD:
        found = _token_sums(found, x2, dx2, x2_sb, x2_st, x2_sh, b, h, start, there, p0, T, H, K, BP, C)
    behind = entering + (row * n_chunks + c + 1) * K * V
    if start + length >= T:
        if SEGMENTS:
            behind = states + ((b * (n_seg + 1) + n_seg) * H + h) * K * V
        else:
            behind = ended + row * K * V
    if PACKED:  # noqa: SIM102 (a constexpr, then a value)
        if last:
            behind = ended + (doc.to(tl.int64) * H + h) * K * V
    dS = leaving + (row * n_chunks + c) * K * V
    told = _of_state(behind, dS, length > 0, p0, K, V, BP, BV)  # slots without tokens have nothing behind them
    later = tl.cumsum(found, axis=0, reverse=True) - told[None, :]
    at = ((b * T + start + i) * H + h) * (K // 2)
    tl.store(to + at[:, None] + p[None, :], later, mask=there[:, None] & (p < K // 2)[None, :])
