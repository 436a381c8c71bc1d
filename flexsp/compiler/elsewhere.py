"""Work that must not see the state of the thread that asks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

__all__ = ["elsewhere"]


def elsewhere(device: torch.device, work: Callable[[], Any]) -> Any:
    """What `work` returns in a thread of its own, on the current stream of `device`.

    There no tracer, mode, transform or hook of the caller's thread is in force: inference mode, autocast, what compiles
    or checkpoints the call, hooks on saved tensors.
    """
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
