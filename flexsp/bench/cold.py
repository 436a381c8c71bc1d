"""The first training step in a fresh process with an empty cache: what a user waits for the first time.

Imports and the start of CUDA are not counted; generating, compiling, linking, tuning and running are. Run as
`python -m flexsp.bench.cold JSON`, by `first_call`; prints one JSON line last.
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
from flexsp.bench.timing import spread, synchronize

__all__ = ["first_call"]


def first_call(
    case: str, shape: Shape, dtype: str, device: str, provider: str, timeout_s: float, repeats: int
) -> dict[str, Any]:
    """Seconds of the first forward + backward with compilation, over ``repeats`` fresh processes, or an error."""
    request = {
        "case": case, "dtype": dtype, "device": device, "provider": provider,
        "shape": [shape.B, shape.T, shape.H, shape.K, shape.V],
    }  # fmt: skip
    command = [sys.executable, "-m", "flexsp.bench.cold", json.dumps(request)]
    seconds = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as empty:
            places = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLEXSP_CODE_DIR")
            environment = {**os.environ, **dict.fromkeys(places, empty)}
            try:
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
            except subprocess.TimeoutExpired:
                return {"error": f"not finished after {timeout_s:.0f} s"}
        if done.returncode != 0:
            return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
        seconds.append(json.loads(done.stdout.strip().splitlines()[-1]))
    return {"fwd_bwd_s": spread(seconds).as_dict()}


def _measure(request: dict[str, Any]) -> float:
    case, device, dtype = CASES[request["case"]], torch.device(request["device"]), getattr(torch, request["dtype"])
    if request["provider"] == "flexsp":
        import flexsp.ops  # noqa: F401

        op = case.ours
    else:
        import fla.ops.simple_gla  # noqa: F401

        assert case.baseline is not None
        op = case.baseline
    if device.type == "cuda":
        import triton.language  # noqa: F401

        torch.mm(torch.ones(64, 64, device=device), torch.ones(64, 64, device=device))
    inputs = make_inputs(case, Shape(*request["shape"]), dtype, device)
    synchronize(device)
    began = time.perf_counter()
    forward_backward(op, inputs)
    synchronize(device)
    return time.perf_counter() - began


if __name__ == "__main__":
    print(json.dumps(_measure(json.loads(sys.argv[1]))))
