"""The launches of a call of the delta engine with a gate a key channel."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from flexsp.kernels.delta import channels, walks
from flexsp.kernels.delta.delta_plan import DeltaPlan
from flexsp.kernels.delta.tiling import Part
from flexsp.kernels.launch_plan import Buffer, Role, by_name, gradient_of
from flexsp.kernels.launch_spec import Launch, LaunchSpec, named, step

__all__ = ["ChannelPlan"]

_F32 = torch.float32


class ChannelPlan(DeltaPlan):
    """As `DeltaPlan`. ``@reads``, ``@writes`` and ``@decay`` of chunks are there for queries, keys and gates in walks.

    ``@parts``, ``@dwrites`` and ``@dpairs`` lie in place of the states and v_new that they are made of where these are
    large enough. Elsewhere ``@parts`` are in fp32: rounded to bf16 they would make half of the error of dg.

    Attributes:
        skipped: the chunks whose gradients other kernels make.
        gated_inputs: those that kernels of chunks decay keys and queries with.
    """

    kernels: ClassVar[dict[str, Any]] = DeltaPlan.kernels | by_name(
        channels.channel_blocks, channels.channel_scores, channels.channel_inverse, channels.channel_wy_transform,
        channels.channel_parts, channels.channel_grads,
    )  # fmt: skip

    skipped: str | None
    gated_inputs: list[str]

    def settled(self) -> dict[str, Any]:
        found = super().settled()
        return found | {
            "gated": int(walks.CHANNEL.value), "transition_nonzero": None, "gates": "@decay", "bounds": None,
            "keys": ["@reads", "@writes"], "chunk_beta": None, "skipped": "@exact" if found["rounds"] else None,
            "gated_inputs": ["q", "k", str(self.gate), self.beta],
        }  # fmt: skip

    def declare(self) -> list[Buffer]:
        p, C, half = self.tiling, self.chunk, self.half
        chunks = p.B * p.H, p.n_chunks
        return [
            *super().declare(),
            Buffer("@blocks", Role.SAVED, half, (channels.matrices(C), C, C)),
            Buffer("@reads", Role.SAVED, half, (*chunks, C, p.K)),
            Buffer("@writes", Role.SAVED, half, (*chunks, C, p.K)),
            Buffer("@sizes", Role.SAVED, torch.int32, (*chunks, -(-p.K // p.tiles.channel_scores.cols))),
            Buffer("@decay", Role.SAVED, _F32, (*chunks, p.K)),
            Buffer("@kept", Role.SCRATCH, _F32, (*chunks, p.K)),
            Buffer("@errors", Role.SCRATCH, _F32, (*chunks, C)),
            Buffer("@dbeta", Role.SCRATCH, _F32, (self._panels, p.B, p.T, p.H)),
            Buffer("@parts", Role.SCRATCH, _F32, (*chunks, 2 * C, p.K)),
            Buffer("@dwrites", Role.SCRATCH, half, (*chunks, 2 * C, p.K)),
            Buffer("@dpairs", Role.SCRATCH, half, (*chunks, 2 * C, C)),
        ]

    @property
    def gates_shape(self) -> tuple[int, ...]:
        return self.B, self.T, self.H, self.tiling.K

    @property
    def _panels(self) -> int:
        """Tiles of channels that have programs of their own for gradients."""
        return -(-self.tiling.K // self.tiling.tiles.channel_grads.cols)

    @property
    def to_steps(self) -> str:
        """Gradients of beta, of each tile."""
        return gradient_of(self.beta) if self._panels == 1 else "@dbeta"

    def _before_states(self) -> list[LaunchSpec]:
        """What is made of chunks before states are known."""
        p, t, names = self.tiling, self.tiling.tiles, self.gated_inputs
        made, grid = ["@inverse", "@scores", "@reads", "@writes", "@w", "@decay", "@sizes"], (p.n_chunks, p.B * p.H, 1)
        scores = self.kernel_launch(
            "channel_scores", t.channel_scores, grid, [*names, "@blocks", *made], made, names,
        )  # fmt: skip
        four = Launch(0, 4, 1)
        inverse = LaunchSpec(
            "channel_inverse", four, grid, ("@inverse", self.gain or "@inverse", "@table" if p.n_docs else "@inverse"),
            ("@inverse",), ("@inverse", *named(self.gain)), (p.T,),
            {"C": t.chunk, "GAIN": self.gain is not None, "PACKED": p.n_docs > 0}, four.options,
        )  # fmt: skip
        transformed = self.kernel_launch(
            "channel_wy_transform", t.wy_transform, grid, ["v", "@inverse", "@u", "@w"], ["@u", "@w"], ["v"],
            in_place=["@w"],
        )  # fmt: skip
        blocks = LaunchSpec(
            "channel_blocks", four, (channels.matrices(t.chunk), 1, 1), ("@blocks",), (), ("@blocks",),
            constants={"C": t.chunk}, options=four.options,
        )  # fmt: skip
        return [blocks, scores, inverse, transformed]

    def _grads(self, part: Part) -> list[LaunchSpec]:
        """Of all chunks: plans with a gate a channel have one part."""
        p, t, names = self.tiling, self.tiling.tiles, self.gated_inputs
        around = ["@entering", "@leaving", "@v_new"]
        width = t.channel_width
        in_place = width >= p.V >= 2 * t.chunk
        errors = "@errors" if self.rounds else None
        left = around if in_place else ["@parts", "@dwrites", "@dpairs"]
        rows = p.V if in_place else 2 * t.chunk
        parts = self.kernel_launch(
            "channel_parts", t.channel_parts, (p.n_chunks, p.B * p.H, 1),
            ["do", "@inverse", "@v_new", "@dv_new", *around[:2], self.skipped, "d_v", "@kept", errors, *left],
            ["d_v", *named("@kept", errors), *left], ["do"], in_place=around, BV=width, ROWS=rows,
            SKIPS=self.skipped is not None,
        )  # fmt: skip
        made = [*self.to_keys, self.to_steps, gradient_of(str(self.gate))]
        grads = self.kernel_launch(
            "channel_grads", t.channel_grads, (p.n_chunks, p.B * p.H, self._panels),
            [*names, "@blocks", "@sizes", self.skipped, self.gain, "@kept", errors, *left, *made], made, names,
            SIZED=t.channel_scores.cols, ROWS=rows, SKIPS=self.skipped is not None,
        )  # fmt: skip
        return [*self.exact_gradients(part, made[2], made[3], self._panels), parts, grads]

    def _summed(self) -> list[LaunchSpec]:
        sums = [] if self._panels == 1 else [step("sum", _sum, ("@dbeta",), (gradient_of(self.beta),))]
        return [*self._unit_keys_grad(), *sums]


def _sum(parts: torch.Tensor, to: torch.Tensor) -> None:
    to.copy_(parts.sum(0))
