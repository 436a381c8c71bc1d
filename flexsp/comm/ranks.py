"""Ranks: what is known of one group that shares a sequence. `SequenceParallel`, which users call, is made of it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.utils.checkpoint

from flexsp.exceptions import FlexspError

__all__ = ["GROUPS", "Ranks", "ambient", "count_failed_call", "ranks_call", "ranks_of"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_NO_ERROR = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())  # ends a recomputation that is complete
GROUPS: dict[int, Ranks] = {}
"""Those that are open, by their id."""
_next_id = itertools.count()


class _Ambient(threading.local):
    """Thread-local rather than a ContextVar: torch.compile can trace it."""

    def __init__(self) -> None:
        # in __init__, so that torch.compile's guards find them on every thread
        self.sp: Any = None  # None, or a SequenceParallel
        self.entered: FrameType | None = None


ambient = _Ambient()
"""The group of the innermost `flexsp.comm.group.sequence_parallel` of each thread."""


class Ranks:
    """The ranks one sequence is cut over, in order, and what their exchanges count and leave behind.

    Attributes beside those of `SequenceParallel`:
        id: key of this object in this process; compiled graphs and autograd nodes keep it instead of the object.
        heap: symmetric memory of the transports other than process_group.
        order: int64 [1] on ``device``, declared as mutated by every communicating op, so that no compiler drops or
            reorders one.
        anchor: scalar leaf that requires grad; makes communicating ops part of the graph on every rank.
        calls: exchanges begun.
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
        timeout_s: float = 120.0, check_calls: bool = False, hosts: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.id = next(_next_id)
        self.rank, self.world_size = rank, world_size
        self.global_ranks = list(range(world_size)) if global_ranks is None else list(global_ranks)
        self.group, self.cpu_group = group, cpu_group
        self.device = torch.device(device)
        self.transport, self.schedule, self.heap = transport, schedule, heap
        self.timeout_s, self.check_calls = float(timeout_s), check_calls
        self.hosts = (world_size,) if hosts is None else tuple(hosts)
        with torch.inference_mode(False):  # these outlast it
            self.order = torch.zeros(1, dtype=torch.int64, device=self.device)
            self.anchor = torch.zeros((), device=self.device, requires_grad=True)
        self.channels: dict[Any, Any] = {}
        self.records: Any = None
        self.failure: FlexspError | None = None
        self.calls = 0
        self.abandoned = 0
        self.compared = 0
        self.asked = 0
        self.answered = 0
        self._lengths: list[int] | None = None
        GROUPS[self.id] = self

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
        failure = self.failure
        if failure is None and self.records is not None:
            failure = self.records.error(self.rank)
        if failure is not None:
            raise failure


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
