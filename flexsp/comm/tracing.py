"""Marks of functions for torch.compile that do not import it: PyTorch's own decorators load torch._dynamo, which takes
longer than all of flexsp."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["constant_in_graphs", "outside_graphs"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def constant_in_graphs(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """`torch.compiler.assume_constant_result`: torch.compile calls ``fn`` while it traces, and keeps what it returns.

    The attribute is all that PyTorch's own decorator sets. A release that looks for another one would trace ``fn``
    itself, which then raises.
    """
    changed = f"{fn.__qualname__}: torch {torch.__version__} marks functions whose result is constant in another way"

    @functools.wraps(fn)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_dynamo_compiling():  # True only in what is traced, not in what is called meanwhile
            raise RuntimeError(changed)
        return fn(*args, **kwargs)

    run._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return run


def outside_graphs(why: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """`torch.compiler.disable`: a graph ends before the call. Where it may not, the error says ``why`` it must."""

    def decorate(fn: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(fn)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if torch.compiler.is_compiling():
                torch._dynamo.graph_break(msg=why)
                return torch.compiler.disable(fn)(*args, **kwargs)
            return fn(*args, **kwargs)

        return run

    return decorate
