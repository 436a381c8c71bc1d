"""What is asked of a plan, and how its numbers are labelled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from flexsp.devices import H100, H200, Device
from flexsp.exceptions import check_integer, check_number, fail
from flexsp.planner.measured import MEMORY_GIB

__all__ = ["DTYPES", "GPUS", "Kind", "Part", "Setup", "Split", "parse_tokens"]

GPUS: dict[str, Device] = {"h100": H100, "h200": H200}
DTYPES = {"float32": 4, "bfloat16": 2}
"""Bytes of a number."""


class Kind(str, Enum):
    """Where a number comes from."""

    COUNTED = "counted"
    MEASURED = "measured"
    SCALED = "scaled from measured"
    PREDICTED = "predicted"


@dataclass(frozen=True)
class Part:
    """A part of the memory (bytes) or of the time (milliseconds) of one GPU; `how` is its formula or its source."""

    name: str
    value: float
    kind: Kind
    how: str


@dataclass(frozen=True)
class Setup:
    """What is to be trained on.

    Attributes:
        tokens: of one sequence.
        gpus, gpus_per_host: GPUs in all, and of a host.
        gpu: a key of `GPUS`.
        memory_gib: of a GPU.
        sequences: of a step; None: one for each of the dp ranks.
        parameters, optimizer: dtype that a rank keeps parameters and gradients in, and AdamW's two states.
        checkpointing: layers are computed again in the backward pass.
        network_gb_s: between hosts, GB/s of each GPU.

    Raises:
        ValueError: a value that is none of these.
    """

    tokens: int
    gpus: int
    gpus_per_host: int = 8
    gpu: str = "h200"
    memory_gib: float | None = None
    sequences: int | None = None
    parameters: str = "float32"
    optimizer: str = "float32"
    checkpointing: bool = True
    network_gb_s: float = 50.0

    def __post_init__(self) -> None:
        check_integer("--tokens", self.tokens, least=1)
        check_integer("--gpus", self.gpus, least=1)
        check_integer("--gpus-per-host", self.gpus_per_host, least=1)
        if self.gpus > self.gpus_per_host and self.gpus % self.gpus_per_host:
            fail("--gpus", f"at most {self.gpus_per_host}, or whole hosts of {self.gpus_per_host}", self.gpus)
        if self.sequences is not None:
            check_integer("--sequences", self.sequences, least=1)
        for name, value, known in (
            ("--gpu", self.gpu, GPUS), ("--parameters", self.parameters, DTYPES),
            ("--optimizer", self.optimizer, DTYPES),
        ):  # fmt: skip
            if value not in known:
                fail(name, f"one of {', '.join(known)}", repr(value))
        if self.memory_gib is not None:
            check_number("--gpu-memory", self.memory_gib, above=0)
        check_number("--network", self.network_gb_s, above=0)

    @property
    def device(self) -> Device:
        return GPUS[self.gpu]

    @property
    def memory(self) -> float:
        """Bytes of a GPU."""
        return (MEMORY_GIB[self.gpu][0] if self.memory_gib is None else self.memory_gib) * 2**30

    @property
    def host(self) -> int:
        """GPUs of a host that are used."""
        return min(self.gpus, self.gpus_per_host)

    @property
    def hosts(self) -> int:
        return self.gpus // self.host


@dataclass(frozen=True)
class Split:
    """`dp` groups of `sp` ranks, each of which has one sequence at a time."""

    dp: int
    sp: int

    def shard(self, tokens: int) -> int:
        """Tokens of the rank that has most."""
        return -(-tokens // self.sp)

    def hosts(self, host: int) -> int:
        """Hosts that a group of sp ranks lies on at most, ranks being numbered host by host."""
        last_start = host - math.gcd(self.sp, host)  # groups begin at multiples of this divisor
        return -(-(last_start + self.sp) // host)


def parse_tokens(text: str) -> int:
    """128k and 1M are 128 * 1024 and 1024 * 1024 tokens.

    Raises:
        ValueError: something else than a positive integer with or without k or M.
    """
    units = {"k": 1024, "m": 1024**2}
    unit = units.get(text[-1:].lower(), 1)
    digits = text[:-1] if unit > 1 else text
    if not (digits.isascii() and digits.isdigit() and int(digits) > 0):
        fail("--tokens", "a number of tokens such as 262144, 128k or 1M", repr(text))
    return int(digits) * unit
