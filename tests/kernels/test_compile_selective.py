"""The kernels of the selective scan compiled for sm_90 without a GPU: registers, shared memory, NaN, lanes, races."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import triton

from flexsp.devices import H200
from flexsp.runtime.triton_private import RELEASE
from tests.harness.compiling import in_child, told_of
from tests.marks import slow

pytestmark = pytest.mark.compiles(always=True)

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed": {"n_docs": 4},
    "zoh": {"zoh": True},
    "packed zoh": {"n_docs": 4, "zoh": True},
    "fp32, bare": {"dtype": "float32", "bare": True},
    "odd sizes": {"batch": 2, "T": 333, "D": 45, "N": 5},
    "few channels": {"D": 4, "N": 4},
    "few channels zoh": {"D": 12, "N": 2, "zoh": True},
}
KERNELS = {"summarize_kernel", "output_kernel", "summarize_backward_kernel", "chunk_states_kernel", "grads_kernel"}
every = pytest.mark.parametrize("name", slow(*CONFIGS))


def compile_config(
    dtype: str = "bfloat16", batch: int = 1, T: int = 32768, D: int = 4096, N: int = 16, n_docs: int = 0,
    zoh: bool = False, bare: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """In a child process: a forward and backward pass on meta tensors, every launch compiled."""
    import torch

    from flexsp.kernels import executable, operators
    from flexsp.kernels.selective.selective_scan import selective
    from flexsp.testing.offline import record_launches

    def meta(*size: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=kind, device="meta", requires_grad=kind.is_floating_point)

    os.environ["FLEXSP_BACKEND"] = "triton"
    executable.propagate_step = lambda *args: lambda frame: None  # type: ignore[assignment]  # compiled in its own tests
    operators.chunk_table = lambda *args: meta(T // 8 + n_docs, 5, kind=torch.int32)  # type: ignore[assignment]
    kind = getattr(torch, dtype)
    u, delta, z = (meta(batch, T, D, kind=kind) for _ in range(3))
    B, C = (meta(batch, T, N, kind=kind) for _ in range(2))
    optional = (None, None, None) if bare else (meta(D), z, meta(D))
    with record_launches() as launches:
        y, last = selective(
            u, delta, meta(D, N), B, C, *optional, softplus=not bare, zoh=zoh, output_final_state=True,
            initial_state=meta(n_docs or batch, D, N),
            cu_seqlens=meta(n_docs + 1, kind=torch.int64) if n_docs else None,
        )  # fmt: skip
        assert last is not None
        torch.autograd.backward([y, last], [y.detach(), last.detach()])
    return told_of(launches)


@functools.cache
def compiled(name: str) -> list[dict[str, Any]]:
    return in_child(functools.partial(compile_config, **CONFIGS[name]))


@every
def test_resources(name: str) -> None:
    found = compiled(name)
    assert {kernel["name"] for kernel in found} == KERNELS | ({"tail_kernel"} if "packed" in name else set())
    assert all(kernel["shared"] < H200.shared for kernel in found), found
    if RELEASE != (3, 6):
        pytest.skip(f"no spills are stated for Triton {triton.__version__}")
    assert all(kernel["stack"] == 0 for kernel in found), found


@every
def test_what_the_interpreter_cannot_show(name: str) -> None:
    """The wait for the kernel before comes first; no lanes that round a sum differently, no NaN that gives way to a
    number, no missing barriers, no registers that nothing wrote."""
    for kernel in compiled(name):
        assert kernel["waits_first"], kernel
        assert not any(kernel[what] for what in ("uneven_sums", "drops_nan", "races", "unwritten")), kernel
