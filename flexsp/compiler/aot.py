"""What ``LinearAttention(..., enable_aot=True)`` does: it compiles kernels before the first call needs them."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import Future
from typing import Any

import torch
import triton

from flexsp.compiler.backend import intrinsic_kernels
from flexsp.compiler.backend.generated_kernels import Generated
from flexsp.compiler.dispatch import executable_of, refusal
from flexsp.compiler.frontend.meta import InputMeta
from flexsp.devices import of_arch, of_device, planned_for
from flexsp.runtime.launch import workers
from flexsp.runtime.triton_private import current_target, gpu_target

__all__ = ["compile_ahead", "target_of_host"]

_AHEAD = (1024, 65536)  # tokens: plans for short and for long sequences differ in flags and tiles


def target_of_host() -> Any:
    """The GPU that is there, else one of compute capability FLEXSP_AOT_ARCH."""
    named = os.environ.get("FLEXSP_AOT_ARCH") or "90"
    if not named.isdecimal():
        raise ValueError(f"FLEXSP_AOT_ARCH: expected a compute capability such as 90, got {named!r}")
    return current_target() if torch.cuda.is_available() else gpu_target(int(named))


def compile_ahead(code: Generated, meta: InputMeta, target: Any) -> int:
    """Compiles forward and backward kernels into Triton's cache; returns their number.

    It goes through all combinations of the sizes in `meta`, for calls with and without packed documents. Inputs are
    contiguous, aligned, and of the dtypes of `meta`; there are no initial states, and no gradients of final states.
    Sizes that have no kernels are left out. Plans are made for the GPU that is there, else for the known GPU of the
    target's compute capability.
    """
    if not isinstance(intrinsic_kernels.inverse_kernel, triton.JITFunction):
        raise ValueError("enable_aot: expected a process without TRITON_INTERPRET, whose kernels can be compiled")
    device = of_device() if torch.cuda.is_available() else of_arch(target.arch)
    jobs: dict[Any, Future[Any]] = {}
    choices = meta.sizes()
    for values in itertools.product(*choices.values()):
        sizes = dict(zip(choices, values, strict=True))
        with planned_for(device):
            refused = refusal(code, sizes, meta.looks(sizes, 1), on_gpu=False)
        if refused is None:
            for T, n_docs in itertools.product(_AHEAD, (0, 4)):
                looks = meta.looks(sizes, T)
                given = {x: torch.empty(shape, dtype=kind, device="meta") for x, (kind, shape) in looks.items()}
                bounds = torch.empty(n_docs + 1, dtype=torch.int64, device="meta") if n_docs else None
                with planned_for(device):
                    executable = executable_of(code, given, None, bounds, None)
                for launch, frame in executable.launches(list(given.values()), None, True):
                    if (facts := launch.facts(frame)) not in jobs:
                        jobs[facts] = workers().submit(launch.request(frame, device.dependent).build, target)
    return len({job.result().hash for job in jobs.values()})
