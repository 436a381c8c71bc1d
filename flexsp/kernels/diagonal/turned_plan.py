"""The launches of gradients of angles: see `flexsp.kernels.diagonal.turned_grads`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flexsp.kernels.diagonal.base_plan import BasePlan
from flexsp.kernels.diagonal.tiles import FEW, Tile
from flexsp.kernels.launch_plan import Buffer, Role, gradient_of
from flexsp.kernels.launch_spec import Launch, LaunchSpec, named

__all__ = ["TurnedRows"]

_F32 = torch.float32
_PAIRS = 32  # of a program
_COLUMNS = 128  # of a tile at most
_PROGRAMS = 128  # of a walk at least, if there are so many segments


@dataclass(frozen=True)
class TurnedRows:
    """Of a plan whose queries and keys were turned by `name` [B, T, G, S].

    Buffers: ``@turn_reads`` and ``@turn_writes`` of walks; else ``@chunk_states`` as they enter the chunks of a piece
    of the tokens, as many as FEW bytes hold, ``@ended`` those behind the last tokens of packed documents,
    ``@turn_edges`` and ``@turn_ends``.

    Attributes:
        in_walks: the walks of dq and dk leave what the gradients of a chunk add up to.
    """

    plan: BasePlan
    name: str
    S: int
    in_walks: bool

    @property
    def _tile(self) -> Tile:
        """Of walks over states, which hold three of them: no wider than registers allow."""
        found = self.plan.tiling.tiles.summarize
        return found if found.bv <= _COLUMNS else replace(found, bv=_COLUMNS)

    @property
    def _tiles(self) -> int:
        """Of columns."""
        return -(-self.plan.tiling.V // self._tile.bv)

    @property
    def _held(self) -> torch.dtype:
        return torch.bfloat16 if self.plan.dtype == torch.bfloat16 else _F32

    @property
    def _segments(self) -> int:
        """Of a piece."""
        p = self.plan.tiling
        a_segment = p.B * p.per_seg * p.H * p.K * p.V * self._held.itemsize
        least = -(-_PROGRAMS // (p.B * p.H * -(-p.K // self._tile.bk) * self._tiles))
        return min(p.n_seg, max(least, FEW // a_segment))

    @property
    def _kept(self) -> int:
        """Chunks of a piece."""
        return self._segments * self.plan.tiling.per_seg

    def buffers(self) -> list[Buffer]:
        plan, p = self.plan, self.plan.tiling
        turns = _F32, (p.B, p.T, p.H // plan.group, self.S)
        rows = self._tiles, p.K
        return [
            Buffer(self.name, Role.INPUT, *turns),
            Buffer(gradient_of(self.name), Role.GRADIENT, *turns),
            Buffer("@chunk_states", Role.SCRATCH, self._held, (p.B, self._kept, p.H, *plan.state)),
            Buffer("@ended", Role.SCRATCH, _F32, (p.n_docs, p.H, *plan.state)),
            Buffer("@turn_edges", Role.SCRATCH, _F32, (p.B, p.H, p.n_chunks + 1, *rows)),
            Buffer("@turn_ends", Role.SCRATCH, _F32, (p.n_docs, p.H, *rows)),
            Buffer("@turn_reads", Role.SCRATCH, _F32, (p.B, p.H, p.n_chunks, self._read_rows)),
            Buffer("@turn_writes", Role.SCRATCH, _F32, (p.B, p.H, p.n_chunks, self._written_rows)),
        ]

    @property
    def _read_rows(self) -> int:
        dq = self.plan.tiling.tiles.dq
        return -(-self.plan.tiling.K // dq.bk) * dq.bk

    @property
    def _written_rows(self) -> int:
        dk = self.plan.tiling.tiles.dk
        return -(-self.plan.tiling.K // dk.bk) * dk.bk

    def gradients(self, last: str | None) -> list[LaunchSpec]:
        """After those of q and k, from which it is made; `last` as in `LaunchPlan.gradients`."""
        if self.in_walks:
            return [self._of_tokens(None)]
        launches = [x for first in range(0, self.plan.n_seg, self._segments) for x in self._edges(first, last)]
        return [*launches, self._of_tokens(last)]

    def _edges(self, first: int, last: str | None) -> list[LaunchSpec]:
        """Of the piece that begins at segment `first`."""
        plan, p, tile = self.plan, self.plan.tiling, self._tile
        initial = plan.in_walk("@initial" if plan.initial else None)
        final, ends = (None, None) if last is None else ("@ended", "@turn_ends")
        states = plan.chunk_states(
            tile, "k", "v", "@states", "@chunk_states", initial, final, self._kept, first, reverse=False
        )
        edges = plan.walk(
            "turn_edges_kernel", tile, -(-p.K // tile.bk) * self._tiles,
            ["q", "do", plan.gates, "@chunk_states", "@states", "@dstates", last, final, "@turn_edges", ends],
            named("@turn_edges", ends), ["q", "do", *plan.gate_strides, first, self._kept], FINAL=last is not None,
            HALVES=self._halves, GROUP=plan.group,
        )  # fmt: skip
        return [states, replace(edges, grid=states.grid)]

    def _of_tokens(self, last: str | None) -> LaunchSpec:
        plan, p, to = self.plan, self.plan.tiling, gradient_of(self.name)
        ends = "@turn_edges" if last is None else "@turn_ends"
        edges = "@turn_edges"
        if self.in_walks:
            edges, ends = "@turn_reads", "@turn_writes"
        constants = {
            "IN_WALKS": self.in_walks, "READ_ROWS": self._read_rows, "WRITTEN_ROWS": self._written_rows,
            "K": p.K, "S": self.S, "BP": _PAIRS, "C": p.chunk, "TILES": self._tiles, "GROUP": plan.group,
            "HALVES": self._halves, "FINAL": last is not None,
        }  # fmt: skip
        return plan.launch(
            "turned_grad_kernel", Launch(0, 4, 1), (p.n_chunks, p.B * p.H // plan.group, -(-self.S // _PAIRS)),
            ["q", "k", "d_q", "d_k", edges, ends, to], [to], ["q", "k", p.T, p.H, p.n_chunks], constants,
        )  # fmt: skip

    @property
    def _halves(self) -> bool:
        return self.name == "turned_halves"
