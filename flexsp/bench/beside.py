"""An operator beside others in one process, on the same inputs: first calls, differences, times and peak memory."""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from flexsp.bench.case import Case, Inputs, Op, forward_backward
from flexsp.bench.timing import measure, spread, synchronize

__all__ = [
    "MODES", "Calls", "Provider", "agreement_limit", "calls", "copy_bandwidth", "differences", "peak_gib", "print_rows",
    "providers", "refusal", "relative", "results", "time_calls", "warm",
]  # fmt: skip

Row = dict[str, Any]
Calls = dict[tuple[str, str], Callable[[], object]]
"""By provider and mode, which is "fwd" or "fwd_bwd"."""
MODES = ("fwd", "fwd_bwd")
_AHEAD_MS = 2.0
_SLOW_S, _SLOW_RUNS = 0.2, 3  # what takes so long is timed by itself, and so often


@dataclass(frozen=True)
class Provider:
    """Whose operator it is, and inputs in its layout. `back` gives a result the layout of ours, by its name."""

    name: str
    op: Op
    given: Inputs
    back: Callable[[str, torch.Tensor], torch.Tensor] | None = None

    def forward(self) -> torch.Tensor:
        with torch.no_grad():
            return self.op(self.given)

    def both(self) -> tuple[torch.Tensor, ...]:
        return forward_backward(self.op, self.given)


def providers(case: Case, inputs: Inputs, fla: bool, *, bounded: bool = False) -> tuple[list[Provider], list[Row]]:
    """Ours and, with `fla`, the others that are installed; a row for each mode of one that is not.

    Args:
        bounded: no log gate is below `flexsp.bench.gates.BOUND`.
    """
    found, missing = [Provider("flexsp", case.ours, inputs)], []
    if fla and case.baseline is not None:
        promised = case.promised if bounded else {}
        found.append(Provider("fla", partial(case.baseline, **promised), inputs))
    for name, peer in case.others.items() if fla else ():
        if find_spec(peer.module) is None:
            missing += [{"provider": name, "mode": mode, "error": "not installed"} for mode in MODES]
            continue
        given = inputs if peer.prepare is None else peer.prepare(inputs)
        found.append(Provider(name, peer.op, given, peer.back))
    return found, missing


def calls(found: list[Provider]) -> Calls:
    """What is timed."""
    return {(x.name, mode): call for x in found for mode, call in zip(MODES, (x.forward, x.both), strict=True)}


def refusal(error: Exception) -> str:
    """What a row says of a call that raised."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return f"refused: {type(error).__name__}: {' '.join(str(error).split())}"[:300]


def warm(functions: Calls, device: torch.device, *, ours_may_refuse: bool = False) -> list[Row]:
    """First calls, compiling and tuning; drops and reports the ones that refuse to run."""
    refused = []
    for key in list(functions):
        began = time.perf_counter()
        try:
            functions[key]()
            synchronize(device)
        except Exception as error:
            if key[0] == "flexsp" and not ours_may_refuse:
                raise
            refused.append({"provider": key[0], "mode": key[1], "error": refusal(error)})
            del functions[key]
        if refused and device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        print(f"    {key[0]:14s}{key[1]:8s} first call {time.perf_counter() - began:7.2f} s", flush=True)
    return refused


def results(of: Provider) -> Inputs:
    """The output as "o", and gradients by the names of inputs, in our layout."""
    leaves = {name: x for name, x in of.given.items() if name != "do"}
    o = of.op(of.given)
    found = {"o": o.detach()}
    gradients = torch.autograd.grad(o, list(leaves.values()), of.given["do"])
    found |= dict(zip(leaves, gradients, strict=True))
    return found if of.back is None else {name: of.back(name, x) for name, x in found.items()}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of a - b over that of b."""
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    norm = partial(torch.linalg.vector_norm, dtype=torch.float64)
    return (norm(a.to(wide) - b.to(wide)) / norm(b.to(wide)).clamp_min(1e-30)).item()


def differences(of: Inputs, reference: Inputs) -> dict[str, float]:
    """By name, the relative difference of an output and of gradients from the reference's."""
    return {name: relative(of[name], x) for name, x in reference.items()}


def agreement_limit(dtype: torch.dtype) -> float:
    """The relative difference from which on two libraries are said to differ."""
    return 2e-2 if dtype == torch.bfloat16 else 4 * math.sqrt(torch.finfo(dtype).eps)


def peak_gib(
    function: Callable[[], object], inputs: Inputs, device: torch.device, repeats: int
) -> dict[str, float] | None:
    """Peak memory of a call with its inputs, over repeated calls that each start from an empty cache."""
    if device.type != "cuda":
        return None
    function()
    peaks = []
    for _ in range(repeats):
        synchronize(device)
        gc.collect()
        torch.cuda.empty_cache()
        others = torch.cuda.memory_allocated(device) - sum(t.numel() * t.element_size() for t in inputs.values())
        torch.cuda.reset_peak_memory_stats(device)
        function()
        synchronize(device)
        peaks.append((torch.cuda.max_memory_allocated(device) - max(others, 0)) / 2**30)
    return spread(peaks).as_dict()


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - began


def time_calls(
    functions: Calls, inputs: Inputs, floors: Mapping[str, float | None], args: argparse.Namespace, device: torch.device
) -> list[Row]:
    """A row for each call that was warmed: milliseconds, in turns with the others of its mode, and peak memory.

    Args:
        floors: milliseconds of the memory floor by mode.
    """
    rows: list[Row] = []
    for mode in MODES:
        chosen = {provider: call for (provider, m), call in functions.items() if m == mode}
        peaks = {provider: peak_gib(call, inputs, device, args.repeats) for provider, call in chosen.items()}
        slow = {name for name, call in chosen.items() if name != "flexsp" and _seconds(call, device) > _SLOW_S}
        together = {name: call for name, call in chosen.items() if name not in slow}
        ms, device_ms = _in_turns(together, device, args.warmup, args.iterations)
        for name in slow:
            alone = _in_turns({name: chosen[name]}, device, 0, _SLOW_RUNS)
            ms, device_ms = ms | alone[0], device_ms | alone[1]
        for provider in chosen:
            timing, floor = ms[provider], floors[mode]
            over = timing["median"] / floor if floor else None
            rows.append({
                "mode": mode, "provider": provider, "ms": timing, "device_ms": device_ms[provider], "floor_ms": floor,
                "over_floor": over, "peak_gib": peaks[provider],
            })  # fmt: skip
    return rows


def _in_turns(
    functions: dict[str, Callable[[], object]], device: torch.device, warmup: int, iterations: int
) -> tuple[Row, Row]:
    """Timings with launch gaps, and without."""
    timed = partial(measure, functions, device, warmup=warmup, iterations=iterations)
    eager = timed()
    ahead = timed(ahead_ms=_AHEAD_MS) if device.type == "cuda" else eager
    return {name: x.as_dict() for name, x in eager.items()}, {name: x.as_dict() for name, x in ahead.items()}


def copy_bandwidth(device: torch.device) -> float | None:
    """GB/s of a copy, read and written; None on a CPU."""
    if device.type != "cuda":
        return None
    source = torch.randint(0, 255, (1 << 30,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = measure({"copy": lambda: target.copy_(source)}, device, iterations=20, flush=False, ahead_ms=_AHEAD_MS)
    return 2 * source.numel() / timing["copy"].median / 1e6


def print_rows(rows: list[Row]) -> None:
    for row in rows:
        head = f"  {row['case']:29s}{row['T']:7d} {row['mode']:8s}{row['provider']:14s}"
        if "error" in row:
            print(f"{head} {row['error']}", flush=True)
            continue
        ms, peak = row["ms"], row["peak_gib"]
        text = f"{head}{ms['median']:9.3f} ms [{ms['p20']:.3f}, {ms['p80']:.3f}]"
        if row["floor_ms"] is not None:
            device = f"  device {row['device_ms']['median']:.3f}"
            text += f"{device}  floor {row['floor_ms']:.3f} (x{row['over_floor']:.1f})"
        if peak is not None:
            text += f"  peak {peak['median']:.2f} GiB [{peak['min']:.2f}, {peak['max']:.2f}]"
        print(text, flush=True)
