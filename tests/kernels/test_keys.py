"""Keys of unit length, repeated for value heads: the kernels under the interpreter against PyTorch in float64."""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexsp.testing.bounds import within_tensors
from flexsp.testing.offline import compile_launches, record_launches
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED

KINDS = [(K, repeats, norm) for K, repeats, norm in itertools.product((5, 20, 256), (1, 3), (True, False))]
LENGTHS = [(7,), (7, 14), (9, 4)]


def errors(sp: object, seed: int, dtype: torch.dtype) -> list[float]:
    """Of outputs and gradients of two tensors, or of one, that need not have as many tokens. They lie behind odd
    strides; the rows of one sequence are very small, or zero."""
    from flexsp.kernels.keys import unit_keys

    made, found = torch.Generator().manual_seed(seed), []
    for (K, repeats, norm), lengths in itertools.product(KINDS, LENGTHS):
        xs, exacts, wants, dys = [], [], [], []
        for T in lengths:
            x = torch.randn(3, 2, T, K, 2, generator=made).to(dtype)[..., 0].transpose(1, 2)  # [B, T, H, K]
            x[1] *= 1e-3
            x[2, 3] = 0
            exact = x.double().requires_grad_()
            want = exact / (exact.square().sum(-1, keepdim=True) + 1e-6).sqrt() if norm else exact
            exacts.append(exact)
            wants.append(want.repeat_interleave(repeats, dim=2))
            xs.append(x.requires_grad_())
            dys.append(torch.randn(3, T, 2 * repeats, K, generator=made).to(dtype))
        with within_tensors():
            with torch.no_grad():
                alone = unit_keys(xs, repeats, norm)
            got = unit_keys(xs, repeats, norm)
            assert all(torch.equal(a, b) for a, b in zip(alone, got, strict=True))
            grads = torch.autograd.grad(got, xs, dys)
        pairs = [*zip(got, wants, strict=True)]
        pairs += zip(grads, torch.autograd.grad(wants, exacts, [dy.double() for dy in dys]), strict=True)
        found += [((a[b].double() - w[b]).norm() / w[b].norm()).item() for a, w in pairs for b in range(3)]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_against_float64(dtype: torch.dtype) -> None:
    (found,) = run_ranks(errors, 1, random.randrange(2**31), dtype, env=INTERPRETED)
    assert len(found) == 6 * len(KINDS) * sum(map(len, LENGTHS)) and max(found) < 4 * torch.finfo(dtype).eps


class Watched(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def watched(sp: object, seed: int) -> list[float]:
    """Differences of gradients that PyTorch computes, of a negative view and while something looks on."""
    from flexsp.kernels.keys import unit_keys

    torch.manual_seed(seed)
    xs, found = [torch.randn(2, 5, 3, 20, requires_grad=True) for _ in range(2)], []
    dys = [torch.randn(2, 5, 6, 20) for _ in range(2)]
    for norm in (True, False):
        want = torch.autograd.grad(unit_keys(xs, 2, norm), xs, dys)
        negative = torch.autograd.grad(unit_keys(xs, 2, norm), xs, [torch._neg_view(dys[0]), -dys[1]])
        y = unit_keys(xs, 2, norm)
        with Watched():
            seen = torch.autograd.grad(y, xs, dys)
        for i in range(2):
            found += [(seen[i] - want[i]).norm().item(), (negative[i] + want[i]).norm().item()]
    return found


def test_gradients_that_something_looks_at() -> None:
    (found,) = run_ranks(watched, 1, random.randrange(2**31), env=INTERPRETED)
    assert max(found) < 1e-5


def partly(sp: object, seed: int) -> list[bool]:
    """What has a gradient where one of two tensors wants one, or one output is used, and whether it is that of both.
    Last of a tensor that is both."""
    from flexsp.kernels.keys import unit_keys

    torch.manual_seed(seed)
    xs, dys = [torch.randn(2, 5, 3, 20) for _ in range(2)], [torch.randn(2, 5, 6, 20) for _ in range(2)]
    leaves = [x.clone().requires_grad_() for x in xs]
    want = torch.autograd.grad(unit_keys(leaves, 2, True), leaves, dys)
    found = []
    for i in range(2):
        mixed = [x.clone().requires_grad_(j == i) for j, x in enumerate(xs)]
        ys = unit_keys(mixed, 2, True)
        found += [ys[i].requires_grad, not ys[1 - i].requires_grad]
        found.append(torch.equal(torch.autograd.grad(ys[i], mixed[i], dys[i])[0], want[i]))
        one = torch.autograd.grad(unit_keys(leaves, 2, True)[i], leaves, dys[i], allow_unused=True)
        found += [torch.equal(one[i], want[i]), one[1 - i] is None]
        asked = torch.autograd.grad(unit_keys(leaves, 2, True), leaves[i], dys)[0]
        found.append(torch.equal(asked, want[i]))
    x = leaves[0]
    twice = unit_keys((x, x), 2, True)
    found += [torch.equal(y, unit_keys(leaves, 2, True)[0]) for y in twice]
    both = torch.autograd.grad(twice, x, [dys[0], dys[0]])[0]
    return [*found, torch.allclose(both, 2 * want[0])]


def test_gradients_of_one_of_two() -> None:
    (found,) = run_ranks(partly, 1, random.randrange(2**31), env=INTERPRETED)
    assert found == [True] * 15


def unaligned(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


def turned(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


CHANGES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], dict[str, Any]], tuple[int, int]]] = {
    "nothing": (lambda q, k: {}, (0, 0)),
    "strides of the first": (lambda q, k: {"tensors": (turned(q), k)}, (1, 1)),
    "strides of the second": (lambda q, k: {"tensors": (q, turned(k))}, (1, 1)),
    "alignment of the first": (lambda q, k: {"tensors": (unaligned(q), k)}, (1, 1)),
    "alignment of the second": (lambda q, k: {"tensors": (q, unaligned(k))}, (1, 1)),
    "tokens of the second": (lambda q, k: {"tensors": (q, k[:, :4])}, (1, 1)),
    "dtypes": (lambda q, k: {"tensors": (q.half(), k.half())}, (1, 1)),
    "only one": (lambda q, k: {"tensors": (q,)}, (1, 1)),
    "repeats": (lambda q, k: {"repeats": 3}, (1, 1)),
    "no norm": (lambda q, k: {"norm": False}, (1, 1)),
    "whose gradient is wanted": (lambda q, k: {"wants": (False, True)}, (0, 1)),
}
"""What a second call differs in, and how many launches are worked out for it, forward and backward."""


@pytest.mark.parametrize("change", CHANGES)
def test_what_tells_launches_apart(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsp.kernels import keys

    monkeypatch.setattr(keys, "run_steps", lambda *args: None)  # no kernel runs
    monkeypatch.setattr(keys, "_launches", {})

    def call(tensors: Any, repeats: int = 2, norm: bool = True, wants: tuple[bool, ...] = (True, True)) -> None:
        leaves = [x.detach().requires_grad_(want) for x, want in zip(tensors, wants, strict=False)]
        found = [y for y in keys.unit_keys(leaves, repeats, norm) if y.requires_grad]
        torch.autograd.backward(found, [torch.zeros_like(y) for y in found])

    def worked_out() -> list[int]:
        names = [launch.kernel.__name__ for launch in keys._launches.values()]
        return [names.count("unit_keys_kernel"), names.count("unit_keys_grad_kernel")]

    q, k = torch.randn(2, 1, 5, 3, 16).unbind(0)
    call((q, k))
    assert worked_out() == [1, 1]
    make, more = CHANGES[change]
    call(**({"tensors": (q.clone(), k.clone())} | make(q, k)))
    assert [n - 1 for n in worked_out()] == list(more)


@functools.cache
def launched() -> list[Any]:
    """Both kernels, as they are launched for heads of 256."""
    from flexsp.kernels.keys import unit_keys

    xs = [torch.empty(1, T, 4, 256, dtype=torch.bfloat16, device="meta").requires_grad_() for T in (4096, 8192)]
    with record_launches() as launches:
        y = unit_keys(xs, 2, True)
        torch.autograd.backward(y, [torch.empty_like(each) for each in y])
    assert len(launches) == 2
    return launches


@pytest.mark.compiles
def test_compiles_without_spills() -> None:
    for kernel in compile_launches(launched()):
        assert kernel.spills == 0 and kernel.waits_first and not kernel.races and not kernel.uneven_sums, kernel.name


def test_offsets_are_of_64_bits() -> None:
    """Tensors of more than 2^31 numbers: what is multiplied to find a number is an int64 from the start."""
    for kernel in compile_launches(launched()):
        products = re.findall(r"arith\.muli .* : (\S+)", kernel.ttir)
        assert products and all("i64" in kind for kind in products), (kernel.name, products)
