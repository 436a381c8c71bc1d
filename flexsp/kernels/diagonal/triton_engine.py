"""Host side of the Triton kernels: summarize -> propagate -> output, and the same backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flexsp.kernels.diagonal.plan import Plan, decay_dtype, make_plan
from flexsp.kernels.diagonal.tiles import Tile
from flexsp.kernels.table import chunk_table
from flexsp.scan.launch import launch
from flexsp.scan.propagate import propagate

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel

Optional = torch.Tensor | None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Kernels step through the last axis one element at a time; other strides are free."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _strides(x: torch.Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


class _Gate:
    """The decay's device function with its tensor: nothing, or b [B, H, chunks * C] (`decay` below)."""

    def __init__(self, decay: torch.Tensor, p: Plan, gated: bool) -> None:
        from flexsp.kernels import primitives

        self.gated = gated
        self.tensor = decay
        self.decay = primitives.decay_scalar if self.gated else primitives.decay_none
        row = p.n_chunks * p.tiles.chunk
        self.strides = (p.H * row, row) if self.gated else (0, 0)


def _cumulate(g: Optional, g_gamma: Optional, table: torch.Tensor, p: Plan, dtype: torch.dtype) -> torch.Tensor:
    """Cumulative log2 decay of the chunks, for inputs of `dtype`; empty where there is no gate."""
    from flexsp.kernels.primitives import gate_kernel

    if g is None and g_gamma is None:
        return torch.empty(0, device=table.device, dtype=decay_dtype(dtype))
    if g is None:
        assert g_gamma is not None
        g = g_gamma.expand(p.B, p.T, p.H)
    b = torch.empty(p.B, p.H, p.n_chunks * p.tiles.chunk, device=g.device, dtype=decay_dtype(dtype))
    if p.n_chunks:
        launch(
            gate_kernel, (p.n_chunks, p.B * p.H), (g, b, table, *_strides(g), p.T, p.H),
            {"C": p.tiles.chunk, "PACKED": p.packed}, {"num_warps": 2},
        )  # fmt: skip
    return b


def _dots(dtype: torch.dtype) -> dict[str, Any]:
    """Operand type and precision of the kernels' matrix products.

    fp16 goes the way of fp32, three tf32 products for one: its own range would overflow in states and scores.
    """
    import triton.language as tl

    return {"DOT": tl.bfloat16 if dtype == torch.bfloat16 else tl.float32, "PREC": "tf32x3"}


def _run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], tile: Tile, p: Plan, **constants: Any) -> None:
    """Launches a walk with its tile; `constants` are its own, those of every walk are added here."""
    shape = {"K": p.K, "V": p.V, "BK": tile.bk, "BV": tile.bv, "C": p.tiles.chunk, "PACKED": p.packed}
    launch(kernel, grid, args, shape | constants, {"num_warps": tile.warps, "num_stages": tile.stages})


def _alike(*tensors: torch.Tensor) -> bool:
    """Whether one token stride serves all: the kernels then share their offsets, which saves them registers."""
    return len({x.stride(1) for x in tensors}) == 1


def _count(n: int, block: int) -> int:
    return -(-n // block)


def _launch_summarize(p: Plan, x, y, gate, states, log_a, cut, boundary, table, scale, reverse, zero) -> None:
    from flexsp.kernels.diagonal.summarize import summarize_kernel

    tile = p.tiles.summarize
    grid = (_count(p.K, tile.bk) * _count(p.V, tile.bv), p.B * p.H, p.n_seg)
    args = (
        x, y, gate.tensor, states, log_a, cut, x if boundary is None else boundary, table,
        *_strides(x), *_strides(y), *gate.strides,
        p.T, p.H, p.n_seg, p.n_chunks, p.per_seg, scale,
    )  # fmt: skip
    _run(
        summarize_kernel, grid, args, tile, p,
        DECAY=gate.decay, REVERSE=reverse, BOUNDARY=boundary is not None, ZERO=zero, GATED=gate.gated, **_dots(x.dtype),
    )  # fmt: skip


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: Optional,
    g_gamma: Optional,
    initial: Optional,
    cu_seqlens: Optional,
    sp: SequenceParallel | None,
    scale: float,
    want_final: bool,
) -> tuple[torch.Tensor, ...]:
    """(o, final, states, log_a, cut, table, cumulative log2 decay); what does not apply comes back empty."""
    q, k, v = _rows(q), _rows(k), _rows(v)
    docs = 0 if cu_seqlens is None else cu_seqlens.numel() - 1
    p = make_plan(q, v, docs)
    f32: dict[str, Any] = {"device": q.device, "dtype": torch.float32}
    states = torch.empty(p.B, p.n_seg + 1, p.H, p.K, p.V, **f32)
    cut = torch.empty((p.B, p.n_seg) if p.packed else 0, device=q.device, dtype=torch.int32)
    table = _table(cu_seqlens, p, sp, q.device)
    decay = _cumulate(g, g_gamma, table, p, q.dtype)
    gate = _Gate(decay, p, g is not None or g_gamma is not None)
    log_a = torch.empty((p.B, p.n_seg, p.H) if gate.gated else 0, **f32)
    o = torch.empty(p.B, p.T, p.H, p.V, device=q.device, dtype=v.dtype)
    final = torch.zeros(docs, p.H, p.K, p.V, **f32) if p.packed and want_final else torch.empty(0, **f32)

    in_walk = initial if p.packed else None
    if p.n_chunks:
        _launch_summarize(p, k, v, gate, states, log_a, cut, in_walk, table, scale, False, p.packed or initial is None)
    else:
        states.zero_()
        log_a.zero_()
    if not p.packed and initial is not None:
        states[:, 0].copy_(initial)
    propagate(states, log_a if gate.gated else None, cut if p.packed else None, sp)
    if p.n_chunks:
        _launch_output(p, q, k, v, gate, o, states, in_walk, final, table, scale, p.packed and want_final)
    if want_final and not p.packed:
        final = states[:, p.n_seg].clone()
    return o, final, states, log_a, cut, table, decay


def _launch_output(p: Plan, q, k, v, gate: _Gate, o, states, initial, final, table, scale, with_final: bool) -> None:
    from flexsp.kernels.diagonal.output import output_kernel

    tile = p.tiles.output
    args = (
        q, k, v, gate.tensor, o, states, q if initial is None else initial, final, table,
        *_strides(q), *_strides(k), *_strides(v), *gate.strides, *_strides(o),
        p.T, p.H, p.n_seg, p.n_chunks, p.per_seg, scale,
    )  # fmt: skip
    _run(
        output_kernel, (_count(p.V, tile.bv), p.B * p.H, p.n_seg), args, tile, p,
        DECAY=gate.decay, INITIAL=initial is not None, FINAL=with_final,
        GATED=gate.gated, **_dots(q.dtype), ALIKE=_alike(q, k, v, o),
    )  # fmt: skip


def _table(cu_seqlens: Optional, p: Plan, sp: SequenceParallel | None, device: torch.device) -> torch.Tensor:
    if cu_seqlens is None:
        return torch.empty(0, device=device, dtype=torch.int32)
    start, stop, last_rank = 0, p.T, True
    if sp is not None:
        start, stop, _ = sp.shard_range(p.T)
        last_rank = sp.rank == sp.world_size - 1
    return chunk_table(cu_seqlens, start, stop, p.tiles.chunk, last_rank)


@dataclass
class Saved:
    """What the backward reads: the inputs and the boundary results of the forward (empty tensors where not kept)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    initial: Optional
    final: torch.Tensor
    states: torch.Tensor
    log_a: torch.Tensor
    cut: torch.Tensor
    table: torch.Tensor
    decay: torch.Tensor
    docs: int
    scale: float


def backward(
    s: Saved, do: torch.Tensor, dfinal: Optional, sp: SequenceParallel | None, want_dg: bool, want_dinitial: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv, dg [B, H, T] fp32, dinitial); the last two empty unless wanted."""
    s.q, s.k, s.v, do = _rows(s.q), _rows(s.k), _rows(s.v), _rows(do)
    p = make_plan(s.q, s.v, s.docs)
    f32: dict[str, Any] = {"device": s.q.device, "dtype": torch.float32}
    gate = _Gate(s.decay, p, s.log_a.numel() > 0)
    dstates = torch.empty(p.B, p.n_seg + 1, p.H, p.K, p.V, **f32)
    in_walk = dfinal if p.packed else None
    zero = p.packed or dfinal is None
    if p.n_chunks:
        _launch_summarize(p, s.q, do, gate, dstates, s.log_a, s.cut, in_walk, s.table, s.scale, True, zero)
    else:
        dstates.zero_()
    if not p.packed and dfinal is not None:
        dstates[:, p.n_seg].copy_(dfinal)
    dq = torch.empty(p.B, p.T, p.H, p.K, device=s.q.device, dtype=s.q.dtype)
    dk, dv = torch.empty_like(dq), torch.empty(p.B, p.T, p.H, p.V, device=s.v.device, dtype=s.v.dtype)
    dg = torch.empty(0, **f32)
    dinitial = torch.zeros(s.docs, p.H, p.K, p.V, **f32) if p.packed and want_dinitial else torch.empty(0, **f32)
    last = _waited_for_by_nobody(sp)
    reads = _launch_dq(p, s, do, gate, dq, want_dg) if p.n_chunks and last else None
    propagate(dstates, s.log_a if gate.gated else None, s.cut if p.packed else None, sp, reverse=True)
    if p.n_chunks:
        if reads is None:
            reads = _launch_dq(p, s, do, gate, dq, want_dg)
        sums = _launch_dkv(p, p.tiles.dk, s, do, gate, dk, dv, dstates, in_walk, dinitial, p.tiles.dv is None, want_dg)
        if p.tiles.dv is not None:
            _launch_dkv(p, p.tiles.dv, s, do, gate, None, dv, dstates, in_walk, dinitial, True, False)
        if want_dg:
            dg = _launch_gate_grad(p, s, gate, reads, *sums, in_walk)
    elif want_dg:
        dg = torch.zeros(p.B, p.H, p.T, **f32)
    if want_dinitial and not p.packed:
        dinitial = dstates[:, 0].clone()
    return dq, dk, dv, dg, dinitial


def _waited_for_by_nobody(sp: SequenceParallel | None) -> bool:
    """True on the end of the backward chain: it may walk dq, which needs no dS, before it waits for its neighbour."""
    return sp is not None and sp.rank == 0 and sp.schedule == "chain" and sp.transport != "process_group"


def _launch_dq(p: Plan, s: Saved, do, gate: _Gate, dq, want_dg: bool) -> torch.Tensor:
    from flexsp.kernels.diagonal.grads import dq_kernel

    tile = p.tiles.dq
    n_k = _count(p.K, tile.bk)
    reads = _sums(p, n_k, tile.parts, want_dg, dq.device)
    in_walk = s.initial if p.packed else None
    args = (
        s.q, s.k, s.v, do, gate.tensor, dq, reads, s.states, s.q if in_walk is None else in_walk, s.table,
        *_strides(s.q), *_strides(s.k), *_strides(s.v), *_strides(do), *gate.strides, *_strides(dq),
        p.T, p.H, p.n_seg, p.n_chunks, p.per_seg, s.scale,
    )  # fmt: skip
    _run(
        dq_kernel, (n_k, p.B * p.H, p.n_seg), args, tile, p,
        DECAY=gate.decay, INITIAL=in_walk is not None, READS=want_dg, PARTS=tile.parts,
        GATED=gate.gated, **_dots(s.q.dtype), ALIKE=_alike(s.q, s.k, s.v, do, dq),
    )  # fmt: skip
    return reads


def _sums(p: Plan, tiles: int, parts: int, wanted: bool, device: torch.device) -> torch.Tensor:
    """Room for the sums that tokens of a chunk leave to the gate gradient."""
    shape = (p.B, p.H, p.n_chunks, tiles, parts, p.tiles.chunk) if wanted else 0
    return torch.empty(shape, device=device, dtype=torch.float32)


def _launch_dkv(
    p: Plan, tile: Tile, s: Saved, do, gate: _Gate, dk: Optional, dv, dstates, dfinal, dinitial, with_dv: bool, dg: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walks dk (unless it is None), dv, or both at once; what the gate gradient needs of it, if `dg`."""
    from flexsp.kernels.diagonal.grads import dkv_kernel

    n = _count(p.K, tile.bk) if dk is not None else _count(p.V, tile.bv)
    pairs, writes = _sums(p, n, tile.parts, dg, dv.device), _sums(p, n, tile.parts, dg, dv.device)
    edges = torch.empty((n, p.B, p.n_seg, p.H) if dg else 0, device=dv.device, dtype=torch.float32)
    to_k = dv if dk is None else dk
    args = (
        s.q, s.k, s.v, do, gate.tensor, to_k, dv, pairs, writes, edges, s.states, dstates,
        s.q if dfinal is None else dfinal, dinitial, s.table,
        *_strides(s.q), *_strides(s.k), *_strides(s.v), *_strides(do), *gate.strides, *_strides(to_k), *_strides(dv),
        p.T, p.H, p.n_seg, p.n_chunks, p.per_seg, s.scale,
    )  # fmt: skip
    _run(
        dkv_kernel, (n, p.B * p.H, p.n_seg), args, tile, p,
        DECAY=gate.decay, FINAL=dfinal is not None, INITIAL=p.packed and with_dv and dinitial.numel() > 0,
        DK=dk is not None, DV=with_dv, DG=dg, PARTS=tile.parts,
        GATED=gate.gated, **_dots(s.q.dtype), ALIKE=_alike(s.q, s.k, s.v, do, to_k, dv),
    )  # fmt: skip
    return pairs, writes, edges


def _launch_gate_grad(p: Plan, s: Saved, gate: _Gate, reads, pairs, writes, edges, dfinal) -> torch.Tensor:
    from flexsp.kernels.diagonal.grads import gate_grad_kernel

    dg = torch.empty(p.B, p.H, p.T, device=reads.device, dtype=torch.float32)
    doc_edges = edges if dfinal is None else (s.final * dfinal).sum((-1, -2))
    args = (
        pairs, reads, writes, edges, doc_edges, gate.tensor, dg, s.table, *gate.strides,
        p.T, p.H, p.n_seg, p.n_chunks, p.per_seg,
    )  # fmt: skip
    constants = {
        "TILES": writes.shape[3], "READ_TILES": reads.shape[3], "PARTS": writes.shape[4], "READ_PARTS": reads.shape[4],
        "C": p.tiles.chunk, "DROP": -14.0 if s.q.dtype == torch.bfloat16 else -30.0,
        "DECAY": gate.decay, "PACKED": p.packed, "FINAL": dfinal is not None,
    }  # fmt: skip
    launch(gate_grad_kernel, (p.B * p.H, p.n_seg), args, constants, {"num_warps": 2})
    return dg
