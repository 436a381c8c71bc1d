"""Every op goes one way to what runs it: kernels by `operators.run` or, two calls at once, `operators.run_both`, in
graphs by `operators.call`, PyTorch by `reference.run`, each in `flexsp.kernels`. An op with a way of its own would miss
what is done there: ranks, documents, second derivatives, checks of what a backward pass gets back."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from flexsp.testing.cases import CASES, PROGRAM_CASES, Shape
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED
from tests.op_cases import OTHER_CASES

ALL = CASES | PROGRAM_CASES | OTHER_CASES
SMALL = Shape(B=1, T=6, H=2, K=4, V=4)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often each of the entries is called, wherever a module holds it."""
    from flexsp.kernels import operators, reference

    found: Counter[str] = Counter()
    changed = []
    entries = {"run": operators.run, "both": operators.run_both, "call": operators.call, "PyTorch": reference.run}
    for name, plain in entries.items():

        def noted(*args: Any, name: str = name, plain: Any = plain, **given: Any) -> Any:
            if not torch.compiler.is_compiling():
                found[name] += 1
            return plain(*args, **given)

        for module in [x for key, x in sys.modules.items() if key.startswith("flexsp.")]:
            for key, held in [*vars(module).items()]:
                if held is plain:
                    setattr(module, key, noted)
                    changed.append((module, key, plain))
    try:
        yield found
    finally:
        for module, key, plain in changed:
            setattr(module, key, plain)


def ways(sp: Any, names: list[str], dtype: torch.dtype, seed: int) -> dict[str, list[str]]:
    found = {}
    for name in names:
        inputs = ALL[name].inputs(SMALL, seed)
        inputs = {key: x.to(dtype) if isinstance(x, torch.Tensor) else x for key, x in inputs.items()}
        with counted() as taken:
            ALL[name].op(**inputs)
        found[name] = sorted(taken)
    return found


@pytest.mark.parametrize(("dtype", "way"), [(torch.float32, "run"), (torch.float64, "PyTorch")])
def test_eager_calls(dtype: torch.dtype, way: str) -> None:
    (found,) = run_ranks(ways, 1, [*ALL], dtype, random.randrange(2**31), env=INTERPRETED, timeout=200)
    both = ("mlstm", "normalized") if way == "run" else ()  # memory and normaliser
    assert found == {name: ["both"] if name in both else [way] for name in ALL}


def graphs(sp: Any, names: list[str], seed: int) -> dict[str, list[str]]:
    """The operators in the graph that torch.compile makes of a call."""
    found = {}
    for name in names:
        inputs = {x: y.float() if isinstance(y, torch.Tensor) else y for x, y in ALL[name].inputs(SMALL, seed).items()}
        held: list[str] = []

        def note(graph: Any, _: Any, held: list[str] = held) -> Any:
            held += [str(node.target) for node in graph.graph.nodes if "flexsp" in str(node.target)]
            return graph.forward

        with torch.no_grad():
            torch.compile(ALL[name].op, backend=note, fullgraph=True)(**inputs)
        torch.compiler.reset()
        found[name] = sorted({x.split(".")[-1] for x in held})
    return found


def test_graphs() -> None:
    names = ["simple_gla", "gated_delta_rule", "gla", "hgrn", "selective_scan"]
    (found,) = run_ranks(graphs, 1, names, random.randrange(2**31), env=INTERPRETED, timeout=200)
    assert found == {name: ["forward"] for name in names}
