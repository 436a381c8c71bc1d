"""Makes variants and kernels one at a time, away from the state of the calling thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from flexsp.compiler.frontend.trace import CompileError
from flexsp.runtime.clean_thread import run_in_clean_thread

__all__ = ["in_turn", "one_at_a_time"]

_LOCK = threading.Lock()  # tracers and forward-mode differentiation have one state for all threads
_here = threading.local()
_Result = TypeVar("_Result")


def in_turn() -> bool:
    """Whether this thread is one that `one_at_a_time` made."""
    return getattr(_here, "making", False)


def one_at_a_time(work: Callable[[], _Result], what: str) -> _Result:
    """Calls `work` in a thread of its own while no other thread is in here, and returns its result.

    Raises:
        CompileError: `work` itself calls this function.
    """
    if in_turn():
        raise CompileError(
            "merge_mode", what, "this variant is made while the functions of another one are traced; make it, or call "
            "what makes it, once before, outside of the functions"
        )  # fmt: skip

    def marked() -> _Result:
        _here.making = True
        return work()

    with _LOCK:
        return run_in_clean_thread(torch.device("cpu"), marked)  # type: ignore[no-any-return]
