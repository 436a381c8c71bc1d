"""The launches of one call of the delta engine: wy_inverse, wy_transform -> (summarize -> scan) -> output, and the same
backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from flexsp.kernels.delta import grads, scan_segments, walks, wy_transform
from flexsp.kernels.delta.base_plan import BasePlan, choose
from flexsp.kernels.delta.tiling import Part
from flexsp.kernels.keys import unit_keys_grad_kernel, unit_keys_kernel
from flexsp.kernels.launch_plan import Buffer, Layout, Role, by_name, gradient_of
from flexsp.kernels.launch_spec import Launch, LaunchSpec, named, scan, unit, zeroed

__all__ = ["DeltaPlan"]

_F32 = torch.float32


@dataclass(frozen=True)
class DeltaPlan(BasePlan):
    """A call of the delta engine.

    Buffers: ``@states`` and ``@dstates`` at the edges of the rank, ``@A`` its matrix, ``@gates`` cumulative log2 decay
    within chunks, ``@inverse`` of chunks, and in the backward pass what `walks` keeps of every chunk.
    """

    kernels: ClassVar[dict[str, Any]] = by_name(
        wy_transform.wy_inverse, wy_transform.wy_transform, walks.summarize, scan_segments.scan_segments,
        walks.output, walks.chunk_states, walks.summarize_backward, walks.output_backward, grads.grads,
        grads.reduce_gate_grads,
    ) | {"unit_keys": unit_keys_kernel, "unit_keys_grad": unit_keys_grad_kernel}  # fmt: skip

    # Buffers

    @property
    def state(self) -> tuple[int, ...]:
        return self.tiling.K, self.tiling.V

    @property
    def scan_shape(self) -> tuple[str, tuple[int, int, int, int, int]]:
        """Segments are joined before, so that the scan sees one."""
        return "dense", (self.B, 1, self.H, self.tiling.K, self.tiling.V)

    def declare(self) -> list[Buffer]:
        p, C, half = self.tiling, self.chunk, self.half
        chunks, held = (p.B * p.H, p.n_chunks), (p.B * p.H, p.held)
        of_segments = (p.B, p.n_seg + 1, p.H, p.K, p.V)
        edges = (p.B, 2, p.H, p.K, p.V)
        saved: dict[str, Layout] = {
            "@states": (_F32, of_segments),
            "@A": (_F32, (p.B, p.n_seg, p.H, p.K, p.K)),
            "@transition_nonzero": (torch.int32, (p.B, p.n_seg, p.H)),
            "@total": (_F32, (p.B, 1, p.H, p.K, p.K)),
            "@gates": (_F32 if half == torch.bfloat16 else torch.float64, (*chunks, C)),
            "@bounds": (_F32, (p.B * p.H, 2, p.n_chunks)),
            "@chunks_within_horizon": (torch.int32, (2, p.B * p.H, p.n_seg)),
            "@chunk_beta": (_F32, (*chunks, C)),
            "@decays": (_F32, (2 if self.norms is None else 4, *chunks, C)),
            "@norms": (_F32, (2, *chunks, C)),
            "@inverse": (half, (*chunks, C, C)),
            "@u": (half, (*chunks, C, p.V)),
            "@w": (half, (*chunks, C, p.K)),
            "@scores": (half, (*chunks, C, C)),
            "@exact": (torch.int32, chunks),
            "@gain": (_F32, chunks),
            "@q": (self.dtype, (p.B, p.T // p.steps, p.H // p.group, p.K)),
            "@k": (self.dtype, (p.B, p.T, p.H // p.group, p.K)),
        }
        scratch: dict[str, Layout] = {
            "@dstates": (_F32, of_segments),
            "@edges": (_F32, edges),
            "@dedges": (_F32, edges),
            "@scratch": (_F32, self.exact_scratch),
            "@entering": (half, (*held, p.V, p.K)),
            "@leaving": (half, (*held, p.V, p.K)),
            "@v_new": (half, (*held, p.V, C)),
            "@dv_new": (half, (*held, p.V, C)),
            "@done": (torch.int32, (p.B * p.H // p.group, p.n_chunks)),
            "@parts": (_F32, (1 if self.gate is None else 3, self._tiles_of_keys, *chunks, C)),
            "@dq": (self.dtype, (p.B, p.T // p.steps, p.H, p.K)),
            "@dk": (self.dtype, (p.B, p.T, p.H, p.K)),
        }
        return [
            *self._of_tokens(),
            *(Buffer(name, Role.SAVED, *x) for name, x in saved.items()),
            *(Buffer(name, Role.SCRATCH, *x) for name, x in scratch.items()),
        ]

    def _of_tokens(self) -> list[Buffer]:
        """The inputs, the outputs and the gradients. A token has a query and a gate for `steps` keys."""
        p, queries = self.tiling, self.T // self.tiling.steps
        inputs: dict[str, Layout] = {
            "q": (self.dtype, (p.B, queries, p.H // p.group, p.K)),
            "k": (self.dtype, (p.B, p.T, p.H // p.group, p.K)),
            "v": (self.dtype, (p.B, p.T, p.H, p.V)),
            self.beta: (self.types[0], (p.B, p.T, p.H)),
        }
        if self.gate is not None:
            inputs[self.gate] = self.types[1], self.gates_shape
        return self.token_buffers(inputs, (self.dtype, (p.B, queries, p.H, p.V)))

    @property
    def gates_shape(self) -> tuple[int, ...]:
        return self.B, self.T // self.tiling.steps, self.H

    # Launches

    def forward(self) -> list[LaunchSpec]:
        given, final = "@initial" if self.initial else None, "@final" if self.returns_final else None
        chosen = [choose(self)] if self.rounds else []
        launches = [*self._unit_keys(), *self._before_states(), *chosen]
        if self.scanned:
            launches += [*self._summarize(given), *self.exact_forward("summarize", given)]
            launches += self._scan("@states", reverse=False)
        entering = self.in_walk(given)
        launches.append(self._output(entering))
        launches += self.exact_forward("output", entering, final=final)
        return launches if self.n_chunks else self.without_tokens(launches, [unit("@A"), zeroed("@states")])

    def backward(self, dfinal: bool, dinitial: bool, wanted: Collection[str] = ()) -> list[LaunchSpec]:
        """All gradients of inputs are computed, whichever are `wanted`."""
        after, to = "@dfinal" if dfinal else None, "@dinitial" if dinitial else None
        launches: list[LaunchSpec] = []
        if self.scanned:
            launches += [*self._summarize_backward(after), *self.exact_backward("summarize_backward", after)]
            launches += self._scan("@dstates", reverse=True)
        before, behind = self.in_walk("@initial" if self.initial else None), self.in_walk(after)
        for part in self.tiling.parts:
            launches += [self._chunk_states(before, part), *self.exact_forward("chunk_states", before, part)]
            launches.append(self._output_backward(behind, to, part))
            launches += self.exact_backward("output_backward", behind, to, part)
            launches += self._grads(part)
        launches += self._summed()
        if self.n_chunks:
            return launches
        return self.backward_without_tokens(launches, [zeroed("@dstates")], dfinal, dinitial)

    def _scan(self, states: str, reverse: bool) -> list[LaunchSpec]:
        """What enters segments, from what each of them leaves."""
        edges, p = ("@dedges" if reverse else "@edges"), self.tiling
        if p.n_seg == 1:
            return [scan(states, "@A", None, reverse=reverse)]
        if not p.ranks:
            return [self._scan_segments(states, states, p.n_seg + 1, None, reverse)]
        return [
            self._scan_segments(states, edges, 2, "@total", reverse, WHOLE=True),
            scan(edges, "@total", None, reverse=reverse),
            self._scan_segments(states, edges, 2, None, reverse),
        ]

    def _scan_segments(
        self, states: str, edges: str, slots: int, total: str | None, reverse: bool, WHOLE: bool = False
    ) -> LaunchSpec:
        p, how = self.tiling, Launch(min(32, self.tiling.tiles.output.cols), 4 if self.tiling.K <= 128 else 8, 1)
        panels = -(-p.V // how.cols) + (-(-p.K // how.cols) if WHOLE and not reverse else 0)
        pointers = [states, "@A", self.transition_nonzero, edges, total if not reverse else None]
        writes = named(edges, pointers[-1]) if WHOLE else (states,)
        reads = tuple(x for x in named(*pointers) if x not in writes or x == states)
        constants = {"K": p.K, "BK": p.key_block, "V": p.V, "BV": how.cols}
        constants |= {"REVERSE": reverse, "WHOLE": WHOLE, "GATED": self.transition_nonzero is not None}
        return LaunchSpec(
            "scan_segments", how, (panels, p.B * p.H, 1), tuple(x or states for x in pointers), reads, writes,
            (p.H, p.n_seg, slots), constants, how.options,
        )  # fmt: skip

    def _wy_inverse(self) -> LaunchSpec:
        p, names = self.tiling, ["k", self.beta, self.gate]
        made = ["@inverse", "@chunk_beta", self.gates, self.bounds, self.gain]
        return self.kernel_launch(
            "wy_inverse", p.tiles.wy_inverse, (p.n_chunks, p.B * p.H, 1), [*names, *made], named(*made), names,
            BOUNDS=self.bounds is not None, GAIN=self.gain is not None,
        )  # fmt: skip

    def _before_states(self) -> list[LaunchSpec]:
        """What is made of chunks before states are known."""
        p, names, made = self.tiling, ["q", "k", "v"], ["@u", "@w", "@scores"]
        transformed = self.kernel_launch(
            "wy_transform", p.tiles.wy_transform, (p.n_chunks, p.B * p.H, 1),
            [*names, "@inverse", "@chunk_beta", self.gates, *made], made, names,
        )  # fmt: skip
        return [self._wy_inverse(), transformed]

    def _launch(
        self, kind: str, how: Launch, pointers: Sequence[str | None], writes: Sequence[str], inputs: Sequence[str],
        **flags: Any,
    ) -> LaunchSpec:  # fmt: skip
        """A walk over the chunks of segments."""
        p = self.tiling
        panels = -(-p.V // how.cols) + (-(-p.K // how.cols) if kind == "summarize" else 0)
        given = [x if x in self.keys or x == "do" else None for x in inputs]
        return self.kernel_launch(kind, how, (panels, p.B * p.H, p.n_seg), pointers, writes, given, **flags)

    def _summarize(self, given: str | None) -> list[LaunchSpec]:
        return [self._launch(
            "summarize", self.tiling.tiles.chunk_states,
            [
                self.keys[1], self.chunk_beta, "@u", "@w", self.gates, self.bounds, "@states", given, "@A",
                self.transition_nonzero,
            ],
            ("@states", "@A", *named(self.transition_nonzero)), ["k"], BOUNDARY=given is not None,
            NONZERO=self.transition_nonzero is not None,
        )]  # fmt: skip

    def _output(self, given: str | None) -> LaunchSpec:
        final = "@final" if self.returns_final else None
        return self._launch(
            "output", self.tiling.tiles.output,
            [*self.keys, self.chunk_beta, "@u", "@w", "@scores", self.gates, "o", self.segment_states, given, final],
            ("o", *named(final)), ["q", "k"],
            ENTERS=self.tiling.scanned, BOUNDARY=given is not None, LEAVES=self.returns_final,
        )  # fmt: skip

    def _chunk_states(self, given: str | None, part: Part) -> LaunchSpec:
        return self._launch(
            "chunk_states", self.tiling.tiles.chunk_states,
            [
                self.keys[1], self.chunk_beta, "@u", "@w", self.gates, "@v_new", self.segment_states, given,
                "@entering",
            ],
            ("@v_new", "@entering"), ["k"], ENTERS=self.tiling.scanned, BOUNDARY=given is not None,
        )  # fmt: skip

    def _summarize_backward(self, after: str | None) -> list[LaunchSpec]:
        return [self._launch(
            "summarize_backward", self.tiling.tiles.output_backward,
            [*self.keys, "do", self.chunk_beta, "@w", "@scores", self.gates, self.bounds, "@dstates", after],
            ("@dstates",), ["q", "k", "do"], BOUNDARY=after is not None,
        )]  # fmt: skip

    def _output_backward(self, after: str | None, to: str | None, part: Part) -> LaunchSpec:
        return self._launch(
            "output_backward", self.tiling.tiles.output_backward,
            [
                *self.keys, "do", self.chunk_beta, "@w", "@scores", self.gates, "@dv_new", self.segment_gradients,
                after, to, "@leaving",
            ],
            ("@dv_new", "@leaving", *named(to)), ["q", "k", "do"],
            ENTERS=self.tiling.scanned, BOUNDARY=after is not None, LEAVES=to is not None,
        )  # fmt: skip

    @property
    def _tiles_of_keys(self) -> int:
        return -(-self.tiling.K // self.tiling.tiles.grads.cols)

    def _grads(self, part: Part) -> list[LaunchSpec]:
        """Gradients of the chunks of a part, from what its walks keep."""
        p, how, names, made = self.tiling, self.tiling.tiles.grads, ["q", "k", "do"], [*self.to_keys, "d_v", "@parts"]
        pointers = [*names, "@chunk_beta", "@inverse", "@v_new", "@dv_new", self.gates, self.gain]
        pointers += ["@entering", "@leaving"]
        spec = self.kernel_launch(
            "grads", how, (p.n_chunks * self._tiles_of_keys, p.B * p.H, 1), [*pointers, *made], made, names,
            BK=how.cols, BV=p.tiles.values_of_grads,
        )  # fmt: skip
        return [spec, *self.exact_gradients(part, "@parts", None, self._tiles_of_keys)]

    def _summed(self) -> list[LaunchSpec]:
        """Sums of what all chunks left."""
        return [self._reduce_gate_grads(), *self._unit_keys_grad()]

    def _unit_keys(self) -> list[LaunchSpec]:
        """Copies of q and k that are divided by their norms."""
        made = *self.unit.values(),
        return [self._of_keys("unit_keys", ("q", "k", *made), ("q", "k"), made, 1, True)] if made else []

    def _unit_keys_grad(self) -> list[LaunchSpec]:
        """Gradients of q and k: sums of those of heads that share them, taken back through the norm. Kernels that
        finish them do that themselves."""
        p, made = self.tiling, ("d_q", "d_k")
        if self.finishes or self.to_keys == [*made]:
            return []
        reads = *(("q", "k") if self.norm else ()), *self.to_keys
        return [self._of_keys("unit_keys_grad", ("q", "k", *self.to_keys, *made), reads, made, p.group, self.norm)]

    def _of_keys(
        self, kind: str, pointers: tuple[str, ...], reads: tuple[str, ...], writes: tuple[str, ...], repeats: int,
        norm: bool,
    ) -> LaunchSpec:  # fmt: skip
        p, how, block = self.tiling, Launch(0, 4, 1), 1 << (self.tiling.K - 1).bit_length()
        heads, lines = p.H // p.group, max(1, 2048 // block)
        rows = p.B * p.T * heads
        constants = {"K": p.K, "BK": block, "ROWS": lines, "REPEATS": repeats, "NORM": norm}
        return LaunchSpec(
            kind, how, (-(-rows // lines), 2, 1), pointers, reads, writes,
            ("q", "k", rows // p.steps, p.T // p.steps, rows, p.T, heads), constants, how.options,
        )  # fmt: skip

    def _reduce_gate_grads(self) -> LaunchSpec:
        p, how = self.tiling, Launch(min(32, 1 << (self.tiling.H - 1).bit_length()), 4, 1)
        gate = None if self.gate is None else gradient_of(self.gate)
        made = [gradient_of(self.beta), gate]
        return self.kernel_launch(
            "reduce_gate_grads", how, (p.n_chunks, -(-p.H // how.cols), p.B), [self.gate, "@parts", *made],
            named(*made), [self.gate], TILES=self._tiles_of_keys, HEADS=how.cols,
        )  # fmt: skip
