"""What flexsp writes to the logger "flexsp". docs/use.md lists the messages.

Nothing is printed unless the program sets up logging, as ``logging.basicConfig(level=logging.INFO)`` does.
"""

from __future__ import annotations

import logging
import os
import threading

import torch

__all__ = ["LOGGER", "logs", "tell"]

LOGGER = logging.getLogger("flexsp")
LOGGER.addHandler(logging.NullHandler())  # without a handler Python would print warnings to stderr by itself

_MOST = 4096  # messages that are remembered, so that each is written once
_told: dict[tuple[int, str], None] = {}
_lock = threading.Lock()


def _forget_lock() -> None:
    """A fork may happen while another thread holds the lock, and the child has no such thread."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


def logs(level: int) -> bool:
    """Whether a message of this level is wanted: texts that take time are made only then. Never while torch.compile
    traces, since a message would end its graph."""
    return not torch.compiler.is_compiling() and LOGGER.isEnabledFor(level)


def tell(level: int, text: str) -> None:
    """Writes a message once in this process: equal texts of the same level after the first are left out."""
    if not logs(level):
        return
    with _lock:
        if (level, text) in _told:
            return
        if len(_told) >= _MOST:
            _told.pop(next(iter(_told)))
        _told[level, text] = None
    LOGGER.log(level, "%s", text, stacklevel=2)
