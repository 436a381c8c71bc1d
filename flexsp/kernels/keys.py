"""Queries and keys as a recurrence reads them: of unit length, and one for each value head."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from flexsp.comm.derivatives import IN_PYTORCH, first_only, same_place, untransformed
from flexsp.kernels import keys_in_pytorch
from flexsp.kernels.keys_in_pytorch import EPS
from flexsp.kernels.operators import plain
from flexsp.runtime.launch import begin, launch

__all__ = ["unit_keys"]

_EPS = tl.constexpr(EPS)
_NAME = "keys of unit length"
_NUMBERS = 2048  # of a program


@triton.jit
def _tile(x, x_sb, x_st, x_sh, rows, T, H, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr):
    """(row of each line, column of each number, where there are numbers, fp32 tile [ROWS, BK]) of x [B, T, H, K]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BK)
    inside = (row < rows)[:, None] & (cols < K)[None, :]
    token = row // H
    at = (token // T) * x_sb + (token % T) * x_st + (row % H) * x_sh
    return row, cols, inside, tl.load(x + at[:, None] + cols[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "T", "H"])
def unit_keys_kernel(
    x, y, x_sb, x_st, x_sh, rows, T, H, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, REPEATS: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [B, T, H REPEATS, K]: x [B, T, H, K] / sqrt(sum x^2 + EPS), or x itself, each head REPEATS times."""
    begin(PDL)
    row, cols, inside, values = _tile(x, x_sb, x_st, x_sh, rows, T, H, K, BK, ROWS)
    if NORM:
        values *= tl.rsqrt(tl.sum(tl.where(inside, values * values, 0.0), axis=1) + _EPS)[:, None]
    for r in tl.static_range(REPEATS):
        tl.store(y + ((row * REPEATS + r) * K)[:, None] + cols[None, :], values.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "T", "H"])
def unit_keys_grad_kernel(
    x, dy, dx, x_sb, x_st, x_sh, rows, T, H, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
    REPEATS: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dx [B, T, H, K] of dy [B, T, H REPEATS, K]."""
    begin(PDL)
    row, cols, inside, values = _tile(x, x_sb, x_st, x_sh, rows, T, H, K, BK, ROWS)
    grad = tl.zeros([ROWS, BK], tl.float32)
    for r in tl.static_range(REPEATS):
        grad += tl.load(dy + ((row * REPEATS + r) * K)[:, None] + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(tl.where(inside, values * values, 0.0), axis=1) + _EPS)[:, None]
        along = tl.sum(tl.where(inside, values * scale * grad, 0.0), axis=1)[:, None]
        grad = (grad - values * scale * along) * scale
    tl.store(dx + (row * K)[:, None] + cols[None, :], grad.to(dx.dtype.element_ty), mask=inside)


def _run(kernel: Any, x: torch.Tensor, others: list[torch.Tensor], repeats: int, norm: bool) -> None:
    B, T, H, K = x.shape
    block = triton.next_power_of_2(K)
    lines = max(1, _NUMBERS // block)
    if x.numel():
        constants = {"K": K, "BK": block, "ROWS": lines, "REPEATS": repeats, "NORM": norm}
        args = (x, *others, *x.stride()[:3], B * T * H, T, H)
        launch(kernel, (triton.cdiv(B * T * H, lines),), args, constants, {"num_warps": 4})


class _UnitKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, repeats: int, norm: bool) -> torch.Tensor:
        x = x if x.stride(-1) == 1 else x.contiguous()
        B, T, H, K = x.shape
        y = x.new_empty(B, T, H * repeats, K)
        _run(unit_keys_kernel, x, [y], repeats, norm)
        ctx.save_for_backward(x)
        ctx.how = repeats, norm
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        first_only(_NAME, IN_PYTORCH)
        untransformed(_NAME, IN_PYTORCH, dy)
        (x,) = ctx.saved_tensors
        same_place(dy.device, x)
        x = x if x.stride(-1) == 1 else x.contiguous()
        if not plain(x, dy):
            return _grad(x, dy, *ctx.how), None, None
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        _run(unit_keys_grad_kernel, x, [dy.contiguous(), dx], *ctx.how)
        return dx, None, None


def _grad(x: torch.Tensor, dy: torch.Tensor, repeats: int, norm: bool) -> torch.Tensor:
    """The same in PyTorch, where something looks at the operators of a backward pass."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        y = keys_in_pytorch.unit_keys(leaf, repeats, norm)
    return torch.autograd.grad(y, leaf, dy)[0]


def unit_keys(x: torch.Tensor, repeats: int, norm: bool) -> torch.Tensor:
    """x [B, T, H, K] with unit rows if `norm`, each head `repeats` times: [B, T, H repeats, K], in x's dtype.

    Value head h has key head h // repeats. The norm is sqrt(sum of squares + 1e-6), in float32.
    """
    y: torch.Tensor = _UnitKeys.apply(x, repeats, norm)
    return y
