"""Tile helpers shared by the Triton engines.

Log decays inside the kernels are in base 2 (natural gates times log2 e), so that one `exp2` applies them. Rows of a
chunk past its length are zero in every tensor. Gates are
clamped at -104 (natural) before the cumulative sum: e^-104 underflows in fp32, and larger magnitudes would only cost
the sum its precision (docs/math.md, section 15).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from flexsp.runtime.launch import begin

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
GATE_MIN = tl.constexpr(-104.0)


def dots(dtype: torch.dtype) -> dict[str, Any]:
    """Operand type and precision of the kernels' matrix products, for inputs of `dtype`.

    fp16 goes the way of fp32, three tf32 products for one: its own range would overflow in states and scores.
    """
    return {"DOT": tl.bfloat16 if dtype == torch.bfloat16 else tl.float32, "PREC": "tf32x3"}


@triton.jit
def gate_kernel(
    g, write, b, writing, table, g_sb, g_st, g_sh, w_sb, w_st, w_sh, T, H, C: tl.constexpr, WRITES: tl.constexpr,
    PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """b [B, H, chunks * C], fp32 or fp64: inclusive cumulative log2 decay of g [B, T, H], restarted in every chunk.

    Rows past a chunk's length repeat its last value, so that the walks read b without a mask. WRITES: writing, the same
    less log2 of the weight of the token's key, of natural logarithms of weights `write` [B, T, H]: with the gates
    `writing` a key counts as if it were multiplied by its weight. A weight of 0 makes inf, and a difference to that has
    the power 0.
    """
    begin(PDL)
    row = tl.program_id(1)
    chunk = tl.program_id(0)
    start, length, doc, first, last = chunk_info(table, chunk, T, C, PACKED)
    i = tl.arange(0, C)
    at = g + (row // H).to(tl.int64) * g_sb + (row % H).to(tl.int64) * g_sh + (start + i) * g_st
    gate = tl.load(at, mask=i < length, other=0.0).to(b.dtype.element_ty)
    gate = tl.maximum(gate, GATE_MIN, propagate_nan=tl.PropagateNan.ALL)
    to = (row.to(tl.int64) * tl.num_programs(0) + chunk) * C + i
    decay = tl.cumsum(gate * LOG2E, axis=0)
    tl.store(b + to, decay)
    if WRITES:
        at = write + (row // H).to(tl.int64) * w_sb + (row % H).to(tl.int64) * w_sh + (start + i) * w_st
        log = tl.load(at, mask=i < length, other=0.0).to(b.dtype.element_ty)
        tl.store(writing + to, decay - log * LOG2E)


@triton.jit
def decay_none(gate, chunk, C: tl.constexpr):
    """No decay: b = 0."""
    return tl.zeros([C], tl.float32), 0.0


@triton.jit
def decay_scalar(gate, chunk, C: tl.constexpr):
    """Cumulative log2 decay b [C] of one chunk, as `gate_kernel` left it, and its last value."""
    at = gate + chunk * C
    return tl.load(at + tl.arange(0, C)), tl.load(at + C - 1)


@triton.jit
def group_of(h, GROUP: tl.constexpr):
    """The row of head h in a tensor that GROUP heads share a row of."""
    return h if GROUP == 1 else h // GROUP


@triton.jit
def rows_of(x, chunk, C: tl.constexpr):
    """Numbers [C] of one chunk, a number a token."""
    return tl.load(x + chunk * C + tl.arange(0, C))


@triton.jit
def token_weights(x, stride_t, length, C: tl.constexpr):
    """Numbers [C] of one chunk's tokens in fp32, zero past its length."""
    rows = tl.arange(0, C)
    return tl.load(x + rows * stride_t, mask=rows < length, other=0.0).to(tl.float32)


@triton.jit
def sees(i, j, STRICT: tl.constexpr):
    """Whether token i of a chunk reads what token j writes: if j is no later than i, or with STRICT earlier."""
    if STRICT:
        found = i > j
    else:
        found = i >= j
    return found


@triton.jit
def power(x):
    """2^x in fp32, of a difference of cumulative gates. Digits that x in fp64 loses in fp32 would be lost of the
    result: so its whole and its other part are taken apart."""
    if x.dtype == tl.float64:
        whole = tl.floor(tl.where(x < -200.0, -200.0, x))
        found = tl.where(x < -200.0, 0.0, tl.exp2((x - whole).to(tl.float32)) * tl.exp2(whole.to(tl.float32)))
    else:
        found = tl.exp2(x)
    return found


@triton.jit
def load_rows(base, stride_t, length, col0, C: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Tile [C, BLOCK] of rows 0..length-1 and columns col0.., zero outside."""
    rows = tl.arange(0, C)
    cols = col0 + tl.arange(0, BLOCK)
    at = base + rows[:, None] * stride_t + cols[None, :]
    mask = rows[:, None] < length
    if DIM % BLOCK != 0:
        mask = mask & (cols[None, :] < DIM)
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def store_rows(base, x, stride_t, length, col0, C: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Stores the tile that `load_rows` would read."""
    rows = tl.arange(0, C)
    cols = col0 + tl.arange(0, BLOCK)
    mask = rows[:, None] < length
    if DIM % BLOCK != 0:
        mask = mask & (cols[None, :] < DIM)
    tl.store(base + rows[:, None] * stride_t + cols[None, :], x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def store_columns(base, x, stride_t, length, col0, C: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Stores x [BLOCK, C], the transposed tile.

    Written as [C, BLOCK / 32, 32]: the shape makes Triton turn the tile in one exchange through shared memory where
    [C, BLOCK] takes four.
    """
    WIDTH: tl.constexpr = 32 if BLOCK >= 32 else BLOCK
    rows = tl.arange(0, C)[:, None, None]
    cols = col0 + tl.arange(0, BLOCK // WIDTH)[None, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    mask = rows < length
    if DIM % BLOCK != 0:
        mask = mask & (cols < DIM)
    x = tl.reshape(tl.trans(x.to(base.dtype.element_ty)), [C, BLOCK // WIDTH, WIDTH])
    tl.store(base + rows * stride_t + cols, x, mask=mask)


@triton.jit
def _state_tile(
    k0, v0, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FLIP: tl.constexpr,
    STRIDE: tl.constexpr,
):
    if BK is None:
        cols = v0 + tl.arange(0, BV)
        at = cols if STRIDE is None else cols * STRIDE
        mask = cols < V
    else:
        if FLIP:
            rows = k0 + tl.arange(0, BK)[None, :]
            cols = v0 + tl.arange(0, BV)[:, None]
        else:
            rows = k0 + tl.arange(0, BK)[:, None]
            cols = v0 + tl.arange(0, BV)[None, :]
        at = rows * (V if STRIDE is None else STRIDE) + cols
        mask = (rows < K) & (cols < V)
    return at, mask


@triton.jit
def load_state(
    base, k0, v0, when, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLIP: tl.constexpr = False, STRIDE: tl.constexpr = None,
):
    """fp32 tile [BK, BV] ([BV, BK] if FLIP) of one K x V state; zero outside, and everywhere unless `when`.

    Where BK is None [BV] of a vector of V numbers. STRIDE: from row to row (from number to number of a vector), where
    they are not next to each other.
    """
    at, mask = _state_tile(k0, v0, K, V, BK, BV, FLIP, STRIDE)
    return tl.load(base + at, mask=mask & when, other=0.0).to(tl.float32)


@triton.jit
def store_state(
    base, x, k0, v0, when, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLIP: tl.constexpr = False, STRIDE: tl.constexpr = None,
):
    """Stores the tile that `load_state` would read, if `when`."""
    at, mask = _state_tile(k0, v0, K, V, BK, BV, FLIP, STRIDE)
    tl.store(base + at, x, mask=mask & when)


@triton.jit
def chunk_info(table, c, T, C: tl.constexpr, PACKED: tl.constexpr):
    """(first token, length, document, starts here, ends here) of chunk c, from the chunk table when packed."""
    if PACKED:
        row = table + c * 5
        start = tl.load(row)
        length = tl.load(row + 1)
        document = tl.load(row + 2)
        first = tl.load(row + 3) != 0
        last = tl.load(row + 4) != 0
    else:
        start = c * C
        length = tl.minimum(T - start, C)
        document = 0
        first = False
        last = False
    return start.to(tl.int64), length, document, first, last


@triton.jit
def mm(a, b, DOT: tl.constexpr, PREC: tl.constexpr):
    """Matrix product with operands in DOT (bf16, or fp32 at precision PREC) and fp32 accumulation."""
    return tl.dot(a.to(DOT), b.to(DOT), input_precision=PREC)


@triton.jit
def written(x, w, y, V: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr):
    """What a chunk adds to a state: sum_j w_j x_j^T y_j [BK, BV] of rows x [C, BK] and y [C, BV]; w [C] None means 1.

    All kernels add this very sum, rounded alike: the gate gradient counts on it (`flexsp/kernels/diagonal/grads.py`).
    Of one column, V = 1, it is in fp32 throughout: what divides others must not be off by roundings of theirs
    (docs/math.md, section 10).
    """
    if V == 1:
        # + 0.0, so that all lanes round alike (`flexsp.compiler.backend.tile_ops.sum_over`).
        value = tl.sum(y.to(tl.float32) + 0.0, axis=1)
        if w is not None:
            value = value * w
        column = tl.sum(x.to(tl.float32) * value[:, None] + 0.0, axis=0)
        found = tl.where(tl.arange(0, y.shape[1])[None, :] == 0, column[:, None], 0.0)
    elif w is None:
        found = mm(tl.trans(x), y, DOT, PREC)
    else:
        found = mm(tl.trans(x) * w[None, :], y, DOT, PREC)
    return found


@triton.jit
def weighted(y, w, V: tl.constexpr, DOT: tl.constexpr):
    """Rows y [C, BV] times w [C], as `written` takes them up."""
    found = y.to(tl.float32) * w[:, None]
    if V > 1:
        found = found.to(DOT)
    return found


@triton.jit
def log1p_of(e):
    """log(1 + e) of e in 0..1, to 1.6e-7 of it: e times a polynomial of degree 9, interpolated in Chebyshev's points.

    Without a logarithm, since the special function units are busy with exponentials.
    """
    p = e * -0.0031760570127516985 + 0.019542526453733444
    p = p * e - 0.056373611092567444
    p = p * e + 0.10543623566627502
    p = p * e - 0.1526966691017151
    p = p * e + 0.1966327428817749
    p = p * e - 0.24951615929603577
    p = p * e + 0.33329710364341736
    p = p * e - 0.49999892711639404
    return p * e * e + e


@triton.jit
def step_of(x, shift, there, SOFTPLUS: tl.constexpr):
    """Step sizes, of x and what is added to it, and their derivatives after x; 0 unless `there`."""
    x = x.to(tl.float32) + shift
    slope = tl.full(x.shape, 1.0, tl.float32)
    if SOFTPLUS:
        e = tl.exp(-tl.abs(x))
        slope = tl.where(x < 0.0, e, 1.0) / (1.0 + e)
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + log1p_of(e)
    return tl.where(there, x, 0.0), tl.where(there, slope, 0.0)
