"""Models of transformers for train_hybrid.py: from a folder into shards over all ranks, and back into a folder."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from checkpoint import Ranks, UserError, on_first_rank
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import flexsp
from flexsp.exceptions import NotAvailable
from flexsp.integrations.transformers import parallelize

TINY = "tiny"
_ROUTERS = re.compile(r"\w*Top[kK]Router")
_GATES = ("A_log", "dt_bias")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
# Three layers of the gated delta rule to one of softmax attention; a token goes to two of eight experts.
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 24,
    "linear_value_head_dim": 24, "intermediate_size": 128, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "output_router_logits": True,
    "router_aux_loss_coef": 0.01, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def read_config(model: str) -> Any:
    """The config of the built-in tiny Qwen3-Next, of a folder, or in a file of JSON. Nothing is downloaded."""
    from transformers import AutoConfig

    if model == TINY:
        return AutoConfig.for_model("qwen3_next", **SIZES)
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        expected = f"{TINY!r}, a folder with config.json or such a file"
        raise UserError(f"--model: expected {expected}, got {model!r}: there is no {file}")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--model: {file} is no config of transformers: {one_line(error)}") from error


def left_out(config: Any) -> str:
    """What a run must say of a model that takes more than text: its other parts are neither trained nor exported."""
    text = config.get_text_config()
    if text is config:
        return ""
    return (
        f"--model is a {config.model_type} that takes more than text: only its language model is trained, and exported "
        f"as a {text.model_type}, without the rest"
    )


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def read_tokenizer(model: str) -> Any:
    """The tokenizer of a folder; None where there is none."""
    from transformers import AutoTokenizer

    path = Path(model)
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"--model: the tokenizer in {path} cannot be read: {one_line(error)}") from error


def has_weights(model: str) -> bool:
    return Path(model).is_dir() and any(next(Path(model).glob(name), None) for name in WEIGHTS)


def config_digest(config: Any) -> str:
    return hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True, default=str).encode()).hexdigest()[:16]


def empty_model(config: Any) -> Any:
    """The model without memory for its parameters; buffers are there."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    try:
        with init_empty_weights(include_buffers=False):
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise UserError(f"--model: no causal language model has this config: {one_line(error)}") from error


def make_model(
    config: Any, sp: flexsp.SequenceParallel, everyone: DeviceMesh, dtype: torch.dtype, checkpointing: bool
) -> Any:
    """A model whose parameters, in float32 and not set yet, are sharded over ``everyone``, and whose sequences are cut
    over ``sp``.

    Args:
        dtype: of the parameters and activations that the layers compute with; gradients are summed in float32. Routers
            and the gates' A_log and dt_bias stay in float32: rounded, some tokens choose other experts, and log gates
            are off by up to 0.75 %, for every token alike.
    """
    model = empty_model(config)
    try:
        parallelize(model, sp)
    except (ValueError, NotAvailable) as error:
        raise UserError(f"--model: {error}") from error
    model.train()
    if checkpointing:
        with warnings.catch_warnings():  # transformers 5.24 has another name for it, which 5.23 does not know
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable({"use_reentrant": False})
    rounded = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for module in [x for x in model.modules() if _ROUTERS.fullmatch(type(x).__name__)]:
        fully_shard(module, mesh=everyone, mp_policy=exact)  # its inputs become float32 too
    gates = {module: [p for name, p in module.named_parameters(recurse=False) if name in _GATES]
             for module in model.modules()}  # fmt: skip
    kept = {p for of_gates in gates.values() for p in of_gates}
    for module in units(model):
        fully_shard(module, mesh=everyone, mp_policy=rounded, ignored_params=kept)
    # After the layers, which look at nothing inside a module that is sharded by itself.
    as_it_is = replace(exact, cast_forward_inputs=False)
    for module, of_gates in gates.items():
        if of_gates:
            others = set(module.parameters()) - set(of_gates)
            fully_shard(module, mesh=everyone, mp_policy=as_it_is, ignored_params=others)
    model._apply(lambda x: torch.empty_like(x, device=sp.device) if x.is_meta else x.to(sp.device))
    return model


def units(model: Any) -> list[nn.Module]:
    """What fully_shard gathers at a time: layers and the head, where they share no parameter, and the rest."""
    base = model.base_model
    parts = [*(base.layers if hasattr(base, "layers") else base.blocks), model.get_output_embeddings()]
    holders = Counter(id(p) for part in parts for p in part.parameters())
    holders.update({id(p): 1 for p in model.get_input_embeddings().parameters()})
    return [*(part for part in parts if all(holders[id(p)] == 1 for p in part.parameters())), model]


def set_first_weights(model: nn.Module, source: str, config: Any, seed: int, nudge: bool, ranks: Ranks) -> None:
    """Weights of the folder ``source``, or random ones where it has none. Only rank 0 holds them whole. Collective.

    Args:
        nudge: change every number of them by one unit in the last place.
    """

    def whole() -> dict[str, Any]:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        if has_weights(source):
            made = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True)
        else:
            made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if nudge:
            with torch.no_grad():
                for parameter in made.parameters():
                    up = torch.rand_like(parameter) < 0.5
                    parameter.copy_(parameter.nextafter(torch.where(up, torch.inf, -torch.inf)))
        return made.state_dict()

    state = on_first_rank(whole, ranks) or {}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


def export(model: nn.Module, config: Any, tokenizer: Any, folder: Path, dtype: torch.dtype, ranks: Ranks) -> None:
    """Writes a folder that ``from_pretrained`` loads: config, safetensors, tokenizer. Collective.

    It is renamed when it is whole. Rank 0 holds all parameters for it.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)

    def write() -> None:
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        plain = empty_model(config)
        plain.config.dtype = dtype
        held = {name: x.to(dtype) if x.is_floating_point() else x for name, x in state.items()}
        plain.save_pretrained(partial, state_dict=held)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)

    on_first_rank(write, ranks)
