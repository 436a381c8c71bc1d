"""torch.compile treats marked functions as if PyTorch's own decorators had marked them."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexsp.comm.tracing import constant_in_graphs, outside_graphs
from flexsp.runtime.clean_thread import run_in_clean_thread


def graphs_of(fn: Callable[[int], int], **options: Any) -> list[list[str]]:
    """The methods called in each graph of a function that calls ``fn``; torch.compile changes no result."""
    torch._dynamo.reset()
    graphs = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([node.target for node in module.graph.nodes if node.op == "call_method"])
        return module

    def inner(n: int) -> int:
        return fn(n) + 1

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x.sinh()
        n = inner(3)
        return y.add(n).mul(2)

    compiled, x = torch.compile(run, backend=backend, **options), torch.rand(2)
    for _ in range(2):
        assert torch.equal(compiled(x), run(x))
    return [x for x in graphs if x]


def make_ones(n: int) -> int:
    """Traced, it would be a graph of its own."""
    assert not torch.compiler.is_dynamo_compiling()
    return int(torch.ones(n).sum())


def test_a_constant_is_marked_as_pytorch_marks_it() -> None:
    def theirs() -> None: ...

    def ours() -> None: ...

    found = vars(constant_in_graphs(ours))
    assert found.pop("__wrapped__") is ours
    assert found == vars(torch.compiler.assume_constant_result(theirs)) and found


def test_a_constant_ends_no_graph() -> None:
    marked = constant_in_graphs(make_ones)
    assert graphs_of(marked, fullgraph=True) == [["sinh", "add", "mul"]]
    del marked._dynamo_marked_constant  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="make_ones: torch .* in another way"):
        graphs_of(marked, fullgraph=True)


def test_what_is_outside_ends_the_graph_and_is_not_traced() -> None:
    marked = outside_graphs("it makes ones")(make_ones)
    assert graphs_of(marked) == graphs_of(torch.compiler.disable(make_ones)) == [["sinh"], ["add", "mul"]]
    with pytest.raises(Exception, match="it makes ones"):
        graphs_of(marked, fullgraph=True)


def test_nothing_is_compiled_beside_work_elsewhere() -> None:
    """Tracers change torch.nn.Module for all threads: two at once would leave it changed."""
    caller, names = threading.get_ident(), list[str]()

    torch._dynamo.reset()

    def work() -> int:
        time.sleep(0.3)  # the caller compiles what comes behind the start of the thread, or waits
        frame = sys._current_frames()[caller]
        names.extend(each.f_code.co_name for each, _ in traceback.walk_stack(frame))
        return 1

    assert torch.compile(lambda x: x + run_in_clean_thread(x.device, work), backend="eager")(torch.zeros(())) == 1
    assert names[names.index("join") + 1] == "_in_thread"  # not what torch.compile made of the rest of it
