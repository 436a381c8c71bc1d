"""What the delta engine makes of a chunk before any state is known: its gates, and the inverse of I + G.

G_ij = k_i . k_j e^{b_i - b_j} beta_j below the diagonal, with the cumulative gates b (docs/math.md, section 7).
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.alike_keys import dithered, size_of_inverse
from flexsp.kernels.delta.tokens import load_tokens, of_gates
from flexsp.kernels.primitives import GATE_MIN, LOG2E, chunk_info, load_rows, mm, power, store_rows
from flexsp.runtime.launch import begin

_BLOCK = tl.constexpr(4)
_MANY = tl.constexpr(128)
_PART = tl.constexpr(32)


@triton.jit
def sum_over(x, axis: tl.constexpr):
    """The sum of products x, which must not be fused with the first addition between lanes: each lane would round the
    other's product and not its own, and all must hold the same sum. `+ 0.0` is fused instead."""
    return tl.sum(x + 0.0, axis=axis)


@triton.jit
def mm_of_keys(a, b, DOT: tl.constexpr, PREC: tl.constexpr):
    """a b, summed over keys: fp32 of many has too many operands in registers, so parts of them are side by side."""
    M: tl.constexpr = a.shape[0]
    K: tl.constexpr = a.shape[1]
    N: tl.constexpr = b.shape[1]
    if tl.float32 == DOT and K > _MANY:
        x = tl.permute(tl.reshape(a.to(DOT), [M, K // _PART, _PART]), (1, 0, 2))
        y = tl.reshape(b.to(DOT), [K // _PART, _PART, N])
        return tl.sum(tl.dot(x, y, input_precision=PREC), axis=0)
    else:
        return mm(a, b, DOT, PREC)


@triton.jit
def load_numbers(base, stride_t, length, C: tl.constexpr):
    """One number a token of a chunk [C], zero outside."""
    rows = tl.arange(0, C)
    return tl.load(base + rows * stride_t, mask=rows < length, other=0.0)


@triton.jit
def _blocks(x, lower, C: tl.constexpr, N: tl.constexpr):
    """Blocks [C / N, N, N] on the diagonal of x [C, C]; if `lower` those left of them."""
    m = tl.arange(0, C // N)
    of = m[:, None] - 1 if lower else m[:, None]
    chosen = (of == m[None, :])[:, None, :, None]
    return tl.sum(tl.where(chosen, tl.reshape(x, [C // N, N, C // N, N]), 0.0), axis=2)


@triton.jit
def _every_second(x, odd: tl.constexpr, PAIRS: tl.constexpr, N: tl.constexpr):
    """The even, or the odd, matrices of x [2 PAIRS, N, N]."""
    chosen = (tl.arange(0, 2) == odd)[None, :, None, None]
    return tl.sum(tl.where(chosen, tl.reshape(x, [PAIRS, 2, N, N]), 0.0), axis=1)


@triton.jit
def _substituted(x, COUNT: tl.constexpr, N: tl.constexpr):
    """Inverses of I + x, for matrices x [COUNT, N, N] that are zero on and above the diagonal."""
    i = tl.arange(0, N)[None, :, None]
    j = tl.arange(0, N)[None, None, :]
    turned = tl.permute(x, (0, 2, 1))
    found = tl.where(i == j, 1.0, 0.0) + tl.zeros([COUNT, N, N], tl.float32)
    for row in tl.static_range(1, N):
        left = tl.sum(tl.where(j == row, turned, 0.0), axis=2)
        new = sum_over(left[:, :, None] * found, 1)
        found = tl.where(i == row, found - new[:, None, :], found)
    return found


@triton.jit
def _product(a, b, N: tl.constexpr):
    """Products of matrices [.., N, N] in fp32."""
    if N < 16:
        return sum_over(a[:, :, :, None] * b[:, None, :, :], 2)
    else:
        return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _joined(a, b, d, PAIRS: tl.constexpr, N: tl.constexpr):
    """[[a, 0], [b, d]] of matrices [PAIRS, N, N]."""
    lower = (tl.arange(0, 2) == 1)[None, :, None, None, None]
    right = (tl.arange(0, 2) == 1)[None, None, None, :, None]
    a = a[:, None, :, None, :]
    b = b[:, None, :, None, :]
    d = d[:, None, :, None, :]
    whole = tl.where(lower, tl.where(right, d, b), tl.where(right, 0.0, a))
    return tl.reshape(whole, [PAIRS, 2 * N, 2 * N])


@triton.jit
def _merged(found, x, C: tl.constexpr, N: tl.constexpr):
    """Inverses of blocks of 2 N, from those of blocks of N and x."""
    PAIRS: tl.constexpr = C // (2 * N)
    a = _every_second(found, 0, PAIRS, N)
    d = _every_second(found, 1, PAIRS, N)
    b = _every_second(_blocks(x, True, C, N), 1, PAIRS, N)
    return _joined(a, -_product(d, _product(b, a, N), N), d, PAIRS, N)


@triton.jit
def unit_inverse(x, C: tl.constexpr):
    """Inverse of I + x, for x [C, C] that is zero on and above the diagonal; in fp32 throughout.

    Blocks of 4 by substitution, then [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]].
    """
    LEVELS: tl.constexpr = 2 if C == 16 else 3 if C == 32 else 4
    found = _substituted(_blocks(x, False, C, _BLOCK), C // _BLOCK, _BLOCK)
    for level in tl.static_range(LEVELS):
        found = _merged(found, x, C, _BLOCK << level)
    return tl.reshape(found, [C, C])


@triton.jit
def store_gain(gain, at, found, x, length, C: tl.constexpr):
    """The sum of squares of the inverse's entries below the diagonal, see `exact`; larger where keys are alike."""
    every = tl.sum(found * found)  # not along rows, where lanes would round each other's squares as `sum_over` has it
    tl.store(gain + at, size_of_inverse(every - C, tl.sum(x * x), length))


@triton.jit
def store_inverse(to, found, C: tl.constexpr):
    """An inverse [C, C] to `to`, dithered where that is bfloat16."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if to.dtype.element_ty == tl.bfloat16:
        found = dithered(found, i, j)
    tl.store(to + i * C + j, found.to(to.dtype.element_ty))


@triton.jit(do_not_specialize=["T", "H"])
def wy_inverse(
    k, beta, g, inverse, chunk_beta, gates, bounds, gain, table, k_sb, k_st, k_sh, beta_sb, beta_st, beta_sh,
    g_sb, g_st, g_sh, T, H, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr,
    BOUNDS: tl.constexpr, GAIN: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
    GROUP: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """M^-1 [B H, chunks, C, C] of M = I + G, and as [B H, chunks, C] beta and gates, log2 of e^b.

    GAIN: also gain [B H, chunks], as `store_gain` has it.

    BOUNDS: also bounds [B H, 2, chunks], log2 of how the chunk changes a state at most, and of how it makes one grow
    at most; a token changes it by no more than e^g max(1, |1 - beta |k|^2|).

    Rows past a chunk's length repeat its last gate.
    """
    begin(PDL)
    row = tl.program_id(1).to(tl.int64)
    b = row // H
    h = row % H
    start, length, doc, first, last = chunk_info(table, tl.program_id(0), T, C, PACKED)
    at = row * tl.num_programs(0) + tl.program_id(0)
    i = tl.arange(0, C)
    kc = load_rows(k + b * k_sb + h // GROUP * k_sh + start * k_st, k_st, length, 0, C, K, BK)
    given = load_numbers(beta + b * beta_sb + h * beta_sh + start * beta_st, beta_st, length, C).to(tl.float32)
    tl.store(chunk_beta + at * C + i, given)
    x = mm_of_keys(kc, tl.trans(kc), DOT, PREC)
    squares = tl.sum(tl.where(i[:, None] == i[None, :], x, 0.0), axis=1)
    x = x * given[None, :]
    below = i[:, None] > i[None, :]
    if GATED:
        token, there = of_gates(start, length, C, STEPS)
        g += b * g_sb + h * g_sh + start // STEPS * g_st
        gate = tl.load(g + token * g_st, mask=there, other=0.0).to(gates.dtype.element_ty)
        gate = tl.maximum(gate, GATE_MIN, propagate_nan=tl.PropagateNan.ALL)
        total = tl.cumsum(gate * LOG2E, axis=0)
        tl.store(gates + at * C + i, total)
        if BOUNDS:
            growth = tl.maximum(tl.abs(1.0 - given * squares), 1.0, propagate_nan=tl.PropagateNan.ALL)
            most = (gate * LOG2E).to(tl.float32) + tl.log2(growth)
            to = bounds + row * 2 * tl.num_programs(0) + tl.program_id(0)
            tl.store(to, tl.sum(most, axis=0))
            tl.store(to + tl.num_programs(0), tl.sum(tl.maximum(most, 0.0, propagate_nan=tl.PropagateNan.ALL), axis=0))
        x = x * power(tl.where(below, total[:, None] - total[None, :], float("-inf")))
    else:
        x = tl.where(below, x, 0.0)
    found = unit_inverse(x, C)
    if GAIN:
        store_gain(gain, at, found, x, length, C)
    store_inverse(inverse + at * C * C, found, C)


@triton.jit(do_not_specialize=["T", "H"])
def wy_transform(
    q, k, v, inverse, chunk_beta, gates, u, w, scores, table, q_sb, q_st, q_sh, k_sb, k_st, k_sh, v_sb, v_st, v_sh, T,
    H, scale, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    GATED: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, GROUP: tl.constexpr,
    STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """U = M^-1 V [B H, chunks, C, V] and W = M^-1 e^b K [B H, chunks, C, K], with M^-1 of `wy_inverse`; and scores
    scale q_i . k_j e^{b_i - b_j} beta_j of queries and keys not after them, [B H, chunks, C, C].
    """
    begin(PDL)
    row = tl.program_id(1).to(tl.int64)
    b = row // H
    h = row % H
    start, length, doc, first, last = chunk_info(table, tl.program_id(0), T, C, PACKED)
    at = row * tl.num_programs(0) + tl.program_id(0)
    i = tl.arange(0, C)
    found = tl.load(inverse + at * C * C + i[:, None] * C + i[None, :])
    qc = load_tokens(q + b * q_sb + h // GROUP * q_sh, q_st, start, length, 0, C, K, BK, STEPS)
    kc = load_rows(k + b * k_sb + h // GROUP * k_sh + start * k_st, k_st, length, 0, C, K, BK)
    x = mm_of_keys(qc, tl.trans(kc), DOT, PREC) * (tl.load(chunk_beta + at * C + i) * scale)[None, :]
    until = i[:, None] >= i[None, :]
    if GATED:
        total = tl.load(gates + at * C + i)
        x = x * power(tl.where(until, total[:, None] - total[None, :], float("-inf")))
        kc = (kc * power(total)[:, None]).to(DOT)
    else:
        x = tl.where(until, x, 0.0)
    tl.store(scores + at * C * C + i[:, None] * C + i[None, :], x.to(scores.dtype.element_ty))
    store_rows(w + at * C * K, mm(found, kc, DOT, PREC), K, C, 0, C, K, BK)
    for v0 in range(0, V, BV):
        vc = load_rows(v + b * v_sb + h * v_sh + start * v_st, v_st, length, v0, C, V, BV)
        store_rows(u + at * C * V, mm(found, vc, DOT, PREC), V, C, v0, C, V, BV)
