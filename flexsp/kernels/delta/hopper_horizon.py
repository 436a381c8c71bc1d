"""How many chunks of a segment count where each key channel has a gate, on Hopper GPUs (docs/math.md, section 17).

Transitions of tokens mix channels, so no sum of gates says how much of a state is left. Their product says it: 64 rows
of it are walked from the segment's end, or its start, until nothing is left of them.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flexsp.kernels.gluon import (
    arrived,
    begin,
    begun,
    by_sum,
    chunk_at,
    copy,
    copy_numbers,
    numbers,
    operand,
    tiles,
)

__all__ = ["segment_horizon"]

_NOTHING = gl.constexpr(-140.0)  # log2 of what is left
_LEAST = gl.constexpr(2.0**-149)  # of float32
_FEW = gl.constexpr(32)
_MANY = gl.constexpr(128)
_CHUNKS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _growth(growth, c0, c1):
    """log2 of how much the chunks c0 to c1 make a state grow at most."""
    total = 0.0
    for block in range(c0, c1, _MANY):
        c = block + gl.arange(0, _MANY, _CHUNKS)
        total += gl.sum(gl.load(growth + c, mask=c < c1, other=0.0), axis=0)
    return total


@gluon.jit
def _begins(table, c0, c1):
    """As `flexsp.kernels.delta.walks.begins`."""
    found = 0
    for block in range(c0, c1, _MANY):
        c = block + gl.arange(0, _MANY, _CHUNKS)
        found += gl.sum(gl.load(table + c * 5 + 3, mask=c < c1, other=0), axis=0)
    return found != 0


@gluon.jit(do_not_specialize=["T", "H", "n_seg", "n_chunks", "per_seg"])
def segment_horizon(
    reads, writes, inverse, decay, growth, found, table, T, H, n_seg, n_chunks, per_seg,
    K: gl.constexpr, C: gl.constexpr, REVERSE: gl.constexpr, PACKED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Of each segment the number of chunks at its end (at its start unless REVERSE) of which the product of transitions
    is nothing, and one more than it has where that of all is something: found [K / 64, B H, n_seg].

    growth [B H, chunks]: log2 of how much a chunk makes a state grow at most; what is left is nothing if the whole
    segment could not make it grow to anything. A quarter of the chunks is tried, or 32: where that many are something,
    all count. Nothing passes a chunk in which a document begins.
    """
    begin(PDL)
    panel, row, seg = gl.program_id(0), gl.program_id(1).to(gl.int64), gl.program_id(2)
    c0 = seg * per_seg
    count = gl.minimum(c0 + per_seg, n_chunks) - c0
    SK: gl.constexpr = by_sum(K)
    channels = panel * 64 + gl.arange(0, 64, gl.SliceLayout(1, SK))
    X = gl.where(channels[:, None] == gl.arange(0, K, gl.SliceLayout(0, SK))[None, :], 1.0, 0.0)
    most = _growth(growth + row * n_chunks, c0, c0 + count)
    rs, ws, inverses, decays = tiles(2, C, K), tiles(2, C, K), tiles(2, C, C), numbers(2, K)
    if count > 0:
        _fetch(c0 + count - 1 if REVERSE else c0, 0, row, reads, writes, inverse, decay, rs, ws, inverses, decays,
               n_chunks, K, C)  # fmt: skip
    async_copy.commit_group()
    n = 0
    reached = count + 1
    if PACKED:
        reached = gl.where(_begins(table, c0, c0 + count), count, reached)
    tried = gl.minimum(count, gl.maximum(count // 4, _FEW))
    gone = ~(most <= 149.0 + _NOTHING)  # no product is so small that it is nothing
    while (n < tried) & ~gone:
        arrived(0)
        c = c0 + count - 1 - n if REVERSE else c0 + n
        s = n % 2
        if n + 1 < tried:
            _fetch(c - 1 if REVERSE else c + 1, 1 - s, row, reads, writes, inverse, decay, rs, ws, inverses, decays,
                   n_chunks, K, C)  # fmt: skip
        async_copy.commit_group()
        start, length, doc, first, last = chunk_at(table, c, T, C, PACKED)
        kr, kw = rs.index(s), ws.index(s)
        before, after = kr, kw
        chunk = inverses.index(s).permute((1, 0))
        if REVERSE:
            before, after = kw, kr
            chunk = inverses.index(s)
        y = warpgroup_mma_wait(0, [begun(operand(X, C), before.permute((1, 0)), C)])
        y = warpgroup_mma_wait(0, [begun(operand(-y, C), chunk, C)])
        X = X * decays.index(s).load(gl.SliceLayout(0, SK))[None, :]
        X = warpgroup_mma_wait(0, [warpgroup_mma(operand(y, K), after, X, is_async=True)])
        n += 1
        left = gl.sum(gl.sum(gl.abs(X), axis=1), axis=0)
        gone = gl.log2(gl.maximum(left, _LEAST, propagate_nan=tl.PropagateNan.ALL)) + most <= _NOTHING
        if PACKED:
            gone = gone | first
        reached = gl.where(gone, n, reached)
    arrived(0)
    gl.store(found + (panel * gl.num_programs(1) + row) * n_seg + seg, reached)


@gluon.jit
def _fetch(
    c, to, row, reads, writes, inverse, decay, rs, ws, inverses, decays, n_chunks, K: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Begins to copy chunk c to the places `to`."""
    at = row * n_chunks + c
    copy(rs.index(to), reads + at * C * K, C, C, K, K)
    copy(ws.index(to), writes + at * C * K, C, C, K, K)
    copy(inverses.index(to), inverse + at * C * C, C, C, C, C)
    copy_numbers(decays.index(to), decay + at * K, K)
