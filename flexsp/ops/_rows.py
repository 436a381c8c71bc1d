"""The diagonal engine on tokens with several rows, for `mamba3` and `flexsp.grammar`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from flexsp.comm.group import SequenceParallel
from flexsp.kernels.diagonal.op import diagonal
from flexsp.kernels.rotary import halved, paired, turn_rows

__all__ = [
    "Turns", "entering", "leaving", "of_first_rows", "on_engine", "own_products", "products", "value_rows",
]  # fmt: skip

Tensor = torch.Tensor
Optional = torch.Tensor | None
_TURN = 2 * math.pi


def value_rows(v: Tensor, mimo_x: Optional) -> Tensor:
    """[..., R, H, P] of v [..., H, P] and factors [H, R, P]; R = 1 without."""
    return v.unsqueeze(-3) if mimo_x is None else v.unsqueeze(-3) * mimo_x.transpose(0, 1).to(v.dtype)


def products(k: Tensor, rows: Tensor) -> Tensor:
    """The sum over R of k x^T, [N, H, K, P], from k [N, R, H, K] and x [N, R, H, P]. It uses no matmul, whose result
    autocast would round."""
    return (k.unsqueeze(-1) * rows.unsqueeze(-2)).sum(1)


class Turns(NamedTuple):
    """By how many turns (of 2 pi) tokens have turned the first S pairs of rows of the state, all with gradients. The
    caller rotates q and k by sums of `steps`, not for autograd.

    Attributes:
        steps: what each token adds, [B, T, H, S].
        start: what sums begin with, [N, H, S], or None: zero.
        end: the sums of last tokens, [N or 1, H or 1, S], if the final state is to turn with its tokens; else None.
        of_values: the same as `steps` for pairs of the state's columns, [B, T, H, S], or None. The caller rotates v,
            and outputs and final states back, not for autograd either.
    """

    steps: Tensor
    start: Optional = None
    end: Optional = None
    of_values: Optional = None


def on_engine(
    q: Tensor, k: Tensor, v: Tensor, gate: Optional, *, scale: float, initial: Optional, want_final: bool,
    cu_seqlens: Optional, sp: SequenceParallel | None, op: str, turns: Turns | None = None, pairwise: bool = True,
    strict: bool = False,
) -> tuple[Tensor, Optional]:  # fmt: skip
    """`diagonal` over rows [B, T, R, H, *], one after the other. The state decays before a token's first row only, by
    its log gate [B, T, H].

    So row i of q reads what rows j <= i of its own token have written, with `strict` rows j < i. turns: by which all
    rows of a token are rotated; pairwise: as of `flexsp.kernels.rotary.rotate`.
    """
    (T, R), of_rows, of_values = q.shape[1:3], None, None
    if not T and sp is None:
        turns = None  # the final state is the initial one, and so is its gradient, to the last bit
    if turns is not None:
        of_rows, of_values = of_first_rows(turns.steps, R), of_first_rows(turns.of_values, R)
        q, k = (x if pairwise else paired(x) for x in (q, k))
        initial = entering(initial, turns.start, pairwise)
    o, final = diagonal(
        q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2), of_first_rows(gate, R), turned=of_rows,
        turned_values=of_values, scale=scale, initial_state=initial, output_final_state=want_final,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens * R, sp=sp, op=op, rows=R, strict=strict,
    )  # fmt: skip
    if turns is not None:
        final = leaving(final, turns.end, pairwise)
    return o.unflatten(1, (T, R)), final


def of_first_rows(x: Optional, R: int) -> Optional:
    """[B, T R, ...]: what tokens have, x [B, T, ...], at the first of their R rows, and zeros."""
    if x is None or R == 1:
        return x
    first = x.unsqueeze(2)
    return torch.cat([first, first.new_zeros(*x.shape[:2], R - 1, *x.shape[2:])], 2).flatten(1, 2)


def entering(initial: Optional, start: Optional, pairwise: bool) -> Optional:
    """An initial state as `diagonal` has it with `turned`, which turns states against the tokens behind them: the state
    stays where it is if these begin with further turns, ``start``."""
    if initial is None:
        return None
    initial = initial if pairwise else paired(initial, -2)
    return initial if start is None else turn_rows(initial, -_TURN * start)


def leaving(final: Optional, end: Optional, pairwise: bool) -> Optional:
    """The final state of `diagonal` with `turned`. If it is to turn with its tokens, by ``end``."""
    if final is None:
        return None
    final = final if end is None else turn_rows(final, _TURN * end)
    return final if pairwise else halved(final, -2)


def own_products(reads: Tensor, keys: Tensor, x: Tensor, gamma: Tensor, eta: Tensor, strict: bool = False) -> Tensor:
    """The correction [B, T, R, H, P] of the engine's outputs for a token's own products.

    Row i of `reads` [B, T, R, H, K] must see all R products with the weight gamma [B, T, H]. The engine's row i has
    seen the products j <= i, or with `strict` j < i, with the weight gamma + eta.
    """
    R = x.shape[2]
    row, found = torch.arange(R, device=eta.device).unsqueeze(-1), torch.zeros_like(x)
    for j in range(R):
        seen = row > j if strict else row >= j
        weight = torch.where(seen, -eta.unsqueeze(2), gamma.unsqueeze(2))
        read = (reads * keys[:, :, j, None]).sum(-1)
        found = found + (weight * read).unsqueeze(-1) * x[:, :, j, None]
    return found
