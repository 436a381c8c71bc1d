"""The launches of a call with a gate a key channel, by kernels in Gluon for Hopper GPUs.

`channel_scores` and `channel_grads` in Gluon do the chunks whose gates add up to little, those in Triton the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flexsp.kernels.delta import hopper_channels, hopper_prepare, hopper_reach
from flexsp.kernels.delta.channel_launches import ChannelCall
from flexsp.kernels.delta.hopper_launches import WARP, HopperCall
from flexsp.kernels.delta.plan import Part
from flexsp.kernels.launches import Buffer, Launch, LaunchSpec, named

__all__ = ["HopperChannelCall"]

_KERNELS = {
    "little_scores": hopper_channels.channel_scores, "little_grads": hopper_channels.channel_grads,
    "inverse": hopper_prepare.inverse, "reach": hopper_reach.reach,
}  # fmt: skip
_SCORES, _GRADS, _REACH = Launch(64, 4, 1, 168), Launch(64, 4, 1), Launch(64, 4, 1)


class HopperChannelCall(HopperCall, ChannelCall):
    """As `ChannelCall`, with the walks of `HopperCall`: U and W are not kept in memory."""

    def kernel(self, spec: LaunchSpec) -> Any:
        return _KERNELS.get(spec.kind) or super().kernel(spec)

    def buffer(self, name: str) -> Buffer:
        p = self.plan
        heads = p.B * p.H
        found = {
            "@mild": Buffer(torch.int32, (heads, p.n_chunks)),
            "@growth": Buffer(torch.float32, (heads, p.n_chunks)),
            "@from_end": Buffer(torch.int32, (p.K // 64, heads, p.n_seg)),
            "@from_start": Buffer(torch.int32, (p.K // 64, heads, p.n_seg)),
        }
        return found.get(name) or super().buffer(name)

    @property
    def _mild(self) -> str | None:
        return "@mild"

    @property
    def _skipped(self) -> str | None:
        return "@mild"

    @property
    def _growth(self) -> str | None:
        return "@growth" if self.plan.scanned else None

    @property
    def alive(self) -> str | None:
        return "@alive" if self.plan.scanned else None

    @property
    def _decays(self) -> str | None:
        return "@decay"

    @property
    def _keys_of_walks(self) -> list[str | None]:
        return ["@reads", "@w", "@writes"]

    def _prepared(self) -> list[LaunchSpec]:
        p, names = self.plan, ["q", "k", str(self.gate), self.beta]
        made = ("@inverse", "@scores", "@reads", "@writes", "@w", "@decay", "@mild")
        constants = {"K": p.K, "C": p.tiles.chunk, "GROWTH": self._growth is not None, "PACKED": p.docs > 0}
        little = LaunchSpec(
            "little_scores", _SCORES, (p.n_chunks, p.B * p.H, 1),
            (*names, *made, self._growth or "q", "@table" if p.docs else "q"), tuple(names),
            (*made, *named(self._growth)), (*names, p.T, p.H, self.scale), constants | {"GROUP": p.group},
            _SCORES.options,
        )  # fmt: skip
        blocks, scores, inverse, values = ChannelCall._prepared(self)
        inverse = replace(inverse, kind="inverse", how=WARP, options=WARP.options)
        return [little, blocks, scores, inverse]

    def _reach(self, found: str, reverse: bool) -> LaunchSpec:
        p, reads = self.plan, ("@w", "@writes", "@inverse", "@decay", "@growth")
        constants = {"K": p.K, "C": p.tiles.chunk, "REVERSE": reverse, "PACKED": p.docs > 0}
        return LaunchSpec(
            "reach", _REACH, (p.K // 64, p.B * p.H, p.n_seg), (*reads, found, "@table" if p.docs else "@w"), reads,
            (found,), (p.T, p.H, p.n_seg, p.n_chunks, p.per_seg), constants, _REACH.options,
        )  # fmt: skip

    def _summarize(self, given: str | None) -> list[LaunchSpec]:
        writes = "@states", "@A", "@alive"
        return [
            self._reach("@from_end", True), self._forward("summarize", writes, "@states", given, None, "@from_end")
        ]  # fmt: skip

    def _collect(self, after: str | None) -> list[LaunchSpec]:
        return [
            self._reach("@from_start", False),
            self._backward("collect", ("@dstates",), "@dstates", after, None, "@from_start"),
        ]

    def _grads(self, part: Part) -> list[LaunchSpec]:
        p, names = self.plan, ["q", "k", str(self.gate), self.beta]
        pointers = [*names, "@do", "d.v", "@errors", "@entering", "@leaving", "@mild"]
        made = (*self.to_keys, "@dbeta", f"d.{self.gate}")
        constants = {"K": p.K, "PARTS": 64 // p.tiles.channel_grads.cols, "V": p.V, "C": p.tiles.chunk}
        constants |= {"PACKED": p.docs > 0, "GROUP": p.group}
        little = LaunchSpec(
            "little_grads", _GRADS, (p.n_chunks * (p.K // 64), p.B * p.H, 1),
            (*pointers, *made, "@table" if p.docs else "q"), tuple(pointers), made,
            (*names, "do", p.T, p.H, p.n_chunks, self.scale), constants, _GRADS.options,
        )  # fmt: skip
        return [little, *ChannelCall._grads(self, part)]
