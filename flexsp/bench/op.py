"""`flexsp bench op`: operators against flash-linear-attention in the same run, interleaved."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flexsp.bench.beside import calls, copy_bandwidth, print_rows, providers, time_calls, warm
from flexsp.bench.cases import CASES, Case, Shape, baseline_available, floor_ms, make_inputs
from flexsp.bench.cold import first_call
from flexsp.bench.gates import at_least_bound
from flexsp.bench.record import continued, environment, file_stem, save, spread_of
from flexsp.bench.sizes import choose
from flexsp.bench.variant import variant_case

__all__ = ["TARGETS", "Target", "judge", "run"]

Row = dict[str, Any]


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


def _run_case(
    case: Case, shape: Shape, args: argparse.Namespace, device: torch.device, fla: bool, gb_s: float | None
) -> list[Row]:
    dtype = getattr(torch, args.dtype)
    inputs = make_inputs(case, shape, dtype, device, gates=args.gates if args.variant is None else "mild")
    found, missing = providers(case, inputs, fla, bounded=at_least_bound(args.gates))
    functions = calls(found)
    rows = missing + warm(functions, device)
    floors = {mode: floor_ms(case, shape, dtype, mode, gb_s) for mode in ("fwd", "fwd_bwd")}
    rows += time_calls(functions, inputs, floors, args, device)
    return [{"case": case.name, "T": shape.T, **row} for row in rows]


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
    cases = [CASES[name] for name in args.ops] if args.variant is None else [variant_case(args, device)]
    copied = copy_bandwidth(device)
    bandwidth = args.bandwidth or copied
    result = _empty_result(args, record, missing, bandwidth, copied)
    stem = file_stem("op" if args.variant is None else f"op_{cases[0].name}", record)
    if args.add:
        result, stem = continued(Path(args.add), result), Path(args.add).stem
    out = Path(args.out) / f"{stem}.json"
    speed = f", copy {copied:.0f} GB/s" if copied else ""
    print(
        f"flexsp bench op on {record['device']}{speed}; baseline flash-linear-attention: "
        f"{record['flash_linear_attention'] if missing is None else 'none (' + missing + ')'}",
        flush=True,
    )
    deadline = time.monotonic() + args.time_limit if args.time_limit else None
    for case in cases:
        for name, T in [(case.name, T) for T in args.T]:
            if deadline is not None and time.monotonic() > deadline:
                result.setdefault("skipped", []).append([name, T])
                print(f"  {name} T={T}: skipped, past --time-limit", flush=True)
                continue
            fla = missing is None and name in (args.baseline_ops or args.ops) and T in (args.baseline_T or args.T)
            beside = fla or args.variant is not None  # the same program in PyTorch
            rows = _run_case(case, Shape(args.B, T, args.H, args.K, args.V), args, device, beside, bandwidth)
            if device.type == "cuda":
                torch.cuda.empty_cache()
            print_rows(rows)
            result["rows"] = [row for row in result["rows"] if (row["case"], row["T"]) != (name, T)] + rows
            save(out, result)
    if args.variant is None:
        _run_cold(args, device, missing is None, result, out)
    result["targets"] = judge(result["rows"], result["cold"]) if device.type == "cuda" else []
    save(out, result)
    for verdict in result["targets"]:
        value = "-" if verdict["value"] is None else f"{verdict['value']:.2f}"
        print(f"  {verdict['verdict']:13s}{value:>8s} <= {verdict['limit']:<5g} {verdict['target']}")
    print(f"wrote {out}")
    return int(args.strict and any(verdict["verdict"] == "MISS" for verdict in result["targets"]))


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
