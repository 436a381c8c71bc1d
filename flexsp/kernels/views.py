"""Views of tensors as steps of recipes (`flexsp.runtime.recipe`)."""

from __future__ import annotations

import torch

from flexsp.runtime.recipe import step

__all__ = ["contiguous", "flatten", "turned", "unflatten", "unsqueeze"]

Tensor = torch.Tensor


@step
def contiguous(x: Tensor) -> Tensor:
    return x.contiguous()


@step
def flatten(x: Tensor, first: int, last: int = -1) -> Tensor:
    return x.flatten(first, last)


@step
def turned(state: Tensor) -> Tensor:
    """A state with rows as columns."""
    return state.transpose(-1, -2)


@step
def unflatten(x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    return x.unflatten(dim, sizes)  # type: ignore[no-any-return, no-untyped-call]


@step
def unsqueeze(x: Tensor, dim: int) -> Tensor:
    return x.unsqueeze(dim)
