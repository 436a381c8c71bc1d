"""HGRN, a vector state: h_t = e^{g_t} h_{t-1} + (1 - e^{g_t}) x_t, o_t = q_t h_t (Qin et al. 2023)."""

import torch

from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor, cache_result, decayed_sums


def chunk(x, g):
    h = cache_result(decayed_sums(-g.expm1() * x, g), "h")  # from a state of zeros
    return h[-1]


def decay(prev_s, chunk_state, g):
    return prev_s * g.sum(0).exp() + chunk_state


def merge(q, g, h, chunk_state):
    return q * (h + g.cumsum(0).exp() * chunk_state)


def make(H: int, K: int, V: int = 0, dtype: torch.dtype = torch.float32, **options) -> LinearAttention:
    h, k = ConstExpr("H", H), ConstExpr("K", K)
    token = SymbTensor(["T", h, k], dtype)
    meta = {"q": token, "x": token, "g": SymbTensor(["T", h, k]), "prev_s": SymbTensor(["NS", h, k])}
    return LinearAttention(meta, chunk, decay, merge, **options)
