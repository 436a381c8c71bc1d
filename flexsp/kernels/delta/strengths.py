"""Values times their strengths of writing, as the walks of a delta rule with two strengths read them."""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.runtime.launch import begin

__all__ = ["written_values", "written_values_grad"]


@triton.jit
def _place(x_sb, x_st, x_sh, row, T, H):
    """Where rows of x [B, T, H, V] begin."""
    token = row // H
    return (token // T) * x_sb + (token % T) * x_st + (row % H) * x_sh


@triton.jit
def _tile(x, x_sb, x_st, x_sh, rows, T, H, V: tl.constexpr, ROWS: tl.constexpr):
    """The fp32 tile [ROWS, V] of x [B, T, H, V], where it would lie in contiguous memory, and which rows there are."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    cols = tl.arange(0, V)[None, :]
    found = tl.load(x + _place(x_sb, x_st, x_sh, row, T, H)[:, None] + cols, mask=inside, other=0.0)
    return found.to(tl.float32), row[:, None] * V + cols, inside


@triton.jit(do_not_specialize=["rows", "T", "H"])
def written_values(
    v, write, y, v_sb, v_st, v_sh, write_sb, write_st, write_sh, rows, T, H, V: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y = write v, all [B, T, H, V]; y is contiguous."""
    begin(PDL)
    values, at, inside = _tile(v, v_sb, v_st, v_sh, rows, T, H, V, ROWS)
    strengths, at, inside = _tile(write, write_sb, write_st, write_sh, rows, T, H, V, ROWS)
    tl.store(y + at, (values * strengths).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "T", "H"])
def written_values_grad(
    v, write, dy, dv, dwrite, v_sb, v_st, v_sh, write_sb, write_st, write_sh, rows, T, H, V: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dv = write dy and dwrite = v dy; dy, dv and dwrite are contiguous."""
    begin(PDL)
    values, at, inside = _tile(v, v_sb, v_st, v_sh, rows, T, H, V, ROWS)
    strengths, at, inside = _tile(write, write_sb, write_st, write_sh, rows, T, H, V, ROWS)
    grad = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dv + at, (strengths * grad).to(dv.dtype.element_ty), mask=inside)
    tl.store(dwrite + at, (values * grad).to(dwrite.dtype.element_ty), mask=inside)
