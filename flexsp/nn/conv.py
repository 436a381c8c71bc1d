"""Short causal depthwise convolution whose window reaches across ranks and stops at documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsp.comm.derivatives import share_backward, transformed
from flexsp.comm.group import SequenceParallel, resolve_sp
from flexsp.exceptions import check_flag, check_integer, check_number, fail
from flexsp.nn.norm import FLOATS, accumulation_dtype, check_input
from flexsp.ops._validate import check_cu_seqlens, check_tensor
from flexsp.scan.by_segments import by_segments
from flexsp.scan.in_order import Segment
from flexsp.scan.tokens import tokens_before


def tokens_since_start(
    length: int, cu_seqlens: Tensor | None, sp: SequenceParallel | None, device: torch.device
) -> Tensor | None:
    """int64 [T]: each local token's place in its document, counted from 0; -1 behind the last document. None without
    documents.

    Under `sp` this is collective unless `sp.set_lengths` was called, so every rank must call it. It does not
    synchronise the device.
    """
    if cu_seqlens is None:
        return None
    start = sp.shard_range(length)[0] if sp is not None else 0
    position = torch.arange(length, device=device) + start
    boundaries = cu_seqlens.to(device=device, dtype=torch.int64)
    document = torch.searchsorted(boundaries, position, right=True) - 1
    return torch.where(position < boundaries[-1], position - boundaries[document], -1)


class _CausalTapsFunction(torch.autograd.Function):
    """y_t = sum_j weight[:, W-1-j] x_{t-j}, with 0 for an x_{t-j} of another document."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, weight: Tensor, since: Tensor | None) -> Tensor:
        ctx.save_for_backward(padded, weight, since)
        return _weighted_sum(padded, weight, since)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        padded, weight, since = ctx.saved_tensors
        width = weight.shape[1]
        length = padded.shape[1] - (width - 1)
        taps = weight.to(accumulation_dtype(padded.dtype, weight.dtype))
        grad = grad_out.to(taps.dtype)
        grad_padded = torch.zeros(padded.shape, dtype=taps.dtype, device=padded.device)
        grad_taps = []
        for at in range(width):
            reaching = _own_document(grad, since, width - 1 - at)
            grad_padded[:, at : at + length] += reaching * taps[:, at]
            # The masked inputs may be NaN, and 0 * NaN is NaN: so the value is masked as well as its gradient.
            read = _own_document(padded[:, at : at + length], since, width - 1 - at)
            grad_taps.append((reaching * read).sum((0, 1)))
        return grad_padded.to(padded.dtype), torch.stack(grad_taps, dim=1).to(weight.dtype), None


def _weighted_sum(padded: Tensor, weight: Tensor, since: Tensor | None) -> Tensor:
    width = weight.shape[1]
    length = padded.shape[1] - (width - 1)
    taps = weight.to(accumulation_dtype(padded.dtype, weight.dtype))
    out = padded[:, width - 1 :] * taps[:, width - 1]
    for back in range(1, width):
        at = width - 1 - back
        out = out + _own_document(padded[:, at : at + length], since, back) * taps[:, at]
    # `to` returns the same tensor if the dtype does not change. An output that is also an intermediate value then loses
    # its gradient under torch.compile of torch 2.11.
    return out if out.dtype == padded.dtype else out.to(padded.dtype)


def _taps(padded: Tensor, weight: Tensor, since: Tensor | None) -> Tensor:
    if not torch.compiler.is_compiling() and transformed():  # which autograd.Function does not take part in
        return _weighted_sum(padded, weight, since)
    return _CausalTapsFunction.apply(padded, weight, since)


def _own_document(x: Tensor, since: Tensor | None, back: int) -> Tensor:
    if since is None or back == 0:
        return x
    return x.masked_fill((since < back)[None, :, None], 0.0)


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None = None, since: Tensor | None = None
) -> Tensor:
    """`ShortConvolution.forward` with this weight [D, W] and bias [D], without the activation.

    Behind the last document outputs and gradients are 0. Channels are independent, so several convolutions are one
    with their weights concatenated, and ranks exchange one halo.
    """
    sp = resolve_sp(None, keeps_bits=True)
    if since is None:
        check_cu_seqlens(cu_seqlens, None, x, "x", sp)
        since = tokens_since_start(x.shape[1], cu_seqlens, sp, x.device)
    else:
        check_tensor("since", since, (x.shape[1],), "[T]", dtypes=(torch.int64,), device=x.device)
    reach = weight.shape[1] - 1
    if sp is not None and reach > sp.segment > 0:
        fail("bitwise", f"segments of at least the {reach} tokens before that a convolution reads", sp.segment)
    if sp is not None and reach:
        _, x, weight, bias = share_backward(sp, x, weight, bias)
        x = torch.cat([tokens_before(x, reach, sp), x], dim=1)
    elif reach:
        x = torch.cat([x.new_zeros(x.shape[0], reach, x.shape[2]), x], dim=1)

    if sp is None or not sp.segment:
        return _convolved(x, weight, bias, since)

    def of_segment(segment: Segment) -> tuple[Tensor | None]:
        at = slice(segment.start - segment.begin, segment.stop - segment.begin)
        return (None if since is None else since[at],)

    return by_segments(None, "convolution", _convolved, x, shared=(weight, bias), reach=reach, of_segments=of_segment)  # type: ignore[no-any-return]


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, since: Tensor | None) -> Tensor:
    """`convolve` of x with the tokens before that the first ones read."""
    y = _biased(_taps(x, weight, since), bias)
    return y if since is None else y.masked_fill((since < 0)[None, :, None], 0.0)


def convolve_prompt(x: Tensor, cache: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """`ShortConvolution.prefill` with this weight [D, W] and bias [D], without the activation."""
    seen = torch.cat([cache.transpose(1, 2).to(x.dtype), x], dim=1)
    y = _biased(_taps(seen[:, 1:], weight, None), bias)
    return y, seen[:, -weight.shape[1] :].transpose(1, 2).to(cache.dtype)


def convolve_token(x: Tensor, cache: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """`ShortConvolution.step` with this weight [D, W] and bias [D], without the activation."""
    cache = torch.cat([cache[:, :, 1:], x.unsqueeze(-1).to(cache.dtype)], dim=-1)
    wide = accumulation_dtype(x.dtype, weight.dtype)
    return _biased((cache.to(wide) * weight.to(wide)).sum(-1).to(x.dtype), bias), cache


def _biased(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.to(y.dtype)


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over a few tokens, exact over ranks and packed documents.

    ``y_t = activation(bias + sum_j weight[:, 0, W-1-j] * x_{t-j})``, with zeros before the sequence and before each
    document, and with y = 0 behind the last document. Under sequence parallelism the W-1 tokens before the shard come
    from the ranks that hold them (several, where shards are short or empty), and their gradients go back there.

    Args:
        dim: channels D.
        width: taps W, at least 1.
        bias: add a bias [D].
        activation: ``"silu"`` or None.
        init: the weight is initialised uniformly in +- this number above 0; None: 1/sqrt(W).

    The weight is [D, 1, W], as that of ``nn.Conv1d``; [D, W] loads too. Sums are float32 (float64 stays).
    """

    def __init__(
        self, dim: int, width: int = 4, bias: bool = False, activation: str | None = "silu", init: float | None = None
    ) -> None:  # fmt: skip
        super().__init__()
        dim, width = check_integer("dim", dim, least=1), check_integer("width", width, least=1)
        check_flag("bias", bias)
        if activation is not None and not (isinstance(activation, str) and activation == "silu"):
            raise ValueError(f'activation: expected "silu" or None, got {activation!r}')
        self.dim, self.width, self.activation = dim, width, activation
        self._init = None if init is None else check_number("init", init, above=0)
        self.weight = nn.Parameter(torch.empty(dim, 1, width))
        self.bias = nn.Parameter(torch.empty(dim)) if bias else None
        self.reset_parameters()

    @property
    def taps(self) -> Tensor:
        """The weight as [D, W]."""
        return self.weight.squeeze(1)

    def reset_parameters(self) -> None:
        """The weight is uniform in +- ``init``, the bias in +- 1/sqrt(W) as in `nn.Conv1d`."""
        bound = 1 / math.sqrt(self.width)
        reach = bound if self._init is None else self._init
        nn.init.uniform_(self.weight, -reach, reach)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, since: Tensor | None = None) -> Tensor:
        """x [B, T, D] -> y [B, T, D].

        Args:
            cu_seqlens: int32/int64 [N+1], global document boundaries (B = 1); under sp over all ranks' tokens.
            since: `tokens_since_start`, for callers that already have it (then `cu_seqlens` is not read).

        Raises:
            ValueError: wrong shapes, or documents with B > 1.
        """
        check_input("x", x, (None, None, self.dim))
        return self._activate(convolve(x, self.taps, self.bias, cu_seqlens, since))

    def prefill(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Continue from a cache on this rank alone: x [B, T, D], cache [B, D, W] (the last W inputs, oldest first)
        -> (y [B, T, D], new cache)."""
        check_input("x", x, (None, None, self.dim))
        check_input("cache", cache, (x.shape[0], self.dim, self.width))
        y, cache = convolve_prompt(x, cache, self.taps, self.bias)
        return self._activate(y), cache

    def step(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        """One token on this rank alone: x [B, D], cache [B, D, W] -> (y [B, D], new cache)."""
        check_input("x", x, (None, self.dim))
        check_input("cache", cache, (x.shape[0], self.dim, self.width))
        y, cache = convolve_token(x, cache, self.taps, self.bias)
        return F.silu(y) if self.activation == "silu" else y, cache  # not by segments: there are channels along axis 1

    def init_cache(self, batch: int, dtype: torch.dtype | None = None) -> Tensor:
        """The cache before the first token: zeros [B, D, W]."""
        batch = check_integer("batch", batch, least=1)
        if dtype is None:
            dtype = self.weight.dtype
        elif dtype not in FLOATS:
            fail("dtype", "a floating dtype", repr(dtype))
        return torch.zeros(batch, self.dim, self.width, dtype=dtype, device=self.weight.device)

    def _activate(self, y: Tensor) -> Tensor:
        return by_segments(None, "activation", F.silu, y) if self.activation == "silu" else y

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        weight = state_dict.get(prefix + "weight")
        if weight is not None and weight.dim() == 2:
            state_dict[prefix + "weight"] = weight.unsqueeze(1)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"{self.dim}, width={self.width}, bias={self.bias is not None}, activation={self.activation!r}"


class SideBySide:
    """Several convolutions as one over their concatenated channels, so that ranks exchange one halo. Its methods are
    those of `ShortConvolution`, without activations."""

    def __init__(self, parts: Sequence[ShortConvolution]) -> None:
        self.weight = torch.cat([part.taps for part in parts])
        biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
        self.bias = torch.cat(biases) if biases else None

    def __call__(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        return convolve(x, self.weight, self.bias, cu_seqlens)

    def prefill(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return convolve_prompt(x, cache, self.weight, self.bias)

    def step(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return convolve_token(x, cache, self.weight, self.bias)
