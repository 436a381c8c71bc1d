"""Launch of Triton kernels with little host time: a repeated call goes straight to the compiled kernel.

Triton's own launcher describes every argument of every call in text to find the kernel it compiled before. Here the
numbers of a call and the types and alignments of its tensors form a tuple, and the compiled kernel it led to is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["launch"]

_compiled: dict[Any, Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    constants: dict[str, Any],
    options: dict[str, Any],
    prepare: Callable[[Any], None] | None = None,
) -> None:
    """Runs `kernel[grid](*args, **constants, **options)` on the first argument's device and its current stream.

    The kernel's constexpr parameters come after all others; option values are hashable or dictionaries. `prepare` is
    called with a freshly compiled kernel, its module loaded, before its first launch.
    """
    if not args[0].is_cuda:
        kernel[grid](*args, **constants, **options)
        return
    if args[0].device.index != torch.cuda.current_device():
        with torch.cuda.device(args[0].device):
            return launch(kernel, grid, args, constants, options, prepare)
    fixed = tuple([constants[name] for name in kernel.arg_names[len(args) :]])
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
    key = (kernel, args[0].device.index, tuple(facts), fixed, how)
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = kernel.warmup(*args, grid=grid, **constants, **options)
        if prepare is not None:
            compiled._init_handles()
            prepare(compiled)
        _compiled[key] = compiled
    compiled[grid + (1,) * (3 - len(grid))](*values, *fixed)
