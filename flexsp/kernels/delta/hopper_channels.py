"""What `channels` does of chunks whose gates add up to little, on Hopper GPUs; the kernels there do the others.

Decays of pairs of tokens are products e^{b_i - b_m} e^{b_m - b_j}, with m the middle of the chunk. A thread has whole
columns of tokens, so that gates are summed in registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flexsp.kernels.delta.hopper import (
    arrived,
    begin,
    begun,
    by_row,
    by_sum,
    chunk_at,
    copy,
    shared,
    store,
    tiles,
    visible,
)

__all__ = ["channel_grads", "channel_scores"]

_GATE_MIN = gl.constexpr(-104.0)
_LOG2E = gl.constexpr(1.4426950408889634)
_LITTLE = gl.constexpr(80.0)  # log2: what such factors multiply neither overflows nor vanishes
_GROWTH = gl.constexpr(10.0)
_SUMS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))


@gluon.constexpr_function
def by_channel(tokens, columns):
    """Layout of a tile [tokens, columns], 32 or 64: a thread has two columns of tokens that follow each other."""
    down = 64 // columns
    return gl.BlockedLayout([tokens // (4 * down), 2], [down, 32 // down], [4, 1], [1, 0])


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def _places(stride, C: gl.constexpr, N: gl.constexpr):
    """Offsets of a tile [C, N] whose rows are `stride` apart."""
    rows = gl.arange(0, C, gl.SliceLayout(1, by_channel(C, N)))
    columns = gl.arange(0, N, gl.SliceLayout(0, by_channel(C, N)))
    return rows[:, None] * stride + columns[None, :]


@gluon.jit
def _load(base, length, stride, C: gl.constexpr, N: gl.constexpr):
    """A tile [C, N], zero from row `length` on."""
    rows = gl.arange(0, C, gl.SliceLayout(1, by_channel(C, N)))
    return gl.load(base + _places(stride, C, N), mask=(rows < length)[:, None], other=0.0)


@gluon.jit
def _row(x, row, C: gl.constexpr, N: gl.constexpr):
    """One row of x [C, N]."""
    rows = gl.arange(0, C, gl.SliceLayout(1, by_channel(C, N)))
    return gl.sum(gl.where((rows == row)[:, None], x, 0.0), axis=0)


@gluon.jit
def _sums(gate, C: gl.constexpr, N: gl.constexpr):
    """Cumulative gates in log2 [C, N]; their values in the middle, and at the end."""
    gate = gate.to(gl.float32)
    gate = gl.where(gate < _GATE_MIN, _GATE_MIN, gate) * _LOG2E  # NaN stays
    total = gl.associative_scan(gate, 0, _add)
    return total, _row(total, C // 2 - 1, C, N), _row(total, C - 1, C, N)


@gluon.jit(do_not_specialize=["T", "H"])
def channel_scores(
    q, k, g, beta, pairs, scores, reads, writes, w, decay, mild, table, q_sb, q_st, q_sh, k_sb, k_st, k_sh,
    g_sb, g_st, g_sh, beta_sb, beta_st, beta_sh, T, H, scale, K: gl.constexpr, C: gl.constexpr, PACKED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """As `channels.channel_scores`. mild [B H, chunks]: whether the chunk's gates add up to little, so that what is
    written stands."""
    begin(PDL)
    c, row = gl.program_id(0), gl.program_id(1).to(gl.int64)
    b = row // H
    h = row % H
    start, length, doc, first, last = chunk_at(table, c, T, C, PACKED)
    at = row * gl.num_programs(0) + c
    q += b * q_sb + h * q_sh + start * q_st
    k += b * k_sb + h * k_sh + start * k_st
    g += b * g_sb + h * g_sh + start * g_st
    beta += b * beta_sb + h * beta_sh + start * beta_st
    CC: gl.constexpr = by_sum(C)
    N: gl.constexpr = 64
    rows = gl.arange(0, C, gl.SliceLayout(1, by_channel(C, N)))
    strength = gl.load(beta + rows * beta_st, mask=rows < length, other=0.0).to(gl.float32)
    qs, ks, ps = tiles(K // N, C, N), tiles(K // N, C, N), tiles(K // N, C, N)
    for n in gl.static_range(K // N):
        copy(qs.index(n), q + n * N, length, C, N, q_st)
        copy(ks.index(n), k + n * N, length, C, N, k_st)
    async_copy.commit_group()
    L: gl.constexpr = by_channel(C, N)
    strong = 0
    for n in range(K // N):
        total, middle, end = _sums(_load(g + n * N, length, g_st, C, N), C, N)
        x = total - middle[None, :]
        little = (gl.abs(x) <= _LITTLE) & (total <= _GROWTH)
        strong += gl.sum(gl.sum((~little).to(gl.int32), axis=1), axis=0)
        to = at * C * K + n * N + _places(K, C, N)
        arrived(0)
        found = ks.index(n).load(L).to(gl.float32) * gl.exp2(-x)
        ps.index(n).store(found.to(gl.bfloat16))
        found = found * gl.exp2(end - middle)[None, :] * strength[:, None]
        gl.store(writes + to, found.to(gl.bfloat16))
        e = gl.exp2(x)
        found = ks.index(n).load(L).to(gl.float32) * e
        ks.index(n).store(found.to(gl.bfloat16))
        gl.store(w + to, (found * gl.exp2(middle)[None, :]).to(gl.bfloat16))
        found = qs.index(n).load(L).to(gl.float32) * e
        qs.index(n).store(found.to(gl.bfloat16))
        gl.store(reads + to, (found * (gl.exp2(middle) * scale)[None, :]).to(gl.bfloat16))
        columns = gl.arange(0, N, gl.SliceLayout(0, L))
        gl.store(decay + at * K + n * N + columns, gl.exp2(end))
    visible()
    of_keys = gl.zeros([C, C], gl.float32, CC)
    of_queries = of_keys
    for n in gl.static_range(K // N):
        of_keys = warpgroup_mma(ks.index(n), ps.index(n).permute((1, 0)), of_keys, is_async=True)
        of_queries = warpgroup_mma(qs.index(n), ps.index(n).permute((1, 0)), of_queries, is_async=True)
    of_keys, of_queries = warpgroup_mma_wait(0, [of_keys, of_queries])
    i = gl.arange(0, C, gl.SliceLayout(1, CC))
    j = gl.arange(0, C, gl.SliceLayout(0, CC))
    factor = gl.convert_layout(strength, gl.SliceLayout(0, CC))[None, :]
    store(pairs + at * C * C, gl.where(i[:, None] > j[None, :], of_keys * factor, 0.0), C, C, C, C)
    of_queries = of_queries * (factor * scale)
    store(scores + at * C * C, gl.where(i[:, None] >= j[None, :], of_queries, 0.0), C, C, C, C)
    gl.store(mild + at, (strong == 0).to(gl.int32))


@gluon.jit(do_not_specialize=["T", "H", "n_chunks"])
def channel_grads(
    q, k, g, beta, do, dv, errors, entering, leaving, mild, dq, dk, dbeta, dg, table, q_sb, q_st, q_sh, k_sb, k_st,
    k_sh, g_sb, g_st, g_sh, beta_sb, beta_st, beta_sh, do_sb, do_st, do_sh, T, H, n_chunks, scale, K: gl.constexpr,
    PARTS: gl.constexpr, V: gl.constexpr, C: gl.constexpr, PACKED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """dq, dk, dg [B, T, H, K] and, of tiles of channels, dbeta [tiles, B, T, H], of chunks that are `mild`.

    dv [B, T, H, V], errors N^T, and the S^T around the chunk are what the walks left. The first of PARTS tiles of
    dbeta has what 64 channels add, the others zeros.
    """
    begin(PDL)
    N: gl.constexpr = 64
    CK: gl.constexpr = by_sum(N)
    CC: gl.constexpr = by_sum(C)
    TILES: gl.constexpr = K // N
    c, tile, row = gl.program_id(0) // TILES, gl.program_id(0) % TILES, gl.program_id(1).to(gl.int64)
    at = row * n_chunks + c
    if gl.load(mild + at) == 0:
        return
    k0 = tile * N
    b = row // H
    h = row % H
    start, length, doc, first, last = chunk_at(table, c, T, C, PACKED)
    of_o, of_y, errors_s = tiles(1, C, V).index(0), tiles(1, C, V).index(0), tiles(1, V, C).index(0)
    S, dS = tiles(1, V, N).index(0), tiles(1, V, N).index(0)
    qs, ks = tiles(1, C, N).index(0), tiles(1, C, N).index(0)
    copy(of_o, do + b * do_sb + h * do_sh + start * do_st, length, C, V, do_st)
    copy(of_y, dv + ((b * T + start) * H + h) * V, length, C, V, H * V)
    copy(errors_s, errors + at * V * C, V, V, C, C)
    async_copy.commit_group()
    copy(S, entering + at * V * K + k0, V, V, N, K)
    copy(dS, leaving + at * V * K + k0, V, V, N, K)
    copy(qs, q + b * q_sb + h * q_sh + start * q_st + k0, length, C, N, q_st)
    copy(ks, k + b * k_sb + h * k_sh + start * k_st + k0, length, C, N, k_st)
    async_copy.commit_group()
    g += b * g_sb + h * g_sh + start * g_st + k0
    gate = _load(g, length, g_st, C, N)
    rows = gl.arange(0, C, gl.SliceLayout(1, CK))
    strength = gl.load(beta + b * beta_sb + h * beta_sh + (start + rows) * beta_st, mask=rows < length, other=0.0)
    strength = strength.to(gl.float32)

    arrived(1)
    i = gl.arange(0, C, gl.SliceLayout(1, CC))
    j = gl.arange(0, C, gl.SliceLayout(0, CC))
    of_scores, of_pairs = warpgroup_mma_wait(0, [begun(of_o, errors_s, C), begun(of_y, errors_s, C)])
    scores_s = shared(gl.where(i[:, None] >= j[None, :], of_scores * scale, 0.0))
    pairs_s = shared(gl.where(i[:, None] > j[None, :], -of_pairs, 0.0))
    arrived(0)
    whole: gl.constexpr = by_row(N)
    kept = gl.sum(S.load(whole).to(gl.float32) * dS.load(whole).to(gl.float32), axis=0)
    to_p, to_k, to_q = warpgroup_mma_wait(
        0, [begun(errors_s.permute((1, 0)), dS, N), begun(of_y, S, N), begun(of_o, S, N)]
    )
    total, middle, end = _sums(gate, C, N)
    gl.thread_barrier()
    xs = gl.allocate_shared_memory(gl.float32, [C, N], _SUMS, total - middle[None, :])
    to_end = gl.convert_layout(gl.exp2(end - middle), gl.SliceLayout(0, CK))
    middle = gl.convert_layout(gl.exp2(middle), gl.SliceLayout(0, CK))
    kept = gl.convert_layout(kept, gl.SliceLayout(0, by_channel(C, N))) * gl.exp2(end)
    to_p = to_p * to_end[None, :]
    to_k = to_k * -middle[None, :]
    to_q = to_q * (middle * scale)[None, :]
    gl.thread_barrier()
    pe = (ks.load(CK).to(gl.float32) * gl.exp2(-xs.load(CK)) * strength[:, None]).to(gl.bfloat16)
    pe_s = shared(pe)
    from_p = gl.sum(pe.to(gl.float32) * to_p, axis=0)
    qe_s = shared(qs.load(CK).to(gl.float32) * gl.exp2(xs.load(CK)))
    ke_s = shared(ks.load(CK).to(gl.float32) * gl.exp2(xs.load(CK)))
    visible()
    to_q = warpgroup_mma(scores_s, pe_s, to_q, is_async=True)
    to_k = warpgroup_mma(pairs_s, pe_s, to_k, is_async=True)
    to_p = warpgroup_mma(scores_s.permute((1, 0)), qe_s, to_p, is_async=True)
    to_p = warpgroup_mma(pairs_s.permute((1, 0)), ke_s, to_p, is_async=True)
    to_q, to_k, to_p = warpgroup_mma_wait(0, [to_q, to_k, to_p])
    to = ((b * T + start) * H + h) * K + k0
    sums = qe_s.load(CK).to(gl.float32) * to_q  # as products had them: what pairs add to dg cancels in its sums
    store(dq + to, to_q * gl.exp2(xs.load(CK)), length, C, N, H * K)
    sums += ke_s.load(CK).to(gl.float32) * to_k
    sums -= pe_s.load(CK).to(gl.float32) * to_p
    to_p = to_p * gl.exp2(-xs.load(CK))
    part = dbeta + ((tile * PARTS * (gl.num_programs(1) // H) + b) * T + start + rows) * H + h
    gl.store(part, gl.sum(to_p * ks.load(CK).to(gl.float32), axis=1), mask=rows < length)
    for n in gl.static_range(1, PARTS):
        skipped = gl.num_programs(1).to(gl.int64) * T * n
        gl.store(part + skipped, gl.zeros([C], gl.float32, gl.SliceLayout(1, CK)), mask=rows < length)
    store(dk + to, to_k * gl.exp2(xs.load(CK)) + to_p * strength[:, None], length, C, N, H * K)
    sums = gl.associative_scan(gl.convert_layout(sums, by_channel(C, N)), 0, _add, reverse=True)
    kept += gl.convert_layout(from_p, gl.SliceLayout(0, by_channel(C, N)))
    closed = _load(g, length, g_st, C, N).to(gl.float32) < _GATE_MIN
    sums = gl.where(closed, 0.0, sums + kept[None, :])
    tokens = gl.arange(0, C, gl.SliceLayout(1, by_channel(C, N)))
    gl.store(dg + to + _places(H * K, C, N), sums.to(dg.dtype.element_ty), mask=(tokens < length)[:, None])
