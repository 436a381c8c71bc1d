"""Before the walks: gated operands and scores of every chunk, and what a chunk makes of its own tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.gated_keys.tiles import far_apart, last_row, running_gates, up_to_last_large
from flexsp.kernels.gated_transition.tiles import factors, within
from flexsp.kernels.primitives import chunk_info, load_rows, mm, store_rows
from flexsp.runtime.launch import begin


@triton.jit
def _gate_later(
    x, k, b, g, running, gated_x, gated_k, gated_b, x_k, x_b, x_st, k_st, b_st, g_st, length, rows,
    REMOVES: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    SMALL_GATES: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """`rows` rows of x with their decays, and their scores with k and b; in how many channels gates are not small.

    REMOVES: x is `a`, whose rows are taken one earlier and stored one later: what it reads before a token's gate is
    what it would read after that of the token before. Then x_b is 1 less scores, and k and b are not stored.
    """
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    with_k = tl.zeros([C, C], tl.float32)
    with_b = tl.zeros([C, C], tl.float32)
    k_alone = tl.zeros([C], tl.float32)
    b_alone = tl.zeros([C], tl.float32)
    far = 0
    for at in range(0, K, BN):
        cols = at + tl.arange(0, BN)
        own = running_gates(g, g_st, length, at, C, K, BN)
        end = last_row(own, C)
        far += far_apart(end)
        if not REMOVES:
            if SMALL_GATES:
                tl.store(running + (C - 1) * K + cols, end, mask=cols < K)
            else:
                store_rows(running, own, K, C, at, C, K, BN)
                tl.debug_barrier()  # sums of gates are read by other threads than those that stored them
        xc = load_rows(x, x_st, rows, at, C, K, BN)
        kc = load_rows(k, k_st, length, at, C, K, BN)
        bc = load_rows(b, b_st, length, at, C, K, BN)
        # Pairs without decay are not rounded. + 0.0, so that all lanes round alike.
        k_alone += tl.sum(xc.to(tl.float32) * kc.to(tl.float32) + 0.0, axis=1)
        b_alone += tl.sum(xc.to(tl.float32) * bc.to(tl.float32) + 0.0, axis=1)
        if REMOVES:
            store_rows(gated_x + K, xc * tl.exp(own), K, C - 1, at, C, K, BN)
            undecayed = tl.load(x - x_st + cols, mask=(cols < K) & (length > 0), other=0.0)
            tl.store(gated_x + cols, undecayed, mask=cols < K)
        else:
            store_rows(gated_x, xc * tl.exp(own), K, C, at, C, K, BN)
            store_rows(gated_k, kc * tl.exp(end[None, :] - own), K, C, at, C, K, BN)
            store_rows(gated_b, bc * tl.exp(end[None, :] - own), K, C, at, C, K, BN)
        if SMALL_GATES:
            half = 0.5 * end[None, :]
            later = (xc * tl.exp(own - half)).to(DOT)
            with_k += mm(later, tl.trans((kc * tl.exp(half - own)).to(DOT)), DOT, PREC)
            with_b += mm(later, tl.trans((bc * tl.exp(half - own)).to(DOT)), DOT, PREC)
        else:
            for level in range(0, LEVELS):
                up, down = factors(own, running, level, cols, C, K)
                near = within(level, C)
                later = (xc * up).to(DOT)
                with_k += tl.where(near, mm(later, tl.trans((kc * down).to(DOT)), DOT, PREC), 0.0)
                with_b += tl.where(near, mm(later, tl.trans((bc * down).to(DOT)), DOT, PREC), 0.0)
    with_k = tl.where(i > j, with_k, tl.where(i == j, k_alone[:, None], 0.0))
    with_b = tl.where(i > j, with_b, tl.where(i == j, b_alone[:, None], 0.0))
    at = i * C + j
    if REMOVES:
        first = tl.arange(0, C)
        one = (j == i + 1) & (j < length)
        tl.store(x_k + at + C, with_k.to(x_k.dtype.element_ty), mask=(i + 1 < C) & (j >= 0))
        tl.store(x_b + at + C, tl.where(one, 1.0, -with_b), mask=(i + 1 < C) & (j >= 0))
        tl.store(x_k + first, tl.zeros([C], x_k.dtype.element_ty))
        tl.store(x_b + first, tl.where((first == 0) & (length > 0), 1.0, 0.0))
    else:
        tl.store(x_k + at, with_k.to(x_k.dtype.element_ty))
        tl.store(x_b + at, with_b.to(x_b.dtype.element_ty))
    return far


@triton.jit
def _gate_chunk(
    q, k, a, b, g, running, gated_q, gated_k, gated_a, gated_b, q_k, q_b, a_k, lower, table, q_sb, q_st, q_sh, k_sb,
    k_st, k_sh, a_sb, a_st, a_sh, b_sb, b_st, b_sh, g_sb, g_st, g_sh, T, H, c, chunk, K: tl.constexpr, BN: tl.constexpr,
    C: tl.constexpr, LEVELS: tl.constexpr, SMALL_GATES: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """One chunk; in how many channels its gates are not small. Queries and `a` one after the other: registers would not
    hold the scores of both."""
    row = tl.program_id(1).to(tl.int64)
    batch, h = row // H, row % H
    start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
    q += batch * q_sb + h * q_sh + start * q_st
    k += batch * k_sb + h * k_sh + start * k_st
    a += batch * a_sb + h * a_sh + start * a_st
    b += batch * b_sb + h * b_sh + start * b_st
    g += batch * g_sb + h * g_sh + start * g_st
    running += chunk * C * K
    gated_k += chunk * C * K
    gated_b += chunk * C * K
    far = _gate_later(
        q, k, b, g, running, gated_q + chunk * C * K, gated_k, gated_b, q_k + chunk * C * C, q_b + chunk * C * C, q_st,
        k_st, b_st, g_st, length, length, False, K, BN, C, LEVELS, SMALL_GATES, DOT, PREC,
    )  # fmt: skip
    _gate_later(
        a + a_st, k, b, g, running, gated_a + chunk * C * K, gated_k, gated_b, a_k + chunk * C * C,
        lower + chunk * C * C, a_st, k_st, b_st, g_st, length, length - 1, True, K, BN, C, LEVELS, SMALL_GATES, DOT,
        PREC,
    )  # fmt: skip
    return far


@triton.jit(do_not_specialize=["T", "H"])
def gate_operands_small(
    q, k, a, b, g, running, gated_q, gated_k, gated_a, gated_b, q_k, q_b, a_k, lower, small_gates, table, q_sb, q_st,
    q_sh, k_sb, k_st, k_sh, a_sb, a_st, a_sh, b_sb, b_st, b_sh, g_sb, g_st, g_sh, T, H, K: tl.constexpr,
    BN: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A chunk's operands with their decays, and its scores; with r_i the running sum of gates, a and b of the rank one.

    q e^{r_i}, a e^{r_i - g_i}, k e^{r_C - r_i}, b e^{r_C - r_i}, and of r the last row, which walks read; scores of q
    with k and b for j <= i, sum_d q_id k_jd e^{r_id - r_jd}, and of a for j < i, with e^{r_id - g_id - r_jd}: those
    with k, and 1 less those with b, `lower`. Gates are read and summed once for all of them (docs/math.md, section 19).

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
