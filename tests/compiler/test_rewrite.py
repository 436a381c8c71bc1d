"""Rewrites of graphs made by hand: the same values from fewer products, and what stays without a gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Interpreter

from flexsp.compiler.graphs.homogeneous import without
from flexsp.compiler.graphs.rewrite import DIMS, cheapen
from flexsp.compiler.graphs.values import NotEmittable

aten = torch.ops.aten
C, K, V = 5, 3, 4
SIZES = {"C": C, "K": K, "V": V}


class Made:
    """A graph under construction, whose nodes have values and named sizes as those of a step have."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.inputs: dict[str, torch.Tensor] = {}

    def input(self, name: str, *sizes: str) -> Any:
        node = self.graph.placeholder(name)
        node.name = name  # not what the graph makes of upper-case letters
        self.inputs[name] = torch.randn([SIZES[s] for s in sizes], dtype=torch.float64)
        node.meta = {"val": self.inputs[name], DIMS: sizes}
        return node

    def call(self, target: Any, *args: Any) -> Any:
        node = self.graph.call_function(target, args)
        value = target(*(x.meta["val"] if hasattr(x, "meta") else x for x in args))
        names = {n: name for name, n in SIZES.items()} | {1: "1"}
        node.meta = {"val": value, DIMS: tuple(names[n] for n in value.shape)}
        return node

    def run(self, **given: torch.Tensor) -> torch.Tensor:
        """What the graph gives, with inputs that it no longer has left out."""
        self.graph.lint()
        values = self.inputs | given
        left = [node.name for node in self.graph.nodes if node.op == "placeholder"]
        return Interpreter(GraphModule({}, self.graph)).run(*(values[name] for name in left))[0]

    def products(self) -> int:
        return sum(node.target is aten.mm.default for node in self.graph.nodes)


@pytest.mark.parametrize("signs", [(aten.add.Tensor, aten.add.Tensor), (aten.sub.Tensor, aten.add.Tensor),
                                   (aten.add.Tensor, aten.sub.Tensor), (aten.sub.Tensor, aten.sub.Tensor)])  # fmt: skip
@pytest.mark.parametrize("first", [True, False], ids=["rest first", "rest last"])
def test_products_with_a_common_operand_become_one(signs: Any, first: bool) -> None:
    """S +- k^T x +- k^T y, the rest before or after the products."""
    made = Made()
    S, k, x, y = (made.input(n, *s) for n, s in (("S", "KV"), ("k", "CK"), ("x", "CV"), ("y", "CV")))
    kt = made.call(aten.t.default, k)
    kx, ky = made.call(aten.mm.default, kt, x), made.call(aten.mm.default, kt, y)
    inner = made.call(signs[0], *((S, kx) if first else (kx, S)))
    made.graph.output([made.call(signs[1], inner, ky)])
    want = made.run()
    cheapen(made.graph, join=False)
    assert made.products() == 2
    cheapen(made.graph, join=True)
    assert made.products() == 1
    torch.testing.assert_close(made.run(), want)


def test_products_that_something_else_reads_stay() -> None:
    made = Made()
    k, x, y = made.input("k", "C", "K"), made.input("x", "K", "V"), made.input("y", "K", "V")
    kx, ky = made.call(aten.mm.default, k, x), made.call(aten.mm.default, k, y)
    total = made.call(aten.add.Tensor, kx, ky)
    made.graph.output([made.call(aten.mul.Tensor, total, kx)])
    want = made.run()
    cheapen(made.graph, join=True)
    assert made.products() == 2
    torch.testing.assert_close(made.run(), want)


def test_what_a_gradient_of_zero_leaves() -> None:
    """dS - k^T (tril(...) do + k dS) + (do term): sums lose a term, products with it go, whichever side it is on."""
    made = Made()
    do, dS, k, q, a = (
        made.input(n, *s) for n, s in (("do", "CV"), ("dS", "KV"), ("k", "CK"), ("q", "CK"), ("a", "CC"))
    )
    kt, qt = made.call(aten.t.default, k), made.call(aten.t.default, q)
    within = made.call(aten.mm.default, made.call(aten.tril.default, a), do)
    moved = made.call(aten.sub.Tensor, made.call(aten.neg.default, within), made.call(aten.mm.default, k, dS))
    new = made.call(aten.add.Tensor, made.call(aten.mm.default, kt, moved), dS)
    made.graph.output([made.call(aten.add.Tensor, made.call(aten.mm.default, qt, do), new)])
    want = made.run(do=torch.zeros(C, V, dtype=torch.float64))
    without(made.graph, "do")
    assert [node.name for node in made.graph.nodes if node.op == "placeholder" and node.users] == ["dS", "k"]
    assert made.products() == 2
    torch.testing.assert_close(made.run(), want)


def test_what_is_not_known_to_be_linear_is_refused() -> None:
    made = Made()
    do, dS = made.input("do", "C", "V"), made.input("dS", "C", "V")
    made.graph.output([made.call(aten.add.Tensor, dS, made.call(aten.exp.default, do))])
    with pytest.raises(NotEmittable, match="goes through exp, of which kernels .* do not know that it is linear"):
        without(made.graph, "do")


def test_a_number_beside_a_gradient_is_not_zero() -> None:
    made = Made()
    do, dS = made.input("do", "C", "V"), made.input("dS", "C", "V")
    made.graph.output([made.call(aten.add.Tensor, dS, made.call(aten.add.Tensor, do, 1.0))])
    with pytest.raises(NotEmittable, match="goes through add, of which kernels .* do not know that it is linear"):
        without(made.graph, "do")


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("turned", [True, False], ids=["transposed", "as it is"])
@pytest.mark.parametrize("factor", ["number", "rows", "sign"])
def test_factors_of_an_operand(factor: str, turned: bool, side: int) -> None:
    """(c X) Y, (r X) Y with r [N, 1], (-X) Y, with X on either side, transposed or not: what can leaves the product."""
    made = Made()
    sizes = ("K", "C") if turned else ("C", "K")
    loaded, other = made.input("x", *sizes), made.input("y", *(("K", "V") if side == 0 else ("V", "C")))
    if factor == "sign":
        x = made.call(aten.neg.default, loaded)
    else:
        r = 0.5 if factor == "number" else made.call(aten.unsqueeze.default, made.input("r", sizes[0]), 1)
        x = made.call(aten.mul.Tensor, loaded, r)
    x = made.call(aten.t.default, x) if turned else x
    made.graph.output([made.call(aten.mm.default, *((x, other) if side == 0 else (other, x)))])
    want = made.run()
    cheapen(made.graph, join=False)
    torch.testing.assert_close(made.run(), want)
    (product,) = (node for node in made.graph.nodes if node.target is aten.mm.default)
    stays = factor == "rows" and (turned or side == 1)
    before = product.all_input_nodes + [x for node in product.all_input_nodes for x in node.all_input_nodes]
    assert any(node.target in (aten.mul.Tensor, aten.neg.default) for node in before) == stays
