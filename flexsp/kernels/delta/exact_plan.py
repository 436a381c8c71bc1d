"""The launches of `exact` and `exact_grads`, behind those whose results they replace."""

from __future__ import annotations

from typing import Any

from flexsp.kernels.delta import exact, exact_grads
from flexsp.kernels.delta.base_plan import BasePlan
from flexsp.kernels.delta.tiling import Part
from flexsp.kernels.launch_plan import LaunchPlan
from flexsp.kernels.launch_spec import Launch, LaunchSpec, named

__all__ = ["ExactPlan", "choose"]

_COLS = 8  # of the state, in one warp
_WARP = Launch(_COLS, 1, 1)


def choose(call: LaunchPlan) -> LaunchSpec:
    """Which segments are done token by token, of a call that `rounds`."""
    p, n_docs = call.tiling, call.n_docs
    pointers = "@gain", "@exact", "@table" if n_docs else "@exact"
    constants = {"C": p.chunk, "PACKED": n_docs > 0}
    return LaunchSpec(
        "choose", _WARP, (call.B * call.H, p.n_seg, 1), pointers, ("@gain",), ("@exact",),
        (call.T, p.n_chunks, p.per_seg), constants, _WARP.options, kernel=exact.choose,
    )  # fmt: skip


class ExactPlan(BasePlan):
    """The part of a call's plan that does segments again, token by token."""

    def _exact_walk(
        self, kernel: Any, inputs: list[str | None], pointers: list[str | None], writes: tuple[str, ...], panels: int,
        part: Part | None, **flags: Any,
    ) -> list[LaunchSpec]:  # fmt: skip
        """Of the segments of a part, or of all."""
        if not self.rounds:
            return []
        n_seg, before = (self.n_seg, 0) if part is None else part[:2]
        return [self.kernel_launch(
            kernel.__name__, _WARP, (panels, self.B * self.H, n_seg), [*inputs, "@exact", *pointers], writes, inputs,
            kernel=kernel, counts={"before": before}, NORM=self.norms is not None, **flags,
        )]  # fmt: skip

    def exact_forward(
        self, kind: str, given: str | None, part: Part | None = None, final: str | None = None
    ) -> list[LaunchSpec]:
        """As the walk of this kind: "summarize", "output" or "states"."""
        p, sums, reads = self.tiling, kind == "summarize", kind == "output"
        nonzero = self.transition_nonzero if sums else None
        made: list[str | None] = ["o" if reads else None, "@entering" if kind == "chunk_states" else None]
        made += [self.segment_states, "@A" if sums else None, nonzero]
        writes = {
            "summarize": ("@states", "@A", *named(nonzero)), "output": ("o", *named(final)),
            "chunk_states": ("@entering",),
        }  # fmt: skip
        panels = -(-p.V // _COLS) + (-(-p.K // _COLS) if sums else 0)
        return self._exact_walk(
            exact.exact_forward, ["q", "k", "v", self.beta, self.gate], [*made, given, final], writes[kind], panels,
            part, READS=reads, KEEPS=kind == "chunk_states", SUMS=sums, NONZERO=nonzero is not None,
            ENTERS=p.scanned and not sums, BOUNDARY=given is not None, LEAVES=final is not None,
        )  # fmt: skip

    def exact_backward(
        self, kind: str, after: str | None, to: str | None = None, part: Part | None = None
    ) -> list[LaunchSpec]:
        """As the walk of this kind: "summarize_backward" or "output_backward"."""
        p, sums = self.tiling, kind == "summarize_backward"
        pointers = [None if sums else "@leaving", self.segment_gradients, after, to]
        writes = ("@dstates",) if sums else ("@leaving", *named(to))
        return self._exact_walk(
            exact.exact_backward, ["q", "k", self.beta, self.gate, "do"], pointers, writes, -(-p.V // _COLS), part,
            SUMS=sums, ENTERS=p.scanned and not sums, BOUNDARY=after is not None, LEAVES=to is not None,
        )  # fmt: skip

    def exact_gradients(self, part: Part, to_beta: str, to_gate: str | None, tiles: int) -> list[LaunchSpec]:
        """Of the chunks of a part; dbeta [tiles, ..], or parts with so many tiles."""
        if not self.rounds:
            return []
        cols, inputs = self._exact_columns, ["q", "k", "v", self.beta, self.gate, "do"]
        groups = -(-part.chunks // int(exact.GROUP_OF_CHUNKS.value)) * self.B * self.H
        made = [*self.to_keys, "d_v", to_beta, to_gate]
        return [self.kernel_launch(
            "exact_grads", Launch(cols, max(4, self.tiling.key_block * cols // 2048), 1),
            (min(groups, self._exact_programs), 1, 1),
            [*inputs, "@exact", "@entering", "@leaving", "@scratch", *made], [*named(*made), "@scratch"], inputs,
            kernel=exact_grads.exact_grads, TILES=tiles, NORM=self.norms is not None,
            counts={"before": part.chunks_before, "count": part.chunks, "groups": groups},
        )]  # fmt: skip

    @property
    def _exact_columns(self) -> int:
        """Columns of the values at a time: a state of so many is in the registers of eight warps at most."""
        return min(max(16, 1 << (self.tiling.V - 1).bit_length()), 16384 // self.tiling.key_block)

    @property
    def _exact_programs(self) -> int:
        return 2 * self.tiling.programs

    @property
    def exact_scratch(self) -> tuple[int, ...]:
        """Numbers in fp32: rows of a chunk for each program."""
        return self._exact_programs, self.chunk, 3 * self.tiling.K + 2 * self._exact_columns
