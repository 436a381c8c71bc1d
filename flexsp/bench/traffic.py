"""`flexsp bench traffic`: bytes that generated kernels move, counted by Nsight Compute, beside a plan's prediction."""

from __future__ import annotations

import argparse
import csv
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from flexsp.bench.cases import CASES, Shape, forward_backward, make_inputs, variant_of
from flexsp.bench.record import environment, file_stem, save
from flexsp.bench.sizes import choose

__all__ = ["compare", "parse", "run"]

_METRICS = {"dram__bytes_read.sum": "read", "dram__bytes_write.sum": "written", "gpu__time_duration.sum": "us"}
_WITHIN = 0.2
_UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}


def parse(text: str) -> list[dict[str, Any]]:
    """Kernels in launch order with bytes read and written and microseconds, from ncu's --csv output."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError(f"ncu: expected a table, got {text[-400:]!r}")
    found: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        name = _METRICS.get(row["Metric Name"])
        if name is not None:
            kernel = found.setdefault(row["ID"], {"kernel": row["Kernel Name"].partition("(")[0]})
            kernel[name] = float(row["Metric Value"].replace(",", "")) * _UNITS[row["Metric Unit"]]
    return list(found.values())


def compare(measured: list[dict[str, Any]], predicted: list[Any]) -> list[dict[str, Any]]:
    """A row a launch of the plan, in order; kernels of PyTorch between them are left out."""
    names = {x.kernel for x in predicted}
    ours = [x for x in measured if x["kernel"] in names]
    if [x["kernel"] for x in ours] != [x.kernel for x in predicted]:
        raise ValueError(f"expected launches {[x.kernel for x in predicted]}, ncu saw {[x['kernel'] for x in ours]}")
    return [
        {"kernel": x.kernel, "read": y["read"], "written": y["written"], "us": y["us"],
         "predicted_read": x.read, "predicted_written": x.written, "predicted_us": x.us,
         "ratio": (y["read"] + y["written"]) / (x.read + x.written)}
        for x, y in zip(predicted, ours, strict=True)
    ]  # fmt: skip


def _child(args: argparse.Namespace) -> int:
    """The process that ncu looks at: one call to compile, one call to count."""
    case = CASES[args.op]
    shape = Shape(args.B, args.T, args.H, args.K, args.V)
    inputs = make_inputs(case, shape, getattr(torch, args.dtype), torch.device("cuda"))
    if "g" in inputs:  # no chunk is left out because its part decays to nothing
        inputs["g"] = torch.zeros_like(inputs["g"], requires_grad=True)
    forward_backward(case.ours, inputs)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    forward_backward(case.ours, inputs)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()
    return 0


def _predicted(args: argparse.Namespace) -> list[Any]:
    from flexsp.compiler.planning.model import predict
    from flexsp.compiler.planning.tiling import choose_tiling

    dtype = getattr(torch, args.dtype)
    code = variant_of(args.op, args.H, args.K, args.V, dtype).kernels
    sizes = {name: {"K": args.K, "V": args.V}[name] for name in code.layout.sizes}
    plan = choose_tiling(code, sizes, args.B * args.H, args.T, 0, dtype)
    both = [predict(code, plan, sizes, args.B * args.H, args.T, dtype, backward=x) for x in (False, True)]
    return both[0] + both[1]


def run(args: argparse.Namespace) -> int:
    """Profile, print and write JSON. 0 unless --strict and a miss."""
    choose(args, "cuda")
    if args.child:
        return _child(args)
    ncu = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    if not torch.cuda.is_available() or not Path(ncu).exists():
        raise ValueError("bench traffic: expected a CUDA device and Nsight Compute's ncu")
    record = environment(torch.device("cuda"), args.argv)
    child = [sys.executable, "-m", "flexsp", *args.argv, "--child"]
    command = [ncu, "--csv", "--profile-from-start", "off", "--metrics", ",".join(_METRICS), *child]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=args.timeout, check=False)
    if done.returncode:
        raise ValueError(f"ncu failed: {(done.stdout + done.stderr)[-600:]}")
    rows = compare(parse(done.stdout), _predicted(args))
    print(f"  {args.op} T={args.T}: GB moved, counted by ncu / predicted; microseconds (clocks as ncu fixes them)")
    for row in rows:
        moved, predicted = (row[f"{x}read"] + row[f"{x}written"] for x in ("", "predicted_"))
        print(f"  {row['kernel']:22s}{moved / 1e9:8.3f} /{predicted / 1e9:8.3f} ={row['ratio']:6.2f}"
              f"   {row['us']:9.1f} us, predicted {row['predicted_us']:9.1f}")  # fmt: skip
    moved, predicted = (sum(row[f"{x}read"] + row[f"{x}written"] for row in rows) for x in ("", "predicted_"))
    ratio = moved / predicted
    verdict = "pass" if abs(ratio - 1) <= _WITHIN else "MISS"
    print(f"  {verdict:6s}{ratio:.3f}, within {_WITHIN:.0%}")
    result: dict[str, Any] = {
        "kind": "traffic", "environment": record, "case": args.op, "T": args.T, "rows": rows,
        "shape": {"B": args.B, "H": args.H, "K": args.K, "V": args.V, "dtype": args.dtype},
        "targets": [{"target": "bytes moved / predicted", "limit": _WITHIN, "value": ratio, "verdict": verdict}],
        "method": "dram__bytes of every kernel of one forward and backward pass, caches flushed before each",
    }  # fmt: skip
    out = Path(args.out) / f"{file_stem('traffic', record).replace('traffic', f'traffic_{args.op}')}.json"
    save(out, result)
    print(f"wrote {out}")
    return int(args.strict and verdict == "MISS")
