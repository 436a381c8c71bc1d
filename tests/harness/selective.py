"""Calls of `selective_scan` and their token loop."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexsp import ops
from flexsp.testing.compare import WIDE
from flexsp.testing.oracles import token_loop

KEPT_WIDE = (*WIDE, "delta", "delta_bias")
Tensors = dict[str, Tensor]


def oracle(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    delta_bias: Tensor | None = None, delta_softplus: bool = False, initial_state: Tensor | None = None,
    discretization: str = "euler", cu_seqlens: Tensor | None = None, engine: Any = token_loop,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mamba's recurrence one token after the other; the zero-order hold by the limit of its quotient at 0."""
    dtype = u.dtype
    u, delta, A, B, C = (x if x.dtype == torch.float64 else x.float() for x in (u, delta, A, B, C))
    B, C = (x.expand(*u.shape, -1) if x.dim() == 2 else x.unsqueeze(2) for x in (B, C))
    bounds = [0, u.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    dt, y, last = delta if delta_bias is None else delta + delta_bias, [u[:, :0]], []
    dt = torch.logaddexp(dt, torch.zeros_like(dt)) if delta_softplus else dt
    for n, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        h = u.new_zeros(u.shape[0], *A.shape) if initial_state is None else initial_state
        h = h if cu_seqlens is None or initial_state is None else initial_state[n : n + 1]
        for t in range(begin, end):
            exponent = dt[:, t, :, None] * A
            weight = dt[:, t, :, None]
            if discretization == "zoh":
                weight = weight * torch.where(exponent == 0, 1 + exponent / 2, torch.expm1(exponent) / exponent)
            h = torch.exp(exponent) * h + weight * u[:, t, :, None] * B[:, t]
            read = (h * C[:, t]).sum(-1)
            read = read if D is None else read + D * u[:, t]
            gate = 1.0 if z is None else z[:, t].to(u.dtype) / (1 + torch.exp(-z[:, t].to(u.dtype)))
            y.append((read * gate).unsqueeze(1))
        last.append(h)
    return torch.cat(y, 1).to(dtype), torch.cat(last)


def call(op: Any, output_final_state: bool = False, **given: Any) -> Any:
    return op(**given, return_last_state=output_final_state)


HOW = {"delta_softplus": True}
ZOH = {"delta_softplus": True, "discretization": "zoh"}


def draw(batch: int, T: int, states: int = 0, width: int = 9, N: int = 5, seed: int | None = None) -> Tensors:
    made = torch.Generator().manual_seed(random.randrange(2**31) if seed is None else seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64)

    found = {"u": normal(batch, T, width), "delta": normal(batch, T, width) - 1}
    found |= {"A": -torch.rand(width, N, generator=made, dtype=torch.float64) * 4}
    found |= {"B": normal(batch, T, N), "C": normal(batch, T, N), "D": normal(width), "z": normal(batch, T, width)}
    found |= {"delta_bias": normal(width) / 2}
    return found | ({"initial_state": normal(states, width, N)} if states else {})


scan, step = partial(call, ops.selective_scan), partial(call, ops.recurrent_selective_scan)
