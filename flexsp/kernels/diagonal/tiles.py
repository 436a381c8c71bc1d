"""Tile choices of the diagonal engine: a deterministic table, no autotuning.

`choose` is what the ops use; `all_configs` lists every choice the table can make, for tests and benchmarks.

From Hopper on, products read their operands from shared memory, and a walk may have wide tiles. Before, operands come
from registers, where those of 64 tokens beside a state spill kilobytes a thread: chunks have 32 tokens or 16 there, dk
and dv have a walk each, and all fits the 99 KiB that a block has on the smallest of these GPUs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch

from flexsp.devices import H200, Device, filled

__all__ = ["MOST_CHUNKS", "SharedTiles", "Tile", "Tiles", "all_configs", "choose", "segment_length"]

MOST_CHUNKS = 128
"""Of a segment: `summarize_kernel` looks at the decays of all of them at once."""


FEW = 2**28
"""Bytes of states that are all kept at once: gradients of shared keys take those of a piece of the tokens each."""


@dataclass(frozen=True)
class Tile:
    """Tile [bk, bv] of the state in one program's registers, and how the program is launched."""

    bk: int
    bv: int
    warps: int
    stages: int

    @property
    def parts(self) -> int:
        """Parts in which a tile leaves its sums over channels: one for each warp group."""
        return self.warps // 4


_HOPPER = Tile(128, 128, 8, 1)
"""Of the walks in Gluon, which have 128 columns of what they make."""


@dataclass(frozen=True)
class SharedTiles:
    """Tiles of gradients that take a chunk each, and go over heads that share keys: of the walks over states, of
    values, and of keys.

    Attributes:
        programs: that there should be at least; heads of a group go to as many blocks.
        pieces: of the tokens, for whose states there is memory.
    """

    states: Tile
    values: Tile
    keys: Tile
    programs: int
    pieces: int


@dataclass(frozen=True)
class Tiles:
    """Choices for one (dtype class, K, V): `chunk` tokens a step, one tile a kernel.

    Where `dv` is None, the walk of dk holds all of dS and gives dv too. Where there is `shared`, gradients do not walk.
    `hopper`: the walks of outputs and gradients are those in Gluon.
    """

    chunk: int
    summarize: Tile
    output: Tile
    dq: Tile
    dk: Tile
    dv: Tile | None
    shared: SharedTiles | None = None
    hopper: bool = False


def _block(n: int, smallest: int) -> int:
    """Head sizes are padded to one of few tile sizes: `smallest`, 64, 128 or 256."""
    return next(size for size in (smallest, 64, 128, 256) if n <= size)


def choose(
    dtype: torch.dtype, K: int, V: int, device: Device = H200, packed: bool = False, shared: bool = False,
    gluon: bool = False, gated: bool = False, turned: bool = False,
) -> Tiles:  # fmt: skip
    """Tiles for inputs of `dtype` and head sizes K, V in 1..256; `shared` where heads share keys, `gated` where tokens
    have gates, `turned` where they turn the state.

    bf16 multiplies bf16 tiles; fp16 and fp32 multiply fp32 tiles (tf32, tf32x3), which take twice the shared memory.
    Where documents are packed, each sets the state anew: in tensor memory no release of Triton pipelines that.
    """
    bk, bv = _block(K, 64), _block(V, 16)
    if dtype != torch.bfloat16:
        return _single_tiles(bk, bv)
    found = _half_tiles(bk, bv) if device.wide_products else _small_half_tiles(bk, bv)
    hopper = device.wide_products and not device.tensor_memory
    if turned and device.wide_products:
        found = _turned_tiles(found, bk, bv)
    elif hopper and (V == 1 or (shared and K <= 128 and V <= 64)):
        found = _shared_tiles(found, bk, bv, device, bk // 32 if V > 1 else 1)
    if gluon and hopper and not turned and _in_gluon(K, V, gated):
        found = replace(found, hopper=True, dq=_HOPPER, dk=_HOPPER, dv=_HOPPER)
    if V == 1:  # queries in fp32, in registers
        found = replace(found, output=replace(found.output, warps=8))
    return _one_stage(found) if packed and device.tensor_memory else found


def _in_gluon(K: int, V: int, gated: bool) -> bool:
    """Whether states are walked in Gluon. Smaller ones leave Triton's walks enough registers and shared memory, those
    of 128 x 128 unless there are gradients of gates. K and V may be symbolic, which have no hash."""
    large = (K == 256 and (V == 128 or V == 256)) or (K == 128 and V == 256)  # noqa: PLR1714
    return large or (gated and K == 128 and V == 128)


def _one_stage(tiles: Tiles) -> Tiles:
    walks = {name: replace(x, stages=1) for name, x in vars(tiles).items() if isinstance(x, Tile)}
    return replace(tiles, **walks)  # type: ignore[arg-type]


def _half_tiles(bk: int, bv: int) -> Tiles:
    wide_v = min(bv, 128 if bk <= 128 else 64)
    walk_warps = 8 if wide_v > 64 or bk * wide_v >= 128 * 128 else 4
    output = Tile(bk, wide_v, walk_warps, 3 if bk <= 128 else 2)
    # Of wide values all columns at once, so that keys are read once.
    wide = Tile(128, 256, 8, 3) if bk >= 128 and bv == 256 else None
    summarize = wide or Tile(min(bk, 128), min(bv, 128), 8 if min(bk, bv) >= 128 else 4, 4)
    if bk <= 128 and bv <= 128:
        warps = 8 if bk * bv >= 64 * 128 else 4
        # Two narrow tiles of dq share a multiprocessor, where one of 8 warps would have it alone.
        dq = Tile(64, bv, 4, 3) if bk == 128 and bv == 64 else Tile(bk, bv, warps, 3)
        return Tiles(64, summarize, output, dq=dq, dk=Tile(bk, bv, warps, 3), dv=None)
    if bv == 128:
        half = Tile(128, bv, 8, 3)
        return Tiles(64, summarize, output, dq=half, dk=half, dv=Tile(bk, wide_v, walk_warps, 2))
    across = Tile(64, bv, 8 if bv > 128 else 4, 2)
    return Tiles(64, summarize, output, dq=across, dk=across, dv=Tile(bk, wide_v, walk_warps, 2))


def _turned_tiles(tiles: Tiles, bk: int, bv: int) -> Tiles:
    """Walks that leave gradients of turns read states in two parts, and turn rows: with few rows of a state each, and
    with dv apart, they spill little. On an H200 dk and dv of 128 x 64 in one walk took a fifth longer. There are no
    more columns than 128 (`flexsp.kernels.diagonal.op`).
    """
    dq = dk = Tile(64, bv, 8 if bv > 64 else 4, 3)
    dv = Tile(bk, min(bv, 64), 8, 3 if bk <= 128 else 2) if bv > 64 or bk > 128 else Tile(bk, min(bv, 32), 4, 3)
    return replace(tiles, dq=dq, dk=dk, dv=dv)


def _shared_tiles(tiles: Tiles, bk: int, bv: int, device: Device, pieces: int) -> Tiles:
    """For values of up to 64: of larger ones the states are so large that walks are as fast.

    States of all chunks take bk / 32 times the memory of v: in as many pieces, as much as v. Short documents take more,
    and so do many short sequences, which are not cut.
    """
    states, keys = Tile(64, bv, 4, 3), Tile(64, bv, 4, 3)
    return replace(tiles, shared=SharedTiles(states, Tile(bk, bv, 8, 3), keys, device.programs, pieces))


def _small_half_tiles(bk: int, bv: int) -> Tiles:
    """For products whose operands are in registers: none was measured, all were chosen for few spills."""

    def tile(k: int, v: int, stages: int = 2) -> Tile:
        return Tile(k, v, 8 if k * v > 64 * 64 else 4, stages)

    summarize, output = tile(min(bk, 128), min(bv, 128), 3), tile(bk, min(bv, 128 if bk <= 128 else 64))
    dq, dk, dv = tile(min(bk, 128 if bv <= 128 else 64), bv), tile(64, bv), tile(bk, min(bv, 64))
    return Tiles(32 if max(bk, bv) <= 128 else 16, summarize, output, dq, dk, dv)


def _single_tiles(bk: int, bv: int) -> Tiles:
    walk = Tile(bk, min(bv, 32), 4 if bk <= 128 else 8, 1)
    across = Tile(32, bv, 4 if bv <= 128 else 8, 1)
    return Tiles(chunk=16, summarize=Tile(64, min(bv, 64), 4, 2), output=walk, dq=across, dk=across, dv=walk)


def all_configs(device: Device = H200) -> list[tuple[torch.dtype, int, int, Tiles]]:
    """Every distinct choice for a GPU where tokens do not turn the state, with one (dtype, K, V) that leads to it."""
    seen: dict[Tiles, tuple[torch.dtype, int, int, Tiles]] = {}
    flags = itertools.product((False, True), (False, True), (False, True))
    sizes = itertools.product(flags, (torch.bfloat16, torch.float32), (64, 128, 256), (1, 16, 64, 128, 256))
    for (shared, gluon, gated), dtype, K, V in sizes:
        tiles = choose(dtype, K, V, device, shared=shared, gluon=gluon, gated=gated)
        seen.setdefault(tiles, (dtype, K, V, tiles))
    return list(seen.values())


def segment_length(n_chunks: int, heads: int, programs: int, pieces: int = 1) -> int:
    """Chunks a segment, at most `MOST_CHUNKS`.

    Heads (B * H) times segments of a piece are about a multiple of `programs`, which run at once: the smallest that
    keeps them busy. Where texts are so long that `MOST_CHUNKS` asks for more segments, they are a multiple of that: 4
    segments of 80 heads would be 320 programs, of which the third round of 128 is half empty; 6 nearly fill four.

    Longer segments would also let rounding build up in the gate gradient, which is exact at their edges only. n_chunks
    may be symbolic.
    """
    least, most = max(1, programs // max(heads, 1)), 4 * -(-programs // max(heads, 1))
    filling = pieces * max(range(least, most + 1), key=lambda n: filled(n * heads, programs))
    filling *= max(1, -(-n_chunks // (MOST_CHUNKS * filling)))
    segments = max(1, min(n_chunks, filling))
    return max(1, -(-n_chunks // segments))


def pieces(tiles: Tiles, n_chunks: int, heads: int, K: int, V: int) -> int:
    """Pieces of the tokens that gradients of shared keys go through: one if states at the edges of chunks are few."""
    if tiles.shared is None:
        return 1
    states = 4 * n_chunks * heads * K * V
    return max(1, min(tiles.shared.pieces, -(-states // FEW)))
