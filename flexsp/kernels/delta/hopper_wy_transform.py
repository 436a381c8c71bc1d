"""What is made of a chunk before any state is known, on Hopper GPUs: gates, the inverse of I + G, scores of queries.

A warp has a chunk, in blocks of 16 tokens: ten of them lie on and below the diagonal. Those on the diagonal are
inverted by substitution, a thread having two columns of one; those below are products of inverses and of N = -G, which
`_times` takes from registers as they are. All is fp32: keys may repeat, and the inverse is then ill-conditioned
(docs/math.md, sections 7 and 15).
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from flexsp.kernels.alike_keys import FEW_KEYS, GOLDEN, NEARER
from flexsp.kernels.gluon import begin, chunk_at, nothing, of_gates, of_outputs, power
from flexsp.kernels.keys_in_pytorch import EPS
from flexsp.kernels.primitives import GATE_MIN, LOG2E

__all__ = ["inverse", "wy_inverse"]

_TOKENS = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))
_MATRIX = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
_ROWS = gl.constexpr(gl.SliceLayout(1, _SUMS.value))
_COLUMNS = gl.constexpr(gl.SliceLayout(0, _SUMS.value))
_FOUND = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0]],
        [[0, 0, 2], [0, 0, 4], [0, 0, 8], [1, 0, 0], [2, 0, 0]], [], [], [4, 16, 16],
    )
)  # fmt: skip
_GIVEN = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8]], [[0, 0], [0, 0], [0, 0], [0, 16], [0, 32]], [], [], [1, 64]
    )
)
_BLOCKS = gl.constexpr(gl.PaddedSharedLayout.with_identity_for([[64, 8]], [16, 64], [1, 0]))
_TILE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
_NUMBERS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_EPS = gl.constexpr(EPS)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _negative(x):
    """-x, in bfloat16."""
    asm: gl.constexpr = "xor.b32 $0, $1, 0x80008000;"
    return gl.inline_asm_elementwise(asm, "=r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2)


# Products of blocks [16, 16]


@gluon.jit
def _left(x):
    """x as a left operand, in the order of columns that costs nothing."""
    x = gl.reshape(gl.permute(gl.reshape(x, [16, 2, 4, 2]), (0, 1, 3, 2)), [16, 16])
    return gl.convert_layout(x, gl.DotOperandLayout(0, _SUMS, 1), assert_trivial=True)


@gluon.jit
def _right(x):
    """The transpose of x as a right operand, in the order of `_left`."""
    x = gl.permute(gl.reshape(gl.permute(gl.reshape(x, [16, 2, 4, 2]), (0, 1, 3, 2)), [16, 16]), (1, 0))
    return gl.convert_layout(x, gl.DotOperandLayout(1, _SUMS, 1), assert_trivial=True)


@gluon.jit
def _split(x):
    """x as the sum of two numbers in tf32, but for 2^-22 of it."""
    first = ((x.to(gl.int32, bitcast=True) + 0x1000) & -0x2000).to(gl.float32, bitcast=True)
    return first, x - first


@gluon.jit
def _times(x, y, sums):
    """sums + x y^T, of blocks that were split."""
    sums = mma_v2(_left(x[0]), _right(y[1]), sums, input_precision="tf32")
    sums = mma_v2(_left(x[1]), _right(y[0]), sums, input_precision="tf32")
    return mma_v2(_left(x[0]), _right(y[0]), sums, input_precision="tf32")


# The inverse


@gluon.jit
def _substituted(blocks):
    """Inverses [4, 16, 16] of I - N, for four N side by side in shared memory [16, 64]; only below the diagonal."""
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, _FOUND)))[None, :, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, _FOUND)))[None, None, :]
    found = gl.where(i == j, 1.0, gl.full([4, 16, 16], -0.0, gl.float32, _FOUND))  # adding -0.0 costs nothing
    for row in gl.static_range(1, 16):
        given = gl.reshape(blocks.slice(row, 1, dim=0).load(_GIVEN), [4, 16])
        given = gl.convert_layout(given, gl.SliceLayout(2, _FOUND), assert_trivial=True)
        terms = gl.where(i < row, given[:, :, None] * found, gl.where(i == row, found, -0.0))
        found = gl.where(i == row, gl.sum(terms, axis=1)[:, None, :], found)
    return found


@gluon.jit
def _put(tile, x, i: gl.constexpr, j: gl.constexpr, TURNED: gl.constexpr = False):
    """Block (i, j) of a tile in shared memory; TURNED: x is its transpose."""
    to = tile.slice(16 * i, 16, dim=0).slice(16 * j, 16, dim=1)
    if TURNED:
        to = to.permute((1, 0))
    to.store(x.to(gl.bfloat16))


@gluon.jit
def _put_inverse(tile, x, i: gl.constexpr, j: gl.constexpr, TURNED: gl.constexpr = False):
    """As `_put`, with the rounding of `flexsp.kernels.alike_keys.dithered`."""
    threshold = ((gl.arange(0, 16, _ROWS)[:, None] + gl.arange(0, 16, _COLUMNS)[None, :]) * GOLDEN) & 0xFFFF
    found = ((x.to(gl.int32, bitcast=True) + threshold) & -0x10000).to(gl.float32, bitcast=True)
    _put(tile, gl.where(x == x, found, x), i, j, TURNED)


@gluon.jit
def _put_counted(tile, x, i: gl.constexpr, j: gl.constexpr, squares):
    """As `_put_inverse`; returns squares with those of x."""
    _put_inverse(tile, x, i, j)
    return squares + x * x


@gluon.jit
def _sum(x):
    return gl.sum(gl.sum(x, axis=1), axis=0)


@gluon.jit
def _store_gain(to, squares, alike, length, C: gl.constexpr):
    """The number by which segments are done token by token: `size_of_inverse` of squares, those of the inverse still to
    be added up, those of N added up."""
    found = _sum(squares) - C
    gl.store(to, gl.where(alike > FEW_KEYS * length, NEARER * found, found))


@gluon.jit
def _inverted(blocks, others, tile):
    """The blocks below and on the diagonal of the inverse of I - N, into a tile in shared memory. Returns squares of
    their entries, [16, 16], some added up.

    blocks: of N on the diagonal, side by side in shared memory; others: those below, column by column, split. d stands
    for inverses of the former, x for what is found below, y for N times what is known of the inverse to the right; a
    `t` for a transpose.
    """
    n10, n20, n30, n21, n31, n32 = others
    found = _substituted(blocks)
    inverses = gl.allocate_shared_memory(gl.float32, [16, 64], _BLOCKS)
    inverses.store(gl.reshape(gl.permute(found, (1, 0, 2)), [16, 64]))
    gl.thread_barrier()  # blocks are read by other threads than those that stored them
    d0t = inverses.slice(0, 16, dim=1).permute((1, 0)).load(_SUMS)
    d1 = inverses.slice(16, 16, dim=1).load(_SUMS)
    d2 = inverses.slice(32, 16, dim=1).load(_SUMS)
    d3 = inverses.slice(48, 16, dim=1).load(_SUMS)
    _put_inverse(tile, d0t, 0, 0, True)
    _put_inverse(tile, d1, 1, 1)
    _put_inverse(tile, d2, 2, 2)
    _put_inverse(tile, d3, 3, 3)
    squares = d0t * d0t + d1 * d1 + d2 * d2 + d3 * d3
    d0t, d1, d2, d3 = _split(d0t), _split(d1), _split(d2), _split(d3)
    d1t = _split(inverses.slice(16, 16, dim=1).permute((1, 0)).load(_SUMS))
    d2t = _split(inverses.slice(32, 16, dim=1).permute((1, 0)).load(_SUMS))
    zeros = gl.zeros([16, 16], gl.float32, _SUMS)

    x10t = _times(_split(_times(d0t, n10, zeros)), d1, zeros)
    x32 = _times(d3, _split(_times(d2t, n32, zeros)), zeros)
    _put_inverse(tile, x10t, 1, 0, True)
    _put_inverse(tile, x32, 3, 2)
    squares += x10t * x10t + x32 * x32
    x10t, x32 = _split(x10t), _split(x32)

    y20t = _split(_times(x10t, n21, _times(d0t, n20, zeros)))
    y30t = _split(_times(x10t, n31, _times(d0t, n30, zeros)))
    y21t = _split(_times(d1t, n21, zeros))
    y31t = _split(_times(d1t, n31, zeros))
    squares = _put_counted(tile, _times(d2, y20t, zeros), 2, 0, squares)
    squares = _put_counted(tile, _times(d2, y21t, zeros), 2, 1, squares)
    squares = _put_counted(tile, _times(d3, y30t, _times(x32, y20t, zeros)), 3, 0, squares)
    return _put_counted(tile, _times(d3, y31t, _times(x32, y21t, zeros)), 3, 1, squares)


@gluon.jit
def _store(to, tile, C: gl.constexpr):
    """The tile [C, C] in shared memory, which all threads have written, to memory."""
    gl.thread_barrier()
    rows = gl.arange(0, C, gl.SliceLayout(1, _MATRIX))
    columns = gl.arange(0, C, gl.SliceLayout(0, _MATRIX))
    gl.store(to + rows[:, None] * C + columns[None, :], tile.load(_MATRIX))


@gluon.jit(do_not_specialize=["T"])
def inverse(
    inverse, gain, table, T, C: gl.constexpr, GAIN: gl.constexpr, PACKED: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """Inverses of I + G in place of G [B H, chunks, C, C], as `channel_scores` left it; GAIN: and gain
    [B H, chunks], as `wy_transform.store_gain` has it."""
    begin(PDL)
    at = gl.program_id(1).to(gl.int64) * gl.num_programs(0) + gl.program_id(0)
    inverse += at * C * C
    tile = gl.allocate_shared_memory(gl.bfloat16, [C, C], _TILE)
    rows = gl.arange(0, C, gl.SliceLayout(1, _MATRIX))
    columns = gl.arange(0, C, gl.SliceLayout(0, _MATRIX))
    place = inverse + rows[:, None] * C + columns[None, :]
    async_copy.async_copy_global_to_shared(tile, place)
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.thread_barrier()  # each thread waited for its own copies only
    blocks = gl.allocate_shared_memory(gl.float32, [16, 64], _BLOCKS)
    inside = gl.arange(0, 16, _ROWS)[:, None] > gl.arange(0, 16, _COLUMNS)[None, :]
    below, alike = nothing(), gl.zeros([16, 16], gl.float32, _SUMS)
    for j in gl.static_range(4):
        for i in gl.static_range(j, 4):
            first = tile.slice(16 * i, 16, dim=0).slice(16 * j, 16, dim=1).load(_SUMS)
            rest = tile.slice(16 * j, 16, dim=0).slice(16 * i, 16, dim=1).permute((1, 0)).load(_SUMS)
            first, rest = _negative(first).to(gl.float32), _negative(rest).to(gl.float32)
            pairs = first + rest
            if i == j:
                pairs = gl.where(inside, pairs, 0.0)
                blocks.slice(16 * i, 16, dim=1).store(pairs)
            else:
                below = below + ((first, rest),)
            alike += pairs * pairs
    alike = _sum(alike)
    gl.thread_barrier()  # the tile has been read, and all blocks are stored
    for j in gl.static_range(4):
        for i in gl.static_range(j + 1, 4):
            _put(tile, gl.zeros([16, 16], gl.float32, _SUMS), j, i)
    squares = _inverted(blocks, below, tile)
    _store(inverse, tile, C)
    if GAIN:
        start, length, doc, first, last = chunk_at(table, gl.program_id(0), T, C, PACKED)
        _store_gain(gain + at, squares, alike, length, C)


# What comes before it


@gluon.jit
def _pairs(q, k, K: gl.constexpr, NORM: gl.constexpr):
    """q_i . k_j and -k_i . k_j of tiles [C, K] in shared memory, as ten blocks each: (0, 0), (1, 0), (1, 1), (2, 0) and
    so on. And if NORM q_i . q_j of the four blocks on the diagonal."""
    zeros = gl.zeros([16, 16], gl.float32, _SUMS)
    of_queries, of_keys, squares = nothing(), nothing(), nothing()
    for _ in gl.static_range(10):
        of_queries, of_keys = of_queries + (zeros,), of_keys + (zeros,)
    for _ in gl.static_range(4):
        squares = squares + (zeros,)
    for k0 in gl.static_range(0, K, 16):
        rights = nothing()
        for j in gl.static_range(4):
            right = k.slice(16 * j, 16, dim=0).slice(k0, 16, dim=1).permute((1, 0))
            rights = rights + (right.load(gl.DotOperandLayout(1, _SUMS, 2)),)
        more_queries, more_keys, more_squares = nothing(), nothing(), nothing()
        for i in gl.static_range(4):
            query = q.slice(16 * i, 16, dim=0).slice(k0, 16, dim=1).load(gl.DotOperandLayout(0, _SUMS, 2))
            key = _negative(k.slice(16 * i, 16, dim=0).slice(k0, 16, dim=1).load(gl.DotOperandLayout(0, _SUMS, 2)))
            for j in gl.static_range(i + 1):
                more_queries = more_queries + (mma_v2(query, rights[j], of_queries[i * (i + 1) // 2 + j]),)
                more_keys = more_keys + (mma_v2(key, rights[j], of_keys[i * (i + 1) // 2 + j]),)
            if NORM:
                right = gl.convert_layout(gl.permute(query, (1, 0)), gl.DotOperandLayout(1, _SUMS, 2))
                more_squares = more_squares + (mma_v2(query, right, squares[i]),)
        of_queries, of_keys = more_queries, more_keys
        if NORM:
            squares = more_squares
    return of_queries, of_keys, squares


@gluon.jit
def _put_diagonal(to, x, n: gl.constexpr):
    """The diagonal of block n on the diagonal, in shared memory."""
    i = gl.arange(0, 16, _ROWS)[:, None]
    j = gl.arange(0, 16, _COLUMNS)[None, :]
    to.slice(16 * n, 16, dim=0).store(gl.sum(gl.where(i == j, x, 0.0), axis=1))


@gluon.jit
def _copy_rows(
    to, base, stride, start, length, K: gl.constexpr, BK: gl.constexpr, C: gl.constexpr, STEPS: gl.constexpr
):  # fmt: skip
    """Begins to copy a chunk's rows of tokens of STEPS keys, zero at other keys than the last of a token."""
    row, there = of_outputs(start, length, C, STEPS, gl.SliceLayout(1, _MATRIX))
    at = row[:, None] * stride + gl.arange(0, BK, gl.SliceLayout(0, _MATRIX))[None, :]
    inside = there[:, None]
    if K != BK:
        inside = inside & (gl.arange(0, BK, gl.SliceLayout(0, _MATRIX)) < K)[None, :]
    async_copy.async_copy_global_to_shared(to, base + start // STEPS * stride + at, inside)


@gluon.jit
def _parts(numbers, layout: gl.constexpr):
    """Numbers of tokens in shared memory, block by block."""
    found = nothing()
    for i in gl.static_range(4):
        found = found + (numbers.slice(16 * i, 16, dim=0).load(layout),)
    return found


@gluon.jit
def _bounds(to, half, beta, gate, own):
    """Stores the two bounds, see `flexsp.kernels.delta.wy_transform.wy_inverse`; own: -k . k of tokens."""
    growth = gl.maximum(gl.abs(1.0 + beta * own.load(_TOKENS)), 1.0, propagate_nan=tl.PropagateNan.ALL)
    most = gate + gl.log2(growth)
    gl.store(to, gl.sum(most, axis=0))
    gl.store(to + half, gl.sum(gl.maximum(most, 0.0, propagate_nan=tl.PropagateNan.ALL), axis=0))


@gluon.jit
def _weighted(
    x, m: gl.constexpr, n: gl.constexpr, factors, norms, rows, columns, here, GATED: gl.constexpr, NORM: gl.constexpr
):  # fmt: skip
    """Block (m, n) of pairs x, with the factors of its columns and decayed; on the diagonal only `here`, else zero.

    factors: of columns; norms: factors of rows, if NORM; rows, columns: cumulative gates; all block by block.
    """
    found = x[m * (m + 1) // 2 + n] * factors[n][None, :]
    if NORM:
        found *= norms[m][:, None]
    if GATED:
        found *= power(rows[m][:, None] - columns[n][None, :])
    if m == n:
        found = gl.where(here, found, 0.0)
    return found


@gluon.jit
def _decayed(x, factors, norms, totals, blocks, tile, GATED: gl.constexpr, NORM: gl.constexpr):
    """N of pairs x, with numbers of tokens in shared memory: betas and cumulative gates.

    Its blocks on the diagonal are put into `blocks`; those below are returned, column by column, split, and squares of
    all added up. The tile of the inverse is given its zeros.
    """
    below = gl.arange(0, 16, _ROWS)[:, None] > gl.arange(0, 16, _COLUMNS)[None, :]
    factors, norms = _parts(factors, _COLUMNS), _parts(norms, _ROWS)
    rows, columns = _parts(totals, _ROWS), _parts(totals, _COLUMNS)
    made, alike = nothing(), gl.zeros([16, 16], gl.float32, _SUMS)
    for n in gl.static_range(4):
        for m in gl.static_range(n, 4):
            pairs = _weighted(x, m, n, factors, norms, rows, columns, below, GATED, NORM)
            alike += pairs * pairs
            if m == n:
                blocks.slice(16 * m, 16, dim=1).store(pairs)
            else:
                made = made + (_split(pairs),)
                _put(tile, gl.zeros([16, 16], gl.float32, _SUMS), n, m)
    return made, _sum(alike)  # one register, not eight


@gluon.jit
def _scored(x, factors, norms, totals, scale, tile, GATED: gl.constexpr, NORM: gl.constexpr):
    """Puts the scores of products x into the tile."""
    until = gl.arange(0, 16, _ROWS)[:, None] >= gl.arange(0, 16, _COLUMNS)[None, :]
    factors, norms = _parts(factors, _COLUMNS), _parts(norms, _ROWS)
    rows, columns = _parts(totals, _ROWS), _parts(totals, _COLUMNS)
    for n in gl.static_range(4):
        for m in gl.static_range(n, 4):
            found = _weighted(x, m, n, factors, norms, rows, columns, until, GATED, NORM)
            _put(tile, found * scale, m, n)
            if m > n:
                _put(tile, gl.zeros([16, 16], gl.float32, _SUMS), n, m)


@gluon.jit(do_not_specialize=["T", "H"])
def wy_inverse(
    q, k, beta, g, inverse, chunk_beta, gates, bounds, gain, decays, norms, scores, table, q_sb, q_st, q_sh, k_sb, k_st,
    k_sh, beta_sb, beta_st, beta_sh, g_sb, g_st, g_sh, T, H, scale, K: gl.constexpr, BK: gl.constexpr,
    C: gl.constexpr, GATED: gl.constexpr, BOUNDS: gl.constexpr, NORM: gl.constexpr, PACKED: gl.constexpr,
    GROUP: gl.constexpr, STEPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `flexsp.kernels.delta.wy_transform.wy_inverse`, for bfloat16 keys of 64 channels or more and chunks of 64
    tokens; with gates decays [2, B H, chunks, C] too, e^b and beta e^{b_C - b}. Always with gain.

    And scores scale q_i . k_j e^{b_i - b_j} beta_j of queries and keys not after them, [B H, chunks, C, C].

    NORM: queries and keys are to be divided by their norms. Then norms [2, B H, chunks, C] are 1 / norm of queries and
    keys, and decays [4, ..] what walks multiply by, with norms: e^b without them, where there are gates, then
    beta e^{b_C - b} and e^b for keys, and scale e^b for queries.
    """
    begin(PDL)
    row = gl.program_id(1).to(gl.int64)
    b, h = row // H, row % H
    chunks = gl.num_programs(0)
    start, length, doc, first, last = chunk_at(table, gl.program_id(0), T, C, PACKED)
    at = row * chunks + gl.program_id(0)
    qs = gl.allocate_shared_memory(gl.bfloat16, [C, BK], _TILE)
    ks = gl.allocate_shared_memory(gl.bfloat16, [C, BK], _TILE)
    _copy_rows(qs, q + b * q_sb + h // GROUP * q_sh, q_st, start, length, K, BK, C, STEPS)
    _copy_rows(ks, k + b * k_sb + h // GROUP * k_sh, k_st, start, length, K, BK, C, 1)
    async_copy.commit_group()
    i = gl.arange(0, C, _TOKENS)
    given = gl.load(beta + b * beta_sb + h * beta_sh + (start + i) * beta_st, mask=i < length, other=0.0)
    given = given.to(gl.float32)
    gl.store(chunk_beta + at * C + i, given)
    half = (chunks * C).to(gl.int64) * gl.num_programs(1)
    from_start = gl.full([C], 1.0, gl.float32, _TOKENS)
    written = given
    factors = gl.allocate_shared_memory(gl.float32, [C], _NUMBERS)
    totals = factors
    if GATED:
        token, there = of_gates(start, length, C, STEPS, _TOKENS)
        g += b * g_sb + h * g_sh + start // STEPS * g_st
        gate = gl.load(g + token * g_st, mask=there, other=0.0).to(gl.float32)
        gate = gl.maximum(gate, GATE_MIN, propagate_nan=tl.PropagateNan.ALL) * LOG2E
        total = gl.associative_scan(gate, 0, _add)
        gl.store(gates + at * C + i, total)
        totals = gl.allocate_shared_memory(gl.float32, [C], _NUMBERS, total)
        gl.thread_barrier()  # `end` is the sum of the last token, which another thread has
        from_start = power(total)
        gl.store(decays + at * C + i, from_start)
        end = totals.slice(C - 1, 1, dim=0).load(_TOKENS)
        written = given * power(end - total)
        if not NORM:
            gl.store(decays + half + at * C + i, written)
    async_copy.wait_group(0)
    gl.thread_barrier()  # each thread waited for its own copies only
    of_queries, x, squares = _pairs(qs, ks, K, NORM)
    own = gl.allocate_shared_memory(gl.float32, [C], _NUMBERS)
    for n in gl.static_range(4):
        _put_diagonal(own, x[n * (n + 1) // 2 + n], n)
    of_query, of_key = factors, factors
    squared = given
    if NORM:
        of_query = gl.allocate_shared_memory(gl.float32, [C], _NUMBERS)
        of_key = gl.allocate_shared_memory(gl.float32, [C], _NUMBERS)
        for n in gl.static_range(4):
            _put_diagonal(of_query, squares[n], n)
        gl.thread_barrier()  # diagonals were stored by other threads
        asks, reads = gl.rsqrt(of_query.load(_TOKENS) + _EPS), gl.rsqrt(_EPS - own.load(_TOKENS))
        gl.store(norms + at * C + i, asks)
        gl.store(norms + half + at * C + i, reads)
        gl.store(decays + half + at * C + i, written * reads)
        gl.store(decays + 2 * half + at * C + i, from_start * reads)
        gl.store(decays + 3 * half + at * C + i, from_start * (asks * scale))
        gl.thread_barrier()  # the squares were read
        of_query.store(asks)
        of_key.store(reads)
        given *= reads
        squared = given * reads
    factors.store(given)
    gl.thread_barrier()  # factors are read by other threads than those that stored them
    if GATED and BOUNDS:
        _bounds(bounds + row * 2 * chunks + gl.program_id(0), chunks, squared, gate, own)
    tile = gl.allocate_shared_memory(gl.bfloat16, [C, C], _TILE)
    _scored(of_queries, factors, of_query, totals, scale, tile, GATED, NORM)
    _store(scores + at * C * C, tile, C)
    gl.thread_barrier()  # the tile was read
    blocks = gl.allocate_shared_memory(gl.float32, [16, 64], _BLOCKS)
    made, alike = _decayed(x, factors, of_key, totals, blocks, tile, GATED, NORM)
    gl.thread_barrier()
    squares = _inverted(blocks, made, tile)
    _store(inverse + at * C * C, tile, C)
    _store_gain(gain + at, squares, alike, length, C)
