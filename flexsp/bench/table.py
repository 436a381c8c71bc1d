"""`flexsp bench table`: Markdown tables from result files, so that a document's numbers are the files' numbers."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flexsp.bench.record import case_of, load

__all__ = [
    "footer", "grid", "host_table", "markdown", "op_table", "run", "scale_table", "states_table", "traffic_table",
]  # fmt: skip

Result = dict[str, Any]


def grid(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def footer(result: Result) -> str:
    """Where a result was measured: device, shape, versions, commit, date and command."""
    env, shape = result["environment"], result["shape"]
    count = f"{env['world_size']} x " if env["world_size"] > 1 else ""
    sizes = ", ".join(f"{name}={shape[name]}" for name in "BHKV")
    parts = [f"{count}{env['device']}", sizes, shape["dtype"], f"torch {env['torch']}"]
    parts += [f"{name} {env[key]}" for name, key in (("Triton", "triton"), ("driver", "driver")) if env.get(key)]
    if result["kind"] == "op" and env.get("flash_linear_attention"):
        parts.append(f"flash-linear-attention {env['flash_linear_attention']}")
    source = (env["commit"] or "unknown")[:10] + (" with local changes" if env["dirty"] else "")
    return f"{', '.join(parts)}; commit {source}, {env['date'][:10]}: `{env['command']}`"


def _ms(row: Result | None) -> str:
    if row is None:
        return ""
    return f"{row['ms']['median']:.3f}" if "ms" in row else "refused"


def op_table(result: Result) -> str:
    """Ours and the baseline in ms, their ratio, the memory floor, peak memory: one line per op, T and pass."""
    keyed = {(r["case"], r["T"], r.get("mode"), r["provider"]): r for r in result["rows"]}
    lines = []
    for case, T, mode, provider in keyed:
        if provider != "flexsp":
            continue
        ours, theirs = keyed[case, T, mode, "flexsp"], keyed.get((case, T, mode, "fla"))
        ratio = f"{ours['ms']['median'] / theirs['ms']['median']:.2f}" if theirs and "ms" in theirs else ""
        peaks = [f"{r['peak_gib']:.1f}" for r in (ours, theirs) if r and r.get("peak_gib") is not None]
        lines.append(
            [
                case,
                str(T),
                mode.replace("fwd_bwd", "fwd+bwd"),
                _ms(ours),
                _ms(theirs),
                ratio,
                f"{ours['floor_ms']:.3f}",
                " / ".join(peaks),
            ]
        )
    header = ["op", "T", "pass", "flexsp ms", "flash-linear-attention ms", "ratio", "memory floor ms", "peak GiB"]
    text = grid(header, lines)
    for row in result["cold"]:
        if row.get("fwd_bwd_s") is not None:
            text += f"\n\nFirst call, cold cache, {row['provider']} {row['case']}: {row['fwd_bwd_s']:.1f} s."
    return text


def scale_table(result: Result) -> str:
    """Per op, length and pass: one rank alone, then each schedule's time, what it adds and its efficiency T1/TN."""
    lines = []
    for row in result["rows"]:
        local = row["schedule"] == "local"
        lines.append(
            [
                case_of(row),
                str(row["T_local"]),
                row["mode"].replace("fwd_bwd", "fwd+bwd"),
                "1 rank" if local else row["schedule"],
                f"{row['slowest_rank_ms' if local else 'ms']:.3f}" if local else _ms(row),
                "" if local else f"{row['added_us']:+.0f}",
                "" if local else f"{row['efficiency']:.3f}",
                f"{row['back_to_back_ms']:.3f}",
                f"{row['tokens_per_s'] / 1e6:.1f}",
            ]
        )
    header = ["op", "T per rank", "pass", "schedule", "ms", "added us", "efficiency", "back to back ms", "M tokens/s"]
    return grid(header, lines)


def states_table(result: Result) -> str:
    """The states' travel alone: microseconds by size, segments and schedule."""
    names = list(dict.fromkeys(row["schedule"] for row in result["states"]))
    keyed: dict[tuple[float, int], dict[str, float]] = {}
    for row in result["states"]:
        keyed.setdefault((row["bytes_total"] / 1e6, row["segments"]), {})[row["schedule"]] = row["ms"]["median"] * 1e3
    lines = [
        [f"{size:.1f}", str(segments), *(f"{times[name]:.0f}" for name in names)]
        for (size, segments), times in keyed.items()
    ]
    return grid(["MB over all ranks", "segments", *(f"{name} us" for name in names)], lines)


def host_table(result: Result) -> str:
    """Host microseconds of a call, with the dispatcher and without."""
    lines = [
        [row["case"], str(row["T"]), row["mode"], f"{row['dispatcher_us']:.0f}",
         f"{row['plain_us']:.0f}" if "plain_us" in row else ""]
        for row in result["rows"]
    ]  # fmt: skip
    return grid(["op", "T", "pass", "host us", "without the dispatcher"], lines)


def traffic_table(result: Result) -> str:
    """GB that each launch moves, counted and predicted, and microseconds under the profiler."""
    lines = []
    for row in result["rows"]:
        moved, predicted = (row[f"{x}read"] + row[f"{x}written"] for x in ("", "predicted_"))
        us = [f"{row['us']:.0f}", f"{row['predicted_us']:.0f}"]
        lines.append([row["kernel"], f"{moved / 1e9:.2f}", f"{predicted / 1e9:.2f}", f"{row['ratio']:.2f}", *us])
    [total] = result["targets"]
    lines.append(["all", "", "", f"{total['value']:.2f}", "", ""])
    return grid(["kernel", "GB", "predicted GB", "ratio", "us", "predicted us"], lines)


_TABLES = {"op": op_table, "scale": scale_table, "host": host_table, "traffic": traffic_table}


def markdown(paths: Sequence[Path]) -> str:
    """Tables of several result files, each with the line that says where it was measured."""
    parts = []
    for path in paths:
        result = load(path)
        if result["kind"] not in _TABLES:
            raise ValueError(f"{path}: expected a result of kind {', '.join(_TABLES)}, got {result['kind']!r}")
        tables = [_TABLES[result["kind"]](result)]
        if result.get("states"):
            tables.append(states_table(result))
        parts += [*tables, footer(result)]
    return "\n\n".join(parts)


def run(args: argparse.Namespace) -> int:
    """Print the tables of the given files."""
    print(markdown([Path(path) for path in args.results]))
    return 0
