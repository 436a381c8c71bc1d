"""The layers against their formulas, token by token in float64; decoding and training share code, so that they agree
says little about either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flexsp.nn import Mamba2, SimpleGLA


def convolved(x: torch.Tensor, conv: torch.nn.Module, act: Callable[..., torch.Tensor] = F.silu) -> torch.Tensor:
    """act(bias + sum_j weight[:, 0, W - 1 - j] x_{t - j}) of x [T, D]."""
    width = conv.weight.shape[2]
    padded = torch.cat([x.new_zeros(width - 1, x.shape[1]), x])
    y = torch.stack([sum(padded[t + j] * conv.weight[:, 0, j] for j in range(width)) for t in range(len(x))])
    return act(y if conv.bias is None else y + conv.bias)


def recurrent(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """q_t S_t with S_t = decay_t S_{t-1} + k_t v_t^T, of one head: [T, K], [T, K], [T, V], [T]."""
    S, o = q.new_zeros(q.shape[1], v.shape[1]), []
    for t in range(len(q)):
        S = decay[t] * S + torch.outer(k[t], v[t])
        o.append(q[t] @ S)
    return torch.stack(o)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def test_simple_gla() -> None:
    layer = SimpleGLA(32, num_heads=2, gate_logit_normalizer=3.0, norm_eps=1e-2).double()
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    torch.nn.init.normal_(layer.norm.weight)
    q, k, v = convolved(layer.qkv_proj(x[0]), layer.conv).split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    decay = layer.g_proj(x[0]).sigmoid() ** (1 / 3)
    heads = []
    for h in range(2):
        at_k, at_v = slice(16 * h, 16 * h + 16), slice(16 * h, 16 * h + 16)
        o = 16**-0.5 * recurrent(q[:, at_k], k[:, at_k], v[:, at_v], decay[:, h])
        heads.append(rms(o, layer.norm.weight, 1e-2) * F.silu(layer.z_proj(x[0])[:, at_v]))
    want = layer.o_proj(torch.cat(heads, -1))
    torch.testing.assert_close(layer(x)[0], want, rtol=1e-9, atol=1e-9)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"norm_before_gate": True, "use_bias": True, "D_has_hdim": True, "hidden_act": "gelu", "dt_limit": (0.02, 0.05)},
    {"rmsnorm": False, "hidden_act": "relu", "dt_limit": (0.01, float("inf")), "conv_bias": False},
    {"hidden_act": "swish", "dt_limit": [0, 0.03]},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_mamba2(options: dict[str, Any]) -> None:
    layer = Mamba2(32, head_dim=16, state_size=16, n_groups=2, norm_eps=1e-2, **options).double()
    for x in (layer.D, *([] if layer.norm is None else [layer.norm.weight])):
        torch.nn.init.normal_(x)
    with torch.no_grad():
        layer.dt_bias[0], layer.dt_bias[-1] = -8.0, 0.0  # steps below and above the limits
    act = {"relu": F.relu, "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2}.get(layer.hidden_act, F.silu)
    low, high = options.get("dt_limit", (0, torch.inf))
    u = torch.randn(1, 9, 32, dtype=torch.float64)
    inner, shared = layer.inner_size, 2 * 16
    z, mixed, dt = layer.in_proj(u[0]).split([inner, inner + 2 * shared, layer.num_heads], -1)
    x, B, C = convolved(mixed, layer.conv1d, act).split([inner, shared, shared], -1)
    dt = torch.log1p((dt + layer.dt_bias).exp())
    assert not options.get("dt_limit") or ((dt < low) | (dt > high)).any()
    dt = torch.where(dt < low, low, torch.where(dt > high, high, dt))
    D = layer.D.view(layer.num_heads, -1)
    y = []
    for h in range(layer.num_heads):
        group, at = h // (layer.num_heads // 2), slice(16 * h, 16 * h + 16)
        of_group = slice(16 * group, 16 * group + 16)
        decay = (-dt[:, h] * layer.A_log[h].exp()).exp()
        y.append(recurrent(C[:, of_group], B[:, of_group], dt[:, h, None] * x[:, at], decay) + D[h] * x[:, at])
    first, last = F.silu(z), torch.ones_like(z)
    if options.get("norm_before_gate"):
        first, last = last, first
    o = (torch.cat(y, -1) * first).unflatten(-1, (2, -1))
    o = o if layer.norm is None else rms(o, layer.norm.weight.view(2, -1), 1e-2)
    want, dy = layer.out_proj(o.flatten(-2) * last), torch.randn(9, 32, dtype=torch.float64)
    torch.testing.assert_close(layer(u)[0], want, rtol=1e-9, atol=1e-9)
    parameters = list(layer.parameters())
    grads = (torch.autograd.grad(y, parameters, dy) for y in (layer(u)[0], want))
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


def test_initial_convolutions_of_mamba2() -> None:
    weight = Mamba2(64, conv_init=1e-3).conv1d.weight
    assert 9e-4 < weight.abs().max() <= 1e-3
