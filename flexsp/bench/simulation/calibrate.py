"""Rates of the parts of an exchange, and times of operators, from what `flexsp bench scale` measured on few GPUs.

Rates are those with the least squares of relative errors, found by Newton's method for such sums (Gauss-Newton), with
a simulation of every measured exchange in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import torch

from flexsp.bench.record import case_of
from flexsp.bench.simulation.exchange import Ended, Phase, Rates, Simulation, simulate
from flexsp.bench.simulation.network import Fabric
from flexsp.bench.simulation.trace import State
from flexsp.devices import KNOWN

__all__ = [
    "KINDS_OF", "MODES", "NVLINK_GB_S", "Calibrated", "Compared", "Sample", "calibrate", "compared", "fit_rates",
    "one_host", "passes", "run_sample", "samples_of",
]  # fmt: skip

Result = dict[str, Any]
Key = tuple[str, str, int]  # case, pass, tokens of a rank
MODES = ("fwd", "fwd_bwd")

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


def samples_of(results: Sequence[Result]) -> list[Sample]:
    """The exchanges that were measured alone; of those that were measured twice, the mean."""
    found: dict[tuple[str, State, int], list[list[float]]] = {}
    for result in results:
        shape = result["shape"]
        for row in result["states"]:
            state = State(row["batch"], shape["H"], shape["K"], shape["V"], "scalar", row["segments"])
            if (row["schedule"], result["transports"][row["schedule"]]) == ("chain", "process_group"):
                continue
            times = [1e3 * ms for ms in (row["ms"]["median"], *row["rank_ms"])]
            found.setdefault((row["schedule"], state, row["world_size"]), []).append(times)
    samples = []
    for (schedule, state, _), times in found.items():
        slowest, *us = map(fmean, zip(*times, strict=True))
        samples.append(Sample(schedule, state, tuple(us), slowest))
    return samples


def run_sample(sample: Sample, rates: Rates) -> Ended:
    """The exchange of a sample, simulated."""
    fabric = one_host(len(sample.us))
    return simulate(Simulation(fabric, rates, sample.state, sample.schedule, as_measured=True)).phases[0]


def passes(
    fabric: Fabric, rates: Rates, state: State, schedule: str, as_measured: bool = False
) -> tuple[Ended, Ended]:
    """A forward and a backward exchange one after the other. What ranks compute around them takes as long on all, so
    that it only adds to their times."""
    simulation = Simulation(fabric, rates, state, schedule, as_measured=as_measured)
    forward, both = simulate(simulation, [Phase(), Phase(reverse=True)]).phases
    return forward, both


CHAIN = {"launch": 1.3, "hop": 5.06, "credit": 3.2, "fold": 0.42, "write": 1.12}
MESSAGES = {
    "start": 7.0, "message": 8.46, "kernel": 2.88, "message_gb_s": 125.0, "gather": 26.0, "gather_gb_s": 193.0,
}  # fmt: skip
"""Where the search begins."""


def fit_rates(results: Sequence[Result]) -> Rates:
    """Rates for the exchanges in these files.

    Raises:
        ValueError: files of several devices, or none with exchanges over ranks.
    """
    samples = samples_of(results)
    chain = [x for x in samples if x.schedule == "chain"]
    messages = [x for x in samples if x.schedule != "chain"]
    if not chain or not messages:
        raise ValueError("results: expected exchanges of chain and of other schedules, got none (--no-states?)")
    rates = Rates(memory_gb_s=_memory_gb_s(results))
    rates = _search(replace(rates, **CHAIN), list(CHAIN), chain)
    return _search(replace(rates, **MESSAGES), list(MESSAGES), messages)


def _errors(rates: Rates, samples: Sequence[Sample]) -> torch.Tensor:
    """Of the slowest rank, relative; and, with less weight, of every rank: the first ones' ends delay nobody."""
    errors = []
    for sample in samples:
        run = run_sample(sample, rates)
        errors.append((run.slowest - sample.slowest) / sample.slowest)
        errors += [0.1 * (mine - us) / sample.slowest for mine, us in zip(run.us, sample.us, strict=True)]
    return torch.tensor(errors, dtype=torch.float64)


def _search(rates: Rates, names: Sequence[str], samples: Sequence[Sample]) -> Rates:
    """Gauss-Newton over the logarithms of the rates, so that they stay positive."""
    errors = _errors(rates, samples)
    damping = 1e-3
    for _ in range(20):
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
                better = bool(found.norm() < errors.norm() * (1 - 1e-3))
                rates, errors, damping = new, found, damping / 4
                break
            damping *= 4
        if not better:
            break
    return rates


@dataclass(frozen=True)
class Calibrated:
    """Rates, and of each operator, pass and length microseconds: on one rank, and what several ranks do besides the
    exchange, such as composing matrices over a shard."""

    rates: Rates
    state: State
    alone: dict[Key, float]
    extra: dict[Key, float]

    def state_of(self, case: str) -> State:
        return replace(self.state, kind=KINDS_OF[case])


def _rows(results: Sequence[Result], ranks: int) -> dict[tuple[Key, str], list[Result]]:
    """Rows of (key, schedule) on `ranks` ranks, of operators that make one exchange a pass."""
    found: dict[tuple[Key, str], list[Result]] = {}
    for result in results:
        for row in result["rows"]:
            if row["world_size"] == ranks and case_of(row) in KINDS_OF:
                key = case_of(row), row["mode"], row["T_local"]
                found.setdefault((key, row["schedule"]), []).append(row)
    return found


def calibrate(results: Sequence[Result]) -> Calibrated:
    """Rates of exchanges from files of 2 and more ranks; operators alone from files of 1; what several ranks do besides
    from those of 2; and what a dense transition adds to a hop from those of 2 and 4.

    Raises:
        ValueError: files of several devices or shapes, or without what is needed.
    """
    shapes = {str(result["shape"]) for result in results}
    if len(shapes) != 1:
        raise ValueError(f"results: expected files of one shape, got {' and '.join(sorted(shapes)) or 'none'}")
    one, two, four = (_rows(results, ranks) for ranks in (1, 2, 4))
    missing = [str(n) for n, rows in ((1, one), (2, two), (4, four)) if not rows]
    if missing:
        raise ValueError(f"results: expected operators on 1, 2 and 4 ranks, got none on {' and '.join(missing)}")
    rates, shape = fit_rates(results), results[0]["shape"]
    state = State(shape["B"], shape["H"], shape["K"], shape["V"])
    alone = {
        key: fmean(1e3 * row["slowest_rank_ms"] for row in rows)
        for (key, schedule), rows in one.items()
        if schedule == "local"
    }
    added = [
        {key: fmean(row["added_us"] for row in rows) for (key, schedule), rows in of.items() if schedule == "chain"}
        for of in (two, four)
    ]
    hops = [
        (added[1][key] - us) / 2 / (1 + MODES.index(key[1]))
        for key, us in added[0].items()
        if KINDS_OF[key[0]] == "dense" and key in added[1]
    ]
    if hops:
        rates = replace(rates, dense=max(0.0, median(hops) - rates.hop))
    found = Calibrated(rates, state, alone, {})
    for kind in sorted({KINDS_OF[key[0]] for key in added[0]}):
        ends = dict(zip(MODES, passes(one_host(2), rates, replace(state, kind=kind), "chain"), strict=True))
        found.extra.update({key: us - ends[key[1]].slowest for key, us in added[0].items() if KINDS_OF[key[0]] == kind})
    return found


@dataclass(frozen=True)
class Compared:
    """A measured operator over ranks beside its prediction, microseconds; `added`: what ranks add, (measured, here)."""

    key: Key
    schedule: str
    ranks: int
    measured: float
    predicted: float
    added: tuple[float, float]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def compared(results: Sequence[Result], found: Calibrated, schedules: Sequence[str]) -> list[Compared]:
    """Every measured row of these schedules on 2 and more ranks, with the same run's operator alone."""
    rows: list[Compared] = []
    ends: dict[tuple[str, str, int], dict[str, Ended]] = {}
    for ranks in sorted({result["environment"]["world_size"] for result in results} - {1}):
        of = _rows(results, ranks)
        for (key, schedule), measured in of.items():
            if schedule not in schedules or key not in found.extra:
                continue
            kind = KINDS_OF[key[0]]
            at = kind, schedule, ranks
            if at not in ends:
                both = passes(one_host(ranks), found.rates, found.state_of(key[0]), schedule, as_measured=True)
                ends[at] = dict(zip(MODES, both, strict=True))
            added = ends[at][key[1]].slowest + found.extra[key]
            us = fmean(1e3 * row["ms"]["median"] for row in measured)
            alone = fmean(1e3 * row["slowest_rank_ms"] for row in of[key, "local"])
            rows.append(Compared(key, schedule, ranks, us, alone + added, (us - alone, added)))
    return rows
