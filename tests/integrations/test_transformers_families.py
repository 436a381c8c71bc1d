"""Families of transformers whose layers are seldom seen, over two ranks: shards, documents, checkpointing, generation
and adapters. tests/integrations/test_transformers.py has each of them, and the others, in more shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexsp.integrations.transformers import parallelize
from flexsp.testing import run_ranks
from tests.marks import quick
from tests.transformers_models import (
    LATER_MODELS,
    VOCABULARY,
    Found,
    assert_exact,
    make,
    mean,
    packed,
    precision,
    rows,
    run_documents,
    run_shard,
    run_whole,
)  # fmt: skip

pytest.importorskip("transformers")
LENGTHS, DOCUMENTS = [15, 10], [3, 13, 1, 8]
PROJECTIONS = (
    "in_proj", "x_proj", "q_proj", "o_proj", "qkv_proj", "output_gate", "linear_x", "linear_out", "f_proj",
    "igate_preact", "fgate_preact", "ogate_preact",
)  # fmt: skip


def generate(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    model.eval()
    with precision(torch.float64):
        made: torch.Tensor = model.generate(prompt, max_new_tokens=3, do_sample=False)
    model.train()
    return made


def _cut(sp: Any, name: str, plain: Any, documents: Any, prompt: torch.Tensor) -> tuple[list[Found], torch.Tensor]:
    sp.set_lengths(LENGTHS)
    model = parallelize(make(name).double(), sp)
    in_rows, made = run_shard(model, sp, plain), generate(model, prompt)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return [in_rows, run_shard(model, sp, documents)], made


@pytest.mark.parametrize("name", LATER_MODELS)
def test_equals_the_whole_model(name: str) -> None:
    """Rows; documents with each layer computed once more in the backward pass; and between them the same object
    generates as the unmodified model does."""
    model = make(name).double()
    plain, documents, prompt = rows(2, sum(LENGTHS)), packed(DOCUMENTS), torch.randint(VOCABULARY, (2, 6))
    per_rank = run_ranks(_cut, 2, name, plain, documents, prompt)
    in_rows, checkpointed = (mean([found[at] for found, _ in per_rank]) for at in range(2))
    assert_exact(in_rows, run_whole(model, plain), "rows")
    assert_exact(checkpointed, run_documents(model, documents), "documents")
    made = generate(model, prompt)
    for _, continued in per_rank:
        assert torch.equal(continued, made)


def adapted(name: str, reentrant: bool) -> Any:
    import peft

    model = make(name)
    parts = {key.rpartition(".")[2] for key, _ in model.named_modules()}
    names = [part for part in PROJECTIONS if part in parts]
    if "mamba" not in name:  # which peft refuses in models of nothing but Mamba
        names.append("out_proj")
    with torch.random.fork_rng():
        torch.manual_seed(8)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model.double()


def _adapted(sp: Any, name: str, batch: Any) -> list[Found]:
    sp.set_lengths(LENGTHS)
    return [run_shard(parallelize(adapted(name, reentrant), sp), sp, batch) for reentrant in (False, True)]


@pytest.mark.parametrize("name", quick(LATER_MODELS))
def test_adapters_with_checkpointing(name: str) -> None:
    """LoRA, with both ways to checkpoint. (In the reentrant one, routers' logits have no gradient in transformers.)"""
    pytest.importorskip("peft")
    batch = rows(2, sum(LENGTHS))
    per_rank = run_ranks(_adapted, 2, name, batch)
    for at, reentrant in enumerate((False, True)):
        want = run_whole(adapted(name, reentrant), batch)
        assert sum(bool(x.count_nonzero()) for key, x in want.items() if "lora" in key) > 6
        assert_exact(mean([found[at] for found in per_rank]), want, f"reentrant {reentrant}")
