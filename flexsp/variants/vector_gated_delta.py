"""A delta rule with a gate for each key channel, which reads the state after its decay:

e_t = v_t - k_t diag(e^{g_t}) S_{t-1}, S_t = diag(e^{g_t}) S_{t-1} + beta_t k_t e_t^T, o_t = scale q_t S_t.
"""

from flexsp.compiler import cache_result, decayed_scores, identity, unit_lower_inverse
from flexsp.variants.delta_rule import DELTA_RULE
from flexsp.variants.maker import maker


def chunk(k, v, beta, g):
    b = g.cumsum(0)
    p = k * beta[:, None]
    inverse = unit_lower_inverse(identity(k, k.size(0)) + decayed_scores(k, p, b).tril(-1))
    cache_result(inverse @ v, "u")
    cache_result(inverse @ (k * b.exp()), "w")
    return (p * (b[-1] - b).exp()).T @ (inverse @ v)


def decay(prev_s, k, beta, g, w, chunk_state):
    p = k * beta[:, None] * (g.sum(0) - g.cumsum(0)).exp()
    return prev_s * g.sum(0).exp()[:, None] - p.T @ (w @ prev_s) + chunk_state


def merge(q, k, beta, g, u, w, chunk_state, scale):
    b = g.cumsum(0)
    errors = u - w @ chunk_state
    return (decayed_scores(q, k * beta[:, None], b) @ errors + (q * b.exp()) @ chunk_state) * scale


make = maker(
    chunk, decay, merge, {"q": "THK", "k": "THK", "v": "THV", "beta": "TH"}, {"g": "THK"}, lowerings=[DELTA_RULE]
)
