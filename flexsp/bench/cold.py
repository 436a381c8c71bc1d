"""First call of an operator in a fresh process with an empty Triton cache: what a user waits for the first time.

Imports and the start of CUDA are not counted; compiling, linking, tuning and running are. Run as
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

__all__ = ["first_call"]


def first_call(case: str, shape: Shape, dtype: str, device: str, provider: str, timeout_s: float) -> dict[str, Any]:
    """Seconds of the first forward and of forward + backward, each including compilation, from a fresh process."""
    with tempfile.TemporaryDirectory() as empty:
        environment = {**os.environ, "TRITON_CACHE_DIR": empty, "TORCHINDUCTOR_CACHE_DIR": empty}
        request = json.dumps(
            {
                "case": case,
                "dtype": dtype,
                "device": device,
                "provider": provider,
                "shape": [shape.B, shape.T, shape.H, shape.K, shape.V],
            }
        )
        command = [sys.executable, "-m", "flexsp.bench.cold", request]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return {"error": f"not finished after {timeout_s:.0f} s"}
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


def _measure(request: dict[str, Any]) -> dict[str, Any]:
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
    with torch.no_grad():
        op(inputs)
    synchronize()
    forward = time.perf_counter() - began
    if backward:
        forward_backward(op, inputs)
        synchronize()
    return {"fwd_s": forward, "fwd_bwd_s": time.perf_counter() - began if backward else None}


if __name__ == "__main__":
    print(json.dumps(_measure(json.loads(sys.argv[1]))))
