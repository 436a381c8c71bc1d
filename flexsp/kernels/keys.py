"""Queries and keys as a recurrence reads them: of unit length, and one for each value head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from flexsp.comm.derivatives import by_autograd, keep_for_backward, kept_for_backward
from flexsp.kernels import keys_in_pytorch
from flexsp.kernels.keys_in_pytorch import EPS
from flexsp.kernels.operators import plain
from flexsp.kernels.run import power_of_2
from flexsp.runtime.kept import keep
from flexsp.runtime.launch import KernelLaunch, begin
from flexsp.runtime.recipe import step
from flexsp.runtime.steps import Frame, run_steps

__all__ = ["unit_keys"]

_EPS = tl.constexpr(EPS)
_NAME = "keys of unit length"
_NUMBERS = 2048  # of a program
_CALLS = 256  # launches that are kept

Tensors = Sequence[torch.Tensor]
_launches: dict[Any, KernelLaunch] = {}


@triton.jit
def _tile(x, x_sb, x_st, x_sh, rows, T, H, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr):
    """(row of each line, column of each number, where there are numbers, fp32 tile [ROWS, BK]) of x [B, T, H, K]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BK)
    inside = (row < rows)[:, None] & (cols < K)[None, :]
    token = row // H
    at = (token // T) * x_sb + (token % T) * x_st + (row % H) * x_sh
    return row, cols, inside, tl.load(x + at[:, None] + cols[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _unit(
    x, y, x_sb, x_st, x_sh, rows, T, H, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, REPEATS: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    row, cols, inside, values = _tile(x, x_sb, x_st, x_sh, rows, T, H, K, BK, ROWS)
    if NORM:
        values *= tl.rsqrt(tl.sum(tl.where(inside, values * values, 0.0), axis=1) + _EPS)[:, None]
    for r in tl.static_range(REPEATS):
        tl.store(y + ((row * REPEATS + r) * K)[:, None] + cols[None, :], values.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _unit_grad(
    x, dy, dx, x_sb, x_st, x_sh, rows, T, H, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
    REPEATS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row, cols, inside, values = _tile(x, x_sb, x_st, x_sh, rows, T, H, K, BK, ROWS)
    grad = tl.zeros([ROWS, BK], tl.float32)
    for r in tl.static_range(REPEATS):
        grad += tl.load(dy + ((row * REPEATS + r) * K)[:, None] + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(tl.where(inside, values * values, 0.0), axis=1) + _EPS)[:, None]
        along = tl.sum(tl.where(inside, values * scale * grad, 0.0), axis=1)[:, None]
        grad = (grad - values * scale * along) * scale
    tl.store(dx + (row * K)[:, None] + cols[None, :], grad.to(dx.dtype.element_ty), mask=inside)


_POINTERS = ("x0", "x1", "y0", "y1", "dy0", "dy1", "dx0", "dx1")
_SIZES = ["x0_rows", "x0_T", "x1_rows", "x1_T", "H"]


@triton.jit(do_not_specialize=_SIZES)
def unit_keys_kernel(
    x0, x1, y0, y1, x0_sb, x0_st, x0_sh, x1_sb, x1_st, x1_sh, x0_rows, x0_T, x1_rows, x1_T, H, K: tl.constexpr,
    BK: tl.constexpr, ROWS: tl.constexpr, REPEATS: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [B, T, H REPEATS, K]: x [B, T, H, K] / sqrt(sum x^2 + EPS), or x itself, each head REPEATS times."""
    begin(PDL)
    if tl.program_id(1) == 0:
        _unit(x0, y0, x0_sb, x0_st, x0_sh, x0_rows, x0_T, H, K, BK, ROWS, REPEATS, NORM)
    else:
        _unit(x1, y1, x1_sb, x1_st, x1_sh, x1_rows, x1_T, H, K, BK, ROWS, REPEATS, NORM)


@triton.jit(do_not_specialize=_SIZES)
def unit_keys_grad_kernel(
    x0, x1, dy0, dy1, dx0, dx1, x0_sb, x0_st, x0_sh, x1_sb, x1_st, x1_sh, x0_rows, x0_T, x1_rows, x1_T, H,
    K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, REPEATS: tl.constexpr, NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """dx [B, T, H, K] of dy [B, T, H REPEATS, K]."""
    begin(PDL)
    if tl.program_id(1) == 0:
        _unit_grad(x0, dy0, dx0, x0_sb, x0_st, x0_sh, x0_rows, x0_T, H, K, BK, ROWS, REPEATS, NORM)
    else:
        _unit_grad(x1, dy1, dx1, x1_sb, x1_st, x1_sh, x1_rows, x1_T, H, K, BK, ROWS, REPEATS, NORM)


def _run(kernel: Any, pointers: Sequence[str], tensors: Tensors, repeats: int, norm: bool) -> None:
    """`tensors`: what the kernel's `pointers` are, two of each kind: first x0 and x1 [B, T, H, K], last what it writes.
    Twice the same where there is but one of each."""
    x0, x1, one = *tensors[:2], tensors[-1] is tensors[-2]
    looks = [(x.dtype, x.data_ptr() % 16 == 0) for x in tensors]  # as many as the kernel has pointers
    key = (repeats, norm, x0.device, x0.shape, x0.stride(), x1.shape, x1.stride(), one, *looks)
    launch = _launches.get(key)
    if launch is None:
        launch = _launch(kernel, pointers, x0, x1, 1 if one else 2, repeats, norm)
        keep(_launches, key, launch, _CALLS)
    if x0.numel():
        run_steps([launch], Frame(dict(zip(pointers, tensors, strict=True)), ()), x0.device)


def _launch(
    kernel: Any, pointers: Sequence[str], x0: torch.Tensor, x1: torch.Tensor, count: int, repeats: int, norm: bool
) -> KernelLaunch:  # fmt: skip
    """A row of programs for each of x0 and x1, or for x0 alone."""
    B, _, H, K = x0.shape
    block = power_of_2(K)
    lines = max(1, _NUMBERS // block)
    lengths = x0.shape[1], x1.shape[1]
    numbers = [*x0.stride()[:3], *x1.stride()[:3], *[n for T in lengths for n in (B * T * H, T)], H]
    constants = {"K": K, "BK": block, "ROWS": lines, "REPEATS": repeats, "NORM": norm}
    grid = -(-B * max(lengths) * H // lines), count, 1
    return KernelLaunch(kernel, grid, pointers, numbers, constants, {"num_warps": 4})


def _pair(tensors: Tensors) -> Tensors:
    return tensors[0], tensors[-1]


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _forward(tensors: Tensors, repeats: int, norm: bool) -> tuple[torch.Tensor, ...]:
    found = []
    for x in tensors:
        B, T, H, K = x.shape
        found.append(x.new_empty(B, T, H * repeats, K))
    _run(unit_keys_kernel, _POINTERS[:4], [*_pair(tensors), *_pair(found)], repeats, norm)
    return (*found,)


class _UnitKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, repeats: int, norm: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = _forward(tensors, repeats, norm)
        keep_for_backward(ctx, *tensors)
        ctx.how = repeats, norm
        ctx.set_materialize_grads(False)
        if not all(ctx.needs_input_grad[2:]):
            ctx.mark_non_differentiable(*[y for y, x in zip(found, tensors, strict=True) if not x.requires_grad])
        return found

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        saved = kept_for_backward(ctx, _NAME, *dys)
        asked = {i: dy for i, dy in enumerate(dys) if dy is not None and ctx.needs_input_grad[2 + i]}
        grads = dict(zip(asked, _backward([_rows(saved[i]) for i in asked], [*asked.values()], *ctx.how), strict=True))
        return None, None, *[grads.get(i) for i in range(len(dys))]


def _backward(xs: Tensors, dys: Tensors, repeats: int, norm: bool) -> Sequence[torch.Tensor]:
    if not plain(*xs, *dys):
        return by_autograd(lambda *xs: [keys_in_pytorch.unit_keys(x, repeats, norm) for x in xs], xs, dys)
    found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in xs]
    if found:
        given = [*_pair(xs), *_pair([dy.contiguous() for dy in dys]), *_pair(found)]
        _run(unit_keys_grad_kernel, _POINTERS[:2] + _POINTERS[4:], given, repeats, norm)
    return found


@step
def unit_keys(tensors: Tensors, repeats: int, norm: bool) -> tuple[torch.Tensor, ...]:
    """Of each of one or two x [B, T, H, K], which may differ in T: x with unit rows if `norm`, each head `repeats`
    times, [B, T, H repeats, K], in x's dtype.

    Value head h has key head h // repeats. The norm is sqrt(sum of squares + 1e-6), in float32.
    """
    tensors = [_rows(x) for x in tensors]
    if torch.is_grad_enabled() and any([x.requires_grad for x in tensors]):
        found: tuple[torch.Tensor, ...] = _UnitKeys.apply(repeats, norm, *tensors)
        return found
    return _forward(tensors, repeats, norm)
