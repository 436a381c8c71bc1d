"""Ops on heads whose values have any size, as sequences and as packed documents."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from flexsp import nn as layers
from flexsp import ops

__all__ = [
    "LAYERS", "OPS", "PARAMETERS", "STATES", "Tensors", "bounds", "inputs", "layer_of", "outputs", "solve",
    "solve_layer",
]  # fmt: skip

Tensors = dict[str, torch.Tensor]
STATES = {
    "initial_state", "initial_z", "c_initial", "n_initial", "m_initial", "angle_initial", "k_initial", "v_initial",
}  # fmt: skip
PARAMETERS = {"A", "D", "u", "B_bias", "C_bias"}
"""Names of inputs; all others but `cu_seqlens` are of tokens."""


def bounds(T: int) -> torch.Tensor:
    """Boundaries of six documents, of which two are empty and one has one token; the last token is in none."""
    return torch.tensor([0, T // 3, T // 3, T // 3 + 1, T - T // 4, T - 1, T - 1])


def inputs(name: str, seed: int, T: int, H: int, K: int, V: int, packed: bool = False) -> Tensors:
    made, N = torch.Generator().manual_seed(seed), len(bounds(T)) - 1 if packed else 1
    keys = 1, T, H, K
    shapes = {"q": keys, "k": keys, "v": (1, T, H, V), "g": keys, "h": (1, T, H), "initial_state": (N, H, K, V)}

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64)

    x = {key: normal(*shape) for key, shape in shapes.items()}
    x["k"] = F.normalize(x["k"], dim=-1)
    gates, strong = F.logsigmoid(x.pop("g")), x.pop("h").sigmoid()
    if name in ("gla", "hgrn2", "kda", "gdn2"):
        x["g"] = gates
    if name in ("simple_gla", "gated", "product"):
        x["g"] = gates[..., 0]
    if name in ("delta", "gated", "kda"):
        x["beta"] = strong
    if name == "gdn2":
        x["b"], x["w"] = normal(*keys).sigmoid(), normal(1, T, H, V).sigmoid()
    if name == "product":
        x["beta"] = torch.stack([strong, strong.flip(1)], 2)
        x["k"], x["v"] = (torch.stack([x[key], x[key].flip(1)], 2) for key in "kv")
    if name == "normalized":  # features, whose products are all positive
        x |= {key: x[key].abs() for key in "qk"} | {"initial_z": 1 + normal(N, 1, H, K).abs()}
    if name == "mlstm":  # no sum of a normaliser nearly vanishes
        x |= {key: x[key].abs() for key in "qk"} | {"i": normal(1, T, H), "f": 3 + 2 * normal(1, T, H)}
        x |= {"c_initial": x.pop("initial_state"), "n_initial": normal(N, H, K).abs(), "m_initial": normal(N, H, 1)}
    if name == "mamba2":
        x = {
            "x": x["v"], "dt": strong, "A": -torch.ones(H, dtype=torch.float64), "B": x["k"][:, :, :1],
            "C": x["q"][:, :, :1], "D": torch.ones(H, dtype=torch.float64), "initial_state": x["initial_state"],
        }  # fmt: skip
    if name == "mamba3":
        x = {
            "x": x["v"], "dt": strong, "decay": -normal(1, T, H).exp(), "B": x["k"][:, :, :1], "C": x["q"][:, :, :1],
            "trap": normal(1, T, H), "angles": normal(1, T, H, 2), "D": normal(H), "B_bias": normal(H, K),
            "C_bias": normal(H, K), "initial_state": x["initial_state"], "angle_initial": normal(N, H, 2),
            "k_initial": normal(N, 1, H, K), "v_initial": normal(N, H, V),
        }  # fmt: skip
    if name == "rwkv6":
        x["r"], x["w"], x["u"] = x.pop("q"), gates, x["initial_state"][0, :, :, 0].clone()
    if name == "rwkv7":
        x["r"], x["w"], x["a"], x["b"] = x.pop("q"), gates, -x["k"], x["k"] * strong.unsqueeze(-1)
    x = {key: y for key, y in x.items() if name != "hgrn2" or key != "k"}
    return x | {"cu_seqlens": bounds(T)} if packed else x


def _normalized(initial_z: torch.Tensor | None = None, initial_state: Any = None, **x: Any) -> Any:
    return ops.chunk_linear_attn(**x, initial_state=None if initial_state is None else (initial_state, initial_z))


def _mlstm(output_final_state: bool, **x: Any) -> Any:
    return ops.chunk_mlstm(**x, head_first=False, return_last_states=output_final_state)


def _product(k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, **x: Any) -> Any:
    return ops.chunk_gated_delta_product(
        k=k.flatten(1, 2), v=v.flatten(1, 2), beta=beta.flatten(1, 2), num_householder=2, **x
    )  # fmt: skip


def _mamba3(
    decay: torch.Tensor, initial_state: Any = None, angle_initial: Any = None, k_initial: Any = None,
    v_initial: Any = None, **x: Any,
) -> Any:  # fmt: skip
    state = None if initial_state is None else (angle_initial, initial_state, k_initial, v_initial)
    y, final = ops.mamba3(**x, A=decay, initial_state=state)
    if final is None:
        return y, None
    angle, *others = final
    return y, (angle.sin(), 1 - angle.cos(), *others)  # which whole turns do not change


OPS: dict[str, Any] = {
    "simple_gla": ops.chunk_simple_gla, "mamba2": partial(ops.mamba2_ssd, state_v_first=False), "mamba3": _mamba3,
    "mlstm": _mlstm, "retention": ops.chunk_retention,
    "lightning": partial(ops.chunk_lightning_attn, layer_idx=1, num_layers=4),
    "gla": ops.chunk_gla, "delta": ops.chunk_delta_rule, "gated": ops.chunk_gated_delta_rule, "kda": ops.chunk_kda,
    "gdn2": ops.chunk_gdn2, "product": _product,
    "hgrn2": ops.chunk_hgrn2, "rwkv6": ops.chunk_rwkv6, "rwkv7": ops.chunk_rwkv7,
    "linear": partial(ops.chunk_linear_attn, normalize=False), "normalized": _normalized,
}  # fmt: skip


def outputs(o: torch.Tensor, final: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Outputs and final states, if there are any, by name."""
    yield "o", o
    if final is not None:
        for n, x in enumerate(final if isinstance(final, tuple) else (final,)):
            yield f"final {n}", x


def solve(name: str, given: Tensors, dtype: torch.dtype, seed: int = 1) -> Tensors:
    """Outputs, final states and the gradients of all inputs, for cotangents drawn with `seed`."""
    leaves = {
        key: x.to(torch.promote_types(dtype, torch.float32) if key in STATES else dtype).requires_grad_()
        for key, x in given.items() if key != "cu_seqlens"
    }  # fmt: skip
    found = dict(outputs(*OPS[name](**{**given, **leaves}, output_final_state=True)))
    made, loss = torch.Generator().manual_seed(seed), torch.zeros((), dtype=torch.float64)
    for x in found.values():
        weight = torch.randn(x.shape, generator=made, dtype=torch.float64).to(x.device)
        loss = loss.to(x.device) + (x.double() * weight).sum()
    gradients = torch.autograd.grad(loss, [*leaves.values()], materialize_grads=True)
    return {key: x.detach() for key, x in found.items()} | {
        f"d{key}": x for key, x in zip(leaves, gradients, strict=True)
    }  # fmt: skip


LAYERS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "SimpleGLA": (layers.SimpleGLA, {"hidden_size": 16, "num_heads": 2, "head_k_dim": 8, "head_v_dim": 270}),
    "Mamba2": (layers.Mamba2, {"hidden_size": 270, "head_dim": 270, "state_size": 8}),
    "Mamba3": (layers.Mamba3, {"hidden_size": 270, "head_dim": 270, "state_size": 8}),
    "MLSTM": (layers.MLSTM, {"hidden_size": 16, "num_heads": 2, "v_dim_factor": 33.75}),
    "DeltaNet": (layers.DeltaNet, {"hidden_size": 16, "num_heads": 2, "expand_v": 33.75}),
    "GatedDeltaNet": (layers.GatedDeltaNet, {"hidden_size": 16, "num_heads": 2, "head_dim": 8, "expand_v": 33.75}),
    "KimiDeltaAttention": (
        layers.KimiDeltaAttention, {"hidden_size": 16, "num_heads": 2, "head_dim": 8, "expand_v": 33.75},
    ),
    "GatedDeltaNet2": (layers.GatedDeltaNet2, {"hidden_size": 16, "num_heads": 2, "head_dim": 8, "expand_v": 33.75}),
    "GatedDeltaProduct": (
        layers.GatedDeltaProduct, {"hidden_size": 16, "num_heads": 2, "head_dim": 8, "expand_v": 33.75},
    ),
    "GatedLinearAttention": (layers.GatedLinearAttention, {"hidden_size": 16, "num_heads": 2, "expand_v": 33.75}),
    "HGRN2": (layers.HGRN2, {"hidden_size": 540, "expand_ratio": 181}),
    "RWKV7": (layers.RWKV7, {"hidden_size": 16, "head_dim": 8, "value_dim": 540}),
}  # fmt: skip
"""Layers with two heads of 270 values."""


def layer_of(name: str, seed: int) -> nn.Module:
    """In float64, with parameters that are no longer the ones and zeros that some begin as."""
    cls, options = LAYERS[name]
    torch.manual_seed(seed)
    layer = cls(**options).double()
    with torch.no_grad():
        for x in layer.parameters():
            x.add_(0.1 * torch.randn_like(x) * (x.dim() == 1 or not x.any()))
    return layer


def solve_layer(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor, cu_seqlens: torch.Tensor) -> Tensors:
    """Outputs and the gradients of x and of every parameter, for packed documents."""
    wanted = {"x": x.detach().requires_grad_(), **dict(layer.named_parameters())}
    y = layer(wanted["x"], cu_seqlens=cu_seqlens)
    gradients = torch.autograd.grad(y, [*wanted.values()], dy)
    return {"y": y.detach()} | {f"d{key}": x for key, x in zip(wanted, gradients, strict=True)}
