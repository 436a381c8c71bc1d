"""Layers and models of flash-linear-attention, cut over ranks, give what the unmodified ones give."""

from __future__ import annotations

import contextlib
import io
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from flexsp import init_sequence_parallel
from flexsp.comm.group import SequenceParallel
from flexsp.integrations.fla import parallelize, shard
from flexsp.nn import SequenceParallelLA, SimpleGLA
from flexsp.testing import run_ranks
from tests.fla_models import LAYERS, MODELS, D, in_pytorch, make, make_layer, run_layer
from tests.guides import save_scripts
from tests.transformers_models import (
    Found,
    assert_exact,
    gradients,
    mean,
    packed,
    precision,
    rows,
    run_documents,
    run_shard,
    run_whole,
)  # fmt: skip

pytest.importorskip("fla")
RANKS = 3
BOUNDS = [0, 4, 4, 5, 17, 23]


# Layers ---------------------------------------------------------------------------------------------------------------


def _cut_layer(sp: Any, name: str, lengths: list[int] | None, x: Tensor, dy: Tensor, **call: Any) -> Found:
    sp.set_lengths(lengths)
    layer = parallelize(make_layer(name), sp)
    return run_layer(layer, sp.shard(x), sp.shard(dy), **call)


def _cut_layers(sp: Any, name: str, x: Tensor, dy: Tensor, cu_seqlens: Tensor) -> list[Found]:
    first, one_row = ({"x": t, "dy": g} for t, g in ((x, dy), (x[:1], dy[:1])))
    found = [_cut_layer(sp, name, lengths, **first) for lengths in ([9, 2, 12], None)]
    return [*found, _cut_layer(sp, name, [3, 11, 9], **one_row, cu_seqlens=cu_seqlens)]


def joined(per_rank: list[Found]) -> Found:
    """Outputs and gradients of inputs side by side; gradients of parameters add up."""
    return {
        key: torch.cat([found[key] for found in per_rank], 1) if key in "xy" else sum(found[key] for found in per_rank)
        for key in per_rank[0]
    }


def run_layer_documents(layer: Any, x: Tensor, dy: Tensor) -> Found:
    """One call each."""
    bounds = [(a, b) for a, b in zip(BOUNDS, BOUNDS[1:], strict=False) if a < b]
    return joined([run_layer(layer, x[:, a:b], dy[:, a:b]) for a, b in bounds])


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_equals_the_whole_one(name: str) -> None:
    """In float64: uneven shards, shorter than a convolution; documents, some empty."""
    layer, (x, dy) = make_layer(name), torch.randn(2, 2, 23, D, dtype=torch.float64)
    per_rank = run_ranks(_cut_layers, RANKS, name, x, dy, torch.tensor(BOUNDS))
    want = run_layer(layer, x, dy)
    assert all(grad.count_nonzero() for grad in want.values())
    uneven, even, documents = (joined([found[at] for found in per_rank]) for at in range(3))
    assert_exact(uneven, want, "uneven")
    assert_exact(even, want, "even")
    assert_exact(documents, run_layer_documents(layer, x[:1], dy[:1]), "documents")


def _cut_some(sp: Any, names: list[str], x: Tensor, dy: Tensor, cu_seqlens: Tensor) -> list[list[Found]]:
    found = []
    for name in names:
        whole = _cut_layer(sp, name, [21, 2], x, dy)
        found.append([whole, _cut_layer(sp, name, [3, 20], x, dy, cu_seqlens=cu_seqlens)])
    return found


def test_some_layers_equal_the_whole_ones() -> None:
    """Some layers, on two ranks."""
    names = ["kda", "gdn2", "mamba", "mamba, other", "mamba, wide", "gated, wide", "softmax, window"]
    x, dy = torch.randn(2, 1, 23, D, dtype=torch.float64).unbind(0)
    per_rank = run_ranks(_cut_some, 2, names, x, dy, torch.tensor(BOUNDS))
    for at, name in enumerate(names):
        layer = make_layer(name)
        whole, documents = (joined([found[at][which] for found in per_rank]) for which in range(2))
        assert_exact(whole, run_layer(layer, x, dy), name)
        assert_exact(documents, run_layer_documents(layer, x, dy), f"{name}, documents")


class Mixed(nn.Module):
    """A layer of flexsp and one of flash-linear-attention."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> tuple[Tensor]:
        x = x + self.first(x)
        return (x + checkpoint(self.second, x, use_reentrant=False)[0],)


def mixed() -> Mixed:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Mixed(SimpleGLA(D, 2), make_layer("gated")).double()


def _cut_mixed(sp: Any, x: Tensor, dy: Tensor) -> Found:
    model = mixed()
    parallelize(model.second, sp)
    return run_layer(SequenceParallelLA(model, sp), sp.shard(x), sp.shard(dy))


def test_a_model_of_ones_own() -> None:
    """Under `SequenceParallelLA`, the layer checkpointed."""
    x, dy = torch.randn(2, 1, 13, D, dtype=torch.float64)
    assert_exact(joined(run_ranks(_cut_mixed, 2, x, dy)), run_layer(mixed(), x, dy))


def _evaluated(sp: Any, names: list[str], x: Tensor) -> list[Tensor]:
    """Few tokens without gradients: layers then call other functions."""
    sp.set_lengths([70, 5])
    with torch.no_grad(), precision(torch.float64):
        return [parallelize(make_layer(name).eval(), sp)(sp.shard(x))[0] for name in names]


def test_evaluation() -> None:
    """A rank with many tokens beside one with few, which take another branch in some layers."""
    names = ["delta", "gated", "kda", "product", "product, ungated", "retention", "simple gla", "linear attention"]
    x = torch.randn(1, 75, D, dtype=torch.float64)
    per_rank = run_ranks(_evaluated, 2, names, x)
    for at, name in enumerate(names):
        with precision(torch.float64):
            want = make_layer(name)(x)[0]
        assert_exact({"y": torch.cat([found[at] for found in per_rank], 1)}, {"y": want.detach()}, name)


@pytest.mark.slow
def test_groups_of_mamba() -> None:
    """As in the library's decoding and kernels. Its own forward on CPU deals groups out to heads in another order."""
    from fla.models.utils import Cache

    layer, x = make_layer("mamba", n_groups=2, layer_idx=0).eval(), torch.randn(2, 9, D, dtype=torch.float64)
    cache = Cache()
    state = x.new_zeros(2, layer.num_heads, layer.head_dim, layer.ssm_state_size)
    cache.update(layer_idx=0, recurrent_state=state, conv_state=x.new_zeros(2, layer.conv_dim, 4), offset=0)
    with torch.no_grad(), precision(torch.float64):
        want = torch.cat([layer(x[:, t : t + 1], past_key_values=cache, use_cache=True)[0] for t in range(9)], 1)
        whole = layer(x)[0]
        got = parallelize(layer, SequenceParallel())(x)[0]
    assert_exact({"y": got}, {"y": want})
    assert (whole - want).abs().max() > 1e-3


# Models ---------------------------------------------------------------------------------------------------------------

Calls = list[tuple[list[int] | None, dict[str, Any]]]


def _cut(sp: Any, names: list[str], calls: Calls) -> list[Found]:
    found = []
    for name in names:
        model = parallelize(make(name).double(), sp)
        for lengths, batch in calls:
            sp.set_lengths(lengths)
            found.append(run_shard(model, sp, batch))
    return found


def check_models(names: list[str], ranks: int, plain: list[list[int] | None], documents: list[int]) -> None:
    """Rows with labels that do not count, and packed documents; labels of documents may be learned across them."""
    batch, pack = rows(2, 23), packed([3, 9, 1, 10])
    pack = {"input_ids": pack["input_ids"], "labels": pack["labels"], "cu_seqlens": pack["cu_seq_lens_q"]}
    calls: Calls = [*[(lengths, batch) for lengths in plain], (documents, pack)]
    per_rank = run_ranks(_cut, ranks, names, calls)
    for at, name in enumerate(names):
        model = make(name).double()
        want = run_whole(model, batch)
        assert all(x.count_nonzero() for x in want.values())
        *some, in_documents = (mean([found[len(calls) * at + n] for found in per_rank]) for n in range(len(calls)))
        for lengths, got in zip(plain, some, strict=True):
            assert_exact(got, want, f"{name} {lengths}")
        boundaries = {**pack, "cu_seq_lens_q": pack["cu_seqlens"]}
        assert_exact(in_documents, run_documents(model, boundaries), f"{name} documents")


def test_some_models_equal_the_whole_ones() -> None:
    """Two models, on two ranks."""
    check_models(["GatedDeltaNet", "RetNet"], 2, [[20, 3]], [9, 14])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_whole_model(name: str) -> None:
    """In float64: uneven shards, shorter than a convolution; packed documents."""
    check_models([name], RANKS, [[12, 2, 9], None, [1, 1, 21]], [9, 2, 12])


CASES = ["checkpoint", "checkpoint_reentrant", "lora", "num_items", "attnres", "untrained padding"]


def prepared(how: str) -> Any:
    changes = {"attnres_block_size": 2} if how == "attnres" else {}
    model = make("GatedDeltaNet", **changes)
    if how.startswith("checkpoint"):
        model.gradient_checkpointing_enable({"use_reentrant": how == "checkpoint_reentrant"})
    if how == "lora":
        from peft import LoraConfig, get_peft_model

        with torch.random.fork_rng():
            torch.manual_seed(6)
            targets = ["q_proj", "v_proj", "o_proj", "lm_head"]
            model = get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    return model.double()


def _cut_prepared(sp: Any, how: str, batch: dict[str, Any]) -> Found:
    sp.set_lengths([12, 2, 9])
    return run_shard(parallelize(prepared(how), sp), sp, batch)


@pytest.mark.slow
@pytest.mark.parametrize("how", CASES)
def test_training(how: str) -> None:
    if how == "lora":
        pytest.importorskip("peft")
    batch = rows(2, 23)
    if how == "num_items":
        batch["num_items_in_batch"] = torch.tensor(29)
    if how == "untrained padding":
        mask = (torch.arange(23) < torch.tensor([[23], [11]])).long()
        batch |= {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
    got = mean(run_ranks(_cut_prepared, RANKS, how, batch))
    batch.pop("attention_mask", None)
    assert_exact(got, run_whole(prepared(how), batch), how)


def _on_mesh(_: Any, batches: list[dict[str, Any]], lengths: list[list[int]]) -> Found:
    """This replica's loss, and the gradients that FSDP2 averages over the (dp, sp) mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    sp = init_sequence_parallel(mesh["sp"], device="cpu")
    everyone = mesh["dp", "sp"]._flatten("dp_sp")
    replica = mesh["dp"].get_local_rank()
    sp.set_lengths(lengths[replica])
    model = make("KDA", tie_word_embeddings=False, attn={"layers": [1], "num_heads": 4}).double()
    model.gradient_checkpointing_enable()
    for module in [*model.model.layers, model.lm_head, model]:
        fully_shard(module, mesh=everyone)
    parallelize(model, sp)
    try:
        with precision(torch.float64):
            loss = model(**shard(batches[replica], sp)).loss
            loss.backward()
        found = gradients(model)
    finally:
        sp.close()
    return {"loss": loss.detach()} | {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in found.items()}


@pytest.mark.slow
def test_on_a_mesh() -> None:
    batches = [rows(1, 33), rows(2, 27)]
    per_rank = run_ranks(_on_mesh, 4, batches, [[30, 3], [10, 17]], whole_world=True)
    model = make("KDA", tie_word_embeddings=False, attn={"layers": [1], "num_heads": 4}).double()
    want = mean([run_whole(model, batch) for batch in batches])
    for found in per_rank:
        assert_exact({**found, "loss": mean(per_rank)["loss"]}, want)


def _in_halves(sp: Any, name: str, dtype: torch.dtype, batch: dict[str, Any]) -> Found:
    sp.set_lengths([12, 2, 9])
    model = parallelize(make(name).to(dtype), sp)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        return run_shard(model, sp, batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("GatedDeltaNet", torch.float32), ("KDA", torch.float32), ("GatedDeltaProduct", torch.bfloat16),
     ("RetNet", torch.bfloat16), ("Mamba2", torch.float32)],
)  # fmt: skip
def test_halves(name: str, dtype: torch.dtype) -> None:
    """Autocast, or parameters in bfloat16: no further from float64 than twice what the unmodified model is."""
    errors, own = [], []
    for batch in [rows(3, 23) for _ in range(3)]:
        got, want = mean(run_ranks(_in_halves, RANKS, name, dtype, batch)), run_whole(make(name).double(), batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            other = run_whole(make(name).to(dtype), batch)
        for errors_of, found in ((errors, got), (own, other)):
            errors_of.append(sum(float((found[key] - x).norm() / x.norm()) for key, x in want.items()) / len(want))
    assert sorted(errors)[1] < 2 * max(own)


def _printed(_: Any, script: str) -> list[str]:
    in_pytorch()
    with contextlib.redirect_stdout(io.StringIO()) as text:
        runpy.run_path(script)
    return text.getvalue().splitlines()


@pytest.mark.slow
def test_the_guide_runs(tmp_path: Path) -> None:
    """Its scripts print the same on one rank and on several."""
    assert save_scripts("flash-linear-attention.md", tmp_path) == ({"pretrain.py", "layer.py"}, [])
    for name in ("pretrain.py", "layer.py"):
        script = str(tmp_path / name)
        alone, cut = _printed(None, script), run_ranks(_printed, RANKS, script, whole_world=True)
        assert alone and cut == [alone, *[[]] * (RANKS - 1)]
