"""What `make test` leaves to `make test-all`, and what takes longest in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

__all__ = ["by_turns", "quick", "slow"]


def slow(*values: Any) -> list[Any]:
    """These values of a parameter (tuples where there are several), each marked as slow."""
    return [pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=pytest.mark.slow) for x in values]


def quick(every: Iterable[Any], *names: Any) -> list[Any]:
    """These of a parameter's values, and the others as slow ones."""
    return [*names, *slow(*(x for x in every if x not in names))]


def by_turns(names: Iterable[Any], kinds: Sequence[Any], *always: Any) -> list[Any]:
    """Pairs of a name and a kind (`always` are kinds too): each name with those of `always` and with one of the others,
    by turns; the rest as slow ones."""
    found = []
    for i, name in enumerate(names):
        for kind in (*always, *kinds):
            marks = [] if kind in always or kind == kinds[i % len(kinds)] else pytest.mark.slow
            found.append(pytest.param(name, kind, marks=marks, id=f"{name}-{kind}".replace("torch.", "")))
    return found
