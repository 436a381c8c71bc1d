"""Rates of the parts of an exchange, from exchanges and operators that `flexsp bench scale` measured on 1, 2 and 4 GPUs.

Rates are those with the least squares of relative errors, found by Newton's method for such sums (Gauss-Newton), with
a simulation of every measured exchange in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flexsp.bench.record import case_of
from flexsp.bench.simulation.exchange import Rates, Run, Simulation, State, simulate
from flexsp.bench.simulation.network import Fabric
from flexsp.devices import KNOWN

__all__ = ["KINDS_OF", "Op", "Sample", "fit_rates", "one_host", "run_sample", "samples_of"]

Result = dict[str, Any]

NVLINK_GB_S = 450.0
"""Of a port of an H100 or H200, in each direction; from its data sheet."""

KINDS_OF = {
    "linear_attn": "none", "simple_gla": "scalar", "retention": "scalar", "lightning": "scalar", "mamba2": "scalar",
    "generated_simple_gla": "scalar", "gla": "vector", "generated_gla": "vector", "gated_delta_rule": "dense",
    "gated_delta_rule_shared_keys": "dense", "kda": "dense", "gated_delta_product": "dense",
}  # fmt: skip
"""Transition of the operators that make one exchange a pass, of a state of K x V. The others make several, or none in
the kernel alone, or take the product of their matrices over the shard, which takes longer than the exchange."""


@dataclass(frozen=True)
class Sample:
    """Microseconds of each rank in an exchange that was measured alone, and of the slowest, run by run."""

    schedule: str
    state: State
    us: tuple[float, ...]
    slowest: float
    source: str


@dataclass(frozen=True)
class Op:
    """An operator's pass over `tokens` of each rank: microseconds on one rank, forward and of both passes, and what
    ranks of several do besides, each in a pass: composing their segments, and another kernel for what is scanned."""

    case: str
    tokens: int
    state: State
    forward: float
    both: float
    extra: tuple[float, float] = (0.0, 0.0)


def one_host(ranks: int) -> Fabric:
    """The ranks of the measured runs: all on one host."""
    return Fabric(ranks, ranks, port_gb_s=NVLINK_GB_S, card_gb_s=1.0)


def _memory_gb_s(results: Sequence[Result]) -> float:
    names = {str(result["environment"]["device"]) for result in results}
    if len(names) > 1:
        raise ValueError(f"results: expected files of one device, got {' and '.join(sorted(names))}")
    name = names.pop() if names else ""
    for device in KNOWN:
        if device.name in name:
            return device.bandwidth * 1e-3
    raise ValueError(f"results: expected files of one of {', '.join(x.name for x in KNOWN)}, got {name!r}")


def samples_of(results: Sequence[tuple[str, Result]]) -> list[Sample]:
    """The exchanges that were measured alone, of (name of a file, what is in it)."""
    found = []
    for source, result in results:
        shape = result["shape"]
        for row in result["states"]:
            state = State(row["batch"], shape["H"], shape["K"], shape["V"], "scalar", row["segments"])
            if (row["schedule"], result["transports"][row["schedule"]]) == ("chain", "process_group"):
                continue
            us = tuple(1e3 * ms for ms in row["rank_ms"])
            found.append(Sample(row["schedule"], state, us, 1e3 * row["ms"]["median"], source))
    return found


def run_sample(sample: Sample, rates: Rates) -> Run:
    """The exchange of a sample, simulated."""
    simulation = Simulation(one_host(len(sample.us)), rates, sample.state, sample.schedule)
    return simulate(simulation, [(0.0, False)])


CHAIN = {"launch": 3.0, "hop": 5.0, "credit": 1.0, "fold": 0.4, "write": 0.8}
MESSAGES = {
    "start": 20.0, "message": 20.0, "kernel": 2.0, "message_gb_s": 160.0, "gather": 30.0, "gather_hop": 2.0,
    "gather_gb_s": 180.0,
}  # fmt: skip
"""Where the search begins."""


def fit_rates(results: Sequence[tuple[str, Result]]) -> Rates:
    """Rates for the exchanges in these files.

    Raises:
        ValueError: files of several devices, or none with exchanges over ranks.
    """
    samples = samples_of(results)
    chain = [x for x in samples if x.schedule == "chain"]
    messages = [x for x in samples if x.schedule != "chain"]
    if not chain or not messages:
        raise ValueError("results: expected exchanges of chain and of other schedules, got none (--no-states?)")
    rates = Rates(memory_gb_s=_memory_gb_s([result for _, result in results]))
    rates = _search(replace(rates, **CHAIN), list(CHAIN), chain)
    return _search(replace(rates, **MESSAGES), list(MESSAGES), messages)


def _errors(rates: Rates, samples: Sequence[Sample]) -> torch.Tensor:
    """Relative to the slowest rank's time: of that, and of every rank's."""
    errors = []
    for sample in samples:
        run = run_sample(sample, rates)
        errors += [(run.slowest - sample.slowest) / sample.slowest * len(sample.us) ** 0.5]
        errors += [(mine - us) / sample.slowest for mine, us in zip(run.us, sample.us, strict=True)]
    return torch.tensor(errors, dtype=torch.float64)


def _search(rates: Rates, names: Sequence[str], samples: Sequence[Sample]) -> Rates:
    """Gauss-Newton over the logarithms of the rates, so that they stay positive."""
    errors = _errors(rates, samples)
    damping = 1e-3
    for _ in range(40):
        base = torch.tensor([getattr(rates, name) for name in names], dtype=torch.float64)
        columns = [
            (_errors(replace(rates, **{name: float(x) * 1.001}), samples) - errors) / 1e-3
            for name, x in zip(names, base, strict=True)
        ]
        slope = torch.stack(columns, 1)
        square = slope.T @ slope
        better = False
        for _ in range(8):
            step = torch.linalg.solve(square + damping * torch.eye(len(names)), -slope.T @ errors).clamp(-1, 1)
            new = replace(rates, **dict(zip(names, (base * step.exp()).tolist(), strict=True)))
            found = _errors(new, samples)
            if found.norm() < errors.norm():
                better = bool(found.norm() < errors.norm() * (1 - 1e-4))
                rates, errors, damping = new, found, damping / 4
                break
            damping *= 4
        if not better:
            break
    return rates
