"""Simple GLA (Mamba-2's recurrence): S_t = e^{g_t} S_{t-1} + k_t v_t^T, o_t = scale q_t S_t, a scalar gate a head."""

import torch

from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor
from flexsp.variants.scalar_decay import SCALAR_DECAY


def chunk(k, v, g):
    g_cumsum = g.cumsum(dim=0)
    decay = (g.sum(dim=0) - g_cumsum).unsqueeze(0).exp()
    return ((k.permute([1, 0]).to(g.dtype) * decay).to(v.dtype)) @ v


def decay(prev_s, chunk_state, g):
    return prev_s * g.sum(dim=0).exp() + chunk_state


def merge(q, k, v, g, chunk_state, scale):
    b = g.cumsum(0)
    p = (q @ k.T).tril(0)
    p = (p * (b[..., None] - b[None, ...]).exp()).to(v.dtype)
    return (p @ v + q @ chunk_state.to(q.dtype) * b.exp()[..., None]) * scale


def make(H: int, K: int, V: int, dtype: torch.dtype = torch.float32, **options) -> LinearAttention:
    h, k, v = ConstExpr("H", H), ConstExpr("K", K), ConstExpr("V", V)
    meta = {
        "q": SymbTensor(["T", h, k], dtype),
        "k": SymbTensor(["T", h, k], dtype),
        "v": SymbTensor(["T", h, v], dtype),
        "g": SymbTensor(["T", h]),
        "prev_s": SymbTensor(["NS", h, k, v]),
        "scale": K**-0.5,
    }
    return LinearAttention(meta, chunk, decay, merge, lowerings=[SCALAR_DECAY], **options)
