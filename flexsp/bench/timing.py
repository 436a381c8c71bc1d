"""The one timing helper: device events, warm-up, L2 flush, median and percentiles."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

__all__ = ["L2Flush", "Spread", "Stopwatch", "Timing", "busy_wait", "measure", "spread", "summarize", "synchronize"]

_BUSY_CYCLES_PER_MS = 2_000_000


@dataclass(frozen=True)
class Timing:
    """Milliseconds over `n` runs: median, 20th and 80th percentile, and the fastest."""

    median: float
    p20: float
    p80: float
    best: float
    n: int

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of `n` repeated runs."""

    median: float
    min: float
    max: float
    n: int

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def spread(values: Sequence[float]) -> Spread:
    """Spread of a non-empty list of repeated measurements."""
    if not values:
        raise ValueError("values: expected at least one measurement, got none")
    return Spread(statistics.median(values), min(values), max(values), len(values))


def _percentile(ordered: Sequence[float], fraction: float) -> float:
    position = fraction * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(times_ms: Sequence[float]) -> Timing:
    """Timing of a non-empty list of milliseconds."""
    if not times_ms:
        raise ValueError("times_ms: expected at least one measurement, got none")
    ordered = sorted(times_ms)
    return Timing(
        statistics.median(ordered), _percentile(ordered, 0.2), _percentile(ordered, 0.8), ordered[0], len(ordered)
    )


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing to wait for on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def busy_wait(device: torch.device, milliseconds: float) -> None:
    """Keep the device (not the host) busy for about this long, so that the host runs ahead of it. No-op on CPU."""
    if device.type == "cuda" and milliseconds > 0:
        with torch.cuda.device(device):
            torch.cuda._sleep(int(milliseconds * _BUSY_CYCLES_PER_MS))


class L2Flush:
    """Writes a buffer of twice the L2 cache, so that a run does not find the previous run's data there."""

    def __init__(self, device: torch.device) -> None:
        self._buffer: torch.Tensor | None = None
        if device.type == "cuda":
            size = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 << 20
            self._buffer = torch.empty(2 * size, dtype=torch.int8, device=device)

    def __call__(self) -> None:
        if self._buffer is not None:
            self._buffer.zero_()


class Stopwatch:
    """Times regions of one device: CUDA events on a GPU, the host clock on the CPU.

    `start()` / `stop()` enqueue; `times_ms()` synchronises once and returns every region's milliseconds in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._host: list[float] = []
        self._began = 0.0

    def start(self) -> None:
        if self._device.type == "cuda":
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._pairs.append(pair)
            pair[0].record()
        else:
            self._began = time.perf_counter()

    def stop(self) -> None:
        if self._device.type == "cuda":
            self._pairs[-1][1].record()
        else:
            self._host.append((time.perf_counter() - self._began) * 1e3)

    def times_ms(self) -> list[float]:
        if self._device.type != "cuda":
            return list(self._host)
        synchronize(self._device)
        return [begin.elapsed_time(end) for begin, end in self._pairs]


def measure(
    functions: dict[str, Callable[[], object]],
    device: torch.device,
    *,
    warmup: int = 5,
    iterations: int = 30,
    flush: bool = True,
    ahead_ms: float = 0.0,
) -> dict[str, Timing]:
    """Time several functions interleaved, round by round, so that clocks and heat drift for all of them alike.

    With `ahead_ms` > 0 the device is kept busy that long before each start event: the host enqueues the whole call
    meanwhile, and the number is device time without launch gaps. With 0 the number includes the gaps in which the
    device waits for the host, which is what an eager caller sees.
    """
    if iterations < 1:
        raise ValueError(f"iterations: expected at least 1, got {iterations}")
    for function in functions.values():
        for _ in range(warmup):
            function()
    flusher = L2Flush(device) if flush else None
    watches = {name: Stopwatch(device) for name in functions}
    synchronize(device)
    for _ in range(iterations):
        for name, function in functions.items():
            if flusher is not None:
                flusher()
            busy_wait(device, ahead_ms)
            watches[name].start()
            function()
            watches[name].stop()
    return {name: summarize(watch.times_ms()) for name, watch in watches.items()}
