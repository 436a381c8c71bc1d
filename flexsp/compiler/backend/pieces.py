"""Stage 5b: chunkwise code that takes the state's columns in pieces, for states too large to be in one tile.

What has an axis along the columns is made in a loop, a piece of it in each round; what sums over them is added up there
in float32. All else is made before the loop, if the loop needs it, or after it.
"""

# fx types the arguments of a node as a union of all there can be.
# mypy: disable-error-code="union-attr"
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph

from flexsp.compiler.backend.emit import Emitter, node_name, operator_name
from flexsp.compiler.graphs.intrinsics import SUMS
from flexsp.compiler.graphs.rewrite import dims, reverse_cumsum
from flexsp.compiler.graphs.values import NotEmittable, Value, block

__all__ = ["ADDED_UP", "InPieces", "NotInPieces"]

aten = torch.ops.aten
ADDED_UP = (aten.mm.default, aten.sum.dim_IntList, aten.sum.default)
"""Operators that may sum over the columns."""
_RUNNING = (aten.cumsum.default, reverse_cumsum)
_WITH_DIAGONAL = (aten.tril.default, aten.triu.default, aten.eye.default)
_OF_SIZES = (aten.sym_size.int, aten.sym_numel.default)


class NotInPieces(NotEmittable):
    """A piece of the columns depends on the other pieces."""


class InPieces(Emitter):
    """An `Emitter` whose code has a loop over pieces of the axis `cols`, the first of whose numbers is `v0`."""

    def __init__(
        self, graph: Graph, given: Mapping[str, Callable[[], Value]], memory: Mapping[str, str], apart: bool, cols: str
    ) -> None:  # fmt: skip
        super().__init__(graph, given, memory, apart)
        self.cols = cols
        self.added_up: set[str] = set()

    def run(self, outputs: Mapping[str, Any], done: Callable[[str, Value], None], order: bool = True) -> None:
        needed = set().union(*(self._needs(node) for node in outputs.values()))
        nodes = [x for x in self.graph.nodes if x in needed]
        pieces = {x for x in nodes if self.cols in dims(x)}
        sums = [
            x for x in nodes if x not in pieces and x.target not in _OF_SIZES and pieces.intersection(x.all_input_nodes)
        ]
        self._refuse(pieces, sums)
        if pieces:
            self._before(pieces.union(sums))
            self._loop({name: x for name, x in outputs.items() if x in pieces}, sums, done)
        super().run({name: x for name, x in outputs.items() if x not in pieces}, done, order)

    def _refuse(self, pieces: set[Any], sums: list[Any]) -> None:
        """`NotInPieces` if the pieces cannot be computed one after the other."""
        later = next((x for x in self.graph.nodes if x in pieces and self._needs(x).intersection(sums)), None)
        strange = next((x for x in sums if x.target not in ADDED_UP), None)
        strange = strange or next((x for x in self.graph.nodes if x in pieces and self._counts(x)), None)
        found = strange or later
        if found is not None:
            line = found.meta.get("line")
            why = f"{operator_name(found)} is of all of them at once" if strange else "some are made of sums over all"
            raise NotInPieces(f"{why}{f', at {line}' if line else ''}")

    def _counts(self, node: Any) -> bool:
        """Whether a node has indices along the columns."""
        sizes = dims(node)
        if node.target in (*_RUNNING, aten.select_backward.default):
            at = node.args[1] if node.target in _RUNNING else node.args[2]
            return sizes[at % len(sizes)] == self.cols
        return node.target in _WITH_DIAGONAL or (node.target in SUMS and sizes[0] == self.cols)

    def _before(self, inside: set[Any]) -> None:
        size = self._sizes()
        for node in self.graph.nodes:
            for x in node.all_input_nodes if node in inside else ():
                if x not in inside:
                    self._visit(x, size)
                    self.values[x]  # loads it

    def _loop(self, outputs: Mapping[str, Any], sums: list[Any], done: Callable[[str, Value], None]) -> None:
        for node in sums:
            shape = ", ".join(block(x) for x in dims(node) if x != "1")
            self.lines.append(f"{node_name(node)} = {f'tl.zeros([{shape}], tl.float32)' if shape else '0.0'}")
        self.added_up = {node_name(node) for node in sums}
        outside, self.lines = self.lines, []
        super().run(outputs, done)
        super().run({node_name(node): node for node in sums}, lambda name, value: None)
        inside, self.lines = self.lines, outside
        index = f"at_{self.cols}"
        if any(index in line for line in inside):
            inside.insert(0, f"{index} = v0 + tl.arange(0, {block(self.cols)})")
        self.lines += [f"for v0 in range(0, {self.cols}, {block(self.cols)}):", *(f"    {line}" for line in inside)]

    def let(self, name: str, value: Value) -> Value:
        if name not in self.added_up:
            return super().let(name, value)
        if value.text.startswith("product("):
            self.lines.append(f"{name} = add_{value.text.replace('(', f'({name}, ', 1)}")
        else:
            self.lines.append(f"{name} += {value.text}")
        return value.now(name)

    def _limit(self, size: str) -> str:
        return f"{size} - v0" if size == self.cols else super()._limit(size)
