"""Oracles, comparison by rule, and functions run on several ranks."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {"RankFailure": "ranks", "close_pools": "ranks", "run_ranks": "ranks"}

__all__ = ["RankFailure", "close_pools", "run_ranks"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"flexsp.testing.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
