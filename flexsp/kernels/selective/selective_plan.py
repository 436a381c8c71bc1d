"""The launches of one call of the selective scan: summarize -> propagate -> output, and the same backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from flexsp.kernels.channel_tiling import ChannelTiling, Limits
from flexsp.kernels.launch_plan import Buffer, Role, SegmentedPlan, by_name, gradient_of
from flexsp.kernels.launch_spec import Launch, LaunchSpec, named, step, zeroed
from flexsp.kernels.selective import grads, walks

__all__ = ["LIMITS", "NAME", "Form", "SelectivePlan"]

NAME = "the kernels of flexsp.ops.selective_scan"
_F32 = torch.float32
_WARPS = 1
LIMITS = Limits(NAME, "u", channels=64, numbers=1024, programs=64, chunks=1 << 31)


class Form(NamedTuple):
    """Which of the optional parts a call has."""

    zoh: bool
    softplus: bool
    skip: bool
    gate: bool
    bias: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors, in order."""
        optional = (("skip", self.skip), ("z", self.gate), ("bias", self.bias))
        return "u", "delta", "A", "B", "C", *(name for name, there in optional if there)


def _padded(B: torch.Tensor, C: torch.Tensor, to_B: torch.Tensor, to_C: torch.Tensor) -> None:
    """With zeros behind the last token and the last number."""
    for x, to in ((B, to_B), (C, to_C)):
        T, N = x.shape[1], x.shape[-1]
        to[:, T:].zero_()
        to[..., N:].zero_()
        to[:, :T, :, :N].copy_(x)


def _summed(parts: torch.Tensor, to_B: torch.Tensor, to_C: torch.Tensor) -> None:
    """Gradients of B and C from what the programs left."""
    found = parts.sum(1)
    for x, to in zip(found.unbind(2), (to_B, to_C), strict=True):
        to.copy_(x[..., : to.shape[-1]].view(to.shape))


@dataclass(frozen=True)
class SelectivePlan(SegmentedPlan):
    """A call of the selective scan.

    Buffers beside those of `SegmentedPlan`: ``@decay`` of segments (natural logarithms); in the backward pass
    ``@chunks``, the states [N, D] that enter chunks, and ``@parts``, gradients of B and C by every program's channels.
    ``@B`` and ``@C`` are these with zeros behind, so that a lane reads whole rows without a mask, ``@wide_B`` and
    ``@wide_C`` in float32: the kernel of the gradients reads rows several times, and would convert them each time.

    Attributes:
        dtype: of u.
        delta: the dtype of delta, which may be another.
        neighbours: as in `SegmentedPlan`.
    """

    tiling: ChannelTiling
    form: Form
    dtype: torch.dtype
    delta: torch.dtype
    initial: bool
    returns_final: bool
    description: str
    neighbours: tuple[bool, bool] = (True, True)
    filler: ClassVar[str] = "u"
    kernels: ClassVar[dict[str, Any]] = by_name(
        walks.summarize_kernel, walks.output_kernel, walks.summarize_backward_kernel, walks.chunk_states_kernel,
        grads.grads_kernel,
    )  # fmt: skip

    def settled(self) -> dict[str, Any]:
        return {"name": NAME, "sparse": self.n_docs > 0}

    # Buffers

    @property
    def state(self) -> tuple[int, ...]:
        return self.tiling.P, self.tiling.N

    @property
    def scan_shape(self) -> tuple[str, tuple[int, int, int, int, int]]:
        return "vector", (self.B, self.n_seg, self.H, self.tiling.P * self.tiling.N, 1)

    def declare(self) -> list[Buffer]:
        p, dtype = self.tiling, self.dtype
        padded, of_token = (p.B, p.T + p.chunk, 1, p.numbers), (p.B, p.T, 1, p.N)
        rows = dtype, (p.B, p.T, p.H, p.P)
        tokens = {"u": rows, "delta": (self.delta, rows[1]), "B": (dtype, of_token), "C": (dtype, of_token)}
        tokens |= {"z": rows} if self.form.gate else {}
        return [
            *self.states_of_segments(),
            *self.token_buffers(tokens, rows),
            *(Buffer(name, Role.INPUT, _F32, (p.H, *shape)) for name, shape in self._parameters.items()),
            *(
                Buffer(gradient_of(name), Role.SCRATCH, _F32, (p.B, p.H, p.n_seg, *shape))
                for name, shape in self._parameters.items()
            ),
            Buffer("@decay", Role.SAVED, _F32, (p.B, p.n_seg, p.H, p.P * p.N)),
            Buffer("@chunks", Role.SCRATCH, _F32, (p.B, p.n_chunks, p.H, p.P * p.N)),
            Buffer("@parts", Role.SCRATCH, _F32, (p.B, p.programs(self._block("grads_kernel")), p.T, 2, p.numbers)),
            *(Buffer(name, Role.SCRATCH, dtype, padded) for name in ("@B", "@C")),
            *(Buffer(name, Role.SCRATCH, _F32, padded) for name in ("@wide_B", "@wide_C")),
        ]

    @property
    def _parameters(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the inputs that have no row a token, of one head. Their gradients are left for every segment."""
        P, there = self.tiling.P, {"skip": self.form.skip, "bias": self.form.bias}
        return {"A": (P, self.tiling.N)} | {name: (P,) for name, used in there.items() if used}

    # Launches

    def summarize(self, initial: str | None, *, zero: bool, onward: bool) -> list[LaunchSpec]:
        return [
            step("padded", _padded, ("B", "C"), ("@B", "@C")),
            self._walk(
                "summarize_kernel", ["u", "delta", "A", "@B", self._bias, "@states", "@decay", self.cut, initial],
                named("@states", "@decay", self.cut), ["u", "delta"],
                ZOH=self.form.zoh, INITIAL=initial is not None, ZERO=zero, ONWARD=onward,
            ),
        ]  # fmt: skip

    def output(self, initial: str | None, final: str | None) -> list[LaunchSpec]:
        return [self._walk(
            "output_kernel",
            ["u", "delta", "A", "@B", "@C", self._skip, self._z, self._bias, "o", "@states", initial, final],
            named("o", final), ["u", "delta", self._z or "u"],
            ZOH=self.form.zoh, INITIAL=initial is not None, FINAL=final is not None, SKIP=self.form.skip,
            GATE=self.form.gate,
        )]  # fmt: skip

    def summarize_backward(self, last: str | None, *, zero: bool, onward: bool) -> list[LaunchSpec]:
        return [
            step("padded", _padded, ("B", "C"), ("@wide_B", "@wide_C")),
            self._walk(
                "summarize_backward_kernel", ["delta", "A", "@wide_C", self._z, self._bias, "do", "@dstates", last],
                ["@dstates"], ["delta", self._z or "u", "do"], FINAL=last is not None, ZERO=zero, ONWARD=onward,
                GATE=self.form.gate,
            ),
        ]  # fmt: skip

    def sums(self, wanted: Collection[str]) -> list[str]:
        return [gradient_of(name) for name in self._parameters]

    def gradients(self, last: str | None, to: str | None, wanted: Collection[str]) -> list[LaunchSpec]:
        form, first = self.form, self.in_walk("@initial" if self.initial else None)
        dskip, dbias = "d_skip" if form.skip else None, "d_bias" if form.bias else None
        made = ["d_u", "d_delta", "d_A", "@parts", dskip, "d_z" if form.gate else None, dbias]
        return [
            self._walk(
                "chunk_states_kernel", ["u", "delta", "A", "@wide_B", self._bias, "@states", first, "@chunks"],
                ["@chunks"], ["u", "delta"], ZOH=form.zoh, INITIAL=first is not None,
            ),
            self._walk(
                "grads_kernel",
                ["u", "delta", "A", "@wide_B", "@wide_C", self._skip, self._z, self._bias, "do", "@chunks", "@dstates",
                 last, to, *made],
                named(*made, to), ["u", "delta", self._z or "u", "do"], ZOH=form.zoh, FINAL=last is not None,
                INITIAL=to is not None, SKIP=form.skip, GATE=form.gate,
            ),
            *([] if self.n_chunks else [zeroed("@parts")]),
            step("parts", _summed, ("@parts",), ("d_B", "d_C")),
        ]  # fmt: skip

    def _block(self, kind: str) -> int:
        """Channels of a program. The gradients hold five states where the other walks hold one, and the zero-order hold
        takes more registers in both."""
        part = 4 if kind == "grads_kernel" and self.form.zoh else 2 if kind == "grads_kernel" else 1
        return max(1, self.tiling.block // (2 * part if self.form.zoh else part))

    @property
    def _skip(self) -> str | None:
        return "skip" if self.form.skip else None

    @property
    def _z(self) -> str | None:
        return "z" if self.form.gate else None

    @property
    def _bias(self) -> str | None:
        return "bias" if self.form.bias else None

    def _walk(
        self, kind: str, pointers: Sequence[str | None], writes: Sequence[str], strides: Sequence[str],
        **constants: Any,
    ) -> LaunchSpec:  # fmt: skip
        """A walk over segments; `constants` are its own, those of every walk are added here."""
        p, block = self.tiling, self._block(kind)
        constants |= {"D": p.D, "N": p.N, "P": p.P, "BD": block, "BN": p.numbers, "C": p.chunk}
        constants |= {"SOFTPLUS": self.form.softplus, "BIAS": self.form.bias}
        return self.launch(
            kind, Launch(block, _WARPS, 1), (p.programs(block), p.B, p.n_seg), pointers, writes,
            (*strides, p.T, p.n_seg, p.n_chunks, p.per_seg), constants,
        )  # fmt: skip
