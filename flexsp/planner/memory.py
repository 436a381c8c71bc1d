"""Peak memory of one GPU, part by part: what FSDP2 keeps and gathers, and activations of a shard."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flexsp.integrations.transformers.loss import _LOGITS
from flexsp.nn.attention.over_ranks import _repeats, choose_exchange
from flexsp.planner.measured import op_bytes
from flexsp.planner.model_sizes import Layer, ModelSizes, SoftmaxMixer
from flexsp.planner.setup import DTYPES, Kind, Part, Setup, Split

__all__ = [
    "USABLE", "available", "exchange_of", "key_heads_of_rank", "memory_parts", "numbers_of_rank", "softmax_bytes",
]  # fmt: skip

_HALF = 2  # bytes of a bfloat16 number
USABLE = 0.93
"""Share of a GPU's memory that tensors can fill; the rest is what the allocator cannot use in large pieces. Assumed."""
RESERVED = 2 * 2**30
"""Bytes of the CUDA context, of NCCL's and cuBLAS's buffers, and of the symmetric heap. Assumed."""
LOGIT = 12
"""Bytes of a logit in a block of the loss: it and its gradient, in bfloat16 and in float32."""


def available(setup: Setup) -> float:
    """Bytes that a plan may fill."""
    return setup.memory * USABLE


def numbers_of_rank(shapes: Iterable[tuple[int, int]], ranks: int) -> int:
    """Numbers that the first rank holds where FSDP2 cuts the rows of every parameter over ``ranks``; none has more.

    Args:
        shapes: (rows, numbers) of each parameter.
    """
    return sum(math.ceil(rows / ranks) * (numbers // rows) for rows, numbers in shapes)


def key_heads_of_rank(mixer: SoftmaxMixer, ranks: int) -> int:
    """Key heads of which a rank gets all tokens, where ranks exchange heads (docs/hybrid-models.md)."""
    return mixer.key_heads * _repeats(mixer.heads, mixer.key_heads, ranks) // ranks


def exchange_of(mixer: SoftmaxMixer, tokens: int, split: Split) -> str:
    """"none" on one rank, else what `scaled_dot_product_attention` takes: "heads" or "keys"."""
    if split.sp == 1:
        return "none"
    return choose_exchange(mixer.heads, mixer.window, [split.shard(tokens)] * split.sp)


def softmax_bytes(mixer: SoftmaxMixer, tokens: int, split: Split) -> tuple[float, float]:
    """Bytes of q, k, v and o of a softmax layer: (kept for the backward pass, at work in it with their gradients)."""
    wide = mixer.key_size + mixer.value_size
    own = float((mixer.heads + mixer.key_heads) * wide * split.shard(tokens) * _HALF)
    exchange = exchange_of(mixer, tokens, split)
    if exchange == "none":
        return own, 2 * own
    if exchange == "keys":
        return own, 2 * (own + mixer.key_heads * wide * tokens * _HALF)
    gathered = (mixer.heads // split.sp + key_heads_of_rank(mixer, split.sp)) * wide * tokens * _HALF
    return own + gathered, 2 * (own + gathered)


@dataclass(frozen=True)
class _LayerBytes:
    """Bytes of a layer on one rank: its own activations, and (kept for the backward pass, at work in it) of its linear
    and of its softmax operators."""

    own: float
    linear: tuple[float, float]
    softmax: tuple[float, float]

    @property
    def most(self) -> float:
        return self.own + self.linear[1] + self.softmax[1]

    @property
    def backward(self) -> float:
        """What its operators need besides what they keep."""
        return self.linear[1] - self.linear[0] + self.softmax[1] - self.softmax[0]


def _layer_bytes(layer: Layer, tokens: int, split: Split) -> _LayerBytes:
    shard = split.shard(tokens)
    linear = [op_bytes(x.case, shard, x.heads, x.key_size, x.value_size) for x in layer.linear]
    softmax = [softmax_bytes(x, tokens, split) for x in layer.softmax]
    return _LayerBytes(float(layer.kept * shard), _total(linear), _total(softmax))


def _total(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(a for a, _ in pairs), sum(b for _, b in pairs)


def _gathered(model: ModelSizes) -> float:
    """Bytes that FSDP2 has of whole parameters: of the parts outside of layers the parameters and their gradients, of
    the largest layer and the next one the parameters, of one layer the gradients, in bfloat16 and, to be summed, in
    float32."""
    outside = sum(numbers for _, numbers in model.shapes)
    largest = max((layer.parameters for layer in model.layers), default=0)
    return float(2 * _HALF * outside + (2 * _HALF + _HALF + 4) * largest)


def _linear_kind(model: ModelSizes) -> Kind:
    """Mamba-2's memory was not measured."""
    cases = {x.case for layer in model.layers for x in layer.linear}
    return Kind.PREDICTED if "mamba2" in cases else Kind.SCALED


def memory_parts(model: ModelSizes, setup: Setup, split: Split) -> list[Part]:
    """Peak bytes of one GPU, in the order in which they are explained."""
    numbers = numbers_of_rank(model.all_shapes, setup.gpus)
    kept, state = DTYPES[setup.parameters], DTYPES[setup.optimizer]
    logits = LOGIT * min(split.shard(setup.tokens) * model.vocabulary, max(_LOGITS, model.vocabulary))
    where = f"{setup.gpus} GPU{'s' * (setup.gpus > 1)}"
    return [
        Part("parameters", numbers * kept, Kind.COUNTED, f"{setup.parameters}, rows cut over {where}"),
        Part("gradients", numbers * kept, Kind.COUNTED, f"{setup.parameters}, rows cut over {where}"),
        Part("optimizer states", 2 * numbers * state, Kind.COUNTED, f"AdamW's two in {setup.optimizer}"),
        Part("gathered parameters", _gathered(model), Kind.PREDICTED, "and their gradients, two layers at a time"),
        *(_checkpointed(model, setup, split) if setup.checkpointing else _all_kept(model, setup, split)),
        Part("logits", logits, Kind.PREDICTED, "one block of the loss"),
        Part("reserved", RESERVED, Kind.PREDICTED, "CUDA context, libraries, symmetric heap"),
    ]


def _checkpointed(model: ModelSizes, setup: Setup, split: Split) -> list[Part]:
    shard, layers = split.shard(setup.tokens), len(model.layers)
    hidden = float(_HALF * model.hidden * shard)
    each = [_layer_bytes(layer, setup.tokens, split) for layer in model.layers]
    largest = max(each, key=lambda x: x.most)
    how = "by tokens, heads and head sizes"
    return [
        Part("hidden states", (layers + 1) * hidden, Kind.PREDICTED, f"{layers + 1} of {shard:,} tokens"),
        Part("a layer's activations", largest.own + 2 * hidden, Kind.PREDICTED, "of the largest layer, computed again"),
        Part("its linear operators", largest.linear[1], _linear_kind(model), how),
        Part("its softmax attention", largest.softmax[1], Kind.PREDICTED, "q, k, v, o and their gradients"),
    ]


def _all_kept(model: ModelSizes, setup: Setup, split: Split) -> list[Part]:
    shard, layers = split.shard(setup.tokens), len(model.layers)
    hidden = float(_HALF * model.hidden * shard)
    each = [_layer_bytes(layer, setup.tokens, split) for layer in model.layers]
    own = hidden + sum(x.own + x.softmax[0] for x in each)
    linear, most = sum(x.linear[0] for x in each), max(x.backward for x in each)
    how = "by tokens, heads and head sizes"
    return [
        Part("kept activations", own, Kind.PREDICTED, f"of {layers} layers and {shard:,} tokens"),
        Part("kept by linear operators", linear, _linear_kind(model), how),
        Part("a layer's backward pass", most + 2 * hidden, Kind.PREDICTED, "gradients of the largest layer"),
    ]
