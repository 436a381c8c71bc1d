"""Forwards in place of those whose own code meets other tokens without calling a function, or hands no shard on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flexsp import ops
from flexsp.integrations.transformers.batch import KEY, Shard
from flexsp.integrations.transformers.functions import causal_conv1d
from flexsp.integrations.transformers.running import running_shard

__all__ = ["forward_with", "gated_sum", "lightning_forward", "own_convolution", "stack_forward"]


class _Standing:
    """What a module's own forward sees as itself: the module, with some attributes in place of its own. What that
    forward keeps in itself, such as a state for decoding, is gone with this object."""

    def __init__(self, module: nn.Module, parts: dict[str, Callable[..., Any]]) -> None:
        self._module = module
        for name, part in parts.items():
            setattr(self, name, functools.partial(part, module))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def forward_with(**parts: Callable[..., Any]) -> Callable[..., Any]:
    """The module's own forward, with functions of (module, ...) in place of some of its methods and submodules."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        del kwargs[KEY]
        return type(module).forward(_Standing(module, parts), *args, **kwargs)  # type: ignore[arg-type]

    return forward


def own_convolution(module: Any, x: Tensor) -> Tensor:
    """In place of ``module.conv_1d``: x [B, D, T_local] -> [B, D, T_local]."""
    return causal_conv1d(x, module.conv_1d.weight.squeeze(1), module.conv_1d.bias)


def gated_sum(
    module: nn.Module, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, recurrent_states: None = None
) -> tuple[Tensor, None]:
    """In place of RecurrentGemma's scan, h_t = gate_t h_{t-1} + x_t, of hidden_states and gates [B, T_local, D]. Where
    it resets a document begins, and so a state of zeros."""
    log_gate = recurrent_gate.to(torch.promote_types(hidden_states.dtype, torch.float32)).log()
    with running_shard().call() as ranks:
        h, _ = ops.chunk_hgrn(hidden_states, log_gate, **ranks)
    return h, None


def lightning_forward(module: Any, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
    """In place of that of MiniMax's lightning attention: [B, T_local, D] -> [B, T_local, D]."""
    qkv = module.act_fn(module.qkv_proj(hidden_states)).unflatten(-1, (module.num_attention_heads, -1))
    q, k, v = qkv.split(module.head_dim, dim=-1)
    decay = -module.slope_rate.flatten().to(torch.promote_types(q.dtype, torch.float32))
    with running_shard().call() as ranks:
        o, _ = ops.chunk_simple_gla(q, k, v, g_gamma=decay, scale=1.0, **ranks)
    o = module.norm(o.flatten(-2))
    return module.out_proj(module.output_gate(hidden_states).sigmoid() * o), None


def stack_forward(
    model: Any, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None,
    output_hidden_states: bool | None = None, *, flexsp_shard: Shard, **kwargs: Any,
) -> Any:  # fmt: skip
    """In place of that of a model of nothing but Mamba-1 or xLSTM, which hands its blocks no keyword arguments."""
    from transformers.modeling_outputs import BaseModelOutput

    hidden = model.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
    mamba = hasattr(model, "norm_f")
    every = [] if mamba else [hidden]  # they collect other states
    for block in model.layers if mamba else model.blocks:
        made = block(hidden, **{KEY: flexsp_shard})
        hidden = made[0] if isinstance(made, tuple) else made
        every.append(hidden)
    hidden = model.norm_f(hidden) if mamba else model.out_norm(hidden)
    collected = (*every, hidden) if mamba else (*every[:-1], hidden)
    wanted = model.config.output_hidden_states if output_hidden_states is None else output_hidden_states
    return BaseModelOutput(last_hidden_state=hidden, hidden_states=collected if wanted else None)
