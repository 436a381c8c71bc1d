"""On one GPU: gradients of gates, and of parameters that are sums over tokens, at 131,072 tokens.

A rounding that is carried from token to token does not show in short tests. The reference is the same call of the same
numbers in float32. Every error is at most 1 %, token by token and summed over tokens, as A_log or the bias of a
projection get it. `test_a_million_tokens` does the same at 1,048,576 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flexsp import nn, ops
from tests.gpu.judge import CUDA

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
        made = layer.to(CUDA)
        o = torch.func.functional_call(made, {"weight": weight.to(x).view_as(made.weight)}, x)
        return o[0] if isinstance(o, tuple) else o

    return run


OPS = {
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
    "gla": Op(lambda q, k, v, gk: ops.chunk_gla(q, k, v, gk)[0], "q k v", "gk"),
    "hgrn2": Op(lambda q, v, gk: ops.chunk_hgrn2(q, v, gk)[0], "q v", "gk"),
    "rwkv6": Op(lambda q, k, v, gk, u: ops.chunk_rwkv6(q, k, v, gk, u)[0], "q k v", "gk", "u"),
    "mlstm": Op(lambda q, k, v, i, f: ops.chunk_mlstm(q, k, v, i, f, head_first=False)[0], "q k v", "i f"),
    "rg_lru": Op(lambda x, r, i, Lambda: ops.rg_lru(x, r, i, Lambda)[0], "x", "r i", "Lambda"),
    "convolution": Op(_layer(nn.ShortConvolution(H * K, 4)), "x", "", "weight"),
    "norm": Op(_layer(nn.RMSNorm(H * K)), "x", "", "weight"),
}  # fmt: skip
GATES = {
    "mild": lambda x: F.logsigmoid(x + 3),
    "strong": lambda x: -3 * torch.sigmoid(x),
    "closed": lambda x: torch.where(torch.rand_like(x) < 1e-3, -1e4, F.logsigmoid(x + 3)),
}


def drawn(op: Op, name: str, kind: str, tokens: int, seed: int) -> Tensors:
    made = torch.Generator(CUDA).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, device=CUDA)

    gate = (lambda x: x) if "dt_bias" in op.sums else GATES[kind]  # else the op makes gates of raw numbers
    wide = name in ("rg_lru", "convolution", "norm")
    slopes = torch.linspace(0.5, 16.0, H, device=CUDA)
    makers: dict[str, Callable[[], Tensor]] = {
        "k": lambda: F.normalize(normal(1, tokens, H, K), dim=-1),
        "B": lambda: normal(1, tokens, 1, K), "C": lambda: normal(1, tokens, 1, K),
        "x": lambda: normal(1, tokens, H * K) if wide else normal(1, tokens, H, K),
        "g": lambda: gate(normal(1, tokens, H)), "gk": lambda: gate(normal(1, tokens, H, K)),
        "dt": lambda: normal(1, tokens, H), "beta": lambda: normal(1, tokens, H).sigmoid(),
        "r": lambda: normal(1, tokens, H * K).sigmoid(),
        "i": lambda: normal(1, tokens, H * K).sigmoid() if wide else normal(1, tokens, H),
        "f": lambda: torch.special.logit(gate(normal(1, tokens, H)).exp().clamp(1e-30, 1 - 1e-6)),
        "A": lambda: -slopes, "A_log": lambda: slopes.log(), "D": lambda: normal(H), "u": lambda: normal(H, K),
        "dt_bias": lambda: torch.full((H, K) if name == "kda" else (H,), -4.0, device=CUDA),
        "g_gamma": lambda: -torch.logspace(-1, -3, H, device=CUDA), "Lambda": lambda: normal(H * K),
        "weight": lambda: normal(H * K, 4) if name == "convolution" else normal(H * K),
    }  # fmt: skip
    found = {n: makers.get(n, lambda: normal(1, tokens, H, K))() for n in f"{op.tokens} {op.gates} {op.sums}".split()}
    return {n: x.bfloat16() if n in op.tokens.split() else x for n, x in found.items()}


def errors(name: str, kind: str, tokens: int, seed: int) -> dict[str, float]:
    op = OPS[name]
    inputs = drawn(op, name, kind, tokens, seed)
    errors: dict[str, list[Tensor]] = {}
    answers = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = {n: (x.to(dtype) if n in op.tokens.split() else x.clone()).requires_grad_() for n, x in inputs.items()}
        answers.append((op.run(**leaves), leaves))
    made = torch.Generator(CUDA).manual_seed(seed + 1)
    for _ in range(DRAWS):
        do = torch.randn(answers[0][0].shape, generator=made, device=CUDA).bfloat16()
        low, high = (
            dict(zip(leaves, torch.autograd.grad(o, [*leaves.values()], do.to(o), retain_graph=True), strict=True))
            for o, leaves in answers
        )
        for n, x in high.items():
            parts = {n: (low[n], x)}
            if n in op.gates.split():
                parts[f"{n}, summed over tokens"] = (low[n].double().sum(1), x.double().sum(1))
            for key, (got, want) in parts.items():
                errors.setdefault(key, []).append(torch.stack([(got.double() - want).norm(), want.double().norm()]))
    del answers, low, high
    torch.cuda.empty_cache()  # other workers share the GPU
    sums = {n: torch.stack(x).square().sum(0).sqrt().tolist() for n, x in errors.items()}
    return {n: error / size for n, (error, size) in sums.items()}


def judge(found: dict[str, float]) -> None:
    over = [f"{n}: {error:.1e}" for n, error in found.items() if not error <= BOUND]
    assert not over, "; ".join(over)


# Where the op makes its gates, or has none, one kind is all.
OWN = [name for name, op in OPS.items() if not op.gates or "dt_bias" in op.sums or name == "rg_lru"]
CASES = [(name, kind) for name in OPS for kind in (["mild"] if name in OWN else GATES)]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_long(name: str, kind: str, seed: int) -> None:
    judge(errors(name, kind, T, seed))


def test_a_million_tokens(seed: int) -> None:
    judge(errors("simple_gla", "mild", 8 * T, seed))
