"""Ops on long texts: gradients of gates, and of parameters that are sums over tokens, may get worse with the length."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flexsp import nn, ops
from flexsp.grammar import FlexLinearAttention, decay, feature_map, transition
from tests.harness.masks import mlstm_gates

T, H, K, V = 131_072, 2, 64, 64
DRAWS = 4  # cotangents, whose errors are taken together: a sum over tokens may nearly vanish for one of them
BOUND = 0.01
Tensors = dict[str, Tensor]


class Op(NamedTuple):
    """`tokens` are inputs in bfloat16, `gates` and `sums` in float32: of `sums` the gradient is a sum over tokens."""

    run: Callable[..., Any]
    tokens: str
    gates: str = ""
    sums: str = ""


def _layer(layer: torch.nn.Module) -> Callable[..., Any]:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        made = layer.to(x.device)
        o = torch.func.functional_call(made, {"weight": weight.to(x).view_as(made.weight)}, x)
        return o[0] if isinstance(o, tuple) else o

    return run


def _rwkv7(q: Tensor, k: Tensor, v: Tensor, kk: Tensor, gk: Tensor, rate: Tensor) -> Tensor:
    kk = F.normalize(kk.float(), dim=-1)
    return ops.chunk_rwkv7(q, gk, k, v, -kk.to(k), (kk * rate).to(k))[0]


def _spectral(q: Tensor, k: Tensor, v: Tensor, g: Tensor, theta: Tensor, psi: Tensor) -> Tensor:
    what = FlexLinearAttention(decay.gated(), transition=transition.spectral())
    return what(q=q, k=k, v=v, decay=g, theta=theta, psi=psi)[0]


def _rope(q: Tensor, k: Tensor, v: Tensor, g: Tensor, theta: Tensor) -> Tensor:
    what = FlexLinearAttention(decay.gated(), feature_map.rope(data_dependent=True))
    return what(q=q, k=k, v=v, decay=g, theta=theta)[0]


def _preconditioned(at: str) -> Callable[..., Any]:
    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **eta: Tensor) -> Tensor:
        what = FlexLinearAttention(decay.gated(), transition=transition.preconditioned_gd(at=at, eps=0.1))
        return what(q=q, k=k, v=v, decay=g, **eta)[0]

    return run


def _mask(q: Tensor, k: Tensor, v: Tensor, f: Tensor, u1: Tensor) -> Tensor:
    return FlexLinearAttention(custom_mask=mlstm_gates)(q=q, k=k, v=v, f=f, u=u1)[0]


def _with_state(of: Callable[..., Any]) -> Callable[..., Any]:
    """The outputs, and rows of the final state behind them."""

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        o, state = of(q, k, v, g, beta, output_final_state=True)
        return torch.cat([o.float(), state.transpose(1, 2)], 1)

    return run


OPS = {
    "linear": Op(lambda q, k, v: ops.chunk_linear_attn(q, k, v, normalize=False)[0], "q k v"),
    "simple_gla": Op(lambda q, k, v, g: ops.chunk_simple_gla(q, k, v, g)[0], "q k v", "g"),
    "retention": Op(lambda q, k, v, g_gamma: ops.chunk_simple_gla(q, k, v, g_gamma=g_gamma)[0], "q k v", "", "g_gamma"),
    "mamba2": Op(
        lambda x, dt, A, B, C, D, dt_bias: ops.mamba2_ssd(x, dt, A, B, C, D, dt_bias, dt_softplus=True)[0],
        "x B C", "dt", "A D dt_bias",
    ),
    "gated_delta_rule": Op(
        lambda q, k, v, g, beta, A_log, dt_bias: ops.chunk_gated_delta_rule(
            q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, use_gate_in_kernel=True
        )[0], "q k v", "g beta", "A_log dt_bias",
    ),
    "kda": Op(
        lambda q, k, v, gk, beta, A_log, dt_bias: ops.chunk_kda(
            q, k, v, gk, beta, A_log=A_log, dt_bias=dt_bias, use_gate_in_kernel=True
        )[0], "q k v", "gk beta", "A_log dt_bias",
    ),
    "delta_rule": Op(lambda q, k, v, beta: ops.chunk_delta_rule(q, k, v, beta)[0], "q k v", "beta"),
    "gated_delta_product": Op(
        lambda q, k2, v2, g, beta2: ops.chunk_gated_delta_product(q, k2, v2, g, beta2, 2)[0], "q k2 v2", "g beta2",
    ),
    "gdn2": Op(
        lambda q, k, v, gk, b, w: ops.chunk_gdn2(q, k, v, gk, b, w)[0], "q k v", "gk b w",
    ),
    "rwkv7": Op(_rwkv7, "q k v kk", "gk rate"),
    "gla": Op(lambda q, k, v, gk: ops.chunk_gla(q, k, v, gk)[0], "q k v", "gk"),
    "hgrn2": Op(lambda q, v, gk: ops.chunk_hgrn2(q, v, gk)[0], "q v", "gk"),
    "rwkv6": Op(lambda q, k, v, gk, u: ops.chunk_rwkv6(q, k, v, gk, u)[0], "q k v", "gk", "u"),
    "mlstm": Op(lambda q, k, v, i, f: ops.chunk_mlstm(q, k, v, i, f, head_first=False)[0], "q k v", "i f"),
    "hgrn": Op(lambda x, gd: ops.chunk_hgrn(x, gd)[0], "x", "gd"),
    "mamba3": Op(
        lambda x, dt1, At, B, C, trap, angles, D, u: ops.mamba3(
            x, dt1, At, B, C, trap, angles, D, B_bias=u, C_bias=u
        )[0], "x B C", "dt1 At trap angles", "D u",
    ),
    "selective_scan": Op(
        lambda x, z, B1, C1, delta, AN, Dd, delta_bias: ops.selective_scan(
            x, delta, AN, B1, C1, Dd, z, delta_bias, delta_softplus=True
        )[0], "x z B1 C1", "delta", "AN Dd delta_bias",
    ),
    "spectral": Op(_spectral, "q k v", "g theta psi"), "rope": Op(_rope, "q k v", "g theta"),
    "preconditioned": Op(_preconditioned("read"), "q k v", "g"),
    "preconditioned writes": Op(_preconditioned("write"), "q k v", "g eta"),
    "mask": Op(_mask, "q k v", "f u1"),
    "rg_lru": Op(lambda x, r, i, Lambda: ops.rg_lru(x, r, i, Lambda)[0], "x", "r i", "Lambda"),
    "convolution": Op(_layer(nn.ShortConvolution(H * K, 4)), "x", "", "weight"),
    "norm": Op(_layer(nn.RMSNorm(H * K)), "x", "", "weight"),
}  # fmt: skip
WITH_STATE = {
    "gated_delta_rule": Op(_with_state(ops.chunk_gated_delta_rule), "q k v", "g beta"),
    "kda": Op(lambda q, k, v, gk, beta: _with_state(ops.chunk_kda)(q, k, v, gk, beta), "q k v", "gk beta"),
}
GATES = {
    "slow": lambda x: torch.full_like(x, math.log(0.9999)),
    "mild": lambda x: F.logsigmoid(x + 3),
    "strong": lambda x: -3 * torch.sigmoid(x),
    "closed": lambda x: torch.where(x > 3.1, -1e4, F.logsigmoid(x + 3)),  # one in a thousand
}
KINDS = ("mild", "strong", "closed")
# Where the op makes its gates, or has none, one kind is all.
OWN = [name for name, op in OPS.items() if not op.gates or "bias" in op.sums or name in ("rg_lru", "delta_rule")]


def drawn(op: Op, name: str, kind: str, tokens: int, seed: int, device: torch.device) -> Tensors:
    made = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, device=device)

    gate = (lambda x: x) if "dt_bias" in op.sums else GATES[kind]  # else the op makes gates of raw numbers
    wide = name in ("rg_lru", "hgrn", "selective_scan", "convolution", "norm")
    slopes = torch.linspace(0.5, 16.0, H, device=device)
    makers: dict[str, Callable[[], Tensor]] = {
        "k": lambda: F.normalize(normal(1, tokens, H, K), dim=-1),
        "B": lambda: normal(1, tokens, 1, K), "C": lambda: normal(1, tokens, 1, K),
        "x": lambda: normal(1, tokens, H * K) if wide else normal(1, tokens, H, K),
        "k2": lambda: F.normalize(normal(1, 2 * tokens, H, K), dim=-1), "v2": lambda: normal(1, 2 * tokens, H, V),
        "beta2": lambda: normal(1, 2 * tokens, H).sigmoid(), "gd": lambda: gate(normal(1, tokens, H * K)),
        "b": lambda: normal(1, tokens, H, K).sigmoid(), "w": lambda: normal(1, tokens, H, V).sigmoid(),
        "rate": lambda: normal(1, tokens, H, K).sigmoid(), "eta": lambda: normal(1, tokens, H).sigmoid(),
        "dt1": lambda: 0.01 + 0.1 * normal(1, tokens, H).sigmoid(), "At": lambda: 10 * gate(normal(1, tokens, H)),
        "angles": lambda: normal(1, tokens, H, K // 4), "theta": lambda: normal(1, tokens, H, K // 2),
        "psi": lambda: normal(1, tokens, H, V // 2), "trap": lambda: normal(1, tokens, H),
        "u1": lambda: normal(1, tokens, H),
        "B1": lambda: normal(1, tokens, 16), "C1": lambda: normal(1, tokens, 16), "z": lambda: normal(1, tokens, H * K),
        "delta": lambda: normal(1, tokens, H * K), "AN": lambda: -(normal(H * K, 16).exp()),
        "Dd": lambda: normal(H * K), "delta_bias": lambda: torch.full((H * K,), -4.0, device=device),
        "g": lambda: gate(normal(1, tokens, H)), "gk": lambda: gate(normal(1, tokens, H, K)),
        "dt": lambda: normal(1, tokens, H), "beta": lambda: normal(1, tokens, H).sigmoid(),
        "r": lambda: normal(1, tokens, H * K).sigmoid(),
        "i": lambda: normal(1, tokens, H * K).sigmoid() if wide else normal(1, tokens, H),
        "f": lambda: torch.special.logit(gate(normal(1, tokens, H)).exp().clamp(1e-30, 1 - 1e-6)),
        "A": lambda: -slopes, "A_log": lambda: slopes.log(), "D": lambda: normal(H), "u": lambda: normal(H, K),
        "dt_bias": lambda: torch.full((H, K) if name == "kda" else (H,), -4.0, device=device),
        "g_gamma": lambda: -torch.logspace(-1, -3, H, device=device), "Lambda": lambda: normal(H * K),
        "weight": lambda: normal(H * K, 4) if name == "convolution" else normal(H * K),
    }  # fmt: skip
    found = {n: makers.get(n, lambda: normal(1, tokens, H, K))() for n in f"{op.tokens} {op.gates} {op.sums}".split()}
    return {n: x.bfloat16() if n in op.tokens.split() else x for n, x in found.items()}
