"""Log gates and step sizes of raw numbers in PyTorch, for tensors that kernels do not run, with derivatives of every
order."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["MOST_LOG", "activated"]

MOST_LOG = {torch.float32: 88.0, torch.float64: 709.0}
"""e^x is finite: beyond, gradients of gates that close would be 0 * inf = NaN."""
Optional = torch.Tensor | None


def activated(
    x: torch.Tensor, A_log: Optional, bias: Optional, factor: float | None, dtype: torch.dtype
) -> torch.Tensor:  # fmt: skip
    """What the function of this name in `flexsp.kernels.raw_gates` gives, in `dtype`, float32 or float64."""
    heads = x.shape[2:]
    raw = x.to(dtype) if bias is None else x + bias.to(dtype).view(heads)  # torch promotes x
    if A_log is not None:
        slope = A_log.to(dtype).flatten().clamp(max=MOST_LOG[dtype]).exp()
        slope = slope if len(heads) == 1 else slope.unsqueeze(-1)
        if factor is None:
            return -slope * F.softplus(raw)
        raw = slope * raw
    assert factor is not None
    found = raw.sigmoid()
    return found if factor == 1.0 else factor * found
