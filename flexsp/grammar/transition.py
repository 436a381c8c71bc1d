"""How a token changes the state. Each function returns a component for FlexLinearAttention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Transition", "contrastive", "delta_rule", "one_step_gd", "preconditioned_gd", "temporal_difference"]


@dataclass(frozen=True)
class Transition:
    """`inputs` are the tensors that a call must bring for it."""

    kind: Literal["one_step_gd", "delta_rule"]
    inputs: tuple[str, ...] = ()


def one_step_gd(mimo_rank: int = 1) -> Transition:
    """S_t = decay S_{t-1} + k_t v_t^T: one gradient step of -<k S, v>."""
    if mimo_rank != 1:
        raise NotImplementedError(f"transition.one_step_gd(mimo_rank={mimo_rank}): only rank 1 is there yet")
    return Transition("one_step_gd")


def delta_rule() -> Transition:
    """S_t = S' + beta_t k_t (v_t - k_t S')^T with S' the decayed state; the call's ``beta`` is [B, T, H].

    Keys should have length 1 and beta lie in 0..2, else the state grows.
    """
    return Transition("delta_rule", ("beta",))


def preconditioned_gd(preconditioner: str = "diagonal", **options: Any) -> Transition:
    """Not there yet."""
    raise NotImplementedError(f"transition.preconditioned_gd(preconditioner={preconditioner!r}) is not there yet")


def contrastive(feedback: str = "chunk_lagged") -> Transition:
    """Not there yet."""
    raise NotImplementedError(f"transition.contrastive(feedback={feedback!r}) is not there yet")


def temporal_difference() -> Transition:
    """Not there yet."""
    raise NotImplementedError("transition.temporal_difference() is not there yet")
