"""GLA: S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T, o_t = scale q_t S_t, a gate for each key channel (Yang et al. 2023)."""

import torch

from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor, decayed_scores
from flexsp.variants.gated_keys import GATED_KEYS


def chunk(k, v, g):
    return (k * (g.sum(0) - g.cumsum(0)).exp()).T @ v


def decay(prev_s, chunk_state, g):
    return prev_s * g.sum(0).exp()[:, None] + chunk_state


def merge(q, k, v, g, chunk_state, scale):
    b = g.cumsum(0)
    return (decayed_scores(q, k, b) @ v + (q * b.exp()) @ chunk_state) * scale


def make(
    H: int, K: int, V: int, dtype: torch.dtype = torch.float32, scale: float | None = None, **options
) -> LinearAttention:
    h, k, v = ConstExpr("H", H), ConstExpr("K", K), ConstExpr("V", V)
    meta = {
        "q": SymbTensor(["T", h, k], dtype),
        "k": SymbTensor(["T", h, k], dtype),
        "v": SymbTensor(["T", h, v], dtype),
        "g": SymbTensor(["T", h, k]),
        "prev_s": SymbTensor(["NS", h, k, v]),
        "scale": K**-0.5 if scale is None else scale,
    }
    return LinearAttention(meta, chunk, decay, merge, lowerings=[GATED_KEYS], **options)
