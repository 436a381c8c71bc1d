"""Diagonal engine in plain PyTorch: chunked, differentiable by autograd, any float dtype, CPU or GPU.

Defines what the Triton kernels compute (docs/math.md, section 2) and runs where they cannot. All chunks are computed
at once with batched matrix products, by a step of the reference (`flexsp.kernels.reference`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from flexsp.comm.derivatives import share_backward
from flexsp.kernels import reference
from flexsp.kernels.gates import clamped
from flexsp.kernels.reference import Documents, Frames, States
from flexsp.kernels.rotary import rotate
from flexsp.kernels.table import chunk_table
from flexsp.scan.chunks import Turned

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel
    from flexsp.scan.transitions import Transition

__all__ = ["Layout", "chunk_layout", "run"]

_CHUNK = 64
Optional = torch.Tensor | None


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: Optional, g_gamma: Optional, scale: float,
    initial: Optional, cu_seqlens: Optional, sp: SequenceParallel | None, call: str, want_final: bool, rows: int = 1,
    w: Optional = None, i: Optional = None, strict: bool = False, turned: Optional = None,
    turned_values: Optional = None,
) -> tuple[torch.Tensor, Optional]:  # fmt: skip
    """S_t = e^{g_t} S_{t-1} + e^{i_t} k_t v_t^T, o_t = scale q_t S_t + w_t v_t: outputs in v's dtype, final states in
    that of states.

    Args:
        q, k, v: [B, T, H, K] and [B, T, H, V], any strides; T may be 0.
        g: natural-log gates [B, T, H], or None.
        g_gamma: natural-log decay [H] of every token, added to g, or None. Sums are clamped (flexsp/kernels/gates.py).
        initial: [N, H, K, V], float64 for float64 inputs, else float32.
        cu_seqlens: [N + 1] global document boundaries, which are not looked at; B must be 1.
        call: what ranks compare of the call.
        want_final: whether final states are wanted.
        rows: how many of T are a token of `sp.set_lengths`.
        w: [B, T, H], or None for zeros.
        i: natural logarithms [B, T, H], or None for zeros.
        strict, turned, turned_values: as of `flexsp.kernels.diagonal.op.diagonal`.
    """
    anchor = None
    if sp is not None:
        given = q, k, v, g, g_gamma, initial, w, i, turned, turned_values
        anchor, q, k, v, g, g_gamma, initial, w, i, turned, turned_values = share_backward(sp, *given)
    B, T, H, _ = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    layout = chunk_layout(cu_seqlens, T, sp, rows)
    gates = _gates(g, g_gamma, (B, T, H), dtype)
    gates = None if gates is None else layout.chunks(gates.unsqueeze(-1), dtype).squeeze(-1)
    weights = None if w is None else layout.chunks(w.unsqueeze(-1), dtype)
    keys = k if i is None else k.to(dtype) * i.to(dtype).exp().unsqueeze(-1)
    rows_of = (layout.chunks(q, dtype) * scale, layout.chunks(keys, dtype), layout.chunks(v, dtype))
    turns = [None if x is None else _local_turns(layout.chunks(x, dtype)) for x in (turned, turned_values)]
    step = _Step(layout, *rows_of, gates, weights, strict, *turns)
    zero, frames = torch.zeros_like(step.summaries[:, :, 0]), None
    if sp is not None and sp.world_size > 1 and step.turned is not None:
        frames = _frames(step.turned, layout, sp, anchor, call)
    o, final = reference.run(step, zero, initial, layout.documents, sp, anchor, call, want_final, frames)
    return o.to(v.dtype), final


def _local_turns(turns: torch.Tensor) -> torch.Tensor:
    """Zeros with the gradients of the angles [B, H, chunks, C, S] by which tokens have turned since their chunk began,
    of the turns that each of them adds."""
    angles = 2 * math.pi * turns.cumsum(-2)
    return angles - angles.detach()


def _frames(turned: Turned, layout: Layout, sp: SequenceParallel, anchor: Optional, call: str) -> Frames:
    """States go from rank to rank in the frame of the first token, of the text or of their document. So what a shard
    does to a state that passes it is still a number, and the angles' gradients are made of states at its edges."""
    from flexsp.scan.exchange import exchange
    from flexsp.scan.transitions import Transition

    angles, cut = turned.angles, None
    if layout.documents is not None:
        begins = layout.documents.table[:, 3].bool()
        later = begins.flip(0).cumsum(0).flip(0) - begins.long()  # documents that begin behind a chunk
        angles, cut = angles.masked_fill((later > 0).view(-1, 1), 0.0), begins.any().view(1)
    mine = angles.sum(2, keepdim=True)
    before = exchange(mine, Transition.of(mine, None, cut), sp, f"{call}, angles", anchor).squeeze(2)
    until = mine.squeeze(2) + (before if cut is None else before.masked_fill(cut, 0.0))
    return Frames(lambda S: turned.turn(S, -until), lambda S: turned.turn(S, before))


class _Step:
    """The chunks of a call: q, k [B, H, chunks, C, K], v [B, H, chunks, C, V], log gates [B, H, chunks, C], and weights
    [B, H, chunks, C, 1] of a token's own values. strict: tokens do not read what they write themselves.

    turns, of_values: angles [B, H, chunks, C, S] by which pairs of channels of q and k, and of v, are turned, as
    `_local_turns` makes them: nothing is turned but for their gradients. They begin anew with each chunk. To turn all
    tokens behind the chunk as well is to turn back the state that it leaves."""

    def __init__(
        self, layout: Layout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: Optional, weights: Optional,
        strict: bool, turns: Optional = None, of_values: Optional = None,
    ) -> None:  # fmt: skip
        self.layout, self.own, self.weights, self.of_values = layout, v, weights, of_values
        q, k = (x if turns is None else rotate(x, turns) for x in (q, k))
        self.v = v = v if of_values is None else rotate(v, of_values)
        found = [x[..., -1, :] for x in (turns, of_values) if x is not None]
        n = 0 if turns is None else turns.shape[-1]

        def turn(S: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
            of_rows, of_columns = angles.unsqueeze(-2).tensor_split([n], -1)
            S = S if turns is None else rotate(S.transpose(-1, -2), of_rows).transpose(-1, -2)
            return S if of_values is None else rotate(S, of_columns)

        self.turned = Turned(-torch.cat(found, -1), turn) if found else None
        causal = torch.ones(layout.C, layout.C, dtype=torch.bool, device=q.device).tril()
        scores = q @ k.transpose(-1, -2)
        if gates is None:
            self.log_a, self.scores, self.reads, writes = None, scores.masked_fill(~causal, 0.0), q, k
        else:
            since_start, decay = _decays(gates, causal)
            self.scores, self.reads = scores * decay, q * since_start.exp().unsqueeze(-1)
            writes = k * decay[..., -1, :, None]
            self.log_a = clamped(since_start[..., -1])
        if strict:
            self.scores = self.scores.masked_fill(~causal.tril(-1), 0.0)
        self.summaries = writes.transpose(-1, -2) @ v

    def states(self, initial: Optional) -> Callable[[torch.Tensor], States]:
        A = None if self.log_a is None else self.log_a.exp()[..., None, None]
        return reference.states_of(A, self.summaries, initial, self.layout.documents, self.turned)

    def through(self) -> Transition:
        from flexsp.scan.transitions import Transition

        documents, log_a = self.layout.documents, None if self.log_a is None else self.log_a.sum(-1)
        cut = None if documents is None else documents.table[:, 3].any().view(1)
        return Transition.of(self.summaries[:, :, 0], log_a, cut)

    def merge(self, entering: torch.Tensor) -> torch.Tensor:
        found = self.scores @ self.v + self.reads @ entering
        found = found if self.of_values is None else rotate(found, -self.of_values)
        return self.layout.tokens(found if self.weights is None else found + self.weights * self.own)


def _gates(g: Optional, g_gamma: Optional, shape: tuple[int, int, int], dtype: torch.dtype) -> Optional:
    """Clamped log decay of every token [B, T, H], or None where nothing decays."""
    if g is None and g_gamma is None:
        return None
    gates = None if g is None else g.to(dtype)
    if g_gamma is not None:
        constant = g_gamma.to(dtype).expand(shape)
        gates = constant if gates is None else gates + constant
    assert gates is not None
    return clamped(gates)


def _decays(g: torch.Tensor, causal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums b of log gates [..., C] from the first on, and e^{b_i - b_j} where ``causal``, 0 elsewhere.

    Each b_i - b_j is a sum of its own, of the gates between the two. So it keeps its precision after a closed gate,
    and a gate's gradient adds up what passes the gate and nothing else, which may be far smaller than the rest. The
    exponent is masked, never the exponential.
    """
    between = g.unsqueeze(-1).masked_fill(~causal.tril(-1), 0.0)  # the gate of row i, for each column j < i
    return g.cumsum(-1), between.cumsum(-2).masked_fill(~causal, float("-inf")).exp()


class Layout(NamedTuple):
    """How the tokens [B, T, H, D] of this shard lie in chunks [B, H, chunks, C, D]."""

    T: int
    C: int
    documents: Documents | None = None  # the rest of packed tokens only
    token_of: Optional = None  # [chunks * C] token at each place, T where there is none
    place_of: Optional = None  # [T] place of each token, -1 where it is of no document

    def chunks(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        x = x.to(dtype)
        B, _, H, D = x.shape
        if self.token_of is None:
            n_chunks = max(1, -(-self.T // self.C))
            x = torch.cat([x.transpose(1, 2), x.new_zeros(B, H, n_chunks * self.C - self.T, D)], dim=2)
        else:
            x = F.pad(x[0], (0, 0, 0, 0, 0, 1)).index_select(0, self.token_of)
            x = x.transpose(0, 1).unsqueeze(0)
        return x.contiguous().view(B, H, x.shape[2] // self.C, self.C, D)

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(2, 3).transpose(1, 2)
        if self.place_of is None:
            return x[:, : self.T]
        nowhere = (self.place_of < 0).view(1, -1, 1, 1)
        return x.index_select(1, self.place_of.clamp(min=0)).masked_fill(nowhere, 0.0)


def chunk_layout(cu_seqlens: Optional, T: int, sp: SequenceParallel | None, rows: int = 1) -> Layout:
    if cu_seqlens is None:
        return Layout(T, _chunk_length(T))
    start, stop = (0, T) if sp is None else sp.shard_range(T, rows)[:2]
    n = cu_seqlens.numel() - 1
    C = max(16, _chunk_length(-(-T // n)))
    table = chunk_table(cu_seqlens, start, stop, C, last_rank=sp is None or sp.is_last)
    t0, length = table[:, 0, None].to(torch.int64), table[:, 1, None]
    inside = torch.arange(C, device=table.device)
    token_of = torch.where(inside < length, t0 + inside, T).flatten()
    place_of = torch.full((T + 1,), -1, dtype=torch.int64, device=table.device)
    place_of = place_of.scatter(0, token_of, torch.arange(token_of.numel(), device=table.device))[:T]
    return Layout(T, C, Documents(table, n), token_of, place_of)


def _chunk_length(T: int) -> int:
    """64, or the smallest power of two that holds a shorter sequence; by comparisons, so that T may be symbolic."""
    C = 1
    while C < T and C < _CHUNK:
        C *= 2
    return C
