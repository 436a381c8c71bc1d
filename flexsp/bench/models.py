"""`flexsp bench models`: layers of released models, beside other libraries as those libraries' layers call them.

Outputs and gradients are compared with those of ours on the same inputs, and over a short sequence those of all with
ours in float64, which runs in PyTorch.
"""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flexsp.bench.beside import (
    MODES,
    Provider,
    agreement_limit,
    calls,
    copy_bandwidth,
    differences,
    print_rows,
    providers,
    refusal,
    results,
    time_calls,
    warm,
)  # fmt: skip
from flexsp.bench.case import Case, Inputs, floor_ms, make_inputs
from flexsp.bench.layers import Layer, case_of
from flexsp.bench.record import continued, environment, file_stem, save
from flexsp.bench.released import RELEASED
from flexsp.bench.sizes import choose

__all__ = ["differing", "run"]

Row = dict[str, Any]
_IN_TORCH = ("pytorch", "torch.compile")
_KEYS = ("case", "B", "T")


def _chosen(case: Case, args: argparse.Namespace, device: torch.device) -> tuple[Case, list[Row]]:
    """The case with the other libraries that are asked for; a row for each mode of one that cannot run here."""
    asked = {name: peer for name, peer in case.others.items() if name in _IN_TORCH or name.split()[0] in args.peers}
    if device.type == "cuda":
        return replace(case, others=asked), []
    here = {name: peer for name, peer in asked.items() if name in _IN_TORCH}
    rows = [
        {"provider": name, "mode": mode, "error": "not run on a CPU"} for name in asked.keys() - here for mode in MODES
    ]
    return replace(case, others=here), sorted(rows, key=lambda row: row["provider"])


def _results(of: Provider) -> Inputs | None:
    """Output and gradients; None where they cannot be had, for want of memory."""
    try:
        return results(of)
    except Exception as error:
        print(f"    {of.name:14s}not compared: {refusal(error)}", flush=True)
        return None


def _apart(found: list[Provider], reference: Provider) -> dict[str, dict[str, float]]:
    """By provider, the differences of its results; without those that cannot be compared."""
    against = _results(reference) if found else None
    if against is None:
        return {}
    each = ((of.name, _results(of)) for of in found)
    return {name: differences(x, against) for name, x in each if x is not None}


def _wide(inputs: Inputs) -> Inputs:
    found = {name: x.detach().double() for name, x in inputs.items()}
    return {name: x if name == "do" else x.requires_grad_() for name, x in found.items()}


def _from_float64(
    case: Case, layer: Layer, names: list[str], args: argparse.Namespace, device: torch.device
) -> dict[str, dict[str, float]]:
    """By provider, the differences of its results over `args.check` tokens from ours in float64."""
    inputs = make_inputs(case, layer.shape(1, args.check), getattr(torch, args.dtype), device, seed=1)
    found = [of for of in providers(case, inputs, True)[0] if of.name in names]
    return _apart(found, Provider("float64", case.ours, _wide(inputs)))


def _run_layer(
    layer: Layer, case: Case, B: int, T: int, args: argparse.Namespace, device: torch.device, gb_s: float | None
) -> list[Row]:
    dtype, shape = getattr(torch, args.dtype), layer.shape(B, T)
    torch.compiler.reset()  # code that is compiled for many layers would run eagerly in the end
    case, rows = _chosen(case, args, device)
    inputs = make_inputs(case, shape, dtype, device)
    found, missing = providers(case, inputs, True)
    functions = calls(found)
    rows += missing + warm(functions, device, ours_may_refuse=True)
    ran = [of for of in found if (of.name, "fwd_bwd") in functions]
    apart, exact = {}, {}
    if ran and ran[0].name == "flexsp":
        apart = _apart(ran[1:], ran[0])
        exact = _from_float64(case, layer, [of.name for of in ran], args, device) if args.check else {}
    floors = {mode: floor_ms(case, shape, dtype, mode, gb_s) for mode in MODES}
    timed = time_calls(functions, inputs, floors, args, device)
    for row in timed:
        if row["mode"] == "fwd_bwd":
            row |= {"difference": apart.get(row["provider"]), "from_float64": exact.get(row["provider"])}
    return [*rows, *timed]


def differing(rows: list[Row], dtype: torch.dtype) -> list[str]:
    """Lines that name other libraries whose results are apart from ours, and how far each is from float64."""
    limit, lines = agreement_limit(dtype), []
    exact = {tuple(row[x] for x in _KEYS): row.get("from_float64") for row in rows if row["provider"] == "flexsp"}
    for row in rows:
        far = {name: x for name, x in (row.get("difference") or {}).items() if not x <= limit}
        ours, theirs = exact.get(tuple(row[x] for x in _KEYS)) or {}, row.get("from_float64") or {}
        where = f"{row['provider']}, {row['case']}, {row['B']} x {row['T']}"
        for name, x in far.items():
            both = name in ours and name in theirs
            against = f"; from float64 {theirs[name]:.2g}, flexsp {ours[name]:.2g}" if both else ""
            what = "output" if name == "o" else f"gradient of {name}"
            lines.append(f"{where}: {what} differs by {x:.2g}{against}")
    return lines


def _empty_result(args: argparse.Namespace, device: torch.device) -> Row:
    copied = copy_bandwidth(device)
    return {
        "kind": "released",
        "environment": environment(device, args.argv),
        "gates": args.gates or "trained",
        "dtype": args.dtype,
        "rows": [],
        "left_out": [],
        "method": "CUDA events, L2 flushed before each run, providers interleaved (those over 0.2 s alone, in three "
        "runs); ms includes launch gaps, device_ms has the host running ahead; floor = bytes of inputs and outputs / "
        "bandwidth; differences are norms, of the output o and of gradients, over ours or over float64's",
        "check_tokens": args.check,
        "bandwidth_gb_s": args.bandwidth or copied,
        "copy_gb_s": copied,
    }


def _print(rows: list[Row]) -> None:
    print_rows(rows)
    for row in rows:
        for key, text in (("difference", "from flexsp"), ("from_float64", "from float64")):
            if row.get(key):
                found = ", ".join(f"{name} {x:.2g}" for name, x in row[key].items())
                print(f"    {row['provider']:14s}{text}: {found}", flush=True)


def run(args: argparse.Namespace) -> int:
    """Run the chosen layers at each batch and length, write JSON after each, name libraries that differ. Always 0."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    choose(args, device.type)
    layers = [layer for layer in RELEASED if re.search(args.only, layer.name)]
    if not layers:
        raise ValueError(f"--only: expected a pattern of {', '.join(x.name for x in RELEASED)}, got {args.only!r}")
    result = _empty_result(args, device)
    stem = file_stem("released", result["environment"])
    if args.add:
        result, stem = continued(Path(args.add), result), Path(args.add).stem
    out = Path(args.out) / f"{stem}.json"
    print(f"flexsp bench models on {result['environment']['device']}, gates {result['gates']}", flush=True)
    deadline = time.monotonic() + args.time_limit if args.time_limit else None
    for B, T, layer in [(B, T, layer) for B in args.B for T in args.lengths for layer in layers]:
        case = case_of(layer, args.gates, tuple(args.naive))
        late = deadline is not None and time.monotonic() > deadline
        if case is None or late:
            why = "past --time-limit" if late else f"its op has no {args.gates} gates"
            result["left_out"].append([layer.name, B, T, why])
            print(f"  {layer.name}, {B} x {T}: left out, {why}", flush=True)
            continue
        try:
            rows = _run_layer(layer, case, B, T, args, device, result["bandwidth_gb_s"])
        except torch.OutOfMemoryError:
            rows = [{"provider": "flexsp", "mode": mode, "error": "out of memory"} for mode in MODES]
        gates = layer.gates if layer.gates == "own" else args.gates or layer.gates
        keys = {"case": layer.name, "sizes": layer.sizes, "gates": gates, "B": B, "T": T}
        rows = [{**keys, **row} for row in rows]
        if device.type == "cuda":
            torch.cuda.empty_cache()
        _print(rows)
        result["rows"] = [r for r in result["rows"] if (r["case"], r["B"], r["T"]) != (layer.name, B, T)] + rows
        save(out, result)
    result["differ"] = differing(result["rows"], getattr(torch, args.dtype))
    save(out, result)
    print("\n".join([*result["differ"], f"wrote {out}"]))
    return 0
