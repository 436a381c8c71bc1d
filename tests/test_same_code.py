"""tests/same_code.py: what counts as the same kernel."""

from __future__ import annotations

import json
from pathlib import Path

from tests.same_code import compare, kernels_in

PTX = """
.version 8.8
.visible .entry walk(
	.param .u64 walk_param_0
)
{
	.loc	1 {line} 0                         // walks.py:{line}:0
	ld.param.b64 	%rd1, [walk_param_0];    // a comment
	{instruction}
$L__tmp{line}:
	ret;
}
	.file	1 "/somewhere" "walks.py"
	.section	.debug_abbrev
	{line}
"""


def cache(folder: Path, name: str = "walk", line: int = 7, instruction: str = "bar.sync 0;", shared: int = 0) -> Path:
    """A folder as Triton's cache, with one kernel in it."""
    folder.mkdir()
    text = PTX.replace("{line}", str(line)).replace("{instruction}", instruction).replace("walk", name)
    (folder / f"{name}.ptx").write_text(text)
    (folder / f"{name}.json").write_text(json.dumps({"shared": shared, "num_warps": 4, "target": {"arch": 90}}))
    return folder


def test_names_and_places_do_not_count(tmp_path: Path) -> None:
    base = kernels_in(cache(tmp_path / "base"))
    assert len(base) == 1
    assert not compare(base, kernels_in(cache(tmp_path / "now", "stroll", line=12)))


def test_instructions_and_shared_memory_count(tmp_path: Path) -> None:
    base = kernels_in(cache(tmp_path / "base"))
    for number, change in enumerate(({"instruction": "bar.sync 1;"}, {"shared": 16}, {"name": "wal", "shared": 16})):
        now = kernels_in(cache(tmp_path / str(number), **change))
        assert compare(base, now), change
    (told,) = compare(base, kernels_in(cache(tmp_path / "last", instruction="bar.sync 1;")))
    assert "bar.sync 0;" in told and "bar.sync 1;" in told
    assert compare(base, {}) == ["walk: 1 of BASE are gone"]
