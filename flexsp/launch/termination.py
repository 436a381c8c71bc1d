"""Last exchanges of a process that is ended from outside: torchrun ends the other ranks as soon as one has died.

They may be waiting in C++ or for a GPU then, where no Python code runs, also no handler of a signal. But Python's own
part of a handler, which runs at once, writes the signal's number into a file (`signal.set_wakeup_fd`); a thread waits
for it there. This is done only where FLEXSP_DUMP names a folder.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import threading
from types import FrameType

from flexsp.comm.ranks import GROUPS

__all__ = ["dump_when_ended"]

_pipe: tuple[int, int] | None = None
_END = 0  # no signal has this number: the process ends
_done = threading.Event()


def dump_when_ended() -> None:
    """From now on SIGTERM writes this process's last exchanges before it ends it. A handler of the user's stays, and
    then decides about the end."""
    global _pipe
    asked = bool(os.environ.get("FLEXSP_DUMP")) and threading.current_thread() is threading.main_thread()
    if not asked or _pipe is not None or signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        return
    _pipe = os.pipe()
    os.set_blocking(_pipe[1], False)
    other = signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
    if other != -1:  # somebody else waits for signals
        signal.set_wakeup_fd(other)
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _left_to_the_thread)
    threading.Thread(target=_wait, args=(_pipe[0],), daemon=True, name="flexsp-termination").start()
    atexit.register(_let_it_write)


def _left_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Python calls no wakeup without a handler of its own."""


def _wait(pipe: int) -> None:
    while True:
        told = os.read(pipe, 64)
        if signal.SIGTERM in told:
            _write()
        if _END in told:
            _done.set()


def _let_it_write() -> None:
    """A handler of the user's may end the process at once, and threads with it."""
    assert _pipe is not None
    with contextlib.suppress(OSError):
        os.write(_pipe[1], bytes([_END]))
        _done.wait(5)


def _write() -> None:
    """Writes the last exchanges, and ends the process unless the user has a handler."""
    group = next((group for group in list(GROUPS.values()) if group.world_size > 1), None)
    if group is not None:
        with contextlib.suppress(OSError):
            group.dump(os.environ.get("FLEXSP_DUMP", ""))
    if signal.getsignal(signal.SIGTERM) is _left_to_the_thread:
        ctypes.CDLL(None).signal(int(signal.SIGTERM), None)  # Python's lets the main thread alone do so
        os.kill(os.getpid(), signal.SIGTERM)


def _leave_to_children() -> None:
    """A child has no such thread; workers of a data loader, which are ended by SIGTERM, would live on."""
    if _pipe is not None:
        atexit.unregister(_let_it_write)
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) is _left_to_the_thread:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_leave_to_children)
