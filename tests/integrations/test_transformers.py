"""Every model of transformers that is known, cut over ranks, gives the loss and gradients of the unmodified one."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

from flexsp.integrations.transformers import parallelize
from flexsp.integrations.transformers.seams import SEAMS
from flexsp.testing import run_ranks
from tests.marks import quick, slow
from tests.transformers_models import (
    ALL_MODELS,
    LATER_MODELS,
    MODELS,
    Found,
    assert_exact,
    make,
    mean,
    packed,
    rows,
    run_documents,
    run_shard,
    run_whole,
)  # fmt: skip

pytest.importorskip("transformers")
RANKS = 3
OTHERS: list[tuple[str, dict[str, Any]]] = [  # what the configs in MODELS leave out
    ("olmo_hybrid", {"rope_parameters": {"rope_type": "default", "rope_theta": None}}),
    ("falcon_h1", {"mamba_rms_norm": False}),
    ("granitemoehybrid", {"position_embedding_type": None, "num_local_experts": 0, "output_router_logits": False}),
    ("zamba2", {"use_mem_rope": False, "use_shared_attention_adapter": False}),
    ("nemotron_h", {"moe_latent_size": None}), ("kimi_linear", {"q_lora_rank": None}),
    ("qwen3_next", {"linear_value_head_dim": 270, "linear_num_value_heads": 2}),
    ("mamba2", {"hidden_size": 20, "expand": 27, "num_heads": 2, "head_dim": 270}),
]  # fmt: skip
OWN = [("eager", 8), ("sdpa", 16), ("eager", 32)]  # attention and chunks of unmodified runs in float32


Calls = list[tuple[list[int] | None, dict[str, Any]]]


def _cut(sp: Any, name: str, dtype: torch.dtype, calls: Calls, changes: dict[str, Any]) -> list[Found]:
    model = parallelize(make(name, **changes).to(dtype), sp)
    found = []
    for lengths, batch in calls:
        sp.set_lengths(lengths)
        found.append(run_shard(model, sp, batch))
    return found


def cut(name: str, dtype: torch.dtype, calls: Calls, **changes: Any) -> list[Found]:
    per_rank = run_ranks(_cut, RANKS, name, dtype, calls, changes)
    return [mean([found[at] for found in per_rank]) for at in range(len(calls))]


def test_all_models_are_here() -> None:
    assert {type(make(name)).__name__ for name in ALL_MODELS} == set(SEAMS)


@pytest.mark.parametrize("name", [*MODELS, *slow(*LATER_MODELS)])
def test_equals_the_whole_model(name: str) -> None:
    """In float64, with labels that do not count: uneven shards, shorter than a convolution; packed documents."""
    model = make(name).double()
    plain, documents = rows(2, 41), packed([3, 19, 1, 14, 4])
    calls = [([20, 2, 19], plain), (None, plain), ([1, 1, 39], plain), ([9, 14, 18], documents)]
    *some, in_documents = cut(name, torch.float64, calls)
    want = run_whole(model, plain)
    assert all(x.count_nonzero() for x in want.values())
    for (lengths, _), got in zip(calls, some, strict=False):
        assert_exact(got, want, f"{lengths}")
    assert_exact(in_documents, run_documents(model, documents), "documents")


WIDE = ["-wide" if 270 in changes.values() else "" for _, changes in OTHERS]


@pytest.mark.parametrize(
    ("name", "changes"), OTHERS, ids=[name + wide for (name, _), wide in zip(OTHERS, WIDE, strict=True)]
)  # fmt: skip
def test_other_configs(name: str, changes: dict[str, Any]) -> None:
    model, batch = make(name, **changes).double(), rows(2, 30)
    if name == "olmo_hybrid":
        assert model.model.rotary_emb is None
    (got,) = cut(name, torch.float64, [([5, 8, 17], batch)], **changes)
    assert_exact(got, run_whole(model, batch))


@pytest.mark.parametrize("name", quick(ALL_MODELS, "qwen3_next", "mamba2"))
def test_float32(name: str) -> None:
    """No further from float64 than twice what the unmodified model is, with other chunks and attention. Most models
    magnify one direction of rounding, so it is the median of some batches that must be so, or of many."""
    ratios: dict[str, list[float]] = {}
    for batches in (5, 12):
        add_ratios(ratios, name, batches)
        typical = {key: statistics.median(of) for key, of in ratios.items()}
        if max(typical.values()) < 2:
            return
    pytest.fail(str({key: ratios[key] for key, x in typical.items() if x >= 2}))


def add_ratios(ratios: dict[str, list[float]], name: str, count: int) -> None:
    """Errors of loss and gradients over those of the unmodified model, of so many batches."""
    batches = [rows(1, 70) for _ in range(count)]
    found = cut(name, torch.float32, [([30, 17, 23], batch) for batch in batches])
    for batch, got in zip(batches, found, strict=True):
        want = run_whole(make(name).double(), batch)
        own = [relative(run_whole(make(name, how), batch, size), want) for how, size in OWN]
        for key, error in relative(got, want).items():
            spread = max(errors[key] for errors in own) + 16 * torch.finfo(torch.float32).eps
            ratios.setdefault(key, []).append(error / spread)


def relative(found: Found, want: Found) -> dict[str, float]:
    return {key: float((found[key] - x).norm() / x.norm()) for key, x in want.items()}
