"""The launches of a call with strengths of erasing and of writing by channel, by kernels in Gluon for Hopper GPUs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from flexsp.kernels.delta.hopper_channel_plan import HopperChannelPlan
from flexsp.kernels.delta.strengths import written_values, written_values_grad
from flexsp.kernels.launch_plan import Buffer, Role, by_name, gradient_of
from flexsp.kernels.launch_spec import Launch, LaunchSpec

__all__ = ["HopperStrengthsPlan"]

_NUMBERS = 2048  # of a program
_WARPS = Launch(0, 4, 1)


@dataclass(frozen=True)
class HopperStrengthsPlan(HopperChannelPlan):
    """As `HopperChannelPlan`; `beta` is the name of the strengths of erasing [B, T, H, K], which kernels multiply keys
    by as they read. ``@v`` are values times strengths of writing, which they read as values.

    Attributes:
        write: the name of the strengths of writing [B, T, H, V].
        write_type: their dtype.
    """

    erases: ClassVar[bool] = True
    of_grads: ClassVar[Launch] = Launch(64, 8, 1)  # what it holds for a chunk takes 168 registers or more
    kernels: ClassVar[dict[str, Any]] = HopperChannelPlan.kernels | by_name(written_values, written_values_grad)

    write: str = "write"
    write_type: torch.dtype = torch.float32

    def settled(self) -> dict[str, Any]:
        return super().settled() | {"unit": {"v": "@v", "d_v": "@dv"}}

    def declare(self) -> list[Buffer]:
        values = self.dtype, (self.B, self.T, self.H, self.tiling.V)
        keys, strengths = (self.types[0], self.gates_shape), (self.write_type, values[1])
        return [
            *super().declare(),
            *(Buffer(name, Role.INPUT, *x) for name, x in ((self.beta, keys), (self.write, strengths))),
            *(Buffer(gradient_of(name), Role.GRADIENT, *x) for name, x in ((self.beta, keys), (self.write, strengths))),
            Buffer("@v", Role.SAVED, *values),
            Buffer("@dv", Role.SCRATCH, *values),
        ]

    @property
    def to_steps(self) -> str:
        return gradient_of(self.beta)

    def forward(self) -> list[LaunchSpec]:
        return [self._values("written_values", ("v", self.write), ("@v",)), *super().forward()]

    def backward(self, dfinal: bool, dinitial: bool, wanted: Collection[str] = ()) -> list[LaunchSpec]:
        made = "d_v", gradient_of(self.write)
        last = self._values("written_values_grad", ("v", self.write, "@dv"), made)
        return [*super().backward(dfinal, dinitial, wanted), last]

    def _summed(self) -> list[LaunchSpec]:
        return self._unit_keys_grad()

    def _unit_keys(self) -> list[LaunchSpec]:
        return []

    def _values(self, kind: str, reads: tuple[str, ...], writes: tuple[str, ...]) -> LaunchSpec:
        p = self.tiling
        lines, rows = _NUMBERS // p.V, p.B * p.T * p.H
        return LaunchSpec(
            kind, _WARPS, (-(-rows // lines), 1, 1), (*reads, *writes), reads, writes,
            ("v", self.write, rows, p.T, p.H), {"V": p.V, "ROWS": lines}, _WARPS.options,
        )  # fmt: skip
