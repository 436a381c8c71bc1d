"""Follows the state through the graph of decay_mode, and extracts the part that is linear in the state."""

# fx types the arguments of a node as a union of all there can be.
# mypy: disable-error-code="union-attr,arg-type,index,misc"

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.fx import Graph, GraphModule, Node

from flexsp.compiler.frontend import primitives
from flexsp.compiler.frontend.meta import STATE
from flexsp.compiler.frontend.primitives import identity, to_floating
from flexsp.compiler.frontend.trace import Traced, named

__all__ = ["PARTS", "Flow", "Flows", "values_of"]

PARTS = 4  # a breadth for each part, each a number or one a row
_NO_VALUES = {"size", "dim", "ones_like", "zeros_like", identity.__name__}
_ALIGNED = {"contiguous", "expand", "flatten", "reshape", "squeeze", "unsqueeze", "view", to_floating.__name__}
_TURNS = {"permute", "t", "transpose"}
_MOVES = {"cat", "cumsum", "diag", "diagonal", "flip", "getitem", "mean", "stack", "sum"}
_PRODUCTS = {"bmm", "matmul", "matmul_out_fp32", "mm", "outer"}


@dataclass(frozen=True)
class Flow:
    """How a value depends on the state, or on a part of it: elementwise by factors of some breadth, linearly otherwise,
    or neither."""

    level: Literal["aligned", "moved", "curved"] = "aligned"
    breadth: int = 0
    turned: bool = False
    part: int | None = None


_CURVED = Flow("curved")


def _join(flows: list[Flow]) -> Flow:
    levels = {flow.level for flow in flows}
    if "curved" in levels:
        return _CURVED
    moved = "moved" in levels or len({(flow.turned, flow.part) for flow in flows}) > 1
    return replace(flows[0], level="moved" if moved else "aligned", breadth=max(flow.breadth for flow in flows))


def _of_parts(flows: list[Flow | None]) -> Flow:
    """The flow of a state whose parts have these flows."""
    known = [(i, flow) for i, flow in enumerate(flows) if flow is not None]
    if any(flow.level == "curved" for _, flow in known):
        return _CURVED
    if any(flow.level == "moved" or flow.turned or flow.part != i for i, flow in known):
        return Flow("moved")
    breadth = max((flow.breadth for _, flow in known), default=1) if len(known) == len(flows) else 1
    return Flow(breadth=PARTS if breadth in (1, 2) else breadth)


class Flows:
    """The flow of every value of decay_mode that depends on the state."""

    def __init__(self, decay: Traced, values: Mapping[str, Any], state: torch.Tensor) -> None:
        self.decay, self.graph, self.state = decay, decay.graph, state
        self.values = values_of(decay, {**values, STATE: state})
        self.flows: dict[Node, Flow] = {}
        self.sizes: dict[int | None, list[int]] = {None: list(state.shape)}  # of the state, or of a part

    def linear(self) -> Traced:
        """A S of S' = A S + F, if no flow is curved: the graph with zeros in place of the terms added to the state."""
        graph, new = Graph(), dict[Node, Node]()
        graph.output(graph.graph_copy(self.graph, new))
        result = next(node for node in self.graph.nodes if node.op == "output").args[0][0]
        if result not in self.flows:
            with graph.inserting_after(new[result]):
                nothing = graph.call_function(torch.zeros_like, (new[result],))
            next(node for node in graph.nodes if node.op == "output").args = ((nothing,),)
        for node in self.flows:
            self._drop_constants(graph, node, new)
        graph.eliminate_dead_code()
        graph.lint()
        return replace(self.decay, module=GraphModule(torch.nn.Module(), graph))

    def _drop_constants(self, graph: Graph, node: Node, new: dict[Node, Node]) -> None:
        """Zeros for the terms of a node that do not depend on the state."""

        def zero(x: Any) -> Any:
            if not isinstance(x, Node):
                return 0.0
            if x in self.flows:
                return new[x]
            if not isinstance(self.values[x], torch.Tensor):
                return 0.0
            with graph.inserting_before(new[node]):
                return graph.call_function(torch.zeros_like, (new[x],))

        what, args = named(node), node.args
        if what in ("add", "sub", "rsub"):
            new[node].args = tuple(zero(x) for x in args)
            if "other" in node.kwargs:
                new[node].kwargs = new[node].kwargs | {"other": zero(node.kwargs["other"])}
        elif what in ("cat", "stack"):
            if args:
                new[node].args = ([zero(x) for x in args[0]], *new[node].args[1:])
            else:
                new[node].kwargs = new[node].kwargs | {"tensors": [zero(x) for x in node.kwargs["tensors"]]}
        elif node.target is primitives.joined:
            new[node].args = tuple(zero(x) for x in args)
        elif what == "masked_fill":
            new[node].args = (*new[node].args[:2], 0.0)
        elif what == "where":
            mask = 1 if node.op == "call_method" else 0
            new[node].args = tuple(new[node].args[i] if i == mask else zero(x) for i, x in enumerate(args))

    def result(self) -> Flow:
        for node in self.graph.nodes:
            if node.op == "output":
                return self._of(node.args[0][0]) or Flow(breadth=1)
            flow = Flow() if node.op == "placeholder" and node.target == STATE else self._flow(node)
            if flow is not None:
                self.flows[node] = flow
        raise AssertionError("a graph without output")

    def _of(self, x: Any) -> Flow | None:
        return self.flows.get(x) if isinstance(x, Node) else None

    def _flow(self, node: Node) -> Flow | None:
        flows = [self.flows[x] for x in node.all_input_nodes if x in self.flows]
        if not flows or node.op == "placeholder":
            return None
        what, joined = named(node), _join(flows)
        first = self._of(node.args[0]) if node.args else None
        others = [x for x in (*node.args[1:], *node.kwargs.values()) if self._of(x) is not None]
        if what == "getattr":
            return self._attribute(node, joined)
        if node.target is primitives.part_of and first is not None:
            part = int(str(node.args[1]))
            self.sizes[part] = list(self.values[node].shape)
            return Flow(first.level, first.breadth, first.turned, part)
        if node.target is primitives.joined:
            return _of_parts([self._of(x) for x in node.args])
        if what in _NO_VALUES or (what == "expand_as" and first is None):
            return None
        if what in ("add", "sub", "rsub"):
            plain = (what == "add" and (first is None or not others)) or (what == "sub" and not others)
            return joined if plain and not node.kwargs else self._scaled(node, joined, -1)
        if what in ("mul", "div", "truediv", "where", "masked_fill"):
            return self._by_factor(node, what, first, others)
        if what in _MOVES or what in _PRODUCTS:
            bilinear = what in _PRODUCTS and first is not None and len(others) > 0
            return _CURVED if joined.level == "curved" or bilinear or (what in _MOVES and others) else Flow("moved")
        if others or joined.level == "curved":
            return joined if what == "expand_as" and first is not None else _CURVED
        if what in ("neg", "tril", "triu"):
            return self._scaled(node, joined, -1) if what == "neg" else replace(joined, breadth=3)
        if what in _TURNS:
            return self._turned(node, joined)
        return joined if what in _ALIGNED or what == "expand_as" else _CURVED

    def _attribute(self, node: Node, flow: Flow) -> Flow | None:
        if not isinstance(self.values[node], torch.Tensor):
            return None  # shape, dtype and the like
        if node.args[1] in ("T", "mT", "H", "mH"):
            return self._turned(node, flow)
        return flow if node.args[1] == "real" else _CURVED

    def _by_factor(self, node: Node, what: str, first: Flow | None, others: list[Any]) -> Flow:
        if what == "where" and not node.kwargs:
            mask, *parts = node.args
            if node.op == "call_method":
                mask, parts = node.args[1], [node.args[0], *node.args[2:]]
            flows = [flow for x in parts if (flow := self._of(x)) is not None]
            return _CURVED if self._of(mask) else self._scaled(node, _join(flows), mask)
        if node.kwargs or len(node.args) < 2 or (first is not None and others):
            return _CURVED
        if first is not None:
            return self._scaled(node, first, node.args[1])
        flow = self._of(node.args[1])
        return self._scaled(node, flow, node.args[0]) if what == "mul" and flow is not None else _CURVED

    def _scaled(self, node: Node, flow: Flow, factor: Any) -> Flow:
        x = self.values[factor] if isinstance(factor, Node) else factor
        breadth = 3
        sizes = self.sizes[flow.part]
        if not isinstance(x, torch.Tensor) or x.numel() == 1:
            breadth = 1
        elif list(self.values[node].shape) == (sizes[::-1] if flow.turned else sizes):
            at = -2 if flow.turned else -1
            if len(sizes) == 1 or (x.dim() < 2 if flow.turned else False) or x.shape[at] == 1:
                breadth = 2
        return replace(flow, breadth=max(flow.breadth, breadth))

    def _turned(self, node: Node, flow: Flow) -> Flow:
        """A transposition: a second one undoes it."""
        value = self.values[node]
        numbers = [n for x in node.args[1:] for n in (x if isinstance(x, (list, tuple)) else [x]) if type(n) is int]
        swap = sorted(n % 2 for n in numbers) == [0, 1] and (named(node) != "permute" or numbers[0] % 2 == 1)
        simple = named(node) in ("t", "getattr") or swap
        if value.dim() != 2 or not simple or flow.level != "aligned":
            return flow if flow.level == "curved" else Flow("moved")
        return replace(flow, turned=not flow.turned)


def values_of(traced: Traced, values: Mapping[str, Any]) -> dict[Node, Any]:
    """The value of every node."""
    interpreter = torch.fx.Interpreter(traced.module, garbage_collect_values=False)
    interpreter.run(*(values[str(node.target)] for node in traced.graph.nodes if node.op == "placeholder"))
    return interpreter.env
