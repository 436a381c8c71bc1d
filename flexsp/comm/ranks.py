"""Ranks: what is known of one group that shares a sequence. `SequenceParallel`, which users call, is made of it."""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import inspect
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.utils.checkpoint

from flexsp.comm import faults
from flexsp.comm.recorder import Recorder
from flexsp.exceptions import BetweenRanks, FlexspError

__all__ = ["GROUPS", "Ranks", "ambient", "count_failed_call", "ranks_call", "ranks_of"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_NO_ERROR = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())  # ends a recomputation that is complete
GROUPS: dict[int, Ranks] = {}
"""Those that are open, by their id."""
_next_id = itertools.count()
_made_over: collections.Counter[tuple[int, ...]] = collections.Counter()


class _Ambient(threading.local):
    """Thread-local rather than a ContextVar: torch.compile can trace it."""

    def __init__(self) -> None:
        # in __init__, so that torch.compile's guards find them on every thread
        self.sp: Any = None  # None, or a SequenceParallel
        self.entered: FrameType | None = None
        self.keeps_bits = False  # the op that runs now gives the same bits for any number of ranks
        self.in_segment = False  # what runs now is given one segment (`flexsp.scan.by_segments`)


ambient = _Ambient()
"""The group of the innermost `flexsp.comm.group.sequence_parallel` of each thread."""


class Ranks:
    """The ranks one sequence is cut over, in order, and what their exchanges count and leave behind.

    Attributes beside those of `SequenceParallel`:
        id: key of this object in this process; compiled graphs and autograd nodes keep it instead of the object.
        heap: symmetric memory of the transports that send in a kernel; calls that need more replace it by a larger one.
        open_heap: makes the heap, of a number of bytes, on all ranks together; None where the heap keeps its size.
        outgrown: heaps before it and what the scan made of them, for kernels under way and captured graphs.
        order: int64 [1] on ``device``, declared as mutated by every communicating op, so that no compiler drops or
            reorders one.
        anchor: scalar leaf that requires grad; makes communicating ops part of the graph on every rank.
        calls: exchanges begun.
        recorder: the last of them.
        store_key: under which ranks tell each other of faults in the store of torch.distributed; the same on all.
        reported: what this rank has told there; None before a fault.
        compared: texts compared under FLEXSP_CHECK=1.
        asked: how often ranks told each other their lengths.
        answered: number of the exchange whose backward pass runs, 0 outside of such passes.
        abandoned: calls that an error ended on this rank (`ranks_call`).
        check_calls: whether call signatures are compared between the ranks before a launch (FLEXSP_CHECK=1).
        channels: scratch of the transports.
        records: error record of the watchdog.
        failure: the error that an earlier call left behind.
    """

    constant_in_recipes = True

    def __init__(
        self, *, rank: int = 0, world_size: int = 1, global_ranks: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None, cpu_group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu", transport: str = "process_group", schedule: str = "chain", heap: Any = None,
        open_heap: Callable[[int], Any] | None = None, timeout_s: float = 120.0, check_calls: bool = False,
        hosts: Sequence[int] | None = None, segment: int = 0,
    ) -> None:  # fmt: skip
        self.id = next(_next_id)
        self.rank, self.world_size = rank, world_size
        self.global_ranks = list(range(world_size)) if global_ranks is None else list(global_ranks)
        self.group, self.cpu_group = group, cpu_group
        self.device = torch.device(device)
        self.transport, self.schedule, self.heap, self.open_heap = transport, schedule, heap, open_heap
        self.outgrown: list[tuple[Any, Any]] = []
        self.timeout_s, self.check_calls, self.segment = float(timeout_s), check_calls, segment
        self.hosts = (world_size,) if hosts is None else tuple(hosts)
        with torch.inference_mode(False):  # these outlast it
            self.order = torch.zeros(1, dtype=torch.int64, device=self.device)
            self.anchor = torch.zeros((), device=self.device, requires_grad=True)
        self.start_anew()
        self.compared = 0
        self.asked = 0
        self.answered = 0
        self._lengths: list[int] | None = None
        GROUPS[self.id] = self

    def start_anew(self) -> None:
        """Forgets all exchanges and their failures. Every rank does so at the same place, when none is under way."""
        self.channels: dict[Any, Any] = {}
        self.records: Any = None
        self.failure: BetweenRanks | None = None
        self.recorder = Recorder()
        self.reported: dict[str, Any] | None = None
        self.calls = 0
        self.abandoned = 0
        members = tuple(self.global_ranks)  # groups are made by all their ranks, in the same order
        name = hashlib.sha256(repr(members).encode()).hexdigest()[:12]
        self.store_key = f"flexsp/faults/{name}-{_made_over[members]}"
        _made_over[members] += 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.world_size - 1

    def neighbours(self, reverse: bool = False) -> tuple[int | None, int | None]:
        """(source, target) of what passes along the ranks from left to right, or from right to left."""
        left = self.rank - 1 if self.rank > 0 else None
        right = self.rank + 1 if self.rank + 1 < self.world_size else None
        return (right, left) if reverse else (left, right)

    @property
    def lengths(self) -> list[int] | None:
        """Shard lengths given by `set_lengths`, else None."""
        return self._lengths

    def check_shard(self, T_local: int, rows: int = 1) -> None:
        """ValueError unless this rank has as many tokens as `set_lengths` says, if it says. Sends nothing.

        Every op and layer asks it before anything else, so that a whole sequence is never taken for a shard.
        """
        if self._lengths is None or rows * self._lengths[self.rank] == T_local:
            return
        of = f"{self._lengths[self.rank]} tokens (set_lengths)" + (f" of {rows} rows" if rows > 1 else "")
        whole = T_local == rows * sum(self._lengths)
        hint = ", as many as all ranks have together: cut with sp.shard" if whole and self.world_size > 1 else ""
        raise ValueError(f"rank {self.rank}: expected a shard of {of}, got {T_local}{hint}")

    def number(self) -> int:
        """Of the exchange that was compared last, the same on every rank; 0 without FLEXSP_CHECK=1 and in graphs."""
        return 0 if torch.compiler.is_compiling() else self.compared

    def answering(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Exchanges inside are of the backward pass of the one with this `number`, and say so to each other."""
        return self._answering(number) if number else contextlib.nullcontext()

    @contextlib.contextmanager
    def _answering(self, number: int) -> Iterator[None]:
        self.answered = number
        try:
            yield
        finally:
            self.answered = 0

    def check(self) -> None:
        """Raise the PeerTimeout or PeerMismatch that an earlier call left behind, if any."""
        if self.failure is None and self.records is not None:
            self.failure = self.records.error(self.rank)  # once written it stays
        if self.failure is not None:
            raise faults.explained(self, self.failure)

    def dump(self, folder: str | os.PathLike[str], error: BaseException | None = None) -> Path:
        """Writes the last 64 exchanges of each group of this process into `folder`, as ``rank_N.json`` with its rank N
        of the world.

        After an error between ranks this happens by itself where FLEXSP_DUMP names a folder. ``python -m flexsp dump
        FOLDER`` reads the files of all ranks. Not collective, and no GPU is waited for.

        Returns:
            the file, which is replaced in one step.
        """
        file = Path(folder) / f"rank_{self.global_ranks[self.rank]}.json"
        found = self.failure if self.failure is not None else error
        groups = [
            group.as_row(found if group is self else group.failure) for group in list(GROUPS.values())
            if group.world_size > 1 or group is self
        ]  # fmt: skip
        content = {
            "rank": self.global_ranks[self.rank], "host": socket.gethostname(), "process": os.getpid(),
            "written_ns": time.time_ns(), "error": None if error is None else str(error), "groups": groups,
        }  # fmt: skip
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(content, indent=1))
        beside.replace(file)
        return file

    def as_row(self, failure: BaseException | None) -> dict[str, Any]:
        """What a dump says of this group and of its failure."""
        fault = getattr(failure, "fault", None)
        return {
            "key": self.store_key, "ranks": self.global_ranks, "rank": self.rank, "transport": self.transport,
            "schedule": self.schedule, "timeout_s": self.timeout_s, "lengths": self._lengths, "calls": self.calls,
            "abandoned": self.abandoned, "failure": None if failure is None else str(failure),
            "first_fault": None if fault is None else str(fault),
            "kernel_record": None if self.records is None else self.records.row(),
            "exchanges": [*self.recorder.rows()],
        }  # fmt: skip


def count_failed_call(error: BaseException, sp: object) -> None:
    """Counts a call over ``sp`` that ``error`` ends on this rank.

    The others may have made the call, and what they sent then still lies there: the count is part of what ranks
    compare, so that the next exchange says so. Errors that all ranks meet alike leave the counts equal.
    """
    found = ambient.sp if sp is None else sp
    if isinstance(error, _NO_ERROR):
        return
    if isinstance(found, Ranks) and found.world_size > 1 and not getattr(error, "_flexsp_counted", False):
        found.abandoned += 1
        with contextlib.suppress(AttributeError):
            error._flexsp_counted = True  # type: ignore[attr-defined]


def ranks_call(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator of functions with an argument ``sp`` that all ranks call together; see `count_failed_call`."""

    @functools.wraps(fn)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            with contextlib.suppress(TypeError):  # of arguments that the function does not take
                count_failed_call(error, inspect.signature(fn).bind(*args, **kwargs).arguments.get("sp"))
            raise

    return run


def ranks_of(sp_id: int) -> Ranks:
    """The open group with this id; FlexspError once it is closed."""
    if sp_id not in GROUPS:
        raise FlexspError(f"SequenceParallel {sp_id} was closed: a call or a backward pass still needs it")
    return GROUPS[sp_id]
