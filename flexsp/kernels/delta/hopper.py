"""`grads` for Hopper GPUs in Gluon, Triton's lower level: what a chunk reads is copied to shared memory all at once.

Triton keeps such copies for loops. Without them every tile passes the registers, and each product waits for its own.
Only for bfloat16 and heads of 64 or 128, whose rows are whole vectors of the copies.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

__all__ = ["grads"]


@gluon.constexpr_function
def _rows(columns, warps):
    """Layout of a tile [R, columns] that is read from memory, 16 bytes a thread."""
    across = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def _sums(columns, warps):
    """Layout of products [64, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


@gluon.jit
def _at(R: gl.constexpr, N: gl.constexpr, stride):
    """Offsets of a tile [R, N] whose rows are `stride` apart."""
    layout: gl.constexpr = _rows(N, gl.num_warps())
    rows = gl.arange(0, R, gl.SliceLayout(1, layout))
    columns = gl.arange(0, N, gl.SliceLayout(0, layout))
    return rows[:, None] * stride + columns[None, :]


@gluon.jit
def _copied(base, R: gl.constexpr, N: gl.constexpr, stride):
    """A tile [R, N] of bfloat16 on its way to shared memory."""
    to = gl.allocate_shared_memory(gl.bfloat16, [R, N], gl.NVMMASharedLayout.get_default_for([R, N], gl.bfloat16))
    async_copy.async_copy_global_to_shared(to, base + _at(R, N, stride))
    return to


@gluon.jit
def _loaded(base, length, R: gl.constexpr, N: gl.constexpr, stride):
    """Rows 0..length-1 of a tile [R, N], zero below, in registers."""
    rows = gl.arange(0, R, gl.SliceLayout(1, _rows(N, gl.num_warps())))
    return gl.load(base + _at(R, N, stride), mask=(rows < length)[:, None], other=0.0)


@gluon.jit
def _shared(x):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(x.shape, gl.bfloat16)
    return gl.allocate_shared_memory(gl.bfloat16, x.shape, layout, x.to(gl.bfloat16))


@gluon.jit
def _stored(base, x, length, R: gl.constexpr, N: gl.constexpr, stride):
    rows = gl.arange(0, R, gl.SliceLayout(1, _rows(N, gl.num_warps())))
    x = gl.convert_layout(x.to(gl.bfloat16), _rows(N, gl.num_warps()))
    gl.store(base + _at(R, N, stride), x, mask=(rows < length)[:, None])


@gluon.jit
def _arrived(groups: gl.constexpr):
    """Waits for all copies but the last `groups`, which products may then read."""
    async_copy.wait_group(groups)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _product(a, b, N: gl.constexpr):
    """a [64, n] times b [n, N], begun."""
    zeros = gl.zeros([64, N], gl.float32, _sums(N, gl.num_warps()))
    return warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)


@gluon.jit(do_not_specialize=["T", "H", "n_chunks"])
def grads(
    q, k, do, strength, inverse, errors, derrors, gates, entering, leaving, dq, dk, dv, parts, table,
    q_sb, q_st, q_sh, k_sb, k_st, k_sh, do_sb, do_st, do_sh, T, H, n_chunks, scale,
    K: gl.constexpr, BK: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, GATED: gl.constexpr,
    PACKED: gl.constexpr, DOT: gl.constexpr, PREC: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `flexsp.kernels.delta.grads.grads`."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    TILES: gl.constexpr = K // BK
    CK: gl.constexpr = _sums(BK, gl.num_warps())
    CC: gl.constexpr = _sums(C, gl.num_warps())
    c, tile, row = gl.program_id(0) // TILES, gl.program_id(0) % TILES, gl.program_id(1).to(gl.int64)
    k0 = tile * BK
    b = row // H
    h = row % H
    start = (c * C).to(gl.int64)
    length = gl.minimum(T - c * C, C)
    if PACKED:
        start = gl.load(table + c * 5).to(gl.int64)
        length = gl.load(table + c * 5 + 1)
    at = row * n_chunks + c

    dN = _copied(derrors + at * V * C, V, C, C)
    turned = _copied(inverse + at * C * C, C, C, C)
    async_copy.commit_group()
    N = _copied(errors + at * V * C, V, C, C)
    async_copy.commit_group()
    S = _copied(entering + at * V * K + k0, V, BK, K)
    dS = _copied(leaving + at * V * K + k0, V, BK, K)
    async_copy.commit_group()
    oc = _shared(_loaded(do + b * do_sb + h * do_sh + start * do_st, length, C, V, do_st))
    qs = _shared(_loaded(q + b * q_sb + h * q_sh + start * q_st + k0, length, C, BK, q_st))
    ks = _shared(_loaded(k + b * k_sb + h * k_sh + start * k_st + k0, length, C, BK, k_st))
    i = gl.arange(0, C, gl.SliceLayout(1, CC))
    j = gl.arange(0, C, gl.SliceLayout(0, CC))
    r = gl.arange(0, C, gl.SliceLayout(1, CK))
    below = i[:, None] > j[None, :]
    w = gl.load(strength + at * C + r)
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

    _arrived(2)
    y = warpgroup_mma_wait(0, [_product(turned.permute((1, 0)), dN.permute((1, 0)), V)])
    if tile == 0:
        _stored(dv + ((b * T + start) * H + h) * V, y, length, C, V, H * V)
    ys = _shared(y)
    _arrived(1)
    reads, pairs = warpgroup_mma_wait(0, [_product(oc, N, C), _product(ys, N, C)])
    own = gl.sum(gl.where(i[:, None] == j[None, :], reads, 0.0), axis=1) * scale  # of no gate: a token and itself
    own = gl.convert_layout(own, gl.SliceLayout(1, CK))
    reads_s = _shared(reads * decay * scale)
    pairs_s = _shared(pairs * -decay)
    _arrived(0)
    to_p, to_k, to_q = warpgroup_mma_wait(
        0, [_product(N.permute((1, 0)), dS, BK), _product(ys, S, BK), _product(oc, S, BK)]
    )
    if GATED:
        whole: gl.constexpr = _rows(BK, gl.num_warps())
        both = S.load(whole).to(gl.float32) * dS.load(whole).to(gl.float32)
        kept = gl.sum(gl.sum(both, axis=1), axis=0) * kept
    to_p = to_p * to_end[:, None]
    to_k = to_k * -from_start[:, None]
    to_q = to_q * (from_start * scale)[:, None]
    kc = ks.load(CK).to(gl.float32)
    pc = (kc * w[:, None]).to(gl.bfloat16)  # rounded once: what pairs of tokens add to dg cancels in the sums below
    ps = _shared(pc)
    pc = pc.to(gl.float32)
    fence_async_shared()
    gl.thread_barrier()
    to_q = warpgroup_mma(reads_s, ps, to_q, is_async=True)
    to_k = warpgroup_mma(pairs_s, ps, to_k, is_async=True)
    by_pairs = _product(reads_s.permute((1, 0)), qs, BK)
    by_pairs = warpgroup_mma(pairs_s.permute((1, 0)), ks, by_pairs, is_async=True)
    to_q, to_k, by_pairs = warpgroup_mma_wait(0, [to_q, to_k, by_pairs])
    qc = qs.load(CK).to(gl.float32)
    sums = gl.sum(to_q * qc + to_k * kc - by_pairs * pc, axis=1)
    left = gl.sum(to_p * pc, axis=1)
    to_q += own[:, None] * pc
    _stored(dq + ((b * T + start) * H + h) * K + k0, to_q, length, C, BK, H * K)
    to_p += by_pairs + own[:, None] * qc
    part = parts + (tile * gl.num_programs(1) + row) * n_chunks * C + c * C
    gl.store(part + r, gl.sum(to_p * kc, axis=1))
    to_k += to_p * w[:, None]
    _stored(dk + ((b * T + start) * H + h) * K + k0, to_k, length, C, BK, H * K)
    if GATED:
        sums = gl.convert_layout(sums, gl.SliceLayout(0, CC))
        left = gl.convert_layout(left, gl.SliceLayout(0, CC))
        passed = gl.sum(gl.where(below, left[None, :], sums[None, :]), axis=1) + kept
        of_gates = (TILES * n_chunks * C).to(gl.int64) * gl.num_programs(1)
        gl.store(part + of_gates + i, passed)
