"""Linear attention without a gate: S_t = S_{t-1} + k_t v_t^T, o_t = scale q_t S_t (Katharopoulos et al. 2020)."""

from flexsp.variants.maker import maker
from flexsp.variants.scalar_decay import SCALAR_DECAY


def chunk(k, v):
    return k.T @ v


def decay(prev_s, chunk_state):
    return prev_s + chunk_state


def merge(q, k, v, chunk_state, scale):
    return ((q @ k.T).tril(0) @ v + q @ chunk_state) * scale


make = maker(chunk, decay, merge, {"q": "THK", "k": "THK", "v": "THV"}, lowerings=[SCALAR_DECAY])
