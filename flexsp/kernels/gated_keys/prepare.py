"""Before the walks: gated queries and keys of every chunk, and its scores."""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.gated_keys.tiles import far_apart, half, last_row, running_gates, up_to_last_large
from flexsp.kernels.primitives import chunk_info, load_rows, mm, store_rows
from flexsp.runtime.launch import begin


@triton.jit(do_not_specialize=["T", "H"])
def gate_keys_small(
    q, k, g, b, gated_q, gated_k, scores, small_gates, table, q_sb, q_st, q_sh, k_sb, k_st, k_sh, g_sb, g_st, g_sh, T,
    H, K: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """q e^{b_i}, k e^{b_C - b_i} and sum_d q_id k_jd e^{b_id - b_jd} for j <= i, of running gates b of a chunk.

    A chunk a program, its channels in blocks of BN. Queries and keys are decayed by way of half of what a chunk's gates
    add up to. Of b [chunks, C, K] the last row is left, which walks read. `small_gates` [chunks] says where gates are
    small enough for that: elsewhere `gate_keys` leaves all anew.
    """
    begin(PDL)
    c = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    batch, h = row // H, row % H
    chunk = row * tl.num_programs(0) + c
    start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
    q += batch * q_sb + h * q_sh + start * q_st
    k += batch * k_sb + h * k_sh + start * k_st
    g += batch * g_sb + h * g_sh + start * g_st
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    pairs = tl.zeros([C, C], tl.float32)
    far = 0
    for at in range(0, K, BN):
        cols = at + tl.arange(0, BN)
        own = running_gates(g, g_st, length, at, C, K, BN)
        end = last_row(own, C)
        far += far_apart(end)
        tl.store(b + (chunk * C + C - 1) * K + cols, end, mask=cols < K)
        beyond = own - 0.5 * end[None, :]
        rest = tl.exp(0.5 * end)[None, :]
        x = load_rows(q, q_st, length, at, C, K, BN).to(tl.float32)
        y = load_rows(k, k_st, length, at, C, K, BN).to(tl.float32)
        own_pair = tl.sum(x * y + 0.0, axis=1)  # so that all lanes round alike
        x *= tl.exp(beyond)
        y *= tl.exp(-beyond)
        store_rows(gated_q + chunk * C * K, x * rest, K, C, at, C, K, BN)
        store_rows(gated_k + chunk * C * K, y * rest, K, C, at, C, K, BN)
        pairs += tl.where(i > j, mm(x, tl.trans(y), DOT, PREC), tl.where(i == j, own_pair[:, None], 0.0))
    tl.store(scores + chunk * C * C + i * C + j, pairs.to(scores.dtype.element_ty))
    tl.store(small_gates + chunk, tl.where(far == 0, 1, 0))


@triton.jit
def _gate_chunk(
    q, k, g, b, gated_q, gated_k, scores, q_st, k_st, g_st, length, K: tl.constexpr, BN: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    pairs = tl.zeros([C, C], tl.float32)
    for at in range(0, K, BN):
        cols = at + tl.arange(0, BN)
        own = running_gates(g, g_st, length, at, C, K, BN)
        end = last_row(own, C)
        store_rows(b, own, K, C, at, C, K, BN)
        tl.debug_barrier()  # `half` reads sums of gates that other threads stored
        qc = load_rows(q, q_st, length, at, C, K, BN)
        kc = load_rows(k, k_st, length, at, C, K, BN)
        store_rows(gated_q, qc * tl.exp(own), K, C, at, C, K, BN)
        store_rows(gated_k, kc * tl.exp(end[None, :] - own), K, C, at, C, K, BN)
        pairs += tl.where(i == j, tl.sum(qc.to(tl.float32) * kc.to(tl.float32) + 0.0, axis=1)[:, None], 0.0)
        for level in range(0, LEVELS):
            x, _decay, _second = half(qc, kc, own, b, level, cols, C, K)
            apart = ((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) > (j >> level))
            pairs += tl.where(apart, mm(x, tl.trans(x), DOT, PREC), 0.0)
    tl.store(scores + i * C + j, pairs.to(scores.dtype.element_ty))


@triton.jit(do_not_specialize=["T", "H", "n_chunks"])
def gate_keys(
    q, k, g, b, gated_q, gated_k, scores, small_gates, table, q_sb, q_st, q_sh, k_sb, k_st, k_sh, g_sb, g_st, g_sh, T,
    H, n_chunks, K: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, RUN: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `gate_keys_small`, for any gates, of those chunks whose gates are not small: a program has RUN of them. With
    RUN = 1 of all chunks.

    Pairs are decayed by way of the row between two halves, as in `scores_kernel`. All rows of b are left, which
    gradients read.
    """
    begin(PDL)
    row = tl.program_id(1).to(tl.int64)
    batch, h = row // H, row % H
    at = tl.program_id(0) * RUN
    todo = up_to_last_large(small_gates + row * n_chunks, at, n_chunks, RUN)
    for n in range(todo):
        c = at + n
        chunk = row * n_chunks + c
        if up_to_last_large(small_gates + row * n_chunks, c, c + 1, RUN) > 0:
            start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
            _gate_chunk(
                q + batch * q_sb + h * q_sh + start * q_st, k + batch * k_sb + h * k_sh + start * k_st,
                g + batch * g_sb + h * g_sh + start * g_st, b + chunk * C * K, gated_q + chunk * C * K,
                gated_k + chunk * C * K, scores + chunk * C * C, q_st, k_st, g_st, length, K, BN, C, LEVELS, DOT, PREC,
            )  # fmt: skip
