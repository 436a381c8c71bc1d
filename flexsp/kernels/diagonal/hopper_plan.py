"""The launches of walks of large states on Hopper GPUs: see `flexsp.kernels.diagonal.hopper_walks`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexsp.kernels.diagonal import hopper_walks
from flexsp.kernels.diagonal.base_plan import BasePlan
from flexsp.kernels.launch_spec import Launch, LaunchSpec, named

__all__ = ["HopperWalks"]

_HOW = Launch(hopper_walks.COLUMNS, hopper_walks.WARPS, 1)


@dataclass(frozen=True)
class HopperWalks:
    """Of a plan; documents that are packed have states of their own in `boundary` and `left`."""

    plan: BasePlan

    def output(self, boundary: str | None, left: str | None) -> LaunchSpec:
        return self._walk("q", "k", "v", "o", "@states", boundary, left, of_keys=True, reverse=False)

    def dv(self, boundary: str | None, left: str | None) -> LaunchSpec:
        return self._walk("k", "q", "do", "d_v", "@dstates", boundary, left, of_keys=True, reverse=True)

    def dq(self, to: str, boundary: str | None) -> LaunchSpec:
        return self._walk("do", "v", "k", to, "@states", boundary, None, of_keys=False, reverse=False)

    def dk(self, to: str, boundary: str | None) -> LaunchSpec:
        return self._walk("v", "do", "q", to, "@dstates", boundary, None, of_keys=False, reverse=True)

    def _walk(
        self, r: str, w: str, u: str, to: str, states: str, boundary: str | None, left: str | None, *, of_keys: bool,
        reverse: bool,
    ) -> LaunchSpec:  # fmt: skip
        """of_keys: r and w are of keys and u of values, and not the other way round."""
        plan, p = self.plan, self.plan.tiling
        N, U = (p.K, p.V) if of_keys else (p.V, p.K)
        skip = plan.skip if of_keys else None
        constants: dict[str, Any] = {
            "N": N, "U": U, "C": p.chunk, "R_GROUP": plan.group if of_keys else 1,
            "U_GROUP": 1 if of_keys else plan.group, "TURNED": of_keys, "REVERSE": reverse,
            "GATED": plan.gate is not None, "STEPS": plan.writing is not None, "SKIP": skip is not None,
            "BOUNDARY": boundary is not None, "LEFT": left is not None,
        }  # fmt: skip
        cut = p.T, p.H, p.n_seg, p.n_chunks, p.per_seg, plan.scale
        return plan.launch(
            "walk_kernel", _HOW, (U // hopper_walks.COLUMNS, p.B * p.H, p.n_seg),
            [r, w, u, plan.gates, plan.writing, skip, to, states, boundary, left], named(to, left),
            [r, w, u, *plan.gate_strides, *plan.strides(to), *cut], constants, kernel=hopper_walks.walk_kernel,
        )  # fmt: skip
