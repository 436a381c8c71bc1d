"""Calls of ops by recipe: calls that look alike are checked and planned once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from flexsp.comm.derivatives import transformed
from flexsp.comm.group import SequenceParallel, current_sp, resolve_sp
from flexsp.comm.ranks import GROUPS
from flexsp.kernels.operators import plain
from flexsp.ops import _validate as check
from flexsp.runtime.kept import keep
from flexsp.runtime.recipe import Recipe, noted, noting

__all__ = ["by_recipe", "forget"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_CALLS, _LAYOUTS = 256, 8  # that are kept of each op, and of each call
_TENSORS = {torch.Tensor, torch.nn.Parameter}
_VALUES = {bool, int, float, str, torch.dtype}


_every: list[dict[Any, list[_Kept]]] = []
"""What is kept of each op."""


def forget() -> None:
    """Has all calls checked and planned anew, for tests that change what plans are made of."""
    for kept in _every:
        kept.clear()


class _Kept(NamedTuple):
    """`guards`: what the call's tensors look like, as torch.compile compares it. `recipe`: None if there is none."""

    guards: Any
    aligned: list[bool]
    recipe: Recipe | None


def by_recipe(op: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator of an op with the argument ``sp``. For a call that looks like an earlier one it does again what that
    did with its tensors (`flexsp.runtime.recipe`), without the op's checks and plans. Calls over groups made with
    ``bitwise`` go by what `flexsp.ops._segments.in_segments` left with the op.

    Calls look alike if nothing but addresses and values of their tensors differs. So a call whose values the op may
    read, on a CPU or under FLEXSP_CHECK=1, has no recipe, nor has one in graphs, under modes or in transforms.
    """
    kept: dict[Any, list[_Kept]] = {}
    _every.append(kept)
    at = [*inspect.signature(op).parameters].index("sp")

    @functools.wraps(op)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            return op(*args, **kwargs)
        sp: Any = args[at] if len(args) > at else kwargs.get("sp")
        group = current_sp() if sp is None else sp
        if isinstance(group, SequenceParallel) and group.segment:
            return op.in_segments(group, args, kwargs)  # type: ignore[attr-defined,no-any-return]
        tensors: list[torch.Tensor] = []
        # A call that looks like one before may forget a group that was opened since: the op warns of that.
        facts: list[Any] = [torch.is_grad_enabled(), len(GROUPS), *kwargs]
        known = _look(args, facts, tensors) and _look(kwargs.values(), facts, tensors) and _look_at_ranks(group, facts)
        if not known or not tensors or _watched(tensors):
            return op(*args, **kwargs)
        key = (*facts, tensors[0].shape)
        found = kept.get(key, ())
        for each in found:
            if each.guards.check(*tensors) and each.aligned == _aligned(tensors):
                if each.recipe is None:
                    return op(*args, **kwargs)
                if group is not None:
                    resolve_sp(sp)  # which refuses what would be recomputed outside of the group
                return each.recipe(tensors)  # type: ignore[no-any-return]
        if not _comparable(tensors) or not _guards_tell():
            return op(*args, **kwargs)
        asked, guards, aligned = getattr(group, "asked", 0), _guards(tensors), _aligned(tensors)
        made, recipe = noted(lambda: op(*args, **kwargs), tensors)
        if getattr(group, "asked", 0) != asked:  # what other ranks answer may differ the next time
            recipe = None
        keep(kept, key, [*found[1 - _LAYOUTS :], _Kept(guards, aligned, recipe)], _CALLS)
        return made

    run.kept = kept  # type: ignore[attr-defined]
    return run


def _look(values: Iterable[Any], facts: list[Any], tensors: list[torch.Tensor]) -> bool:
    """Adds tensors, and facts about all else. False where there is something that facts do not tell."""
    for x in values:
        kind = type(x)
        if kind in _TENSORS:
            facts.append(torch.Tensor)
            tensors.append(x)
        elif x is None:
            facts.append(x)
        elif kind in _VALUES:
            facts += (kind, x)  # True is not 1
        elif isinstance(x, tuple):
            facts += (kind, len(x))
            if not _look(x, facts, tensors):
                return False
        elif kind is SequenceParallel:
            facts.append(kind)
        else:
            return False
    return True


def _look_at_ranks(group: Any, facts: list[Any]) -> bool:
    """The same with the group of ranks."""
    if not isinstance(group, SequenceParallel):
        return True
    facts += (group.id, group.transport, group.schedule, *(group.lengths or ()))
    return not group.check_calls


def _watched(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether more may count than what tensors look like: their values, derivatives, what traces or notes the call."""
    watched = is_in_torch_dispatch_mode() or transformed() or noting() or check.readable(tensors[0])
    return watched or any([x.is_nested for x in tensors])  # guards would end the process over these


def _comparable(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether guards know such tensors again, each for itself."""
    device = tensors[0].device
    alike = all([x.layout == torch.strided and x.device == device for x in tensors])
    return alike and plain(*tensors) and len({id(x) for x in tensors}) == len(tensors)


def _aligned(tensors: Sequence[torch.Tensor]) -> list[bool]:
    return [x.data_ptr() % 16 == 0 for x in tensors]


def _guards(tensors: Sequence[torch.Tensor]) -> Any:
    """Tells tensors of other types, dtypes, devices, sizes, strides or needs of gradients, and other modes. It is what
    graphs of torch.compile check their inputs with, in a tenth of the time that Python would take."""
    made: Any = torch._C._dynamo.guards.TensorGuards
    return made(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


@functools.cache
def _guards_tell() -> bool:
    """Whether `TensorGuards` is there, which is not public, and tells tensors apart as it should. Elsewhere no call has
    a recipe, and every one is checked and planned."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            x, y = torch.zeros(2, 2, 3, device="cpu", dtype=torch.float32).unbind(0)
            others = [
                x[:, :2], x[:, ::2], x.t().contiguous().t(), x.to(torch.float64), x.to("meta"),
                x.detach().requires_grad_(), torch.nn.Parameter(x, requires_grad=False), torch._neg_view(x),
            ]  # fmt: skip
            guards = _guards([x, y])
            return bool(guards.check(y, x)) and not any([guards.check(x, other) for other in others])
    except (AttributeError, TypeError, RuntimeError):
        return False
