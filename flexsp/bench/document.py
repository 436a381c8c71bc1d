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

from flexsp.bench.record import load
from flexsp.bench.summary import (
    beside_ranks,
    exchanges,
    hosts,
    models,
    operators,
    ratios,
    released,
    sanitizers,
    simulated,
    traffic,
)
from flexsp.bench.table import grid

__all__ = ["refreshed", "run", "sources"]

Result = dict[str, Any]
_PART = re.compile(r"(<!-- measured: (\w+) ([^>]*?) -->\n)(.*?)(<!-- /measured -->)", re.DOTALL)
_TOKENS = 65536


def _row(rows: Sequence[Result], **keys: object) -> Result | None:
    found = (row for row in rows if all(row.get(name) == value for name, value in keys.items()))
    return next((row for row in found if "ms" in row), None)


_OPERATORS = {
    "hgrn": "chunk_hgrn", "mamba": "selective_scan", "linear_attn": "chunk_linear_attn", "retention": "chunk_retention",
    "lightning": "chunk_lightning_attn",
}  # fmt: skip
"""Of the cases of `bench scale`, what users call; without those whose kernels are others than the measured ones."""
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
    "beside_ranks": beside_ranks,
    "exchanges": exchanges,
    "hosts": hosts,
    "models": models,
    "operators": operators,
    "ratios": ratios,
    "released": released,
    "sanitizers": sanitizers,
    "simulated": simulated,
    "speed": _speed,
    "traffic": traffic,
}


_MAY_BE_EMPTY = ("ratios", "released")
"""Kinds whose part says that nothing was measured where there are no files."""


def _files(folder: Path, patterns: Sequence[str], kind: str) -> list[Path]:
    """The files of all patterns; an error where one has none, or one measurement of two dates."""
    found: list[Path] = []
    for pattern in patterns:
        paths = sorted(folder.glob(pattern))
        stems = [re.sub(r"_\d{8}$", "", path.stem) for path in paths]
        twice = sorted({stem for stem in stems if stems.count(stem) > 1})
        if (not paths and kind not in _MAY_BE_EMPTY) or twice:
            got = f"several dates of {', '.join(twice)}" if twice else "none"
            raise ValueError(f"{pattern}: expected one result file of each measurement, got {got}")
        found += paths
    return found


def sources(document: Path) -> list[Path]:
    """Result files that a document shows."""
    parts = _PART.finditer(document.read_text())
    return [path for part in parts for path in _files(document.parent, part[3].split(), part[2])]


def refreshed(document: Path) -> str:
    """The document's text with its measured parts written anew."""

    def part(match: re.Match[str]) -> str:
        start, kind, patterns, _, end = match.groups()
        if kind not in _KINDS:
            raise ValueError(f"{document}: expected a part of kind {', '.join(_KINDS)}, got {kind!r}")
        return f"{start}{_KINDS[kind](_files(document.parent, patterns.split(), kind))}\n{end}"

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
