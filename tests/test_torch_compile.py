"""torch.compile keeps every op, alone or over ranks, in one graph and changes no result."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import flexsp
from flexsp import SequenceParallel, ops
from flexsp.testing.cases import CASES, Shape
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks

EXACT = 1e-12


def compiled(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(f, fullgraph=True, backend="aot_eager", **options)


def leaf(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(leaf(y) for y in x)
    return x.detach().clone().requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x


def tensors(x: Any) -> list[torch.Tensor]:
    if isinstance(x, dict):
        x = tuple(x.values())
    if isinstance(x, (tuple, list)):
        return [t for y in x for t in tensors(y)]
    return [x] if isinstance(x, torch.Tensor) and x.is_floating_point() else []


def results(f: Callable[..., Any], inputs: dict[str, Any]) -> list[torch.Tensor]:
    """Outputs and gradients of the sum of their squares."""
    inputs = {name: leaf(x) for name, x in inputs.items()}
    outputs = tensors(f(**inputs))
    loss = sum((x.square().sum() for x in outputs), torch.zeros((), dtype=torch.float64))
    return [*outputs, *torch.autograd.grad(loss, tensors(inputs))]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    assert all(relative_error(a, b) < EXACT for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("name", ["simple_gla", "normalized", "mamba2_groups"])
def test_one_graph(name: str) -> None:
    case = CASES[name]
    inputs = case.inputs(Shape(B=1, T=70, K=6, V=5, states=3), random.randrange(2**31))
    inputs["cu_seqlens"] = torch.tensor([0, 20, 20, 70])

    def f(**kwargs: Any) -> Any:
        return case.op(**kwargs, output_final_state=True)

    assert_same(results(compiled(f), inputs), results(f, inputs))


@pytest.mark.parametrize("name", ["linear", "gamma", "retention", "lightning", "mamba2"])
def test_one_graph_of_the_other_gates(name: str) -> None:
    T = 2200 if name == "gamma" else 20  # long enough for two levels of the scan, once
    inputs = CASES[name].inputs(Shape(T=T, K=6, V=5), random.randrange(2**31))
    with torch.no_grad():
        assert_same([compiled(CASES[name].op)(**inputs)[0]], [CASES[name].op(**inputs)[0]])


def test_another_length_is_no_other_graph() -> None:
    """With a symbolic T. Multiples of the chunk, which need no padding, may have a graph of their own."""
    step = compiled(ops.chunk_simple_gla)
    before = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        for T in (70, 129, 999, 128, 256):
            inputs = CASES["simple_gla"].inputs(Shape(B=1, T=T, K=3, V=2), random.randrange(2**31))
            for x in inputs.values():
                torch._dynamo.mark_dynamic(x, 1)
            assert_same([step(**inputs)[0]], [ops.chunk_simple_gla(**inputs)[0]])
            assert counters["stats"]["unique_graphs"] - before <= 1 + (T % 64 == 0)


def test_decoding_step() -> None:
    inputs = CASES["simple_gla"].inputs(Shape(T=1, K=6, V=5, states=2), random.randrange(2**31))

    def f(**kwargs: Any) -> Any:
        return ops.recurrent_simple_gla(**kwargs, output_final_state=True)

    assert_same(results(compiled(f), inputs), results(f, inputs))


def over_ranks(sp: SequenceParallel, name: str, lengths: list[int], packed: bool, ambient: bool, seed: int) -> None:
    case = CASES[name]
    sp.set_lengths(lengths)
    start = sum(lengths[: sp.rank])
    inputs = case.inputs(Shape(B=1, T=sum(lengths), K=6, V=5), seed)
    inputs = {n: x[:, start : start + lengths[sp.rank]] if n in case.tokens else x for n, x in inputs.items()}
    if packed:
        inputs["cu_seqlens"] = torch.tensor([0, 10, 45, sum(lengths)])

    def f(**kwargs: Any) -> Any:
        if ambient:
            with flexsp.sequence_parallel(sp):
                return case.op(**kwargs)
        return case.op(**kwargs, sp=sp)

    want = results(f, inputs)
    assert_same(results(compiled(f), inputs), want)


def compile_over_ranks(sp: SequenceParallel, calls: list[tuple[Any, ...]]) -> None:
    for call in calls:
        over_ranks(sp, *call)


def test_one_graph_over_ranks() -> None:
    """An empty shard compiles and answers too: its outputs have no elements, and its neighbours wait for it."""
    seed = random.randrange(2**31)
    calls = [
        ("simple_gla", [0, 70], False, True, seed),
        ("normalized", [40, 30], True, False, seed + 1),
    ]
    run_ranks(compile_over_ranks, 2, calls, timeout=200)
