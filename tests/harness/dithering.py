"""Numbers dithered by a kernel. Import this in ranks that run Triton's interpreter."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from flexsp.kernels.alike_keys import dithered

__all__ = ["dithered_numbers"]


@triton.jit
def _kernel(x, y, C: tl.constexpr):
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    tl.store(y + i * C + j, dithered(tl.load(x + i * C + j), i, j))


def dithered_numbers(sp: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.full_like(x, 7.0)
    _kernel[(1,)](x, y, C=x.shape[0])
    return y
