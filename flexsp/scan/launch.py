"""Launch of Triton kernels with little host time: a repeated call goes straight to the compiled kernel.

Triton's own launcher describes every argument of every call in text to find the kernel it compiled before. Here the
numbers of a call and the types and alignments of its tensors form a tuple, and the compiled kernel it led to is kept.

From Hopper on, kernels are launched as programmatic dependents: a kernel is set up before the memory of the one before
has settled, and waits for that in `begin`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

__all__ = ["begin", "launch"]

_compiled: dict[Any, Any] = {}


@triton.jit
def begin(PDL: tl.constexpr) -> None:
    """First statement of every kernel that `launch` starts: waits until what the kernel before wrote can be seen.

    Nothing may touch global memory above it. The kernel before gives no signal of its own, so this one is set up when
    its last block is done: set up earlier, small blocks crowd on the few SMs that the walks leave idle.
    """
    if PDL:
        gdc_wait()


@functools.lru_cache(maxsize=64)
def _dependent(device: int) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    constants: dict[str, Any],
    options: dict[str, Any],
    prepare: Callable[[Any], None] | None = None,
) -> None:
    """Runs `kernel[grid](*args, **constants, **options)` on the first argument's device and its current stream.

    The kernel's constexpr parameters come after all others, the last is PDL, given here and handed to `begin`; option
    values are hashable or dictionaries. `prepare` is called with a freshly compiled kernel, its module loaded, before
    its first launch.
    """
    if not args[0].is_cuda:
        kernel[grid](*args, **constants, PDL=False, **options)
        return
    device = args[0].device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, args, constants, options, prepare)
    pdl = _dependent(device)
    fixed = (*[constants[name] for name in kernel.arg_names[len(args) : -1]], pdl)
    how = tuple([tuple(v.items()) if isinstance(v, dict) else v for v in options.values()])
    facts, values = [], []
    for x in args:
        if isinstance(x, torch.Tensor):
            address = x.data_ptr()
            facts.append((x.dtype, address % 16 == 0))
            values.append(address if x.is_cuda else x)  # the driver need not look up what is known to be on the GPU
        else:
            facts.append(x)
            values.append(x)
    key = (kernel, device, tuple(facts), fixed, how)
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = kernel.warmup(*args, grid=grid, **constants, PDL=pdl, **options, launch_pdl=pdl)
        if prepare is not None:
            compiled._init_handles()
            prepare(compiled)
        _compiled[key] = compiled
    compiled[grid + (1,) * (3 - len(grid))](*values, *fixed)
