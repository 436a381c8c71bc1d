"""Log gates of the benchmarks, as natural logarithms: of trained models, of layers as they begin, and none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

__all__ = ["BOUND", "GATES", "TRAINED", "Decays", "Normal", "at_least_bound", "decays", "log_gates", "log_uniform"]

TRAINED = ("mild", "initialised", "bounded", "unbounded")
GATES = (*TRAINED, "none")
"""Kinds of log gates, of x in N(0, 1) for each token:

mild: log sigmoid(x + 3), about -0.07.
initialised: -A softplus(x + b) with A uniform in 0..16 a head, and softplus(b) log-uniform in 0.001..0.1 a head, or a
    channel, as layers begin.
bounded: -5 sigmoid(x), as Kimi Delta Attention with `safe_gate` has them.
unbounded: as initialised, with A of mean 8 a head and up to 200, log-normal, as in trained Kimi Linear models.
none: 0.
"""
BOUND = -5.0
_STEPS = (0.001, 0.1)
_MEAN, _MOST, _SPREAD = 8.0, 200.0, 1.2  # of A; with this spread of log A one head of some hundreds has the most

Normal = Callable[..., torch.Tensor]  # of sizes: N(0, 1) in float32


class Decays(NamedTuple):
    """Log gates -A softplus(x + bias) of a token's x: A [H] > 0, and bias [H] or [H, K], in float32."""

    A: torch.Tensor
    bias: torch.Tensor


def log_uniform(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Log-uniform numbers in low..high, of normal ones."""
    return low * (high / low) ** torch.special.ndtr(x)


def _check(kind: str, kinds: tuple[str, ...]) -> None:
    if kind not in kinds:
        raise ValueError(f"gates: expected one of {', '.join(kinds)}, got {kind!r}")


def decays(kind: str, sizes: tuple[int, ...], normal: Normal) -> Decays:
    """A and bias of heads, or of heads and their channels, for gates that are mild, initialised or unbounded."""
    _check(kind, ("mild", "initialised", "unbounded"))
    x, bias = normal(sizes[0]), normal(*sizes)
    if kind == "mild":  # -softplus(x - 3) is distributed as log sigmoid(x + 3)
        return Decays(torch.ones_like(x), torch.full_like(bias, -3.0))
    if kind == "initialised":
        A = 16 * torch.special.ndtr(x)
    else:
        A = (math.log(_MEAN) - _SPREAD**2 / 2 + _SPREAD * x).exp().clamp(max=_MOST)
    return Decays(A, log_uniform(bias, *_STEPS).expm1().log())


def log_gates(kind: str, size: tuple[int, ...], normal: Normal) -> torch.Tensor:
    """Log gates [B, T, H] or [B, T, H, K] in float32."""
    _check(kind, GATES)
    raw = normal(*size)
    if kind == "none":
        return torch.zeros_like(raw)
    if kind == "mild":
        return F.logsigmoid(raw + 3.0)
    if kind == "bounded":
        return BOUND * raw.sigmoid()
    A, bias = decays(kind, size[2:], normal)
    return -A.view(-1, *[1] * (len(size) - 3)) * F.softplus(raw + bias)


def at_least_bound(kind: str) -> bool:
    """Whether no log gate of this kind is below `BOUND`, so that other libraries may be told so (`safe_gate`)."""
    return kind in ("mild", "bounded", "none")
