"""What `make test` leaves to `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["quick", "slow"]


def slow(*values: Any) -> list[Any]:
    """These values of a parameter (tuples where there are several), each marked as slow."""
    return [pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=pytest.mark.slow) for x in values]


def quick(every: Iterable[Any], *names: Any) -> list[Any]:
    """These of a parameter's values, and the others as slow ones."""
    return [*names, *slow(*(x for x in every if x not in names))]
