"""Replacements for the functions and modules that mixers of flash-linear-attention call.

A mixer's forward enters `on_ranks`, where they find the ranks and the documents. So they take no arguments for these.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexsp.comm.group import SequenceParallel, sequence_parallel
from flexsp.exceptions import FlexspError, fail
from flexsp.integrations.transformers.functions import without_states
from flexsp.nn.attention import scaled_dot_product_attention
from flexsp.nn.attention.layer import rotate_first
from flexsp.nn.conv import convolve
from flexsp.ops import chunk_gated_delta_product, chunk_gla, mamba2_ssd
from flexsp.scan.tokens import positions

__all__ = [
    "causal_conv1d", "convolution_forward", "flash_attention", "gated_by_channel", "mamba2_forward", "on_ranks",
    "over_ranks", "recurrent_product", "rotary_forward",
]  # fmt: skip


@dataclass(frozen=True)
class _Sequence:
    sp: SequenceParallel
    cu_seqlens: Tensor | None
    cu_seqlens_cpu: Tensor | None

    @property
    def call(self) -> dict[str, Any]:
        """Arguments of flexsp's functions."""
        return {"sp": self.sp, "cu_seqlens": self.cu_seqlens, "cu_seqlens_cpu": self.cu_seqlens_cpu}


class _Running(threading.local):
    def __init__(self) -> None:  # not on the class: torch.compile's guards look here, on every thread
        self.sequence: _Sequence | None = None


_running = _Running()


@contextlib.contextmanager
def on_ranks(sp: SequenceParallel, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None = None) -> Iterator[None]:
    """Inside, on this thread, the functions of this module run over ``sp``. The boundaries [N + 1] of documents count
    tokens of the whole sequence."""
    before, _running.sequence = _running.sequence, _Sequence(sp, cu_seqlens, cu_seqlens_cpu)
    try:
        yield
    finally:
        _running.sequence = before


def _sequence() -> _Sequence:
    if _running.sequence is None:
        raise FlexspError("a mixer's function was called outside of its forward")
    return _running.sequence


def over_ranks(op: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, None]]:
    """An operator of flash-linear-attention, as its layers call it, by flexsp's operator of the same arguments."""

    def run(
        *, initial_state: Tensor | None = None, output_final_state: bool | None = False, state_v_first: bool = False,
        cu_seqlens: None = None, **given: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        without_states(initial_state, bool(output_final_state))
        return op(**given, **_sequence().call)[0], None

    return run


def gated_by_channel(*, g: Tensor | None = None, gk: Tensor | None = None, **given: Any) -> tuple[Tensor, None]:
    """`chunk_gla` over ranks. The recurrent operator calls the gates gk."""
    return over_ranks(chunk_gla)(g=gk if g is None else g, **given)


def recurrent_product(steps: int) -> Callable[..., tuple[Tensor, None]]:
    """`GatedDeltaProduct` runs short sequences without gradients by a gated delta rule of T n tokens. Of each n, the
    first one has the gate and the last one the query."""

    def run(
        *, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, initial_state: Tensor | None,
        output_final_state: bool | None, cu_seqlens: None, use_qk_l2norm_in_kernel: bool,
    ) -> tuple[Tensor, None]:  # fmt: skip
        without_states(initial_state, bool(output_final_state))
        o, _ = chunk_gated_delta_product(
            q[:, steps - 1 :: steps], k, v, None if g is None else g[:, ::steps], beta, steps,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **_sequence().call,
        )  # fmt: skip
        return o.repeat_interleave(steps, dim=1), None

    return run


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None, backend: str | None = None,
    mask: None = None, cache: None = None, output_final_state: bool | None = False, cu_seqlens: None = None,
) -> tuple[Tensor, None]:  # fmt: skip
    """x [B, T_local, D], weight [D, W], bias [D] -> [B, T_local, D]."""
    without_states(cache, bool(output_final_state))
    if mask is not None:
        fail("mask", "None (a shard knows its padding)", "a tensor")
    y = _convolved(x, weight, bias)
    return (y if activation is None else F.silu(y)), None


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    sequence = _sequence()
    with sequence_parallel(sequence.sp):
        return convolve(x, weight, bias, sequence.cu_seqlens)


def convolution_forward(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a `ShortConvolution`, by `causal_conv1d` where a mixer runs over ranks."""
    if _running.sequence is None:
        return original(module, *args, **kwargs)
    return _convolve(module, *args, **kwargs)


def _convolve(module: Any, x: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
    return causal_conv1d(x, module.weight.squeeze(1), module.bias, activation=module.activation, **kwargs)


def rotary_forward(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a `RotaryEmbedding`, with positions in the whole sequence where a mixer runs over ranks."""
    if _running.sequence is None:
        return original(module, *args, **kwargs)
    return _rotate(module, *args, **kwargs)


def _rotate(
    module: Any, q: Tensor, k: Tensor, seqlen_offset: int = 0, max_seqlen: int | None = None, cu_seqlens: None = None
) -> tuple[Tensor, Tensor]:
    """q [B, T_local, H, K] and k [B, T_local, HK, K], rotated."""
    if seqlen_offset != 0:
        fail("seqlen_offset", "0 (a shard knows its place)", seqlen_offset)
    sequence, frequencies = _sequence(), module.inv_freq
    if frequencies.dtype not in (torch.float32, torch.float64):  # as the module does: halves are too coarse
        frequencies = module._compute_inv_freq(device=q.device)
    at = positions(q.shape[1], q.device, sequence.cu_seqlens, sequence.sp)
    # In float64, because a large position times a frequency in float32 is off by a large part of a turn.
    angles = at[:, None, None] * frequencies.double()
    return rotate_first(q, angles), rotate_first(k, angles)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """q [B, T_local, H, K], k and v [B, T_local, HK, K] -> [B, T_local, H, K]. The window is (tokens before, tokens
    after), -1 for all."""
    before, _ = window_size
    return scaled_dot_product_attention(
        q, k, v, is_causal=causal, window=None if before < 0 else before + 1, **_sequence().call
    )


def mamba2_forward(
    module: Any, hidden_states: Tensor, attention_mask: None = None, past_key_values: None = None,
    use_cache: bool | None = False, output_attentions: bool | None = False,
) -> tuple[Tensor, None, None]:  # fmt: skip
    """The forward of `Mamba2`, whose own code calls no function for the scan. [B, T_local, D] -> [B, T_local, D]."""
    without_states(past_key_values, bool(use_cache))
    width, states = module.intermediate_size, module.n_groups * module.ssm_state_size
    gate, mixed, dt = module.in_proj(hidden_states).split([width, module.conv_dim, module.num_heads], dim=-1)
    mixed = module.act(_convolved(mixed, module.conv1d.weight.squeeze(1), module.conv1d.bias))
    x, B, C = mixed.split([width, states, states], dim=-1)
    by_group = (module.n_groups, module.ssm_state_size)
    y, _ = mamba2_ssd(
        x.unflatten(-1, (-1, module.head_dim)), dt, -module.A_log.float().exp(), B.unflatten(-1, by_group),
        C.unflatten(-1, by_group), module._get_D(), module.dt_bias, True, dt_limit=module.dt_limit,
        **_sequence().call,
    )  # fmt: skip
    y = y.flatten(-2)
    y = module.norm(y, gate) if module.rmsnorm else y * module.act(gate)
    return module.out_proj(y.to(hidden_states.dtype)), None, None
