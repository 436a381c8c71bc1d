"""Simple GLA (Mamba-2's recurrence): S_t = e^{g_t} S_{t-1} + k_t v_t^T, o_t = scale q_t S_t, a scalar gate a head."""

from flexsp.variants.maker import maker
from flexsp.variants.scalar_decay import SCALAR_DECAY


def chunk(k, v, g):
    g_cumsum = g.cumsum(dim=0)
    decay = (g.sum(dim=0) - g_cumsum).unsqueeze(0).exp()
    return ((k.permute([1, 0]).to(g.dtype) * decay).to(v.dtype)) @ v


def decay(prev_s, chunk_state, g):
    return prev_s * g.sum(dim=0).exp() + chunk_state


def merge(q, k, v, g, chunk_state, scale):
    b = g.cumsum(0)
    p = (q @ k.T).tril(0)
    p = (p * (b[..., None] - b[None, ...]).exp()).to(v.dtype)
    return (p @ v + q @ chunk_state.to(q.dtype) * b.exp()[..., None]) * scale


make = maker(chunk, decay, merge, {"q": "THK", "k": "THK", "v": "THV"}, {"g": "TH"}, lowerings=[SCALAR_DECAY])
