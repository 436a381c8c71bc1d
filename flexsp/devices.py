"""The properties of GPUs that plans, predicted times and messages depend on.

Only the H200 was measured: it reaches nine tenths of its data sheet's memory bandwidth and four fifths of its peak of
matrix products. The rates of the other GPUs are these shares of their data sheets.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch

__all__ = [
    "A10", "A100", "B200", "H100", "H200", "KNOWN", "L4", "MOST_HEADS", "REGISTERS", "Device", "check_heads",
    "check_shared", "filled", "of_arch", "of_device", "of_name", "of_properties", "planned_for", "shared_of_arch",
    "standing_in",
]  # fmt: skip

MOST_HEADS = 65535
"""The largest B * H of a call. It is the second axis of the kernels' grids, and CUDA allows 65535 there."""
REGISTERS = 64 * 1024
"""32-bit registers of a multiprocessor."""
_KIB = 1024
_SHARED = {
    80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 101: 227, 103: 227, 110: 227, 120: 99, 121: 99,
}  # fmt: skip
"""KiB of shared memory that a block may have, by compute capability."""
_OLDEST = 80
_ADVICE = "use smaller K or V, or a smaller chunk_size where one was given"
_ALIKE = 0.1  # parts by which the bandwidths of GPUs of one name differ
_COPIED = 0.9  # the share of the memory's peak bandwidth that a copy reaches


@dataclass(frozen=True)
class Device:
    """A GPU as plans see it. Times are in microseconds, so rates are a microsecond's.

    Attributes:
        capability: compute capability, (9, 0) for Hopper.
        multiprocessors: how many; each runs one or several blocks of a kernel at a time.
        shared: bytes of shared memory that a block may have.
        bandwidth: bytes of device memory, read and written, as of a large copy.
        half, single: floating-point operations of large matrix products of bf16 and of tf32 numbers.
        programs: blocks that a walk is cut into, so that they fill the multiprocessors.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared: int
    bandwidth: float
    half: float
    single: float
    programs: int

    @property
    def arch(self) -> int:
        """The capability as one number, 90 for (9, 0)."""
        return 10 * self.capability[0] + self.capability[1]

    def __str__(self) -> str:
        memory = f"{self.shared // _KIB} KiB a block, {self.bandwidth / 1e6:g} TB/s"
        return f"{self.name} ({self.multiprocessors} SMs, {memory})"

    @property
    def dependent(self) -> bool:
        """Whether kernels can be launched as programmatic dependents."""
        return self.capability >= (9, 0)

    @property
    def wide_products(self) -> bool:
        """Whether matrix products read their operands from shared memory, not from registers."""
        return reads_shared(self.arch)

    @property
    def tensor_memory(self) -> bool:
        """Whether accumulators of matrix products are kept in tensor memory (tcgen05)."""
        return 100 <= self.arch < 120

    def flops(self, dtype: torch.dtype) -> float:
        """Floating-point operations of products of inputs in `dtype`: three tf32 products make one of fp16 or fp32."""
        return self.half if dtype == torch.bfloat16 else self.single / 3


def _filling(multiprocessors: int) -> int:
    """The number of programs that fills the multiprocessors: a multiple of 16 or 32, because B * H usually is one."""
    step = 32 if multiprocessors >= 64 else 16
    return max(step, multiprocessors // step * step)


def filled(n: int, at_once: int) -> float:
    """The share of time that n programs keep all busy, if `at_once` run at the same time; nine tenths are enough."""
    return min(0.9, n / (-(-n // at_once) * at_once)) if n else 0.9


def _known(name: str, arch: int, multiprocessors: int, bandwidth: float, half: float) -> Device:
    shared, programs = _SHARED[arch] * _KIB, _filling(multiprocessors)
    return Device(name, divmod(arch, 10), multiprocessors, shared, bandwidth, half, half / 2, programs)


A100 = _known("A100", 80, 108, 1.8e6, 250e6)
A10 = _known("A10", 86, 72, 0.54e6, 100e6)
L4 = _known("L4", 89, 58, 0.27e6, 95e6)
H100 = _known("H100", 90, 132, 3.0e6, 780e6)
H200 = _known("H200", 90, 132, 4.3e6, 780e6)
B200 = _known("B200", 100, 148, 7.2e6, 1780e6)
KNOWN = (A100, A10, L4, H100, H200, B200)
_OF_ARCH = {x.arch: x for x in KNOWN}  # the last one of a capability: the H200 for 90

_planned: ContextVar[Device] = ContextVar("planned", default=H200)


@contextmanager
def planned_for(device: Device) -> Iterator[None]:
    """Inside, plans for tensors that are not on a GPU (meta tensors, the interpreter's) are made for `device`; outside
    for an H200."""
    token = _planned.set(device)
    try:
        yield
    finally:
        _planned.reset(token)


_stand_in: Device | None = None


@contextmanager
def standing_in(device: Device) -> Iterator[None]:
    """Inside, `device` is every GPU of this process, on all threads."""
    global _stand_in
    before, _stand_in = _stand_in, device
    try:
        yield
    finally:
        _stand_in = before


def of_device(device: torch.device | None = None) -> Device:
    """The properties of the GPU `device`, by default of the current one. For a device that is no GPU, those of the GPU
    that plans are made for.

    Raises:
        ValueError: the GPU is older than all that kernels are made for.
    """
    if _stand_in is not None:
        return _stand_in
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda":
        return _planned.get()
    return _of_index(torch.cuda.current_device() if device.index is None else device.index)


@functools.lru_cache(maxsize=64)
def _of_index(index: int) -> Device:
    return of_properties(torch.cuda.get_device_properties(index))


def of_properties(found: Any) -> Device:
    """A GPU's properties, from `torch.cuda.get_device_properties`.

    Torch does not give rates of matrix products: they are those of the known GPU of the same capability, scaled by the
    number of multiprocessors. The memory's bandwidth is that GPU's if torch does not give it.

    A known GPU is found by its name, its multiprocessors and about its bandwidth. Plans are then those that are made
    for it elsewhere, ahead of time.
    """
    arch = 10 * found.major + found.minor
    like, count = of_arch(arch, found.name), found.multi_processor_count
    clock, width = (getattr(found, key, 0) or 0 for key in ("memory_clock_rate", "memory_bus_width"))
    # clock in kHz, of memory that transfers twice a clock; width in bits
    told = _COPIED * 2 * clock * width / 8 * 1e-3 if clock > 0 and width > 0 else None
    for known in KNOWN:
        near = told is None or known is H200 or abs(told / known.bandwidth - 1) < _ALIKE
        alike = near and (known.arch, known.multiprocessors) == (arch, count)
        if alike and re.search(rf"\b{known.name}\b", found.name):
            return known
    bandwidth = like.bandwidth if told is None else told
    more = count / like.multiprocessors
    return Device(
        found.name, (found.major, found.minor), count,
        getattr(found, "shared_memory_per_block_optin", 0) or like.shared,
        bandwidth, like.half * more, like.single * more, _filling(count),
    )  # fmt: skip


def of_name(name: str) -> Device:
    """The known GPU of a name such as "H100", or that of a compute capability such as "sm_90".

    Raises:
        ValueError: none is known.
    """
    known = {x.name.lower(): x for x in KNOWN}
    arch = re.fullmatch(r"sm_(\d+)a?", name.lower())
    if arch is None and name.lower() not in known:
        raise ValueError(f"expected a GPU of {', '.join(x.name for x in KNOWN)}, or sm_90 and the like, got {name!r}")
    return known[name.lower()] if arch is None else of_arch(int(arch[1]))


def of_arch(arch: int, name: str = "") -> Device:
    """The known GPU of a compute capability, 90 for Hopper. If none is known, one with the rates of the nearest older.

    Raises:
        ValueError: the GPU is older than all that kernels are made for.
    """
    if arch < _OLDEST:
        called = f"{name} of " if name else ""
        raise ValueError(
            f"GPU: expected compute capability {_OLDEST / 10} or newer, got {called}{arch / 10}; kernels are made for "
            f"{', '.join(f'sm_{x}' for x in _SHARED)}"
        )
    like = _OF_ARCH.get(arch) or _OF_ARCH[max(x for x in _OF_ARCH if x <= arch)]
    if like.arch == arch:
        return like
    return replace(like, name=f"sm_{arch}", capability=divmod(arch, 10), shared=shared_of_arch(arch))


def reads_shared(arch: int) -> bool:
    """Whether matrix products read their operands from shared memory instead of registers.

    The instructions wgmma (Hopper) and tcgen05 (data-center Blackwell) do. GPUs of capability 12 have neither.
    """
    return 90 <= arch < 120


def shared_of_arch(arch: int) -> int:
    """Bytes of shared memory that a block may have; for a capability that is not in the table, the least of all."""
    return _SHARED.get(arch, min(_SHARED.values())) * _KIB


def check_heads(name: str, B: int, H: int) -> None:
    """ValueError if B * H is more than `MOST_HEADS`."""
    if B * H > MOST_HEADS:
        limit = f"B * H <= {MOST_HEADS} (a grid's second axis)"
        raise ValueError(f"{name}: expected {limit}, got {B * H}. Pack the sequences, with cu_seqlens.")


def check_shared(kernel: str, needed: int, arch: int, sizes: str, advice: str = _ADVICE) -> None:
    """Raises ValueError where a compiled kernel needs more shared memory than a block of the GPU has.

    Args:
        kernel: its name.
        needed: bytes, `metadata.shared` of the compiled kernel.
        sizes: what it was compiled for, as text.
    """
    limit = shared_of_arch(arch)
    if needed > limit:
        raise ValueError(
            f"{sizes}: kernel `{kernel}` needs {math.ceil(needed / _KIB)} KiB of shared memory, "
            f"{math.ceil((needed - limit) / _KIB)} KiB more than the {limit // _KIB} KiB that a block has on "
            f"sm_{arch}; {advice}"
        )
