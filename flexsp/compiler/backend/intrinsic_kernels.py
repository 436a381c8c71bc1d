"""Kernels of the intrinsics, a chunk a program. Arguments and results lie in memory: tokens, or rows kept by chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.alike_keys import dithered, size_of_inverse
from flexsp.kernels.gated_keys.tiles import half, rows_of
from flexsp.kernels.primitives import chunk_info, mm
from flexsp.runtime.launch import begin

_COLUMNS = 64  # of the keys that the kernels of scores hold at a time
_BLOCK = tl.constexpr(16)
_REPEATED = tl.constexpr(0.25)  # the same, for each of n C: half of what one key with a rate of 1 has
_LARGEST_SUM = tl.constexpr(40.0)  # of log gates whose e^sum may be a factor of one operand of a product


def warps(kind: str, half: bool) -> int:
    """That a kernel is launched with; `half`: its products are those of bfloat16."""
    return {"inverse": 1, "scores": 8 if half else 4, "scores_grad": 8}[kind]


def columns(kind: str, N: int, half: bool) -> int:
    """Of keys of N numbers, how many a kernel of scores holds at a time."""
    return N if kind == "scores_grad" and not half else min(N, _COLUMNS)


@triton.jit
def _load(x, sb, st, sh, KEPT: tl.constexpr, T, H, c, start, length, cols, C: tl.constexpr, N: tl.constexpr):
    """Columns of a chunk's rows, of tokens [B, T, H, N] or of kept values [B * H, chunks * C, N]; else 0."""
    row = tl.program_id(1).to(tl.int64)
    if KEPT:
        at = x + (row * tl.num_programs(0) + c) * C * N
        step = N
    else:
        at = x + (row // H) * sb + (row % H) * sh + start * st
        step = st
    rows = tl.arange(0, C)
    mask = (rows < length)[:, None] & (cols < N)[None, :]
    return tl.load(at + rows[:, None] * step + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _at(x, row, col, C: tl.constexpr, N: tl.constexpr):
    """Addresses of the [N, N] block of x [C, C] that begins at (row, col)."""
    i = tl.arange(0, N)
    return x + (row + i[:, None]) * C + col + i[None, :]


@triton.jit
def _lower(x, start, C: tl.constexpr, N: tl.constexpr):
    """The lower triangle of a block on the diagonal."""
    i = tl.arange(0, N)
    return tl.load(_at(x, start, start, C, N), mask=i[:, None] >= i[None, :], other=0.0)


@triton.jit
def _squares(x, C: tl.constexpr):
    """The sum of squares of x [C, C] below the diagonal."""
    j = tl.arange(0, C)[None, :]
    found = 0.0
    for block in range(0, C // _BLOCK):  # a few rows at a time: all of them take registers
        some = block * _BLOCK + tl.arange(0, _BLOCK)[:, None]
        part = tl.load(x + some * C + j, mask=some > j, other=0.0)
        found += tl.sum(tl.sum(part * part, axis=1), axis=0)
    return found


@triton.jit(do_not_specialize=["T"])
def inverse_kernel(
    x, y, gain, table, T, C: tl.constexpr, GAIN: tl.constexpr, MORE: tl.constexpr, REPEATS: tl.constexpr,
    DITHERED: tl.constexpr, PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Inverse y of the lower triangular [C, C] with ones on the diagonal and x (fp32, overwritten) below it.

    GAIN: the chunk's number of `gain` is the sum of squares of the inverse below the diagonal; with MORE the larger of
    that and what is there. It is larger where keys are alike (`size_of_inverse`). REPEATS: it is negative where the
    squares of x add up to more than `_REPEATED` for each token that the chunk has and each of C, and
    `flexsp.kernels.delta.exact.choose` counts such chunks. DITHERED: y is on numbers of bfloat16, which products take.

    Blocks of 16 by substitution, all at once: lane (m, j) has column j of the inverse of block m. Then from blocks of s
    to blocks of 2 s, [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]. Rows past the chunk's length are 0 in x.
    """
    begin(PDL)
    chunk = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    x += chunk * C * C
    y += chunk * C * C
    alike = _squares(x, C) if GAIN else 0.0
    tl.debug_barrier()
    lane = tl.arange(0, C)
    m = lane // _BLOCK * _BLOCK
    depth = tl.arange(0, _BLOCK)[:, None]
    rows = tl.where(depth == (lane % _BLOCK)[None, :], 1.0, 0.0)  # those above i are the inverse's
    for i in tl.static_range(1, _BLOCK):
        left = tl.load(
            x + (m[None, :] + i) * C + m[None, :] + depth, mask=(depth < i) & (lane[None, :] >= 0), other=0.0
        )
        row = tl.sum(left * rows, axis=0)
        rows = tl.where(depth == i, rows - row[None, :], rows)
    tl.debug_barrier()  # all of x is read before it is written over
    tl.store(x + (m[None, :] + depth) * C + lane[None, :], rows)
    LEVELS: tl.constexpr = 0 if C == 16 else 1 if C == 32 else 2 if C == 64 else 3 if C == 128 else 4
    for level in tl.static_range(LEVELS):
        for pair in tl.static_range(C // (32 << level)):
            tl.debug_barrier()  # blocks are read by other threads than those that stored them
            at = pair * (32 << level)
            to = at + (16 << level)
            off = tl.load(_at(x, to, at, C, 16 << level))
            inner = mm(off, _lower(x, at, C, 16 << level), tl.float32, "tf32x3")
            outer = mm(_lower(x, to, C, 16 << level), inner, tl.float32, "tf32x3")
            tl.debug_barrier()  # the block is read by all before it is written over
            tl.store(_at(x, to, at, C, 16 << level), -outer)
    tl.debug_barrier()  # as above, of the last blocks
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    whole = tl.load(x + i * C + j)
    if DITHERED:
        whole = dithered(whole, i, j)
    tl.store(y + i * C + j, tl.where(i >= j, whole, 0.0))
    if GAIN:
        found = _squares(x, C)
        start, length, doc, first, last = chunk_info(table, tl.program_id(0), T, C, PACKED)
        found = size_of_inverse(found, alike, length)
        if REPEATS:
            found = tl.where(alike > _REPEATED * C * length, -found, found)
        if MORE:
            before = tl.load(gain + chunk)
            size = tl.maximum(tl.abs(found), tl.abs(before), propagate_nan=tl.PropagateNan.ALL)
            found = tl.where((found < 0) | (before < 0), -size, size)
        tl.store(gain + chunk, found)


@triton.jit
def _middle(b, cols, C: tl.constexpr, N: tl.constexpr):
    """The row of b [C, N] in the middle, and 1 where all rows are so near to it that neither e^{b_i - b_m} nor
    e^{b_m - b_i} is large, on either side of it; else 0, so where one is NaN. Not for fp32: the exponential's error
    grows with its argument."""
    mask = cols < N
    middle = tl.load(b + (C // 2 - 1) * N + cols, mask=mask, other=0.0)
    before = tl.load(b + cols, mask=mask, other=0.0) - middle
    after = middle - tl.load(b + (C - 1) * N + cols, mask=mask, other=0.0)
    far = tl.sum((~((before <= _LARGEST_SUM) & (after <= _LARGEST_SUM))).to(tl.int32), axis=0)
    return middle, tl.where(far == 0, 1, 0)


@triton.jit(do_not_specialize=["T", "H"])
def scores_kernel(
    q, k, b, a, table, q_sb, q_st, q_sh, k_sb, k_st, k_sh, T, H,
    N: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, Q_KEPT: tl.constexpr,
    K_KEPT: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """a = sum_d q_id k_jd e^{b_id - b_jd} for j <= i, else 0; b, kept in fp32, does not increase.

    The pairs (i, j) of the two halves of a block of 2 s rows are decayed by way of the row between the halves
    (`half`), so no exponent is positive; s = 1, 2, 4, ..., C / 2 (docs/math.md, section 6). Columns in blocks of BN.
    Where a block's b differ little, all its pairs are decayed by way of the chunk's middle at once (`_middle`).
    """
    begin(PDL)
    c = tl.program_id(0)
    start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
    b += (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + c) * C * N
    a += (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + c) * C * C
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    scores = tl.zeros([C, C], tl.float32)
    for at in range(0, N, BN):
        cols = at + tl.arange(0, BN)
        qc = _load(q, q_sb, q_st, q_sh, Q_KEPT, T, H, c, start, length, cols, C, N)
        kc = _load(k, k_sb, k_st, k_sh, K_KEPT, T, H, c, start, length, cols, C, N)
        own = rows_of(b, tl.arange(0, C), cols, N)
        scores += tl.where(i == j, tl.sum(qc.to(tl.float32) * kc.to(tl.float32), axis=1)[:, None], 0.0)
        small = 0
        if tl.float32 != DOT:
            middle, small = _middle(b, cols, C, N)
            for zero in range(small):
                beyond = own - middle[None, :] + zero  # so that nothing is made before the loop
                x, y = qc * tl.exp(beyond), kc * tl.exp(-beyond)
                scores += tl.where(i > j, mm(x, tl.trans(y), DOT, PREC), 0.0)
        for level in range(small * LEVELS, LEVELS):
            x, _decay, _second = half(qc, kc, own, b, level, cols, C, N)
            pairs = ((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) > (j >> level))
            scores += tl.where(pairs, mm(x, tl.trans(x), DOT, PREC), 0.0)
    tl.store(a + i * C + j, scores)


@triton.jit(do_not_specialize=["T", "H"])
def scores_grad_kernel(
    da, q, k, b, dq, dk, db, table, q_sb, q_st, q_sh, k_sb, k_st, k_sh, T, H,
    N: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, Q_KEPT: tl.constexpr,
    K_KEPT: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gradients of `scores_kernel` to q, k and b, kept in fp32; what of da is above the diagonal does not count.

    db is q dq - k dk, of which each pair of rows is once in the first and once in the second: its running sum, the
    gradient of gates, has of pairs that do not straddle a gate nothing but what they round differently. So both are
    products of the same three numbers, q and k with their decays rounded once (docs/math.md, section 6).
    """
    begin(PDL)
    c = tl.program_id(0)
    start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
    chunk = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + c
    b += chunk * C * N
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    d = tl.load(da + chunk * C * C + i * C + j, mask=(i < length) & (j < length), other=0.0).to(tl.float32)
    diagonal = tl.sum(tl.where(i == j, d, 0.0), axis=1)[:, None]
    both = tl.where(i > j, d, 0.0)
    both += tl.trans(both)
    for block in range(0, N, BN):
        cols = block + tl.arange(0, BN)
        qc = _load(q, q_sb, q_st, q_sh, Q_KEPT, T, H, c, start, length, cols, C, N)
        kc = _load(k, k_sb, k_st, k_sh, K_KEPT, T, H, c, start, length, cols, C, N)
        own = rows_of(b, tl.arange(0, C), cols, N)
        to_q = tl.zeros([C, BN], tl.float32)
        to_k = tl.zeros([C, BN], tl.float32)
        to_b = tl.zeros([C, BN], tl.float32)
        small = 0
        if tl.float32 != DOT:
            middle, small = _middle(b, cols, C, N)
            for zero in range(small):
                beyond = own - middle[None, :] + zero
                x, y = (qc * tl.exp(beyond)).to(DOT), (kc * tl.exp(-beyond)).to(DOT)
                new = mm(tl.where(i > j + zero, both, 0.0), y, DOT, PREC)
                to_q += new * tl.exp(beyond)
                to_b += new * x.to(tl.float32)
                new = mm(tl.where(i < j + zero, both, 0.0), x, DOT, PREC)
                to_k += new * tl.exp(-beyond)
                to_b -= new * y.to(tl.float32)
        for level in range(small * LEVELS, LEVELS):
            x, decay, second = half(qc, kc, own, b, level, cols, C, N)
            x = x.to(DOT)
            pairs = ((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) != (j >> level))
            new = mm(tl.where(pairs, both, 0.0), x, DOT, PREC)
            if tl.float32 != DOT:
                to_b += tl.where(second, new, -new) * x.to(tl.float32)
            new *= decay
            to_q += tl.where(second, new, 0.0)
            to_k += tl.where(second, 0.0, new)
        if tl.float32 == DOT:
            to_b = to_q * qc.to(tl.float32) - to_k * kc.to(tl.float32)
        at = chunk * C * N + i * N + cols[None, :]
        mask = (cols < N)[None, :] & (i >= 0)
        tl.store(dq + at, to_q + diagonal * kc.to(tl.float32), mask=mask)
        tl.store(dk + at, to_k + diagonal * qc.to(tl.float32), mask=mask)
        tl.store(db + at, to_b, mask=mask)
