"""One launch of a call, as a plan states it: the kernel, and by name the buffers that it reads and writes.

`flexsp.kernels.launch_plan` has the plan of a call, which is a list of these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = [
    "PROPAGATE", "Launch", "LaunchSpec", "SameTokenStride", "copied", "minus_infinity", "named", "ones", "scan",
    "step", "unit", "zeroed",
]  # fmt: skip

PROPAGATE = "_propagate_kernel"


@dataclass(frozen=True)
class Launch:
    """Columns of the state that a program computes, and Triton's options of its launch. `registers` limits those of a
    thread; None is no limit."""

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
        numbers: the arguments behind the pointers; the name of an input, or of the outputs' gradient, "do", stands for
            its strides from sequence to sequence, token to token and head to head.
        constants: the kernel's constexpr arguments, a `SameTokenStride` where strides decide; of the scan whether it
            goes from right to left, REVERSE.
        options: of Triton.
        intrinsic: what is computed, where `kind` is the kernel of an intrinsic.
        host: the step of PyTorch, called with the buffers of `pointers`; None for kernels.
        kernel: the Triton kernel; None for the one that the plan has of this kind.
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


def minus_infinity(name: str) -> LaunchSpec:
    """-inf in all slots of states but the first: a maximum over no tokens."""
    return step("minus_infinity", _minus_infinity, (), (name,))


def unit(name: str) -> LaunchSpec:
    """The identity in matrices [..., N, N]."""
    return step("unit", _unit, (), (name,))


def copied(to: str, source: str, to_slot: int | None = None, slot: int | None = None) -> LaunchSpec:
    """`source` in `to`; slots are places along their second axis, None for all."""
    return step("copy", functools.partial(_copy, to_slot, slot), (source,), (to,))


def _zero(*tensors: torch.Tensor) -> None:
    for x in tensors:
        x.zero_()


def _minus_infinity(x: torch.Tensor) -> None:
    x[:, 1:] = -torch.inf


def _ones(x: torch.Tensor) -> None:
    x.fill_(1.0)


def _unit(x: torch.Tensor) -> None:
    x.copy_(torch.eye(x.shape[-1], dtype=x.dtype, device=x.device))


def _copy(to_slot: int | None, slot: int | None, source: torch.Tensor, to: torch.Tensor) -> None:
    to = to if to_slot is None else to[:, to_slot]
    to.copy_(source if slot is None else source[:, slot])
