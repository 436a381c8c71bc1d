"""`flexsp bench plot`: the weak-scaling picture from the result files of several world sizes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexsp.bench.record import case_of, load_kind

__all__ = ["efficiencies", "run", "weak_scaling"]

_COLORS = {
    "chain": "#1b6ca8", "serial": "#9a9a9a", "pipelined": "#c98b2b", "all_gather": "#b3446c", "hierarchical": "#3c8d5a",
}  # fmt: skip
_TITLES = {"fwd": "forward", "fwd_bwd": "forward + backward"}


def _points(results: Sequence[dict[str, Any]], case: str, mode: str, T: int) -> dict[str, list[tuple[int, float]]]:
    points: dict[str, list[tuple[int, float]]] = {}
    for result in results:
        for row in result["rows"]:
            if (case_of(row), row["mode"], row["T_local"]) != (case, mode, T):
                continue
            alone = row["schedule"] == "local"
            value = row["slowest_rank_ms"] if alone else row["ms"]["median"]
            points.setdefault(row["schedule"], []).append((row["world_size"], value))
    return {name: sorted(values) for name, values in points.items()}


def weak_scaling(results: Sequence[dict[str, Any]], path: Path, chosen: Sequence[str] | None = None) -> None:
    """One panel per operator (of ``chosen``), pass and T_local: ms of the slowest rank against ranks, T1 dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for result in results for row in result["rows"] if chosen is None or case_of(row) in chosen]
    lengths = sorted({row["T_local"] for row in rows})
    cases = dict.fromkeys(case_of(row) for row in rows)
    panels = [(case, mode) for case in cases for mode in _TITLES if any(row["mode"] == mode for row in rows)]
    if not lengths:
        raise ValueError(f"results: expected weak-scaling rows of {', '.join(chosen or ['any operator'])}, got none")
    figure, axes = pyplot.subplots(
        len(panels), len(lengths), figsize=(3.6 * len(lengths), 2.9 * len(panels)), squeeze=False, sharex=True
    )
    for i, (case, mode) in enumerate(panels):
        for j, T in enumerate(lengths):
            axis = axes[i][j]
            series = _points(results, case, mode, T)
            for name, values in series.items():
                ranks, times = zip(*values, strict=True)
                style = (
                    {"color": "black", "linestyle": "--", "label": "no communication"}
                    if name == "local"
                    else {"color": _COLORS.get(name), "marker": "o", "label": name}
                )
                axis.plot(ranks, times, linewidth=1.4, markersize=4, **style)
            axis.set_title(f"{case}, {_TITLES[mode]}, {T} tokens a rank", fontsize=8)
            axis.set_ylim(bottom=0)
            axis.set_xticks(sorted({rank for values in series.values() for rank, _ in values}))
            axis.tick_params(labelsize=8)
            axis.spines[["top", "right"]].set_visible(False)
            if i == len(panels) - 1:
                axis.set_xlabel("ranks", fontsize=8)
            if j == 0:
                axis.set_ylabel("ms, slowest rank", fontsize=8)
    axes[0][0].legend(fontsize=7, frameon=False)
    env, shape = results[0]["environment"], results[0]["shape"]
    sizes = f"H={shape['H']}, K={shape['K']}, V={shape['V']}, {shape['dtype']}"
    _save(figure, f"weak scaling, {env['device']}, {sizes}", path)


def _save(figure: Any, title: str, path: Path) -> None:
    from matplotlib import pyplot

    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def efficiencies(result: dict[str, Any], path: Path) -> None:
    """Of a simulation, a panel an operator and pass: predicted efficiency against ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result["rows"]
    cases, sizes = list(dict.fromkeys(row["case"] for row in rows)), sorted({row["ranks"] for row in rows})
    figure, axes = pyplot.subplots(
        len(_TITLES), len(cases), figsize=(3.4 * len(cases), 5.4), squeeze=False, sharex=True, sharey=True
    )
    for i, (mode, title) in enumerate(_TITLES.items()):
        for j, case in enumerate(cases):
            axis = axes[i][j]
            for schedule in dict.fromkeys(row["schedule"] for row in rows):
                of = sorted(
                    (row["ranks"], row["efficiency"])
                    for row in rows
                    if (row["case"], row["mode"], row["schedule"]) == (case, mode, schedule)
                )
                axis.plot(*zip(*of, strict=True), color=_COLORS.get(schedule), marker="o", markersize=3, label=schedule)
            axis.axhline(0.95, color="black", linewidth=0.8, linestyle=":")
            axis.set_xscale("log", base=2)
            axis.set_xticks(sizes, list(map(str, sizes)))
            axis.set_ylim(0, 1.02)
            axis.set_title(f"{case}, {title}", fontsize=8)
            axis.tick_params(labelsize=7)
            axis.spines[["top", "right"]].set_visible(False)
            if i == len(_TITLES) - 1:
                axis.set_xlabel("ranks", fontsize=8)
        axes[i][0].set_ylabel("predicted efficiency", fontsize=8)
    axes[0][0].legend(fontsize=7, frameon=False)
    network, tokens = result["network"], rows[0]["T_local"]
    title = f"weak scaling, predicted: {tokens:,} tokens a rank, {result['of']}, {network['per_host']} a host, "
    _save(figure, f"{title}cards of {network['nic_gb_s']:g} GB/s", path)


def run(args: argparse.Namespace) -> int:
    """Draw the given scale results."""
    results = load_kind([Path(path) for path in args.results], "scale")
    weak_scaling(results, Path(args.out), args.case)
    print(f"wrote {args.out}")
    return 0
