"""Graphs of a step, run on numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter

from flexsp.compiler.backend.operators import BINARY
from flexsp.compiler.graphs.rewrite import dims

aten = torch.ops.aten
Tensors = dict[str, torch.Tensor]


class Eager(Interpreter):
    """Runs a step's graph: constants, sizes and expansions have lost their arguments and take them from their sizes."""

    def __init__(self, graph: Graph, sizes: dict[str, int]) -> None:
        super().__init__(GraphModule({}, graph))
        self.sizes = sizes

    def shape(self, names: Any) -> list[int]:
        return [int(name) if name.isdigit() else self.sizes[name] for name in names]

    def run_node(self, n: Any) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        shape = self.shape(dims(n))
        if n.target is aten.full.default:
            boolean = n.meta["val"].dtype == torch.bool
            return torch.full(shape, n.meta["fill"], dtype=torch.bool if boolean else torch.float64)
        if n.target is aten.eye.default:
            return torch.eye(*shape, dtype=torch.float64)
        if n.target in (aten.sym_size.int, aten.sym_numel.default):
            return math.prod(self.shape(n.meta["sizes"]))
        x = self.env[n.args[0]] if n.args and n.args[0] in self.env else None
        if n.target is aten.expand.default:
            return x.expand(shape)
        if n.target in (aten.view.default, aten._unsafe_view.default):
            return x.reshape(shape)
        if n.target is aten._to_copy.default:
            return x.double()
        args, options = self.fetch_args_kwargs_from_env(n)
        if n.target in BINARY and not any(isinstance(y, torch.Tensor) for y in args):  # of sizes: not in float32
            args = tuple(torch.tensor(y, dtype=torch.float64) for y in args)
        return n.target(*args, **options)


def run_graph(graph: Graph, sizes: dict[str, int], values: Tensors) -> list[torch.Tensor]:
    given = [values[node.name] for node in graph.nodes if node.op == "placeholder"]
    return list(Eager(graph, sizes).run(*given))
