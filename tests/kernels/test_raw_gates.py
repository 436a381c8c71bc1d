"""Log gates and step sizes of raw numbers: the kernels under the interpreter against PyTorch in float64."""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexsp.kernels import gates, raw_gates_in_pytorch
from flexsp.testing.bounds import within_tensors
from flexsp.testing.offline import compile_launches, record_launches
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED
from tests.marks import slow

Tensor = torch.Tensor
SHAPES = [(3, 7, 2), (2, 5, 3), (1, 40, 3, 5), (2, 9, 3, 20), (1, 70, 2, 130)]
FORMS = [(True, True, None), (True, False, None), (True, True, -5.0), (False, True, -3.0), (False, False, 2.0)]
"""Whether there is A_log, whether there is a bias, and the factor of sigmoids."""


def drawn(shape: Sequence[int], form: Any, dtype: torch.dtype, made: torch.Generator) -> list[Tensor | None]:
    """x behind odd strides, tokens first where heads have one gate, of two sequences with heads two apart; some of it
    far out. A_log and the bias are in float32 or in x's dtype."""
    turned = (1, 0, 2) if len(shape) == 3 else (2, 1, 0, 3)
    x = torch.randn(*[shape[i] for i in turned], 1 if len(shape) == 3 else 2, generator=made)[..., 0]
    some = torch.rand(x.shape, generator=made)
    x = torch.where(some < 0.05, -30.0, torch.where(some > 0.95, 30.0, 2 * x)).permute(turned)
    A_log, bias = torch.randn(shape[2], generator=made), torch.randn(shape[2:], generator=made)
    other = dtype if made.initial_seed() % 2 else torch.float32
    x = x.to(dtype)
    if len(shape) == 3 and shape[0] == 2:
        x = torch.stack([x, x], -1)[..., 0]
    found = [x, A_log.to(other) if form[0] else None, bias.to(other) if form[1] else None]
    return [None if p is None else p.requires_grad_() for p in found]


def of_all(y: Tensor, given: Sequence[Tensor | None], dy: Tensor) -> list[Tensor]:
    return [*torch.autograd.grad(y, [p for p in given if p is not None], dy)]


def errors(sp: object, seed: int, dtype: torch.dtype, tokens: int) -> list[tuple[float, float]]:
    """Of gates and of gradients, with the roundings of their dtypes. Programs add up gradients of `tokens` tokens."""
    from flexsp.kernels import raw_gates

    with patch.multiple(raw_gates, _TOKENS=tokens, _SUMMED=512, _NUMBERS=256):
        return _errors(seed, dtype)


def _errors(seed: int, dtype: torch.dtype) -> list[tuple[float, float]]:
    from flexsp.kernels import raw_gates

    made, found = torch.Generator().manual_seed(seed), []
    for shape, form in itertools.product(SHAPES, FORMS):
        given = drawn(shape, form, dtype, made)
        exact = [None if p is None else p.detach().double().requires_grad_() for p in given]
        dy = torch.rand(shape, generator=made)  # of one sign: sums do not cancel
        with within_tensors():
            with torch.no_grad():
                alone = raw_gates.activated(*given, form[2])  # type: ignore[arg-type]
            y = raw_gates.activated(*given, form[2])  # type: ignore[arg-type]
            assert torch.equal(alone, y) and y.dtype == torch.float32
            grads = of_all(y, given, dy)
        want = raw_gates_in_pytorch.activated(*exact, form[2], torch.float64)  # type: ignore[arg-type]
        exacts = of_all(want, exact, dy.double())
        pairs = [*zip([y, *grads], [want, *exacts], strict=True)]
        sizes = [w.norm().item() for _, w in pairs]
        if form[0] and form[2]:  # what tokens add to A_log's gradient has both signs, and cancels
            raw = exact[0] if exact[2] is None else exact[0] + exact[2]  # type: ignore[operator]
            sizes[2] = (exacts[0] * raw).abs().movedim(2, 0).flatten(1).sum(1).norm().item()
        for (a, w), size in zip(pairs, sizes, strict=True):
            found.append(((a - w).norm().item() / size, torch.finfo(a.dtype).eps))
        for a, leaf in zip(grads, [p for p in given if p is not None], strict=True):
            assert a.shape == leaf.shape and a.dtype == leaf.dtype
    return found


@pytest.mark.parametrize(
    ("dtype", "tokens"),
    [
        (torch.float32, 4), (torch.bfloat16, 4),
        *slow((torch.float32, 1000), (torch.float16, 4), (torch.float16, 1000), (torch.bfloat16, 1000)),
    ],
)  # fmt: skip
def test_against_float64(dtype: torch.dtype, tokens: int) -> None:
    (found,) = run_ranks(errors, 1, random.randrange(2**31), dtype, tokens, env=INTERPRETED)
    assert all(error < 16 * eps for error, eps in found), max((error / eps, error) for error, eps in found)


def steep(sp: object, seed: int) -> list[list[Tensor]]:
    """Gradients behind clamped gates, of kernels and of PyTorch, where e^A_log may overflow."""
    from flexsp.kernels import raw_gates

    made, found = torch.Generator().manual_seed(seed), []
    x = torch.randn(1, 10, 4, 6, generator=made)
    x[0, 3], x[0, 4] = -200.0, -1e4
    bias = torch.randn(4, 6, generator=made)
    x[0, 5, :, 0], bias[:, 0] = 2e-38, 0.0  # times the largest slope this is 3.3
    for factor in (None, -5.0):
        results = []
        for kernels in (True, False):
            leaves = [p.clone().requires_grad_() for p in (x, torch.tensor([1.0, 50.0, 89.0, 1e4]), bias)]
            if kernels:
                y = raw_gates.activated(*leaves, factor)
            else:
                y = raw_gates_in_pytorch.activated(*leaves, factor, torch.float32)
            results.append(torch.autograd.grad(gates.clamped(y).sum(), leaves))
        found += [[a, b] for a, b in zip(*results, strict=True)]
    return found


def test_gates_of_any_steepness() -> None:
    (found,) = run_ranks(steep, 1, random.randrange(2**31), env=INTERPRETED)
    for got, want in found:
        assert got.isfinite().all()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


class Watched(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def watched(sp: object, seed: int) -> list[float]:
    """Differences of gradients that PyTorch computes, of a negative view and while something looks on."""
    from flexsp.kernels import raw_gates

    made, found = torch.Generator().manual_seed(seed), []
    for form in FORMS:
        given = drawn((2, 5, 3, 4), form, torch.float32, made)
        dy = torch.randn(2, 5, 3, 4, generator=made)
        want = of_all(raw_gates.activated(*given, form[2]), given, dy)  # type: ignore[arg-type]
        y = raw_gates.activated(*given, form[2])  # type: ignore[arg-type]
        negative = of_all(y, given, torch._neg_view(dy))
        y = raw_gates.activated(*given, form[2])  # type: ignore[arg-type]
        with Watched():
            seen = of_all(y, given, dy)
        for a, b, c in zip(want, negative, seen, strict=True):
            found += [((a + b).norm() / a.norm()).item(), ((a - c).norm() / a.norm()).item()]
    return found


def test_gradients_that_something_looks_at() -> None:
    (found,) = run_ranks(watched, 1, random.randrange(2**31), env=INTERPRETED)
    assert max(found) < 1e-5


def partly(sp: object, seed: int) -> list[bool]:
    """Whether one gradient that is asked for is what it is beside the others, and A_log may be [1, 1, H, 1]. Last of no
    tokens."""
    from flexsp.kernels import raw_gates

    made, found = torch.Generator().manual_seed(seed), []
    given = drawn((2, 5, 3, 4), FORMS[0], torch.float32, made)
    x, A_log, bias = [p.detach() for p in given if p is not None]
    leaves, dy = [x, A_log.view(1, 1, 3, 1), bias.flatten()], torch.randn(2, 5, 3, 4, generator=made)
    want = of_all(raw_gates.activated(*given, None), given, dy)  # type: ignore[arg-type]
    for i, leaf in enumerate(leaves):
        one = [p.clone().requires_grad_(p is leaf) for p in leaves]
        (got,) = torch.autograd.grad(raw_gates.activated(*one, None), one[i], dy)
        found += [got.shape == leaf.shape, torch.equal(got.view_as(want[i]), want[i])]
    none = [x[:, :0].requires_grad_(), A_log.requires_grad_(), bias.requires_grad_()]
    empty = torch.autograd.grad(raw_gates.activated(*none, None).sum(), none)
    return [*found, *[p.shape == g.shape and not g.any() for p, g in zip(none, empty, strict=True)]]


def test_gradients_of_one_of_three() -> None:
    (found,) = run_ranks(partly, 1, random.randrange(2**31), env=INTERPRETED)
    assert found == [True] * 9


@functools.cache
def launched() -> list[Any]:
    """All kernels, as they are launched for gates of channels, of heads, and for step sizes."""
    from flexsp.kernels.raw_gates import activated

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta").requires_grad_()

    with record_launches() as launches:
        for sizes, factor in (((32, 128), None), ((32, 128), -5.0), ((32,), None), ((5, 256), -2.0)):
            y = activated(empty(1, 40960, *sizes, dtype=torch.bfloat16), empty(sizes[0]), empty(*sizes), factor)
            y.backward(torch.empty_like(y))
        y = activated(empty(1, 40960, 32, dtype=torch.bfloat16), None, None, 2.0)
        y.backward(torch.empty_like(y))
    assert len(launches) == 14
    return launches


@pytest.mark.compiles
def test_compiles_without_spills() -> None:
    for kernel in compile_launches(launched()):
        assert kernel.spills == 0 and kernel.waits_first and not kernel.races and not kernel.uneven_sums, kernel.name
        assert not kernel.unwritten


def test_offsets_are_of_64_bits() -> None:
    """Tensors of more than 2^31 numbers: what is multiplied to find a number is an int64 from the start."""
    for kernel in compile_launches(launched()):
        products = re.findall(r"arith\.muli .* : (\S+)", kernel.ttir)
        assert products and all("i64" in kind for kind in products), (kernel.name, products)
