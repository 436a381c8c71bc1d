"""What a plan needs to know of a model of transformers: its parameters, and of each layer what a token meets there.

The model is built on the meta device, so its parameters are counted and not estimated, and no weight is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexsp.exceptions import NotAvailable, fail
from flexsp.integrations.transformers.check import check_model, class_of, replaced_by, seam_of
from flexsp.integrations.transformers.seams import SEAMS, Seam

__all__ = [
    "Layer", "LinearMixer", "ModelSizes", "SoftmaxMixer", "config_of", "known_types", "on_meta", "operator_of",
    "read_model", "sizes_of",
]  # fmt: skip

_HALF = 2  # bytes of a bfloat16 number


@dataclass(frozen=True)
class LinearMixer:
    """A linear-attention or state-space operator of a layer; `case` is its name in `flexsp bench op`.

    channels: of its convolution; taps: its width.
    """

    case: str
    heads: int
    key_size: int
    value_size: int
    channels: int
    taps: int

    @property
    def state_bytes(self) -> int:
        """Of one sequence's state, which a rank hands on in float32."""
        return self.heads * self.key_size * self.value_size * 4


@dataclass(frozen=True)
class SoftmaxMixer:
    """Softmax attention of a layer: `heads` of queries and outputs, `key_heads` of keys and values."""

    heads: int
    key_heads: int
    key_size: int
    value_size: int
    window: int | None


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    Attributes:
        shapes: (rows, numbers) of each parameter that no earlier layer has; FSDP2 cuts rows.
        dense: weights that every token is multiplied with.
        experts: weights of chosen experts that a token is multiplied with.
        kept: bytes a token that its backward pass needs, without the operators of its mixers (estimated).
        linear, softmax: its mixers; Falcon-H1 has both in each layer, others one or none.
    """

    shapes: tuple[tuple[int, int], ...]
    dense: int
    experts: int
    kept: int
    linear: tuple[LinearMixer, ...]
    softmax: tuple[SoftmaxMixer, ...]

    @property
    def parameters(self) -> int:
        return sum(numbers for _, numbers in self.shapes)


@dataclass(frozen=True)
class ModelSizes:
    """A causal language model.

    Attributes:
        shapes: (rows, numbers) of each parameter outside of layers: embeddings, last norm, head.
        active: parameters that a token meets, of experts only the chosen ones.
        head: weights of the head.
    """

    model_type: str
    class_name: str
    hidden: int
    vocabulary: int
    layers: tuple[Layer, ...]
    shapes: tuple[tuple[int, int], ...]
    parameters: int
    active: int
    head: int

    @property
    def all_shapes(self) -> Iterator[tuple[int, int]]:
        yield from self.shapes
        for layer in self.layers:
            yield from layer.shapes


def known_types() -> list[str]:
    """Values of ``model_type`` in a config.json that a plan takes: `parallelize` takes them, and their operators were
    measured."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(
        kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name in SEAMS and _is_planned(SEAMS[name])
    )


# The functions in layers that a plan knows: operators, by their names in `flexsp bench op`, and what costs little.
_OPERATORS = {
    "torch_chunk_gated_delta_rule": "gated_delta_rule", "chunk_kimi_delta_attention": "kda",
    "mamba2_chunk_scan": "mamba2",
}  # fmt: skip
_OTHERS = {"causal_conv1d_fn", "mamba2_split_conv1d_scan_combined", "ALL_ATTENTION_FUNCTIONS"}


def _is_planned(seam: Seam) -> bool:
    return all(not callable(names) and {*names} <= {*_OPERATORS, *_OTHERS} for names in seam.replaced.values())


def read_model(folder: str | Path) -> ModelSizes:
    """Sizes of the model whose config.json lies in ``folder``; weights there are not read.

    Raises:
        ValueError: no such file, or a config that `flexsp.integrations.transformers.parallelize` refuses.
        NotAvailable: transformers is not installed or too old, or a type of models that is not known.
    """
    return sizes_of(on_meta(folder, "--model"))


def config_of(folder: str | Path, argument: str) -> dict[str, Any]:
    """The config.json in ``folder``, which is what a command was given as `argument`.

    Raises:
        ValueError: there is none.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        fail(argument, "a folder with a config.json of transformers", repr(str(folder)))
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        fail(argument, f"JSON in {path}", str(error))
    return config if isinstance(config, dict) else {}


def on_meta(folder: str | Path, argument: str) -> Any:
    """The model of a `config_of`, without weights.

    Raises:
        ValueError: there is no config.
        NotAvailable: transformers is not installed or too old, or a type of models that is not known.
    """
    kind = config_of(folder, argument).get("model_type")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise NotAvailable(f"the model is built with transformers: {error}; "
                           'pip install "flexsp[transformers]"') from error  # fmt: skip
    if kind not in known_types():
        known, path = ", ".join(known_types()), Path(folder) / "config.json"
        raise NotAvailable(f"{argument}: expected a model_type of {known}, got {kind!r} in {path}")
    with torch.device("meta"):
        loaded = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return AutoModelForCausalLM.from_config(loaded, trust_remote_code=False)


def sizes_of(model: Any) -> ModelSizes:
    """The same of a causal language model of transformers, on any device."""
    check_model(model)
    seam, config = seam_of(model), model.config
    seen: set[int] = set()
    hybrids: list[int] = []
    layers = tuple(_layer(layer, seam, config, seen, hybrids) for layer in model.base_model.layers)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    outside = _shapes(model, seen)
    total = sum(numbers for _, numbers in outside) + sum(layer.parameters for layer in layers)
    idle = sum(_idle(module, config) for module in model.modules() if _experts(module) is not None)
    return ModelSizes(
        str(config.model_type), class_of(model).__name__, int(config.hidden_size), int(embedding.weight.shape[0]),
        layers, outside, total, total - idle, head.weight.numel(),
    )  # fmt: skip


def _shapes(module: nn.Module, seen: set[int]) -> tuple[tuple[int, int], ...]:
    """(rows, numbers) of parameters that are not in ``seen``, which they join."""
    found = []
    for parameter in module.parameters():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            found.append((parameter.shape[0] if parameter.dim() else 1, parameter.numel()))
    return tuple(found)


def _experts(module: nn.Module) -> int | None:
    """How many experts the module holds the weights of; None for other modules."""
    count = getattr(module, "num_experts", None)
    stacked = [p for p in module.parameters(recurse=False) if p.dim() == 3 and p.shape[0] == count]
    return count if stacked else None


def _idle(module: Any, config: Any) -> int:
    """Numbers in the experts that a token does not choose."""
    numbers = sum(p.numel() for p in module.parameters(recurse=False))
    return numbers - numbers * _chosen(module, config) // module.num_experts


def _chosen(module: Any, config: Any) -> int:
    chosen = getattr(config, "num_experts_per_tok", None)
    if not isinstance(chosen, int) or not 0 < chosen <= module.num_experts:
        fail("--model", f"num_experts_per_tok of 1..{module.num_experts} in the config", chosen)
    return chosen


def _layer(layer: nn.Module, seam: Seam, config: Any, seen: set[int], hybrids: list[int]) -> Layer:
    shapes = _shapes(layer, seen)
    modules = dict(_met(layer, len(hybrids)))
    if any("_adapter_list." in name for name, _ in layer.named_modules()):
        hybrids.append(len(hybrids))
    mixers = [x for x in modules.values() if replaced_by(x, seam) is not None]
    found = [(x, operator_of(x, seam)) for x in mixers]  # a short convolution alone has none
    linear = tuple(_linear_mixer(x, case) for x, case in found if case is not None)
    softmax = tuple(_softmax_mixer(x, config) for x in mixers if _is_softmax(x, seam))
    dense = experts = 0
    for module in modules.values():
        numbers = sum(p.numel() for p in module.parameters(recurse=False))
        if _experts(module) is None:
            dense += numbers
        else:
            experts += numbers - _idle(module, config)
    kept = sum(_kept(module, config, linear, softmax) for module in modules.values())
    kept += 2 * _HALF * config.hidden_size  # what the two residual sums of a layer leave
    return Layer(shapes, dense, experts, kept, linear, softmax)


def _met(layer: nn.Module, hybrid: int) -> Iterator[tuple[str, nn.Module]]:
    """Modules of a layer that its tokens pass. A shared block of Zamba2 has an adapter for each layer that it is in."""
    for name, module in layer.named_modules():
        adapter = re.search(r"_adapter_list\.(\d+)", name)
        if adapter is None or int(adapter[1]) == hybrid:
            yield name, module


def _is_softmax(module: nn.Module, seam: Seam) -> bool:
    return class_of(module).__name__ == seam.prefix + "Attention"


def operator_of(module: nn.Module, seam: Seam) -> str | None:
    """The operator of a layer, by its name in `flexsp bench op`."""
    names = replaced_by(module, seam)
    return None if names is None or callable(names) else next((_OPERATORS[x] for x in names if x in _OPERATORS), None)


def _linear_mixer(module: Any, case: str) -> LinearMixer:
    channels, taps = module.conv1d.weight.shape[0], module.conv1d.weight.shape[-1]
    if case == "gated_delta_rule":
        heads, K, V = module.num_v_heads, module.head_k_dim, module.head_v_dim
        return LinearMixer(case, heads, K, V, channels, taps)
    if case == "kda":
        return LinearMixer(case, module.num_heads, module.head_dim, module.head_dim, channels, taps)
    return LinearMixer(case, module.num_heads, module.ssm_state_size, module.head_dim, channels, taps)


def _softmax_mixer(module: Any, config: Any) -> SoftmaxMixer:
    heads = config.num_attention_heads
    K = getattr(module, "qk_head_dim", None) or module.head_dim
    V = getattr(module, "v_head_dim", None) or K
    return SoftmaxMixer(heads, heads // module.num_key_value_groups, K, V, getattr(module, "sliding_window", None))


def _kept(
    module: Any, config: Any, linear: tuple[LinearMixer, ...], softmax: tuple[SoftmaxMixer, ...]
) -> int:  # fmt: skip
    """Bytes a token that a module's backward pass needs, in bfloat16.

    A linear layer's output is kept, and once more what comes of it (an activation, a product with a gate, a rotated
    head). Experts likewise, and the tokens that they are handed. A convolution keeps what it is handed and what comes
    out. A norm keeps its input, and in float32 a copy and the normalised numbers; one over heads has them all.
    """
    if isinstance(module, nn.Linear):
        return 2 * _HALF * module.out_features
    if isinstance(module, nn.Conv1d):
        return 2 * _HALF * module.out_channels
    if _experts(module) is not None:
        outputs = (3 if module.has_gate else 2) * module.intermediate_dim + 2 * module.hidden_dim
        return _HALF * _chosen(module, config) * outputs
    if "Norm" in type(module).__name__ and hasattr(module, "weight"):
        width = module.weight.numel()
        mixers: list[LinearMixer | SoftmaxMixer] = [*linear, *softmax]
        over_heads = [x.heads * width for x in mixers if width in (x.key_size, x.value_size)]
        return (2 * 4 + _HALF) * (max(over_heads) if over_heads and width < config.hidden_size else width)
    return 0
