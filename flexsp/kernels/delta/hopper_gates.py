"""Gates of channels on Hopper GPUs: sums between tokens and the edges or middles of their blocks.

Channels are taken 64 at a time. A thread of the eight warps has eight tokens of two channels, a part, so gates are
summed in registers; sums of parts are in shared memory.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from flexsp.kernels.primitives import GATE_MIN, LOG2E

__all__ = [
    "BLOCK", "CHANNELS", "IN_PARTS", "LEVELS", "PARTS", "WIDTH", "by_part", "by_token", "copy_gates", "larger",
    "read_gates", "room_for", "sum_before", "sum_beside", "sum_of", "summed", "to_edge", "to_edge_of_parts",
    "to_middle",
]  # fmt: skip

_SMALL = gl.constexpr(104.0)  # log2: what such factors multiply neither overflows nor vanishes
_GROWTH = gl.constexpr(10.0)
LEVELS = gl.constexpr(6)  # log2 of the tokens of a chunk
BLOCK = gl.constexpr(4)  # log2 of those of a smaller block that has one middle
_PART = gl.constexpr(3)  # log2 of those that a thread has
_ROWS = gl.constexpr(1 << _PART.value)
PARTS = gl.constexpr(8)  # of the tokens; a warp has one
WIDTH = gl.constexpr(64)  # channels
CHANNELS = gl.constexpr(gl.BlockedLayout([8, 2], [1, 32], [8, 1], [1, 0]))
IN_PARTS = gl.constexpr(gl.BlockedLayout([1, 8, 2], [1, 1, 32], [8, 1, 1], [2, 1, 0]))


@gluon.constexpr_function
def _in_blocks(size):
    """As `IN_PARTS` of [8, 8, 64], of [8, 8 / size, size, 64]."""
    return gl.BlockedLayout([1, 8 // size, size, 2], [1, 1, 1, 32], [8, 1, 1, 1], [3, 2, 1, 0])


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def larger(x, y):
    return gl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def by_part(x):
    """x [64, 64] as [8, 8, 64]."""
    return gl.convert_layout(gl.reshape(x, [PARTS, _ROWS, WIDTH]), IN_PARTS, assert_trivial=True)


@gluon.jit
def by_token(x):
    """x [8, 8, 64] as [64, 64]."""
    return gl.convert_layout(gl.reshape(x, [PARTS * _ROWS, WIDTH]), CHANNELS, assert_trivial=True)


@gluon.constexpr_function
def _vectors(kind):
    """Layout of a tile [64, 64] in memory, 16 bytes a thread."""
    width = 128 // kind.primitive_bitwidth
    return gl.BlockedLayout([1, width], [width // 2, 64 // width], [8, 1], [1, 0])


@gluon.jit
def room_for(kind: gl.constexpr):
    """Room for gates [64, 64]."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(128 // kind.primitive_bitwidth, 1, 1, [1, 0])
    return gl.allocate_shared_memory(kind, [64, 64], layout)


@gluon.jit
def copy_gates(to, base, length, stride):
    """Gates as they are given on their way to shared memory, zero from row `length` on."""
    L: gl.constexpr = _vectors(to.dtype)
    rows = gl.arange(0, 64, gl.SliceLayout(1, L))
    at = rows[:, None] * stride + gl.arange(0, 64, gl.SliceLayout(0, L))[None, :]
    async_copy.async_copy_global_to_shared(to, base + at, (rows < length)[:, None])


@gluon.jit
def read_gates(tile):
    """Gates [8, 8, 64] in log2 from shared memory; NaN stays."""
    gate = tile.load(CHANNELS).to(gl.float32)
    return by_part(gl.where(gate < GATE_MIN, GATE_MIN, gate) * LOG2E)


@gluon.jit
def summed(x):
    """Of x [8, 8, 64]: sums in each part until each token, and of parts [8, 64]."""
    return gl.associative_scan(x, 1, _add), gl.sum(x, axis=1)


@gluon.jit
def _parts():
    """The number of a part, [8, 1]."""
    return gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(1, IN_PARTS)))[:, None]


@gluon.jit
def _part(totals, n: gl.constexpr):
    """[1, 64]: of numbers of parts [8, 64] in shared memory those of part n. They are loaded where they are needed:
    registers would not hold them."""
    return totals.slice(n, 1, dim=0).load(gl.SliceLayout(1, IN_PARTS))


@gluon.jit
def sum_of(totals, COUNT: gl.constexpr):
    """[1, 64]: the sum of the first COUNT parts."""
    found = _part(totals, 0)
    for n in gl.static_range(1, COUNT):
        found += _part(totals, n)
    return found


@gluon.jit
def sum_before(totals):
    """[8, 64]: the sum of the parts before each."""
    found = gl.zeros([PARTS, WIDTH], gl.float32, gl.SliceLayout(1, IN_PARTS))
    for n in gl.static_range(PARTS - 1):
        found += gl.where(_parts() > n, _part(totals, n), 0.0)
    return found


@gluon.jit
def sum_beside(totals, LEVEL):
    """[8, 64]: for each part the sum of others of its block of 2^LEVEL tokens: of an odd block of those before it, of
    an even one of those behind it."""
    own = _parts() >> (LEVEL - _PART)
    found = gl.zeros([PARTS, WIDTH], gl.float32, gl.SliceLayout(1, IN_PARTS))
    for n in gl.static_range(PARTS):
        counts = ((own & 1 == 1) & (_parts() > n)) | ((own & 1 == 0) & (_parts() < n))
        found += gl.where(counts & (own == n >> (LEVEL - _PART)), _part(totals, n), 0.0)
    return found


@gluon.jit
def _within_part(gate, LEVEL: gl.constexpr):
    """As `to_edge_of_parts`, of gates [8, 8, 64] of tokens, for blocks of which a thread has several."""
    SIZE: gl.constexpr = 1 << LEVEL
    L: gl.constexpr = _in_blocks(SIZE)
    x = gl.convert_layout(gl.reshape(gate, [PARTS, _ROWS // SIZE, SIZE, WIDTH]), L, assert_trivial=True)
    until = gl.associative_scan(x, 2, _add)
    block = gl.arange(0, _ROWS // SIZE, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    found = gl.where((block & 1)[None, :, None, None] == 1, until, gl.sum(x, axis=2)[:, :, None, :] - until)
    return gl.convert_layout(gl.reshape(found, [PARTS, _ROWS, WIDTH]), IN_PARTS, assert_trivial=True)


@gluon.jit
def to_edge_of_parts(inside, sums, totals, LEVEL):
    """Gates [8, 8, 64] between each token and the edge at which its block of 2^LEVEL tokens meets that beside it: those
    of an odd block from its start to the token, those of an even one from behind the token to the end.

    inside, sums: as `summed`; totals: sums, in shared memory.
    """
    odd = ((_parts() >> (LEVEL - _PART)) & 1)[:, None, :] == 1
    return gl.where(odd, inside, sums[:, None, :] - inside) + sum_beside(totals, LEVEL)[:, None, :]


@gluon.jit
def to_edge(gate, totals, level):
    """As `to_edge_of_parts`, of gates [8, 8, 64] of tokens, for blocks of any level."""
    inside, sums = summed(gate)
    if level == 0:
        found = _within_part(gate, 0)
    elif level == 1:
        found = _within_part(gate, 1)
    elif level == 2:
        found = _within_part(gate, 2)
    else:
        found = to_edge_of_parts(inside, sums, totals, level)
    return found


@gluon.jit
def to_middle(inside, sums, totals):
    """log2 of how many tokens a block has for which its middle serves, and gates [8, 8, 64] from there to each
    token."""
    half, before = sum_of(totals, PARTS // 2), sum_before(totals)
    of_chunk, of_block = before - half, gl.where(_parts() & 1 == 1, 0.0, -sums)
    x = inside + of_chunk[:, None, :]
    grown = gl.where((_parts() < PARTS // 2)[:, None, :], -x, x) <= _GROWTH
    fits = (gl.abs(x) <= _SMALL) & grown & (inside + before[:, None, :] <= _GROWTH) & (half >= -_SMALL)[:, None, :]
    unfit = (~fits).to(gl.int32) + ((~(gl.abs(inside + of_block[:, None, :]) <= _SMALL)).to(gl.int32) << 16)
    unfit = gl.sum(gl.sum(gl.sum(unfit, axis=1), axis=1), axis=0)
    size = gl.where((unfit & 0xFFFF) == 0, LEVELS, gl.where(unfit >> 16 == 0, BLOCK, 0))
    return size, gl.where(size == 0, 0.0, inside + gl.where(size == LEVELS, of_chunk, of_block)[:, None, :])
