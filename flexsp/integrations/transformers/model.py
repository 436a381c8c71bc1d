"""`parallelize`, which changes the forward of a model's mixers and of the model itself, and `restore`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flexsp.comm.group import SequenceParallel, abandon
from flexsp.exceptions import FlexspError, fail
from flexsp.integrations.transformers.batch import KEY, Shard
from flexsp.integrations.transformers.check import (
    causal_model,
    check_loss_function,
    check_model,
    replaced_names,
    seam_of,
)  # fmt: skip
from flexsp.integrations.transformers.loss import language_loss, router_loss
from flexsp.integrations.transformers.seams import Head

__all__ = ["parallelize", "restore"]

M = TypeVar("M", bound=nn.Module)
_MARK = "_flexsp_parallelized"  # of a forward that `parallelize` made
_LATER = "after parallelize: restore the model and parallelize it again"


class _Inside(threading.local):
    """Whether a model's forward runs on a shard at the moment, and how many mixers it has handed it to."""

    shard: bool = False
    reached: int = 0


_inside = _Inside()


def parallelize(model: M, sp: SequenceParallel) -> M:
    """Lets a causal language model of transformers run on sequences that are cut over ranks. In place.

    Afterwards the model takes what `shard` returns: ``model(**shard(batch, sp)).loss``. The mean of this loss over the
    ranks is the loss of the whole batch on the unmodified model, and gradients averaged over the ranks, as
    DistributedDataParallel and fully_shard do it, are that model's. With labels no ``logits`` are returned; without
    labels they are those of this rank's tokens. ``hidden_states`` are of these tokens, attention weights are not to be
    had, and ``aux_loss`` follows the same rule as ``loss``.

    Calls without a shard run the unmodified forward on this rank alone: ``generate``, evaluation. In training mode,
    with gradients and more than one rank, they raise.

    Only this object changes: its forward, and those of its linear-attention and softmax layers. Its class, its
    config, its parameters and what it saves stay as they are; so do all other models. Before or after
    ``fully_shard`` and ``get_peft_model`` (LoRA), before DistributedDataParallel. `restore` undoes it.

    Args:
        model: of a class in docs/transformers.md, or a PeftModel around one.
        sp: from `flexsp.init_sequence_parallel`.

    Returns:
        ``model``.

    Raises:
        ValueError: all that cannot be cut over ranks in this model, with its path. Nothing was changed.
        NotAvailable: a class of models that is not known, or a release of transformers that is too old.
    """
    if not isinstance(sp, SequenceParallel):
        fail("sp", "a SequenceParallel", type(sp).__name__)
    inner = causal_model(model)
    check_model(inner)
    replaced = {module: replaced_names(module, seam_of(inner)) for module in inner.modules()}
    mixers = {module: names for module, names in replaced.items() if names is not None}
    for module, names in mixers.items():
        _replace_forward(module, functools.partial(_mixer_forward, _with_globals(type(module).forward, names), sp))
    _replace_forward(inner.get_output_embeddings(), _head_forward)
    _replace_forward(inner, functools.partial(_model_forward, sp, len(mixers)))
    return model


def restore(model: M) -> M:
    """Undoes `parallelize`, in place.

    Raises:
        ValueError: the model is not parallelized.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    changed = [module for module in modules if hasattr(vars(module).get("forward"), _MARK)]
    if not changed:
        fail("model", "a parallelized model", type(model).__name__)
    for module in changed:
        del module.__dict__["forward"]
    return model


def _replace_forward(module: nn.Module, run: Callable[..., Any]) -> None:
    """``run(original, module, *args, **kwargs)`` in place of the forward of this object."""
    original = type(module).forward

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(original, self, *args, **kwargs)

    setattr(forward, _MARK, True)
    module.forward = MethodType(forward, module)  # type: ignore[method-assign]


def _with_globals(function: Callable[..., Any], names: Mapping[str, Any]) -> Callable[..., Any]:
    """The function with other globals of these names, and its decorators around it."""
    assert isinstance(function, FunctionType)
    inner = getattr(function, "__wrapped__", None)
    space, cells = function.__globals__, function.__closure__ or ()
    if inner is None:
        space = {**space, **names}
    else:
        changed = _with_globals(inner, names)
        cells = tuple(CellType(changed) if cell.cell_contents is inner else cell for cell in cells)
    made = FunctionType(function.__code__, space, function.__name__, function.__defaults__, cells or None)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _mixer_forward(
    over_ranks: Callable[..., Any], sp: SequenceParallel, original: Callable[..., Any], module: nn.Module, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """The mixer's own forward, with the functions it calls replaced where it is handed a shard."""
    if kwargs.get(KEY) is not None:
        _inside.reached += 1
        return over_ranks(module, *args, **kwargs)
    if _inside.shard:
        raise FlexspError(f"{type(module).__name__} was not handed {KEY} by the layers around it")
    _refuse_training(module, sp)
    return original(module, *args, **kwargs)


def _refuse_training(module: nn.Module, sp: SequenceParallel) -> None:
    if sp.world_size > 1 and module.training and torch.is_grad_enabled():
        fail(
            KEY, f"what flexsp.integrations.transformers.shard returns (the model is parallelized over {sp.world_size} "
            "ranks; without it, it runs on this rank alone, in evaluation mode or without gradients)", None,
        )  # fmt: skip


def _head_forward(
    original: Callable[..., Any], head: nn.Module, *args: Any, loss_of: Callable[..., Any] | None = None, **kwargs: Any
) -> Any:
    """The head's own forward or, with `loss_of`, a loss that calls it for blocks of tokens. Hooks of the head, such as
    those by which fully_shard gathers its parameters, run once for all blocks, on every rank of a mesh."""
    forward = functools.partial(original, head, **kwargs)
    return forward(*args) if loss_of is None else loss_of(forward, *args)


def _model_forward(
    sp: SequenceParallel, mixers: int, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    shard = kwargs.pop(KEY, None)
    if shard is None:
        _refuse_training(model, sp)
        return original(model, *args, **kwargs)
    try:
        return _run(model, mixers, shard, _arguments(model, sp, shard, args, kwargs))
    except Exception as error:
        abandon(error, sp)  # the other ranks go on to the exchanges that come after it
        raise


def _run(model: Any, mixers: int, shard: Shard, call: dict[str, Any]) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

    seam, config, head = seam_of(model), model.config, model.get_output_embeddings()
    if not hasattr(vars(head).get("forward"), _MARK):
        raise FlexspError(f"{type(head).__name__} took the place of the model's head {_LATER}")
    labels, counted = call.pop("shift_labels", None), call.pop("num_items_in_batch", shard.counted)
    as_dict = call.pop("return_dict", config.return_dict)
    balanced = seam.router_loss and call.setdefault("output_router_logits", config.output_router_logits)
    outputs = _run_layers(model, mixers, shard, call)
    found: dict[str, Any] = {name: outputs.get(name) for name in ("hidden_states", "router_logits")}
    if labels is None:
        found["logits"] = seam.logits(model, head, outputs.last_hidden_state)
    else:
        found["loss"] = head(
            outputs.last_hidden_state, loss_of=functools.partial(_loss_of, model, labels, counted, shard)
        )
    if balanced and found["router_logits"]:
        found["aux_loss"] = router_loss(found["router_logits"], model.num_experts, model.num_experts_per_tok, shard)
        if labels is not None:
            found["loss"] = found["loss"] + model.router_aux_loss_coef * found["aux_loss"]
    kind = CausalLMOutputWithPast if found["router_logits"] is None else MoeCausalLMOutputWithPast
    made = kind(**{name: x for name, x in found.items() if x is not None})
    return made if as_dict else made.to_tuple()


def _run_layers(model: Any, mixers: int, shard: Shard, call: dict[str, Any]) -> Any:
    """What the model without its head returns; all of its mixers must have had the shard."""
    if seam_of(model).has_masks:
        call["attention_mask"] = {"full_attention": None, "linear_attention": None}
    else:
        del call["position_ids"]
    _inside.shard, _inside.reached = True, 0
    try:
        outputs = model.base_model(**call, use_cache=False, return_dict=True, **{KEY: shard})
    finally:
        _inside.shard = False
    if _inside.reached != mixers:
        raise FlexspError(f"{mixers - _inside.reached} of {mixers} mixers were replaced {_LATER}")
    return outputs


def _loss_of(
    model: Any, labels: Tensor, counted: int | float | Tensor, shard: Shard, head: Head, hidden: Tensor
) -> Tensor:
    logits_of, z_loss = functools.partial(seam_of(model).logits, model, head), getattr(model, "z_loss_coefficient", 0.0)
    return language_loss(logits_of, hidden, labels, model.config.vocab_size, shard, counted, z_loss)


# Arguments of a call that `shard` does not make, with the values that mean nothing.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "attention_mask": (), "labels": (), "cache": (), "past_key_values": (), "cache_params": (), "use_cache": (False,),
    "output_attentions": (False,), "logits_to_keep": (0,), "task_ids": (),
}  # fmt: skip
_TAKEN = (
    "input_ids", "inputs_embeds", "position_ids", "shift_labels", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "return_dict",
)  # fmt: skip


def _arguments(
    model: Any, sp: SequenceParallel, shard: Shard, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Checked, without those of None."""
    if not isinstance(shard, Shard) or shard.sp is not sp:
        fail(KEY, f"a Shard of {sp}", repr(shard.sp) if isinstance(shard, Shard) else type(shard).__name__)
    if args:
        fail("arguments", "keywords only (model(**shard(batch, sp)))", f"{len(args)} by position")
    call = {name: x for name, x in kwargs.items() if x is not None}
    for name in [name for name in call if name in _NOTHING]:
        if not any(call[name] is nothing or call[name] == nothing for nothing in _NOTHING[name]):
            fail(name, "nothing beside a shard" if not _NOTHING[name] else repr(_NOTHING[name][0]), repr(call[name]))
        del call[name]
    unknown = [name for name in call if name not in _TAKEN]
    if unknown:
        fail("arguments", f"only {', '.join(_TAKEN)} beside {KEY}", ", ".join(unknown))
    shape = shard.batch, shard.length
    for name in ("input_ids", "inputs_embeds", "shift_labels"):
        if name in call and tuple(call[name].shape[:2]) != shape:
            fail(name, f"the shape {list(shape)} of the shard", list(call[name].shape))
    if "position_ids" not in call:
        fail("position_ids", "those that shard returned", None)
    if "shift_labels" in call:
        check_loss_function(model)
        if shard.counted is None and "num_items_in_batch" not in call:
            fail("shift_labels", "labels that shard made", "labels for a batch without labels")
    return call
