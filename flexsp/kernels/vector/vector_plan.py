"""The launches of one call of a vector state: summarize -> propagate -> output, and the same backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from flexsp.kernels.channel_tiling import ChannelTiling, Limits
from flexsp.kernels.launch_plan import Buffer, Role, SegmentedPlan, by_name, gradient_of
from flexsp.kernels.launch_spec import Launch, LaunchSpec, named
from flexsp.kernels.vector import walks

__all__ = ["GATED", "LIMITS", "NAME", "Form", "VectorPlan"]

NAME = "the kernels of vector states"
_F32 = torch.float32
# Every token's factor is rounded, and for gates near 0 always the same way: that limits the chunks of a segment.
LIMITS = Limits(NAME, "x", channels=128, numbers=128, programs=8, chunks=128)
# Gates, their roots and the derivatives of both take more registers.
GATED = Limits(NAME, "x", channels=64, numbers=64, programs=16, chunks=128)


class Form(NamedTuple):
    """Which inputs a call has: x and log gates g; or, `gated`, x and the RG-LRU's gates r and i and rates of channels,
    and `unit`, which texts' first tokens have a weight of 1."""

    gated: bool
    unit: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors, in order."""
        if not self.gated:
            return "x", "g"
        return "x", "r", "i", "rate", *(["unit"] if self.unit else [])


@dataclass(frozen=True)
class VectorPlan(SegmentedPlan):
    """A call of a vector state.

    Buffers beside those of `SegmentedPlan`: ``@decay`` of segments (natural logarithms), and ``@chunks``, the states
    that enter chunks. Gates and weighted inputs of the RG-LRU are made anew in each walk.

    Attributes:
        dtypes: of the inputs; outputs have x's.
        neighbours: as in `SegmentedPlan`.
    """

    tiling: ChannelTiling
    form: Form
    dtypes: tuple[torch.dtype, ...]
    initial: bool
    returns_final: bool
    description: str
    neighbours: tuple[bool, bool] = (True, True)
    filler: ClassVar[str] = "x"
    kernels: ClassVar[dict[str, Any]] = by_name(
        walks.summarize_kernel, walks.output_kernel, walks.summarize_backward_kernel, walks.grads_kernel
    )

    def settled(self) -> dict[str, Any]:
        return {"name": NAME, "sparse": self.n_docs > 0, "optional": frozenset(["unit"])}  # which has no gradient

    # Buffers

    @property
    def state(self) -> tuple[int, ...]:
        return (self.tiling.P,)

    @property
    def scan_shape(self) -> tuple[str, tuple[int, int, int, int, int]]:
        return "vector", (self.B, self.n_seg, self.H, self.tiling.P, 1)

    def declare(self) -> list[Buffer]:
        p, rows = self.tiling, (self.B, self.T, self.H, self.tiling.P)
        inputs = {name: (dtype, rows) for name, dtype in zip(self.form.names, self.dtypes, strict=True)}
        tokens = {name: inputs[name] for name in self._rows}
        return [
            *self.states_of_segments(Role.SCRATCH),
            *self.token_buffers(tokens, tokens["x"]),
            *(self._parameters if self.form.gated else []),
            Buffer("@decay", Role.SAVED, _F32, (p.B, p.n_seg, p.H, p.P)),
            Buffer("@chunks", Role.SAVED, _F32, (p.B, p.n_chunks, p.H, p.P)),
        ]

    @property
    def _parameters(self) -> list[Buffer]:
        p = self.tiling
        return [
            Buffer("rate", Role.INPUT, _F32, (p.H, p.P)),
            Buffer("d_rate", Role.SCRATCH, _F32, (p.B, p.H, p.n_seg, p.P)),  # of every segment
            Buffer("unit", Role.INPUT, torch.int32, (self.n_docs or p.B,)),
        ]

    # Launches

    def sums(self, wanted: Collection[str]) -> list[str]:
        return ["d_rate"] if self.form.gated else []

    def summarize(self, initial: str | None, *, zero: bool, onward: bool) -> list[LaunchSpec]:
        return [self._walk(
            "summarize_kernel", [*self._made_of, "@states", "@decay", self.cut, initial],
            named("@states", "@decay", self.cut), self._rows, UNIT=self.form.unit, INITIAL=initial is not None,
            ZERO=zero, ONWARD=onward,
        )]  # fmt: skip

    def output(self, initial: str | None, final: str | None) -> list[LaunchSpec]:
        return [self._walk(
            "output_kernel", [*self._made_of, "o", "@states", "@chunks", initial, final], named("o", "@chunks", final),
            self._rows, UNIT=self.form.unit, INITIAL=initial is not None, FINAL=final is not None,
        )]  # fmt: skip

    def summarize_backward(self, last: str | None, *, zero: bool, onward: bool) -> list[LaunchSpec]:
        gate, rate = self._rows[1], self._made_of[3]
        return [self._walk(
            "summarize_backward_kernel", [gate, rate, "do", "@dstates", last], ["@dstates"], [gate, "do"],
            FINAL=last is not None, ZERO=zero, ONWARD=onward,
        )]  # fmt: skip

    def gradients(self, last: str | None, to: str | None, wanted: Collection[str]) -> list[LaunchSpec]:
        made = [None if name is None else gradient_of(name) for name in self._made_of[:4]]
        return [self._walk(
            "grads_kernel", [*self._made_of, "do", "@chunks", "@dstates", last, to, *made], named(*made, to),
            [*self._rows, "do"], UNIT=self.form.unit, FINAL=last is not None, INITIAL=to is not None,
        )]  # fmt: skip

    @property
    def _made_of(self) -> tuple[str | None, ...]:
        """What gates and the inputs of the state are made of, as kernels take it."""
        if not self.form.gated:
            return "x", "g", None, None, None
        return "x", "r", "i", "rate", "unit" if self.form.unit else None

    @property
    def _rows(self) -> tuple[str, str, str]:
        """Those of them with a row a token; kernels without a second gate take strides for it all the same."""
        return ("x", "r", "i") if self.form.gated else ("x", "g", "g")

    def _walk(
        self, kind: str, pointers: Sequence[str | None], writes: Sequence[str], strides: Sequence[str],
        **constants: Any,
    ) -> LaunchSpec:  # fmt: skip
        """A walk over segments; `constants` are its own, those of every walk are added here."""
        p = self.tiling
        constants |= {"D": p.D, "P": p.P, "BD": p.block, "C": p.chunk, "GATED": self.form.gated}
        return self.launch(
            kind, Launch(p.block, 1, 1), (p.programs(p.block), p.B, p.n_seg), pointers, writes,
            (*strides, p.T, p.n_seg, p.n_chunks, p.per_seg), constants,
        )  # fmt: skip
