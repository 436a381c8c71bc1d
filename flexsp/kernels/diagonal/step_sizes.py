"""Kernels of the state-space dual around the walks: gates from step sizes, and gradients of these and of parameters."""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.primitives import GATE_MIN, LOG2E, chunk_info, step_of
from flexsp.runtime.launch import begin

_LEAST = tl.constexpr(2.0**-100)


@triton.jit
def _step(
    dt, bias, h, i, length, dt_st, least, most, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, LIMITED: tl.constexpr
):  # fmt: skip
    """Step sizes of a chunk's tokens i, from `least` to `most` (LIMITED), and their derivatives after dt."""
    x = tl.load(dt + i * dt_st, mask=i < length, other=0.0)
    shift = 0.0
    if BIAS:
        shift = tl.load(bias + h).to(tl.float32)
    step, slope = step_of(x, shift, i < length, SOFTPLUS)
    if LIMITED:
        slope = tl.where((step < least) | (step > most), 0.0, slope)
        step = tl.clamp(step, least, most, propagate_nan=tl.PropagateNan.ALL)
        step = tl.where(i < length, step, 0.0)
    return step, slope


@triton.jit
def _positive(step):
    return tl.where((step >= 0.0) & (step < _LEAST), _LEAST, step)


@triton.jit
def step_kernel(
    dt, A, bias, gate, writing, table, dt_sb, dt_st, dt_sh, T, H, least, most,
    C: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, LIMITED: tl.constexpr, PACKED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """gate [B, H, chunks * C]: what `gate_kernel` makes of log gates step * A, of step sizes dt [B, T, H]. writing:
    the same less log2 of the step.

    With the gates `writing` a key counts as if it were multiplied by its step, and no walk has to do it. A step below
    _LEAST counts as that, which is as good as 0: so a step of 0 has a gradient, too. A negative one gives NaN.
    """
    begin(PDL)
    row = tl.program_id(1)
    chunk = tl.program_id(0)
    h = row % H
    start, length, doc, first, last = chunk_info(table, chunk, T, C, PACKED)
    i = tl.arange(0, C)
    from_dt = dt + (row // H).to(tl.int64) * dt_sb + h.to(tl.int64) * dt_sh + start * dt_st
    step, slope = _step(from_dt, bias, h, i, length, dt_st, least, most, BIAS, SOFTPLUS, LIMITED)
    at = (row.to(tl.int64) * tl.num_programs(0) + chunk) * C + i
    log = step.to(gate.dtype.element_ty) * tl.load(A + h).to(gate.dtype.element_ty)
    log = tl.maximum(log, GATE_MIN, propagate_nan=tl.PropagateNan.ALL)
    b = tl.cumsum(log * LOG2E, axis=0)
    tl.store(gate + at, b)
    tl.store(writing + at, b - tl.log2(_positive(step).to(gate.dtype.element_ty)))


@triton.jit
def step_grads_kernel(
    dg, of_keys, of_skip, dt, A, bias, ddt, dA, dbias, dskip, table, dt_sb, dt_st, dt_sh, T, H, least, most, n_chunks,
    C: tl.constexpr, PARTS: tl.constexpr, SKIP_PARTS: tl.constexpr, PER: tl.constexpr, BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr, LIMITED: tl.constexpr, STEPS: tl.constexpr, SKIP: tl.constexpr, PACKED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Gradients of PER chunks of a head: ddt [B, H, T] (STEPS), and sums of theirs, dA, dbias and dskip (SKIP) [B, H,
    programs].

    dg [B, H, T]: of the gates. of_keys [B, H, chunks, PARTS, C], what tokens wrote for all that read it, and of_skip
    [B, H, chunks, SKIP_PARTS, C]: as `dkv_kernel` leaves them.
    """
    begin(PDL)
    row = tl.program_id(1)
    part = tl.program_id(0)
    h = row % H
    i = tl.arange(0, C)
    dt += (row // H).to(tl.int64) * dt_sb + h.to(tl.int64) * dt_sh
    slow = tl.load(A + h).to(tl.float32)
    to_A = tl.zeros([C], tl.float32)
    to_bias = tl.zeros([C], tl.float32)
    to_skip = tl.zeros([C], tl.float32)
    for c in range(part * PER, tl.minimum(part * PER + PER, n_chunks)):
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        valid = i < length
        chunk = row.to(tl.int64) * n_chunks + c
        if STEPS:
            at = dt + start * dt_st
            step, slope = _step(at, bias, h, i, length, dt_st, least, most, BIAS, SOFTPLUS, LIMITED)
            open_ = valid & ~(step * slow <= GATE_MIN)  # a gate that is clamped has no gradient
            of_gate = tl.load(dg + row.to(tl.int64) * T + start + i, mask=open_, other=0.0)
            written = tl.zeros([C], tl.float32)
            for n in tl.static_range(PARTS):
                written += tl.load(of_keys + (chunk * PARTS + n) * C + i, mask=valid, other=0.0)
            found = tl.where(valid, (of_gate * slow + written / _positive(step)) * slope, 0.0)
            tl.store(ddt + row.to(tl.int64) * T + start + i, found, mask=valid)
            to_A += of_gate * step
            to_bias += found
        if SKIP:
            for n in tl.static_range(SKIP_PARTS):
                to_skip += tl.load(of_skip + (chunk * SKIP_PARTS + n) * C + i, mask=valid, other=0.0)
    at = row * tl.num_programs(0) + part
    if STEPS:
        tl.store(dA + at, tl.sum(to_A, axis=0))
        if BIAS:
            tl.store(dbias + at, tl.sum(to_bias, axis=0))
    if SKIP:
        tl.store(dskip + at, tl.sum(to_skip, axis=0))


@triton.jit
def sum_heads_kernel(
    x, to, table, rows, H, N: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """to [rows, H / GROUP, N] = x [rows, H, N] summed over the GROUP heads of a group, in fp32."""
    begin(PDL)
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    n = tl.arange(0, BN)
    mask = (i[:, None] < rows) & (n[None, :] < N)
    at = x + (i[:, None] * H + group * GROUP) * N + n[None, :]
    found = tl.zeros([ROWS, BN], tl.float32)
    for h in range(GROUP):
        found += tl.load(at + h * N, mask=mask, other=0.0).to(tl.float32)
    place = (i[:, None] * (H // GROUP) + group) * N + n[None, :]
    tl.store(to + place, found.to(to.dtype.element_ty), mask=mask)
