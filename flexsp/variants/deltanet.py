"""DeltaNet: S_t = (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T, o_t = scale q_t S_t (Yang et al. 2024, in chunks)."""

from flexsp.compiler import cache_result, identity, matmul_out_fp32
from flexsp.variants.delta_rule import DELTA_RULE
from flexsp.variants.maker import maker


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


make = maker(chunk, decay, merge, {"q": "THK", "k": "THK", "v": "THV", "b": "TH"}, lowerings=[DELTA_RULE])
