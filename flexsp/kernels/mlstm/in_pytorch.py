"""mLSTM's weighted keys and quotients in PyTorch, for tensors that kernels do not run."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["MIN_LOG_FORGET", "log_forget", "quotients", "weighted"]

MIN_LOG_FORGET = -1e6


def log_forget(f: torch.Tensor) -> torch.Tensor:
    """log sigmoid(f) in float64, at least -1e6."""
    return F.logsigmoid(f.double()).clamp(min=MIN_LOG_FORGET)


def weighted(
    k: torch.Tensor, i: torch.Tensor, m: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """e^{i - m} k [B, T, H, K] in ``dtype`` of i and m [B, T, H], m in float64 and a constant; k as it is; and
    e^{i - m}, at least in float32."""
    weight = (i.double() - m).exp().to(torch.promote_types(dtype, torch.float32))
    return (k * weight.unsqueeze(-1)).to(dtype), k, weight


def quotients(
    numerator: torch.Tensor, denominator: torch.Tensor, m: torch.Tensor, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """numerator [B, T, H, V] / (max(|denominator [B, T, H, 1]|, e^{-m}) + eps); where both underflow, 0."""
    wide = torch.promote_types(numerator.dtype, torch.float32)
    least = torch.exp(-m).to(wide).clamp(min=torch.finfo(wide).tiny).unsqueeze(-1)
    return (numerator / (torch.maximum(denominator.to(wide).abs(), least) + eps)).to(dtype)
