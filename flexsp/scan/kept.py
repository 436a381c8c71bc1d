"""What is kept of calls for the next ones like them."""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["keep"]

_lock = threading.Lock()


def keep(kept: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Adds an entry to `kept`, which has at most so many: the oldest goes. Threads may look entries up meanwhile."""
    with _lock:
        if len(kept) >= most and key not in kept:
            kept.pop(next(iter(kept)), None)
        kept[key] = value
