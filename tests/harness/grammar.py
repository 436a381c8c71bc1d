"""Models of `flexsp.grammar`, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import logsigmoid, normalize

from flexsp.grammar import FlexLinearAttention, decay, feature_map, transition

H, K, V = 2, 4, 3
EXACT = 1e-10
Tensors = dict[str, torch.Tensor]


def model(d: Any, f: Any = None, t: Any = None) -> FlexLinearAttention:
    return FlexLinearAttention(decay=d, features=f or feature_map.identity(), transition=t or transition.one_step_gd())


# name: (the model, its inputs besides q, k and v, whether keys have length 1)
MODELS: dict[str, Callable[[], FlexLinearAttention]] = {
    "mamba2": lambda: model(decay.exponential(data_dependent=True)),
    "mamba2, constant": lambda: model(decay.exponential(data_dependent=False)),
    "gla": lambda: model(decay.gated(per_head=True)),
    "gla, a gate a channel": lambda: model(decay.gated(per_head=False)),
    "gated_delta_net": lambda: model(decay.gated(per_head=True), t=transition.delta_rule()),
    "kda": lambda: model(decay.gated(per_head=False), t=transition.delta_rule()),
    "delta_net": lambda: model(decay.none(), t=transition.delta_rule()),
    "delta_rope": lambda: model(decay.gated(), feature_map.rope(data_dependent=True), transition.delta_rule()),
    "gla, rope": lambda: model(decay.gated(), feature_map.rope(data_dependent=True)),
    "mamba2, rope": lambda: model(decay.exponential(), feature_map.rope(data_dependent=True)),
    "linear, elu": lambda: model(decay.none(), feature_map.elu()),
    "linear, relu": lambda: model(decay.none(), feature_map.relu()),
    "retnet": lambda: model(decay.fixed(), feature_map.rope()),
    "exponential delta": lambda: model(decay.exponential(), t=transition.delta_rule()),
    "fixed delta": lambda: model(decay.fixed([-0.1, -0.5]), t=transition.delta_rule()),
}


def draw(name: str, B: int, T: int, seed: int) -> Tensors:
    made, found = torch.Generator().manual_seed(seed), {}
    what = MODELS[name]()

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    found = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V)}
    if what.transition.kind == "delta_rule":
        found["k"] = normalize(found["k"], dim=-1)
        found["beta"] = normal(B, T, H).sigmoid()
    if "theta" in what.inputs:
        found["theta"] = normal(B, T, H, K // 2)
    if what.decay.kind == "gated":
        found["decay"] = logsigmoid(normal(B, T, H, K) if what.decay.vector else normal(B, T, H))
    if what.decay.kind == "exponential":
        found["A"] = -normal(H).exp()
        if "decay" in what.inputs:
            found["decay"] = normal(B, T, H).exp()
    return found


def rotated(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten(-2)


def angles(x: Tensors, begin: int, end: int) -> torch.Tensor:
    """Of the tokens begin..end of a document, and what the token behind them is turned by before its own theta."""
    if "theta" in x:
        sums = x["theta"][:, begin:end].cumsum(1)
        return torch.cat([sums, sums[:, -1:] if end > begin else x["theta"][:, :1] * 0], 1)
    speed = torch.tensor([10000.0 ** (-2 * i / K) for i in range(K // 2)], dtype=torch.float64)
    angle = torch.arange(end - begin + 1, dtype=torch.float64)[:, None, None] * speed
    return angle.expand(x["v"].shape[0], -1, x["v"].shape[2], -1)


def gradients(call: Callable[..., Any], x: Tensors, initial: torch.Tensor, seed: int) -> Tensors:
    """Output, final state and every gradient of a sum of both with random weights."""
    leaves = {key: y.clone().requires_grad_() for key, y in x.items()}
    state = initial.clone().requires_grad_()
    o, final = call(leaves, state)
    made = torch.Generator().manual_seed(seed + 1)
    loss = sum((y * torch.randn(y.shape, generator=made, dtype=torch.float64)).sum() for y in (o, final))
    given = leaves | {"initial": state}
    found = torch.autograd.grad(loss, list(given.values()))
    return {"o": o, "final": final} | {f"d{key}": y for key, y in zip(given, found, strict=True)}
