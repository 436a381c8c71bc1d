"""What a call of the delta engine was given, how it is cut, and what all its launches have in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from flexsp.kernels.delta import walks
from flexsp.kernels.delta.tiling import Tiling
from flexsp.kernels.launch_plan import LaunchPlan
from flexsp.kernels.launch_spec import Launch, LaunchSpec
from flexsp.kernels.primitives import dots

__all__ = ["BasePlan"]


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
