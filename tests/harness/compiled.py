"""Calls under `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor


def compiled(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(f, fullgraph=True, backend="aot_eager", **options)


def leaf(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(leaf(y) for y in x)
    return x.detach().clone().requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x


def tensors(x: Any) -> list[torch.Tensor]:
    if isinstance(x, dict):
        x = tuple(x.values())
    if isinstance(x, (tuple, list)):
        return [t for y in x for t in tensors(y)]
    return [x] if isinstance(x, torch.Tensor) and x.is_floating_point() else []


SIZES = (2, 4, 3)


def saturating() -> LinearAttention:
    h, k, v = ConstExpr("H", 2), ConstExpr("K", 4), ConstExpr("V", 3)
    key = SymbTensor(["T", h, k])
    meta = {"q": key, "k": key, "v": SymbTensor(["T", h, v]), "prev_s": SymbTensor(["NS", h, k, v])}
    # a constant width, which no input has, and a state that is not affine
    return LinearAttention(
        meta, lambda k, v: k.T @ v, lambda prev_s, chunk_state: (prev_s + chunk_state).tanh(),
        lambda q, v, chunk_state: (torch.cat([q @ chunk_state, v, v[:, :1]], 1)), chunk_size=4,
    )  # fmt: skip
