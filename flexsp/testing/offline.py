"""Compile the kernels a host function would launch on a GPU, on a machine without one.

Run it in a process without TRITON_INTERPRET. The host code runs on meta tensors; each launch is recorded and compiled
instead, with the specialisation (divisibility by 16, ones) that Triton would choose.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flexsp.runtime.triton_private import FENCES_COPIES, gpu_target, tool
from flexsp.runtime.workarounds.unwritten_registers import disassembled, unread, unwritten
from flexsp.testing.races import UNFENCED_COPY, races
from flexsp.testing.triton_hooks import SharedMemory, compiling_to_shared_memory, record_launches

__all__ = ["Compiled", "compile_launch", "compile_launches", "ptx_of", "record_launches", "shared_of", "uneven_sums"]

Launched = tuple[Any, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Compiled:
    """What ptxas says of one kernel."""

    name: str
    registers: int
    stack: int
    shared: int
    spills: int
    ptx: str
    assembler: int  # 129 is CUDA 12.9
    unwritten: list[str]  # instructions that read registers which nothing wrote, and constants that nothing reads
    serialized: bool  # products on Hopper wait for each other: ptxas does that where registers do not suffice (C7512)
    ttir: str  # what Triton makes of the source first; empty of Gluon

    @property
    def waits_first(self) -> bool:
        """Whether the wait for the kernel before comes before every access to global memory, and comes once."""
        memory = re.search(r"\b(?:ld|st|atom|red|cp\.async)\.[\w.]*global|\bcp\.async\.bulk", self.ptx)
        waits = [found.start() for found in re.finditer(r"griddepcontrol\.wait", self.ptx)]
        return memory is not None and len(waits) == 1 and waits[0] < memory.start()

    @property
    def uneven_sums(self) -> list[str]:
        """Additions of a product to that of another lane that round the other lane's product alone.

        The lanes of a warp then hold sums that differ in the last bit. Triton 3.9 lets all of them write to the same
        place, and which one stays is not defined.
        """
        return uneven_sums(self.ptx)

    @property
    def drops_nan(self) -> bool:
        """Whether a larger or a smaller number is taken so that NaN gives way to a number; in fp64 no instruction does
        otherwise, and others put NaN in its place again."""
        return re.search(r"\b(?:max|min)(?:\.ftz)?\.(?:bf16|f16|f32)", self.ptx) is not None

    @property
    def races(self) -> list[str]:
        """Races on shared memory; also that some of the kernel could not be looked at.

        Left out are fences that a release of Triton leaves out of all kernels, see `FENCES_COPIES`.
        """
        answer = _races(self.ptx)
        found = [x for x in answer.found if FENCES_COPIES or not x.endswith(UNFENCED_COPY)]
        unseen = [f"{answer.unseen} of {answer.accesses} accesses not looked at"] if answer.unseen else []
        unseen += [f"{answer.unfollowed} ways of branches not followed"] if answer.unfollowed else []
        unseen += [f"{answer.missed} instructions not reached"] if answer.missed else []
        return [*found, *unseen]


_races = functools.lru_cache(maxsize=256)(races)  # calls of other kinds have kernels in common


def uneven_sums(ptx: str) -> list[str]:
    """See `Compiled.uneven_sums`."""
    numbers = r"(%\w+), (%?\w+), (%?\w+)"
    products = {x: {a, b} for x, a, b in re.findall(rf"mul(?:\.rn)?\.f32\s+{numbers};", ptx)}
    others = dict(re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+), (%\w+),", ptx))
    fused = re.finditer(rf"fma\.rn\.f32\s+{numbers}, (%\w+);", ptx)
    return [x[0] for x in fused if x[4] in others and products.get(others[x[4]]) == {x[2], x[3]}]


def compile_launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arch: int = 90) -> Compiled:
    """Compiles one recorded launch as `launch` would; reads registers, spills, shared memory and PTX.

    `arch`: compute capability, 90 for Hopper.
    """
    return _resources(kernel.__name__, _build(kernel, args, kwargs, arch))


def compile_launches(launches: Iterable[Launched], arch: int = 90) -> list[Compiled]:
    """`compile_launch` of all of them, side by side."""
    from flexsp.runtime.launch import workers

    return [*workers().map(lambda launch: compile_launch(launch[0], launch[1], launch[2], arch), launches)]


def ptx_of(launches: Iterable[Launched], arch: int = 90) -> list[str]:
    """The PTX of all of them, side by side."""
    from flexsp.runtime.launch import workers

    return [*workers().map(lambda launch: _build(launch[0], launch[1], launch[2], arch).asm["ptx"], launches)]


def shared_of(launches: Iterable[Launched], arch: int) -> list[int]:
    """Bytes of shared memory of each, side by side; nothing is compiled further than that is known."""
    from flexsp.runtime.launch import workers

    def found(launch: Launched) -> int:
        try:
            return _build(*launch, arch).metadata.shared  # compiled before
        except SharedMemory as known:
            return known.args[0]

    with compiling_to_shared_memory():
        return [*workers().map(found, launches)]


def _build(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arch: int) -> Any:
    from flexsp.runtime.launch import build

    pdl = arch >= 90
    constants = {k: v for k, v in kwargs.items() if k in kernel.arg_names} | {"PDL": pdl}
    options = {k: v for k, v in kwargs.items() if k not in kernel.arg_names} | {"launch_pdl": pdl}
    return build(kernel, args, constants, options, gpu_target(arch))


def _resources(name: str, out: Any) -> Compiled:
    asm = out.asm
    return _told(name, out.metadata.shared, asm["cubin"], asm["ptx"], asm.get("ttir", ""))


@functools.lru_cache(maxsize=256)
def _told(name: str, shared: int, cubin: bytes, ptx: str, ttir: str) -> Compiled:
    cuobjdump = tool("cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    listing = disassembled(cubin)
    assert listing is not None, "found no nvdisasm"
    spills = len(re.findall(r"\b(?:STL|LDL)\b", listing))
    toolkit = re.search(rb"\x04\x37\x04\x00(....)", cubin, re.DOTALL)  # EIATTR_CUDA_API_VERSION
    assembler = int.from_bytes(toolkit[1], "little") if toolkit else 0
    wrong = [*unwritten(listing), *unread(listing)]
    registers, stack = found["REG"], found["STACK"]
    return Compiled(name, registers, stack, shared, spills, ptx, assembler, wrong, _serialized(listing), ttir)


def _serialized(listing: str) -> bool:
    """Whether machine code waits as often as it begins products. In order, only the last of a sum is waited for."""
    products, waits = (len(re.findall(x, listing)) for x in (r"\bHGMMA\b", r"\bWARPGROUP\.DEPBAR\b"))
    return products > 1 and waits >= products
