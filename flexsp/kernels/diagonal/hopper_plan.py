"""The launches of walks of large states on Hopper GPUs: see `flexsp.kernels.diagonal.hopper_walks`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
        return self._walk("q", "k", "v", None, "o", "@states", boundary, left, of_keys=True, reverse=False)

    def dv(self, boundary: str | None, left: str | None) -> LaunchSpec:
        return self._walk("k", "q", "do", None, "d_v", "@dstates", boundary, left, of_keys=True, reverse=True)

    def dq(self, to: str, boundary: str | None, last: str | None, *, gates: bool) -> list[LaunchSpec]:
        """gates: gradients of gates are wanted, which need gradients of final states of packed documents, `last`."""
        ends = "@ends" if gates and last is not None else None
        sums = ["@reads", "@read_sums", None, None, ends, last if ends else None] if gates else [None] * 6
        walk = self._walk(
            "do", "v", "k", "q", to, "@states", boundary, None, sums, of_keys=False, reverse=False, SUMS=gates,
            ENDS=ends is not None,
        )  # fmt: skip
        return self._of_pairs(walk) if self.adds else [walk]

    def dk(self, to: str, boundary: str | None, *, gates: bool, skips: bool) -> list[LaunchSpec]:
        """skips: gradients of skip weights are wanted, which are made of inner products of rows of v and do."""
        sums: list[str | None] = [None] * 6
        if gates:
            sums = ["@writes", "@write_sums", "@pairs", None, "@edges", "@states"]
        sums[3] = "@of_skip" if skips else None
        walk = self._walk(
            "v", "do", "q", "k", to, "@dstates", boundary, None, sums, of_keys=False, reverse=True, SUMS=gates,
            SKIPS=skips,
        )  # fmt: skip
        return self._of_pairs(walk) if self.adds else [walk]

    @property
    def adds(self) -> bool:
        """Whether walks add up the gradients of keys that two heads share, as halves of values of 512 do: the second
        adds to what the first left."""
        return self.plan.group == 2

    def _of_pairs(self, walk: LaunchSpec) -> list[LaunchSpec]:
        """A walk for the first head of every pair, and then one for the second."""
        grid = walk.grid[0], walk.grid[1] // 2, walk.grid[2]
        return [replace(walk, grid=grid, constants={**walk.constants, "PARTS": 2, "PART": n}) for n in (0, 1)]

    def _walk(
        self, r: str, w: str, u: str, x: str | None, to: str, states: str, boundary: str | None, left: str | None,
        sums: Sequence[str | None] = (None,) * 6, *, of_keys: bool, reverse: bool, **constants: bool,
    ) -> LaunchSpec:  # fmt: skip
        """of_keys: r and w are of keys and u of values, and not the other way round. x: of tokens, where sums are left;
        the last of `sums` is read."""
        plan, p = self.plan, self.plan.tiling
        N, U = (p.K, p.V) if of_keys else (p.V, p.K)
        skip = plan.skip if of_keys else None
        how: dict[str, Any] = {
            "N": N, "U": U, "C": p.chunk, "R_GROUP": plan.group if of_keys else 1,
            "U_GROUP": 1 if of_keys else plan.group, "TURNED": of_keys, "REVERSE": reverse,
            "GATED": plan.gate is not None, "STEPS": plan.writing is not None, "SKIP": skip is not None,
            "BY_TOKEN": skip == "w",
            "BOUNDARY": boundary is not None, "LEFT": left is not None, "SUMS": False, "ENDS": False, "SKIPS": False,
            "STRICT": plan.strict, "PARTS": 1, "PART": 0,
        }  # fmt: skip
        strides = plan.skip_strides if of_keys else (1, 1, 1)
        cut = p.T, p.H, p.n_seg, p.n_chunks, p.per_seg, plan.scale
        gives = constants.get("SUMS", False)
        return plan.launch(
            "walk_kernel", _HOW, (U // hopper_walks.COLUMNS, p.B * p.H, p.n_seg),
            [r, w, u, x if gives else None, plan.gates, plan.writing, skip, to, states, boundary, left, *sums],
            named(to, left, *sums[:-1]), [r, w, u, x or u, *plan.gate_strides, *plan.strides(to), *strides, *cut],
            how | constants, kernel=hopper_walks.walk_kernel,
        )  # fmt: skip
