"""Host side of the Triton kernels: summarize -> propagate -> output, and the same backward.

What a call does is worked out once for its signature: how its tensors lie, and what is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flexsp.comm.transport import in_kernel
from flexsp.kernels.diagonal.plan import Plan, decay_dtype, make_plan
from flexsp.kernels.diagonal.tiles import Tile
from flexsp.kernels.primitives import dots
from flexsp.kernels.table import chunk_table
from flexsp.runtime.kept import keep
from flexsp.runtime.launch import KernelLaunch
from flexsp.runtime.steps import Frame, Step, Workspace, copy, run_steps
from flexsp.scan.step import propagate_step

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel

Optional = torch.Tensor | None
Tensors = dict[str, torch.Tensor]
_F32 = torch.float32
_CALLS = 256  # signatures that are kept


@dataclass(frozen=True)
class _Call:
    """The steps of calls of one signature, and their scratch buffers."""

    plan: Plan
    steps: list[Step]
    workspace: Workspace

    def run(self, tensors: Tensors, device: torch.device) -> None:
        workspaces = []
        if self.workspace.nbytes:
            workspaces.append((self.workspace, torch.empty(self.workspace.nbytes, dtype=torch.uint8, device=device)))
        run_steps(self.steps, Frame(tensors, workspaces), device)


_calls: dict[Any, _Call] = {}


def _remembered(asked: tuple[Any, ...], p: Plan, given: Tensors, make: Callable[[], _Call]) -> _Call:
    """The call that was made for tensors that lie like these. Plans count by identity: what is kept holds its own."""
    looks = [(name, x.dtype, x.stride(), x.data_ptr() % 16 == 0) for name, x in given.items()]
    key = (id(p), given["q"].device, *asked, *looks)
    found = _calls.get(key)
    if found is None:
        found = make()
        keep(_calls, key, found, _CALLS)
    return found


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Kernels step through the last axis one element at a time; other strides are free."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _count(n: int, block: int) -> int:
    return -(-n // block)


class _Launches:
    """Launches of one call. `tensors` by name are there for their strides; `workspace` has what is
    scratch memory alone.

    A pointer that a kernel does not use is that of q.
    """

    def __init__(self, p: Plan, tensors: Tensors, scale: float) -> None:
        from flexsp.kernels import primitives

        self.p, self.tensors, self.scale = p, tensors, scale
        self.gated = tensors["log_a"].numel() > 0
        self.decay = primitives.decay_scalar if self.gated else primitives.decay_none
        row = p.n_chunks * p.tiles.chunk
        self.gate_strides = (p.H * row, row) if self.gated else (0, 0)
        self.workspace = Workspace()

    def strides(self, *names: str) -> list[int]:
        return [n for name in names for n in self.tensors[name].stride()[:3]]

    def alike(self, *names: str) -> bool:
        """Whether one token stride serves all: the kernels then share their offsets, which saves them registers."""
        return len({self.tensors[name].stride(1) for name in names}) == 1

    def or_q(self, name: str | None) -> str:
        return "q" if name is None else name

    def walk(
        self, kernel: Any, tile: Tile, programs: int, pointers: list[str | None], numbers: list[int], **constants: Any
    ) -> KernelLaunch:
        """A walk with its tile; `constants` are its own, those of every walk are added here."""
        p = self.p
        constants |= {"K": p.K, "V": p.V, "BK": tile.bk, "BV": tile.bv, "C": p.tiles.chunk, "PACKED": p.packed}
        constants |= {"DECAY": self.decay, "GATED": self.gated, **dots(self.tensors["q"].dtype)}
        cut: list[Any] = [p.T, p.H, p.n_seg, p.n_chunks, p.per_seg, self.scale]
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        return KernelLaunch(kernel, (programs, p.B * p.H, p.n_seg), pointers, [*numbers, *cut], constants, options)

    def gates(self) -> KernelLaunch:
        """Cumulative log2 decay of the chunks."""
        from flexsp.kernels.primitives import gate_kernel

        p = self.p
        constants = {"C": p.tiles.chunk, "PACKED": p.packed}
        numbers = [*self.strides("g"), p.T, p.H]
        pointers = ["g", "decay", "table"]
        return KernelLaunch(gate_kernel, (p.n_chunks, p.B * p.H, 1), pointers, numbers, constants, {"num_warps": 2})

    def summarize(self, x: str, y: str, states: str, boundary: str | None, reverse: bool, zero: bool) -> KernelLaunch:
        from flexsp.kernels.diagonal.summarize import summarize_kernel

        tile = self.p.tiles.summarize
        return self.walk(
            summarize_kernel, tile, _count(self.p.K, tile.bk) * _count(self.p.V, tile.bv),
            [x, y, "decay", states, "log_a", "cut", x if boundary is None else boundary, "table"],
            [*self.strides(x, y), *self.gate_strides],
            REVERSE=reverse, BOUNDARY=boundary is not None, ZERO=zero,
        )  # fmt: skip

    def output(self, initial: str | None, final: bool) -> KernelLaunch:
        from flexsp.kernels.diagonal.output import output_kernel

        tile = self.p.tiles.output
        return self.walk(
            output_kernel, tile, _count(self.p.V, tile.bv),
            ["q", "k", "v", "decay", "o", "states", self.or_q(initial), "final", "table"],
            [*self.strides("q", "k", "v"), *self.gate_strides, *self.strides("o")],
            INITIAL=initial is not None, FINAL=final, ALIKE=self.alike("q", "k", "v", "o"),
        )  # fmt: skip

    def sums(self, name: str, tiles: int, parts: int, wanted: bool) -> str:
        """Memory for the sums that tokens of a chunk leave to the gate gradient."""
        p = self.p
        shape = (p.B, p.H, p.n_chunks, tiles, parts, p.tiles.chunk) if wanted else (0,)
        return self.workspace.add(name, _F32, *shape)

    def dq(self, initial: str | None, want_dg: bool) -> KernelLaunch:
        from flexsp.kernels.diagonal.grads import dq_kernel

        tile = self.p.tiles.dq
        n = _count(self.p.K, tile.bk)
        reads = self.sums("reads", n, tile.parts, want_dg)
        return self.walk(
            dq_kernel, tile, n,
            ["q", "k", "v", "do", "decay", "dq", reads, "states", self.or_q(initial), "table"],
            [*self.strides("q", "k", "v", "do"), *self.gate_strides, *self.strides("dq")],
            INITIAL=initial is not None, READS=want_dg, PARTS=tile.parts, ALIKE=self.alike("q", "k", "v", "do", "dq"),
        )  # fmt: skip

    def dkv(self, tile: Tile, dfinal: str | None, with_dk: bool, with_dv: bool, dg: bool) -> KernelLaunch:
        """Walks dk, dv, or both at once; leaves what the gate gradient needs of it, if `dg`."""
        from flexsp.kernels.diagonal.grads import dkv_kernel

        p = self.p
        n = self._dkv_tiles(tile, with_dk)
        sums = [self.sums(name if with_dk else "nothing", n, tile.parts, dg) for name in ("pairs", "writes")]
        edges = self.workspace.add("edges" if with_dk else "nothing", _F32, *((n, p.B, p.n_seg, p.H) if dg else (0,)))
        to_k = "dk" if with_dk else "dv"
        return self.walk(
            dkv_kernel, tile, n,
            ["q", "k", "v", "do", "decay", to_k, "dv", *sums, edges, "states", "dstates", self.or_q(dfinal),
             "dinitial", "table"],
            [*self.strides("q", "k", "v", "do"), *self.gate_strides, *self.strides(to_k, "dv")],
            FINAL=dfinal is not None, INITIAL=p.packed and with_dv and self.tensors["dinitial"].numel() > 0,
            DK=with_dk, DV=with_dv, DG=dg, PARTS=tile.parts, ALIKE=self.alike("q", "k", "v", "do", to_k, "dv"),
        )  # fmt: skip

    def _dkv_tiles(self, tile: Tile, with_dk: bool) -> int:
        return _count(self.p.K, tile.bk) if with_dk else _count(self.p.V, tile.bv)

    def gate_grad(self, dfinal: str | None) -> list[Step]:
        from flexsp.kernels.diagonal.grads import gate_grad_kernel

        p = self.p
        steps: list[Step] = []
        doc_edges = "edges"
        if dfinal is not None:
            doc_edges = self.workspace.add("doc_edges", _F32, p.docs, p.H)
            steps.append(lambda frame: _document_edges(frame["final"], frame["dfinal"], frame["doc_edges"]))
        dq, dk = p.tiles.dq, p.tiles.dk
        constants = {
            "TILES": self._dkv_tiles(dk, True), "READ_TILES": _count(p.K, dq.bk), "PARTS": dk.parts,
            "READ_PARTS": dq.parts, "C": p.tiles.chunk,
            "DROP": -14.0 if self.tensors["q"].dtype == torch.bfloat16 else -30.0,
            "DECAY": self.decay, "PACKED": p.packed, "FINAL": dfinal is not None,
        }  # fmt: skip
        pointers = ["pairs", "reads", "writes", "edges", doc_edges, "decay", "dg", "table"]
        numbers = [*self.gate_strides, p.T, p.H, p.n_seg, p.n_chunks, p.per_seg]
        grid = (p.B * p.H, p.n_seg, 1)
        return [*steps, KernelLaunch(gate_grad_kernel, grid, pointers, numbers, constants, {"num_warps": 2})]

    def propagate(self, states: str, reverse: bool, sp_id: int, call: str) -> Step:
        p = self.p
        log_a, kind = ("log_a", "scalar") if self.gated else (None, "none")
        shape = p.B, p.n_seg, p.H, p.K, p.V
        return propagate_step(states, log_a, "cut" if p.packed else None, shape, kind, reverse, sp_id, call)


def _document_edges(final: torch.Tensor, dfinal: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_((final * dfinal).sum((-1, -2)))


def _chained(sp: SequenceParallel | None) -> int:
    """The group that states travel over; -1 on one rank."""
    return -1 if sp is None or sp.world_size == 1 else sp.id


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
    call: str = "",
) -> tuple[torch.Tensor, ...]:
    """(o, final, states, log_a, cut, table, cumulative log2 decay); what does not apply comes back empty.

    ``call``: what ranks compare of the call, besides the states that they exchange.
    """
    q, k, v = _rows(q), _rows(k), _rows(v)
    docs = 0 if cu_seqlens is None else cu_seqlens.numel() - 1
    p = make_plan(q, v, docs)
    if g_gamma is not None:
        g = g_gamma.expand(p.B, p.T, p.H)
    f32: dict[str, Any] = {"device": q.device, "dtype": _F32}
    given = {"q": q, "k": k, "v": v, "table": _table(cu_seqlens, p, sp, q.device)}
    given |= {name: x for name, x in (("g", g), ("initial", initial)) if x is not None}
    row = p.n_chunks * p.tiles.chunk
    tensors = given | {
        "o": torch.empty(p.B, p.T, p.H, p.V, device=q.device, dtype=v.dtype),
        "final": torch.zeros(docs, p.H, p.K, p.V, **f32) if p.packed and want_final else torch.empty(0, **f32),
        "states": torch.empty(p.B, p.n_seg + 1, p.H, p.K, p.V, **f32),
        "log_a": torch.empty(0 if g is None else (p.B, p.n_seg, p.H), **f32),
        "cut": torch.empty((p.B, p.n_seg) if p.packed else 0, device=q.device, dtype=torch.int32),
        "decay": torch.empty(0 if g is None else (p.B, p.H, row), device=q.device, dtype=decay_dtype(q.dtype)),
    }
    group = _chained(sp)
    found = _remembered(
        ("forward", scale, want_final, group, call), p, given,
        lambda: _forward_call(p, tensors, scale, want_final, group, call),
    )  # fmt: skip
    found.run(tensors, q.device)
    if want_final and not p.packed:
        tensors["final"] = tensors["states"][:, p.n_seg].clone()
    return tuple(tensors[name] for name in ("o", "final", "states", "log_a", "cut", "table", "decay"))


def _forward_call(p: Plan, tensors: Tensors, scale: float, want_final: bool, group: int, call: str) -> _Call:
    make, steps = _Launches(p, tensors, scale), list[Step]()
    given = "initial" in tensors
    in_walk = "initial" if p.packed and given else None
    if p.n_chunks:
        if make.gated:
            steps.append(make.gates())
        steps.append(make.summarize("k", "v", "states", in_walk, False, p.packed or not given))
    else:
        steps.append(lambda frame: _zero(frame["states"], frame["log_a"]))
    if given and not p.packed:
        steps.append(lambda frame: copy(frame["states"][:, 0], frame["initial"]))
    steps.append(make.propagate("states", False, group, call))
    if p.n_chunks:
        steps.append(make.output(in_walk, p.packed and want_final))
    return _Call(p, steps, make.workspace)


def _zero(*tensors: torch.Tensor) -> None:
    for x in tensors:
        x.zero_()


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
    s: Saved, do: torch.Tensor, dfinal: Optional, sp: SequenceParallel | None, want_dg: bool, want_dinitial: bool,
    call: str = "",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv, dg [B, H, T] fp32, dinitial); the last two empty unless wanted."""
    s.q, s.k, s.v, do = _rows(s.q), _rows(s.k), _rows(s.v), _rows(do)
    p = make_plan(s.q, s.v, s.docs)
    f32: dict[str, Any] = {"device": s.q.device, "dtype": _F32}
    given = {
        "q": s.q, "k": s.k, "v": s.v, "do": do, "states": s.states, "log_a": s.log_a, "cut": s.cut, "table": s.table,
        "decay": s.decay, "final": s.final,
    }  # fmt: skip
    given |= {name: x for name, x in (("initial", s.initial), ("dfinal", dfinal)) if x is not None}
    dq = torch.empty(p.B, p.T, p.H, p.K, device=s.q.device, dtype=s.q.dtype)
    fill = torch.zeros if p.packed else torch.empty  # rows of documents that begin elsewhere stay 0
    tensors = given | {
        "dq": dq, "dk": torch.empty_like(dq),
        "dv": torch.empty(p.B, p.T, p.H, p.V, device=s.v.device, dtype=s.v.dtype),
        "dg": torch.empty((p.B, p.H, p.T) if want_dg else 0, **f32),
        "dinitial": fill((s.docs or p.B, p.H, p.K, p.V) if want_dinitial else 0, **f32),
    }  # fmt: skip
    group, early = _chained(sp), _waited_for_by_nobody(sp)
    found = _remembered(
        ("backward", s.scale, want_dg, want_dinitial, group, early, call), p, given,
        lambda: _backward_call(p, tensors, s.scale, want_dg, want_dinitial, group, early, call),
    )  # fmt: skip
    found.run(tensors, s.q.device)
    return tensors["dq"], tensors["dk"], tensors["dv"], tensors["dg"], tensors["dinitial"]


def _backward_call(
    p: Plan, tensors: Tensors, scale: float, want_dg: bool, want_dinitial: bool, group: int, early: bool, call: str
) -> _Call:
    """`early`: dq is walked before the states come in."""
    make, steps = _Launches(p, tensors, scale), list[Step]()
    make.workspace.add("dstates", _F32, p.B, p.n_seg + 1, p.H, p.K, p.V)
    given = "dfinal" in tensors
    in_walk = "dfinal" if p.packed and given else None
    initial = "initial" if p.packed and "initial" in tensors else None
    if p.n_chunks:
        steps.append(make.summarize("q", "do", "dstates", in_walk, True, p.packed or not given))
    else:
        steps.append(lambda frame: _zero(frame["dstates"], frame["dg"]))
    if given and not p.packed:
        steps.append(lambda frame: copy(frame["dstates"][:, p.n_seg], frame["dfinal"]))
    dq = [make.dq(initial, want_dg)] if p.n_chunks else []
    propagate = make.propagate("dstates", True, group, call)
    steps += [*dq, propagate] if early else [propagate, *dq]
    if p.n_chunks:
        steps.append(make.dkv(p.tiles.dk, in_walk, True, p.tiles.dv is None, want_dg))
        if p.tiles.dv is not None:
            steps.append(make.dkv(p.tiles.dv, in_walk, False, True, False))
        if want_dg:
            steps += make.gate_grad(in_walk)
    if want_dinitial and not p.packed:
        steps.append(lambda frame: copy(frame["dinitial"], frame["dstates"][:, 0]))
    return _Call(p, steps, make.workspace)


def _waited_for_by_nobody(sp: SequenceParallel | None) -> bool:
    """True on the end of the backward chain: it may walk dq, which needs no dS, before it waits for its neighbour."""
    return sp is not None and sp.rank == 0 and in_kernel(sp)
