"""Rows of mLSTM: quotients of what queries read by the normaliser."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from flexsp.comm.derivatives import by_autograd, keep_for_backward, kept_for_backward
from flexsp.kernels.mlstm import in_pytorch
from flexsp.kernels.operators import plain
from flexsp.kernels.run import power_of_2, run
from flexsp.runtime.launch import begin
from flexsp.runtime.recipe import step

__all__ = ["exp32", "quotients"]

_QUOTIENTS = "mLSTM's quotients"
_NUMBERS = 2048  # of a program
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_SIZES = ["rows", "T", "H"]
Optional = torch.Tensor | None


@triton.jit
def _rows(rows, T, H, N: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr):
    """Of this program's rows: (row, batch, token, head, which of them are there, column, which numbers are there)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BN)
    token = row // H
    there = row < rows
    return row, token // T, token % T, row % H, there, cols, there[:, None] & (cols < N)[None, :]


@triton.jit
def exp32(x):
    """e^x in float32 of x in float64: what x loses in float32 would be a relative error of the result."""
    x *= 1.4426950408889634
    x = tl.where(x < -200.0, -200.0, tl.where(x > 200.0, 200.0, x))
    n = tl.floor(x)
    return tl.exp2((x - n).to(tl.float32)) * tl.exp2(n.to(tl.float32))


@triton.jit
def _divisor(denominator, m, eps, row, there):
    """(the normaliser, what it is at least, what is divided by), of rows."""
    below = tl.load(denominator + row, mask=there, other=1.0).to(tl.float32)
    least = exp32(-tl.load(m + row, mask=there, other=0.0))
    least = tl.where(least < _TINY, _TINY, least)
    return below, least, tl.where((least >= tl.abs(below)) | (least != least), least, tl.abs(below)) + eps


@triton.jit(do_not_specialize=_SIZES)
def mlstm_quotients_kernel(
    numerator, denominator, m, y, eps, rows, T, H, N: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y [B, T, H, N] = numerator / (max(|denominator|, e^{-m}) + eps)."""
    begin(PDL)
    row, _, _, _, there, cols, inside = _rows(rows, T, H, N, BN, ROWS)
    _, _, by = _divisor(denominator, m, eps, row, there)
    at = (row * N)[:, None] + cols[None, :]
    x = tl.load(numerator + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, tl.div_rn(x, tl.broadcast_to(by[:, None], x.shape)).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def mlstm_quotients_grad_kernel(
    numerator, denominator, m, dy, dn, dd, eps, rows, T, H, N: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """dn [B, T, H, N] of the numerator, dd [B, T, H] of the normaliser."""
    begin(PDL)
    row, _, _, _, there, cols, inside = _rows(rows, T, H, N, BN, ROWS)
    below, least, by = _divisor(denominator, m, eps, row, there)
    at = (row * N)[:, None] + cols[None, :]
    x = tl.load(numerator + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32) / by[:, None]
    tl.store(dn + at, grad.to(dn.dtype.element_ty), mask=inside)
    share = tl.where(tl.abs(below) < least, 0.0, tl.where(tl.abs(below) == least, 0.5, 1.0))  # 1 of NaN
    slope = tl.where(below < 0, -share, share)
    total = tl.sum(grad * x, axis=1) / by
    tl.store(dd + row, tl.where(share == 0.0, 0.0, -total * slope).to(dd.dtype.element_ty), mask=there)


def _cut(x: torch.Tensor) -> tuple[tuple[int, int, int], list[int], dict[str, int]]:
    """Grid, sizes and constants for the rows of x [B, T, H, N]."""
    B, T, H, N = x.shape
    block = power_of_2(N)
    lines = max(1, _NUMBERS // block)
    rows = B * T * H
    return (-(-rows // lines), 1, 1), [rows, T, H], {"N": N, "BN": block, "ROWS": lines}


class _Quotients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, numerator: torch.Tensor, denominator: torch.Tensor, m: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        y = _divided(numerator, denominator, m, eps, dtype)
        keep_for_backward(ctx, numerator, denominator, m)
        ctx.how = eps, dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Optional, ...]:
        numerator, denominator, m = kept_for_backward(ctx, _QUOTIENTS, dy)
        eps, dtype = ctx.how
        if not plain(numerator, denominator, m, dy):
            given = numerator, denominator
            dn, dd = by_autograd(lambda n, d: [in_pytorch.quotients(n, d, m, eps, dtype)], given, [dy])
            return dn, dd, None, None, None
        numerator, denominator = numerator.contiguous(), denominator.contiguous()
        dn, dd = torch.empty_like(numerator), torch.empty_like(denominator)
        grid, sizes, constants = _cut(numerator)
        tensors = {"numerator": numerator, "denominator": denominator, "m": m, "dy": dy.contiguous()}
        tensors |= {"dn": dn, "dd": dd}
        if numerator.numel():
            run(mlstm_quotients_grad_kernel, grid, tensors, [eps, *sizes], constants)
        return dn, dd, None, None, None


def _divided(
    numerator: torch.Tensor, denominator: torch.Tensor, m: torch.Tensor, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    y = torch.empty(numerator.shape, dtype=dtype, device=numerator.device)
    grid, sizes, constants = _cut(numerator)
    if y.numel():
        tensors = {"numerator": numerator.contiguous(), "denominator": denominator.contiguous(), "m": m, "y": y}
        run(mlstm_quotients_kernel, grid, tensors, [eps, *sizes], constants)
    return y


@step
def quotients(
    numerator: torch.Tensor, denominator: torch.Tensor, m: torch.Tensor, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """numerator [B, T, H, V] / (max(|denominator [B, T, H, 1]|, e^{-m}) + eps) in ``dtype``, as
    `in_pytorch.quotients`."""
    m = m.contiguous()
    if torch.is_grad_enabled() and (numerator.requires_grad or denominator.requires_grad):
        y: torch.Tensor = _Quotients.apply(numerator, denominator, m, eps, dtype)
        return y
    return _divided(numerator, denominator, m, eps, dtype)
