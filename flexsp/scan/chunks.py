"""States between chunks, from what each chunk does to a state: S' = A S + F, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import pad

__all__ = ["Turned", "states_between"]

_GROUP = 16
_DIRECT = 32
Optional = torch.Tensor | None


class Turned(NamedTuple):
    """By how much chunks turn the state that passes them, besides A, which must commute with it.

    Attributes:
        angles: [B, H, chunks, S].
        turn: a state [B, H, *state], with any axes between, turned by angles with the same axes. Turning twice is
            turning by the sum.
    """

    angles: torch.Tensor
    turn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def states_between(
    A: Optional, F: torch.Tensor, start: torch.Tensor, cut: Optional = None, dense: bool = False,
    turned: Turned | None = None,
) -> torch.Tensor:  # fmt: skip
    """States before each chunk and after the last one; differentiable.

    Chunks are walked in groups, all groups side by side, so that the number of operations hardly grows with theirs.

    Args:
        A: None where it is 1; [B, H, chunks, K, K] if ``dense``, else broadcastable to F.
        F: [B, H, chunks, *state].
        start: [B, H, *state], what enters the first chunk.
        cut: bool [chunks], true where nothing enters a chunk, not even what is not finite: neither does a gradient
            leave it, nor has its A one.
        turned: S' = turn(A S) + F; not if ``dense``.

    Returns:
        [B, H, chunks + 1, *state]; before a chunk with a cut, what the chunks before it leave.
    """
    n = F.shape[2]
    if A is None and cut is None and turned is None:
        return torch.cat([start.unsqueeze(2), F], 2).cumsum(2)
    if dense or (n < _DIRECT and not torch.compiler.is_compiling()):
        return _walk(A, F, start, cut, 2, dense, turned)
    a, f, c = (A, 2, 1.0), (F, 2, 0.0), (cut, 0, False)
    if n < _DIRECT:  # n may be symbolic: as many steps for all, so that they share a graph
        more = None if turned is None else turned._replace(angles=_padded(turned.angles, 2, _DIRECT, 0.0))
        return _walk(_longer(*a), _longer(*f), start, _longer(*c), 2, turned=more)[:, :, : n + 1]
    if turned is not None:
        angles = _padded(turned.angles, 2, -n % _GROUP, 0.0).unflatten(2, (-1, _GROUP))
        turned = turned._replace(angles=angles)
    return _by_groups(_grouped(*a), _grouped(*f), start, _grouped(*c), n, turned)


def _by_groups(
    A: Optional, F: Optional, start: torch.Tensor, cut: Optional, n: int, turned: Turned | None
) -> torch.Tensor:  # fmt: skip
    """`states_between` of `n` chunks in groups."""
    assert F is not None
    inside = _walk(A, F, torch.zeros_like(F[:, :, :, 0]), cut, 3, turned=turned)
    passed = None if A is None else _walk(A, None, torch.ones_like(A[:, :, :, 0]), cut, 3)
    through = None if passed is None else passed[:, :, :, -1]
    by, over = None, None
    if turned is not None:
        by = _walk(None, turned.angles, torch.zeros_like(turned.angles[:, :, :, 0]), cut, 3)
        over = turned._replace(angles=by[:, :, :, -1])
    outer = states_between(
        through, inside[:, :, :, -1], start, None if cut is None else cut.any(1), turned=over
    )  # fmt: skip
    entering = outer[:, :, :-1].unsqueeze(3).expand_as(inside[:, :, :, :-1])
    if cut is not None:
        entering = _dropped(entering, pad(cut[:, :-1].cumsum(1) > 0, (1, 0)))
    if passed is not None:
        entering = passed[:, :, :, :-1] * entering
    if turned is not None and by is not None:
        entering = turned.turn(entering, by[:, :, :, :-1])
    return torch.cat([(entering + inside[:, :, :, :-1]).flatten(2, 3)[:, :, :n], outer[:, :, -1:]], 2)


def _grouped(x: Optional, axis: int, value: float) -> Optional:
    """[.., groups, chunks of a group, ..] of [.., chunks, ..], with `value` for chunks that are not there."""
    return None if x is None else _padded(x, axis, -x.shape[axis] % _GROUP, value).unflatten(axis, (-1, _GROUP))


def _longer(x: Optional, axis: int, value: float) -> Optional:
    """`_DIRECT` chunks of fewer."""
    return None if x is None else _padded(x, axis, _DIRECT, value).narrow(axis, 0, _DIRECT)


def _padded(x: torch.Tensor, axis: int, chunks: int, value: float) -> torch.Tensor:
    return pad(x, (*(0, 0) * (x.dim() - axis - 1), 0, chunks), value=value)


def _dropped(S: torch.Tensor, cut: torch.Tensor) -> torch.Tensor:
    """S [B, H, *cut.shape, *state] without what a cut drops."""
    return S.masked_fill(cut.view(*cut.shape, *[1] * (S.dim() - 2 - cut.dim())), 0.0)


def _walk(
    A: Optional, F: Optional, S: torch.Tensor, cut: Optional, axis: int, dense: bool = False,
    turned: Turned | None = None,
) -> torch.Tensor:  # fmt: skip
    """The states from S on, along the axis of chunks of A and F: 2, or 3 behind one of groups. F None is 0."""
    like = A if F is None else F
    assert like is not None
    states = [S]
    for c in range(like.shape[axis]):
        S = states[-1] if cut is None else _dropped(states[-1], cut.select(axis - 2, c))
        if A is not None:
            a = A.select(axis, c)
            S = a @ S if dense else a * S
        if turned is not None:
            S = turned.turn(S, turned.angles.select(axis, c))
        states.append(S if F is None else S + F.select(axis, c))
    return torch.stack(states, axis)
