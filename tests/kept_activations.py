"""Bytes a token that layers of transformers keep for their backward pass, as autograd saves them, without the mixers'
operators."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flexsp.planner.model_sizes import sizes_of
from tests.transformers_models import ALL_MODELS

_TOKENS = 512
_WIDER: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "num_experts": 8,
    "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64,
}  # fmt: skip
_OF_MODEL: dict[str, dict[str, Any]] = {
    "kimi_linear": {
        "kv_lora_rank": 128, "q_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64,
        "linear_head_dim": 64, "linear_num_heads": 8, "num_key_value_heads": 8,
    },
    "mamba2": {"num_heads": 16, "head_dim": 64, "state_size": 64, "n_groups": 1},
    "nemotron_h": {
        "ssm_state_size": 64, "mamba_num_heads": 16, "mamba_head_dim": 64, "n_groups": 1, "moe_latent_size": 256,
        "moe_shared_expert_intermediate_size": 256,
    },
    "bailing_hybrid": {
        "kv_lora_rank": 128, "q_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64,
        "num_key_value_heads": 8, "num_local_experts": 8,
    },
    "falcon_h1": {"mamba_d_ssm": 1024},
    "zamba2": {"mamba_d_state": 64, "n_mamba_heads": 16, "mamba_ngroups": 1, "num_key_value_heads": 8, "head_dim": 128},
    "granitemoehybrid": {"shared_intermediate_size": 256},
}  # fmt: skip


class _NothingKept(torch.autograd.Function):
    """In place of a mixer's operator: an output of the size of its first input."""

    @staticmethod
    def forward(ctx: Any, like: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.others = len(others)
        return torch.zeros_like(like)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (grads[0], *[None] * ctx.others)


def _delta(q: Any, k: Any, v: Any, g: Any, beta: Any, *_: Any, **__: Any) -> Any:
    return _NothingKept.apply(v, q, k, g, beta), None


def _scan(x: Any, dt: Any, A: Any, B: Any, C: Any, *_: Any, **__: Any) -> Any:
    return _NothingKept.apply(x, dt, B, C)


def _attention(module: Any, q: Any, k: Any, v: Any, mask: Any, **_: Any) -> Any:
    return _NothingKept.apply(q[..., : v.shape[-1]].transpose(1, 2), k, v), None


class _Attentions:
    def get_interface(self, *_: Any) -> Any:
        return _attention


_REPLACED = {
    "torch_chunk_gated_delta_rule": _delta, "chunk_kimi_delta_attention": _delta, "mamba2_chunk_scan": _scan,
    "ALL_ATTENTION_FUNCTIONS": _Attentions(),
}  # fmt: skip


def compare(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[float, float]]:
    """(estimated by the plan, saved by autograd) of each layer of a small model in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = copy.deepcopy(ALL_MODELS[name])
    sizes |= {key: value for key, value in _WIDER.items() if key in sizes} | _OF_MODEL.get(name, {})
    if "rope_parameters" in sizes:
        sizes["rope_parameters"]["mrope_section"] = [12, 10, 10]
    config = AutoConfig.for_model(name, **sizes)
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    for key, function in _REPLACED.items():
        monkeypatch.setattr(sys.modules[type(model).__module__], key, function, raising=False)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: list[float] = []
    for layer in model.base_model.layers:
        layer.forward = _counting(layer.forward, parameters, found)
    estimated = [layer.kept for layer in sizes_of(model).layers]
    model(input_ids=torch.randint(30, (1, _TOKENS)), use_cache=False)
    assert len(found) == len(estimated)
    yield from zip(estimated, found, strict=True)


def _counting(forward: Any, parameters: set[int], found: list[float]) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        saved: dict[int, torch.Tensor] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            if x.untyped_storage().data_ptr() not in parameters:
                saved[x.untyped_storage().data_ptr()] = x
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = forward(*args, **kwargs)
        found.append(sum(x.untyped_storage().nbytes() for x in saved.values()) / _TOKENS)
        return out

    return run
