"""Compile the kernels a host function would launch for sm_90 on a machine without a GPU.

Run it in a process without TRITON_INTERPRET. The host code runs on meta tensors; each launch is recorded and compiled
instead, with the specialisation (divisibility by 16, ones) that Triton would choose.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["Compiled", "compile_launch", "record_launches"]

_TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64",
    torch.uint8: "*u8", torch.float64: "*fp64",
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """What ptxas says of one kernel."""

    name: str
    registers: int
    stack: int
    shared: int
    spills: int
    ptx: str

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
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kwargs = kwargs | {"PDL": True, "launch_pdl": True}
    options = {k: v for k, v in kwargs.items() if k not in kernel.arg_names}
    named = dict(zip(kernel.arg_names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in kernel.arg_names}
    signature: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    attrs: dict[Any, Any] = {}
    for i, param in enumerate(kernel.params):
        value = named.get(param.name, param.default)
        free = param.name in (kernel.do_not_specialize or ())
        if param.is_constexpr or value is None or (type(value) is int and value == 1 and not free):
            signature[param.name], constants[(i,)] = "constexpr", value
            continue
        signature[param.name], aligned = _describe(value)
        if aligned and not free:
            attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    out = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return _resources(kernel.__name__, out)


def _describe(value: Any) -> tuple[str, bool]:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype], True
    if isinstance(value, bool):
        return "i1", False
    if isinstance(value, float):
        return "fp32", False
    return ("i32" if -(2**31) <= value < 2**31 else "i64"), value % 16 == 0


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
    return Compiled(name, found["REG"], found["STACK"], out.metadata.shared, spills, out.asm["ptx"])
