"""Trainers of TRL over ranks: the steps of the unmodified trainer and model, one process for each row of ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from flexsp.exceptions import NotAvailable
from flexsp.integrations.transformers import parallelize
from flexsp.launch.bootstrap import init_sequence_parallel
from flexsp.testing import run_ranks
from tests.trainer_runs import Found, as_torchrun, assert_same, trained
from tests.transformers_models import VOCABULARY, make

pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
pytestmark = pytest.mark.slow  # make test-trl has an environment with TRL


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[eos]", "[pad]", *map(str, range(VOCABULARY - 2))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[pad]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="[eos]", pad_token="[pad]")


def text(length: int, start: int) -> str:
    return " ".join(str((start + 7 * i * i) % (VOCABULARY - 2)) for i in range(length)) + " "


def data(kind: str, rows: int = 24) -> Any:
    from datasets import Dataset

    made = []
    for row in range(rows):
        prompt, answer, other = text(3 + row % 4, row), text(6 + row % 7, 3 * row), text(4 + row % 5, 5 * row)
        if kind == "SFT":
            made.append({"prompt": prompt, "completion": answer})
        elif kind == "DPO":
            made.append({"prompt": prompt, "chosen": answer, "rejected": other})
        else:
            made.append({"prompt": prompt})
    return Dataset.from_list(made)


def trainer(kind: str, sp: Any, folder: Path, name: str, how: str, changes: dict[str, Any]) -> Any:
    """A trainer of TRL, over ranks or (without them) as it is."""
    from flexsp.integrations.transformers import SequenceParallelTrainer

    base, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    given: dict[str, Any] = {
        "max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 0.1, "adam_epsilon": 0.1,
        "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "report_to": "none", "use_cpu": True,
        "logging_nan_inf_filter": False, "bf16": False, "gradient_checkpointing": False,
        "per_device_eval_batch_size": 2,
    }  # fmt: skip
    args = config(str(folder), **{**given, **changes})

    def model(seed: int) -> Any:
        made = make(name, pad_token_id=1, eos_token_id=0)
        made = (made if sp is None else parallelize(made, sp)).double()
        if seed:
            for parameter in made.parameters():
                parameter.data *= 1.05
        return made

    more: dict[str, Any] = {"ref_model": model(1)} if kind == "DPO" and how != "lora" else {}
    if kind == "GRPO":
        more["reward_funcs"] = reward
    if how == "lora":
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=2, target_modules=["o_proj"])
    if sp is not None:  # with the class of the guide
        document = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
        (block,) = re.findall(r"```python\n(class Trainer\(Seq.*?)```", document, flags=re.DOTALL)
        made: dict[str, Any] = {"SequenceParallelTrainer": SequenceParallelTrainer, "trl": trl}
        exec(block.replace("SFTTrainer", f"{kind}Trainer", 1), made)
        base = made["Trainer"]
    return base(
        model(0), args=args, train_dataset=data(kind), eval_dataset=data(kind, 5), processing_class=tokenizer(), **more
    )


Logs = dict[str, float]


def _steps(_: Any, rows: int, kind: str, folder: Path, name: str, how: str, changes: Any) -> tuple[Found, list[Logs]]:
    ranks, sp = dist.get_world_size(), None
    if rows < ranks or how == "packed":
        mesh = init_device_mesh("cpu", (rows, ranks // rows), mesh_dim_names=("dp", "sp"))
        sp = init_sequence_parallel(mesh["sp"], device="cpu")
    with as_torchrun():
        made = trainer(kind, sp, folder, name, how, changes)
        found = trained(made)
    if sp is not None:
        sp.close()
    return found, [log for log in made.state.log_history if "loss" in log]


def run_both(kind: str, ranks: int, rows: int, folder: Path, name: str, how: str = "", **changes: Any) -> None:
    every = run_ranks(_steps, ranks, rows, kind, folder, name, how, changes, whole_world=True, timeout=280)
    whole = folder / "whole"
    want, logs = run_ranks(_steps, rows, rows, kind, whole, name, how, changes, whole_world=True, timeout=280)[0]
    for got, ours in every:
        assert_same({**got, "flos": want["flos"]}, want)
        for log, other in zip(ours, logs, strict=True):  # of one reward on S ranks, the Trainer logs a spread of S
            known = [key for key in other if not key.endswith(("std", "time")) and "runtime" not in key]
            assert {key: log[key] for key in known} == pytest.approx({key: other[key] for key in known}, rel=1e-4)


def test_sft(tmp_path: Path) -> None:
    run_both("SFT", 2, 1, tmp_path, "mamba2", gradient_accumulation_steps=2)


def test_sft_in_rows(tmp_path: Path) -> None:
    run_both("SFT", 4, 2, tmp_path, "qwen3_next", gradient_accumulation_steps=2)


def test_sft_with_adapters(tmp_path: Path) -> None:
    run_both("SFT", 2, 1, tmp_path, "qwen3_next", how="lora", loss_type="dft")


def test_sft_of_packed_batches(tmp_path: Path) -> None:
    """As on one rank; the unmodified model does not keep documents apart."""
    run_both("SFT", 2, 1, tmp_path, "qwen3_next", how="packed", packing=True, max_length=30)


def test_dpo(tmp_path: Path) -> None:
    run_both("DPO", 2, 1, tmp_path, "mamba2", use_weighting=True, gradient_checkpointing=True)


def test_dpo_without_adapters_as_reference(tmp_path: Path) -> None:
    run_both("DPO", 4, 2, tmp_path, "qwen3_next", how="lora", loss_type=["sigmoid", "sft"])


def reward(completions: list[str], **_: Any) -> list[float]:
    """Of few different words."""
    return [len({*text.split()}) + 0.1 * len(text) for text in completions]


GRPO: dict[str, Any] = {"max_completion_length": 9, "num_generations": 2, "beta": 0.0, "logging_steps": 1}


def test_grpo(tmp_path: Path) -> None:
    run_both("GRPO", 2, 1, tmp_path, "mamba2", **GRPO, gradient_accumulation_steps=2, num_iterations=2)


def test_grpo_in_rows(tmp_path: Path) -> None:
    run_both("GRPO", 4, 2, tmp_path, "qwen3_next", "lora", **{**GRPO, "beta": 0.1}, loss_type="grpo")


def _refusals(sp: Any, folder: Path) -> list[str]:
    """What is said of arguments that would be wrong over ranks."""
    said = []
    for kind, changes in (
        ("SFT", {"label_smoothing_factor": 0.1}), ("SFT", {"neftune_noise_alpha": 5.0}),
        ("GRPO", {**GRPO, "num_generations": 4, "steps_per_generation": 1}),
        ("GRPO", {**GRPO, "scale_rewards": "batch"}), ("GRPO", {**GRPO, "top_entropy_quantile": 0.5}),
        ("GRPO", {**GRPO, "cast_lm_head_to_fp32": True}),
    ):  # fmt: skip
        with as_torchrun(), pytest.raises(ValueError) as caught:
            trainer(kind, sp, folder, "mamba2", "", changes)
        said.append(str(caught.value))
    with as_torchrun(), pytest.raises(NotAvailable) as other:
        trainer("Reward", sp, folder, "mamba2", "", {})
    return [*said, str(other.value)]


def test_refused(tmp_path: Path) -> None:
    for said in run_ranks(_refusals, 2, tmp_path, whole_world=True):
        for text, error in zip(
            said,
            ("TRL makes logits of whole sequences", "neftune_noise_alpha: its noise", "2 completions of a row and gen",
             "scale_rewards='batch'.* would count", "top_entropy_quantile would count",
             "cast_lm_head_to_fp32: expected",
             "RewardTrainer of TRL over ranks: of TRL 1.16, SFTTrainer, DPOTrainer, GRPOTrainer were tried"),
            strict=True,
        ):  # fmt: skip
            assert re.search(error, text), text
