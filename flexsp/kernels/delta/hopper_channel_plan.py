"""The launches of a call with a gate a key channel, by kernels in Gluon for Hopper GPUs.

`channel_scores` and `channel_grads` in Gluon do the chunks whose gates add up to little, those in Triton the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch

from flexsp.kernels.delta import hopper_channels, hopper_horizon, hopper_wy_transform
from flexsp.kernels.delta.channel_plan import ChannelPlan
from flexsp.kernels.delta.hopper_plan import WARP, HopperPlan
from flexsp.kernels.delta.tiling import Part
from flexsp.kernels.launch_plan import Buffer, Role, gradient_of
from flexsp.kernels.launch_spec import Launch, LaunchSpec, named

__all__ = ["HopperChannelPlan"]

_SCORES, _GRADS, _HORIZON = Launch(64, 4, 1, 168), Launch(64, 4, 1), Launch(64, 4, 1)


class HopperChannelPlan(HopperPlan, ChannelPlan):
    """As `ChannelPlan`, with the walks of `HopperPlan`: U and W are not kept in memory."""

    kernels: ClassVar[dict[str, Any]] = ChannelPlan.kernels | HopperPlan.kernels | {
        "small_gate_scores": hopper_channels.channel_scores, "small_gate_grads": hopper_channels.channel_grads,
        "inverse": hopper_wy_transform.inverse, "segment_horizon": hopper_horizon.segment_horizon,
    }  # fmt: skip

    def settled(self) -> dict[str, Any]:
        scanned = self.tiling.scanned
        return super().settled() | {
            "small_gates": "@small_gates", "skipped": "@small_gates", "growth": "@growth" if scanned else None,
            "transition_nonzero": "@transition_nonzero" if scanned else None, "decays": "@decay",
            "walk_keys": ["@reads", "@w", "@writes"],
        }  # fmt: skip

    def declare(self) -> list[Buffer]:
        p, chunks = self.tiling, (self.B * self.H, self.n_chunks)
        segments = p.K // 64, self.B * self.H, self.n_seg
        return [
            *super().declare(),
            Buffer("@small_gates", Role.SAVED, torch.int32, chunks),
            Buffer("@growth", Role.SAVED, torch.float32, chunks),
            Buffer("@from_end", Role.SCRATCH, torch.int32, segments),
            Buffer("@from_start", Role.SCRATCH, torch.int32, segments),
        ]

    def _before_states(self) -> list[LaunchSpec]:
        p, names = self.tiling, self.gated_inputs
        made = ["@inverse", "@scores", "@reads", "@writes", "@w", "@decay", "@small_gates", self.growth]
        small = self.kernel_launch(
            "small_gate_scores", _SCORES, (p.n_chunks, p.B * p.H, 1), [*names, *made], named(*made), names,
            GROWTH=self.growth is not None,
        )  # fmt: skip
        blocks, scores, inverse, _ = ChannelPlan._before_states(self)
        inverse = replace(inverse, kind="inverse", how=WARP, options=WARP.options)
        return [small, blocks, scores, inverse]

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
        p, names = self.tiling, [*self.gated_inputs, "do"]
        made = [*self.to_keys, "@dbeta", gradient_of(str(self.gate))]
        small = self.kernel_launch(
            "small_gate_grads", _GRADS, (p.n_chunks * (p.K // 64), p.B * p.H, 1),
            [*names, "d_v", "@v_new", "@entering", "@leaving", "@small_gates", self.gain, *made], made, names,
            PARTS=64 // p.tiles.channel_grads.cols,
        )  # fmt: skip
        return [small, *ChannelPlan._grads(self, part)]
