"""The launches of a call of the delta engine with a gate a key channel."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from flexsp.kernels.delta import channels, exact_launches, walks
from flexsp.kernels.delta.delta_plan import DeltaPlan
from flexsp.kernels.delta.plan import Part
from flexsp.kernels.launch_plan import Buffer, Role, gradient_of
from flexsp.kernels.launch_spec import Launch, LaunchSpec, named, step
from flexsp.kernels.primitives import dots

__all__ = ["ChannelPlan"]

_F32 = torch.float32


class ChannelPlan(DeltaPlan):
    """As `DeltaPlan`. ``@reads``, ``@writes`` and ``@decay`` of chunks are there for queries, keys and gates in walks.

    ``@parts``, ``@dwrites`` and ``@dpairs`` lie in place of the states and errors that they are made of where these are
    large enough. Elsewhere ``@parts`` are in fp32: rounded to bf16 they would make half of the error of dg.
    """

    kernels: ClassVar[dict[str, Any]] = DeltaPlan.kernels | {
        kernel.__name__: kernel
        for kernel in (
            channels.channel_blocks, channels.channel_scores, channels.channel_inverse, channels.channel_values,
            channels.channel_parts, channels.channel_grads,
        )
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
            Buffer("@dbeta", Role.SCRATCH, _F32, (-(-p.K // p.tiles.channel_grads.cols), p.B, p.T, p.H)),
            Buffer("@parts", Role.SCRATCH, _F32, (*chunks, 2 * C, p.K)),
            Buffer("@dwrites", Role.SCRATCH, half, (*chunks, 2 * C, p.K)),
            Buffer("@dpairs", Role.SCRATCH, half, (*chunks, 2 * C, C)),
        ]

    @property
    def gates_shape(self) -> tuple[int, ...]:
        return self.B, self.T, self.H, self.tiling.K

    @property
    def _gates(self) -> str | None:
        return "@decay"

    @property
    def gated(self) -> int:
        return int(walks.CHANNEL.value)

    @property
    def alive(self) -> str | None:
        return None

    @property
    def _keys(self) -> list[str]:
        return ["@reads", "@writes"]

    @property
    def _strength(self) -> str | None:
        return None

    @property
    def _skipped(self) -> str | None:
        """The chunks whose gradients other kernels make."""
        return "@exact" if self._gain is not None else None

    @property
    def _growth(self) -> str | None:
        return None

    def _chunkwise(
        self, kind: str, how: Launch, pointers: Sequence[str | None], writes: Sequence[str],
        numbers: Sequence[int | float | str], in_place: Collection[str] = (), **constants: int,
    ) -> LaunchSpec:  # fmt: skip
        """A program a chunk; what it writes `in_place` it reads first."""
        p = self.tiling
        given = {"K": p.K, "COLS": how.cols, "C": p.chunk} | constants | dots(self.dtype)
        grid = p.n_chunks, p.B * p.H, 1
        return self.launch(kind, how, grid, pointers, writes, numbers, given, in_place=in_place)

    def _prepared(self) -> list[LaunchSpec]:
        """What is made of chunks before states are known."""
        p, t, names = self.tiling, self.tiling.tiles, ["q", "k", str(self.gate), self.beta]
        made = ["@inverse", "@scores", "@reads", "@writes", "@w", "@decay", "@sizes"]
        scores = self._chunkwise(
            "channel_scores", t.channel_scores, [*names, "@blocks", *made, self._mild, self._growth],
            [*made, *named(self._growth)], [*names, p.T, p.H, self.scale], STRONG=self._mild is not None,
            GROWTH=self._growth is not None, GROUP=p.group,
        )  # fmt: skip
        inverse = LaunchSpec(
            "channel_inverse", t.prepare, (p.n_chunks, p.B * p.H, 1), ("@inverse", self._gain or "@inverse"),
            ("@inverse",), ("@inverse", *named(self._gain)), constants={"C": t.chunk, "GAIN": self._gain is not None},
            options=t.prepare.options,
        )  # fmt: skip
        values = self._chunkwise(
            "channel_values", t.values, ["v", "@inverse", "@u", "@w"], ["@u", "@w"], ["v", p.T, p.H], ["@w"], V=p.V
        )
        blocks = LaunchSpec(
            "channel_blocks", Launch(0, 4, 1), (channels.matrices(t.chunk), 1, 1), ("@blocks",), (), ("@blocks",),
            constants={"C": t.chunk}, options=Launch(0, 4, 1).options,
        )  # fmt: skip
        return [blocks, scores, inverse, values]

    def _grads(self, part: Part) -> list[LaunchSpec]:
        """Of all chunks: plans with a gate a channel have one part."""
        p, t, names = self.tiling, self.tiling.tiles, ["q", "k", str(self.gate), self.beta]
        around = ["@entering", "@leaving", "@errors"]
        width = t.channel_width
        in_place, strong = width >= p.V >= 2 * t.chunk, self._mild is not None
        left = around if in_place else ["@parts", "@dwrites", "@dpairs"]
        rows = p.V if in_place else 2 * t.chunk
        parts = self._chunkwise(
            "channel_parts", t.channel_parts,
            [
                "do", "@inverse", "@errors", None if strong else "@derrors", *around[:2], self._skipped, "d_v",
                "@kept", *left,
            ],
            [*([] if strong else ["d_v"]), "@kept", *left], ["do", p.T, p.H, p.n_chunks, self.scale], around,
            V=p.V, BV=width, ROWS=rows, STRONG=strong, SKIPS=self._skipped is not None,
        )  # fmt: skip
        to_beta = gradient_of(self.beta)
        whole = t.channel_grads.cols >= p.K
        made = [*self.to_keys, to_beta if whole else "@dbeta", gradient_of(str(self.gate))]
        grads = self._chunkwise(
            "channel_grads", t.channel_grads, [*names, "@blocks", "@sizes", self._skipped, "@kept", *left, *made], made,
            [*names, p.T, p.H, p.n_chunks, self.scale], SIZED=t.channel_scores.cols, ROWS=rows,
            SKIPS=self._skipped is not None, GROUP=p.group,
        )  # fmt: skip
        exact = exact_launches.grads(self, part, made[2], made[3], 1 if whole else -(-p.K // t.channel_grads.cols))
        return [*exact, parts, replace(grads, grid=(p.n_chunks, p.B * p.H, -(-p.K // t.channel_grads.cols)))]

    def _summed(self) -> list[LaunchSpec]:
        whole = self.tiling.tiles.channel_grads.cols >= self.tiling.K
        sums = [] if whole else [step("sum", _sum, ("@dbeta",), (gradient_of(self.beta),))]
        return [*self._sum_of_groups(), *sums]


def _sum(parts: torch.Tensor, to: torch.Tensor) -> None:
    to.copy_(parts.sum(0))
