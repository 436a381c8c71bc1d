"""What a stretch of tokens does to the state that enters it: S' = A S + F.

A diagonal A of the fused kernels is carried as its logarithm (natural log, <= 0) and a document boundary as the flag
``cut`` (A = 0), never as -inf: sums and differences of logs stay finite (docs/math.md, section 3). What PyTorch
functions compute comes as A itself. The adjoint runs the same algebra from right to left with A^T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["Kind", "Transition", "times"]

Kind = Literal["none", "scalar", "vector", "elementwise", "dense"]


def times(a: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """A S with a diagonal A; nothing passes where it is 0, not even what is not finite."""
    return (a * state).masked_fill(a == 0, 0.0)


def _matmul(A: torch.Tensor, S: torch.Tensor) -> torch.Tensor:
    """A S; nothing passes an A of zeros, not even what is not finite."""
    return (A @ S).masked_fill((A == 0).all(-1).all(-1)[..., None, None], 0.0)


@dataclass(frozen=True)
class Transition:
    """A over states [..., H, K, V].

    Diagonal: ``log_a`` is None (A = 1, "none"), [..., H] (one decay a head, "scalar") or [..., H, K] (one a key
    channel, "vector"); ``cut`` is None or [...], nonzero where the stretch contains the start of a document, so nothing
    passes through. Else ``A`` itself: "elementwise", broadcastable to the states, or "dense", [..., H, K, K].
    """

    kind: Kind
    log_a: torch.Tensor | None = None
    cut: torch.Tensor | None = None
    A: torch.Tensor | None = None

    @classmethod
    def of(cls, state: torch.Tensor, log_a: torch.Tensor | None, cut: torch.Tensor | None = None) -> Transition:
        """The diagonal transition over ``state`` [..., H, K, V], its kind read off the shape of ``log_a``."""
        if state.dim() < 4:
            raise ValueError(f"state: expected [..., H, K, V], got shape {tuple(state.shape)}")
        lead, heads, channels = state.shape[:-3], state.shape[-3], state.shape[-2]
        kinds: dict[tuple[int, ...], Kind] = {(*lead, heads): "scalar", (*lead, heads, channels): "vector"}
        if log_a is not None and tuple(log_a.shape) not in kinds:
            raise ValueError(f"log_a: expected shape {' or '.join(map(str, kinds))}, got {tuple(log_a.shape)}")
        if cut is not None and cut.shape != lead:
            raise ValueError(f"cut: expected shape {tuple(lead)}, got {tuple(cut.shape)}")
        return cls("none" if log_a is None else kinds[tuple(log_a.shape)], log_a, cut)

    @classmethod
    def linear(cls, state: torch.Tensor, A: torch.Tensor, dense: bool) -> Transition:
        """The transition with this A, which must have the state's shape or, if ``dense``, [..., K, K]."""
        shape = (*state.shape[:-1], state.shape[-2]) if dense else tuple(state.shape)
        if tuple(A.shape) != shape:
            raise ValueError(f"A: expected shape {shape}, got {tuple(A.shape)}")
        return cls("dense" if dense else "elementwise", A=A)

    def factor(self, like: torch.Tensor) -> torch.Tensor | None:
        """A itself in the dtype of ``like``, broadcastable to the states unless dense; None for the identity."""
        if self.A is not None:
            return self.A.to(like.dtype)
        a = None
        if self.log_a is not None:
            a = self.log_a.to(like.dtype).exp()
            a = a[..., None, None] if self.kind == "scalar" else a[..., None]
        if self.cut is not None:
            dropped = (self.cut != 0)[..., None, None, None]
            a = (~dropped).to(like.dtype) if a is None else a.masked_fill(dropped, 0.0)
        return a

    def apply(self, state: torch.Tensor, plus: torch.Tensor | None = None) -> torch.Tensor:
        """A S, or A S + F."""
        a = self.factor(state)
        out = state if a is None else self.times(a, state)
        return out if plus is None else out + plus

    def times(self, a: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """a S of a factor `a` of this kind."""
        return _matmul(a, state) if self.kind == "dense" else times(a, state)

    def gradients(self, state: torch.Tensor, dF: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Of `log_a` and of `A`, where `state` came in and ``dF`` is the gradient of A S + F."""
        if self.A is not None:
            return None, dF @ state.mT if self.kind == "dense" else dF * state
        if self.log_a is None:
            return None, None
        dims = (-2, -1) if self.kind == "scalar" else (-1,)
        return times(self.apply(state), dF).sum(dims).to(self.log_a.dtype), None

    def transpose(self) -> Transition:
        """A^T, for the adjoint: a diagonal is its own."""
        if self.kind == "dense" and self.A is not None:
            return Transition("dense", A=self.A.mT)
        return self

    def split(self, state: torch.Tensor, pieces: int) -> list[tuple[torch.Tensor, Transition]]:
        """``state`` in parts that do not depend on each other, each with its transition: some columns where A is dense,
        else some rows of [..., V]. `join` puts such parts together."""
        if self.kind == "dense":
            return [(part, self) for part in state.chunk(pieces, dim=-1)]
        rows = state.reshape(-1, state.shape[-1]).chunk(pieces)
        a = self.factor(state)
        if a is None:
            return [(part, Transition("none")) for part in rows]
        a = a.expand(*state.shape[:-1], a.shape[-1])
        parts = a.reshape(-1, a.shape[-1]).chunk(pieces)
        return [(part, Transition("elementwise", A=x)) for part, x in zip(rows, parts, strict=True)]

    def join(self, parts: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
        """The state of this shape from its parts."""
        if len(parts) == 1:
            return parts[0].view(shape)
        return torch.cat(parts, dim=-1 if self.kind == "dense" else 0).view(shape)
