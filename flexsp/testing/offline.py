"""Compile the kernels a host function would launch for sm_90 on a machine without a GPU.

Run it in a process without TRITON_INTERPRET. The host code runs on meta tensors; each launch is recorded and compiled
instead, with the specialisation (divisibility by 16, ones) that Triton would choose.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Compiled", "compile_launch", "compile_launches", "record_launches"]


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

    @property
    def waits_first(self) -> bool:
        """Whether the wait for the kernel before comes before every access to global memory, and comes once."""
        memory = re.search(r"\b(?:ld|st|atom|red|cp\.async)\.[\w.]*global|\bcp\.async\.bulk", self.ptx)
        waits = [found.start() for found in re.finditer(r"griddepcontrol\.wait", self.ptx)]
        return memory is not None and len(waits) == 1 and waits[0] < memory.start()


@contextmanager
def record_launches() -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """Collects (kernel, args, kwargs) of every Triton launch in the block instead of running it."""
    from triton.runtime.jit import JITFunction

    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    original: Callable[..., Any] = JITFunction.__getitem__

    def record(self: Any, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: launches.append((self, args, kwargs))

    JITFunction.__getitem__ = record  # type: ignore[method-assign]
    try:
        yield launches
    finally:
        JITFunction.__getitem__ = original  # type: ignore[method-assign]


def compile_launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
    """Compiles one recorded launch as `launch` would for sm_90; reads registers, spills, shared memory and PTX."""
    from triton.backends.compiler import GPUTarget

    from flexsp.scan.launch import build

    constants = {k: v for k, v in kwargs.items() if k in kernel.arg_names} | {"PDL": True}
    options = {k: v for k, v in kwargs.items() if k not in kernel.arg_names} | {"launch_pdl": True}
    return _resources(kernel.__name__, build(kernel, args, constants, options, GPUTarget("cuda", 90, 32)))


def compile_launches(launches: Iterable[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> list[Compiled]:
    """`compile_launch` of all of them, side by side."""
    from flexsp.scan.launch import workers

    return [*workers().map(lambda launch: compile_launch(*launch), launches)]


def _resources(name: str, out: Any) -> Compiled:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(out.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        sass = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    found = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    spills = len(re.findall(r"\b(?:STL|LDL)\b", sass))
    toolkit = re.search(rb"\x04\x37\x04\x00(....)", out.asm["cubin"], re.DOTALL)  # EIATTR_CUDA_API_VERSION
    assembler = int.from_bytes(toolkit[1], "little") if toolkit else 0
    return Compiled(name, found["REG"], found["STACK"], out.metadata.shared, spills, out.asm["ptx"], assembler)
