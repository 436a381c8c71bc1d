"""The launches of one call of a vector state: summarize -> propagate -> output, and the same backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from flexsp.kernels.channel_tiling import ChannelTiling, Limits
from flexsp.kernels.launch_plan import Buffer, Role, SegmentedPlan, by_name
from flexsp.kernels.launch_spec import Launch, LaunchSpec, named
from flexsp.kernels.vector import walks

__all__ = ["LIMITS", "NAME", "VectorPlan"]

NAME = "the kernels of vector states"
_F32 = torch.float32
# Every token's factor is rounded, and for gates near 0 always the same way: that limits the chunks of a segment.
LIMITS = Limits(NAME, "x", channels=128, numbers=128, programs=8, chunks=128)


@dataclass(frozen=True)
class VectorPlan(SegmentedPlan):
    """A call of a vector state.

    Buffers beside those of `SegmentedPlan`: ``@decay`` of segments (natural logarithms), and ``@chunks``, the states
    that enter chunks.

    Attributes:
        dtype: of x.
        gate: the dtype of g, which may be another.
    """

    tiling: ChannelTiling
    dtype: torch.dtype
    gate: torch.dtype
    initial: bool
    returns_final: bool
    description: str
    filler: ClassVar[str] = "g"
    kernels: ClassVar[dict[str, Any]] = by_name(
        walks.summarize_kernel, walks.output_kernel, walks.summarize_backward_kernel, walks.grads_kernel
    )

    def settled(self) -> dict[str, Any]:
        return {"name": NAME, "sparse": self.n_docs > 0}

    # Buffers

    @property
    def state(self) -> tuple[int, ...]:
        return (self.tiling.P,)

    @property
    def scan_shape(self) -> tuple[str, tuple[int, int, int, int, int]]:
        return "vector", (self.B, self.n_seg, self.H, self.tiling.P, 1)

    def declare(self) -> list[Buffer]:
        p, rows = self.tiling, (self.B, self.T, self.H, self.tiling.P)
        return [
            *self.states_of_segments(Role.SCRATCH),
            *self.token_buffers({"x": (self.dtype, rows), "g": (self.gate, rows)}, (self.dtype, rows)),
            Buffer("@decay", Role.SAVED, _F32, (p.B, p.n_seg, p.H, p.P)),
            Buffer("@chunks", Role.SAVED, _F32, (p.B, p.n_chunks, p.H, p.P)),
        ]

    # Launches

    def summarize(self, initial: str | None, *, zero: bool, onward: bool) -> list[LaunchSpec]:
        return [self._walk(
            "summarize_kernel", ["x", "g", "@states", "@decay", self.cut, initial],
            named("@states", "@decay", self.cut), ["x", "g"], INITIAL=initial is not None, ZERO=zero,
        )]  # fmt: skip

    def output(self, initial: str | None, final: str | None) -> list[LaunchSpec]:
        return [self._walk(
            "output_kernel", ["x", "g", "o", "@states", "@chunks", initial, final], named("o", "@chunks", final),
            ["x", "g"], INITIAL=initial is not None, FINAL=final is not None,
        )]  # fmt: skip

    def summarize_backward(self, last: str | None, *, zero: bool, onward: bool) -> list[LaunchSpec]:
        return [self._walk(
            "summarize_backward_kernel", ["g", "do", "@dstates", last], ["@dstates"], ["g", "do"],
            FINAL=last is not None, ZERO=zero,
        )]  # fmt: skip

    def gradients(self, last: str | None, to: str | None, wanted: Collection[str]) -> list[LaunchSpec]:
        return [self._walk(
            "grads_kernel", ["x", "g", "do", "@chunks", "@dstates", last, to, "d_x", "d_g"], named("d_x", "d_g", to),
            ["x", "g", "do"], FINAL=last is not None, INITIAL=to is not None,
        )]  # fmt: skip

    def _walk(
        self, kind: str, pointers: Sequence[str | None], writes: Sequence[str], strides: Sequence[str],
        **constants: Any,
    ) -> LaunchSpec:  # fmt: skip
        """A walk over segments; `constants` are its own, those of every walk are added here."""
        p = self.tiling
        constants |= {"D": p.D, "P": p.P, "BD": p.block, "C": p.chunk}
        return self.launch(
            kind, Launch(p.block, 1, 1), (p.programs(p.block), p.B, p.n_seg), pointers, writes,
            (*strides, p.T, p.n_seg, p.n_chunks, p.per_seg), constants,
        )  # fmt: skip
