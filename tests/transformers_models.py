"""Tiny random models of transformers, and how the unmodified ones run: the references of test_transformers*.py."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

VOCABULARY = 37
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 20, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 4, "initializer_range": 0.2, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "linear_key_head_dim": 6, "linear_value_head_dim": 5, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 12, "shared_expert_intermediate_size": 10, "num_experts": 5, "num_experts_per_tok": 2,
    "output_router_logits": True, "router_aux_loss_coef": 0.1,
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 10, "mamba_chunk_size": 16,
    "num_hidden_layers": 3,
}  # fmt: skip
_MAMBA1: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "state_size": 10, "num_hidden_layers": 2, "time_step_rank": 4,
    "initializer_range": 0.2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_THREE_ROWS = {
    "rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.0, "mrope_section": [1, 1, 0],
}  # fmt: skip

# Model type -> arguments of its config.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_SIZES, **_DELTA, **_EXPERTS},
    "qwen3_5_text": {**_SIZES, **_DELTA, "tie_word_embeddings": True, "rope_parameters": _THREE_ROWS},
    "qwen3_5_moe_text": {**_SIZES, **_DELTA, **_EXPERTS, "rope_parameters": _THREE_ROWS},
    "olmo_hybrid": {**_SIZES, **_DELTA, "head_dim": 4},
    "kimi_linear": {
        **_SIZES, "num_key_value_heads": 6, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 2,
        "qk_nope_head_dim": 6, "v_head_dim": 4, "linear_head_dim": 6, "linear_num_heads": 3, "num_local_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": _DELTA["layer_types"], "num_hidden_layers": 3,
    },
    "mamba2": {
        "vocab_size": VOCABULARY, "hidden_size": 24, "num_heads": 6, "head_dim": 8, "state_size": 10, "n_groups": 2,
        "num_hidden_layers": 2, "chunk_size": 16, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
        "time_step_limit": (0.01, 2.0),
    },
    "bamba": {**_SIZES, **_MAMBA, "attn_layer_indices": [1], "z_loss_coefficient": 0.1},
    "nemotron_h": {
        **_SIZES, "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp", "linear_attention"],
        "ssm_state_size": 10, "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 16,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "moe_latent_size": 10,
        "moe_shared_expert_intermediate_size": 10,
    },
    "falcon_h1": {
        **_SIZES, **_MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 48, "lm_head_multiplier": 0.7, "key_multiplier": 0.8,
        "embedding_multiplier": 1.3, "attention_out_multiplier": 0.9, "ssm_in_multiplier": 0.8, "mamba_rms_norm": True,
        "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7], "ssm_out_multiplier": 1.2, "attention_in_multiplier": 1.1,
    },
    "zamba2": {
        **_SIZES, "head_dim": 8, "num_key_value_heads": 6, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "num_hidden_layers": 4, "mamba_d_state": 10, "n_mamba_heads": 6, "mamba_ngroups": 2, "chunk_size": 16,
        "use_shared_attention_adapter": True, "adapter_rank": 3, "use_mem_rope": True, "num_mem_blocks": 1,
    },
    "granitemoehybrid": {
        **_SIZES, **_MAMBA, **_EXPERTS, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 5, "shared_intermediate_size": 14, "logits_scaling": 1.7, "embedding_multiplier": 1.3,
        "residual_multiplier": 0.8, "attention_multiplier": 0.4, "position_embedding_type": "rope",
        "tie_word_embeddings": True,
    },
}
# Families that test_transformers_families.py has a small quick case of.
LATER_MODELS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        **_SIZES, "num_key_value_heads": 6, "head_dim": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 2,
        "qk_nope_head_dim": 6, "v_head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "moe_intermediate_size": 12, "first_k_dense_replace": 1, "num_mtp_layers": 0,
        "layer_types": _DELTA["layer_types"], "num_hidden_layers": 3,
    },
    "lara_mini": {
        **_SIZES, **_DELTA, **_EXPERTS, "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
        "sliding_window": 5,
    },
    "mamba": {**_MAMBA1, "use_bias": True},
    "falcon_mamba": _MAMBA1,
    "jamba": {
        **_SIZES, **_EXPERTS, "mamba_d_state": 10, "mamba_dt_rank": 4, "num_hidden_layers": 3, "attn_layer_period": 3,
        "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 0,
    },
    "zamba": {
        **{**_SIZES, "head_dim": 8}, "num_key_value_heads": 6, "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "num_hidden_layers": 3, "mamba_d_state": 10, "mamba_dt_rank": 4, "n_mamba_heads": 2,
    },
    "minimax": {
        **_SIZES, "layer_types": _DELTA["layer_types"], "num_hidden_layers": 3, "num_local_experts": 4,
        "block_size": 16, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1,
        "linear_attn_alpha_factor": 1.1, "mlp_beta_factor": 0.8,
    },
    "recurrent_gemma": {
        **_SIZES, "lru_width": 24, "block_types": ["recurrent", "attention"], "num_hidden_layers": 3,
        "attention_window_size": 5, "logits_soft_cap": 3.0,
    },
    "xlstm": {  # sizes that its cache rounds to; chunks of one token, of which any number is right
        "vocab_size": VOCABULARY, "hidden_size": 128, "num_heads": 4, "num_hidden_layers": 2, "mode": "train",
        "chunk_size": 1, "ffn_proj_factor": 1.0, "ffn_round_up_to_multiple_of": 4, "eps": 0.1, "gate_soft_cap": 3.0,
        "output_logit_soft_cap": 2.0, "use_cache": False, "pad_token_id": None, "bos_token_id": None,
        "eos_token_id": None,
    },
    "lfm2": {
        **_SIZES, "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "conv_bias": True,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {
        **_SIZES, "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1,
        "moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2,
    },
    "lfm3": {
        **_SIZES, "layer_types": ["conv", "sliding_attention", "full_attention"], "num_hidden_layers": 3,
        "sliding_window": 5,
    },
}

WITHOUT_SOFTMAX = ("mamba", "mamba2", "falcon_mamba", "xlstm")
ALL_MODELS = MODELS | LATER_MODELS


def make(name: str, attention: str = "sdpa", kind: str = "ForCausalLM", **changes: Any) -> Any:
    """The model in float32 and in training mode, with the same random parameters everywhere. `kind` is how the name of
    its class ends."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if name not in CONFIG_MAPPING_NAMES:
        import pytest

        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    # By their names: flash-linear-attention puts classes of its own into the register, under the same types.
    config_class = getattr(transformers, CONFIG_MAPPING_NAMES[name])
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name].removesuffix("ForCausalLM") + kind)
    _in_pytorch(sys.modules[model_class.__module__])
    with torch.random.fork_rng():
        torch.manual_seed(5)
        config = config_class(**{**copy.deepcopy(ALL_MODELS[name]), **changes})
        config._experts_implementation = "eager"
        model = model_class._from_config(config, attn_implementation="eager" if name in WITHOUT_SOFTMAX else attention)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


@functools.cache
def _in_pytorch(module: Any) -> None:
    """Where flash-linear-attention is installed, transformers has taken its kernels; they have none for CPU."""
    if find_spec("fla") is None:
        return
    for name, function in list(vars(module).items()):
        if hasattr(function, "__wrapped__") and getattr(function, "__module__", None) == module.__name__:
            setattr(module, name, _of_arguments_it_has(inspect.unwrap(function)))


def _of_arguments_it_has(function: Any) -> Any:
    known = inspect.signature(function).parameters
    return lambda *args, **kwargs: function(*args, **{name: x for name, x in kwargs.items() if name in known})


@contextlib.contextmanager
def wide() -> Iterator[None]:
    """Casts to float32 inside are casts to float64."""
    names = {"float32": torch.float32, "float": torch.float}
    method = torch.Tensor.float
    try:
        for name in names:
            setattr(torch, name, torch.float64)
        torch.Tensor.float = torch.Tensor.double
        yield
    finally:
        torch.Tensor.float = method
        for name, dtype in names.items():
            setattr(torch, name, dtype)


@contextlib.contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    with wide() if dtype == torch.float64 else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def chunks(model: Any, size: int) -> Iterator[None]:
    """The unmodified model, with other chunks: what it computes differs by its own rounding only. Its own numbers are
    of its dtype."""
    module, dtype = sys.modules[type(model).__module__], next(model.parameters()).dtype
    for part in model.modules():
        if hasattr(part, "decay_factors"):  # of MiniMax, made in float32 before the model was converted
            part.block_size = size
            made = part.decay_factors(part.slope_rate)
            part.query_decay, part.key_decay, part.diagonal_decay = made
        if hasattr(part, "_rnn_scan"):  # of RecurrentGemma
            type(part)._rnn_scan.__defaults__ = (torch.promote_types(dtype, torch.float32),)
    names = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan")
    before = {name: getattr(module, name) for name in names if hasattr(module, name)}

    def with_size(function: Any) -> Any:
        return lambda *args, **kwargs: function(*args, **{**kwargs, "chunk_size": size})

    try:
        for name, function in before.items():
            setattr(module, name, with_size(function))
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


Found = dict[str, torch.Tensor]


def gradients(model: Any) -> Found:
    """Of every parameter; zeros where there is none. They are taken away."""
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def run_whole(model: Any, batch: dict[str, Any], chunk_size: int = 16) -> Found:
    """Loss and gradients of the unmodified model."""
    dtype = next(model.parameters()).dtype
    with chunks(model, chunk_size), precision(dtype):
        loss = model(**batch).loss
        loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def run_documents(model: Any, batch: dict[str, Any], chunk_size: int = 16) -> Found:
    """The same of packed documents: one call of the unmodified model each, and the losses put together from its logits
    and the places of experts."""
    bounds, losses, squares, routers = batch["cu_seq_lens_q"].tolist(), [], [], []
    config, module = model.config, sys.modules[type(model).__module__]
    with chunks(model, chunk_size), precision(next(model.parameters()).dtype):
        for start, stop in zip(bounds, bounds[1:], strict=False):
            tokens, labels = batch["input_ids"][:, start:stop], batch["labels"][0, start + 1 : stop]
            out = model(input_ids=tokens)
            logits = out.logits[0].float()
            losses.append(F.cross_entropy(logits[:-1], labels, reduction="none", ignore_index=-100))
            squares.append(logits.logsumexp(-1).square())
            routers.append(out.get("router_logits"))
        counted = (batch["labels"][0] != -100).sum()
        loss = torch.cat(losses).sum() / counted
        loss = loss + getattr(config, "z_loss_coefficient", 0.0) * torch.cat(squares).mean()
        if hasattr(module, "load_balancing_loss_func"):
            layers = tuple(torch.cat(layer) for layer in zip(*routers, strict=True))
            balance = module.load_balancing_loss_func(layers, model.num_experts, model.num_experts_per_tok)
            loss = loss + config.router_aux_loss_coef * balance
        loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def run_shard(model: Any, sp: Any, batch: dict[str, Any]) -> Found:
    """Loss and gradients of a parallelized model on this rank."""
    from flexsp.integrations.transformers import shard

    with precision(next(model.parameters()).dtype):
        loss = model(**shard(batch, sp)).loss
        loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def mean(per_rank: list[Found]) -> Found:
    return {name: sum(found[name] for found in per_rank) / len(per_rank) for name in per_rank[0]}


def rows(B: int, T: int) -> dict[str, Any]:
    """Random tokens, of whose labels a third does not count."""
    ids = torch.randint(VOCABULARY, (B, T))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(B, T) < 0.3, -100)}


def packed(lengths: list[int]) -> dict[str, Any]:
    """Random documents as transformers' own collator packs them."""
    from transformers import DataCollatorWithFlattening

    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    return dict(collate([{"input_ids": torch.randint(VOCABULARY, (n,)).tolist()} for n in lengths]))


def assert_exact(got: Found, want: Found, what: str = "", bound: float = 1e-10) -> None:
    for name, x in want.items():
        scale = max(0.1, float(x.abs().max()))
        worst = float((got[name] - x).abs().max()) / scale
        assert worst < bound, f"{what} {name}: off by {worst:.2g} of {scale:.2g}"
