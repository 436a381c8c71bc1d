"""`flexsp bench host`: the host's time for a call of generated kernels, with the dispatcher and without it."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flexsp.bench.cases import CASES, Shape, forward_backward, make_inputs
from flexsp.bench.record import environment, file_stem, save
from flexsp.bench.sizes import choose
from flexsp.bench.timing import spread, synchronize

__all__ = ["combine", "run", "without_dispatcher"]

_BURST = 20  # calls between two waits for the device, so that its queue never fills
_TIMEOUT_S = 300.0  # of one process
FORWARD_US, RATIO = 60.0, 0.5
FAST = ("mamba2",)  # ops of hand-written kernels whose forward call is to take no longer either


@contextmanager
def without_dispatcher() -> Iterator[None]:
    """Every call is checked, planned and laid out anew, and launched by Triton's own launcher."""
    from flexsp.compiler.linear_attention import LinearAttention
    from flexsp.kernels.executable import Executable
    from flexsp.runtime.launch import KernelLaunch

    def run(self: Any, frame: Any, at: Any, stream: int) -> None:
        self.kernel[self.grid](*self.arguments(frame), **self.constants, PDL=True, launch_pdl=True, **self.options)

    def nothing(*args: Any) -> None: ...

    parts: tuple[tuple[type, str, Any], ...] = (
        (KernelLaunch, "run", run), (KernelLaunch, "prepare", nothing),
        (Executable, "precompile", nothing), (LinearAttention, "remembered", nothing),
    )  # fmt: skip
    plain = [getattr(owner, name) for owner, name, _ in parts]
    for owner, name, other in parts:
        setattr(owner, name, other)
    try:
        yield
    finally:
        for (owner, name, _), own in zip(parts, plain, strict=True):
            setattr(owner, name, own)


def _host_us(call: Callable[[], object], device: torch.device, warmup: int, rounds: int) -> float:
    """Median microseconds until a call returns; the device is waited for between bursts, outside the time."""
    times = []
    for _ in range(warmup):
        call()
    for _ in range(rounds):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(_BURST):
            call()
        times.append((time.perf_counter() - began) / _BURST * 1e6)
    synchronize(device)
    return statistics.median(times)


def _measure(name: str, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    case, shape = CASES[name], Shape(args.B, args.T, args.H, args.K, args.V)
    inputs = make_inputs(case, shape, getattr(torch, args.dtype), device)

    def forward() -> object:
        with torch.no_grad():
            return case.ours(inputs)

    calls: dict[str, Callable[[], object]] = {
        "forward": forward,
        "forward, recorded by autograd": lambda: case.ours(inputs),
        "forward+backward": lambda: forward_backward(case.ours, inputs),
    }
    rows = []
    for mode, call in calls.items():
        row: dict[str, Any] = {"case": name, "T": args.T, "mode": mode}
        if name.startswith("generated"):
            with without_dispatcher():
                row["plain_us"] = _host_us(call, device, args.warmup, args.iterations)
        row["dispatcher_us"] = _host_us(call, device, args.warmup, args.iterations)
        rows.append(row)
    return rows


def _repeated(args: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """The rows of each of several fresh processes, one after the other."""
    command = [sys.executable, "-m", "flexsp", *args.argv, "--child"]
    runs = []
    for _ in range(args.repeats):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode:
            raise ValueError(f"bench host: a process failed: {(done.stdout + done.stderr).strip()[-600:]}")
        runs.append(json.loads(done.stdout.strip().splitlines()[-1]))
    return runs


def combine(runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row a call: median, min and max over the processes of what each of them measured."""
    rows = []
    for same in zip(*runs, strict=True):
        row = dict(same[0])
        for name in ("dispatcher_us", "plain_us"):
            if name in row:
                row[name] = spread([run[name] for run in same]).as_dict()
        rows.append(row)
    return rows


def _print(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        texts = ["{median:7.1f} us [{min:.1f}, {max:.1f}]".format(**row["dispatcher_us"])]
        if "plain_us" in row:
            texts.append("without the dispatcher {median:.1f} us [{min:.1f}, {max:.1f}]".format(**row["plain_us"]))
        print(f"  {row['case']:22s} T={row['T']} {row['mode']:30s} {', '.join(texts)}", flush=True)


def _targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for row in rows:
        if row["mode"] != "forward" or not ("plain_us" in row or row["case"] in FAST):
            continue
        us = row["dispatcher_us"]["median"]
        targets = [("host microseconds of a forward", FORWARD_US, us)]
        if "plain_us" in row:
            targets.append(("host time / without the dispatcher", RATIO, us / row["plain_us"]["median"]))
        for text, limit, value in targets:
            verdict = "pass" if value <= limit else "MISS"
            found.append({"target": f"{row['case']} {text}", "limit": limit, "value": value, "verdict": verdict})
    return found


def run(args: argparse.Namespace) -> int:
    """Measure, print and write JSON. 0 unless --strict and a miss."""
    if not torch.cuda.is_available():
        raise ValueError("bench host: expected a CUDA device, got none")
    choose(args, "cuda")
    device = torch.device("cuda", torch.cuda.current_device())
    if args.child:
        print(json.dumps([row for name in args.ops for row in _measure(name, args, device)]))
        return 0
    record = environment(device, args.argv)
    rows = combine(_repeated(args))
    _print(rows)
    result: dict[str, Any] = {
        "kind": "host", "environment": record, "rows": rows, "targets": _targets(rows),
        "shape": {"B": args.B, "T": args.T, "H": args.H, "K": args.K, "V": args.V, "dtype": args.dtype},
        "method": f"host clock over bursts of {_BURST} calls, the device waited for in between; the median of a "
        f"process, then median, min and max of {args.repeats} fresh processes",
    }  # fmt: skip
    out = Path(args.out) / f"{file_stem('host', record)}.json"
    save(out, result)
    for verdict in result["targets"]:
        print(f"  {verdict['verdict']:13s}{verdict['value']:8.2f} <= {verdict['limit']:<5g} {verdict['target']}")
    print(f"wrote {out}")
    return int(args.strict and any(verdict["verdict"] == "MISS" for verdict in result["targets"]))
