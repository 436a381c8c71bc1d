"""Base models of transformers, and heads that classify sequences or tokens, over ranks; and what is refused of models
that take images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flexsp.comm.group import SequenceParallel
from flexsp.exceptions import NotAvailable
from flexsp.integrations.transformers import parallelize, shard
from flexsp.testing import run_ranks
from tests.marks import slow
from tests.transformers_models import (
    VOCABULARY,
    Found,
    assert_exact,
    chunks,
    gradients,
    make,
    mean,
    packed,
    precision,
    rows,
    run_shard,
    run_whole,
)  # fmt: skip

pytest.importorskip("transformers")
ONE, LENGTHS, PAD = SequenceParallel(), [23, 18], 0


# ------------------------------------------------------------------------------------------------------- base models


def _hidden(sp: Any, name: str, kind: str, batch: dict[str, Any], weights: torch.Tensor) -> tuple[Found, Any]:
    """Gradients of a sum over this rank's tokens, and their hidden states."""
    sp.set_lengths(LENGTHS)
    model = parallelize(make(name, kind=kind).double(), sp)
    with precision(torch.float64):
        out = model(**shard(batch, sp), output_hidden_states=True)
        (out.last_hidden_state * sp.shard(weights)).sum().backward()
    return gradients(model), torch.stack(out.hidden_states)


BASES = [("qwen3_next", "Model"), ("falcon_mamba", "Model")]
OTHER_BASES = [("qwen3_5_text", "TextModel"), ("recurrent_gemma", "Model"), ("zamba", "Model"), ("xlstm", "Model")]


@pytest.mark.parametrize(("name", "kind"), [*BASES, *slow(*OTHER_BASES)])
def test_a_base_model(name: str, kind: str) -> None:
    model, batch = make(name, kind=kind).double(), {"input_ids": torch.randint(VOCABULARY, (2, sum(LENGTHS)))}
    weights = torch.randn(2, sum(LENGTHS), model.config.hidden_size, dtype=torch.float64)
    found = run_ranks(_hidden, 2, name, kind, batch, weights)
    with precision(torch.float64), chunks(model, 16):
        out = model(**batch, output_hidden_states=True)
        (out.last_hidden_state * weights).sum().backward()
    assert_exact({key: sum(grads[key] for grads, _ in found) for key in found[0][0]}, gradients(model))
    assert_exact({"hidden": torch.cat([x for _, x in found], 2)}, {"hidden": torch.stack(out.hidden_states)})


def test_a_base_model_has_no_labels() -> None:
    model = parallelize(make("mamba", kind="Model"), ONE)
    with pytest.raises(ValueError, match=r"arguments: expected only input_ids, .* got shift_labels"):
        model(**shard(rows(1, 8), ONE))


# --------------------------------------------------------------------------------------------------------- sequences


def sentences(labels: Any) -> dict[str, Any]:
    """Rows of several lengths: one ends on the first rank, one has an inner token like padding, one is whole."""
    ids = torch.randint(1, VOCABULARY, (3, sum(LENGTHS)))
    mask = (torch.arange(sum(LENGTHS)) < torch.tensor([7, 33, sum(LENGTHS)])[:, None]).long()
    ids = ids * mask
    ids[1, 4] = PAD
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def classifier(name: str, kind: str, **changes: Any) -> Any:
    sizes = {"pad_token_id": PAD, "num_labels": 4, "classifier_dropout": 0.0, **changes}
    return make(name, kind=kind, **sizes).double()


def _classified(sp: Any, name: str, kind: str, changes: dict[str, Any], batch: dict[str, Any], shift: bool) -> Found:
    sp.set_lengths(LENGTHS)
    model = parallelize(classifier(name, kind, **changes), sp)
    with precision(torch.float64):
        made = shard(batch, sp, shift)
        out = model(**made)
        out.loss.backward()
    found = gradients(model)
    return {"loss": out.loss.detach(), "logits": out.logits.detach(), **found}


def whole(name: str, kind: str, changes: dict[str, Any], batch: dict[str, Any]) -> Found:
    model = classifier(name, kind, **changes)
    found = run_whole(model, batch)
    with precision(torch.float64), chunks(model, 16), torch.no_grad():
        return found | {"logits": model(**batch).logits}


SEQUENCES: list[tuple[str, str, dict[str, Any], Any]] = [
    ("jamba", "ForSequenceClassification", {}, torch.tensor([3, 0, 2])),
    ("zamba", "ForSequenceClassification", {"problem_type": "multi_label_classification"}, torch.rand(3, 4).double()),
]  # fmt: skip
OTHER_SEQUENCES: list[tuple[str, str, dict[str, Any], Any]] = [
    ("qwen3_5_text", "TextForSequenceClassification", {"num_labels": 1}, torch.rand(3).double()),
    ("zamba2", "ForSequenceClassification", {"problem_type": "regression"}, torch.rand(3, 4).double()),
    ("minimax", "ForSequenceClassification", {}, torch.tensor([-100, 1, 1])),
    ("qwen3_next", "ForSequenceClassification", {}, torch.tensor([3, 0, 2])),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "changes", "labels"), [*SEQUENCES, *slow(*OTHER_SEQUENCES)])
def test_sequences_are_classified(name: str, kind: str, changes: dict[str, Any], labels: Any) -> None:
    """Every rank has the logits and the loss of all rows."""
    batch = sentences(labels)
    found = run_ranks(_classified, 2, name, kind, changes, batch, True)
    want = whole(name, kind, changes, batch)
    for mine in found:
        assert_exact({**mean(found), "loss": mine["loss"], "logits": mine["logits"]}, want)


def _rewarded(sp: Any, batch: dict[str, Any]) -> Found:
    sp.set_lengths(LENGTHS)
    model = parallelize(classifier("jamba", "ForSequenceClassification", num_labels=1), sp)
    with precision(torch.float64):
        rewards = model(**shard(batch, sp)).logits[:, 0]
        (-F.logsigmoid(rewards[0] - rewards[1])).backward()
    return gradients(model)


def test_a_loss_of_rewards() -> None:
    """A loss of one's own on the logits of rows, without labels."""
    batch = sentences(None)
    model = classifier("jamba", "ForSequenceClassification", num_labels=1)
    with precision(torch.float64):
        rewards = model(**batch).logits[:, 0]
        (-F.logsigmoid(rewards[0] - rewards[1])).backward()
    assert_exact(mean(run_ranks(_rewarded, 2, batch)), gradients(model))


def test_refused_sequences() -> None:
    model = parallelize(classifier("jamba", "ForSequenceClassification"), ONE)
    with pytest.raises(ValueError, match="batch: expected one sequence a row .*, got packed documents"):
        model(**shard({**packed([3, 5]), "labels": torch.tensor([1])}, ONE))
    model.config.pad_token_id = None
    with pytest.raises(ValueError, match="batch: expected one row, where the config has no pad_token_id, got 3 rows"):
        model(**shard(sentences(torch.tensor([1, 2, 3])), ONE))
    model.loss_function = max
    with pytest.raises(ValueError, match="model.loss_function: expected transformers' ForSequenceClassificationLoss"):
        model(**shard({"input_ids": torch.ones(1, 8).long(), "labels": torch.tensor([1])}, ONE))


# ------------------------------------------------------------------------------------------------------------ tokens


def tokens() -> dict[str, Any]:
    batch = rows(2, sum(LENGTHS))
    ids = batch["input_ids"]
    return {**batch, "labels": torch.randint(4, ids.shape).masked_fill(torch.rand(ids.shape) < 0.3, -100)}


@pytest.mark.parametrize("name", ["minimax", *slow("qwen3_next")])
def test_tokens_are_classified(name: str) -> None:
    kind = "ForTokenClassification"
    batch = tokens()
    found = run_ranks(_classified, 2, name, kind, {}, batch, False)
    want = whole(name, kind, {}, batch)
    logits = torch.cat([mine["logits"] for mine in found], 1)
    assert_exact({**mean([{k: x for k, x in mine.items() if k != "logits"} for mine in found]), "logits": logits}, want)


def test_refused_tokens() -> None:
    model = parallelize(classifier("minimax", "ForTokenClassification"), ONE)
    with pytest.raises(ValueError, match="arguments: expected only .*, labels beside flexsp_shard, got shift_labels"):
        model(**shard(tokens(), ONE))
    with pytest.raises(ValueError, match=r"labels: expected labels of tokens that shard\(batch, sp, shift=False\)"):
        model(**shard({**tokens(), "labels": torch.tensor([1, 2])}, ONE))
    with pytest.raises(ValueError, match="num_items_in_batch: expected None with shift=False, got a value"):
        shard({**tokens(), "num_items_in_batch": 3}, ONE, shift=False)
    with pytest.raises(ValueError, match="num_items_in_batch: expected None beside labels of rows"):
        shard({**tokens(), "labels": torch.tensor([1, 2]), "num_items_in_batch": 3}, ONE)
    with pytest.raises(ValueError, match=r"labels: expected \[B, T\] of tokens, or of rows \[2\]"):
        shard({**tokens(), "labels": torch.tensor([1, 2, 3])}, ONE)
    with pytest.raises(ValueError, match="shift: expected True or False, got 1"):
        shard(tokens(), ONE, shift=1)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------ images


def test_models_that_take_images_lead_to_their_language_model() -> None:
    import transformers

    with torch.device("meta"):
        for name in ("Qwen3_5", "Qwen3_5Moe"):
            config = getattr(transformers, f"{name}Config")()
            config.text_config.num_hidden_layers = config.vision_config.depth = 1
            config.text_config.layer_types = ["linear_attention"]
            for kind in ("ForConditionalGeneration", "Model"):
                model = getattr(transformers, name + kind)(config)
                said = f"{name}{kind} is not .*AutoModelForCausalLM.from_pretrained loads .*, a {name}ForCausalLM, wh"
                with pytest.raises(NotAvailable, match=said):
                    parallelize(model, ONE)
        model = transformers.Qwen3_5ForSequenceClassification(transformers.Qwen3_5Config())
        with pytest.raises(NotAvailable, match="Qwen3_5ForSequenceClassification is not .* a Qwen3_5ForCausalLM, wh"):
            parallelize(model, ONE)


def test_a_part_that_can_be_cut_is_named() -> None:
    model = torch.nn.Module()
    model.language_model = make("nemotron_h")
    with pytest.raises(NotAvailable, match="Module is not .*. Its language_model is a NemotronHForCausalLM, which can"):
        parallelize(model, ONE)
    batch = rows(1, 12)
    inner = parallelize(model.language_model.double(), ONE)
    assert_exact(run_shard(inner, ONE, batch), run_whole(make("nemotron_h").double(), batch))


# ----------------------------------------------------------------------------------------------- what families refuse


def test_rotary_embeddings_of_kinds_of_layers() -> None:
    whole = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    both = {"full_attention": whole, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(ValueError, match="model.rotary_emb: a rotary embedding of type 'dynamic' depends on"):
        parallelize(make("lfm3", rope_parameters=both), ONE)


def test_a_convolution_around_a_mixer() -> None:
    """Those of mixers are replaced; one in a layer that only hands the shard on is not known."""
    model = make("jamba")
    model.model.layers[0].feed_forward = torch.nn.Conv1d(24, 24, 3)
    with pytest.raises(ValueError, match="model.layers.0.feed_forward: Conv1d is not known"):
        parallelize(model, ONE)
