"""The splits (dp, sp) of some GPUs, each with its memory and its time, the best first; what would fit if none does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from flexsp.planner.memory import available, memory_parts
from flexsp.planner.model_sizes import ModelSizes
from flexsp.planner.setup import Part, Setup, Split
from flexsp.planner.step_time import exposed, time_parts

__all__ = ["Plan", "advice", "plan", "splits"]

_MOST_GPUS = 1 << 15
_TIE = 0.01


@dataclass(frozen=True)
class Plan:
    """One split.

    Attributes:
        sequences: of a step.
        memory, time: parts, in bytes and in milliseconds.
        fits: whether the memory suffices.
    """

    split: Split
    sequences: int
    shard: int
    memory: tuple[Part, ...]
    time: tuple[Part, ...]
    fits: bool
    tokens_per_s: float

    @property
    def bytes(self) -> float:
        return sum(part.value for part in self.memory)

    @property
    def step_ms(self) -> float:
        return exposed(list(self.time))


def splits(gpus: int) -> list[Split]:
    """Every (dp, sp) with dp * sp = gpus, sp rising."""
    return [Split(gpus // sp, sp) for sp in range(1, gpus + 1) if gpus % sp == 0]


def possible(setup: Setup) -> list[Split]:
    """Those of `splits` that can be run: every rank has a token, and dp divides the sequences of a step."""
    found = [x for x in splits(setup.gpus) if x.sp <= setup.tokens]
    return [x for x in found if setup.sequences is None or setup.sequences % x.dp == 0]


def plan(model: ModelSizes, setup: Setup) -> list[Plan]:
    """All splits that can be run: those that fit by tokens a second, then the others by memory.

    Of rates within 1 %, which the predicted parts are not exact to, the one with less memory comes first.

    Raises:
        ValueError: there is none, since more sequences are needed.
    """
    found = possible(setup)
    if not found:
        raise ValueError(
            f"--sequences: expected a number that some dp of {setup.gpus} GPUs divides, with at least one token a "
            f"rank, got {setup.sequences} sequences of {setup.tokens} tokens"
        )
    plans = [_plan(model, setup, split) for split in found]
    fitting = sorted((x for x in plans if x.fits), key=lambda x: (-x.tokens_per_s, x.split.sp))
    best: list[Plan] = []
    while fitting:
        tied = [x for x in fitting if x.tokens_per_s >= (1 - _TIE) * fitting[0].tokens_per_s]
        best += sorted(tied, key=lambda x: (x.bytes, x.split.sp))
        fitting = fitting[len(tied) :]
    return best + sorted((x for x in plans if not x.fits), key=lambda x: (x.bytes, x.split.sp))


def _plan(model: ModelSizes, setup: Setup, split: Split) -> Plan:
    memory, time = memory_parts(model, setup, split), time_parts(model, setup, split)
    sequences = split.dp if setup.sequences is None else setup.sequences
    fits = sum(part.value for part in memory) <= available(setup)
    rate = sequences * setup.tokens / exposed(time) * 1e3
    return Plan(split, sequences, split.shard(setup.tokens), tuple(memory), tuple(time), fits, rate)


def _fits(model: ModelSizes, setup: Setup) -> bool:
    room = available(setup)
    return any(sum(x.value for x in memory_parts(model, setup, split)) <= room for split in possible(setup))


def advice(model: ModelSizes, setup: Setup) -> list[str]:
    """What would fit in place of a setup that does not; one change at a time."""
    found = []
    if not setup.checkpointing and _fits(model, replace(setup, checkpointing=True)):
        found.append("activation checkpointing (leave --no-checkpointing out)")
    found += _in_half(model, setup)
    tokens = _largest(lambda n: _fits(model, replace(setup, tokens=n)), setup.tokens)
    if tokens:
        found.append(f"sequences of up to {tokens:,} tokens on these GPUs (--tokens {tokens})")
    gpus = _more_gpus(model, setup)
    if gpus is not None:
        found.append(f"{gpus} GPUs (--gpus {gpus})")
    if not found:
        found.append("no shorter sequence and no larger number of GPUs: GPUs with more memory")
    return found


def _in_half(model: ModelSizes, setup: Setup) -> list[str]:
    """AdamW's states in bfloat16, if that is enough, else with parameters and gradients."""
    states = replace(setup, optimizer="bfloat16")
    if states != setup and _fits(model, states):
        return ["AdamW's states in bfloat16 (--optimizer bfloat16)"]
    both = replace(states, parameters="bfloat16")
    if both not in (setup, states) and _fits(model, both):
        return ["parameters, gradients and AdamW's states in bfloat16 (--parameters bfloat16 --optimizer bfloat16)"]
    return []


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number of tokens below ``most`` that fits, to 1024 tokens where it is that large; 0: none."""
    low, high = 0, most
    while high - low > max(1, min(1024, low // 2)):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low // 1024 * 1024 if low >= 1024 else low


def _more_gpus(model: ModelSizes, setup: Setup) -> int | None:
    """The least number of GPUs that fits, of more in a host and of one, two, four, ... hosts."""
    host = setup.gpus_per_host
    hosts = (host << doublings for doublings in range(_MOST_GPUS.bit_length()))
    numbers = [*range(setup.gpus + 1, host), *(x for x in hosts if setup.gpus < x <= _MOST_GPUS)]
    return next((x for x in numbers if _fits(model, replace(setup, gpus=x))), None)
