"""States between chunks, from what each chunk does to a state: S' = A S + F, in plain PyTorch."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

__all__ = ["states_between"]

_GROUP = 16
_DIRECT = 32
Optional = torch.Tensor | None


def states_between(
    A: Optional, F: torch.Tensor, start: torch.Tensor, cut: Optional = None, dense: bool = False
) -> torch.Tensor:
    """States before each chunk and after the last one; differentiable.

    Chunks are walked in groups, all groups side by side, so that the number of operations hardly grows with theirs.

    Args:
        A: None where it is 1; [B, H, chunks, K, K] if ``dense``, else broadcastable to F.
        F: [B, H, chunks, *state].
        start: [B, H, *state], what enters the first chunk.
        cut: bool [chunks], true where nothing enters a chunk, not even what is not finite: neither does a gradient
            leave it, nor has its A one.

    Returns:
        [B, H, chunks + 1, *state]; before a chunk with a cut, what the chunks before it leave.
    """
    n = F.shape[2]
    if A is None and cut is None:
        return torch.cat([start.unsqueeze(2), F], 2).cumsum(2)
    if dense or n < _DIRECT:
        return _walk(A, F, start, cut, 2, dense)
    A, F_, cut_ = _grouped(A, 2, 1.0), _grouped(F, 2, 0.0), _grouped(cut, 0, False)
    assert F_ is not None
    inside = _walk(A, F_, torch.zeros_like(F_[:, :, :, 0]), cut_, 3)
    passed = None if A is None else _walk(A, None, torch.ones_like(A[:, :, :, 0]), cut_, 3)
    outer = states_between(
        None if passed is None else passed[:, :, :, -1], inside[:, :, :, -1], start,
        None if cut_ is None else cut_.any(1),
    )  # fmt: skip
    entering = outer[:, :, :-1].unsqueeze(3).expand_as(inside[:, :, :, :-1])
    if cut_ is not None:
        entering = _dropped(entering, pad(cut_[:, :-1].cumsum(1) > 0, (1, 0)))
    through = entering if passed is None else passed[:, :, :, :-1] * entering
    return torch.cat([(through + inside[:, :, :, :-1]).flatten(2, 3)[:, :, :n], outer[:, :, -1:]], 2)


def _grouped(x: Optional, axis: int, value: float) -> Optional:
    """[.., groups, chunks of a group, ..] of [.., chunks, ..], with `value` for chunks that are not there."""
    if x is None:
        return None
    behind = (0, 0) * (x.dim() - axis - 1)
    return pad(x, (*behind, 0, -x.shape[axis] % _GROUP), value=value).unflatten(axis, (-1, _GROUP))


def _dropped(S: torch.Tensor, cut: torch.Tensor) -> torch.Tensor:
    """S [B, H, *cut.shape, *state] without what a cut drops."""
    return S.masked_fill(cut.view(*cut.shape, *[1] * (S.dim() - 2 - cut.dim())), 0.0)


def _walk(
    A: Optional, F: Optional, S: torch.Tensor, cut: Optional, axis: int, dense: bool = False
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
        states.append(S if F is None else S + F.select(axis, c))
    return torch.stack(states, axis)
