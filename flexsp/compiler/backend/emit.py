"""Stage 5a: a graph of aten operators as straight Triton code on tiles.

Every value is a tile padded to a power of two in each axis. Padding may hold anything, except where it is known to be
zero; what sums over an axis sees zeros there. So a function written for C tokens is right for a chunk of fewer.
"""

# fx types the arguments of a node as a union of all there can be.
# mypy: disable-error-code="union-attr,index,operator,arg-type,assignment,misc,return-value"
from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from flexsp.compiler.backend.operators import (
    BINARY,
    EXPONENTIALS,
    KEEPS_ZERO,
    LOGIC,
    ON_SIZES,
    UNARY,
    defined_at,
    padding_of,
)
from flexsp.compiler.graphs.intrinsics import SUMS
from flexsp.compiler.graphs.rewrite import DIMS, dims, reverse_cumsum
from flexsp.compiler.graphs.values import (
    NotEmittable,
    Value,
    block,
    broadcast,
    index_text,
    inner,
    limit,
    number,
    operator_name,
    steady_at,
    type_of,
    zero_at,
)  # fmt: skip

__all__ = ["Emitter"]

aten = torch.ops.aten


class _Values(dict[Any, Any]):
    """The tiles of nodes. Placeholders are loaded at their first use."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter

    def __missing__(self, node: Any) -> Value:
        value = self[node] = self.emitter.given[node.name]()
        return value


class Emitter:
    """Writes the nodes of `graph` as lines of Triton; `given` are the tiles of its placeholders.

    `memory` maps names of kept values to where their chunk begins, for what reads them a row at a time: `rows_read` are
    those that the code reads so, `indices` the sizes whose `at_SIZE` it uses for it. `contracted` are the sizes that
    something was summed over, or that were counted along: their axis must be in one tile. `apart`: the code has the
    constant APART (`product`).
    """

    def __init__(
        self, graph: Graph, given: Mapping[str, Callable[[], Value]], memory: Mapping[str, str], apart: bool = False
    ) -> None:
        self.graph, self.given, self.memory, self.apart = graph, given, memory, apart
        self.lines: list[str] = []
        self.values: dict[Any, Any] = _Values(self)
        self.contracted: set[str] = set()
        self.rows_read: set[str] = set()
        self.indices: set[str] = set()
        self.needs: dict[Any, set[Any]] = {}
        self.flipped: set[Any] = set()

    def run(self, outputs: Mapping[str, Any], done: Callable[[str, Value], None], order: bool = True) -> None:
        """Emits each output after the nodes that it needs, smallest first, and calls `done` right after each output.

        So a tile is not held while others are computed that do not need it. With `order` False in the order given.
        """
        size = self._sizes()
        for name, node in sorted(outputs.items(), key=lambda item: size[item[1]] if order else 0):
            self._visit(node, size)
            done(name, self.values[node])

    def _sizes(self) -> dict[Any, int]:
        return {node: len(self._needs(node)) for node in self.graph.nodes if node.op != "output"}

    def _needs(self, node: Any) -> set[Any]:
        if node not in self.needs:
            self.needs[node] = {node}.union(*(self._needs(x) for x in node.all_input_nodes))
        return self.needs[node]

    def _visit(self, node: Any, size: dict[Any, int]) -> None:
        """Puts arguments that need most registers first: their temporaries are dead when the others start."""
        if node.op == "placeholder" or node in self.values:
            return
        for x in sorted(node.all_input_nodes, key=lambda x: -size[x]):
            chain = self._chain(x) if self.flipped and node.target is aten.mm.default else []
            if chain:
                self._in_branch(chain, size)
            self._visit(x, size)
        self.values[node] = self._made(node)

    def _made(self, node: Any) -> Any:
        try:
            value = self._emit(node)
            if any(size.isdigit() and size != "1" for size in node.meta.get(DIMS, ())):
                raise NotEmittable(f"a tile of {dims(node)}: kernels are made of sizes that are ConstExprs")
            return value
        except NotEmittable as error:
            line = node.meta.get("line")
            raise NotEmittable(f"{error}, at {line}" if line else str(error)) from None

    def _chain(self, node: Any) -> list[Any]:
        """The nodes from matrix products to `node`, scores [C, C] that only products read; empty if there are none.

        Triton gives the warps of a product that feeds another one to its rows alone: both warp groups compute the
        same. In a branch it does not see the second one (ARCHITECTURE.md, "Walks").
        """
        if node.target is aten.t.default:
            node = node.args[0]
        if node in self.values or node.op == "placeholder" or dims(node) != ("C", "C"):
            return []
        found: list[Any] = []
        waiting = [node]
        while waiting:
            at = waiting.pop()
            if at in found or at in self.values or not any(x.target is aten.mm.default for x in self._needs(at)):
                continue
            if at.target is not aten.mm.default and at.target not in _IN_BRANCH:
                return []
            found.append(at)
            if at.target is not aten.mm.default:
                waiting += at.all_input_nodes
        only_products = all(
            user.target is aten.mm.default
            or (user.target is aten.t.default and set(user.users) <= _products(user.users))
            for user in node.users
        )
        if not only_products or any(set(x.users) - set(found) for x in found if x is not node) or node in self.flipped:
            return []
        grown = True
        while grown:  # nodes that only the chain reads are computed with it
            more = [
                x for at in found for x in at.all_input_nodes
                if x not in found and x.target in _IN_BRANCH and dims(x) == ("C", "C") and x not in self.values
                and set(x.users) <= set(found)
            ]  # fmt: skip
            found += dict.fromkeys(more)
            grown = bool(more)
        return [x for x in self.graph.nodes if x in found]

    def _in_branch(self, chain: list[Any], size: dict[Any, int]) -> None:
        for x in chain:
            for given in x.all_input_nodes:
                if given not in chain:
                    self._visit(given, size)
                    self.values[given]  # loads it
        outside, self.lines = self.lines, []
        for x in chain:
            self.values[x] = self._made(x)
        last = self.values[chain[-1]]
        name = node_name(chain[-1])
        text = last.code if last.is_transposed else last.text
        inside, self.lines = self.lines, outside
        self.lines += ["if length >= 0:  # always", *(f"    {line}" for line in inside)]
        self.lines += [f"    {name}_p = {inner(text)}.to(DOT)", "else:", f"    {name}_p = tl.zeros([C, C], DOT)"]
        self.values[chain[-1]] = last.now(f"{name}_p", raw=True, view="transposed" if last.is_transposed else "")

    def let(self, name: str, value: Value) -> Value:
        """Gives a value a name in the code."""
        self.lines.append(f"{name} = {value.text}")
        return value.now(name)

    def _emit(self, node: Any) -> Any:
        target = node.target
        if target in (aten.sym_size.int, aten.sym_numel.default):
            sizes = " * ".join(limit(size) for size in node.meta["sizes"])
            return f"({sizes})" if " " in sizes else sizes or "1"
        if target in ON_SIZES:
            return self._of_sizes(node)
        if target is aten.full.default:
            fill = node.meta["fill"]
            boolean = node.meta["val"].dtype == torch.bool
            return self._fill(dims(node), bool(fill) if boolean else fill)
        if target in UNARY:
            return self._unary(node)
        if target in BINARY:
            return self._binary(node)
        special = _SPECIAL.get(target)
        if special is None:
            name = operator_name(node)
            raise NotEmittable(f"no kernel is made of {name} yet{_INSTEAD.get(name, '')}")
        return special(self, node)

    def _of_sizes(self, node: Any) -> str:
        """A number computed from sizes, as text. Only a chunk's length is unknown before the kernel runs."""
        args = [self.values[x] if isinstance(x, Node) else repr(x) for x in node.args]
        power = node.target is operator.pow
        if any("length" in x for x in (args[1:] if power else ())) or (power and "length" in args[0]):
            if args[1] not in ("0.5", "-0.5"):
                raise NotEmittable(
                    f"no kernel is made of the power {args[1]} of a chunk's length yet, but of 0.5 and -0.5"
                )
            return f"tl.{'sqrt' if args[1] == '0.5' else 'rsqrt'}({args[0]} * 1.0)"
        return ON_SIZES[node.target].format(*args)

    def _fill(self, sizes: tuple[str, ...], fill: Any) -> Value:
        if not sizes:
            return Value(number(fill), (), truth=isinstance(fill, bool))
        axes = frozenset(range(len(sizes)))
        text = f"tl.full([{', '.join(block(s) for s in sizes)}], {number(fill)}, {type_of(fill)})"
        return Value(text, sizes, frozenset() if fill else axes, steady=axes, truth=isinstance(fill, bool))

    def _arg(self, x: Any, sizes: tuple[str, ...], truth: bool = False) -> Value:
        """An operand of an elementwise operation whose result has `sizes`: a number, or a mask if `truth`."""
        if not isinstance(x, Node):
            return Value(number(x), ())
        value = self.values[x]
        if isinstance(value, str):
            return Value(value, ())
        if not truth and (value.raw or value.truth):
            value = value.now(value.f32, raw=False, truth=False)
        elif truth and not value.truth:
            value = value.now(f"({value.f32} != 0.0)", raw=False, truth=True)
        return value.with_axis(0) if value.sizes and len(sizes) - len(value.sizes) == 1 else value

    def _unary(self, node: Any) -> Value:
        logic = node.target in LOGIC
        x = self._arg(node.args[0], dims(node), truth=logic)
        flip = x.is_transposed
        x = x.transposed() if flip else x
        zero = x.zero if node.target in KEEPS_ZERO else frozenset()
        wild = (x.wild and not (x.low and node.target in EXPONENTIALS)) or not defined_at(node.target, x)
        text = UNARY[node.target].format(inner(x.text))
        value = self.let(node_name(node), Value(text, x.sizes, zero, wild, steady=x.steady, truth=logic))
        return value.transposed() if flip else value

    def _binary(self, node: Any) -> Value:
        if node.kwargs.get("alpha", 1) != 1 or len(node.args) > 2:
            raise NotEmittable(f"no kernel is made of {operator_name(node)} with alpha yet")
        sizes = dims(node)
        a, b = (self._arg(x, sizes, truth=node.target in LOGIC) for x in node.args)
        flip = len(sizes) == 2 and (node in self.flipped or any(x.is_transposed and not x.raw for x in (a, b)))
        if flip:
            a, b = (x.transposed() if x.sizes else x for x in (a, b))
        shape = broadcast(a, b)
        text = BINARY[node.target].format(inner(a.text), inner(b.text))
        value = self.let(node_name(node), Value(text, shape, **padding_of(node.target, a, b, shape)))
        return value.transposed() if flip else value

    # Axes

    def masked(self, x: Value, axis: int, fill: float = 0.0) -> Value:
        """x with zeros in the padding of an axis, or with numbers that an extremum ignores."""
        if x.sizes[axis] == "1" or (axis in x.zero and not fill):
            return x
        if x.is_transposed:
            return self.masked(x.transposed(), 1 - axis, fill).transposed()
        name = "keep_rows" if axis == 0 else "keep_cols"
        other = f", {number(fill)}" if fill else ""
        text = f"{name}({x.f32}, {self._limit(x.sizes[axis])}{other})"
        return x.now(text, zero=x.zero | ({axis} if not fill else set()), raw=False, truth=False)

    def _limit(self, size: str) -> str:
        """The bound of the indices of a tile's axis."""
        return limit(size)

    def full(self, x: Value, sizes: tuple[str, ...]) -> Value:
        """x broadcast along every axis."""
        if x.sizes == sizes:
            return x
        shape = ", ".join(map(block, sizes))
        if not x.sizes:
            steady = frozenset(range(len(sizes)))
            return Value(f"tl.full([{shape}], 0.0, tl.float32) + {x.f32}", sizes, steady=steady)
        if len(x.sizes) < len(sizes):
            x = x.with_axis(0)
        zero = frozenset(a for a in x.zero if x.sizes[a] == sizes[a])
        steady = frozenset(a for a in range(len(sizes)) if steady_at(x, a))
        return Value(f"tl.broadcast_to({x.f32}, [{shape}])", sizes, zero, x.wild, low=x.low, steady=steady)

    def _mm(self, node: Any) -> Value:
        a, b = (self.full(self.values[x], dims(x)) for x in node.args)
        along = a.sizes[1]
        if "1" in (*a.sizes, *b.sizes) or any(s.isdigit() for s in (*a.sizes, *b.sizes)):
            raise NotEmittable(f"a matrix product of {a.sizes} and {b.sizes} is not there yet")
        self.contracted.add(along)
        if a.wild or b.wild:
            a, b = self.masked(a, 1), self.masked(b, 0)
        elif 1 not in a.zero and 0 not in b.zero:
            a = self.masked(a, 1)
        zero = frozenset({0} if 0 in a.zero and not b.wild else ()) | ({1} if 1 in b.zero and not a.wild else set())
        wild = a.wild or b.wild
        if node in self.flipped:
            a, b = b.transposed(), a.transposed()
            zero = frozenset(1 - axis for axis in zero)
        text = f"mm({a.text}, {b.text}, DOT, PREC)"
        if self.apart:
            text = f"product({a.text}, {b.text}, length, DOT, PREC, APART)"
        value = self.let(node_name(node), Value(text, (a.sizes[0], b.sizes[1]), zero, wild))
        return value.transposed() if node in self.flipped else value

    def flip(self, start: str) -> None:
        """Computes transposes of values that depend on the state (the placeholder `start`), and of their summands."""
        waiting = [node for node in self.graph.nodes if node.name == start]
        while waiting:
            node = waiting.pop()
            if node in self.flipped:
                continue
            self.flipped.add(node)
            waiting += [
                user for user in node.users
                if (user.target in BINARY and len(dims(user)) == 2)
                or (user.target is aten.mm.default and user.args[1] is node)
            ]  # fmt: skip
            if node.target in BINARY:
                waiting += [
                    x for x in node.all_input_nodes
                    if (x.target in BINARY or x.target is aten.mm.default) and dims(x) == dims(node)
                ]  # fmt: skip

    def _t(self, node: Any) -> Value:
        x = self.values[node.args[0]]
        if len(x.sizes) < 2:
            return x
        return x.transposed()

    def _unsqueeze(self, node: Any) -> Value:
        x, at = self.values[node.args[0]], node.args[1] % len(dims(node))
        if len(dims(node)) > 2:
            raise NotEmittable(
                "no kernel is made of tiles of three axes yet; pairs of tokens with a gate a channel are "
                "decayed_scores(q, k, b), or decayed_sums(x, g) where they are only summed up"
            )
        return x.with_axis(at) if x.sizes else x

    def _squeeze(self, node: Any) -> Value:
        x, want = self.values[node.args[0]], dims(node)
        if len(x.sizes) <= len(want):
            return x
        gone = [axis for axis, s in enumerate(x.sizes) if s == "1"]
        if len(x.sizes) - len(gone) != len([s for s in want if s != "1"]):
            raise NotEmittable(f"no kernel is made of {operator_name(node)} from {x.sizes} to {want} yet")
        for axis in reversed(gone[len(gone) - (len(x.sizes) - len(want)) :]):
            added = x.view == ("row" if axis == 0 else "column") and not x.truth
            x = x.without(axis, inner(x.code) if added else f"tl.sum({x.f32}, axis={axis})")
        return x

    def _view(self, node: Any) -> Value:
        have, want = dims(node.args[0]), dims(node)
        if [s for s in have if s != "1"] != [s for s in want if s != "1"] or len(want) > 2:
            raise NotEmittable(f"no kernel is made of reshaping [{', '.join(have)}] to [{', '.join(want)}] yet")
        if len(have) > len(want):
            return self._squeeze(node)
        x = self.values[node.args[0]]
        if have == want or len(want) != 2 or len(x.sizes) != 1:
            return x
        return x.with_axis(0 if want[0] == "1" else 1)

    def _sum(self, node: Any) -> Value:
        return self._last_gate(node) or self._reduced(node, "sum_over", 0.0)

    def _extremum(self, node: Any) -> Value:
        largest = node.target is aten.amax.default
        return self._reduced(node, "largest" if largest else "smallest", -math.inf if largest else math.inf)

    def _reduced(self, node: Any, how: str, fill: float) -> Value:
        """A sum or an extremum over some axes, or all, without or with an axis of size 1 in their place."""
        have = dims(node.args[0])
        axes = _axes(node)
        x = self.full(self.values[node.args[0]], have)
        for axis in axes:
            x = self.masked(x, axis, fill)
        text = x.f32
        for axis in reversed(axes):
            self.contracted.add(have[axis])
            text = f"{how}({text}, {axis})"
            x = x.without(axis, text)
        x = self.let(node_name(node), x.now(text, raw=False, truth=False, low=False))
        return x.with_axis(axes[0]) if _keeps_axes(node) and x.sizes else x

    def _last_gate(self, node: Any) -> Value | None:
        """The sum over a chunk whose running sum is kept in memory: its last row."""
        x = node.args[0]
        if _axes(node) != [0] or _keeps_axes(node) or node.meta.get("last") not in self.memory:
            return None
        self.rows_read.add(node.meta["last"])
        at, sizes = self.memory[node.meta["last"]], dims(x)[1:]
        if not sizes:
            return self.let(node_name(node), Value(f"tl.load({at} + C - 1)", ()))
        size = sizes[0]
        self.indices.add(size)
        text = f"tl.load({at} + (C - 1) * {size} + at_{size}, mask=at_{size} < {size}, other=0.0)"
        return self.let(node_name(node), Value(text, sizes, frozenset({0})))

    def _cumsum(self, node: Any) -> Value:
        reverse = node.target is reverse_cumsum
        axis = node.args[1] % len(dims(node))
        x = self.full(self.values[node.args[0]], dims(node))
        self.contracted.add(x.sizes[axis])
        x = self.masked(x, axis)  # also forward: the sum stays as it is past the chunk's length
        text = f"tl.cumsum({x.f32}, axis={axis}{', reverse=True' if reverse else ''})"
        zero, steady = (x.zero, x.steady - {axis}) if reverse else (x.zero - {axis}, x.steady | {axis})
        return self.let(node_name(node), Value(text, x.sizes, zero, x.wild, steady=steady))

    def _decayed_sums(self, node: Any) -> Value:
        """Sums along the rows with a gate each, from above or (`later_sums`) from below."""
        x, g = (self.masked(self.full(self.values[x], dims(node)), 0) for x in node.args)
        self.contracted.add(x.sizes[0])
        wild = x.wild or g.wild or not defined_at(aten.exp.default, g)
        zero = frozenset() if wild else x.zero if SUMS[node.target] == "later_sums" else x.zero - {0}
        return self.let(node_name(node), Value(f"{SUMS[node.target]}({x.f32}, {g.f32})", x.sizes, zero, wild))

    def _select(self, node: Any) -> Value:
        source, axis, index = node.args
        have = dims(source)
        axis %= len(have)
        self.contracted.add(have[axis])
        x = self.full(self.values[source], have)
        at = index_text(index, have[axis])
        return self.let(node_name(node), x.without(axis, f"{'row_of' if axis == 0 else 'col_of'}({x.f32}, {at})"))

    def _select_backward(self, node: Any) -> Value:
        grad, _, axis, index = node.args
        want = dims(node)
        axis %= len(want)
        self.contracted.add(want[axis])
        x = self.full(self.values[grad], dims(grad))
        at = index_text(index, want[axis])
        if not x.sizes:
            text = f"tl.where(tl.arange(0, {block(want[0])}) == {at}, {x.f32}, 0.0)"
        else:
            text = f"{'only_row' if axis == 0 else 'only_col'}({x.f32}, {at}, {block(want[axis])})"
        zero = frozenset({axis}) | frozenset(a + (a >= axis) for a in x.zero)
        return self.let(node_name(node), Value(text, want, zero, x.wild))

    def _tril(self, node: Any) -> Value:
        sizes = dims(node)
        self.contracted.update(sizes)
        x = self.values[node.args[0]]
        diagonal = node.args[1] if len(node.args) > 1 else 0
        shape = f"{block(sizes[0])}, {block(sizes[1])}"
        mask = f"below({shape}, {diagonal})" if node.target is aten.tril.default else f"~below({shape}, {diagonal - 1})"
        if x.truth:
            everywhere = node.args[0].target is aten.full.default and node.args[0].meta["fill"]
            text = mask if everywhere else f"{mask} & ({x.text})"
            return self.let(node_name(node), Value(text, sizes, truth=True))
        x = self.full(x, sizes)
        return self.let(node_name(node), x.now(f"tl.where({mask}, {x.f32}, 0.0)", raw=False))

    def _where(self, node: Any) -> Value:
        if node.target is aten.where.self:
            mask, yes, no = node.args
        else:
            no, mask, yes = node.args
        sizes = dims(node)
        m, y, n = self._arg(mask, sizes, truth=True), self._arg(yes, sizes), self._arg(no, sizes)
        shape = broadcast(Value("", broadcast(m, y)), n)
        zero = frozenset(a for a in range(len(shape)) if zero_at(y, a) and zero_at(n, a))
        steady = frozenset(a for a in range(len(shape)) if steady_at(y, a) and steady_at(n, a))
        signs = [x.text for x in (y, n) if x.text.endswith('inf")')]
        wild = y.wild or n.wild or bool(signs)
        low = all(x.low or not x.wild for x in (y, n)) and number(math.inf) not in signs
        text = f"tl.where({m.text}, {y.text}, {n.text})"
        return self.let(node_name(node), Value(text, shape, zero, wild, low=wild and low, steady=steady))

    def _pow(self, node: Any) -> Value:
        x, p = self._arg(node.args[0], dims(node)), node.args[1]
        if not isinstance(p, (int, float)) or p * 2 != int(p * 2) or not 0 < abs(p) <= _LARGEST_POWER:
            raise NotEmittable(
                f"no kernel is made of the power {p} yet, but of multiples of 0.5 up to {_LARGEST_POWER}; of what is "
                "positive, (x.log() * p).exp() is the same"
            )
        name, whole, half = inner(x.text), int(abs(p)), abs(p) % 1 > 0
        text = " * ".join([name] * whole + [f"tl.sqrt({x.text})"] * half)
        if p < 0:
            text = f"tl.rsqrt({x.text})" if p == -0.5 else f"1.0 / ({text})"
        like = aten.reciprocal.default if p < 0 else aten.sqrt.default if half else aten.mul.Tensor
        zero = x.zero if p > 0 else frozenset()
        value = Value(text, x.sizes, zero, x.wild or not defined_at(like, x), steady=x.steady)
        return self.let(node_name(node), value)

    def _threshold_backward(self, node: Any) -> Value:
        """The gradient of relu: grad where its input is above the threshold."""
        sizes = dims(node)
        grad, x = (self._arg(a, sizes) for a in node.args[:2])
        shape = broadcast(grad, x)
        text = f"tl.where({x.text} > {number(node.args[2])}, {grad.text}, 0.0)"
        zero = frozenset(a for a in range(len(shape)) if zero_at(grad, a))
        return self.let(node_name(node), Value(text, shape, zero, grad.wild))

    def _rsub(self, node: Any) -> Value:
        if len(node.args) > 2 or node.kwargs:
            raise NotEmittable("no kernel is made of rsub with alpha yet")
        x = self._arg(node.args[0], dims(node))
        text = f"{number(node.args[1])} - {inner(x.text)}"
        return self.let(node_name(node), Value(text, x.sizes, frozenset(), x.wild, steady=x.steady))

    def _clamp(self, node: Any) -> Value:
        """A clamp between numbers, either of which may be missing."""
        x = self._arg(node.args[0], dims(node))
        low, high = (*node.args[1:], None, None)[:2]
        text, zero = x.text, x.zero
        if low is not None:
            text, zero = f"larger({text}, {number(low)})", zero if low <= 0 else frozenset()
        if high is not None:
            text, zero = f"smaller({text}, {number(high)})", zero if high >= 0 else frozenset()
        return self.let(node_name(node), Value(text, x.sizes, zero, x.wild, steady=x.steady))

    def _cast(self, node: Any) -> Value:
        """A mask as numbers."""
        x = self.values[node.args[0]]
        return self.let(node_name(node), x.now(x.f32, raw=False, truth=False)) if x.truth else x

    def _eye(self, node: Any) -> Value:
        sizes = dims(node)
        self.contracted.update(sizes)
        return self.let(node_name(node), Value(f"eye({block(sizes[0])}, {block(sizes[1])})", sizes))

    def _expand(self, node: Any) -> Value:
        x = self.values[node.args[0]]
        return x.with_axis(0) if x.sizes and len(x.sizes) < len(dims(node)) else x


def _axes(node: Any) -> list[int]:
    """The axes of a sum or an extremum: all axes if it names none."""
    n = len(dims(node.args[0]))
    named = node.args[1] if len(node.args) > 1 else ()
    return sorted({axis % n for axis in named or range(n)})


def _keeps_axes(node: Any) -> bool:
    return len(node.args) > 2 and bool(node.args[2])


def node_name(node: Any) -> str:
    """The variable of a node. Its name always has a number, so that it hides no function."""
    return node.name if node.name[-1].isdigit() else f"{node.name}_0"


_LARGEST_POWER = 8
_INSTEAD = {
    "cat": " (add up the products of each part)",
    "cumprod": " (of what is positive, x.log().cumsum(0).exp() is the same)",
    "stack": " (add up what each part gives)", "split": " (give the parts as inputs of their own)",
    "unbind": " (x[:, 0] takes one)", "slice": " (give the parts as inputs of their own)",
    "index": " (a constant, such as x[:, 0] or x[-1], is one)",
}  # fmt: skip
_IN_BRANCH = {*BINARY, *UNARY, aten.tril.default, aten.triu.default, aten.where.self, aten.masked_fill.Scalar}


def _products(nodes: Iterable[Any]) -> set[Any]:
    return {x for x in nodes if x.target is aten.mm.default}


_SPECIAL: dict[Any, Callable[[Emitter, Any], Any]] = {
    aten.mm.default: Emitter._mm,
    aten.t.default: Emitter._t,
    aten.unsqueeze.default: Emitter._unsqueeze,
    aten.squeeze.dim: Emitter._squeeze,
    aten.squeeze.dims: Emitter._squeeze,
    aten.squeeze.default: Emitter._squeeze,
    aten.view.default: Emitter._view,
    aten._unsafe_view.default: Emitter._view,
    aten.sum.dim_IntList: Emitter._sum,
    aten.sum.default: Emitter._sum,
    aten.cumsum.default: Emitter._cumsum,
    reverse_cumsum: Emitter._cumsum,
    **dict.fromkeys(SUMS, Emitter._decayed_sums),
    aten.select.int: Emitter._select,
    aten.select_backward.default: Emitter._select_backward,
    aten.tril.default: Emitter._tril,
    aten.triu.default: Emitter._tril,
    aten.where.self: Emitter._where,
    aten.masked_fill.Scalar: Emitter._where,
    aten.pow.Tensor_Scalar: Emitter._pow,
    aten.threshold_backward.default: Emitter._threshold_backward,
    aten.rsub.Scalar: Emitter._rsub,
    aten.amax.default: Emitter._extremum,
    aten.amin.default: Emitter._extremum,
    aten.clamp.default: Emitter._clamp,
    aten._to_copy.default: Emitter._cast,
    aten.eye.default: Emitter._eye,
    aten.expand.default: Emitter._expand,
}
