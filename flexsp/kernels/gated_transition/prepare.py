"""Before the walks: gated operands and scores of every chunk, and what a chunk makes of its own tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.gated_keys.tiles import far_apart, last_row, running_gates, up_to_last_large
from flexsp.kernels.gated_transition.tiles import factors, within
from flexsp.kernels.primitives import chunk_info, load_rows, mm, store_rows
from flexsp.runtime.launch import begin


@triton.jit
def _gate_chunk(
    q, k, a, b, g, running, gated_q, gated_k, gated_a, gated_b, q_k, q_b, a_k, lower, table, q_sb, q_st, q_sh, k_sb,
    k_st, k_sh, a_sb, a_st, a_sh, b_sb, b_st, b_sh, g_sb, g_st, g_sh, T, H, c, chunk, K: tl.constexpr, BN: tl.constexpr,
    C: tl.constexpr, LEVELS: tl.constexpr, SMALL_GATES: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """One chunk; how many of its channels have gates that are not small.

    What `a` reads before a token's gate is what it would read after that of the token before: its rows are taken one
    earlier, with the same decays as those of q, and stored one later.
    """
    row = tl.program_id(1).to(tl.int64)
    batch, h = row // H, row % H
    start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
    q += batch * q_sb + h * q_sh + start * q_st
    k += batch * k_sb + h * k_sh + start * k_st
    a += batch * a_sb + h * a_sh + start * a_st
    b += batch * b_sb + h * b_sh + start * b_st
    g += batch * g_sb + h * g_sh + start * g_st
    running += chunk * C * K
    gated_q += chunk * C * K
    gated_k += chunk * C * K
    gated_a += chunk * C * K + K
    gated_b += chunk * C * K
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    of_qk = tl.zeros([C, C], tl.float32)
    of_qb = tl.zeros([C, C], tl.float32)
    of_ak = tl.zeros([C, C], tl.float32)
    of_ab = tl.zeros([C, C], tl.float32)
    far = 0
    for at in range(0, K, BN):
        cols = at + tl.arange(0, BN)
        own = running_gates(g, g_st, length, at, C, K, BN)
        end = last_row(own, C)
        far += far_apart(end)
        if SMALL_GATES:
            tl.store(running + (C - 1) * K + cols, end, mask=cols < K)
        else:
            store_rows(running, own, K, C, at, C, K, BN)
            tl.debug_barrier()
        qc = load_rows(q, q_st, length, at, C, K, BN)
        kc = load_rows(k, k_st, length, at, C, K, BN)
        ac = load_rows(a + a_st, a_st, length - 1, at, C, K, BN)
        bc = load_rows(b, b_st, length, at, C, K, BN)
        # Pairs without decay are not rounded. + 0.0, so that all lanes round alike.
        alone = tl.sum(qc.to(tl.float32) * kc.to(tl.float32) + 0.0, axis=1)[:, None]
        of_qk += tl.where(i == j, alone, 0.0)
        alone = tl.sum(qc.to(tl.float32) * bc.to(tl.float32) + 0.0, axis=1)[:, None]
        of_qb += tl.where(i == j, alone, 0.0)
        alone = tl.sum(ac.to(tl.float32) * kc.to(tl.float32) + 0.0, axis=1)[:, None]
        of_ak += tl.where(i == j, alone, 0.0)
        alone = tl.sum(ac.to(tl.float32) * bc.to(tl.float32) + 0.0, axis=1)[:, None]
        of_ab += tl.where(i == j, alone, 0.0)
        whole, left = tl.exp(own), tl.exp(end[None, :] - own)
        store_rows(gated_q, qc * whole, K, C, at, C, K, BN)
        store_rows(gated_a, ac * whole, K, C - 1, at, C, K, BN)
        first_row = tl.load(a + cols, mask=(cols < K) & (length > 0), other=0.0)
        tl.store(gated_a - K + cols, first_row, mask=cols < K)
        store_rows(gated_k, kc * left, K, C, at, C, K, BN)
        store_rows(gated_b, bc * left, K, C, at, C, K, BN)
        if SMALL_GATES:
            half = 0.5 * end[None, :]
            up, down = tl.exp(own - half), tl.exp(half - own)
            keys, writes = tl.trans((kc * down).to(DOT)), tl.trans((bc * down).to(DOT))
            reads, removes = (qc * up).to(DOT), (ac * up).to(DOT)
            of_qk += tl.where(i > j, mm(reads, keys, DOT, PREC), 0.0)
            of_qb += tl.where(i > j, mm(reads, writes, DOT, PREC), 0.0)
            of_ak += tl.where(i > j, mm(removes, keys, DOT, PREC), 0.0)
            of_ab += tl.where(i > j, mm(removes, writes, DOT, PREC), 0.0)
        else:
            for level in range(0, LEVELS):
                up, down = factors(own, running, level, cols, C, K)
                pairs = within(level, C) & (i > j)
                keys, writes = tl.trans((kc * down).to(DOT)), tl.trans((bc * down).to(DOT))
                reads, removes = (qc * up).to(DOT), (ac * up).to(DOT)
                of_qk += tl.where(pairs, mm(reads, keys, DOT, PREC), 0.0)
                of_qb += tl.where(pairs, mm(reads, writes, DOT, PREC), 0.0)
                of_ak += tl.where(pairs, mm(removes, keys, DOT, PREC), 0.0)
                of_ab += tl.where(pairs, mm(removes, writes, DOT, PREC), 0.0)
    at = chunk * C * C + i * C + j
    tl.store(q_k + at, of_qk.to(q_k.dtype.element_ty))
    tl.store(q_b + at, of_qb.to(q_b.dtype.element_ty))
    later = i + 1 < C
    tl.store(a_k + at + C, of_ak.to(a_k.dtype.element_ty), mask=later & (j >= 0))
    one = (j == i + 1) & (j < length)
    tl.store(lower + at + C, tl.where(one, 1.0, -of_ab), mask=later & (j >= 0))
    j = tl.arange(0, C)
    tl.store(a_k + chunk * C * C + j, tl.zeros([C], a_k.dtype.element_ty))
    tl.store(lower + chunk * C * C + j, tl.where((j == 0) & (length > 0), 1.0, 0.0))
    return far


@triton.jit(do_not_specialize=["T", "H"])
def gate_operands_small(
    q, k, a, b, g, running, gated_q, gated_k, gated_a, gated_b, q_k, q_b, a_k, lower, small_gates, table, q_sb, q_st,
    q_sh, k_sb, k_st, k_sh, a_sb, a_st, a_sh, b_sb, b_st, b_sh, g_sb, g_st, g_sh, T, H, K: tl.constexpr,
    BN: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A chunk's operands with their decays, and its scores; with r_i the running sum of gates, a and b of the rank one.

    q e^{r_i}, a e^{r_i - g_i}, k e^{r_C - r_i}, b e^{r_C - r_i}, and of r the last row, which walks read; scores of q
    with k and b for j <= i, sum_d q_id k_jd e^{r_id - r_jd}, and of a for j < i, with e^{r_id - g_id - r_jd}: those with
    k, and 1 less those with b, `lower`. Gates are read and summed once for all of them.

    A chunk a program, its channels in blocks of BN. Pairs are decayed by way of half of what a chunk's gates add up to.
    `small_gates` [chunks] says where gates are small enough for that: elsewhere `gate_operands` leaves all anew.
    """
    begin(PDL)
    chunk = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    far = _gate_chunk(
        q, k, a, b, g, running, gated_q, gated_k, gated_a, gated_b, q_k, q_b, a_k, lower, table, q_sb, q_st, q_sh, k_sb,
        k_st, k_sh, a_sb, a_st, a_sh, b_sb, b_st, b_sh, g_sb, g_st, g_sh, T, H, tl.program_id(0), chunk, K, BN, C, 0,
        True, PACKED, DOT, PREC,
    )  # fmt: skip
    tl.store(small_gates + chunk, tl.where(far == 0, 1, 0))


@triton.jit(do_not_specialize=["T", "H", "n_chunks"])
def gate_operands(
    q, k, a, b, g, running, gated_q, gated_k, gated_a, gated_b, q_k, q_b, a_k, lower, small_gates, table, q_sb, q_st,
    q_sh, k_sb, k_st, k_sh, a_sb, a_st, a_sh, b_sb, b_st, b_sh, g_sb, g_st, g_sh, T, H, n_chunks, K: tl.constexpr,
    BN: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, RUN: tl.constexpr, PACKED: tl.constexpr,
    DOT: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `gate_operands_small`, of those chunks whose gates are not small: a program has RUN of them.

    Pairs of the two halves of a block of rows are decayed by way of the row between (`factors`), so no exponent is
    positive. All rows of r are left, which gradients read.
    """
    begin(PDL)
    at = tl.program_id(0) * RUN
    before = tl.program_id(1).to(tl.int64) * n_chunks
    small_gates += before
    for n in range(up_to_last_large(small_gates, at, n_chunks, RUN)):
        if up_to_last_large(small_gates, at + n, at + n + 1, RUN) > 0:
            _gate_chunk(
                q, k, a, b, g, running, gated_q, gated_k, gated_a, gated_b, q_k, q_b, a_k, lower, table, q_sb, q_st,
                q_sh, k_sb, k_st, k_sh, a_sb, a_st, a_sh, b_sb, b_st, b_sh, g_sb, g_st, g_sh, T, H, at + n,
                before + at + n, K, BN, C, LEVELS, False, PACKED, DOT, PREC,
            )  # fmt: skip


@triton.jit(do_not_specialize=["T", "H"])
def solve_chunks(
    v, inverse, gated_a, a_k, u, w, table, v_sb, v_st, v_sh, T, H, K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What the rank one reads of a state that is 0 when the chunk begins, u, and what times that state, w:
    u = inverse (scores of a with k) v, w = inverse (a e^{r_i - g_i})."""
    begin(PDL)
    c = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    chunk = row * tl.num_programs(0) + c
    start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
    v += row // H * v_sb + row % H * v_sh + start * v_st
    solved = load_rows(inverse + chunk * C * C, C, length, 0, C, C, C)
    for at in range(0, K, BN):
        operand = load_rows(gated_a + chunk * C * K, K, length, at, C, K, BN)
        store_rows(w + chunk * C * K, mm(solved, operand, DOT, PREC), K, C, at, C, K, BN)
    pairs = load_rows(a_k + chunk * C * C, C, length, 0, C, C, C)
    for v0 in range(0, V, BV):
        read = mm(pairs, load_rows(v, v_st, length, v0, C, V, BV), DOT, PREC)
        store_rows(u + chunk * C * V, mm(solved, read, DOT, PREC), V, C, v0, C, V, BV)
