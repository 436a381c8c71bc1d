"""The memory of xLSTM over ranks, with the derivatives that automatic differentiation of transformers' code has.

`chunk_mlstm` takes its stabiliser m for a constant, as the authors' kernels do. With the ``eps`` in the denominator the
outputs depend on m, and transformers differentiates that too: h = N / D with D = max(|d|, e^-m) + eps, all of N and d
relative to e^m, has the derivative -h eps / D with respect to m.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flexsp import ops
from flexsp.comm.group import SequenceParallel
from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor
from flexsp.integrations.transformers.functions import without_states
from flexsp.integrations.transformers.running import running_shard

__all__ = ["memory_forward"]


def memory_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, igate: Tensor, fgate: Tensor,
    c_initial: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """In place of that of `xLSTMBackend`: query and key [B, H, T_local, K], value [B, H, T_local, V], gates before
    their activations [B, H, T_local] -> [B, H, T_local, V]."""
    without_states(c_initial, False)
    eps: float = module.config.eps
    gates = {"i": igate, "f": fgate}
    with running_shard().call() as ranks:
        h, _ = ops.chunk_mlstm(query, key, value, **gates, head_first=True, eps=eps, **ranks)
        if eps == 0 or not torch.is_grad_enabled():
            return h, None
        m = _maxima(igate, fgate, ranks["cu_seqlens"], ranks["sp"])
        wide = torch.promote_types(query.dtype, torch.float32)
        q, k = query.detach().to(wide), key.detach().to(wide)
        constant = {name: x.detach() for name, x in gates.items()}
        ones = torch.ones_like(value[..., :1], dtype=wide)
        ratio, _ = ops.chunk_mlstm(q, k, ones, **constant, head_first=True, eps=eps, **ranks)  # d / D
    small = (-m.detach()).exp()
    share = torch.minimum(eps / (small + eps), 1 - ratio.squeeze(-1).abs()).clamp(min=0)  # eps / D
    change = (m - m.detach()) * share
    return h - h.detach() * change.unsqueeze(-1).to(h.dtype), None


def _maxima(igate: Tensor, fgate: Tensor, cu_seqlens: Tensor | None, sp: SequenceParallel) -> Tensor:
    """m_t = max(logsigmoid(f_t) + m_{t-1}, i_t) from m = 0 on, of gates [B, H, T_local]."""
    wide = torch.promote_types(igate.dtype, torch.float32)
    i, f = (x.to(wide).transpose(1, 2).unsqueeze(-1) for x in (igate, fgate))
    m, _ = _maximum(i.shape[2])(x=i, a=torch.nn.functional.logsigmoid(f), cu_seqlens=cu_seqlens, sp=sp)
    found: Tensor = m.squeeze(-1).transpose(1, 2)
    return found


def _chunk(x: Any, a: Any) -> Any:
    return (x + a.sum(0) - a.cumsum(0)).amax(0)


def _decay(prev_s: Any, chunk_state: Any, a: Any) -> Any:
    return torch.maximum(prev_s + a.sum(0), chunk_state)


def _merge(x: Any, a: Any, chunk_state: Any) -> Any:
    b = a.cumsum(0)
    pairs = b[:, None, :] + (x - b)[None, :, :]
    later = torch.ones_like(pairs.amax(2)).triu(1) > 0
    inside = pairs.masked_fill(later[:, :, None], -torch.inf).amax(1)
    return torch.maximum(inside, b + chunk_state[None, :])


@functools.cache
def _maximum(heads: int) -> LinearAttention:
    h, k = ConstExpr("H", heads), ConstExpr("K", 1)
    meta = {name: SymbTensor(["T", h, k]) for name in "xa"} | {"prev_s": SymbTensor(["NS", h, k])}
    return LinearAttention(meta, _chunk, _decay, _merge, chunk_size=32)
