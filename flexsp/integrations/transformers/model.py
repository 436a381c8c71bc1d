"""`parallelize`, which changes the forward of a model's mixers and of the model itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from flexsp.comm.group import SequenceParallel
from flexsp.exceptions import fail
from flexsp.integrations.transformers.causal import forward_on_shard, head_forward, take_shard
from flexsp.integrations.transformers.check import (
    came_later,
    causal_model,
    check_model,
    replaced_names,
    seam_of,
)  # fmt: skip
from flexsp.integrations.transformers.forwards import replace_forward, with_globals

__all__ = ["parallelize"]

M = TypeVar("M", bound=nn.Module)


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
    seam = seam_of(inner)
    replaced = {module: replaced_names(module, seam) for module in inner.modules()}
    mixers = {module: names for module, names in replaced.items() if names is not None}
    for module, names in mixers.items():
        replace_forward(module, functools.partial(_mixer_forward, with_globals(type(module).forward, names), sp))
    later = functools.partial(came_later, seam, len(mixers))
    replace_forward(inner.get_output_embeddings(), head_forward)
    replace_forward(inner, functools.partial(forward_on_shard, seam, sp, later))
    return model


def _mixer_forward(
    over_ranks: Callable[..., Any], sp: SequenceParallel, original: Callable[..., Any], module: nn.Module, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """The mixer's own forward, with the functions it calls replaced where it is handed a shard."""
    on_ranks = take_shard(module, sp, kwargs) is not None
    return over_ranks(module, *args, **kwargs) if on_ranks else original(module, *args, **kwargs)
