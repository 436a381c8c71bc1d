"""Diagonal engine in plain PyTorch: chunked, differentiable by autograd, any float dtype, CPU or GPU.

Defines what the Triton kernels compute (docs/math.md, section 2) and runs where they cannot. All chunks are computed
at once with batched matrix products; the states between chunks come from a scan that walks groups of chunks side by
side, so the number of operations hardly grows with the sequence length.

What is not finite stays in its document, from its token's chunk on: where nothing passes, a state is replaced by zeros
and never multiplied by zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from flexsp.comm.derivatives import joined
from flexsp.kernels.table import chunk_table
from flexsp.scan.chunks import states_between

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel

__all__ = ["diagonal_reference"]

MIN_LOG_DECAY = -104.0  # e^-104 is 0 in float32; a finite floor keeps sums of gates finite
_CHUNK = 64


def diagonal_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    *,
    scale: float,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    sp: SequenceParallel | None = None,
    call: str = "",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """S_t = e^{g_t} S_{t-1} + k_t v_t^T, o_t = scale q_t S_t.

    Args:
        q, k: [B, T, H, K], any strides; T may be 0.
        v: [B, T, H, V].
        g: [B, T, H] natural-log gates <= 0, clamped at -104.
        g_gamma: [H] natural-log decay of every token, added to ``g``.
        scale: factor on q.
        initial_state: [N, H, K, V] in the accumulation dtype (float64 for float64 inputs, else float32).
        output_final_state: whether the state after the last token is returned.
        cu_seqlens: [N+1] global document boundaries; B must be 1.
        sp: the ranks that share the sequence; T is then this rank's part of it.
        call: what ranks compare of the call, besides the states that they exchange.

    Returns:
        o [B, T, H, V] in v's dtype, and the final state [N, H, K, V] or None. With ``sp`` and without
        ``cu_seqlens`` only the last rank has a final state; with ``cu_seqlens`` every rank fills the rows of the
        documents that end in its shard.
    """
    B, T, H, _ = q.shape
    if sp is not None:
        _, q, k, v, g, g_gamma, initial_state = joined(sp, q, k, v, g, g_gamma, initial_state)
    dtype = torch.promote_types(q.dtype, torch.float32)
    layout = _layout(cu_seqlens, B, T, sp)
    qc = layout.chunks(q, dtype) * scale
    kc, vc = layout.chunks(k, dtype), layout.chunks(v, dtype)
    gates = _gates(g, g_gamma, (B, T, H), dtype)
    if gates is None:
        causal = _causal(layout.C, q.device)
        scores = (qc @ kc.transpose(-1, -2)).masked_fill(~causal, 0.0)
        writes, reads, log_a = kc, qc, qc.new_zeros(1, 1, qc.shape[2])
    else:
        gc = layout.chunks(gates.unsqueeze(-1), dtype).squeeze(-1)
        whole, part = _split_cumsum(gc)
        decay = _decay_between(whole, part, whole, part, _causal(layout.C, q.device))
        scores = (qc @ kc.transpose(-1, -2)) * decay
        writes = kc * decay[..., -1, :, None]
        since_start = whole + part
        reads = qc * since_start.exp().unsqueeze(-1)
        log_a = since_start[..., -1].clamp(min=MIN_LOG_DECAY)
    summaries = writes.transpose(-1, -2) @ vc
    entering, final = _states(summaries, log_a, layout, initial_state, output_final_state, gates is not None, sp, call)
    o = scores @ vc + reads @ entering
    return layout.tokens(o).to(v.dtype), final


def _gates(
    g: torch.Tensor | None, g_gamma: torch.Tensor | None, shape: tuple[int, int, int], dtype: torch.dtype
) -> torch.Tensor | None:
    """Clamped log decay of every token [B, T, H], or None where nothing decays."""
    if g is None and g_gamma is None:
        return None
    gates = None if g is None else g.to(dtype)
    if g_gamma is not None:
        constant = g_gamma.to(dtype).expand(shape)
        gates = constant if gates is None else gates + constant
    assert gates is not None
    return gates.clamp(min=MIN_LOG_DECAY)


def _causal(C: int, device: torch.device) -> torch.Tensor:
    return torch.ones(C, C, dtype=torch.bool, device=device).tril()


def _split_cumsum(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inclusive sum over the last axis as (sum of integers, sum of remainders).

    The integers add up exactly, so differences of two sums keep their precision after a gate of -104.
    """
    whole = g.detach().round()
    return whole.cumsum(-1), (g - whole).cumsum(-1)


def _decay_between(
    whole_to: torch.Tensor,
    part_to: torch.Tensor,
    whole_from: torch.Tensor,
    part_from: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """e^{b_to - b_from} where ``mask`` holds and 0 elsewhere; the exponent is masked, never the exponential."""
    exponent = whole_to.unsqueeze(-1) - whole_from.unsqueeze(-2)
    exponent = exponent + (part_to.unsqueeze(-1) - part_from.unsqueeze(-2))
    return exponent.masked_fill(~mask, float("-inf")).exp()


# ------------------------------------------------------------------------------------------ tokens <-> chunks


class _Layout(NamedTuple):
    """How the tokens [B, T, H, D] of this shard lie in chunks [B, H, NC, C, D]."""

    T: int
    C: int
    table: torch.Tensor | None  # [NC, 5] from chunk_table, packed documents only
    token_of: torch.Tensor | None  # [NC * C] token at each place, T where there is none
    place_of: torch.Tensor | None  # [T] place of each token
    n_docs: int

    def chunks(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        x = x.to(dtype)
        B, _, H, D = x.shape
        if self.token_of is None:
            n_chunks = max(1, -(-self.T // self.C))
            x = torch.cat([x.transpose(1, 2), x.new_zeros(B, H, n_chunks * self.C - self.T, D)], dim=2)
        else:
            x = F.pad(x[0], (0, 0, 0, 0, 0, 1)).index_select(0, self.token_of)
            x = x.transpose(0, 1).unsqueeze(0)
        return x.contiguous().view(B, H, -1, self.C, D)

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(2, 3).transpose(1, 2)
        return x[:, : self.T] if self.place_of is None else x.index_select(1, self.place_of)


def _layout(cu_seqlens: torch.Tensor | None, B: int, T: int, sp: SequenceParallel | None) -> _Layout:
    if cu_seqlens is None:
        return _Layout(T, _chunk_length(T), None, None, None, B)
    start, stop = (0, T) if sp is None else sp.shard_range(T)[:2]
    n_docs = cu_seqlens.numel() - 1
    C = max(16, _chunk_length(-(-T // n_docs)))
    table = chunk_table(cu_seqlens, start, stop, C, last_rank=sp is None or sp.rank == sp.world_size - 1)
    t0, length = table[:, 0, None].to(torch.int64), table[:, 1, None]
    inside = torch.arange(C, device=table.device)
    token_of = torch.where(inside < length, t0 + inside, T).flatten()
    place_of = torch.zeros(T + 1, dtype=torch.int64, device=table.device)
    place_of = place_of.scatter(0, token_of, torch.arange(token_of.numel(), device=table.device))[:T]
    return _Layout(T, C, table, token_of, place_of, n_docs)


def _chunk_length(T: int) -> int:
    """64, or the smallest power of two that holds a shorter sequence; by comparisons, so that T may be symbolic."""
    C = 1
    while C < T and C < _CHUNK:
        C *= 2
    return C


# ----------------------------------------------------------------------------------------------- chunk states


def _states(
    summaries: torch.Tensor,
    log_a: torch.Tensor,
    layout: _Layout,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    decays: bool,
    sp: SequenceParallel | None,
    call: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """States entering every chunk [B, H, NC, K, V], and the final states [N, H, K, V] or None."""
    table = layout.table
    A = log_a.exp()[..., None, None] if decays else None
    first = started = None
    start = torch.zeros_like(summaries[:, :, 0]) if initial_state is None else initial_state
    if table is not None:
        first = table[:, 3].bool()
        if initial_state is not None:
            start = torch.zeros_like(summaries[:, :, 0])
            started = initial_state.index_select(0, table[:, 2]).transpose(0, 1).unsqueeze(0)
            started = started.masked_fill(~first[:, None, None], 0.0)
            summaries = summaries + (started if A is None else A * started)
    boundary = states_between(A, summaries, start, first)
    if sp is not None:
        received = _exchange(boundary[:, :, -1], log_a.sum(-1) if decays else None, first, sp, call)
        boundary = states_between(A, summaries, start + received, first)
    entering = boundary[:, :, :-1]
    if first is not None:
        entering = entering.masked_fill(first[:, None, None], 0.0)
        if started is not None:
            entering = entering + started
    if not output_final_state:
        return entering, None
    return entering, _final_states(boundary, layout, sp)


def _exchange(
    leaving: torch.Tensor, log_a: torch.Tensor | None, first: torch.Tensor | None, sp: SequenceParallel, call: str
) -> torch.Tensor:
    from flexsp.scan.exchange import exchange
    from flexsp.scan.transitions import Transition

    if log_a is not None:
        log_a = log_a.expand(leaving.shape[:2])
    cut = None if first is None else first.any().view(1)
    return exchange(leaving, Transition.of(leaving, log_a, cut), sp, call)


def _final_states(boundary: torch.Tensor, layout: _Layout, sp: SequenceParallel | None) -> torch.Tensor | None:
    table = layout.table
    if table is None:
        return boundary[:, :, -1] if sp is None or sp.rank == sp.world_size - 1 else None
    n_slots, n_docs = table.shape[0], layout.n_docs
    slot = torch.arange(1, n_slots + 1, device=table.device)
    ends_in = torch.where(table[:, 4] > 0, table[:, 2].to(torch.int64), n_docs)
    after = torch.zeros(n_docs + 1, dtype=torch.int64, device=table.device).scatter(0, ends_in, slot)[:n_docs]
    states = boundary[0].index_select(1, after).transpose(0, 1)
    return states.masked_fill((after == 0)[:, None, None, None], 0.0)
