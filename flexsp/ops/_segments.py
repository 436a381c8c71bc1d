"""How ops run over a group of ranks that was made with ``bitwise``: a segment of tokens after the other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from flexsp.comm.derivatives import transformed
from flexsp.comm.group import SequenceParallel, keeping_bits, resolve_sp
from flexsp.exceptions import asks_for_kernels
from flexsp.kernels.operators import plain
from flexsp.ops import _validate as check
from flexsp.scan.in_order import Arguments, run_in_order

__all__ = ["in_segments"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Kind(NamedTuple):
    """What `in_segments` is told of an op, as it says there."""

    tokens: list[str]
    shared: list[str]
    states: list[str]
    wants: str
    begins: str
    refuses: str
    head_first: str
    kernels: bool
    apart: list[str]
    axes: dict[str, int]


def in_segments(
    tokens: str, shared: str = "", *, states: str = "initial_state", wants: str = "output_final_state",
    begins: str = "", refuses: str = "", head_first: str = "", kernels: bool = False, apart: str = "",
    one_axis: str = "", three_axes: str = "",
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:  # fmt: skip
    """Decorator of an op with the argument ``sp``, below `flexsp.ops._recipe.by_recipe`. Over a group that was made
    with ``bitwise`` the op is called for one segment of tokens after the other (`flexsp.scan.in_order`).

    Args:
        tokens: the arguments [B, T, ...]. One of them that has two axes is shared.
        shared: parameters.
        states: of initial states, one argument or several.
        wants: the flag that asks for final states.
        begins: the argument that says which texts begin with a weight of 1, "" for none.
        refuses: an argument that must be None.
        head_first: the flag by which tokens are the third axis.
        kernels: kernels alone do all that a call without documents does, or what goes on beside them does not depend
            on how many tokens there are; then it runs on all ranks at once (`flexsp.kernels.segments`).
        apart: the arguments that something else than kernels reads, which must be False or None for that.
        one_axis, three_axes: those that something else reads unless they have as many axes.
    """
    axes = dict.fromkeys(one_axis.split(), 1) | dict.fromkeys(three_axes.split(), 3)
    kind = _Kind(
        tokens.split(), shared.split(), states.split(), wants, begins, refuses, head_first, kernels, apart.split(), axes
    )  # fmt: skip

    def decorate(op: Callable[_P, _R]) -> Callable[_P, _R]:
        op.in_segments = _OverSegments(op, kind)  # type: ignore[attr-defined]
        return op

    return decorate


class _OverSegments:
    """Calls of an op over groups that were made with ``bitwise``. `at_once`: kernels can run them so."""

    def __init__(self, op: Callable[..., Any], kind: _Kind) -> None:
        self.op, self.kind, self.at_once = op, kind, kind.kernels
        self.signature = inspect.signature(op)

    def __call__(self, group: SequenceParallel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        found = self.signature.bind(*args, **kwargs)
        found.apply_defaults()
        resolve_sp(found.arguments["sp"], keeps_bits=True)  # which refuses what a checkpoint would lose
        return _run(self.op, self.kind, found.arguments, group)


def _run(op: Callable[..., Any], kind: _Kind, given: dict[str, Any], group: SequenceParallel) -> Any:
    """The op with these arguments, over a group that was made with ``bitwise``."""
    if kind.refuses and given[kind.refuses] is not None:
        check.fail(kind.refuses, "None over ranks with bitwise", "a tensor")
    axis, lead = 2 if kind.head_first and given[kind.head_first] is True else 1, kind.tokens[0]
    x = given[lead]
    if not isinstance(x, torch.Tensor) or x.dim() <= axis:
        return op(**given | {"sp": False})  # which refuses it
    check.check_flag(kind.wants, given[kind.wants])
    check.check_cu_seqlens(given["cu_seqlens"], given["cu_seqlens_cpu"], x.transpose(1, axis), lead, group)
    if group.device.type != x.device.type:
        check.fail("sp", f"a group on the inputs' device ({x.device.type})", f"one on {group.device}")
    if kind.kernels and _at_once(kind, given, x):
        with keeping_bits():
            return op(**given)
    return _in_turn(op, kind, given | {"sp": False}, group, axis)


def _at_once(kind: _Kind, given: dict[str, Any], x: torch.Tensor) -> bool:
    """Whether kernels run a call for all its segments at once."""
    tensors = [y for y in given.values() if isinstance(y, torch.Tensor)]
    apart = [given[name] for name in kind.apart]
    if given["cu_seqlens"] is not None or any(y is not None and y is not False for y in apart):
        return False
    if any(isinstance(given[name], torch.Tensor) and given[name].dim() != n for name, n in kind.axes.items()):
        return False
    return asks_for_kernels(x.is_cuda, x.dtype) and plain(*tensors) and not transformed()


def _in_turn(op: Callable[..., Any], kind: _Kind, given: dict[str, Any], group: SequenceParallel, axis: int) -> Any:
    """The op for one segment after the other."""
    initial, packed = _flat([given[name] for name in kind.states]), given["cu_seqlens"] is not None
    if initial and not packed and not group.is_first:
        expected = "None on every rank but the first of the sequence-parallel group"
        check.fail(kind.states[0], expected, f"a tensor on rank {group.rank}")
    if given.get("state_v_first", False) is None and not (initial or given[kind.wants]):
        given["state_v_first"] = False  # of states that nobody sees
    single, last = len(kind.states) == 1, None

    def call(asked: Arguments) -> tuple[torch.Tensor, list[torch.Tensor]]:
        nonlocal last
        changed = {**asked.tokens, **asked.shared, kind.wants: True, "cu_seqlens": asked.bounds, "cu_seqlens_cpu": None}
        if asked.states is None:
            changed |= dict.fromkeys(kind.states)
        elif single:
            changed[kind.states[0]] = _built(given[kind.states[0]] if last is None else last, asked.states)
        else:
            changed |= dict(zip(kind.states, asked.states, strict=True))
        if kind.begins:
            changed[kind.begins] = _beginning(given[kind.begins], asked)
        o, last = op(**given | changed)
        return o, _flat([last])

    text = f"{op.__name__} on {given[kind.tokens[0]].dtype}{', packed' if packed else ''}"
    cut, shared = _sorted(kind, given, axis)
    o, final = run_in_order(call, text, group, cut, shared, initial or None, given["cu_seqlens"], axis)
    if final is None or not given[kind.wants]:
        return o, None
    return o, _built(last, final)


def _sorted(
    kind: _Kind, given: dict[str, Any], axis: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:  # fmt: skip
    """The tensors that have rows of tokens, and the others."""
    T = given[kind.tokens[0]].shape[axis]
    cut: dict[str, torch.Tensor] = {}
    shared: dict[str, torch.Tensor] = {}
    for name in (*kind.tokens, *kind.shared):
        x = given[name]
        if isinstance(x, torch.Tensor):
            rows = name in kind.tokens and x.dim() > 2 and (x.shape[axis] % T == 0 if T else x.shape[axis] == 0)
            (cut if rows else shared)[name] = x
    return cut, shared


def _beginning(asked: Any, given: Arguments) -> Any:
    """Which of a segment's texts begin with a weight of 1: not those that have begun before."""
    if asked is False:
        return False
    if given.bounds is None:
        return False if given.entered else asked
    if isinstance(given.entered, bool):  # no tokens
        return torch.zeros(given.bounds.numel() - 1, dtype=torch.bool, device=given.bounds.device)
    return ~given.entered if asked is True else asked & ~given.entered


def _flat(states: Any) -> list[torch.Tensor]:
    """The tensors of states, in order."""
    if isinstance(states, (tuple, list)):
        return [x for each in states for x in _flat(each)]
    return [] if states is None else [states]


def _built(like: Any, states: list[torch.Tensor]) -> Any:
    """States as the op takes them and returns them."""
    if not isinstance(like, (tuple, list)):
        return states[0]
    return type(like)(*states) if hasattr(like, "_fields") else tuple(states)
