"""mLSTM as a variant of three functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor, decayed_scores
from flexsp.ops import chunk_mlstm

H, K, V, C = 2, 5, 4, 16
Tensors = dict[str, Tensor]


def largest(i: Any, f: Any) -> Any:
    return (i + f.sum(0) - f.cumsum(0)).amax(0)


def larger(prev_s: Any, chunk_state: Any, f: Any) -> Any:
    return torch.maximum(prev_s + f.sum(0), chunk_state)


def maxima(i: Any, f: Any, chunk_state: Any) -> Any:
    b = f.cumsum(0)
    later = torch.ones_like(b @ b.T).triu(1)
    before = ((i - b)[:, 0] + 0 * later).masked_fill(later > 0, -torch.inf).amax(1)
    return b + torch.maximum(before[:, None], chunk_state)


def chunk(k: Any, v: Any, i: Any, f: Any, m: Any, m_before: Any) -> Any:
    g = f + m_before - m
    return (k * (i - m + g.sum(0) - g.cumsum(0)).exp()[:, None]).T @ v


def decay(prev_s: Any, chunk_state: Any, f: Any, m: Any, m_before: Any) -> Any:
    return prev_s * (f + m_before - m).sum(0).exp() + chunk_state


def merge(q: Any, k: Any, v: Any, i: Any, f: Any, m: Any, m_before: Any, chunk_state: Any) -> Any:
    b = (f + m_before - m).cumsum(0)
    return decayed_scores(q, k * (i - m).exp()[:, None], b) @ v + (q * b.exp()[:, None]) @ chunk_state


def stabiliser(**options: Any) -> LinearAttention:
    """m_t = max(m_{t-1} + f_t, i_t)."""
    h, one = ConstExpr("H", H), ConstExpr("N", 1)
    meta = {name: SymbTensor(["T", h, one]) for name in ("i", "f")} | {"prev_s": SymbTensor(["NS", h, one])}
    return LinearAttention(meta, largest, larger, maxima, chunk_size=C, **options)


def memory(**options: Any) -> LinearAttention:
    """C and, as the last column, n."""
    h, k, v = ConstExpr("H", H), ConstExpr("K", K), ConstExpr("V", V + 1)
    meta: dict[str, Any] = {name: SymbTensor(["T", h, v if name == "v" else k]) for name in "qkv"}
    meta |= {name: SymbTensor(["T", h]) for name in "ifm"} | {"m_before": SymbTensor(["T", h], before="m")}
    return LinearAttention(meta | {"prev_s": SymbTensor(["NS", h, k, v])}, chunk, decay, merge, chunk_size=C, **options)


def mlstm(x: Tensors, cu: Tensor | None, sp: Any, **options: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """h, final C with n, and final m."""
    q, k, v, i, f = (x[name] for name in "qkvif")
    f = torch.nn.functional.logsigmoid(f)
    m, last = stabiliser(**options)(i=i.unsqueeze(-1), f=f.unsqueeze(-1), cu_seqlens=cu, sp=sp)
    m, augmented = m.squeeze(-1), torch.cat([v, torch.ones_like(v[..., :1])], -1)
    given = {"q": q * K**-0.5, "k": k, "v": augmented, "i": i, "f": f, "m": m}
    read, state = memory(**options)(**given, cu_seqlens=cu, sp=sp)
    h = read[..., :V] / torch.maximum(read[..., V].abs(), (-m).exp()).unsqueeze(-1)
    return h, state, last


def by_op(x: Tensors, cu: Tensor | None, sp: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    h, states = chunk_mlstm(**x, return_last_states=True, cu_seqlens=cu, sp=sp, head_first=False)
    if states is None:
        return h, None, None
    return h, torch.cat([states[0], states[1].unsqueeze(-1)], -1), states[2]


def draw(T: int, seed: int) -> Tensors:
    made = torch.Generator().manual_seed(seed)
    sizes = {"q": (K,), "k": (K,), "v": (V,), "i": (), "f": ()}
    x = {name: torch.randn(1, T, H, *size, generator=made).double() for name, size in sizes.items()}
    x |= {name: x[name].abs() for name in "qk"}  # no sum of weights is near 0
    return x | {"i": 6 * x["i"], "f": 3 * x["f"] + 2}
