"""The launches of gradients that take a chunk each: see `flexsp.kernels.diagonal.shared_grads`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from flexsp.kernels.diagonal.base_plan import BasePlan
from flexsp.kernels.diagonal.tiles import SharedTiles, Tile
from flexsp.kernels.launch_plan import Buffer, Role
from flexsp.kernels.launch_spec import Launch, LaunchSpec, named

__all__ = ["SharedGradients"]

_F32 = torch.float32


@dataclass(frozen=True)
class SharedGradients:
    """Buffers and launches of a plan's backward pass, which takes pieces of the tokens one after the other.

    Buffers: ``@entering`` and ``@leaving``, states and their gradients at the edges of a piece's chunks; ``@dq_blocks``
    and ``@dk_blocks`` of blocks of heads, where there is more than one; the rest is for gates and skips.
    """

    plan: BasePlan
    tiles: SharedTiles

    @property
    def _groups(self) -> int:
        return self.plan.H // self.plan.group

    @property
    def _heads(self) -> int:
        """Heads that a program goes through: as many as leave `programs` of them."""
        chunks = self.plan.B * self._groups * min(self.plan.n_chunks, self._kept)
        blocks = min(self.plan.group, -(-self.tiles.programs // max(1, chunks)))
        return -(-self.plan.group // blocks)

    @property
    def _blocks(self) -> int:
        return -(-self.plan.group // self._heads)

    @property
    def _segments(self) -> int:
        """Of a piece."""
        return -(-self.plan.n_seg // self.plan.tiling.pieces)

    @property
    def _kept(self) -> int:
        """Chunks of a piece."""
        return self._segments * self.plan.tiling.per_seg

    @property
    def _key_tiles(self) -> int:
        return -(-self.plan.tiling.K // self.tiles.keys.bk)

    def _parts(self, tile: Tile) -> int:
        """Warp groups between which products of a chunk's rows split the columns; a state of one has no products."""
        return 1 if self.plan.tiling.V == 1 else max(1, 16 * tile.warps // self.plan.chunk)

    def buffers(self) -> list[Buffer]:
        plan, C, K = self.plan, self.plan.chunk, self.plan.tiling.K
        of_chunk = plan.B, plan.H, plan.n_chunks
        held = torch.bfloat16 if plan.dtype == torch.bfloat16 and plan.tiling.V > 1 else _F32
        edges = held, (plan.B, self._kept, plan.H, *plan.state)
        of_blocks = _F32, (plan.B, plan.T, self._groups * self._blocks, K)
        scratch = {
            "@entering": edges, "@leaving": edges, "@dq_blocks": of_blocks, "@dk_blocks": of_blocks,
            "@dscores": (plan.dtype, (plan.B, self._kept, self._groups, self._blocks, C, C)),
            "@sums": (_F32, (*of_chunk, C, self._parts(self.tiles.values), 4)),
            "@reads": (_F32, (*of_chunk, self._key_tiles, C, self._parts(self.tiles.keys))),
            "@passes": (_F32, (*of_chunk, self._key_tiles)),
            "@writes": (_F32, (*of_chunk, C)), "@of_skip": (_F32, (*of_chunk, C)),
        }  # fmt: skip
        return [Buffer(name, Role.SCRATCH, *layout) for name, layout in scratch.items()]

    def entering(self, first: int = 0) -> LaunchSpec:
        """States as they enter the chunks of the piece that begins at segment `first`. They need nothing of the
        backward pass."""
        initial = self.plan.in_walk("@initial" if self.plan.initial else None)
        return self._states(first, "k", "v", "@states", "@entering", initial, None, reverse=False)

    def gradients(self, last: str | None, to: str | None, wanted: Collection[str]) -> list[LaunchSpec]:
        """All but those of gates and parameters, of which they leave parts. Expects that of the first piece the states
        are there."""
        dq, dk = ("d_q", "d_k") if self._blocks == 1 else ("@dq_blocks", "@dk_blocks")
        launches = []
        for first in range(0, self.plan.n_seg, self._segments):
            launches += [self.entering(first)] if first else []
            launches.append(self._states(first, "q", "do", "@dstates", "@leaving", last, to, reverse=True))
            launches += self._chunks(first, dq, dk, wanted)
        if self._blocks > 1:
            rows = self._groups * self._blocks
            launches += [self.plan.sum_rows(x, y, rows, self._blocks) for x, y in ((dq, "d_q"), (dk, "d_k"))]
        return launches

    def _states(
        self, first: int, x: str, y: str, states: str, edges: str, boundary: str | None, left: str | None, *,
        reverse: bool,
    ) -> LaunchSpec:  # fmt: skip
        tile = self.tiles.states
        return self.plan.chunk_states(tile, x, y, states, edges, boundary, left, self._kept, first, reverse=reverse)

    def _chunks(self, first: int, dq: str, dk: str, wanted: Collection[str]) -> list[LaunchSpec]:
        plan, tiles = self.plan, self.tiles
        dsums = plan.of_sums(wanted)
        sums, reads = ["@sums"] if dsums else [None], ["@reads", "@passes"] if dsums else [None, None]
        values = self._over_heads(
            "shared_values_kernel", tiles.values, 1, first,
            ["q", "k", "v", "do", plan.gates, plan.writing, plan.skip, "@leaving", "d_v", "@dscores", *sums],
            named("d_v", "@dscores", *sums), plan.strides("d_v"), SUMS=dsums, SKIP=plan.skip is not None,
            STRICT=plan.strict,
        )  # fmt: skip
        keys = self._over_heads(
            "shared_keys_kernel", tiles.keys, self._key_tiles, first,
            ["q", "k", "v", "do", plan.gates, plan.writing, "@entering", "@leaving", "@dscores", dq, dk, *reads],
            named(dq, dk, *reads), (), SUMS=dsums,
        )  # fmt: skip
        return [values, keys]

    def _over_heads(
        self, kind: str, tile: Tile, programs: int, first: int, pointers: list[str | None], writes: tuple[str, ...],
        strides: tuple[int, ...], **constants: Any,
    ) -> LaunchSpec:  # fmt: skip
        plan, p = self.plan, self.plan.tiling
        first_chunk = first * p.per_seg
        constants |= {"K": p.K, "V": p.V, "BK": tile.bk, "BV": tile.bv, "C": p.chunk, "PARTS": self._parts(tile)}
        constants |= {"GATED": plan.gate is not None, "STEPS": plan.writing is not None, "GROUP": plan.group}
        grid = programs * min(self._kept, p.n_chunks - first_chunk), self._blocks, p.B * self._groups
        cut = first_chunk, p.T, p.H, p.n_chunks, self._kept, self._heads
        return plan.launch(
            kind, Launch(tile.bv, tile.warps, tile.stages), grid, pointers, writes,
            ["q", "k", "v", "do", *plan.gate_strides, *strides, *cut, plan.scale], constants | plan.dots,
        )  # fmt: skip

    def gate_grad(self, to: str, *, steps: bool, skip: bool) -> LaunchSpec:
        """Gradients of log gates; what gradients of steps and of skips are made of."""
        plan, p = self.plan, self.plan.tiling
        of_steps, of_skip = "@writes" if steps else None, "@of_skip" if skip else None
        return plan.small(
            "chunk_gate_grad_kernel", (p.n_chunks, p.B * p.H, 1), ["@sums", "@reads", "@passes", to, of_steps, of_skip],
            named(to, of_steps, of_skip), (p.T, p.H), PARTS=self._parts(self.tiles.values),
            READ_PARTS=self._parts(self.tiles.keys), TILES=self._key_tiles, C=p.chunk, STEPS=steps, SKIP=skip,
        )  # fmt: skip
