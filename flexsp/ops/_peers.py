"""What ops take because other libraries' ops do: mixed dtypes, and documents and reversed sequences token by token."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from flexsp.exceptions import check_flag, fail

__all__ = ["one_dtype", "recurrence_of"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_HALVES = (torch.float16, torch.bfloat16)
_MIXED = (*_HALVES, torch.float32)
_STATES = ("initial_state", "c_initial", "n_initial", "m_initial")


def one_dtype(rows: str, out: str = "v") -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorator of an op whose arguments named in ``rows`` must have one dtype.

    If they differ among float16, bfloat16 and float32, all of them are converted to float32, and the output to the
    dtype of the argument ``out``. States in half precision are converted to float32, and so are other arguments in
    another half precision than the rows'. Gradients have the dtypes of the arguments.
    """
    together = rows.split()

    def decorate(op: Callable[_P, _R]) -> Callable[_P, _R]:
        names = tuple(inspect.signature(op).parameters)

        @functools.wraps(op)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            given: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
            changed = _in_one_dtype(given, together)
            # An argument that is given twice is left for Python to report.
            if not changed or len(given) != len(args) + len(kwargs):
                return op(*args, **kwargs)
            made: Any = op(**given | changed)  # type: ignore[call-arg]
            if out in changed:
                made = made[0].to(given[out].dtype), made[1]
            return made  # type: ignore[no-any-return]

        return run

    return decorate


def _in_one_dtype(given: dict[str, Any], together: list[str]) -> dict[str, Any]:
    """The arguments that `one_dtype` converts, converted."""
    rows = {name: given[name] for name in together if isinstance(given.get(name), torch.Tensor)}
    if not rows:
        return {}
    lead = next(iter(rows.values())).dtype
    changed = {}
    if any([x.dtype != lead for x in rows.values()]):
        if not all([x.dtype in _MIXED for x in rows.values()]):
            return {}
        lead, changed = torch.float32, {name: x.float() for name, x in rows.items()}
    for name, x in given.items():
        if name in rows:
            continue
        if name in _STATES:
            if any([_is_half(y) for y in (x if isinstance(x, tuple) else (x,))]):
                wide = torch.promote_types(lead, torch.float32)
                changed[name] = _widened(x, wide)
        elif isinstance(x, torch.Tensor) and x.dtype != lead and x.dtype in _HALVES:
            changed[name] = x.float()
    return changed


def _is_half(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in _HALVES


def _widened(state: Any, dtype: torch.dtype) -> Any:
    if not isinstance(state, tuple):
        return state.to(dtype)
    parts = [x.to(dtype) if _is_half(x) else x for x in state]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def recurrence_of(chunked: Callable[..., Any], flips: str = "") -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorator of a `recurrent_*` op, whose body runs token by token on this rank.

    With ``cu_seqlens`` it calls ``chunked`` on this rank instead. With ``reverse`` it goes from the last token to the
    first one. The body reads neither.

    Args:
        flips: the arguments [B, T, ...], of an op that has ``reverse``.
    """
    in_chunks = {*inspect.signature(chunked).parameters}

    def decorate(op: Callable[_P, _R]) -> Callable[_P, _R]:
        names = tuple(inspect.signature(op).parameters)

        @functools.wraps(op)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            given: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
            packed, reverse = given.get("cu_seqlens") is not None, given.get("reverse", False)
            check_flag("reverse", reverse)
            # Arguments that are unknown or given twice are left for Python to report.
            if not (packed or reverse) or len(given) != len(args) + len(kwargs) or not given.keys() <= {*names}:
                return op(*args, **kwargs)
            given.pop("reverse", None)
            if not reverse:
                for name in [x for x in given if x not in in_chunks]:
                    if given.pop(name) is not None:
                        fail(name, "None with cu_seqlens", "a tensor")
                return chunked(**given, sp=False)  # type: ignore[no-any-return]
            if packed:
                fail("reverse", "False with cu_seqlens", True)
            for name in flips.split():
                x = given.get(name)
                given[name] = x.flip(1) if isinstance(x, torch.Tensor) and x.dim() > 1 else x
            made: Any = op(**given)  # type: ignore[call-arg]
            return made[0].flip(1), made[1]  # type: ignore[return-value]

        return run

    return decorate
