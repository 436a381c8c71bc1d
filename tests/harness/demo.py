"""examples/train_lm.py in small: its modules, its arguments, and what it writes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

__all__ = ["MODEL", "ROOT", "SCHEDULE", "arguments", "demo", "module", "rows_of", "text_file", "train", "write_text"]

ROOT = Path(__file__).resolve().parents[2]
MODEL = ["--tokens", "96", "--dim", "32", "--layers", "2", "--heads", "2", "--eval-windows", "2", "--sample", "8"]
# float64, so that the number of ranks leaves no trace but rounding.
SCHEDULE = ["--dtype", "float64", "--lr", "2e-3", "--warmup", "3", "--hold", "6"]


def module(name: str) -> ModuleType:
    """A file of examples/ as a module, loaded once a process."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
        assert spec and spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def demo() -> ModuleType:
    """The script, after the files that it imports by their bare names as scripts do."""
    module("checkpoint")
    module("training")
    return module("train_lm")


def train(sp: Any, argv: list[str]) -> None:
    """One invocation on the ranks of the pool."""
    script = demo()
    script.run(script.parse_options(argv), sp)


def write_text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text("".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(60)))
    return path


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    return write_text(tmp_path)


def arguments(text: Path, name: str, *more: str) -> list[str]:
    return [*MODEL, "--data", str(text), "--runs", str(text.parent), "--name", name, *more]


def rows_of(folder: Path, key: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if key in row]
