"""Runs work in a thread of its own, where the state of the calling thread is not in force."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from flexsp.runtime.workarounds.device_guard import outlive_threads

__all__ = ["run_in_clean_thread"]


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
