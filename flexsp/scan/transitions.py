"""What a stretch of tokens does to the state that enters it: S' = A S + F, or S' = max(S + a, F).

This file says all that depends on the kind of A: its shape, how two stretches compose, how one is applied, its adjoint,
what ranks send, and which Triton function the kernel of the scan reads it with. All schedules go by it.

A decay is carried as its natural logarithm (<= 0), and the start of a document as the flag ``cut`` (A = 0), never as a
logarithm of -inf: so sums and differences of logarithms stay finite (docs/math.md, section 3). The adjoint runs the
same algebra from right to left with A^T.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["KINDS", "Kind", "Transition", "times"]


class Kind(NamedTuple):
    """What all transitions of a kind share.

    Attributes:
        description: what the ranks do, for people.
        axes: of ``a`` behind those of the heads, for states [..., H, K, V]: "K", "KV" (all of the state) or "KK"; None
            where there is no ``a``.
        logarithm: ``a`` is the logarithm of a factor.
        function: the Triton function of flexsp/scan/segments.py that reads one segment's ``a``.
        by: BY of the kernel, what it reads: 0 a logarithm, 1 a factor for each number, 2 a shift before a maximum.
        adjoint: the kind of the scan of gradients, from right to left.
        dtypes: of states that the kernel scans.
        sent_as: how the kernel sends one state of any shape from rank to rank: as "numbers", which need no rows and
            columns; as a "matrix"; or "" where torch.distributed sends it.
    """

    description: str
    axes: str | None = None
    logarithm: bool = False
    function: str = "decay_none"
    by: int = 0
    adjoint: str | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    sent_as: str = ""

    @property
    def by_number(self) -> bool:
        """Whether each number of the state has one of its own in ``a``."""
        return self.axes == "KV"


KINDS: dict[str, Kind] = {
    "none": Kind("the state is kept: ranks add up", adjoint="none", sent_as="numbers"),
    "scalar": Kind(
        "one factor for the state: ranks exchange the state and multiply",
        axes="", logarithm=True, function="decay_scalar", adjoint="scalar", sent_as="matrix",
    ),
    "vector": Kind(
        "one factor a row of the state: ranks exchange the state and multiply",
        axes="K", logarithm=True, function="decay_vector", adjoint="vector", sent_as="matrix",
    ),
    # The kernel multiplies: it would let NaN pass a factor of 0, where PyTorch says that a document begins.
    "elementwise": Kind(
        "a factor for each number of the state: ranks exchange the state and multiply",
        axes="KV", function="decay_elementwise", by=1, adjoint="elementwise",
    ),
    "dense": Kind(
        "a matrix from the left: each rank propagates [0 | I] too, and ranks exchange the state",
        axes="KK", adjoint="dense", sent_as="matrix",
    ),
    # The derivative of a maximum has a factor for each number, which says whose it is. Stabilisers need float64.
    "max-plus": Kind(
        "the larger of state plus shift and another: ranks exchange the state and take the maximum",
        axes="KV", function="decay_shift", by=2, adjoint="elementwise", dtypes=(torch.float32, torch.float64),
        sent_as="numbers",
    ),
    "sequential": Kind("not affine in the state: ranks run one after the other, exactly"),
}  # fmt: skip


def times(a: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """A S with a diagonal A; nothing passes where it is 0, not even what is not finite."""
    return (a * state).masked_fill(a == 0, 0.0)


def _matmul(A: torch.Tensor, S: torch.Tensor) -> torch.Tensor:
    """A S; nothing passes an A of zeros, not even what is not finite."""
    return (A @ S).masked_fill(_nothing_passes(A), 0.0)


def _nothing_passes(A: torch.Tensor) -> torch.Tensor:
    """Where a matrix is zeros, to be broadcast to it."""
    return (A == 0).flatten(-2).all(-1)[..., None, None]


def _like(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """``x`` with axes of 1 behind its own, to be broadcast to the state."""
    return x.view(*x.shape, *[1] * (state.dim() - x.dim()))


class Transition(NamedTuple):
    """What a stretch does to states [B, H, *state]; [B, NSEG, H, K, V] for the segments of a rank.

    Attributes:
        kind: one of `KINDS`.
        a: None ("none", "sequential"); logarithms of one factor a head [..., H] ("scalar") or a key channel [..., H, K]
            ("vector"); factors ("elementwise") or shifts ("max-plus") of the state's shape; or matrices [..., H, K, K].
        cut: None or [...], as the axes before the heads; nonzero where a document starts in the stretch, so that
            nothing passes it.
    """

    kind: str
    a: torch.Tensor | None = None
    cut: torch.Tensor | None = None

    @classmethod
    def of(
        cls, state: torch.Tensor, a: torch.Tensor | None = None, cut: torch.Tensor | None = None,
        kind: str | None = None,
    ) -> Transition:  # fmt: skip
        """The transition over ``state`` [B, H, *state], checked; without a kind, "scalar" or "vector" by the shape."""
        if state.dim() < 2:
            raise ValueError(f"state: expected [B, H, *state], got shape {tuple(state.shape)}")
        if kind is None:
            kind = "none" if a is None else "scalar" if a.dim() == 2 else "vector"
        found = cls(kind, a, cut)
        found.check(1, tuple(state.shape))
        return found

    def check(self, lead: int, states: tuple[int, ...]) -> None:
        """ValueError unless the shapes are those of a transition over these states, with ``lead`` axes before heads."""
        want = self._shape(lead, states)
        got = None if self.a is None else tuple(self.a.shape)
        if got != want:
            raise ValueError(f"a: expected shape {want} for the kind {self.kind!r}, got {got}")
        if self.cut is not None and self.cut.shape != states[:lead]:
            raise ValueError(f"cut: expected shape {states[:lead]}, got {tuple(self.cut.shape)}")

    def _shape(self, lead: int, state: tuple[int, ...]) -> tuple[int, ...] | None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        heads, rows, axes = state[: lead + 1], state[lead + 1 : lead + 2], KINDS[self.kind].axes
        if axes is None:
            return None
        return state if axes == "KV" else heads + rows * len(axes)

    def check_composes(self) -> None:
        """ValueError where no two stretches are known to be one, so that ranks run one after the other."""
        if self.kind == "sequential":
            raise ValueError("transition: expected one that composes, got 'sequential' (see flexsp/scan/relay.py)")

    # Applied and composed

    @property
    def neutral(self) -> float:
        """F of a stretch without tokens: 0, or -inf of "max-plus"."""
        return -torch.inf if self.kind == "max-plus" else 0.0

    def factor(self, like: torch.Tensor) -> torch.Tensor | None:
        """A itself in the dtype of ``like``, broadcastable to the states unless dense; None for the identity.

        Of "max-plus" the shifts, -inf where there is a cut.
        """
        self.check_composes()
        a = None
        if self.a is not None:
            a = self.a.to(like.dtype)
            a = _like(a.exp() if KINDS[self.kind].logarithm else a, like)
        if self.cut is not None:
            dropped = _like(self.cut != 0, like)
            a = (~dropped).to(like.dtype) if a is None else a.masked_fill(dropped, self.neutral)
        return a

    def times(self, a: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """What is left of a state behind a factor ``a`` of this kind."""
        if self.kind == "max-plus":
            return (a + state).masked_fill(a == -torch.inf, -torch.inf)
        return _matmul(a, state) if self.kind == "dense" else times(a, state)

    def apply(self, state: torch.Tensor, plus: torch.Tensor | None = None) -> torch.Tensor:
        """A S, or A S + F; of "max-plus" S + a, or max(S + a, F)."""
        a = self.factor(state)
        out = state if a is None else self.times(a, state)
        if plus is None:
            return out
        return torch.maximum(out, plus) if self.kind == "max-plus" else out + plus

    def composed(self) -> Transition:
        """All stretches along the second axis, as the segments of a rank, in one. A "dense" one is alone."""
        cut = None if self.cut is None else (self.cut != 0).any(1)
        if self.a is None or self.kind == "dense":
            return Transition(self.kind, None if self.a is None else self.a[:, 0], cut)
        return Transition(self.kind, self.a.prod(1) if self.kind == "elementwise" else self.a.sum(1), cut)

    # Backward

    def adjoint(self) -> Transition:
        """A^T: a diagonal is its own."""
        if KINDS[self.kind].adjoint != self.kind:
            raise ValueError(f"reverse: expected a transition that is linear, got one of the kind {self.kind!r}")
        return Transition("dense", self.a.mT, self.cut) if self.kind == "dense" and self.a is not None else self

    def gradient(self, state: torch.Tensor, dF: torch.Tensor, reverse: bool = False) -> torch.Tensor | None:
        """That of ``a``, where `state` came in and ``dF`` is the gradient of A S + F, of A^T S + F if ``reverse``."""
        if self.a is None:
            return None
        if self.kind == "dense":
            return state @ dF.mT if reverse else dF @ state.mT
        if self.kind == "elementwise":
            return dF * state
        found = times(self.apply(state), dF)
        return found.sum(tuple(range(self.a.dim(), found.dim()))).to(self.a.dtype)

    # On the wire

    def split(self, state: torch.Tensor, pieces: int) -> list[tuple[torch.Tensor, Transition]]:
        """``state`` in parts that do not depend on each other, each with its transition: some columns where A is dense,
        else some rows of [..., V]. `join` puts such parts together."""
        if self.kind == "dense":
            return [(part, self) for part in state.chunk(pieces, dim=-1)]
        rows = state.reshape(-1, state.shape[-1]).chunk(pieces)
        a = self.factor(state)
        if a is None:
            return [(part, Transition("none")) for part in rows]
        kind: str = "max-plus" if self.kind == "max-plus" else "elementwise"
        a = a.expand(*state.shape[:-1], a.shape[-1])
        parts = a.reshape(-1, a.shape[-1]).chunk(pieces)
        return [(part, Transition(kind, x)) for part, x in zip(rows, parts, strict=True)]

    def join(self, parts: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
        """The state of this shape from its parts."""
        if len(parts) == 1:
            return parts[0].view(shape)
        return torch.cat(parts, dim=-1 if self.kind == "dense" else 0).view(shape)

    def packed(self, F: torch.Tensor, parts: int = 1) -> torch.Tensor:
        """A and F side by side, alike on all ranks whether they have a cut or not.

        Returns:
            [rows, A and F]: the rows of the state, each behind its own A. Of a dense A [matrices, K, A and F]: one for
            each head, or for some columns of each head where there are fewer heads than ``parts``.
        """
        a = self.factor(F)
        if self.kind == "dense":
            assert a is not None
            heads, (K, V) = F.shape[:2].numel(), F.shape[2:]
            blocks = next((n for n in range(1, V) if V % n == 0 and heads * n >= parts), max(V, 1))
            columns = F.reshape(heads, K, blocks, -1).transpose(1, 2)
            return torch.cat([a.reshape(heads, 1, K, K).expand(-1, blocks, -1, -1), columns], -1).flatten(0, 1)
        if a is None:
            a = F.new_ones([1] * F.dim())
        by_number = KINDS[self.kind].by_number
        if self.a is not None and self.a.dim() == F.dim() and not by_number:
            a, F = a.unsqueeze(-1), F.unsqueeze(-1)
        width = F.shape[-1] if by_number else 1
        return torch.cat([a.expand(*F.shape[:-1], width), F], -1).flatten(0, -2)

    def unpacked(self, states: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The state of this shape whose rows or columns lie as F does in `packed`."""
        if self.kind == "dense":
            states = states.view(shape[:2].numel(), -1, shape[2], states.shape[-1]).transpose(1, 2)
        return states.reshape(shape)

    def in_packed(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(A, F), views."""
        width = packed.shape[-2] if self.kind == "dense" else 1
        if KINDS[self.kind].by_number:
            width = packed.shape[-1] // 2
        return packed[..., :width], packed[..., width:]

    def apply_packed(self, packed: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """`apply` of A and F, as `packed` gave them on any rank, to states that lie as F does."""
        a, F = self.in_packed(packed)
        left = self.times(a, states)
        return torch.maximum(left, F) if self.kind == "max-plus" else left + F

    def compose_packed(self, packed: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
        """A and F of two stretches in a row, the second one first: (A2 A1, A2 F1 + F2)."""
        (a, F), (before, _) = self.in_packed(packed), self.in_packed(earlier)
        if KINDS[self.kind].by_number:
            both = self.times(a.unsqueeze(-2), earlier.unflatten(-1, (2, -1))).flatten(-2)
        else:
            both = self.times(a, earlier)
        through, state = self.in_packed(both)
        # What the later one makes of an A through which nothing passes may not be finite.
        if self.kind == "max-plus":
            through.masked_fill_(before == -torch.inf, -torch.inf)
            torch.maximum(state, F, out=state)
            return both
        closed = _nothing_passes(before) if self.kind == "dense" else before == 0
        through.masked_fill_(closed, 0.0)
        state.add_(F)
        return both
