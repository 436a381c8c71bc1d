"""Replacements for the functions that mixers of transformers call.

Each takes the arguments of the original, and runs over the ranks of the shard that its layer runs on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flexsp import ops
from flexsp.comm.group import sequence_parallel
from flexsp.exceptions import NotAvailable, fail
from flexsp.integrations.transformers.running import running_shard
from flexsp.nn.attention import scaled_dot_product_attention
from flexsp.nn.conv import convolve
from flexsp.ops import chunk_gated_delta_rule, chunk_kda, mamba2_ssd

__all__ = [
    "Attentions", "causal_conv1d", "gated_delta_rule", "kimi_delta_rule", "mamba2_scan", "not_fused",
    "selective_scan", "without_states",
]  # fmt: skip


def causal_conv1d(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    """hidden_states [B, D, T_local], weight [D, W], bias [D] -> [B, D, T_local]."""
    from transformers.activations import ACT2FN

    shard = running_shard()
    with shard.known_lengths() as sp, sequence_parallel(sp):
        y = convolve(hidden_states.transpose(1, 2), weight, bias, shard.cu_seqlens)
    return (y if activation is None else ACT2FN[activation](y)).transpose(1, 2)


def _delta_rule(op: Callable[..., Any]) -> Callable[..., tuple[Tensor, None]]:
    """query, key [B, T_local, H, K], value [B, T_local, HV, V], g and beta as of the op -> [B, T_local, HV, V]."""

    def run(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        without_states(initial_state, output_final_state)
        if beta.dtype != torch.float32:
            beta = beta.to(query.dtype)
        with running_shard().call() as ranks:
            o, _ = op(query, key, value, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **ranks)
        return o, None

    return run


gated_delta_rule, kimi_delta_rule = _delta_rule(chunk_gated_delta_rule), _delta_rule(chunk_kda)


def mamba2_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    """hidden_states [B, T_local, H, P], dt [B, T_local, H], A [H], B, C [B, T_local, G, N] -> [B, T_local, H, P]."""
    without_states(initial_states, return_final_states)
    if z is not None:
        fail("z", "None (the mixers gate after the scan)", "a tensor")
    with running_shard().call() as ranks:
        y, _ = mamba2_ssd(hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, dt_limit=dt_limit, **ranks)
    return y.contiguous()  # callers view it


def selective_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    return_last_state: bool = False, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """hidden_states, dt and z [B, D, T_local], A [D, N], B, C [B, N, T_local] -> [B, D, T_local]."""
    without_states(None, return_last_state)
    u, dt, B, C = (x.transpose(1, 2) for x in (hidden_states, dt, B, C))
    gate = None if z is None else z.transpose(1, 2)
    with running_shard().call() as ranks:
        y, _ = ops.selective_scan(u, dt, A, B, C, D, gate, delta_bias, delta_softplus, **ranks)
    return y.transpose(1, 2)


def not_fused(*args: Any, **kwargs: Any) -> None:
    """Replaces a mixer's fused kernel. It returns None, so that the mixer calls its convolution and its scan."""


def without_states(initial: Tensor | None, final: bool) -> None:
    if initial is not None or final:
        raise NotAvailable("a sequence that is cut over ranks takes no cache: call the model with use_cache=False")


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """query [B, H, T_local, K], key [B, HK, T_local, K], value [B, HK, T_local, V] -> [B, T_local, H, V]."""
    if attention_mask is not None:
        fail("attention_mask", "None (a shard knows its documents and its padding)", "a tensor")
    kind, dtype = query.device.type, value.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    q, k, v = (x.transpose(1, 2).to(dtype) for x in (query, key, value))
    with running_shard().call() as ranks:
        o = scaled_dot_product_attention(
            q, k, v, scale=scaling, window=sliding_window, dropout_p=dropout, softcap=softcap, sinks=s_aux, **ranks
        )
    return o, None


class Attentions:
    """Replaces transformers' register of attention functions (``ALL_ATTENTION_FUNCTIONS``): it always gives
    `attention`."""

    def get_interface(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return attention
