"""Rows of benchmarks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from flexsp.bench.timing import summarize

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
TOY = ["--H", "2", "--K", "16", "--V", "16", "--dtype", "float32", "--iterations", "3", "--warmup", "1"]


def _row(case: str, T: int, mode: str, provider: str, ms: float, peak: float = 5.0) -> dict[str, Any]:
    return {"case": case, "T": T, "mode": mode, "provider": provider, "ms": summarize([ms]).as_dict(),
            "peak_gib": peak, "floor_ms": 0.5}  # fmt: skip


def torchrun(processes: int | str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "flexsp", *words, "--ranks", str(processes)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
