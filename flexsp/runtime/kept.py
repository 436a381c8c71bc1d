"""Bounded caches for results that later calls need again."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

__all__ = ["keep", "keep_with"]

_R = TypeVar("_R")

_lock = threading.Lock()


def keep(kept: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Adds an entry to `kept`, which holds at most `most`; the oldest entry goes. Other threads may read meanwhile."""
    with _lock:
        if len(kept) >= most and key not in kept:
            kept.pop(next(iter(kept)), None)
        kept[key] = value


def keep_with(position: int, most: int = 4096) -> Callable[[Callable[..., _R]], Callable[..., _R]]:
    """Decorator that caches results as long as the argument at `position` lives, at most `most` for each such argument.

    functools.lru_cache would keep the argument alive. For the same reason results must not refer to it.
    """

    def decorate(fn: Callable[..., _R]) -> Callable[..., _R]:
        found: WeakKeyDictionary[Any, dict[Any, _R]] = WeakKeyDictionary()

        @functools.wraps(fn)
        def run(*args: Any) -> _R:
            with _lock:
                results = found.setdefault(args[position], {})
            key = (*args[:position], *args[position + 1 :])
            try:
                return results[key]
            except KeyError:
                result = fn(*args)
                keep(results, key, result, most)
                return result

        run.cache_clear = found.clear  # type: ignore[attr-defined]
        return run

    return decorate
