"""HGRN, a vector state: h_t = e^{g_t} h_{t-1} + (1 - e^{g_t}) x_t, o_t = q_t h_t (Qin et al. 2023)."""

from flexsp.compiler import cache_result, decayed_sums
from flexsp.variants.maker import maker
from flexsp.variants.vector_state import decay


def chunk(x, g):
    h = cache_result(decayed_sums(-g.expm1() * x, g), "h")  # from a state of zeros
    return h[-1]


def merge(q, g, h, chunk_state):
    return q * (h + g.cumsum(0).exp() * chunk_state)


make = maker(chunk, decay, merge, {"q": "THK", "x": "THK"}, {"g": "THK"}, state="HK")
