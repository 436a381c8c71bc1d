"""The diagonal engine on tokens with several rows, for `mamba3` and `flexsp.grammar`."""

from __future__ import annotations

import torch

from flexsp.comm.group import SequenceParallel
from flexsp.kernels.diagonal.op import diagonal

__all__ = ["on_engine", "own_products", "products", "value_rows"]

Tensor = torch.Tensor
Optional = torch.Tensor | None


def value_rows(v: Tensor, mimo_x: Optional) -> Tensor:
    """[..., R, H, P] of v [..., H, P] and factors [H, R, P]; R = 1 without."""
    return v.unsqueeze(-3) if mimo_x is None else v.unsqueeze(-3) * mimo_x.transpose(0, 1).to(v.dtype)


def products(k: Tensor, rows: Tensor) -> Tensor:
    """The sum over R of k x^T, [N, H, K, P], from k [N, R, H, K] and x [N, R, H, P]. It uses no matmul, whose result
    autocast would round."""
    return (k.unsqueeze(-1) * rows.unsqueeze(-2)).sum(1)


def on_engine(
    q: Tensor, k: Tensor, v: Tensor, gate: Optional, *, scale: float, initial: Optional, want_final: bool,
    cu_seqlens: Optional, sp: SequenceParallel | None, op: str, turned: Optional = None, pairwise: bool = True,
) -> tuple[Tensor, Optional]:  # fmt: skip
    """`diagonal` over rows [B, T, R, H, *], one after the other. The state decays before a token's first row only, by
    its log gate [B, T, H].

    So row i of q reads what rows j <= i of its own token have written. turned, pairwise: as of `diagonal`, [B, T, H, S]
    of all rows of a token.
    """
    (B, T, R, H), further = q.shape[:4], None
    if gate is not None:
        further = torch.cat([gate.unsqueeze(2), gate.new_zeros(B, T, R - 1, H)], 2).flatten(1, 2)
    if turned is not None:
        turned = turned.unsqueeze(2).expand(-1, -1, R, -1, -1).flatten(1, 2)
    o, final = diagonal(
        q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2), further, turned=turned, scale=scale, initial_state=initial,
        output_final_state=want_final, cu_seqlens=None if cu_seqlens is None else cu_seqlens * R, sp=sp, op=op, rows=R,
        pairwise=pairwise,
    )  # fmt: skip
    return o.unflatten(1, (T, R)), final


def own_products(reads: Tensor, keys: Tensor, x: Tensor, gamma: Tensor, eta: Tensor) -> Tensor:
    """The correction [B, T, R, H, P] of the engine's outputs for a token's own products.

    Row i of `reads` [B, T, R, H, K] must see all R products with the weight gamma [B, T, H]. The engine's row i has
    seen the products j <= i, with the weight gamma + eta.
    """
    R = x.shape[2]
    row, found = torch.arange(R, device=eta.device).unsqueeze(-1), torch.zeros_like(x)
    for j in range(R):
        weight = torch.where(row >= j, -eta.unsqueeze(2), gamma.unsqueeze(2))
        read = (reads * keys[:, :, j, None]).sum(-1)
        found = found + (weight * read).unsqueeze(-1) * x[:, :, j, None]
    return found
