"""Inputs of steps of programs."""

from __future__ import annotations

import torch

from tests import variants

__all__ = ["drawn"]

Tensors = dict[str, torch.Tensor]


def drawn(
    name: str, B: int, T: int, seed: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensors, Tensors, torch.Tensor]:  # fmt: skip
    """Tokens, parameters and states in float64, with values that the dtype has, or float32 for `variants.WIDE`."""
    tokens, params = variants.draw(name, B, T, seed)
    made = torch.Generator().manual_seed(seed + 1)
    state = torch.randn(B, variants.H, *variants.state_sizes(name), generator=made, dtype=torch.float64)
    if dtype == torch.float64:
        return tokens, params, state

    def rounded(x: Tensors) -> Tensors:
        return {key: y.to(torch.float32 if key in variants.WIDE else dtype).double() for key, y in x.items()}

    return rounded(tokens), rounded(params), state
