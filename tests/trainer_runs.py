"""Runs of trainers in the processes of `run_ranks`, and how two are compared; for test_transformers_trainer.py and
test_transformers_trl.py."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.transformers_models import VOCABULARY, precision


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of several numbers of labels, the same everywhere."""

    def __init__(self, rows: int, T: int = 23) -> None:
        ids = torch.randint(VOCABULARY, (rows, T), generator=torch.Generator().manual_seed(4))
        prompts = torch.arange(rows)[:, None] % 9
        self.labels, self.ids = ids.masked_fill(torch.arange(T) < 2 * prompts, -100), ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[row], "labels": self.labels[row]}


_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@contextlib.contextmanager
def as_torchrun(alone: bool = False) -> Iterator[None]:
    """What torchrun tells a process, which accelerate reads, or nothing; and an accelerate that knows no processes."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    before = {name: os.environ.pop(name, None) for name in _TORCHRUN}
    if not alone:
        os.environ |= dict(zip(_TORCHRUN, (rank, rank, ranks, ranks), strict=True))
    try:
        yield
    finally:
        for name, was in before.items():
            os.environ.pop(name, None)
            if was is not None:
                os.environ[name] = was


def settings(folder: Path, **changes: Any) -> Any:
    from transformers import TrainingArguments

    given: dict[str, Any] = {
        "max_steps": 3, "per_device_train_batch_size": 1, "learning_rate": 0.1, "adam_epsilon": 0.1,
        "logging_steps": 1, "save_steps": 2, "disable_tqdm": True, "report_to": "none", "use_cpu": True,
        "max_grad_norm": 1.0, "per_device_eval_batch_size": 2, "logging_nan_inf_filter": False,
    }  # fmt: skip
    return TrainingArguments(str(folder), **{**given, **changes})


Found = dict[str, Any]


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def trained(trainer: Any, resume: str | None = None) -> Found:
    """Losses, gradient norms, evaluation and parameters of a run; casts to float32 inside a model are to float64."""

    def wide(step: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with precision(torch.float64):
                return step(*args, **kwargs)

        return run

    trainer.training_step, trainer.prediction_step = wide(trainer.training_step), wide(trainer.prediction_step)
    trainer.train(resume_from_checkpoint=resume)
    evaluated = trainer.evaluate()["eval_loss"]
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return {
        "losses": [log["loss"] for log in logs], "norms": [float(log["grad_norm"]) for log in logs],
        "evaluated": evaluated, "parameters": {name: full(p.detach()) for name, p in trainer.model.named_parameters()},
        "seen": trainer.state.num_input_tokens_seen, "flos": trainer.state.total_flos,
    }  # fmt: skip


def assert_same(got: Found, want: Found) -> None:
    """Parameters in float64; the Trainer adds up losses in float32."""
    for key in ("losses", "norms", "evaluated", "seen", "flos"):
        torch.testing.assert_close(got[key], want[key], rtol=1e-6, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")
    for name, x in want["parameters"].items():
        torch.testing.assert_close(got["parameters"][name], x, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
