"""A vector state with a gate for each channel: h_t = e^{g_t} h_{t-1} + x_t, o_t = h_t.

HGRN (Qin et al. 2023) and the RG-LRU of Hawk and Griffin (De et al. 2024) are this, with inputs made of their gates.
"""

import torch

from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor, cache_result, decayed_sums


def chunk(x, g):
    h = cache_result(decayed_sums(x, g), "h")  # from a state of zeros
    return h[-1]


def decay(prev_s, chunk_state, g):
    return prev_s * g.sum(0).exp() + chunk_state


def merge(g, h, chunk_state):
    return h + g.cumsum(0).exp() * chunk_state


def make(H: int, K: int, V: int = 0, dtype: torch.dtype = torch.float32, **options) -> LinearAttention:
    h, k = ConstExpr("H", H), ConstExpr("K", K)
    meta = {"x": SymbTensor(["T", h, k], dtype), "g": SymbTensor(["T", h, k]), "prev_s": SymbTensor(["NS", h, k])}
    return LinearAttention(meta, chunk, decay, merge, **options)
