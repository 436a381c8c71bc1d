"""Calls of `chunk_mlstm` and their token loop."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from flexsp import ops
from flexsp.testing.compare import WIDE
from flexsp.testing.oracles import token_loop

STATES = ("c_initial", "n_initial", "m_initial")
KEPT_WIDE = (*WIDE, "i", "f", *STATES)
TOKENS = "qkvif"
Tensors = dict[str, Tensor]


def in_true_units(x: Tensors, scale: float, eps: float = 0.0) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """h = scale q C / max(|scale q n|, 1) with C_t = sigmoid(f) C_{t-1} + e^i k v^T and n alike, no stabiliser.

    m of the paper, a constant, is only for eps, and to say the final C and n in.
    """
    C, n, m = x["c_initial"], x["n_initial"], x["m_initial"]
    C, n, m, h = C * m.exp()[..., None], n * m.exp(), m.detach(), []
    for t in range(x["q"].shape[1]):
        q, k, v, i, f = (x[name][:, t] for name in TOKENS)
        forget, entry = 1 / (1 + torch.exp(-f)), i.exp()
        C = forget[..., None, None] * C + entry[..., None, None] * k[..., :, None] * v[..., None, :]
        n = forget[..., None] * n + entry[..., None] * k
        m = torch.maximum(forget.detach().log()[..., None] + m, i.detach()[..., None])
        read, weight = (q[..., :, None] * C).sum(-2), (q * n).sum(-1, keepdim=True)
        h.append(scale * read / (torch.maximum((scale * weight).abs(), torch.ones_like(m)) + eps * m.exp()))
    last = C * (-m).exp()[..., None], n * (-m).exp(), m
    return (torch.stack(h, 1) if h else x["v"]), last


def stabilised(x: Tensors, scale: float, engine: Any, rounded: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The paper's equations 19 to 27, of one document: the gates token by token, the sums by an engine."""
    log_f = logsigmoid(x["f"])
    m, gates, entries, floors = x["m_initial"].squeeze(-1), [], [], []
    first, m = (m - m.detach()).exp(), m.detach()
    for t in range(log_f.shape[1]):
        after = torch.maximum(log_f[:, t].detach() + m, x["i"][:, t].detach())
        gates.append(log_f[:, t] + (m - after))
        entries.append((x["i"][:, t] - after).exp())
        floors.append((-after).exp())
        m = after
    C, n = x["c_initial"] * first[..., None, None], x["n_initial"] * first[..., None]
    if not gates:
        return x["v"], (C, n, m[..., None])
    g, entry, floor = (torch.stack(y, 1) for y in (gates, entries, floors))
    written = (x["k"] * entry[..., None]).to(rounded)
    q, v = x["q"].to(rounded), x["v"].to(rounded)
    read, C = engine(q, written, v, g, scale=scale, initial_state=C)
    weight, n = engine(q, written, torch.ones_like(v[..., :1]), g, scale=scale, initial_state=n[..., None])
    below = torch.maximum(weight.to(g.dtype).abs(), floor.clamp(min=torch.finfo(g.dtype).tiny)[..., None])
    return (read.to(g.dtype) / below).to(rounded), (C, n.squeeze(-1), m[..., None])


def oracle(
    scale: float | None = None, cu_seqlens: Tensor | None = None, engine: Any = token_loop, exact: bool = True,
    eps: float = 0.0, **x: Tensor,
) -> Any:  # fmt: skip
    """In true units in float64 if ``exact``; (h, (C, n, m)), where m has a gradient of 0."""
    dtype = x["q"].dtype
    wide = {key: y if y.dtype == torch.float64 else y.float() for key, y in x.items()}
    scale = x["q"].shape[-1] ** -0.5 if scale is None else scale
    (B, T, H, K), V = x["q"].shape, x["v"].shape[-1]
    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    shapes = dict(zip(STATES, ((K, V), (K,), (1,)), strict=True))
    h, last = [], []
    for n, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        part = {key: y[:, begin:end] for key, y in wide.items() if key not in STATES}
        for key in STATES:
            zeros = wide["q"].new_zeros(B, H, *shapes[key])
            part[key] = wide[key][n : n + 1] if key in x and cu_seqlens is not None else wide.get(key, zeros)
        if exact and dtype == torch.float64:
            found = in_true_units(part, scale, eps)
        else:
            found = stabilised(part, scale, engine, dtype)
        h.append(found[0].to(dtype))
        last.append(found[1])
    return torch.cat(h, 1), differentiable(tuple(torch.cat(each) for each in zip(*last, strict=True)))


def differentiable(states: Any) -> Any:
    C, n, m = states
    return C, n, m + 0 * C.sum()


def call(op: Any, output_final_state: bool = False, **given: Any) -> Any:
    h, states = op(**given, return_last_states=output_final_state)
    return h, differentiable(states)


chunk_mlstm, recurrent_mlstm = (partial(op, head_first=False) for op in (ops.chunk_mlstm, ops.recurrent_mlstm))
chunk, step = partial(call, chunk_mlstm), partial(call, recurrent_mlstm)


def draw(B: int, T: int, states: int = 0, K: int = 9, V: int = 7, seed: int | None = None) -> Tensors:
    made = torch.Generator().manual_seed(random.randrange(2**31) if seed is None else seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64)

    found = {name: normal(B, T, 2, V if name == "v" else K) for name in "qkv"}
    found |= {"i": normal(B, T, 2), "f": 3 + 2 * normal(B, T, 2)}
    if states:
        found |= {"c_initial": normal(states, 2, K, V), "n_initial": normal(states, 2, K)}
        found["m_initial"] = 2 * normal(states, 2, 1)
    return found


def conditioned(inputs: Tensors, dtype: torch.dtype) -> Tensors:
    """In low precision all terms of q n are positive: where they cancel, results are a matter of luck."""
    if dtype == torch.float64:
        return inputs
    return inputs | {key: x.abs() for key, x in inputs.items() if key in ("q", "k", "n_initial")}


def with_gradients(inputs: Tensors) -> Tensors:
    return {key: x.detach().clone().requires_grad_() for key, x in inputs.items()}
