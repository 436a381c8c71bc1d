"""Combinations of components that no engine runs, as three functions for the compiler.

Log gates come as `g` [C], one a head, or `gk` [C, K], one a key channel, or not at all. Factors of a mask and step
sizes come as `row`, `column` and `own` [C]: outputs times row, values times column, and own (q_t . k_t) v_t is added.
Arguments that a call leaves out are None.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from flexsp.compiler import (
    ConstExpr,
    LinearAttention,
    SymbTensor,
    cache_result,
    decayed_scores,
    identity,
    torch_compile,
    unit_lower_inverse,
)  # fmt: skip
from flexsp.grammar.turned import THETA, TurnedRows

__all__ = ["contrastive", "delta", "general_delta", "linear"]

Tensor = torch.Tensor
Optional = torch.Tensor | None


def _times(x: Tensor, factor: Optional) -> Tensor:
    return x if factor is None else x * factor[:, None]


def _read(x: Tensor, g: Optional, gk: Optional) -> Tensor:
    """x [C, K] with the decay from the chunk's start, to read the state that enters the chunk."""
    return x * gk.cumsum(0).exp() if gk is not None else _times(x, None if g is None else g.cumsum(0).exp())


def _written(x: Tensor, g: Optional, gk: Optional) -> Tensor:
    """x [C, K] with the decay to the chunk's end, to write to the state that leaves the chunk."""
    if gk is not None:
        return x * (gk.sum(0) - gk.cumsum(0)).exp()
    return _times(x, None if g is None else (g.sum(0) - g.cumsum(0)).exp())


def _kept(S: Tensor, g: Optional, gk: Optional) -> Tensor:
    if gk is not None:
        return S * gk.sum(0).exp()[:, None]
    return S if g is None else S * g.sum(0).exp()


def _scores(q: Tensor, k: Tensor, g: Optional, gk: Optional) -> Tensor:
    if g is None and gk is None:
        return (q @ k.T).tril(0)
    return decayed_scores(q, k, g.cumsum(0) if g is not None else gk.cumsum(0))  # type: ignore[union-attr]


def _linear_chunk(k: Tensor, v: Tensor, g: Optional = None, gk: Optional = None, column: Optional = None) -> Tensor:
    return _written(k, g, gk).T @ _times(v, column)


def _linear_decay(prev_s: Tensor, chunk_state: Tensor, g: Optional = None, gk: Optional = None) -> Tensor:
    return _kept(prev_s, g, gk) + chunk_state


def _linear_merge(
    q: Tensor, k: Tensor, v: Tensor, chunk_state: Tensor, scale: float, g: Optional = None, gk: Optional = None,
    row: Optional = None, column: Optional = None, own: Optional = None,
) -> Tensor:  # fmt: skip
    o = _times(_scores(q, k, g, gk) @ _times(v, column) + _read(q, g, gk) @ chunk_state, row)
    return (o if own is None else o + _times(v, own * (q * k).sum(-1))) * scale


def _delta_chunk(
    r: Tensor, p: Tensor, v: Tensor, g: Optional = None, gk: Optional = None, column: Optional = None
) -> Tensor:
    inverse = unit_lower_inverse(identity(r, r.size(0)) + _scores(r, p, g, gk).tril(-1))
    u = inverse @ _times(v, column)
    cache_result(u, "u")
    cache_result(inverse @ _read(r, g, gk), "w")
    return _written(p, g, gk).T @ u


def _delta_decay(
    prev_s: Tensor, p: Tensor, w: Tensor, chunk_state: Tensor, g: Optional = None, gk: Optional = None
) -> Tensor:
    return _kept(prev_s, g, gk) - _written(p, g, gk).T @ (w @ prev_s) + chunk_state


def _delta_merge(
    q: Tensor, p: Tensor, v: Tensor, u: Tensor, w: Tensor, chunk_state: Tensor, scale: float, g: Optional = None,
    gk: Optional = None, row: Optional = None, own: Optional = None,
) -> Tensor:  # fmt: skip
    o = _times(_scores(q, p, g, gk) @ (u - w @ chunk_state) + _read(q, g, gk) @ chunk_state, row)
    return (o if own is None else o + _times(v, own * (q * p).sum(-1))) * scale


def _beta_chunk(
    k: Tensor, v: Tensor, beta: Tensor, g: Optional = None, gk: Optional = None, column: Optional = None
) -> Tensor:
    return _delta_chunk(k, _times(k, beta), v, g, gk, column)


def _beta_decay(
    prev_s: Tensor, k: Tensor, beta: Tensor, w: Tensor, chunk_state: Tensor, g: Optional = None, gk: Optional = None
) -> Tensor:
    return _delta_decay(prev_s, _times(k, beta), w, chunk_state, g, gk)


def _beta_merge(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, u: Tensor, w: Tensor, chunk_state: Tensor, scale: float,
    g: Optional = None, gk: Optional = None, row: Optional = None, own: Optional = None,
) -> Tensor:  # fmt: skip
    return _delta_merge(q, _times(k, beta), v, u, w, chunk_state, scale, g, gk, row, own)


def _expected(k: Tensor, v: Tensor, S: Tensor, temperature: float) -> Tensor:
    """The mean of v_j over j <= i with weights e^{k_i S v_j / temperature}, beside one of 1 for a value of 0."""
    logits = ((k @ S) @ v.T) / temperature
    logits = logits.masked_fill(torch.ones_like(logits).tril(0) < 0.5, float("-inf"))
    largest = logits.amax(-1).clamp(min=0.0)
    weights = (logits - largest[:, None]).exp()
    return (weights @ v) / (weights.sum(-1) + (-largest).exp())[:, None]


def _contrastive_chunk(
    k: Tensor, v: Tensor, eta: Tensor, g: Optional = None, gk: Optional = None, column: Optional = None
) -> Tensor:
    return _written(_times(k, eta), g, gk).T @ _times(v, column)


def _contrastive_decay(
    prev_s: Tensor, k: Tensor, v: Tensor, eta: Tensor, chunk_state: Tensor, temperature: float, g: Optional = None,
    gk: Optional = None, column: Optional = None,
) -> Tensor:  # fmt: skip
    means = _times(_expected(k, v, prev_s, temperature), column)
    return _kept(prev_s, g, gk) + chunk_state - _written(_times(k, eta), g, gk).T @ means


def _contrastive_merge(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, chunk_state: Tensor, scale: float, temperature: float,
    g: Optional = None, gk: Optional = None, column: Optional = None,
) -> Tensor:  # fmt: skip
    writes = _times(v - _expected(k, v, chunk_state, temperature), column)
    return (_scores(q, _times(k, eta), g, gk) @ writes + _read(q, g, gk) @ chunk_state) * scale


def _program(
    functions: tuple[Callable[..., Tensor], ...], tokens: dict[str, str], turned: tuple[str, ...] = ("q", "k")
) -> Callable[..., LinearAttention]:
    @functools.lru_cache(maxsize=64)
    def make(
        H: int, K: int, V: int, scale: float, given: tuple[str, ...], fallback: str | None = None,
        chunk_size: int | None = None, rows: int = 1, **numbers: float,
    ) -> LinearAttention:  # fmt: skip
        h, k, v = ConstExpr("H", H), ConstExpr("K", K), ConstExpr("V", V)
        shapes = {"K": SymbTensor(["T", h, k]), "V": SymbTensor(["T", h, v]), "": SymbTensor(["T", h])}
        meta: dict[str, Any] = {name: shapes[size] for name, size in tokens.items()}
        meta |= {"prev_s": SymbTensor(["NS", h, k, v]), "scale": scale, **numbers}
        meta |= {name: shapes["K" if name == "gk" else ""] for name in given if name != THETA}
        engines: tuple[TurnedRows, ...] = ()
        if THETA in given:
            meta[THETA] = SymbTensor(["T", h, ConstExpr("P", K // 2)])
            engines = (TurnedRows(turned, chunk_size, rows),)
        found = LinearAttention(
            meta, functions[0], functions[1], functions[2], fallback=fallback, chunk_size=chunk_size,
            lowerings=engines,
        )  # fmt: skip
        if rows > 1:
            found.rows = rows
            found.graph_name = torch_compile.name_of(found)
        return found

    return make


# Arguments: H, K, V, the factor on q, names of further inputs, LinearAttention's fallback and chunk_size, how many rows
# are a token, and numbers.
# `general_delta` reads the decayed state with r and writes with p: S_t = S' + p_t (v_t - r_t S')^T.
# `theta` is a further input where rows were turned by its running sums (flexsp/grammar/turned.py).
linear = _program((_linear_chunk, _linear_decay, _linear_merge), {"q": "K", "k": "K", "v": "V"})
delta = _program((_beta_chunk, _beta_decay, _beta_merge), {"q": "K", "k": "K", "v": "V", "beta": ""})
general_delta = _program(
    (_delta_chunk, _delta_decay, _delta_merge), {"q": "K", "r": "K", "p": "K", "v": "V"}, ("q", "r", "p")
)
contrastive = _program(
    (_contrastive_chunk, _contrastive_decay, _contrastive_merge), {"q": "K", "k": "K", "v": "V", "eta": ""}
)
