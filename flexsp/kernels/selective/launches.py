"""The launches of one call of the selective scan: summarize -> propagate -> output, and the same backward."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton

from flexsp.devices import MOST_HEADS, Device, of_device
from flexsp.exceptions import NotAvailable
from flexsp.kernels.launches import Buffer, Facts, Launch, LaunchSpec, named, scan, step, zeroed
from flexsp.kernels.selective import grads, walks
from flexsp.scan.dense import MOST

__all__ = ["NAME", "Form", "Plan", "SelectiveCall", "make_plan", "channels_of_head"]

NAME = "the kernels of flexsp.ops.selective_scan"
_F32 = torch.float32
_CHUNK = 8
_NUMBERS = 1024  # of the states of a program
_CHANNELS = 64  # at most
_WARPS = 1
_SEGMENTS = 64  # times as many programs as a device's number of them
_SAVED = ("@states", "@decay", "@cut")
_OWN = (*_SAVED, "@dstates", "@chunks", "@parts", "@B", "@C", "@wide_B", "@wide_C")
_PARAMETERS = ("A", "skip", "bias")


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


@dataclass(frozen=True)
class Plan:
    """How one call is cut: P channels a head, blocks of channels and numbers, chunks and segments."""

    batch: int
    T: int
    D: int
    N: int
    P: int
    docs: int
    block: int
    numbers: int
    n_chunks: int
    per_seg: int
    n_seg: int

    @property
    def H(self) -> int:
        return self.D // self.P

    def programs(self, block: int) -> int:
        return -(-self.D // block)


def channels_of_head(D: int, N: int) -> int:
    """How many channels the scan over segments and ranks takes for a head: a divisor, of states that it holds."""
    return next(size for size in range(min(D, MOST // N), 0, -1) if D % size == 0)


def make_plan(u: torch.Tensor, N: int, docs: int) -> Plan:
    """Plan for u [batch, T, H, P] and `docs` packed documents (0: not packed), on the GPU that u is on."""
    sizes = (*u.shape, N, docs)
    build = _plan_of if all(type(n) is int for n in sizes) else _plan_of.__wrapped__  # symbolic sizes have no hash
    return build(*sizes, of_device(u.device))


@functools.lru_cache(maxsize=4096)
def _plan_of(batch: int, T: int, H: int, P: int, N: int, docs: int, device: Device) -> Plan:
    D, numbers = H * P, triton.next_power_of_2(N)
    if batch * H > MOST_HEADS:
        blocks = f"blocks of {P} channels, the largest divisor of D = {D} up to {MOST // N}"
        raise NotAvailable(f"u: {NAME} takes at most {MOST_HEADS} {blocks}, in all sequences, got {batch * H}")
    block = max(1, min(triton.next_power_of_2(D), _CHANNELS, _NUMBERS // numbers))
    n_chunks = -(-T // _CHUNK) + docs
    wanted = max(1, _SEGMENTS * device.programs // max(1, batch * -(-D // block)))
    per_seg = max(1, -(-n_chunks // max(1, min(n_chunks, wanted))))
    n_seg = max(1, -(-n_chunks // per_seg))
    return Plan(batch, T, D, N, P, docs, block, numbers, n_chunks, per_seg, n_seg)


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
class SelectiveCall:
    """A call of the selective scan, as `flexsp.kernels.launches.Call` describes it.

    A pointer that a kernel does not use is that of u. Buffers: ``@states`` and ``@dstates`` at the edges of segments,
    ``@decay`` of segments (natural logarithms), ``@cut`` where a document begins in a segment; in the backward pass
    ``@chunks``, the states [N, D] that enter chunks, and ``@parts``, gradients of B and C by every program's channels.
    ``@B`` and ``@C`` are these with zeros behind, so that a lane reads whole rows without a mask, ``@wide_B`` and
    ``@wide_C`` in float32: the kernel of the gradients reads rows several times, and would convert them each time.

    Attributes:
        dtype: of u.
        delta: the dtype of delta, which may be another.
        initial: initial states are given on this rank.
        ends: final states are wanted, and leave on this rank.
        text: what ranks compare of the call.
    """

    plan: Plan
    form: Form
    dtype: torch.dtype
    delta: torch.dtype
    initial: bool
    ends: bool
    text: str

    @cached_property
    def facts(self) -> Facts:
        p = self.plan
        return Facts(
            NAME, self.text, p.batch, p.T, p.H, p.docs, _CHUNK, p.n_chunks, p.n_seg, ("vector", p.P * p.N, 1),
            self.ends, sparse=p.docs > 0,
        )  # fmt: skip

    def kernel(self, spec: LaunchSpec) -> Any:
        return getattr(grads if spec.kind == "grads_kernel" else walks, spec.kind)

    def look(self, frame: Any) -> None:
        """Nothing can be wrong that the operators do not look at."""

    # Buffers

    def buffer(self, name: str) -> Buffer:
        p = self.plan
        padded = p.batch, p.T + _CHUNK, 1, p.numbers
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "@states": (_F32, (p.batch, p.n_seg + 1, p.H, p.P * p.N)),
            "@dstates": (_F32, (p.batch, p.n_seg + 1, p.H, p.P * p.N)),
            "@decay": (_F32, (p.batch, p.n_seg, p.H, p.P * p.N)),
            "@cut": (torch.int32, (p.batch, p.n_seg)),
            "@chunks": (_F32, (p.batch, p.n_chunks, p.H, p.P * p.N)),
            "@parts": (_F32, (p.batch, p.programs(self._block("grads_kernel")), p.T, 2, p.numbers)),
            "@B": (self.dtype, padded), "@C": (self.dtype, padded),
            "@wide_B": (_F32, padded), "@wide_C": (_F32, padded),
            "d.A": (_F32, (p.batch, p.H, p.n_seg, p.P, p.N)),
            "d.skip": (_F32, (p.batch, p.H, p.n_seg, p.P)),
            "d.bias": (_F32, (p.batch, p.H, p.n_seg, p.P)),
        }  # fmt: skip
        if name in found:
            return Buffer(*found[name])
        if name.removeprefix("@") in ("initial", "final", "dinitial", "dfinal"):
            return Buffer(_F32, (p.docs or p.batch, p.H, p.P, p.N))
        if name.removeprefix("d.") in ("B", "C"):
            return Buffer(self.dtype, (p.batch, p.T, 1, p.N))
        return Buffer(self.delta if name == "d.delta" else self.dtype, (p.batch, p.T, p.H, p.P))

    @property
    def kept(self) -> tuple[str, ...]:
        return tuple(name for name in _SAVED if name != "@cut" or self.plan.docs)

    def own(self, name: str) -> bool:
        return name in _OWN or name in [f"d.{x}" for x in _PARAMETERS]

    def saved(self, name: str) -> bool:
        return name in _SAVED

    # Launches

    def forward(self) -> list[LaunchSpec]:
        p = self.plan
        in_walk = "@initial" if p.docs and self.initial else None
        final = "@final" if p.docs and self.ends else None
        launches = [
            step("padded", _padded, ("B", "C"), ("@B", "@C")),
            self._walk(
                "summarize_kernel", ("u", "delta", "A", "@B", self._bias, "@states", "@decay", self._cut, in_walk),
                ("@states", "@decay", *named(self._cut)), ("u", "delta"),
                ZOH=self.form.zoh, INITIAL=in_walk is not None, ZERO=p.docs > 0 or not self.initial,
            )
        ]  # fmt: skip
        if not p.n_chunks:
            launches.append(zeroed("@states", "@decay"))
        if self.initial and not p.docs:
            launches.append(copied_state("@states", "@initial", 0, None))
        launches += [
            scan("@states", "@decay", self._cut, reverse=False),
            self._walk(
                "output_kernel",
                ("u", "delta", "A", "@B", "@C", self._skip, self._z, self._bias, "@o", "@states", in_walk, final),
                named("@o", final), ("u", "delta", self._z or "u"),
                ZOH=self.form.zoh, INITIAL=in_walk is not None, FINAL=final is not None, SKIP=self.form.skip,
                GATE=self.form.gate,
            ),
        ]  # fmt: skip
        if self.ends and not p.docs:
            launches.append(copied_state("@final", "@states", None, p.n_seg))
        return launches

    def backward(self, dfinal: bool, dinitial: bool, wanted: Collection[str]) -> list[LaunchSpec]:
        p, form = self.plan, self.form
        first = "@initial" if p.docs and self.initial else None
        last = "@dfinal" if p.docs and dfinal else None
        into = "@dinitial" if p.docs and dinitial else None
        parameters = named("d.A", form.skip and "d.skip" or None, form.bias and "d.bias" or None)
        launches = [
            step("padded", _padded, ("B", "C"), ("@wide_B", "@wide_C")),
            self._walk(
                "collect_kernel", ("delta", "A", "@wide_C", self._z, self._bias, "@do", "@dstates", last),
                ("@dstates",), ("delta", self._z or "u", "do"), FINAL=last is not None, ZERO=p.docs > 0 or not dfinal,
                GATE=form.gate,
            )
        ]  # fmt: skip
        if not p.n_chunks:
            launches.append(zeroed("@dstates", *parameters))
        if dfinal and not p.docs:
            launches.append(copied_state("@dstates", "@dfinal", p.n_seg, None))
        launches += [
            scan("@dstates", "@decay", self._cut, reverse=True),
            self._walk(
                "chunks_kernel", ("u", "delta", "A", "@wide_B", self._bias, "@states", first, "@chunks"), ("@chunks",),
                ("u", "delta"), ZOH=form.zoh, INITIAL=first is not None,
            ),
            self._walk(
                "grads_kernel",
                ("u", "delta", "A", "@wide_B", "@wide_C", self._skip, self._z, self._bias, "@do", "@chunks", "@dstates",
                 last, into, "d.u", "d.delta", "d.A", "@parts", form.skip and "d.skip" or None,
                 form.gate and "d.z" or None, form.bias and "d.bias" or None),
                named("d.u", "d.delta", *parameters, "@parts", form.gate and "d.z" or None, into),
                ("u", "delta", self._z or "u", "do"), ZOH=form.zoh, FINAL=last is not None,
                INITIAL=into is not None, SKIP=form.skip, GATE=form.gate,
            ),
        ]  # fmt: skip
        if not p.n_chunks:
            launches.append(zeroed("@parts"))
        launches.append(step("parts", _summed, ("@parts",), ("d.B", "d.C")))
        if dinitial and not p.docs:
            launches.append(copied_state("@dinitial", "@dstates", None, 0))
        return launches

    def _block(self, kind: str) -> int:
        """Channels of a program. The gradients hold five states where the other walks hold one, and the zero-order hold
        takes more registers in both."""
        part = 4 if kind == "grads_kernel" and self.form.zoh else 2 if kind == "grads_kernel" else 1
        return max(1, self.plan.block // (2 * part if self.form.zoh else part))

    @property
    def _skip(self) -> str | None:
        return "skip" if self.form.skip else None

    @property
    def _z(self) -> str | None:
        return "z" if self.form.gate else None

    @property
    def _bias(self) -> str | None:
        return "bias" if self.form.bias else None

    @property
    def _cut(self) -> str | None:
        return "@cut" if self.plan.docs else None

    def _walk(
        self, kind: str, pointers: Sequence[str | None], writes: Sequence[str], strides: Sequence[str],
        **constants: Any,
    ) -> LaunchSpec:  # fmt: skip
        """A walk over segments; `constants` are its own, those of every walk are added here."""
        p = self.plan
        how = Launch(self._block(kind), _WARPS, 1)
        constants |= {"D": p.D, "N": p.N, "P": p.P, "BD": self._block(kind), "BN": p.numbers, "C": _CHUNK}
        constants |= {"SOFTPLUS": self.form.softplus, "BIAS": self.form.bias, "PACKED": p.docs > 0}
        table = "@table" if p.docs else "u"
        return LaunchSpec(
            kind, how, (p.programs(self._block(kind)), p.batch, p.n_seg), (*(x or "u" for x in pointers), table),
            tuple(x for x in named(*pointers) if x not in writes), tuple(writes),
            (*strides, p.T, p.n_seg, p.n_chunks, p.per_seg), constants, how.options,
        )  # fmt: skip


def copied_state(to: str, source: str, to_slot: int | None, slot: int | None) -> LaunchSpec:
    """As `flexsp.kernels.launches.copied`, of states that one has as [H, P N], the other as [H, P, N]."""
    def run(source: torch.Tensor, to: torch.Tensor) -> None:
        to = to if to_slot is None else to[:, to_slot]
        to.copy_((source if slot is None else source[:, slot]).reshape(to.shape))

    return step("copy", run, (source,), (to,))
