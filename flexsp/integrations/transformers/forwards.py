"""Forwards that are replaced on one object, and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

from torch import nn

from flexsp.exceptions import fail
from flexsp.nn.exactness import OVER_RANKS

__all__ = ["is_replaced", "replace_forward", "restore", "with_globals"]

M = TypeVar("M", bound=nn.Module)
_MARK = "_flexsp_parallelized"  # of a forward that `parallelize` made


def restore(model: M) -> M:
    """Undoes `parallelize`, in place.

    Raises:
        ValueError: the model is not parallelized.
    """
    changed = [module for module in model.modules() if is_replaced(module)] if isinstance(model, nn.Module) else []
    if not changed:
        fail("model", "a parallelized model", type(model).__name__)
    for module in changed:
        del module.__dict__["forward"]
    return model


def is_replaced(module: nn.Module) -> bool:
    return hasattr(vars(module).get("forward"), _MARK)


def replace_forward(module: nn.Module, run: Callable[..., Any], over_ranks: bool = False) -> None:
    """``run(original, module, *args, **kwargs)`` in place of the forward of this object. ``over_ranks``: each of its
    calls runs over ranks, whatever its arguments."""
    original = type(module).forward

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(original, self, *args, **kwargs)

    setattr(forward, _MARK, True)
    if over_ranks:
        setattr(forward, OVER_RANKS, True)
    module.forward = MethodType(forward, module)  # type: ignore[method-assign]


def with_globals(function: Callable[..., Any], names: Mapping[str, Any]) -> Callable[..., Any]:
    """The function with other globals of these names, and its decorators around it."""
    assert isinstance(function, FunctionType)
    inner = getattr(function, "__wrapped__", None)
    space, cells = function.__globals__, function.__closure__ or ()
    if inner is None:
        space = {**space, **names}
    else:
        changed = with_globals(inner, names)
        cells = tuple(CellType(changed) if cell.cell_contents is inner else cell for cell in cells)
    made = FunctionType(function.__code__, space, function.__name__, function.__defaults__, cells or None)
    made.__kwdefaults__ = function.__kwdefaults__
    return made
