"""Angles of `feature_map.rope`: those of a call's tokens, and those that final states need in the next call.

Angles of a call begin at 0, so what it returns must say how far the last token was turned. Where the whole recurrence
turns with queries and keys, the rows of the final state are turned back by that angle. Where it does not, since gates
of channels or squares of keys are of the channels that were turned, the state keeps its frame, and one more column
holds the angle.
"""

from __future__ import annotations

import math

import torch

from flexsp.comm.group import SequenceParallel
from flexsp.kernels.rotary import rotate
from flexsp.ops._rows import Turns
from flexsp.scan.exchange import add_backward_dependency
from flexsp.scan.tokens import last, positions, running_sum

__all__ = ["Angles", "split_angle"]

Tensor = torch.Tensor
Optional = torch.Tensor | None
_TURN = 2 * math.pi


class Angles:
    """Angles of one call.

    Args:
        q: [B, T, H, K] or [B, T, R, H, K].
        theta: radians that each token adds, [B, T, H, K/2], or None for rotations by position.
        base: of rotations by position.
        kept: whether the state keeps the angle.
        before: the angle [N, H, K/2] that an initial state keeps, or None.
        fixed: angles give no gradients, which the program that reads the rows has instead (flexsp/grammar/turned.py).
    """

    def __init__(
        self, q: Tensor, theta: Optional, base: float, kept: bool, before: Optional, cu_seqlens: Optional,
        sp: SequenceParallel | None, fixed: bool = False,
    ) -> None:  # fmt: skip
        T, H, K = q.shape[1], q.shape[-2], q.shape[-1]
        if K % 2:
            raise ValueError(f"q: feature_map.rope expected an even K, got {K}")
        self.kept, self._K, self._T = kept, K, T
        self._cu_seqlens, self._sp, self._taken = cu_seqlens, sp, fixed
        self._fixed = fixed
        exponents = -torch.arange(0, K, 2, device=q.device, dtype=torch.float64) / K
        self._speed = None if theta is not None else base**exponents  # radians a position
        self._sums: Optional = None
        self._steps: Optional = None
        self._end: Optional = None
        self._before = None if before is None else before / _TURN
        if theta is None and not kept:
            assert self._speed is not None
            position = positions(T, q.device, cu_seqlens, sp)
            self._of_tokens = (position.unsqueeze(-1) * self._speed).view(1, T, 1, K // 2)
            return
        steps = theta if self._speed is None else self._speed.expand(q.shape[0], T, H, K // 2)
        assert steps is not None
        steps = steps.detach() if fixed else steps  # forward mode goes on where grad mode is off
        # In turns, not radians: without whole turns a sum stays small, and float32 keeps its digits.
        with torch.set_grad_enabled(torch.is_grad_enabled() and not fixed):
            self._sums = running_sum(steps, cu_seqlens, sp, self._before, wrapped=True, unit=_TURN)
        self._steps, self._of_tokens = steps, _TURN * self._sums
        if self._speed is not None:  # position 0 is not turned
            self._of_tokens = self._of_tokens - self._speed

    def turn(self, x: Tensor) -> Tensor:
        """q or k, rotated. All rows of a token have the same angle."""
        return rotate(x, self._of_tokens.unsqueeze(2) if x.dim() == 5 else self._of_tokens)

    def taken(self, want_final: bool) -> Turns:
        """The turns of tokens, for one who gives their gradient: from now on `turn` gives none."""
        assert self._sums is not None and self._steps is not None and self._before is None
        self._of_tokens, self._taken = self._of_tokens.detach(), True
        end = self._at_end() / _TURN if want_final else None
        return Turns(self._steps.to(self._sums.dtype) / _TURN, None, end)

    def _at_end(self) -> Tensor:
        """The angle of the token after the last one, without its own theta, [N or 1, H or 1, K/2]."""
        if self._sums is not None:
            if self._end is None:
                self._end = _TURN * last(self._sums, self._before, self._cu_seqlens, self._sp)
            return self._end
        assert self._speed is not None
        if self._cu_seqlens is not None:
            tokens = self._cu_seqlens.diff().unsqueeze(-1)
        else:
            total = self._T if self._sp is None else self._sp.shard_range(self._T)[2]
            tokens = torch.full((1, 1), total, device=self._speed.device)
        return (tokens * self._speed).unsqueeze(1)

    def finish(self, o: Tensor, state: Optional, V: int) -> tuple[Tensor, Optional]:
        """o, made to depend on all exchanges, and the final state [N, H, K + rows, V + columns] for the next call."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._fixed):
            angle = self._at_end()
        if self._sp is not None and self._sums is not None and not self._fixed:
            o = add_backward_dependency(o, angle)
        if state is None:
            return o, None
        if self.kept:
            column = torch.nn.functional.pad(angle.to(state.dtype), (0, state.shape[-2] - angle.shape[-1]))
            return o, torch.cat([state, column.unsqueeze(-1)], -1)
        back = -angle.unsqueeze(-2).expand(*state.shape[:2], state.shape[-1], -1)
        if self._taken:  # what turned keys beside the state gives no gradient, nor does what turns them back
            back = torch.cat([back[..., :V, :], back[..., V:, :].detach()], -2)
        rows = rotate(state[..., : self._K, :].transpose(-1, -2), back).transpose(-1, -2)
        return o, torch.cat([rows, state[..., self._K :, :]], -2)


def split_angle(state: Optional, K: int) -> tuple[Optional, Optional]:
    """An initial state without the column of its angle, and the angle [N, H, K/2]."""
    if state is None:
        return None, None
    return state[..., :-1].contiguous(), state[..., : K // 2, -1]
