"""examples/synthetics.py in small: its tasks, an ordering that shows, resuming, workers that die, the report."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.harness.demo import ROOT, module

PARITY = ["--tiny", "--device", "cpu", "--tasks", "parity"]


def tasks() -> ModuleType:
    return module("synthetic_tasks")


def script() -> ModuleType:
    """After the files that it imports."""
    for name in ("checkpoint", "training", "synthetic_tasks"):
        module(name)
    return module("synthetics")


def drawn(name: str, batch: int = 64, length: int | None = None, seed: int = 1) -> tuple[list[Any], list[Any]]:
    """Tokens and labels of each text, as numbers."""
    task = tasks().TASKS[name]
    found = task.draw(batch, length or task.lengths[0], torch.Generator().manual_seed(seed))
    assert found[0].dtype == found[1].dtype == torch.int64
    assert found[0].shape == found[1].shape == (batch, length or task.lengths[0])
    assert found[0].min() >= 0 and found[0].max() < task.vocabulary and found[1].max() < task.classes
    return found[0].tolist(), found[1].tolist()


# ---------------------------------------------------------------- tasks


def test_parity_is_that_of_all_bits_so_far() -> None:
    for bits, labels in zip(*drawn("parity"), strict=True):
        assert labels == [sum(bits[: t + 1]) % 2 for t in range(len(bits))]


def test_permutations_act_one_after_another() -> None:
    """Three things are moved token by token; each label says where they are then, and all permutations are drawn."""
    order = tasks().S3
    seen = set()
    for tokens, labels in zip(*drawn("s3"), strict=True):
        assert tokens[0] == 6 and labels[0] == order.index((0, 1, 2))
        places = [0, 1, 2]
        for token, label in zip(tokens[1:], labels[1:], strict=True):
            places = [order[token][place] for place in places]
            assert tuple(places) == order[label]
            seen.add(token)
    assert seen == set(range(6))


def test_marks_stand_for_the_symbols_in_their_order() -> None:
    module_ = tasks()
    noise, mark, ignored = module_.NOISE, module_.MARK, module_.IGNORED
    for tokens, labels in zip(*drawn("copying"), strict=True):
        count = len(tokens) // 8
        assert tokens[-count:] == [mark] * count and mark not in tokens[:-count]
        assert labels == [ignored] * (len(tokens) - count) + [x for x in tokens[:-count] if x != noise]


def test_questions_are_answered_by_the_pairs_before() -> None:
    module_ = tasks()
    keys, ignored = range(1, 1 + module_.KEYS), module_.IGNORED
    for tokens, labels in zip(*drawn("recall"), strict=True):
        half = len(tokens) // 2
        known = dict(zip(tokens[:half:2], tokens[1:half:2], strict=True))
        assert len(known) == half // 2 and all(key in keys for key in known)
        assert not any(value in keys or value == 0 for value in known.values())
        assert labels == [ignored] * half + [known.get(token, ignored) for token in tokens[half:]]
        assert sorted(token for token in tokens[half:] if token) == sorted(known)


@pytest.mark.parametrize("name", ["parity", "s3", "copying", "recall"])
def test_a_token_does_not_tell_its_label(name: str) -> None:
    """The best table from a labelled token to its label is no better than guessing."""
    tokens, labels = (torch.tensor(x) for x in drawn(name, 1024))
    labels[:, : 8 if name == "parity" else 1] = -100  # the first labels are the first tokens
    kept = labels != -100
    count = torch.zeros(200, 200).index_put_((tokens[kept], labels[kept]), torch.ones(()), accumulate=True)
    assert count.max(1).values.sum() / kept.sum() < tasks().TASKS[name].guessing + 0.03


@pytest.mark.parametrize("name", ["parity", "s3", "copying", "recall"])
def test_batches_are_fresh_and_tests_are_not(name: str) -> None:
    task, made = tasks().TASKS[name], torch.Generator().manual_seed(3)
    first, second = (task.draw(8, task.lengths[0], made)[0] for _ in range(2))
    assert not torch.equal(first, second)
    for length in task.lengths:
        tokens, labels = task.test_batch(length, torch.device("cpu"))
        again = task.test_batch(length, torch.device("cpu"))
        assert torch.equal(tokens, again[0]) and torch.equal(labels, again[1])
        assert (labels[:, : task.lengths[0]] == -100).all() == (length > task.lengths[0] or name == "none")
        assert (labels[:, -1] != -100).any()


# ---------------------------------------------------------------- models


def every_variant() -> list[Any]:
    quick = ("linear attention", "DeltaNet, negative", "Mamba")
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in tasks().VARIANTS]


@pytest.mark.parametrize("variant", every_variant())
def test_models_are_causal_and_mix_tokens_as_their_task_says(variant: str) -> None:
    """A token changes no logits before it; and all models take a step on each task without an error."""
    for name, task in tasks().TASKS.items():
        torch.manual_seed(0)
        model = tasks().make_model(variant, task)
        with torch.no_grad():  # RWKV-7 begins with an output of 0
            for p in model.parameters():
                p.add_(0.05 * torch.randn_like(p))
        tokens = task.draw(2, 32, torch.Generator().manual_seed(0))[0]
        other = tokens.clone()
        other[:, 20] = (other[:, 20] + 1) % task.vocabulary
        before, after = model(tokens), model(other)
        assert before.shape == (2, 32, task.classes)
        torch.testing.assert_close(after[:, :20], before[:, :20], rtol=0, atol=1e-6)
        assert (after[:, 20:] - before[:, 20:]).abs().amax((0, 2)).gt(1e-7).sum() > 2, f"{name} mixes no tokens"
        before.square().mean().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def state_numbers(variant: str, name: str) -> int:
    """Numbers of a text that the mixer keeps, its convolutions left out."""
    task = tasks().TASKS[name]
    mixer = tasks().VARIANTS[variant](task.size)
    if isinstance(mixer, tasks().OpLayer):
        return task.size.heads * task.size.head**2
    cache = mixer.init_cache(1)
    state = cache.ssm if variant == "Mamba-3" else cache.state
    return max(x.numel() for x in (state if isinstance(state, tuple) else (state,)))  # of mLSTM without its normaliser


@pytest.mark.parametrize("name", ["parity", "s3", "copying", "recall"])
def test_states_have_the_sizes_that_the_page_tells(name: str) -> None:
    size = tasks().TASKS[name].size
    for variant in tasks().VARIANTS:
        numbers = 1024 if name == "recall" else 2048
        assert state_numbers(variant, name) == (4 * size.width if variant in ("HGRN", "RG-LRU") else numbers), variant


def test_convolutions_are_left_out_where_they_would_track_states() -> None:
    for name in ("parity", "s3"):
        assert tasks().TASKS[name].size.conv == 1 and tasks().TASKS[name].layers == 1
    assert tasks().DeltaNet(64, 2, **tasks().Size(conv=1).short()).use_short_conv is False


def test_the_rate_rises_and_falls() -> None:
    rates = [tasks().rate(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[9:] == sorted(rates[9:], reverse=True) and 0.05 <= rates[-1] < 0.06


class Oracle(torch.nn.Module):
    """Right for the first ``sure`` positions of each text, else wrong."""

    def __init__(self, sure: int) -> None:
        super().__init__()
        self.sure, self.weight = sure, torch.nn.Parameter(torch.ones(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        right = torch.nn.functional.one_hot(tokens.cumsum(1) % 2, 2).float()
        right[:, self.sure :] = 1 - right[:, self.sure :]
        return right * self.weight


def test_training_stops_once_all_lengths_are_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    task = replace(tasks().TASKS["parity"], steps=20, batch=2, lengths=(8, 16))
    for sure, steps, solved, accuracy in (
        (16, 10, 5, {8: 1.0, 16: 1.0}), (12, 20, None, {8: 1.0, 16: 0.5}), (4, 20, None, {8: 0.5, 16: 0.0})
    ):  # fmt: skip
        monkeypatch.setattr(tasks(), "make_model", lambda *_, sure=sure: Oracle(sure))
        result = tasks().train("", task, 0, torch.device("cpu"), every=5)
        assert (result["steps"], result["solved"], result["accuracy"]) == (steps, solved, accuracy)


def test_one_good_test_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    task = replace(tasks().TASKS["parity"], steps=40, batch=2, lengths=(8,))
    found = iter([0.5, 1.0, 0.5, 0.9995, 0.999, 1.0, 1.0])
    monkeypatch.setattr(tasks(), "accuracies", lambda *_: [next(found)])
    monkeypatch.setattr(tasks(), "make_model", lambda *_: Oracle(8))
    result = tasks().train("", task, 0, torch.device("cpu"), every=5)
    assert (result["steps"], result["solved"]) == (25, 20)


def test_seeds_draw_other_texts() -> None:
    seen: list[torch.Tensor] = []

    def draw(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(tasks().draw_parity(*args)[0])
        return tasks().draw_parity(*args)

    task = replace(tasks().TASKS["parity"], draw=draw, steps=1, batch=8, lengths=(16,))
    for seed in 0, 1, 0:
        tasks().train("linear attention", task, seed, torch.device("cpu"))
    tests, texts = seen[::2], seen[1::2]
    assert torch.equal(tests[0], tests[1]) and torch.equal(texts[0], texts[2])
    assert not torch.equal(texts[0], texts[1])


def test_a_seed_gives_one_result() -> None:
    task = replace(tasks().TASKS["parity"], steps=6, batch=8, lengths=(16, 24))
    cpu = torch.device("cpu")
    first, again, other = (tasks().train("DeltaNet", task, seed, cpu, every=3)["curve"] for seed in (0, 0, 1))
    assert first == again and [step for step, *_ in first] == [3, 6]
    assert first != other and all(len(row) == 3 for row in first)


# ---------------------------------------------------------------- runs


def command(*argv: str) -> list[str]:
    return [sys.executable, "examples/synthetics.py", *argv]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FLEXSP_COMMIT": "abc"}


def start(*argv: str) -> str:
    """What a run prints."""
    done = subprocess.run(command(*argv), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def result_of(folder: Path) -> dict[str, Any]:
    [file] = folder.glob("synthetics_*.json")
    return json.loads(file.read_text())


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "cells.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_negative_eigenvalues_track_parity_and_linear_attention_does_not(tmp_path: Path) -> None:
    """With two workers; the same command once more trains nothing, and one more variant trains that alone."""
    argv = [*PARITY, "--jobs", "2", "--seeds", "1", "--out", str(tmp_path), "--variants"]
    names = ["linear attention", "DeltaNet", "DeltaNet, negative"]
    assert "3 cells, 0 of them finished before" in start(*argv, *names)
    found = {row["variant"]: row["accuracy"] for row in result_of(tmp_path)["cells"]}
    assert found["DeltaNet, negative"]["32"] > 0.99 and found["DeltaNet, negative"]["128"] > 0.7
    for name in ("linear attention", "DeltaNet"):
        assert found[name]["32"] < 0.6 and found[name]["128"] < 0.55
    assert (tmp_path / "synthetics.png").read_bytes().startswith(b"\x89PNG")
    assert "| linear attention | 0.5" in (tmp_path / "table.md").read_text()
    before = (tmp_path / "cells.jsonl").read_text()
    assert "3 cells, 3 of them finished before" in start(*argv, *names)
    assert (tmp_path / "cells.jsonl").read_text() == before
    assert "4 cells, 3 of them finished before" in start(*argv, *names, "RetNet")
    assert len(lines_of(tmp_path)) == 5 and len(result_of(tmp_path)["cells"]) == 4


class FakeWorker:
    """In the place of a process: what each cell comes to is told by its variant."""

    made: list[FakeWorker] = []  # noqa: RUF012

    def __init__(self, device: str, tiny: bool) -> None:
        self.cells: list[Any] = []
        self.ended = False
        FakeWorker.made.append(self)

    def train(self, cell: Any, stop: Any, deadline: float) -> dict[str, Any] | None:
        self.cells.append(cell)
        if cell[0] == "never":
            return None
        if cell[0] == "fails":
            return {"error": "ValueError: no"}
        return {"accuracy": {"64": 0.5}, "solved": None, "steps": 1, "seconds": 0.0}

    def end(self) -> None:
        self.ended = True


def drive(
    monkeypatch: pytest.MonkeyPatch, path: Path, variants: Sequence[str], jobs: int = 1
) -> tuple[list[FakeWorker], list[dict[str, Any]]]:
    """The workers of a run of these variants, and the lines it wrote."""
    monkeypatch.setattr(script(), "Worker", FakeWorker)
    FakeWorker.made = []
    options = script().parse_options(["--jobs", str(jobs)])
    cells = [(name, "parity", seed) for seed, name in enumerate(variants)]
    script().Run(path, cells, options, time.monotonic() + 60).go()
    lines = path.read_text().splitlines() if path.exists() else []
    return FakeWorker.made, [json.loads(line) for line in lines]


def test_a_worker_trains_many_cells_and_a_new_one_comes_after_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made, rows = drive(monkeypatch, tmp_path / "cells", ["a", "b", "fails", "c", "d"])
    assert [len(worker.cells) for worker in made] == [3, 2] and all(worker.ended for worker in made)
    assert [row["variant"] for row in rows] == ["a", "b", "fails", "c", "d"]
    assert [row.get("error") for row in rows] == [None, None, "ValueError: no", None, None]
    assert [row["seed"] for row in rows] == [0, 1, 2, 3, 4]


def test_workers_stop_when_time_is_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made, rows = drive(monkeypatch, tmp_path / "cells", ["a", "never", "b"])
    assert [row["variant"] for row in rows] == ["a"] and [len(worker.cells) for worker in made] == [2]
    assert made[0].ended


def test_each_cell_is_trained_once_by_many_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made, rows = drive(monkeypatch, tmp_path / "cells", [f"v{i}" for i in range(40)], jobs=4)
    assert sorted(row["seed"] for row in rows) == list(range(40)) and 1 <= len(made) <= 4


def written(folder: Path, cells: Sequence[dict[str, Any]], **env: Any) -> dict[str, Any]:
    """A result as a run makes it."""
    found = {"commit": "abc", "dirty": False, "device": "NVIDIA H200", "torch": "2", "triton": "3",
             "date": "2026-01-02T", "command": "python examples/synthetics.py", "world_size": 1, **env}  # fmt: skip
    head = {"kind": "synthetics", "environment": found, "tiny": False}
    result = {**head, "tasks": script().described(False), "cells": list(cells)}
    (folder / "synthetics_h200_20260102.json").write_text(json.dumps(result))
    (folder / "cells.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [head, *cells]))
    return head


def cell(variant: str, task: str, seed: int, *accuracy: float, solved: int | None = None) -> dict[str, Any]:
    lengths = tasks().TASKS[task].lengths
    found = {str(length): x for length, x in zip(lengths, accuracy, strict=True)}
    return {"variant": variant, "task": task, "seed": seed, "accuracy": found, "solved": solved, "steps": 9}


CELLS = (("DeltaNet, negative", 0, 1.0, 1.0, 150), ("DeltaNet, negative", 1, 1.0, 0.9, None),
         ("DeltaNet, negative", 2, 1.0, 1.0, 250), ("linear attention", 0, 0.52, 0.5, None))  # fmt: skip


def rows_for_a_table() -> list[dict[str, Any]]:
    rows = [cell(name, "parity", seed, *found, solved=solved) for name, seed, *found, solved in CELLS]
    rows += [{"variant": "linear attention", "task": "parity", "seed": 1, "error": "ValueError: no | room"}]
    rows += [{"variant": "RetNet", "task": "parity", "seed": 0, "error": "OSError: gone"}]
    return [*rows, cell("linear attention", "recall", 0, 0.25)]


def test_a_table_of_a_file(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- measured: none -->\nold\n<!-- /measured -->\nafter\n")
    written(tmp_path, rows_for_a_table())
    script().report(tmp_path / "synthetics_h200_20260102.json", page)
    text = page.read_text()
    assert text.startswith("before\n<!-- measured: synthetics_h200_20260102.json -->\n| variant | parity, 64 tokens |")
    assert text.endswith("<!-- /measured -->\nafter\n") and "old" not in text
    lines = text.splitlines()
    assert "| linear attention | 0.52; 1 of 2 failed | 0.50; 1 of 2 failed | 0.25 |" in lines
    assert "| DeltaNet, negative | 1.00 | 1.00 [0.90, 1.00]; 200 steps (2 of 3) | - |" in lines
    assert "| RetNet | error | error | - |" in lines
    assert "| guessing | 0.50 | 0.50 | 0.02 |" in lines
    assert "- RetNet, parity, seed 0: `OSError: gone`" in lines
    order = [line.split(" | ")[0][2:] for line in lines if line.startswith("| ")]
    assert order == ["variant", "---", "linear attention", "RetNet", "DeltaNet, negative", "guessing"]
    assert "NVIDIA H200, torch 2, Triton 3; commit abc, 2026-01-02, 3 seeds" in text
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG") and "](page.png)" in text
    script().report(tmp_path / "synthetics_h200_20260102.json", page)
    assert page.read_text() == text


def test_a_file_has_a_line_for_each_cell(tmp_path: Path) -> None:
    result = {"kind": "synthetics", "tiny": False, "cells": rows_for_a_table()}
    script().save_lines(tmp_path / "x.json", result)
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == result and text.count("\n") == 6 + len(result["cells"])
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_the_page_has_the_numbers_of_its_file() -> None:
    """`python examples/synthetics.py --report FILE` writes it; every such file stands in it."""
    page = script().PAGE
    [(_, name, _)] = script().MEASURED.findall(page.read_text())
    files = {path.name: path for path in (ROOT / "benchmarks" / "results").glob("synthetics_*.json")}
    assert set(files) == ({name} if name != "none" else set())
    if files:
        result = json.loads(files[name].read_text())
        assert script().measured(result, page) in page.read_text() and page.with_suffix(".png").exists()


def test_results_go_on_from_a_line_cut_off_and_the_last_of_a_cell_counts(tmp_path: Path) -> None:
    rows = [{"variant": "a", "task": "parity", "seed": 0, "error": "once"}, cell("a", "parity", 0, 0.5, 0.5)]
    head = written(tmp_path, rows)
    path = tmp_path / "cells.jsonl"
    with path.open("a") as file:
        file.write('{"variant": "b", "ta')
    assert script().read_cells(path, head) == rows[1:]
    assert path.read_text().endswith("}\n") and len(lines_of(tmp_path)) == 3


@pytest.mark.parametrize(
    ("what", "value"),
    [("commit", "other"), ("device", "cpu"), ("torch", "1"), ("triton", None), ("dirty", True), ("tiny", True)],
)
def test_results_of_another_machine_or_commit_are_not_mixed(what: str, value: Any, tmp_path: Path) -> None:
    head = written(tmp_path, [])
    other = {**head, "tiny": value} if what == "tiny" else {**head, "environment": {**head["environment"], what: value}}
    with pytest.raises(script().UserError, match=rf"expected results of {what} {value}, got .*take another --out"):
        script().read_cells(tmp_path / "cells.jsonl", other)


def test_what_is_no_result_is_refused_in_a_line(tmp_path: Path) -> None:
    head = written(tmp_path, [])
    path = tmp_path / "cells.jsonl"
    path.write_text('{"a": 1}\n')
    with pytest.raises(script().UserError, match="expected the results of this script"):
        script().read_cells(path, head)
    path.write_text('{"kind": "op"}\n')
    with pytest.raises(script().UserError, match="got one of kind op"):
        script().report(path, tmp_path / "page.md")
    written(tmp_path, [])
    (tmp_path / "page.md").write_text("no marks")
    with pytest.raises(script().UserError, match="expected the marks"):
        script().report(tmp_path / "synthetics_h200_20260102.json", tmp_path / "page.md")


@pytest.mark.parametrize(
    ("option", "value"),
    [("--jobs", "0"), ("--seeds", "-1"), ("--minutes", "0"), ("--minutes", "nan"), ("--device", "tpu")],
)
def test_refuses_options_in_one_line(option: str, value: str) -> None:
    with pytest.raises(script().UserError, match=rf"^{option}: expected .*, got "):
        script().check_options(script().parse_options([option, value]))


def test_an_error_is_a_line_of_the_pipe_and_the_worker_ends() -> None:
    class Pipe:
        sent: list[Any] = []  # noqa: RUF012

        def recv(self) -> Any:
            assert not self.sent, "goes on after an error"
            return "no such variant", "parity", 0

        def send(self, result: Any) -> None:
            self.sent.append(result)

    before = signal.getsignal(signal.SIGINT), torch.get_num_threads()
    try:
        script().work(Pipe(), "cpu", True)
    finally:
        signal.signal(signal.SIGINT, before[0])
        torch.set_num_threads(before[1])
    assert Pipe.sent == [{"error": "KeyError: 'no such variant'"}]
    assert len(script().shortened("a\nb " * 400)) == 300 and script().shortened("a\n  b") == "a b"


def children(pid: int) -> list[int]:
    """Of a process on Linux, those that train."""
    path = Path(f"/proc/{pid}/task")
    found = (
        [int(x) for task in path.iterdir() for x in (task / "children").read_text().split()] if path.exists() else []
    )
    return [x for x in found if b"spawn_main" in Path(f"/proc/{x}/cmdline").read_bytes()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_killed_worker_does_not_hang_the_rest(tmp_path: Path) -> None:
    """The cell of the one that is killed is an error, all others are trained, and a new run tries that cell again."""
    argv = [*PARITY, "--jobs", "2", "--seeds", "2", "--out", str(tmp_path), "--variants", "DeltaNet", "RetNet"]
    run = subprocess.Popen(command(*argv), cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 120
        while len(workers := children(run.pid)) < 2 and time.monotonic() < until:
            time.sleep(0.2)
        time.sleep(1)
        os.kill(workers[0], signal.SIGKILL)
        out, _ = run.communicate(timeout=250)
    finally:
        run.kill()
    assert run.returncode == 0 and "its process ended with exit code -9" in out
    rows = lines_of(tmp_path)[1:]
    assert len(rows) == 4 and sum("error" in row for row in rows) == 1
    assert "1 of 2 failed" in (tmp_path / "table.md").read_text()
    assert "4 cells, 3 of them finished before" in start(*argv)
    assert not any("error" in row for row in result_of(tmp_path)["cells"])


@pytest.mark.slow
def test_the_time_limit_ends_training_and_reports_what_is_there(tmp_path: Path) -> None:
    began = time.monotonic()
    argv = [*PARITY, "--jobs", "1", "--out", str(tmp_path)]
    out = start(*argv, "--minutes", "1")
    assert time.monotonic() - began < 100 and "| guessing |" in out
    assert 1 <= len(result_of(tmp_path)["cells"]) < 75
    shutil.rmtree(tmp_path)
    done = subprocess.run(
        command(*argv, "--minutes", "0.01"), cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.endswith("--minutes: expected the time that one cell takes at least, got 0.01\n")
