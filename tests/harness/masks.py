"""Masks as users write them, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import logsigmoid, normalize

from flexsp.grammar import FlexLinearAttention
from tests.harness.grammar import H, K, Tensors, V


def segments(i, j, *, delta_cumsum, delta, beta):  # type: ignore[no-untyped-def]
    if i < j:
        return 0.0
    return beta[j] * torch.exp(delta_cumsum[i] - delta_cumsum[j]) * delta[j]


def gated(i, j, g):  # type: ignore[no-untyped-def]
    G = g.cumsum(0)
    return torch.exp(G[i] - G[j])


def mlstm_gates(i, j, f, u):  # type: ignore[no-untyped-def]
    F = logsigmoid(f).cumsum(0)
    return torch.exp(F[i] - F[j] + u[j])


def own_bonus(i, j, g, u):  # type: ignore[no-untyped-def]
    G = torch.cumsum(g, dim=0)
    return torch.where(i == j, torch.exp(u), torch.exp(G[i] - G[j]))


def half(i, j, g, w):  # type: ignore[no-untyped-def]
    G = g.cumsum(0)
    return torch.sigmoid(w[i]) * torch.exp(G[i] - 0.5 * G[j]) * (w[j] - 2)


def average(i, j):  # type: ignore[no-untyped-def]
    return 1 / (i + 1)


def retention(i, j, gamma):  # type: ignore[no-untyped-def]
    return gamma ** (i - j)


def sizes(i, j, w):  # type: ignore[no-untyped-def]
    return torch.sqrt(w[j].square()) * (w[i] ** 2) ** -0.5


def strict(i, j, dt, A):  # type: ignore[no-untyped-def]
    G = (dt * A).cumsum(0)
    if i <= j:
        return 0.0
    return torch.exp(G[i] - G[j]) * dt[j]


def before(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


# name: (function, its (log gate, row, column, own) [B, T, H] from a document's arrays, written by hand)
MASKS: dict[str, tuple[Callable[..., Any], Callable[[Tensors, torch.Tensor], tuple[Any, ...]]]] = {
    "segments": (
        segments, lambda x, t: (x["delta_cumsum"] - before(x["delta_cumsum"]), 1, x["beta"] * x["delta"], None),
    ),
    "gated": (gated, lambda x, t: (x["g"], 1, 1, None)),
    "mlstm_gates": (mlstm_gates, lambda x, t: (logsigmoid(x["f"]), 1, x["u"].exp(), None)),
    "own_bonus": (own_bonus, lambda x, t: (x["g"], 1, 1, x["u"].exp())),
    "half": (
        half, lambda x, t: (0.5 * x["g"], x["w"].sigmoid() * (0.5 * x["g"].cumsum(1)).exp(), x["w"] - 2, None),
    ),
    "average": (average, lambda x, t: (0 * t, 1 / (t + 1), 1, None)),
    "retention": (retention, lambda x, t: (x["gamma"].log(), 1, 1, None)),
    "sizes": (sizes, lambda x, t: (0 * t, 1 / x["w"].abs(), x["w"].abs(), None)),
    "strict": (strict, lambda x, t: (x["dt"] * x["A"], 1, x["dt"], 0 * x["dt"])),
}  # fmt: skip
OF_HEADS = {"gamma", "A", ("own_bonus", "u")}


def of_heads(name: str, array: str) -> bool:
    return array in OF_HEADS or (name, array) in OF_HEADS


def draw(name: str, model: FlexLinearAttention, B: int, T: int, seed: int) -> Tensors:
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    found = {"q": normal(B, T, H, K), "k": normalize(normal(B, T, H, K), dim=-1), "v": normal(B, T, H, V)}
    for array in model.inputs:
        shape = (H,) if of_heads(name, array) else (B, T, H, K) if array == "decay" else (B, T, H)
        x = normal(*shape)
        if array in ("g", "decay", "A"):
            x = logsigmoid(x)
        if array in ("gamma", "beta", "dt", "mu"):
            x = x.sigmoid()
        found[array] = logsigmoid(x).cumsum(1) if array == "delta_cumsum" else x
    return found
