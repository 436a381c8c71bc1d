"""The launches of one call of the diagonal engine: summarize -> propagate -> output, and the same backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from flexsp.kernels import primitives
from flexsp.kernels.diagonal import grads, output, summarize
from flexsp.kernels.diagonal.plan import NAME, Plan, decay_dtype
from flexsp.kernels.diagonal.tiles import Tile
from flexsp.kernels.launches import Buffer, Facts, Launch, LaunchSpec, SameTokenStride, copied, named, scan, zeroed
from flexsp.kernels.primitives import dots

__all__ = ["DiagonalCall"]

_F32 = torch.float32
_SAVED = ("@states", "@decay", "@cut", "@gates")
_SUMS = ("@reads", "@read_sums", "@writes", "@write_sums", "@pairs", "@edges", "@ends")
_OWN = (*_SAVED, *_SUMS, "@dstates")
_KERNELS = {
    kernel.__name__: kernel
    for kernel in (
        primitives.gate_kernel, summarize.summarize_kernel, output.output_kernel, grads.dq_kernel, grads.dkv_kernel,
        grads.gate_grad_kernel,
    )  # fmt: skip
}


def _count(n: int, block: int) -> int:
    return -(-n // block)


@dataclass(frozen=True)
class DiagonalCall:
    """A call of the diagonal engine, as `flexsp.kernels.launches.Call` describes it.

    A pointer that a kernel does not use is that of q. Buffers: ``@states`` and ``@dstates`` at the edges of segments,
    ``@decay`` of segments (natural logarithms), ``@gates`` cumulative log2 decay within chunks, ``@cut`` where a
    document begins in a segment, and what tokens leave to the gradient of the gates.

    Attributes:
        dtype: of q and k, and of what products multiply.
        gate: "g", the input with a number a token that the state decays by, or the name of one with a number a head;
            None where it does not decay.
        initial: initial states are given on this rank.
        ends: final states are wanted, and leave on this rank.
        early: dq is walked before the gradients of states come in.
        text: what ranks compare of the call.
        values: the type of v and of the outputs; None for `dtype`.
    """

    plan: Plan
    dtype: torch.dtype
    gate: str | None
    scale: float
    initial: bool
    ends: bool
    early: bool
    text: str
    values: torch.dtype | None = None

    @cached_property
    def facts(self) -> Facts:
        p = self.plan
        kind = "none" if self.gate is None else "scalar"
        return Facts(
            NAME, self.text, p.B, p.T, p.H, p.docs,
            p.tiles.chunk, p.n_chunks, p.n_seg, (kind, p.K, p.V), self.ends,
            sparse=p.packed, optional=frozenset(() if self.gate is None else (self.gate,)), by_head=frozenset({"g"}),
            by_token=frozenset({"g_gamma"}),
        )  # fmt: skip

    def kernel(self, spec: LaunchSpec) -> Any:
        return _KERNELS[spec.kind]

    def look(self, frame: Any) -> None:
        """Nothing can be wrong that the operators do not look at."""

    # Buffers

    def buffer(self, name: str) -> Buffer:
        p = self.plan
        state = p.K, p.V
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "@states": (_F32, (p.B, p.n_seg + 1, p.H, *state)),
            "@dstates": (_F32, (p.B, p.n_seg + 1, p.H, *state)),
            "@decay": (_F32, (p.B, p.n_seg, p.H)),
            "@cut": (torch.int32, (p.B, p.n_seg)),
            "@gates": (decay_dtype(self.dtype), (p.B, p.H, self._row)),
            "@edges": (_F32, (self._dk_tiles, p.B, p.n_seg, p.H)),
            "@ends": (_F32, (p.docs, p.H, _count(p.K, p.tiles.dq.bk), p.tiles.dq.bk)),
            "@reads": (_F32, self._sums(_count(p.K, p.tiles.dq.bk), p.tiles.dq.parts)),
            "@pairs": (_F32, self._sums(self._dk_tiles, p.tiles.chunk // 16 if self._exact else p.tiles.dk.parts)),
            "@writes": (_F32, self._sums(self._dk_tiles, p.tiles.dk.parts)),
            "@read_sums": (_F32, (p.B, p.H, p.n_chunks, _count(p.K, p.tiles.dq.bk), p.tiles.dq.bk)),
            "@write_sums": (_F32, (p.B, p.H, p.n_chunks, self._dk_tiles, p.tiles.dk.bk)),
            f"d.{self.gate}": (_F32, (p.B, p.H, p.T)),
        }
        if name in found:
            return Buffer(*found[name])
        if name.removeprefix("@") in ("initial", "final", "dinitial", "dfinal"):
            return Buffer(_F32, (p.docs or p.B, p.H, *state))
        keys = name.removeprefix("d.") in ("q", "k")
        dtype = self.dtype if keys or self.values is None else self.values
        return Buffer(dtype, (p.B, p.T, p.H, p.K if keys else p.V))

    @property
    def kept(self) -> tuple[str, ...]:
        used = {"@states": True, "@cut": self.plan.packed}
        return tuple(name for name in _SAVED if used.get(name, self.gate is not None))

    def own(self, name: str) -> bool:
        return name in _OWN or (self.gate != "g" and name == f"d.{self.gate}")

    def saved(self, name: str) -> bool:
        return name in _SAVED

    @property
    def _row(self) -> int:
        """Rows of all chunks."""
        return self.plan.n_chunks * self.plan.tiles.chunk

    @property
    def _exact(self) -> bool:
        """Whether what the gate gradient carries from chunk to chunk is summed up apart, in fp32."""
        return self.dtype == torch.bfloat16

    @property
    def _dk_tiles(self) -> int:
        return _count(self.plan.K, self.plan.tiles.dk.bk)

    def _sums(self, tiles: int, parts: int) -> tuple[int, ...]:
        """What tokens of a chunk leave to the gate gradient."""
        p = self.plan
        return p.B, p.H, p.n_chunks, tiles, parts, p.tiles.chunk

    # Launches

    def forward(self) -> list[LaunchSpec]:
        p = self.plan
        in_walk = "@initial" if p.packed and self.initial else None
        launches = [self._gate_sums()] if self._gates else []
        launches.append(self._summarize("k", "v", "@states", in_walk, reverse=False, zero=p.packed or not self.initial))
        if not p.n_chunks:
            launches.append(zeroed("@states", *(["@decay"] if self._gates else [])))
        if self.initial and not p.packed:
            launches.append(copied("@states", "@initial", 0))
        launches += [self._propagate("@states", reverse=False), self._output(in_walk)]
        if self.ends and not p.packed:
            launches.append(copied("@final", "@states", None, p.n_seg))
        return launches

    def backward(self, dfinal: bool, dinitial: bool, wanted: Collection[str]) -> list[LaunchSpec]:
        p, dgate = self.plan, self.gate is not None and self.gate in wanted
        in_walk = "@dfinal" if p.packed and dfinal else None
        launches = [self._summarize("q", "do", "@dstates", in_walk, reverse=True, zero=p.packed or not dfinal)]
        if not p.n_chunks:
            launches.append(zeroed("@dstates", *([f"d.{self.gate}"] if dgate else [])))
        if dfinal and not p.packed:
            launches.append(copied("@dstates", "@dfinal", p.n_seg))
        dq, propagate = self._dq(dgate, in_walk if dgate else None), self._propagate("@dstates", reverse=True)
        launches += [dq, propagate] if self.early else [propagate, dq]
        dinitial_of = "@dinitial" if dinitial and p.packed else None
        with_dv = p.tiles.dv is None
        launches.append(self._dkv(p.tiles.dk, in_walk, dinitial_of if with_dv else None, "d.k", with_dv, dgate))
        if p.tiles.dv is not None:
            launches.append(self._dkv(p.tiles.dv, in_walk, dinitial_of, "d.v", True, False))
        if dgate:
            launches.append(self._gate_grad(in_walk))
        if dinitial and not p.packed:
            launches.append(copied("@dinitial", "@dstates", None, 0))
        return launches

    @property
    def _gates(self) -> tuple[str, ...]:
        return () if self.gate is None else ("@gates",)

    @property
    def _table(self) -> str:
        return "@table" if self.plan.packed else "q"

    @property
    def _gate_strides(self) -> tuple[int, int]:
        return (0, 0) if self.gate is None else (self.plan.H * self._row, self._row)

    def _row_of(self, name: str) -> int:
        """Numbers of a token of all heads."""
        _, _, H, N = self.buffer(name).shape
        return H * N

    def _strides(self, *outputs: str) -> tuple[int, ...]:
        """Of contiguous outputs."""
        rows = [(self._row_of(name), self.buffer(name).shape[-1]) for name in outputs]
        return tuple([n for row, width in rows for n in (self.plan.T * row, row, width)])

    def _alike(self, inputs: Sequence[str], *outputs: str) -> SameTokenStride:
        return SameTokenStride(tuple(inputs), tuple(map(self._row_of, outputs)))

    def _walk(
        self, kind: str, tile: Tile, programs: int, pointers: Sequence[str | None], reads: Sequence[str],
        writes: Sequence[str], numbers: Sequence[int | str], **constants: Any,
    ) -> LaunchSpec:  # fmt: skip
        """A walk with its tile; `constants` are its own, those of every walk are added here."""
        p, gated = self.plan, self.gate is not None
        constants |= {"K": p.K, "V": p.V, "BK": tile.bk, "BV": tile.bv, "C": p.tiles.chunk, "PACKED": p.packed}
        constants |= {"DECAY": primitives.decay_scalar if gated else primitives.decay_none, "GATED": gated}
        how = Launch(tile.bv, tile.warps, tile.stages)
        cut = (p.T, p.H, p.n_seg, p.n_chunks, p.per_seg, self.scale)
        return LaunchSpec(
            kind, how, (programs, p.B * p.H, p.n_seg), tuple(x or "q" for x in pointers),
            (*reads, *self._gates), tuple(writes), (*numbers, *cut), constants | dots(self.dtype), how.options,
        )  # fmt: skip

    def _propagate(self, states: str, reverse: bool) -> LaunchSpec:
        decay, cut = None if self.gate is None else "@decay", "@cut" if self.plan.packed else None
        return scan(states, decay, cut, reverse=reverse)

    def _gate_sums(self) -> LaunchSpec:
        """Cumulative log2 decay of the chunks."""
        p, how = self.plan, Launch(0, 2, 1)
        strides: tuple[int | str, ...] = ("g",) if self.gate == "g" else (0, 0, 1)
        constants = {"C": p.tiles.chunk, "PACKED": p.packed}
        return LaunchSpec(
            "gate_kernel", how, (p.n_chunks, p.B * p.H, 1), (str(self.gate), "@gates", self._table), (str(self.gate),),
            ("@gates",), (*strides, p.T, p.H), constants, {"num_warps": how.warps},
        )  # fmt: skip

    def _summarize(self, x: str, y: str, states: str, boundary: str | None, *, reverse: bool, zero: bool) -> LaunchSpec:
        tile, p = self.plan.tiles.summarize, self.plan
        decay = "@decay" if self._gates else None
        cut = "@cut" if p.packed else None
        return self._walk(
            "summarize_kernel", tile, _count(p.K, tile.bk) * _count(p.V, tile.bv),
            [x, f"@{y}" if y == "do" else y, *(self._gates or (None,)), states, decay, cut, boundary, self._table],
            named(x, f"@{y}" if y == "do" else y, boundary), named(states, decay, cut),
            [x, y, *self._gate_strides], REVERSE=reverse, BOUNDARY=boundary is not None, ZERO=zero,
        )  # fmt: skip

    def _output(self, initial: str | None) -> LaunchSpec:
        tile, p = self.plan.tiles.output, self.plan
        final = "@final" if p.packed and self.ends else None
        return self._walk(
            "output_kernel", tile, _count(p.V, tile.bv),
            ["q", "k", "v", *(self._gates or (None,)), "@o", "@states", initial, final, self._table],
            ["q", "k", "v", "@states", *named(initial)], named("@o", final),
            ["q", "k", "v", *self._gate_strides, *self._strides("@o")],
            INITIAL=initial is not None, FINAL=final is not None, ALIKE=self._alike("qkv", "@o"),
        )  # fmt: skip

    def _dq(self, dgate: bool, dfinal: str | None) -> LaunchSpec:
        """`dgate`: leaves what the gate gradient needs, which includes products of `dfinal`."""
        tile, p = self.plan.tiles.dq, self.plan
        initial = "@initial" if p.packed and self.initial else None
        reads, sums = "@reads" if dgate else None, "@read_sums" if dgate and self._exact else None
        ends = None if dfinal is None else "@ends"
        return self._walk(
            "dq_kernel", tile, _count(p.K, tile.bk),
            ["q", "k", "v", "@do", *(self._gates or (None,)), "d.q", reads, sums, ends, "@states", initial, dfinal,
             self._table],
            ["q", "k", "v", "@do", "@states", *named(initial, dfinal)], named("d.q", reads, sums, ends),
            ["q", "k", "v", "do", *self._gate_strides, *self._strides("d.q")],
            INITIAL=initial is not None, READS=dgate, FINAL=dfinal is not None, PARTS=tile.parts, EXACT=self._exact,
            ALIKE=self._alike(("q", "k", "v", "do"), "d.q"),
        )  # fmt: skip

    def _dkv(
        self, tile: Tile, dfinal: str | None, dinitial: str | None, to: str, with_dv: bool, dgate: bool
    ) -> LaunchSpec:
        """Walks dk, dv, or both at once; `to` is "d.v" for dv alone. `dgate`: leaves what the gate gradient needs."""
        p, with_dk = self.plan, to == "d.k"
        sums = ["@pairs", "@writes", "@write_sums" if self._exact else None, "@edges"] if dgate else [None] * 4
        return self._walk(
            "dkv_kernel", tile, self._dk_tiles if with_dk else _count(p.V, tile.bv),
            ["q", "k", "v", "@do", *(self._gates or (None,)), to, "d.v", *sums, "@states", "@dstates", dfinal, dinitial,
             self._table],
            ["q", "k", "v", "@do", "@dstates", *(["@states"] if dgate else []), *named(dfinal)],
            named(to, "d.v" if with_dv else None, *sums, dinitial),
            ["q", "k", "v", "do", *self._gate_strides, *self._strides(to, "d.v")],
            FINAL=dfinal is not None, INITIAL=dinitial is not None, DK=with_dk, DV=with_dv, DG=dgate, PARTS=tile.parts,
            EXACT=self._exact, ALIKE=self._alike(("q", "k", "v", "do"), to, "d.v"),
        )  # fmt: skip

    def _gate_grad(self, dfinal: str | None) -> LaunchSpec:
        p, how, ends = self.plan, Launch(0, 2, 1), "@edges" if dfinal is None else "@ends"
        dq, dk = p.tiles.dq, p.tiles.dk
        # Noise: products of fp32 states, or of tf32x3, are good to about 2^-18; true values of that size hardly survive
        # a decay of DROP.
        constants = {
            "TILES": self._dk_tiles, "READ_TILES": _count(p.K, dq.bk), "PARTS": dk.parts, "READ_PARTS": dq.parts,
            "BK": dk.bk, "READ_BK": dq.bk, "EXACT": self._exact,
            "C": p.tiles.chunk, "DROP": -20.0 if self._exact else -30.0,
            "ROUNDING": 2.0**-14 if self._exact else 2.0**-16,
            "DECAY": primitives.decay_scalar, "PACKED": p.packed, "FINAL": dfinal is not None,
        }  # fmt: skip
        sums = ("@read_sums", "@write_sums") if self._exact else ("q", "q")
        reads = ("@pairs", "@reads", sums[0], "@writes", sums[1], "@edges", ends, "@gates")
        numbers = (*self._gate_strides, p.T, p.H, p.n_seg, p.n_chunks, p.per_seg)
        to = f"d.{self.gate}"
        return LaunchSpec(
            "gate_grad_kernel", how, (p.B * p.H, p.n_seg, 1), (*reads, to, self._table), reads, (to,), numbers,
            constants, {"num_warps": how.warps},
        )  # fmt: skip
