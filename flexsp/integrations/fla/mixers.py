"""The layers and models of flash-linear-attention that can be cut over ranks, and what is replaced in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from flexsp import ops
from flexsp.integrations.fla.functions import (
    causal_conv1d,
    convolution_forward,
    flash_attention,
    gated_by_channel,
    mamba2_forward,
    over_ranks,
    recurrent_product,
    rotary_forward,
)  # fmt: skip
from flexsp.integrations.transformers.check import class_of

__all__ = ["FORWARDS", "LOCAL", "MIXERS", "MODELS", "PARTS", "UNAVAILABLE", "qualified_name"]


def qualified_name(module: nn.Module) -> str:
    cls = class_of(module)
    return f"{cls.__module__}.{cls.__name__}"


def _by(op: Callable[..., Any], *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, over_ranks(op))


_GLA = dict.fromkeys(("chunk_gla", "fused_chunk_gla", "fused_recurrent_gla"), gated_by_channel)

# For each class of layers, a function of the module: the global names that its forward calls, and their replacements.
MIXERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "fla.layers.delta_net.DeltaNet": lambda module: _by(
        ops.chunk_delta_rule, "chunk_delta_rule", "fused_recurrent_delta_rule"
    ),
    "fla.layers.gated_deltanet.GatedDeltaNet": lambda module: {
        **_by(ops.chunk_gated_delta_rule, "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
        "causal_conv1d": causal_conv1d,
    },
    "fla.layers.kda.KimiDeltaAttention": lambda module: _by(ops.chunk_kda, "chunk_kda", "fused_recurrent_kda"),
    "fla.layers.gdn2.GatedDeltaNet2": lambda module: _by(ops.chunk_gdn2, "chunk_gdn2", "fused_recurrent_gdn2"),
    "fla.layers.gated_deltaproduct.GatedDeltaProduct": lambda module: {
        **_by(ops.chunk_gated_delta_product, "chunk_gated_delta_product"),
        "fused_recurrent_gated_delta_rule": recurrent_product(module.num_householder),
    },
    "fla.layers.multiscale_retention.MultiScaleRetention": lambda module: _by(
        ops.chunk_retention, "chunk_retention", "fused_chunk_retention", "parallel_retention",
        "fused_recurrent_retention",
    ),
    "fla.layers.simple_gla.SimpleGatedLinearAttention": lambda module: _by(
        ops.chunk_simple_gla, "chunk_simple_gla", "fused_recurrent_simple_gla"
    ),
    "fla.layers.gla.GatedLinearAttention": lambda module: _GLA,
    "fla.layers.hgrn2.HGRN2Attention": lambda module: _GLA,
    "fla.layers.linear_attn.LinearAttention": lambda module: _by(
        ops.chunk_linear_attn, "chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"
    ),
    "fla.layers.mamba2.Mamba2": lambda module: {},
    "fla.layers.attn.Attention": lambda module: {"flash_attn_func": flash_attention},
}  # fmt: skip

# Layers whose whole forward is replaced.
FORWARDS: dict[str, Callable[..., Any]] = {"fla.layers.mamba2.Mamba2": mamba2_forward}

# Modules inside layers that make tokens depend on others, and their forwards.
PARTS: dict[str, Callable[..., Any]] = {
    "fla.modules.causal_conv1d.ops.ShortConvolution": convolution_forward,
    "fla.modules.rotary.ops.RotaryEmbedding": rotary_forward,
}

_FAMILIES = {
    "delta_net": "DeltaNet", "gated_deltanet": "GatedDeltaNet", "gated_deltaproduct": "GatedDeltaProduct",
    "gla": "GLA", "hgrn2": "HGRN2", "kda": "KDA", "mamba2": "Mamba2", "retnet": "RetNet", "transformer": "Transformer",
}  # fmt: skip


def _in_models(ending: str) -> frozenset[str]:
    return frozenset(f"fla.models.{file}.modeling_{file}.{name}{ending}" for file, name in _FAMILIES.items())


MODELS = _in_models("ForCausalLM")

# Modules that treat tokens one by one or only call others.
LOCAL = MODELS | _in_models("Block") | _in_models("Model") | {
    "fla.modules.norm.layernorm.RMSNorm", "fla.modules.norm.fused_norm_gate.FusedRMSNormGated",
    "fla.modules.norm.layernorm_gated.RMSNormGated", "fla.modules.mlp.GatedMLP", "fla.modules.mlp.SwiGLULinear",
    "fla.modules.feature_map.DPFPFeatureMap", "fla.modules.feature_map.HadamardFeatureMap",
    "fla.modules.feature_map.HedgehogFeatureMap", "fla.modules.feature_map.T2RFeatureMap",
    "torch.nn.modules.normalization.RMSNorm",
}  # fmt: skip

UNAVAILABLE = {
    "fla.models.linear_attn.modeling_linear_attn.LinearAttentionForCausalLM": (
        "hands no keyword arguments to its layers, so these would not get the shard; the layer alone can be cut"
    ),
}
