"""Code of a graph for one token: a chunk of one row, whose products are sums in float32 instead of tile products.

A chunk of one token has no pairs of tokens. Its inverse is 1, its running sums are its own numbers, and scores are
those of the token with itself.
"""

# fx types the arguments of a node as a union of all there can be.
# mypy: disable-error-code="union-attr,index,arg-type"
from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph

from flexsp.compiler.backend.emit import Emitter, node_name
from flexsp.compiler.graphs.intrinsics import SUMS, unit_lower_inverse
from flexsp.compiler.graphs.rewrite import dims, reverse_cumsum
from flexsp.compiler.graphs.values import Value, block

__all__ = ["ByToken"]

aten = torch.ops.aten
_SCORES = torch.ops.flexsp.vector_scores.default
_SCORES_GRAD = torch.ops.flexsp.vector_scores_grad.default


class ByToken(Emitter):
    """An `Emitter` of chunks of one token: the tile size C is 1. `nothing` are nodes that are 0, `units` nodes that are
    1 [C, C]; no code is emitted for operations with them."""

    def __init__(
        self, graph: Graph, given: Mapping[str, Callable[[], Value]], memory: Mapping[str, str]
    ) -> None:  # fmt: skip
        super().__init__(graph, given, memory)
        self.nothing: set[Any] = set()
        self.units: set[Any] = set()

    def _emit(self, node: Any) -> Any:
        if self._vanishes(node):
            self.nothing.add(node)
            shape = ", ".join(block(x) for x in dims(node))
            return Value(f"tl.zeros([{shape}], tl.float32)", dims(node), frozenset(range(len(dims(node)))))
        if node.target in _SUMS_OF_TWO and not node.kwargs and len(node.args) == 2:
            a, b = node.args
            if b in self.nothing and dims(a) == dims(node):
                return self.values[a]
            if a in self.nothing and dims(b) == dims(node) and node.target is aten.add.Tensor:
                return self.values[b]
        if node.target is aten.t.default and node.args[0] in self.units:
            self.units.add(node)
        own = _OWN.get(node.target)
        found = None if own is None else own(self, node)
        return super()._emit(node) if found is None else found

    def _vanishes(self, node: Any) -> bool:
        """Whether a node is 0: entries below the diagonal, and nodes computed from them."""
        if node.target is aten.tril.default:
            return dims(node) == ("C", "C") and (node.args[0] in self.nothing or (*node.args, 0)[1] < 0)
        if node.target is operator.getitem:
            of, i = node.args  # of the gradients of a token's score
            return i == 2 or of in self.nothing or of.args[2 - i] in self.nothing
        if node.target in (_SCORES, _SCORES_GRAD):
            return any(x in self.nothing for x in node.args[: len(node.args) - 1 if node.target is _SCORES else 1])
        if node.target in _FACTORS:
            return any(x in self.nothing for x in node.args)
        return node.target in _SUMS_OF_TWO and all(x in self.nothing for x in node.args)

    def _product(self, node: Any) -> Value | None:
        """Products with a token's row or column; None for products of whole matrices, which are tile products."""
        for unit, other in (node.args, node.args[::-1]):
            if unit in self.units:
                return self.values[other]
        a, b = (self.full(self.values[x], dims(x)) for x in node.args)
        (rows, along), cols = a.sizes, b.sizes[1]
        sizes = rows, cols
        if along == "C":
            zero = frozenset({0} if 0 in a.zero and not b.wild else ()) | ({1} if 1 in b.zero and not a.wild else set())
            return self.let(node_name(node), Value(f"{a.f32} * {b.f32}", sizes, zero, a.wild or b.wild))
        if "C" not in sizes:
            return None
        self.contracted.add(along)
        a, b = self.masked(a, 1), self.masked(b, 0)  # + 0.0: all lanes round alike, in tiles of all sizes (`sum_over`)
        if rows == "C" and cols != "C":
            text = f"sum_over({a.transposed().f32} * {b.f32} + 0.0, 0)[None, :]"
        else:
            text = f"sum_over({a.f32} * {b.transposed().f32} + 0.0, 1)[:, None]"
        zero = frozenset({0} if 0 in a.zero else ()) | ({1} if 1 in b.zero else set())
        return self.let(node_name(node), Value(text, sizes, zero, a.wild or b.wild))

    def _one(self, node: Any) -> Value | None:
        if dims(node) != ("C", "C"):
            return None
        self.units.add(node)
        return self.let(node_name(node), Value("tl.full([C, C], 1.0, tl.float32)", dims(node)))

    def _own_score(self, node: Any) -> Value:
        q, k = (self.masked(self.full(self.values[x], dims(x)), 1) for x in node.args[:2])
        self.contracted.add(q.sizes[1])
        text = f"sum_over({q.f32} * {k.f32} + 0.0, 1)[:, None]"
        return self.let(node_name(node), Value(text, dims(node), wild=q.wild or k.wild))

    def _of_own_score(self, node: Any) -> Any:
        """Gradients of `_own_score` to queries and keys; that of running gates is 0."""
        da, q, k = (self.full(self.values[x], dims(x)) for x in node.args[:3])
        name = node_name(node)
        return [
            self.let(f"{name}_{i}", Value(f"{da.f32} * {x.f32}", x.sizes, x.zero, da.wild or x.wild))
            for i, x in enumerate((k, q))
        ]

    def _part(self, node: Any) -> Any:
        of = self.values[node.args[0]]
        return of[node.args[1]] if isinstance(of, list) else None

    def _running(self, node: Any) -> Value | None:
        """Sums along the tokens, of which there is one."""
        axis = node.args[1] if node.target in _CUMSUMS else 0
        sizes = dims(node)
        if sizes[axis % len(sizes)] != "C":
            return None
        if SUMS.get(node.target) == "earlier_sums":
            x = self.full(self.values[node.args[0]], sizes)
            return self.let(node_name(node), Value(f"tl.zeros_like({x.f32})", sizes, frozenset(range(len(sizes)))))
        return self.values[node.args[0]]


_FACTORS = (aten.mm.default, aten.mul.Tensor, aten.mul.Scalar, aten.neg.default, aten.t.default)
_SUMS_OF_TWO = (aten.add.Tensor, aten.sub.Tensor)
_CUMSUMS = (aten.cumsum.default, reverse_cumsum)
_OWN: dict[Any, Callable[[ByToken, Any], Any]] = {
    aten.mm.default: ByToken._product,
    unit_lower_inverse: ByToken._one,
    aten.eye.default: ByToken._one,
    _SCORES: ByToken._own_score,
    _SCORES_GRAD: ByToken._of_own_score,
    operator.getitem: ByToken._part,
    **dict.fromkeys((*_CUMSUMS, *SUMS), ByToken._running),
}
