"""Replaces the forward of one module object, and puts it back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any, NoReturn, TypeVar

from torch import nn

from flexsp.comm.group import SequenceParallel
from flexsp.exceptions import FlexspError, fail
from flexsp.nn.exactness import OVER_RANKS

__all__ = ["is_replaced", "ranks_of_model", "replace_forward", "restore", "with_globals", "wrap_forward"]

M = TypeVar("M", bound=nn.Module)
_MARK = "_flexsp_parallelized"  # of a forward that `parallelize` made, and of its module


class _Kept:
    """An attribute of a parallelized module that cannot be pickled, since the loaded module would run on each rank's
    tokens alone. A model's says over which ranks it runs."""

    def __init__(self, sp: SequenceParallel | None) -> None:
        self.sp = sp

    def __reduce__(self) -> NoReturn:
        raise FlexspError(
            "a parallelized model cannot be pickled, since what is loaded would run on each rank's tokens alone: save "
            "model.state_dict(), call model.save_pretrained, or restore the model first"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return self


def restore(model: M) -> M:
    """Undoes `parallelize`, in place.

    Raises:
        ValueError: the model is not parallelized, or a forward of it was replaced once more since then.
    """
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    changed = {name: module for name, module in modules if _MARK in vars(module)}
    if not changed:
        fail("model", "a parallelized model", type(model).__name__)
    others = [name or "the model" for name, module in changed.items() if not is_replaced(module)]
    if others:
        undo = "undo that first: accelerator.unwrap_model(model, keep_fp32_wrapper=False) does it for accelerate"
        fail("model", "the forwards that parallelize made", f"others of {', '.join(others)} ({undo})")
    for module in changed.values():
        del module.__dict__["forward"], module.__dict__[_MARK]
    return model


def is_replaced(module: nn.Module) -> bool:
    return hasattr(vars(module).get("forward"), _MARK)


def ranks_of_model(model: nn.Module) -> SequenceParallel | None:
    """The ranks that this model was parallelized over; None if it was not, or if its forward was replaced since."""
    mark = vars(model).get(_MARK)
    return mark.sp if isinstance(mark, _Kept) and is_replaced(model) else None


def replace_forward(
    module: nn.Module, run: Callable[..., Any], over_ranks: bool = False, sp: SequenceParallel | None = None
) -> None:
    """Lets calls of this module run ``run(original, module, *args, **kwargs)``.

    Args:
        over_ranks: every call runs over ranks, whatever its arguments.
        sp: the ranks, where the module is a whole model.
    """
    original = type(module).forward

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(original, self, *args, **kwargs)

    # accelerate follows __wrapped__ to remove its own wrappers, and must stop here. Trainers read the signature.
    del forward.__wrapped__  # type: ignore[attr-defined]
    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    setattr(forward, _MARK, True)
    if over_ranks:
        setattr(forward, OVER_RANKS, True)
    module.forward = MethodType(forward, module)  # type: ignore[method-assign]
    setattr(module, _MARK, _Kept(sp))


def wrap_forward(module: nn.Module, run: Callable[..., Any]) -> None:
    """Lets calls of a parallelized module run ``run(what they ran, *args, **kwargs)``, until `restore`."""
    made = functools.partial(run, module.forward)
    made.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
    setattr(made, _MARK, True)
    module.forward = made


def with_globals(
    function: Callable[..., Any], names: Mapping[str, Any],
    around: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """A copy of the function, inside the same decorators, that finds ``names`` instead of its own globals.

    Args:
        around: takes the innermost function's copy, and returns what the decorators call in its place.
    """
    assert isinstance(function, FunctionType)
    inner = getattr(function, "__wrapped__", None)
    space, cells = function.__globals__, function.__closure__ or ()
    if inner is None:
        space = {**space, **names}
        space.pop("__name__", None)  # with it torch.compile would look globals up in the original module
    else:
        changed = with_globals(inner, names, around)
        cells = tuple(CellType(changed) if cell.cell_contents is inner else cell for cell in cells)
    made = FunctionType(function.__code__, space, function.__name__, function.__defaults__, cells or None)
    made.__kwdefaults__, made.__module__ = function.__kwdefaults__, function.__module__
    return made if around is None or inner is not None else around(made)
