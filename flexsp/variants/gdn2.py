"""Gated DeltaNet-2: a gate for each key channel, and a delta rule whose strength of erasing is a number for each key
channel and whose strength of writing is one for each value channel (arXiv 2605.22791):

e_t = write_t * v_t - (erase_t * k_t) diag(e^{g_t}) S_{t-1}, S_t = diag(e^{g_t}) S_{t-1} + k_t e_t^T,
o_t = scale q_t S_t.
"""

from flexsp.compiler import cache_result, decayed_scores, identity, unit_lower_inverse
from flexsp.variants.delta_rule import DELTA_RULE
from flexsp.variants.maker import maker


def chunk(k, v, erase, write, g):
    b = g.cumsum(0)
    r = k * erase
    inverse = unit_lower_inverse(identity(k, k.size(0)) + decayed_scores(r, k, b).tril(-1))
    u = inverse @ (v * write)
    cache_result(u, "u")
    cache_result(inverse @ (r * b.exp()), "w")
    return (k * (b[-1] - b).exp()).T @ u


def decay(prev_s, k, g, w, chunk_state):
    left = (g.sum(0) - g.cumsum(0)).exp()
    return prev_s * g.sum(0).exp()[:, None] - (k * left).T @ (w @ prev_s) + chunk_state


def merge(q, k, g, u, w, chunk_state, scale):
    b = g.cumsum(0)
    errors = u - w @ chunk_state
    return (decayed_scores(q, k, b) @ errors + (q * b.exp()) @ chunk_state) * scale


inputs = {"q": "THK", "k": "THK", "v": "THV", "erase": "THK", "write": "THV"}
make = maker(chunk, decay, merge, inputs, {"g": "THK"}, clamped=["g"], lowerings=[DELTA_RULE])
