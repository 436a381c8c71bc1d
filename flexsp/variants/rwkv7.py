"""RWKV-7: a gate for each key channel, and a transition of rank one that reads the state before its decay (Peng et al.
2025, Goose):

S_t = diag(e^{g_t}) S_{t-1} + b_t (a_t S_{t-1}) + k_t v_t^T, o_t = scale q_t S_t.
"""

from flexsp.compiler import cache_result, decayed_scores, identity, unit_lower_inverse
from flexsp.variants.gated_transition import GATED_TRANSITION
from flexsp.variants.maker import maker


def chunk(k, v, a, b, g):
    before = g.cumsum(0) - g  # a token reads the state before its own decay
    lower = identity(k, k.size(0)).cumsum(0)
    delay = lower.tril(-1) - lower.tril(-2)  # moves rows down by one
    own = decayed_scores(a, delay @ b, before) @ delay
    inverse = unit_lower_inverse(identity(k, k.size(0)) - own, exact_repeats=True)
    u = inverse @ (decayed_scores(a, delay @ k, before) @ (delay @ v))
    cache_result(u, "u")
    cache_result(inverse @ (a * before.exp()), "w")
    left = (g.sum(0) - g.cumsum(0)).exp()
    return (k * left).T @ v + (b * left).T @ u


def decay(prev_s, b, g, w, chunk_state):
    left = (g.sum(0) - g.cumsum(0)).exp()
    return prev_s * g.sum(0).exp()[:, None] + (b * left).T @ (w @ prev_s) + chunk_state


def merge(q, k, v, b, g, u, w, chunk_state, scale):
    since = g.cumsum(0)
    reads = u + w @ chunk_state  # a_t S_{t-1}
    pairs = decayed_scores(q, k, since) @ v + decayed_scores(q, b, since) @ reads
    return (pairs + (q * since.exp()) @ chunk_state) * scale


inputs = {"q": "THK", "k": "THK", "v": "THV", "a": "THK", "b": "THK"}
make = maker(chunk, decay, merge, inputs, {"g": "THK"}, clamped=["g"], lowerings=[GATED_TRANSITION])
