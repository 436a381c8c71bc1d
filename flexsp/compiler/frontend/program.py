"""`Functions`, three traced functions, and `Program`, what `check` found out about them. All later stages read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flexsp.compiler.frontend import primitives
from flexsp.compiler.frontend.meta import InputMeta, Part, Size
from flexsp.compiler.frontend.running_sums import with_wide_sums
from flexsp.compiler.frontend.trace import Traced

__all__ = ["Functions", "Program", "call", "has_parts", "widths"]


@dataclass(frozen=True)
class Functions:
    """Three traced functions of the inputs in `meta`, not checked yet."""

    meta: InputMeta
    chunk: Traced
    decay: Traced
    merge: Traced
    fixed_chunks: bool  # the user says where chunks end, so results may depend on it


@dataclass(frozen=True)
class Program(Functions):
    """Three traced functions, with what `flexsp.compiler.frontend.check` found out about them."""

    transition: str
    linear: Traced | None  # A S of decay's S' = A S + F, or S + a of max(S + a, F); None if decay is neither
    value_sizes: tuple[Size, ...]  # sizes of one token's output; a number if no input has this size
    parts: tuple[Part, ...] = ()  # the state's parts after the first one, whose sizes are in `meta`
    lowerings: tuple[Any, ...] = ()  # each a `Lowering`: the first that takes a call runs it, else generated kernels
    disagrees: str | None = None  # how results depend on where chunks end; None if they do not

    def description(self, dtype: torch.dtype, packed: bool) -> str:
        """The description of a call that ranks compare, to notice that they make different calls."""
        names = ", ".join(x.name for x in (self.chunk, self.decay, self.merge))
        return f"{names} on {dtype}{', packed' if packed else ''}"


def call(
    traced: Traced, values: Mapping[str, torch.Tensor | float], wide_sums: bool = False
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Result and cached values of one function on one chunk of one head; sums of gates in float64 if ``wide_sums``."""
    module = with_wide_sums(traced.module) if wide_sums else traced.module
    result, *cached = module(**{name: values[name] for name in traced.arguments})
    return result, dict(zip(traced.cached, cached, strict=True))


def has_parts(decay: Traced) -> bool:
    """Whether the state consists of several parts."""
    return any(node.target is primitives.joined for node in decay.graph.nodes)


def widths(decay: Traced, K: int, V: int) -> list[int]:
    """The number of columns, from the left, that each row of the state [K, V] has: V, or fewer in a state of parts."""
    nodes = [node for node in decay.graph.nodes if node.target is primitives.joined]
    places: list[Any] = [place for node in nodes for place in node.kwargs["places"]]  # type: ignore[union-attr]
    found = [0 if places else V] * K
    for row, column in places:
        end = column + 1 if isinstance(column, int) else column.stop
        for i in [row] if isinstance(row, int) else range(row.start, row.stop):
            found[i] = max(found[i], end)
    return found
