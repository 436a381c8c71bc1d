"""How one call of the delta engine is cut: chunks, segments, tiles. A deterministic table, no autotuning."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from flexsp.devices import MOST_HEADS
from flexsp.kernels.launches import Launch

__all__ = ["MOST", "Plan", "Tiles", "plan_of"]

MOST = 128
"""Of K and V."""


@dataclass(frozen=True)
class Tiles:
    """Tokens of a chunk, and for each kernel the columns of the state a program has and how it is launched."""

    chunk: int
    prepare: Launch
    output: Launch
    states: Launch
    back: Launch
    grads: Launch


@dataclass(frozen=True)
class Plan:
    """How one call is cut. `scanned`: states come from elsewhere, over ranks."""

    B: int
    T: int
    H: int
    K: int
    V: int
    docs: int
    tiles: Tiles
    n_chunks: int
    scanned: bool

    @property
    def per_seg(self) -> int:
        return max(1, self.n_chunks)

    @property
    def n_seg(self) -> int:
        return 1


def _choose(dtype: torch.dtype, V: int) -> Tiles:
    """bf16 multiplies bf16 tiles; fp16 and fp32 multiply fp32 tiles, three tf32 products for one."""
    wide = 16 if V <= 16 else 32 if V <= 32 else 64
    if dtype == torch.bfloat16:
        walk = Launch(min(wide, 32), 4, 2)
        return Tiles(64, Launch(0, 4, 1), walk, walk, walk, Launch(wide, 8, 1))
    walk = Launch(min(wide, 32), 4, 1)
    return Tiles(32, Launch(0, 4, 1), walk, walk, walk, Launch(min(wide, 32), 8, 1))


@functools.lru_cache(maxsize=4096)
def plan_of(dtype: torch.dtype, B: int, T: int, H: int, K: int, V: int, docs: int, scanned: bool) -> Plan:
    """The plan of calls of B sequences of T tokens and H heads; `docs` packed documents, 0 if not packed."""
    if B * H > MOST_HEADS:
        raise ValueError(f"q: expected B * H <= {MOST_HEADS} (a grid's second axis), got {B} * {H}")
    tiles = _choose(dtype, V)
    return Plan(B, T, H, K, V, docs, tiles, -(-T // tiles.chunk) + docs, scanned)
