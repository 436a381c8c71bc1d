"""GLA whose mask has a learned bias for the token itself, a number u a head (no library has it):

S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T, o_t = scale (q_t S_t + (e^u - 1) (q_t . k_t) v_t).
"""

from flexsp.compiler import decayed_scores
from flexsp.variants.gla import chunk, decay
from flexsp.variants.maker import maker


def merge(q, k, v, g, u, chunk_state, scale):
    b = g.cumsum(0)
    own = (u.exp() - 1) * (q * k).sum(-1)
    return (decayed_scores(q, k, b) @ v + own[:, None] * v + (q * b.exp()) @ chunk_state) * scale


make = maker(chunk, decay, merge, {"q": "THK", "k": "THK", "v": "THV"}, {"g": "THK", "u": "H"})
