"""Tile choices of the diagonal engine: a deterministic table, no autotuning.

`choose` is what the ops use; `all_configs` lists every choice the table can make, for tests and benchmarks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Tile", "Tiles", "all_configs", "choose", "segment_length"]

_PROGRAMS = 128
_LONGEST = 128


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


@dataclass(frozen=True)
class Tiles:
    """Choices for one (dtype class, K, V): `chunk` tokens a step, one tile a kernel.

    Where `dv` is None, the walk of dk holds all of dS and gives dv too.
    """

    chunk: int
    summarize: Tile
    output: Tile
    dq: Tile
    dk: Tile
    dv: Tile | None


def _block(n: int, smallest: int) -> int:
    """Head sizes are padded to one of few tile sizes: `smallest`, 64, 128 or 256."""
    return next(size for size in (smallest, 64, 128, 256) if n <= size)


def choose(dtype: torch.dtype, K: int, V: int) -> Tiles:
    """Tiles for inputs of `dtype` and head sizes K, V in 1..256.

    bf16 multiplies bf16 tiles; fp16 and fp32 multiply fp32 tiles (tf32, tf32x3), which take twice the shared memory.
    """
    bk, bv = _block(K, 64), _block(V, 16)
    return _half_tiles(bk, bv) if dtype == torch.bfloat16 else _single_tiles(bk, bv)


def _half_tiles(bk: int, bv: int) -> Tiles:
    wide_v = min(bv, 128 if bk <= 128 else 64)
    walk_warps = 8 if wide_v > 64 or bk * wide_v >= 128 * 128 else 4
    output = Tile(bk, wide_v, walk_warps, 3 if bk <= 128 else 2)
    summarize = Tile(min(bk, 128), min(bv, 128), 8 if min(bk, bv) >= 128 else 4, 4)
    if bk <= 128 and bv <= 128:
        warps = 8 if bk * bv >= 64 * 128 else 4
        return Tiles(64, summarize, output, dq=Tile(bk, bv, warps, 3), dk=Tile(bk, bv, warps, 3), dv=None)
    across = Tile(64, bv, 8 if bv > 128 else 4, 2)
    return Tiles(64, summarize, output, dq=across, dk=across, dv=Tile(bk, wide_v, walk_warps, 2))


def _single_tiles(bk: int, bv: int) -> Tiles:
    walk = Tile(bk, min(bv, 32), 4 if bk <= 128 else 8, 1)
    across = Tile(32, bv, 4 if bv <= 128 else 8, 1)
    return Tiles(chunk=16, summarize=Tile(64, min(bv, 64), 4, 2), output=walk, dq=across, dk=across, dv=walk)


def all_configs() -> list[tuple[torch.dtype, int, int, Tiles]]:
    """Every distinct choice with one (dtype, K, V) that leads to it."""
    seen: dict[Tiles, tuple[torch.dtype, int, int, Tiles]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        for K in (64, 128, 256):
            for V in (16, 64, 128, 256):
                tiles = choose(dtype, K, V)
                seen.setdefault(tiles, (dtype, K, V, tiles))
    return list(seen.values())


def segment_length(n_chunks: int, heads: int, programs: int = _PROGRAMS) -> int:
    """Chunks a segment: about `programs` programs a tile over heads (B * H) and segments, at most `_LONGEST` chunks.

    Longer segments would also let rounding build up in the gate gradient, which is exact at their edges only.
    """
    segments = max(1, min(n_chunks, max(-(-programs // max(heads, 1)), -(-n_chunks // _LONGEST))))
    return max(1, -(-n_chunks // segments))
