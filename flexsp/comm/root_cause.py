"""Lets torchrun's "Root Cause" name the rank that failed, not a healthy one that waited for it in vain.

torchrun ends all ranks of a host as soon as one has failed. Of those it names the one with the earliest time as root
cause, and takes a rank's time and message from a file that the rank wrote (`torch.distributed.elastic`, `record`), else
the time at which it saw the rank end. A rank that hangs, or is slow to end after its own error, is seen last. So a rank
that learns where the trouble began writes the file of that rank, with an earlier time than its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

__all__ = ["record_root_cause"]

_LATER_S = 1.1  # torchrun compares whole seconds


def record_root_cause(sp: Any, error: Any) -> None:
    """Writes what torchrun is to say of the rank that ``error.fault`` names, and of this one. `sp` is a `Ranks`.

    Other hosts have files of their own: there this rank's file says whose fault it was. What a rank wrote itself, by
    ``record`` around its main function, is kept; only its time may become earlier. A rank that is not at fault waits
    for a second, so that what ``record`` then writes of it is later. Nothing happens where torchrun did not start this
    process, or where the ranks did not find out.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not file or error.fault is None:
        return
    now, mine, culprit = int(time.time()), sp.global_ranks[sp.rank], sp.global_ranks[error.fault.rank]
    name = f"rank {mine}" if mine == culprit else f"rank {culprit}, as rank {mine} tells"
    theirs = _file_of(culprit, Path(file))
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it is the error that matters
        if theirs is not None:
            _write(theirs, f"{name}: {error.fault}", now - 1)
        if mine != culprit and not Path(file).exists():
            _write(Path(file), f"{type(error).__name__}: {error}", now)
    if mine != culprit:
        time.sleep(_LATER_S)


def _file_of(rank: int, mine: Path) -> Path | None:
    """The error file of a rank (of the world); None if it is on another host.

    torchrun numbers the ranks of a host in a row, and their files stand side by side: .../LOCAL_RANK/error.json.
    """
    try:
        own, local = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK"))
    except (KeyError, ValueError):
        return None
    if mine.parent.name != str(local):
        return None
    found = mine.parent.parent / str(rank - own + local) / mine.name
    return found if found.parent.is_dir() else None


def _write(file: Path, text: str, when: int) -> None:
    """A file as torch.distributed.elastic reads it; one that is there is only made earlier."""
    data: dict[str, Any] = {"message": {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(when)}}}
    if file.exists():
        data = json.loads(file.read_text())
        extra = data["message"]["extraInfo"]
        if int(extra["timestamp"]) <= when:
            return
        extra["timestamp"] = str(when)
    whole = file.with_name(f"{file.name}.{os.getpid()}")  # other ranks write it too
    whole.write_text(json.dumps(data))
    os.replace(whole, file)
