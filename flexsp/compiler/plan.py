"""Stage 4: how one call of a generated variant is cut into chunks, segments and tiles. Deterministic."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flexsp.compiler.skeleton import Layout
from flexsp.compiler.values import NotEmittable

__all__ = ["Launch", "Plan", "make_plan"]

_PROGRAMS = 128
_LONGEST = 128
_LARGEST = 128
_NARROWEST = 32
_PART_WARPS = 4


@dataclass(frozen=True)
class Launch:
    """Columns of the state a program has, and how it is launched."""

    cols: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Plan:
    """Chunks, segments and tiles of one call; `blocks` are padded sizes by name."""

    chunk: int
    blocks: tuple[tuple[str, int], ...]
    n_chunks: int
    per_seg: int
    n_seg: int
    walk: Launch
    whole: Launch
    part: Launch
    small: Launch


def padded(n: int) -> int:
    """The tile size for n."""
    return max(_NARROWEST, 1 << (n - 1).bit_length())


def make_plan(
    layout: Layout, sizes: Mapping[str, int], heads: int, T: int, docs: int, dtype: torch.dtype, dense: bool,
    split: bool, chunk: int | None,
) -> Plan:  # fmt: skip
    """Plan for `heads` (B * H) sequences of T tokens. `split`: walks may take some of the state's columns each.

    A dense transition is walked in one segment, and columns of the state are spread over programs instead: its
    segments would have to be composed with a K x K product each.
    """
    return _plan(layout.rows, layout.cols, tuple(sizes.items()), heads, T, docs, dtype, dense, split, chunk)


@functools.lru_cache(maxsize=4096)
def _plan(
    rows: str, cols: str, sizes: tuple[tuple[str, int], ...], heads: int, T: int, docs: int, dtype: torch.dtype,
    dense: bool, split: bool, chunk: int | None,
) -> Plan:  # fmt: skip
    blocks = {name: padded(n) for name, n in sizes}
    for name, n in blocks.items():
        if n > _LARGEST:
            raise NotEmittable(f"{name} = {dict(sizes)[name]}: kernels are generated for sizes up to {_LARGEST}")
    half = dtype == torch.bfloat16
    chunk = chunk or (64 if half else 16)
    n_chunks = -(-T // chunk) + docs
    width = blocks[cols]
    if dense and split:
        while width > _NARROWEST and heads * (blocks[cols] // width) < _PROGRAMS:
            width //= 2
    if not half and split:
        width = min(width, 32)
    panels = -(-blocks[cols] // width)
    segments = 1 if dense else max(1, min(n_chunks, max(-(-_PROGRAMS // (heads * panels)), -(-n_chunks // _LONGEST))))
    per_seg = max(1, -(-n_chunks // segments))
    large = blocks[rows] * width >= 128 * 128
    walk = Launch(width, 8 if large else 4, 3 if half else 1)
    whole = Launch(blocks[cols], 8 if blocks[rows] * blocks[cols] >= 64 * 128 else 4, 1)
    part, small = Launch(blocks[cols], _PART_WARPS, 1), Launch(blocks[cols], 2, 1)
    return Plan(
        chunk, tuple(blocks.items()), n_chunks, per_seg, max(1, -(-n_chunks // per_seg)), walk, whole, part, small
    )
