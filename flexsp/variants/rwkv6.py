"""RWKV-6: a gate for each key channel, and a bonus with which a token reads what it wrote itself (Peng et al. 2024):

o_t = scale q_t (S_{t-1} + diag(u) k_t v_t^T), S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T.
"""

from flexsp.compiler import decayed_scores, identity
from flexsp.variants.gla import chunk, decay
from flexsp.variants.maker import maker


def merge(q, k, v, g, u, chunk_state, scale):
    b = g.cumsum(0) - g  # a token reads the state before its own decay
    lower = identity(k, k.size(0)).cumsum(0)
    delay = lower.tril(-1) - lower.tril(-2)  # moves rows down by one
    own = (q * u * k).sum(-1)
    scores = decayed_scores(q, delay @ k, b) @ delay + own[:, None] * identity(k, k.size(0))
    return (scores @ v + (q * b.exp()) @ chunk_state) * scale


make = maker(chunk, decay, merge, {"q": "THK", "k": "THK", "v": "THV"}, {"g": "THK", "u": "HK"}, clamped=["g"])
