"""Recognises a decay_mode that takes maxima, S' = max(S + a, F) elementwise, and extracts its part S + a."""

# fx types the arguments of a node as a union of all there can be.
# mypy: disable-error-code="union-attr,arg-type"

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from flexsp.compiler.frontend.flows import values_of
from flexsp.compiler.frontend.meta import STATE
from flexsp.compiler.frontend.primitives import to_floating
from flexsp.compiler.frontend.trace import Traced, named

__all__ = ["shifted"]

_VIEWS = {"contiguous", "expand", "flatten", "reshape", "squeeze", "unsqueeze", "view", to_floating.__name__}
_MAXIMA = {"maximum", "clamp_min"}


def shifted(decay: Traced, values: Mapping[str, Any], state: torch.Tensor) -> Traced | None:
    """S + a of decay's S' = max(S + a, F): its graph with -inf in place of what the state is compared with.

    None if the graph does anything else to the state than additions and maxima. The caller checks with values that
    the result is elementwise and equals max(S + a, F).
    """
    found = values_of(decay, {**values, STATE: state})
    graph, new = Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(decay.graph, new))
    flows: set[Any] = {node for node in decay.graph.nodes if node.op == "placeholder" and node.target == STATE}
    for node in decay.graph.nodes:
        if node.op == "output" or not flows.intersection(node.all_input_nodes):
            continue
        if not isinstance(found[node], torch.Tensor):
            continue  # a shape, which does not carry the state
        if not _moves_alone(node, flows):
            return None
        if named(node) in _MAXIMA:
            new[node].args = tuple(_nothing(graph, new, node, x, flows) for x in node.args)
        flows.add(node)
    end = next(node for node in decay.graph.nodes if node.op == "output")
    if end.args[0][0] not in flows:
        return None
    graph.eliminate_dead_code()
    graph.lint()
    return replace(decay, module=GraphModule(torch.nn.Module(), graph))


def _moves_alone(node: Node, flows: set[Any]) -> bool:
    """Whether a node adds to the state, takes a maximum with it, or views it."""
    of_state = [x for x in node.args if isinstance(x, Node) and x in flows]
    if node.kwargs or len(of_state) < len(flows.intersection(node.all_input_nodes)):
        return False
    what, first = named(node), node.args[0]
    if what in _MAXIMA:
        return len(node.args) == 2
    if what == "add":
        return len(of_state) == 1 and len(node.args) == 2
    return first in flows and len(of_state) == 1 and (what == "sub" or what in _VIEWS)


def _nothing(graph: Graph, new: dict[Node, Node], node: Node, x: Any, flows: set[Any]) -> Any:
    """The operand of a maximum if it depends on the state, else -inf in its place."""
    if not isinstance(x, Node):
        return -math.inf
    if x in flows:
        return new[x]
    with graph.inserting_before(new[node]):
        return graph.call_function(torch.full_like, (new[x], -math.inf))
