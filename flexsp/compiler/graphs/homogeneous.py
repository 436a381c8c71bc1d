"""The adjoint of a step for zero gradients of outputs: A^T, which carries dS from the end of a chunk to its start."""

# fx types the arguments of a node as a union of all there can be.
# mypy: disable-error-code="union-attr,arg-type"
from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph

from flexsp.compiler.graphs.rewrite import cheapen, dims, reverse_cumsum
from flexsp.compiler.graphs.values import NotEmittable, operator_name

__all__ = ["without"]

aten = torch.ops.aten
_SUMS = {aten.add.Tensor, aten.sub.Tensor}
# Zero where one of their tensors is, in the place where a derivative stands: all are linear there.
_PRODUCTS = {
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.mm.default, aten.neg.default,
    aten.t.default, aten.sum.dim_IntList, aten.sum.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.expand.default, aten.tril.default, aten.triu.default, aten.cumsum.default, reverse_cumsum, aten.flip.default,
    aten.view.default, aten._unsafe_view.default, aten.slice.Tensor, aten.slice_backward.default, aten.select.int,
    aten.select_backward.default, aten._to_copy.default,
}  # fmt: skip


def without(graph: Graph, name: str) -> None:
    """Takes out the placeholder `name`, of a gradient that is zero, and what is zero with it.

    Raises:
        NotEmittable: an operator of which it is not known whether it is linear.
    """
    zero = {node for node in graph.nodes if node.op == "placeholder" and node.name == name}
    for node in list(graph.nodes):
        gone = [x for x in node.all_input_nodes if x in zero]
        if node.op != "call_function" or not gone:
            continue
        if node.target in _SUMS and len(gone) < len(node.all_input_nodes) and not node.kwargs:
            node.replace_all_uses_with(_other(graph, node, zero))
        elif _stays_zero(node, zero):
            zero.add(node)
        else:
            at = f" at {node.meta['line']}" if node.meta.get("line") else ""
            raise NotEmittable(
                f"a derivative{at} goes through {operator_name(node)}, of which kernels that carry states over ranks "
                "do not know that it is linear; write it with sums and products"
            )
    graph.eliminate_dead_code()
    for node in zero:
        if node.op == "placeholder":
            graph.erase_node(node)
    cheapen(graph, join=True)


def _stays_zero(node: Any, zero: set[Any]) -> bool:
    if node.target in _SUMS:
        return all(x in zero for x in node.args)
    if node.target is aten.masked_fill.Scalar:
        return bool(node.args[2] == 0)
    if node.target is aten.where.self:
        return all(x in zero or x.meta.get("fill") == 0 for x in node.args[1:])
    return node.target in _PRODUCTS


def _other(graph: Graph, node: Any, zero: set[Any]) -> Any:
    """x + 0, x - 0 or 0 - x, broadcast to the sizes of the sum."""
    x, y = node.args
    rest = y if x in zero else x
    with graph.inserting_before(node):
        if x in zero and node.target is aten.sub.Tensor:
            rest = graph.call_function(aten.neg.default, (rest,))
            rest.meta = dict(node.args[1].meta)
        if dims(rest) != dims(node):
            rest = graph.call_function(aten.expand.default, (rest, []))
            rest.meta = dict(node.meta)
    return rest
