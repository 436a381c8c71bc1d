"""How the fused scan cuts states into tiles."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton

from flexsp.scan.dense import MOST

__all__ = ["CHAIN_TILE", "LOCAL_TILE", "MOST_COLUMNS", "MOST_ROWS", "Tiles", "too_large"]

CHAIN_TILE = 4096  # fp32 numbers of a tile that travels: fixed, since both ends of a hop must agree
LOCAL_TILE = 1024
MOST_ROWS, MOST_COLUMNS = 65536, 512  # of a state; dense transitions have fewer rows


def too_large(K: int, V: int, dense: bool) -> str | None:
    """What the scan takes instead of a state of K x V, or None if it takes it."""
    rows = MOST if dense else MOST_ROWS
    return None if 1 <= K <= rows and 1 <= V <= MOST_COLUMNS else f"1..{rows} rows and 1..{MOST_COLUMNS} columns"


@dataclass(frozen=True)
class Tiles:
    """A tile is ``rows`` rows of a state and all V columns, padded to ``cols``; if dense, all rows and some columns.

    There are ``count`` tiles, and a block has ``warps`` warps.
    """

    rows: int
    cols: int
    count: int
    warps: int

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def of(B: int, H: int, K: int, V: int, size: int, halved: bool = False) -> Tiles:
        warps = 8 if size == CHAIN_TILE else 4
        if halved:
            size //= 2
        if V % 4:
            size //= 2  # no loads of 16 bytes: each number has an address of its own, which takes registers
        cols = triton.next_power_of_2(V)
        rows = max(1, min(triton.next_power_of_2(K), size // cols))
        return Tiles(rows, cols, B * H * triton.cdiv(K, rows), warps)

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def dense(B: int, H: int, K: int, V: int) -> Tiles:
        rows = max(16, triton.next_power_of_2(K))
        cols = max(16, min(triton.next_power_of_2(V), CHAIN_TILE // rows))
        return Tiles(rows, cols, B * H * triton.cdiv(V, cols), 8)
