"""Random graphs of the operators that rewrites look for, before and after all of them: the same values in float64.

Every rule must have been at work: a rule that none of the graphs needed fails the test.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch.fx import Graph

from flexsp.compiler.graphs import rewrite
from flexsp.compiler.graphs.rewrite import DIMS, cheapen, dims, simplify
from tests.harness.graphs import run_graph

aten = torch.ops.aten
SIZES = {"C": 5, "K": 3, "V": 4}
GRAPHS = 300
RULES = (
    "_hoist", "_sum_over", "_of_vectors", "_thin_product", "_signed", "_one_running_sum", "_factored", "_total",
    "_implied", "_regroup", "_out_of_product", "_times",
)  # fmt: skip
Sizes = tuple[str, ...]


class Drawn:
    """A graph under construction, whose nodes have values and named sizes as those of a step have."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.inputs: dict[str, torch.Tensor] = {}
        self.made: dict[Sizes, list[Any]] = {}
        for i, sizes in enumerate(("CK", "CV", "KV", "CC", "CC", "KK", "VV", "C", "C", "K", "V")):
            self.made.setdefault(tuple(sizes), []).append(self.placeholder(f"x{i}", sizes))
        ones = self.call(aten.ones.default, [SIZES["C"]] * 2, dtype=torch.bool)
        self.masks = [self.call(aten.bitwise_not.default, self.call(aten.tril.default, ones, n)) for n in (0, -1)]
        for sizes in ("CC", "CV", "C"):
            shape = [SIZES[s] for s in sizes]
            for fill in (aten.ones.default, aten.zeros.default):
                self.call(fill, shape, dtype=torch.float64)
            self.call(aten.full.default, shape, 0.5, dtype=torch.float64)
        finite = self.call(aten.tril.default, self.call(aten.abs.default, self.made["C", "C"][0]))
        self.wild = self.call(aten.reciprocal.default, finite)  # infinite above the diagonal
        exponent = self.call(aten.masked_fill.Scalar, self.made["C", "C"][1], random.choice(self.masks), float("-inf"))
        self.low = self.call(aten.exp.default, exponent)  # zero above it

    def placeholder(self, name: str, sizes: str) -> Any:
        node = self.graph.placeholder(name)
        node.name = name
        value = self.inputs[name] = torch.randn([SIZES[s] for s in sizes], dtype=torch.float64)
        node.meta = {"val": value, DIMS: tuple(sizes)}
        return node

    def call(self, target: Any, *args: Any, **options: Any) -> Any:
        node = self.graph.call_function(target, args, options)
        value = target(*(x.meta["val"] if hasattr(x, "meta") else x for x in args), **options)
        names = {n: name for name, n in SIZES.items()} | {1: "1"}
        node.meta = {"val": value, DIMS: tuple(names[n] for n in value.shape)}
        if value.is_floating_point() and value.isfinite().all():
            self.made.setdefault(dims(node), []).append(node)
        return node

    def tile(self, sizes: Sizes, depth: int) -> Any:
        """A node of these sizes: made anew, or one that is there, so that some are read twice."""
        if depth <= 0 or random.random() < 0.15:
            return random.choice(self.made[sizes]) if sizes in self.made else self.turned(sizes, 0)
        of_any = [self.sum_of, self.negative, self.times_number, self.times]
        more = [self.running, self.reduced, self.reduced] if len(sizes) == 1 else [self.product, self.two_products]
        more += [self.turned, self.times_rows] if len(sizes) == 2 else []
        more += [self.below, self.filled, self.implied] if sizes == ("C", "C") else []
        return random.choice([*of_any, *more])(sizes, depth - 1)

    def sum_of(self, sizes: Sizes, depth: int) -> Any:
        return self.call(self.plus(), self.tile(sizes, depth), self.tile(sizes, depth))

    def plus(self) -> Any:
        return random.choice([aten.add.Tensor, aten.sub.Tensor])

    def negative(self, sizes: Sizes, depth: int) -> Any:
        return self.call(aten.neg.default, self.tile(sizes, depth))

    def times_number(self, sizes: Sizes, depth: int) -> Any:
        return self.call(aten.mul.Tensor, self.tile(sizes, depth), random.choice([0.5, -0.25, 3.0]))

    def times(self, sizes: Sizes, depth: int) -> Any:
        return self.call(aten.mul.Tensor, self.tile(sizes, depth), self.tile(sizes, 0))

    def column(self, size: str, depth: int) -> Any:
        """[N, 1], of one vector, of two that are added, or a product with a column."""
        one = self.call(aten.unsqueeze.default, self.tile((size,), depth), 1)
        kind = random.randrange(3)
        if kind == 1:
            other = self.call(aten.unsqueeze.default, self.tile((size,), 0), 1)
            return self.call(random.choice([aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor]), one, other)
        if kind == 2:
            inner = random.choice("CKV")
            return self.call(aten.mm.default, self.tile((size, inner), depth), self.column(inner, 0))
        return one

    def times_rows(self, sizes: Sizes, depth: int) -> Any:
        return self.call(aten.mul.Tensor, self.tile(sizes, depth), self.column(sizes[0], depth))

    def turned(self, sizes: Sizes, depth: int) -> Any:
        return self.call(aten.t.default, self.tile(sizes[::-1], depth))

    def product(self, sizes: Sizes, depth: int) -> Any:
        inner = random.choice("CKV")
        return self.call(aten.mm.default, self.tile((sizes[0], inner), depth), self.tile((inner, sizes[1]), depth))

    def two_products(self, sizes: Sizes, depth: int) -> Any:
        """With a common operand on either side, and something else before or after them."""
        inner, left = random.choice("CKV"), random.random() < 0.5
        common = self.tile((sizes[0], inner) if left else (inner, sizes[1]), depth)
        terms = []
        for _ in range(2):
            other = self.tile((inner, sizes[1]) if left else (sizes[0], inner), depth)
            terms.append(self.call(aten.mm.default, *((common, other) if left else (other, common))))
        terms.insert(random.randrange(3), self.tile(sizes, 0))
        total = self.call(self.plus(), terms[0], terms[1])
        return self.call(self.plus(), *random.choice([(total, terms[2]), (terms[2], total)]))

    def running(self, sizes: Sizes, depth: int) -> Any:
        """A running sum from either end, or two that are added, with or without something else."""

        def one(back: bool) -> Any:
            x = self.tile(sizes, depth)
            if not back:
                return self.call(aten.cumsum.default, x, 0)
            turned = self.call(aten.cumsum.default, self.call(aten.flip.default, x, [0]), 0)
            return self.call(aten.flip.default, turned, [0])

        back = random.random() < 0.5
        x, y = one(back), one(back if random.random() < 0.7 else not back)
        kind = random.randrange(3)
        if kind == 0:
            return self.call(random.choice([aten.add.Tensor, aten.sub.Tensor]), x, y)
        if kind == 1:
            rest = self.call(self.plus(), *random.sample([x, self.tile(sizes, 0)], 2))
            return self.call(aten.add.Tensor, *random.sample([rest, y], 2))
        return x

    def reduced(self, sizes: Sizes, depth: int) -> Any:
        axis, other = random.randrange(2), random.choice("CKV")
        x = self.tile((sizes[0], other) if axis else (other, sizes[0]), depth)
        if random.random() < 0.5:
            return self.call(aten.sum.dim_IntList, x, [axis])
        return self.call(aten.squeeze.dim, self.call(aten.sum.dim_IntList, x, [axis], True), axis)

    def below(self, sizes: Sizes, depth: int) -> Any:
        return self.call(aten.tril.default, self.tile(sizes, depth), random.choice([0, -1]))

    def filled(self, sizes: Sizes, depth: int) -> Any:
        return self.call(aten.masked_fill.Scalar, self.tile(sizes, depth), random.choice(self.masks), 0.0)

    def implied(self, sizes: Sizes, depth: int) -> Any:
        """A triangle times what is zero above the diagonal already, or below it too; it may be infinite there."""
        x = random.choice([self.wild, self.tile(sizes, depth)])
        triangle = self.call(aten.tril.default, x, random.choice([0, 0, -1]))
        if random.random() < 0.3:
            triangle = self.call(aten.mul.Tensor, *random.sample([triangle, self.tile(sizes, depth)], 2))
        low = random.choice([self.low, self.below(sizes, depth)])
        return self.call(aten.mul.Tensor, *random.sample([triangle, low], 2))


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each rule changed something."""
    found: Counter[str] = Counter()

    def watch(name: str, rule: Any) -> None:
        def watched(*args: Any) -> Any:
            new = rule(*args)
            found[name] += new is not None
            return new

        monkeypatch.setattr(rewrite, name, watched)

    for name in RULES:
        watch(name, getattr(rewrite, name))
    return found


def test_values_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    used = counted(monkeypatch)
    for i in range(20 * GRAPHS):
        if i >= GRAPHS and all(used[name] for name in RULES):
            break
        drawn = Drawn()
        if i % 3:
            node = drawn.tile(random.choice([("C", "V"), ("K", "V"), ("C", "C"), ("C",)]), 5)
        else:
            node = random.choice([drawn.two_products, drawn.implied])(("C", "C"), 1)
        want, text = node.meta["val"], str(drawn.graph)
        drawn.graph.output([node])
        drawn.graph.eliminate_dead_code()
        largest = max([1.0, *(float(x.meta["val"].abs().max()) for of in drawn.made.values() for x in of)])
        for change in (simplify, lambda graph: cheapen(graph, False), lambda graph: cheapen(graph, True)):
            change(drawn.graph)
            drawn.graph.lint()
            (got,) = run_graph(drawn.graph, SIZES, drawn.inputs)
            assert torch.allclose(got.expand(want.shape), want, rtol=1e-9, atol=1e-11 * largest), (
                f"{text}\nbecame\n{drawn.graph}"
            )
    unused = [name for name in RULES if not used[name]]
    assert not unused, unused
