"""examples/train_hybrid.py in small: its modules, its arguments, texts and the config of a tiny model."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.harness.demo import module
from tests.transformers_models import ALL_MODELS

__all__ = ["COMMON", "FILES", "SCHEDULE", "arguments", "hybrid", "place", "write_config"]

SCHEDULE = ["--steps", "6", "--warmup", "2", "--decay", "2", "--lr", "1e-2", "--batch", "4", "--tokens", "96"]
COMMON = ["--context", "40", "--dtype", "float32", "--save-every", "100"]
FILES = ("checkpoint", "training", "token_data", "sharded_checkpoint", "pretrained", "train_hybrid", "compare_runs")


def hybrid(name: str = "train_hybrid") -> ModuleType:
    """The script or one of the files beside it, in the order in which they import each other."""
    for file in FILES:
        module(file)
    return module(name)


def write_config(folder: Path, name: str = "qwen3_next", **changes: Any) -> Path:
    """A tiny model; torch's product of groups, for experts, wants sizes of whole 16 bytes."""
    from transformers import AutoConfig

    sizes = {key: 16 for key in ("moe_intermediate_size", "moe_latent_size") if key in ALL_MODELS[name]}
    config = AutoConfig.for_model(name, **{**ALL_MODELS[name], **sizes, "vocab_size": 256, **changes})
    config.save_pretrained(folder / name)
    return folder / name


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with texts and the config of a tiny model."""
    write_config(tmp_path)
    (tmp_path / "texts").mkdir()
    for i in range(5):
        text = "".join(f"{i * j} foxes jump over {j} dogs\n" for j in range(3 + 17 * i))
        (tmp_path / "texts" / f"{i}.txt").write_text(text)
    return tmp_path


def arguments(place: Path, name: str, *more: str, model: str = "qwen3_next") -> list[str]:
    where = ["--model", str(place / model), "--data", str(place / "texts"), "--runs", str(place), "--name", name]
    return [*where, *COMMON, *SCHEDULE, *more]
