"""Runs work in a thread of its own, where the state of the calling thread is not in force; programs and kernels are
made there one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from flexsp.exceptions import CompileError
from flexsp.runtime.workarounds.device_guard import outlive_threads

__all__ = ["in_turn", "one_at_a_time", "run_in_clean_thread"]

_LOCK = threading.Lock()  # tracers and forward-mode differentiation have one state for all threads
_here = threading.local()
_Result = TypeVar("_Result")


def run_in_clean_thread(device: torch.device, work: Callable[[], Any]) -> Any:
    """Calls `work` in a new thread, on the current stream of `device`, and returns its result.

    No tracer, mode, transform or hook of the calling thread is in force there: neither inference mode nor autocast, no
    compilation or checkpoint of the call, no hooks on saved tensors.
    """
    if torch.compiler.is_dynamo_compiling():  # Dynamo would compile what follows the thread's start while it works
        return torch.compiler.disable(_in_thread)(device, work)
    return _in_thread(device, work)


def _in_thread(device: torch.device, work: Callable[[], Any]) -> Any:
    outlive_threads()
    answer: list[Any] = []
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run() -> None:
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                answer.append((work(), None))
        except BaseException as error:  # also what is no Exception, such as SystemExit, belongs to the caller
            answer.append((None, error))

    thread = threading.Thread(target=run, name="flexsp-graph")
    thread.start()
    thread.join()
    result, error = answer[0]
    if error is not None:
        raise error
    return result


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
