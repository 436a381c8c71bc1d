"""The launches of one call of a vector state: summarize -> propagate -> output, and the same backward."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton

from flexsp.devices import MOST_HEADS, Device, of_device
from flexsp.exceptions import NotAvailable
from flexsp.kernels.launches import Buffer, Facts, Launch, LaunchSpec, copied, named, scan, zeroed
from flexsp.kernels.vector import walks
from flexsp.scan.dense import MOST

__all__ = ["NAME", "Plan", "VectorCall", "channels_of_head", "make_plan"]

NAME = "the kernels of vector states"
_F32 = torch.float32
_CHUNK = 8
_CHANNELS = 128  # of a program at most
_SEGMENTS = 8  # times as many programs as a device's number of them
_CHUNKS = 128  # of a segment at most: every token's factor is rounded, and for gates near 0 always the same way
_SAVED = ("@decay", "@cut", "@chunks")
_OWN = (*_SAVED, "@states", "@dstates")


@dataclass(frozen=True)
class Plan:
    """How one call is cut: P channels a head, blocks of channels, chunks and segments."""

    batch: int
    T: int
    D: int
    P: int
    docs: int
    block: int
    n_chunks: int
    per_seg: int
    n_seg: int

    @property
    def H(self) -> int:
        return self.D // self.P


def channels_of_head(D: int) -> int:
    """How many channels the scan over segments and ranks takes for a head: a divisor, of states that it holds."""
    return next(size for size in range(min(D, MOST), 0, -1) if D % size == 0)


def make_plan(x: torch.Tensor, docs: int) -> Plan:
    """Plan for x [batch, T, H, P] and `docs` packed documents (0: not packed), on the GPU that x is on."""
    sizes = (*x.shape, docs)
    build = _plan_of if all(type(n) is int for n in sizes) else _plan_of.__wrapped__  # symbolic sizes have no hash
    return build(*sizes, of_device(x.device))


@functools.lru_cache(maxsize=4096)
def _plan_of(batch: int, T: int, H: int, P: int, docs: int, device: Device) -> Plan:
    D = H * P
    if batch * H > MOST_HEADS:
        blocks = f"blocks of {P} channels, the largest divisor of D = {D} up to {MOST}"
        raise NotAvailable(f"x: {NAME} take at most {MOST_HEADS} {blocks}, in all sequences, got {batch * H}")
    block = min(triton.next_power_of_2(D), _CHANNELS)
    n_chunks = -(-T // _CHUNK) + docs
    wanted = max(1, _SEGMENTS * device.programs // max(1, batch * -(-D // block)))
    per_seg = min(_CHUNKS, max(1, -(-n_chunks // max(1, min(n_chunks, wanted)))))
    n_seg = max(1, -(-n_chunks // per_seg))
    return Plan(batch, T, D, P, docs, block, n_chunks, per_seg, n_seg)


@dataclass(frozen=True)
class VectorCall:
    """A call of a vector state, as `flexsp.kernels.launches.Call` describes it.

    A pointer that a kernel does not use is that of g. Buffers: ``@states`` and ``@dstates`` at the edges of segments,
    ``@decay`` of segments (natural logarithms), ``@cut`` where a document begins in a segment, and ``@chunks``, the
    states that enter chunks.

    Attributes:
        dtype: of x.
        gate: the dtype of g, which may be another.
        initial: initial states are given on this rank.
        ends: final states are wanted, and leave on this rank.
        text: what ranks compare of the call.
    """

    plan: Plan
    dtype: torch.dtype
    gate: torch.dtype
    initial: bool
    ends: bool
    text: str

    @cached_property
    def facts(self) -> Facts:
        p = self.plan
        return Facts(
            NAME, self.text, p.batch, p.T, p.H, p.docs, _CHUNK, p.n_chunks, p.n_seg, ("vector", p.P, 1), self.ends,
            sparse=p.docs > 0,
        )  # fmt: skip

    def kernel(self, spec: LaunchSpec) -> Any:
        return getattr(walks, spec.kind)

    def look(self, frame: Any) -> None:
        """Nothing can be wrong that the operators do not look at."""

    # Buffers

    def buffer(self, name: str) -> Buffer:
        p = self.plan
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "@states": (_F32, (p.batch, p.n_seg + 1, p.H, p.P)),
            "@dstates": (_F32, (p.batch, p.n_seg + 1, p.H, p.P)),
            "@decay": (_F32, (p.batch, p.n_seg, p.H, p.P)),
            "@cut": (torch.int32, (p.batch, p.n_seg)),
            "@chunks": (_F32, (p.batch, p.n_chunks, p.H, p.P)),
        }
        if name in found:
            return Buffer(*found[name])
        if name.removeprefix("@") in ("initial", "final", "dinitial", "dfinal"):
            return Buffer(_F32, (p.docs or p.batch, p.H, p.P))
        return Buffer(self.gate if name == "d.g" else self.dtype, (p.batch, p.T, p.H, p.P))

    @property
    def kept(self) -> tuple[str, ...]:
        return tuple(name for name in _SAVED if name != "@cut" or self.plan.docs)

    def own(self, name: str) -> bool:
        return name in _OWN

    def saved(self, name: str) -> bool:
        return name in _SAVED

    # Launches

    def forward(self) -> list[LaunchSpec]:
        p = self.plan
        in_walk = "@initial" if p.docs and self.initial else None
        final = "@final" if p.docs and self.ends else None
        launches = [
            self._walk(
                "summarize_kernel", ("x", "g", "@states", "@decay", self._cut, in_walk),
                ("@states", "@decay", *named(self._cut)), ("x", "g"),
                INITIAL=in_walk is not None, ZERO=p.docs > 0 or not self.initial,
            )
        ]  # fmt: skip
        if not p.n_chunks:
            launches.append(zeroed("@states", "@decay"))
        if self.initial and not p.docs:
            launches.append(copied("@states", "@initial", 0))
        launches += [
            scan("@states", "@decay", self._cut, reverse=False),
            self._walk(
                "output_kernel", ("x", "g", "@o", "@states", "@chunks", in_walk, final), named("@o", "@chunks", final),
                ("x", "g"), INITIAL=in_walk is not None, FINAL=final is not None,
            ),
        ]  # fmt: skip
        if self.ends and not p.docs:
            launches.append(copied("@final", "@states", None, p.n_seg))
        return launches

    def backward(self, dfinal: bool, dinitial: bool, wanted: Collection[str]) -> list[LaunchSpec]:
        p = self.plan
        last = "@dfinal" if p.docs and dfinal else None
        into = "@dinitial" if p.docs and dinitial else None
        launches = [
            self._walk(
                "collect_kernel", ("g", "@do", "@dstates", last), ("@dstates",), ("g", "do"),
                FINAL=last is not None, ZERO=p.docs > 0 or not dfinal,
            )
        ]  # fmt: skip
        if not p.n_chunks:
            launches.append(zeroed("@dstates"))
        if dfinal and not p.docs:
            launches.append(copied("@dstates", "@dfinal", p.n_seg))
        launches += [
            scan("@dstates", "@decay", self._cut, reverse=True),
            self._walk(
                "grads_kernel", ("x", "g", "@do", "@chunks", "@dstates", last, into, "d.x", "d.g"),
                named("d.x", "d.g", into), ("x", "g", "do"), FINAL=last is not None, INITIAL=into is not None,
            ),
        ]  # fmt: skip
        if dinitial and not p.docs:
            launches.append(copied("@dinitial", "@dstates", None, 0))
        return launches

    @property
    def _cut(self) -> str | None:
        return "@cut" if self.plan.docs else None

    def _walk(
        self, kind: str, pointers: Sequence[str | None], writes: Sequence[str], strides: Sequence[str],
        **constants: Any,
    ) -> LaunchSpec:  # fmt: skip
        """A walk over segments; `constants` are its own, those of every walk are added here."""
        p = self.plan
        how = Launch(p.block, 1, 1)
        constants |= {"D": p.D, "P": p.P, "BD": p.block, "C": _CHUNK, "PACKED": p.docs > 0}
        table = "@table" if p.docs else "g"
        return LaunchSpec(
            kind, how, (-(-p.D // p.block), p.batch, p.n_seg), (*(x or "g" for x in pointers), table),
            tuple(x for x in named(*pointers) if x not in writes), tuple(writes),
            (*strides, p.T, p.n_seg, p.n_chunks, p.per_seg), constants, how.options,
        )  # fmt: skip
