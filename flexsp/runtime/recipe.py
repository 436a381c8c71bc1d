"""Recipes of calls: what an op did with its tensors, noted once, is done again for calls that look alike.

An op checks its arguments, works out how they are cut, and calls a few functions of tensors, which are marked as
`step`. While a call is noted, each of them leaves what it was called with. If the arguments of every step are the op's
own tensors, outputs of earlier steps, or values of types that are known to hold no tensor, and what the op returns is
made of these, then the steps are all that calls alike do with tensors, and a `Recipe` of them takes the place of the
op. Any other operation on tensors in between leaves a tensor that no step made, and then there is no recipe. Only what
changes a tensor in place would not be seen: ops do so nowhere but in steps.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["Recipe", "noted", "noting", "step"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Here(threading.local):
    notes: _Notes | None = None


_here = _Here()


_Get = Callable[[list[Any]], Any]
"""Takes an argument from the tensors of a call, with the outputs of its steps behind them."""
_VALUES = (type(None), bool, int, float, str, torch.dtype, torch.device)


class _Unknown(Exception):
    """A tensor that no step made, or something that may hold one."""


class _Notes:
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.seen = [*tensors]  # kept alive, so that no other tensor gets their ids
        self.places = {id(x): i for i, x in enumerate(tensors)}
        self.steps: list[tuple[Callable[..., Any], list[Any], list[tuple[int, _Get]]]] = []
        self.complete = True

    def add(self, fn: Callable[..., Any], args: Sequence[Any], made: Any) -> None:
        outputs = _outputs(made)
        try:
            found = [self.getter(x) for x in args]
        except _Unknown:
            self.complete = False
        if not all([x is None or isinstance(x, torch.Tensor) for x in outputs]):
            self.complete = False  # numbers may be made of a tensor's values
        if not self.complete:
            return
        values = [x if get is None else None for x, get in zip(args, found, strict=True)]
        self.steps.append((fn, values, [(i, get) for i, get in enumerate(found) if get is not None]))
        for x in outputs:
            self.places[id(x)] = len(self.seen)
            self.seen.append(x)

    def getter(self, x: Any) -> _Get | None:
        """What takes `x` from the tensors; None for a value without tensors."""
        if isinstance(x, torch.Tensor):
            if id(x) not in self.places:
                raise _Unknown
            return operator.itemgetter(self.places[id(x)])
        if isinstance(x, _VALUES) or getattr(type(x), "constant_in_recipes", False):
            return None
        if not isinstance(x, (list, tuple)):
            raise _Unknown
        parts = [self.getter(y) for y in x]
        if all(get is None for get in parts):
            return None
        make = getattr(type(x), "_make", type(x))
        each = [(y if get is None else None, get) for y, get in zip(x, parts, strict=True)]  # which holds no tensor
        return lambda tensors: make([y if get is None else get(tensors) for y, get in each])


class Recipe:
    """The steps of a call, and what it returns."""

    def __init__(self, notes: _Notes, returned: _Get) -> None:
        self._steps, self._returned = notes.steps, returned

    def __call__(self, tensors: list[Any]) -> Any:
        """What the call returns for these tensors. The list is added to."""
        for fn, values, getters in self._steps:
            args = values.copy()
            for i, get in getters:
                args[i] = get(tensors)
            tensors += _outputs(fn(*args))
        return self._returned(tensors)


def _outputs(made: Any) -> list[Any]:
    """What a step returned, one by one."""
    if not isinstance(made, tuple):
        return [made]
    return [y for x in made for y in (_outputs(x) if isinstance(x, tuple) else (x,))]


def noting() -> bool:
    """Whether a call is being noted in this thread."""
    return _here.notes is not None


def noted(call: Callable[[], _R], tensors: Sequence[torch.Tensor]) -> tuple[_R, Recipe | None]:
    """What `call` returns, and the recipe of it, None where there is none. `tensors` are all that it is given, each
    once: else nothing would tell which of two a step reads."""
    notes = _here.notes = _Notes(tensors)
    try:
        made = call()
    finally:
        _here.notes = None
    if not notes.complete or not notes.steps:
        return made, None
    try:
        returned = notes.getter(made)
    except _Unknown:
        return made, None
    return made, None if returned is None else Recipe(notes, returned)


def step(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator of a function that recipes may hold. What it does depends on its arguments alone and on modes, as
    operations of PyTorch do. It returns a tensor, None, or a tuple of these.

    Its arguments have no names, and may be tensors in tuples and lists, numbers, texts, dtypes, devices, and objects of
    classes with an attribute `constant_in_recipes`: a recipe hands them over as they are. A call with others is made,
    and has no recipe.
    """

    @functools.wraps(fn)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        notes = None if torch.compiler.is_compiling() else _here.notes
        if notes is None:
            return fn(*args, **kwargs)
        _here.notes = None  # what it calls is part of it
        try:
            made = fn(*args, **kwargs)
        finally:
            _here.notes = notes
        notes.add(fn, [*args, *([kwargs] if kwargs else [])], made)
        return made

    return run
