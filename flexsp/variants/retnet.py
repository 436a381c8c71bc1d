"""RetNet: S_t = gamma S_{t-1} + k_t v_t^T, o_t = scale q_t S_t, gamma = e^{log_gamma} a head (Sun et al. 2023)."""

import torch

from flexsp.compiler import decayed_scores
from flexsp.variants.maker import maker
from flexsp.variants.scalar_decay import SCALAR_DECAY


def positions(k, log_gamma):
    return torch.ones_like(k[:, 0]).cumsum(0) * log_gamma


def chunk(k, v, log_gamma):
    b = positions(k, log_gamma)
    return (k * (b[-1] - b).exp()[:, None]).T @ v


def decay(prev_s, chunk_state, k, log_gamma):
    return prev_s * (log_gamma * k.size(0)).exp() + chunk_state


def merge(q, k, v, log_gamma, chunk_state, scale):
    b = positions(k, log_gamma)
    return (decayed_scores(q, k, b) @ v + (q * b.exp()[:, None]) @ chunk_state) * scale


make = maker(
    chunk, decay, merge, {"q": "THK", "k": "THK", "v": "THV"}, {"log_gamma": "H"}, lowerings=[SCALAR_DECAY]
)
