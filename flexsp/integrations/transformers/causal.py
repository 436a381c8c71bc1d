"""The forward of a model on a shard. Of a causal language model: layers, head and loss."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flexsp.comm.group import SequenceParallel, count_failed_call
from flexsp.exceptions import FlexspError, fail
from flexsp.integrations.transformers.batch import KEY, Running, Shard
from flexsp.integrations.transformers.forwards import is_replaced
from flexsp.integrations.transformers.loss import language_loss, router_loss
from flexsp.integrations.transformers.running import entered_shard

__all__ = [
    "LANGUAGE", "LATER", "SCORES", "CausalModel", "Head", "Task", "forward_on_shard", "head_forward",
    "refuse_training", "run_layers", "take_shard",
]  # fmt: skip

SCORES = "flexsp_scores"  # the keyword argument that asks for numbers of single tokens in place of the loss

LATER = "after parallelize: restore the model and parallelize it again"

# Kinds of layers that models look a mask up for. A shard needs none: it knows its documents and its padding.
_LAYER_TYPES = ("full_attention", "linear_attention", "sliding_attention", "conv")

Head = Callable[[Tensor], Tensor]
"""The forward of a model's last layer: hidden states [..., D] -> [..., vocabulary]."""


def plain_logits(model: Any, head: Head, hidden: Tensor) -> Tensor:
    return head(hidden)


@dataclass(frozen=True, kw_only=True)
class CausalModel:
    """How a causal language model computes its loss around its layers.

    Attributes:
        check_loss: raises a ValueError if the model's loss is not cross entropy.
        logits: the logits from (model, head, last hidden states [..., D]).
        has_masks: the model takes an attention mask for each kind of layer, and positions.
        router_loss: it can add a loss that balances experts.
    """

    check_loss: Callable[[Any], None]
    logits: Callable[[Any, Head, Tensor], Tensor] = plain_logits
    has_masks: bool = True
    router_loss: bool = False


@dataclass(frozen=True)
class Task:
    """What a model makes of its last hidden states.

    Attributes:
        run: from (how the model computes its loss, model, its layers' forward on a shard, shard, arguments) what a call
            returns.
        labels: the argument that has its labels, as `shard` makes it; None where it has no loss.
    """

    run: Callable[[CausalModel, Any, Callable[..., Any], Shard, dict[str, Any]], Any]
    labels: str | None


class _Inside(threading.local):
    """Whether this thread is inside a model's forward on a shard."""

    def __init__(self) -> None:  # not on the class: torch.compile's guards look here, on every thread
        self.shard = False


_inside = _Inside()


def take_shard(module: nn.Module, sp: SequenceParallel, kwargs: dict[str, Any]) -> Shard | None:
    """The shard in a layer's arguments, or that of the layer around it; None if it runs on this rank alone."""
    shard: Shard | None = kwargs.get(KEY) or entered_shard()
    if shard is None:
        if _inside.shard:
            raise FlexspError(f"{type(module).__name__} was not handed {KEY} by the layers around it")
        refuse_training(module, sp)
    elif not isinstance(shard, Running):  # another forward computes the loss, from this rank's labels alone
        raise FlexspError(
            f"{type(module).__name__} was handed {KEY} by other code than the model's forward of parallelize. Call the "
            "whole model, not its base model. If you do, something replaced model.forward after parallelize, such as "
            "use_liger_kernel=True or a trainer of TRL: turn that off, or train with SequenceParallelTrainer, which "
            "trainers of TRL can be combined with (docs/transformers.md)"
        )
    return shard


def refuse_training(module: nn.Module, sp: SequenceParallel) -> None:
    if sp.world_size > 1 and module.training and torch.is_grad_enabled():
        fail(
            KEY, f"what shard returns (the model is parallelized over {sp.world_size} ranks; without it, it runs on "
            "this rank alone, in evaluation mode or without gradients)", None,
        )  # fmt: skip


def head_forward(
    original: Callable[..., Any], head: nn.Module, *args: Any, loss_of: Callable[..., Any] | None = None, **kwargs: Any
) -> Any:
    """The head's own forward or, with `loss_of`, a loss that calls it for blocks of tokens. Hooks of the head, such as
    those by which fully_shard gathers its parameters, run once for all blocks, on every rank of a mesh."""
    forward = functools.partial(original, head, **kwargs)
    return forward(*args) if loss_of is None else loss_of(forward, *args)


def forward_on_shard(
    causal: CausalModel, task: Task, base: Callable[..., Any] | None, sp: SequenceParallel,
    later: Callable[[Any], Iterable[str]], original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """The forward of a parallelized model. Without a shard it is the original one.

    Args:
        base: the forward of its layers on a shard, of (model, ...) where the model is nothing more; None where they are
            the model's ``base_model``.
        later: finds what was added to the model after `parallelize` and would run on this rank's tokens alone.
    """
    shard = kwargs.pop(KEY, None)
    if shard is None:
        refuse_training(model, sp)
        return original(model, *args, **kwargs)
    try:
        call = _arguments(causal, task.labels, model, sp, shard, args, kwargs)
        came = [*later(model)]
        if came:
            raise FlexspError(f"{', '.join(came)} {LATER}")
        layers = model.base_model if base is None else functools.partial(base, model)
        return task.run(causal, model, layers, shard, call)
    except Exception as error:
        count_failed_call(error, sp)  # the other ranks go on to the exchanges that come after it
        raise


def _run_language_model(
    causal: CausalModel, model: Any, base: Callable[..., Any], shard: Shard, call: dict[str, Any]
) -> Any:  # fmt: skip
    from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

    config, head = model.config, model.get_output_embeddings()
    if not is_replaced(head):
        raise FlexspError(f"{type(head).__name__} took the place of the model's head {LATER}")
    labels, counted = call.pop("shift_labels", None), call.pop(_COUNT, shard.counted)
    scores = call.pop(SCORES, None)
    as_dict = call.pop("return_dict", config.return_dict)
    balanced = causal.router_loss and call.setdefault("output_router_logits", config.output_router_logits)
    outputs = run_layers(causal, base, shard, call)
    found: dict[str, Any] = {name: outputs.get(name) for name in ("hidden_states", "router_logits")}
    if scores is not None:
        found = head(outputs.last_hidden_state, loss_of=functools.partial(scores, causal, model, labels)) | found
    elif labels is None:
        found["logits"] = causal.logits(model, head, outputs.last_hidden_state)
    else:
        found["loss"] = head(
            outputs.last_hidden_state, loss_of=functools.partial(_loss_of, causal, model, labels, counted, shard)
        )
    if balanced and found["router_logits"]:
        found["aux_loss"] = router_loss(found["router_logits"], model.num_experts, model.num_experts_per_tok, shard)
        if "loss" in found:
            found["loss"] = found["loss"] + model.router_aux_loss_coef * found["aux_loss"]
    if scores is not None:
        return {name: x for name, x in found.items() if x is not None}
    kind = CausalLMOutputWithPast if found["router_logits"] is None else MoeCausalLMOutputWithPast
    made = kind(**{name: x for name, x in found.items() if x is not None})
    return made if as_dict else made.to_tuple()


LANGUAGE = Task(_run_language_model, "shift_labels")


def run_layers(causal: CausalModel, base: Callable[..., Any], shard: Shard, call: dict[str, Any]) -> Any:
    """What the model without its head returns."""
    if causal.has_masks:
        call["attention_mask"] = dict.fromkeys(_LAYER_TYPES)
    else:
        del call["position_ids"]
    _inside.shard = True
    try:
        return base(**call, use_cache=False, return_dict=True, **{KEY: Running(**vars(shard))})
    finally:
        _inside.shard = False


def _loss_of(
    causal: CausalModel, model: Any, labels: Tensor, counted: int | float | Tensor, shard: Shard, head: Head,
    hidden: Tensor,
) -> Tensor:  # fmt: skip
    logits_of, z_loss = functools.partial(causal.logits, model, head), getattr(model, "z_loss_coefficient", 0.0)
    return language_loss(logits_of, hidden, labels, model.config.vocab_size, shard, counted, z_loss)


# Arguments of a call that `shard` does not make. They may be None or one of these values, which have no effect.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "attention_mask": (), "labels": (), "cache": (), "past_key_values": (), "cache_params": (), "use_cache": (False,),
    "output_attentions": (False,), "logits_to_keep": (0,), "task_ids": (),
}  # fmt: skip
_TAKEN = ("input_ids", "inputs_embeds", "position_ids", "output_hidden_states", "output_router_logits", "return_dict")
_COUNT = "num_items_in_batch"  # beside labels of the next tokens


def _arguments(
    causal: CausalModel, labels: str | None, model: Any, sp: SequenceParallel, shard: Shard,
    args: tuple[Any, ...], kwargs: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The arguments of a call after their checks, without those that are None."""
    if not isinstance(shard, Shard):
        fail(KEY, "what shard returns", type(shard).__name__)
    if shard.sp is not sp:
        fail(KEY, f"a Shard by the object that parallelize was given, {sp}", f"one by another object, {shard.sp}")
    if args:
        fail("arguments", "keywords only (model(**shard(batch, sp)))", f"{len(args)} by position")
    call = {name: x for name, x in kwargs.items() if x is not None}
    taken = _TAKEN if labels is None else (*_TAKEN, labels)
    taken = (*taken, _COUNT, SCORES) if labels == LANGUAGE.labels else taken
    for name in [name for name in call if name in _NOTHING and name not in taken]:
        if not any(call[name] is nothing or call[name] == nothing for nothing in _NOTHING[name]):
            fail(name, "nothing beside a shard" if not _NOTHING[name] else repr(_NOTHING[name][0]), repr(call[name]))
        del call[name]
    unknown = [name for name in call if name not in taken]
    if unknown:
        fail("arguments", f"only {', '.join(taken)} beside {KEY}", ", ".join(unknown))
    shape = shard.batch, shard.length
    for name in ("input_ids", "inputs_embeds", "shift_labels"):
        if name in call and tuple(call[name].shape[:2]) != shape:
            fail(name, f"the shape {list(shape)} of the shard", list(call[name].shape))
    if "position_ids" not in call:
        fail("position_ids", "those that shard returned", None)
    embedding = model.get_input_embeddings()
    noise = getattr(embedding, "neftune_noise_alpha", None)
    if noise is not None and embedding.training and "input_ids" in call:  # NEFTune's hook sees the shard alone
        expected = "None on a cut sequence (the noise would be that of a shorter one, and the same on every rank)"
        fail("neftune_noise_alpha", expected, noise)
    if SCORES in call and labels not in call:
        fail("labels", "labels, whose log-probabilities are asked for", None)
    if labels in call:
        causal.check_loss(model)
    if "shift_labels" in call:
        if SCORES not in call and shard.keep is not None and getattr(model, "z_loss_coefficient", None):
            expected = "no zeros with z_loss_coefficient, whose loss counts padding on one rank (leave the mask out)"
            fail("attention_mask", expected, "padding")
        if shard.counted is None and "num_items_in_batch" not in call:
            fail("shift_labels", "labels that shard made", "labels for a batch without labels")
    return call
