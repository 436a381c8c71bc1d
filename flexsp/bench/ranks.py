"""What the runs over ranks share: aligned starts, timing, gathering, one sequence-parallel object a schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from flexsp.bench.timing import L2Flush, Stopwatch, busy_wait, summarize, synchronize
from flexsp.comm.transport import PROCESS_GROUP

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel

__all__ = ["Aligned", "SCHEDULES", "open_schedules", "split_schedule"]

SCHEDULES = ("chain", "serial", "pipelined", "all_gather", "hierarchical")
# Enough for the host to enqueue a whole forward + backward while the device waits.
AHEAD_MS = 1.5


def split_schedule(text: str, transport: str) -> tuple[str, str]:
    """`chain:put` -> ("chain", "put"). Without a transport: the given one for chain, process_group for the others."""
    schedule, _, own = text.partition(":")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {schedule!r}")
    return schedule, own or (transport if schedule == "chain" else PROCESS_GROUP)


def open_schedules(names: list[str], transport: str, timeout_s: float) -> dict[str, SequenceParallel]:
    """One SequenceParallel a schedule, all over the default group. Collective."""
    from flexsp.launch.bootstrap import init_sequence_parallel

    opened = {}
    for name in names:
        schedule, chosen = split_schedule(name, transport)
        opened[name] = init_sequence_parallel(transport=chosen, schedule=schedule, timeout_s=timeout_s)
    return opened


class Aligned:
    """Times functions that run on all ranks, each run started by all ranks together.

    A run is: flush the L2, keep the device busy while the host enqueues, an all-reduce of one number on the same
    stream (no rank leaves it before the last one has entered), start event, the call, end event. The host is never
    synchronised inside the loop, so the barrier is the device's. On the CPU the barrier is the process group's.
    """

    def __init__(self, sp: SequenceParallel, flush: bool = True) -> None:
        self.sp = sp
        self._device = sp.device
        self._flush = L2Flush(sp.device) if flush else None
        self._token = torch.zeros(1, device=sp.device)

    def barrier(self) -> None:
        """Enqueue the alignment of all ranks."""
        if self.sp.world_size > 1:
            dist.all_reduce(self._token, group=self.sp.group)

    def gather(self, value: Any) -> list[Any]:
        """This value of every rank, over the host."""
        if self.sp.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.sp.world_size
        dist.all_gather_object(values, value, group=self.sp.cpu_group)
        return values

    def measure(
        self,
        functions: dict[str, Callable[[], object]],
        *,
        warmup: int,
        iterations: int,
        before: Callable[[], object] | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Interleaved runs. For each function: `ms`, the timing of the slowest rank of each run, and
        `slowest_rank_ms`, the largest of the ranks' own medians. `before` is enqueued ahead of the barrier."""
        for function in functions.values():
            for _ in range(warmup):
                if before is not None:
                    before()
                function()
            synchronize(self._device)
        watches = {name: Stopwatch(self._device) for name in functions}
        self.barrier()
        synchronize(self._device)
        for _ in range(iterations):
            for name, function in functions.items():
                if before is not None:
                    before()
                if self._flush is not None:
                    self._flush()
                busy_wait(self._device, AHEAD_MS)
                self.barrier()
                watches[name].start()
                function()
                watches[name].stop()
        results = {}
        for name, watch in watches.items():
            ranks = self.gather(watch.times_ms())
            medians = [summarize(times).median for times in ranks]
            slowest = summarize([max(run) for run in zip(*ranks, strict=True)])
            results[name] = {"ms": slowest.as_dict(), "slowest_rank_ms": max(medians), "rank_ms": medians}
        return results

    def back_to_back(self, function: Callable[[], object], iterations: int) -> float:
        """Milliseconds a call when calls follow one another with no barrier between; the slowest rank's."""
        watch = Stopwatch(self._device)
        busy_wait(self._device, AHEAD_MS)
        self.barrier()
        watch.start()
        for _ in range(iterations):
            function()
        watch.stop()
        return float(max(self.gather(watch.times_ms()[0]))) / iterations
