"""What `parallelize` looks for before it changes anything: all that could make a layer or a model wrong on a cut
sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from flexsp.exceptions import NotAvailable, fail
from flexsp.integrations.fla.mixers import LOCAL, MIXERS, MODELS, PARTS, UNAVAILABLE, qualified_name
from flexsp.integrations.transformers.check import (
    check_release,
    class_of,
    is_common,
    mixer_problems,
    raise_problems,
    without_adapters,
)  # fmt: skip

__all__ = ["check", "check_loss", "layer_or_model"]

_OLDEST, _NEWEST = (0, 6), (0, 6)  # releases of flash-linear-attention that the tests have run with


def layer_or_model(model: Any) -> Any:
    """The layer or the model itself, or the one inside a PeftModel.

    Raises:
        ValueError: something else.
        NotAvailable: a class that is not known.
    """
    if not isinstance(model, nn.Module):
        fail("model", "a layer or a causal language model of flash-linear-attention", type(model).__name__)
    inner = without_adapters(model)
    if qualified_name(inner) in MODELS or qualified_name(inner) in MIXERS:
        return inner
    known = ", ".join(name.rpartition(".")[2] for name in sorted(MODELS) + sorted(MIXERS))
    unavailable = {class_of(part).__name__: UNAVAILABLE.get(qualified_name(part)) for part in inner.modules()}
    reasons = "".join(f". {name} {reason}" for name, reason in unavailable.items() if reason)
    raise NotAvailable(
        f"{class_of(inner).__name__} is not among the models and layers that can be cut over ranks: {known}{reasons}"
    )


def check(inner: nn.Module) -> None:
    """Raises where `parallelize` must not go on.

    Raises:
        ValueError: everything that is in the way, with its path.
        NotAvailable: the release of flash-linear-attention is too old.
    """
    import fla

    check_release("flash-linear-attention", fla.__version__, _OLDEST, _NEWEST)
    raise_problems(inner, _problems(inner))


def check_loss(model: Any) -> None:
    for name, expected, got in _loss_refusals(model):
        fail(name, expected, got)


def _loss_refusals(model: Any) -> Iterator[tuple[str, str, str]]:
    if getattr(model, "criterion", None) is not None:
        yield "model.criterion", "None (cross entropy, which flexsp computes)", repr(model.criterion)
    if getattr(model.config, "use_l2warp", False):
        yield "model.config.use_l2warp", "False (what it adds to gradients is not available)", "True"


def _problems(inner: Any) -> Iterator[tuple[str, str]]:
    """(path, what is in the way)"""
    mixers = {name for name, module in inner.named_modules() if qualified_name(module) in MIXERS}
    for name, module in inner.named_modules():
        kind, inside = qualified_name(module), name.rpartition(".")[0] in mixers and name not in mixers
        if "forward" in vars(module) and (name in mixers or inside or not name):
            yield name, "its forward was replaced already (by parallelize or by a hook)"
        if name in mixers:
            yield from ((name, problem) for problem in mixer_problems(module, MIXERS[kind](module)))
        elif inside and kind in PARTS:
            yield from ((name, problem) for problem in _part_problems(module))
        elif kind not in LOCAL and not is_common(module) and not (type(module) is nn.Conv1d and inside):
            yield name, f"{class_of(module).__name__} {UNAVAILABLE.get(kind, 'is not known')}"
    if qualified_name(inner) in MODELS:
        for name, expected, got in _loss_refusals(inner):
            yield "", f"{name}: expected {expected}, got {got}"


def _part_problems(module: Any) -> Iterator[str]:
    if getattr(module, "scale_base", None) is not None or getattr(module, "interleaved", False):
        yield "a rotary embedding with scale_base or interleaved is not available"
