"""Selective scan in plain PyTorch: differentiable by autograd, any float dtype, CPU or GPU.

All chunks are walked at once, token after token of a chunk: first from zeros, for what each adds to the state, then
from the states that enter, for the outputs. No tensor has a number for every token, channel and state: a walk in groups
of chunks is made again in the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from flexsp.comm.derivatives import share_backward, transformed
from flexsp.comm.group import SequenceParallel
from flexsp.kernels import reference
from flexsp.kernels.diagonal.in_pytorch import Layout, chunk_layout
from flexsp.kernels.reference import States
from flexsp.scan.transitions import Transition

__all__ = ["gated", "run", "steps", "weights"]

_NUMBERS = 1 << 25  # of the states of all tokens of a group
_NEAR_ZERO, _TERMS = 0.25, 13
Optional = torch.Tensor | None


def run(
    u: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, zoh: bool, initial: Optional,
    cu_seqlens: Optional, sp: SequenceParallel | None, call: str, want_final: bool,
) -> tuple[torch.Tensor, Optional]:  # fmt: skip
    """h_t = e^{dt_t A} h_{t-1} + w(dt_t, A) B_t u_t, y_t = sum_n C_t h_t: y and final states in the dtype of dt.

    Args:
        u, dt: [B, T, D], any strides; T may be 0. dt >= 0, in the dtype of the sums.
        A: [D, N] <= 0, in that dtype.
        B, C: [B, T, N].
        zoh: w is expm1(dt A) / A, else dt.
        initial: [N_s, D, N] in the dtype of the sums.
        cu_seqlens: [N_s + 1] global document boundaries, which are not looked at; the batch must be 1.
        call: what ranks compare of the call.
        want_final: whether final states are wanted.
    """
    anchor = None
    if sp is not None:
        anchor, u, dt, A, B, C, initial = share_backward(sp, u, dt, A, B, C, initial)
    layout = chunk_layout(cu_seqlens, u.shape[1], sp)
    tokens = tuple(layout.chunks(x.unsqueeze(2), dt.dtype).squeeze(1) for x in (u, dt, B, C))
    step = _Step(layout, tokens, A, zoh)
    zero = torch.zeros_like(step.summaries[:, :, 0])
    start = None if initial is None else initial.unsqueeze(1)
    y, final = reference.run(step, zero, start, layout.documents, sp, anchor, call, want_final)
    return y.squeeze(2), None if final is None else final.squeeze(1)


class _Step:
    """The chunks of a call, ``tokens``: u, dt [B, chunks, C, D], B and C [B, chunks, C, N]. States [D, N] are those of
    one head.

    Places without a token have dt = 0: a state passes them as it is.
    """

    def __init__(self, layout: Layout, tokens: tuple[torch.Tensor, ...], A: torch.Tensor, zoh: bool) -> None:
        self.layout, self.tokens, self.A = layout, tokens, A
        self._walk = functools.partial(_walk, zoh=zoh)
        dt = tokens[1]
        self.stretch = dt.sum(2)
        zeros = dt.new_zeros(()).expand(*dt.shape[:2], *A.shape)
        self.summaries = _by_groups(functools.partial(self._walk, reads=False), A, zeros, self.tokens).unsqueeze(1)

    def states(self, initial: Optional) -> Callable[[torch.Tensor], States]:
        passed = (self.stretch.unsqueeze(-1) * self.A).exp().unsqueeze(1)
        return reference.states_of(passed, self.summaries, initial, self.layout.documents)

    def through(self) -> Transition:
        from flexsp.scan.transitions import Transition

        stretch, documents = self.stretch.sum(1), self.layout.documents
        cut = None if documents is None else documents.table[:, 3].any()
        if cut is not None:  # before e^x: a gradient of 0 times NaN is NaN
            stretch = stretch.masked_fill(cut, 0.0)
        passed = (stretch.unsqueeze(-1) * self.A).exp().unsqueeze(1)
        passed = passed if cut is None else passed.masked_fill(cut, 0.0)
        return Transition.of(self.summaries[:, :, 0], passed, kind="elementwise")

    def merge(self, entering: torch.Tensor) -> torch.Tensor:
        y = _by_groups(functools.partial(self._walk, reads=True), self.A, entering.squeeze(1), self.tokens)
        return self.layout.tokens(y.unsqueeze(1))


def steps(delta: torch.Tensor, bias: Optional, softplus: bool, dtype: torch.dtype) -> torch.Tensor:
    """dt in this dtype."""
    dt = delta.to(dtype) if bias is None else delta.to(dtype) + bias  # which is not wider
    return F.softplus(dt) if softplus else dt


def gated(y: torch.Tensor, u: torch.Tensor, D: Optional, z: Optional) -> torch.Tensor:
    """(y + D u) silu(z) in u's dtype, computed in that of y."""
    y = y if D is None else y + D.to(y.dtype) * u.to(y.dtype)
    return (y if z is None else y * F.silu(z.to(y.dtype))).to(u.dtype)


def weights(dt: torch.Tensor, A: torch.Tensor, zoh: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """e^{dt A} and w(dt, A), what a state keeps and what it is given, of dt [..., 1] and A."""
    z = dt * A
    if not zoh:
        return z.exp(), dt
    # Near 0 the series, for the sake of its derivative: that of expm1(z) / z cancels there.
    near = z.abs() < _NEAR_ZERO
    small, large = z.masked_fill(~near, 0.0), z.masked_fill(near, 1.0)
    series = torch.ones_like(z)
    for k in range(_TERMS, 1, -1):
        series = 1 + series * small / k
    return z.exp(), dt * torch.where(near, series, large.expm1() / large)


def _walk(
    A: torch.Tensor, h: torch.Tensor, u: torch.Tensor, dt: torch.Tensor, B: torch.Tensor, C: torch.Tensor, zoh: bool,
    reads: bool,
) -> torch.Tensor:  # fmt: skip
    """Of some chunks [B, chunks, C, *], from states [B, chunks, D, N]: what is read of them, or the last states."""
    y = []
    for t in range(u.shape[2]):
        kept, given = weights(dt[:, :, t, :, None], A, zoh)
        h = kept * h + given * u[:, :, t, :, None] * B[:, :, t, None, :]
        if reads:
            y.append((h * C[:, :, t, None, :]).sum(-1))
    return torch.stack(y, 2) if reads else h


def _by_groups(
    walk: Callable[..., torch.Tensor], A: torch.Tensor, h: torch.Tensor, tokens: tuple[torch.Tensor, ...]
) -> torch.Tensor:  # fmt: skip
    """The walk of a few chunks at a time, whose states autograd does not keep."""
    if torch.compiler.is_compiling() or transformed():
        return walk(A, h, *tokens)
    batch, n, C = tokens[0].shape[:3]
    size = max(1, _NUMBERS // max(1, batch * C * A.numel()))
    found = []
    for at in range(0, n, size):
        part = (h[:, at : at + size], *(x[:, at : at + size] for x in tokens))
        found.append(checkpoint(walk, A, *part, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(found, 1)
