"""Peak memory of one GPU, part by part: what FSDP2 keeps and gathers, and activations of a shard."""

from __future__ import annotations

import math
from collections.abc import Iterable

from flexsp.integrations.transformers.loss import _LOGITS
from flexsp.nn.attention.over_ranks import choose_exchange
from flexsp.planner.measured import op_bytes
from flexsp.planner.model import Layer, ModelSizes, SoftmaxMixer
from flexsp.planner.setup import DTYPES, Kind, Part, Setup, Split

__all__ = ["USABLE", "available", "key_heads_of_rank", "memory_parts", "numbers_of_rank", "softmax_bytes"]

_HALF = 2  # bytes of a bfloat16 number
USABLE = 0.93
"""Share of a GPU's memory that tensors can fill; the rest is what the allocator cannot use in large pieces. Assumed."""
RESERVED = 2 * 2**30
"""Bytes of the CUDA context, of NCCL's and cuBLAS's buffers, and of the symmetric heap (256 MiB). Assumed."""
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
    queries, group = mixer.heads // ranks, mixer.heads // mixer.key_heads
    if queries % group == 0:
        return queries // group
    return 1 if group % queries == 0 else queries


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


def _layer_bytes(layer: Layer, tokens: int, split: Split) -> tuple[float, float]:
    """(kept for the backward pass, most of it at work at a time) of a layer."""
    shard = split.shard(tokens)
    linear = [op_bytes(x.case, shard, x.heads, x.key_size, x.value_size) for x in layer.linear]
    softmax = [softmax_bytes(x, tokens, split) for x in layer.softmax]
    own = float(layer.kept * shard)
    return own + sum(a for a, _ in (*linear, *softmax)), own + sum(b for _, b in (*linear, *softmax))


def _gathered(model: ModelSizes) -> float:
    """Bytes that FSDP2 has of whole parameters: of the parts outside of layers the parameters and their gradients, of
    the largest layer and the next one the parameters, of one layer the gradients, in bfloat16 and, to be summed, in
    float32."""
    outside = sum(numbers for _, numbers in model.shapes)
    largest = max((layer.parameters for layer in model.layers), default=0)
    return float(2 * _HALF * outside + (2 * _HALF + _HALF + 4) * largest)


def memory_parts(model: ModelSizes, setup: Setup, split: Split) -> list[Part]:
    """Peak bytes of one GPU, in the order in which they are explained."""
    numbers = numbers_of_rank(model.all_shapes, setup.gpus)
    kept, state = DTYPES[setup.parameters], DTYPES[setup.optimizer]
    shard = split.shard(setup.tokens)
    each = [_layer_bytes(layer, setup.tokens, split) for layer in model.layers]
    hidden = float(_HALF * model.hidden * shard)
    logits = LOGIT * min(shard * model.vocabulary, max(_LOGITS, model.vocabulary))
    where = f"{setup.gpus} GPUs"
    parts = [
        Part("parameters", numbers * kept, Kind.COUNTED, f"{setup.parameters}, rows cut over {where}"),
        Part("gradients", numbers * kept, Kind.COUNTED, f"{setup.parameters}, rows cut over {where}"),
        Part("optimizer", 2 * numbers * state, Kind.COUNTED, f"AdamW's two states in {setup.optimizer}"),
        Part("gathered parameters", _gathered(model), Kind.PREDICTED, "bfloat16, by layer, two layers at a time"),
    ]
    layers = len(model.layers)
    if setup.checkpointing:
        text = f"{layers + 1} hidden states of {shard} tokens"
        parts.append(Part("hidden states", (layers + 1) * hidden, Kind.PREDICTED, text))
        most, text = max((b for _, b in each), default=0.0), "the largest layer at work, its operator scaled from measured"
    else:
        text = f"what {layers} layers keep of {shard} tokens, operators scaled from measured"
        parts.append(Part("kept activations", hidden + sum(a for a, _ in each), Kind.PREDICTED, text))
        most, text = max((b - a for a, b in each), default=0.0), "what the largest layer needs besides in its backward pass"
    parts.append(Part("a layer at work", most + 2 * hidden, Kind.PREDICTED, text))
    parts.append(Part("logits", logits, Kind.PREDICTED, "one block of the loss"))
    parts.append(Part("reserved", RESERVED, Kind.PREDICTED, "CUDA context, libraries, symmetric heap"))
    return parts
