"""Tables and documents that are written from files of results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flexsp.bench import document, record, scale, table
from flexsp.bench.cases import CASES
from flexsp.bench.timing import spread
from flexsp.launch.cli import main
from tests.guides import ROOT
from tests.harness.bench import CPU, _row

DOCUMENTS = ("README.md", "benchmarks/README.md", "docs/variants.md")


def test_tables_of_all_results_can_be_made() -> None:
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    files = [path for path in files if record.load(path)["kind"] != "synthetics"]
    assert {record.load(path)["kind"] for path in files} >= {"host", "traffic", "op", "scale"}
    assert table.markdown(files).count("commit") >= len(files)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_have_the_numbers_of_their_files(name: str) -> None:
    """`flexsp bench document` with these names writes them anew."""
    text = (ROOT / name).read_text()
    assert "<!-- measured: " in text and document.refreshed(ROOT / name) == text


def test_every_result_file_stands_in_a_document() -> None:
    shown = [path for name in DOCUMENTS for path in document.sources(ROOT / name)]
    found = {path.name for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    others = {name for name in found if name.startswith("synthetics_")}  # tests/test_synthetics.py looks at these
    assert found - others == {path.name for path in shown}


def test_findings_of_the_sanitizer_are_a_table(tmp_path: Path) -> None:
    env = record.environment(CPU, ["sanitize"])
    found = {"calls": 40, "kernels": 12, "errors": 0, "failed": ["x"], "findings": [], "seconds": 9}
    record.save(tmp_path / "s.json", {"kind": "sanitize", "environment": env, "tools": {"racecheck": found}})
    assert "| racecheck | 40 | 12 | 0 | 1 |" in table.markdown([tmp_path / "s.json"])


def _measured(kind: str, commit: str = "abc", **parts: Any) -> dict[str, Any]:
    env = {"commit": commit, "device": "NVIDIA H200", "torch": "2", "triton": "3", "flash_linear_attention": "0.6.0"}
    shape = {"B": 1, "H": 32, "K": 128, "V": 128, "dtype": "bfloat16"}
    return {"kind": kind, "environment": {**env, "world_size": 4}, "shape": shape, "cold": [], "rows": [], **parts}


def test_the_readme_has_six_lines_at_most_and_names_commits() -> None:
    cases = ("simple_gla", "linear_attn", "generated_deltanet")
    rows = [
        _row(case, 65536, mode, provider, ms) for case in cases for mode in ("fwd", "fwd_bwd")
        for provider, ms in (("flexsp", 1.25), ("fla", 2.5))
    ]  # fmt: skip
    three = spread([2.0, 1.0, 3.0]).as_dict()
    cold = [{"provider": "flexsp", "case": "simple_gla", "fwd_bwd_s": three}]
    keys = {"case": "simple_gla", "mode": "fwd_bwd", "T_local": 65536, "ms": {}}
    chain = {"schedule": "chain", "efficiency": 0.9, **keys}
    whole = document.readme([_measured("op", rows=rows, cold=cold), _measured("scale", rows=[chain])])
    lines = [line.strip("| ").split(" | ") for line in whole.splitlines() if line.startswith("|")][2:]
    assert len(lines) == len(document._LINES) <= 6
    assert lines[0] == ["simple GLA, forward", "1.25 ms", "flash-linear-attention: 2.50 ms"]
    assert lines[4][1].startswith("2.0 s [1.0, 3.0]")
    assert "on 4 GPUs" in lines[5][0] and lines[5][1] == "0.900"
    few = document.readme([_measured("op", rows=rows[:2]), _measured("scale")])
    assert [line for line in few.splitlines() if "GLA" in line] and "GPUs" not in few and "DeltaNet" not in few
    two = document.readme([_measured("op"), _measured("scale", commit="def")])
    assert "One GPU: commit abc; several: def, torch" in two
    with pytest.raises(ValueError, match="a file of bench op and one of bench scale"):
        document.readme([_measured("op")])


def test_a_document_is_written_from_one_file_of_each_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = next((ROOT / "benchmarks" / "results").glob("host_*.json"))
    (tmp_path / "host_x_20260101.json").write_text(first.read_text())
    path = tmp_path / "doc.md"
    path.write_text("a\n<!-- measured: table host_*.json -->\nold\n<!-- /measured -->\nb\n")
    assert main(["bench", "document", str(path)]) == 0 and "wrote" in capsys.readouterr().out
    text = path.read_text()
    assert text.startswith("a\n<!-- measured") and text.endswith("-->\nb\n") and "| op |" in text and "old" not in text
    assert main(["bench", "document", str(path)]) == 0 and "up to date" in capsys.readouterr().out
    (tmp_path / "host_x_20260202.json").write_text(first.read_text())
    for files, message in (("host_*.json", "several dates of host_x"), ("op_*.json", "got none")):
        path.write_text(f"<!-- measured: table {files} -->\n<!-- /measured -->\n")
        assert main(["bench", "document", str(path)]) == 1
        assert message in capsys.readouterr().err
    path.write_text("<!-- measured: poem host_x_20260101.json -->\n<!-- /measured -->\n")
    assert main(["bench", "document", str(path)]) == 1
    assert (
        "expected a part of kind added, aims, predict, readme, speed, states, table, got 'poem'"
        in capsys.readouterr().err
    )


def test_speeds_of_operators_are_of_one_commit(tmp_path: Path) -> None:
    keys = {"case": "gla", "mode": "fwd"}
    alone = {"schedule": "local", "world_size": 1, "T_local": 65536, "ms": {"median": 1.25}, **keys}
    chain = {"schedule": "chain", "world_size": 4, "T_local": 32768, "ms": {}, "efficiency": 0.9, **keys}
    text = "<!-- measured: speed scale_*.json -->\n<!-- /measured -->\n"
    (tmp_path / "doc.md").write_text(text)
    for name, rows in (("scale_a_20260101", [alone]), ("scale_b_20260101", [chain])):
        record.save(tmp_path / f"{name}.json", _measured("scale", rows=rows))
    written = document.refreshed(tmp_path / "doc.md")
    assert "| `chunk_gla` | 1.25 |  | 0.900 |  |" in written and "efficiency of 4 GPUs" in written and "abc" in written
    record.save(tmp_path / "scale_b_20260101.json", _measured("scale", commit="def", rows=[chain]))
    with pytest.raises(ValueError, match="expected files of one commit, got abc and def"):
        document.refreshed(tmp_path / "doc.md")


def test_files_of_many_operators_have_short_names() -> None:
    assert scale._kind(["gla", "kda"]) == "scale_gla_kda" and scale._kind(["kda", "simple_gla"]) == "scale"
    assert scale._kind(list(CASES)[1:]) == f"scale_{'_'.join(list(CASES)[1:4])}_and_{len(CASES) - 4}_more"
