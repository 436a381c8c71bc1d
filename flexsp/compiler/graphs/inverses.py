"""The adjoint of a chunk's inverse, from what a step and its adjoint hold already."""

# fx types the arguments of a node as a union of all there can be.
# mypy: disable-error-code="union-attr,index,arg-type"
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from flexsp.compiler.graphs.intrinsics import unit_lower_inverse
from flexsp.compiler.graphs.rewrite import DIMS, common, dims

__all__ = ["shorten_adjoints"]

aten = torch.ops.aten


def shorten_adjoints(graph: Graph) -> None:
    """M^-T (A B^T + ..) M^-T = (M^-T A) (M^-1 B)^T + .. where both factors of every term are computed anyway.

    This saves two products of [C, C]. The entries of A B^T also are much larger than those of the result where keys are
    alike, so rounding them would cost the gradients of keys digits (docs/math.md, section 7).
    """
    for node in list(graph.nodes):
        if not _is(node, aten.mm.default) or not _is(node.args[0], aten.t.default):
            continue
        turned, inner = node.args
        inverse = turned.args[0]
        if not _is(inverse, unit_lower_inverse) or not _is(inner, aten.mm.default) or inner.args[1] is not turned:
            continue
        found = [_factors(x, turned, inverse) for x in _terms(inner.args[0])]
        if None in found:
            continue
        total = None
        for left, right in found:  # type: ignore[misc]
            new = _product(graph, node, left, right)
            total = new if total is None else _made(graph, node, node, aten.add.Tensor, (total, new))
        node.replace_all_uses_with(total)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    common(graph)


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, Node) and node.target is target


def _terms(x: Any) -> list[Any]:
    return [y for part in x.args for y in _terms(part)] if _is(x, aten.add.Tensor) and not x.kwargs else [x]


def _factors(term: Any, turned: Any, inverse: Any) -> tuple[Node, Node] | None:
    """Of a term A B^T, the products M^-T A and M^-1 B."""
    if not _is(term, aten.mm.default) or not _is(term.args[1], aten.t.default):
        return None
    left = _of(turned, term.args[0])
    right = _of(inverse, term.args[1].args[0])
    return None if left is None or right is None else (left, right)


def _of(one: Any, other: Any) -> Node | None:
    """The product of two nodes, if the graph has it."""
    return next((x for x in one.users if x.target is aten.mm.default and x.args == (one, other)), None)


def _product(graph: Graph, node: Any, left: Any, right: Any) -> Any:
    """left right^T, of the same two products once more: those of the graph may stand behind `node`."""
    x, y = (_made(graph, node, like, aten.mm.default, like.args) for like in (left, right))
    with graph.inserting_before(node):
        back = graph.call_function(aten.t.default, (y,))
    back.meta = right.meta | {"val": right.meta["val"].mT, DIMS: dims(right)[::-1]}
    return _made(graph, node, node, aten.mm.default, (x, back))


def _made(graph: Graph, before: Any, like: Any, target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with graph.inserting_before(before):
        new = graph.call_function(target, args)
    new.meta = dict(like.meta)
    return new
