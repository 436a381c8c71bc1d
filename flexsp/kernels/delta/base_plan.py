"""What a call of the delta engine was given, how it is cut, and what all its launches have in common.

Also the launches of `exact` and `exact_grads`, which do segments again, token by token, behind those whose results they
replace.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from flexsp.kernels.delta import exact, exact_grads, walks
from flexsp.kernels.delta.tiling import Part, Tiling
from flexsp.kernels.launch_plan import LaunchPlan
from flexsp.kernels.launch_spec import Launch, LaunchSpec, named
from flexsp.kernels.primitives import dots

__all__ = ["BasePlan", "choose"]

_COLS = 8  # of the state, where a segment is done token by token: in one warp
_WARP = Launch(_COLS, 1, 1)


def choose(call: LaunchPlan) -> LaunchSpec:
    """Which segments are done token by token, of a call that `rounds`."""
    p, n_docs = call.tiling, call.n_docs
    pointers = "@gain", "@exact", "@table" if n_docs else "@exact"
    constants = {"C": p.chunk, "PACKED": n_docs > 0}
    return LaunchSpec(
        "choose", _WARP, (call.B * call.H, p.n_seg, 1), pointers, ("@gain",), ("@exact",),
        (call.T, p.n_chunks, p.per_seg), constants, _WARP.options, kernel=exact.choose,
    )  # fmt: skip


class _Buffers(LaunchPlan):
    """What follows from a call's arguments and from the kind of plan; buffers by name, None where kernels use none.

    Attributes:
        rounds: the call's chunks multiply rounded inverses: in other dtypes products are of fp32.
        half: the dtype that operands of chunks' products are kept in.
        gated: what decays a state, as `walks` knows it.
        transition_nonzero: which segments' matrices count: not where states decay to nothing, or a document begins.
        gates, bounds, gain: what `wy_inverse` leaves of chunks.
        keys, chunk_beta: queries and keys of walks, and what they multiply keys by.
        unit: what kernels read and write in place of inputs and of their gradients: copies of q and k of unit length,
            if kernels do not divide by `norms`.
        norms: 1 / norm of queries and keys of chunks, for kernels that divide by these themselves.
        to_keys: gradients of q and k, of each head.
        segment_states, segment_gradients: the states that enter segments and their gradients; None where a walk begins
            with those of the call.
    """

    rounds: bool
    half: torch.dtype
    gated: int
    transition_nonzero: str | None
    gates: str | None
    bounds: str | None
    gain: str | None
    keys: list[str]
    chunk_beta: str | None
    unit: dict[str, str]
    norms: str | None
    to_keys: list[str]
    segment_states: str | None
    segment_gradients: str | None


@dataclass(frozen=True)
class BasePlan(_Buffers):
    """The tiling, the inputs and the options of one call.

    Attributes:
        dtype: of q, k and v.
        beta: the name of the input beta.
        gate: that of the log gates, None where the state does not decay.
        types: dtypes of beta and of the gates.
        norm: q and k are to be divided by their norms.
        divides: kernels do that as they read q and k.
        erases: beta has a number for each channel of the keys that read, and those that write are as they are.
        finishes: kernels of gradients sum those of heads that share queries and keys, and take them back through norms.
    """

    divides: ClassVar[bool] = False
    erases: ClassVar[bool] = False
    finishes: ClassVar[bool] = False

    tiling: Tiling
    dtype: torch.dtype
    beta: str
    gate: str | None
    types: tuple[torch.dtype, torch.dtype]
    scale: float
    initial: bool
    returns_final: bool
    description: str
    name: str
    norm: bool = False

    def settled(self) -> dict[str, Any]:
        scanned, rounds, decays = self.tiling.scanned, self.dtype == torch.bfloat16, self.gate is not None
        own_gradients = self.tiling.group == 1 and not self.norm
        return {
            "sparse": self.n_docs > 0, "scanned": scanned, "aligned_gradient": self.tiling.tiles.copies,
            "rounds": rounds, "half": self.dtype if rounds else torch.float32,
            "gated": int((walks.SCALAR if decays else walks.NONE).value),
            "transition_nonzero": "@transition_nonzero" if decays or (self.tiling.n_docs and scanned) else None,
            "gates": "@gates" if decays else None, "bounds": "@bounds" if decays and scanned else None,
            "gain": "@gain" if rounds else None, "keys": ["q", "k"], "chunk_beta": "@chunk_beta",
            "unit": {"q": "@q", "k": "@k"} if self.norm and not self.divides else {},
            "norms": "@norms" if self.norm and self.divides else None,
            "to_keys": ["d_q", "d_k"] if own_gradients else ["@dq", "@dk"],
            "segment_states": "@states" if scanned else None, "segment_gradients": "@dstates" if scanned else None,
        }  # fmt: skip

    def kernel_launch(
        self, kind: str, how: Launch, grid: tuple[int, ...], pointers: Sequence[str | None], writes: Sequence[str],
        inputs: Sequence[str | None] = (), *, kernel: Any = None, reads: Sequence[str] | None = None,
        in_place: Collection[str] = (), counts: Mapping[str, int] | None = None, **constants: Any,
    ) -> LaunchSpec:  # fmt: skip
        """As `launch`, with the `unit` copies of queries and keys if there are some. Counts and sizes of the call are
        passed by name: the kernel gets those that it takes.

        Args:
            inputs: those whose strides the kernel takes, before its counts; the strides of None are 0.
            counts, constants: the kernel's own, which go before those of the call.
        """
        p, taken = self.tiling, (kernel or self.kernels[kind]).arg_names
        numbers: dict[str, int | float] = {
            "T": p.T, "H": p.H, "n_seg": p.n_seg, "n_chunks": p.n_chunks, "per_seg": p.per_seg, "held": p.held,
            "scale": self.scale, **(counts or {}),
        }  # fmt: skip
        sizes = {
            "K": p.K, "BK": p.key_block, "V": p.V, "BV": how.cols, "COLS": how.cols, "C": p.chunk, "GATED": self.gated,
            "GROUP": p.group, "STEPS": p.steps, "ERASES": self.erases, **dots(self.dtype),
        }  # fmt: skip
        strides = [n for x in inputs for n in self._strides(x)]
        pointers = [x if x is None else self.unit.get(x, x) for x in pointers]
        writes = [self.unit.get(x, x) for x in writes]
        reads = None if reads is None else [self.unit.get(x, x) for x in reads]
        return self.launch(
            kind, how, grid, pointers, writes, [*strides, *(numbers[x] for x in taken if x in numbers)],
            {x: sizes[x] for x in taken if x in sizes} | constants, reads=reads, in_place=in_place, kernel=kernel,
        )  # fmt: skip

    def _strides(self, name: str | None) -> Sequence[int | str]:
        """From sequence to sequence, token to token and head to head, or the input that has them."""
        if name is None:
            return 0, 0, 0
        if name not in self.unit:
            return (name,)
        _, rows, heads, width = self.buffers[self.unit[name]].shape
        return rows * heads * width, heads * width, width

    # Segments that are done again, token by token

    def _exact_walk(
        self, kernel: Any, inputs: list[str | None], pointers: list[str | None], writes: tuple[str, ...], panels: int,
        part: Part | None, **flags: Any,
    ) -> list[LaunchSpec]:  # fmt: skip
        """Of the segments of a part, or of all."""
        if not self.rounds:
            return []
        n_seg, before = (self.n_seg, 0) if part is None else part[:2]
        return [self.kernel_launch(
            kernel.__name__, _WARP, (panels, self.B * self.H, n_seg), [*inputs, "@exact", *pointers], writes, inputs,
            kernel=kernel, counts={"before": before}, NORM=self.norms is not None, **flags,
        )]  # fmt: skip

    def exact_forward(
        self, kind: str, given: str | None, part: Part | None = None, final: str | None = None
    ) -> list[LaunchSpec]:
        """As the walk of this kind: "summarize", "output" or "states"."""
        p, sums, reads = self.tiling, kind == "summarize", kind == "output"
        nonzero = self.transition_nonzero if sums else None
        made: list[str | None] = ["o" if reads else None, "@entering" if kind == "chunk_states" else None]
        made += [self.segment_states, "@A" if sums else None, nonzero]
        writes = {
            "summarize": ("@states", "@A", *named(nonzero)), "output": ("o", *named(final)),
            "chunk_states": ("@entering",),
        }  # fmt: skip
        panels = -(-p.V // _COLS) + (-(-p.K // _COLS) if sums else 0)
        return self._exact_walk(
            exact.exact_forward, ["q", "k", "v", self.beta, self.gate], [*made, given, final], writes[kind], panels,
            part, READS=reads, KEEPS=kind == "chunk_states", SUMS=sums, NONZERO=nonzero is not None,
            ENTERS=p.scanned and not sums, BOUNDARY=given is not None, LEAVES=final is not None,
        )  # fmt: skip

    def exact_backward(
        self, kind: str, after: str | None, to: str | None = None, part: Part | None = None
    ) -> list[LaunchSpec]:
        """As the walk of this kind: "summarize_backward" or "output_backward"."""
        p, sums = self.tiling, kind == "summarize_backward"
        pointers = [None if sums else "@leaving", self.segment_gradients, after, to]
        writes = ("@dstates",) if sums else ("@leaving", *named(to))
        return self._exact_walk(
            exact.exact_backward, ["q", "k", self.beta, self.gate, "do"], pointers, writes, -(-p.V // _COLS), part,
            SUMS=sums, ENTERS=p.scanned and not sums, BOUNDARY=after is not None, LEAVES=to is not None,
        )  # fmt: skip

    def exact_gradients(self, part: Part, to_beta: str, to_gate: str | None, tiles: int) -> list[LaunchSpec]:
        """Of the chunks of a part; dbeta is [tiles, ...]."""
        if not self.rounds:
            return []
        cols, inputs = self._exact_columns, ["q", "k", "v", self.beta, self.gate, "do"]
        groups = -(-part.chunks // int(exact.GROUP_OF_CHUNKS.value)) * self.B * self.H
        made = [*self.to_keys, "d_v", to_beta, to_gate]
        return [self.kernel_launch(
            "exact_grads", Launch(cols, max(4, self.tiling.key_block * cols // 2048), 1),
            (min(groups, self._exact_programs), 1, 1),
            [*inputs, "@exact", "@entering", "@leaving", "@scratch", *made], [*named(*made), "@scratch"], inputs,
            kernel=exact_grads.exact_grads, TILES=tiles, NORM=self.norms is not None,
            counts={"before": part.chunks_before, "count": part.chunks, "groups": groups},
        )]  # fmt: skip

    @property
    def _exact_columns(self) -> int:
        """Columns of the values at a time: those of a state that fits the registers of eight warps."""
        return min(max(16, 1 << (self.tiling.V - 1).bit_length()), 16384 // self.tiling.key_block)

    @property
    def _exact_programs(self) -> int:
        return 2 * self.tiling.programs

    @property
    def exact_scratch(self) -> tuple[int, ...]:
        """Numbers in fp32: rows of a chunk for each program."""
        return self._exact_programs, self.chunk, 3 * self.tiling.K + 2 * self._exact_columns
