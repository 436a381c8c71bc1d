"""Time of a training step on one GPU, part by part, in milliseconds."""

from __future__ import annotations

from flexsp.devices import H200
from flexsp.planner.measured import SEGMENTS, fitted, is_measured, op_times, work
from flexsp.planner.memory import exchange_of, key_heads_of_rank, numbers_of_rank
from flexsp.planner.model_sizes import Layer, LinearMixer, ModelSizes, SoftmaxMixer
from flexsp.planner.setup import DTYPES, Kind, Part, Setup, Split
from flexsp.scan.cost import NETWORK_LATENCY_US

__all__ = ["attention_flops", "exposed", "operator_times", "step_flops", "time_parts"]

_HALF = 2  # bytes of a bfloat16 number
# Rates and moves are fitted to the kernels of training steps that were measured on one H200: a Qwen3-Next of 1.0
# billion parameters with 32,768 and 131,072 tokens (benchmarks/results/model_h200_20261125.json).
PRODUCTS = 0.98
"""Rate of linear layers over that of one large product (`flexsp.devices`)."""
EXPERTS = 0.85
"""The same of products of experts."""
ATTENTION = 0.58
"""The same of softmax attention, by cuDNN's kernels, which torch chooses on Hopper GPUs."""
BACKWARD = 2.5
"""Products of attention's backward pass over those of its forward pass: five in place of two, as it keeps no scores."""
KEPT_MOVES = 9, 18
"""How often a byte that a layer keeps is read or written in a forward and in a backward pass, outside of products: so
often because transformers runs norms, gates, rotations and experts' routing one operation after the other, in part in
float32."""
LOGIT_BYTES = 36
"""Bytes of memory traffic of a logit: made twice and summed in float32, its gradient once."""


def _ms(flops: float, setup: Setup, efficiency: float) -> float:
    return flops / (setup.device.half * efficiency) * 1e-3


def _memory_ms(moved: float, setup: Setup) -> float:
    return moved / setup.device.bandwidth * 1e-3


def _link_gb_s() -> float:
    """GB/s between GPUs of a host that NCCL's collectives reach, from the all-gathers that were measured."""
    return fitted()["all_gather"].link_gb_s


def operator_times(mixer: LinearMixer, tokens: int, setup: Setup) -> tuple[float, float, Kind]:
    """(forward, both passes, where they come from) of a linear operator for a shard of one sequence.

    Only an H200 was measured with these operators; an H100 is taken to be slower by its memory's bandwidth.
    """
    sizes = (mixer.heads, mixer.key_size, mixer.value_size)
    forward, both = op_times(mixer.case, work(tokens, *sizes))
    if setup.device is not H200:
        slower = max(H200.bandwidth / setup.device.bandwidth, H200.half / setup.device.half)
        return forward * slower, both * slower, Kind.PREDICTED
    return forward, both, Kind.MEASURED if is_measured(mixer.case, tokens, *sizes) else Kind.SCALED


def attention_flops(mixer: SoftmaxMixer, tokens: int, split: Split) -> float:
    """Floating-point operations of causal attention's forward pass on the rank that has most."""
    seen = tokens if mixer.window is None else min(mixer.window, tokens)
    shard = split.shard(tokens)
    if exchange_of(mixer, tokens, split) == "keys":  # the last rank's queries see most
        full = max(0, min(shard, tokens - seen + 1))
        pairs = full * seen + _sum(tokens - shard + 1, tokens - full)
        return 2.0 * pairs * mixer.heads * (mixer.key_size + mixer.value_size)
    pairs = _sum(1, seen) + (tokens - seen) * seen
    return 2.0 * pairs * mixer.heads / split.sp * (mixer.key_size + mixer.value_size)


def _sum(first: int, last: int) -> int:
    return (first + last) * (last - first + 1) // 2 if last >= first else 0


def step_flops(model: ModelSizes, tokens: int, checkpointing: bool) -> float:
    """Floating-point operations of one sequence on all GPUs: 6 of a token and a weight that it meets, 8 with
    checkpointing and in the head, and attention's."""
    passes = 8 if checkpointing else 6
    weights = sum(layer.dense + layer.experts for layer in model.layers)
    alone = [attention_flops(x, tokens, Split(1, 1)) for layer in model.layers for x in layer.softmax]
    return (passes * weights + 8.0 * model.head) * tokens + (1 + BACKWARD + checkpointing) * sum(alone)


def _states_us(mixer: LinearMixer, setup: Setup, split: Split) -> float:
    """Microseconds that ranks add to one pass of a linear layer: its state's way and its convolution's."""
    chain, message = fitted()["chain"], fitted()["serial"]
    far = split.hosts(setup.host) - 1
    us = chain.us(mixer.state_bytes, split.sp, SEGMENTS) + far * NETWORK_LATENCY_US
    halo = mixer.channels * (mixer.taps - 1) * _HALF
    us += message.us(halo, 2) if halo else 0.0
    if far:
        us += NETWORK_LATENCY_US + (mixer.state_bytes + halo) / setup.network_gb_s * 1e-3
    return us


def _exchange_ms(mixer: SoftmaxMixer, setup: Setup, split: Split) -> float:
    """Milliseconds of softmax attention's exchanges in all passes of one sequence."""
    kind, wide = exchange_of(mixer, setup.tokens, split), mixer.key_size + mixer.value_size
    if kind == "none":
        return 0.0
    passes = 2 + setup.checkpointing
    if kind == "keys":
        seen = setup.tokens if mixer.window is None else min(setup.tokens, mixer.window + split.shard(setup.tokens))
        numbers = mixer.key_heads * wide * seen
        passes += 1  # keys come once more in the backward pass, and their gradients go back
    else:
        heads = mixer.heads // split.sp + key_heads_of_rank(mixer, split.sp)
        numbers = heads * wide * setup.tokens
    inside = min(split.sp, setup.host)
    near = numbers * _HALF * (inside - 1) / split.sp / _link_gb_s()
    far = numbers * _HALF * (split.sp - inside) / split.sp / setup.network_gb_s
    if split.hosts(setup.host) == 1:
        far = 0.0
    return passes * (near + far) * 1e-6


def _fsdp_ms(model: ModelSizes, setup: Setup) -> float:
    """Milliseconds of FSDP2's gathers (bfloat16, once in each pass) and sums of gradients (float32) of one sequence."""
    moved = model.parameters * (2 * _HALF + 4)
    near = moved * (1 - 1 / setup.host) / _link_gb_s()
    far = moved * (1 - 1 / setup.hosts) / (setup.host * setup.network_gb_s)
    return (near + far) * 1e-6


def _operators(layers: tuple[Layer, ...], setup: Setup, shard: int) -> tuple[float, Kind]:
    total, kinds = 0.0, {Kind.MEASURED}
    for mixer in (x for layer in layers for x in layer.linear):
        forward, both, kind = operator_times(mixer, shard, setup)
        total += both + setup.checkpointing * forward
        kinds.add(kind)
    return total, next(kind for kind in (Kind.PREDICTED, Kind.SCALED, Kind.MEASURED) if kind in kinds)


def time_parts(model: ModelSizes, setup: Setup, split: Split) -> list[Part]:
    """Milliseconds of a step on the slowest GPU. They add up, but for "FSDP, overlapped"; see `exposed`.

    A dp rank has its sequences one after the other.
    """
    shard, again = split.shard(setup.tokens), int(setup.checkpointing)
    count = 1 if setup.sequences is None else setup.sequences // split.dp
    operators, kind = _operators(model.layers, setup, shard)
    dense = sum(x.dense for x in model.layers) * (6 + 2 * again) + 8 * model.head
    experts = sum(x.experts for x in model.layers) * (6 + 2 * again)
    linear = [x for layer in model.layers for x in layer.linear]
    softmax = [x for layer in model.layers for x in layer.softmax]
    attention = sum(
        attention_flops(x, setup.tokens, split)
        * (1 + BACKWARD + again + (exchange_of(x, setup.tokens, split) == "keys"))
        for x in softmax
    )
    moved = sum(x.kept for x in model.layers) * (KEPT_MOVES[0] * (1 + again) + KEPT_MOVES[1])
    moved += LOGIT_BYTES * model.vocabulary
    states = sum(_states_us(x, setup, split) for x in linear) * (2 + again) * 1e-3 if split.sp > 1 else 0.0
    near = split.sp <= 4 and split.hosts(setup.host) == 1 and setup.device is H200
    exchanges = sum(_exchange_ms(x, setup, split) for x in softmax)
    rates = f"of {setup.device.half * 1e-6:g} TFLOP/s"
    parts = [
        Part("linear operators", operators, kind, "measured operators on an H200, by tokens, heads and head sizes"),
        Part("matrix products", _ms(dense * shard, setup, PRODUCTS), Kind.PREDICTED, f"{PRODUCTS:.0%} {rates}"),
        Part("experts", _ms(experts * shard, setup, EXPERTS), Kind.PREDICTED, f"{EXPERTS:.0%} {rates}"),
        Part("softmax attention", _ms(attention, setup, ATTENTION), Kind.PREDICTED, f"{ATTENTION:.0%} {rates}"),
        Part("elementwise and loss", _memory_ms(moved * shard, setup), Kind.PREDICTED,
             f"bytes over {setup.device.bandwidth * 1e-6:g} TB/s"),
        Part("states between ranks", states, Kind.SCALED if near else Kind.PREDICTED,
             "cost model fitted to 2 and 4 H200 of one host"),
        Part("heads or keys between ranks", exchanges, Kind.PREDICTED,
             f"bytes over {_link_gb_s():.0f} GB/s, between hosts {setup.network_gb_s:g} GB/s"),
    ]  # fmt: skip
    parts = [Part(x.name, x.value * count, x.kind, x.how) for x in parts]
    return [*parts, *_parameters(model, setup, count, sum(x.value for x in parts[:5]))]


def _parameters(model: ModelSizes, setup: Setup, count: int, busy: float) -> list[Part]:
    """What FSDP2 and the optimizer add; ``busy`` is the milliseconds of what gathers and sums can hide behind."""
    fsdp = _fsdp_ms(model, setup) * count
    hidden = min(fsdp, busy)
    numbers = numbers_of_rank(model.all_shapes, setup.gpus)
    moved = numbers * (3 * DTYPES[setup.parameters] + 4 * DTYPES[setup.optimizer])
    text = f"bytes over {_link_gb_s():.0f} GB/s, between hosts {setup.network_gb_s:g} GB/s"
    memory = f"bytes over {setup.device.bandwidth * 1e-6:g} TB/s"
    return [
        Part("FSDP, exposed", fsdp - hidden, Kind.PREDICTED, f"{text}, less what computing hides"),
        Part("FSDP, overlapped", hidden, Kind.PREDICTED, "runs beside the computing, not in the sum"),
        Part("optimizer", _memory_ms(moved, setup), Kind.PREDICTED, memory),
    ]


def exposed(parts: list[Part]) -> float:
    """Milliseconds of a step: the sum of the parts that do not run beside others."""
    return sum(part.value for part in parts if part.name != "FSDP, overlapped")
