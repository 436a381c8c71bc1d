"""What the delta engine does chunk by chunk where each key channel has a gate (docs/math.md, section 7).

Decays e^{b_i - b_j} of pairs of tokens are products e^{b_i - b_m} e^{b_m - b_j}, for whole blocks of tokens at once.
Within a block of so many tokens that the gates add up to little, m is its middle, and either factor may grow. Blocks
beyond that meet in pairs, level by level, from those blocks to the halves of the chunk: m is the edge between an odd
block and the even one before it, and no factor grows where gates are not positive. Every pair of tokens meets once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.delta.exact import by_errors
from flexsp.kernels.delta.wy_transform import load_numbers, store_gain, store_inverse, sum_over, unit_inverse
from flexsp.kernels.primitives import GATE_MIN, LOG2E, chunk_info, load_rows, load_state, mm, store_rows
from flexsp.runtime.launch import begin

_SMALL = tl.constexpr(80.0)  # log2: what such factors multiply neither overflows nor vanishes
_FEW = tl.constexpr(4)  # log2 of how many tokens the smaller blocks have that are tried
_STEPS = tl.constexpr(1024.0)
_ALL = tl.constexpr(4)  # matrices of `channel_blocks` before those of blocks


@triton.jit
def _load_gates(base, stride_t, length, k0, C: tl.constexpr, K: tl.constexpr, COLS: tl.constexpr):
    """Gates [C, COLS] in log2."""
    gate = load_rows(base, stride_t, length, k0, C, K, COLS).to(tl.float32)
    return tl.maximum(gate, GATE_MIN, propagate_nan=tl.PropagateNan.ALL) * LOG2E


@triton.jit
def _split(gate, DOT: tl.constexpr):
    """Gates as sums of two numbers in DOT. In fp32 sums of the first are exact."""
    if tl.float32 == DOT:
        first = tl.floor(gate * _STEPS) / _STEPS
    else:
        first = gate.to(DOT)
    return first, (gate - first.to(tl.float32)).to(DOT)


@triton.jit
def _ones(blocks, which, C: tl.constexpr):
    """A matrix [C, C] of `channel_blocks`."""
    i = tl.arange(0, C)
    return tl.load(blocks + which * C * C + i[:, None] * C + i[None, :])


@triton.jit
def _summed(ones, first, second, DOT: tl.constexpr, PREC: tl.constexpr):
    """For each token the sum of gates over the tokens that have ones; in fp32 in two parts, or else as the first."""
    x = mm(ones, first, DOT, PREC)
    rest = mm(ones, second, DOT, PREC)
    if tl.bfloat16 == DOT:
        x += rest
    return x, rest


@triton.jit
def _power(x, rest, DOT: tl.constexpr):
    """2^{x + rest}."""
    if tl.float32 == DOT:
        whole = tl.floor(x)  # their sum would be rounded
        found = tl.exp2((x - whole) + rest) * tl.exp2(whole)
    else:
        found = tl.exp2(x)
    return found


@triton.jit
def _decays(blocks, which, first, second, C: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr):
    """Decay over the tokens that a matrix of `channel_blocks` has ones for."""
    x, rest = _summed(_ones(blocks, which, C), first, second, DOT, PREC)
    return _power(x, rest, DOT)


@triton.jit
def _block(
    blocks, which, total, first, second, C: tl.constexpr, LEVELS: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr
):  # fmt: skip
    """log2 of how many tokens a block may have whose gates add up to little in all channels; total: sums of gates from
    the chunk's start on; which: the matrix of blocks of 2^_FEW."""
    # Not in a branch: ARCHITECTURE.md, "Walks".
    x, rest = _summed(_ones(blocks, which, C), first, second, DOT, PREC)
    wide = tl.sum(tl.sum((~(tl.abs(x) <= _SMALL)).to(tl.int32), axis=1), axis=0)
    wider = tl.sum(tl.sum((~((total >= -_SMALL) & (total <= _SMALL / 8))).to(tl.int32), axis=1), axis=0)
    return tl.where(wider == 0, LEVELS, tl.where(wide == 0, _FEW, 0))


@triton.jit
def _factors(
    blocks, n, block, first, second, C: tl.constexpr, LEVELS: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr
):  # fmt: skip
    """Decay from the middle of a block, or the edge, to each token that reads, and that from each token that writes."""
    which = _ALL + tl.where(n == 0, block, LEVELS + block + n)
    x, rest = _summed(_ones(blocks, which, C), first, second, DOT, PREC)
    sign = tl.where(n == 0, -1.0, 1.0)
    return _power(x, rest, DOT), _power(x * sign, rest * sign, DOT)


@triton.jit
def _between(i, first, end):
    """[C, C]: the tokens from first [C] to those before end [C]."""
    return (i[None, :] >= first[:, None]) & (i[None, :] < end[:, None])


@triton.jit
def _met(i, n, block):
    """[C, C]: the tokens that a token meets: at first itself and those before it in its block; then for tokens of odd
    blocks of 2^{block + n - 1} tokens those of the even block before."""
    level = tl.where(n == 0, block, block + n - 1)
    start = (i >> level) << level
    odd = ((i >> level) & 1) == 1
    first = tl.where(n == 0, start, start - (1 << level))
    return _between(i, first, tl.where(n == 0, i + 1, tl.where(odd, start, 0)))


def matrices(C: int) -> int:
    """How many of them `channel_blocks` makes."""
    return 4 + 2 * C.bit_length() - 1


@triton.jit
def channel_blocks(blocks, C: tl.constexpr, PDL: tl.constexpr):
    """Matrices of ones and zeros [.., C, C], one a program. For a token, ones stand for: itself and those before it;
    those after it; those before it; itself and those after it. Then for blocks of 1, 2, 4, .. C tokens those between it
    and the middle, -1 where these come after it. Last, those between it and the edge where blocks meet.
    """
    begin(PDL)
    which = tl.program_id(0)
    LEVELS: tl.constexpr = 4 if C == 16 else 5 if C == 32 else 6
    i = tl.arange(0, C)
    within = which <= _ALL + LEVELS
    level = tl.maximum(which - _ALL - tl.where(within, 0, LEVELS + 1), 0)
    start = (i >> level) << level
    edge = tl.where(within, start + (((1 << level) + 1) >> 1), start + tl.where(((i >> level) & 1) == 1, 0, 1 << level))
    found = tl.where(_between(i, edge, i + 1), 1.0, 0.0)
    found += tl.where(_between(i, i + 1, edge), tl.where(within, -1.0, 1.0), 0.0)
    if which == 0:
        found = tl.where(i[:, None] >= i[None, :], 1.0, 0.0)
    elif which == 1:
        found = tl.where(i[:, None] < i[None, :], 1.0, 0.0)
    elif which == 2:
        found = tl.where(i[:, None] > i[None, :], 1.0, 0.0)
    elif which == 3:
        found = tl.where(i[:, None] <= i[None, :], 1.0, 0.0)
    place = blocks + which * C * C + i[:, None] * C + i[None, :]
    tl.store(place, found.to(blocks.dtype.element_ty))


@triton.jit(do_not_specialize=["T", "H"])
def channel_scores(
    q, k, g, beta, blocks, pairs, scores, reads, writes, w, decay, sizes, table, q_sb, q_st, q_sh, k_sb, k_st, k_sh,
    g_sb, g_st, g_sh, beta_sb, beta_st, beta_sh, T, H, scale, K: tl.constexpr, COLS: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of chunks [B H, chunks]: pairs G and scores [.., C, C]; what reads the state that enters, scale q e^b into reads
    and k e^b into w; what writes to the one that leaves, beta k e^{b_C - b}, into writes [.., C, K]; decay e^{b_C}
    [.., K]; and for each tile of channels which blocks of tokens were chosen, sizes [.., tiles]. In bf16 the rounding
    of G stands transposed above the diagonal: an inverse makes it larger where keys are alike.
    """
    begin(PDL)
    row = tl.program_id(1).to(tl.int64)
    b = row // H
    h = row % H
    start, length, doc, first_chunk, last_chunk = chunk_info(table, tl.program_id(0), T, C, PACKED)
    at = row * tl.num_programs(0) + tl.program_id(0)
    q += b * q_sb + h // GROUP * q_sh + start * q_st
    k += b * k_sb + h // GROUP * k_sh + start * k_st
    g += b * g_sb + h * g_sh + start * g_st
    LEVELS: tl.constexpr = 4 if C == 16 else 5 if C == 32 else 6
    i = tl.arange(0, C)
    beta_c = load_numbers(beta + b * beta_sb + h * beta_sh + start * beta_st, beta_st, length, C).to(tl.float32)
    of_keys = tl.zeros([C, C], tl.float32)
    of_queries = tl.zeros([C, C], tl.float32)
    for k0 in range(0, K, COLS):
        gate = _load_gates(g, g_st, length, k0, C, K, COLS)
        first, second = _split(gate, DOT)
        qc = load_rows(q, q_st, length, k0, C, K, COLS).to(tl.float32)
        kc = load_rows(k, k_st, length, k0, C, K, COLS).to(tl.float32)
        which = tl.minimum(k0, 0)  # 0, and no matrix stays in registers
        total, rest = _summed(_ones(blocks, which, C), first, second, DOT, PREC)
        block = _block(blocks, which + _ALL + _FEW, total, first, second, C, LEVELS, DOT, PREC)
        tl.store(sizes + at * ((K + COLS - 1) // COLS) + k0 // COLS, block)
        e = _power(total, rest, DOT)
        store_rows(reads + at * C * K, qc * e * scale, K, C, k0, C, K, COLS)
        store_rows(w + at * C * K, kc * e, K, C, k0, C, K, COLS)
        cols = k0 + tl.arange(0, COLS)[None, :] + 0 * i[:, None]
        tl.store(decay + at * K + cols, e, mask=(i[:, None] == C - 1) & (cols < K))
        e = _decays(blocks, which + 1, first, second, C, DOT, PREC)
        store_rows(writes + at * C * K, kc * beta_c[:, None] * e, K, C, k0, C, K, COLS)
        for n in range(LEVELS + 1 - block):
            e, f = _factors(blocks, n, block, first, second, C, LEVELS, DOT, PREC)
            met = _met(i, n, block)
            written = tl.trans((kc * f).to(DOT))
            of_keys += tl.where(met, mm((kc * e).to(DOT), written, DOT, PREC), 0.0)
            of_queries += tl.where(met, mm((qc * e).to(DOT), written, DOT, PREC), 0.0)
    square = at * C * C + i[:, None] * C + i[None, :]
    of_keys = tl.where(i[:, None] > i[None, :], of_keys * beta_c[None, :], 0.0)
    found = of_keys.to(DOT)
    if tl.bfloat16 == DOT:
        found = tl.where(i[:, None] > i[None, :], found, tl.trans((of_keys - found.to(tl.float32)).to(DOT)))
    tl.store(pairs + square, found)
    tl.store(scores + square, (of_queries * (beta_c * scale)[None, :]).to(scores.dtype.element_ty))


@triton.jit(do_not_specialize=["T"])
def channel_inverse(
    inverse, gain, table, T, C: tl.constexpr, GAIN: tl.constexpr, PACKED: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Inverses of I + G in place of G [B H, chunks, C, C], as `channel_scores` left it; GAIN: and gain, as in
    `wy_inverse`."""
    begin(PDL)
    at = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    i = tl.arange(0, C)
    place = inverse + at * C * C + i[:, None] * C + i[None, :]
    below = i[:, None] > i[None, :]
    x = tl.load(place, mask=below, other=0.0).to(tl.float32)
    if inverse.dtype.element_ty == tl.bfloat16:
        x += tl.load(inverse + at * C * C + i[:, None] + i[None, :] * C, mask=below, other=0.0).to(tl.float32)
    found = unit_inverse(x, C)
    if GAIN:
        start, length, doc, first, last = chunk_info(table, tl.program_id(0), T, C, PACKED)
        store_gain(gain, at, found, x, length, C)
    tl.debug_barrier()  # all of G is read before its inverse is written over it
    store_inverse(inverse + at * C * C, found, C)


@triton.jit(do_not_specialize=["T", "H"])
def channel_wy_transform(
    v, inverse, u, w, table, v_sb, v_st, v_sh, T, H, K: tl.constexpr, V: tl.constexpr, COLS: tl.constexpr,
    C: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """U = M^-1 V [B H, chunks, C, V], and W = M^-1 e^b K [B H, chunks, C, K] in place of e^b K."""
    begin(PDL)
    row = tl.program_id(1).to(tl.int64)
    b = row // H
    h = row % H
    start, length, doc, first, last = chunk_info(table, tl.program_id(0), T, C, PACKED)
    at = row * tl.num_programs(0) + tl.program_id(0)
    i = tl.arange(0, C)
    found = tl.load(inverse + at * C * C + i[:, None] * C + i[None, :])
    for k0 in tl.static_range(0, K, COLS):
        kc = load_rows(w + at * C * K, K, C, k0, C, K, COLS)
        wc = mm(found, kc, DOT, PREC)
        tl.debug_barrier()  # all of a tile is read before it is written
        store_rows(w + at * C * K, wc, K, C, k0, C, K, COLS)
    for v0 in tl.static_range(0, V, COLS):
        vc = load_rows(v + b * v_sb + h * v_sh + start * v_st, v_st, length, v0, C, V, COLS)
        store_rows(u + at * C * V, mm(found, vc, DOT, PREC), V, C, v0, C, V, COLS)


@triton.jit
def _chunk(
    do, do_st, v_new, dv_new, turned, length, v0, C: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Of columns of the values: the outputs' gradient, N^T, and dV = M^-T dN."""
    oc = load_rows(do, do_st, length, v0, C, V, BV)
    N = load_state(v_new, v0, 0, True, V, C, BV, C).to(v_new.dtype.element_ty)
    dN = load_state(dv_new, v0, 0, True, V, C, BV, C).to(dv_new.dtype.element_ty)
    return oc, N, mm(turned, tl.trans(dN), DOT, PREC).to(DOT)


@triton.jit(do_not_specialize=["T", "H", "n_chunks"])
def channel_parts(
    do, inverse, v_new, dv_new, entering, leaving, skipped, dv, kept, errors, parts, dwrites, dpairs, table, do_sb,
    do_st, do_sh, T, H, n_chunks, scale, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, COLS: tl.constexpr,
    C: tl.constexpr, ROWS: tl.constexpr, SKIPS: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr,
    PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dv [B, T, H, V], and what `channel_grads` goes on with: for each chunk ROWS rows of `parts`, gradients of scale
    q e^b and then of k e^b [C, K], of `dwrites`, those of beta k e^{b_C - b} [C, K], and of `dpairs`, those of scores,
    with scale, and then of G [C, C]; kept [.., K], products of the states around the chunk, summed; and in bf16 errors
    [.., C], those of N and dV.

    These may be the memory of entering, leaving and v_new, which have V = ROWS rows a chunk then, where BV >= V.
    """
    begin(PDL)
    c, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b = row // H
    h = row % H
    start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
    at = row * n_chunks + c
    if SKIPS:  # noqa: SIM102
        if tl.load(skipped + at) != 0:
            return
    i = tl.arange(0, C)
    turned = tl.trans(tl.load(inverse + at * C * C + i[:, None] * C + i[None, :]))
    do += b * do_sb + h * do_sh + start * do_st
    v_new += at * V * C
    dv_new += at * V * C
    dv += ((b * T + start) * H + h) * V
    entering += at * V * K
    leaving += at * V * K
    square = dpairs + at * ROWS * C + i[:, None] * C + i[None, :]
    of_scores = tl.zeros([C, C], tl.float32)
    of_pairs = tl.zeros([C, C], tl.float32)
    for v0 in tl.static_range(0, V, BV):
        oc, N, y = _chunk(do, do_st, v_new, dv_new, turned, length, v0, C, V, BV, DOT, PREC)
        store_rows(dv, y, H * V, length, v0, C, V, BV)
        of_scores += mm(oc, N, DOT, PREC)
        of_pairs -= mm(y, N, DOT, PREC)
    if tl.bfloat16 == DOT:
        tl.store(errors + at * C + i, -tl.sum(tl.where(i[:, None] == i[None, :], of_pairs, 0.0), axis=1))
    tl.debug_barrier()  # all of N is read before it is written over
    tl.store(square, tl.where(i[:, None] >= i[None, :], of_scores * scale, 0.0).to(dpairs.dtype.element_ty))
    tl.store(square + C * C, tl.where(i[:, None] > i[None, :], of_pairs, 0.0).to(dpairs.dtype.element_ty))
    for k0 in range(0, K, COLS):
        to_reads = tl.zeros([C, COLS], tl.float32)
        to_keys = tl.zeros([C, COLS], tl.float32)
        to_writes = tl.zeros([C, COLS], tl.float32)
        both = tl.zeros([COLS], tl.float32)
        for v1 in tl.static_range(0, V, BV):
            if BV < V:
                oc, N, y = _chunk(do, do_st, v_new, dv_new, turned, length, v1, C, V, BV, DOT, PREC)
            S = load_state(entering, v1, k0, True, V, K, BV, COLS).to(entering.dtype.element_ty)
            dS = load_state(leaving, v1, k0, True, V, K, BV, COLS).to(leaving.dtype.element_ty)
            both += sum_over(S.to(tl.float32) * dS.to(tl.float32), 0)
            to_reads += mm(oc, S, DOT, PREC)
            to_keys -= mm(y, S, DOT, PREC)
            to_writes += mm(tl.trans(N), dS, DOT, PREC)
        cols = k0 + tl.arange(0, COLS)
        tl.store(kept + at * K + cols, both, mask=cols < K)
        tl.debug_barrier()
        store_rows(parts + at * ROWS * K, to_reads, K, C, k0, C, K, COLS)
        store_rows(parts + at * ROWS * K + C * K, to_keys, K, C, k0, C, K, COLS)
        store_rows(dwrites + at * ROWS * K, to_writes, K, C, k0, C, K, COLS)


@triton.jit
def _exact_sums(ones, x, DOT: tl.constexpr, PREC: tl.constexpr):
    """For each token the sum of x [C, N] over the tokens that have ones, in fp32."""
    first = x.to(DOT)
    found = mm(ones, first, DOT, PREC)
    if tl.bfloat16 == DOT:
        rest = x - first.to(tl.float32)
        second = rest.to(DOT)
        found += mm(ones, second, DOT, PREC)
        found += mm(ones, rest - second.to(tl.float32), DOT, PREC)
    return found


@triton.jit(do_not_specialize=["T", "H", "n_chunks"])
def channel_grads(
    q, k, g, beta, blocks, sizes, skipped, gain, kept, errors, parts, dwrites, dpairs, dq, dk, dbeta, dg, table, q_sb,
    q_st, q_sh, k_sb, k_st, k_sh, g_sb, g_st, g_sh, beta_sb, beta_st, beta_sh, T, H, n_chunks, scale, K: tl.constexpr,
    COLS: tl.constexpr, SIZED: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, SKIPS: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg [B, T, H, K] and, of each tile of channels, dbeta [tiles, B, T, H], of what `channel_parts` left."""
    begin(PDL)
    c, row, k0 = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) * COLS
    b = row // H
    h = row % H
    start, length, doc, first_chunk, last_chunk = chunk_info(table, c, T, C, PACKED)
    at = row * n_chunks + c
    if SKIPS:  # noqa: SIM102
        if tl.load(skipped + at) != 0:
            return
    q += b * q_sb + h // GROUP * q_sh + start * q_st
    k += b * k_sb + h // GROUP * k_sh + start * k_st
    g += b * g_sb + h * g_sh + start * g_st
    to = ((b * T + start) * H + h) * K
    LEVELS: tl.constexpr = 4 if C == 16 else 5 if C == 32 else 6
    i = tl.arange(0, C)
    cols = k0 + tl.arange(0, COLS)
    beta_c = load_numbers(beta + b * beta_sb + h * beta_sh + start * beta_st, beta_st, length, C).to(tl.float32)
    square = dpairs + at * ROWS * C + i[:, None] * C + i[None, :]
    block = tl.load(sizes + at * ((K + SIZED - 1) // SIZED) + k0 // SIZED)
    first, second = _split(_load_gates(g, g_st, length, k0, C, K, COLS), DOT)
    qc = load_rows(q, q_st, length, k0, C, K, COLS).to(tl.float32)
    kc = load_rows(k, k_st, length, k0, C, K, COLS).to(tl.float32)
    to_q = tl.zeros([C, COLS], tl.float32)
    to_k = tl.zeros([C, COLS], tl.float32)
    sums = tl.zeros([C, COLS], tl.float32)
    written = tl.zeros([C], tl.float32)
    for n in range(LEVELS + 1 - block):
        e, f = _factors(blocks, n, block, first, second, C, LEVELS, DOT, PREC)
        met = _met(i, n, block)
        qe = (qc * e).to(DOT)  # rounded once: what pairs of tokens add to dg cancels in its sums
        ke = (kc * e).to(DOT)
        pe = (kc * f * beta_c[:, None]).to(DOT)
        given = square + tl.minimum(n, 0) * C  # 0, and the gradients do not stay in registers
        chosen = tl.where(met, tl.load(given), 0.0).to(DOT)
        x = mm(chosen, pe, DOT, PREC)
        to_q += e * x
        sums += qe.to(tl.float32) * x
        z = mm(tl.trans(chosen), qe, DOT, PREC)
        chosen = tl.where(met, tl.load(given + C * C), 0.0).to(DOT)
        x = mm(chosen, pe, DOT, PREC)
        to_k += e * x
        sums += ke.to(tl.float32) * x
        z += mm(tl.trans(chosen), ke, DOT, PREC)
        sums -= pe.to(tl.float32) * z
        z *= f
        written += sum_over(z * kc, 1)
        to_k += z * beta_c[:, None]
    e = _decays(blocks, 0, first, second, C, DOT, PREC)
    part = load_rows(parts + at * ROWS * K, K, C, k0, C, K, COLS).to(tl.float32) * e * scale
    sums += qc * part
    to_q += part
    store_rows(dq + to, to_q, H * K, length, k0, C, K, COLS)
    part = load_rows(parts + at * ROWS * K + C * K, K, C, k0, C, K, COLS).to(tl.float32) * e
    sums += kc * part
    to_k += part
    end = tl.sum(tl.where((i == C - 1)[:, None], e, 0.0), axis=0)
    to_g = _exact_sums(_ones(blocks, 3, C), sums, DOT, PREC)
    to_g += (tl.load(kept + at * K + cols, mask=cols < K, other=0.0) * end)[None, :]
    e = _decays(blocks, 1, first, second, C, DOT, PREC)
    part = load_rows(dwrites + at * ROWS * K, K, C, k0, C, K, COLS).to(tl.float32) * e
    to_g += _exact_sums(_ones(blocks, 2, C), kc * beta_c[:, None] * part, DOT, PREC)
    gate = load_rows(g, g_st, length, k0, C, K, COLS).to(tl.float32)
    store_rows(dg + to, tl.where(gate <= GATE_MIN, 0.0, to_g), H * K, length, k0, C, K, COLS)
    written += sum_over(part * kc, 1)
    store_rows(dk + to, to_k + part * beta_c[:, None], H * K, length, k0, C, K, COLS)
    at_token = ((tl.program_id(2) * (tl.num_programs(1) // H) + b) * T + start + i) * H + h
    by_keys = i < length
    if tl.bfloat16 == DOT:
        chosen = by_errors(gain, at, length, beta_c)
        by_keys = by_keys & ~chosen
        found = tl.load(errors + at * C + i, mask=chosen & (k0 == 0), other=0.0) / tl.where(chosen, beta_c, 1.0)
        tl.store(dbeta + at_token, found.to(dbeta.dtype.element_ty), mask=chosen)
    tl.store(dbeta + at_token, written.to(dbeta.dtype.element_ty), mask=by_keys)
