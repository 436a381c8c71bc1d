"""The files of examples/train_lm.py: damage is refused, a failed or killed write leaves what was there."""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flexsp.testing.ranks import run_ranks
from tests.harness.demo import ROOT, arguments, demo, module, rows_of, text_file, train

__all__ = ["text_file"]  # the fixture


def complain(sp: Any, argv: list[str]) -> str:
    try:
        train(sp, argv)
    except demo().UserError as error:
        return str(error)
    return ""


def small_state(step: int = 0) -> dict[str, Any]:
    model = {"weight": torch.randn(2)}
    return {"settings": {}, "text": "", "step": step, "model": model, "optimizer": {}}


def refusal(path: Path) -> str:
    files = module("checkpoint")
    with pytest.raises(files.UserError) as caught:
        files.read_checkpoint(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


def test_every_single_bit_and_every_length(tmp_path: Path) -> None:
    """No flip of one bit is read, wherever it stands in the file, nor a file cut short or with more at its end."""
    files = module("checkpoint")
    path = tmp_path / "checkpoint.pt"
    files.write_checkpoint(path, small_state())
    whole = path.read_bytes()
    assert files.read_checkpoint(path)["step"] == 0

    class Memory(Path):  # so that thousands of files cost no disk
        _flavour = getattr(type(path), "_flavour", None)
        content = b""

        def read_bytes(self) -> bytes:
            return Memory.content

    held = Memory(path)
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        Memory.content = bytes(damaged)
        refusal(held)
    for length in range(len(whole)):
        Memory.content = whole[:length]
        refusal(held)
    for more in (b"\0", b"\n", whole):
        Memory.content = whole + more
        refusal(held)


def test_torch_reads_it_too(tmp_path: Path) -> None:
    files, path, state = module("checkpoint"), tmp_path / "checkpoint.pt", small_state(3)
    files.write_checkpoint(path, state)
    for found in (torch.load(path, weights_only=True), torch.load(path, weights_only=True, mmap=True)):
        assert found["step"] == 3 and torch.equal(found["model"]["weight"], state["model"]["weight"])
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None and re.fullmatch(rb"train_lm checkpoint, sha256 \w{64}", archive.comment)


def test_a_damaged_checkpoint_of_a_run(text_file: Path) -> None:
    """All ranks say so in the same line, and nothing is written."""
    run_ranks(train, 1, arguments(text_file, "run", "--steps", "1"))
    path = text_file.parent / "run" / "checkpoint.pt"
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[random.randrange(len(whole))] ^= 1 << random.randrange(8)
    for damaged in (b"", b"not a checkpoint", whole[: len(whole) // 2], bytes(flipped)):
        path.write_bytes(damaged)
        said = run_ranks(complain, 2, arguments(text_file, "run"))
        assert said[0] == said[1] and str(path) in said[0] and "--no-resume" in said[0]
        assert path.read_bytes() == damaged


def test_refuses_another_run_and_names_the_field(text_file: Path) -> None:
    run_ranks(train, 1, arguments(text_file, "run", "--steps", "1", "--lr", "1e-3"))
    folder = text_file.parent / "run"
    held = {"dim": 32, "layers": 2, "tokens": 96, "lr": 0.001, "warmup": 20, "hold": 40, "dtype": "float32"}
    given = {"dim": 48, "layers": 3, "tokens": 97, "lr": 1.0, "warmup": 5, "hold": 7, "dtype": "float64"}
    for name, value in given.items():
        said = run_ranks(complain, 2, arguments(text_file, "run", f"--{name}", str(value)))
        assert said[0] == said[1]
        assert said[0].startswith(f"--{name}: expected {held[name]}, which {folder / 'checkpoint.pt'} was trained with")
        assert f", got {value};" in said[0]
    text_file.write_text(text_file.read_text().upper())
    assert "trained on other text" in run_ranks(complain, 1, arguments(text_file, "run"))[0]
    assert "--resume: expected a checkpoint" in run_ranks(complain, 1, arguments(text_file, "new", "--resume"))[0]
    assert not (text_file.parent / "new").exists()


def change_model(**tensors: torch.Tensor) -> Callable[[dict[str, Any]], Any]:
    return lambda state: state["model"].update({name.replace("__", "."): value for name, value in tensors.items()})


CONTENTS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda state: state.update(step=-1), r"step: expected a number >= 0, got -1"),
    (lambda state: state.update(step="1"), r"step: expected int, got str"),
    (lambda state: state.pop("optimizer"), r"expected .*optimizer.*, got \['model', 'settings', 'step', 'text'\]"),
    (lambda state: state.update(model={}), r"model: embed.weight: expected float32 \[256, 32\], got nothing"),
    (lambda state: state.update(optimizer={}), r"optimizer: 0 step: expected float32 \[\], got nothing"),
    (lambda state: state["optimizer"][3].pop("exp_avg"), r"optimizer: 3 exp_avg: expected .*, got nothing"),
    (change_model(head__weight=torch.zeros(1)), r"head.weight: expected float32 \[256, 32\], got float32 \[1\]"),
    (change_model(norm__weight=torch.zeros(32).half()), r"norm.weight: expected float32 \[32\], got float16 \[32\]"),
    (change_model(more=torch.zeros(1)), r"model: more: expected nothing, got float32 \[1\]"),
    (lambda state: state["settings"].update(layers=0), r"settings: --layers: expected a number > 0, got 0"),
    (lambda state: state["settings"].update(depth=2), r"settings: .*depth"),
]


def test_refuses_contents_that_do_not_fit(text_file: Path) -> None:
    """Files whose digest is right: written by another version of the script, or by hand."""
    files = module("checkpoint")
    run_ranks(train, 1, arguments(text_file, "run", "--steps", "1"))
    path = text_file.parent / "run" / "checkpoint.pt"
    argv = ["--data", str(text_file), "--runs", str(text_file.parent), "--name", "run", "--eval-windows", "1"]
    whole = path.read_bytes()
    for change, expected in CONTENTS:
        path.write_bytes(whole)
        state = files.read_checkpoint(path)
        change(state)
        files.write_checkpoint(path, state)
        (said,) = run_ranks(complain, 1, argv)
        assert str(path) in said and "\n" not in said and re.search(expected, said), said


# ---------------------------------------------------------------- writing


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_a_failed_write_keeps_the_former_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    files = module("checkpoint")
    path = tmp_path / "checkpoint.pt"
    files.write_checkpoint(path, small_state(1))
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    if failing == "write":
        (tmp_path / "checkpoint.pt.partial").symlink_to("/dev/full")
        monkeypatch.setattr(os, "fsync", lambda file: None)
    else:
        monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match=r"checkpoint\.pt'$"):
        files.write_checkpoint(path, small_state(2))
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint.pt"]


KILLED = """
import importlib.util, resource, signal, sys
import torch
spec = importlib.util.spec_from_file_location("checkpoint", "examples/checkpoint.py")
files = importlib.util.module_from_spec(spec)
spec.loader.exec_module(files)
path, size = files.Path(sys.argv[1]), int(sys.argv[2])
state = {"settings": {}, "text": "", "step": 2, "model": {"weight": torch.zeros(1 << 16)}, "optimizer": {}}
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))  # the kernel kills the process in the write past this size
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
files.write_checkpoint(path, state)
"""


def test_a_process_killed_while_it_writes_keeps_the_former_checkpoint(tmp_path: Path) -> None:
    files = module("checkpoint")
    path = tmp_path / "checkpoint.pt"
    files.write_checkpoint(path, small_state(1))
    before = path.read_bytes()
    command = [sys.executable, "-c", KILLED, str(path), str(1 << 17)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120)
    assert done.returncode == -signal.SIGXFSZ
    assert 0 < (tmp_path / "checkpoint.pt.partial").stat().st_size <= 1 << 17  # it was halfway
    assert path.read_bytes() == before
    files.write_checkpoint(path, small_state(3))  # what the killed process left is in nobody's way
    assert files.read_checkpoint(path)["step"] == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint.pt"]


def test_content_is_on_the_disk_before_its_name_and_its_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = module("checkpoint")
    path = tmp_path / "checkpoint.pt"
    seen: list[str] = []
    real = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        seen.append("folder" if target == tmp_path else f"{target.name} {target.stat().st_size}")
        real[0](descriptor)

    def replace(old: Any, new: Any) -> None:
        seen.append(f"{Path(old).name} becomes {Path(new).name}")
        real[1](old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    files.write_checkpoint(path, small_state())
    partial = "checkpoint.pt.partial"
    assert seen == [f"{partial} {path.stat().st_size}", f"{partial} becomes checkpoint.pt", "folder"]


def with_little_disk(sp: Any, argv: list[str], size: int) -> tuple[str, int]:
    """``complain`` in a rank that cannot write a file past ``size`` bytes, and the last step that it trained."""
    script, steps = demo(), [0]
    before, window = resource.getrlimit(resource.RLIMIT_FSIZE), script.training_window
    script.SECONDS_BETWEEN_CHECKPOINTS = float("inf")
    script.training_window = lambda text, step, tokens: steps.append(step + 1) or window(text, step, tokens)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # the output may be a file too
            return complain(sp, argv), steps[-1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        script.training_window, script.SECONDS_BETWEEN_CHECKPOINTS = window, 60.0


def test_a_full_disk_ends_in_one_line_on_every_rank(text_file: Path) -> None:
    folder = text_file.parent / "run"
    run_ranks(train, 2, arguments(text_file, "run", "--steps", "2"))
    kept = (folder / "checkpoint.pt").read_bytes()
    said = run_ranks(with_little_disk, 2, arguments(text_file, "run", "--steps", "3"), len(kept) // 2)
    line = f"the checkpoint of step 3 cannot be written: {folder / 'checkpoint.pt'}: File too large"
    assert [message for message, _ in said] == [line] * 2
    assert (folder / "checkpoint.pt").read_bytes() == kept
    lines = (folder / "metrics.jsonl").stat().st_size
    said = run_ranks(with_little_disk, 2, arguments(text_file, "run", "--steps", "20"), lines + 1)
    assert [message for message, _ in said] == [f"{folder / 'metrics.jsonl'}: File too large"] * 2
    assert all(step < 6 for _, step in said)  # steps that cannot be recorded are not trained
    assert (folder / "checkpoint.pt").read_bytes() == kept
    run_ranks(train, 2, arguments(text_file, "run", "--steps", "4"))
    assert [row["step"] for row in rows_of(folder, "loss")] == [1, 2, 3, 4]


def saved_steps(sp: Any, argv: list[str], seconds: float) -> list[int]:
    """The steps whose checkpoint this rank took part in, with so many seconds between two of them."""
    script, steps = demo(), []
    save = script.save_checkpoint
    script.save_checkpoint = lambda path, state, *more: steps.append(state["step"]) or save(path, state, *more)
    script.SECONDS_BETWEEN_CHECKPOINTS = seconds if sp.rank == 0 else 60.0  # rank 0's clock decides for all
    try:
        train(sp, argv)
    finally:
        script.save_checkpoint, script.SECONDS_BETWEEN_CHECKPOINTS = save, 60.0
    return steps


@pytest.mark.parametrize("seconds, expected", [(-1.0, [0, 1, 2, 3, 3]), (1e9, [0, 3])])
def test_checkpoints_in_between(text_file: Path, seconds: float, expected: list[int]) -> None:
    assert run_ranks(saved_steps, 2, arguments(text_file, "run", "--steps", "3"), seconds) == [expected] * 2


def test_a_folder_that_cannot_be_made_ends_in_one_line(text_file: Path) -> None:
    """Before a step is trained; also as a person sees it, on the error output of the script."""
    argv = arguments(text_file, "text.txt/run", "--steps", "1")
    line = f"the checkpoint of step 0 cannot be written: {text_file}/run: Not a directory"
    assert run_ranks(complain, 2, argv) == [line] * 2
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "examples/train_lm.py", "--device", "cpu", *argv]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"train_lm: {line}\n")


def test_a_name_that_is_too_long_ends_in_one_line(text_file: Path) -> None:
    for more in [], ["--no-resume"]:
        said = run_ranks(complain, 2, arguments(text_file, "a" * 300, "--steps", "1", *more))
        assert said[0] == said[1] and said[0].endswith(": File name too long"), said


def test_a_head_that_is_too_wide_leaves_nothing_behind(text_file: Path) -> None:
    said = run_ranks(complain, 2, arguments(text_file, "run", "--steps", "1", "--dim", "512", "--heads", "1"))
    assert said == ["--dim: expected at most 256 for each of --heads 1, got 512"] * 2
    assert not (text_file.parent / "run").exists()


def fail_on_the_first_rank(sp: Any, call: str) -> str:
    """What each rank raises where rank 0 meets something that is no OSError."""
    files = module("checkpoint")
    path = Path("nowhere")

    def fail(*_: Any) -> None:
        raise MemoryError("full")

    names = {"read": "read_checkpoint", "write": "write_checkpoint", "metrics": "Metrics"}
    before = getattr(files, names[call])
    setattr(files, names[call], fail)
    try:
        if call == "read":
            files.load_checkpoint(Path(__file__), None, sp)
        elif call == "write":
            files.save_checkpoint(Path("checkpoint.pt"), small_state(), None, sp)
        else:
            files.open_metrics(path, 0, sp)
    except (MemoryError, files.UserError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        setattr(files, names[call], before)
    return ""


@pytest.mark.parametrize("call", ["read", "write", "metrics"])
def test_no_rank_waits_for_one_that_failed(call: str) -> None:
    said = run_ranks(fail_on_the_first_rank, 2, call)
    assert said == ["MemoryError: full", "UserError: MemoryError on rank 0: full"]


# ---------------------------------------------------------------- metrics.jsonl


def metrics_file(folder: Path, steps: int) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "loss": {5 - step / 10}}}\n' for step in range(1, steps + 1)))
    return path


def test_a_kill_between_resume_and_first_step_keeps_the_metrics(tmp_path: Path) -> None:
    """What is on the disk once the file is open, before anything was added, is all that the next resume will find."""
    path = metrics_file(tmp_path, 5)
    opened = module("checkpoint").Metrics(path, 3)
    assert [row["step"] for row in rows_of(tmp_path, "loss")] == [1, 2, 3] == [row["step"] for row in opened.rows]
    opened.add(step=4, loss=4.0)
    assert [row["step"] for row in rows_of(tmp_path, "loss")] == [1, 2, 3, 4]


def test_a_kill_while_the_metrics_are_rewritten_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = metrics_file(tmp_path, 5)

    class Killed(BaseException):
        pass

    def kill(*_: Any) -> None:
        raise Killed

    monkeypatch.setattr(os, "replace", kill)
    with pytest.raises(Killed):
        module("checkpoint").Metrics(path, 3)
    assert len(rows_of(tmp_path, "loss")) == 5


def test_metrics_that_need_no_change_are_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = metrics_file(tmp_path, 5)
    monkeypatch.delattr(os, "replace")
    module("checkpoint").Metrics(path, 5).add(step=6, loss=4.0)
    assert len(rows_of(tmp_path, "loss")) == 6


def test_resumes_beside_unfinished_and_foreign_metrics(text_file: Path) -> None:
    run_ranks(train, 1, arguments(text_file, "run", "--steps", "2"))
    metrics = text_file.parent / "run" / "metrics.jsonl"
    foreign = b'\xff\xfe\n[1]\n{"step": "2"}\n{"step": 1, "loss": []}\n' + b"[" * 100_000 + b"\n"
    foreign += b'{"step": 1, "loss": %s}\n' * 3 % (b"9" * 400, b"9" * 5000, b"1e999") + b'{"step": 2, "lo'
    metrics.write_bytes(metrics.read_bytes() + foreign)
    run_ranks(train, 2, arguments(text_file, "run", "--steps", "3"))
    assert [row["step"] for row in rows_of(metrics.parent, "loss")] == [1, 2, 3]
    metrics.unlink()
    run_ranks(train, 1, arguments(text_file, "run", "--steps", "3"))  # nothing left to train


def test_starting_anew_replaces_the_checkpoint_before_the_metrics(text_file: Path) -> None:
    """A run killed in between would otherwise leave its metrics beside the checkpoint of the former run."""
    run_ranks(train, 1, arguments(text_file, "run", "--steps", "3"))
    run_ranks(train, 1, arguments(text_file, "run", "--steps", "1", "--no-resume", "--lr", "1e-3"))
    folder = text_file.parent / "run"
    assert module("checkpoint").read_checkpoint(folder / "checkpoint.pt")["step"] == 1
    assert [row["step"] for row in rows_of(folder, "loss")] == [1]
