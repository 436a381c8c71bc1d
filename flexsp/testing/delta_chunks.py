"""The delta rules chunk by chunk in PyTorch: the yardstick of `compare`, which rounds as sound chunks do."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

__all__ = ["delta_chunks"]

CHUNK = 64
MIN_LOG_DECAY = -104.0


def delta_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    *,
    scale: float,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    reads: torch.Tensor | None = None,
    steps: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `token_loop` computes with beta, in float32 (float64 of float64), differentiated by autograd.

    o comes in v's dtype. Each step of a token is a row: the first one has the gate, the last one the query.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    (B, T, H, K), V = q.shape, v.shape[-1]
    gates = None
    if g is not None:
        gates = g.to(wide).clamp(min=MIN_LOG_DECAY).view(B, T, 1, H, -1)
        gates = pad(gates, (0, 0, 0, 0, 0, steps - 1)).flatten(1, 2).transpose(1, 2)
    queries = pad(q.to(wide).unsqueeze(2) * scale, (0, 0, 0, 0, steps - 1, 0)).flatten(1, 2).transpose(1, 2)
    read = k if reads is None else reads
    keys, read, values, strength = (x.to(wide).transpose(1, 2) for x in (k, read, v, beta))
    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, finals = [values[:, :, :0]], []
    for n, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        state = queries.new_zeros(B, H, K, V)
        if initial_state is not None:
            state = initial_state if cu_seqlens is None else initial_state[n : n + 1]
        for at in range(begin * steps, end * steps, CHUNK):
            rows = slice(at, min(at + CHUNK, end * steps))
            written = keys[:, :, rows] * strength[:, :, rows, None]
            q_c, r_c, v_c = (x[:, :, rows] for x in (queries, read, values))
            o, state = _chunk(q_c, r_c, written, v_c, None if gates is None else gates[:, :, rows], state)
            outputs.append(o)
        finals.append(state)
    rows_of_o = torch.cat(outputs, dim=2).transpose(1, 2)
    return rows_of_o[:, steps - 1 :: steps].to(v.dtype), torch.cat(finals)


def _chunk(
    q: torch.Tensor, k: torch.Tensor, written: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, S: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [B, H, C, V] and the next state, of rows [B, H, C, ...] and gates [B, H, C, 1 or K]; k are the keys that read,
    written those that write."""
    one = torch.eye(k.shape[2], dtype=k.dtype)
    if g is None:
        inverse = torch.linalg.inv(one + (k @ written.mT).tril(-1))
        W, U = inverse @ k, inverse @ v
        state = (torch.eye(k.shape[3], dtype=k.dtype) - written.mT @ W) @ S + written.mT @ U
        return (q @ written.mT).tril() @ (U - W @ S) + q @ S, state
    sums = g.cumsum(2)
    later = torch.ones_like(one, dtype=torch.bool).tril()[..., None]
    decay = (sums.unsqueeze(3) - sums.unsqueeze(2)).masked_fill(~later, -torch.inf).exp()

    def scores(x: torch.Tensor) -> torch.Tensor:
        if decay.shape[-1] == 1:
            return (x @ written.mT) * decay[..., 0]
        return (x.unsqueeze(3) * written.unsqueeze(2) * decay).sum(-1)

    inverse = torch.linalg.inv(one + scores(k).tril(-1))
    errors = inverse @ v - (inverse @ (k * sums.exp())) @ S
    last = sums[:, :, -1:]
    state = last.exp().mT * S + (written * (last - sums).exp()).mT @ errors
    return scores(q) @ errors + (q * sums.exp()) @ S, state
