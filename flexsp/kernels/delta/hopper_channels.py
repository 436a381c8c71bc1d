"""What `channels` does of chunks whose gates add up to little, on Hopper GPUs; the kernels there do the others.

Decays of pairs of tokens are products e^{b_i - b_m} e^{b_m - b_j}, with m the middle of the chunk. A thread has whole
columns of tokens, so that gates are summed in registers.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flexsp.kernels.delta.exact import ALIKE, LEAST_BETA
from flexsp.kernels.gluon import (
    arrived,
    begin,
    begun,
    by_row,
    by_sum,
    chunk_at,
    copy,
    numbers,
    power,
    shared,
    store,
    tiles,
    visible,
)
from flexsp.kernels.primitives import GATE_MIN, LOG2E

__all__ = ["channel_grads", "channel_scores"]

_SMALL = gl.constexpr(104.0)  # log2: what such factors multiply neither overflows nor vanishes
_GROWTH = gl.constexpr(10.0)
_SUMS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
_PARTS = gl.constexpr(4)  # of the tokens, one a warp


@gluon.constexpr_function
def by_channel(tokens):
    """Layout of a tile [tokens, 64]: a thread has two columns of a quarter of the tokens."""
    return gl.BlockedLayout([tokens // _PARTS.value, 2], [1, 32], [4, 1], [1, 0])


@gluon.constexpr_function
def _in_parts(tokens):
    """The same of [4, tokens / 4, 64]."""
    return gl.BlockedLayout([1, tokens // _PARTS.value, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0])


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def _larger(x, y):
    return gl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def _places(stride, C: gl.constexpr, N: gl.constexpr):
    """Offsets of a tile [C, N] whose rows are `stride` apart."""
    rows = gl.arange(0, C, gl.SliceLayout(1, by_channel(C)))
    columns = gl.arange(0, N, gl.SliceLayout(0, by_channel(C)))
    return rows[:, None] * stride + columns[None, :]


@gluon.jit
def _load(base, length, stride, C: gl.constexpr, N: gl.constexpr):
    """A tile [C, N], zero from row `length` on."""
    rows = gl.arange(0, C, gl.SliceLayout(1, by_channel(C)))
    return gl.load(base + _places(stride, C, N), mask=(rows < length)[:, None], other=0.0)


@gluon.jit
def _scanned(x, SUFFIX: gl.constexpr, C: gl.constexpr, N: gl.constexpr):
    """Sums over the tokens until each of x [C, N], or from each on; over the first half, and over all."""
    L: gl.constexpr = _in_parts(C)
    EVERY: gl.constexpr = gl.BlockedLayout([_PARTS, 2], [1, 32], [1, 4], [1, 0])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, by_channel(C))
    x = gl.convert_layout(gl.reshape(x, [_PARTS, C // _PARTS, N]), L, assert_trivial=True)
    inside = gl.associative_scan(x, 1, _add)
    sums = gl.sum(x, axis=1)
    room = gl.allocate_shared_memory(gl.float32, [_PARTS, N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), sums)
    gl.thread_barrier()
    every = room.load(EVERY)
    which = gl.arange(0, _PARTS, gl.SliceLayout(1, EVERY))[:, None]
    own = gl.arange(0, _PARTS, gl.SliceLayout(1, gl.SliceLayout(1, L)))[:, None]
    beyond = gl.zeros([_PARTS, N], gl.float32, gl.SliceLayout(1, L))
    for n in gl.static_range(_PARTS):
        part = gl.convert_layout(
            gl.sum(gl.where(which == n, every, 0.0), axis=0), gl.SliceLayout(0, gl.SliceLayout(1, L)),
            assert_trivial=True,
        )  # fmt: skip
        beyond += gl.where(own < n if SUFFIX else own > n, part[None, :], 0.0)
    if SUFFIX:
        inside = x + (sums[:, None, :] - inside)
    found = gl.convert_layout(
        gl.reshape(inside + beyond[:, None, :], [C, N]), by_channel(C), assert_trivial=True
    )  # fmt: skip
    half = gl.convert_layout(gl.sum(gl.where(which < _PARTS // 2, every, 0.0), axis=0), COLUMNS, assert_trivial=True)
    return found, half, gl.convert_layout(gl.sum(every, axis=0), COLUMNS, assert_trivial=True)


@gluon.jit
def _sums(gate, C: gl.constexpr, N: gl.constexpr):
    """Cumulative gates in log2 [C, N]; their values in the middle, and at the end."""
    gate = gate.to(gl.float32)
    gate = gl.where(gate < GATE_MIN, GATE_MIN, gate) * LOG2E  # NaN stays
    return _scanned(gate, False, C, N)


@gluon.jit
def _largest(gate, C: gl.constexpr, N: gl.constexpr):
    """The largest gate of each channel in each part of the tokens, [4, N]."""
    parts = gl.reshape(gate.to(gl.float32), [_PARTS, C // _PARTS, N])
    return gl.reduce(gl.convert_layout(parts, _in_parts(C), assert_trivial=True), 1, _larger)


@gluon.jit
def _size(x, y):
    """The power of two that the largest number of x and y has at least, and one over it; 1 where there is none."""
    x = x.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    y = y.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = gl.max(gl.max(gl.maximum(x, y), axis=1), axis=0) >> 23
    exponent = gl.where((exponent > 0) & (exponent < 255), gl.minimum(gl.maximum(exponent, 28), 226), 127)
    return (exponent << 23).to(gl.float32, bitcast=True), ((254 - exponent) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _store_pairs(to, x, C: gl.constexpr):
    """x [C, C], which is zero on and above the diagonal, as bfloat16; its rounding is transposed above the diagonal."""
    first = x.to(gl.bfloat16)
    rest = gl.permute((x - first.to(gl.float32)).to(gl.bfloat16), (1, 0))
    rows = gl.arange(0, C, gl.SliceLayout(1, by_row(C)))[:, None]
    columns = gl.arange(0, C, gl.SliceLayout(0, by_row(C)))[None, :]
    x = gl.where(rows > columns, gl.convert_layout(first, by_row(C)), gl.convert_layout(rest, by_row(C)))
    gl.store(to + rows * C + columns, x)


@gluon.jit(do_not_specialize=["T", "H"])
def channel_scores(
    q, k, g, beta, pairs, scores, reads, writes, w, decay, small_gates, growth, table, q_sb, q_st, q_sh, k_sb, k_st,
    k_sh, g_sb, g_st, g_sh, beta_sb, beta_st, beta_sh, T, H, scale, K: gl.constexpr, C: gl.constexpr,
    GROWTH: gl.constexpr, PACKED: gl.constexpr, GROUP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `channels.channel_scores`. small_gates [B H, chunks]: whether the chunk's gates add up to little, so that what
    is written stands.
    """
    begin(PDL)
    c, row = gl.program_id(0), gl.program_id(1).to(gl.int64)
    b = row // H
    h = row % H
    start, length, doc, first, last = chunk_at(table, c, T, C, PACKED)
    at = row * gl.num_programs(0) + c
    q += b * q_sb + h // GROUP * q_sh + start * q_st
    k += b * k_sb + h // GROUP * k_sh + start * k_st
    g += b * g_sb + h * g_sh + start * g_st
    beta += b * beta_sb + h * beta_sh + start * beta_st
    CC: gl.constexpr = by_sum(C)
    N: gl.constexpr = 64
    rows = gl.arange(0, C, gl.SliceLayout(1, by_channel(C)))
    beta_c = gl.load(beta + rows * beta_st, mask=rows < length, other=0.0).to(gl.float32)
    qs, ks, ps = tiles(K // N, C, N), tiles(K // N, C, N), tiles(K // N, C, N)
    for n in gl.static_range(K // N):
        copy(qs.index(n), q + n * N, length, C, N, q_st)
        copy(ks.index(n), k + n * N, length, C, N, k_st)
    async_copy.commit_group()
    L: gl.constexpr = by_channel(C)
    large = 0
    most = gl.zeros([_PARTS, N], gl.float32, gl.SliceLayout(1, _in_parts(C)))
    for n in range(K // N):
        gate = _load(g + n * N, length, g_st, C, N)
        if GROWTH:
            most = _larger(most, _largest(gate, C, N))
        total, middle, end = _sums(gate, C, N)
        x = total - middle[None, :]
        grown = gl.where((rows < C // 2)[:, None], -x, x) <= _GROWTH
        small = (gl.abs(x) <= _SMALL) & grown & (total <= _GROWTH) & (middle >= -_SMALL)[None, :]
        large += gl.sum(gl.sum((~small).to(gl.int32), axis=1), axis=0)
        to = at * C * K + n * N + _places(K, C, N)
        arrived(0)
        found = ks.index(n).load(L).to(gl.float32) * power(-x)
        ps.index(n).store(found.to(gl.bfloat16))
        found = found * power(end - middle)[None, :] * beta_c[:, None]
        gl.store(writes + to, found.to(gl.bfloat16))
        e = power(x)
        found = ks.index(n).load(L).to(gl.float32) * e
        ks.index(n).store(found.to(gl.bfloat16))
        gl.store(w + to, (found * power(middle)[None, :]).to(gl.bfloat16))
        found = qs.index(n).load(L).to(gl.float32) * e
        qs.index(n).store(found.to(gl.bfloat16))
        gl.store(reads + to, (found * (power(middle) * scale)[None, :]).to(gl.bfloat16))
        columns = gl.arange(0, N, gl.SliceLayout(0, L))
        gl.store(decay + at * K + n * N + columns, power(end))
    visible()
    of_keys = gl.zeros([C, C], gl.float32, CC)
    of_queries = of_keys
    for n in gl.static_range(K // N):
        of_keys = warpgroup_mma(ks.index(n), ps.index(n).permute((1, 0)), of_keys, is_async=True)
        of_queries = warpgroup_mma(qs.index(n), ps.index(n).permute((1, 0)), of_queries, is_async=True)
    of_keys, of_queries = warpgroup_mma_wait(0, [of_keys, of_queries])
    i = gl.arange(0, C, gl.SliceLayout(1, CC))
    j = gl.arange(0, C, gl.SliceLayout(0, CC))
    if GROWTH:
        own = gl.sum(gl.where(i[:, None] == j[None, :], of_keys, 0.0), axis=1)
        own = gl.abs(1.0 - own * gl.convert_layout(beta_c, gl.SliceLayout(1, CC)))
        grown = gl.sum(gl.log2(gl.maximum(own, 1.0, propagate_nan=tl.PropagateNan.ALL)), axis=0)
        positive = gl.reduce(gl.reduce(most, 1, _larger), 0, _larger) > 0.0
        gl.store(growth + at, gl.where(positive, float("inf"), grown))
    factor = gl.convert_layout(beta_c, gl.SliceLayout(0, CC))[None, :]
    _store_pairs(pairs + at * C * C, gl.where(i[:, None] > j[None, :], of_keys * factor, 0.0), C)
    of_queries = of_queries * (factor * scale)
    store(scores + at * C * C, gl.where(i[:, None] >= j[None, :], of_queries, 0.0), C, C, C, C)
    gl.store(small_gates + at, gl.where(large == 0, 1, 0))


@gluon.jit(do_not_specialize=["T", "H", "n_chunks"])
def channel_grads(
    q, k, g, beta, do, dv, v_new, entering, leaving, small_gates, gain, dq, dk, dbeta, dg, table, q_sb, q_st, q_sh,
    k_sb, k_st, k_sh, g_sb, g_st, g_sh, beta_sb, beta_st, beta_sh, do_sb, do_st, do_sh, T, H, n_chunks, scale,
    K: gl.constexpr, PARTS: gl.constexpr, V: gl.constexpr, C: gl.constexpr, PACKED: gl.constexpr, GROUP: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """dq, dk, dg [B, T, H, K] and, of tiles of channels, dbeta [tiles, B, T, H], of chunks of `small_gates`, and not 2.

    dv [B, T, H, V], v_new N^T, and the S^T around the chunk are what the walks left. The first of PARTS tiles of
    dbeta has what 64 channels add, the others zeros.
    """
    begin(PDL)
    N: gl.constexpr = 64
    CK: gl.constexpr = by_sum(N)
    CC: gl.constexpr = by_sum(C)
    TILES: gl.constexpr = K // N
    c, tile, row = gl.program_id(0) // TILES, gl.program_id(0) % TILES, gl.program_id(1).to(gl.int64)
    at = row * n_chunks + c
    if gl.load(small_gates + at) != 1:
        return
    k0 = tile * N
    b = row // H
    h = row % H
    start, length, doc, first, last = chunk_at(table, c, T, C, PACKED)
    of_o, of_y, v_new_s = tiles(1, C, V).index(0), tiles(1, C, V).index(0), tiles(1, V, C).index(0)
    S, dS = tiles(1, V, N).index(0), tiles(1, V, N).index(0)
    qs, ks = tiles(1, C, N).index(0), tiles(1, C, N).index(0)
    copy(of_o, do + b * do_sb + h * do_sh + start * do_st, length, C, V, do_st)
    copy(of_y, dv + ((b * T + start) * H + h) * V, length, C, V, H * V)
    copy(v_new_s, v_new + at * V * C, V, V, C, C)
    async_copy.commit_group()
    copy(S, entering + at * V * K + k0, V, V, N, K)
    copy(dS, leaving + at * V * K + k0, V, V, N, K)
    copy(qs, q + b * q_sb + h // GROUP * q_sh + start * q_st + k0, length, C, N, q_st)
    copy(ks, k + b * k_sb + h // GROUP * k_sh + start * k_st + k0, length, C, N, k_st)
    async_copy.commit_group()
    g += b * g_sb + h * g_sh + start * g_st + k0
    gate = _load(g, length, g_st, C, N)
    rows = gl.arange(0, C, gl.SliceLayout(1, CK))
    beta_c = gl.load(beta + b * beta_sb + h * beta_sh + (start + rows) * beta_st, mask=rows < length, other=0.0)
    beta_c = beta_c.to(gl.float32)

    arrived(1)
    i = gl.arange(0, C, gl.SliceLayout(1, CC))
    j = gl.arange(0, C, gl.SliceLayout(0, CC))
    of_scores, of_pairs = warpgroup_mma_wait(0, [begun(of_o, v_new_s, C), begun(of_y, v_new_s, C)])
    dbeta += ((tile * PARTS * (gl.num_programs(1) // H) + b) * T + start) * H + h
    if gl.load(gain + at) > ALIKE * length:  # stored at once, and as the diagonal that it is: sums would take registers
        step = gl.load(beta + b * beta_sb + h * beta_sh + (start + i) * beta_st, mask=i < length, other=0.0)
        step = step.to(gl.float32)
        of_errors = (i[:, None] == j[None, :]) & (gl.abs(step) > LEAST_BETA)[:, None]
        place = dbeta + (i * H)[:, None] + j[None, :] * 0
        gl.store(place, gl.where(tile == 0, of_pairs / step[:, None], 0.0), mask=of_errors)
    of_scores = gl.where(i[:, None] >= j[None, :], of_scores * scale, 0.0)
    of_pairs = gl.where(i[:, None] > j[None, :], -of_pairs, 0.0)
    size, unit = _size(of_scores, of_pairs)  # gradients may be small, and decays make them smaller: in units of size
    scores_s, pairs_s = shared(of_scores * unit), shared(of_pairs * unit)
    arrived(0)
    to_p, to_k, to_q = begun(v_new_s.permute((1, 0)), dS, N), begun(of_y, S, N), begun(of_o, S, N)
    kept = gl.zeros([C, N], gl.float32, CK)
    for v0 in gl.static_range(0, V, C):
        kept += S.slice(v0, C).load(CK).to(gl.float32) * dS.slice(v0, C).load(CK).to(gl.float32)
    to_p, to_k, to_q = warpgroup_mma_wait(0, [to_p, to_k, to_q])
    total, middle, end = _sums(gate, C, N)  # all warps have waited for these products, so that they are written over
    from_middle = gl.allocate_shared_memory(gl.float32, [C, N], _SUMS, power(total - middle[None, :]))
    to_middle = gl.allocate_shared_memory(gl.float32, [C, N], _SUMS, power(middle[None, :] - total))
    edges = numbers(2, N)
    edges.index(0).store(middle)
    edges.index(1).store(end)
    gl.thread_barrier()
    middle = edges.index(0).load(gl.SliceLayout(0, CK))
    end = edges.index(1).load(gl.SliceLayout(0, CK))
    to_p = to_p * power(end - middle)[None, :] * unit
    to_k = to_k * power(middle)[None, :] * -unit
    to_q = to_q * power(middle)[None, :] * (scale * unit)
    pe = (ks.load(CK).to(gl.float32) * to_middle.load(CK) * beta_c[:, None]).to(gl.bfloat16)
    pe_s = shared(pe)
    kept = kept * power(end)[None, :] * unit + pe.to(gl.float32) * to_p
    qe_s = shared(qs.load(CK).to(gl.float32) * from_middle.load(CK))
    ke_s = shared(ks.load(CK).to(gl.float32) * from_middle.load(CK))
    edges.index(0).store(gl.sum(kept, axis=0))
    visible()
    to_q = warpgroup_mma(scores_s, pe_s, to_q, is_async=True)
    to_k = warpgroup_mma(pairs_s, pe_s, to_k, is_async=True)
    to_p = warpgroup_mma(scores_s.permute((1, 0)), qe_s, to_p, is_async=True)
    to_p = warpgroup_mma(pairs_s.permute((1, 0)), ke_s, to_p, is_async=True)
    to_q, to_k, to_p = warpgroup_mma_wait(0, [to_q, to_k, to_p])
    sums = qe_s.load(CK).to(gl.float32) * to_q  # as products had them: what pairs add to dg cancels in its sums
    qs.store((to_q * from_middle.load(CK) * size).to(gl.bfloat16))
    sums += ke_s.load(CK).to(gl.float32) * to_k
    sums -= pe_s.load(CK).to(gl.float32) * to_p
    to_p = to_p * to_middle.load(CK) * size
    by_errors = (gl.load(gain + at) > ALIKE * length) & (gl.abs(beta_c) > LEAST_BETA)
    to_beta = gl.sum(to_p * ks.load(CK).to(gl.float32), axis=1)
    part = dbeta + rows * H
    gl.store(part, to_beta, mask=(rows < length) & ~by_errors)
    for n in gl.static_range(1, PARTS):
        skipped = gl.num_programs(1).to(gl.int64) * T * n
        gl.store(part + skipped, gl.zeros([C], gl.float32, gl.SliceLayout(1, CK)), mask=rows < length)
    ks.store((to_k * from_middle.load(CK) * size + to_p * beta_c[:, None]).to(gl.bfloat16))
    from_middle.store(sums)
    gl.thread_barrier()
    to = ((b * T + start) * H + h) * K + k0
    store(dq + to, qs.load(by_row(N)), length, C, N, H * K)
    store(dk + to, ks.load(by_row(N)), length, C, N, H * K)
    L: gl.constexpr = by_channel(C)
    sums, half, whole = _scanned(from_middle.load(L), True, C, N)
    sums = (sums + edges.index(0).load(gl.SliceLayout(0, L))[None, :]) * size
    closed = _load(g, length, g_st, C, N).to(gl.float32) < GATE_MIN
    tokens = gl.arange(0, C, gl.SliceLayout(1, L))
    place = dg + to + _places(H * K, C, N)
    gl.store(place, gl.where(closed, 0.0, sums).to(dg.dtype.element_ty), mask=(tokens < length)[:, None])
