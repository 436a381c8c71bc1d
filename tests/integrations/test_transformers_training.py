"""Models of transformers over ranks, trained as people do it: checkpointing, LoRA, padding, autocast, FSDP2 and DDP."""

from __future__ import annotations

import contextlib
import io
import runpy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from flexsp.comm.group import SequenceParallel
from flexsp.integrations.transformers import loss as loss_module
from flexsp.integrations.transformers import parallelize, shard
from flexsp.launch.bootstrap import init_sequence_parallel
from flexsp.testing import run_ranks
from tests.guides import save_scripts
from tests.marks import slow
from tests.transformers_models import (
    VOCABULARY,
    Found,
    assert_exact,
    gradients,
    make,
    mean,
    precision,
    rows,
    run_shard,
    run_whole,
)  # fmt: skip

pytest.importorskip("transformers")
RANKS, LENGTHS = 4, [7, 1, 20, 5]


def prepared(name: str, how: str) -> Any:
    """The unmodified model in float64, as a user would set it up."""
    model = make(name)
    if how.startswith("checkpoint"):
        model.gradient_checkpointing_enable({"use_reentrant": how == "checkpoint_reentrant"})
        model.enable_input_require_grads()
    if how.startswith("lora"):
        from peft import LoraConfig, get_peft_model

        names = ["in_proj_qkvz", "out_proj", "q_proj", "o_proj"]
        names, saved = (names, ["lm_head"]) if how == "lora_and_head" else ([*names, "lm_head"], None)
        with torch.random.fork_rng():
            torch.manual_seed(8)
            config = LoraConfig(r=2, target_modules=names, modules_to_save=saved, init_lora_weights=False)
            model = get_peft_model(model, config)
    return model.double()


def _cut(sp: Any, name: str, how: str, batch: dict[str, Any]) -> tuple[Found, int]:
    """Loss and gradients, and of how many tokens there were logits at once."""
    sp.set_lengths(LENGTHS)
    model, seen = parallelize(prepared(name, how), sp), []
    whole, entropy = loss_module._LOGITS, F.cross_entropy

    def watched(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(len(logits))
        return entropy(logits, *args, **kwargs)

    try:
        loss_module._LOGITS = 3 * VOCABULARY if how == "blocks" else whole
        F.cross_entropy = watched
        return run_shard(model, sp, batch), max(seen)
    finally:
        loss_module._LOGITS, F.cross_entropy = whole, entropy


def with_padding(batch: dict[str, Any]) -> dict[str, Any]:
    """Rows of several lengths, padded on the right."""
    B, T = batch["input_ids"].shape
    mask = (torch.arange(T) < torch.tensor([T, 11, T - 2])[:B, None]).long()
    return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def with_four_rows(batch: dict[str, Any]) -> dict[str, Any]:
    B, T = batch["input_ids"].shape
    text = torch.arange(T).expand(1, B, T)
    return {**batch, "position_ids": torch.cat([text, torch.randint(T, (3, B, T))])}


CASES = [
    ("qwen3_next", "checkpoint"), ("qwen3_next", "checkpoint_reentrant"), ("mamba2", "checkpoint"),
    ("qwen3_next", "blocks"), ("bamba", "blocks"), ("qwen3_next", "lora_and_head"), ("qwen3_next", "padding"),
    ("granitemoehybrid", "padding"), ("olmo_hybrid", "num_items"), ("qwen3_5_text", "four_rows"),
]  # fmt: skip
MORE = [("falcon_h1", "checkpoint"), ("qwen3_next", "lora")]


@pytest.mark.parametrize(("name", "how"), [*CASES, *slow(*MORE)])
def test_equals_the_whole_model(name: str, how: str) -> None:
    if how.startswith("lora"):
        pytest.importorskip("peft")
    batch = rows(3, sum(LENGTHS))
    if how == "padding":
        batch = with_padding(batch)
    elif how == "num_items":
        batch["num_items_in_batch"] = torch.tensor(29)
    elif how == "four_rows":
        batch = with_four_rows(batch)
    per_rank = run_ranks(_cut, RANKS, name, how, batch)
    want = run_whole(prepared(name, how), batch)
    assert_exact(mean([found for found, _ in per_rank]), want, how)
    blocks = {3} if how == "blocks" else {3 * n for n in LENGTHS}
    assert {seen for _, seen in per_rank} == blocks
    if how.startswith("lora"):
        assert sum(bool(x.count_nonzero()) for x in want.values()) > 12


def test_memory_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pass holds the logits of more than a block."""
    monkeypatch.setattr(loss_module, "_LOGITS", 10 * VOCABULARY)
    sp, kept = SequenceParallel(), 0
    model, batch = parallelize(make("mamba2", num_hidden_layers=1), sp), rows(1, 500)

    def keep(x: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += x.numel() * (x.shape[-1:] == (VOCABULARY,))
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(**shard(batch, sp)).loss.backward()
    assert kept <= 2 * 500 * VOCABULARY / 10


def _in_halves(sp: Any, name: str, dtype: torch.dtype, batch: dict[str, Any]) -> Found:
    sp.set_lengths(LENGTHS)
    model = parallelize(make(name).to(dtype), sp)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        return run_shard(model, sp, batch)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("olmo_hybrid", torch.float32), ("kimi_linear", torch.bfloat16),
        *slow(
            ("falcon_h1", torch.float32), ("granitemoehybrid", torch.bfloat16), ("jamba", torch.float32),
            ("zamba", torch.bfloat16), ("minimax", torch.bfloat16), ("recurrent_gemma", torch.float32),
            ("falcon_mamba", torch.bfloat16), ("bailing_hybrid", torch.float32), ("lfm3", torch.bfloat16),
            ("xlstm", torch.bfloat16),
        ),
    ],
)  # fmt: skip
def test_halves(name: str, dtype: torch.dtype) -> None:
    """Autocast, or parameters in bfloat16: no further from float64 than twice what the unmodified model is."""
    errors, own = [], []
    for batch in [rows(3, sum(LENGTHS)) for _ in range(3)]:
        got, want = mean(run_ranks(_in_halves, RANKS, name, dtype, batch)), run_whole(make(name).double(), batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            other = run_whole(make(name).to(dtype), batch)
        assert got["loss"].dtype == other["loss"].dtype == torch.float32
        for errors_of, found in ((errors, got), (own, other)):
            errors_of.append(sum(float((found[key] - x).norm() / x.norm()) for key, x in want.items()) / len(want))
    assert sorted(errors)[1] < 2 * max(own)


def _on_mesh(_: Any, how: str, name: str, batches: list[dict[str, Any]], lengths: list[list[int]]) -> Found:
    """This replica's loss, and the gradients that DDP or FSDP2 average over the (dp, sp) mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    sp = init_sequence_parallel(mesh["sp"], device="cpu")
    everyone = mesh["dp", "sp"]._flatten("dp_sp")
    replica = mesh["dp"].get_local_rank()
    sp.set_lengths(lengths[replica])
    whole, loss_module._LOGITS = loss_module._LOGITS, 8 * VOCABULARY
    model = make(name).double()
    if how == "fsdp":
        model.gradient_checkpointing_enable()
        heads = [] if model.config.tie_word_embeddings else [model.lm_head]  # tied, it belongs to the whole model
        for module in [*model.base_model.layers, *heads, model]:
            fully_shard(module, mesh=everyone)
        parallel: Any = parallelize(model, sp)
    else:
        parallel = DistributedDataParallel(parallelize(model, sp), process_group=everyone.get_group())
    try:
        with precision(torch.float64):
            loss = parallel(**shard(batches[replica], sp)).loss
            loss.backward()
        found = gradients(model)
    finally:
        loss_module._LOGITS = whole
        sp.close()
    return {"loss": loss.detach()} | {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in found.items()}


ON_MESH = [("fsdp", "qwen3_next"), ("fsdp", "nemotron_h"), ("ddp", "zamba2")]
MORE_ON_MESH = [("fsdp", "falcon_mamba"), ("fsdp", "minimax"), ("fsdp", "lfm2"), ("ddp", "recurrent_gemma")]


@pytest.mark.parametrize(("how", "name"), [*ON_MESH, *slow(*MORE_ON_MESH)])
def test_on_a_mesh(how: str, name: str) -> None:
    batches = [rows(1, 33), rows(2, 27)]
    per_rank = run_ranks(_on_mesh, 4, how, name, batches, [[30, 3], [10, 17]], whole_world=True)
    want = mean([run_whole(make(name).double(), batch) for batch in batches])
    for found in per_rank:
        assert_exact({**found, "loss": mean(per_rank)["loss"]}, want, how)


def _steps(sp: Any, batch: dict[str, Any], prompt: torch.Tensor) -> tuple[list[float], torch.Tensor, Found]:
    """Train, then generate from the same object."""
    sp.set_lengths(LENGTHS)
    model = parallelize(make("qwen3_next").double(), sp)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), []
    with precision(torch.float64):
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(**shard(batch, sp)).loss
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= RANKS
            optimizer.step()
            losses.append(float(loss.detach()))
        made = model.generate(prompt, max_new_tokens=4, do_sample=False)
    return losses, made, dict(model.state_dict())


def test_generation_after_training() -> None:
    batch, prompt = rows(2, sum(LENGTHS)), torch.randint(VOCABULARY, (2, 6))
    per_rank = run_ranks(_steps, RANKS, batch, prompt, whole_world=True)
    model = make("qwen3_next").double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for at in range(2):
        found = run_whole(model, batch)
        assert abs(sum(losses[at] for losses, _, _ in per_rank) / RANKS - float(found.pop("loss"))) < 1e-10
        for name, parameter in model.named_parameters():
            parameter.grad = found[name]
        optimizer.step()
        optimizer.zero_grad()
    with precision(torch.float64):
        made = model.generate(prompt, max_new_tokens=4, do_sample=False)
    for _, continued, state in per_rank:
        assert_exact(state, dict(model.state_dict()))
        assert torch.equal(continued, made)


def printed(_: Any, script: str) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        runpy.run_path(script)
    return text.getvalue().splitlines()


def test_the_guide_runs(tmp_path: Any) -> None:
    """Its script prints the same losses on one rank and on several."""
    assert save_scripts("transformers.md", tmp_path)[0] == {"finetune.py", "trainer.py"}
    script = str(tmp_path / "finetune.py")
    alone, cut = printed(None, script), run_ranks(printed, RANKS, script, whole_world=True)
    assert cut == [alone, [], [], []]
    assert len(alone) == 5 and float(alone[-1].split()[-1]) < float(alone[0].split()[-1])
