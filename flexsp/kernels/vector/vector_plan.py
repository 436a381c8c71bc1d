"""The launches of one call of a vector state: summarize -> propagate -> output, and the same backward."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton

from flexsp.devices import MOST_HEADS, Device, of_device
from flexsp.exceptions import NotAvailable
from flexsp.kernels.launch_plan import Buffer, Role, SegmentedPlan, by_name
from flexsp.kernels.launch_spec import Launch, LaunchSpec, named
from flexsp.kernels.vector import walks
from flexsp.scan.dense import MOST

__all__ = ["NAME", "Tiling", "VectorPlan", "channels_of_head", "make_tiling"]

NAME = "the kernels of vector states"
_F32 = torch.float32
_CHUNK = 8
_CHANNELS = 128  # of a program at most
_SEGMENTS = 8  # times as many programs as a device's number of them
_CHUNKS = 128  # of a segment at most: every token's factor is rounded, and for gates near 0 always the same way


@dataclass(frozen=True)
class Tiling:
    """How one call is cut: P channels a head, blocks of channels, chunks and segments."""

    B: int
    T: int
    D: int
    P: int
    n_docs: int
    block: int
    n_chunks: int
    per_seg: int
    n_seg: int

    chunk: ClassVar[int] = _CHUNK

    @property
    def H(self) -> int:
        return self.D // self.P


def channels_of_head(D: int) -> int:
    """How many channels the scan over segments and ranks takes for a head: a divisor, of states that it holds."""
    return next(size for size in range(min(D, MOST), 0, -1) if D % size == 0)


def make_tiling(x: torch.Tensor, n_docs: int) -> Tiling:
    """Tiling for x [batch, T, H, P] and `n_docs` packed documents (0: not packed), on the GPU that x is on."""
    sizes = (*x.shape, n_docs)
    build = _plan_of if all(type(n) is int for n in sizes) else _plan_of.__wrapped__  # symbolic sizes have no hash
    return build(*sizes, of_device(x.device))


@functools.lru_cache(maxsize=4096)
def _plan_of(batch: int, T: int, H: int, P: int, n_docs: int, device: Device) -> Tiling:
    D = H * P
    if batch * H > MOST_HEADS:
        blocks = f"blocks of {P} channels, the largest divisor of D = {D} up to {MOST}"
        raise NotAvailable(f"x: {NAME} take at most {MOST_HEADS} {blocks}, in all sequences, got {batch * H}")
    block = min(triton.next_power_of_2(D), _CHANNELS)
    n_chunks = -(-T // _CHUNK) + n_docs
    wanted = max(1, _SEGMENTS * device.programs // max(1, batch * -(-D // block)))
    per_seg = min(_CHUNKS, max(1, -(-n_chunks // max(1, min(n_chunks, wanted)))))
    n_seg = max(1, -(-n_chunks // per_seg))
    return Tiling(batch, T, D, P, n_docs, block, n_chunks, per_seg, n_seg)


@dataclass(frozen=True)
class VectorPlan(SegmentedPlan):
    """A call of a vector state.

    Buffers beside those of `SegmentedPlan`: ``@decay`` of segments (natural logarithms), and ``@chunks``, the states
    that enter chunks.

    Attributes:
        dtype: of x.
        gate: the dtype of g, which may be another.
    """

    tiling: Tiling
    dtype: torch.dtype
    gate: torch.dtype
    initial: bool
    returns_final: bool
    description: str
    filler: ClassVar[str] = "g"
    kernels: ClassVar[dict[str, Any]] = by_name(
        walks.summarize_kernel, walks.output_kernel, walks.summarize_backward_kernel, walks.grads_kernel
    )

    def settled(self) -> dict[str, Any]:
        return {"name": NAME, "sparse": self.n_docs > 0}

    # Buffers

    @property
    def state(self) -> tuple[int, ...]:
        return (self.tiling.P,)

    @property
    def scan_shape(self) -> tuple[str, tuple[int, int, int, int, int]]:
        return "vector", (self.B, self.n_seg, self.H, self.tiling.P, 1)

    def declare(self) -> list[Buffer]:
        p, rows = self.tiling, (self.B, self.T, self.H, self.tiling.P)
        return [
            *self.states_of_segments(Role.SCRATCH),
            *self.token_buffers({"x": (self.dtype, rows), "g": (self.gate, rows)}, (self.dtype, rows)),
            Buffer("@decay", Role.SAVED, _F32, (p.B, p.n_seg, p.H, p.P)),
            Buffer("@chunks", Role.SAVED, _F32, (p.B, p.n_chunks, p.H, p.P)),
        ]

    # Launches

    def summarize(self, initial: str | None, *, zero: bool) -> list[LaunchSpec]:
        return [self._walk(
            "summarize_kernel", ["x", "g", "@states", "@decay", self.cut, initial],
            named("@states", "@decay", self.cut), ["x", "g"], INITIAL=initial is not None, ZERO=zero,
        )]  # fmt: skip

    def output(self, initial: str | None, final: str | None) -> list[LaunchSpec]:
        return [self._walk(
            "output_kernel", ["x", "g", "o", "@states", "@chunks", initial, final], named("o", "@chunks", final),
            ["x", "g"], INITIAL=initial is not None, FINAL=final is not None,
        )]  # fmt: skip

    def summarize_backward(self, last: str | None, *, zero: bool) -> list[LaunchSpec]:
        return [self._walk(
            "summarize_backward_kernel", ["g", "do", "@dstates", last], ["@dstates"], ["g", "do"],
            FINAL=last is not None, ZERO=zero,
        )]  # fmt: skip

    def gradients(self, last: str | None, to: str | None, wanted: Collection[str]) -> list[LaunchSpec]:
        return [self._walk(
            "grads_kernel", ["x", "g", "do", "@chunks", "@dstates", last, to, "d_x", "d_g"], named("d_x", "d_g", to),
            ["x", "g", "do"], FINAL=last is not None, INITIAL=to is not None,
        )]  # fmt: skip

    def _walk(
        self, kind: str, pointers: Sequence[str | None], writes: Sequence[str], strides: Sequence[str],
        **constants: Any,
    ) -> LaunchSpec:  # fmt: skip
        """A walk over segments; `constants` are its own, those of every walk are added here."""
        p = self.tiling
        constants |= {"D": p.D, "P": p.P, "BD": p.block, "C": p.chunk}
        return self.launch(
            kind, Launch(p.block, 1, 1), (-(-p.D // p.block), p.B, p.n_seg), pointers, writes,
            (*strides, p.T, p.n_seg, p.n_chunks, p.per_seg), constants,
        )  # fmt: skip
