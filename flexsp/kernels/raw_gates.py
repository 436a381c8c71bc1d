"""Log gates and step sizes of the delta rules, of what projections give: one pass over them, and one backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from flexsp.comm.derivatives import by_autograd, keep_for_backward, kept_for_backward
from flexsp.kernels import raw_gates_in_pytorch
from flexsp.kernels.operators import plain
from flexsp.kernels.primitives import step_of
from flexsp.kernels.run import power_of_2, run
from flexsp.runtime.launch import begin
from flexsp.runtime.recipe import step

__all__ = ["activated"]

_NAME = "gates of raw numbers"
_MOST_LOG = tl.constexpr(raw_gates_in_pytorch.MOST_LOG[torch.float32])
_COLUMNS = 128  # of a program
_NUMBERS = 2048  # that it holds at a time
_TOKENS = 256  # of which a program adds up the gradients of parameters
_SUMMED = 8192  # numbers that a program adds up at a time
_SIZES = ["rows", "T", "parts"]
Optional = torch.Tensor | None


@triton.jit
def _slope_of(A_log, at, mask, STEEP: tl.constexpr):
    """(e^A_log, whether it has a gradient); 1 without A_log."""
    slope = tl.full(at.shape, 1.0, tl.float32)
    learned = at < 0
    if STEEP:
        log = tl.load(A_log + at, mask=mask, other=0.0).to(tl.float32)
        slope = tl.exp(tl.minimum(log, _MOST_LOG, propagate_nan=tl.PropagateNan.ALL))
        learned = ~(log > _MOST_LOG)
    return slope, learned


@triton.jit
def _shift_of(bias, cols, N: tl.constexpr, BIAS: tl.constexpr):
    shift = tl.zeros(cols.shape, tl.float32)
    if BIAS:
        shift = tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)
    return shift


@triton.jit
def _sigmoid(x):
    """(sigmoid, its derivative), of which neither loses digits far from 0."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, e, 1.0) / (1.0 + e), e / ((1.0 + e) * (1.0 + e))


@triton.jit(do_not_specialize=_SIZES)
def raw_gates_kernel(
    x, A_log, bias, y, x_sb, x_st, rows, T, factor, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr,
    ROWS: tl.constexpr, STEEP: tl.constexpr, BIAS: tl.constexpr, SIGMOID: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [B, T, N] = -e^A_log softplus(x + bias), or factor sigmoid(e^A_log (x + bias)) (SIGMOID). A head has K of the N
    columns."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    slope, _learned = _slope_of(A_log, cols // K, cols < N, STEEP)
    inside = (row < rows)[:, None] & (cols < N)[None, :]
    given = x + ((row // T) * x_sb + (row % T) * x_st)[:, None] + cols[None, :]
    raw = tl.load(given, mask=inside, other=0.0).to(tl.float32) + _shift_of(bias, cols, N, BIAS)[None, :]
    if SIGMOID:
        value, _by = _sigmoid(slope[None, :] * raw)
        value *= factor
    else:
        value, _by = step_of(raw, 0.0, inside, True)
        value *= -slope[None, :]
    tl.store(y + row[:, None] * N + cols[None, :], value, mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def raw_gates_grad_kernel(
    x, A_log, bias, dy, dx, sums, x_sb, x_st, rows, T, factor, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr,
    ROWS: tl.constexpr, PER: tl.constexpr, STEEP: tl.constexpr, BIAS: tl.constexpr, SIGMOID: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """dx [B, T, N] of dy [B, T, N]. sums [2, programs, N]: of PER tokens, the gradients of e^A_log and of bias."""
    begin(PDL)
    first = tl.program_id(0).to(tl.int64) * PER
    cols = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    slope, _learned = _slope_of(A_log, cols // K, cols < N, STEEP)
    shift = _shift_of(bias, cols, N, BIAS)
    of_slope = tl.zeros([ROWS, BN], tl.float32)
    of_bias = tl.zeros([ROWS, BN], tl.float32)
    for at in range(0, PER, ROWS):
        row = first + at + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (cols < N)[None, :]
        given = x + ((row // T) * x_sb + (row % T) * x_st)[:, None] + cols[None, :]
        raw = tl.load(given, mask=inside, other=0.0).to(tl.float32) + shift[None, :]
        to = row[:, None] * N + cols[None, :]
        grad = tl.load(dy + to, mask=inside, other=0.0)
        if SIGMOID:
            _value, by = _sigmoid(slope[None, :] * raw)
            grad *= factor * by
            of_slope += grad * raw
        else:
            value, by = step_of(raw, 0.0, inside, True)
            of_slope -= grad * value
            grad *= -by
        # e^A_log comes last, on what is 0 where a gate closes: together with other factors it may overflow.
        grad *= slope[None, :]
        of_bias += grad
        tl.store(dx + to, grad.to(dx.dtype.element_ty), mask=inside)
    left = sums + tl.program_id(0).to(tl.int64) * N + cols
    if STEEP:
        tl.store(left, tl.sum(of_slope, axis=0), mask=cols < N)
    if BIAS:
        tl.store(left + tl.num_programs(0).to(tl.int64) * N, tl.sum(of_bias, axis=0), mask=cols < N)


@triton.jit(do_not_specialize=_SIZES)
def raw_gates_sums_kernel(
    sums, A_log, dA, dbias, parts, N: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
    STEEP: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dA [H] and dbias [N], of `sums` [2, parts, N]. A head a program."""
    begin(PDL)
    h = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BK)
    of_slope = tl.zeros([ROWS, BK], tl.float32)
    of_bias = tl.zeros([ROWS, BK], tl.float32)
    for at in range(0, parts, ROWS):
        part = at + tl.arange(0, ROWS)
        inside = (part < parts)[:, None] & (cols < K)[None, :]
        given = sums + part.to(tl.int64)[:, None] * N + h * K + cols[None, :]
        if STEEP:
            of_slope += tl.load(given, mask=inside, other=0.0)
        if BIAS:
            of_bias += tl.load(given + parts.to(tl.int64) * N, mask=inside, other=0.0)
    if STEEP:
        here = h + tl.arange(0, 1)
        slope, learned = _slope_of(A_log, here, here >= 0, True)
        total = tl.sum(tl.sum(of_slope, axis=0), axis=0)
        tl.store(dA + here, tl.where(learned, total * slope, 0.0).to(dA.dtype.element_ty))
    if BIAS:
        tl.store(dbias + h * K + cols, tl.sum(of_bias, axis=0).to(dbias.dtype.element_ty), mask=cols < K)


def _columns(x: torch.Tensor) -> torch.Tensor:
    """[B, T, N] of x [B, T, H] or [B, T, H, K], with columns side by side."""
    x = x.flatten(2)
    return x if x.stride(-1) == 1 else x.contiguous()


def _given(x: torch.Tensor, A_log: Optional, bias: Optional) -> dict[str, torch.Tensor]:
    """What the kernels read; x where there is none."""
    others = {"A_log": A_log, "bias": bias}
    return {"x": _columns(x)} | {name: x if p is None else p.flatten().contiguous() for name, p in others.items()}


def _cut(x: torch.Tensor, A_log: Optional, bias: Optional, factor: float | None) -> tuple[list[Any], dict[str, Any]]:
    """Numbers and constants of the kernels that read x."""
    (B, T, H), N = x.shape[:3], x.shape[2:].numel()
    block = min(_COLUMNS, power_of_2(N))
    constants = {"N": N, "K": N // H, "BN": block, "ROWS": _NUMBERS // block}
    flags = {"STEEP": A_log is not None, "BIAS": bias is not None, "SIGMOID": factor is not None}
    return [B * T, T, 1.0 if factor is None else float(factor)], constants | flags


def _forward(x: torch.Tensor, A_log: Optional, bias: Optional, factor: float | None) -> torch.Tensor:
    y = torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
    if not x.numel():
        return y
    tensors = _given(x, A_log, bias)
    numbers, constants = _cut(x, A_log, bias, factor)
    grid = -(-numbers[0] // constants["ROWS"]), -(-constants["N"] // constants["BN"]), 1
    run(raw_gates_kernel, grid, tensors | {"y": y}, [*tensors["x"].stride()[:2], *numbers], constants)
    return y


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, A_log: Optional, bias: Optional, factor: float | None) -> torch.Tensor:
        keep_for_backward(ctx, x, A_log, bias)
        ctx.factor = factor
        return _forward(x, A_log, bias, factor)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Optional, ...]:
        x, A_log, bias = kept_for_backward(ctx, _NAME, dy)
        found = _backward(dy, x, A_log, bias, ctx.factor)
        return *[d if wanted else None for d, wanted in zip(found, ctx.needs_input_grad, strict=False)], None


def _backward(
    dy: torch.Tensor, x: torch.Tensor, A_log: Optional, bias: Optional, factor: float | None
) -> tuple[Optional, ...]:  # fmt: skip
    given = [x, A_log, bias]
    there = [p for p in given if p is not None]
    if not plain(*there, dy):

        def formula(*there: torch.Tensor) -> list[torch.Tensor]:
            left = iter(there)
            again = [None if p is None else next(left) for p in given]
            assert again[0] is not None
            return [raw_gates_in_pytorch.activated(again[0], again[1], again[2], factor, torch.float32)]

        grads = iter(by_autograd(formula, there, [dy]))
        return tuple([None if p is None else next(grads) for p in given])
    make = torch.empty if x.numel() else torch.zeros
    dx, dA, dbias = (None if p is None else make(p.shape, dtype=p.dtype, device=p.device) for p in given)
    assert dx is not None
    if not x.numel():
        return dx, dA, dbias
    numbers, constants = _cut(x, A_log, bias, factor)
    per = max(_TOKENS, constants["ROWS"])
    parts = -(-numbers[0] // per)
    sums = x.new_empty(2, parts, constants["N"], dtype=torch.float32)
    tensors = _given(x, A_log, bias)
    strides, written = tensors["x"].stride()[:2], {"dy": dy.contiguous(), "dx": dx, "sums": sums}
    grid = parts, -(-constants["N"] // constants["BN"]), 1
    run(raw_gates_grad_kernel, grid, tensors | written, [*strides, *numbers], constants | {"PER": per})
    if len(there) > 1:
        block = power_of_2(constants["K"])
        to = {"sums": sums, "A_log": tensors["A_log"], "dA": sums if dA is None else dA}
        to |= {"dbias": sums if dbias is None else dbias}
        how = {"N": constants["N"], "K": constants["K"], "BK": block, "ROWS": _SUMMED // block}
        how |= {name: constants[name] for name in ("STEEP", "BIAS")}
        run(raw_gates_sums_kernel, (x.shape[2], 1, 1), to, [parts], how, warps=8)
    return dx, dA, dbias


@step
def activated(x: torch.Tensor, A_log: Optional, bias: Optional, factor: float | None) -> torch.Tensor:
    """-e^{A_log} softplus(x + bias), or with a `factor` factor sigmoid(e^{A_log} (x + bias)), in float32.

    Args:
        x: [B, T, H] or [B, T, H, K].
        A_log: a number for each head, of any shape, or None, with a factor.
        bias: a number for each of x's columns, of any shape, or None.
    """
    if torch.is_grad_enabled() and any([p is not None and p.requires_grad for p in (x, A_log, bias)]):
        y: torch.Tensor = _Activated.apply(x, A_log, bias, factor)
        return y
    return _forward(x, A_log, bias, factor)
