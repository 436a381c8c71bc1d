"""What ranks add and how they decay, and the states that enter ranks, written out from the definition."""

from __future__ import annotations

import torch

__all__ = ["KINDS", "fold", "random_elements"]

KINDS = ("none", "scalar", "vector")


def random_elements(kind: str, ranks: int, B: int = 2, H: int = 3, K: int = 4, V: int = 5) -> list[tuple]:
    """(F, log_a, cut) of every rank, float64."""
    shape = {"none": None, "scalar": (ranks, B, H), "vector": (ranks, B, H, K)}[kind]
    F = torch.randn(ranks, B, H, K, V, dtype=torch.float64)
    log_a = [None] * ranks if shape is None else list(-3 * torch.rand(shape, dtype=torch.float64))
    return [(F[r], log_a[r], torch.rand(B) < 0.3 if r % 2 else None) for r in range(ranks)]


def fold(elements: list[tuple], reverse: bool = False) -> list[torch.Tensor]:
    """State entering every rank, written out from the definition."""
    state = torch.zeros_like(elements[0][0])
    entering = []
    for F, log_a, cut in reversed(elements) if reverse else elements:
        entering.append(state)
        decay = torch.ones_like(F)
        if log_a is not None:
            decay = log_a.exp().reshape(*log_a.shape, *[1] * (4 - log_a.dim())).expand_as(F)
        if cut is not None:
            decay = torch.where(cut[:, None, None, None], 0.0, decay)
        state = decay * state + F
    return entering[::-1] if reverse else entering
