"""The memory of xLSTM over ranks, with the derivatives that automatic differentiation of transformers' code has.

`chunk_mlstm` takes its stabiliser m for a constant, as the authors' kernels do. With the ``eps`` in the denominator the
outputs depend on m, and transformers differentiates that too: h = N / D with D = max(|d|, e^-m) + eps, all of N and d
relative to e^m, has the derivative -h eps / D with respect to m.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexsp import ops
from flexsp.integrations.transformers.functions import without_states
from flexsp.integrations.transformers.running import running_shard
from flexsp.scan.maxima import maxima_between
from flexsp.scan.tokens import positions

__all__ = ["memory_forward"]


def memory_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, igate: Tensor, fgate: Tensor,
    c_initial: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """In place of that of `xLSTMBackend`: query and key [B, H, T_local, K], value [B, H, T_local, V], gates before
    their activations [B, H, T_local] -> [B, H, T_local, V]."""
    without_states(c_initial, False)
    eps: float = module.config.eps
    with running_shard().call() as ranks:
        h, _ = ops.chunk_mlstm(query, key, value, igate, fgate, head_first=True, eps=eps, **ranks)
        if eps == 0 or not torch.is_grad_enabled():
            return h, None
        m = _maxima(igate, fgate, ranks)
        wide = torch.promote_types(query.dtype, torch.float32)
        q, k, i, f = (x.detach().to(wide) for x in (query, key, igate, fgate))
        ones = torch.ones_like(value[..., :1], dtype=wide)
        ratio, _ = ops.chunk_mlstm(q, k, ones, i, f, head_first=True, eps=eps, **ranks)  # d / D
    small = (-m.detach()).exp()
    share = torch.minimum(eps / (small + eps), 1 - ratio.squeeze(-1).abs()).clamp(min=0)  # eps / D
    change = (m - m.detach()) * share
    return h - h.detach() * change.unsqueeze(-1).to(h.dtype), None


def _maxima(igate: Tensor, fgate: Tensor, ranks: dict[str, Any]) -> Tensor:
    """m_t = max(logsigmoid(f_t) + m_{t-1}, i_t) from m = 0 on, of gates [B, H, T_local]. Once it is known which of the
    two is larger, m is a linear recurrence, which has the derivatives."""
    wide = torch.promote_types(igate.dtype, torch.float32)
    i, log_f = igate.to(wide), F.logsigmoid(fgate.to(wide))
    with torch.no_grad():
        begun = first = None
        if ranks["cu_seqlens"] is not None:
            first = positions(i.shape[-1], i.device, ranks["cu_seqlens"], ranks["sp"]) == 0
            begun = i.new_zeros(i.shape[1:])
        start = i.new_zeros(i.shape[:-1])
        before, along = maxima_between(log_f, i, start, begun, first, ranks["sp"], "maxima of xLSTM")
        larger = before + log_f - i
        earlier = torch.where(larger > 0, 1.0, torch.where(larger < 0, 0.0, 0.5)).to(wide)
    x = earlier * log_f + (1 - earlier) * i
    m, _ = ops.chunk_hgrn(x.transpose(1, 2), earlier.log().transpose(1, 2), **ranks)
    return along[..., 1:] + (m - m.detach()).transpose(1, 2)
