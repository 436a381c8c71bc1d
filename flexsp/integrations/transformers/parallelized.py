"""`parallelize`, which changes the forward of a model's mixers and of the model itself."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from flexsp.comm.group import SequenceParallel, refuse_bitwise
from flexsp.exceptions import fail
from flexsp.integrations.transformers.batch import KEY
from flexsp.integrations.transformers.causal import LANGUAGE, forward_on_shard, head_forward, take_shard
from flexsp.integrations.transformers.check import (
    came_later,
    check_model,
    known_model,
    replaced_by,
    seam_of,
    task_of,
)  # fmt: skip
from flexsp.integrations.transformers.forwards import replace_forward, with_globals
from flexsp.integrations.transformers.heads import NONE
from flexsp.integrations.transformers.running import on_shard
from flexsp.integrations.transformers.seams import Seam

__all__ = ["over_ranks", "parallelize"]

M = TypeVar("M", bound=nn.Module)


def parallelize(model: M, sp: SequenceParallel) -> M:
    """Lets a model of transformers run on sequences that are cut over ranks: a causal language model, a base model, or
    a head that classifies sequences or tokens. In place.

    Afterwards the model takes what `shard` returns: ``model(**shard(batch, sp)).loss``. The mean of this loss over the
    ranks is the loss of the whole batch on the unmodified model, and gradients averaged over the ranks, as
    DistributedDataParallel and fully_shard do it, are that model's. With labels no ``logits`` are returned; without
    labels they are those of this rank's tokens. ``hidden_states`` are of these tokens, attention weights are not to be
    had, and ``aux_loss`` follows the same rule as ``loss``.

    A base model returns the hidden states of this rank's tokens and has no loss. A head for sequences returns the
    logits of all rows and the whole loss, one for tokens the logits of this rank's tokens.

    Calls without a shard run the unmodified forward on this rank alone: ``generate``, evaluation. In training mode,
    with gradients and more than one rank, they raise.

    Only this object changes: its forward, and those of its recurrent and softmax layers. Its class, its
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
    refuse_bitwise(sp, "parallelize")
    inner = known_model(model)
    check_model(inner)
    seam = seam_of(inner)
    mixers = [module for module in inner.modules() if replaced_by(module, seam) is not None]
    for module in mixers:
        replace_forward(module, functools.partial(_layer_forward, over_ranks(module, seam), sp))
    later = functools.partial(came_later, seam, len(mixers))
    task = task_of(inner)
    if task is LANGUAGE:
        replace_forward(inner.get_output_embeddings(), head_forward)
    base = _layers_of(inner, seam) if task is NONE else None
    replace_forward(inner, functools.partial(forward_on_shard, seam, task, base, sp, later), sp=sp)
    return model


def _layers_of(base: nn.Module, seam: Seam) -> Callable[..., Any]:
    return type(base).forward if replaced_by(base, seam) is None else over_ranks(base, seam)


def over_ranks(module: nn.Module, seam: Seam) -> Callable[..., Any]:
    """What a layer runs on a shard: a forward in place of its own, or its own with other functions in it. Its innermost
    function says on which shard it runs, since gradient checkpointing is one of its decorators and calls that again."""
    found = replaced_by(module, seam)
    if callable(found):
        return _entering(found, keeps=True)
    return with_globals(type(module).forward, found or {}, functools.partial(_entering, keeps=_takes_more(module)))


def _takes_more(module: nn.Module) -> bool:
    """Whether a layer's forward takes keyword arguments that it does not name."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _entering(run: Callable[..., Any], keeps: bool) -> Callable[..., Any]:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        shard = kwargs[KEY] if keeps else kwargs.pop(KEY)
        with on_shard(shard):
            return run(module, *args, **kwargs)

    return forward


def _layer_forward(
    on_ranks: Callable[..., Any], sp: SequenceParallel, original: Callable[..., Any], module: nn.Module, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """A layer's forward: its own, or where it is handed a shard the one over ranks."""
    shard = take_shard(module, sp, kwargs)
    if shard is None:
        return original(module, *args, **kwargs)
    return on_ranks(module, *args, **{**kwargs, KEY: shard})
