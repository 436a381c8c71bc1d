"""`flexsp bench document`: writes the measured parts of documents anew from result files.

A part stands between `<!-- measured: KIND FILES -->` and `<!-- /measured -->`. FILES are patterns relative to the
document. So a document's numbers are those of its files, which a test checks, and a new measurement needs no editing.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flexsp.bench import predict
from flexsp.bench.record import case_of, load
from flexsp.bench.table import added_table, aims_table, footer, grid, markdown, shown, states_table

__all__ = ["readme", "refreshed", "run", "sources"]

Result = dict[str, Any]
_PART = re.compile(r"(<!-- measured: (\w+) ([^>]*?) -->\n)(.*?)(<!-- /measured -->)", re.DOTALL)
_BASELINE = "flash-linear-attention"
_TOKENS = 65536
_PREDICTED = ("simple_gla", "gla", "hgrn", "gated_delta_rule", "kda")


def _row(rows: Sequence[Result], **keys: object) -> Result | None:
    found = (row for row in rows if all(row.get(name) == value for name, value in keys.items()))
    return next((row for row in found if "ms" in row or "fwd_bwd_s" in row), None)


def _pair(ours: str, theirs: str, name: str) -> list[str] | None:
    """The two cells of a line; none where ours was not measured."""
    return [ours, f"{name}: {theirs}" if theirs else ""] if ours else None


def _time(case: str, mode: str) -> Callable[[Result, Result], list[str] | None]:
    def cells(op: Result, scale: Result) -> list[str] | None:
        rows = [_row(op["rows"], case=case, mode=mode, T=_TOKENS, provider=provider) for provider in ("flexsp", "fla")]
        ours, theirs = (f"{row['ms']['median']:.2f} ms" if row else "" for row in rows)
        return _pair(ours, theirs, _BASELINE)

    return cells


def _peak(case: str) -> Callable[[Result, Result], list[str] | None]:
    def cells(op: Result, scale: Result) -> list[str] | None:
        rows = [
            _row(op["rows"], case=case, mode="fwd_bwd", T=_TOKENS, provider=provider) for provider in ("flexsp", "fla")
        ]
        ours, theirs = (shown(row["peak_gib"], 1, " GiB") if row else "" for row in rows)
        return _pair(ours, theirs, _BASELINE)

    return cells


def _first(op: Result, scale: Result) -> list[str] | None:
    rows = [_row(op["cold"], case="simple_gla", provider=provider) for provider in ("flexsp", "fla")]
    ours, theirs = (shown(row["fwd_bwd_s"], 1, " s") if row else "" for row in rows)
    return _pair(ours, theirs, _BASELINE)


def _efficiency(op: Result, scale: Result) -> list[str] | None:
    rows = [row for row in scale["rows"] if case_of(row) == "simple_gla" and row["schedule"] != "local"]
    keys = {"mode": "fwd_bwd", "T_local": _TOKENS}
    found = [_row(rows, schedule=name, **keys) for name in ("chain", "all_gather")]
    ours, theirs = (f"{row['efficiency']:.3f}" if row else "" for row in found)
    return _pair(ours, theirs, "states gathered by all ranks")


# Six lines at most, one meaning a cell.
_LINES = (
    ("simple GLA, forward", _time("simple_gla", "fwd")),
    ("linear attention, forward + backward", _time("linear_attn", "fwd_bwd")),
    ("DeltaNet, generated from three functions, forward + backward", _time("generated_deltanet", "fwd_bwd")),
    ("linear attention, forward + backward: peak memory", _peak("linear_attn")),
    ("simple GLA: the first training step, with compilation", _first),
    ("simple GLA, forward + backward on {ranks} GPUs, 65,536 tokens each: efficiency", _efficiency),
)


def readme(results: Sequence[Result]) -> str:
    """The README's table, from one file of `bench op` and one of `bench scale`."""
    kinds = sorted(result["kind"] for result in results)
    if kinds != ["op", "scale"]:
        raise ValueError(f"results: expected a file of bench op and one of bench scale, got {', '.join(kinds)}")
    op, scale = sorted(results, key=lambda result: str(result["kind"]))
    lines = []
    for text, cells in _LINES:
        found = cells(op, scale)
        if found:
            lines.append([text.format(ranks=scale["environment"]["world_size"]), *found])
    name = op["environment"]["device"].removeprefix("NVIDIA ")
    sizes = "B=1, 32 heads, K=V=128" if [op["shape"][x] for x in "BHKV"] == [1, 32, 128, 128] else str(op["shape"])
    header = [f"one {name}, 65,536 tokens, {sizes}, {op['shape']['dtype']}", "flexsp", "beside it, in the same run"]
    env = op["environment"]
    versions = f"torch {env['torch']}, Triton {env['triton']}, {_BASELINE} {env['flash_linear_attention']}"
    note = "Times are medians; memory and the first step are medians of repeated runs with [smallest, largest]."
    alone, ranks = (str(result["environment"]["commit"])[:7] for result in (op, scale))
    commits = f"Commit {alone}" if alone == ranks else f"One GPU: commit {alone}; several: {ranks}"
    return f"{grid(header, lines)}\n\n{note} {commits}, {versions}."


def _tables(of: Callable[[Result], str]) -> Callable[[Sequence[Path]], str]:
    def tables(paths: Sequence[Path]) -> str:
        results = {path.name: load(path) for path in paths}
        return "\n\n".join(f"{of(result)}\n\n{name}: {footer(result)}" for name, result in results.items())

    return tables


_OPERATORS = {
    "gla": "chunk_gla", "rwkv7": "chunk_rwkv7", "hgrn": "chunk_hgrn", "mlstm": "chunk_mlstm",
    "mamba": "selective_scan", "mamba2": "mamba2_ssd", "mamba3": "mamba3", "simple_gla": "chunk_simple_gla",
    "linear_attn": "chunk_linear_attn", "retention": "chunk_retention", "lightning": "chunk_lightning_attn",
    "delta_rule": "chunk_delta_rule", "gated_delta_rule": "chunk_gated_delta_rule", "kda": "chunk_kda",
    "gated_delta_product": "chunk_gated_delta_product",
}  # fmt: skip
"""Of the cases of `bench scale`, what users call."""
_LOCAL = 32768


def _speed(paths: Sequence[Path]) -> str:
    """Milliseconds of operators on one GPU, and the chain's efficiency, from files of `bench scale` of one commit."""
    results = [load(path) for path in paths]
    commits = {str(result["environment"]["commit"])[:7] for result in results}
    if len(commits) > 1:
        raise ValueError(f"results: expected files of one commit, got {' and '.join(sorted(commits))}")
    rows = [row for result in results for row in result["rows"]]
    worlds = sorted({row["world_size"] for row in rows} - {1})
    lines = []
    for case, name in _OPERATORS.items():
        keys = [{"case": case, "mode": mode} for mode in ("fwd", "fwd_bwd")]
        alone = [_row(rows, schedule="local", world_size=1, T_local=_TOKENS, **key) for key in keys]
        ranks = [
            _row(rows, schedule="chain", world_size=n, T_local=_LOCAL, **key) for n in worlds for key in keys
        ]  # fmt: skip
        cells = [f"{row['ms']['median']:.2f}" if row else "" for row in alone]
        lines.append([f"`{name}`", *cells, *(f"{row['efficiency']:.3f}" if row else "" for row in ranks)])
    efficiencies = [f"efficiency of {n} GPUs, {mode}" for n in worlds for mode in ("forward", "with backward")]
    env = results[0]["environment"]
    note = f"Commit {min(commits)}, torch {env['torch']}, Triton {env['triton']}."
    return f"{grid(['operator', 'forward', 'forward + backward', *efficiencies], lines)}\n\n{note}"


_KINDS: dict[str, Callable[[Sequence[Path]], str]] = {
    "added": _tables(added_table),
    "aims": lambda paths: aims_table([load(path) for path in paths]),
    "predict": lambda paths: predict.report([load(path) for path in paths], 8, _PREDICTED),
    "readme": lambda paths: readme([load(path) for path in paths]),
    "speed": _speed,
    "states": _tables(states_table),
    "table": markdown,
}


def _files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """The files of all patterns; an error where one has none, or one measurement of two dates."""
    found: list[Path] = []
    for pattern in patterns:
        paths = sorted(folder.glob(pattern))
        stems = [re.sub(r"_\d{8}$", "", path.stem) for path in paths]
        twice = sorted({stem for stem in stems if stems.count(stem) > 1})
        if not paths or twice:
            got = f"several dates of {', '.join(twice)}" if twice else "none"
            raise ValueError(f"{pattern}: expected one result file of each measurement, got {got}")
        found += paths
    return found


def sources(document: Path) -> list[Path]:
    """Result files that a document shows."""
    parts = _PART.finditer(document.read_text())
    return [path for part in parts for path in _files(document.parent, part[3].split())]


def refreshed(document: Path) -> str:
    """The document's text with its measured parts written anew."""

    def part(match: re.Match[str]) -> str:
        start, kind, patterns, _, end = match.groups()
        if kind not in _KINDS:
            raise ValueError(f"{document}: expected a part of kind {', '.join(_KINDS)}, got {kind!r}")
        return f"{start}{_KINDS[kind](_files(document.parent, patterns.split()))}\n{end}"

    return _PART.sub(part, document.read_text())


def run(args: argparse.Namespace) -> int:
    """Write the measured parts of the given documents anew."""
    for name in args.documents:
        path = Path(name)
        text = refreshed(path)
        if text == path.read_text():
            print(f"{name}: up to date")
        else:
            path.write_text(text)
            print(f"wrote {name}")
    return 0
