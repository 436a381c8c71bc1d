"""mLSTM's gates and quotients in PyTorch, for tensors that kernels do not run."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

__all__ = ["MIN_LOG_FORGET", "Gates", "gates", "log_forget", "quotients"]

MIN_LOG_FORGET = -1e6


class Gates(NamedTuple):
    """Of tokens [B, T, H]: log f_t + m_{t-1} - m_t, which is <= 0 up to roundings; i_t - m_t, <= 0; the exponential of
    that; and the maxima m, in float64 and without gradients."""

    log_forget: torch.Tensor
    log_weight: torch.Tensor
    weight: torch.Tensor
    m: torch.Tensor


def log_forget(f: torch.Tensor) -> torch.Tensor:
    """log sigmoid(f) in float64, at least -1e6."""
    return F.logsigmoid(f.double()).clamp(min=MIN_LOG_FORGET)


def gates(log_f: torch.Tensor, i: torch.Tensor, before: torch.Tensor, m: torch.Tensor, dtype: torch.dtype) -> Gates:
    """Of `log_forget`, i and the maxima m_{t-1} and m_t [B, T, H], constants in float64; all but m in ``dtype``."""
    forget, write = log_f + (before - m), i.double() - m
    return Gates(forget.to(dtype), write.to(dtype), write.exp().to(dtype), m)


def quotients(
    numerator: torch.Tensor, denominator: torch.Tensor, m: torch.Tensor, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """numerator [B, T, H, V] / (max(|denominator [B, T, H, 1]|, e^{-m}) + eps); where both underflow, 0."""
    wide = torch.promote_types(numerator.dtype, torch.float32)
    least = torch.exp(-m).to(wide).clamp(min=torch.finfo(wide).tiny).unsqueeze(-1)
    return (numerator / (torch.maximum(denominator.to(wide).abs(), least) + eps)).to(dtype)
