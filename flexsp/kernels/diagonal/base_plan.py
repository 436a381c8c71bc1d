"""What the launches of one call of the diagonal engine have in common: its sizes, strides, gates and walks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from flexsp.kernels import primitives
from flexsp.kernels.diagonal.tiles import Tile
from flexsp.kernels.diagonal.tiling import Tiling
from flexsp.kernels.launch_plan import SegmentedPlan
from flexsp.kernels.launch_spec import Launch, LaunchSpec, SameTokenStride, named

__all__ = ["BasePlan"]


@dataclass(frozen=True)
class BasePlan(SegmentedPlan):
    """A call of the diagonal engine, without its launches.

    Attributes:
        dtype: of q and k, and of what products multiply.
        gate: "g", the input with a number a token that the state decays by, or the name of one with a number a head;
            None where it does not decay.
        dq_first: dq is walked before the gradients of states come in.
        values: the type of v and of the outputs; None for `dtype`.
        key_heads: heads of q and k, each of which some heads of v share; None for one each.
        neighbours: as in `SegmentedPlan`.
        strict: tokens read what those before them write, and nothing of their own.
    """

    tiling: Tiling
    dtype: torch.dtype
    gate: str | None
    scale: float
    initial: bool
    returns_final: bool
    dq_first: bool
    description: str
    values: torch.dtype | None = None
    key_heads: int | None = None
    neighbours: tuple[bool, bool] = (True, True)
    strict: bool = False
    writing: ClassVar[str | None] = None  # the gates of keys, where these have their own: see `gate_kernel`
    skip: ClassVar[str | None] = None  # the input of weights of v in the outputs: of heads, or "w" of tokens

    @property
    def state(self) -> tuple[int, ...]:
        return self.tiling.K, self.tiling.V

    @property
    def scan_shape(self) -> tuple[str, tuple[int, int, int, int, int]]:
        kind = "none" if self.gate is None else "scalar"
        return kind, (self.B, self.n_seg, self.H, self.tiling.K, self.tiling.V)

    @property
    def group(self) -> int:
        """Heads of v that share one of q and of k."""
        return 1 if self.key_heads is None else self.H // self.key_heads

    @property
    def _row(self) -> int:
        """Rows of all chunks."""
        return self.n_chunks * self.chunk

    def of_gate(self, wanted: Collection[str]) -> bool:
        """Whether gradients of the gates are needed."""
        return self.gate in wanted

    def of_sums(self, wanted: Collection[str]) -> bool:
        """Whether gradients are needed that are made of what tokens leave to them."""
        return self.of_gate(wanted)

    @property
    def gates(self) -> str | None:
        return None if self.gate is None else "@gates"

    @property
    def gate_strides(self) -> tuple[int, int]:
        return (0, 0) if self.gate is None else (self.H * self._row, self._row)

    @property
    def skip_strides(self) -> tuple[int | str, ...]:
        """Of weights of tokens. Those of heads need none: kernels have no parameters for numbers that are 1."""
        return ("w",) if self.skip == "w" else (1, 1, 1)

    def _row_of(self, name: str) -> int:
        """Numbers of a token of all heads."""
        _, _, H, N = self.buffers[name].shape
        return H * N

    def strides(self, *outputs: str) -> tuple[int, ...]:
        """Of contiguous outputs."""
        rows = [(self._row_of(name), self.buffers[name].shape[-1]) for name in outputs]
        return tuple([n for row, width in rows for n in (self.T * row, row, width)])

    def _alike(self, inputs: Sequence[str], *outputs: str) -> SameTokenStride:
        return SameTokenStride(tuple(inputs), tuple(map(self._row_of, outputs)))

    @property
    def dots(self) -> dict[str, Any]:
        return primitives.dots(self.dtype)

    def walk(
        self, kind: str, tile: Tile, programs: int, pointers: Sequence[str | None], writes: Sequence[str],
        numbers: Sequence[int | str], reads: Sequence[str] | None = None, **constants: Any,
    ) -> LaunchSpec:  # fmt: skip
        """A walk with its tile; `constants` are its own, those of every walk are added here."""
        p, gated = self.tiling, self.gate is not None
        constants |= {"K": p.K, "V": p.V, "BK": tile.bk, "BV": tile.bv, "C": p.chunk}
        constants |= {"DECAY": primitives.decay_scalar if gated else primitives.decay_none, "GATED": gated}
        cut = (p.T, p.H, p.n_seg, p.n_chunks, p.per_seg, self.scale)
        return self.launch(
            kind, Launch(tile.bv, tile.warps, tile.stages), (programs, p.B * p.H, p.n_seg), pointers, writes,
            (*numbers, *cut), constants | self.dots, reads=reads,
        )  # fmt: skip

    def chunk_states(
        self, tile: Tile, x: str, y: str, states: str, edges: str, boundary: str | None, left: str | None, kept: int,
        first: int = 0, *, reverse: bool,
    ) -> LaunchSpec:  # fmt: skip
        """The states at the edges of chunks, of `kept` chunks of the segments from `first` on."""
        p, writing = self.tiling, None if reverse else self.writing
        walk = self.walk(
            "chunk_states_kernel", tile, -(-p.K // tile.bk) * -(-p.V // tile.bv),
            [x, y, self.gates, writing, states, edges, boundary, left], named(edges, left),
            [x, y, *self.gate_strides, first, kept], REVERSE=reverse, BOUNDARY=boundary is not None,
            LEFT=left is not None, STEPS=writing is not None, GROUP=self.group,
        )  # fmt: skip
        return replace(walk, grid=(*walk.grid[:2], min(-(-kept // p.per_seg), p.n_seg - first)))

    def small(
        self, kind: str, grid: tuple[int, ...], pointers: Sequence[str | None], to: Sequence[str],
        numbers: Sequence[int | float | str], **constants: Any,
    ) -> LaunchSpec:  # fmt: skip
        """A kernel without products, which takes the number of stages that Triton gives it."""
        how = Launch(0, 2, 1)
        spec = self.launch(kind, how, grid, pointers, to, numbers, constants)
        return replace(spec, options={"num_warps": how.warps})

    def sum_rows(self, x: str, to: str, H: int, group: int) -> LaunchSpec:
        """Sums over every `group` of H rows that a token has in x."""
        rows, width = self.B * self.T, self.buffers[x].shape[-1]
        block = max(16, 1 << (width - 1).bit_length())
        take = max(1, 2048 // block)
        return self.small(
            "sum_heads_kernel", (-(-rows // take), H // group, 1), [x, to], [to], (rows, H), N=width, BN=block,
            GROUP=group, ROWS=take,
        )  # fmt: skip
