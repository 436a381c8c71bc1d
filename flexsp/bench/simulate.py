"""`flexsp simulate`: weak scaling of operators over many ranks on many hosts, predicted by a simulation of events.

The messages are those of the schedules' own code. What each part of an exchange takes comes from files of
`flexsp bench scale` on 1, 2 and 4 GPUs of one host; cards between hosts are given, and were never measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from flexsp.bench.plot import efficiencies
from flexsp.bench.predict import exchanges, fit_exchanges
from flexsp.bench.record import environment, load_kind, save
from flexsp.bench.simulation.calibrate import KINDS_OF, MODES, Calibrated, calibrate, compared, passes
from flexsp.bench.simulation.exchange import Rates, Simulation, simulate
from flexsp.bench.simulation.network import Fabric
from flexsp.bench.simulation.trace import State
from flexsp.bench.summary import commit_of
from flexsp.bench.table import grid, simulation_table
from flexsp.exceptions import check_integer, check_number, fail
from flexsp.scan.cost import BLOCKS
from flexsp.scan.schedules import SCHEDULES

__all__ = ["NEAR", "SOURCES", "against_cost_model", "close", "run", "weak_scaling_rows"]

Result = dict[str, Any]

SOURCES = (
    "scale_h200_20261126.json", "more_scale_h200_20261126.json", "scale_h200x2_20261126.json",
    "more_scale_h200x2_20261126.json", "scale_h200x4_20261126.json",
)  # fmt: skip
"""Files of benchmarks/results that a simulation is calibrated by where none are named."""
NEAR = 0.1
"""How far a prediction may be from a measured time."""
AIM = 128, 0.95
"""Ranks, and the efficiency that is asked of them with 65,536 tokens each."""


def _files(names: Sequence[str]) -> list[Path]:
    """The files that were named, or those of this project's checkout."""
    if names:
        return [Path(name) for name in names]
    folder = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
    found = [folder / name for name in SOURCES]
    if not all(path.exists() for path in found):
        fail("results", "files of `flexsp bench scale` on 1, 2 and 4 GPUs, as there is no checkout beside", "none")
    return found


def _fabric(ranks: int, args: argparse.Namespace) -> Fabric:
    per_host = min(ranks, args.per_host)
    return Fabric(
        ranks, per_host, port_gb_s=args.nvlink, card_gb_s=args.nic, card_us=args.nic_latency,
        cards=None if args.nics is None else min(args.nics, per_host),
    )  # fmt: skip


def _check(args: argparse.Namespace) -> None:
    for ranks in args.ranks:
        check_integer("--ranks", ranks, least=2)
        if ranks > args.per_host and ranks % args.per_host:
            fail("--ranks", f"at most {args.per_host}, or whole hosts of {args.per_host}", ranks)
    check_integer("--per-host", args.per_host, least=1)
    if args.nics is not None:
        check_integer("--nics", args.nics, least=1, most=args.per_host)
    for name, value in (("--nic", args.nic), ("--nvlink", args.nvlink)):
        check_number(name, value, above=0)
    if not args.nic_latency >= 0:
        fail("--nic-latency", "a number of microseconds >= 0", args.nic_latency)
    if args.kernel_us is not None and not args.kernel_us >= 0:
        fail("--kernel-us", "a number of microseconds >= 0", args.kernel_us)


def weak_scaling_rows(
    found: Calibrated, fabrics: Mapping[int, Fabric], cases: Sequence[str], schedules: Sequence[str], T: int
) -> list[Result]:
    """A row for each operator, schedule, world size and pass."""
    rows: list[Result] = []
    for schedule in schedules:
        for kind in dict.fromkeys(KINDS_OF[case] for case in cases):
            for ranks, fabric in fabrics.items():
                began = time.monotonic()
                ends = passes(fabric, found.rates, replace(found.state, kind=kind), schedule)
                seconds = time.monotonic() - began
                for case in (case for case in cases if KINDS_OF[case] == kind):
                    for mode, end in zip(MODES, ends, strict=True):
                        key = case, mode, T
                        if key not in found.alone or key not in found.extra:
                            lengths = sorted({key[2] for key in found.extra if key[0] == case})
                            fail("--T-local", f"one of {lengths or 'none'} that were measured of {case}", T)
                        alone, added = found.alone[key], end.slowest + found.extra[key]
                        rows.append(
                            {
                                "case": case, "schedule": schedule, "mode": mode, "T_local": T, "ranks": ranks,
                                "alone_us": alone, "added_us": added, "efficiency": alone / (alone + added),
                                "path_us": {what: us for what, us in end.path.items() if us > 0}, "seconds": seconds,
                            }
                        )  # fmt: skip
    order = {case: i for i, case in enumerate(cases)}
    return sorted(rows, key=lambda row: order[row["case"]])


def against_cost_model(
    results: Sequence[Result], rates: Rates, fabrics: Mapping[int, Fabric]
) -> list[tuple[str, int, float]]:
    """(schedule, ranks, simulated over what `flexsp.scan.cost` says) of an exchange of one state.

    Both come from the same files. "hierarchical" was not measured: its messages are taken to cost that model what those
    of "serial" do, and their bytes what those of "all_gather" do.
    """
    measured = exchanges(results)
    sizes = sorted({world for us in measured.values() for world in us} - {1})
    fits = fit_exchanges(measured, sizes, results[0]["environment"].get("sm_count", BLOCKS))
    costs = {name: one.cost for name, one in fits.items()}
    if {"serial", "all_gather"} <= set(costs):
        costs["hierarchical"] = replace(costs["serial"], name="hierarchical", byte=costs["all_gather"].byte)
    shape, found = results[0]["shape"], []
    state = State(1, shape["H"], shape["K"], shape["V"])
    for name, cost in costs.items():
        for ranks, fabric in fabrics.items():
            card = fabric.network[0][0].rate * fabric.cards / fabric.per_host  # of a rank
            among = replace(cost, per_host=fabric.per_host, network_latency=fabric.card_us, network_byte=1 / card)
            us = simulate(Simulation(fabric, rates, state, name, as_measured=True)).phases[0].slowest
            found.append((name, ranks, us / among.us(state.nbytes, ranks)))
    return found


def close(results: Sequence[Result], found: Calibrated, schedules: Sequence[str]) -> tuple[str, str]:
    """How many measured rows the prediction is near to, and a table of those that it is not."""
    rows = compared(results, found, schedules)
    lines, counts = [], []
    for schedule in dict.fromkeys(row.schedule for row in rows):
        of = [row for row in rows if row.schedule == schedule]
        counts.append(f"{schedule} {sum(abs(row.error) <= NEAR for row in of)} of {len(of)}")
    for row in (row for row in rows if abs(row.error) > NEAR):
        case, mode, T = row.key
        lines.append(
            [case, mode, str(T), row.schedule, str(row.ranks), f"{row.measured:.0f}", f"{row.predicted:.0f}",
             f"{row.added[0]:.0f} / {row.added[1]:.0f}"]
        )  # fmt: skip
    header = ["op", "pass", "T per rank", "schedule", "ranks", "measured us", "predicted us", "ranks add, us"]
    return f"Within {NEAR:.0%} of the measured time: {', '.join(counts)}.", grid(header, lines)


def _aim(rows: Sequence[Result]) -> list[str]:
    ranks, least = AIM
    lines = []
    for mode in MODES:
        of = [row for row in rows if row["ranks"] == ranks and row["mode"] == mode]
        for case in dict.fromkeys(row["case"] for row in of):
            best = max((row for row in of if row["case"] == case), key=lambda row: row["efficiency"])
            verdict = "reaches" if best["efficiency"] >= least else "misses"
            lines.append(
                f"{case} {mode} on {ranks} ranks: {best['schedule']} {best['efficiency']:.3f} {verdict} {least}"
            )
    return lines


def run(args: argparse.Namespace) -> int:
    """Print the tables, and save and draw what is asked for."""
    _check(args)
    paths = _files(args.results)
    results = load_kind(paths, "scale")
    found = calibrate(results)
    near, table = close(results, found, SCHEDULES)
    if args.kernel_us is not None:
        found = replace(found, rates=replace(found.rates, kernel=args.kernel_us))
    fabrics = {ranks: _fabric(ranks, args) for ranks in args.ranks}
    env = environment(torch.device("cpu"), args.argv)
    network = {
        "per_host": args.per_host, "nic_gb_s": args.nic, "nic_us": args.nic_latency, "nics": args.nics,
        "nvlink_gb_s": args.nvlink,
    }  # fmt: skip
    result: Result = {
        "kind": "simulation", "prediction": True, "environment": env, "shape": results[0]["shape"],
        "of": results[0]["environment"]["device"], "network": network, "rates": asdict(found.rates),
        "calibrated_by": {path.name: commit_of(x) for path, x in zip(paths, results, strict=True)},
        "near": near, "rows": weak_scaling_rows(found, fabrics, args.case, args.schedules, args.T_local),
    }  # fmt: skip
    print(simulation_table(result), end="\n\n")
    if args.check:
        print("Not near:\n" + table, end="\n\n")
        ratios = against_cost_model(results, found.rates, fabrics)
        header = ["an exchange, simulated / cost model", *map(str, args.ranks)]
        names = dict.fromkeys(name for name, *_ in ratios)
        lines = [[name, *(f"{ratio:.2f}" for of, _, ratio in ratios if of == name)] for name in names]
        print(grid(header, lines), end="\n\n")
    print("\n".join(_aim(result["rows"])))
    if args.out is not None:
        out = Path(args.out)
        save(out, result)
        print(f"wrote {out}")
    if args.plot is not None:
        efficiencies(result, Path(args.plot))
        print(f"wrote {args.plot}")
    return 0
