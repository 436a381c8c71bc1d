"""The table of docs/coming-from.md beside the signatures of the flash-linear-attention that is installed."""

from __future__ import annotations

import ast
import inspect
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from flexsp import ops

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
ROW = re.compile(r"^\| `(\w+)` \| `(\w+)` \|([^|]*)\|([^|]*)\|$", re.MULTILINE)


def _table() -> list[tuple[str, str, set[str], set[str]]]:
    """What is there, what is here, arguments that are only there, and defaults that differ."""
    part = PAGE.read_text().partition("## flash-linear-attention")[2].partition("\n## ")[0]
    rows = [(there, here, *[set(re.findall(r"`([^`]+)`", cell)) for cell in cells])
            for there, here, *cells in ROW.findall(part)]  # fmt: skip
    return rows  # type: ignore[return-value]


def _theirs(root: Path) -> dict[str, dict[str, str | None]]:
    """Arguments of all functions of fla.ops, with defaults as text. Nothing is imported, which would need a GPU."""
    found: dict[str, dict[str, str | None]] = {}
    for path in (root / "ops").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                names, defaults = [x.arg for x in node.args.args], [ast.unparse(x) for x in node.args.defaults]
                if names:
                    none: list[str | None] = [None] * (len(names) - len(defaults))
                    found[node.name] = dict(zip(names, none + defaults, strict=True))
    return found


def _differences(theirs: dict[str, str | None], here: str) -> tuple[set[str], set[str]]:
    ours = inspect.signature(getattr(ops, here)).parameters
    defaults = set()
    for name, text in theirs.items():
        if name in ours and text is not None:
            default = ours[name].default
            if default is inspect.Parameter.empty or default != ast.literal_eval(text):
                defaults.add(f"{name}={text}")
    return {name for name in theirs if name not in ours}, defaults


def test_the_table_has_the_differences() -> None:
    assert _differences({"q": None, "scale": "1.0", "gk": "None"}, "recurrent_gla") == ({"gk"}, {"scale=1.0"})
    spec = find_spec("fla")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("flash-linear-attention is not installed: make test-fla")
    theirs = _theirs(Path(spec.submodule_search_locations[0]))
    wrong = []
    for there, here, only, defaults in _table():
        found = _differences(theirs[there], here)
        if found != (only, defaults):
            wrong.append(f"{there}: only there {sorted(found[0])}, other defaults {sorted(found[1])}")
        required = [name for name, text in theirs[there].items() if text is None]
        if required != [*inspect.signature(getattr(ops, here)).parameters][: len(required)]:
            wrong.append(f"{there}: another order, {required}")
    assert not wrong, "\n".join(wrong)
    known = {there for there, *_ in _table()}
    others = {name for name in ops.__all__ if name.startswith("chunk_") and name in theirs}
    assert others <= known, f"not in the table: {sorted(others - known)}"


def test_the_table_is_read() -> None:
    assert ("fused_recurrent_gla", "recurrent_gla", {"gk"}, set()) in _table() and len(_table()) == 22
