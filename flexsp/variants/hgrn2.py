"""HGRN2, GLA whose keys are what the gates forget (Qin et al. 2024):

S_t = diag(e^{g_t}) S_{t-1} + (1 - e^{g_t}) v_t^T, o_t = scale q_t S_t, a gate for each key channel.
"""

from flexsp.compiler import decayed_scores
from flexsp.variants.gla import decay
from flexsp.variants.maker import maker


def chunk(v, g):
    return (-g.expm1() * (g.sum(0) - g.cumsum(0)).exp()).T @ v


def merge(q, v, g, chunk_state, scale):
    b = g.cumsum(0)
    return (decayed_scores(q, -g.expm1(), b) @ v + (q * b.exp()) @ chunk_state) * scale


make = maker(chunk, decay, merge, {"q": "THK", "v": "THV"}, {"g": "THK"}, clamped=["g"])
