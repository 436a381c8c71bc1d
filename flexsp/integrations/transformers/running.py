"""The shard that a layer of a parallelized model runs on, for the functions that the layer calls.

Not every layer hands its keyword arguments on: the decoder layers of Jamba hand their mixers none, and the mixers of
Mamba-1 hand their scan none. So a layer enters `on_shard`, and what it calls finds the shard in `running_shard`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from flexsp.exceptions import FlexspError
from flexsp.integrations.transformers.batch import Shard

__all__ = ["entered_shard", "on_shard", "running_shard"]


class _Running(threading.local):
    def __init__(self) -> None:  # not on the class: torch.compile's guards look here, on every thread
        self.shard: Shard | None = None


_running = _Running()


@contextlib.contextmanager
def on_shard(shard: Shard) -> Iterator[None]:
    """Inside, on this thread, `running_shard` is this one."""
    before, _running.shard = _running.shard, shard
    try:
        yield
    finally:
        _running.shard = before


def entered_shard() -> Shard | None:
    """The shard of the innermost `on_shard`; None outside of all."""
    return _running.shard


def running_shard() -> Shard:
    """The same inside of a layer, where there is one."""
    if _running.shard is None:
        raise FlexspError("a layer's function was called outside of its forward")
    return _running.shard
