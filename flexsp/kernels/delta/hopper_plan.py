"""The launches of a call whose walks and gradients are the kernels in Gluon for Hopper GPUs."""

from __future__ import annotations

from typing import Any, ClassVar

from flexsp.kernels.delta import hopper_grads, hopper_walks, hopper_wy_transform
from flexsp.kernels.delta.delta_plan import DeltaPlan
from flexsp.kernels.delta.tiling import Part
from flexsp.kernels.delta.walks import horizons
from flexsp.kernels.launch_spec import Launch, LaunchSpec, named, zeroed

__all__ = ["WARP", "HopperPlan"]

_WARPS, _WY_INVERSE = Launch(64, 4, 1), Launch(0, 1, 1)
WARP = Launch(0, 1, 1, registers=168)


class HopperPlan(DeltaPlan):
    """As `DeltaPlan`, from the inverses of chunks alone: U, W and scores are not kept in memory.

    Attributes:
        chunks_within_horizon: how many chunks of a segment count, at its end and at its start.
        decays: what walks multiply the products with queries and keys by; `chunk_beta` is all if None.
        walk_keys: queries, keys that read, and keys that write if they are others.
    """

    divides: ClassVar[bool] = True
    finishes: ClassVar[bool] = True

    chunks_within_horizon: str | None
    decays: str | None
    walk_keys: list[str | None]

    kernels: ClassVar[dict[str, Any]] = DeltaPlan.kernels | {
        "summarize": hopper_walks.forward, "output": hopper_walks.forward, "chunk_states": hopper_walks.forward,
        "summarize_backward": hopper_walks.backward, "output_backward": hopper_walks.backward,
        "grads": hopper_grads.grads, "wy_inverse": hopper_wy_transform.wy_inverse, "horizons": horizons,
    }  # fmt: skip

    def settled(self) -> dict[str, Any]:
        found = super().settled()
        counted = found["transition_nonzero"] is not None and found["scanned"]
        return found | {
            "chunks_within_horizon": "@chunks_within_horizon" if counted else None,
            "decays": None if self.gate is None and found["norms"] is None else "@decays",
            "walk_keys": ["q", "k", None],
        }  # fmt: skip

    def _before_states(self) -> list[LaunchSpec]:
        p, launches = self.tiling, [self._wy_inverse()]
        if self.chunks_within_horizon is None:
            return launches
        horizons_of = self.kernel_launch(
            "horizons", Launch(0, 1, 1), (p.B * p.H, p.n_seg, 1),
            [self.bounds, "@transition_nonzero", "@chunks_within_horizon"],
            ["@transition_nonzero", "@chunks_within_horizon"],
        )  # fmt: skip
        return [*launches, horizons_of]

    def _wy_inverse(self) -> LaunchSpec:
        p, names = self.tiling, ["q", "k", self.beta, self.gate]
        made = ["@inverse", "@chunk_beta", self.gates, self.bounds, self.gain, self.decays, self.norms, "@scores"]
        return self.kernel_launch(
            "wy_inverse", _WY_INVERSE, (p.n_chunks, p.B * p.H, 1), [*names, *made], named(*made), names,
            reads=named(*names), BOUNDS=self.bounds is not None, NORM=self.norms is not None,
        )  # fmt: skip

    def _walk(
        self, kind: str, pointers: list[str | None], writes: tuple[str, ...], inputs: list[str], panels: int,
        part: Part | None, **flags: Any,
    ) -> LaunchSpec:  # fmt: skip
        """Of the segments of a part, or of all."""
        p = self.tiling
        n_seg, before = (p.n_seg, 0) if part is None else part[:2]
        flags["DEEP"] = panels * p.B * p.H * n_seg <= p.programs and p.K <= 128
        flags["BK"] = p.key_tile
        grid = panels, p.B * p.H, n_seg
        flags["NORM"] = self.norms is not None and self.walk_keys[0] == "q"  # copies of others are divided
        return self.kernel_launch(kind, _WARPS, grid, pointers, writes, inputs, counts={"before": before}, **flags)

    def _forward(
        self, kind: str, writes: tuple[str, ...], states: str | None, given: str | None, final: str | None,
        within: str | None = None, part: Part | None = None,
    ) -> LaunchSpec:  # fmt: skip
        """`writes`: of o, v_new and states of chunks, or of segments."""
        p, reads, sums = self.tiling, kind == "output", kind == "summarize"

        def of(*names: str) -> list[str | None]:
            return [x if x in writes else None for x in names]

        queries, keys, written = self.walk_keys
        pointers = [queries if reads else None, keys, written, "v", self.decays or "@chunk_beta", "@inverse"]
        pointers += ["@scores" if reads else None, *of("o", "@v_new", "@entering"), states, *of("@A")]
        pointers += [*([self.transition_nonzero, within] if sums else [None, None]), given, final]
        return self._walk(
            kind, pointers, writes, ["q", "k", "v"], p.V // 64 + (-(-p.K // 64) if sums else 0), part, READS=reads,
            KEEPS=kind == "chunk_states", SUMS=sums, NONZERO=sums and self.transition_nonzero is not None,
            ENTERS=p.scanned and not sums, BOUNDARY=given is not None, LEAVES=final is not None,
        )  # fmt: skip

    def _summarize(self, given: str | None) -> list[LaunchSpec]:
        return [self._forward("summarize", ("@states", "@A"), "@states", given, None, self.chunks_within_horizon)]

    def _output(self, given: str | None) -> LaunchSpec:
        final = "@final" if self.returns_final else None
        return self._forward("output", ("o", *named(final)), self.segment_states, given, final)

    def _chunk_states(self, given: str | None, part: Part) -> LaunchSpec:
        return self._forward("chunk_states", ("@v_new", "@entering"), self.segment_states, given, None, part=part)

    def _backward(
        self, kind: str, writes: tuple[str, ...], dstates: str | None, after: str | None, to: str | None,
        within: str | None = None, part: Part | None = None,
    ) -> LaunchSpec:  # fmt: skip
        p, sums = self.tiling, kind == "summarize_backward"
        pointers = [*self.walk_keys, "do", self.decays or "@chunk_beta", "@inverse", "@scores"]
        pointers += [None, None] if sums else ["d_v", "@leaving"]
        pointers += [dstates, within, after, to]
        return self._walk(
            kind, pointers, writes, ["q", "k", "do"], p.V // 64, part, SUMS=sums, ENTERS=p.scanned and not sums,
            BOUNDARY=after is not None, LEAVES=to is not None,
        )  # fmt: skip

    def _summarize_backward(self, after: str | None) -> list[LaunchSpec]:
        within = self.chunks_within_horizon
        return [self._backward("summarize_backward", ("@dstates",), "@dstates", after, None, within)]

    def _output_backward(self, after: str | None, to: str | None, part: Part) -> LaunchSpec:
        writes = "d_v", "@leaving", *named(to)
        return self._backward("output_backward", writes, self.segment_gradients, after, to, part=part)

    def _grads(self, part: Part) -> list[LaunchSpec]:
        p, how, names, joined = self.tiling, self.tiling.tiles.grads, ["q", "k", "do"], ["d_q", "d_k"]
        joins, made = self.to_keys != joined, [*self.to_keys, "@parts"]
        pointers = [*names, "d_v", "@chunk_beta", "@v_new", self.gates, self.gain, self.norms, "@exact", "@entering"]
        pointers += ["@leaving", "@done" if joins else None, *made, *(joined if joins else (None, None))]
        writes = [*made, *(["@done", *joined] if joins else [])]
        grid = part.chunks * self._tiles_of_keys * p.group, p.B * p.H // p.group, 1
        spec = self.kernel_launch(
            "grads", how, grid, pointers, writes, names, in_place=["@done", *self.to_keys] if joins else [],
            counts={"before": part.chunks_before}, BK=how.cols, NORM=self.norms is not None, JOINS=joins,
        )  # fmt: skip
        counts = [zeroed("@done")] if joins and part.chunks_before == 0 else []
        return [*self.exact_gradients(part, "@parts", None, self._tiles_of_keys), *counts, spec]
