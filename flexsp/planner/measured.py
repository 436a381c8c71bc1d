"""The measured numbers that a plan starts from, each with its file of benchmarks/results and that file's commit.

An installed package has no result files, so they stand here once more. tests/planner/test_training_plan.py compares
them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from flexsp.scan.cost import Cost, Measurement, fit

__all__ = [
    "EXCHANGES", "HEADS", "INITIALISED", "KEY_SIZE", "MEMORY_GIB", "PEAKS", "SEGMENTS", "SOURCES", "TIMES",
    "VALUE_SIZE", "OpPeak", "OpTime", "fitted", "initialised_ratio", "is_measured", "op_bytes", "op_times", "work",
]  # fmt: skip

HEADS, KEY_SIZE, VALUE_SIZE = 32, 128, 128
"""Sizes of all operators below: batch 1, bfloat16."""

# Result file -> its commit.
SOURCES = {
    "delta_short_op_h200_20261125.json": "5a1db10",
    "delta_peers_op_h200_20261125.json": "5a1db10",
    "delta_long_op_h200_20261125.json": "5a1db10",
    "delta_initialised_op_h200_20261125.json": "5a1db10",
    "horizon_op_h200_20261123.json": "ad7deeb",
    "ranks_after_h100x2_20261124.json": "2198333",
    "scale_h200x2_20261126.json": "17ae2e9",
    "scale_h200x4_20261126.json": "17ae2e9",
}


@dataclass(frozen=True)
class OpTime:
    """Milliseconds of an operator on one H200, the host running ahead: of a forward pass, and of both passes."""

    case: str
    tokens: int
    forward: float
    both: float
    source: str


@dataclass(frozen=True)
class OpPeak:
    """Peak memory of an operator in GiB, inputs and outputs with it: of a forward pass, and of both passes."""

    case: str
    tokens: int
    forward: float
    both: float
    source: str


_SHORT, _PEERS, _LONG, _INITIALISED, _HORIZON, _H100, _TWO, _FOUR = SOURCES

TIMES = (
    OpTime("gated_delta_rule", 4096, 0.15014399588108063, 0.5007520020008087, _SHORT),
    OpTime("gated_delta_rule", 65536, 1.257311999797821, 4.758752107620239, _PEERS),
    OpTime("gated_delta_rule", 262144, 4.865087985992432, 19.253023147583008, _LONG),
    OpTime("kda", 4096, 0.19352000206708908, 0.6058400273323059, _SHORT),
    OpTime("kda", 65536, 2.3339520692825317, 7.964192152023315, _PEERS),
    OpTime("kda", 262144, 9.154656410217285, 31.513856887817383, _LONG),
    OpTime("mamba2", 8192, 0.3104479908943176, 1.166208028793335, _FOUR),
    OpTime("mamba2", 32768, 1.1085119843482971, 4.266847848892212, _FOUR),
    OpTime("mamba2", 65536, 2.183471918106079, 8.345664024353027, _FOUR),
)
"""Gates as `flexsp bench` takes them where nothing is said."""

INITIALISED = (
    OpTime("gated_delta_rule", 65536, 1.4273920059204102, 5.2545599937438965, _INITIALISED),
    OpTime("kda", 65536, 4.083631992340088, 12.290016174316406, _INITIALISED),
)
"""Gates as layers begin."""

PEAKS = (
    OpPeak("gated_delta_rule", 65536, 3.0627455711364746, 7.129151821136475, _PEERS),
    OpPeak("kda", 65536, 5.539926052093506, 10.606332302093506, _PEERS),
    OpPeak("simple_gla", 65536, 2.5332040786743164, 4.105470657348633, _HORIZON),
)

MEMORY_GIB = {"h100": (79.2, _H100), "h200": (139.8, _TWO)}
"""Memory of a GPU that torch reports, and where."""

EXCHANGES = (
    (Measurement("chain", 2097152, 2, 1, 20.816), _TWO),
    (Measurement("chain", 2097152, 2, 8, 29.072), _TWO),
    (Measurement("chain", 8388608, 2, 1, 51.728), _TWO),
    (Measurement("chain", 8388608, 2, 8, 65.360), _TWO),
    (Measurement("chain", 2097152, 4, 1, 30.960), _FOUR),
    (Measurement("chain", 2097152, 4, 8, 41.488), _FOUR),
    (Measurement("chain", 8388608, 4, 1, 62.704), _FOUR),
    (Measurement("chain", 8388608, 4, 8, 88.368), _FOUR),
    (Measurement("serial", 2097152, 2, 1, 87.216), _TWO),
    (Measurement("serial", 2097152, 2, 8, 96.336), _TWO),
    (Measurement("serial", 8388608, 2, 1, 148.320), _TWO),
    (Measurement("serial", 8388608, 2, 8, 200.064), _TWO),
    (Measurement("serial", 2097152, 4, 1, 210.512), _FOUR),
    (Measurement("serial", 2097152, 4, 8, 219.360), _FOUR),
    (Measurement("serial", 8388608, 4, 1, 379.504), _FOUR),
    (Measurement("serial", 8388608, 4, 8, 429.200), _FOUR),
    (Measurement("all_gather", 2097152, 2, 1, 113.472), _TWO),
    (Measurement("all_gather", 2097152, 2, 8, 128.512), _TWO),
    (Measurement("all_gather", 8388608, 2, 1, 191.216), _TWO),
    (Measurement("all_gather", 8388608, 2, 8, 236.112), _TWO),
    (Measurement("all_gather", 2097152, 4, 1, 185.184), _FOUR),
    (Measurement("all_gather", 2097152, 4, 8, 194.720), _FOUR),
    (Measurement("all_gather", 8388608, 4, 1, 318.192), _FOUR),
    (Measurement("all_gather", 8388608, 4, 8, 365.120), _FOUR),
)
"""Microseconds of exchanges of states on 2 and 4 H200 of one host, to a nanosecond."""

SEGMENTS = 8
"""That a rank folds in an exchange, of the numbers measured the one that takes longer."""


@functools.lru_cache(maxsize=1)
def fitted() -> dict[str, Cost]:
    """Parameters of scan/cost.py for each schedule, from `EXCHANGES`."""
    return {name: found.cost for name, found in fit([m for m, _ in EXCHANGES]).items()}


def work(tokens: int, heads: int, key_size: int, value_size: int) -> float:
    """How many tokens of the measured sizes take as long: by heads, and by the larger of what heads read and compute.

    Bytes of q, k, v and o go with K + V, products with K V.
    """
    bytes_ratio = (key_size + value_size) / (KEY_SIZE + VALUE_SIZE)
    products_ratio = key_size * value_size / (KEY_SIZE * VALUE_SIZE)
    return tokens * heads / HEADS * max(bytes_ratio, products_ratio)


def op_times(case: str, amount: float) -> tuple[float, float]:
    """Milliseconds (forward, both passes) of an operator for the `work` of a number of tokens.

    Between two measured lengths on the straight line between them; beyond the longest in proportion to it; below the
    shortest as long as that.
    """
    rows = sorted((row for row in TIMES if row.case == case), key=lambda row: row.tokens)
    if not rows:
        raise ValueError(f"case: expected one of {', '.join(sorted({row.case for row in TIMES}))}, got {case!r}")
    first, last = rows[0], rows[-1]
    if amount <= first.tokens:
        return first.forward, first.both
    if amount >= last.tokens:
        return last.forward * amount / last.tokens, last.both * amount / last.tokens
    low, high = next((a, b) for a, b in zip(rows, rows[1:], strict=False) if amount <= b.tokens)
    part = (amount - low.tokens) / (high.tokens - low.tokens)
    return low.forward + part * (high.forward - low.forward), low.both + part * (high.both - low.both)


def op_bytes(case: str, tokens: int, heads: int, key_size: int, value_size: int) -> tuple[float, float]:
    """Peak bytes (forward, both passes) of an operator, in proportion to tokens, heads and K + V.

    Mamba-2's was not measured: its engine's is taken, of simple GLA.
    """
    name = "simple_gla" if case == "mamba2" else case
    row = next(row for row in PEAKS if row.case == name)
    share = tokens / row.tokens * heads / HEADS * (key_size + value_size) / (KEY_SIZE + VALUE_SIZE)
    return row.forward * share * 2**30, row.both * share * 2**30


def is_measured(case: str, tokens: int, heads: int, key_size: int, value_size: int) -> bool:
    """Whether these sizes are those of a row of `TIMES`."""
    lengths = {row.tokens for row in TIMES if row.case == case}
    return tokens in lengths and (heads, key_size, value_size) == (HEADS, KEY_SIZE, VALUE_SIZE)


def initialised_ratio(case: str) -> float | None:
    """How much longer both passes take with gates as layers begin; None where that was not measured."""
    for row in INITIALISED:
        if row.case == case:
            return row.both / op_times(case, row.tokens)[1]
    return None
