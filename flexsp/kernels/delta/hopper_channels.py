"""What `channels` does chunk by chunk, on Hopper GPUs, for any gates.

Decays of pairs of tokens are products e^{b_i - b_m} e^{b_m - b_j}, for whole blocks of tokens at once. Within a block,
m is its middle; how many tokens it has, all, 16 or one, depends on what its gates add up to, since either factor may
grow. Blocks beyond that meet in pairs: those of one token, of two and so on, up to the halves of the chunk. There m is
the edge between an odd block and the even one before it: a token has one factor, and none grows where gates are not
positive. A product is of the whole chunk, and of it the pairs that meet are taken. Every pair meets once.

Channels are taken 64 at a time. A thread of the eight warps has eight tokens of two channels, so gates are summed in
registers, in blocks of up to eight tokens. Registers are scarce: either kernel has 128, so that a multiprocessor has
two blocks. So what can be had from shared memory again is not kept, not even places in memory; in the gradients levels
are a loop, of which the compiler takes nothing out, and products follow each other.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flexsp.kernels.delta.exact import ALIKE, LEAST_BETA
from flexsp.kernels.delta.hopper_gates import (
    BLOCK,
    CHANNELS,
    IN_PARTS,
    LEVELS,
    PARTS,
    WIDTH,
    by_part,
    by_token,
    copy_gates,
    larger,
    read_gates,
    room_for,
    sum_before,
    sum_beside,
    sum_of,
    summed,
    to_edge,
    to_edge_of_parts,
    to_middle,
)
from flexsp.kernels.gluon import (
    arrived,
    begin,
    by_row,
    chunk_at,
    copy,
    numbers,
    power,
    shared,
    store,
    tiles,
    visible,
)
from flexsp.kernels.keys_in_pytorch import EPS
from flexsp.kernels.primitives import GATE_MIN

__all__ = ["channel_grads", "channel_scores"]

_WARPS = gl.constexpr(8)
_EPS = gl.constexpr(EPS)
_BITS = (
    "{ .reg .pred p, q; .reg .b32 t, u; setp.eq.u32 p, $1, N; setp.eq.u32 q, $2, N;"
    " selp.b32 t, 0xFFFF, 0, p; selp.b32 u, 0xFFFF0000, 0, q; or.b32 $0, t, u; }"
)  # ones where numbers are N
_TOGETHER, _MEETING = gl.constexpr(_BITS.replace("N", "0")), gl.constexpr(_BITS.replace("N", "1"))
_NUMBERS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_TOTALS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_TOKENS = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
_SUMS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
_PRODUCTS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))


@gluon.jit
def _size(x, y):
    """The power of two that the largest number of x and y has at least, and one over it; 1 where there is none."""
    x = x.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    y = y.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = gl.max(gl.max(gl.maximum(x, y), axis=1), axis=0) >> 23
    exponent = gl.where((exponent > 0) & (exponent < 255), gl.minimum(gl.maximum(exponent, 28), 226), 127)
    return (exponent << 23).to(gl.float32, bitcast=True), ((254 - exponent) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _store_pairs(to, x):
    """The transpose of x [64, 64], which is zero but above the diagonal, as bfloat16; above the diagonal the rounding
    of x."""
    L: gl.constexpr = by_row(64, _WARPS)
    first = x.to(gl.bfloat16)
    rest = (x - first.to(gl.float32)).to(gl.bfloat16)
    first = gl.permute(first, (1, 0))
    rows = gl.arange(0, 64, gl.SliceLayout(1, L))[:, None]
    columns = gl.arange(0, 64, gl.SliceLayout(0, L))[None, :]
    x = gl.where(rows > columns, gl.convert_layout(first, L), gl.convert_layout(rest, L))
    gl.store(to + rows * 64 + columns, x)


@gluon.jit
def _levels_of_pairs():
    """[64, 64] in shared memory: at which level tokens meet, -1 on the diagonal; above it 8 more. In registers there is
    no room for it, nor for what the compiler would make of it ahead."""
    i = gl.arange(0, 64, gl.SliceLayout(1, _PRODUCTS))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, _PRODUCTS))[None, :]
    apart = i ^ j
    found = gl.where(apart > 0, 0, -1)
    for level in gl.static_range(1, LEVELS):
        found += gl.where(apart >> level > 0, 1, 0)
    return shared(gl.where(i < j, found + 8, found).to(gl.float32))


@gluon.jit
def _product(x, y):
    """x y [64, 64], which goes on by itself."""
    return warpgroup_mma(x, y, gl.zeros([64, 64], gl.float32, _PRODUCTS), use_acc=False, is_async=True)


@gluon.jit
def _inverse_norms(base, length, stride, K: gl.constexpr):
    """1 / norm of rows 0..length-1 [64, K] of bfloat16 in memory; `_TOKENS`."""
    L: gl.constexpr = by_row(K, _WARPS)
    rows = gl.arange(0, 64, gl.SliceLayout(1, L))[:, None]
    at = rows * stride + gl.arange(0, K, gl.SliceLayout(0, L))[None, :]
    x = gl.load(base + at, mask=rows < length, other=0.0).to(gl.float32)
    return gl.rsqrt(gl.convert_layout(gl.sum(x * x, axis=1), _TOKENS) + _EPS)


@gluon.jit
def _multiply(tile, factors):
    """Rows of a tile [64, 64] in shared memory by numbers [64, 1], laid out `by_row`; not seen by other threads yet."""
    L: gl.constexpr = by_row(WIDTH, _WARPS)
    tile.store((tile.load(L).to(gl.float32) * factors).to(gl.bfloat16))


@gluon.jit
def _weigh(to, keys, strengths):
    """Keys that read: a tile [64, 64] of keys times strengths, all in shared memory; not seen by other threads yet.
    Returns their products with those that write, [64]."""
    L: gl.constexpr = by_row(WIDTH, _WARPS)
    written = keys.load(L).to(gl.float32)
    read = written * strengths.load(L).to(gl.float32)
    to.store(read.to(gl.bfloat16))
    return gl.sum(written * read, axis=1)


@gluon.jit
def _scores_at(found, levels, qs, ks, rs, qe, ke, gates, level, ERASES: gl.constexpr):
    """`found`, scores and above the diagonal pairs of keys, with those of the tokens that meet at a level. levels: of
    pairs; gates: to the edges where blocks meet; rs: with ERASES keys that read, those of odd blocks."""
    e = power(by_token(gates))
    gl.thread_barrier()  # all warps have waited for products that read what is written over
    qe.store((qs.load(CHANNELS).to(gl.float32) * e).to(gl.bfloat16))
    keys = ks.load(CHANNELS)
    if ERASES:
        odd = (gl.arange(0, 64, gl.SliceLayout(1, CHANNELS)) >> level) & 1 == 1
        keys = gl.where(odd[:, None], rs.load(CHANNELS), keys)
    ke.store((keys.to(gl.float32) * e).to(gl.bfloat16))
    visible()
    turned = ke.permute((1, 0))
    of_keys, of_queries, found = warpgroup_mma_wait(0, [_product(ke, turned), _product(qe, turned), found])
    meets = levels.load(_PRODUCTS).to(gl.float32)
    return found + gl.where(meets == level, of_queries, gl.where(meets == level + 8, of_keys, 0.0))


@gluon.jit(do_not_specialize=["T", "H"])
def channel_scores(
    q, k, g, beta, pairs, scores, reads, writes, w, decay, growth, norms, table, q_sb, q_st, q_sh, k_sb, k_st, k_sh,
    g_sb, g_st, g_sh, beta_sb, beta_st, beta_sh, T, H, scale, K: gl.constexpr, C: gl.constexpr, GROWTH: gl.constexpr,
    NORM: gl.constexpr, ERASES: gl.constexpr, PACKED: gl.constexpr, GROUP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `channels.channel_scores`. GROWTH: also growth [B H, chunks], log2 of how much the chunk makes a state grow at
    most; a token does so by no more than |1 - beta |k|^2|, and without bound if one of its gates is positive. NORM: q
    and k are to be divided by their norms, and norms [2, B H, chunks, C] are 1 / norm of queries and keys.

    ERASES: beta are strengths [B, T, H, K]; keys that read are beta k, those that write k. Growth is then of the
    transition's eigenvalues (docs/math.md, section 7, "Two strengths")."""
    begin(PDL)
    c, row = gl.program_id(0), gl.program_id(1).to(gl.int64)
    b = row // H
    h = row % H
    start, length, doc, first, last = chunk_at(table, c, T, C, PACKED)
    at = row * gl.num_programs(0) + c
    TILES: gl.constexpr = K // WIDTH
    q += b * q_sb + h // GROUP * q_sh + start * q_st
    k += b * k_sb + h // GROUP * k_sh + start * k_st
    g += b * g_sb + h * g_sh + start * g_st
    qs, ks = tiles(1, C, WIDTH).index(0), tiles(1, C, WIDTH).index(0)
    qe, ke = tiles(1, C, WIDTH).index(0), tiles(1, C, WIDTH).index(0)
    gates = room_for(g.dtype.element_ty)
    totals = gl.allocate_shared_memory(gl.float32, [PARTS, WIDTH], _TOTALS)
    rows = gl.arange(0, C, _TOKENS)
    rs, strengths = ks, gates
    if ERASES:
        beta += b * beta_sb + h * beta_sh + start * beta_st
        rs, strengths = tiles(1, C, WIDTH).index(0), room_for(beta.dtype.element_ty)
    else:
        given_beta = gl.load(beta + b * beta_sb + h * beta_sh + (start + rows) * beta_st, mask=rows < length, other=0.0)
        steps = gl.allocate_shared_memory(gl.float32, [C], _NUMBERS, given_beta.to(gl.float32))
    if NORM:
        asks, keeps = _inverse_norms(q, length, q_st, K), _inverse_norms(k, length, k_st, K)
        of_query = gl.allocate_shared_memory(gl.float32, [C], _NUMBERS, asks)
        of_key = gl.allocate_shared_memory(gl.float32, [C], _NUMBERS, keeps)
        gl.store(norms + at * C + rows, asks)
        gl.store(norms + (gl.num_programs(0) * C).to(gl.int64) * gl.num_programs(1) + at * C + rows, keeps)
    found = gl.zeros([C, C], gl.float32, _PRODUCTS)  # scores, and above the diagonal pairs of keys
    levels = _levels_of_pairs()
    largest = 0.0
    if GROWTH and ERASES:
        erased = numbers(TILES, C)
    for n in range(TILES):
        zero = gl.minimum(length + n, 0) * 16  # addresses of rows that depend on it are not kept in registers
        gl.thread_barrier()  # all warps have read what is written over
        copy_gates(gates, g + n * WIDTH, length, g_st + zero)
        copy(ks, k + n * WIDTH, length, C, WIDTH, k_st + zero, _WARPS)
        copy(qs, q + n * WIDTH, length, C, WIDTH, q_st + zero, _WARPS)
        if ERASES:
            copy_gates(strengths, beta + n * WIDTH, length, beta_st + zero)
        async_copy.commit_group()
        arrived(0)
        if NORM:  # before the barrier below
            _multiply(qs, of_query.load(gl.SliceLayout(1, by_row(WIDTH, _WARPS)))[:, None])
            _multiply(ks, of_key.load(gl.SliceLayout(1, by_row(WIDTH, _WARPS)))[:, None])
        if ERASES:
            of_tile = _weigh(rs, ks, strengths)
            if GROWTH:
                erased.index(n).store(of_tile)
        gate = read_gates(gates)
        if GROWTH:
            largest = larger(largest, gl.reduce(gl.reduce(by_token(gate), 1, larger), 0, larger))
        inside, sums = summed(gate)
        totals.store(sums)
        gl.thread_barrier()  # sums of other parts are read below
        size, x = to_middle(inside, sums, totals)
        x = by_token(x)
        qe.store((ks.load(CHANNELS).to(gl.float32) * power(-x)).to(gl.bfloat16))
        ke.store((rs.load(CHANNELS).to(gl.float32) * power(x)).to(gl.bfloat16))
        visible()
        product, found = warpgroup_mma_wait(0, [_product(qe, ke.permute((1, 0))), found])
        meets = levels.load(_PRODUCTS).to(gl.float32)
        found += gl.where((meets >= 8) & (meets < size + 8), product, 0.0)
        gl.thread_barrier()  # all warps have waited for the product that reads ke
        ke.store((qs.load(CHANNELS).to(gl.float32) * power(x)).to(gl.bfloat16))
        visible()
        product, found = warpgroup_mma_wait(0, [_product(ke, qe.permute((1, 0))), found])
        found += gl.where(levels.load(_PRODUCTS).to(gl.float32) < size, product, 0.0)
        if size < LEVELS:
            for level in range(gl.where(size == 0, 0, BLOCK), BLOCK):
                found = _scores_at(
                    found, levels, qs, ks, rs, qe, ke, to_edge(read_gates(gates), totals, level), level, ERASES
                )
            inside, sums = summed(read_gates(gates))
            for level in gl.static_range(BLOCK, LEVELS):
                found = _scores_at(
                    found, levels, qs, ks, rs, qe, ke, to_edge_of_parts(inside, sums, totals, level), level, ERASES
                )
        inside, sums = summed(read_gates(gates))
        gl.thread_barrier()  # all warps have waited for products that read what is written over
        e = power(by_token(inside + sum_before(totals)[:, None, :]))
        qs.store((qs.load(CHANNELS).to(gl.float32) * (e * scale)).to(gl.bfloat16))  # a thread's own numbers
        ke.store((rs.load(CHANNELS).to(gl.float32) * e).to(gl.bfloat16))
        e = power(by_token((sums + sum_beside(totals, LEVELS))[:, None, :] - inside))
        if not ERASES:
            e = e * steps.load(gl.SliceLayout(1, CHANNELS))[:, None]
        ks.store((ks.load(CHANNELS).to(gl.float32) * e).to(gl.bfloat16))
        columns = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, IN_PARTS)))[None, :]
        gl.store(decay + at * K + n * WIDTH + columns, power(sum_of(totals, PARTS)))
        gl.thread_barrier()  # rows in memory are other threads' numbers
        store(reads + at * C * K + n * WIDTH, qs.load(by_row(WIDTH, _WARPS)), C, C, WIDTH, K, _WARPS)
        store(w + at * C * K + n * WIDTH, ke.load(by_row(WIDTH, _WARPS)), C, C, WIDTH, K, _WARPS)
        store(writes + at * C * K + n * WIDTH, ks.load(by_row(WIDTH, _WARPS)), C, C, WIDTH, K, _WARPS)
    meets = levels.load(_PRODUCTS).to(gl.float32)
    if GROWTH and ERASES:
        step = erased.index(0).load(gl.SliceLayout(1, by_row(WIDTH, _WARPS)))  # a thread's own numbers
        for n in gl.static_range(1, TILES):
            step += erased.index(n).load(gl.SliceLayout(1, by_row(WIDTH, _WARPS)))
        most = gl.maximum(gl.abs(1.0 - step), 1.0, propagate_nan=tl.PropagateNan.ALL)
        gl.store(growth + at, gl.where(largest > 0.0, float("inf"), gl.sum(gl.log2(most), axis=0)))
    elif GROWTH:
        L: gl.constexpr = by_row(K, _WARPS)
        rows = gl.arange(0, C, gl.SliceLayout(1, L))
        at_rows = rows[:, None] * k_st + gl.arange(0, K, gl.SliceLayout(0, L))[None, :]
        x = gl.load(k + at_rows, mask=(rows < length)[:, None], other=0.0).to(gl.float32)
        step = steps.load(gl.SliceLayout(1, L))
        if NORM:
            step *= of_key.load(gl.SliceLayout(1, L)) * of_key.load(gl.SliceLayout(1, L))
        most = gl.maximum(gl.abs(1.0 - gl.sum(x * x, axis=1) * step), 1.0, propagate_nan=tl.PropagateNan.ALL)
        gl.store(growth + at, gl.where(largest > 0.0, float("inf"), gl.sum(gl.log2(most), axis=0)))
    factor = 1.0
    if not ERASES:
        factor = steps.load(gl.SliceLayout(0, _PRODUCTS))[None, :]
    store(scores + at * C * C, gl.where(meets < 8, found * (factor * scale), 0.0), C, C, C, C, _WARPS)
    if not ERASES:
        factor = steps.load(gl.SliceLayout(1, _PRODUCTS))[:, None]
    _store_pairs(pairs + at * C * C, gl.where(meets >= 8, found * factor, 0.0))


@gluon.jit
def _choose(to, x, y, count, level, MEETS: gl.constexpr):
    """Puts two tiles [64, 64] of bfloat16 in shared memory into those of `to`, with zeros but where tokens are in one
    block of 2^level, or in two that meet (MEETS). count: 0 to 63, in shared memory: what follows from numbers that the
    compiler knows it would make ahead, and keep in registers."""
    L: gl.constexpr = by_row(64, _WARPS)
    i, j = count.load(gl.SliceLayout(1, L))[:, None], count.load(gl.SliceLayout(0, L))[None, :]
    apart = (i ^ j) >> level
    asm: gl.constexpr = _MEETING if MEETS else _TOGETHER
    kept = gl.inline_asm_elementwise(asm, "=r,r,r", [apart], dtype=gl.bfloat16, is_pure=True, pack=2)
    to.index(0).store(_and(x.load(L), kept))
    to.index(1).store(_and(y.load(L), kept))


@gluon.jit
def _and(x, y):
    """Bits of numbers in bfloat16."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def _read(tile):
    """Numbers of a tile [64, 64] in bfloat16, as products have them."""
    return tile.load(_PRODUCTS).to(gl.float32)


@gluon.jit
def _row_sums(x):
    """Sums of x [64, 64] over the columns that a thread has, [64, 2, 4]."""
    return gl.sum(gl.sum(gl.reshape(x, [64, 2, 4, 4, 2]), axis=4), axis=2)


@gluon.jit
def _column_sums(x):
    """Sums of x [64, 64] over the rows that a thread has, [32, 64]."""
    return gl.reshape(gl.sum(gl.reshape(x, [4, 2, 8, 64]), axis=1), [32, 64])


@gluon.jit
def _grads_at(
    to_q, to_k, to_beta, of_gates, qs, ks, rs, qe, ke, es, scores, pairs, chosen, steps, count, gates, level,
    ERASES: gl.constexpr,
):  # fmt: skip
    """Adds to the gradients of queries, keys and steps, and to what those of gates are summed of, what pairs of tokens
    do that meet at a level. gates: to the edges where blocks meet; pairs: symmetric; chosen: room for two tiles.

    ERASES: rs are keys that read, those of odd blocks, and to_beta is the gradient of these."""
    e = power(by_token(gates))
    odd = (gl.arange(0, 64, gl.SliceLayout(1, CHANNELS)) >> level) & 1 == 1
    if not ERASES:
        step = gl.where(odd, 1.0, steps.load(gl.SliceLayout(1, CHANNELS)))[:, None]
    gl.thread_barrier()  # all warps have read what is written over, and waited for products that do
    es.store(e.to(gl.bfloat16))
    qe.store((qs.load(CHANNELS).to(gl.float32) * e).to(gl.bfloat16))
    if ERASES:
        ke.store((gl.where(odd[:, None], rs.load(CHANNELS), ks.load(CHANNELS)).to(gl.float32) * e).to(gl.bfloat16))
    else:
        ke.store((ks.load(CHANNELS).to(gl.float32) * e * step).to(gl.bfloat16))
    gl.thread_barrier()  # so that masks of pairs are not made beside what is above: registers
    _choose(chosen, scores, pairs, count, level, True)
    visible()
    scores, pairs = chosen.index(0), chosen.index(1)
    odd = ((gl.arange(0, 64, gl.SliceLayout(1, _PRODUCTS)) >> level) & 1 == 1)[:, None]
    # One product after the other: registers do not hold more. Of even tokens there are no queries.
    found, to_q, of_gates = warpgroup_mma_wait(0, [_product(scores, ke), to_q, of_gates])
    to_q += found * _read(es)
    of_gates += found * _read(qe)
    found = warpgroup_mma(scores.permute((1, 0)), qe, _product(pairs, ke), is_async=True)
    found, to_k, of_gates = warpgroup_mma_wait(0, [found, to_k, of_gates])
    of_gates += gl.where(odd, found, -found) * _read(ke)
    found = found * _read(es)
    if ERASES:
        to_k += gl.where(odd, 0.0, found)
        to_beta += gl.where(odd, found, 0.0)
    else:
        to_k += found * gl.where(odd, 1.0, steps.load(gl.SliceLayout(1, _PRODUCTS))[:, None])
        to_beta += _row_sums(gl.where(odd, 0.0, found * _read(ks)))
    return to_q, to_k, to_beta, of_gates


@gluon.jit(do_not_specialize=["T", "H", "n_chunks"])
def channel_grads(
    q, k, g, beta, do, dv, v_new, entering, leaving, skipped, gain, norms, dq, dk, dbeta, dg, table, q_sb, q_st, q_sh,
    k_sb, k_st, k_sh, g_sb, g_st, g_sh, beta_sb, beta_st, beta_sh, do_sb, do_st, do_sh, T, H, n_chunks, scale,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, NORM: gl.constexpr, ERASES: gl.constexpr, PACKED: gl.constexpr,
    GROUP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """dq, dk, dg [B, T, H, K] and, of each tile of 64 channels, dbeta [tiles, B, T, H], but of chunks that are
    `skipped`.

    dv [B, T, H, V], v_new N^T, and the S^T around the chunk are what the walks left. NORM: q and k are to be divided by
    their norms, which are as `channel_scores` left them; dq and dk are of what that gives.

    ERASES: beta and dbeta are [B, T, H, K], as in `channel_scores`.
    """
    begin(PDL)
    TILES: gl.constexpr = K // WIDTH
    c, tile, row = gl.program_id(0) // TILES, gl.program_id(0) % TILES, gl.program_id(1).to(gl.int64)
    at = row * n_chunks + c
    if gl.load(skipped + at) != 0:
        return
    k0 = tile * WIDTH
    L: gl.constexpr = by_row(WIDTH, _WARPS)
    b = row // H
    h = row % H
    start, length, doc, first, last = chunk_at(table, c, T, C, PACKED)
    of_o, of_y, N = tiles(1, C, V).index(0), tiles(1, C, V).index(0), tiles(1, V, C).index(0)
    S, dS = tiles(1, V, WIDTH).index(0), tiles(1, V, WIDTH).index(0)
    qs, ks = tiles(1, C, WIDTH).index(0), tiles(1, C, WIDTH).index(0)
    copy(of_o, do + b * do_sb + h * do_sh + start * do_st, length, C, V, do_st, _WARPS)
    copy(of_y, dv + ((b * T + start) * H + h) * V, length, C, V, H * V, _WARPS)
    copy(N, v_new + at * V * C, V, V, C, C, _WARPS)
    async_copy.commit_group()
    copy(S, entering + at * V * K + k0, V, V, WIDTH, K, _WARPS)
    copy(dS, leaving + at * V * K + k0, V, V, WIDTH, K, _WARPS)
    copy(qs, q + b * q_sb + h // GROUP * q_sh + start * q_st + k0, length, C, WIDTH, q_st, _WARPS)
    copy(ks, k + b * k_sb + h // GROUP * k_sh + start * k_st + k0, length, C, WIDTH, k_st, _WARPS)
    async_copy.commit_group()
    rows = gl.arange(0, C, _TOKENS)
    if not ERASES:
        given_beta = gl.load(beta + b * beta_sb + h * beta_sh + (start + rows) * beta_st, mask=rows < length, other=0.0)
        steps = gl.allocate_shared_memory(gl.float32, [C], _NUMBERS, given_beta.to(gl.float32))

    arrived(1)
    of_scores, of_pairs = warpgroup_mma_wait(0, [_product(of_o, N), _product(of_y, N)])
    i = gl.arange(0, C, gl.SliceLayout(1, _PRODUCTS))
    j = gl.arange(0, C, gl.SliceLayout(0, _PRODUCTS))
    # Twice the place of a token and whether its dbeta is of errors; -1 where there is no token. It is in shared memory,
    # not in registers until the end. No GPU's memory holds keys of 2^30 tokens.
    token = (((b * T + start + rows) * H + h) * 2).to(gl.int32)
    if not ERASES:
        part = gl.zeros([1], gl.int64, _TOKENS) + tile.to(gl.int64) * (gl.num_programs(1) * T)  # of dbeta
        part = gl.allocate_shared_memory(gl.int64, [1], _NUMBERS, part)
    by_errors = rows < 0
    if not ERASES:  # noqa: SIM102 (a constexpr, then a value)
        if gl.load(gain + at) > ALIKE * length:  # stored at once, as the diagonal that it is: sums would take registers
            by_errors = gl.abs(given_beta.to(gl.float32)) > LEAST_BETA
            places = gl.allocate_shared_memory(
                gl.int32, [C], _NUMBERS, gl.where(by_errors & (rows < length), token, -1)
            )
            gl.thread_barrier()  # places are other threads'
            place = gl.where(i[:, None] == j[None, :], places.load(gl.SliceLayout(1, _PRODUCTS))[:, None], -1)
            beta_c = steps.load(gl.SliceLayout(1, _PRODUCTS))
            of_errors = gl.where(tile == 0, of_pairs / beta_c[:, None], 0.0)
            gl.store(
                dbeta + part.load(gl.SliceLayout(1, _PRODUCTS))[:, None] + (place >> 1), of_errors, mask=place >= 0
            )
    token = gl.where(rows < length, token + by_errors.to(gl.int32), -1)
    places = gl.allocate_shared_memory(gl.int32, [C], _NUMBERS, token)
    of_scores = gl.where(i[:, None] >= j[None, :], of_scores * scale, 0.0)
    of_pairs = gl.where(i[:, None] > j[None, :], -of_pairs, 0.0)
    size, unit = _size(of_scores, of_pairs)  # gradients may be small, and decays make them smaller: in units of size
    scores, pairs = shared(of_scores * unit), shared(of_pairs * unit)
    sizes = gl.allocate_shared_memory(gl.float32, [1], _NUMBERS, gl.zeros([1], gl.float32, _TOKENS) + size)
    chunk = gl.allocate_shared_memory(gl.int32, [1], _NUMBERS, gl.zeros([1], gl.int32, _TOKENS) + at.to(gl.int32))
    arrived(0)
    to_p, to_k, to_q = _product(N.permute((1, 0)), dS), _product(of_y, S), _product(of_o, S)
    kept = _column_sums(_read(S.slice(0, C)) * _read(dS.slice(0, C)))
    for v0 in gl.static_range(C, V, C):
        kept += _column_sums(_read(S.slice(v0, C)) * _read(dS.slice(v0, C)))
    to_p, to_k, to_q = warpgroup_mma_wait(0, [to_p, to_k, to_q])
    gl.thread_barrier()  # all warps have waited for products that read what is written over below
    of_o._keep_alive()
    of_y._keep_alive()
    N._keep_alive()
    S._keep_alive()
    dS._keep_alive()
    gates = room_for(g.dtype.element_ty)  # before there is no room
    copy_gates(gates, g + b * g_sb + h * g_sh + start * g_st + k0, length, g_st)
    if ERASES:
        strengths = room_for(beta.dtype.element_ty)
        copy_gates(strengths, beta + b * beta_sb + h * beta_sh + start * beta_st + k0, length, beta_st)
    async_copy.commit_group()
    if NORM:  # before the barriers below
        at_rows = (chunk.load(gl.SliceLayout(1, L)).to(gl.int64) * C + gl.arange(0, C, gl.SliceLayout(1, L)))[:, None]
        _multiply(qs, gl.load(norms + at_rows))
        _multiply(ks, gl.load(norms + gl.num_programs(1).to(gl.int64) * n_chunks * C + at_rows))
    arrived(0)
    rs = ks
    if ERASES:  # before the barrier below
        rs = tiles(1, C, WIDTH).index(0)
        _weigh(rs, ks, strengths)
    inside, sums = summed(read_gates(gates))
    totals = gl.allocate_shared_memory(gl.float32, [PARTS, WIDTH], _TOTALS, sums)
    factors = gl.allocate_shared_memory(gl.float32, [C, WIDTH], _SUMS)  # made as gates lie, read as products lie
    gl.thread_barrier()  # sums of other parts are read below
    factors.store(power(by_token(inside + sum_before(totals)[:, None, :])))
    edge = gl.allocate_shared_memory(gl.float32, [1, WIDTH], _TOTALS, power(sum_of(totals, PARTS)))
    gl.thread_barrier()  # factors are other threads'
    to_q = to_q * factors.load(_PRODUCTS) * (scale * unit)
    to_k = to_k * factors.load(_PRODUCTS) * -unit
    gl.thread_barrier()  # all have read the factors
    factors.store(power(by_token((sums + sum_beside(totals, LEVELS))[:, None, :] - inside)))
    gl.thread_barrier()  # and here they are others
    to_p = to_p * factors.load(_PRODUCTS) * unit
    of_gates = to_q * _read(qs) + to_k * _read(rs)
    if ERASES:
        to_beta, to_k = to_k, to_p
        to_p = to_p * _read(ks)
    else:
        step = steps.load(gl.SliceLayout(1, _PRODUCTS))[:, None]
        to_k += to_p * step
        to_p = to_p * _read(ks)
        to_beta = _row_sums(to_p)
        to_p = to_p * step
    kept = kept * edge.load(kept.type.layout) * unit + _column_sums(to_p)
    of_gates -= to_p
    gl.thread_barrier()  # all have read the chunk's decay
    edge.store(gl.sum(kept, axis=0)[None, :])  # what passes the whole chunk, and all that its tokens write

    inside, sums = summed(read_gates(gates))
    block, x = to_middle(inside, sums, totals)
    x = by_token(x)
    es, fs, qe, ke = shared(power(x)), shared(power(-x)), tiles(1, C, WIDTH).index(0), tiles(1, C, WIDTH).index(0)
    pe, chosen = tiles(1, C, WIDTH).index(0), tiles(2, C, WIDTH)
    count = gl.allocate_shared_memory(gl.int32, [C], _NUMBERS, gl.arange(0, C, _TOKENS))
    gl.thread_barrier()  # `_choose` reads it
    qe.store((qs.load(CHANNELS).to(gl.float32) * power(x)).to(gl.bfloat16))
    ke.store((rs.load(CHANNELS).to(gl.float32) * power(x)).to(gl.bfloat16))
    if ERASES:
        pe.store((ks.load(CHANNELS).to(gl.float32) * power(-x)).to(gl.bfloat16))
    else:
        own_beta = steps.load(gl.SliceLayout(1, CHANNELS))[:, None]
        pe.store((ks.load(CHANNELS).to(gl.float32) * power(-x) * own_beta).to(gl.bfloat16))
    _choose(chosen, scores, pairs, count, block, False)
    visible()
    # Operands are rounded once, and gradients of gates are made of what products had: what pairs add to these cancels.
    found, to_q, of_gates = warpgroup_mma_wait(0, [_product(chosen.index(0), pe), to_q, of_gates])
    to_q += found * _read(es)
    of_gates += found * _read(qe)
    if ERASES:
        found, to_beta, of_gates = warpgroup_mma_wait(0, [_product(chosen.index(1), pe), to_beta, of_gates])
        to_beta += found * _read(es)
    else:
        found, to_k, of_gates = warpgroup_mma_wait(0, [_product(chosen.index(1), pe), to_k, of_gates])
        to_k += found * _read(es)
    of_gates += found * _read(ke)
    found = _product(chosen.index(0).permute((1, 0)), qe)
    found = warpgroup_mma(chosen.index(1).permute((1, 0)), ke, found, is_async=True)
    found, to_k, of_gates = warpgroup_mma_wait(0, [found, to_k, of_gates])
    of_gates -= found * _read(pe)
    found = found * _read(fs)
    if ERASES:
        to_k += found
    else:
        to_k += found * steps.load(gl.SliceLayout(1, _PRODUCTS))[:, None]
        to_beta += _row_sums(found * _read(ks))
    if block < LEVELS:
        both = shared(pairs.load(_PRODUCTS) + pairs.permute((1, 0)).load(_PRODUCTS))
        for level in range(gl.where(block == 0, 0, BLOCK), LEVELS):
            to_q, to_k, to_beta, of_gates = _grads_at(
                to_q, to_k, to_beta, of_gates, qs, ks, rs, qe, ke, es, scores, both, chosen, rs if ERASES else steps,
                count, to_edge(read_gates(gates), totals, level), level, ERASES,
            )  # fmt: skip
    if ERASES:
        place = places.load(gl.SliceLayout(1, _PRODUCTS))[:, None] >> 1
        here = place >= 0
        channel = k0 + gl.arange(0, WIDTH, gl.SliceLayout(0, _PRODUCTS))[None, :]
        token = place.to(gl.int64) // H  # of all sequences; what was known before is not kept in registers
        tokens = gl.maximum(T, 1)  # documents without tokens have chunks, too
        at_rows = token // tokens * beta_sb + token % tokens * beta_st + place.to(gl.int64) % H * beta_sh
        strength = gl.load(beta + at_rows + channel, mask=here, other=0.0)
        to_k += to_beta * strength.to(gl.float32)
        to_beta = to_beta * _read(ks) * sizes.load(gl.SliceLayout(1, _PRODUCTS))[:, None]
        gl.store(dbeta + place.to(gl.int64) * K + channel, to_beta.to(dbeta.dtype.element_ty), mask=here)
    else:
        to_beta = gl.sum(gl.sum(to_beta, axis=2), axis=1)
        place = places.load(to_beta.type.layout)
        to_beta = to_beta * sizes.load(to_beta.type.layout)
        here = (place >= 0) & (place & 1 == 0)
        gl.store(dbeta + part.load(to_beta.type.layout) + (place >> 1), to_beta, mask=here)
    gl.thread_barrier()  # all warps have read what is written over
    size = sizes.load(gl.SliceLayout(1, _PRODUCTS))[:, None]
    qs.store((to_q * size).to(gl.bfloat16))
    ks.store((to_k * size).to(gl.bfloat16))
    last = gl.allocate_shared_memory(gl.float32, [C, WIDTH], _SUMS, of_gates)
    gl.thread_barrier()  # gradients and sums are read by other threads than those that stored them
    place = places.load(gl.SliceLayout(1, L))[:, None] >> 1
    to = place.to(gl.int64) * K + k0 + gl.arange(0, WIDTH, gl.SliceLayout(0, L))[None, :]
    gl.store(dq + to, qs.load(L), mask=place >= 0)
    gl.store(dk + to, ks.load(L), mask=place >= 0)
    of_gates = by_part(last.load(CHANNELS))
    inside, sums = summed(of_gates)
    totals.store(sums)
    gl.thread_barrier()  # `sum_beside` reads what other warps stored
    found = of_gates + ((sums + sum_beside(totals, LEVELS))[:, None, :] - inside)  # of the token and those behind it
    found = by_token(found + edge.load(gl.SliceLayout(1, IN_PARTS))[:, None, :])
    found *= sizes.load(gl.SliceLayout(1, CHANNELS))[:, None]
    closed = gates.load(CHANNELS).to(gl.float32) <= GATE_MIN
    place = places.load(gl.SliceLayout(1, CHANNELS))[:, None] >> 1
    to = place.to(gl.int64) * K + k0 + gl.arange(0, WIDTH, gl.SliceLayout(0, CHANNELS))[None, :]
    gl.store(dg + to, gl.where(closed, 0.0, found).to(dg.dtype.element_ty), mask=place >= 0)
