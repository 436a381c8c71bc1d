"""DeltaNet: S_t = (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T, o_t = scale q_t S_t (Yang et al. 2024, in chunks)."""

import torch

from flexsp.compiler import (
    ConstExpr,
    LinearAttention,
    SymbTensor,
    cache_result,
    identity,
    matmul_out_fp32,
)
from flexsp.variants.delta_rule import DELTA_RULE


def chunk(k, v, b):
    eye = identity(k, k.size(0))
    t = (eye + matmul_out_fp32(k * b[..., None], k.T).tril(-1)).inverse().to(k.dtype)
    u = t @ (v * b[..., None])
    w = t @ (k * b[..., None])
    cache_result(u, "u")
    cache_result(w, "w")
    return k.T @ u


def decay(prev_s, k, w, chunk_state):
    matrix = identity(k, k.size(1)) - k.T @ w
    return matrix @ prev_s.to(matrix.dtype) + chunk_state


def merge(q, k, u, w, chunk_state, scale):
    errors = u - w @ chunk_state
    return ((q @ k.T).tril(0) @ errors + q @ chunk_state) * scale


def make(
    H: int, K: int, V: int, dtype: torch.dtype = torch.float32, scale: float | None = None, **options
) -> LinearAttention:
    h, k, v = ConstExpr("H", H), ConstExpr("K", K), ConstExpr("V", V)
    meta = {
        "q": SymbTensor(["T", h, k], dtype),
        "k": SymbTensor(["T", h, k], dtype),
        "v": SymbTensor(["T", h, v], dtype),
        "b": SymbTensor(["T", h], dtype),
        "prev_s": SymbTensor(["NS", h, k, v]),
        "scale": K**-0.5 if scale is None else scale,
    }
    return LinearAttention(meta, chunk, decay, merge, lowerings=[DELTA_RULE], **options)
