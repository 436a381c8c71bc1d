"""examples/train_lm.py in small: it learns, resumes elsewhere, agrees with one rank, explains what input it refuses."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flexsp.testing.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--tokens", "96", "--dim", "32", "--layers", "2", "--heads", "2", "--eval-windows", "2", "--sample", "8"]


def demo() -> ModuleType:
    """The script as a module, loaded once a process."""
    if "train_lm" not in sys.modules:
        spec = importlib.util.spec_from_file_location("train_lm", ROOT / "examples" / "train_lm.py")
        assert spec and spec.loader
        sys.modules["train_lm"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["train_lm"])
    return sys.modules["train_lm"]


def train(sp: Any, argv: list[str], dtype: torch.dtype = torch.float64) -> None:
    """One invocation on the ranks of the pool; float64, so that the number of ranks leaves no trace but rounding."""
    script = demo()
    options = script.parse_options(argv)
    text = script.read_text(options.data, options.tokens)
    sp.set_lengths(sp.partition(options.tokens))
    torch.set_default_dtype(dtype)
    try:
        script.run(options, text, sp)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(60)))
    return path


def arguments(text: Path, name: str, *more: str) -> list[str]:
    return [*SMALL, "--data", str(text), "--runs", str(text.parent), "--name", name, "--cooldown", "0", *more]


def rows_of(folder: Path, key: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if key in row]


def test_resumes_on_another_number_of_ranks(text_file: Path) -> None:
    run_ranks(train, 1, arguments(text_file, "whole", "--steps", "6"))
    run_ranks(train, 2, arguments(text_file, "parts", "--steps", "3"))
    run_ranks(train, 3, arguments(text_file, "parts", "--steps", "6", "--resume"))
    whole, parts = (rows_of(text_file.parent / name, "loss") for name in ("whole", "parts"))
    assert [row["step"] for row in parts] == [1, 2, 3, 4, 5, 6]
    assert [row["ranks"] for row in parts] == [2, 2, 2, 3, 3, 3]
    for one, other in zip(whole, parts, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-9)
    states = [torch.load(text_file.parent / name / "checkpoint.pt")["model"] for name in ("whole", "parts")]
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=0, atol=1e-8)


def test_learns_and_leaves_its_files(text_file: Path) -> None:
    run_ranks(train, 2, arguments(text_file, "run", "--steps", "40", "--warmup", "2"), torch.float32)
    folder = text_file.parent / "run"
    losses = [row["loss"] for row in rows_of(folder, "loss")]
    assert losses[0] > 0.9 * math.log(256) > losses[-1] * 1.5
    assert rows_of(folder, "held_out_loss")[-1]["held_out_loss"] < losses[0]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "sample.txt").read_text().startswith("def ")


def compare(sp: Any, text: str) -> list[list[str]]:
    script = demo()
    torch.manual_seed(int(torch.randint(1 << 30, (), generator=torch.Generator().manual_seed(len(text)))))
    config = script.ModelConfig(dim=32, layers=2, heads=2)
    model = script.LanguageModel(config)
    window = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()[None]
    sp.set_lengths(sp.partition(window.shape[1] - 1))
    return script.compare_with_one_rank(model, config, window, torch.float64, sp)


def test_three_ranks_take_the_step_of_one() -> None:
    rows = run_ranks(compare, 3, "a window whose length is no multiple of anything, cut over three ranks" * 2)[0]
    assert len(rows) == 3
    assert all(float(row[-1]) < 1e-12 for row in rows), rows


def test_stepping_gives_the_logits_of_the_whole_sequence() -> None:
    script = demo()
    model = script.LanguageModel(script.ModelConfig(dim=32, layers=2, heads=2)).double()
    tokens = torch.randint(256, (1, 37))
    caches = [block.mix.init_cache(1) for block in model.each_block()]
    for t, expected in enumerate(model(tokens)[0]):
        logits, caches = model.step(tokens[:, t], caches)
        torch.testing.assert_close(logits[0], expected)


def test_windows_depend_on_the_step_only_and_cover_the_text() -> None:
    script = demo()
    text = script.Text(torch.arange(200, dtype=torch.uint8), torch.zeros(50, dtype=torch.uint8), "")
    windows = max(1, 199 // 16 - 1)
    first_epoch = [script.training_window(text, step, 16)[0] for step in range(windows)]
    script.epoch_order.cache_clear()
    again = [script.training_window(text, step, 16)[0] for step in range(windows)]
    assert all(torch.equal(a, b) for a, b in zip(first_epoch, again, strict=True))
    inputs = torch.cat([window[:-1] for window in first_epoch])
    assert len(inputs.unique()) == windows * 16
    assert all(torch.equal(window.diff(), torch.ones(16, dtype=torch.int64)) for window in first_epoch)


def test_default_text_is_the_standard_library_with_files_held_out() -> None:
    text = demo().read_text(None, 8192)
    assert len(text.train) > 10 * len(text.held_out) > 100_000
    assert b"import" in text.held_out.numpy().tobytes()


def test_missing_and_short_text(tmp_path: Path) -> None:
    script = demo()
    with pytest.raises(script.UserError, match="--data: expected a text file or a folder, got .*nowhere"):
        script.read_text(str(tmp_path / "nowhere"), 64)
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(script.UserError, match=r"--data: a sequence takes 65 bytes.*got 9 and 0"):
        script.read_text(str(tmp_path / "short.txt"), 64)


def complain(sp: Any, argv: list[str]) -> str:
    try:
        train(sp, argv)
    except demo().UserError as error:
        return str(error)
    return ""


def test_refuses_a_checkpoint_that_does_not_fit(text_file: Path) -> None:
    run_ranks(train, 1, arguments(text_file, "run", "--steps", "1"))
    wider = run_ranks(complain, 2, arguments(text_file, "run", "--dim", "48"))
    assert all("holds a model with" in message and "'dim': 48" in message for message in wider)
    text_file.write_text(text_file.read_text().upper())
    assert "was trained on other text" in run_ranks(complain, 1, arguments(text_file, "run"))[0]
    assert "--resume: expected a checkpoint" in run_ranks(complain, 1, arguments(text_file, "new", "--resume"))[0]


def test_refuses_a_damaged_checkpoint(text_file: Path) -> None:
    run_ranks(train, 1, arguments(text_file, "run", "--steps", "1"))
    path = text_file.parent / "run" / "checkpoint.pt"
    whole = path.read_bytes()
    for damaged in (b"", b"not a checkpoint", whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        said = run_ranks(complain, 2, arguments(text_file, "run"))
        assert all("cannot be read" in message and "--no-resume" in message for message in said)
    path.write_bytes(whole)
    state = torch.load(path)
    torch.save({key: value for key, value in state.items() if key != "optimizer"}, path)
    assert "lacks optimizer" in run_ranks(complain, 1, arguments(text_file, "run"))[0]


def test_resumes_beside_unfinished_metrics(text_file: Path) -> None:
    run_ranks(train, 1, arguments(text_file, "run", "--steps", "2"))
    metrics = text_file.parent / "run" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 2, "lo')
    run_ranks(train, 1, arguments(text_file, "run", "--steps", "3"))
    assert [row["step"] for row in rows_of(metrics.parent, "loss")] == [1, 2, 3]
    metrics.unlink()
    run_ranks(train, 1, arguments(text_file, "run", "--steps", "3"))  # nothing left to train


def test_under_torchrun_without_triton(text_file: Path) -> None:
    blocker = text_file.parent / "blocked"
    blocker.mkdir()
    (blocker / "triton.py").write_text("raise ModuleNotFoundError('no triton in this test', name='triton')\n")
    environment = os.environ | {"PYTHONPATH": f"{blocker}:{ROOT}", "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "examples/train_lm.py", "--device", "cpu", *arguments(text_file, "run", "--steps", "2")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    for part in ("step 1", "after 2 steps", "held out", "gradient norm, float64", "sample", "checkpoint.pt"):
        assert part in done.stdout
