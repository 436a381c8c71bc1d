"""Values of more than 256 channels: blocks of their columns are heads of their own, which share queries and keys.

Columns of a state do not act on each other, so that a head with values of 512 is two heads with values of 256 that have
the same queries, keys and gates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

__all__ = ["MOST", "ColumnBlocks"]

MOST = 256
"""Columns of a state that kernels take."""


class ColumnBlocks(NamedTuple):
    """V columns of every head in ``n`` blocks of ``width``; the last columns may be added, and are 0."""

    V: int
    n: int
    width: int

    @staticmethod
    def of(V: int, most: int = MOST) -> ColumnBlocks:
        n = -(-V // most)
        return ColumnBlocks(V, n, V if n == 1 else -(-V // (16 * n)) * 16)

    def values(self, v: torch.Tensor) -> torch.Tensor:
        """[B, T, H n, width] of v [B, T, H, V]; a view where no columns are added and heads lie side by side."""
        return v if self.n == 1 else self._padded(v).unflatten(-1, (self.n, self.width)).flatten(2, 3)

    def outputs(self, o: torch.Tensor) -> torch.Tensor:
        """[B, T, H, V] of o [B, T, H n, width]."""
        return o if self.n == 1 else o.unflatten(2, (-1, self.n)).flatten(3)[..., : self.V]

    def repeated(self, x: torch.Tensor, dim: int = 2) -> torch.Tensor:
        """A tensor with heads in `dim`, for each block of a head."""
        return x if self.n == 1 else x.repeat_interleave(self.n, dim)

    def states(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """[N, H n, K, width] of states [N, H, K, V]."""
        if x is None or self.n == 1:
            return x
        return self._padded(x).unflatten(-1, (self.n, self.width)).transpose(2, 3).flatten(1, 2)

    def joined(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """States [N, H, K, V] of [N, H n, K, width]."""
        if x is None or self.n == 1:
            return x
        return x.unflatten(1, (-1, self.n)).transpose(2, 3).flatten(3)[..., : self.V].contiguous()

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        more = self.n * self.width - self.V
        return F.pad(x, (0, more)) if more else x
