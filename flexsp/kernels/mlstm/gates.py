"""Stabilised gates of mLSTM: m_t = max(log f_t + m_{t-1}, i_t) over tokens and documents, found in float64, and what
forgets and writes beside them.

Tokens are pairs (a, c) of max-plus algebra, as in `flexsp.scan.maxima`; where a document begins, a is -inf, and
nothing from before passes, not even what is not finite. Blocks of tokens are put together first, then what is before
each block, then the tokens in it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flexsp.comm.derivatives import keep_for_backward, kept_for_backward
from flexsp.devices import check_heads
from flexsp.kernels.mlstm.in_pytorch import MIN_LOG_FORGET, Gates
from flexsp.kernels.mlstm.rows import exp32
from flexsp.kernels.run import Launch, power_of_2, run_in_order
from flexsp.runtime.launch import begin
from flexsp.runtime.steps import Workspace

__all__ = ["Blocks", "Starts", "blocks", "gates"]

_NAME = "mLSTM's gates"
_LEAST = tl.constexpr(MIN_LOG_FORGET)
_TOKENS = 64  # of a block
_BLOCKS = 256  # that are put together at once
_HEADS = 16  # of a program, at most


class Starts(NamedTuple):
    """Documents of packed tokens: which one they are of [T], whether it begins there [T], and m before each [N, H]."""

    document: torch.Tensor
    first: torch.Tensor
    m: torch.Tensor


Elements = tuple[torch.Tensor, torch.Tensor]
"""Of max-plus algebra: (a, c)."""


class Blocks(NamedTuple):
    """What is before each block of tokens (a, c) [B, blocks, H], and all tokens [B, H], as elements in float64."""

    before: Elements
    all: Elements


@triton.jit
def _exp(x):
    """e^x in float64 of x <= 0, without branches; below -700 as there."""
    x = tl.where(x < -700.0, -700.0, x)
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = (x - n * 0.69314718036912382) - n * 1.9082149292705877e-10
    p = tl.full(x.shape, 1.0, tl.float64)
    for j in tl.static_range(13):
        p = 1.0 + p * (r * (1.0 / (13 - j)))
    return p * ((n.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _log_sigmoid(x):
    """min(x, 0) - log(1 + e^-|x|) in float64: the logarithm in float32, and a step of Newton's."""
    e = _exp(-tl.abs(x))
    y = tl.log(1.0 + e.to(tl.float32)).to(tl.float64)
    y += (1.0 + e) * _exp(-y) - 1.0
    return tl.minimum(x, 0.0) - y


@triton.jit
def _larger(x, y):
    """The maximum; NaN where one is."""
    return tl.where((x > y) | (x != x), x, y)


@triton.jit
def _passing(a, m):
    return tl.where(a == float("-inf"), a, a + m)


@triton.jit
def _then(a, c, later_a, later_c):
    return tl.where(later_a == float("-inf"), later_a, later_a + a), _larger(_passing(later_a, c), later_c)


@triton.jit
def _last_row(x, last):
    """Of x [rows, heads] the row where `last` is, NaN and infinities too."""
    bits = tl.where(last[:, None], x.to(tl.int64, bitcast=True), 0)
    return tl.sum(bits, axis=0).to(tl.float64, bitcast=True)


@triton.jit
def _token(
    f, i, first, document, started, token, head, inside, f_st, f_sh, i_st, i_sh, H, PACKED: tl.constexpr
):  # fmt: skip
    """(log f, a, c, m before the first token of a document or None, where that is) [tokens, heads]."""
    x = tl.load(f + token[:, None] * f_st + head[None, :] * f_sh, mask=inside, other=0.0).to(tl.float64)
    c = tl.load(i + token[:, None] * i_st + head[None, :] * i_sh, mask=inside, other=float("-inf")).to(tl.float64)
    log_f = _log_sigmoid(x)
    log_f = tl.where(inside, tl.where(log_f < _LEAST, _LEAST, log_f), 0.0)
    cut = token[:, None] < 0  # nowhere
    own = tl.zeros_like(log_f)
    a = log_f
    if PACKED:
        here = tl.max(inside.to(tl.int32), axis=1) > 0
        cut = (tl.load(first + token, mask=here, other=0) != 0)[:, None] & inside
        of = tl.load(document + token, mask=here, other=0).to(tl.int64)
        own = tl.load(started + of[:, None] * H + head[None, :], mask=cut, other=0.0)
        c = tl.where(cut, _larger(log_f + own, c), c)
        a = tl.where(cut, float("-inf"), a)
    return log_f, a, c, own, cut


_SIZES = ["T", "H", "n_blocks"]


@triton.jit(do_not_specialize=_SIZES)
def mlstm_blocks_kernel(
    f, i, first, document, started, block_a, block_c, f_sb, f_st, f_sh, i_sb, i_st, i_sh, T, H, n_blocks,
    BT: tl.constexpr, BH: tl.constexpr, PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """block_a, block_c [B, blocks, H] float64: the tokens of each block together."""
    begin(PDL)
    block, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head = (tl.program_id(1) * BH + tl.arange(0, BH)).to(tl.int64)
    row = tl.arange(0, BT)
    token = block.to(tl.int64) * BT + row
    inside = (token < T)[:, None] & (head < H)[None, :]
    _, a, c, _, _ = _token(
        f + b * f_sb, i + b * i_sb, first, document, started, token, head, inside, f_st, f_sh, i_st, i_sh, H, PACKED,
    )  # fmt: skip
    a, c = tl.associative_scan((a, c), 0, _then)
    at = (b * n_blocks + block) * H + head
    tl.store(block_a + at, _last_row(a, row == BT - 1), mask=head < H)
    tl.store(block_c + at, _last_row(c, row == BT - 1), mask=head < H)


@triton.jit(do_not_specialize=_SIZES)
def mlstm_before_kernel(
    block_a, block_c, before_a, before_c, all_a, all_c, T, H, n_blocks, BT: tl.constexpr, BH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """before [B, blocks, H]: all blocks before each one; all [B, H]: all of them."""
    begin(PDL)
    b = tl.program_id(1).to(tl.int64)
    head = (tl.program_id(0) * BH + tl.arange(0, BH)).to(tl.int64)
    row = tl.arange(0, BT)
    so_far_a = tl.zeros([BH], tl.float64)
    so_far_c = tl.full([BH], float("-inf"), tl.float64)
    for start in range(0, n_blocks, BT):
        # A row is the block before its own, so that what is put together ends before it.
        block = start + row - 1
        inside = ((row > 0) & (block < n_blocks))[:, None] & (head < H)[None, :]
        at = (b * n_blocks + block.to(tl.int64))[:, None] * H + head[None, :]
        a = tl.load(block_a + at, mask=inside, other=0.0)
        c = tl.load(block_c + at, mask=inside, other=float("-inf"))
        a, c = tl.associative_scan((a, c), 0, _then)
        a, c = _then(so_far_a[None, :], so_far_c[None, :], a, c)
        here = ((block + 1) < n_blocks)[:, None] & (head < H)[None, :]
        tl.store(before_a + at + H, a, mask=here)
        tl.store(before_c + at + H, c, mask=here)
        last = tl.minimum(start + BT, n_blocks) - 1
        at_last = (b * n_blocks + last.to(tl.int64)) * H + head
        last_a = tl.load(block_a + at_last, mask=head < H, other=0.0)
        last_c = tl.load(block_c + at_last, mask=head < H, other=float("-inf"))
        of = row == last - start
        so_far_a, so_far_c = _then(_last_row(a, of), _last_row(c, of), last_a, last_c)
    tl.store(all_a + b * H + head, so_far_a, mask=head < H)
    tl.store(all_c + b * H + head, so_far_c, mask=head < H)


@triton.jit(do_not_specialize=_SIZES)
def mlstm_gates_kernel(
    f, i, first, document, started, before_a, before_c, entering, log_forget, log_weight, weight, m,
    f_sb, f_st, f_sh, i_sb, i_st, i_sh, T, H, n_blocks,
    BT: tl.constexpr, BH: tl.constexpr, PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """m [B, T, H] float64 and, in float32, log_forget = log f_t + m_{t-1} - m_t, log_weight = i_t - m_t and its
    exponential, weight; entering [B, H]: the maximum before all tokens."""
    begin(PDL)
    block, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head = (tl.program_id(1) * BH + tl.arange(0, BH)).to(tl.int64)
    row = tl.arange(0, BT)
    token = block.to(tl.int64) * BT + row
    inside = (token < T)[:, None] & (head < H)[None, :]
    f += b * f_sb
    i += b * i_sb
    log_f, a, c, own, cut = _token(
        f, i, first, document, started, token, head, inside, f_st, f_sh, i_st, i_sh, H, PACKED
    )  # fmt: skip
    earlier = inside & (row > 0)[:, None]
    _, a_before, c_before, _, _ = _token(
        f, i, first, document, started, token - 1, head, earlier, f_st, f_sh, i_st, i_sh, H, PACKED
    )  # fmt: skip
    a_before, c_before = tl.associative_scan((a_before, c_before), 0, _then)
    at = (b * n_blocks + block) * H + head
    block_a = tl.load(before_a + at, mask=head < H, other=0.0)
    block_c = tl.load(before_c + at, mask=head < H, other=float("-inf"))
    entered = _larger(_passing(block_a, tl.load(entering + b * H + head, mask=head < H, other=0.0)), block_c)
    before = _larger(_passing(a_before, entered[None, :]), c_before)
    now = _larger(_passing(a, before), c)
    before = tl.where(cut, own, before)
    to = (b * T + token)[:, None] * H + head[None, :]
    tl.store(m + to, now, mask=inside)
    tl.store(log_forget + to, (log_f + (before - now)).to(tl.float32), mask=inside)
    writes = tl.load(i + token[:, None] * i_st + head[None, :] * i_sh, mask=inside, other=0.0) - now
    tl.store(log_weight + to, writes.to(tl.float32), mask=inside)
    tl.store(weight + to, exp32(writes), mask=inside)


_EACH, _BEFORE, _ALL = ("block_a", "block_c"), ("before_a", "before_c"), ("all_a", "all_c")


def _run(which: slice, f: torch.Tensor, i: torch.Tensor, starts: Starts | None, **others: torch.Tensor) -> None:
    """Those of the three launches: blocks of tokens, what is before each block, gates. What is not among the tensors,
    and is read and written by them alone, is set aside here."""
    tensors = {"f": f, "i": i, "first": f, "document": f, "started": f} | others
    if starts is not None:
        tensors |= {"first": starts.first.view(torch.uint8), "document": starts.document, "started": starts.m}
    (B, T, H), packed = f.shape, starts is not None

    def made() -> tuple[list[Launch], Workspace]:
        n, BH = -(-T // _TOKENS), min(_HEADS, power_of_2(H))
        heads, scratch = -(-H // BH), Workspace()
        reads, numbers = ("f", "i", "first", "document", "started"), [*f.stride(), *i.stride(), T, H, n]
        constants = {"BT": _TOKENS, "BH": BH, "PACKED": packed}
        for name in (*_EACH, *_BEFORE, *_ALL):
            if name not in tensors:
                scratch.add(name, torch.float64, B, 1 if name in _ALL else n, H)
        every = [
            Launch(mlstm_blocks_kernel, (n, heads, B), [*reads, *_EACH], numbers, constants),
            Launch(mlstm_before_kernel, (heads, B, 1), [*_EACH, *_BEFORE, *_ALL], [T, H, n],
                   {"BT": _BLOCKS, "BH": BH}, 16),
            Launch(mlstm_gates_kernel, (n, heads, B), [*reads, *_BEFORE, "entering", *Gates._fields], numbers,
                   constants),
        ]  # fmt: skip
        return [x for x in every[which] if math.prod(x.grid)], scratch

    key = (mlstm_gates_kernel, which.start, which.stop, B, T, H, f.stride(), i.stride(), packed)
    run_in_order(key, tensors, made)


def blocks(f: torch.Tensor, i: torch.Tensor, starts: Starts | None) -> Blocks:
    """Of gates [B, T, H], any strides."""
    B, T, H = f.shape
    check_heads("q", B, H)
    before_a, before_c = torch.empty(2, B, -(-T // _TOKENS), H, dtype=torch.float64, device=f.device).unbind(0)
    all_a, all_c = torch.empty(2, B, H, dtype=torch.float64, device=f.device).unbind(0)
    _run(slice(0, 2), f, i, starts, before_a=before_a, before_c=before_c, all_a=all_a, all_c=all_c)
    return Blocks((before_a, before_c), (all_a, all_c))


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, f: torch.Tensor, i: torch.Tensor, starts: Starts | None, before: Elements | None,
        entering: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        found = _forward(f, i, starts, before, entering)
        keep_for_backward(ctx, f, found.weight)
        ctx.mark_non_differentiable(found.m)
        ctx.set_materialize_grads(False)
        ctx.dtype = i.dtype
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        f, weight = kept_for_backward(ctx, _NAME, *grads)
        of_forget, of_log, of_weight, _ = grads
        df, di = None, of_log
        if of_forget is not None and ctx.needs_input_grad[0]:
            x = f.float()
            df = x.neg().sigmoid_().mul_(of_forget).masked_fill_(x < MIN_LOG_FORGET, 0.0).to(f.dtype)
        if of_weight is not None and ctx.needs_input_grad[1]:
            di = of_weight * weight if of_log is None else torch.addcmul(of_log, of_weight, weight)
        return df, None if di is None else di.to(ctx.dtype), None, None, None


def _forward(
    f: torch.Tensor, i: torch.Tensor, starts: Starts | None, before: Elements | None, entering: torch.Tensor
) -> Gates:  # fmt: skip
    forget = torch.empty(f.shape, dtype=torch.float32, device=f.device)
    log_weight, weight, m = (torch.empty_like(forget, dtype=x) for x in (None, None, torch.float64))
    found = Gates(forget, log_weight, weight, m)
    if before is not None:
        _run(slice(2, 3), f, i, starts, before_a=before[0], before_c=before[1], entering=entering, **found._asdict())
    else:
        _run(slice(0, 3), f, i, starts, entering=entering, **found._asdict())
    return found


def gates(
    f: torch.Tensor, i: torch.Tensor, starts: Starts | None, before: Elements | None, entering: torch.Tensor
) -> Gates:  # fmt: skip
    """What `in_pytorch.gates` gives, with gradients for f and i.

    Args:
        starts: of packed documents, or None.
        before: `blocks` of the same gates; None where they need not be known before ``entering`` is.
        entering: [B, H] in float64, the maximum before all tokens.
    """
    check_heads("q", f.shape[0], f.shape[2])
    entering = entering.contiguous()
    if torch.is_grad_enabled() and (f.requires_grad or i.requires_grad):
        return Gates(*_Gates.apply(f, i, starts, before, entering))
    return _forward(f, i, starts, before, entering)
