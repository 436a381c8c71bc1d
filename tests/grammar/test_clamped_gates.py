"""One rule for gates that close: in float64 they act as they are down to -800, in float32 from -104 on as 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexsp import ops
from flexsp.grammar import FlexLinearAttention, decay, feature_map, transition
from flexsp.testing.compare import relative_error

T, H, K, V, AT = 12, 2, 4, 3, 5  # the gate of token AT closes; tokens behind it write nothing
Tensors = dict[str, torch.Tensor]


def _flex(d: Any, t: Any = None) -> Callable[..., Any]:
    made = FlexLinearAttention(d, feature_map.identity(), t)
    return lambda q, k, v, g, **x: made(q, k, v, decay=g, **x)[0]


def _mamba2(x: Any, dt: Any, A: Any, B: Any, C: Any) -> Any:
    return ops.mamba2_ssd(x, dt, A, B, C)[0]


# name: (the op, whether every channel has a gate, what it takes besides q, k, v and the gates)
OPS: dict[str, tuple[Callable[..., Any], bool, tuple[str, ...]]] = {
    "simple_gla": (lambda q, k, v, g: ops.chunk_simple_gla(q, k, v, g)[0], False, ()),
    "simple_gla, a token": (lambda q, k, v, g: ops.recurrent_simple_gla(q, k, v, g)[0], False, ()),
    "gla": (lambda q, k, v, g: ops.chunk_gla(q, k, v, g)[0], True, ()),
    "gla, a token": (lambda q, k, v, g: ops.recurrent_gla(q, k, v, g)[0], True, ()),
    "hgrn2": (lambda q, k, v, g: ops.chunk_hgrn2(q, v, g)[0], True, ()),
    "rwkv6": (lambda q, k, v, g: ops.chunk_rwkv6(q, k, v, g, torch.zeros(H, K).to(q))[0], True, ()),
    "rwkv7": (lambda q, k, v, g: ops.chunk_rwkv7(q, g, k, v, 0.1 * k, 0.1 * k)[0], True, ()),
    "hgrn": (lambda q, k, v, g: ops.chunk_hgrn(k.flatten(2), g.flatten(2))[0], True, ()),
    "gated_delta_rule": (lambda q, k, v, g, beta: ops.chunk_gated_delta_rule(q, k, v, g, beta)[0], False, ("beta",)),
    "delta, a token": (lambda q, k, v, g, beta: ops.recurrent_gated_delta_rule(q, k, v, g, beta)[0], False, ("beta",)),
    "kda": (lambda q, k, v, g, beta: ops.chunk_kda(q, k, v, g, beta)[0], True, ("beta",)),
    "gdn2": (lambda q, k, v, g, b, w: ops.chunk_gdn2(q, k, v, g, b, w)[0], True, ("b", "w")),
    "gdn2, a token": (lambda q, k, v, g, b, w: ops.recurrent_gdn2(q, k, v, g, b, w)[0], True, ("b", "w")),
    "mamba2": (lambda q, k, v, g: _mamba2(v, -g, -torch.ones(H).to(g), k, q), False, ()),
    "flex": (_flex(decay.gated()), False, ()),
    "flex, channels": (_flex(decay.gated(per_head=False)), True, ()),
    "flex, delta": (_flex(decay.gated(), transition.delta_rule()), False, ("beta",)),
}  # fmt: skip


def inputs(name: str, seed: int, gate: float) -> Tensors:
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    _, channels, more = OPS[name]
    x = {"q": normal(1, T, H, K), "k": normal(1, T, H, K), "v": normal(1, T, H, V)}
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    x["g"] = -normal(1, T, H, *([K] if channels else [])).abs()
    of_channels = {"b": (K,), "w": (V,)}
    x |= {key: normal(1, T, H, *of_channels.get(key, ())).sigmoid() for key in more}
    for key in ("k", "v"):
        x[key][:, AT:] = 0
    x["g"][:, AT] = gate
    return x


def behind(name: str, x: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of the tokens behind the closing gate, and the gradient of their weighted sum for all gates."""
    leaves = {key: y.clone().requires_grad_() for key, y in x.items()}
    o = OPS[name][0](**leaves)[:, AT + 1 :]
    weights = torch.linspace(-1.0, 1.0, o.numel(), dtype=torch.float64).view_as(o)
    (g,) = torch.autograd.grad((o.double() * weights).sum(), leaves["g"])
    return o.detach(), g


@pytest.mark.parametrize("name", OPS)
def test_a_gate_of_any_size(name: str, seed: int) -> None:
    """All that is read behind the gate has passed it: in float64 e^-200 of what else passes, and so its gradient."""
    o, dg = behind(name, inputs(name, seed, -1.0))
    closed, dclosed = behind(name, inputs(name, seed, -201.0))
    factor = torch.tensor(200.0, dtype=torch.float64).exp()
    assert o.abs().max() > 1e-3 and dg[:, AT].abs().max() > 1e-4
    assert relative_error(closed * factor, o) < 1e-10 and relative_error(dclosed[:, AT] * factor, dg[:, AT]) < 1e-9


@pytest.mark.parametrize(
    ("dtype", "gate"), [(torch.float64, -801.0), (torch.float32, -200.0), (torch.bfloat16, -200.0)], ids=str
)
@pytest.mark.parametrize("name", OPS)
def test_a_gate_that_is_0(name: str, dtype: torch.dtype, gate: float, seed: int) -> None:
    x = {key: y.to(dtype) for key, y in inputs(name, seed, gate).items()}
    o, dg = behind(name, x)
    assert not o.any() and not dg[:, AT].any()


STRONG = ("simple_gla", "gla", "gated_delta_rule", "kda", "gdn2", "rwkv6", "hgrn2", "rwkv7")


def strong_inputs(name: str, seed: int, least: float) -> list[torch.Tensor]:
    """Numbers of float32. Three channels of four have gates down to `least`, and one of two tokens where a head has one
    gate; the others stay open, so that something is there to read."""
    made = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, 70, 2, 8, generator=made)
    k = torch.nn.functional.normalize(k, dim=-1)
    g, beta = least * torch.rand(q.shape, generator=made), torch.rand(q.shape[:3], generator=made)
    g[..., ::4] *= -1e-3 / least
    if name in ("simple_gla", "gated_delta_rule"):
        g = torch.where(torch.arange(70).view(-1, 1) % 2 == 0, -1e-3 / least, 1.0) * g[..., 1]
    u = torch.rand(2, 8, generator=made)
    given = {
        "hgrn2": (q, v, g), "rwkv6": (q, k, v, g, u), "rwkv7": (q, g, k, v, -k, k * beta.unsqueeze(-1)),
        "kda": (q, k, v, g, beta), "gated_delta_rule": (q, k, v, g, beta), "gdn2": (q, k, v, g, k.abs(), v.sigmoid()),
    }  # fmt: skip
    return [x.double() for x in given.get(name, (q, k, v, g))]


@pytest.mark.parametrize("name", STRONG)
def test_strong_gates_cost_chunks_no_digits(name: str, seed: int) -> None:
    """In float32, outputs, states and gradients: beside tokens in float32, and chunks with weak gates."""
    chunks, tokens = (getattr(ops, f"{way}_{name}") for way in ("chunk", "recurrent"))

    def results(op: Callable[..., Any], least: float, dtype: torch.dtype) -> list[torch.Tensor]:
        drawn = torch.Generator().manual_seed(seed + 1)
        x = [y.to(dtype).requires_grad_() for y in strong_inputs(name, seed, least)]
        outputs = op(*x, output_final_state=True)
        cotangents = [torch.randn(y.shape, generator=drawn).to(dtype) for y in outputs]
        return [*outputs, *torch.autograd.grad(outputs, x, cotangents)]

    def error(op: Callable[..., Any], least: float) -> float:
        exact = results(tokens, least, torch.float64)
        return max(map(relative_error, results(op, least, torch.float32), exact))

    low = max(error(tokens, -100.0), error(chunks, -1.0))
    assert error(chunks, -100.0) <= 2 * low + torch.finfo(torch.float32).eps
