"""m_t = max(a_t + m_{t-1}, c_t) over tokens, documents and ranks: the maximum that stabilises exponential gates.

Elements (a, c) compose to (a_1 + a_2, max(a_2 + c_1, c_2)); the identity is (0, -inf). Sums are made in a tree and are
never subtracted, so they lose no precision over long sequences. Not differentiable.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from flexsp.comm.collectives import of_every_rank
from flexsp.comm.group import SequenceParallel

__all__ = ["Elements", "enters", "scan", "together"]

_CHUNK = 64
Optional = torch.Tensor | None


class Elements(NamedTuple):
    """a and c [..., T], and a bool like them, true where nothing from before passes, whatever a is; None: nowhere."""

    a: torch.Tensor
    c: torch.Tensor
    cut: Optional = None

    def then(self, later: Elements) -> Elements:
        cut = None if self.cut is None or later.cut is None else self.cut | later.cut
        return Elements(self.a + later.a, torch.maximum(later.c, later.passing(self.c)), cut)

    def passing(self, m: torch.Tensor) -> torch.Tensor:
        """What is left of a maximum before."""
        passed = self.a + m
        return passed if self.cut is None else passed.masked_fill(self.cut, -torch.inf)

    def padded(self, left: int, right: int = 0) -> Elements:
        """With identities at the ends; a negative number takes elements away."""
        at = left, right
        return Elements(
            F.pad(self.a, at), F.pad(self.c, at, value=-torch.inf), None if self.cut is None else F.pad(self.cut, at)
        )

    def view(self, *shape: int) -> Elements:
        """Of the last axes."""
        return Elements(*(None if x is None else x.reshape(*self.a.shape[:-1], *shape) for x in self))  # type: ignore

    def at(self, place: int) -> Elements:
        return Elements(*(None if x is None else x[..., place] for x in self))  # type: ignore[arg-type]


def scan(tokens: Elements) -> Elements:
    """Every element composed with all before it, along the last axis. Without derivatives.

    In a graph of torch.compile it is one node, since its steps depend on how many elements there are.
    """
    if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
        a, c, cut = torch.ops.flexsp.max_plus_scan(*tokens)
        return Elements(a, c, None if tokens.cut is None else cut)
    T = tokens.a.shape[-1]
    if T <= _CHUNK:
        return _doubled(tokens)
    n = -(-T // _CHUNK)
    inside = _doubled(tokens.padded(0, n * _CHUNK - T).view(n, _CHUNK))
    before = scan(inside.at(-1)).padded(1, -1)
    found = Elements(*(None if x is None else x.unsqueeze(-1) for x in before)).then(inside)  # type: ignore[arg-type]
    return Elements(*(None if x is None else x.flatten(-2)[..., :T] for x in found))  # type: ignore[arg-type]


def together(until: Elements) -> Elements:
    """All of scanned elements in one; the identity if there are none."""
    return until.padded(1).at(-1) if until.a.shape[-1] == 0 else until.at(-1)


def enters(all_tokens: Elements, start: torch.Tensor, sp: SequenceParallel) -> torch.Tensor:
    """The maximum [...] that enters this rank, of what all its tokens are together, [...]. Collective over ``sp``.

    Args:
        start: [...], what enters the first rank.
    """
    a, c, cut = all_tokens
    if sp.is_first:
        c = torch.maximum(c, all_tokens.passing(start))
    a, c, cut = of_every_rank(torch.stack([a, c, torch.zeros_like(a) if cut is None else cut.to(a.dtype)]), sp)
    return start if sp.is_first else scan(Elements(a, c, cut != 0)).c[..., sp.rank - 1]


def _doubled(found: Elements) -> Elements:
    reach = 1
    while reach < found.a.shape[-1]:
        found = found.padded(reach, -reach).then(found)
        reach *= 2
    return found


def _operator(a: torch.Tensor, c: torch.Tensor, cut: Optional) -> tuple[torch.Tensor, ...]:
    found = scan(Elements(a, c, cut))
    outputs = found.a, found.c, c.new_empty(0, dtype=torch.bool) if found.cut is None else found.cut
    return tuple([x.clone(memory_format=torch.contiguous_format) for x in outputs])


def _fake_operator(a: torch.Tensor, c: torch.Tensor, cut: Optional) -> tuple[torch.Tensor, ...]:
    return a.new_empty(a.shape), c.new_empty(c.shape), c.new_empty(0 if cut is None else cut.shape, dtype=torch.bool)


_lib = torch.library.Library("flexsp", "FRAGMENT")
_lib.define("max_plus_scan(Tensor a, Tensor c, Tensor? cut) -> (Tensor, Tensor, Tensor)")
_lib.impl("max_plus_scan", _operator, "CompositeExplicitAutograd")
torch.library.register_fake("flexsp::max_plus_scan", _fake_operator, lib=_lib)
