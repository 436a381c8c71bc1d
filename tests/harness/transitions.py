"""Transitions as users write them, and their inputs."""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid, normalize

from flexsp.compiler import cache_result, identity, unit_lower_inverse
from tests.harness.grammar import H, K, Tensors, V


class Momentum:
    """The delta rule with momentum: M_t = e^{g_t} M_{t-1} + beta_t k_t (v_t - k_t S_{t-1})^T, S_t = S_{t-1} + M_t."""

    inputs = {"beta": ()}
    extra_state = {"momentum": ("K", "V")}

    def sums(self, g):  # type: ignore[no-untyped-def]
        """P(t, r) = e^{g_{r+1} + ... + g_t}, what is left at t of a write at r, and D, its sum from r to t."""
        b = g.cumsum(0)
        ones = torch.ones_like(b[:, None] * b[None, :]).tril(0)
        P = ones * (b[:, None] - b[None, :]).exp()
        return b, P, ones @ P, ones @ b.exp()[:, None]

    def chunk(self, k, v, g, beta):  # type: ignore[no-untyped-def]
        b, P, D, c = self.sums(g)
        solve = unit_lower_inverse(identity(k, k.size(0)) + ((k @ k.T) * (D - P) * beta[None, :]).tril(-1))
        cache_result(beta[:, None] * (solve @ v), "u")
        cache_result(beta[:, None] * (solve @ k), "w")
        cache_result(beta[:, None] * (solve @ (k * (c - b.exp()[:, None]))), "y")
        u = beta[:, None] * (solve @ v)
        return (k * D[-1][:, None]).T @ u, (k * P[-1][:, None]).T @ u

    def propagate(self, state, momentum, chunk_state, chunk_momentum, k, g, w, y):  # type: ignore[no-untyped-def]
        b, P, D, c = self.sums(g)
        lost = w @ state + y @ momentum
        new = state + c[-1] * momentum - (k * D[-1][:, None]).T @ lost + chunk_state
        return new, b[-1].exp() * momentum - (k * P[-1][:, None]).T @ lost + chunk_momentum

    def output(self, q, k, g, state, momentum, u, w, y):  # type: ignore[no-untyped-def]
        b, P, D, c = self.sums(g)
        writes = u - w @ state - y @ momentum
        return q @ state + (q * c) @ momentum + ((q @ k.T) * D).tril(0) @ writes


class Normalised:
    """Linear attention divided by the sum of its weights, z_t = e^{g_t} z_{t-1} + k_t; with a running mean of v."""

    extra_state = {"mean": ("V",), "z": ("K",)}

    def chunk(self, k, v, g):  # type: ignore[no-untyped-def]
        left = (g.sum(0) - g.cumsum(0)).exp()[:, None]
        return (k * left).T @ v, (v * left).sum(0), (k * left).sum(0)

    def propagate(self, state, mean, z, chunk_state, chunk_mean, chunk_z, g):  # type: ignore[no-untyped-def]
        kept = g.sum(0).exp()
        return kept * state + chunk_state, kept * mean + chunk_mean, kept * z + chunk_z

    def output(self, q, k, v, g, state, mean, z):  # type: ignore[no-untyped-def]
        b = g.cumsum(0)
        P = torch.ones_like(b[:, None] * b[None, :]).tril(0) * (b[:, None] - b[None, :]).exp()
        scores = (q @ k.T) * P
        weight = scores.sum(-1) + (q * b.exp()[:, None]) @ z
        means = P @ v + b.exp()[:, None] * mean[None, :]
        return (scores @ v + (q * b.exp()[:, None]) @ state) / (1 + weight * weight)[:, None] + means


class Counted:
    """Numbers beside a row and a column: n_t = e^{g_t} n_{t-1} + 1, and one that decays half as fast."""

    extra_state = {"n": (), "mean": ("V",), "z": ("K",), "slow": ()}

    def chunk(self, k, v, g):  # type: ignore[no-untyped-def]
        left = g.sum(0) - g.cumsum(0)
        kept, slow = left.exp()[:, None], ((0.5 * left).exp() * k.sum(-1)).sum()
        return (k * kept).T @ v, kept.sum(), (v * kept).sum(0), (k * kept).sum(0), slow

    def propagate(self, state, n, mean, z, slow, chunk_state, chunk_n, chunk_mean, chunk_z, chunk_slow, g):  # type: ignore[no-untyped-def]
        kept = g.sum(0).exp()
        new = kept * state + chunk_state, kept * n + chunk_n, kept * mean + chunk_mean, kept * z + chunk_z
        return *new, (0.5 * g.sum(0)).exp() * slow + chunk_slow

    def output(self, q, k, v, g, state, n, mean, z, slow):  # type: ignore[no-untyped-def]
        b = g.cumsum(0)
        P = torch.ones_like(b[:, None] * b[None, :]).tril(0) * (b[:, None] - b[None, :]).exp()
        half = torch.ones_like(b[:, None] * b[None, :]).tril(0) * (0.5 * (b[:, None] - b[None, :])).exp()
        scores, enters = (q @ k.T) * P, b.exp()
        number = P.sum(1) + enters * n
        slower = half @ k.sum(-1)[:, None] + ((0.5 * b).exp() * slow)[:, None]
        means = P @ v + enters[:, None] * mean + (scores.sum(1) + enters * (q @ z))[:, None]
        return (scores @ v + (q * enters[:, None]) @ state + means) / (1 + number * number)[:, None] + slower


class CountedDelta:
    """The delta rule with n_t = e^{g_t} n_{t-1} + beta_t, a row of means and a column that the matrix multiplies."""

    inputs = {"beta": ()}
    extra_state = {"mean": ("V",), "z": ("K",), "n": ()}

    def chunk(self, k, v, g, beta):  # type: ignore[no-untyped-def]
        solve = unit_lower_inverse(identity(k, k.size(0)) + (beta[:, None] * (k @ k.T)).tril(-1))
        cache_result(solve @ (beta[:, None] * v), "u")
        cache_result(solve @ (beta[:, None] * k), "w")
        left = (g.sum(0) - g.cumsum(0)).exp()
        ones = (solve @ beta[:, None])[:, 0]
        return k.T @ (solve @ (beta[:, None] * v)), (v * left[:, None]).sum(0), k.T @ ones, (left * beta).sum()

    def propagate(self, state, mean, z, n, chunk_state, chunk_mean, chunk_z, chunk_n, k, g, w):  # type: ignore[no-untyped-def]
        kept = g.sum(0).exp()
        new = state - k.T @ (w @ state) + chunk_state
        return new, kept * mean + chunk_mean, z - k.T @ (w @ z) + chunk_z, kept * n + chunk_n

    def output(self, q, k, v, g, beta, state, mean, z, n, u, w):  # type: ignore[no-untyped-def]
        b = g.cumsum(0)
        P = torch.ones_like(b[:, None] * b[None, :]).tril(0) * (b[:, None] - b[None, :]).exp()
        number = P @ beta + b.exp() * n
        means = P @ v + b.exp()[:, None] * mean
        scores = (q @ k.T).tril(0)
        solve = unit_lower_inverse(identity(k, k.size(0)) + (beta[:, None] * (k @ k.T)).tril(-1))
        ones = scores @ (solve @ beta[:, None] - (w @ z)[:, None]) + (q @ z)[:, None]
        return (scores @ (u - w @ state) + q @ state + ones) / (1 + number * number)[:, None] + means


class Plain:
    """GLA, without further state."""

    def chunk(self, k, v, g):  # type: ignore[no-untyped-def]
        return (k * (g.sum(0) - g.cumsum(0)).exp()[:, None]).T @ v

    def propagate(self, state, chunk_state, g):  # type: ignore[no-untyped-def]
        return g.sum(0).exp() * state + chunk_state

    def output(self, q, k, v, g, state):  # type: ignore[no-untyped-def]
        b = g.cumsum(0)
        return ((q @ k.T).tril(0) * (b[:, None] - b).exp()) @ v + (q * b.exp()[:, None]) @ state


CLASSES = {"momentum": Momentum, "normalised": Normalised, "counted": Counted, "counted delta": CountedDelta,
           "plain": Plain}  # fmt: skip
SIZES = {"momentum": (2 * K, V), "normalised": (K + 1, V + 1), "counted": (K + 3, V + 1),
         "counted delta": (K + 2, V + 1), "plain": (K, V)}  # fmt: skip


def within(name: str, S: torch.Tensor, K: int = K, V: int = V) -> torch.Tensor:
    """A state without what lies beside its parts: below columns and behind numbers."""
    inside = torch.ones_like(S)
    inside[..., K:, V:] = 0
    for row in {"counted": (K, K + 2), "counted delta": (K + 1,)}.get(name, ()):
        inside[..., row, 1:] = 0
    return S * inside


def draw_transition(name: str, B: int, T: int, seed: int) -> Tensors:
    made = torch.Generator().manual_seed(seed)
    shapes = {"q": (K,), "k": (K,), "v": (V,), "decay": ()}
    shapes |= dict.fromkeys(getattr(CLASSES[name], "inputs", ()), ())
    x = {key: torch.randn(B, T, H, *n, generator=made, dtype=torch.float64) for key, n in shapes.items()}
    x["k"] = normalize(x["k"], dim=-1)
    x["decay"] = logsigmoid(x["decay"])
    if "beta" in x:
        x["beta"] = 0.5 * x["beta"].sigmoid()
    return x


class Counters:
    """Linear attention beside rows and columns of several numbers, which halve and double with every chunk."""

    extra_state = {"low": (2, "V"), "high": ("K", 3), "end": ("V",)}
    chunk_size = 64

    def chunk(self, k, v):  # type: ignore[no-untyped-def]
        return k.T @ v, 0 * (v.T @ v)[:2], 0 * (k.T @ k)[:, :3], v.sum(0)

    def propagate(self, state, low, high, end, chunk_state, chunk_low, chunk_high, chunk_end):  # type: ignore[no-untyped-def]
        return state + chunk_state, 0.5 * low + chunk_low, 2 * high + chunk_high, end + chunk_end

    def output(self, q, k, v, state, low, high, end):  # type: ignore[no-untyped-def]
        return (q @ k.T).tril(0) @ v + q @ state + low.sum(0) + (q @ high).sum(1)[:, None]
