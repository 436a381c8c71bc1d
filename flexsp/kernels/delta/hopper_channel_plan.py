"""The launches of a call with a gate a key channel, by kernels in Gluon for Hopper GPUs."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from flexsp.kernels.delta import hopper_channels, hopper_horizon, hopper_wy_transform
from flexsp.kernels.delta.channel_plan import ChannelPlan
from flexsp.kernels.delta.hopper_plan import WARP, HopperPlan
from flexsp.kernels.delta.tiling import Part
from flexsp.kernels.launch_plan import Buffer, Role, gradient_of
from flexsp.kernels.launch_spec import Launch, LaunchSpec, named

__all__ = ["HopperChannelPlan"]

_SCORES = Launch(64, 8, 1, registers=128)  # two blocks a multiprocessor, as of gradients
_HORIZON = Launch(64, 4, 1)


class HopperChannelPlan(HopperPlan, ChannelPlan):
    """As `ChannelPlan`, with the walks of `HopperPlan`: U and W are not kept in memory.

    Attributes:
        growth: log2 of how much a chunk makes a state grow at most.
        of_grads: how gradients of chunks are launched.
    """

    kernels: ClassVar[dict[str, Any]] = ChannelPlan.kernels | HopperPlan.kernels | {
        "channel_scores": hopper_channels.channel_scores, "channel_grads": hopper_channels.channel_grads,
        "inverse": hopper_wy_transform.inverse, "segment_horizon": hopper_horizon.segment_horizon,
    }  # fmt: skip

    finishes: ClassVar[bool] = False
    of_grads: ClassVar[Launch] = Launch(64, 8, 1, registers=128)

    growth: str | None

    def settled(self) -> dict[str, Any]:
        scanned = self.tiling.scanned
        return super().settled() | {
            "growth": "@growth" if scanned else None, "transition_nonzero": "@transition_nonzero" if scanned else None,
            "decays": "@decay", "walk_keys": ["@reads", "@w", "@writes"],
        }  # fmt: skip

    def declare(self) -> list[Buffer]:
        p, chunks = self.tiling, (self.B * self.H, self.n_chunks)
        segments = p.K // 64, self.B * self.H, self.n_seg
        return [
            *super().declare(),
            Buffer("@growth", Role.SAVED, torch.float32, chunks),
            Buffer("@from_end", Role.SCRATCH, torch.int32, segments),
            Buffer("@from_start", Role.SCRATCH, torch.int32, segments),
        ]

    @property
    def _panels(self) -> int:
        return self.tiling.K // self.of_grads.cols

    def _before_states(self) -> list[LaunchSpec]:
        p, names, grid = self.tiling, self.gated_inputs, (self.n_chunks, self.B * self.H, 1)
        made = ["@inverse", "@scores", "@reads", "@writes", "@w", "@decay", self.growth, self.norms]
        scores = self.kernel_launch(
            "channel_scores", _SCORES, grid, [*names, *made], named(*made), names,
            GROWTH=self.growth is not None, NORM=self.norms is not None,
        )  # fmt: skip
        inverse = LaunchSpec(
            "inverse", WARP, grid, ("@inverse", str(self.gain), "@table" if p.n_docs else "@inverse"), ("@inverse",),
            ("@inverse", str(self.gain)), (p.T,), {"C": p.chunk, "GAIN": True, "PACKED": p.n_docs > 0}, WARP.options,
        )  # fmt: skip
        return [scores, inverse]

    def _segment_horizon(self, found: str, reverse: bool) -> LaunchSpec:
        p, reads = self.tiling, ("@w", "@writes", "@inverse", "@decay", "@growth")
        constants = {"K": p.K, "C": p.chunk, "REVERSE": reverse, "PACKED": p.n_docs > 0}
        return LaunchSpec(
            "segment_horizon", _HORIZON, (p.K // 64, p.B * p.H, p.n_seg),
            (*reads, found, "@table" if p.n_docs else "@w"), reads, (found,),
            (p.T, p.H, p.n_seg, p.n_chunks, p.per_seg), constants, _HORIZON.options,
        )  # fmt: skip

    def _summarize(self, given: str | None) -> list[LaunchSpec]:
        writes = "@states", "@A", "@transition_nonzero"
        return [
            self._segment_horizon("@from_end", True),
            self._forward("summarize", writes, "@states", given, None, "@from_end"),
        ]

    def _summarize_backward(self, after: str | None) -> list[LaunchSpec]:
        return [
            self._segment_horizon("@from_start", False),
            self._backward("summarize_backward", ("@dstates",), "@dstates", after, None, "@from_start"),
        ]

    def _grads(self, part: Part) -> list[LaunchSpec]:
        """Of all chunks: plans with a gate a channel have one part."""
        p, names = self.tiling, [*self.gated_inputs, "do"]
        made = [*self.to_keys, self.to_steps, gradient_of(str(self.gate))]
        grads = self.kernel_launch(
            "channel_grads", self.of_grads, (p.n_chunks * self._panels, p.B * p.H, 1),
            [*names, "d_v", "@v_new", "@entering", "@leaving", self.skipped, self.gain, self.norms, *made], made, names,
            NORM=self.norms is not None,
        )  # fmt: skip
        return [*self.exact_gradients(part, made[2], made[3], self._panels), grads]
