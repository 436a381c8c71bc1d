"""Linear attention without a gate: S_t = S_{t-1} + k_t v_t^T, o_t = scale q_t S_t (Katharopoulos et al. 2020)."""

import torch

from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor
from flexsp.variants.scalar_decay import SCALAR_DECAY


def chunk(k, v):
    return k.T @ v


def decay(prev_s, chunk_state):
    return prev_s + chunk_state


def merge(q, k, v, chunk_state, scale):
    return ((q @ k.T).tril(0) @ v + q @ chunk_state) * scale


def make(H: int, K: int, V: int, dtype: torch.dtype = torch.float32, **options) -> LinearAttention:
    h, k, v = ConstExpr("H", H), ConstExpr("K", K), ConstExpr("V", V)
    meta = {
        "q": SymbTensor(["T", h, k], dtype),
        "k": SymbTensor(["T", h, k], dtype),
        "v": SymbTensor(["T", h, v], dtype),
        "prev_s": SymbTensor(["NS", h, k, v]),
        "scale": K**-0.5,
    }
    return LinearAttention(meta, chunk, decay, merge, lowerings=[SCALAR_DECAY], **options)
