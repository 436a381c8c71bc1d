"""GLA: S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T, o_t = scale q_t S_t, a gate for each key channel (Yang et al. 2023)."""

from flexsp.compiler import decayed_scores
from flexsp.variants.gated_keys import GATED_KEYS
from flexsp.variants.maker import maker


def chunk(k, v, g):
    return (k * (g.sum(0) - g.cumsum(0)).exp()).T @ v


def decay(prev_s, chunk_state, g):
    return prev_s * g.sum(0).exp()[:, None] + chunk_state


def merge(q, k, v, g, chunk_state, scale):
    b = g.cumsum(0)
    return (decayed_scores(q, k, b) @ v + (q * b.exp()) @ chunk_state) * scale


inputs = {"q": "THK", "k": "THK", "v": "THV"}
make = maker(chunk, decay, merge, inputs, {"g": "THK"}, clamped=["g"], lowerings=[GATED_KEYS])
