"""Tables and documents that are written from files of results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flexsp.bench import document, record, scale, summary, table
from flexsp.bench.cases import CASES
from flexsp.launch.cli import main
from flexsp.nn.recurrent import RecurrentLayer
from tests.guides import ROOT
from tests.harness.bench import CPU, _row
from tests.harness.layers import OF_EACH
from tests.harness.ops import PARALLEL, PUBLIC

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


def test_every_op_and_layer_has_its_rows() -> None:
    page = (ROOT / "docs" / "variants.md").read_text()
    parts = {part.split("\n", 1)[0]: part for part in page.split("\n## ")}
    layers = {name for name, (cls, *_) in OF_EACH.items() if issubclass(cls, RecurrentLayer)}
    wanted = {"Equations": PUBLIC, "Programs, states and tests": PARALLEL | layers}
    missing = {title: sorted(x for x in names if f"`{x}`" not in parts[title]) for title, names in wanted.items()}
    assert not any(missing.values()), f"docs/variants.md: expected rows with these names: {missing}"


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


def _saved(folder: Path, name: str, kind: str, commit: str, date: str, **parts: Any) -> Path:
    result = _measured(kind, commit, **parts)
    result["environment"]["date"] = date
    record.save(folder / name, result)
    return folder / name


def test_an_earlier_time_of_an_op_alone_gives_way_to_a_later_one(tmp_path: Path) -> None:
    def file(commit: str, date: str, *rows: Any) -> Path:
        made = [{**row, "floor_ms": 0.5, "peak_gib": 2.0} for row in rows]
        return _saved(tmp_path, f"{commit}.json", "op", commit, date, rows=made)

    alone = [_row("kda", 64, mode, "flexsp", 1.0) for mode in ("fwd", "fwd_bwd")]
    shorter = [_row("kda", 32, "fwd", "flexsp", 8.0)]
    peer = [_row("kda", 64, "fwd", "fla", 4.0)]
    paths = [
        file("beside1", "2026-01-01", *alone, *peer), file("later", "2026-01-03", *alone, *shorter),
        file("before", "2026-01-02", *alone), file("latest", "2026-01-04", *alone),
    ]  # fmt: skip
    lines = [line.split(" | ") for line in summary.operators(paths).splitlines() if line.startswith("| `")]
    assert [line[-1] for line in lines] == ["beside1 |", "latest |"]
    assert lines[0][2:4] == ["1.00 / 1.00", "flash-linear-attention: 4.00 / -"]


def test_of_the_same_training_step_the_newest_is_shown(tmp_path: Path) -> None:
    row = {"T": 64, "world_size": 1, "unmodified": False, "step_s": 2.0, "tokens_per_s": 32.0, "peak_gib": 1.0}
    paths = [
        _saved(tmp_path, f"{commit}.json", "model", commit, date, rows=[row])
        for commit, date in (("new", "2026-01-02"), ("old", "2026-01-01"))
    ]
    other = _saved(tmp_path, "c.json", "model", "c", "2026-01-01", rows=[{**row, "T": 128, "error": "memory"}])
    lines = [line for line in summary.models([*paths, other]).splitlines() if line.startswith("| 1")]
    assert [line.rpartition(" | ")[2] for line in lines] == ["new |", "c |"] and "did not fit" in lines[1]


def test_a_document_is_written_from_one_file_of_each_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = next((ROOT / "benchmarks" / "results").glob("host_*.json"))
    (tmp_path / "host_x_20260101.json").write_text(first.read_text())
    path = tmp_path / "doc.md"
    path.write_text("a\n<!-- measured: hosts host_*.json -->\nold\n<!-- /measured -->\nb\n")
    assert main(["bench", "document", str(path)]) == 0 and "wrote" in capsys.readouterr().out
    text = path.read_text()
    assert text.startswith("a\n<!-- measured") and text.endswith("-->\nb\n") and "| op |" in text and "old" not in text
    assert main(["bench", "document", str(path)]) == 0 and "up to date" in capsys.readouterr().out
    (tmp_path / "host_x_20260202.json").write_text(first.read_text())
    for files, message in (("host_*.json", "several dates of host_x"), ("op_*.json", "got none")):
        path.write_text(f"<!-- measured: hosts {files} -->\n<!-- /measured -->\n")
        assert main(["bench", "document", str(path)]) == 1
        assert message in capsys.readouterr().err
    path.write_text("<!-- measured: poem host_x_20260101.json -->\n<!-- /measured -->\n")
    assert main(["bench", "document", str(path)]) == 1
    assert (
        "expected a part of kind beside_ranks, exchanges, hosts, models, operators, ratios, released, "
        in capsys.readouterr().err
    )


def test_speeds_of_operators_are_of_one_commit(tmp_path: Path) -> None:
    keys = {"case": "hgrn", "mode": "fwd"}
    alone = {"schedule": "local", "world_size": 1, "T_local": 65536, "ms": {"median": 1.25}, **keys}
    chain = {"schedule": "chain", "world_size": 4, "T_local": 32768, "ms": {}, "efficiency": 0.9, **keys}
    text = "<!-- measured: speed scale_*.json -->\n<!-- /measured -->\n"
    (tmp_path / "doc.md").write_text(text)
    for name, rows in (("scale_a_20260101", [alone]), ("scale_b_20260101", [chain])):
        record.save(tmp_path / f"{name}.json", _measured("scale", rows=rows))
    written = document.refreshed(tmp_path / "doc.md")
    assert "| `chunk_hgrn` | 1.25 |  | 0.900 |  |" in written and "efficiency of 4 GPUs" in written and "abc" in written
    record.save(tmp_path / "scale_b_20260101.json", _measured("scale", commit="def", rows=[chain]))
    with pytest.raises(ValueError, match="expected files of one commit, got abc and def"):
        document.refreshed(tmp_path / "doc.md")


def test_files_of_many_operators_have_short_names() -> None:
    assert scale._kind(["gla", "kda"]) == "scale_gla_kda" and scale._kind(["kda", "simple_gla"]) == "scale"
    assert scale._kind(list(CASES)[1:]) == f"scale_{'_'.join(list(CASES)[1:4])}_and_{len(CASES) - 4}_more"
