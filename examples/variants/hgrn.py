"""HGRN, a vector state: h_t = e^{g_t} h_{t-1} + (1 - e^{g_t}) x_t, o_t = q_t h_t (Qin et al. 2023)."""

import torch

from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor


def chunk(x, g):
    return ((1 - g.exp()) * x * (g.sum(0) - g.cumsum(0)).exp()).sum(0)


def decay(prev_s, chunk_state, g):
    return prev_s * g.sum(0).exp() + chunk_state


def merge(q, x, g, chunk_state):
    b = g.cumsum(0)
    causal = torch.ones_like(b @ b.T).tril(0) > 0
    between = torch.where(causal.unsqueeze(-1), b.unsqueeze(1) - b.unsqueeze(0), float("-inf")).exp()
    h = (between * ((1 - g.exp()) * x).unsqueeze(0)).sum(1) + b.exp() * chunk_state
    return q * h


def make(H: int, K: int, V: int = 0, dtype: torch.dtype = torch.float32, **options) -> LinearAttention:
    h, k = ConstExpr("H", H), ConstExpr("K", K)
    token = SymbTensor(["T", h, k], dtype)
    meta = {"q": token, "x": token, "g": SymbTensor(["T", h, k]), "prev_s": SymbTensor(["NS", h, k])}
    return LinearAttention(meta, chunk, decay, merge, **options)
