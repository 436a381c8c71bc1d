"""What an engine says of calls of one signature: their buffers, and their launches in order.

An engine makes kernels for some operators or variants. It states a call as one list of `LaunchSpec`, forward and
backward. `flexsp.kernels.executable` runs the list: it puts strides and addresses in place of names.

Buffers have names: ``x`` an input, ``d.x`` its gradient, ``@x`` all others. Of these ``@o``, ``@initial``, ``@final``,
``@table`` (the chunks of packed documents) and, in backward passes, ``@do``, ``@dfinal`` and ``@dinitial`` are given or
returned.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

__all__ = [
    "PROPAGATE", "Buffer", "Call", "Facts", "Launch", "LaunchSpec", "SameTokenStride", "check_order", "check_results",
    "copied", "memory", "named", "nothing", "ones", "scan", "step", "unit", "zeroed",
]  # fmt: skip

PROPAGATE = "_propagate_kernel"


@dataclass(frozen=True)
class Launch:
    """Columns of the state a program has, and how it is launched; `registers` that a thread may have, None for all."""

    cols: int
    warps: int
    stages: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Of Triton."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


@dataclass(frozen=True)
class Buffer:
    """A tensor as it lies in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class SameTokenStride:
    """Whether inputs, and outputs whose strides are known, have one stride from token to token."""

    inputs: tuple[str, ...]
    others: tuple[int, ...] = ()

    def of(self, strides: Mapping[str, tuple[int, int, int]]) -> bool:
        """With the inputs' strides from sequence to sequence, token to token and head to head."""
        return len({*self.others, *(strides[name][1] for name in self.inputs)}) == 1


@dataclass(frozen=True)
class LaunchSpec:
    """One launch of a kernel, or a step of PyTorch between launches.

    Attributes:
        kind: the name of the kernel or step.
        how: its tile and how it is launched.
        grid: programs; empty for the scan, which chooses them itself, and for steps of PyTorch.
        pointers: buffers in the order of the kernel's arguments, None where it takes none.
        reads, writes: those of them that it reads and writes. What is read of whole chunks only, such as the table of
            packed documents, is left out.
        numbers: the arguments behind the pointers; an input's name, or "do", stands for its strides from sequence to
            sequence, token to token and head to head.
        constants: the kernel's constexpr arguments, a `SameTokenStride` where strides decide; of the scan whether it
            goes from right to left, REVERSE.
        options: of Triton.
        intrinsic: what is computed, where `kind` is the kernel of an intrinsic.
        host: the step of PyTorch, called with the buffers of `pointers`; None for kernels.
        kernel: the Triton kernel; None for the one that the call has of this kind.
    """

    kind: str
    how: Launch
    grid: tuple[int, ...]
    pointers: tuple[str | None, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    numbers: tuple[int | float | str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, int] = field(default_factory=dict)
    intrinsic: Any = None
    host: Callable[..., Any] | None = None
    kernel: Any = None


@dataclass(frozen=True)
class Facts:
    """What is fixed of the calls of one signature.

    Attributes:
        name: of the operator or variant, for messages.
        text: what ranks compare of the call.
        B, T, H: sequences, tokens of this rank, heads.
        docs: packed documents, 0 if not packed.
        chunk: tokens of a chunk.
        n_chunks, n_seg: chunks and segments of a head. Kernels are not launched where there are no chunks.
        scan: how the scan over segments sees the state: its kind, rows and columns.
        ends: final states leave on this rank.
        sparse: kernels write final states, and gradients of initial ones, in part: the rest is 0.
        optional: inputs whose gradients are left out where nobody wants them.
        by_head: inputs with one number a token, whose gradients kernels write in float32 as [B, H, T].
        by_token: parameters [H] whose gradients kernels leave for every token, in float32 as [B, H, T].
        vectors: the gradient of the outputs lies in vectors of 16 bytes, or is copied so that it does.
        sure: a block has the shared memory that each kernel needs; else only compiling them tells.
    """

    name: str
    text: str
    B: int
    T: int
    H: int
    docs: int
    chunk: int
    n_chunks: int
    n_seg: int
    scan: tuple[str, int, int]
    ends: bool
    sparse: bool = False
    optional: frozenset[str] = frozenset()
    by_head: frozenset[str] = frozenset()
    by_token: frozenset[str] = frozenset()
    vectors: bool = False
    sure: bool = True


class Call(Protocol):
    """What decides the launches of a call: kernels, plan, shapes, and which states come in and go out."""

    @property
    def facts(self) -> Facts: ...

    def forward(self) -> list[LaunchSpec]:
        """Launches of the forward pass."""

    def backward(self, dfinal: bool, dinitial: bool, wanted: Collection[str]) -> list[LaunchSpec]:
        """Launches of the backward pass, with gradients of final states or not, for those of initial ones or not, and
        with those of the `wanted` of the optional inputs."""

    def buffer(self, name: str) -> Buffer:
        """The tensor of this name."""

    def own(self, name: str) -> bool:
        """Whether a buffer is neither given to a call nor returned by it."""

    def saved(self, name: str) -> bool:
        """Whether the backward pass reads a buffer that the forward pass makes."""

    def kernel(self, spec: LaunchSpec) -> Any:
        """The kernel of a launch that does not name it."""

    def look(self, frame: Any) -> None:
        """Under FLEXSP_CHECK=1: ValueError where what the forward pass left is wrong. May synchronise."""


def check_order(call: Call, launches: Iterable[LaunchSpec], kept: Collection[str] = ()) -> set[str]:
    """Buffers of its own that the launches write; `kept` are those that an earlier pass left.

    Raises:
        ValueError: a launch reads a buffer of the call's own that nothing before it wrote.
    """
    written = {*kept}
    for spec in launches:
        for name in spec.reads:
            if call.own(name) and name not in written:
                raise ValueError(
                    f"{call.facts.name}: expected a launch before {spec.kind!r} to write {name!r}, which it reads, or "
                    "the forward pass to save it; got none"
                )
        written.update(name for name in spec.writes if call.own(name))
    return written


def check_results(call: Call, launches: Sequence[LaunchSpec], names: Collection[str]) -> None:
    """That the launches write what the call returns, `names`.

    Raises:
        ValueError: nothing writes one of them. Without tokens too: there a kernel's launch, which then does not run, is
            what says that a tensor of no tokens, or a sum over none of them, is a result.
    """
    left = sorted(set(names).difference(*[x.writes for x in launches]))
    if left:
        raise ValueError(
            f"{call.facts.name}: expected launches that write {', '.join(left)}, got only {[x.kind for x in launches]}"
        )


def memory(call: Call, launches: Iterable[LaunchSpec]) -> dict[str, Buffer]:
    """Buffers that launches need and that are neither given to a call nor returned by it."""
    names = dict.fromkeys(name for x in launches for name in x.pointers if name is not None)
    return {name: call.buffer(name) for name in names if call.own(name)}


def named(*names: str | None) -> tuple[str, ...]:
    """The buffers that are there."""
    return tuple(name for name in names if name is not None)


def scan(states: str, carried: str | None, cut: str | None, *, reverse: bool) -> LaunchSpec:
    """The scan of `states` over segments and ranks, from right to left if `reverse`; `carried` holds transitions."""
    reads, constants = named(states, carried), {"REVERSE": reverse}
    return LaunchSpec(PROPAGATE, Launch(0, 4, 1), (), (states, carried, cut), reads, (states,), constants=constants)


# Steps of PyTorch

_NONE = Launch(0, 0, 0)


def step(kind: str, host: Callable[..., Any], reads: tuple[str, ...], writes: tuple[str, ...]) -> LaunchSpec:
    """`host` of the buffers that it reads, then of those that it writes."""
    return LaunchSpec(kind, _NONE, (), (*reads, *writes), reads, writes, host=host)


def zeroed(*names: str) -> LaunchSpec:
    """Zeros in these buffers."""
    return step("zero", _zero, (), names)


def ones(name: str) -> LaunchSpec:
    """Ones in this buffer."""
    return step("ones", _ones, (), (name,))


def nothing(name: str) -> LaunchSpec:
    """What a shard without tokens adds to maxima: -inf in all slots of states but the first."""
    return step("nothing", _nothing, (), (name,))


def unit(name: str) -> LaunchSpec:
    """The identity in matrices [..., N, N]."""
    return step("unit", _unit, (), (name,))


def copied(to: str, source: str, to_slot: int | None = None, slot: int | None = None) -> LaunchSpec:
    """`source` in `to`; slots are places along their second axis, None for all."""
    return step("copy", functools.partial(_copy, to_slot, slot), (source,), (to,))


def _zero(*tensors: torch.Tensor) -> None:
    for x in tensors:
        x.zero_()


def _nothing(x: torch.Tensor) -> None:
    x[:, 1:] = -torch.inf


def _ones(x: torch.Tensor) -> None:
    x.fill_(1.0)


def _unit(x: torch.Tensor) -> None:
    x.copy_(torch.eye(x.shape[-1], dtype=x.dtype, device=x.device))


def _copy(to_slot: int | None, slot: int | None, source: torch.Tensor, to: torch.Tensor) -> None:
    to = to if to_slot is None else to[:, to_slot]
    to.copy_(source if slot is None else source[:, slot])
