"""Keeps a device guard of torch 2.11 alive that other threads go on using.

In torch 2.11 built for CUDA, on a host without a GPU, the first thread that enters a FakeTensorMode registers a device
guard of its own for all threads. The others crash after that thread has ended. So a thread that never ends enters one
first.
"""

from __future__ import annotations

import functools
import threading

import torch

__all__ = ["outlive_threads"]


@functools.cache
def outlive_threads() -> None:
    """Starts the thread, once in a process and only where torch has the fault."""
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
