"""`flexsp compile`: it plans the kernels that calls ask for, and processes that come later find them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flexsp.ahead import command
from flexsp.bench.released import RELEASED
from flexsp.devices import H100, H200, of_name
from flexsp.launch.cli import main, parser
from tests.harness.compiling import in_child

QUICK = ("Qwen3-Next", "Mamba-2 2.7B")
"""No program is traced for these, which takes seconds."""


def keys_of(kind: str, calls: list[list[str]]) -> list[dict[str, str]]:
    """In a child process: for each call the keys of its kernels in Triton's cache, and their names."""
    from flexsp.runtime.triton_private import gpu_target

    found = [command.planned(parser().parse_args(["compile", *words]), H200, kind) for words in calls]
    return [{request.key(gpu_target(90)): request.kernel.__name__ for request in requests} for requests in found]


def of_layer(name: str, tokens: str, packed: str) -> list[str]:
    return ["--layer", name, "--tokens", tokens, "--packed", packed]


def check_same_keys(*calls: list[str]) -> None:
    """What is planned with tensors that have no memory is what calls on tensors in memory ask for."""
    ahead, asked = in_child(keys_of, "meta", [*calls]), in_child(keys_of, "cpu", [*calls])
    for call, planned, found in zip(calls, ahead, asked, strict=True):
        assert len(planned) > 5, call
        assert planned == found, call


def test_keys_are_those_of_calls() -> None:
    check_same_keys(*(of_layer(name, "520", packed) for name, packed in zip(QUICK, "03", strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", ["1000", "8192"])
@pytest.mark.parametrize("name", [x.name for x in RELEASED])
def test_keys_of_all_layers_are_those_of_calls(name: str, tokens: str) -> None:
    check_same_keys(*(of_layer(name, tokens, packed) for packed in "03"))


def test_long_texts_have_other_kernels() -> None:
    """The number of tokens counts: long texts are cut into segments."""
    short, long = in_child(keys_of, "meta", [of_layer("Mamba-2 2.7B", n, "0") for n in ("64", "64k")])
    assert short.keys() != long.keys()


MODELS: dict[str, dict[str, Any]] = {
    "mamba2": {"num_hidden_layers": 2, "hidden_size": 256, "num_heads": 8, "head_dim": 64, "expand": 2, "n_groups": 1},
    "qwen3_5_text": {
        "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 256, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
    },
}  # fmt: skip


def saved_model(folder: Path, kind: str) -> Path:
    from transformers import AutoConfig

    AutoConfig.for_model(kind, vocab_size=128, **MODELS[kind]).save_pretrained(folder / kind)
    return folder / kind


def keys_of_model(folder: Path, packed: bool) -> dict[str, str]:
    """In a child process: what the layers of a parallelized model ask for, on tensors in memory."""
    from dataclasses import replace

    from transformers import AutoConfig, AutoModelForCausalLM

    from flexsp.ahead.stand_in import collected_on
    from flexsp.ahead.steps import roles
    from flexsp.integrations import transformers
    from flexsp.integrations.transformers.batch import Running
    from flexsp.runtime.triton_private import gpu_target

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).to(torch.bfloat16)
    ids = torch.randint(0, 128, (1, 1024))
    batch = {"input_ids": ids, **({"cu_seqlens": torch.tensor([0, 200, 1024])} if packed else {})}
    with collected_on(H200, "cpu") as found:
        (sp,) = roles(1, "peer", "chain", 1 << 20)
        transformers.parallelize(model, sp)
        given = transformers.shard(batch, sp)
        shard = replace(given.pop("flexsp_shard"), cu_seqlens_cpu=None)  # all that is in memory is on the GPU
        if model.config.model_type == "mamba2":
            del given["position_ids"]
        else:
            given["attention_mask"] = {"full_attention": None, "linear_attention": None}
        shard = Running(**vars(shard))
        out = model.base_model(**given, use_cache=False, return_dict=True, flexsp_shard=shard)
        out.last_hidden_state.sum().backward()
    return {request.key(gpu_target(90)): request.kernel.__name__ for request in found.values()}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_keys_of_a_model_are_those_of_its_layers(kind: str, packed: bool, tmp_path: Path) -> None:
    if packed and kind != "mamba2":
        pytest.skip("softmax layers of packed documents are compiled by torch, for a GPU that is not there")
    folder = saved_model(tmp_path, kind)
    words = [str(folder), "--tokens", "1024", *(["--packed", "2"] if packed else [])]
    (ahead,) = in_child(keys_of, "meta", [words])
    assert ahead == in_child(keys_of_model, folder, packed)
    assert len(ahead) > 8


def said(*words: str) -> tuple[int, str]:
    """In a child process: the status of a command, and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        status = main(["compile", *words])
    return status, out.getvalue()


def found_by_calls(words: list[str]) -> list[tuple[str, bool, bool]]:
    """In a child process: of the kernels that calls on tensors in memory ask for, the name, whether the cache has it,
    and whether it has its launcher."""
    from flexsp.runtime.triton_private import gpu_target, in_cache, keep_launcher

    requests = command.planned(parser().parse_args(["compile", *words]), H200, "cpu")
    target, found = gpu_target(90), []
    for request in requests:
        name = request.kernel.__name__
        known = in_cache(request.key(target), name)
        found.append((name, known, known and keep_launcher(request.build(target))))
    return found


@pytest.mark.slow
def test_processes_compile_side_by_side(tmp_path: Path) -> None:
    """By the command itself, whose processes are forks."""
    words = ["--layer", "RecurrentGemma 9B", "--tokens", "512", "--gpu", "h200", "--jobs", "2"]
    environment = {name: x for name, x in os.environ.items() if name not in ("TRITON_INTERPRET", "FLEXSP_BACKEND")}
    done = subprocess.run(
        [sys.executable, "-m", "flexsp", "compile", *words, "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=280, env=environment,
    )  # fmt: skip
    assert done.returncode == 0 and "0 missing" in done.stdout, done.stderr
    assert len(list(tmp_path.glob("*/*.cubin"))) >= 5


def test_later_processes_find_the_kernels_in_a_moved_folder(tmp_path: Path) -> None:
    layer, made, moved = ["--layer", "RecurrentGemma 9B", "--tokens", "512"], tmp_path / "made", tmp_path / "moved"
    words = [*layer, "--gpu", "h200"]
    status, text = in_child(said, *words, "--out", str(made), "--check")
    assert status == 1 and "is not in the cache" in text and not list(made.glob("*/*.cubin"))
    status, text = in_child(said, *words, "--out", str(made), "--jobs", "1")
    assert status == 0, text
    n = len(list(made.glob("*/*.cubin")))
    assert f"0 were there, {n} compiled, 0 missing" in text and n >= 5
    shutil.move(made, moved)
    found = in_child(found_by_calls, layer, TRITON_CACHE_DIR=moved)
    assert len(found) == n and all(known and launcher for _, known, launcher in found), found
    status, text = in_child(said, *words, "--out", str(moved), "--jobs", "1")
    assert status == 0 and f"{n} were there, 0 compiled, 0 missing" in text
    assert len(list(moved.glob("*/*.cubin"))) == n


VARIANT = """
from flexsp.variants.simple_gla import make
"""


def test_a_program_of_ones_own_is_planned(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(VARIANT)
    words = ["--variant", f"{tmp_path / 'own.py'}:make", "--H", "4", "--K", "64", "--V", "64", "--tokens", "300"]
    (found,) = in_child(keys_of, "meta", [words])
    assert len(found) > 5 and "output_kernel" in found.values()


@pytest.fixture
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.usefixtures("no_interpreter")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected one of MODEL_FOLDER, --layer and --variant, got 0 of them"),
        (["--layer", "HGRN2", "here"], "got 2 of them"),
        (["--layer", "HGRN3"], "--layer: expected one of Mamba-2 2.7B; .*got 'HGRN3'"),
        (["nowhere"], "MODEL_FOLDER: expected a folder with a config.json of transformers, got 'nowhere'"),
        (["--layer", "HGRN2", "--packed", "3", "--B", "2"], "--B: expected 1 with --packed"),
        (["--layer", "HGRN2", "--packed", "-1"], "--packed: expected an integer >= 0, got -1"),
        (["--layer", "HGRN2", "--jobs", "0"], "--jobs: expected an integer >= 1, got 0"),
        (["--layer", "HGRN2", "--cuda", "13"], "--cuda: expected the CUDA release .*such as 12.8, got '13'"),
        (["--layer", "HGRN2", "--tokens", "5x"], "--tokens: expected a number of tokens"),
        (["--layer", "HGRN2", "--gpu", "g80"], "--gpu: expected a GPU of A100, .* or sm_90 and the like, got 'g80'"),
        (["--layer", "HGRN2", "--gpu", "sm_70"], "--gpu: GPU: expected compute capability 8.0 or newer"),
        (["--variant", "nowhere.py:f"], "--variant: expected FILE.py:OBJECT with a file that exists"),
    ],
)
def test_errors_name_what_is_wrong(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    gpu = [] if "--gpu" in words else ["--gpu", "h200"]
    assert main(["compile", *words, *gpu]) == 1
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.usefixtures("no_interpreter")
def test_no_gpu_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["compile", "--layer", "HGRN2"]) == 1
    assert "--gpu: expected the GPU to compile for, such as h100 or sm_90" in capsys.readouterr().err


@pytest.mark.usefixtures("no_interpreter")
def test_an_unknown_family_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert main(["compile", str(tmp_path), "--gpu", "h200"]) == 1
    text = capsys.readouterr().err
    assert "expected a model_type of " in text and "qwen3_next" in text and "gla" in text and "got 'llama'" in text


@pytest.mark.usefixtures("no_interpreter")
def test_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert main(["compile", "--layer", "HGRN2", "--gpu", "h200"]) == 1
    assert "flexsp compile needs Triton" in capsys.readouterr().err


def test_the_interpreter_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["compile", "--layer", "HGRN2", "--gpu", "h200"]) == 1
    assert "TRITON_INTERPRET: expected a process without it" in capsys.readouterr().err


def test_gpus_have_names() -> None:
    assert of_name("h100") == H100 and of_name("H200") == of_name("sm_90") == H200
