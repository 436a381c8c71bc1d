"""What runs on GPUs leave in benchmarks/results/tested, and the tables that docs/tested.md makes of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexsp.bench import record
from flexsp.runtime.tested_versions import COVERED
from tests import tested

MATRIX = "tests/gpu/test_matrix_gpu.py"


def run(commit: str, date: str, rows: list[tuple[Any, ...]], part: str = "1/1", **env: Any) -> tested.Run:
    env = {"commit": commit, "date": date, "device": "NVIDIA H200", "world_size": 1, "triton": "3.6.0+x"} | env
    keys = ("file", "op", "passed", "failed", "skipped")
    return {"environment": env, "part": part, "rows": [dict(zip(keys, row, strict=True)) for row in rows]}


def test_the_page_shows_the_records() -> None:
    """`python -m tests.tested` writes it anew."""
    text = tested.PAGE.read_text()
    shown = tested.refreshed(text, tested.load()) == text
    assert shown, "docs/tested.md lacks an op or a run: `python -m tests.tested` writes its tables"
    assert "| `chunk_kda` |" in text


def test_runs_that_count_as_covered_have_a_record() -> None:
    runs = [
        (env["triton"], env["device"], env["commit"], sum(row["passed"] or 0 for row in found["rows"]))
        for found in tested.load() for env in [found["environment"]]
    ]  # fmt: skip
    assert {(run.triton, run.gpu, run.commit, run.passed) for run in COVERED} <= set(runs)


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("test_matrix", "test_ops[simple_gla_gamma-48-float16-packed]", "chunk_simple_gla"),
        ("test_matrix", "test_large_states[gla-(200, 150)-float32-whole]", "variant gla"),
        ("test_nonfinite", "test_stays_in_its_document[variant rwkv6-float32]", "variant rwkv6"),
        ("test_nonfinite", "test_stays_in_its_document[mamba2_groups-float32]", "mamba2_ssd"),
        ("test_vector_gates", "test_the_same_bits[gla]", "chunk_gla"),
        ("test_memory", "test_mamba3_kernels_of_large_tensors", "mamba3"),
        ("test_memory", "test_selective_scan[how0-96-16-dtype2-False]", "selective_scan"),
        ("test_states", "test_mlstm_as_a_pair[packed]", "programs with several states"),
        ("test_delta_ops", "test_reflections_of_a_long_text[product-1000]", "chunk_gated_delta_product"),
        ("test_new_things", "test_x[1]", "test_new_things"),
    ],
)
def test_an_op_is_told_from_a_tests_name(file: str, text: str, expected: str) -> None:
    assert tested.subject(f"tests/gpu/{file}_gpu.py", text) == expected


def test_every_file_has_a_subject() -> None:
    """Where no word of a test is an op: else the table would show the file's name."""
    files = [tested.short(str(path)) for path in (tested.ROOT / "tests" / "gpu").glob("*.py")]
    assert {name for name in files if name.startswith(("test_", "ranks_"))} == {*tested.SUBJECTS}


def test_lines_of_scripts_are_counted() -> None:
    counts: tested.Counts = {}
    lines = ["ok     kda bfloat16 [3]: 1e-3\n", "FAILED kda float32 [3]: 1\n", "  rank 1: kda\n", "ok gla\n"]
    tested.count_lines("tests/gpu/ranks_operators.py", lines, counts)
    tested.count_lines("tests/gpu/ranks_ops.py", ["  FAIL peer          every kda  1.0 s\n"], counts)
    found = {op: dict(count) for (_, op), count in counts.items()}
    assert found.pop("ops over ranks: graphs, absent ranks") == {"failed": 1}
    assert found == {"chunk_kda": {"passed": 1, "failed": 1}, "chunk_gla": {"passed": 1}}


@pytest.mark.parametrize("stopped", [False, True])
def test_a_session_leaves_a_record(stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"commit": "abc", "dirty": False, "date": "2026-01-02T03:04:05+00:00", "device": "NVIDIA H200"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(record, "environment", lambda device, command: env)
    recorder = tested.Recorder(tmp_path, "1/2")

    def report(name: str, when: str, outcome: str) -> Any:
        return SimpleNamespace(nodeid=f"{MATRIX}::test_ops[{name}]", when=when, outcome=outcome)

    recorder.pytest_runtest_logreport(report("kda-1", "setup", "skipped"))
    recorder.pytest_sessionfinish(0)
    assert not list(tmp_path.iterdir()), "nothing ran, and a record was written"
    ends = {"kda-2": ("passed", "passed"), "kda-3": ("passed", "failed"), "gla-1": ("failed", "passed")}
    for name, (call, teardown) in ends.items():
        for when, outcome in (("setup", "passed"), ("call", call), ("teardown", teardown)):
            recorder.pytest_runtest_logreport(report(name, when, outcome))
    if stopped:
        with pytest.raises(KeyboardInterrupt):
            recorder.stop(15, None)
    recorder.pytest_sessionfinish(pytest.ExitCode.TESTS_FAILED if stopped else pytest.ExitCode.INTERRUPTED)
    [path] = tmp_path.iterdir()
    [found] = tested.load(tmp_path)
    assert path.name == "tested_h200_20260102_030405.json" and found["part"] == "1/2" and found["cut_off"]
    keys = ("op", "passed", "failed", "skipped")
    rows = [tuple(row[key] for key in keys) for row in found["rows"]]
    assert rows == [("chunk_gla", 0, 1, 0), ("chunk_kda", 1, 1, 1)]


def test_a_cell_has_the_newest_run_of_each_file_with_all_its_parts() -> None:
    runs = [
        run("a", "2026-01-01", [(MATRIX, "mamba3", 9, 0, 0), ("tests/gpu/test_ops_gpu.py", "mamba3", 5, 0, 0)]),
        run("b", "2026-01-02", [(MATRIX, "mamba3", 1, 1, 0)], "1/2"),
        run("b", "2026-01-02", [(MATRIX, "mamba3", 50, 0, 0)]),
        run("b", "2026-01-03", [(MATRIX, "mamba3", 2, 0, 0)], "2/2"),
        run("b", "2026-01-04", [(MATRIX, "mamba3", 3, 0, 0), (MATRIX, "chunk_gla", None, 0, None)], "1/2"),
        run("c", "2026-01-05", [("tests/gpu/ranks_ops.py", "mamba3", 7, 1, 0)], world_size=2),
        run("c", "2026-01-06", [("tests", "all of it", 99, 0, 0)], device="cpu"),
    ]
    lines = {line.split(" | ")[0]: line for line in tested.by_op(runs).splitlines()}
    assert lines["| op"] == "| op | H200, Triton 3.6.0 | 2 x H200, Triton 3.6.0 |"
    assert lines["| `mamba3`"] == "| `mamba3` | 10 [1, 4, 5] | 7 of 8 [6] |"
    assert lines["| `chunk_gla`"] == "| `chunk_gla` | passed [5] | not run |"
    assert lines["| `chunk_kda`"] == "| `chunk_kda` | not run | not run |"
    assert "| all of it" not in lines and lines["| objectives of flexsp.grammar"].endswith("| not run | not run |")
    assert tested.of_runs(runs).splitlines()[3].endswith("| `test_matrix`, part 1/2 | 1 | 1 | 0 |")


def test_a_page_without_a_part_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one part <!-- tested: ops -->, got 0"):
        tested.refreshed("text", [])


def test_scripts_over_ranks_are_run_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of torchrun stands a program that prints what two scripts print, one of which ends with an error."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *ranks_a.py) exit 3;; esac\necho "ok kda $*"\necho "left out"\n')
    python.chmod(0o755)
    scripts = tmp_path / "tests" / "gpu"
    scripts.mkdir(parents=True)
    for name in ("ranks_a.py", "ranks_b.py"):
        (scripts / name).touch()
    env = {"commit": "abc", "dirty": False, "date": "2026-01-02T03:04:05+00:00", "device": "NVIDIA H200"}
    monkeypatch.setattr(record, "environment", lambda device, command: dict(env))
    monkeypatch.setattr(tested, "ROOT", tmp_path)
    monkeypatch.setattr(tested.sys, "executable", str(python))
    for there, expected in ((1, []), (3, [2])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda there=there: there)
        assert tested.run_ranks(tmp_path / "out") == int(there > 1)
        runs = tested.load(tmp_path / "out")
        assert [run["environment"]["world_size"] for run in runs] == expected
    keys = ("file", "op", "passed", "failed")
    rows = [("tests/gpu/ranks_a.py", "ranks_a", 0, 1), ("tests/gpu/ranks_b.py", "chunk_kda", 1, 0)]
    assert [tuple(row[key] for key in keys) for row in runs[0]["rows"]] == rows
