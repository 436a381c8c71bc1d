"""`flexsp bench predict`: the cost model fitted on some world sizes, its prediction for another beside the measurement.

Exchanges follow the forms of scan/cost.py. What the chain adds to an operator, T_R - T1, is taken as a + b (R - 1): b
is the same for all lengths of an operator's pass, since the state that hops is the same, and a is each length's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from flexsp.bench.record import case_of, load_kind
from flexsp.bench.scale import TARGETS_US
from flexsp.bench.table import footer, grid
from flexsp.scan.cost import BLOCKS, Fit, Measurement, fit

__all__ = ["added_lines", "exchanges", "fit_exchanges", "report", "run"]

Result = dict[str, Any]
Key = tuple[Any, ...]
ByRanks = dict[int, float]
Line = tuple[float, float]  # a, b of a + b (R - 1)


def exchanges(results: Sequence[Result]) -> dict[Key, ByRanks]:
    """(schedule, bytes a rank, segments) -> world size -> measured microseconds."""
    found: dict[Key, ByRanks] = {}
    for result in results:
        for row in result["states"]:
            name = row["schedule"]
            if (name, result["transports"][name]) == ("chain", "process_group"):
                name = "chain:process_group"
            key = (name, row["bytes_per_rank"], row["segments"])
            found.setdefault(key, {})[row["world_size"]] = row["ms"]["median"] * 1e3
    return found


def fit_exchanges(
    measured: Mapping[Key, ByRanks], fitted: Sequence[int], multiprocessors: int = BLOCKS
) -> dict[str, Fit]:
    """The cost model of each schedule, from the ``fitted`` world sizes; nothing where no exchange was measured."""
    samples = [
        Measurement(name, nbytes, R, segments, us[R])
        for (name, nbytes, segments), us in measured.items()
        for R in fitted
        if R in us
    ]
    return fit(samples, multiprocessors) if samples else {}


def _added(results: Sequence[Result]) -> dict[Key, ByRanks]:
    """(case, pass, tokens a rank) -> world size -> microseconds that the chain adds."""
    found: dict[Key, ByRanks] = {}
    for result in results:
        for row in result["rows"]:
            if row["schedule"] == "chain":
                key = (case_of(row), row["mode"], row["T_local"])
                found.setdefault(key, {})[row["world_size"]] = row["added_us"]
    return found


def added_lines(added: Mapping[Key, ByRanks], fitted: Sequence[int]) -> dict[Key, Line]:
    """Least squares of a + b (R - 1) on the ``fitted`` world sizes, b shared by the lengths of a case and pass.

    A length that was not measured on two of them has no line.
    """
    groups: dict[Key, dict[Key, list[tuple[int, float]]]] = {}
    for key, us in added.items():
        points = [(R - 1, us[R]) for R in fitted if R in us]
        if len(points) > 1:
            groups.setdefault(key[:2], {})[key] = points
    lines: dict[Key, Line] = {}
    for group in groups.values():
        means = {key: (fmean(x for x, _ in points), fmean(y for _, y in points)) for key, points in group.items()}
        spread = [(x - means[key][0], y - means[key][1]) for key, points in group.items() for x, y in points]
        slope = sum(x * y for x, y in spread) / sum(x * x for x, _ in spread)
        lines |= {key: (y - slope * x, slope) for key, (x, y) in means.items()}
    return lines


def _measured(us: float | None) -> str:
    return "not measured" if us is None else f"{us:.1f}"


def _beside(us: ByRanks, fitted: Sequence[int], value: Mapping[int, float]) -> list[str]:
    return [f"{us[R]:.1f} / {value[R]:.1f}" if R in us else "" for R in fitted]


def _exchange_table(measured: Mapping[Key, ByRanks], fits: Mapping[str, Fit], fitted: Sequence[int], ranks: int) -> str:
    lines = []
    for (name, nbytes, segments), us in sorted(measured.items(), key=lambda item: list(fits).index(item[0][0])):
        value = {R: fits[name].cost.us(nbytes, R, segments) for R in (*fitted, ranks)}
        lines.append(
            [name, f"{nbytes / 1e6:.1f}", str(segments), *_beside(us, fitted, value), f"{value[ranks]:.1f}",
             _measured(us.get(ranks))]
        )  # fmt: skip
    return grid(["schedule", "MB a rank", "segments", *_ranks_header(fitted, ranks)], lines)


def _parameter_table(fits: Mapping[str, Fit]) -> str:
    lines = []
    for name, found in fits.items():
        cost = found.cost
        launch, apply = (f"{value:.2g}" if value else "" for value in (cost.launch, cost.apply))
        lines.append(
            [name, launch, f"{cost.latency:.1f}", f"{cost.link_gb_s:.0f}",
             f"{cost.memory_gb_s / 1e3:.1f}", apply, f"{max(map(abs, found.residuals_us)):.1f} us",
             f"{found.worst:.1%}"]
        )  # fmt: skip
    header = ["schedule", "launch us", "latency us", "link GB/s", "memory TB/s", "apply us"]
    return grid([*header, "largest residual", "relative"], lines)


def _added_table(added: Mapping[Key, ByRanks], lines: Mapping[Key, Line], fitted: Sequence[int], ranks: int) -> str:
    rows = []
    for key, (a, b) in lines.items():
        case, mode, T = key
        value = {R: a + b * (R - 1) for R in (*fitted, ranks)}
        bound = TARGETS_US.get(ranks, {}).get(mode) if case == "simple_gla" else None
        rows.append(
            [case, mode.replace("fwd_bwd", "fwd+bwd"), str(T), *_beside(added[key], fitted, value),
             f"{value[ranks]:.1f}", _measured(added[key].get(ranks)), "" if bound is None else f"{bound:g}"]
        )  # fmt: skip
    return grid(["op", "pass", "T per rank", *_ranks_header(fitted, ranks), "bound"], rows)


def _ranks_header(fitted: Sequence[int], ranks: int) -> list[str]:
    beside = [f"{R} ranks us, measured / fitted" for R in fitted]
    return [*beside, f"{ranks} ranks us, predicted", f"{ranks} ranks us, measured"]


def report(results: Sequence[Result], ranks: int, cases: Sequence[str] | None = None) -> str:
    """Markdown: exchanges, their parameters, what the chain adds to operators (of ``cases``), where it was measured.

    Fits on all world sizes but ``ranks`` and 1. Of two files with the same measurement the newer counts.

    Raises:
        ValueError: results of different devices or shapes, or too few to fit.
    """
    for what, seen in (
        ("device", {result["environment"]["device"] for result in results}),
        ("shape", {str(result["shape"]) for result in results}),
    ):
        if len(seen) > 1:
            raise ValueError(f"results: expected files of one {what}, got {' and '.join(sorted(seen))}")
    if ranks < 2:
        raise ValueError(f"--ranks: expected at least 2, got {ranks}")
    results = sorted(results, key=lambda result: str(result["environment"]["date"]))
    fitted = sorted({result["environment"]["world_size"] for result in results} - {1, ranks})
    if len(fitted) < 2:
        raise ValueError(f"results: expected at least two world sizes besides 1 and {ranks} to fit, got {fitted}")
    measured, added = exchanges(results), _added(results)
    added = {key: us for key, us in added.items() if cases is None or key[0] in cases}
    parts = []
    fits = fit_exchanges(measured, fitted, results[0]["environment"].get("sm_count", BLOCKS))
    if fits:
        measured = {key: us for key, us in measured.items() if key[0] in fits}
        parts += [_exchange_table(measured, fits, fitted, ranks), _parameter_table(fits)]
    lines = added_lines(added, fitted)
    if lines:
        slopes = {f"{case} {mode.replace('fwd_bwd', 'fwd+bwd')}": b for (case, mode, _), (_, b) in lines.items()}
        text = ", ".join(f"{name} {b:.1f}" for name, b in slopes.items())
        parts += [_added_table(added, lines, fitted, ranks), f"The chain adds a + b (R - 1) us; b: {text}."]
    if not parts:
        raise ValueError(f"results: expected an exchange or an operator over two of {fitted} ranks, got none")
    return "\n\n".join([*parts, *map(footer, results)])


def run(args: argparse.Namespace) -> int:
    """Print the report of the given scale results."""
    print(report(load_kind([Path(path) for path in args.results], "scale"), args.ranks, args.case))
    return 0
