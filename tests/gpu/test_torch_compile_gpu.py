"""torch.compile on a GPU: generated kernels stay in one graph of Inductor, and a repeated step makes no other one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from flexsp.exceptions import NotAvailable
from flexsp.testing.compare import relative_error
from tests import variants

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
H, K, V = 2, 64, 64


def inputs_of(name: str, T: int) -> dict[str, torch.Tensor]:
    tokens, params = variants.draw(name, 1, T, random.randrange(2**31))
    made = {}
    for key, x in (tokens | params).items():
        wide = x.dim() == 4
        y = torch.randn(1, T, H, V if key == "v" else K, dtype=x.dtype) if wide and key != "g" else x
        y = -torch.rand(1, T, H, K, dtype=x.dtype) if wide and key == "g" else y
        made[key] = torch.nn.functional.normalize(y, dim=-1) if key == "k" else y
    return {key: x.float().cuda() for key, x in made.items()}


def results(f: Callable[..., Any], x: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    leaves = {key: y.clone().requires_grad_() for key, y in x.items()}
    o, final = f(**leaves)
    return [o, final, *torch.autograd.grad(o.square().sum() + final.square().sum(), [*leaves.values()])]


@pytest.mark.parametrize("name", ["gla", "deltanet"])
@pytest.mark.parametrize("packed", [False, True])
def test_one_graph_of_kernels(name: str, packed: bool) -> None:
    model = variants.load(name).make(H, K, V)
    bounds = torch.tensor([0, 70, 70, 300], device="cuda") if packed else None

    def f(**x: torch.Tensor) -> Any:
        o, final = model(**{key: y * 0.9 for key, y in x.items()}, cu_seqlens=bounds)
        return o.sin(), final.cos()

    torch._dynamo.reset()
    step = torch.compile(f, fullgraph=True)
    before = counters["stats"]["unique_graphs"]
    for _ in range(3):
        x = inputs_of(name, 300)
        for got, want in zip(results(step, x), results(f, x), strict=True):
            assert relative_error(got, want) < 1e-5  # what Inductor fuses around the kernels rounds otherwise
    with torch.no_grad():
        torch.testing.assert_close(step(**x)[0], f(**x)[0], rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] - before <= 2  # with gradients and without


def test_second_derivatives_are_refused() -> None:
    x = {key: y.requires_grad_() for key, y in inputs_of("gla", 70).items()}
    with pytest.raises(NotAvailable, match="create_graph=True"):
        torch.autograd.grad(variants.load("gla").make(H, K, V)(**x)[0].sum(), [*x.values()], create_graph=True)


def test_saved_tensors_on_the_cpu_are_refused() -> None:
    x = {key: y.requires_grad_() for key, y in inputs_of("gla", 70).items()}
    with torch.autograd.graph.saved_tensors_hooks(lambda y: y.cpu(), lambda y: y):
        o = variants.load("gla").make(H, K, V)(**x)[0]
    with pytest.raises(ValueError, match="saved tensors: expected .* device cuda:0, but hooks .* gave back cpu"):
        torch.autograd.grad(o.sum(), [*x.values()])
