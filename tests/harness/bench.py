"""Rows of benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flexsp.bench.timing import summarize

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
TOY = ["--H", "2", "--K", "16", "--V", "16", "--dtype", "float32", "--iterations", "3", "--warmup", "1"]


def _row(case: str, T: int, mode: str, provider: str, ms: float, peak: float = 5.0) -> dict[str, Any]:
    return {"case": case, "T": T, "mode": mode, "provider": provider, "ms": summarize([ms]).as_dict(),
            "peak_gib": peak, "floor_ms": 0.5}  # fmt: skip
