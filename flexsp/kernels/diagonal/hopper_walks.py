"""Walks of large states on Hopper GPUs, in Gluon: one kernel makes outputs, dv, dq and dk.

All four are, of rows r, w and u that a token has,

    out_i = sum_j <r_i, w_j> E_ij u_j + (what decays until i) r_i X,   X = sum_j (what decays from j) w_j u_j^T,

with X the state or its gradient as it enters the chunk, walked to the right (outputs, dq) or to the left (dv, dk):

| out | r | w | u | X |
|---|---|---|---|---|
| o | q | k | v | S |
| dq | do | v | k | S^T |
| dv | k | q | do | dS |
| dk | v | do | q | dS^T |

A program has 128 columns of u and all N columns of r and w. It holds X^T [128, N] in the registers of eight warps: so X
enters its product as the left operand, and both that product and the update take r and w from shared memory. With so
few registers left, the left operand is made of one half of X after the other (X and Y of 128 columns each). Triton's
walks have at most 64 columns of u: twice as many programs make the same products <r_i, w_j>, and each waits in a chain
of products as long.

The products <r_i, w_j> of a chunk need no state. They are made beside the update of the state in the chunk before, and
lie in shared memory when their chunk begins. What a chunk makes is stored to memory in the next one, where no product
waits for it.

The walks of dq and dk (SUMS) leave what `gate_grad_kernel` makes gradients of gates of, as the walks in Triton do
(`flexsp.kernels.diagonal.grads`): x, the queries of dq and the keys of dk, are read for that alone.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flexsp.kernels.gluon import arrived, begin, chunk_at, numbers, power, tiles, visible

__all__ = ["COLUMNS", "WARPS", "walk_kernel"]

COLUMNS = 128
WARPS = 8
_U = gl.constexpr(COLUMNS)
_WARPS = gl.constexpr(WARPS)
_NUMBERS = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS], [0]))


@gluon.constexpr_function
def _rows(columns):
    """Layout of rows of tokens in memory, 16 bytes a thread."""
    across = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def _products(columns):
    """Layout of products [128, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, columns, 16])


@gluon.constexpr_function
def _pairs(C):
    """Layout of products [C, C], which both groups of four warps share."""
    return gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, C * 4 // WARPS, 16])


@gluon.jit
def _copy(to, base, length, R: gl.constexpr, N: gl.constexpr, stride):
    """Rows 0..length-1 of a tile [R, N] on their way to shared memory, zero below."""
    layout: gl.constexpr = _rows(N)
    rows = gl.arange(0, R, gl.SliceLayout(1, layout))
    columns = gl.arange(0, N, gl.SliceLayout(0, layout))
    at = base + rows[:, None] * stride + columns[None, :]
    async_copy.async_copy_global_to_shared(to, at, (rows < length)[:, None])


@gluon.jit
def _fetch(
    c, to, r, w, u, x, gate, writing, rs, ws, us, xs, gates, writings, table, r_st, w_st, u_st, x_st, T,
    N: gl.constexpr, C: gl.constexpr, GATED: gl.constexpr, STEPS: gl.constexpr, SUMS: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """Begins to copy what chunk c needs to the places `to`."""
    start, length, doc, first, last = chunk_at(table, c, T, C, PACKED)
    zero = gl.minimum(c, 0) * 16  # offsets of rows that depend on c are not kept in registers from chunk to chunk
    _copy(rs.index(to), r + start * r_st, length, C, N, r_st + zero)
    _copy(ws.index(to), w + start * w_st, length, C, N, w_st + zero)
    _copy(us.index(to), u + start * u_st, length, C, _U, u_st + zero)
    if SUMS:
        _copy(xs.index(to), x + start * x_st, length, C, _U, x_st + zero)
    if GATED:
        i = gl.arange(0, C, _NUMBERS)
        async_copy.async_copy_global_to_shared(gates.index(to), gate + c * C + i)
        if STEPS:
            async_copy.async_copy_global_to_shared(writings.index(to), writing + c * C + i)
    async_copy.commit_group()


@gluon.jit
def _state_at(n0, U: gl.constexpr, N: gl.constexpr, TURNED: gl.constexpr):
    """Places of columns n0.. of X^T [128, N] in memory, where a state [N, U] lies if TURNED, else [U, N]."""
    layout: gl.constexpr = _products(128)
    u = gl.arange(0, _U, gl.SliceLayout(1, layout))[:, None]
    n = n0 + gl.arange(0, 128, gl.SliceLayout(0, layout))[None, :]
    return n * U + u if TURNED else u * N + n


@gluon.jit
def _store_numbers(to, x):
    gl.store(to + gl.arange(0, x.shape[0], x.type.layout), x)


@gluon.jit
def _column_sums(to, x):
    """to [R / 16, C] = sums of x [R, C] over 16 rows each, which one warp holds: sums of all would take a barrier."""
    R: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    found = gl.sum(gl.reshape(x, [R // 16, 16, C]), axis=1)
    part = gl.arange(0, R // 16, gl.SliceLayout(1, found.type.layout))[:, None]
    gl.store(to + part * C + gl.arange(0, C, gl.SliceLayout(0, found.type.layout))[None, :], found)


@gluon.jit
def _diagonal(to, x, kept):
    """to [2, C]: the diagonal of x [C, C] and zeros, or the other way round: each group of four warps has a half of the
    columns."""
    C: gl.constexpr = x.shape[0]
    found = gl.sum(gl.reshape(gl.where(kept, x, 0.0), [C, 2, C // 2]), axis=2)
    i = gl.arange(0, C, gl.SliceLayout(1, found.type.layout))[:, None]
    gl.store(to + gl.arange(0, 2, gl.SliceLayout(0, found.type.layout))[None, :] * C + i, found)


@gluon.jit
def _scores(r, w):
    """r w^T [C, C], which goes on by itself."""
    C: gl.constexpr = r.shape[0]
    zeros = gl.zeros([C, C], gl.float32, _pairs(C))
    return warpgroup_mma(r, w.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _finish(
    scores, pairs, gates, writings, x, u, scale, of_pairs, of_skip, at, C: gl.constexpr, REVERSE: gl.constexpr,
    GATED: gl.constexpr, STEPS: gl.constexpr, SUMS: gl.constexpr, SKIPS: gl.constexpr, STRICT: gl.constexpr,
):  # fmt: skip
    """Decays the scores of a chunk, stores them at `pairs` and leaves their sums."""
    PAIR: gl.constexpr = _pairs(C)
    i = gl.arange(0, C, gl.SliceLayout(1, PAIR))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, PAIR))[None, :]
    if STRICT:
        seen = j > i if REVERSE else i > j
    else:
        seen = j >= i if REVERSE else i >= j
    if SKIPS:
        _diagonal(of_skip + at[1] * 2 * C, scores, i == j)
    if GATED:
        of_r, of_w = gates, gates
        if STEPS and REVERSE:
            of_r = writings
        elif STEPS:
            of_w = writings
        here = of_r.load(gl.SliceLayout(1, PAIR))[:, None]
        there = of_w.load(gl.SliceLayout(0, PAIR))[None, :]
        scores = gl.where(seen, scores * (power(there - here if REVERSE else here - there) * scale), 0.0)
    else:
        scores = gl.where(seen, scores * scale, 0.0)
    rounded = scores.to(gl.bfloat16)
    pairs.store(rounded)
    if SUMS and REVERSE:
        beside = warpgroup_mma_wait(0, [_scores(x, u)])
        _column_sums(of_pairs + at[0] * (C // 16) * C, rounded.to(gl.float32) * beside)


@gluon.jit
def _store_rows(to, rows, length, stride, ADD: gl.constexpr):
    """Rows 0..length-1 of a tile in shared memory, with what is there already if ADD."""
    C: gl.constexpr = rows.shape[0]
    N: gl.constexpr = rows.shape[1]
    layout: gl.constexpr = _rows(N)
    i = gl.arange(0, C, gl.SliceLayout(1, layout))
    at = to + i[:, None] * stride + gl.arange(0, N, gl.SliceLayout(0, layout))[None, :]
    found = rows.load(layout)
    if ADD:
        there = gl.load(at, mask=(i < length)[:, None], other=0.0)
        found = (found.to(gl.float32) + there.to(gl.float32)).to(gl.bfloat16)
    gl.store(at, found, mask=(i < length)[:, None])


@gluon.jit
def _rest(X):
    """What a state loses in bf16, in bf16."""
    return (X - X.to(gl.bfloat16).to(gl.float32)).to(gl.bfloat16)


@gluon.jit
def _weighted(u, gates, b_end, scale, layout: gl.constexpr, REVERSE: gl.constexpr, GATED: gl.constexpr):
    """Columns of rows u as they are, and as the state takes them up: left operands."""
    own = u.permute((1, 0)).load(layout)
    put = own
    if GATED:
        writes = gates.load(gl.SliceLayout(0, layout))
        writes = power(writes) * scale if REVERSE else power(b_end - writes)
        put = (put.to(gl.float32) * writes[None, :]).to(gl.bfloat16)
    elif REVERSE:
        put = (put.to(gl.float32) * scale).to(gl.bfloat16)
    return own, put


@gluon.jit(do_not_specialize=["T", "H", "n_seg", "n_chunks", "per_seg"])
def walk_kernel(
    r, w, u, x, gate, writing, skip, out, states, boundary, left, of_tokens, of_states, of_pairs, of_skip, edges, other,
    table,
    r_sb, r_st, r_sh, w_sb, w_st, w_sh, u_sb, u_st, u_sh, x_sb, x_st, x_sh, g_sb, g_sh, out_sb, out_st, out_sh,
    skip_sb, skip_st, skip_sh, T, H, n_seg, n_chunks, per_seg, scale,
    N: gl.constexpr, U: gl.constexpr, C: gl.constexpr, R_GROUP: gl.constexpr, U_GROUP: gl.constexpr,
    TURNED: gl.constexpr, REVERSE: gl.constexpr, GATED: gl.constexpr, STEPS: gl.constexpr, SKIP: gl.constexpr,
    BY_TOKEN: gl.constexpr, BOUNDARY: gl.constexpr, LEFT: gl.constexpr, SUMS: gl.constexpr, ENDS: gl.constexpr,
    SKIPS: gl.constexpr, STRICT: gl.constexpr, PARTS: gl.constexpr, PART: gl.constexpr, PACKED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """out [B, T, H, U] of r, w [B, T, *, N] and u [B, T, *, U], and of X at the segment's edge in `states`.

    R_GROUP heads share rows of r and w, U_GROUP those of u. STEPS: keys have gates of their own, `writing` (see
    `step_kernel`). SKIP: out has skip [H] times u besides, or skip [B, T, H] times u (BY_TOKEN). STRICT: as
    of `flexsp.kernels.primitives.sees`. boundary, left [N, H,
    ...] (BOUNDARY, LEFT): X where packed documents begin, as they are walked, and where they end. PARTS: out has a row
    for so many heads, the sum of theirs, and this is the walk of one of them, PART. All but the first add to what the
    walk before left.

    SUMS: x [B, T, *, U] is read as u is, and all in fp32 is left of_tokens [B, H, chunks, tiles, 8, C], x_i times out_i
    (to the left), or times what it reads of X (to the right), of_states [B, H, chunks, tiles, 128], rows of X times
    what the chunk adds to the other state, and to the left of_pairs [B, H, chunks, tiles, C / 16, C], pairs of the
    chunk, and edges [tiles, B, n_seg, H], X times the state `other` at the segment's edge. ENDS, to the right: edges
    [N, H, tiles, 128] are rows of X times `other` [N, H, ...] where packed documents end. SKIPS, to the left: of_skip
    [B, H, chunks, 2, C], the inner products of r and w of one token.
    """
    begin(PDL)
    u0, row, seg = gl.program_id(0) * _U, gl.program_id(1) * PARTS + PART, gl.program_id(2)
    b = (row // H).to(gl.int64)
    h = (row % H).to(gl.int64)
    r += b * r_sb + h // R_GROUP * r_sh
    w += b * w_sb + h // R_GROUP * w_sh
    u += b * u_sb + h // U_GROUP * u_sh + u0
    x += b * x_sb + h // U_GROUP * x_sh + u0
    out += b * out_sb + h // PARTS * out_sh + u0
    gate += b * g_sb + h * g_sh
    writing += b * g_sb + h * g_sh
    STATE: gl.constexpr = _products(128)
    OUT: gl.constexpr = _products(C)
    LEFT_OF_OUT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    LEFT_OF_STATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    c0 = seg * per_seg
    count = gl.minimum(per_seg, n_chunks - c0)
    c1 = c0 + count
    corner = u0 if TURNED else u0 * N
    slot = (b * (n_seg + 1) + seg + (1 if REVERSE else 0)) * H + h
    X = gl.load(states + slot * N * U + corner + _state_at(0, U, N, TURNED))
    if N == 256:
        Y = gl.load(states + slot * N * U + corner + _state_at(128, U, N, TURNED))
    n_u: gl.constexpr = U // _U
    first_sums = row.to(gl.int64) * n_chunks * n_u + gl.program_id(0)
    if SUMS and REVERSE:
        edge = gl.sum(gl.sum(X * gl.load(other + slot * N * U + corner + _state_at(0, U, N, TURNED)), axis=1), axis=0)
        if N == 256:
            more = gl.load(other + slot * N * U + corner + _state_at(128, U, N, TURNED))
            edge += gl.sum(gl.sum(Y * more, axis=1), axis=0)
        gl.store(edges + (gl.program_id(0) * (gl.num_programs(1) * PARTS // H) + b) * n_seg * H + seg * H + h, edge)
    weight = 0.0
    if BY_TOKEN:
        skip += b * skip_sb + h * skip_sh
    elif SKIP:
        weight = gl.load(skip + h).to(gl.float32)
    rs, ws, us, pairs = tiles(2, C, N), tiles(2, C, N), tiles(2, C, _U), tiles(2, C, C)
    xs = tiles(2, C, _U) if SUMS else us
    outs = tiles(1, C, _U)
    gates, writings = numbers(2, C), numbers(2, C)
    gl.thread_barrier()
    # Of the first chunk, which has none before it to do this beside.
    c = c1 - 1 if REVERSE else c0
    _fetch(
        c, 0, r, w, u, x, gate, writing, rs, ws, us, xs, gates, writings, table, r_st, w_st, u_st, x_st, T, N, C, GATED,
        STEPS, SUMS, PACKED,
    )  # fmt: skip
    arrived(0)
    scores = _scores(rs.index(0), ws.index(0))
    scores = warpgroup_mma_wait(0, [scores])
    at = first_sums + c.to(gl.int64) * n_u, row.to(gl.int64) * n_chunks + c
    _finish(
        scores, pairs.index(0), gates.index(0), writings.index(0), xs.index(0), us.index(0), scale, of_pairs, of_skip,
        at, C, REVERSE, GATED, STEPS, SUMS, SKIPS, STRICT,
    )  # fmt: skip
    to_out, length = out, 0
    b_next = 0.0
    if GATED:
        b_next = gl.load(gate + c * C + C - 1)
    for n in range(0, count):
        s = n % 2
        c = c1 - 1 - n if REVERSE else c0 + n
        # After the last chunk the same once more, which changes nothing: no branch, in which products would wait.
        later = gl.minimum(n + 1, count - 1)
        later = c1 - 1 - later if REVERSE else c0 + later
        visible()  # its pairs; and all products of the chunk before are done, and what they read may go
        _fetch(
            later, 1 - s, r, w, u, x, gate, writing, rs, ws, us, xs, gates, writings, table, r_st, w_st, u_st, x_st, T,
            N, C, GATED, STEPS, SUMS, PACKED,
        )  # fmt: skip
        if PACKED:
            start, length_here, doc, first, last = chunk_at(table, c, T, C, PACKED)
            reset = last if REVERSE else first
            X = gl.where(reset, 0.0, X)
            if N == 256:
                Y = gl.where(reset, 0.0, Y)
            if BOUNDARY:  # noqa: SIM102 (a constexpr, then a value)
                if reset:
                    at_doc = boundary + (doc * H + h) * N * U + corner
                    X = gl.load(at_doc + _state_at(0, U, N, TURNED))
                    if N == 256:
                        Y = gl.load(at_doc + _state_at(128, U, N, TURNED))
        of_r, of_w, of_u = rs.index(s), ws.index(s), us.index(s)
        at_sums = first_sums + c.to(gl.int64) * n_u
        of_read, of_write = gates.index(s), gates.index(s)
        if STEPS and REVERSE:
            of_read = writings.index(s)
        elif STEPS:
            of_write = writings.index(s)
        b_end = b_next
        if GATED:
            b_next = gl.load(gate + later * C + C - 1)
        if SUMS and N == 128:
            # <X, what the chunk adds to the other state>, with the operands of that walk: what it adds cancels to fp32.
            mine = xs.index(s).permute((1, 0)).load(LEFT_OF_STATE)
            reading = of_read.load(gl.SliceLayout(0, LEFT_OF_STATE))
            reading = power(b_end - reading) if REVERSE else power(reading) * scale
            read = (mine.to(gl.float32) * reading[None, :]).to(gl.bfloat16)
            zeros = gl.zeros([_U, 128], gl.float32, STATE)
            added = warpgroup_mma(read, of_r.slice(0, 128, 1), zeros, use_acc=False, is_async=True)
            added = warpgroup_mma_wait(0, [added])
            _store_numbers(of_states + at_sums * _U, gl.sum(X * added, axis=1))
        held = gl.convert_layout(X.to(gl.bfloat16), LEFT_OF_OUT)
        found = warpgroup_mma(
            held, of_r.slice(0, 128, 1).permute((1, 0)), gl.zeros([_U, C], gl.float32, OUT), use_acc=False,
            is_async=True,
        )  # fmt: skip
        _store_rows(to_out, outs.index(0), length, out_st, PART > 0)  # of the chunk before
        start, length, doc, first, last = chunk_at(table, c, T, C, PACKED)
        to_out = out + start * out_st
        if SUMS and N == 256:
            # The same number, of what tokens read, with X in two parts: there are no registers for what a chunk adds.
            # States go through the waits, so that no operand is made before the one before it may go: where registers
            # do not suffice, ptxas has all products of the kernel wait for each other.
            found, X = warpgroup_mma_wait(0, [found, X])
            held = gl.convert_layout(_rest(X), LEFT_OF_OUT)
            found = warpgroup_mma(held, of_r.slice(0, 128, 1).permute((1, 0)), found, is_async=True)
            found, Y = warpgroup_mma_wait(0, [found, Y])
            held = gl.convert_layout(Y.to(gl.bfloat16), LEFT_OF_OUT)
            found = warpgroup_mma(held, of_r.slice(128, 128, 1).permute((1, 0)), found, is_async=True)
            found, Y = warpgroup_mma_wait(0, [found, Y])
            held = gl.convert_layout(_rest(Y), LEFT_OF_OUT)
            found = warpgroup_mma(held, of_r.slice(128, 128, 1).permute((1, 0)), found, is_async=True)
        else:
            own, put = _weighted(of_u, of_write, b_end, scale, LEFT_OF_STATE, REVERSE, GATED)
            found = warpgroup_mma_wait(0, [found])
            if N == 256:
                held = gl.convert_layout(Y.to(gl.bfloat16), LEFT_OF_OUT)
                found = warpgroup_mma(held, of_r.slice(128, 128, 1).permute((1, 0)), found, is_async=True)
        if GATED:
            X = X * power(b_end)
            if N == 256:
                Y = Y * power(b_end)
        found = warpgroup_mma_wait(0, [found])
        if GATED:
            reads = of_read.load(gl.SliceLayout(0, OUT))
            reads = power(b_end - reads) if REVERSE else power(reads) * scale
            if SUMS:
                mine = gl.convert_layout(xs.index(s).permute((1, 0)).load(LEFT_OF_STATE), OUT).to(gl.float32)
                if N == 256:
                    rounded = (mine * reads[None, :]).to(gl.bfloat16).to(gl.float32)  # as the other state has it
                    _store_numbers(of_states + at_sums * _U, gl.sum(found * rounded, axis=1))
                if not REVERSE:
                    _column_sums(of_tokens + at_sums * (_U // 16) * C, found * reads[None, :] * mine)
            found = found * reads[None, :]
        elif not REVERSE:
            found = found * scale
        if SUMS and N == 256:  # here, since registers are few
            own, put = _weighted(of_u, of_write, b_end, scale, LEFT_OF_STATE, REVERSE, GATED)
        if BY_TOKEN:
            i = gl.arange(0, C, gl.SliceLayout(0, OUT))
            weights = gl.load(skip + (start + i) * skip_st, mask=i < length, other=0.0)
            found += gl.convert_layout(own, OUT).to(gl.float32) * weights[None, :]
        elif SKIP:
            found += gl.convert_layout(own, OUT).to(gl.float32) * weight
        found = warpgroup_mma(of_u.permute((1, 0)), pairs.index(s).permute((1, 0)), found, is_async=True)
        X = warpgroup_mma(put, of_w.slice(0, 128, 1), X, is_async=True)
        if N == 256:
            Y = warpgroup_mma(put, of_w.slice(128, 128, 1), Y, is_async=True)
        arrived(0)
        scores = _scores(rs.index(1 - s), ws.index(1 - s))
        found = warpgroup_mma_wait(3 if N == 256 else 2, [found])
        if SUMS and REVERSE:
            mine = xs.index(s).permute((1, 0)).load(LEFT_OF_STATE)
            _column_sums(of_tokens + at_sums * (_U // 16) * C, found * gl.convert_layout(mine, OUT).to(gl.float32))
        outs.index(0).permute((1, 0)).store(found.to(gl.bfloat16))
        if N == 256:
            X, Y, scores = warpgroup_mma_wait(0, [X, Y, scores])
        else:
            X, scores = warpgroup_mma_wait(0, [X, scores])
        at = first_sums + later.to(gl.int64) * n_u, row.to(gl.int64) * n_chunks + later
        _finish(
            scores, pairs.index(1 - s), gates.index(1 - s), writings.index(1 - s), xs.index(1 - s), us.index(1 - s),
            scale, of_pairs, of_skip, at, C, REVERSE, GATED, STEPS, SUMS, SKIPS, STRICT,
        )  # fmt: skip
        if PACKED and LEFT:
            ends = first if REVERSE else last
            if ends:
                at_doc = left + (doc * H + h) * N * U + corner
                gl.store(at_doc + _state_at(0, U, N, TURNED), X)
                if N == 256:
                    gl.store(at_doc + _state_at(128, U, N, TURNED), Y)
        if PACKED and ENDS:  # noqa: SIM102
            if last:
                at_doc = other + (doc * H + h) * N * U + corner
                by_row = gl.sum(X * gl.load(at_doc + _state_at(0, U, N, TURNED)), axis=1)
                if N == 256:
                    by_row += gl.sum(Y * gl.load(at_doc + _state_at(128, U, N, TURNED)), axis=1)
                _store_numbers(edges + ((doc * H + h) * n_u + gl.program_id(0)) * _U, by_row)
    gl.thread_barrier()
    _store_rows(to_out, outs.index(0), length, out_st, PART > 0)
