"""`flexsp bench table`: Markdown tables of result files."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from flexsp.bench.record import case_of, gates_of, load, spread_of

__all__ = [
    "RELEASED_HEADER", "footer", "grid", "host_table", "layers_of", "markdown", "model_table", "op_table", "pair",
    "released_lines", "released_table", "run", "sanitize_table", "scale_table", "shown", "simulation_table",
    "states_table", "times_and_ratios", "traffic_table",
]  # fmt: skip

Result = dict[str, Any]
_PEERS = {
    "flashqla": ("FlashQLA", "flash_qla"),
    "mlstm_kernels": ("mlstm_kernels", "mlstm_kernels"),
    "mamba_ssm": ("mamba_ssm", "mamba_ssm"),
    "cudnn": ("cuDNN frontend", "cudnn_frontend"),
    "pytorch": ("PyTorch", ""),
    "torch.compile": ("torch.compile", ""),
}
"""By provider, a library's name and its version's name in a record, if that is not torch's."""


def grid(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def footer(result: Result) -> str:
    """Where a result was measured: device, shape, versions, commit, date and command."""
    env, shape = result["environment"], result.get("shape")
    count = f"{env['world_size']} x " if env["world_size"] > 1 else ""
    sizes = [*(f"{name}={shape[name]}" for name in "BHKV"), shape["dtype"]] if shape else []
    parts = [f"{count}{env['device']}", *sizes, f"torch {env['torch']}"]
    parts += [f"{name} {env[key]}" for name, key in (("Triton", "triton"), ("driver", "driver")) if env.get(key)]
    if result["kind"] == "op" and not result["baseline_missing"] and env.get("flash_linear_attention"):
        parts.append(f"flash-linear-attention {env['flash_linear_attention']}")
    there = {row.get("provider") for row in result.get("rows", []) if "error" not in row}
    parts += [f"{title} {env.get(key)}" for name, (title, key) in _PEERS.items() if key and name in there]
    if gates_of(result) != "mild":
        parts.append(f"gates {gates_of(result)}")
    source = (env["commit"] or "unknown")[:10] + (" with local changes" if env["dirty"] else "")
    command = re.sub(r" --out /\S+", "", env["command"])  # a folder of that machine
    return f"{', '.join(parts)}; commit {source}, {env['date'][:10]}: `{command}`"


_PLAIN = ("not installed", "not run on a CPU", "out of memory")  # errors that a table has as they are


def _ms(row: Result | None) -> str:
    if row is None:
        return ""
    if "ms" not in row:
        return str(row["error"]) if row["error"] in _PLAIN else "refused"
    return f"{row['ms']['median']:.3f}"


def _ratio(ours: Result, theirs: Result | None) -> str:
    return f"{ours['ms']['median'] / theirs['ms']['median']:.2f}" if theirs and "ms" in theirs else ""


def shown(value: float | dict[str, float] | None, digits: int, unit: str = "") -> str:
    """A repeated measurement: its median, then [min, max]; "one run" where it was not repeated."""
    found = spread_of(value)
    if found is None:
        return ""
    median, low, high = (f"{found[name]:.{digits}f}" for name in ("median", "min", "max"))
    return f"{median}{unit} (one run)" if found["n"] == 1 else f"{median}{unit} [{low}, {high}]"


def op_table(result: Result) -> str:
    """Ours and the baselines that ran in ms, ratios, the memory floor, peak memory: one line per op, T and pass."""
    keyed = {(r["case"], r["T"], r.get("mode"), r["provider"]): r for r in result["rows"]}
    there = {provider for *_, provider in keyed}
    fla, others = "fla" in there, [name for name in _PEERS if name in there]
    lines = []
    for case, T, mode, provider in keyed:
        if provider != "flexsp":
            continue
        ours, theirs = keyed[case, T, mode, "flexsp"], keyed.get((case, T, mode, "fla"))
        floor = "" if ours["floor_ms"] is None else f"{ours['floor_ms']:.3f}"
        peaks = [shown(row.get("peak_gib"), 1) if row else "" for row in ((ours, theirs) if fla else (ours,))]
        times = [_ms(ours), *([_ms(theirs), _ratio(ours, theirs)] if fla else [])]
        for name in others:
            other = keyed.get((case, T, mode, name))
            times += [_ms(other), _ratio(ours, other)]
        lines.append([case, str(T), mode.replace("fwd_bwd", "fwd+bwd"), *times, floor, *peaks])
    header = ["op", "T", "pass", "flexsp ms", *(["flash-linear-attention ms", "ratio"] if fla else [])]
    for name in others:
        header += [f"{_PEERS[name][0]} ms", "ratio"]
    header.append("memory floor ms")
    text = grid([*header, "peak GiB", *(["flash-linear-attention peak GiB"] if fla else [])], lines)
    first = [
        [row["case"], row["provider"].replace("fla", "flash-linear-attention"), shown(row["fwd_bwd_s"], 1)]
        for row in result["cold"]
        if row.get("fwd_bwd_s") is not None
    ]
    return f"{text}\n\n{grid(['first training step, nothing compiled yet', 'of', 's'], first)}" if first else text


def scale_table(result: Result) -> str:
    """Per op, length and pass: one rank alone, then each schedule's time, what it adds and its efficiency T1/TN."""
    lines = []
    for row in result["rows"]:
        local = row["schedule"].endswith("local")
        lines.append(
            [
                case_of(row),
                str(row["T_local"]),
                row["mode"].replace("fwd_bwd", "fwd+bwd"),
                row["schedule"].removesuffix("local") + "1 rank" if local else row["schedule"],
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
        [row["case"], str(row["T"]), row["mode"], shown(row["dispatcher_us"], 0), shown(row.get("plain_us"), 0)]
        for row in result["rows"]
    ]
    return grid(["op", "T", "pass", "host us", "without the dispatcher, us"], lines)


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


def sanitize_table(result: Result) -> str:
    """What `make sanitize` found: what each of compute-sanitizer's tools ran, reported and missed."""
    lines = [
        [tool, *(str(found[key]) for key in ("calls", "kernels", "errors")),
         *(str(len(found.get(key, []))) for key in ("failed", "restarted"))]
        for tool, found in result["tools"].items()
    ]
    return grid(["tool", "calls", "kernels", "errors", "calls that failed", "processes started again"], lines)


def model_table(result: Result) -> str:
    """Training steps of a whole model."""
    lines = []
    for row in result["rows"]:
        who = f"{row['size']}{', unmodified' if row['unmodified'] else ''}"
        found = ["did not fit", "", ""] if "error" in row else []
        found = found or [f"{row['step_s']:.2f}", f"{row['tokens_per_s']:,.0f}", f"{row['peak_gib']:.1f}"]
        tokens = f"{row['sequences']} x {row['T']}" if row.get("sequences", 1) > 1 else str(row["T"])
        lines.append([who, tokens, str(row["world_size"]), *found])
    return grid(["model", "tokens of the sequence", "GPUs", "s a step", "tokens/s", "peak GiB a GPU"], lines)


_IN_TORCH = ("pytorch", "torch.compile")
_MODES = ("fwd", "fwd_bwd")


def pair(rows: Sequence[Result | None], number: Callable[[Result], str]) -> str:
    """Of both passes, "1.25 / 4.50"; a dash for one that did not run, and what prevented both."""
    texts = [number(row) if row and "ms" in row else "-" for row in rows]
    if set(texts) != {"-"}:
        return " / ".join(texts)
    return next((_ms(row) for row in rows if row), "")


def layers_of(result: Result) -> dict[tuple[str, int, int], dict[tuple[str, str], Result]]:
    """Rows of `bench models` by (layer, batch, tokens), then by (provider, mode)."""
    found: dict[tuple[str, int, int], dict[tuple[str, str], Result]] = {}
    for row in result["rows"]:
        found.setdefault((row["case"], row["B"], row["T"]), {})[row["provider"], row["mode"]] = row
    return found


def _fastest(keyed: dict[tuple[str, str], Result], mode: str) -> Result | None:
    """The fastest row of another library; of the op in PyTorch where there is no other."""
    rows = [row for (_, m), row in keyed.items() if m == mode and row["provider"] != "flexsp" and "ms" in row]
    libraries = [row for row in rows if row["provider"] not in _IN_TORCH]
    return min(libraries or rows, key=lambda row: float(row["ms"]["median"]), default=None)


def times_and_ratios(keyed: dict[tuple[str, str], Result]) -> tuple[str, str, list[str]]:
    """Milliseconds of ours, their ratios to the fastest library's, and which that is, of both passes."""
    ours, other = ([keyed.get(("flexsp", mode)) for mode in _MODES], [_fastest(keyed, mode) for mode in _MODES])
    shares = [_ratio(a, b) if a and "ms" in a else "" for a, b in zip(ours, other, strict=True)]
    names = list(dict.fromkeys(str(row["provider"]) for row in other if row))
    return pair(ours, _median), " / ".join(share or "-" for share in shares) if any(shares) else "", names


def _median(row: Result) -> str:
    return f"{row['ms']['median']:.2f}"


def _worst(row: Result | None) -> str:
    """The output's difference from float64, and the largest of a gradient, in percent."""
    found = dict((row or {}).get("from_float64") or {})
    if not found:
        return "-"
    o = found.pop("o")
    name, x = max(found.items(), key=lambda item: item[1])
    return f"{100 * o:.2g} / {100 * x:.2g} ({name})"


def released_lines(result: Result) -> list[list[str]]:
    """A line for each layer, batch and length of `bench models`."""
    lines = []
    for (case, B, T), keyed in layers_of(result).items():
        ours = [keyed.get(("flexsp", mode)) for mode in _MODES]
        first, others, peaks, exact = next(iter(keyed.values())), [], [], []
        for name in dict.fromkeys(provider for provider, _ in keyed):
            rows = [keyed.get((name, mode)) for mode in _MODES]
            if name != "flexsp":
                others.append(f"{name}: {pair(rows, _median)}")
            if name not in _IN_TORCH and any(row and "ms" in row for row in rows):
                who = "" if name == "flexsp" else f"{name} "
                peaks.append(who + (shown((rows[1] or {}).get("peak_gib"), 1).partition(" ")[0] or "-"))
                exact.append(who + _worst(rows[1]))
        ms, share, _ = times_and_ratios(keyed)
        over = " / ".join(f"{row['over_floor']:.1f}" for row in ours if row and row.get("over_floor"))
        lines.append([
            case, first["sizes"], first["gates"], f"{B} x {T}", ms, over, "; ".join(others), share, "; ".join(peaks),
            "; ".join(exact),
        ])  # fmt: skip
    return lines


RELEASED_HEADER = (
    "layer", "heads x K/V", "gates", "sequences x tokens", "flexsp ms", "times the floor", "beside it, ms",
    "ratio to the fastest library", "peak GiB", "% from float64: output / worst gradient",
)  # fmt: skip


def released_table(result: Result) -> str:
    """Layers of released models."""
    text = grid(RELEASED_HEADER, released_lines(result))
    notes = [*result.get("differ", []), *(f"{x[0]}, {x[1]} x {x[2]}: left out, {x[3]}" for x in result["left_out"])]
    return "\n".join([text, "", *(f"- {note}" for note in notes)]).rstrip()


def _largest(path: dict[str, float]) -> str:
    """The two things that most of the time of an exchange goes into."""
    most = sorted(path, key=lambda what: -path[what])[:2]
    return ", ".join(f"{what} {path[what] / sum(path.values()):.0%}" for what in most)


def simulation_table(result: Result) -> str:
    """Predicted efficiencies, forward / both passes, by ranks; at the largest number what limits the exchange."""
    rows, lines = result["rows"], []
    sizes = sorted({row["ranks"] for row in rows})
    keyed = {((row["case"], row["schedule"]), row["ranks"], row["mode"]): row for row in rows}
    for at in dict.fromkeys((row["case"], row["schedule"]) for row in rows):
        cells = [" / ".join(f"{keyed[at, n, mode]['efficiency']:.3f}" for mode in ("fwd", "fwd_bwd")) for n in sizes]
        last = keyed[at, sizes[-1], "fwd"]
        lines.append([f"`{at[0]}`", at[1], *cells, f"{last['added_us']:,.0f}: {_largest(last['path_us'])}"])
    header = ["op", "schedule", *(f"{n} ranks" for n in sizes), f"{sizes[-1]} ranks add us, forward"]
    network, shape = result["network"], result["shape"]
    cards = f"{network['nics'] or 'as many'} cards of {network['nic_gb_s']:g} GB/s and {network['nic_us']:g} us"
    sizes_text = f"{rows[0]['T_local']:,} tokens a rank, {shape['H']} heads of {shape['K']} x {shape['V']}"
    hosts = f"{network['per_host']} on a host, {cards}, ports of {network['nvlink_gb_s']:g} GB/s"
    files = ", ".join(f"{name} (commit {commit})" for name, commit in result["calibrated_by"].items())
    return (
        f"{grid(header, lines)}\n\nPredicted, not measured: {sizes_text}, {result['of']}, {hosts}. {result['near']} "
        f"Calibrated by {files}."
    )


_TABLES = {
    "op": op_table, "scale": scale_table, "host": host_table, "traffic": traffic_table, "sanitize": sanitize_table,
    "model": model_table, "released": released_table, "simulation": simulation_table,
}  # fmt: skip


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
        parts += [*tables, f"{path.name}: {footer(result)}"]
    return "\n\n".join(parts)


def run(args: argparse.Namespace) -> int:
    """Print the tables of the given files."""
    print(markdown([Path(path) for path in args.results]))
    return 0
