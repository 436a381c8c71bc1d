"""Rows of mLSTM: keys times their weights, and quotients of what queries read by the normaliser."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from flexsp.comm.derivatives import by_autograd, keep_for_backward, kept_for_backward
from flexsp.kernels.mlstm import in_pytorch
from flexsp.kernels.operators import plain
from flexsp.kernels.run import run
from flexsp.runtime.launch import begin

__all__ = ["quotients", "weighted"]

_KEYS = "mLSTM's weighted keys"
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
def _exp(x):
    """e^x in float32 of x in float64: what x loses in float32 would be a relative error of the result."""
    x *= 1.4426950408889634
    x = tl.where(x < -200.0, -200.0, tl.where(x > 200.0, 200.0, x))
    n = tl.floor(x)
    return tl.exp2((x - n).to(tl.float32)) * tl.exp2(n.to(tl.float32))


@triton.jit
def _weight(i, m, row, batch, token, head, there, i_sb, i_st, i_sh):
    gate = tl.load(i + batch * i_sb + token * i_st + head * i_sh, mask=there, other=float("-inf")).to(tl.float64)
    return _exp(gate - tl.load(m + row, mask=there, other=0.0))


@triton.jit(do_not_specialize=_SIZES)
def mlstm_keys_kernel(
    k, i, m, y, weights, k_sb, k_st, k_sh, i_sb, i_st, i_sh, rows, T, H, N: tl.constexpr, BN: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """weights [B, T, H] = e^{i - m}, in fp32, and y [B, T, H, N] = e^{i - m} k."""
    begin(PDL)
    row, batch, token, head, there, cols, inside = _rows(rows, T, H, N, BN, ROWS)
    weight = _weight(i, m, row, batch, token, head, there, i_sb, i_st, i_sh)
    at = batch * k_sb + token * k_st + head * k_sh
    x = tl.load(k + at[:, None] + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(weights + row, weight, mask=there)
    tl.store(y + (row * N)[:, None] + cols[None, :], (x * weight[:, None]).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def mlstm_keys_grad_kernel(
    k, i, m, dy, other, dweights, dk, di, k_sb, k_st, k_sh, i_sb, i_st, i_sh, rows, T, H, N: tl.constexpr,
    BN: tl.constexpr, ROWS: tl.constexpr, ALIKE: tl.constexpr, APART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dk [B, T, H, N] and di [B, T, H] of dy, that of weighted keys, if ALIKE, and of other, that of the keys as they
    are, and dweights, if APART."""
    begin(PDL)
    row, batch, token, head, there, cols, inside = _rows(rows, T, H, N, BN, ROWS)
    weight = _weight(i, m, row, batch, token, head, there, i_sb, i_st, i_sh)
    at = batch * k_sb + token * k_st + head * k_sh
    x = tl.load(k + at[:, None] + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    to = (row * N)[:, None] + cols[None, :]
    grad = tl.zeros(x.shape, tl.float32)
    of_weight = tl.zeros([ROWS], tl.float32)
    if ALIKE:
        grad += tl.load(dy + to, mask=inside, other=0.0).to(tl.float32)
        of_weight += tl.sum(grad * x + 0.0, axis=1)
        grad *= weight[:, None]
    if APART:
        grad += tl.load(other + to, mask=inside, other=0.0).to(tl.float32)
        of_weight += tl.load(dweights + row, mask=there, other=0.0)
    tl.store(dk + to, grad.to(dk.dtype.element_ty), mask=inside)
    tl.store(di + row, (of_weight * weight).to(di.dtype.element_ty), mask=there)


@triton.jit
def _divisor(denominator, m, eps, row, there):
    """(the normaliser, what it is at least, what is divided by), of rows."""
    below = tl.load(denominator + row, mask=there, other=1.0).to(tl.float32)
    least = _exp(-tl.load(m + row, mask=there, other=0.0))
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
    block = triton.next_power_of_2(N)
    lines = max(1, _NUMBERS // block)
    rows = B * T * H
    return (triton.cdiv(rows, lines), 1, 1), [rows, T, H], {"N": N, "BN": block, "ROWS": lines}


def _keys(
    k: torch.Tensor, i: torch.Tensor, m: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.empty(k.shape, dtype=dtype, device=k.device)
    weights = torch.empty(k.shape[:3], dtype=torch.float32, device=k.device)
    grid, sizes, constants = _cut(k)
    if y.numel():
        tensors = {"k": k, "i": i, "m": m, "y": y, "weights": weights}
        run(mlstm_keys_kernel, grid, tensors, [*k.stride()[:3], *i.stride(), *sizes], constants)
    return y, weights


class _Weighted(torch.autograd.Function):
    """Weighted keys, and the keys as they are beside the weights: what becomes of the two is added here."""

    @staticmethod
    def forward(
        ctx: Any, k: torch.Tensor, i: torch.Tensor, m: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y, weights = _keys(k, i, m, dtype)
        keep_for_backward(ctx, k, i, m)
        ctx.dtype = dtype
        ctx.set_materialize_grads(False)
        return y, k.new_empty(0).set_(k), weights  # type: ignore[call-overload]

    @staticmethod
    def backward(ctx: Any, *grads: Optional) -> tuple[Optional, ...]:
        k, i, m = kept_for_backward(ctx, _KEYS, *grads)
        if all(grad is None for grad in grads):
            return None, None, None, None
        dy, other, dweights = grads
        if not plain(k, i, m, *(grad for grad in grads if grad is not None)):
            found = by_autograd(lambda k, i: in_pytorch.weighted(k, i, m, ctx.dtype), (k, i), grads)
            return *found, None, None
        dk = torch.empty_like(k, memory_format=torch.contiguous_format)
        di = torch.empty(k.shape[:3], dtype=i.dtype, device=k.device)
        k = k if k.stride(-1) == 1 else k.contiguous()
        apart = other is not None or dweights is not None
        if apart:
            other = torch.zeros_like(dk) if other is None else other.contiguous()
            dweights = torch.zeros_like(m, dtype=torch.float32) if dweights is None else dweights.contiguous()
        grid, sizes, constants = _cut(k)
        tensors = {"k": k, "i": i, "m": m, "dy": k if dy is None else dy.contiguous(), "other": other if apart else k,
                   "dweights": dweights if apart else m, "dk": dk, "di": di}  # fmt: skip
        if k.numel():
            run(mlstm_keys_grad_kernel, grid, tensors, [*k.stride()[:3], *i.stride(), *sizes],
                constants | {"ALIKE": dy is not None, "APART": apart})  # fmt: skip
        return dk, di, None, None


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


def weighted(
    k: torch.Tensor, i: torch.Tensor, m: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `in_pytorch.weighted` gives: m is in float64 and a constant."""
    k, m = k if k.stride(-1) == 1 else k.contiguous(), m.contiguous()
    if torch.is_grad_enabled() and (k.requires_grad or i.requires_grad):
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _Weighted.apply(k, i, m, dtype)
        return found
    y, weights = _keys(k, i, m, dtype)
    return y, k, weights


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
