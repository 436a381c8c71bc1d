"""Inputs that do not come as [B, T, H, K]."""

from __future__ import annotations

from typing import Any

import torch

from flexsp.compiler import (
    ConstExpr,
    LinearAttention,
    SymbTensor,
    cache_result,
    decayed_scores,
    identity,
    unit_lower_inverse,
)

H, K, V = 2, 16, 6
h, k, v = ConstExpr("H", H), ConstExpr("K", K), ConstExpr("V", V)
Sizes = tuple[ConstExpr, ConstExpr, ConstExpr]


def chunk(k, v, beta, g):
    """Gated DeltaProduct (Siems et al. 2025): a gated delta rule whose tokens have several keys."""
    b = g.cumsum(0)
    p = k * beta[:, None]
    inverse = unit_lower_inverse(identity(k, k.size(0)) + decayed_scores(k, p, b).tril(-1))
    cache_result(inverse @ v, "u")
    cache_result(inverse @ (k * b.exp()[:, None]), "w")
    return (p * (b[-1] - b).exp()[:, None]).T @ (inverse @ v)


def decay(prev_s, k, beta, g, w, chunk_state):
    p = k * beta[:, None] * (g.sum(0) - g.cumsum(0)).exp()[:, None]
    return prev_s * g.sum(0).exp() - p.T @ (w @ prev_s) + chunk_state


def merge(q, k, beta, g, u, w, chunk_state):
    b = g.cumsum(0)
    errors = u - w @ chunk_state
    return decayed_scores(q, k * beta[:, None], b) @ errors + (q * b.exp()[:, None]) @ chunk_state


def meta(n: int, sizes: Sizes = (h, k, v), dtype: torch.dtype = torch.float32, **changed: Any) -> dict[str, Any]:
    """The query at a token's last row, the gate at its first."""
    h, k, v = sizes
    found = {"q": SymbTensor(["T", h, k], dtype, row=-1), "k": SymbTensor(["T", h, k], dtype, rows=n)}
    found |= {"v": SymbTensor(["T", h, v], dtype, rows=n), "beta": SymbTensor(["T", h], dtype, rows=n)}
    found |= {"g": SymbTensor(["T", h], row=0), "prev_s": SymbTensor(["NS", h, k, v])}
    return found | changed


def heads_first(
    n: int = 2, H: int = H, K: int = K, V: int = V, dtype: torch.dtype = torch.float32
) -> LinearAttention:  # fmt: skip
    """Queries, keys and gates come with heads first, values and strengths with tokens first."""
    h, k, v = ConstExpr("H", H), ConstExpr("K", K), ConstExpr("V", V)
    changed = {"q": SymbTensor([h, "T", k], dtype, row=-1), "k": SymbTensor([h, "T", k], dtype, rows=n)}
    changed |= {"g": SymbTensor([h, "T"], row=0)}
    return LinearAttention(meta(n, (h, k, v), dtype, **changed), chunk, decay, merge)
