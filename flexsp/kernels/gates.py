"""The one rule for log gates so low that their decay is 0 (docs/math.md, section 15)."""

from __future__ import annotations

import torch

__all__ = ["LEAST", "clamped"]

# e^x is 0 here, as rounded to the dtype of states: so the clamp shows in no result. Kernels have float32 states alone.
LEAST = {torch.float32: -104.0, torch.float64: -800.0}


def clamped(gates: torch.Tensor) -> torch.Tensor:
    """Log gates in float32 or float64, those at `LEAST` and below as that and without a gradient: running sums stay
    finite and keep the digits of what follows.

    What clamp does, whose backward pass makes a mask and then reads it.
    """
    least = LEAST[gates.dtype]
    return torch.nn.functional.threshold(gates, least, least)
