"""examples/train_hybrid.py in small: it resumes, agrees with one rank and the unmodified model, exports, refuses."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from flexsp.testing.ranks import run_ranks
from tests.guides import run_script, save_scripts
from tests.harness.demo import ROOT, rows_of
from tests.harness.hybrid import arguments, hybrid, place, write_config
from tests.transformers_models import ALL_MODELS

pytest.importorskip("transformers")
__all__ = ["place"]  # the fixture


def train(_: Any, argv: list[str]) -> int | str:
    """One invocation on the ranks of the pool: the signal that ended it or 0, or what a person would read."""
    script = hybrid()
    try:
        options = script.parse_options(argv)
        mesh = script.make_mesh(options, torch.device("cpu"))
        try:
            return script.run(options, mesh)
        finally:
            mesh.sp.close()
    except script.UserError as error:
        return str(error)


def run(ranks: int, argv: list[str]) -> list[Any]:
    return run_ranks(train, ranks, argv, whole_world=True)


def column(folder: Path, key: str) -> list[float]:
    return [row[key] for row in rows_of(folder, "loss")]


def exported(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model" / "model.safetensors")


def unmodified(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).train()


def same_bits(one: Path, other: Path) -> None:
    for key in ("loss", "aux_loss", "grad_norm", "lr"):
        assert column(one, key) == column(other, key), key
    left, right = exported(one), exported(other)
    assert left.keys() == right.keys() and all(torch.equal(right[name], x) for name, x in left.items())


def agree(one: Path, other: Path, nudged: Path) -> None:
    """Within what a rounding of the first weights does to the run, as examples/compare_runs.py has it."""
    assert column(one, "lr") == column(other, "lr")
    for key in ("loss", "aux_loss", "grad_norm"):
        rows = [dict(enumerate(column(folder, key), 1)) for folder in (one, other, nudged)]
        compared = hybrid("compare_runs").compare(*rows)
        assert all(off <= bound for _, off, bound in compared), (key, compared)
        assert compared[1][2] < 1e-2 * rows[0][2]  # it can fail
    left, right, apart = exported(one), exported(other), exported(nudged)
    drift = sum(float((apart[name] - x).square().sum()) for name, x in left.items())
    assert 0 < sum(float((right[name] - x).square().sum()) for name, x in left.items()) < 8 * drift


# ---------------------------------------------------------------- runs


def test_stopped_and_resumed_equals_not_stopped(place: Path) -> None:
    """No bit differs, and the run leaves its files."""
    short = ["--batch", "1", "--steps", "5"]
    assert run(2, arguments(place, "whole", *short)) == [0, 0]
    assert run(2, arguments(place, "parts", *short, "--stop-after", "2")) == [0, 0]
    assert not (place / "parts" / "model").exists()
    assert run(2, arguments(place, "parts", *short, "--resume")) == [0, 0]
    same_bits(place / "whole", place / "parts")
    assert column(place / "whole", "lr") == pytest.approx([1e-2 * rate for rate in (1 / 2, 1, 1, 2 / 3, 1 / 3)])
    saved = {path.name for path in (place / "parts" / "checkpoints").iterdir()}
    assert saved == {"step-00000002", "step-00000005"}
    assert (place / "whole" / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_trains_on_from_an_exported_model(place: Path) -> None:
    """A folder with weights and a tokenizer's absence: the first loss is that of the unmodified model from there."""
    assert run(4, arguments(place, "first", "--sp", "2")) == [0] * 4
    folder = place / "first" / "model"
    assert run(2, arguments(place, "on", "--model", str(folder), "--stop-after", "1")) == [0, 0]
    loss, _ = loss_of(unmodified(folder), place, 0)
    assert column(place / "on", "loss") == pytest.approx([loss], rel=1e-5)
    assert loss < column(place / "first", "loss")[0] - 0.2


def loss_of(model: Any, place: Path, step: int) -> tuple[float, list[torch.Tensor]]:
    """Cross entropy and gradients of the unmodified model in a step of SCHEDULE, one document at a time."""
    data = hybrid("token_data")
    tokens = data.open_tokens(str(place / "texts"), None, None, "uint16", place, hybrid().World(0, 1))
    batches = [data.make_batch(tokens.window(4 * step + i, 96, 0), 40, tokens.separator) for i in range(4)]
    counted = sum(int((batch["shift_labels"] != -100).sum()) for batch in batches)
    total = 0.0
    for batch in batches:
        bounds = batch["cu_seq_lens_q"].tolist()
        for a, b in zip(bounds, bounds[1:], strict=False):
            logits = model(batch["input_ids"][:, a:b]).logits[0]
            labels = batch["shift_labels"][0, a:b]
            loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / counted
            loss.backward()
            total += float(loss.detach())
    return total, [p.grad for p in model.parameters() if p.grad is not None]


MESHES = [(4, "2"), (4, "4"), (4, "1"), (2, "1"), (1, "1")]


@pytest.mark.slow
def test_resumes_on_other_ranks(place: Path) -> None:
    """Every mesh goes on from the checkpoint of another one; rows of ranks take a step's four sequences together."""
    slowly = ["--lr", "1e-3"]  # rounding grows less
    run(1, arguments(place, "whole", *slowly))
    run(1, arguments(place, "nudged", "--nudge", *slowly))
    for i, (ranks, sp) in enumerate(MESHES):
        stop = [] if i == len(MESHES) - 1 else ["--stop-after", str(i + 1)]
        assert run(ranks, arguments(place, "parts", "--sp", sp, *slowly, *stop)) == [0] * ranks
    agree(place / "whole", place / "parts", place / "nudged")
    assert column(place / "parts", "ranks") == [4, 4, 4, 2, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("ranks, sp", [(1, "1"), (4, "2"), (4, "1")])
def test_a_step_is_that_of_the_unmodified_model(place: Path, ranks: int, sp: str) -> None:
    """Four sequences, one after another or side by side: their loss and the norm of its gradient."""
    write_config(place, output_router_logits=False)
    run(ranks, arguments(place, "run", "--sp", sp, "--stop-after", "1", "--clip", "1e9"))
    model = fresh(place, run_folder=place / "run")
    loss, gradients = loss_of(model, place, 0)
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    assert column(place / "run", "loss") == pytest.approx([loss], rel=1e-5)
    assert column(place / "run", "grad_norm") == pytest.approx([float(norm)], rel=1e-4)


def fresh(place: Path, run_folder: Path) -> Any:
    """The model that a run starts with."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place / "qwen3_next"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "qwen3_5_text", "zamba2", "mamba2", "bamba", "kimi_linear", "nemotron_h", "falcon_h1", "granitemoehybrid",
        "recurrent_gemma", "minimax", "falcon_mamba", "lfm2_moe", "xlstm", "jamba", "bailing_hybrid",
    ],
)  # fmt: skip
def test_other_models(place: Path, name: str) -> None:
    """Tied embeddings, layers that share a block, a head of another dtype: one rank and four, and both export."""
    write_config(place, name)
    for ranks in (1, 4):
        more = ["--steps", "4", "--lr", "1e-3", "--sp", str(min(2, ranks))]
        assert run(ranks, arguments(place, str(ranks), *more, model=name)) == [0] * ranks
    assert column(place / "4", "loss") == pytest.approx(column(place / "1", "loss"), rel=1e-4)
    assert column(place / "4", "grad_norm") == pytest.approx(column(place / "1", "grad_norm"), rel=1e-3)
    unmodified(place / "4" / "model")
    assert run(2, arguments(place, "4", *more, model=name)) == [0, 0]  # there is nothing left to train


def test_a_model_of_text_and_images_is_told() -> None:
    from transformers import Qwen3_5Config

    script, config = hybrid("pretrained"), Qwen3_5Config(text_config=ALL_MODELS["qwen3_5_text"])
    assert "qwen3_5 that takes more than text: only its language model is trained, and exp" in script.left_out(config)
    assert script.left_out(config.text_config) == script.left_out(script.read_config(script.TINY)) == ""


@pytest.mark.slow
def test_bfloat16_learns(place: Path) -> None:
    more = ["--dtype", "bfloat16", "--steps", "30", "--sp", "2", "--export-dtype", "bfloat16"]
    assert run(4, arguments(place, "run", *more)) == [0] * 4
    losses = column(place / "run", "loss")
    assert losses[0] > 5.2 and losses[-1] < 0.75 * losses[0]
    assert {x.dtype for x in exported(place / "run").values()} == {torch.bfloat16}
    assert unmodified(place / "run" / "model").config.dtype == torch.float32  # as loaded


@pytest.mark.slow
def test_a_tokenizer_and_shards(place: Path) -> None:
    """Text through a folder's tokenizer, and the same tokens from shards, give the same run."""
    tokenizer = save_tokenizer(place / "qwen3_next")
    assert run(1, arguments(place, "text", "--stop-after", "2")) == [0]
    (path,) = (place / "text").glob("tokens-*.npy")
    tokens = np.load(path)
    assert (tokens == tokenizer.eos_token_id).sum() == 5
    (place / "shards").mkdir()
    shutil.copy(path, place / "shards" / "0.npy")
    tokens.astype(np.uint32).tofile(place / "tokens.bin")
    for name, more in (("shards", []), ("tokens.bin", ["--token-dtype", "uint32"])):
        argv = arguments(place, "run" + name, "--stop-after", "2", "--data", str(place / name), *more)
        assert run(1, argv) == [0]
        assert column(place / ("run" + name), "loss") == column(place / "text", "loss")


def save_tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[eos]", "[unk]", "foxes", "jump", "over", "dogs", *map(str, range(100))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[unk]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="[eos]", unk_token="[unk]")
    made.save_pretrained(folder)
    return made


@pytest.mark.slow
def test_the_trainer_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe in the guide prints the same on one rank, over ranks, with rows of ranks, and from a checkpoint."""
    pytest.importorskip("accelerate")
    save_scripts("transformers.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    alone = printed(1)
    assert len(alone) == 6 and float(alone[4].split()[3]) < float(alone[0].split()[3]) - 0.5
    assert printed(4, "2") == alone
    assert printed(2, "1", "trained/checkpoint-2") == alone


def printed(ranks: int, *arguments: str) -> list[str]:
    lines = run_script(Path("trainer.py").absolute(), ranks, *arguments)
    return [line for line in lines if line.startswith(("step", "evaluation"))]


# ---------------------------------------------------------------- interruptions


@pytest.mark.slow
def test_a_signal_saves_and_the_same_command_goes_on(place: Path) -> None:
    """SIGTERM to torchrun, as a scheduler sends it, at some step; the whole equals a run that was left alone."""
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 --shutdown-timeout 120"
    script = [*torchrun.split(), "examples/train_hybrid.py", "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    more = ["--steps", "40"]
    command = [sys.executable, *script, *arguments(place, "parts", *more)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
    metrics = place / "parts" / "metrics.jsonl"
    until = time.monotonic() + 200
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3) and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=200)[0]
    assert process.returncode != 0 and "of 40; the same command goes on" in said, said
    (saved,) = (place / "parts" / "checkpoints").iterdir()
    assert 3 <= int(saved.name[5:]) < 40
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and f"from step {int(saved.name[5:])}" in done.stdout, done.stdout + done.stderr
    run(2, arguments(place, "whole", *more))
    same_bits(place / "whole", place / "parts")


def fail_to_write(sp: Any, argv: list[str], what: str) -> int | str:
    """A run of which rank 1 cannot write its part, or rank 0 dies between the parts and the new name."""
    checkpoint = hybrid("sharded_checkpoint")
    save, replace = checkpoint.dcp.save, checkpoint.os.replace

    def full(*_: Any, **__: Any) -> None:
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        raise checkpoint.CheckpointException("failed", {1: (OSError(28, "No space left on device"), None)})

    def no_name(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    checkpoint.dcp.save = full if what == "part" else save
    checkpoint.os.replace = no_name if what == "name" else replace
    try:
        return train(sp, argv)
    finally:
        checkpoint.dcp.save, checkpoint.os.replace = save, replace


@pytest.mark.slow
@pytest.mark.parametrize("what", ["part", "name"])
def test_a_failed_save_keeps_the_last_good_one(place: Path, what: str) -> None:
    run(2, arguments(place, "whole"))
    run(2, arguments(place, "run", "--stop-after", "2"))
    said = run_ranks(fail_to_write, 2, arguments(place, "run", "--stop-after", "4"), what, whole_world=True)
    assert said[0] == said[1] and said[0].startswith("the checkpoint of step 4 cannot be written: "), said
    checkpoint = hybrid("sharded_checkpoint")
    assert [path.name for path in checkpoint.checkpoints(place / "run" / "checkpoints")] == ["step-00000002"]
    assert run(2, arguments(place, "run")) == [0, 0]
    same_bits(place / "whole", place / "run")


def full_metrics(sp: Any, argv: list[str]) -> int | str:
    """A run whose metrics cannot be written from the second step on, which rank 0 alone notices."""
    files, step = hybrid("checkpoint"), [0]
    add = files.Metrics.add

    def fail(self: Any, **row: Any) -> None:
        self.problem = "metrics.jsonl: No space left on device" if row["step"] >= 2 else ""
        step[0] = row["step"]
        add(self, **row)

    files.Metrics.add = fail
    try:
        return f"{train(sp, argv)} after {step[0]}"
    finally:
        files.Metrics.add = add


@pytest.mark.slow
def test_metrics_that_cannot_be_written_end_the_run(place: Path) -> None:
    said = run_ranks(full_metrics, 2, arguments(place, "run", "--no-export"), whole_world=True, timeout=60)
    assert said[0] == "metrics.jsonl: No space left on device after 3"
    assert said[1] == "metrics.jsonl: No space left on device after 0"
    assert not (place / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_damaged_and_foreign_checkpoints(place: Path) -> None:
    run(2, arguments(place, "run", "--stop-after", "2"))
    folder = place / "run" / "checkpoints" / "step-00000002"
    for more, expected in (
        (["--lr", "1"], "--lr: expected 0.01, which "), (["--seed", "3"], "--seed: expected 0, "),
        (["--data", str(ROOT / "docs")], "--data: expected what the run was trained on"),
        (["--model", str(write_config(place, "mamba2"))], "--model: expected the config that "),
    ):  # fmt: skip
        said = run(2, arguments(place, "run", *more))
        assert said[0] == said[1] and said[0].startswith(expected), said
    part = folder / "__1_0.distcp"
    whole = part.read_bytes()
    part.write_bytes(whole[:-9])
    said = run(2, arguments(place, "run"))
    assert said[0] == said[1] and f"{part}: expected {len(whole)} bytes, got {len(whole) - 9}" in said[0], said
    part.write_bytes(whole)
    (folder / "run.json").write_text("{")
    assert "run.json cannot be read" in run(2, arguments(place, "run"))[0]
    assert run(2, arguments(place, "run", "--no-resume", "--stop-after", "1")) == [0, 0]
    assert [path.name for path in folder.parent.iterdir()] == ["step-00000001"]


def test_more_steps_may_be_added_while_the_rate_stands() -> None:
    settings = hybrid().Settings
    before = settings(steps=20, warmup=2, decay=5)
    longer = settings(steps=40, warmup=2, decay=10)
    longer.check_longer(before, 15)
    assert all(before.learning_rate(step) == longer.learning_rate(step) for step in range(15))
    assert before.learning_rate(15) < before.learning_rate(14)
    with pytest.raises(hybrid().UserError, match="--steps, --decay: expected 20 and 5"):
        longer.check_longer(before, 16)
    before.check_longer(before, 16)
    with pytest.raises(hybrid().UserError, match="the rate falls from step 15 on and the run is at step 20, got 20"):
        before.check_longer(longer, 20)  # it would have begun to fall before
    before.check_longer(longer, 15)


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    "more, expected",
    [([option, "0"], rf"^{option}: expected an integer >= 1, got 0$") for option in
     ("--sp", "--save-every", "--keep", "--stop-after", "--steps", "--tokens", "--batch")]
    + [([option, "-1"], rf"^{option}: expected .*, got -1") for option in
       ("--context", "--warmup", "--decay", "--lr", "--clip")]
    + [(["--dtype", "float16"], "^--dtype: expected one of bfloat16, float32, got 'float16'$"),
       (["--warmup", "190"], r"^--steps: expected at least --warmup 190 \+ --decay 40, got 200$")],
)  # fmt: skip
def test_refuses_options(more: list[str], expected: str) -> None:
    script = hybrid()
    with pytest.raises(script.UserError, match=expected):
        options = script.parse_options(more)
        script.settings_of(script.Settings, options, None, options.folder)


@pytest.mark.slow
def test_refuses_what_does_not_fit(place: Path) -> None:
    """On every rank in the same words, before a file is written."""
    (place / "short.txt").write_text("short")
    (place / "empty").mkdir()
    (place / "odd.bin").write_bytes(b"odd")
    np.save(place / "real.npy", np.zeros(500))
    np.save(place / "large.npy", np.full(500, 300, np.uint16))
    write_config(place, "gpt2", **{}) if "gpt2" in ALL_MODELS else save_gpt2(place)
    for more, expected in (
        (["--model", "nowhere"], "--model: expected 'tiny', a folder with config.json or such a file, got 'nowhere'"),
        (["--model", str(place / "gpt2")], "--model: GPT2LMHeadModel is not among the models"),
        (["--model", str(place / "short.txt")], f"--model: {place / 'short.txt'} is no config"),
        (["--data", "nowhere"], "--data: expected a text file or a folder, got 'nowhere'"),
        (["--data", str(place / "short.txt")], "--data: expected a shard of 97 tokens, got 6"),
        (["--data", str(place / "empty")], "--data: expected text, got no file of text"),
        (["--data", str(place / "odd.bin")], "--token-dtype: expected one whose 2 bytes divide the 3 of"),
        (["--data", str(place / "real.npy")], "--data: expected uint16 or uint32 [n] in"),
        (["--data", str(place / "large.npy")], "--data: expected tokens below the model's 256, got 300"),
        (["--sp", "3"], "--sp: expected a divisor of the 2 ranks, got 3"),
        (["--batch", "3", "--sp", "1"], "--batch: expected a multiple of 2 (2 ranks by --sp 1), got 3"),
        (["--tokens", "1"], "--tokens: expected at least one for each of 2 ranks, got 1"),
        (["--resume"], "--resume: expected a checkpoint, got none in"),
        (["--transport", "pigeon"], "transport: expected one of auto"),
    ):  # fmt: skip
        said = run(2, arguments(place, "run", *more))
        assert said[0] == said[1] and str(said[0]).startswith(expected), (more, said)
        assert not (place / "run" / "checkpoints").exists()


def save_gpt2(place: Path) -> None:
    from transformers import GPT2Config

    GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=256).save_pretrained(place / "gpt2")


# ---------------------------------------------------------------- tokens


def tokens_of(*lengths: int) -> Any:
    """Shards whose every token is its place."""
    data, ends = hybrid("token_data"), np.cumsum(lengths)
    shards = tuple(np.arange(end - n, end, dtype=np.uint32) for n, end in zip(lengths, ends, strict=True))
    return data.Tokens(shards, None, "", "")


def test_an_epoch_takes_every_window_once() -> None:
    tokens = tokens_of(35, 5, 21, 41)
    assert tokens.windows(10) == [3, 0, 2, 4]
    places = [0, 10, 20, 40, 50, 61, 71, 81, 91]
    epochs = [[tokens.window(9 * epoch + i, 10, 7) for i in range(9)] for epoch in range(3)]
    for windows in epochs:
        assert sorted(int(window[0]) for window in windows) == places
        assert all(torch.equal(window, torch.arange(11) + window[0]) for window in windows)
    orders = [[int(window[0]) for window in windows] for windows in epochs]
    assert orders[0] != orders[1] != orders[2]
    assert int(tokens.window(4, 10, 7)[0]) == orders[0][4]  # whatever was taken before
    assert [int(tokens.window(i, 10, 8)[0]) for i in range(9)] != orders[0]


def test_steps_take_one_sequence_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of ranks share those of a step."""
    script, tokens = hybrid(), tokens_of(2000)
    monkeypatch.setattr(script, "over_ranks", lambda values, *_: values)
    model, settings = SimpleNamespace(config=SimpleNamespace(vocab_size=5000)), script.Settings(tokens=10, batch=4)
    for step in range(3):
        taken = []
        for row in range(2):
            mesh = script.Mesh(script.World(0, 1), None, None, row, 2)
            batches, counted = script.TrainingRun(model, None, tokens, settings, mesh).batches(step)
            taken.append([int(batch["input_ids"][0, 0]) for batch in batches])
            assert counted == 20
        expected = [int(tokens.window(4 * step + i, 10, 0)[0]) for i in range(4)]
        assert taken == [expected[0::2], expected[1::2]]


def test_documents_of_a_window() -> None:
    make_batch = hybrid("token_data").make_batch
    window = torch.tensor([5, 6, 0, 7, 8, 9, 1, 2, 0, 3, 4])
    batch = make_batch(window, 3, 0)
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 6, 9, 10]
    assert batch["input_ids"].tolist() == [[5, 6, 0, 7, 8, 9, 1, 2, 0, 3]]
    assert batch["shift_labels"].tolist() == [[6, 0, -100, 8, 9, 1, 2, 0, -100, 4]]
    assert make_batch(window, 4, None)["cu_seq_lens_q"].tolist() == [0, 4, 8, 10]
    assert "cu_seq_lens_q" not in make_batch(window, 10, None)


def test_text_becomes_tokens_once(place: Path) -> None:
    data, world = hybrid("token_data"), hybrid().World(0, 1)
    tokens = data.open_tokens(str(place / "texts"), None, None, "uint16", place / "run", world)
    files = sorted((place / "texts").iterdir())
    assert tokens.shards[0].tobytes() == b"".join(
        np.frombuffer(file.read_bytes() + b"\0", np.uint8).astype(np.uint16).tobytes() for file in files
    )
    (path,) = (place / "run").iterdir()
    before = path.stat().st_mtime_ns
    again = data.open_tokens(str(place / "texts"), None, None, "uint16", place / "run", world)
    assert (again.digest, path.stat().st_mtime_ns) == (tokens.digest, before)
    files[0].write_text("other")
    assert data.open_tokens(str(place / "texts"), None, None, "uint16", place / "run", world).digest != tokens.digest


def test_tokens_are_others_with_another_separator(tmp_path: Path) -> None:
    data, world = hybrid("token_data"), hybrid().World(0, 1)
    for name in ("0.npy", "1.npy"):
        np.save(tmp_path / name, np.arange(50, dtype=np.uint16))
    found = [data.open_tokens(str(tmp_path), None, x, "uint16", tmp_path, world).digest for x in (None, 1, 2, 1)]
    assert found[1] == found[3] and len(set(found)) == 3


# ---------------------------------------------------------------- comparison


def test_comparison_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare, nan = hybrid("compare_runs"), float("nan")
    for name, last in (("one", 2.0), ("many", 2.0 + 1e-6), ("nudged", 2.0), ("wrong", 2.0 + 1e-5), ("nan", nan)):
        (tmp_path / name).mkdir()
        lines = [f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in ((1, 3.0), (2, last))]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    one, nudged = str(tmp_path / "one"), ["--nudged", str(tmp_path / "nudged")]
    compare.main([one, str(tmp_path / "many"), *nudged])
    assert "the losses agree" in capsys.readouterr().out
    for name, expected in (("wrong", "first in step 2"), ("nan", "of the same steps"), ("nowhere", "got none with")):
        with pytest.raises(SystemExit, match=expected):
            compare.main([one, str(tmp_path / name), *nudged])
