"""GLA with a gate for each channel of keys and of values: its general form, in which a gate is an outer product.

S_t = (e^{g_t} e^{w_t}^T) * S_{t-1} + k_t v_t^T, o_t = scale q_t S_t (Yang et al. 2024, section 4.1; Mao 2022).

Every number of the state has a factor of its own. Gates w of values have to be mild: inside a chunk values are
multiplied by up to e^{|sum of w| / 2}. So the sum of w over a chunk must stay above -160, and above -16 in float16.
A smaller chunk_size allows stronger gates.
"""

from flexsp.compiler import decayed_scores
from flexsp.variants.maker import maker


def chunk(k, v, g, w):
    return (k * (g.sum(0) - g.cumsum(0)).exp()).T @ (v * (w.sum(0) - w.cumsum(0)).exp())


def decay(prev_s, chunk_state, g, w):
    return prev_s * g.sum(0).exp()[:, None] * w.sum(0).exp()[None, :] + chunk_state


def merge(q, k, v, g, w, chunk_state, scale):
    b, half = g.cumsum(0), 0.5 * w.sum(0)
    c = w.cumsum(0) - half
    inside = decayed_scores(q, k, b) @ (v * (-c).exp())
    return (inside * c.exp() + ((q * b.exp()) @ chunk_state) * w.cumsum(0).exp()) * scale


make = maker(chunk, decay, merge, {"q": "THK", "k": "THK", "v": "THV"}, {"g": "THK", "w": "THV"})
