"""One table of several result files of a kind, for documents. `flexsp bench table` has every number of one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexsp.bench.record import case_of, gates_of, load
from flexsp.bench.table import (
    RELEASED_HEADER,
    grid,
    layers_of,
    released_lines,
    shown,
    simulation_table,
    times_and_ratios,
)

__all__ = [
    "beside_ranks", "exchanges", "hosts", "models", "operators", "ratios", "released", "sanitizers", "short_sources",
    "simulated", "traffic",
]  # fmt: skip

Result = dict[str, Any]
_LIBRARIES = {
    "fla": "flash-linear-attention", "flashqla": "FlashQLA", "torch": "torch's context_parallel", "pytorch": "PyTorch",
    "cudnn": "cuDNN",
}  # fmt: skip
_VERSIONS = (
    ("torch", "torch", ""), ("Triton", "triton", ""), ("flash-linear-attention", "flash_linear_attention", "fla"),
    ("FlashQLA", "flash_qla", "flashqla"), ("mlstm_kernels", "mlstm_kernels", "mlstm_kernels"),
    ("mamba_ssm", "mamba_ssm", "mamba_ssm"), ("cuDNN frontend", "cudnn_frontend", "cudnn"),
)  # fmt: skip
"""Name, key of a record, and in which rows it ran."""
MODES = ("fwd", "fwd_bwd")


def library(provider: str) -> str:
    return _LIBRARIES.get(provider, provider)


def commit_of(result: Result) -> str:
    return str(result["environment"]["commit"] or "unknown")[:7]


def _providers(result: Result) -> set[str]:
    rows = result.get("rows", [])
    unmodified = {"fla"} if any(row.get("unmodified") for row in rows) else set()
    return unmodified | {str(row.get("provider", row.get("schedule"))) for row in rows}


def versions(results: Sequence[Result]) -> str:
    """Of all results, each version of what ran once: "torch 2.11.0, Triton 3.6.0 and 3.9.0"."""
    found = []
    for name, key, ran in _VERSIONS:
        of = [result for result in results if not ran or ran in _providers(result)]
        values = dict.fromkeys(str(result["environment"][key]) for result in of if result["environment"].get(key))
        found += [f"{name} {' and '.join(values)}"] if values else []
    return ", ".join(found)


def short_sources(results: dict[str, Result]) -> str:
    """The files with their commits, and the versions; a file has its own command and date."""
    files = ", ".join(f"{name} (commit {commit_of(result)})" for name, result in results.items())
    return f"{files}; {versions(list(results.values()))}."


def _load(paths: Sequence[Path]) -> dict[str, Result]:
    return {path.name: load(path) for path in paths}


def _device(result: Result) -> str:
    return str(result["environment"]["device"]).removeprefix("NVIDIA ")


def _cells(rows: Sequence[Result | None], digits: int, *keys: str) -> str:
    """The numbers of both passes as "1.25 / 4.50"; a pass that was not measured is a dash."""
    texts = []
    for row in rows:
        value: Any = row
        for key in keys:
            value = value.get(key) if value else None
        texts.append("-" if value is None else f"{value:.{digits}f}")
    return "" if set(texts) == {"-"} else " / ".join(texts)


def operators(paths: Sequence[Path]) -> str:
    """An operator a line, with both passes, beside other libraries; of each file the longest sequence.

    A line without another library is left out where a later file has the same sizes on the same GPU.
    """
    results = _load(paths)
    lines: list[list[str]] = []
    alone: dict[tuple[str, ...], tuple[str, list[str]]] = {}
    for result in results.values():
        shape, rows = result["shape"], result["rows"]
        for case in dict.fromkeys(row["case"] for row in rows if row["provider"] == "flexsp"):
            T = max(row["T"] for row in rows if row["case"] == case)
            keyed = {(row["provider"], row.get("mode")): row for row in rows if (row["case"], row["T"]) == (case, T)}
            ours = [keyed.get(("flexsp", mode)) for mode in MODES]
            others = [
                f"{library(name)}: {times}"
                for name in dict.fromkeys(provider for provider, _ in keyed if provider != "flexsp")
                if (times := _cells([keyed.get((name, mode)) for mode in MODES], 2, "ms", "median"))
            ]
            gates = "" if gates_of(result) == "mild" else f", gates {gates_of(result)}"
            sizes = f"{shape['B']} x {T}, {shape['H']} heads of {shape['K']} x {shape['V']}{gates}"
            peak = shown(ours[1]["peak_gib"], 1).partition(" ")[0] if ours[1] else ""
            floor = _cells(ours, 2, "floor_ms")
            line = [f"`{case}`", sizes, _cells(ours, 2, "ms", "median"), "; ".join(others), floor, peak]
            line.append(commit_of(result))
            if not others:
                key, date = (_device(result), case, sizes), result["environment"]["date"]
                if key in alone and alone[key][0] >= date:
                    continue
                if key in alone:
                    lines.remove(alone[key][1])
                alone[key] = (date, line)
            lines.append(line)
    header = ["op", "sequences x tokens", "flexsp ms", "beside it, ms", "floor ms", "peak GiB", "commit"]
    return f"{grid(header, lines)}\n\n{short_sources(results)}"


def exchanges(paths: Sequence[Path]) -> str:
    """What the chain adds to one rank's time by tokens a rank, its efficiency at 32,768, and what all_gather adds."""
    results = _load(paths)
    lengths = sorted({row["T_local"] for result in results.values() for row in result["rows"]})
    gathers = any(row["schedule"] == "all_gather" for result in results.values() for row in result["rows"])
    lines = []
    for result in results.values():
        keyed = {(case_of(row), row["schedule"], row["T_local"], row["mode"]): row for row in result["rows"]}
        for case in dict.fromkeys(key[0] for key in keyed):

            def cells(schedule: str, T: int, key: str, digits: int, keyed: Any = keyed, case: str = case) -> str:
                return _cells([keyed.get((case, schedule, T, mode)) for mode in MODES], digits, key)

            lines.append([f"`{case}`", *(cells("chain", T, "added_us", 0) for T in lengths)])
            lines[-1].append(cells("chain", 32768, "efficiency", 3))
            lines[-1] += [cells("all_gather", lengths[-1], "added_us", 0)] if gathers else []
    header = ["op", *(f"chain adds us, {T}" for T in lengths), "efficiency, 32768"]
    header += [f"all_gather adds us, {lengths[-1]}"] if gathers else []
    return f"{grid(header, lines)}\n\n{short_sources(results)}"


def beside_ranks(paths: Sequence[Path]) -> str:
    """One rank alone and all ranks, with other libraries' ways over ranks: milliseconds and the efficiency of each."""
    results, lines = _load(paths), []
    for result in results.values():
        for keys in dict.fromkeys((case_of(row), row["T_local"]) for row in result["rows"]):
            rows = [row for row in result["rows"] if (case_of(row), row["T_local"]) == keys]
            keyed = {(row["schedule"], row["mode"]): row for row in rows}
            names = [name for name, _ in dict.fromkeys(keyed) if name in ("chain", *_LIBRARIES)]
            cells = {
                name: f"{_cells(found, 2, 'ms', 'median')} ({_cells(found, 3, 'efficiency')})"
                for name in dict.fromkeys(names)
                for found in [[keyed.get((name, mode)) for mode in MODES]]
            }
            ours, one = cells.pop("chain"), [keyed.get(("local", mode)) for mode in MODES]
            others = "; ".join(f"{library(name)}: {text}" for name, text in cells.items())
            shape, gpus = result["shape"], str(result["environment"]["world_size"])
            sizes = f"{keys[1]}, {shape['H']} heads of {shape['K']} x {shape['V']}"
            lines.append([f"`{keys[0]}`", gpus, sizes, _cells(one, 2, "slowest_rank_ms"), ours, others])
    header = ["op", "GPUs", "tokens a GPU", "one GPU ms", "flexsp ms (efficiency)", "beside it, ms (efficiency)"]
    return f"{grid(header, lines)}\n\n{short_sources(results)}"


def simulated(paths: Sequence[Path]) -> str:
    """Predictions of `flexsp simulate`, with the commit whose schedules they are of."""
    parts = [f"{simulation_table(result)} {short_sources({name: result})}" for name, result in _load(paths).items()]
    return "\n\n".join(parts)


def models(paths: Sequence[Path]) -> str:
    """Training steps of a whole model, by GPUs and length; of the same step the newest."""
    results, lines = _load(paths), {}
    for result in sorted(results.values(), key=lambda result: str(result["environment"]["date"])):
        for row in result["rows"]:
            numbers = ["did not fit", "", ""]
            if "error" not in row:
                numbers = [f"{row['step_s']:.2f}", f"{row['tokens_per_s']:,.0f}", f"{row['peak_gib']:.1f}"]
            who = "unmodified, flash-linear-attention" if row["unmodified"] else "flexsp"
            key = (row["world_size"], row["T"], row.get("sequences", 1), who)
            lines[key] = [str(key[0]), f"{key[2]} x {key[1]}", who, *numbers, commit_of(result)]
    header = ["GPUs", "sequences x tokens", "kernels", "s a step", "tokens/s", "peak GiB a GPU", "commit"]
    return f"{grid(header, [lines[key] for key in sorted(lines)])}\n\n{short_sources(results)}"


def hosts(paths: Sequence[Path]) -> str:
    """The host's microseconds for a call: forward, forward that autograd records, forward and backward."""
    results, lines = _load(paths), []
    for result in results.values():
        for case in dict.fromkeys(row["case"] for row in result["rows"]):
            rows = [row for row in result["rows"] if row["case"] == case]
            lines.append([f"`{case}`", *(shown(row["dispatcher_us"], 0) for row in rows)])
    return f"{grid(['op', 'forward', 'forward, recorded', 'forward + backward'], lines)}\n\n{short_sources(results)}"


def traffic(paths: Sequence[Path]) -> str:
    """Bytes that all kernels of an operator move, counted and predicted."""
    results, lines = _load(paths), []
    for result in results.values():
        moved, predicted = (
            sum(row[f"{x}read"] + row[f"{x}written"] for row in result["rows"]) / 1e9 for x in ("", "predicted_")
        )
        lines.append([f"`{result['case']}`", f"{moved:.1f}", f"{predicted:.1f}", f"{moved / predicted:.2f}"])
    return f"{grid(['op', 'GB', 'predicted GB', 'ratio'], lines)}\n\n{short_sources(results)}"


def sanitizers(paths: Sequence[Path]) -> str:
    """What each run of `make sanitize` called, and how many errors each tool reported."""
    results, lines = _load(paths), []
    tools = ("racecheck", "synccheck", "memcheck")
    for name, result in results.items():
        found = result["tools"]
        counts = [str(found["without a tool"][key]) for key in ("calls", "kernels")]
        errors = [str(found[tool]["errors"] + len(found[tool].get("failed", []))) for tool in tools]
        lines.append([name.removeprefix("sanitize_").removesuffix(".json"), *counts, *errors, commit_of(result)])
    header = ["run", "calls", "kernels", *(f"errors of {tool}" for tool in tools), "commit"]
    return f"{grid(header, lines)}\n\n{versions(list(results.values()))}."


_UNMEASURED = "Not measured yet."


def released(paths: Sequence[Path]) -> str:
    """Layers of released models, every batch and length, and which libraries differ."""
    results = _load(paths)
    if not results:
        return _UNMEASURED
    lines = [[_device(result), *line] for result in results.values() for line in released_lines(result)]
    differ: dict[str, dict[str, None]] = {}  # by library and layer
    for text in (text for result in results.values() for text in result.get("differ", [])):
        of, _, what = text.rpartition(": ")
        differ.setdefault(of, {})[what] = None
    notes = "".join(f"- {of}: {'; '.join(what)}\n" for of, what in differ.items())
    return f"{grid(['GPU', *RELEASED_HEADER], lines)}\n\n{notes}\n{short_sources(results)}".replace("\n\n\n", "\n\n")


def ratios(paths: Sequence[Path]) -> str:
    """Layers of released models, one sequence of 32,768 tokens: milliseconds and the ratio to the fastest library, of
    each GPU. Layers that no library was measured beside are left out."""
    results = _load(paths)
    if not results:
        return _UNMEASURED
    devices = list(dict.fromkeys(_device(result) for result in results.values()))
    found: dict[str, dict[str, list[str]]] = {}
    about: dict[str, list[str]] = {}
    for result in results.values():
        for (case, B, T), keyed in layers_of(result).items():
            if (B, T) != (1, 32768):
                continue
            first, (ms, share, names) = next(iter(keyed.values())), times_and_ratios(keyed)
            about.setdefault(case, [case, first["sizes"], first["gates"]])
            of = f"{share} of {' and '.join(map(library, names))}" if share else ""
            found.setdefault(case, {})[_device(result)] = [ms, of]
    lines = [
        [*about[case], *(x for device in devices for x in by.get(device, ["", ""]))]
        for case, by in found.items() if any(ratio for _, ratio in by.values())
    ]  # fmt: skip
    columns = [x for device in devices for x in (f"flexsp ms, {device}", "ratio to the fastest library")]
    return f"{grid(['layer', 'heads x K/V', 'gates', *columns], lines)}\n\n{short_sources(results)}"
