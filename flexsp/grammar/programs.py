"""The combinations that no engine has, as three functions for the compiler."""

from __future__ import annotations

import functools

import torch

from flexsp.compiler import (
    ConstExpr,
    LinearAttention,
    SymbTensor,
    cache_result,
    decayed_scores,
    identity,
    unit_lower_inverse,
)  # fmt: skip

__all__ = ["delta", "gla"]

Tensor = torch.Tensor


def _gla_chunk(k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return (k * (g.sum(0) - g.cumsum(0)).exp()).T @ v


def _gla_decay(prev_s: Tensor, chunk_state: Tensor, g: Tensor) -> Tensor:
    return prev_s * g.sum(0).exp()[:, None] + chunk_state


def _gla_merge(q: Tensor, k: Tensor, v: Tensor, g: Tensor, chunk_state: Tensor) -> Tensor:
    b = g.cumsum(0)
    return decayed_scores(q, k, b) @ v + (q * b.exp()) @ chunk_state


def _delta_chunk(k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
    b = g.cumsum(0)
    p = k * beta[:, None]
    inverse = unit_lower_inverse(identity(k, k.size(0)) + decayed_scores(k, p, b).tril(-1))
    u = inverse @ v
    cache_result(u, "u")
    cache_result(inverse @ (k * b.exp()), "w")
    return (p * (b[-1] - b).exp()).T @ u


def _delta_decay(prev_s: Tensor, k: Tensor, beta: Tensor, g: Tensor, w: Tensor, chunk_state: Tensor) -> Tensor:
    p = k * beta[:, None] * (g.sum(0) - g.cumsum(0)).exp()
    return prev_s * g.sum(0).exp()[:, None] - p.T @ (w @ prev_s) + chunk_state


def _delta_merge(q: Tensor, k: Tensor, beta: Tensor, g: Tensor, u: Tensor, w: Tensor, chunk_state: Tensor) -> Tensor:
    b = g.cumsum(0)
    return decayed_scores(q, k * beta[:, None], b) @ (u - w @ chunk_state) + (q * b.exp()) @ chunk_state


def _meta(H: int, K: int, V: int) -> dict[str, SymbTensor]:
    h, k, v = ConstExpr("H", H), ConstExpr("K", K), ConstExpr("V", V)
    key = SymbTensor(["T", h, k])
    return {"q": key, "k": key, "v": SymbTensor(["T", h, v]), "g": key, "prev_s": SymbTensor(["NS", h, k, v])}


@functools.lru_cache(maxsize=64)
def gla(H: int, K: int, V: int) -> LinearAttention:
    """GLA: g [B, T, H, K]."""
    return LinearAttention(_meta(H, K, V), _gla_chunk, _gla_decay, _gla_merge)


@functools.lru_cache(maxsize=64)
def delta(H: int, K: int, V: int) -> LinearAttention:
    """The delta rule with a gate for each key channel, g [B, T, H, K], and beta [B, T, H]."""
    meta = _meta(H, K, V) | {"beta": SymbTensor(["T", ConstExpr("H", H)])}
    return LinearAttention(meta, _delta_chunk, _delta_decay, _delta_merge)
