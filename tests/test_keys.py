"""Keys of unit length, repeated for value heads: the kernels under the interpreter against PyTorch in float64."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from flexsp.testing.offline import compile_launches, record_launches
from flexsp.testing.ranks import run_ranks

ENV = {"TRITON_INTERPRET": "1"}
KINDS = [(K, repeats, norm) for K, repeats, norm in itertools.product((5, 20, 256), (1, 3), (True, False))]


def errors(sp: object, seed: int, dtype: torch.dtype) -> list[float]:
    """Of outputs and gradients, for tensors behind odd strides; the rows of one sequence are very small, or zero."""
    from flexsp.kernels.keys import unit_keys

    made, found = torch.Generator().manual_seed(seed), []
    for K, repeats, norm in KINDS:
        x = torch.randn(3, 2, 7, K, 2, generator=made).to(dtype)[..., 0].transpose(1, 2)  # [B, T, H, K]
        x[1] *= 1e-3
        x[2, 3] = 0
        dy = torch.randn(3, 7, 2 * repeats, K, generator=made).to(dtype)
        exact = x.double().requires_grad_()
        want = exact / (exact.square().sum(-1, keepdim=True) + 1e-6).sqrt() if norm else exact
        want = want.repeat_interleave(repeats, dim=2)
        x = x.requires_grad_()
        got = unit_keys(x, repeats, norm)
        pairs = [(got, want), (torch.autograd.grad(got, x, dy)[0], torch.autograd.grad(want, exact, dy.double())[0])]
        for b in range(3):
            found += [((a[b].double() - w[b]).norm() / w[b].norm()).item() for a, w in pairs]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_against_float64(dtype: torch.dtype) -> None:
    (found,) = run_ranks(errors, 1, random.randrange(2**31), dtype, env=ENV)
    assert len(found) == 6 * len(KINDS) and max(found) < 4 * torch.finfo(dtype).eps


def test_compiles_without_spills() -> None:
    from flexsp.kernels.keys import unit_keys

    x = torch.empty(1, 4096, 4, 256, dtype=torch.bfloat16, device="meta").requires_grad_()
    with record_launches() as launches:
        y = unit_keys(x, 2, True)
        y.backward(torch.empty_like(y))
    assert len(launches) == 2
    for kernel in compile_launches(launches):
        assert kernel.spills == 0 and kernel.waits_first and not kernel.races and not kernel.uneven_sums, kernel.name
