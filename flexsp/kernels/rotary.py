"""Rotations of pairs of channels."""

from __future__ import annotations

import torch

__all__ = ["rotate"]


def rotate(x: torch.Tensor, angle: torch.Tensor, pairwise: bool = True) -> torch.Tensor:
    """x [..., K] with S pairs of channels rotated by ``angle`` [..., S] in radians. The other channels stay.

    A pair is channels 2 i and 2 i + 1, or with ``pairwise=False`` channels i and i + K / 2. cos and sin are computed in
    the angle's dtype, products in x's.
    """
    K, S = x.shape[-1], angle.shape[-1]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    if pairwise:
        a, b = x[..., : 2 * S : 2], x[..., 1 : 2 * S : 2]
    else:
        a, b = x[..., :S], x[..., K // 2 : K // 2 + S]
    first, second = a * cos - b * sin, a * sin + b * cos
    if pairwise:
        rotated = torch.stack([first, second], dim=-1).flatten(-2)
        return rotated if 2 * S == K else torch.cat([rotated, x[..., 2 * S :]], dim=-1)
    return torch.cat([first, x[..., S : K // 2], second, x[..., K // 2 + S :]], dim=-1)
