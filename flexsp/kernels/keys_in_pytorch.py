"""Keys of unit length in PyTorch, for tensors that kernels do not run, with derivatives of every order."""

from __future__ import annotations

import torch

__all__ = ["EPS", "unit_keys"]

EPS = 1e-6


def unit_keys(x: torch.Tensor, repeats: int, norm: bool) -> torch.Tensor:
    """What the function of this name in `flexsp.kernels.keys` gives; in float64 for float64."""
    wide, H = x, x.shape[2]
    if norm:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)
    if repeats > 1:
        wide = wide.unsqueeze(3).expand(-1, -1, -1, repeats, -1)  # before it is rounded: gradients are summed wide
    wide = wide.to(x.dtype)
    return wide.reshape(*x.shape[:2], H * repeats, x.shape[3]) if repeats > 1 else wide
