"""The models that can be cut over ranks, and which of their functions make tokens depend on other tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flexsp.exceptions import fail
from flexsp.integrations.transformers.causal import LANGUAGE, CausalModel, Head
from flexsp.integrations.transformers.functions import (
    Attentions,
    causal_conv1d,
    gated_delta_rule,
    kimi_delta_rule,
    mamba2_scan,
    not_fused,
    selective_scan,
)  # fmt: skip
from flexsp.integrations.transformers.heads import SEQUENCES, TOKENS
from flexsp.integrations.transformers.own_forwards import (
    forward_with,
    gated_sum,
    lightning_forward,
    own_convolution,
    stack_forward,
)  # fmt: skip
from flexsp.integrations.transformers.xlstm import memory_forward

__all__ = ["LOCAL", "SEAMS", "TASKS", "Replaced", "Seam"]

Replaced = Mapping[str, Any] | Callable[..., Any]

_GATED_DELTA = {"causal_conv1d_fn": causal_conv1d, "torch_chunk_gated_delta_rule": gated_delta_rule}
_KIMI_DELTA = {"causal_conv1d_fn": causal_conv1d, "chunk_kimi_delta_attention": kimi_delta_rule}
_MAMBA2 = {
    "causal_conv1d_fn": causal_conv1d, "mamba2_split_conv1d_scan_combined": not_fused, "mamba2_chunk_scan": mamba2_scan,
}  # fmt: skip
_MAMBA1 = {"causal_conv1d_fn": causal_conv1d, "mamba_selective_scan": selective_scan}
_FUSED_MAMBA1 = {**_MAMBA1, "mamba_inner_fn": not_fused}
_STACK: dict[str, Replaced] = {"Model": stack_forward, "Block": {}}
_CONVOLUTION = {"causal_conv1d_fn": causal_conv1d}
_ATTENTION = {"ALL_ATTENTION_FUNCTIONS": Attentions()}


def _check_loss_function(model: Any) -> None:
    from transformers.loss.loss_utils import LOSS_MAPPING

    name = type(model).__name__
    for ending in ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification"):
        expected = LOSS_MAPPING[ending]
        if name.endswith(ending) and model.loss_function is not expected:
            computed = f"transformers' {expected.__name__}, which flexsp computes"
            fail("model.loss_function", computed, repr(model.loss_function))


def _in_dtype_of_head(model: Any, head: Head, hidden: Tensor) -> Tensor:
    return head(hidden.to(model.lm_head.weight.dtype))


def _multiplied(model: Any, head: Head, hidden: Tensor) -> Tensor:
    return head(hidden) * model.model.lm_head_multiplier


def _capped(model: Any, head: Head, hidden: Tensor) -> Tensor:
    cap: float = model.config.logits_soft_cap
    return (head(hidden) / cap).tanh() * cap


def _soft_capped(model: Any, head: Head, hidden: Tensor) -> Tensor:
    logits = _in_dtype_of_head(model, head, hidden).float()
    cap: float | None = model.config.output_logit_soft_cap
    return logits if cap is None else (logits / cap).tanh() * cap


def _divided(model: Any, head: Head, hidden: Tensor) -> Tensor:
    return head(hidden) / model.config.logits_scaling


@dataclass(frozen=True)
class Seam(CausalModel):
    """A causal language model of transformers, and the functions in it that are replaced.

    Attributes:
        folder: the model's folder in ``transformers.models``.
        prefix: what the names of its classes begin with.
        replaced: for each class whose forward makes tokens depend on others (its name without the prefix), the global
            names that its forward calls, and their replacements; or, where it calls none, a forward in place of its
            own. So too for classes that hand no keyword arguments on to such a one: then there are no names.
        base: the class of its layers, without the prefix.
    """

    folder: str
    prefix: str
    replaced: Mapping[str, Replaced]
    base: str = "Model"


def _seam(
    folder: str, prefix: str, mixer: str, functions: Replaced, others: Mapping[str, Replaced] | None = None,
    **options: Any,
) -> Seam:  # fmt: skip
    replaced = {mixer: functions, "Attention": _ATTENTION, **(others or {})}
    return Seam(folder, prefix, replaced, check_loss=_check_loss_function, **options)


_ALL = [
    _seam("qwen3_next", "Qwen3Next", "GatedDeltaNet", _GATED_DELTA, router_loss=True),
    _seam("qwen3_5", "Qwen3_5", "GatedDeltaNet", _GATED_DELTA, base="TextModel"),
    _seam("qwen3_5_moe", "Qwen3_5Moe", "GatedDeltaNet", _GATED_DELTA, router_loss=True, base="TextModel"),
    _seam("olmo_hybrid", "OlmoHybrid", "GatedDeltaNet", _GATED_DELTA),
    _seam("kimi_linear", "KimiLinear", "DeltaAttention", _KIMI_DELTA),
    _seam("mamba2", "Mamba2", "Mixer", _MAMBA2, logits=_in_dtype_of_head, has_masks=False),
    _seam("bamba", "Bamba", "Mixer", _MAMBA2),
    _seam("nemotron_h", "NemotronH", "Mamba2Mixer", _MAMBA2),
    _seam("falcon_h1", "FalconH1", "Mixer", _MAMBA2, logits=_multiplied),
    _seam("zamba2", "Zamba2", "MambaMixer", _MAMBA2),
    _seam("granitemoehybrid", "GraniteMoeHybrid", "MambaLayer", _MAMBA2, logits=_divided, router_loss=True),
    _seam("bailing_hybrid", "BailingHybrid", "DeltaAttention", _KIMI_DELTA),
    _seam("lara_mini", "LaraMini", "GatedDeltaNet", _GATED_DELTA, router_loss=True),
    _seam("mamba", "Mamba", "Mixer", _FUSED_MAMBA1, _STACK, logits=_in_dtype_of_head, has_masks=False),
    _seam("falcon_mamba", "FalconMamba", "Mixer", _FUSED_MAMBA1, _STACK, logits=_in_dtype_of_head, has_masks=False),
    _seam("jamba", "Jamba", "MambaMixer", _MAMBA1, {"MambaDecoderLayer": {}}, router_loss=True),
    _seam("zamba", "Zamba", "MambaMixer", _MAMBA1),
    _seam("minimax", "MiniMax", "LightningAttention", lightning_forward, router_loss=True),
    _seam(
        "recurrent_gemma", "RecurrentGemma", "RecurrentBlock", forward_with(conv_1d=own_convolution),
        {"Rglru": forward_with(_rnn_scan=gated_sum)}, logits=_capped,
    ),  # fmt: skip
    _seam("xlstm", "xLSTM", "Backend", memory_forward, _STACK, logits=_soft_capped, has_masks=False),
    _seam("lfm2", "Lfm2", "ShortConv", _CONVOLUTION),
    _seam("lfm2_moe", "Lfm2Moe", "ShortConv", _CONVOLUTION),
    _seam("lfm3", "Lfm3", "ShortConv", _CONVOLUTION),
]

# By the name of the class whose forward returns the loss of a language model.
SEAMS = {seam.prefix + "ForCausalLM": seam for seam in _ALL}

# What a model of these families makes of its layers' outputs, by its class without the prefix. Base models are theirs.
TASKS = {
    "ForCausalLM": LANGUAGE, "ForSequenceClassification": SEQUENCES, "TextForSequenceClassification": SEQUENCES,
    "ForTokenClassification": TOKENS,
}  # fmt: skip

# Classes of these models, without the prefix, that treat tokens one by one or only call others.
LOCAL = frozenset(TASKS) | frozenset({
    "AttentionDecoderLayer", "Block", "DecoderLayer", "Experts", "FeedForward", "ForgetGate", "HybridLayer", "Layer",
    "LinearAttentionDecoderLayer", "MLP", "MambaDecoderLayer", "MambaRMSNormGated", "Mlp", "MoE", "Model",
    "MultiHeadLayerNorm", "RMSNorm", "RMSNormGated", "RotaryEmbedding", "SparseMoeBlock", "TextModel",
    "TextRotaryEmbedding", "TopKRouter", "TopkRouter", "WeightlessRMSNorm",
})  # fmt: skip
