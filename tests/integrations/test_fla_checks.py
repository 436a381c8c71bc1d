"""What `flexsp.integrations.fla` changes and what it leaves, and what it refuses."""

from __future__ import annotations

import copy
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flexsp.comm.group import SequenceParallel
from flexsp.exceptions import FlexspError, NotAvailable, UncoveredWarning
from flexsp.integrations import transformers
from flexsp.integrations.fla import parallelize, restore, shard
from tests.fla_models import LAYERS, D, make, make_layer, run_layer
from tests.transformers_models import VOCABULARY, assert_exact, precision, rows, run_shard, run_whole

pytest.importorskip("fla")
ONE, THREE = SequenceParallel(), SequenceParallel()
THREE.world_size, THREE.rank = 3, 1


def changed(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize("name", ["GatedDeltaNet", "RetNet"])
def test_nothing_else_changes(name: str, tmp_path: Path) -> None:
    """Another model of the class, the modules of its code, the config, what is saved, calls without a shard."""
    model, other, prompt = make(name), make(name), torch.randint(VOCABULARY, (2, 5))
    homes = {sys.modules[type(module).__module__] for module in model.modules()}
    names = {home: dict(vars(home)) for home in homes}
    config, batch = model.config.to_dict(), rows(2, 20)
    before, whole = run_whole(other, batch), model.eval()(**batch)
    want = model.generate(prompt, max_new_tokens=3, do_sample=False, use_cache=False)

    assert parallelize(model.train(), THREE) is model
    assert names == {home: dict(vars(home)) for home in homes} and model.config.to_dict() == config
    after = run_whole(other, batch)
    assert all(torch.equal(after[key], x) for key, x in before.items())
    assert torch.equal(model.generate(prompt, max_new_tokens=3, do_sample=False, use_cache=False), want)
    assert torch.equal(model.eval()(**batch).logits, whole.logits)

    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(x, loaded.state_dict()[key]) for key, x in model.state_dict().items())
    assert changed(model) and not changed(loaded)

    restore(model.train())
    again = run_whole(model, batch)
    assert not changed(model) and all(torch.equal(again[key], x) for key, x in before.items())
    with pytest.raises(ValueError, match="model: expected a parallelized model"):
        restore(model)


def test_a_copy_is_parallelized_by_itself() -> None:
    model = parallelize(make("KDA").double(), ONE)
    twin, batch = copy.deepcopy(model), rows(1, 20)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_exact(run_shard(twin, ONE, batch), run_whole(make("KDA").double(), batch))


def test_layers_are_compiled() -> None:
    """Twice: guards must find what they looked at, and the functions in the place of others."""
    model, batch = parallelize(make("GatedDeltaNet", num_hidden_layers=1, attn=None), ONE), rows(1, 9)
    model.model.layers[0].compile(backend="eager")
    want = make("GatedDeltaNet", num_hidden_layers=1, attn=None)(**batch).loss
    for _ in range(2):
        torch.testing.assert_close(model(**shard(batch, ONE)).loss, want)


def test_a_layer_is_restored() -> None:
    layer, (x, dy) = make_layer("gated"), torch.randn(2, 2, 9, D, dtype=torch.float64)
    want = run_layer(layer, x, dy)
    names = changed(parallelize(layer, ONE))
    assert names == ["", "q_conv1d", "k_conv1d", "v_conv1d"]
    got = run_layer(layer, x, dy)
    assert_exact(got, want)
    assert not changed(restore(layer)) and all(torch.equal(x, want[key]) for key, x in run_layer(layer, x, dy).items())


def test_training_without_a_shard() -> None:
    model, batch = parallelize(make("DeltaNet"), THREE), rows(1, 12)
    with pytest.raises(ValueError, match="flexsp_shard: expected what shard returns"):
        model(**batch)
    with pytest.raises(ValueError, match="the model is parallelized over 3 ranks"):
        model.model(batch["input_ids"])
    with torch.no_grad():
        model(**batch)
    model.eval()(**batch).loss.backward()


def test_without_labels() -> None:
    model, batch = make("GatedDeltaNet").double().eval(), rows(2, 9)
    with precision(torch.float64):
        want = model(batch["input_ids"], output_hidden_states=True)
        got = parallelize(model, ONE)(**shard({"input_ids": batch["input_ids"]}, ONE), output_hidden_states=True)
    torch.testing.assert_close(got.logits, want.logits)
    torch.testing.assert_close(got.hidden_states, want.hidden_states)
    assert got.loss is None


def test_refused_calls() -> None:
    batch = rows(1, 8)
    model = parallelize(make("DeltaNet"), ONE)
    for given, error in (
        ({"attention_mask": torch.ones(1, 8)}, "attention_mask: expected nothing beside a shard"),
        ({"cu_seqlens": torch.tensor([0, 8])}, "arguments: expected only input_ids, .*, got cu_seqlens"),
        ({"use_cache": True}, "use_cache: expected False"),
    ):
        with pytest.raises(ValueError, match=error):
            model(**shard(batch, ONE), **given)
    model.criterion = nn.CrossEntropyLoss()
    with pytest.raises(ValueError, match=r"model\.criterion: expected None \(cross entropy"):
        model(**shard(batch, ONE))

    layer, x = parallelize(make_layer("mamba"), ONE), torch.randn(1, 8, D, dtype=torch.float64)
    for given, error in (
        ({"attention_mask": torch.ones(1, 8)}, "attention_mask: expected nothing on a sequence that is cut"),
        ({"past_key_values": []}, "past_key_values: expected nothing"),
        ({"use_cache": True}, "use_cache: expected False"),
        ({"cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens: expected"),
    ):
        with pytest.raises(ValueError, match=error):
            layer(x, **given)
    with pytest.raises(ValueError, match=r"hidden_states: expected at least one token .*, got \[1, 0, 24\]"):
        layer(x[:, :0])
    with pytest.raises(ValueError, match=r"hidden_states: expected \[\*, \*, \*\], got \[8, 24\]"):
        layer(x[0])


class Mixing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1)


def test_refused_models_name_everything() -> None:
    from fla.modules import RotaryEmbedding

    model = make("GatedDeltaNet", use_l2warp=True)
    model.criterion = nn.CrossEntropyLoss()
    model.model.layers[0].mlp.act = Mixing()
    model.model.layers[0].attn.q_conv1d = Mixing()
    model.model.layers[1].attn.rotary = RotaryEmbedding(6, interleaved=True)
    model.model.layers[2].attn.o_norm.extra = nn.Conv1d(24, 24, 3)
    model.model.layers[2].mlp.conv = copy.deepcopy(model.model.layers[0].attn.k_conv1d)
    with pytest.raises(ValueError) as error:
        parallelize(model, ONE)
    said = str(error.value)
    for expected in (
        "GatedDeltaNetForCausalLM with",
        "model.layers.0.attn.q_conv1d: Mixing is not known",
        "model.layers.0.mlp.act: Mixing is not known",
        "model.layers.1.attn.rotary: a rotary embedding with scale_base or interleaved",
        "model.layers.2.attn.o_norm.extra: Conv1d is not known",
        "model.layers.2.mlp.conv: ShortConvolution is not known",
        "the model: model.criterion: expected None",
        "the model: model.config.use_l2warp: expected False",
    ):
        assert expected in said
    assert not changed(model)
    with pytest.raises(ValueError, match="the model: its forward was replaced already"):
        parallelize(parallelize(make("RetNet"), ONE), ONE)
    with pytest.raises(ValueError, match=r"(?s)the model: its forward was replaced.*k_conv1d: its forward was"):
        parallelize(parallelize(make_layer("delta"), ONE), ONE)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("gated", {"head_dim": 256, "expand_v": 4}, "head_v_dim is 1024, and heads of more than 512 are not available"),
        ("mamba", {"state_size": 257}, "ssm_state_size is 257, and heads of more than 256"),
        ("hgrn2", {"expand_ratio": 258, "hidden_size": 516}, "head_f_dim is 258, and heads of more than 256"),
        ("linear attention", {"feature_map": "dpfp", "hidden_size": 68}, "its feature map makes keys of 272"),
    ],
)
def test_heads_that_the_operator_refuses(name: str, changes: dict[str, Any], said: str) -> None:
    layer = make_layer(name, **changes)
    with pytest.raises(ValueError, match=said):
        parallelize(layer, ONE)
    assert not changed(layer)


def test_softmax_takes_any_heads() -> None:
    parallelize(make_layer("softmax", hidden_size=1200), ONE)


def test_layers_that_call_other_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer("kda")
    monkeypatch.setattr(type(layer), "forward", lambda self, x: x)
    with pytest.raises(ValueError, match="does not call chunk_kda, fused_recurrent_kda in this release"):
        parallelize(layer, ONE)


def test_classes_that_are_not_known() -> None:
    with pytest.raises(ValueError, match="model: expected a layer or a causal language model of flash"):
        parallelize(3, ONE)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="sp: expected a SequenceParallel, got NoneType"):
        parallelize(make_layer("delta"), None)  # type: ignore[arg-type]
    for model in (make("DeltaNet").model, nn.Linear(2, 2)):
        with pytest.raises(NotAvailable, match=f"{type(model).__name__} is not among the models .*: DeltaNet"):
            parallelize(model, ONE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fla.models import LinearAttentionConfig, LinearAttentionForCausalLM

        sizes: dict[str, Any] = {"hidden_size": D, "num_hidden_layers": 1, "num_heads": 2, "vocab_size": 9}
        linear = LinearAttentionForCausalLM(LinearAttentionConfig(**sizes))
    with pytest.raises(NotAvailable, match=r"\. LinearAttentionForCausalLM hands no keyword arguments to its layers"):
        parallelize(linear, ONE)
    with pytest.raises(NotAvailable, match=r"Mamba2ForCausalLM of fla\.models\.mamba2\.modeling_mamba2 is not among"):
        transformers.parallelize(make("Mamba2"), ONE)


def test_a_mixer_that_came_later() -> None:
    model = parallelize(make("GatedDeltaNet"), ONE)
    model.model.layers[2] = make("GatedDeltaNet").model.layers[2]
    with pytest.raises(FlexspError, match=r"model.layers.2.attn came, or got .*, after parallelize: restore the model"):
        model(**shard(rows(1, 8), ONE))
    model = parallelize(make("GatedDeltaNet"), ONE)
    model.model.layers[0].attn.v_conv1d = make("GatedDeltaNet").model.layers[0].attn.v_conv1d
    with pytest.raises(FlexspError, match="v_conv1d of GatedDeltaNet came after parallelize: restore"):
        model(**shard(rows(1, 8), ONE))
    layer = parallelize(make_layer("delta"), ONE)
    layer.k_conv1d = make_layer("delta").k_conv1d
    with pytest.raises(FlexspError, match="k_conv1d of DeltaNet came after parallelize: restore"):
        layer(torch.randn(1, 8, D, dtype=torch.float64))


def test_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer("delta")
    monkeypatch.setattr(sys.modules["fla"], "__version__", "0.5.1")
    with pytest.raises(NotAvailable, match="flash-linear-attention 0.6 is needed, this is 0.5.1"):
        parallelize(layer, ONE)
    monkeypatch.setattr(sys.modules["fla"], "__version__", "0.7.0")
    with pytest.warns(UncoveredWarning, match=re.escape("flash-linear-attention 0.7.0 was not tested, only 0.6")):
        parallelize(layer, ONE)


def test_all_layers_are_here() -> None:
    from flexsp.integrations.fla.mixers import MIXERS

    assert {f"{type(make_layer(name)).__module__}.{type(make_layer(name)).__name__}" for name in LAYERS} == set(MIXERS)
