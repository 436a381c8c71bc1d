"""What the tests of `flexsp.nn.attention` compare with: a token loop, and all scores at once for low precisions."""

from __future__ import annotations

import torch

__all__ = ["attention_at_once", "attention_token_loop"]


def attention_token_loop(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [B, T, H, K], k [B, T, HK, K], v [B, T, HK, V] -> o [B, T, H, V]: for each token a list of tokens it sees."""
    B, T, H, K = q.shape
    group = H // k.shape[2]
    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    document = [sum(t >= b for b in bounds[1:]) for t in range(T)]
    scale = K**-0.5 if scale is None else scale
    rows = []
    for t in range(T):
        seen = [
            s
            for s in range(T)
            if document[s] == document[t] and (s <= t or not is_causal) and (window is None or abs(s - t) < window)
        ]
        heads = []
        for h in range(H):
            scores = scale * (k[:, seen, h // group] * q[:, t, h, None]).sum(-1)
            weights = (scores - scores.max(-1, keepdim=True).values).exp()
            weights = weights / weights.sum(-1, keepdim=True)
            heads.append((weights[..., None] * v[:, seen, h // group]).sum(1))
        rows.append(torch.stack(heads, 1))
    return torch.stack(rows, 1) if rows else (q.sum() + k.sum() + v.sum()).expand(B, 0, H, v.shape[-1])


def attention_at_once(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = True,
    window: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same with two matrix products, whose operands `RoundedProducts` rounds: the low-precision reference."""
    T, H = q.shape[1], q.shape[2]
    at = torch.arange(T)
    back = at[:, None] - at
    hidden = (back < 0) & is_causal
    if window is not None:
        hidden = hidden | (back.abs() >= window)
    if cu_seqlens is not None:
        document = torch.bucketize(at, cu_seqlens, right=True)
        hidden = hidden | (document[:, None] != document)
    q, k, v = (x.repeat_interleave(H // x.shape[2], 2).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    weights = (q.shape[-1] ** -0.5 * torch.bmm(q, k.mT)).masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.bmm(weights, v).unflatten(0, (-1, H)).transpose(1, 2)
