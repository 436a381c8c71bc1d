"""`flexsp bench op`: operators against flash-linear-attention in the same run, interleaved."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from flexsp.bench.cases import CASES, Case, Inputs, Op, Shape, baseline_available, forward_backward, make_inputs
from flexsp.bench.cold import first_call
from flexsp.bench.record import environment, file_stem, load_kind, save, spread_of
from flexsp.bench.sizes import choose
from flexsp.bench.timing import measure, spread, synchronize

__all__ = ["TARGETS", "Target", "judge", "run"]

Row = dict[str, Any]
AHEAD_MS = 2.0


class Target:
    """An aim of the project: `value(rows, cold)` is at most `limit`. None means it was not measured."""

    def __init__(self, text: str, limit: float, value: Callable[[list[Row], list[Row]], float | None]) -> None:
        self.text, self.limit, self.value = text, limit, value


def _find(rows: list[Row], case: str, T: int, mode: str, provider: str) -> Row | None:
    keys = {"case": case, "T": T, "mode": mode, "provider": provider}
    return next((row for row in rows if all(row.get(k) == v for k, v in keys.items()) and "ms" in row), None)


def _ratio(
    case: str, against: str, T: int, mode: str, provider: str = "fla"
) -> Callable[[list[Row], list[Row]], float | None]:
    def value(rows: list[Row], cold: list[Row]) -> float | None:
        ours, theirs = _find(rows, case, T, mode, "flexsp"), _find(rows, against, T, mode, provider)
        return ours["ms"]["median"] / theirs["ms"]["median"] if ours and theirs else None

    return value


def _peak(rows: list[Row], cold: list[Row]) -> float | None:
    row = _find(rows, "simple_gla", 65536, "fwd_bwd", "flexsp")
    peak = spread_of(row.get("peak_gib")) if row else None
    return peak["median"] if peak else None


def _first(generated: bool) -> Callable[[list[Row], list[Row]], float | None]:
    def value(rows: list[Row], cold: list[Row]) -> float | None:
        ours = [row for row in cold if row["provider"] == "flexsp" and row["case"].startswith("generated") == generated]
        return max((s["median"] for row in ours if (s := spread_of(row.get("fwd_bwd_s")))), default=None)

    return value


TARGETS = (
    *(
        Target(
            f"simple_gla forward, T={T}: time / flash-linear-attention's",
            0.70,
            _ratio("simple_gla", "simple_gla", T, "fwd"),
        )
        for T in (4096, 16384, 65536)
    ),
    Target(
        "simple_gla forward+backward, T=65536: time / flash-linear-attention's ungated linear_attn",
        0.60,
        _ratio("simple_gla", "linear_attn", 65536, "fwd_bwd"),
    ),
    Target("simple_gla forward+backward, T=65536: peak GiB", 5.5, _peak),
    Target("first call, forward + backward, cold cache: seconds", 15.0, _first(False)),
    Target("first call of generated kernels, with their generation: seconds", 10.0, _first(True)),
    *(
        Target(
            f"generated simple_gla {mode}, T={T}: time / the engine's",
            limit,
            _ratio("generated_simple_gla", "simple_gla", T, mode, "flexsp"),
        )
        for mode, limit in (("fwd", 1.15), ("fwd_bwd", 1.5))
        for T in (4096, 16384, 65536)
    ),
    *(
        Target(
            f"{case.replace('_', ' ')} {mode}, T={T}: time / flash-linear-attention's",
            limit,
            _ratio(case, case, T, mode),
        )
        for case in ("generated_gla", "generated_deltanet")
        for mode, limit in (("fwd", 1.0), ("fwd_bwd", 1.5))
        for T in (4096, 16384, 65536)
    ),
)


def judge(rows: list[Row], cold: list[Row]) -> list[Row]:
    """Every target with its limit, the measured value and pass, miss or "not measured"."""
    verdicts = []
    for target in TARGETS:
        value = target.value(rows, cold)
        verdict = "not measured" if value is None else "pass" if value <= target.limit else "MISS"
        verdicts.append({"target": target.text, "limit": target.limit, "value": value, "verdict": verdict})
    return verdicts


def _peak_gib(
    function: Callable[[], object], inputs: dict[str, torch.Tensor], device: torch.device, repeats: int
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


def _functions(case: Case, inputs: Inputs, fla: bool) -> dict[tuple[str, str], Callable[[], object]]:
    def forward(op: Op, given: Inputs) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad():
                return op(given)

        return call

    functions: dict[tuple[str, str], Callable[[], object]] = {}

    def add(provider: str, op: Op, given: Inputs) -> None:
        functions[provider, "fwd"] = forward(op, given)
        functions[provider, "fwd_bwd"] = lambda: forward_backward(op, given)

    add("flexsp", case.ours, inputs)
    if fla and case.baseline is not None:
        add("fla", case.baseline, inputs)
    for provider, peer in case.others.items():
        if fla and find_spec(peer.module) is not None:
            add(provider, peer.op, inputs if peer.prepare is None else peer.prepare(inputs))
    return functions


def _warm(functions: dict[tuple[str, str], Callable[[], object]], device: torch.device) -> list[Row]:
    """First calls, compiling and tuning; drops and reports the ones that refuse to run."""
    refused = []
    for key in list(functions):
        began = time.perf_counter()
        try:
            functions[key]()
            synchronize(device)
        except Exception as error:
            if key[0] == "flexsp":
                raise
            refused.append({"provider": key[0], "mode": key[1], "error": f"{type(error).__name__}: {error}"[:300]})
            del functions[key]
        print(f"    {key[0]:14s}{key[1]:8s} first call {time.perf_counter() - began:7.2f} s", flush=True)
    return refused


def _run_case(
    case: Case, shape: Shape, args: argparse.Namespace, device: torch.device, fla: bool, gb_s: float | None
) -> list[Row]:
    dtype = getattr(torch, args.dtype)
    inputs = make_inputs(case, shape, dtype, device, gates=args.gates)
    functions = _functions(case, inputs, fla)
    rows: list[Row] = [{"case": case.name, "T": shape.T, **row} for row in _warm(functions, device)]
    for mode in ("fwd", "fwd_bwd"):
        chosen = {provider: call for (provider, m), call in functions.items() if m == mode}
        peaks = {provider: _peak_gib(call, inputs, device, args.repeats) for provider, call in chosen.items()}
        options = {"warmup": args.warmup, "iterations": args.iterations}
        eager = measure(chosen, device, **options)
        ahead = measure(chosen, device, **options, ahead_ms=AHEAD_MS) if device.type == "cuda" else eager
        floor = case.floor_bytes(shape, dtype.itemsize, mode == "fwd_bwd") / (gb_s * 1e6) if gb_s else None
        for provider, timing in eager.items():
            rows.append(
                {
                    "case": case.name,
                    "T": shape.T,
                    "mode": mode,
                    "provider": provider,
                    "ms": timing.as_dict(),
                    "device_ms": ahead[provider].as_dict(),
                    "floor_ms": floor,
                    "over_floor": timing.median / floor if floor else None,
                    "peak_gib": peaks[provider],
                }
            )
    return rows


def _print_rows(rows: list[Row]) -> None:
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


def _copy_bandwidth(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    source = torch.randint(0, 255, (1 << 30,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = measure({"copy": lambda: target.copy_(source)}, device, iterations=20, flush=False, ahead_ms=AHEAD_MS)
    return 2 * source.numel() / timing["copy"].median / 1e6


def _empty_result(
    args: argparse.Namespace, record: dict[str, Any], missing: str | None, bandwidth: float | None, copied: float | None
) -> dict[str, Any]:
    return {
        "kind": "op",
        "environment": record,
        "baseline_missing": missing,
        "rows": [],
        "cold": [],
        "shape": {"B": args.B, "H": args.H, "K": args.K, "V": args.V, "dtype": args.dtype},
        "gates": args.gates,
        "method": "CUDA events, L2 flushed before each run, providers interleaved; ms includes launch gaps, device_ms "
        "has the host running ahead; floor = bytes of inputs and outputs / bandwidth; peak memory and first calls are "
        "repeated, first calls in fresh processes",
        "bandwidth_gb_s": bandwidth,
        "copy_gb_s": copied,
    }


def run(args: argparse.Namespace) -> int:
    """Run the chosen operators and lengths, write JSON after each, print the aims. 0 unless --strict and a miss."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    choose(args, device.type)
    missing = "not asked for" if args.no_baseline else baseline_available() if device.type == "cuda" else "CPU run"
    record = environment(device, args.argv)
    copied = _copy_bandwidth(device)
    bandwidth = args.bandwidth or copied
    result = _empty_result(args, record, missing, bandwidth, copied)
    stem = file_stem("op", record)
    if args.add:
        result, stem = _continued(Path(args.add), result), Path(args.add).stem
    out = Path(args.out) / f"{stem}.json"
    speed = f", copy {copied:.0f} GB/s" if copied else ""
    print(
        f"flexsp bench op on {record['device']}{speed}; baseline flash-linear-attention: "
        f"{record['flash_linear_attention'] if missing is None else 'none (' + missing + ')'}",
        flush=True,
    )
    deadline = time.monotonic() + args.time_limit if args.time_limit else None
    for name in args.ops:
        for T in args.T:
            if deadline is not None and time.monotonic() > deadline:
                result.setdefault("skipped", []).append([name, T])
                print(f"  {name} T={T}: skipped, past --time-limit", flush=True)
                continue
            fla = missing is None and name in (args.baseline_ops or args.ops) and T in (args.baseline_T or args.T)
            rows = _run_case(CASES[name], Shape(args.B, T, args.H, args.K, args.V), args, device, fla, bandwidth)
            if device.type == "cuda":
                torch.cuda.empty_cache()
            _print_rows(rows)
            result["rows"] = [row for row in result["rows"] if (row["case"], row["T"]) != (name, T)] + rows
            save(out, result)
    _run_cold(args, device, missing is None, result, out)
    result["targets"] = judge(result["rows"], result["cold"]) if device.type == "cuda" else []
    save(out, result)
    for verdict in result["targets"]:
        value = "-" if verdict["value"] is None else f"{verdict['value']:.2f}"
        print(f"  {verdict['verdict']:13s}{value:>8s} <= {verdict['limit']:<5g} {verdict['target']}")
    print(f"wrote {out}")
    return int(args.strict and any(verdict["verdict"] == "MISS" for verdict in result["targets"]))


def _continued(path: Path, new: dict[str, Any]) -> dict[str, Any]:
    """The result of an earlier part of a run, to go on with; ValueError where it was another run."""
    [old] = load_kind([path], "op")
    for what in ("commit", "dirty", "device", "torch", "triton"):
        if old["environment"][what] != new["environment"][what]:
            found = (new["environment"][what], old["environment"][what])
            raise ValueError(f"--add: expected a file of {what} {found[0]}, got {found[1]} in {path}")
    if old["shape"] != new["shape"]:
        raise ValueError(f"--add: expected a file of shape {new['shape']}, got {old['shape']} in {path}")
    if old.get("gates", "usual") != new["gates"]:
        raise ValueError(f"--add: expected a file of gates {new['gates']}, got {old.get('gates', 'usual')} in {path}")
    old.pop("skipped", None)
    old["environment"]["command"] += "; " + new["environment"]["command"]
    old["baseline_missing"] = old["baseline_missing"] and new["baseline_missing"]
    return old


def _run_cold(args: argparse.Namespace, device: torch.device, fla: bool, result: dict[str, Any], out: Path) -> None:
    wanted = [("flexsp", name) for name in args.cold] + [("fla", name) for name in args.cold_baseline if fla]
    for provider, name in wanted:
        shape = Shape(args.B, max(args.T), args.H, args.K, args.V)
        row = {"provider": provider, "case": name, "T": shape.T}
        row.update(first_call(name, shape, args.dtype, str(device), provider, args.cold_timeout, args.repeats))
        result["cold"] = [x for x in result["cold"] if (x["provider"], x["case"]) != (provider, name)] + [row]
        save(out, result)
        seconds = row.get("fwd_bwd_s")
        text = "{median:.2f} s [{min:.2f}, {max:.2f}] of {n}".format(**seconds) if seconds else row["error"]
        print(f"  first training step, cold cache: {provider} {name} T={shape.T}: {text}", flush=True)
