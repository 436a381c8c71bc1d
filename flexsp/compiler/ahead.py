"""Stage 6b: kernels compiled before they are called for (enable_aot=True)."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from typing import Any

import torch
import triton

from flexsp.compiler.backend import intrinsic_kernels
from flexsp.compiler.backend.generated_kernels import Generated
from flexsp.compiler.dispatch import executable_of
from flexsp.compiler.frontend.meta import InputMeta
from flexsp.compiler.planning.plan import refusal
from flexsp.devices import of_arch, of_device, planned_for
from flexsp.runtime.launch import workers

__all__ = ["compile_ahead"]

_AHEAD = (1024, 65536)  # tokens: plans for short and for long sequences differ in flags and tiles


def compile_ahead(code: Generated, meta: InputMeta, target: Any) -> int:
    """Compiles forward and backward for all combinations of the sizes in `meta`, into Triton's cache. How many kernels.

    For inputs that are contiguous and aligned, in the dtypes of `meta`, packed and not, without initial states and
    without gradients of final ones. Sizes that have no kernels are left out. Plans are those of the GPU that is there,
    else of the known one of the target's compute capability.
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
            for T, docs in itertools.product(_AHEAD, (0, 4)):
                looks = meta.looks(sizes, T)
                given = {x: torch.empty(shape, dtype=kind, device="meta") for x, (kind, shape) in looks.items()}
                bounds = torch.empty(docs + 1, dtype=torch.int64, device="meta") if docs else None
                with planned_for(device):
                    executable = executable_of(code, given, None, bounds, None)
                for launch, frame in executable.launches(list(given.values()), None, True):
                    if (facts := launch.facts(frame)) not in jobs:
                        jobs[facts] = workers().submit(launch.build, launch.described(frame), target)
    return len({job.result().hash for job in jobs.values()})
