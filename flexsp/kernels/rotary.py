"""Rotations of pairs of channels."""

from __future__ import annotations

import torch

from flexsp.comm.derivatives import transformed

__all__ = ["halved", "paired", "rotate", "turn_rows"]


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


def paired(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """x with channels i and i + K / 2 of ``dim``, a negative number, side by side."""
    return x.unflatten(dim, (2, x.shape[dim] // 2)).transpose(dim - 1, dim).flatten(dim - 1, dim)


def halved(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """What `paired` was made of."""
    return x.unflatten(dim, (x.shape[dim] // 2, 2)).transpose(dim - 1, dim).flatten(dim - 1, dim)


def turn_rows(state: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """state [N, H, K, V], whose rows depend on ``angle`` [N or 1, H or 1, S] in radians as on rotations of S pairs of
    rows side by side, but are not rotated: for the gradient alone."""
    if not (angle.requires_grad or transformed()):
        return state
    by = (angle - angle.detach()).unsqueeze(-2)
    return rotate(state.transpose(-1, -2), by).transpose(-1, -2)
