"""What code calls, read from bytecode, closures and attributes. It is not run, but what the user's code imports is.

Why the code is read: a model is wrapped before its first input is known, and what passes here unseen may be silently
wrong on every rank but the first. Two simpler rules were tried. A trace of torch.fx, which needs no input either, ends
at the first op of flexsp, whose checks want tensors, and at the first branch on a size, and follows one side of the
others: what comes after is not seen. The names in a method's code alone take ``self.conv1d(x)`` for the function
conv1d of torch, and say nothing of what stands behind a decorator, a partial, a table, a property or a helper object.
`flexsp.verify` runs the model, but needs an input that its user gives.
"""

from __future__ import annotations

import dis
import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

__all__ = ["Reader", "mentions"]

_WRAPPERS = (staticmethod, classmethod, property, functools.partial, functools.partialmethod, functools.cached_property)
_CONTAINERS = (list, tuple, set, frozenset, dict)
_LONGEST = 1000  # longer containers hold data
_KEEPS = frozenset({"CACHE", "COPY", "EXTENDED_ARG", "NOP", "POP_TOP", "PUSH_NULL", "ROT_TWO", "ROT_THREE", "SWAP"})


class Reader:
    """Walks from one object to all that calling it may call.

    ``enters`` says of a module's name whether functions defined there are read, ``owns`` whether objects and imports
    are too. ``codes`` is the code read so far.
    """

    def __init__(self, enters: Callable[[str], bool], owns: Callable[[str], bool]) -> None:
        self.enters, self.owns = enters, owns
        self.codes: list[CodeType] = []

    def reached(self, start: Any, origin: str) -> Iterator[tuple[str, Any]]:
        """(name of the module whose code holds it, object): functions, classes, callable objects and modules."""
        seen: dict[int, Any] = {}
        waiting = [(origin, start)]
        while waiting:
            holder, value = waiting.pop()
            if id(value) in seen or not _matters(value):
                continue
            seen[id(value)] = value  # kept, so that no other object gets its id
            if not isinstance(value, _CONTAINERS):
                yield holder, value
            if isinstance(value, FunctionType):
                holder = value.__module__ or ""
            waiting.extend((holder, inner) for inner in self._inside(value))

    def _inside(self, value: Any) -> Iterator[Any]:
        if isinstance(value, FunctionType):
            yield from self._in_function(value)
        elif isinstance(value, dict):
            yield from list(itertools.islice(value.values(), _LONGEST))
        elif isinstance(value, _CONTAINERS):
            yield from list(itertools.islice(value, _LONGEST))
        elif isinstance(value, (functools.partial, functools.partialmethod)):
            yield from (value.func, value.args, value.keywords)
        elif isinstance(value, MethodType):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, property):
            yield value.fget
        elif isinstance(value, functools.cached_property):
            yield value.func
        elif isinstance(value, (staticmethod, classmethod)):
            yield value.__func__
        elif isinstance(value, type):
            for cls in value.__mro__ if not issubclass(value, nn.Module) else ():
                if self.owns(cls.__module__):
                    yield from list(vars(cls).values())
        elif not isinstance(value, nn.Module):
            yield from self._in_object(value)

    def _in_object(self, value: Any) -> Iterator[Any]:
        """Of the user's objects, methods and attributes; of others, what they wrap and what calling them runs."""
        if self.owns(type(value).__module__):
            yield type(value)
            yield from list(getattr(value, "__dict__", {}).values())
        else:
            held = [getattr(value, "__wrapped__", None), *getattr(value, "__dict__", {}).values()]
            yield from [x for x in held if isinstance(x, (FunctionType, MethodType, *_WRAPPERS))]
            yield getattr(type(value), "__call__", None)  # noqa: B004

    def _in_function(self, function: FunctionType) -> Iterator[Any]:
        names = function.__code__.co_freevars
        cells: dict[str, list[Any]] = {}
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            try:
                cells[name] = [cell.cell_contents]
            except ValueError:  # not yet set
                continue
        for contents in cells.values():
            yield from contents
        yield getattr(function, "__wrapped__", None)
        if self.enters(function.__globals__.get("__name__", "")):
            yield from (function.__defaults__, function.__kwdefaults__)
            yield from self._loaded(function.__code__, function.__globals__, cells)

    def _loaded(self, code: CodeType, names: dict[str, Any], outer: Mapping[str, list[Any]]) -> Iterator[Any]:
        """What `code` loads by name, such as F.conv1d; not attributes of its arguments (self.conv1d)."""
        self.codes.append(code)
        owned = self.owns(names.get("__name__", ""))
        bound: dict[str, list[Any]] = {}
        values: list[Any] = []
        source: list[Any] = []
        for instruction in dis.get_instructions(code):
            op, name = instruction.opname, instruction.argval
            if op == "IMPORT_NAME":
                values = source = _imported(name, names, owned)
            elif op == "IMPORT_FROM":
                values = _attributes([*values, *source], name)
            elif op.startswith("STORE_") and op != "STORE_ATTR":
                first, *rest = name if isinstance(name, tuple) else (name,)
                if isinstance(first, str):
                    bound[first] = bound.get(first, []) + values
                values = bound.get(rest[0], []) if rest and "LOAD" in op else []
            elif op in ("LOAD_ATTR", "LOAD_METHOD"):
                values = _attributes(values, name)
            elif op.startswith("LOAD_") and op != "LOAD_CONST":
                last = name[-1] if isinstance(name, tuple) else name
                values = _looked_up(op, last, names, outer, bound)
            elif op not in _KEEPS:
                values = []
            yield from values
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from self._loaded(constant, names, {**outer, **bound})


def mentions(codes: list[CodeType]) -> set[str]:
    """All names and strings in code, nested code too."""
    return {x for code in codes for x in (*code.co_names, *code.co_consts) if isinstance(x, str)}


def _matters(value: Any) -> bool:
    if value is None or isinstance(value, (str, bytes, int, float, complex, torch.Tensor, ModuleType)):
        return False
    if isinstance(value, (FunctionType, BuiltinFunctionType, MethodType, nn.Module, type, *_WRAPPERS, *_CONTAINERS)):
        return True
    return callable(value) or hasattr(value, "__dict__")


class _Unloaded:
    """A name of a package that is installed but has not been imported."""

    def __init__(self, module: str, name: str = "") -> None:
        self.__module__, self.__name__ = module, name

    def attribute(self, name: str) -> _Unloaded:
        return _Unloaded(f"{self.__module__}.{self.__name__}" if self.__name__ else self.__module__, name)


def _attributes(values: list[Any], name: str) -> list[Any]:
    """Attributes of modules; those of other objects are walked anyway, or unknown."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, _Unloaded):
            found.append(value.attribute(name))
        elif isinstance(value, ModuleType):
            try:
                found.append(getattr(value, name))
            except Exception:  # noqa: BLE001, S112  (modules that import on access)
                continue
    return found


def _looked_up(
    op: str, name: Any, names: dict[str, Any], outer: Mapping[str, list[Any]], bound: Mapping[str, list[Any]]
) -> list[Any]:
    if not isinstance(name, str):
        return []
    if op in ("LOAD_GLOBAL", "LOAD_NAME"):
        return [*bound.get(name, []), *([names[name]] if name in names else [])]
    return [*bound.get(name, []), *(outer.get(name, []) if "DEREF" in op else [])]


def _imported(name: str, names: dict[str, Any], load: bool) -> list[Any]:
    """The module of an import statement and its package, by the name as it is and relative to the code's package."""
    package = names.get("__package__") or ""
    parents = [package.rsplit(".", up)[0] for up in range(package.count(".") + 1)] if package else []
    wanted = [name, *(f"{parent}.{name}".rstrip(".") for parent in parents)]
    found: list[Any] = [sys.modules[one] for one in wanted if one in sys.modules]
    for one in filter(None, wanted if load and not found else ()):
        try:
            top = find_spec(one.partition(".")[0])
            if top is None:
                continue
            unloaded = top.name not in sys.modules and "-packages" in str(top.origin)
            found.append(_Unloaded(one) if unloaded else importlib.import_module(one))
            break
        except (Exception, SystemExit):  # noqa: BLE001, S112  (then the code cannot import it either)
            continue
    whole = sys.modules.get(name.partition(".")[0])
    return [whole, *found] if whole is not None else found
