"""transformers' Trainer over ranks: the steps, evaluations and checkpoints of the unmodified Trainer on one process."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from flexsp.comm.group import SequenceParallel
from flexsp.integrations.transformers import parallelize
from flexsp.launch.bootstrap import init_sequence_parallel
from flexsp.testing import run_ranks
from tests.trainer_runs import Data, Found, as_torchrun, assert_same, settings, trained
from tests.transformers_models import make

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
ONE = SequenceParallel()


def prepared(name: str, how: str) -> Any:
    model = make(name)
    if how == "lora":
        from peft import LoraConfig, get_peft_model

        with torch.random.fork_rng():
            torch.manual_seed(8)
            model = get_peft_model(model, LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False))
    return model.double()


Run = tuple[Path, str, str, str | None, dict[str, Any]]
"""Folder, model, what was done to it, checkpoint to go on from, settings."""


def _unmodified(_: Any, rows: int, runs: list[Run]) -> list[Found]:
    """The unmodified Trainer and model, each rank with data of its own; or each rank alone, the same."""
    from transformers import Trainer

    runs = [(folder / f"alone{dist.get_rank() * (rows == 1)}", *others) for folder, *others in runs]
    with as_torchrun(alone=rows == 1):
        return [
            trained(Trainer(prepared(name, how), settings(folder, **changes), None, Data(24), Data(5)), resume)
            for folder, name, how, resume, changes in runs
        ]


FSDP = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["Mamba2Block"],
    },
}


def _over_ranks(_: Any, rows: int, runs: list[Run]) -> list[Found]:
    from accelerate import DistributedType
    from accelerate.state import PartialState

    from flexsp.integrations.transformers import SequenceParallelTrainer

    mesh = init_device_mesh("cpu", (rows, dist.get_world_size() // rows), mesh_dim_names=("dp", "sp"))
    sp, found = init_sequence_parallel(mesh["sp"], device="cpu"), []
    with as_torchrun():
        for folder, name, how, resume, changes in runs:
            args = settings(folder, **changes, **(FSDP if how == "fsdp" else {}))
            if how == "fsdp":  # accelerate knows it for accelerators only
                assert args.device.type == "cpu"
                PartialState._shared_state["distributed_type"] = DistributedType.MULTI_NEURON
            model = parallelize(prepared(name, how), sp)
            trainer = SequenceParallelTrainer(model, args, None, Data(24), Data(5))
            found.append(trained(trainer, resume))
            assert trainer.is_fsdp_enabled == isinstance(next(model.parameters()), DTensor) == (how == "fsdp")
    sp.close()
    return found


def run_both(ranks: int, rows: int, runs: list[Run]) -> list[tuple[Found, Found]]:
    """What every rank of ours has, and the unmodified Trainer on one process for each row."""
    every = run_ranks(_over_ranks, ranks, rows, runs, whole_world=True, timeout=280)
    for found in every:
        for got, first in zip(found, every[0], strict=True):
            assert_same(got, first)
    whole = [run for run in runs if run[3] is None]
    want = run_ranks(_unmodified, ranks if rows == 1 else rows, rows, whole, whole_world=True, timeout=280)[0]
    want += want[:1] * (len(runs) - len(want))
    return list(zip(every[0], want, strict=True))


def test_steps_and_resuming(tmp_path: Path) -> None:
    """Two ranks of one sequence; then the last step once more, from a checkpoint."""
    changes = {"gradient_accumulation_steps": 2, "include_num_input_tokens_seen": "all"}
    runs: list[Run] = [
        (tmp_path, "mamba2", "", None, changes), (tmp_path, "mamba2", "", str(tmp_path / "checkpoint-2"), changes),
    ]  # fmt: skip
    (got, want), (again, _) = run_both(2, 1, runs)
    assert_same(got, want)
    assert want["seen"] == 3 * 2 * 23 and len({*want["losses"]}) == 3
    assert_same(again, want)


ROWS: dict[str, tuple[int, int, str, str, dict[str, Any]]] = {
    "smoothed": (2, 1, "mamba2", "", {"label_smoothing_factor": 0.2, "per_device_train_batch_size": 3}),
    "experts": (4, 2, "qwen3_next", "", {"gradient_accumulation_steps": 3}),
    "adapters": (2, 2, "qwen3_next", "lora", {}),
    "own counts": (4, 2, "mamba2", "", {"average_tokens_across_devices": False}),
    "grouped": (4, 2, "mamba2", "", {"train_sampling_strategy": "group_by_length", "label_smoothing_factor": 0.1}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "rows", "name", "how", "changes"), ROWS.values(), ids=ROWS)
def test_rows(ranks: int, rows: int, name: str, how: str, changes: dict[str, Any], tmp_path: Path) -> None:
    ((got, want),) = run_both(ranks, rows, [(tmp_path, name, how, None, changes)])
    assert_same(got, want)


def _trainer(model: Any, folder: Path, compute_loss_func: Any = None, **changes: Any) -> Any:
    from flexsp.integrations.transformers import SequenceParallelTrainer

    return SequenceParallelTrainer(
        model, settings(folder, **changes), None, Data(4), Data(2), compute_loss_func=compute_loss_func
    )


def test_refused(tmp_path: Path) -> None:
    model = parallelize(make("mamba2"), ONE)
    _trainer(model, tmp_path, label_smoothing_factor=0.1)
    for changes, error in (
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha: its noise does not see whole sequences"),
        ({"compute_loss_func": max}, "compute_loss_func does not see whole sequences .*log_probs"),
        ({"use_liger_kernel": True}, "use_liger_kernel puts a forward in place of the model's"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size may change batches on one rank"),
        ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance deals out batches to ranks"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches deals out batches to ranks"),
        ({"compute_loss_func": max, "neftune_noise_alpha": 5.0}, "neftune_noise_alpha.*\n  compute_loss_func"),
    ):
        with pytest.raises(ValueError, match=error):
            _trainer(model, tmp_path, **changes)
    experts = parallelize(make("qwen3_next"), ONE)
    with pytest.raises(ValueError, match="label_smoothing_factor: with it transformers leaves out the loss of experts"):
        _trainer(experts, tmp_path, label_smoothing_factor=0.1)
    for other in (make("mamba2"), parallelize(make("qwen3_next", kind="ForTokenClassification"), ONE), None):
        with pytest.raises(ValueError, match="model: expected a causal language model that parallelize has changed"):
            _trainer(other, tmp_path)


def _other_worlds(_: Any, folder: Path) -> list[str]:
    """What is said where accelerate sees other ranks, and where ranks have no part in a row."""
    found = []
    sp = init_sequence_parallel(device="cpu")
    for sees, over in ((False, sp), (True, ONE)):
        with as_torchrun() if sees else contextlib.nullcontext(), pytest.raises(ValueError) as caught:
            _trainer(parallelize(make("mamba2"), over), folder)
        found.append(str(caught.value))
    sp.close()
    return found


def test_ranks_that_are_no_rows(tmp_path: Path) -> None:
    for unseen, no_rows in run_ranks(_other_worlds, 2, tmp_path, whole_world=True):
        assert "accelerator: expected the 2 ranks of torch.distributed (on CPU with use_cpu=True" in unseen
        assert "sp: expected rows of equally many of the 2 ranks" in no_rows


def _masks(_: Any, folder: Path) -> list[torch.Tensor]:
    """Random numbers of a step, in a model with dropout and in one without."""
    sp, found = init_sequence_parallel(device="cpu"), []

    for dropout in (0.5, 0.0):
        with as_torchrun():
            model = make("mamba2")
            model.backbone.layers[0].mixer.dropout = torch.nn.Dropout(dropout)
            trainer = _trainer(parallelize(model, sp), folder, max_steps=1, save_strategy="no")
            drawn: list[torch.Tensor] = []
            hook = lambda *_, to=drawn: to.append(torch.rand(3))  # noqa: E731
            model.get_output_embeddings().register_forward_hook(hook)
            trainer.train()
        found.append(drawn[0])
    sp.close()
    return found


def test_masks_of_dropout(tmp_path: Path) -> None:
    """Ranks of a row draw other masks, if there are any."""
    (mine, same), (other, again) = run_ranks(_masks, 2, tmp_path, whole_world=True)
    assert not torch.equal(mine, other) and torch.equal(same, again)
