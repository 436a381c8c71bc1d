"""The launches of one call of the delta engine: prepare -> (summarize -> scan) -> output, and the same backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from flexsp.kernels.delta import channels, grads, join, prepare, walks
from flexsp.kernels.delta.plan import Plan
from flexsp.kernels.launches import Buffer, Facts, Launch, LaunchSpec, copied, named, scan, step, unit, zeroed
from flexsp.kernels.primitives import dots

__all__ = ["DeltaCall"]

_F32 = torch.float32
_SAVED = (
    "@states", "@A", "@alive", "@total", "@gates", "@bounds", "@strength", "@inverse", "@u", "@w", "@scores", "@reads",
    "@writes", "@decay", "@blocks", "@sizes",
)  # fmt: skip
_OWN = (
    *_SAVED, "@edges", "@dedges", "@dstates", "@entering", "@leaving", "@errors", "@derrors", "@kept", "@parts",
    "@dwrites", "@dpairs", "@dbeta",
)  # fmt: skip
_KERNELS = {
    kernel.__name__: kernel
    for kernel in (
        prepare.prepare, prepare.values, walks.summarize, join.join, walks.output, walks.states, walks.collect,
        walks.back, grads.grads, channels.channel_blocks, channels.channel_scores, channels.channel_inverse,
        channels.channel_values, channels.channel_parts, channels.channel_grads,
    )
}  # fmt: skip


@dataclass(frozen=True)
class DeltaCall:
    """A call of the delta engine, as `flexsp.kernels.launches.Call` describes it.

    A pointer that a kernel does not use is that of q. Buffers: ``@states`` and ``@dstates`` at the edges of the rank,
    ``@A`` its matrix, ``@gates`` cumulative log2 decay within chunks, ``@inverse`` of chunks, and in the backward pass
    what `walks` keeps of every chunk. With a gate a channel, ``@reads``, ``@writes`` and ``@decay`` of chunks are there
    for queries, keys and gates; and ``@parts``, ``@dwrites`` and ``@dpairs``, which lie in place of the states and
    errors that they are made of where these are large enough.

    Attributes:
        dtype: of q, k and v.
        beta: the name of the input beta.
        gate: that of the log gates, None where the state does not decay.
        by_channel: there is a gate a key channel.
        initial: initial states are given on this rank.
        ends: final states are wanted, and leave on this rank.
        text: what ranks compare of the call.
        name: of the variant, for messages.
    """

    plan: Plan
    dtype: torch.dtype
    beta: str
    gate: str | None
    types: tuple[torch.dtype, torch.dtype]
    scale: float
    initial: bool
    ends: bool
    text: str
    name: str
    by_channel: bool = False

    @cached_property
    def facts(self) -> Facts:
        p = self.plan
        return Facts(
            self.name, self.text, p.B, p.T, p.H, p.docs, p.tiles.chunk, p.n_chunks, 1, ("dense", p.K, p.V),
            self.ends, sparse=p.docs > 0,
        )  # fmt: skip

    def kernel(self, spec: LaunchSpec) -> Any:
        return _KERNELS[spec.kind]

    def look(self, frame: Any) -> None:
        """Nothing can be wrong that nobody looked at."""

    # Buffers

    def buffer(self, name: str) -> Buffer:
        p, C = self.plan, self.plan.tiles.chunk
        half = self.dtype if self.dtype == torch.bfloat16 else _F32
        chunks = p.B * p.H, p.n_chunks
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "@states": (_F32, (p.B, p.n_seg + 1, p.H, p.K, p.V)),
            "@dstates": (_F32, (p.B, p.n_seg + 1, p.H, p.K, p.V)),
            "@A": (_F32, (p.B, p.n_seg, p.H, p.K, p.K)),
            "@alive": (torch.int32, (p.B, p.n_seg, p.H)),
            "@bounds": (_F32, (p.B * p.H, 2, p.n_chunks)),
            "@strength": (_F32, (*chunks, C)),
            "@edges": (_F32, (p.B, 2, p.H, p.K, p.V)),
            "@dedges": (_F32, (p.B, 2, p.H, p.K, p.V)),
            "@total": (_F32, (p.B, 1, p.H, p.K, p.K)),
            "@gates": (_F32 if half == torch.bfloat16 else torch.float64, (*chunks, C)),
            "@inverse": (half, (*chunks, C, C)),
            "@entering": (half, (*chunks, p.V, p.K)),
            "@leaving": (half, (*chunks, p.V, p.K)),
            "@errors": (half, (*chunks, p.V, C)),
            "@derrors": (half, (*chunks, p.V, C)),
            "@u": (half, (*chunks, C, p.V)),
            "@w": (half, (*chunks, C, p.K)),
            "@scores": (half, (*chunks, C, C)),
            "@blocks": (half, (channels.matrices(C), C, C)),
            "@reads": (half, (*chunks, C, p.K)),
            "@writes": (half, (*chunks, C, p.K)),
            "@sizes": (torch.int32, (*chunks, -(-p.K // p.tiles.channel_scores.cols))),
            "@decay": (_F32, (*chunks, p.K)),
            "@kept": (_F32, (*chunks, p.K)),
            "@dbeta": (_F32, (-(-p.K // p.tiles.channel_grads.cols), p.B, p.T, p.H)),
            "@parts": (half, (*chunks, 2 * C, p.K)),
            "@dwrites": (half, (*chunks, 2 * C, p.K)),
            "@dpairs": (half, (*chunks, 2 * C, C)),
            f"d.{self.beta}": (self.types[0], (p.B, p.T, p.H)),
            f"d.{self.gate}": (self.types[1], (p.B, p.T, p.H, *([p.K] if self.by_channel else []))),
        }
        if name in found:
            return Buffer(*found[name])
        if name.removeprefix("@") in ("initial", "final", "dinitial", "dfinal"):
            return Buffer(_F32, (p.docs or p.B, p.H, p.K, p.V))
        width = p.K if name.removeprefix("d.") in ("q", "k") else p.V
        return Buffer(self.dtype, (p.B, p.T, p.H, width))

    def own(self, name: str) -> bool:
        return name in _OWN

    def saved(self, name: str) -> bool:
        return name in _SAVED

    # Launches

    def forward(self) -> list[LaunchSpec]:
        p, in_walk = self.plan, self.plan.docs > 0 or not self.plan.scanned
        launches = self._of_channels() if self.by_channel else [self._prepare(), self._values()]
        given = "@initial" if self.initial else None
        if p.scanned:
            launches += [self._summarize(given), *self._scan("@states", reverse=False)]
        within = given if in_walk else None
        states, final = "@states" if p.scanned else None, "@final" if self.ends else None
        output = self._launch(
            "output", p.tiles.output,
            [*self._keys, self._strength, "@u", "@w", "@scores", self._gates, "@o", states, within, final],
            ("@o", *named(final)), ["q", "k"], scaled=True,
            ENTERS=p.scanned, BOUNDARY=within is not None, LEAVES=self.ends,
        )  # fmt: skip
        launches.append(output)
        return launches if p.n_chunks else self._of_no_tokens(launches)

    def _of_no_tokens(self, launches: list[LaunchSpec]) -> list[LaunchSpec]:
        """The forward pass of a shard without tokens, whose transition is the unit."""
        if not self.plan.scanned:
            ends = copied("@final", "@initial") if self.initial else zeroed("@final")
            return [*launches, *([ends] if self.ends else [])]
        steps = [unit("@A"), zeroed("@states")]
        if self.initial and not self.plan.docs:
            steps.append(copied("@states", "@initial", 0))
        return [*steps, *launches, *([copied("@final", "@states", None, -1)] if self.ends else [])]

    def backward(self, dfinal: bool, dinitial: bool, wanted: Collection[str] = ()) -> list[LaunchSpec]:
        """All gradients of inputs are computed, whichever are `wanted`."""
        p, in_walk = self.plan, self.plan.docs > 0 or not self.plan.scanned
        initial = "@initial" if self.initial and in_walk else None
        after, to = "@dfinal" if dfinal else None, "@dinitial" if dinitial else None
        last = after if in_walk else None
        states, dstates = ("@states", "@dstates") if p.scanned else (None, None)
        tiles, of = p.tiles, ["@w", "@scores", self._gates]
        launches = [self._launch(
            "states", tiles.states,
            [self._keys[1], self._strength, "@u", "@w", self._gates, "@errors", states, initial, "@entering"],
            ("@errors", "@entering"), ["k"], ENTERS=p.scanned, BOUNDARY=initial is not None,
        )]  # fmt: skip
        if p.scanned:
            collect = self._launch(
                "collect", tiles.back, [*self._keys, "@do", self._strength, *of, self._bounds, "@dstates", after],
                ("@dstates",), ["q", "k", "do"], scaled=True, BOUNDARY=after is not None,
            )  # fmt: skip
            launches += [collect, *self._scan("@dstates", reverse=True)]
        launches.append(self._launch(
            "back", tiles.back, [*self._keys, "@do", self._strength, *of, "@derrors", dstates, last, to, "@leaving"],
            ("@derrors", "@leaving", *named(to)), ["q", "k", "do"], scaled=True,
            ENTERS=p.scanned, BOUNDARY=last is not None, LEAVES=dinitial,
        ))  # fmt: skip
        launches += self._grads_of_channels() if self.by_channel else [self._grads()]
        if p.n_chunks:
            return launches
        if not p.scanned:
            first = copied("@dinitial", "@dfinal") if dfinal else zeroed("@dinitial")
            return [first] if dinitial else []
        given = [copied("@dstates", "@dfinal", -1)] if dfinal and not p.docs else []
        left = [copied("@dinitial", "@dstates", None, 0)] if dinitial else []
        return [zeroed("@dstates"), *given, *launches, *left]

    @property
    def _gates(self) -> str | None:
        return None if self.gate is None else "@decay" if self.by_channel else "@gates"

    @property
    def _gated(self) -> int:
        """What decays a state, as `walks` knows it."""
        kind = walks.NONE if self.gate is None else walks.CHANNEL if self.by_channel else walks.SCALAR
        return int(kind.value)

    @property
    def _bounds(self) -> str | None:
        return "@bounds" if self._alive is not None and self.plan.scanned else None

    @property
    def _alive(self) -> str | None:
        return None if self.gate is None or self.by_channel else "@alive"

    @property
    def _keys(self) -> list[str]:
        """Queries and keys of walks."""
        return ["@reads", "@writes"] if self.by_channel else ["q", "k"]

    @property
    def _strength(self) -> str | None:
        return None if self.by_channel else "@strength"

    def _scan(self, states: str, reverse: bool) -> list[LaunchSpec]:
        """What enters segments, from what each of them leaves."""
        edges, p = ("@dedges" if reverse else "@edges"), self.plan
        if p.n_seg == 1:
            return [scan(states, "@A", None, reverse=reverse)]
        if not p.ranks:
            return [self._join(states, states, p.n_seg + 1, None, reverse)]
        whole = self._join(states, edges, 2, "@total", reverse, WHOLE=True)
        return [whole, scan(edges, "@total", None, reverse=reverse), self._join(states, edges, 2, None, reverse)]

    def _join(
        self, states: str, edges: str, slots: int, total: str | None, reverse: bool, WHOLE: bool = False
    ) -> LaunchSpec:
        p, how = self.plan, Launch(min(32, self.plan.tiles.output.cols), 4, 1)
        panels = -(-p.V // how.cols) + (-(-p.K // how.cols) if WHOLE and not reverse else 0)
        pointers = [states, "@A", self._alive, edges, total if not reverse else None]
        writes = named(edges, pointers[-1]) if WHOLE else (states,)
        reads = tuple(x for x in named(*pointers) if x not in writes or x == states)
        constants = {"K": p.K, "BK": 64 if p.K <= 64 else 128, "V": p.V, "BV": how.cols}
        constants |= {"REVERSE": reverse, "WHOLE": WHOLE, "GATED": self._alive is not None}
        return LaunchSpec(
            "join", how, (panels, p.B * p.H, 1), tuple(x or "q" for x in pointers), reads, writes,
            (p.H, p.n_seg, slots), constants, how.options,
        )  # fmt: skip

    def _spec(
        self, kind: str, how: Launch, grid: tuple[int, ...], pointers: Sequence[str | None], writes: Sequence[str],
        numbers: Sequence[int | float | str], constants: dict[str, Any],
    ) -> LaunchSpec:  # fmt: skip
        p = self.plan
        reads = tuple(x for x in named(*pointers) if x not in writes)
        sizes = {"K": p.K, "BK": 64 if p.K <= 64 else 128, "C": p.tiles.chunk}
        constants = sizes | {"GATED": self._gated, "PACKED": p.docs > 0} | constants | dots(self.dtype)
        table = "@table" if p.docs else "q"
        return LaunchSpec(
            kind, how, grid, (*(x or "q" for x in pointers), table), reads, tuple(writes), tuple(numbers), constants,
            how.options,
        )  # fmt: skip

    def _strides(self, names: Sequence[str | None]) -> list[int | str]:
        """Those of a token's numbers are 0 where there is no such input."""
        return [n for x in names for n in ([0, 0, 0] if x is None else [x])]

    def _prepare(self) -> LaunchSpec:
        p, names = self.plan, ["k", self.beta, self.gate]
        made = ["@inverse", "@strength", self._gates, self._bounds]
        return self._spec(
            "prepare", p.tiles.prepare, (p.n_chunks, p.B * p.H, 1), [*names, *made], named(*made),
            [*self._strides(names), p.T, p.H], {"BOUNDS": self._bounds is not None},
        )  # fmt: skip

    def _values(self) -> LaunchSpec:
        p, how = self.plan, self.plan.tiles.values
        pointers, made = ["q", "k", "v", "@inverse", "@strength", self._gates], ("@u", "@w", "@scores")
        return self._spec(
            "values", how, (p.n_chunks, p.B * p.H, 1), [*pointers, *made], made,
            ["q", "k", "v", p.T, p.H, self.scale], {"V": p.V, "BV": how.cols},
        )  # fmt: skip

    def _launch(
        self, kind: str, how: Launch, pointers: Sequence[str | None], writes: Sequence[str], inputs: Sequence[str],
        scaled: bool = False, **flags: bool,
    ) -> LaunchSpec:  # fmt: skip
        """A walk over the chunks of segments."""
        p = self.plan
        panels = -(-p.V // how.cols) + (-(-p.K // how.cols) if kind == "summarize" else 0)
        given = self._strides([None if self.by_channel and x != "do" else x for x in inputs])
        numbers: list[int | float | str] = [*given, p.T, p.H, p.n_seg, p.n_chunks, p.per_seg]
        numbers += [self.scale] if scaled else []
        grid = panels, p.B * p.H, p.n_seg
        return self._spec(kind, how, grid, pointers, writes, numbers, {"V": p.V, "BV": how.cols} | flags)

    def _summarize(self, given: str | None) -> LaunchSpec:
        return self._launch(
            "summarize", self.plan.tiles.states,
            [self._keys[1], self._strength, "@u", "@w", self._gates, self._bounds, "@states", given, "@A", self._alive],
            ("@states", "@A", *named(self._alive)),
            ["k"], BOUNDARY=given is not None,
        )  # fmt: skip

    def _grads(self) -> LaunchSpec:
        p, how = self.plan, self.plan.tiles.grads
        gate = None if self.gate is None else f"d.{self.gate}"
        pointers = ["q", "k", "@do", self.gate, "@strength", "@inverse", "@errors", "@derrors", self._gates]
        pointers += ["@entering", "@leaving", "d.q", "d.k", "d.v", f"d.{self.beta}", gate]
        writes = named("d.q", "d.k", "d.v", f"d.{self.beta}", gate)
        numbers = [*self._strides(["q", "k", "do", self.gate]), p.T, p.H, p.n_chunks, self.scale]
        return self._spec(
            "grads", how, (p.n_chunks, p.B * p.H, 1), pointers, writes, numbers,
            {"V": p.V, "BV": how.cols},
        )  # fmt: skip

    # With gates of channels

    def _chunkwise(
        self, kind: str, how: Launch, pointers: Sequence[str], writes: Sequence[str],
        numbers: Sequence[int | float | str], in_place: Collection[str] = (), **constants: int,
    ) -> LaunchSpec:  # fmt: skip
        """A program a chunk; what it writes `in_place` it reads first."""
        p = self.plan
        reads = tuple(x for x in dict.fromkeys(pointers) if x not in writes or x in in_place)
        given = {"K": p.K, "COLS": how.cols, "C": p.tiles.chunk, "PACKED": p.docs > 0} | constants | dots(self.dtype)
        return LaunchSpec(
            kind, how, (p.n_chunks, p.B * p.H, 1), (*pointers, "@table" if p.docs else "q"), reads, tuple(writes),
            tuple(numbers), given, how.options,
        )  # fmt: skip

    def _of_channels(self) -> list[LaunchSpec]:
        """What `prepare` and `values` are otherwise."""
        p, t, names = self.plan, self.plan.tiles, ["q", "k", str(self.gate), self.beta]
        made = ["@inverse", "@scores", "@reads", "@writes", "@w", "@decay", "@sizes"]
        scores = self._chunkwise(
            "channel_scores", t.channel_scores, [*names, "@blocks", *made], made, [*names, p.T, p.H, self.scale]
        )
        inverse = LaunchSpec(
            "channel_inverse", t.prepare, (p.n_chunks, p.B * p.H, 1), ("@inverse",), ("@inverse",), ("@inverse",),
            constants={"C": t.chunk}, options=t.prepare.options,
        )  # fmt: skip
        values = self._chunkwise(
            "channel_values", t.values, ["v", "@inverse", "@u", "@w"], ["@u", "@w"], ["v", p.T, p.H], ["@w"], V=p.V
        )
        blocks = LaunchSpec(
            "channel_blocks", Launch(0, 4, 1), (channels.matrices(t.chunk), 1, 1), ("@blocks",), (), ("@blocks",),
            constants={"C": t.chunk}, options=Launch(0, 4, 1).options,
        )  # fmt: skip
        return [blocks, scores, inverse, values]

    def _grads_of_channels(self) -> list[LaunchSpec]:
        p, t, names = self.plan, self.plan.tiles, ["q", "k", str(self.gate), self.beta]
        around = ["@entering", "@leaving", "@errors"]
        width = t.channel_width
        in_place = width >= p.V >= 2 * t.chunk
        left = around if in_place else ["@parts", "@dwrites", "@dpairs"]
        rows = p.V if in_place else 2 * t.chunk
        parts = self._chunkwise(
            "channel_parts", t.channel_parts,
            ["@do", "@inverse", "@errors", "@derrors", *around[:2], "d.v", "@kept", *left],
            ["d.v", "@kept", *left], ["do", p.T, p.H, p.n_chunks, self.scale], around, V=p.V, BV=width, ROWS=rows,
        )  # fmt: skip
        to_beta = f"d.{self.beta}"
        whole = t.channel_grads.cols >= p.K
        made = ["d.q", "d.k", to_beta if whole else "@dbeta", f"d.{self.gate}"]
        grads = self._chunkwise(
            "channel_grads", t.channel_grads, [*names, "@blocks", "@sizes", "@kept", *left, *made], made,
            [*names, p.T, p.H, p.n_chunks, self.scale], SIZED=t.channel_scores.cols, ROWS=rows,
        )  # fmt: skip
        grads = replace(grads, grid=(p.n_chunks, p.B * p.H, -(-p.K // t.channel_grads.cols)))
        return [parts, grads] if whole else [parts, grads, step("sum", _sum, ("@dbeta",), (to_beta,))]


def _sum(parts: torch.Tensor, to: torch.Tensor) -> None:
    to.copy_(parts.sum(0))
