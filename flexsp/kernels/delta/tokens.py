"""Rows of tokens beside the keys of a chunk, where a token has STEPS keys (docs/math.md, section 7, "Several keys").

Chunks count keys. A query, an output and its gradient belong to the last key of a token, its gate to the first. With
one key a token these are rows like those of keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.primitives import load_rows, store_columns, store_rows

__all__ = ["load_tokens", "of_gates", "store_tokens", "store_turned_tokens"]


@triton.jit
def _places(start, length, C: tl.constexpr, STEPS: tl.constexpr, AT: tl.constexpr):
    """For each key of a chunk its token, counted from that of the first key, and whether it is the token's key AT."""
    i = tl.arange(0, C)
    key = (start % STEPS).to(tl.int32) + i
    return key // STEPS, (key % STEPS == AT) & (i < length)


@triton.jit
def of_gates(start, length, C: tl.constexpr, STEPS: tl.constexpr):
    """For each key of a chunk the token whose gate it has, counted from that of the first key; and whether it has."""
    return _places(start, length, C, STEPS, 0)


@triton.jit
def load_tokens(
    base, stride_t, start, length, col0, C: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr
):  # fmt: skip
    """Tile [C, BLOCK] of tokens' rows, zero at other keys than the last of a token."""
    if STEPS == 1:
        rows = load_rows(base + start * stride_t, stride_t, length, col0, C, DIM, BLOCK)
    else:
        token, there = _places(start, length, C, STEPS, STEPS - 1)
        cols = col0 + tl.arange(0, BLOCK)
        at = base + (start // STEPS) * stride_t + token[:, None] * stride_t + cols[None, :]
        rows = tl.load(at, mask=there[:, None] & (cols[None, :] < DIM), other=0.0)
    return rows


@triton.jit
def store_tokens(
    base, x, stride_t, start, length, col0, C: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Stores the rows that `load_tokens` would read."""
    if STEPS == 1:
        store_rows(base + start * stride_t, x, stride_t, length, col0, C, DIM, BLOCK)
    else:
        token, there = _places(start, length, C, STEPS, STEPS - 1)
        cols = col0 + tl.arange(0, BLOCK)
        at = base + (start // STEPS) * stride_t + token[:, None] * stride_t + cols[None, :]
        tl.store(at, x.to(base.dtype.element_ty), mask=there[:, None] & (cols[None, :] < DIM))


@triton.jit
def store_turned_tokens(
    base, x, stride_t, start, length, col0, C: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """`store_tokens` of a transposed tile [BLOCK, C]."""
    if STEPS == 1:
        store_columns(base + start * stride_t, x, stride_t, length, col0, C, DIM, BLOCK)
    else:
        store_tokens(base, tl.trans(x), stride_t, start, length, col0, C, DIM, BLOCK, STEPS)
