"""First call of an operator in a fresh process with an empty Triton cache: what a user waits for the first time.

Once for a forward and once, in another process, for a training step. Imports and the start of CUDA are not counted;
generating, compiling, linking, tuning and running are. Run as `python -m flexsp.bench.cold JSON`, by `first_call`;
prints one JSON line last.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from flexsp.bench.cases import CASES, Shape, forward_backward, make_inputs

__all__ = ["first_call"]


def first_call(case: str, shape: Shape, dtype: str, device: str, provider: str, timeout_s: float) -> dict[str, Any]:
    """Seconds of a first forward and of a first forward + backward, each with compilation and in a fresh process."""
    found: dict[str, Any] = {}
    for mode in ("fwd", "fwd_bwd"):
        with tempfile.TemporaryDirectory() as empty:
            places = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLEXSP_CODE_DIR")
            environment = {**os.environ, **dict.fromkeys(places, empty)}
            request = {
                "case": case, "dtype": dtype, "device": device, "provider": provider, "mode": mode,
                "shape": [shape.B, shape.T, shape.H, shape.K, shape.V],
            }  # fmt: skip
            command = [sys.executable, "-m", "flexsp.bench.cold", json.dumps(request)]
            try:
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
            except subprocess.TimeoutExpired:
                return {"error": f"not finished after {timeout_s:.0f} s"}
        if done.returncode != 0:
            return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
        found[f"{mode}_s"] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _measure(request: dict[str, Any]) -> float | None:
    case, device, dtype = CASES[request["case"]], torch.device(request["device"]), getattr(torch, request["dtype"])
    if request["provider"] == "flexsp":
        import flexsp.ops  # noqa: F401

        op, backward = case.ours, True
    else:
        import fla.ops.simple_gla  # noqa: F401

        assert case.baseline is not None
        op, backward = case.baseline, case.baseline_backward
    if device.type == "cuda":
        import triton.language  # noqa: F401

        torch.mm(torch.ones(64, 64, device=device), torch.ones(64, 64, device=device))
    inputs = make_inputs(case, Shape(*request["shape"]), dtype, device)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    began = time.perf_counter()
    if request["mode"] == "fwd_bwd":
        if not backward:
            return None
        forward_backward(op, inputs)
    else:
        with torch.no_grad():
            op(inputs)
    synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    print(json.dumps(_measure(json.loads(sys.argv[1]))))
