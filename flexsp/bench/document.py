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
from flexsp.bench.table import added_table, aims_table, footer, grid, markdown, shown

__all__ = ["readme", "refreshed", "run", "sources"]

Result = dict[str, Any]
_PART = re.compile(r"(<!-- measured: (\w+) ([^>]*?) -->\n)(.*?)(<!-- /measured -->)", re.DOTALL)
_BASELINE = "flash-linear-attention"
_TOKENS = 65536


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
    """The README's table, from one file of `bench op` and one of `bench scale`, measured at one commit."""
    kinds = sorted(result["kind"] for result in results)
    if kinds != ["op", "scale"]:
        raise ValueError(f"results: expected a file of bench op and one of bench scale, got {', '.join(kinds)}")
    commits = sorted({str(result["environment"]["commit"]) for result in results})
    if len(commits) > 1:
        raise ValueError(f"results: expected files of one commit, got {' and '.join(commits)}")
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
    return f"{grid(header, lines)}\n\n{note} Commit {commits[0][:7]}, {versions}."


def _added(paths: Sequence[Path]) -> str:
    results = {path.name: load(path) for path in paths}
    return "\n\n".join(f"{added_table(result)}\n\n{name}: {footer(result)}" for name, result in results.items())


_KINDS: dict[str, Callable[[Sequence[Path]], str]] = {
    "added": _added,
    "aims": lambda paths: aims_table([load(path) for path in paths]),
    "predict": lambda paths: predict.report([load(path) for path in paths], 8),
    "readme": lambda paths: readme([load(path) for path in paths]),
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
