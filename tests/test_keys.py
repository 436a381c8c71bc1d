"""Keys of unit length, repeated for value heads: the kernels under the interpreter against PyTorch in float64."""

from __future__ import annotations

import functools
import itertools
import random
import re
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_against_float64(dtype: torch.dtype) -> None:
    (found,) = run_ranks(errors, 1, random.randrange(2**31), dtype, env=ENV)
    assert len(found) == 6 * len(KINDS) and max(found) < 4 * torch.finfo(dtype).eps


class Watched(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def watched(sp: object, seed: int) -> list[float]:
    """Differences of gradients that PyTorch computes, of a negative view and while something looks on."""
    from flexsp.kernels.keys import unit_keys

    torch.manual_seed(seed)
    x, found = torch.randn(2, 5, 3, 20, requires_grad=True), []
    dy = torch.randn(2, 5, 6, 20)
    for norm in (True, False):
        (want,) = torch.autograd.grad(unit_keys(x, 2, norm), x, dy)
        (negative,) = torch.autograd.grad(unit_keys(x, 2, norm), x, torch._neg_view(dy))
        y = unit_keys(x, 2, norm)
        with Watched():
            (seen,) = torch.autograd.grad(y, x, dy)
        found += [(seen - want).norm().item(), (negative + want).norm().item()]
    return found


def test_gradients_that_something_looks_at() -> None:
    (found,) = run_ranks(watched, 1, random.randrange(2**31), env=ENV)
    assert max(found) < 1e-5


@functools.cache
def launched() -> list[Any]:
    """Both kernels, as they are launched for heads of 256."""
    from flexsp.kernels.keys import unit_keys

    x = torch.empty(1, 4096, 4, 256, dtype=torch.bfloat16, device="meta").requires_grad_()
    with record_launches() as launches:
        y = unit_keys(x, 2, True)
        y.backward(torch.empty_like(y))
    assert len(launches) == 2
    return launches


def test_compiles_without_spills() -> None:
    for kernel in compile_launches(launched()):
        assert kernel.spills == 0 and kernel.waits_first and not kernel.races and not kernel.uneven_sums, kernel.name


def test_offsets_are_of_64_bits() -> None:
    """Tensors of more than 2^31 numbers: what is multiplied to find a number is an int64 from the start."""
    for kernel in compile_launches(launched()):
        products = re.findall(r"arith\.muli .* : (\S+)", kernel.ttir)
        assert products and all("i64" in kind for kind in products), (kernel.name, products)
