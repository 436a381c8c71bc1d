"""Recipes of calls, without running them."""

from __future__ import annotations

from typing import Any

import torch

from flexsp.kernels.diagonal.op import Diagonal, Ssd
from flexsp.kernels.operators import Asked

__all__ = ["scalar_decay_executable", "ssd_executable"]


def scalar_decay_executable(
    given: dict[str, torch.Tensor], initial: torch.Tensor | None, docs: int, scale: float
) -> Any:
    """Of the kernels for scalar decays: q, k, v and those of "g" or "g_gamma" and "w" that are there; final states
    leave. Where there is "w" or "turned_values", tokens read nothing of their own products, as in Mamba-3."""
    names = ",".join([*given][3:])
    form = f"{names}|1|{'strict' if {'w', 'turned_values'} & given.keys() else ''}|"
    return Diagonal(form).executable(Asked([*given.values()], initial, None, docs, scale, True, None))


def ssd_executable(given: dict[str, torch.Tensor], initial: torch.Tensor | None, docs: int, scale: float) -> Any:
    """Of Mamba-2's kernels: q, k, v, "dt", "A", "dt_bias" and "D"; final states leave."""
    asked = Asked([*given.values()], initial, None, docs, scale, True, None)
    return Ssd("softplus,dt_bias,D||").executable(asked)
