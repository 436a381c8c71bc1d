"""S^T [64, K] of walks of the delta engine on Hopper GPUs, and rows of queries and keys, in PARTS tiles of BK columns.

Up to 128 keys are one tile. Of more, tiles of 64 take fewer registers for addresses of copies than those of 128, and no
room for columns that are zero.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flexsp.kernels.gluon import (
    begun,
    by_row,
    by_sum,
    load_state,
    narrower,
    nothing,
    operand,
    state_or,
    store,
    store_state,
    tiles,
    visible,
)

__all__ = [
    "complete", "keep", "leave", "loaded", "loaded_or", "of_chunk", "read", "readable", "rooms", "times", "unless",
    "write", "zeros",
]  # fmt: skip


@gluon.jit
def rooms(COUNT: gl.constexpr, R: gl.constexpr, BK: gl.constexpr, PARTS: gl.constexpr):
    """In shared memory, for COUNT times R rows."""
    found = nothing()
    for _ in gl.static_range(PARTS):
        found = found + (tiles(COUNT, R, BK),)
    return found


@gluon.jit
def of_chunk(rows, at, PARTS: gl.constexpr):
    """The tiles at `at` of such room."""
    found = nothing()
    for n in gl.static_range(PARTS):
        found = found + (rows[n].index(at),)
    return found


@gluon.jit
def zeros(BK: gl.constexpr, PARTS: gl.constexpr):
    found = nothing()
    for _ in gl.static_range(PARTS):
        found = found + (gl.zeros([64, BK], gl.float32, by_sum(BK)),)
    return found


@gluon.jit
def loaded(base, K: gl.constexpr, BK: gl.constexpr, V: gl.constexpr):
    """From a state [K, V]."""
    found = nothing()
    for n in gl.static_range((K + BK - 1) // BK):
        found = found + (load_state(base + n * BK * V, 64, BK, V, narrower(K - n * BK, BK)),)
    return found


@gluon.jit
def loaded_or(S, base, here, K: gl.constexpr, BK: gl.constexpr, V: gl.constexpr):
    """S, of zeros, or what `loaded` reads if `here`."""
    found = nothing()
    for n in gl.static_range((K + BK - 1) // BK):
        found = found + (state_or(S[n], base + n * BK * V, here, V, narrower(K - n * BK, BK)),)
    return found


@gluon.jit
def leave(base, S, K: gl.constexpr, BK: gl.constexpr, V: gl.constexpr, length=None):
    """Stores what `loaded` would read, of the first `length` rows if not None."""
    for n in gl.static_range((K + BK - 1) // BK):
        store_state(base + n * BK * V, S[n], 64, BK, V, narrower(K - n * BK, BK), length)


@gluon.jit
def keep(base, S, room, K: gl.constexpr, BK: gl.constexpr):
    """Stores rows of K numbers as bfloat16; of several tiles what `readable` has put into shared memory."""
    PARTS: gl.constexpr = (K + BK - 1) // BK
    for n in gl.static_range(PARTS):
        x = S[n] if PARTS == 1 else room[n].index(0).load(by_row(BK))
        store(base + n * BK, x, 64, 64, BK, K, width=narrower(K - n * BK, BK))


@gluon.jit
def unless(S, cleared, PARTS: gl.constexpr):
    """Zeros if `cleared`."""
    found = nothing()
    for n in gl.static_range(PARTS):
        found = found + (gl.where(cleared, 0.0, S[n]),)
    return found


@gluon.jit
def readable(S, room, C: gl.constexpr, PARTS: gl.constexpr):
    """As left operands of products with C columns: in registers, or where they have no room for that in shared memory,
    which the products that read it before have left."""
    found = nothing()
    if PARTS == 1:
        found = found + (operand(S[0], C),)
    else:
        for n in gl.static_range(PARTS):
            room[n].index(0).store(S[n].to(gl.bfloat16))
        visible()
        found = of_chunk(room, 0, PARTS)
    return found


@gluon.jit
def read(state, rows, C: gl.constexpr, PARTS: gl.constexpr):
    """Begins the products with a chunk's rows, [64, C]."""
    found = begun(state[0], rows[0].permute((1, 0)), C)
    for n in gl.static_range(1, PARTS):
        found = warpgroup_mma(state[n], rows[n].permute((1, 0)), found, is_async=True)
    return found


@gluon.jit
def times(S, factor, PARTS: gl.constexpr):
    found = nothing()
    for n in gl.static_range(PARTS):
        found = found + (S[n] * factor,)
    return found


@gluon.jit
def write(x, rows, S, PARTS: gl.constexpr):
    """Begins to add the product of x and a chunk's rows to S."""
    found = nothing()
    for n in gl.static_range(PARTS):
        found = found + (warpgroup_mma(x, rows[n], S[n], is_async=True),)
    return found


@gluon.jit
def complete(S, PARTS: gl.constexpr):
    """Waits for all products."""
    if PARTS == 1:
        found = (warpgroup_mma_wait(0, [S[0]]),)
    else:
        found = warpgroup_mma_wait(0, S)
    return found
