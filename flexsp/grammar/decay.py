"""How the state decays. Each function returns a component for FlexLinearAttention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["Decay", "exponential", "fixed", "gated", "none"]


@dataclass(frozen=True)
class Decay:
    """A decay of the state.

    Attributes:
        inputs: names of the tensors that a call must give for it.
        vector: whether every key channel has a gate of its own.
        trapezoidal: whether each token also writes the product of the token before it.
    """

    kind: Literal["none", "fixed", "gated", "exponential"]
    inputs: tuple[str, ...] = ()
    vector: bool = False
    log_decay: tuple[float, ...] | None = None
    trapezoidal: bool = False


def none() -> Decay:
    """S_t = S_{t-1} + ..."""
    return Decay("none")


def fixed(log_decay: Sequence[float] | torch.Tensor | None = None) -> Decay:
    """A constant for each head, natural logarithm, <= 0; None: RetNet's log(1 - 2^{-5 - h}) (Sun et al. 2023).

    Values below -104 (-800 for float64 inputs), -inf too, are a decay of 0.
    """
    values = None if log_decay is None else tuple(float(x) for x in log_decay)
    if values is not None and any(not x <= 0 for x in values):
        raise ValueError(f"log_decay: expected natural logarithms <= 0, got {values}")
    return Decay("fixed", log_decay=values)


def gated(per_head: bool = True, discretization: str = "euler") -> Decay:
    """A gate a token: the call's ``decay`` holds natural logarithms <= 0.

    [B, T, H] if ``per_head`` (simple GLA, Gated DeltaNet), else [B, T, H, K], one a key channel (GLA, KDA). Below -104
    (-800 for float64 inputs), also at -inf, a gate is a decay of 0 and has no gradient.

    ``discretization="trapezoidal"`` is the rule of `exponential` with steps of 1: with the call's ``trap`` [B, T, H], a
    weight before the sigmoid, l = sigmoid(trap), a token writes its product times l_t, and that of the token before,
    which decays with the state, times 1 - l_t. For `transition.one_step_gd` and `transition.preconditioned_gd`.
    """
    trapezoidal = _trapezoidal("gated", discretization)
    inputs = ("decay", "trap") if trapezoidal else ("decay",)
    return Decay("gated", inputs, vector=not per_head, trapezoidal=trapezoidal)


def exponential(data_dependent: bool = True, discretization: str = "euler") -> Decay:
    """e^{dt A}, as in Mamba-2: the call's ``A`` [H] is <= 0.

    If ``data_dependent`` its ``decay`` holds the steps dt >= 0 [B, T, H], and what a token writes is multiplied by its
    dt, in rules that correct what the state predicts its v. Else dt = 1.

    ``discretization="trapezoidal"`` is Mamba-3's rule (Lahoti et al. 2026) with the call's ``trap`` [B, T, H], a weight
    before the sigmoid, l = sigmoid(trap): a token writes its product times l_t dt_t, and that of the token before,
    which decays with the state, times (1 - l_t) dt_t. For `transition.one_step_gd` and `transition.preconditioned_gd`.
    """
    if not _trapezoidal("exponential", discretization):
        return Decay("exponential", ("decay", "A") if data_dependent else ("A",))
    if not data_dependent:
        raise NotImplementedError("decay.exponential(discretization='trapezoidal') needs data_dependent=True")
    return Decay("exponential", ("decay", "A", "trap"), trapezoidal=True)


def _trapezoidal(name: str, discretization: str) -> bool:
    if discretization not in ("euler", "trapezoidal"):
        raise NotImplementedError(
            f"decay.{name}(discretization={discretization!r}): only 'euler' and 'trapezoidal' are there"
        )
    return discretization == "trapezoidal"
