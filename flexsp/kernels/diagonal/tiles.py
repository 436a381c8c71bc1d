"""Tile choices of the diagonal engine: a deterministic table, no autotuning.

`choose` is what the ops use; `all_configs` lists every choice the table can make, for tests and benchmarks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Tile", "Tiles", "all_configs", "choose", "segment_length"]

_PROGRAMS = 512


@dataclass(frozen=True)
class Tile:
    """Tile [bk, bv] of the state in one program's registers, and how the program is launched.

    `registers` caps the registers a thread, 0 leaves them to the compiler.
    """

    bk: int
    bv: int
    warps: int
    stages: int
    registers: int = 0


@dataclass(frozen=True)
class Tiles:
    """Choices for one (dtype class, K, V): `chunk` tokens a step, one tile a kernel."""

    chunk: int
    summarize: Tile
    output: Tile
    dq: Tile
    dk: Tile
    dv: Tile


def _block(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def choose(dtype: torch.dtype, K: int, V: int) -> Tiles:
    """Tiles for inputs of `dtype` and head sizes K, V in 1..256.

    bf16 multiplies bf16 tiles; fp16 and fp32 multiply fp32 tiles (tf32, tf32x3), which take twice the shared memory.
    """
    bk, bv = _block(K), _block(V)
    if dtype == torch.bfloat16:
        return _half_tiles(bk, bv)
    return _single_tiles(bk, bv)


def _half_tiles(bk: int, bv: int) -> Tiles:
    side_k, side_v = min(bk, 64), min(bv, 64)
    warps = 8 if max(bk, bv) > 128 else 4
    return Tiles(
        chunk=64,
        summarize=Tile(min(bk, 128), side_v, 4, 3),
        output=Tile(bk, side_v, warps, 2),
        dq=Tile(side_k, bv, warps, 2),
        dk=Tile(side_k, bv, warps, 2),
        dv=Tile(bk, side_v, warps, 2),
    )


def _single_tiles(bk: int, bv: int) -> Tiles:
    side_k, side_v = min(bk, 32), min(bv, 32)
    return Tiles(
        chunk=32,
        summarize=Tile(min(bk, 64), side_v, 4, 2),
        output=Tile(bk, side_v, 4, 1),
        dq=Tile(side_k, bv, 4, 1),
        dk=Tile(side_k, bv, 4, 1),
        dv=Tile(bk, side_v, 4, 1),
    )


def all_configs() -> list[tuple[torch.dtype, int, int, Tiles]]:
    """Every distinct choice with one (dtype, K, V) that leads to it."""
    seen: dict[Tiles, tuple[torch.dtype, int, int, Tiles]] = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for K in (16, 32, 64, 128, 256):
            for V in (16, 32, 64, 128, 256):
                tiles = choose(dtype, K, V)
                seen.setdefault(tiles, (dtype, K, V, tiles))
    return list(seen.values())


def segment_length(n_chunks: int, heads: int) -> int:
    """Chunks a segment: enough segments that heads (B * H) times segments gives about `_PROGRAMS` programs a tile."""
    segments = max(1, min(n_chunks, -(-_PROGRAMS // max(heads, 1))))
    return max(1, -(-n_chunks // segments))
