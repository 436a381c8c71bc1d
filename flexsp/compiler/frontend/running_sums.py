"""Computes running sums of gates in float64 when the three functions run in float32.

A chunk decays by e^{b_i - b_j}, with running sums b of log gates. After a strong gate both sums are large, and float32
rounds away most digits of the gates that follow, which their difference then lacks. So a sum over the tokens of a chunk
whose only use is such an exponent stays in float64 until the exponent is computed, and so does its gradient.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.fx import Graph, GraphModule, Node

from flexsp.compiler.frontend.primitives import decayed_scores

__all__ = ["NARROW", "with_wide_sums"]

_made: WeakKeyDictionary[GraphModule, GraphModule | None] = WeakKeyDictionary()
NARROW, _WIDE = torch.float32, torch.float64
_SUMS = ("cumsum", "sum")
_LINEAR = ("sub", "add", "neg", "mul")
_VIEWS = ("getitem", "unsqueeze", "squeeze", "expand", "view", "reshape", "flip", "narrow", "select")


def with_wide_sums(module: GraphModule) -> GraphModule:
    """The same function of float32 tensors, with such sums in float64; the module itself if it has none."""
    if module not in _made:
        _made[module] = _widened(module)
    return _made[module] or module


def _widened(module: GraphModule) -> GraphModule | None:
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    wide = [node for node in graph.nodes if _name(node) in _SUMS and _over_tokens(node) and _is_exponent(node)]
    if not wide:
        return None
    for node in wide:
        _cast(graph, node, node.args[0], _WIDE)
    for node in [x for x in graph.nodes if _name(x) == "exp"]:
        if _reaches(node.args[0], wide):
            _cast(graph, node, node.args[0], NARROW)
    return GraphModule(module, graph)


def _name(node: Any) -> str | None:
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", None) if node.op == "call_function" else None


def _over_tokens(node: Node) -> bool:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    return bool(node.args) and len(node.args) < 3 and dim in (0, (0,), [0]) and not {*node.kwargs} - {"dim"}


def _is_exponent(node: Node) -> bool:
    """Whether a sum is used in exponents alone, by way of linear functions."""
    return bool(node.users) and all(
        _ends(user, node) or (_passes(user) and _is_exponent(user)) for user in node.users
    )


def _ends(user: Node, node: Node) -> bool:
    if user.target is decayed_scores:
        return len(user.args) == 3 and node is user.args[2] and node not in user.args[:2]
    return _name(user) == "exp" and user.args == (node,) and not user.kwargs


def _passes(user: Node) -> bool:
    name = _name(user)
    if name == "mul":
        return len(user.all_input_nodes) == 1
    return name in _LINEAR or (name in _VIEWS and len(user.all_input_nodes) == 1)


def _reaches(node: Any, wide: list[Node]) -> bool:
    """Whether an exponent depends on one of these sums."""
    if not isinstance(node, Node):
        return False
    return node in wide or (_passes(node) and any(_reaches(x, wide) for x in node.all_input_nodes))


def _cast(graph: Graph, node: Node, x: Any, dtype: torch.dtype) -> None:
    with graph.inserting_before(node):
        node.replace_input_with(x, graph.call_method("to", (x, dtype)))
