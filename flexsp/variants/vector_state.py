"""A vector state with a gate for each channel: h_t = e^{g_t} h_{t-1} + x_t, o_t = h_t.

HGRN (Qin et al. 2023) and the RG-LRU of Hawk and Griffin (De et al. 2024) are this, with inputs made of their gates.
"""

from flexsp.compiler import cache_result, decayed_sums
from flexsp.variants.maker import maker


def chunk(x, g):
    h = cache_result(decayed_sums(x, g), "h")  # from a state of zeros
    return h[-1]


def decay(prev_s, chunk_state, g):
    return prev_s * g.sum(0).exp() + chunk_state


def merge(g, h, chunk_state):
    return h + g.cumsum(0).exp() * chunk_state


make = maker(chunk, decay, merge, {"x": "THK"}, {"g": "THK"}, state="HK")
