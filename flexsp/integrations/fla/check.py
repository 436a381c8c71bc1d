"""What `parallelize` checks before it changes a layer or model: everything that could make it wrong on a cut
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
    mixers_later,
    not_known,
    raise_problems,
    without_adapters,
)  # fmt: skip
from flexsp.ops._validate import MAX_HEAD_DIM

__all__ = ["came_later", "check", "check_loss", "layer_or_model"]

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
    """Checks a layer or model.

    Raises:
        ValueError: it cannot be cut over ranks. The message lists all reasons, each with a path.
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
    """(path, problem) of all that cannot be cut over ranks."""
    for name, module, kind, inside in _with_places(inner):
        if "forward" in vars(module) and (kind in MIXERS or inside or not name):
            yield name, "its forward was replaced already (by parallelize or by a hook)"
        if kind in MIXERS:
            problems = [*mixer_problems(module, MIXERS[kind](module)), *_feature_problems(module)]
            yield from ((name, problem) for problem in problems)
        elif kind in PARTS:
            yield from ((name, problem) for problem in _part_problems(module))
    yield from _unknown(inner)
    if qualified_name(inner) in MODELS:
        for name, expected, got in _loss_refusals(inner):
            yield "", f"{name}: expected {expected}, got {got}"


def _with_places(inner: nn.Module) -> Iterator[tuple[str, nn.Module, str, bool]]:
    """Every module: its path, itself, its class, and whether a mixer holds it as a part."""
    kinds = {name: qualified_name(module) for name, module in inner.named_modules()}
    for name, module in inner.named_modules():
        inside = kinds[name] not in MIXERS and bool(name) and kinds.get(name.rpartition(".")[0]) in MIXERS
        yield name, module, kinds[name], inside


def _unknown(inner: nn.Module) -> Iterator[tuple[str, str]]:
    """(path, problem) of modules that are not known to treat tokens one by one."""
    for name, module, kind, inside in _with_places(inner):
        part = inside and (kind in PARTS or type(module) is nn.Conv1d)
        if not part and kind not in MIXERS and kind not in LOCAL and not is_common(module):
            yield name, f"{class_of(module).__name__} {UNAVAILABLE[kind]}" if kind in UNAVAILABLE else not_known(module)


def came_later(mixers: int, model: nn.Module) -> Iterator[str]:
    """What was added to a model after `parallelize` replaced the forwards of ``mixers`` layers. It would run on this
    rank's tokens alone."""
    yield from (f"{name} ({problem}) came" for name, problem in _unknown(model))
    yield from mixers_later(model, mixers, lambda module: qualified_name(module) in MIXERS)


def _feature_problems(module: Any) -> Iterator[str]:
    features = getattr(module, "feature_map_q", None)
    times = {"HedgehogFeatureMap": 2, "DPFPFeatureMap": 2 * getattr(features, "nu", 0)}.get(type(features).__name__, 1)
    if times > 1 and module.head_k_dim * times > MAX_HEAD_DIM:
        size = module.head_k_dim * times
        yield f"its feature map makes keys of {size}, and heads of more than {MAX_HEAD_DIM} are not available"


def _part_problems(module: Any) -> Iterator[str]:
    if getattr(module, "scale_base", None) is not None or getattr(module, "interleaved", False):
        yield "a rotary embedding with scale_base or interleaved is not available"
