"""examples/train_lm.py in small: it learns, resumes elsewhere, agrees with one rank, explains what input it refuses."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flexsp.testing.ranks import run_ranks
from tests.harness.demo import ROOT, SCHEDULE, arguments, demo, module, rows_of, text_file, train, write_text
from tests.marks import slow

__all__ = ["text_file"]  # the fixture


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return module("checkpoint").read_checkpoint(folder / "checkpoint.pt")["model"]


@pytest.fixture(scope="module")
def unstopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text and, in the folder ``whole``, a run of nine steps on one rank; its rate rises, stays and falls."""
    path = write_text(tmp_path_factory.mktemp("unstopped"))
    run_ranks(train, 1, arguments(path, "whole", *SCHEDULE, "--steps", "9"))
    return path


@pytest.mark.parametrize(
    "stops",
    [[(2, "4"), (3, "5"), (1, "9")], *slow([(1, "1"), (2, "9")], [(3, "8"), (2, "9")])],
    ids=["while it stays", "while it rises", "while it falls"],
)
def test_resuming_equals_not_stopping(unstopped: Path, tmp_path: Path, stops: list[tuple[int, str]]) -> None:
    """On other numbers of ranks, with --steps and --minutes that change: the same losses, rates and weights."""
    expected: list[int] = []
    for i, (ranks, stop) in enumerate(stops):
        more = SCHEDULE if i == 0 else ["--resume", "--minutes", f"{9 - i}"]  # later, the settings are the checkpoint's
        run_ranks(train, ranks, arguments(unstopped, str(tmp_path / "parts"), *more, "--steps", stop))
        expected += [ranks] * (int(stop) - len(expected))
    whole, parts = rows_of(unstopped.parent / "whole", "loss"), rows_of(tmp_path / "parts", "loss")
    assert [row["step"] for row in parts] == list(range(1, 10))
    assert [row["ranks"] for row in parts] == expected
    assert [row["lr"] for row in parts] == [row["lr"] for row in whole]
    assert len({row["lr"] for row in whole}) > 5
    for one, other in zip(whole, parts, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-9)
    one, other = weights(unstopped.parent / "whole"), weights(tmp_path / "parts")
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-8)


def test_resuming_on_as_many_ranks_changes_no_bit(unstopped: Path, tmp_path: Path) -> None:
    for stop in "4", "9":
        run_ranks(train, 1, arguments(unstopped, str(tmp_path / "parts"), *SCHEDULE, "--steps", stop))
    one, other = weights(unstopped.parent / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(other[name], value) for name, value in one.items())


def test_a_step_trains_on_its_window(unstopped: Path) -> None:
    """The first step's loss is that of the new model on window 0, and all steps' rates are those of the schedule."""
    script = demo()
    settings = script.Settings(tokens=96, dim=32, layers=2, heads=2, dtype="float64", lr=2e-3, warmup=3, hold=6)
    torch.manual_seed(script.SEED)
    model = script.LanguageModel(settings).double()
    window = script.training_window(script.read_text(str(unstopped), 96), 0, 96)
    loss = torch.nn.functional.cross_entropy(model(window[:, :-1])[0], window[0, 1:])
    rows = rows_of(unstopped.parent / "whole", "loss")
    assert rows[0]["loss"] == pytest.approx(loss.item(), rel=1e-12)
    rates = [1 / 3, 2 / 3, 1, 1, 1, 1, (6 / 7) ** 0.5, (6 / 8) ** 0.5, (6 / 9) ** 0.5]
    assert [row["lr"] for row in rows] == pytest.approx([2e-3 * rate for rate in rates], rel=1e-12)


def steps_of(sp: Any, argv: list[str]) -> list[int]:
    """The windows that a run trains on."""
    script, found = demo(), []
    plain = script.training_window

    def watched(text: Any, step: int, *more: Any) -> Any:
        found.append(step)
        return plain(text, step, *more)

    script.training_window = watched
    try:
        train(sp, argv)
    finally:
        script.training_window = plain
    return found


def test_steps_train_on_one_window_after_another(text_file: Path) -> None:
    for steps in run_ranks(steps_of, 2, arguments(text_file, "run", "--steps", "3")):
        assert steps[:3] == [0, 1, 2]  # after the last, ranks are compared with one on another window


def test_learns_and_leaves_its_files(text_file: Path) -> None:
    run_ranks(train, 2, arguments(text_file, "run", "--steps", "40", "--warmup", "2"))
    folder = text_file.parent / "run"
    losses = [row["loss"] for row in rows_of(folder, "loss")]
    assert losses[0] > 0.9 * math.log(256) > losses[-1] * 1.5
    assert rows_of(folder, "held_out_loss")[-1]["held_out_loss"] < losses[0]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "sample.txt").read_text().startswith("def ")


def compare(sp: Any, text: str) -> list[list[str]]:
    script = demo()
    torch.manual_seed(int(torch.randint(1 << 30, (), generator=torch.Generator().manual_seed(len(text)))))
    settings = script.Settings(dim=32, layers=2, heads=2)
    model = script.LanguageModel(settings)
    window = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()[None]
    sp.set_lengths(sp.partition(window.shape[1] - 1))
    return script.compare_with_one_rank(model, settings, window, torch.float64, sp)


def test_three_ranks_take_the_step_of_one() -> None:
    rows = run_ranks(compare, 3, "a window whose length is no multiple of anything, cut over three ranks" * 2)[0]
    assert len(rows) == 3
    assert all(float(row[-1]) < 1e-12 for row in rows), rows


def test_stepping_gives_the_logits_of_the_whole_sequence() -> None:
    script = demo()
    model = script.LanguageModel(script.Settings(dim=32, layers=2, heads=2)).double()
    tokens = torch.randint(256, (1, 37))
    caches = [block.mix.init_cache(1) for block in model.each_block()]
    for t, expected in enumerate(model(tokens)[0]):
        logits, caches = model.step(tokens[:, t], caches)
        torch.testing.assert_close(logits[0], expected)


def windows_of(length: int, tokens: int, steps: range) -> torch.Tensor:
    """First positions of the steps' windows in a text whose every number is its position."""
    script = demo()
    text = script.Text(torch.arange(length), torch.zeros(0), "")
    script.epoch_order.cache_clear()
    windows = torch.cat([script.training_window(text, step, tokens) for step in steps])
    assert torch.equal(windows.diff(), torch.ones(len(steps), tokens, dtype=torch.int64))
    return windows[:, 0]


@pytest.mark.parametrize("length, tokens", [(200, 16), (1000, 7), (34, 16), (33, 16), (17, 16)])
def test_which_tokens_belong_to_which_step(length: int, tokens: int) -> None:
    """An epoch's windows tile the text from a phase that each epoch draws, in an order that it draws."""
    count = max(1, (length - 1) // tokens - 1)
    starts = windows_of(length, tokens, range(3 * count)).tolist()
    for epoch in range(3):
        generator = torch.Generator().manual_seed(demo().SEED * 1_000_003 + epoch)
        spare = length - 1 - count * tokens
        phase = int(torch.randint(min(spare, tokens - 1) + 1, (), generator=generator))
        order = torch.randperm(count, generator=generator)
        mine = starts[epoch * count : (epoch + 1) * count]
        assert mine == (phase + tokens * order).tolist()
        assert sorted(mine) == list(range(min(mine), min(mine) + count * tokens, tokens))
        assert min(mine) >= 0 and max(mine) + tokens + 1 <= length
    late = windows_of(length, tokens, range(2 * count, 3 * count))  # the same without the steps before
    assert late.tolist() == starts[2 * count :]


def test_epochs_differ() -> None:
    starts = windows_of(2000, 16, range(2 * 123)).view(2, 123)
    assert not torch.equal(starts[0], starts[1])
    assert len(windows_of(2000, 16, range(0, 40 * 123, 123)).unique()) > 10  # first windows of forty epochs


def test_default_text_is_the_standard_library_with_files_held_out() -> None:
    text = demo().read_text(None, 8192)
    assert len(text.train) > 10 * len(text.held_out) > 100_000
    assert b"import" in text.held_out.numpy().tobytes()


def test_refuses_a_device_or_transport_in_one_line() -> None:
    script = demo()
    for option, value, expected in (("--transport", "pigeon", "transport: expected one of auto"),
                                    ("--device", "cuda", "--device cuda: expected a CUDA device")):  # fmt: skip
        if option == "--device" and torch.cuda.is_available():
            continue
        with pytest.raises(script.UserError, match=expected):
            script.start_ranks(script.parse_options([option, value]))


def read_own(sp: Any, files: list[str]) -> str:
    script = demo()
    options = script.parse_options(["--data", files[sp.rank]])
    try:
        script.read_same_text(options, 96, None, sp)
    except script.UserError as error:
        return str(error)
    return ""


def test_ranks_that_read_other_text_say_so(text_file: Path) -> None:
    other = text_file.with_name("other.txt")
    other.write_text(text_file.read_text().replace("fox", "ox "))
    said = run_ranks(read_own, 2, [str(text_file), str(other)])
    assert said == [f"--data: rank 1 reads other text from {other} than rank 0"] * 2
    said = run_ranks(read_own, 2, [str(text_file), str(other.with_name("nowhere"))])
    assert said[0] == said[1] and "nowhere" in said[0]
    assert run_ranks(read_own, 2, [str(text_file)] * 2) == ["", ""]


def test_the_largest_head() -> None:
    """What the settings let pass, the layer takes."""
    script = demo()
    script.LanguageModel(script.Settings(dim=script.LARGEST_HEAD, heads=1, layers=1))
    with pytest.raises(script.UserError, match="^--dim: expected at most 256 for each of --heads 2, got 514$"):
        script.Settings(dim=514, heads=2)
    with pytest.raises(ValueError, match=r"expand_k: expected .* of 1\.\.256, .* = 257"):
        script.SimpleGLA(2 * (script.LARGEST_HEAD + 1), 2)


def fail_on_the_first_rank(sp: Any, text: str) -> str:
    script = demo()

    def fail(tensors: list[torch.Tensor]) -> float:
        raise MemoryError("no room for the whole sequence")

    before, script.norm = script.norm, fail
    try:
        compare(sp, text)
    except (MemoryError, script.UserError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        script.norm = before
    return ""


def test_no_rank_waits_for_one_that_cannot_take_the_step() -> None:
    said = run_ranks(fail_on_the_first_rank, 2, "a window of an even number of bytes and one")
    problem = "MemoryError: no room for the whole sequence"
    assert said == [problem, f"UserError: {problem.replace(':', ' on rank 0:')}"]


def test_names_and_prompts_that_are_no_text(tmp_path: Path) -> None:
    """As a shell gives them: bytes that no encoding reads, in the prompt and in the names of files."""
    text = write_text(tmp_path).rename(tmp_path / os.fsdecode(b"text\xff.txt"))
    argv = arguments(text, os.fsdecode(b"run\xff"), "--steps", "1", "--prompt", os.fsdecode(b"\xffa"))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8:strict"}
    command = [sys.executable, "examples/train_lm.py", "--device", "cpu", *argv]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "text\\udcff.txt" in done.stdout and "run\\udcff:" in done.stdout
    assert (tmp_path / os.fsdecode(b"run\xff") / "sample.txt").read_text(encoding="utf-8").startswith("\ufffda")


def test_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    script = demo()
    with pytest.raises(script.UserError, match="File name too long"):
        script.read_text(str(tmp_path / ("a" * 300)), 64)


def test_missing_and_short_text(tmp_path: Path) -> None:
    script = demo()
    with pytest.raises(script.UserError, match="--data: expected a text file or a folder, got .*nowhere"):
        script.read_text(str(tmp_path / "nowhere"), 64)
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(script.UserError, match=r"--data: a sequence takes 65 bytes.*got 9 and 0"):
        script.read_text(str(tmp_path / "short.txt"), 64)


@pytest.mark.parametrize(
    "option, value",
    [(name, value) for name in ("--steps", "--tokens", "--dim", "--layers", "--heads", "--warmup", "--hold",
                                "--eval-windows", "--sample") for value in ("0", "-3")]
    + [(name, value) for name in ("--lr", "--minutes") for value in ("0", "-1", "nan", "inf")]
    + [("--heads", "3"), ("--dtype", "int8"), ("--lr", "1e39"), ("--dim", "1028")]
    + [(name, "1" + "0" * 400) for name in ("--tokens", "--dim", "--layers", "--warmup", "--hold")],
)  # fmt: skip
def test_refuses_options_in_one_line(option: str, value: str) -> None:
    script = demo()
    with pytest.raises(script.UserError, match=rf"^{'--dim' if value == '3' else option}: expected .*, got ") as caught:
        script.choose_settings(script.parse_options([option, value]), None)
    assert "\n" not in str(caught.value)
