"""Work that must not see the state of the thread that asks for it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

__all__ = ["run_in_clean_thread"]


@functools.cache
def _outlive_threads() -> None:
    """torch 2.11 built for CUDA, on a host without a GPU: the first thread that enters a FakeTensorMode leaves a device
    guard of its own for all others, which crash once it has ended. So a thread that does not end goes first."""
    if not torch.__version__.startswith("2.11.") or torch.version.cuda is None or torch.cuda.is_available():
        return
    from torch._subclasses.fake_tensor import FakeTensorMode

    entered = threading.Event()

    def stay() -> None:
        with FakeTensorMode():
            entered.set()
        threading.Event().wait()

    threading.Thread(target=stay, name="flexsp-guard", daemon=True).start()
    entered.wait()


def run_in_clean_thread(device: torch.device, work: Callable[[], Any]) -> Any:
    """What `work` returns in a thread of its own, on the current stream of `device`.

    There no tracer, mode, transform or hook of the caller's thread is in force: inference mode, autocast, what compiles
    or checkpoints the call, hooks on saved tensors.
    """
    if torch.compiler.is_dynamo_compiling():  # it would compile what comes behind the thread's start beside the work
        return torch.compiler.disable(_elsewhere)(device, work)
    return _elsewhere(device, work)


def _elsewhere(device: torch.device, work: Callable[[], Any]) -> Any:
    _outlive_threads()
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
