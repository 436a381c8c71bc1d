"""How one call of the diagonal engine is cut: chunks, segments, tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexsp.kernels.diagonal.tiles import Tiles, choose, segment_length

__all__ = ["Plan", "make_plan"]


@dataclass(frozen=True)
class Plan:
    """How one call is cut: chunks, segments and tiles."""

    B: int
    T: int
    H: int
    K: int
    V: int
    docs: int
    tiles: Tiles
    n_chunks: int
    per_seg: int
    n_seg: int

    @property
    def packed(self) -> bool:
        return self.docs > 0


def make_plan(q: torch.Tensor, v: torch.Tensor, docs: int) -> Plan:
    """Plan for q [B, T, H, K], v [B, T, H, V] and `docs` packed documents (0: not packed)."""
    B, T, H, K = q.shape
    V = v.shape[-1]
    tiles = choose(q.dtype, K, V)
    n_chunks = -(-T // tiles.chunk) + docs
    per_seg = segment_length(n_chunks, B * H)
    n_seg = max(1, -(-n_chunks // per_seg))
    return Plan(B, T, H, K, V, docs, tiles, n_chunks, per_seg, n_seg)
