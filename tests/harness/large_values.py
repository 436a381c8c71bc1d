"""Ops on heads whose values have any size."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from flexsp import ops

__all__ = ["OPS", "Tensors", "inputs", "solve"]

Tensors = dict[str, torch.Tensor]


def inputs(name: str, seed: int, T: int, H: int, K: int, V: int) -> Tensors:
    made = torch.Generator().manual_seed(seed)
    keys = 1, T, H, K
    shapes = {"q": keys, "k": keys, "v": (1, T, H, V), "g": keys, "h": (1, T, H), "initial_state": (1, H, K, V)}
    x = {name: torch.randn(shape, generator=made, dtype=torch.float64) for name, shape in shapes.items()}
    x["k"] = F.normalize(x["k"], dim=-1)
    gates, strong = F.logsigmoid(x.pop("g")), x.pop("h").sigmoid()
    if name in ("gla", "hgrn2", "kda"):
        x["g"] = gates
    if name in ("simple_gla", "gated"):
        x["g"] = gates[..., 0]
    if name in ("delta", "gated", "kda"):
        x["beta"] = strong
    if name == "mamba2":
        x = {
            "x": x["v"], "dt": strong, "A": -torch.ones(H, dtype=torch.float64), "B": x["k"][:, :, :1],
            "C": x["q"][:, :, :1], "D": torch.ones(H, dtype=torch.float64), "initial_state": x["initial_state"],
        }  # fmt: skip
    if name == "rwkv6":
        x["r"], x["w"], x["u"] = x.pop("q"), gates, x["initial_state"][0, :, :, 0].clone()
    if name == "rwkv7":
        x["r"], x["w"], x["a"], x["b"] = x.pop("q"), gates, -x["k"], x["k"] * strong.unsqueeze(-1)
    return {key: y for key, y in x.items() if name != "hgrn2" or key != "k"}


OPS: dict[str, Any] = {
    "simple_gla": ops.chunk_simple_gla, "mamba2": lambda **x: ops.mamba2_ssd(**x, state_v_first=False),
    "gla": ops.chunk_gla, "delta": ops.chunk_delta_rule, "gated": ops.chunk_gated_delta_rule, "kda": ops.chunk_kda,
    "hgrn2": ops.chunk_hgrn2, "rwkv6": ops.chunk_rwkv6, "rwkv7": ops.chunk_rwkv7,
    "linear": lambda **x: ops.chunk_linear_attn(**x, normalize=False),
}  # fmt: skip


def solve(name: str, given: Tensors, dtype: torch.dtype, seed: int = 1) -> Tensors:
    """Outputs, final states and the gradients of all inputs, for cotangents drawn with `seed`."""
    leaves = {
        key: x.to(torch.promote_types(dtype, torch.float32) if key == "initial_state" else dtype).requires_grad_()
        for key, x in given.items()
    }  # fmt: skip
    o, final = OPS[name](**leaves, output_final_state=True)
    made = torch.Generator().manual_seed(seed)
    weights = [torch.randn(x.shape, generator=made, dtype=torch.float64).to(x.device) for x in (o, final)]
    loss = sum((x.double() * w).sum() for x, w in zip((o, final), weights, strict=True))
    return {"o": o.detach(), "final": final.detach(), **{
        f"d{key}": x for key, x in zip(leaves, torch.autograd.grad(loss, [*leaves.values()]), strict=True)
    }}  # fmt: skip
