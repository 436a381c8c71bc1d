"""`grads` of the delta engine on Hopper GPUs: all that a chunk reads is copied to shared memory at once. Of more than
128 values a panel of 64 is, while the one before is worked on."""

from __future__ import annotations

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
    copy_tokens,
    of_outputs,
    shared,
    store,
    store_tokens,
    tiles,
    visible,
)

__all__ = ["grads"]


@gluon.constexpr_function
def whole(K):
    """Columns of a tile that holds rows of K numbers."""
    return max(64, 1 << (K - 1).bit_length())


@gluon.jit
def _joined(
    x, x_st, norms, parts, to, start, length, stride, C: gl.constexpr, K: gl.constexpr, WHOLE: gl.constexpr,
    NORM: gl.constexpr, GROUP: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Sums over GROUP heads of the gradients g that programs left in `parts`. If NORM these are of unit rows u, divided
    by the norms of the rows x, and are taken through the norms: g - u <u, g>. Tiles have WHOLE columns, and as many
    rows as registers hold."""
    R: gl.constexpr = C if WHOLE <= 128 else C // 2
    rows: gl.constexpr = gl.SliceLayout(1, by_row(WHOLE))
    for first in gl.static_range(0, C, R):
        token, there = of_outputs(start + first, length - first, R, STEPS, rows)
        token, there = ((start + first) // STEPS + token)[:, None], there[:, None]
        columns = gl.arange(0, WHOLE, gl.SliceLayout(0, by_row(WHOLE)))[None, :]
        if K != WHOLE:
            there = there & (columns < K)
        found = gl.zeros([R, WHOLE], gl.float32, by_row(WHOLE))
        for n in range(GROUP):
            at = parts + token * (stride * GROUP) + n * K + columns
            found += gl.load(at, mask=there, other=0.0, cache_modifier=".cg").to(gl.float32)
        if NORM:
            u = gl.load(x + token * x_st + columns, mask=there, other=0.0).to(gl.float32)
            u = u * gl.load(norms + first + gl.arange(0, R, rows))[:, None]
            found -= u * gl.sum(u * found + 0.0, axis=1)[:, None]
        gl.store(to + token * stride + columns, found.to(gl.bfloat16), mask=there)


@gluon.jit(do_not_specialize=["T", "H", "n_chunks", "before", "held"])
def grads(
    q, k, do, dv, chunk_beta, v_new, gates, gain, norms, exact, entering, leaving, done, dq, dk, parts, joined_q,
    joined_k, table, q_sb, q_st, q_sh, k_sb, k_st, k_sh, do_sb, do_st, do_sh, T, H, n_chunks, before, held, scale,
    K: gl.constexpr, BK: gl.constexpr, V: gl.constexpr, C: gl.constexpr, GATED: gl.constexpr, NORM: gl.constexpr,
    JOINS: gl.constexpr, PACKED: gl.constexpr, GROUP: gl.constexpr, STEPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `flexsp.kernels.delta.grads.grads`, with dv, v_new and states as `hopper_walks` left them: of `held`
    chunks, the first of them behind `before` others. Of heads that `exact` names `exact_grads` has done that.

    NORM: q and k are to be divided by their norms, and so are dq and dk; norms are as `wy_inverse` left them. JOINS:
    the last program of those that share rows of q and k makes of their dq and dk the gradients of these rows, joined_q
    and joined_k. `done` [B H / GROUP, chunks] counts programs, from 0 on.
    """
    begin(PDL)
    TILES: gl.constexpr = (K + BK - 1) // BK
    tile = gl.program_id(0) % TILES
    row = gl.program_id(1).to(gl.int64) * GROUP + gl.program_id(0) // TILES % GROUP
    c = before + gl.program_id(0) // (TILES * GROUP)
    b, h = row // H, row % H
    start, length, doc, first, last = chunk_at(table, c, T, C, PACKED)
    q += b * q_sb + h // GROUP * q_sh
    k += b * k_sb + h // GROUP * k_sh
    if gl.load(exact + row * n_chunks + c) == 0:
        _of_chunk(
            q, k, do + b * do_sb + h * do_sh, dv + (b * T * H + h) * V, chunk_beta, v_new, gates, gain, norms, entering,
            leaving, dq + (b * (T // STEPS) * H + h) * K, dk + (b * T * H + h) * K, parts, q_st, k_st, do_st, start,
            length, c, row, tile, H, n_chunks, before, held, scale, K, BK, V, C, GATED, NORM, GROUP, STEPS,
        )  # fmt: skip
    if JOINS:
        gl.thread_barrier()
        before_it = gl.atomic_add(done + gl.program_id(1) * n_chunks + c, 1, sem="acq_rel", scope="gpu")
        if before_it == TILES * GROUP - 1:
            heads, of_all = H // GROUP, row - row % GROUP
            h = of_all % H
            norms += (of_all * n_chunks + c) * C
            _joined(
                q, q_st, norms, dq + (b * (T // STEPS) * H + h) * K, joined_q + (b * (T // STEPS) * H + h) // GROUP * K,
                start, length, heads * K, C, K, whole(K), NORM, GROUP, STEPS,
            )  # fmt: skip
            norms += gl.num_programs(1).to(gl.int64) * n_chunks * (C * GROUP)
            _joined(
                k, k_st, norms, dk + (b * T * H + h) * K, joined_k + (b * T * H + h) // GROUP * K, start, length,
                heads * K, C, K, whole(K), NORM, GROUP, 1,
            )  # fmt: skip


@gluon.jit
def _room(C: gl.constexpr, PANEL: gl.constexpr, BK: gl.constexpr):
    """For gradients of outputs and of values, N^T, S^T and dS^T of a panel of values."""
    of_o, of_y, N = tiles(1, C, PANEL).index(0), tiles(1, C, PANEL).index(0), tiles(1, PANEL, C).index(0)
    return of_o, of_y, N, tiles(1, PANEL, BK).index(0), tiles(1, PANEL, BK).index(0)


@gluon.jit
def _fetch(
    to, n: gl.constexpr, do, dv, v_new, entering, leaving, q, k, qs, ks, do_st, q_st, k_st, start, length, H, place, k0,
    width, K: gl.constexpr, BK: gl.constexpr, V: gl.constexpr, PANEL: gl.constexpr, C: gl.constexpr,
    STEPS: gl.constexpr,
):  # fmt: skip
    """Begins to copy panel n, and queries and keys with the first one, in two groups."""
    of_o, of_y, N, S, dS = to
    v0: gl.constexpr = n * PANEL
    copy_tokens(of_o, do + v0, start, length, C, PANEL, do_st, STEPS)
    copy(of_y, dv + start * H * V + v0, length, C, PANEL, H * V)
    copy(N, v_new + place * V * C + v0 * C, PANEL, PANEL, C, C)
    async_copy.commit_group()
    copy(S, entering + place * V * K + v0 * K + k0, PANEL, PANEL, BK, K, width=width)
    copy(dS, leaving + place * V * K + v0 * K + k0, PANEL, PANEL, BK, K, width=width)
    if n == 0:
        copy_tokens(qs, q + k0, start, length, C, BK, q_st, STEPS, width)
        copy(ks, k + start * k_st + k0, length, C, BK, k_st, width=width)
    async_copy.commit_group()


@gluon.jit
def _keep_alive(room):
    of_o, of_y, N, S, dS = room
    of_o._keep_alive()
    of_y._keep_alive()
    N._keep_alive()
    S._keep_alive()
    dS._keep_alive()


@gluon.jit
def _passed(S, dS, BK: gl.constexpr):
    """The sum of products of what S^T and dS^T have."""
    whole: gl.constexpr = by_row(BK)
    both = S.load(whole).to(gl.float32) * dS.load(whole).to(gl.float32)
    return gl.sum(gl.sum(both, axis=1), axis=0)


@gluon.jit
def _of_chunk(
    q, k, do, dv, chunk_beta, v_new, gates, gain, norms, entering, leaving, dq, dk, parts, q_st, k_st, do_st, start,
    length, c, row, tile, H, n_chunks, before, held, scale, K: gl.constexpr, BK: gl.constexpr, V: gl.constexpr,
    C: gl.constexpr, GATED: gl.constexpr, NORM: gl.constexpr, GROUP: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Of one head's tile of BK columns."""
    TILES: gl.constexpr = (K + BK - 1) // BK
    PANEL: gl.constexpr = V if V <= 128 else 64
    PANELS: gl.constexpr = V // PANEL
    CK: gl.constexpr = by_sum(BK)
    CC: gl.constexpr = by_sum(C)
    k0 = tile * BK
    width = None if K == TILES * BK else K - k0
    at, place = row * n_chunks + c, row * held + c - before
    all_chunks = gl.num_programs(1).to(gl.int64) * n_chunks * (C * GROUP)
    room = _room(C, PANEL, BK)
    other = room
    if PANELS > 1:
        other = _room(C, PANEL, BK)
    rooms = room, other
    qs, ks = tiles(1, C, BK).index(0), tiles(1, C, BK).index(0)
    for n in gl.static_range(2 if PANELS > 1 else 1):
        _fetch(
            rooms[n], n, do, dv, v_new, entering, leaving, q, k, qs, ks, do_st, q_st, k_st, start, length, H, place, k0,
            width, K, BK, V, PANEL, C, STEPS,
        )  # fmt: skip
    if PANELS > 1:  # sums of products take the registers of what is loaded below
        reads, pairs = gl.zeros([C, C], gl.float32, CC), gl.zeros([C, C], gl.float32, CC)
        to_p = gl.zeros([C, BK], gl.float32, CK)
        to_k, to_q = to_p, to_p
        passed = 0.0
        for n in gl.static_range(PANELS - 1):
            of_o, of_y, N, S, dS = rooms[n % 2]
            arrived(3)  # a panel comes in two groups of copies: gradients and errors, then states
            reads = warpgroup_mma(of_o, N, reads, is_async=True)
            pairs = warpgroup_mma(of_y, N, pairs, is_async=True)
            arrived(2)
            to_p = warpgroup_mma(N.permute((1, 0)), dS, to_p, is_async=True)
            to_k = warpgroup_mma(of_y, S, to_k, is_async=True)
            to_q = warpgroup_mma(of_o, S, to_q, is_async=True)
            if GATED:
                passed += _passed(S, dS, BK)
            reads, pairs, to_p, to_k, to_q = warpgroup_mma_wait(0, [reads, pairs, to_p, to_k, to_q])
            gl.thread_barrier()  # products of every warp have read what the next panel but one is copied over
            _keep_alive(rooms[n % 2])
            if n + 2 < PANELS:
                _fetch(
                    rooms[n % 2], n + 2, do, dv, v_new, entering, leaving, q, k, qs, ks, do_st, q_st, k_st, start,
                    length, H, place, k0, width, K, BK, V, PANEL, C, STEPS,
                )  # fmt: skip
    i = gl.arange(0, C, gl.SliceLayout(1, CC))
    j = gl.arange(0, C, gl.SliceLayout(0, CC))
    r = gl.arange(0, C, gl.SliceLayout(1, CK))
    below = i[:, None] > j[None, :]
    w = gl.load(chunk_beta + at * C + r)
    of_query = gl.full([C], 1.0, gl.float32, gl.SliceLayout(1, CK))
    of_key = of_query
    if NORM:
        of_query = gl.load(norms + at * C + r)
        of_key = gl.load(norms + all_chunks + at * C + r)
    decay = gl.where(below, 1.0, 0.0)
    kept = 0.0
    from_start = gl.full([C], 1.0, gl.float32, gl.SliceLayout(1, CK))
    to_end = from_start
    if GATED:
        decay = gl.load(gates + at * C + i)[:, None] - gl.load(gates + at * C + j)[None, :]
        decay = gl.exp2(gl.where(below, decay, float("-inf")))
        sums_of_gates = gl.load(gates + at * C + r)
        end = gl.load(gates + at * C + C - 1)
        from_start = gl.exp2(sums_of_gates)
        to_end = gl.exp2(end - sums_of_gates)
        kept = gl.exp2(end)

    arrived(1)
    of_o, of_y, N, S, dS = rooms[(PANELS - 1) % 2]
    if PANELS > 1:
        reads = warpgroup_mma(of_o, N, reads, is_async=True)
        pairs = warpgroup_mma(of_y, N, pairs, is_async=True)
    else:
        reads, pairs = begun(of_o, N, C), begun(of_y, N, C)
    arrived(0)
    if PANELS > 1:
        to_p = warpgroup_mma(N.permute((1, 0)), dS, to_p, is_async=True)
        to_k = warpgroup_mma(of_y, S, to_k, is_async=True)
        to_q = warpgroup_mma(of_o, S, to_q, is_async=True)
    else:
        to_p, to_k, to_q = begun(N.permute((1, 0)), dS, BK), begun(of_y, S, BK), begun(of_o, S, BK)
    reads, pairs = warpgroup_mma_wait(3, [reads, pairs])
    own = gl.sum(gl.where(i[:, None] == j[None, :], reads, 0.0), axis=1) * scale  # of no gate: a token and itself
    own = gl.convert_layout(own, gl.SliceLayout(1, CK)) * of_query
    of_errors = gl.sum(gl.where(i[:, None] == j[None, :], pairs, 0.0), axis=1)
    of_errors = gl.convert_layout(of_errors, gl.SliceLayout(1, CK))
    part = parts + tile * all_chunks + at * C
    by_errors = (gl.load(gain + at) > ALIKE * length) & (gl.abs(w) > LEAST_BETA)
    gl.store(part + r, gl.where(tile == 0, of_errors / w, 0.0), mask=by_errors)  # no register is left to keep it in
    reads_s = shared(reads * decay * gl.convert_layout(of_query * scale, gl.SliceLayout(1, CC))[:, None])
    pairs_s = shared(pairs * decay * gl.convert_layout(-of_key, gl.SliceLayout(1, CC))[:, None])
    if GATED:
        passes = _passed(S, dS, BK)
        if PANELS > 1:
            passes += passed
        kept = passes * kept
    to_p, to_k, to_q = warpgroup_mma_wait(0, [to_p, to_k, to_q])
    gl.thread_barrier()  # all warps have waited for products that read what is written over below
    _keep_alive(rooms[(PANELS - 1) % 2])
    kc = ks.load(CK).to(gl.float32)
    written = w * of_key
    # Rounded once: what pairs of tokens add to dg cancels in the sums below.
    pc = (kc * written[:, None]).to(gl.bfloat16)
    ps = shared(pc)
    pc = pc.to(gl.float32)
    to_p = to_p * to_end[:, None]
    to_k = to_k * -(from_start * of_key)[:, None]
    to_q = to_q * (from_start * scale * of_query)[:, None]
    visible()
    to_q = warpgroup_mma(reads_s, ps, to_q, is_async=True)
    to_k = warpgroup_mma(pairs_s, ps, to_k, is_async=True)
    by_pairs = begun(reads_s.permute((1, 0)), qs, BK)
    by_pairs = warpgroup_mma(pairs_s.permute((1, 0)), ks, by_pairs, is_async=True)
    left = gl.sum(to_p * pc, axis=1)
    to_q, to_k, by_pairs = warpgroup_mma_wait(0, [to_q, to_k, by_pairs])
    qc = qs.load(CK).to(gl.float32)
    sums = gl.sum(to_q * qc + to_k * kc - by_pairs * pc, axis=1)
    to_q += own[:, None] * pc
    store_tokens(dq + k0, to_q, start, length, C, BK, H * K, STEPS, width)
    to_p += by_pairs + own[:, None] * qc
    by_errors = (gl.load(gain + at) > ALIKE * length) & (gl.abs(w) > LEAST_BETA)
    of_beta = gl.sum(to_p * kc, axis=1)
    if NORM:
        of_beta *= gl.load(norms + all_chunks + at * C + r)
    gl.store(part + r, of_beta, mask=~by_errors)
    to_k += to_p * written[:, None]
    store(dk + start * H * K + k0, to_k, length, C, BK, H * K, width=width)
    if GATED:
        gl.store(part + TILES * all_chunks + r, sums + gl.where(r == length - 1, kept, 0.0))
        gl.store(part + 2 * TILES * all_chunks + r, left)
