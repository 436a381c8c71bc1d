"""What a stretch of tokens does to the state that enters it: S' = A S + F with a diagonal A, or a reset.

A is carried as its logarithm (natural log, <= 0) and a document boundary as the flag ``cut`` (A = 0), never as -inf:
sums and differences of logs stay finite (MATH §0). The adjoint runs the same algebra from right to left with A^T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["Kind", "Transition"]

Kind = Literal["none", "scalar", "vector"]


@dataclass(frozen=True)
class Transition:
    """A diagonal A over states [..., H, K, V].

    ``log_a`` is None (A = 1), [..., H] (one decay a head: "scalar") or [..., H, K] (one a key channel: "vector");
    ``cut`` is None or [...], nonzero where the stretch contains the start of a document, so nothing passes through.
    """

    kind: Kind
    log_a: torch.Tensor | None = None
    cut: torch.Tensor | None = None

    @classmethod
    def of(cls, state: torch.Tensor, log_a: torch.Tensor | None, cut: torch.Tensor | None = None) -> Transition:
        """The transition over ``state`` [..., H, K, V], its kind read off the shape of ``log_a``."""
        lead, heads, channels = state.shape[:-3], state.shape[-3], state.shape[-2]
        kinds: dict[tuple[int, ...], Kind] = {(*lead, heads): "scalar", (*lead, heads, channels): "vector"}
        if log_a is not None and tuple(log_a.shape) not in kinds:
            raise ValueError(f"log_a: expected shape {' or '.join(map(str, kinds))}, got {tuple(log_a.shape)}")
        if cut is not None and cut.shape != lead:
            raise ValueError(f"cut: expected shape {tuple(lead)}, got {tuple(cut.shape)}")
        return cls("none" if log_a is None else kinds[tuple(log_a.shape)], log_a, cut)

    def factor(self, like: torch.Tensor) -> torch.Tensor | None:
        """A itself in the dtype of ``like``, broadcastable to [..., H, K, V]; None for the identity."""
        a = None
        if self.log_a is not None:
            a = self.log_a.to(like.dtype).exp()
            a = a[..., None, None] if self.kind == "scalar" else a[..., None]
        if self.cut is not None:
            keep = (self.cut == 0).to(like.dtype)[..., None, None, None]
            a = keep if a is None else a * keep
        return a

    def apply(self, state: torch.Tensor, plus: torch.Tensor | None = None) -> torch.Tensor:
        """A S, or A S + F."""
        a = self.factor(state)
        out = state if a is None else a * state
        return out if plus is None else out + plus

    def then(self, later: Transition) -> Transition:
        """The transition of this stretch followed by ``later``: A_later A_self."""
        if self.kind != later.kind:
            raise ValueError(f"later: expected a transition of kind {self.kind!r}, got {later.kind!r}")
        log_a = None if self.log_a is None or later.log_a is None else self.log_a + later.log_a
        cuts = [c != 0 for c in (self.cut, later.cut) if c is not None]
        cut = None if not cuts else cuts[0] if len(cuts) == 1 else cuts[0] | cuts[1]
        return Transition(self.kind, log_a, cut)

    def transpose(self) -> Transition:
        """A^T, for the adjoint: a diagonal is its own."""
        return self


def compose(
    first: tuple[Transition, torch.Tensor], later: tuple[Transition, torch.Tensor]
) -> tuple[Transition, torch.Tensor]:
    """(A2, F2) after (A1, F1): (A2 A1, A2 F1 + F2)."""
    return first[0].then(later[0]), later[0].apply(first[1], later[1])
