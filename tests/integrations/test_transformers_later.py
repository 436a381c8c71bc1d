"""What people do to a model before and after `parallelize`: adapters, compiled layers, other forwards, pickles."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from flexsp.comm.group import SequenceParallel
from flexsp.exceptions import FlexspError
from flexsp.integrations.transformers import parallelize, restore, shard
from flexsp.testing import run_ranks
from tests.marks import slow
from tests.transformers_models import Found, assert_exact, make, mean, precision, rows, run_shard, run_whole

pytest.importorskip("transformers")
ONE, LENGTHS = SequenceParallel(), [20, 3]
SIZES: dict[str, dict[str, Any]] = {
    "IA3": {"feedforward_modules": ["o_proj"]}, "LoHa": {"r": 2}, "Vera": {"r": 2}, "OFT": {"oft_block_size": 4},
    "Miss": {"r": 2}, "Shira": {"r": 2}, "Lora": {"modules_to_save": ["linear_attn"]}, "LoKr": {"r": 2},
    "HRA": {"r": 2}, "LNTuning": {"target_modules": ["norm"]},
}  # fmt: skip


def adapted(model: Any, kind: str) -> Any:
    """With an adapter that changes something."""
    import peft

    config = getattr(peft, f"{kind}Config")(**{"target_modules": ["q_proj", "o_proj"], **SIZES[kind]})
    with torch.random.fork_rng():
        torch.manual_seed(8)
        model = peft.get_peft_model(model, config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.double()


def _adapted(sp: Any, kinds: list[str], batch: dict[str, Any]) -> list[Found]:
    sp.set_lengths(LENGTHS)
    found = []
    for kind in kinds:
        before = parallelize(adapted(make("olmo_hybrid"), kind), sp)
        after = adapted(parallelize(make("olmo_hybrid"), sp), kind)
        found += [run_shard(model, sp, batch) for model in (before, after)]
    return found


@pytest.mark.parametrize("kinds", [list(SIZES)[:7], *slow(list(SIZES)[7:])], ids=["named", "others"])
def test_adapters(kinds: list[str]) -> None:
    """Before `parallelize` and after it; LoRA with a copy of mixers."""
    pytest.importorskip("peft")
    batch = rows(1, sum(LENGTHS))
    per_rank = run_ranks(_adapted, 2, kinds, batch)
    for at, kind in enumerate(kinds):
        want = run_whole(adapted(make("olmo_hybrid"), kind), batch)
        assert any(x.count_nonzero() for name, x in want.items() if name != "loss")
        for when in (0, 1):
            assert_exact(mean([found[2 * at + when] for found in per_rank]), want, f"{kind} {when}")


def test_refused_adapters() -> None:
    """Whether they come before or after."""
    peft = pytest.importorskip("peft")
    activated = peft.LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[3, 4])
    poly = peft.PolyConfig(target_modules=["q_proj"])
    for config, said in ((activated, "activated LoRA looks for its tokens"), (poly, "PolyRouter is not known")):
        with pytest.raises(ValueError, match=f"self_attn.q_proj.*{said}"):
            parallelize(peft.get_peft_model(make("olmo_hybrid"), config), ONE)
        model = parallelize(make("olmo_hybrid"), ONE)
        peft.get_peft_model(model, config)
        with pytest.raises(FlexspError, match=rf"self_attn.q_proj.*{said}.* came after parallelize: restore"):
            model(**shard(rows(1, 8), ONE))


def _around_layers(sp: Any, batch: dict[str, Any]) -> list[Found]:
    """Layers compiled, layers in a wrapper that checkpoints them, before and after."""
    sp.set_lengths(LENGTHS)
    compiled = parallelize(make("olmo_hybrid").double(), sp)
    for layer in compiled.model.layers[:2]:
        layer.compile(backend="eager")
    wrapped = make("olmo_hybrid").double(), parallelize(make("olmo_hybrid").double(), sp)
    for model in wrapped:
        for at, layer in enumerate(model.model.layers):
            model.model.layers[at] = checkpoint_wrapper(layer)
    parallelize(wrapped[0], sp)
    found = [run_shard(model, sp, batch) for model in (compiled, *wrapped)]
    return [{name.replace("_checkpoint_wrapped_module.", ""): x for name, x in each.items()} for each in found]


def test_layers_are_compiled_and_wrapped() -> None:
    batch = rows(1, sum(LENGTHS))
    per_rank = run_ranks(_around_layers, 2, batch)
    want = run_whole(make("olmo_hybrid").double(), batch)
    for at in range(3):
        assert_exact(mean([found[at] for found in per_rank]), want, str(at))


def base_model_and_loss(model: Any, labels: Any = None, shift_labels: Any = None, **kwargs: Any) -> Any:
    """What Liger's kernels and TRL put in place of model.forward."""
    hidden = model.model(**kwargs, use_cache=False).last_hidden_state
    return torch.nn.functional.cross_entropy(model.lm_head(hidden).flatten(0, 1), shift_labels.flatten())


def test_another_forward_takes_the_place() -> None:
    model = parallelize(make("qwen3_next"), ONE)
    parallelized, model.forward = model.forward, MethodType(base_model_and_loss, model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(FlexspError, match=r"GatedDeltaNet was handed flexsp_shard by other code .*use_liger_kernel"):
        model(**shard(rows(1, 8), ONE))
    with pytest.raises(ValueError, match=r"model: expected the forwards that parallelize made, got others of the mod"):
        restore(model)
    model.forward = parallelized
    model(**shard(rows(1, 8), ONE)).loss.backward()
    restore(model).forward = MethodType(base_model_and_loss, model)
    with pytest.raises(ValueError, match="the model: its forward was replaced already"):
        parallelize(model, ONE)


@pytest.fixture
def accelerate() -> Iterator[Any]:
    """Which keeps its settings for the whole process."""
    module = pytest.importorskip("accelerate")
    module.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield module
    module.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate_takes_its_wrapper_off(accelerate: Any) -> None:
    model, batch = parallelize(make("olmo_hybrid").double(), ONE), rows(1, 12)
    plain = make("olmo_hybrid")
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare(model)
    with pytest.raises(ValueError, match=r"unwrap_model\(model, keep_fp32_wrapper=False\)"):
        restore(prepared)
    with precision(torch.float64):
        prepared(**shard(batch, ONE))
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert_exact(run_shard(unwrapped, ONE, batch), run_whole(plain.double(), batch))
    assert not any("forward" in vars(module) for module in restore(unwrapped).modules())


def test_a_pickle() -> None:
    model = make("mamba2")
    pickle.dumps(restore(parallelize(model, ONE)))
    with pytest.raises(FlexspError, match="a parallelized model cannot be pickled, .*restore the model first"):
        pickle.dumps(parallelize(model, ONE))
