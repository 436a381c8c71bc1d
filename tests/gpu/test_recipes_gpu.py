"""On one GPU: calls that look alike are checked and planned once, and give the bits that the op gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexsp import ops
from flexsp.ops import _recipe
from flexsp.testing.cases import Shape
from flexsp.testing.compare import WIDE
from tests.harness.ops import ALL

Made = dict[str, Any]
LENGTHS = 150, 70
WITHOUT = {"normalized", "mamba2", "mamba3_mimo", "kda_product"}
WITHOUT_PACKED = WITHOUT | {"delta_product", "gated_delta_product"}
WITHOUT_STATES = {"mlstm"}
"""Cases whose calls have no recipes: they do more with tensors than steps do."""


def recipes() -> list[Any]:
    return [each.recipe for kept in _recipe._every for calls in kept.values() for each in calls]


def drawn(name: str, T: int, packed: bool, states: bool, seed: int) -> Made:
    documents = 3 if packed else 2
    shape = Shape(B=1 if packed else 2, T=T, H=4, K=64, V=64, states=documents if states else 0)

    def cast(key: str, x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(cast(key, y) for y in x)
        dtype = torch.float32 if key in (*WIDE, "delta_bias") else torch.bfloat16
        return x.to("cuda", dtype) if torch.is_tensor(x) else x

    made = {key: cast(key, x) for key, x in ALL[name].inputs(shape, seed).items()}
    if packed:
        cuts = [0, *sorted(torch.randint(0, T, (2,), generator=torch.Generator().manual_seed(seed)).tolist()), T]
        made["cu_seqlens"] = torch.tensor(cuts, device="cuda")
    return made


def leaves(x: Any) -> list[torch.Tensor]:
    return [z for y in x for z in leaves(y)] if isinstance(x, tuple) else [x] if torch.is_tensor(x) else []


def solved(op: Callable[..., Any], given: Made, states: bool, grad: bool) -> list[torch.Tensor]:
    """Outputs, final states and, with `grad`, every gradient."""

    def leaf(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(leaf, x))
        return x.detach().requires_grad_(grad) if torch.is_tensor(x) and x.is_floating_point() else x

    x = {key: leaf(y) for key, y in given.items()}
    found = leaves(op(**x, output_final_state=states))
    ends = [y for y in found if y.requires_grad]
    if not ends:
        return found
    inputs = [y for z in x.values() for y in leaves((z,)) if y.requires_grad]
    return [*found, *torch.autograd.grad(ends, inputs, [y.detach().cos() for y in ends])]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("states", [False, True], ids=["", "states"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("name", ALL)
def test_calls_by_recipe_give_the_bits_of_the_op(
    name: str, packed: bool, states: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds of fresh inputs, of two lengths in turn, with gradients and without them."""
    op, wrong = ALL[name].op, []
    for n in range(3):
        for T in LENGTHS:
            x = drawn(name, T, packed, states, seed + n)
            for grad in (True, False):
                found = solved(op, x, states, grad)
                with monkeypatch.context() as patch:
                    patch.setattr(_recipe, "_look", lambda *args: False)
                    expected = solved(op, x, states, grad)
                wrong += [] if same(found, expected) else [(n, T, grad)]
    assert not wrong
    made, without = recipes(), (WITHOUT_PACKED if packed else WITHOUT) | (WITHOUT_STATES if states else set())
    assert (len(made) >= 4 and None not in made) == (name not in without)


def test_graphs_of_cuda_hold_calls_by_recipe() -> None:
    """The call is captured after others that look alike, and before them."""
    op, first = ops.chunk_gated_delta_rule, drawn("gated_delta_rule", 150, False, True, 1)
    with torch.no_grad():
        for _ in range(2):
            op(**first)
        for again in range(2):
            given = {key: x.clone() if torch.is_tensor(x) else x for key, x in first.items()}
            if again:
                _recipe.forget()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                o, _ = op(**given)
            fresh = drawn("gated_delta_rule", 150, False, True, 2 + again)
            for key, x in fresh.items():
                if torch.is_tensor(x):
                    given[key].copy_(x)
            graph.replay()
            _recipe.forget()
            assert torch.equal(o, op(**fresh)[0])


def test_streams_and_memory() -> None:
    """A call by recipe runs on the current stream, and in memory of its own."""
    op, given = ops.chunk_simple_gla, drawn("simple_gla", 150, False, False, 3)
    with torch.no_grad():
        first, _ = op(**given)
        kept, stream = first.clone(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                torch.cuda._sleep(10**7)
                later = {key: x * 0.5 if torch.is_tensor(x) else x for key, x in given.items()}
                o, _ = op(**later)
        stream.synchronize()
        _recipe.forget()
        assert torch.equal(first, kept) and torch.equal(o, op(**later)[0])
