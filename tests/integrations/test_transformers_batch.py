"""What `shard` makes of a batch and what it refuses; what `parallelize` refuses, and that it touches nothing else."""

from __future__ import annotations

import copy
import re
import sys
from typing import Any

import pytest
import torch
from torch import nn

from flexsp.comm.group import SequenceParallel
from flexsp.exceptions import FlexspError, NotAvailable, PeerMismatch, PeerTimeout, UncoveredWarning
from flexsp.integrations.transformers import parallelize, restore, shard
from flexsp.integrations.transformers.functions import attention
from flexsp.integrations.transformers.running import on_shard
from flexsp.testing import run_ranks
from tests.attention_oracle import attention_token_loop
from tests.transformers_models import VOCABULARY, assert_exact, make, packed, precision, rows, run_whole

pytest.importorskip("transformers")
ONE = SequenceParallel()
THREE = SequenceParallel(rank=1, world_size=3)  # of which nothing is sent


def _shards(sp: Any, batch: dict[str, Any], lengths: list[int] | None) -> dict[str, Any]:
    sp.set_lengths(lengths)
    made = shard(batch, sp)
    about = made.pop("flexsp_shard")
    names = ("lengths", "batch", "length", "cu_seqlens", "counted", "kept", "keep")
    return made | {f"about_{name}": getattr(about, name) for name in names} | {"set": sp.lengths}


def shards(batch: dict[str, Any], lengths: list[int] | None = None) -> list[dict[str, Any]]:
    return run_ranks(_shards, 3, batch, lengths)


def test_labels_move_over_the_edges() -> None:
    batch = rows(2, 11)
    per_rank = shards(batch, [3, 1, 7])
    labels = torch.cat([found["shift_labels"] for found in per_rank], 1)
    assert torch.equal(labels[:, :-1], batch["labels"][:, 1:]) and (labels[:, -1] == -100).all()
    assert torch.equal(torch.cat([found["input_ids"] for found in per_rank], 1), batch["input_ids"])
    assert torch.cat([found["position_ids"] for found in per_rank], 1).tolist() == [list(range(11))]
    counted = int((batch["labels"][:, 1:] != -100).sum())
    for found, length in zip(per_rank, [3, 1, 7], strict=True):
        assert found["about_counted"] == counted and found["about_length"] == length and found["about_kept"] == 22
        assert found["about_cu_seqlens"] is None and found["about_keep"] is None and found["set"] == [3, 1, 7]
    assert [found["about_length"] for found in shards(batch)] == [4, 4, 3]


@pytest.mark.parametrize("known_by", ["cu_seq_lens_q", "cu_seqlens", "seq_idx", "position_ids", "three rows"])
def test_documents(known_by: str) -> None:
    batch = packed([4, 1, 6])
    batch["cu_seqlens"] = batch["cu_seq_lens_q"]
    if known_by in ("position_ids", "three rows"):
        batch["attention_mask"] = torch.ones(1, 11, dtype=torch.long)
        batch["position_ids"] = batch["position_ids"].expand(3 if known_by == "three rows" else 1, 1, 11).squeeze(0)
    else:
        del batch["position_ids"]
    for name in {"cu_seq_lens_q", "cu_seqlens", "seq_idx"} - {known_by}:
        del batch[name]
    if known_by != "cu_seq_lens_q":
        del batch["cu_seq_lens_k"]
    per_rank = shards(batch)
    got = torch.cat([found["position_ids"] for found in per_rank], -1).view(-1, 11)
    assert all(row == [*range(4), 0, *range(6)] for row in got.tolist())
    for found in per_rank:
        assert found["about_cu_seqlens"].tolist() == [0, 4, 5, 11]
        assert found["about_counted"] == 3 + 0 + 5


ROW = torch.arange(12)
IMAGE = torch.tensor([  # two tokens of text, an image of 2 x 3, two of text; then a text
    [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 0, 1], [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 0, 1], [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 0, 1],
])  # fmt: skip
RIGHT_PADDED = {"attention_mask": (ROW < 9).long()[None], "position_ids": torch.where(ROW < 9, ROW, 1)[None]}


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ({"position_ids": (ROW + 100 * (ROW > 5))[None]}, None),  # PoSE
        ({"position_ids": (ROW % 7 + 50 * (ROW % 7 > 2))[None]}, [0, 7, 12]),
        ({"position_ids": IMAGE[:, None]}, [0, 10, 12]),
        ({"position_ids": torch.stack([ROW, *IMAGE])[:, None]}, None),
        ({"position_ids": torch.stack([ROW % 8, ROW, ROW, ROW])[:, None]}, [0, 8, 12]),
        (RIGHT_PADDED, None),
    ],
    ids=["a jump ahead", "jumps ahead in documents", "image", "row for text", "documents in it", "padding"],
)
def test_where_positions_begin_documents(given: dict[str, torch.Tensor], bounds: list[int] | None) -> None:
    made = shard({"input_ids": torch.ones(1, 12, dtype=torch.long), **given}, ONE)
    found = made["flexsp_shard"].cu_seqlens
    assert (found if found is None else found.tolist()) == bounds
    assert torch.equal(made["position_ids"], given["position_ids"])


def test_embeddings_keep_their_gradient() -> None:
    embeds = torch.randn(2, 9, 5, requires_grad=True)
    made = shard({"inputs_embeds": embeds, "shift_labels": torch.ones(2, 9, dtype=torch.long)}, ONE)
    made["inputs_embeds"].sum().backward()
    assert (embeds.grad == 1).all() and made["flexsp_shard"].counted == 18


def test_masks_of_half_precision() -> None:
    batch = rows(2, 11)
    found = shards(batch | {"attention_mask": torch.ones(2, 11, dtype=torch.bfloat16)})
    assert torch.equal(torch.cat([x["input_ids"] for x in found], 1), batch["input_ids"])


def _other_batches(sp: Any) -> str:
    batch = {"input_ids": torch.full((1, 12), sp.rank)}
    try:
        shard(batch, sp)
    except PeerMismatch as error:
        return str(error)
    return ""


def test_ranks_with_other_batches() -> None:
    for error in run_ranks(_other_batches, 3, fresh_sp=True):
        assert "also to evaluate) of lengths [4, 4, 4], input_ids [1, 12] hash" in error


def test_a_rank_that_evaluates_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Timed out waiting 5000ms for recv operation to complete")

    monkeypatch.setattr(torch.distributed, "all_gather", no_answer)
    with pytest.raises(PeerTimeout, match=r"in shard \(every rank calls it with the same batch, also to evaluate\)"):
        shard(rows(1, 9), SequenceParallel(rank=0, world_size=2))


MASK = torch.ones(2, 6, dtype=torch.long)
LEFT, RIGHT = MASK.clone(), MASK.clone()
LEFT[0, 0] = RIGHT[0, -1] = 0
REFUSED = {
    "pixel_values": ({"pixel_values": torch.ones(1)}, "batch: expected only keys of input_ids, .*'pixel_values'"),
    "no tokens": ({"input_ids": None}, "batch: expected either input_ids or inputs_embeds, got none of them"),
    "floats": ({"input_ids": torch.ones(2, 6)}, "input_ids: expected integers, got torch.float32"),
    "labels": ({"labels": torch.ones(2, 5).long()}, r"labels: expected shape \[B, T\] = \[2, 6\], got \[2, 5\]"),
    "left": ({"attention_mask": LEFT}, "attention_mask: expected padding on the right only, got a zero before a one"),
    "four dimensions": ({"attention_mask": torch.ones(2, 1, 6, 6)}, r"attention_mask: expected shape \[B, T\]"),
    "no mask": ({"attention_mask": MASK * 2}, "attention_mask: expected zeros and ones"),
    "labels of padding": ({"attention_mask": RIGHT, "shift_labels": MASK}, "labels: expected -100 behind"),
    "positions": ({"position_ids": torch.zeros(2, 2, 6).long()}, r"position_ids: expected integers \[2 or 1, 6\]"),
    "documents in rows": ({"position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]])}, "position_ids: expected rows of one"),
    "boundaries": ({"cu_seq_lens_q": torch.tensor([0, 6])}, "batch: expected batch size 1 with cu_seq_lens_q"),
    "items": ({"num_items_in_batch": 0}, "num_items_in_batch: expected a finite number > 0, got 0"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_batches(what: str) -> None:
    changes, error = REFUSED[what]
    with pytest.raises(ValueError, match=error):
        shard({"input_ids": torch.ones(2, 6, dtype=torch.long), **changes}, ONE)


def test_refused_documents() -> None:
    batch, padded = packed([3, 5]), torch.tensor([[1] * 7 + [0]])
    by_positions = {"cu_seq_lens_q": None, "cu_seq_lens_k": None, "seq_idx": None}
    for changes, error in (
        ({"cu_seq_lens_k": torch.tensor([0, 4, 8])}, "cu_seq_lens_k: expected the documents of cu_seq_lens_q"),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 9])}, "cu_seq_lens_q: expected integers that go from 0 up to the 8"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1, 2, 3, 4, 5]])}, "position_ids: expected positions that start"),
        ({"position_ids": None, "attention_mask": padded}, "attention_mask: expected only ones"),
        ({**by_positions, "attention_mask": padded}, "attention_mask: expected only ones"),
    ):
        with pytest.raises(ValueError, match=error):
            shard(batch | changes, ONE)
    with pytest.raises(ValueError, match="sp: expected a SequenceParallel, got NoneType"):
        shard(batch, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"batch: expected at least one token .* lengths \[1, 1, 0\]"):
        shard({"input_ids": torch.ones(1, 2).long()}, THREE)


# ------------------------------------------------------------------------------------------------------- parallelize


@pytest.mark.parametrize("name", ["qwen3_5_moe_text", "zamba2"])
def test_nothing_else_changes(name: str, tmp_path: Any) -> None:
    """Another model of the class, the class and its module, the config, what is saved, calls without a shard."""
    model, other, prompt = make(name), make(name), torch.randint(VOCABULARY, (2, 5))
    module, batch = sys.modules[type(model).__module__], rows(2, 20)
    names, config = dict(vars(module)), model.config.to_dict()
    before, want = run_whole(other, batch), model.generate(prompt, max_new_tokens=4, do_sample=False)
    whole = model.eval()(**batch)

    assert parallelize(model.train(), THREE) is model
    assert vars(module) == names and model.config.to_dict() == config
    after = run_whole(other, batch)
    assert all(torch.equal(after[key], x) for key, x in before.items())
    assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), want)
    out = model.eval()(**batch)
    assert torch.equal(out.loss, whole.loss) and torch.equal(out.logits, whole.logits)
    assert "forward" in vars(copy.deepcopy(model))

    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(x, loaded.state_dict()[key]) for key, x in model.state_dict().items())
    assert not any("forward" in vars(m) for m in loaded.modules())

    restore(model.train())
    assert not any("forward" in vars(m) for m in model.modules())
    again = run_whole(model, batch)
    assert all(torch.equal(again[key], x) for key, x in before.items())
    with pytest.raises(ValueError, match="model: expected a parallelized model"):
        restore(model)


def test_a_copy_is_parallelized_by_itself() -> None:
    model = parallelize(make("olmo_hybrid").double(), ONE)
    twin, batch = copy.deepcopy(model), rows(1, 20)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with precision(torch.float64):
        loss = twin(**shard(batch, ONE)).loss
    assert_exact({"loss": loss}, {"loss": run_whole(make("olmo_hybrid").double(), batch)["loss"]})


def test_training_without_a_shard() -> None:
    model, batch = parallelize(make("mamba2"), THREE), rows(1, 12)
    with pytest.raises(ValueError, match="flexsp_shard: expected what shard returns"):
        model(**batch)
    with pytest.raises(ValueError, match="the model is parallelized over 3 ranks"):
        model.backbone(batch["input_ids"])
    with torch.no_grad():
        model(**batch)
    model.eval()(**batch).loss.backward()


def test_refused_calls() -> None:
    model = parallelize(make("qwen3_next"), ONE)
    made, unlabelled = shard(rows(1, 8), ONE), shard({"input_ids": torch.ones(1, 8).long()}, ONE)
    for changes, error in (
        ({"use_cache": True}, "use_cache: expected False, got True"),
        ({"output_attentions": True}, "output_attentions: expected False"),
        ({"attention_mask": torch.ones(1, 8)}, "attention_mask: expected nothing beside a shard"),
        ({"labels": torch.ones(1, 8)}, "labels: expected nothing beside a shard"),
        ({"token_type_ids": torch.ones(1, 8)}, "arguments: expected only .* got token_type_ids"),
        ({"input_ids": made["input_ids"][:, :5]}, r"input_ids: expected the shape \[1, 8\] of the shard, got \[1, 5\]"),
        ({"position_ids": None}, "position_ids: expected those that shard returned, got None"),
        ({"flexsp_shard": made}, "flexsp_shard: expected what shard returns, got dict"),
        ({"flexsp_shard": shard(rows(1, 8), SequenceParallel())["flexsp_shard"]},
         "flexsp_shard: expected a Shard by the object that parallelize was given, .* got one by another object"),
        ({"flexsp_shard": unlabelled["flexsp_shard"]}, "shift_labels: expected labels that shard made"),
    ):
        with pytest.raises(ValueError, match=error):
            model(**{**made, **changes})
    with pytest.raises(ValueError, match="arguments: expected keywords only"):
        model(made.pop("input_ids"), **made)


def test_noise_of_embeddings() -> None:
    """NEFTune, as trainers switch it on; in evaluation it does nothing."""
    from transformers.integrations.neftune import activate_neftune

    model, made = parallelize(make("mamba2"), ONE), shard(rows(1, 8), ONE)
    activate_neftune(model, 5.0)
    with pytest.raises(ValueError, match=r"neftune_noise_alpha: expected None on a cut sequence .*, got 5\.0"):
        model(**made)
    model.eval()(**made)
    made["inputs_embeds"] = model.get_input_embeddings()(made.pop("input_ids"))
    model.train()(**made)


def test_padding_and_a_loss_that_counts_it() -> None:
    batch = rows(2, 6) | {"attention_mask": RIGHT}
    batch["labels"] = batch["labels"].masked_fill(RIGHT == 0, -100)
    with pytest.raises(ValueError, match="attention_mask: expected no zeros with z_loss_coefficient"):
        parallelize(make("bamba"), ONE)(**shard(batch, ONE))
    parallelize(make("bamba", z_loss_coefficient=0.0), ONE)(**shard(batch, ONE))


def test_without_labels() -> None:
    model, batch = make("granitemoehybrid").eval(), rows(2, 9)
    want = model(batch["input_ids"], output_hidden_states=True)
    parallelize(model, ONE)
    tokens = {"input_ids": batch["input_ids"]}
    got = model(**shard(tokens, ONE), output_hidden_states=True)
    torch.testing.assert_close(got.logits, want.logits)
    torch.testing.assert_close(got.hidden_states, want.hidden_states)
    torch.testing.assert_close(got.aux_loss, want.aux_loss)
    assert got.loss is None and isinstance(model(**shard(tokens, ONE), return_dict=False), tuple)


class Mixing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1)


def test_refused_models_name_everything() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 1.0}
    model = make("qwen3_next", attention_dropout=0.1, rope_parameters=rope)
    model.model.layers[0].mlp.shared_expert.act_fn = Mixing()
    model.model.layers[2].input_layernorm = nn.Conv1d(24, 24, 3)
    model.model.layers[2].linear_attn.head_v_dim = 513
    model.loss_function = nn.functional.cross_entropy
    with pytest.raises(ValueError) as error:
        parallelize(model, ONE)
    said = str(error.value)
    for expected in (
        "model.layers.0.mlp.shared_expert.act_fn: Mixing is not known",
        "model.layers.1.self_attn: attention_dropout is 0.1",
        "model.layers.2.input_layernorm: Conv1d is not known",
        "model.rotary_emb: a rotary embedding of type 'dynamic' depends on the length",
        "model.layers.2.linear_attn: head_v_dim is 513, and heads of more than 512 are not available",
        "the model: model.loss_function: expected transformers' ForCausalLMLoss",
    ):
        assert expected in said
    assert not any("forward" in vars(module) for module in model.modules())
    with pytest.raises(ValueError, match="the model: its forward was replaced already"):
        parallelize(parallelize(make("bamba"), ONE), ONE)


def test_models_that_are_not_known() -> None:
    with pytest.raises(ValueError, match="model: expected a model of transformers, got int"):
        parallelize(3, ONE)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="sp: expected a SequenceParallel, got NoneType"):
        parallelize(make("mamba2"), None)  # type: ignore[arg-type]
    with pytest.raises(NotAvailable, match="Linear is not among the models .*: BailingHybridForCausalLM"):
        parallelize(nn.Linear(2, 2), ONE)


def test_a_head_that_came_later() -> None:
    peft = pytest.importorskip("peft")
    model = parallelize(make("olmo_hybrid"), ONE)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(FlexspError, match="took the place of the model's head after parallelize"):
        model(**shard(rows(1, 8), ONE))


def test_a_mixer_that_came_later() -> None:
    model = parallelize(make("olmo_hybrid"), ONE)
    model.model.layers[2] = make("olmo_hybrid").model.layers[2]
    with pytest.raises(FlexspError, match=r"layers.2.linear_attn came, or got .*, after parallelize: restore the"):
        model(**shard(rows(1, 8), ONE))
    model.model.layers[2].linear_attn = nn.Identity()
    with pytest.raises(FlexspError, match="1 of 3 mixers were taken out after parallelize"):
        model(**shard(rows(1, 8), ONE))


def test_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("mamba2")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.22.2")
    with pytest.raises(NotAvailable, match="transformers 5.23 to 5.24 are needed, this is 5.22.2"):
        parallelize(model, ONE)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "6.0.0.dev0")
    with pytest.warns(UncoveredWarning, match=re.escape("transformers 6.0.0.dev0 was not tested")):
        parallelize(model, ONE)


def _windowed(sp: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    made = shard({"input_ids": torch.ones(1, inputs["q"].shape[1]).long()}, sp)
    q, k, v = (sp.shard(x).transpose(1, 2) for x in inputs.values())
    with on_shard(made["flexsp_shard"]):
        return attention(nn.Module(), q, k, v, None, 0.3, sliding_window=4)[0]


def test_sliding_windows() -> None:
    """None of the models has them, but attention functions are handed them."""
    inputs = {name: torch.randn(1, 23, heads, 4, dtype=torch.float64) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    got = torch.cat(run_ranks(_windowed, 3, inputs), 1)
    torch.testing.assert_close(got, attention_token_loop(**inputs, scale=0.3, window=4), rtol=1e-10, atol=1e-10)
