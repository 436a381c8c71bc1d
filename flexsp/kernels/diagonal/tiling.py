"""How one call of the diagonal engine is cut: chunks, segments, tiles."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from flexsp.devices import Device, check_heads, of_device
from flexsp.kernels.diagonal import tiles
from flexsp.kernels.diagonal.tiles import Tiles

__all__ = ["NAME", "Tiling", "decay_dtype", "make_tiling", "tiling_of"]

NAME = "the kernels of flexsp.ops (chunk_simple_gla and the others)"


@dataclass(frozen=True)
class Tiling:
    """How one call is cut: chunks, segments and tiles."""

    B: int
    T: int
    H: int
    K: int
    V: int
    n_docs: int
    tiles: Tiles
    n_chunks: int
    per_seg: int
    n_seg: int
    pieces: int

    @property
    def chunk(self) -> int:
        return self.tiles.chunk


def make_tiling(q: torch.Tensor, v: torch.Tensor, n_docs: int, gated: bool = False, turned: bool = False) -> Tiling:
    """Tiling for q [B, T, G, K], v [B, T, H, V] and `n_docs` packed documents (0: not packed), on q's GPU.

    gated: tokens have gates. turned: they turn the state.
    """
    sizes = (*v.shape[:3], q.shape[-1], v.shape[-1], n_docs)
    device, shared, alike = of_device(q.device), q.shape[2] != v.shape[2], q.dtype == v.dtype
    try:
        return tiling_of(q.dtype, *sizes, device, shared, alike, gated, turned)
    except TypeError:  # symbolic sizes have no hash
        return tiling_of.__wrapped__(q.dtype, *sizes, device, shared, alike, gated, turned)


@functools.lru_cache(maxsize=4096)
def tiling_of(
    dtype: torch.dtype, B: int, T: int, H: int, K: int, V: int, n_docs: int, device: Device, shared: bool = False,
    alike: bool = True, gated: bool = False, turned: bool = False,
) -> Tiling:  # fmt: skip
    """As `make_tiling`, of sizes; `shared` where heads share keys, `alike` where v has the dtype of q and k."""
    from flexsp.runtime.triton_private import runs_gluon

    check_heads("q", B, H)
    choice = tiles.choose(dtype, K, V, device, n_docs > 0, shared, alike and runs_gluon(), gated, turned)
    n_chunks = -(-T // choice.chunk) + n_docs
    pieces = tiles.pieces(choice, n_chunks, B * H, K, V)
    per_seg = tiles.segment_length(n_chunks, B * H, device.programs, pieces)
    assert per_seg <= tiles.MOST_CHUNKS, f"{per_seg} chunks a segment: summarize_kernel sees {tiles.MOST_CHUNKS}"
    return Tiling(B, T, H, K, V, n_docs, choice, n_chunks, per_seg, max(1, -(-n_chunks // per_seg)), pieces)


def decay_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of the cumulative gates of inputs in `dtype`: after a closed gate, fp32 would lose digits of fp32 inputs."""
    return torch.float32 if dtype == torch.bfloat16 else torch.float64
