"""The launches of one call of the diagonal engine: summarize -> propagate -> output, and the same backward."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from flexsp.kernels import primitives
from flexsp.kernels.diagonal import grads, output, shared_grads, step_sizes, summarize, value_turns
from flexsp.kernels.diagonal.base_plan import BasePlan
from flexsp.kernels.diagonal.shared_plan import SharedGradients
from flexsp.kernels.diagonal.tiles import Tile
from flexsp.kernels.diagonal.tiling import NAME, decay_dtype
from flexsp.kernels.launch_plan import Buffer, Role, by_name, gradient_of
from flexsp.kernels.launch_spec import Launch, LaunchSpec, copied, named
from flexsp.kernels.run import power_of_2

if TYPE_CHECKING:
    from flexsp.kernels.diagonal.hopper_plan import HopperWalks

__all__ = ["DiagonalPlan"]

_F32 = torch.float32
_CHUNKS = 4  # a program of `token_sums_kernel`
_PAIRS, _ROWS = 32, 64  # of a program of `value_turns_kernel`, and rows of states that it holds at a time


def _count(n: int, block: int) -> int:
    return -(-n // block)


@dataclass(frozen=True)
class DiagonalPlan(BasePlan):
    """A call of the diagonal engine.

    Buffers beside those of `SegmentedPlan`: ``@decay`` of segments (natural logarithms), ``@gates`` cumulative log2
    decay within chunks, and what tokens leave to the gradients of the gates and of weights of v in the outputs.

    Attributes:
        token_skips: there is "w", weights of tokens by which outputs have v besides.
        write_gates: there is "i", log weights of tokens by which their keys are multiplied.
        turned: "turned", turns by which tokens rotate the state, and the caller has rotated q and k; or None.
        angles: how many of a row.
        turned_values: "turned_values", turns by which tokens rotate the state's columns, and the caller has rotated v;
            or None.
        value_angles: how many of a row.
    """

    token_skips: bool = False
    write_gates: bool = False
    turned: str | None = None
    angles: int = 0
    turned_values: str | None = None
    value_angles: int = 0

    kernels: ClassVar[dict[str, Any]] = by_name(
        primitives.gate_kernel, summarize.summarize_kernel, output.output_kernel, grads.dq_kernel,
        grads.dkv_kernel, grads.gate_grad_kernel, grads.token_sums_kernel, step_sizes.sum_heads_kernel,
        shared_grads.chunk_states_kernel, shared_grads.column_output_kernel, shared_grads.shared_values_kernel,
        shared_grads.shared_keys_kernel, shared_grads.chunk_gate_grad_kernel, value_turns.value_turns_kernel,
    )  # fmt: skip

    def settled(self) -> dict[str, Any]:
        skip, write = "w" if self.token_skips else None, "i" if self.write_gates else None
        optional = frozenset(named(self.gate, write, skip, self.turned, self.turned_values))
        return {
            "name": NAME, "sparse": self.n_docs > 0, "optional": optional, "skip": skip,
            "writing": None if write is None else "@writing", "by_head": frozenset({"g", "i", "w"}),
            "by_token": frozenset({"g_gamma"}), "aligned_gradient": self.tiling.tiles.hopper,
        }  # fmt: skip

    # Buffers

    def declare(self) -> list[Buffer]:
        values = self.dtype if self.values is None else self.values
        of_keys = self.dtype, (self.B, self.T, self.H // self.group, self.tiling.K)
        of_values = values, (self.B, self.T, self.H, self.tiling.V)
        tokens = self.token_buffers({"q": of_keys, "k": of_keys, "v": of_values}, of_values)
        of_gates = [] if self.gate is None else self.of_gates(self.gate)
        by_head = Buffer("@by_head", Role.SCRATCH, self.dtype, (self.B, self.T, self.H, self.tiling.K))
        shared = [] if self.shared is None else self.shared.buffers()
        edges = self.B, self.n_seg * self.tiling.per_seg, self.H, *self.state
        column = [Buffer("@entering", Role.SCRATCH, _F32, edges)] if self.tiling.V == 1 else []
        return [
            *self.states_of_segments(), *tokens, *of_gates, *self._of_writes(), by_head, *self._of_skips(), *shared,
            *column, *self._of_turns(), *self._of_value_turns(),
        ]  # fmt: skip

    def _of_writes(self) -> list[Buffer]:
        """Gates of keys, and what tokens leave to the gradients of the weights of theirs."""
        found = []
        if self.writing is not None:
            found.append(Buffer(self.writing, Role.SAVED, decay_dtype(self.dtype), (self.B, self.H, self._row)))
            parts = self._dk_tiles, self._parts(self.tiling.tiles.dk)
            found.append(Buffer("@of_steps", Role.SCRATCH, _F32, self._sums(*parts)))
        if self.write_gates:
            found.append(Buffer("i", Role.INPUT, _F32, (self.B, self.T, self.H)))
            found.append(Buffer("d_i", Role.GRADIENT, _F32, (self.B, self.H, self.T)))
        return found

    def _of_skips(self) -> list[Buffer]:
        found = [Buffer("@of_skip", Role.SCRATCH, _F32, self._sums(*self._skip_parts))]
        if self.token_skips:
            found.append(Buffer("w", Role.INPUT, _F32, (self.B, self.T, self.H)))
            found.append(Buffer("d_w", Role.GRADIENT, _F32, (self.B, self.H, self.T)))
        return found

    def _of_turns(self) -> list[Buffer]:
        """``@turn_reads``: what dq leaves to the gradients of turns; ``@turn_ends``: what final states do; ``@turns``:
        the gradients, a row a head."""
        if self.turned is None:
            return []
        turns, by_head = ((self.B, self.T, heads, self.angles) for heads in (self.H // self.group, self.H))
        return [
            Buffer(self.turned, Role.INPUT, _F32, turns), Buffer(gradient_of(self.turned), Role.GRADIENT, _F32, turns),
            Buffer("@turns", Role.SCRATCH, _F32, by_head), Buffer("@turn_reads", Role.SCRATCH, _F32, by_head),
            Buffer("@turn_ends", Role.SCRATCH, _F32, (self.tiling.n_docs, self.H, self.angles)),
        ]  # fmt: skip

    def _of_value_turns(self) -> list[Buffer]:
        """``@outputs``: what the forward pass returned; ``@ended``: the final states of documents."""
        if self.turned_values is None:
            return []
        turns = self.B, self.T, self.H, self.value_angles
        o = self.B, self.T, self.H, self.tiling.V
        return [
            Buffer(self.turned_values, Role.INPUT, _F32, turns),
            Buffer(gradient_of(self.turned_values), Role.GRADIENT, _F32, turns),
            Buffer("@outputs", Role.SAVED, self.dtype if self.values is None else self.values, o),
            Buffer("@ended", Role.SAVED, _F32, (self.n_docs or self.B, self.H, *self.state)),
        ]

    def _turns_in(self, wanted: Collection[str]) -> str | None:
        """Where walks leave the gradients of turns, if these are wanted."""
        if self.turned is None or self.turned not in wanted:
            return None
        return gradient_of(self.turned) if self.group == 1 else "@turns"

    @cached_property
    def shared(self) -> SharedGradients | None:
        """The gradients, where chunks have a program each: where heads share keys, or states have one column."""
        tiles = self.tiling.tiles.shared
        return None if tiles is None else SharedGradients(self, tiles)

    @cached_property
    def hopper(self) -> HopperWalks | None:
        """Walks in Gluon. Not imported before: Gluon is not in all releases of Triton."""
        if not self.tiling.tiles.hopper:
            return None
        from flexsp.kernels.diagonal.hopper_plan import HopperWalks

        return HopperWalks(self)

    def of_gates(self, gate: str) -> list[Buffer]:
        """The gates, and what their gradient is made of; that of a number a head is left for every token."""
        p, dq, dk = self.tiling, self.tiling.tiles.dq, self.tiling.tiles.dk
        read_tiles, of_head = _count(p.K, dq.bk), gate != "g"
        scratch = {
            "@edges": (self._dk_tiles, p.B, p.n_seg, p.H),
            "@ends": (p.n_docs, p.H, read_tiles, dq.bk),
            "@reads": self._sums(read_tiles, self._parts(dq)),
            "@pairs": self._sums(self._dk_tiles, p.tiles.chunk // 16 if self._exact else dk.parts),
            "@writes": self._sums(self._dk_tiles, self._parts(dk)),
            "@read_sums": (p.B, p.H, p.n_chunks, read_tiles, dq.bk),
            "@write_sums": (p.B, p.H, p.n_chunks, self._dk_tiles, self._written),
        }
        return [
            Buffer(gate, Role.INPUT, _F32, (p.H,) if of_head else (p.B, p.T, p.H)),
            Buffer(gradient_of(gate), Role.SCRATCH if of_head else Role.GRADIENT, _F32, (p.B, p.H, p.T)),
            Buffer("@decay", Role.SAVED, _F32, (p.B, p.n_seg, p.H)),
            Buffer("@gates", Role.SAVED, decay_dtype(self.dtype), (p.B, p.H, self._row)),
            *(Buffer(name, Role.SCRATCH, _F32, shape) for name, shape in scratch.items()),
        ]

    @property
    def _exact(self) -> bool:
        """Whether what the gate gradient carries from chunk to chunk is summed up apart, in fp32."""
        return self.dtype == torch.bfloat16

    @property
    def _read_sums(self) -> str | None:
        """Not of walks that take states in two parts: what tokens read of these adds up to the same."""
        return "@read_sums" if self._exact and self.turned is None else None

    @property
    def _written(self) -> int:
        """Numbers that add up to <dS, what a chunk adds to S>: of rows of a tile, or of tokens (see `_read_sums`)."""
        dk = self.tiling.tiles.dk
        return dk.bk if self.turned is None else dk.parts * self.chunk

    @property
    def _dk_tiles(self) -> int:
        return _count(self.tiling.K, self.tiling.tiles.dk.bk)

    def _parts(self, tile: Tile) -> int:
        """In which a walk with the tile leaves sums over channels."""
        return tile.parts if self.hopper is None else tile.bk // 16

    @property
    def _skip_parts(self) -> tuple[int, int]:
        """Tiles and parts of a tile in which a walk leaves sums for gradients of skip weights."""
        dk, dv = self.tiling.tiles.dk, self.tiling.tiles.dv
        if self.hopper is not None:
            return 1, 2
        return (1, dk.parts) if dv is None else (_count(self.tiling.V, dv.bv), dv.parts)

    def _sums(self, tiles: int, parts: int) -> tuple[int, ...]:
        """What tokens of a chunk leave to the gate gradient."""
        return self.B, self.H, self.n_chunks, tiles, parts, self.chunk

    # Launches

    @property
    def carried(self) -> str | None:
        return None if self.gate is None else "@decay"

    def summarize(self, initial: str | None, *, zero: bool, onward: bool) -> list[LaunchSpec]:
        gates = [] if self.gate is None else [self.gate_sums(self.gate)]
        return [*gates, self._summarize("k", "v", "@states", initial, REVERSE=False, ZERO=zero, ONWARD=onward)]

    def summarize_backward(self, last: str | None, *, zero: bool, onward: bool) -> list[LaunchSpec]:
        return [self._summarize("q", "do", "@dstates", last, REVERSE=True, ZERO=zero, ONWARD=onward)]

    def before_scan(self, last: str | None, wanted: Collection[str]) -> list[LaunchSpec]:
        if self.shared is not None:
            return [self.shared.entering()]
        return self._dq(last, wanted) if self.dq_first else []

    def gradients(self, last: str | None, to: str | None, wanted: Collection[str]) -> list[LaunchSpec]:
        if self.shared is not None:
            found = self.shared.gradients(last, to, wanted)
        else:
            found = self._of_walks(last, to, wanted)
        found += self.gate_gradients(last, wanted)
        if self._turns_in(wanted) == "@turns":
            found.append(self.sum_rows("@turns", gradient_of(str(self.turned)), self.H, self.group))
        if self.turned_values is not None and self.turned_values in wanted:
            found.append(self._value_turns(gradient_of(self.turned_values), last))
        return found

    def forward(self) -> list[LaunchSpec]:
        kept = [] if self.turned_values is None else [copied("@outputs", "o")]
        if kept and self.n_docs and self.returns_final:
            kept.append(copied("@ended", "@final"))
        return [*super().forward(), *kept]

    def _value_turns(self, to: str, last: str | None) -> LaunchSpec:
        p, pairs = self.tiling, min(_PAIRS, power_of_2(self.value_angles))
        ended = None if last is None else "@ended"
        return self.launch(
            "value_turns_kernel", Launch(0, 4, 1), (_count(self.value_angles, pairs), p.B * p.H, p.n_seg),
            ["v", "d_v", "@outputs", "do", "@states", "@dstates", ended, last, to], [to],
            ["v", "do", p.T, p.H, p.n_seg, p.n_chunks, p.per_seg],
            {"K": p.K, "V": p.V, "S": self.value_angles, "BP": pairs, "BK": min(_ROWS, power_of_2(p.K)), "C": p.chunk,
             "FINAL": last is not None},
        )  # fmt: skip

    def _of_walks(self, last: str | None, to: str | None, wanted: Collection[str]) -> list[LaunchSpec]:
        """Gradients of q, k, v, and what walks leave to the others."""
        tiles = self.tiling.tiles
        dq = [] if self.dq_first else self._dq(last, wanted)
        if tiles.dv is None:
            dkv = [*self._dkv(tiles.dk, last, to, "d_k", True, wanted), *self._sum_heads("d_k")]
        else:
            dkv = [
                *self._dkv(tiles.dk, last, None, "d_k", False, wanted), *self._sum_heads("d_k"),
                *self._dkv(tiles.dv, last, to, "d_v", True, wanted),
            ]  # fmt: skip
        return [*dq, *dkv]

    def gate_gradients(self, last: str | None, wanted: Collection[str]) -> list[LaunchSpec]:
        found = []
        if self.gate in wanted or ("i" in wanted and self.shared is not None):  # which adds parts up for both
            found.append(self.gate_grad(gradient_of(str(self.gate)), last))
        if "i" in wanted:
            found.append(self._token_sums(*self.of_keys, "d_i"))
        if "w" in wanted:
            found.append(self._token_sums("@of_skip", math.prod(self._skip_parts), "d_w"))
        return found

    @property
    def of_keys(self) -> tuple[str, int]:
        """What tokens wrote for all that read it: the gradients of logarithms of their weights. And in how many parts
        these are left."""
        if self.shared is not None:
            return "@writes", 1
        return "@writes" if self._exact else "@of_steps", self._dk_tiles * self._parts(self.tiling.tiles.dk)

    def _token_sums(self, x: str, parts: int, to: str) -> LaunchSpec:
        return self.small(
            "token_sums_kernel", (_count(self.n_chunks, _CHUNKS), self.B * self.H, 1), [x, to], [to],
            (self.T, self.n_chunks), PARTS=parts, PER=_CHUNKS, C=self.chunk,
        )  # fmt: skip

    def of_gate(self, wanted: Collection[str]) -> bool:
        return self.gate in wanted or "i" in wanted

    def _by_head(self, gradient: str) -> str:
        """Where walks leave the gradient of q or k: a row a head, unless they add up themselves."""
        return gradient if self._summed or gradient == "d_v" else "@by_head"

    @property
    def _summed(self) -> bool:
        """Whether walks leave gradients of q and k for all heads of a group."""
        return self.group == 1 or (self.hopper is not None and self.hopper.adds)

    def _sum_heads(self, gradient: str) -> list[LaunchSpec]:
        """What heads of a group left. Both gradients lie in the same place until then, one after the other."""
        if self._summed:
            return []
        return [self.sum_rows("@by_head", gradient, self.H, self.group)]

    def sums(self, wanted: Collection[str]) -> list[str]:
        return [gradient_of(self.gate)] if self.gate is not None and self.gate in wanted else []

    def gate_sums(self, gate: str) -> LaunchSpec:
        """Cumulative log2 decay of the chunks, and the gates of keys."""
        p, write = self.tiling, "i" if self.write_gates else None
        strides: tuple[int | str, ...] = (gate,) if gate == "g" else (0, 0, 1)
        of_write: tuple[int | str, ...] = (1, 1, 1) if write is None else (write,)
        return self.small(
            "gate_kernel", (p.n_chunks, p.B * p.H, 1), [gate, write, "@gates", self.writing],
            named("@gates", self.writing), (*strides, *of_write, p.T, p.H), C=p.chunk, WRITES=self.write_gates,
        )  # fmt: skip

    def _summarize(self, x: str, y: str, states: str, boundary: str | None, **constants: bool) -> LaunchSpec:
        tile, p, writing = self.tiling.tiles.summarize, self.tiling, None if constants["REVERSE"] else self.writing
        return self.walk(
            "summarize_kernel", tile, _count(p.K, tile.bk) * _count(p.V, tile.bv),
            [x, y, self.gates, writing, states, self.carried, self.cut, boundary],
            named(states, self.carried, self.cut), [x, y, *self.gate_strides], None, BOUNDARY=boundary is not None,
            STEPS=writing is not None, TURNED=self.turned is not None, X_GROUP=self.group, **constants,
        )  # fmt: skip

    def output(self, initial: str | None, final: str | None) -> list[LaunchSpec]:
        if self.tiling.V == 1:
            return self._output_of_column(initial, final)
        if self.hopper is not None:
            return [self.hopper.output(initial, final)]
        tile, p = self.tiling.tiles.output, self.tiling
        return [self.walk(
            "output_kernel", tile, _count(p.V, tile.bv),
            ["q", "k", "v", self.gates, self.writing, self.skip, "o", "@states", initial, final], named("o", final),
            ["q", "k", "v", *self.gate_strides, *self.strides("o"), *self.skip_strides],
            INITIAL=initial is not None, FINAL=final is not None, ALIKE=self._alike("qkv", "o"),
            STEPS=self.writing is not None, SKIP=self.skip is not None, BY_TOKEN=self.token_skips,
            STRICT=self.strict, GROUP=self.group,
        )]  # fmt: skip

    def _output_of_column(self, initial: str | None, final: str | None) -> list[LaunchSpec]:
        """Chunks side by side: such a state has few numbers, and its products are no work for a walk to do."""
        p, kept = self.tiling, self.n_seg * self.tiling.per_seg
        tile = Tile(64, 16, 4, 2)
        states = self.chunk_states(tile, "k", "v", "@states", "@entering", initial, final, kept, reverse=False)
        constants = {
            "K": p.K, "BK": p.tiles.output.bk, "C": p.chunk, "GATED": self.gate is not None,
            "STEPS": self.writing is not None, "SKIP": self.skip is not None, "STRICT": self.strict,
            "GROUP": self.group,
        }  # fmt: skip
        output = self.launch(
            "column_output_kernel", Launch(0, p.tiles.output.warps, 1), (p.n_chunks, p.B * p.H, 1),
            ["q", "k", "v", self.gates, self.writing, self.skip, "o", "@entering"], ["o"],
            ["q", "k", "v", *self.gate_strides, *self.strides("o"), p.T, p.H, kept, self.scale], constants | self.dots,
        )  # fmt: skip
        return [states, output]

    def _dq(self, last: str | None, wanted: Collection[str]) -> list[LaunchSpec]:
        """Leaves what the gate gradient needs, which includes products of `last`."""
        tile, p, dgate, to = self.tiling.tiles.dq, self.tiling, self.of_gate(wanted), self._by_head("d_q")
        initial = self.in_walk("@initial" if self.initial else None)
        if self.hopper is not None:
            return [*self.hopper.dq(to, initial, last, gates=dgate), *self._sum_heads("d_q")]
        turns = None if self._turns_in(wanted) is None else "@turn_reads"
        last = last if dgate or turns else None
        reads, sums = "@reads" if dgate else None, self._read_sums if dgate else None
        ends = None if last is None or not dgate else "@ends"
        turn_ends = None if last is None or turns is None else "@turn_ends"
        dq = self.walk(
            "dq_kernel", tile, _count(p.K, tile.bk),
            ["q", "k", "v", "do", self.gates, self.writing, to, reads, sums, turns, ends, turn_ends, "@states", initial,
             last],
            named(to, reads, sums, turns, ends, turn_ends),
            ["q", "k", "v", "do", *self.gate_strides, *self.strides(to)],
            INITIAL=initial is not None, READS=dgate, FINAL=last is not None, PARTS=tile.parts, EXACT=self._exact,
            ALIKE=self._alike(("q", "k", "v", "do"), to), STEPS=self.writing is not None,
            STRICT=self.strict, TURNED=self.turned is not None, TURNS=self.angles if turns else 0, GROUP=self.group,
        )  # fmt: skip
        return [dq, *self._sum_heads("d_q")]

    def _dkv(
        self, tile: Tile, last: str | None, to_initial: str | None, to: str, with_dv: bool, wanted: Collection[str]
    ) -> list[LaunchSpec]:
        """Walks dk, dv, or both at once; `to` is "d_v" for dv alone. Leaves what the `wanted` gradients of gates, steps
        and skips need."""
        p, with_dk, to = self.tiling, to == "d_k", self._by_head(to)
        dgate = with_dk and self.of_gate(wanted)
        skips = self.skip is not None and self.skip in wanted
        if self.hopper is not None:
            walks = self.hopper
            return walks.dk(to, last, gates=dgate, skips=skips) if with_dk else [walks.dv(last, to_initial)]
        dskip = "@of_skip" if with_dv and skips else None
        of_steps = "@of_steps" if self.writing is not None and dgate and not self._exact else None
        turns = self._turns_in(wanted) if with_dk else None
        sums = ["@pairs", "@writes", "@write_sums" if self._exact else None] if dgate else [None] * 3
        turn_reads = None if turns is None else "@turn_reads"
        turn_ends = None if turns is None or last is None else "@turn_ends"
        sums += [turns, "@edges" if dgate else None]
        return [self.walk(
            "dkv_kernel", tile, self._dk_tiles if with_dk else _count(p.V, tile.bv),
            ["q", "k", "v", "do", self.gates, self.writing, self.skip, to, "d_v", *sums[:3], turn_reads, turn_ends,
             *sums[3:], of_steps, dskip, "@states", "@dstates", last, to_initial],
            named(to, "d_v" if with_dv else None, *sums, of_steps, dskip, to_initial),
            ["q", "k", "v", "do", *self.gate_strides, *self.strides(to, "d_v"), *self.skip_strides],
            named("q", "k", "v", "do", self.gates, self.writing, self.skip, "@dstates",
                  "@states" if dgate or turns else None, turn_reads, turn_ends, last),
            FINAL=last is not None, INITIAL=to_initial is not None, DK=with_dk, DV=with_dv, DG=dgate, PARTS=tile.parts,
            EXACT=self._exact, ALIKE=self._alike(("q", "k", "v", "do"), to, "d_v"), STEPS=self.writing is not None,
            SKIP=self.skip is not None and with_dv, DSKIP=dskip is not None, BY_TOKEN=self.token_skips and with_dv,
            STRICT=self.strict, TURNED=self.turned is not None, TURNS=self.angles if turns else 0, GROUP=self.group,
        )]  # fmt: skip

    def gate_grad(self, to: str, last: str | None) -> LaunchSpec:
        if self.shared is not None:
            return self.shared.gate_grad(to, steps=self.write_gates, skip=False)
        p, dq, dk = self.tiling, self.tiling.tiles.dq, self.tiling.tiles.dk
        # Noise: products of fp32 states, or of tf32x3, are good to about 2^-18; true values of that size hardly survive
        # a decay of DROP.
        constants = {
            "TILES": self._dk_tiles, "READ_TILES": _count(p.K, dq.bk),
            "PARTS": self._parts(dk), "READ_PARTS": self._parts(dq),
            "BK": self._written, "READ_BK": dq.bk, "EXACT": self._exact,
            "TURNED": self.turned is not None, "C": p.chunk, "DROP": -20.0 if self._exact else -30.0,
            "ROUNDING": 2.0**-14 if self._exact else 2.0**-16,
            "DECAY": primitives.decay_scalar, "FINAL": last is not None,
        }  # fmt: skip
        write_sums, ends = "@write_sums" if self._exact else None, "@edges" if last is None else "@ends"
        reads = ["@pairs", "@reads", self._read_sums, "@writes", write_sums, "@edges", ends]
        numbers = (*self.gate_strides, p.T, p.H, p.n_seg, p.n_chunks, p.per_seg)
        return self.small(
            "gate_grad_kernel", (p.B * p.H, p.n_seg, 1), [*reads, "@gates", to], [to], numbers, **constants
        )
