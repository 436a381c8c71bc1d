"""`parallelize`, which changes the forward of a layer, or of a model and its layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from flexsp.comm.group import SequenceParallel, count_failed_call, refuse_bitwise
from flexsp.exceptions import FlexspError, fail
from flexsp.integrations.fla.check import came_later, check, check_loss, layer_or_model
from flexsp.integrations.fla.functions import on_ranks
from flexsp.integrations.fla.mixers import FORWARDS, MIXERS, PARTS, qualified_name
from flexsp.integrations.transformers.batch import KEY
from flexsp.integrations.transformers.causal import (
    LANGUAGE,
    LATER,
    CausalModel,
    forward_on_shard,
    head_forward,
    take_shard,
)  # fmt: skip
from flexsp.integrations.transformers.check import class_of
from flexsp.integrations.transformers.forwards import is_replaced, replace_forward, with_globals
from flexsp.nn.norm import check_input

__all__ = ["parallelize"]

M = TypeVar("M", bound=nn.Module)
_CAUSAL = CausalModel(check_loss=check_loss, has_masks=False)


def parallelize(model: M, sp: SequenceParallel) -> M:
    """Lets a layer or a causal language model of flash-linear-attention run on sequences that are cut over ranks. In
    place.

    A model then takes what `shard` returns: ``model(**shard(batch, sp)).loss``. The mean of this loss over the ranks is
    the loss of the whole batch on the unmodified model, and gradients averaged over the ranks, as
    DistributedDataParallel and fully_shard do it, are that model's. With labels no ``logits`` are returned; without
    labels they are those of this rank's tokens. Calls without a shard run the unmodified forward on this rank alone:
    ``generate``, evaluation. In training mode, with gradients and more than one rank, they raise.

    A layer of ``fla.layers`` alone then takes this rank's tokens, ``layer(hidden_states)[0]`` of hidden_states
    [B, T_local, D] of any lengths from one token on, and gives what the whole sequence gives for them. ``cu_seqlens``
    are the boundaries [N + 1] of all documents, in tokens of the whole sequence. Gradients of its parameters are this
    rank's share; they add up over the ranks. It takes no cache and no mask.

    Only this object changes: its forward, and those of its layers, convolutions and rotary embeddings. Its class, its
    config, its parameters and what it saves stay as they are; so do all other models. Before or after
    ``fully_shard`` and ``get_peft_model`` (LoRA), before DistributedDataParallel. `restore` undoes it.

    Args:
        model: of a class in docs/flash-linear-attention.md, or a PeftModel around one.
        sp: from `flexsp.init_sequence_parallel`.

    Returns:
        ``model``.

    Raises:
        ValueError: all that cannot be cut over ranks in this model, with its path. Nothing was changed.
        NotAvailable: a class that is not known, or a release of flash-linear-attention that is too old.
    """
    if not isinstance(sp, SequenceParallel):
        fail("sp", "a SequenceParallel", type(sp).__name__)
    refuse_bitwise(sp, "parallelize")
    inner = layer_or_model(model)
    check(inner)
    mixers = [module for module in inner.modules() if qualified_name(module) in MIXERS]
    alone = inner in mixers
    run = _layer_forward if alone else _mixer_forward
    for module in mixers:
        for part in module.children():
            if qualified_name(part) in PARTS:
                replace_forward(part, PARTS[qualified_name(part)])
        replace_forward(module, functools.partial(run, _forward_over_ranks(module), sp), over_ranks=alone)
    if not alone:
        later = functools.partial(came_later, len(mixers))
        replace_forward(inner.get_output_embeddings(), head_forward)
        replace_forward(inner, functools.partial(forward_on_shard, _CAUSAL, LANGUAGE, None, sp, later), sp=sp)
    return model


def _forward_over_ranks(module: nn.Module) -> Callable[..., Any]:
    kind = qualified_name(module)
    if kind in FORWARDS:
        return FORWARDS[kind]
    return with_globals(type(module).forward, MIXERS[kind](module))


def _check_parts(module: nn.Module) -> None:
    """A convolution that is not replaced would read this rank's tokens alone."""
    for name, part in module.named_children():
        if qualified_name(part) in PARTS and not is_replaced(part):
            raise FlexspError(f"{name} of {class_of(module).__name__} came {LATER}")


def _mixer_forward(
    over_ranks: Callable[..., Any], sp: SequenceParallel, original: Callable[..., Any], module: nn.Module, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """A layer in a model."""
    shard = take_shard(module, sp, kwargs)
    if shard is None:
        return original(module, *args, **kwargs)
    del kwargs[KEY]
    _check_parts(module)
    with shard.known_lengths(), on_ranks(sp, shard.cu_seqlens, shard.cu_seqlens_cpu):
        return over_ranks(module, *args, **kwargs)


def _layer_forward(
    over_ranks: Callable[..., Any], sp: SequenceParallel, original: Callable[..., Any], module: nn.Module,
    hidden_states: Tensor, cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """A layer alone, always over the ranks."""
    try:
        _check_call(hidden_states, sp, kwargs)
        _check_parts(module)
        with on_ranks(sp, cu_seqlens):
            return over_ranks(module, hidden_states)
    except Exception as error:
        count_failed_call(error, sp)  # the other ranks go on to the exchanges that come after it
        raise


def _check_call(hidden_states: Tensor, sp: SequenceParallel, others: dict[str, Any]) -> None:
    check_input("hidden_states", hidden_states, (None, None, None))
    if min(sp.lengths or [hidden_states.shape[1]]) < 1:  # which the layers' own code does not take
        got = f"{list(hidden_states.shape)}, lengths {sp.lengths}"
        fail("hidden_states", "at least one token of each row for every rank", got)
    for name, x in others.items():
        if x is not None and x is not False:
            expected = "nothing" if name in ("attention_mask", "past_key_values") else "False"
            fail(name, f"{expected} on a sequence that is cut over ranks", type(x).__name__)
