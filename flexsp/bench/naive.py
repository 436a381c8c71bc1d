"""Ops that no program of `flexsp.variants` is, in plain PyTorch: mLSTM, Mamba-1, Mamba-3 and RG-LRU.

What a user writes without kernels: chunks side by side, and a state that passes from chunk to chunk. Numbers are in
float32, or float64 beside float64; outputs have the inputs' dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from flexsp.bench.in_pytorch import program

if TYPE_CHECKING:
    from flexsp.bench.case import Inputs

__all__ = ["mamba", "mamba3", "mlstm", "rg_lru"]

_CHUNK = 64


def _wide(x: Inputs) -> Inputs:
    return {name: y.to(torch.promote_types(y.dtype, torch.float32)) for name, y in x.items()}


def mlstm(x: Inputs, eps: float = 1e-6) -> torch.Tensor:
    """Gates are stabilised by a running maximum m_t = max(log sigmoid(f_t) + m_{t-1}, i_t) from m_0 = 0 on, and the
    normaliser is one more column of v."""
    w = _wide(x)
    log_f = F.logsigmoid(w["f"])
    b = log_f.cumsum(1)
    m = (b + (w["i"] - b).cummax(1).values.clamp(min=0.0)).detach()
    gates = log_f + F.pad(m, (0, 0, 1, 0))[:, :-1] - m
    keys = (w["k"] * (w["i"] - m).exp().unsqueeze(-1)).to(x["k"].dtype)
    values = torch.cat([x["v"], torch.ones_like(x["v"][..., :1])], -1)
    found = program("simple_gla", {"q": x["q"], "k": keys, "v": values, "g": gates})
    read, weight = found.to(gates.dtype).split([x["v"].shape[-1], 1], -1)
    return (read / (torch.maximum(weight.abs(), (-m).exp().unsqueeze(-1)) + eps)).to(x["v"].dtype)


def mamba3(x: Inputs) -> torch.Tensor:
    """A token's product is written once, with its own weight and the one that the next token gives it; what it reads of
    itself is put right afterwards. Pairs are neighbours."""
    w = _wide(x)
    H, K = x["x"].shape[2], x["B"].shape[3]
    share = w["trap"].sigmoid()
    own, later = share * w["dt"], F.pad(((1 - share) * w["dt"])[:, 1:], (0, 0, 0, 1))
    angle = (torch.pi * w["angles"].tanh() * w["dt"].unsqueeze(-1)).cumsum(1)
    keys, reads = (w[name].expand(-1, -1, H, K) + w[f"{name}_bias"] for name in "BC")
    rows = {"q": _turned(reads, angle), "k": _turned(keys, angle) * (own + later).unsqueeze(-1), "v": w["x"]}
    inputs = {name: y.to(x["x"].dtype) for name, y in rows.items()} | {"g": w["dt"] * w["A"]}
    itself = w["D"] - later * (keys * reads).sum(-1)
    return (program("simple_gla", inputs, 1.0) + itself.unsqueeze(-1) * w["x"]).to(x["x"].dtype)


def _turned(z: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Channels 2 i and 2 i + 1 turned by angle i; the others stay."""
    pairs, rest = z.split([2 * angle.shape[-1], z.shape[-1] - 2 * angle.shape[-1]], -1)
    even, odd, cos, sin = pairs[..., ::2], pairs[..., 1::2], angle.cos(), angle.sin()
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([turned, rest], -1)


def mamba(x: Inputs) -> torch.Tensor:
    w = _wide(x)
    steps = F.softplus(w["delta"] + w["delta_bias"])
    written = (steps * w["u"]).unsqueeze(-1) * w["B"].unsqueeze(2)
    states = _states((steps.unsqueeze(-1) * w["A"]).exp(), written)
    y = (states * w["C"].unsqueeze(2)).sum(-1) + w["D"] * w["u"]
    return (y * F.silu(w["z"])).to(x["u"].dtype)


def rg_lru(x: Inputs) -> torch.Tensor:
    """The first token has a weight of 1."""
    w = _wide(x)
    gates = -8 * F.softplus(w["Lambda"]) * w["r"].sigmoid()
    weights = (-(2 * gates).expm1()).sqrt()
    weights = torch.cat([torch.ones_like(weights[:, :1]), weights[:, 1:]], 1)
    return _states(gates.exp(), weights * w["i"].sigmoid() * w["x"]).to(x["x"].dtype)


def _states(decay: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """h_t = decay_t h_{t-1} + written_t of tensors [B, T, ...]: the tokens of a chunk one by one in all chunks at once,
    and then the chunks' ends by doubling."""
    T, C = decay.shape[1], min(_CHUNK, decay.shape[1])
    rest = [0, 0] * (decay.dim() - 2) + [0, -T % C]
    a, b = (F.pad(y, rest, value=fill).unflatten(1, (-1, C)) for y, fill in ((decay, 1.0), (written, 0.0)))
    through, states = [a[:, :, 0]], [b[:, :, 0]]
    for t in range(1, C):
        through.append(a[:, :, t] * through[-1])
        states.append(a[:, :, t] * states[-1] + b[:, :, t])
    ends, factor, step = states[-1], through[-1], 1
    while step < ends.shape[1]:
        before, earlier = (F.pad(y, [0, 0] * (y.dim() - 2) + [step, 0])[:, :-step] for y in (ends, factor))
        ends, factor, step = ends + factor * before, factor * earlier, 2 * step
    entering = F.pad(ends, [0, 0] * (ends.dim() - 2) + [1, 0])[:, :-1].unsqueeze(2)
    return (torch.stack(states, 2) + torch.stack(through, 2) * entering).flatten(1, 2)[:, :T]
