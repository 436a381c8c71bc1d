"""Stage 5a: a graph of aten operators as straight Triton code on tiles.

Every value is a tile padded to a power of two in each axis. Padding may hold anything, except where it is known to be
zero; what sums over an axis sees zeros there. So a function written for C tokens is right for a chunk of fewer.
"""

# fx types the arguments of a node as a union of all there can be.
# mypy: disable-error-code="union-attr,index,operator,arg-type,assignment,misc,return-value"
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from flexsp.compiler.rewrite import dims, reverse_cumsum
from flexsp.compiler.values import (
    NotEmittable,
    Value,
    block,
    broadcast,
    index_text,
    inner,
    is_turned,
    limit,
    number,
    turned,
    type_of,
    zero_at,
)  # fmt: skip

__all__ = ["Emitter", "NotEmittable", "Value", "block"]

aten = torch.ops.aten


_UNARY = {
    aten.neg.default: "-{}", aten.exp.default: "tl.exp({})", aten.exp2.default: "tl.exp2({})",
    aten.abs.default: "tl.abs({})", aten.sin.default: "tl.sin({})", aten.cos.default: "tl.cos({})",
    aten.sqrt.default: "tl.sqrt({})", aten.sigmoid.default: "tl.sigmoid({})", aten.log.default: "tl.log({})",
    aten.log2.default: "tl.log2({})", aten.log1p.default: "tl.log(1.0 + {})", aten.rsqrt.default: "tl.rsqrt({})",
    aten.reciprocal.default: "(1.0 / {})", aten.relu.default: "tl.maximum({}, 0.0)",
    aten.tanh.default: "(2.0 * tl.sigmoid(2.0 * {}) - 1.0)", aten.bitwise_not.default: "~({})",
    aten.logical_not.default: "~({})",
    aten.sgn.default: "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))",
    aten.sign.default: "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))",
}  # fmt: skip
_KEEPS_ZERO = {
    aten.neg.default, aten.abs.default, aten.sin.default, aten.sqrt.default, aten.relu.default, aten.tanh.default,
    aten.sign.default, aten.sgn.default,
}  # fmt: skip
_WILD = {aten.log.default, aten.log2.default, aten.log1p.default, aten.rsqrt.default, aten.reciprocal.default}
_BINARY = {
    aten.add.Tensor: "{} + {}", aten.sub.Tensor: "{} - {}", aten.mul.Tensor: "{} * {}", aten.div.Tensor: "{} / {}",
    aten.maximum.default: "tl.maximum({}, {})", aten.minimum.default: "tl.minimum({}, {})",
    aten.add.Scalar: "{} + {}", aten.sub.Scalar: "{} - {}", aten.mul.Scalar: "{} * {}", aten.div.Scalar: "{} / {}",
    aten.clamp_min.default: "tl.maximum({}, {})", aten.clamp_max.default: "tl.minimum({}, {})",
    aten.bitwise_and.Tensor: "{} & {}", aten.bitwise_or.Tensor: "{} | {}",
    aten.logical_and.default: "{} & {}", aten.logical_or.default: "{} | {}",
}  # fmt: skip
for _name, _sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="), ("eq", "=="), ("ne", "!=")):
    for _overload in ("Tensor", "Scalar"):
        _BINARY[getattr(getattr(aten, _name), _overload)] = "{} " + _sign + " {}"
_PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar, aten.bitwise_and.Tensor, aten.logical_and.default}


class _Values(dict[Any, Any]):
    """What nodes became. Placeholders are loaded when they are first asked for."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter

    def __missing__(self, node: Any) -> Value:
        value = self[node] = self.emitter.given[node.name]()
        return value


class Emitter:
    """Writes the nodes of `graph` as lines of Triton; `given` are the tiles of its placeholders.

    `memory` maps names of kept values to where their chunk begins, for what reads them a row at a time. `whole` are
    sizes whose axis is in one tile: an operation along any other axis is refused.
    """

    def __init__(self, graph: Graph, given: Mapping[str, Callable[[], Value]], memory: Mapping[str, str]) -> None:
        self.graph, self.given, self.memory = graph, given, memory
        self.lines: list[str] = []
        self.values: dict[Any, Any] = _Values(self)
        self.contracted: set[str] = set()
        self.needs: dict[Any, set[Any]] = {}
        self.flipped: set[Any] = set()

    def run(self, outputs: Mapping[str, Any], done: Callable[[str, Value], None], order: bool = True) -> None:
        """Emits each output with what it needs, those that need least first; `done` is called as soon as one is there.

        So a tile is not held while others are computed that do not need it. With `order` False in the order given.
        """
        size = {node: len(self._needs(node)) for node in self.graph.nodes if node.op != "output"}
        for name, node in sorted(outputs.items(), key=lambda item: size[item[1]] if order else 0):
            self._visit(node, size)
            done(name, self.values[node])

    def _needs(self, node: Any) -> set[Any]:
        if node not in self.needs:
            self.needs[node] = {node}.union(*(self._needs(x) for x in node.all_input_nodes))
        return self.needs[node]

    def _visit(self, node: Any, size: dict[Any, int]) -> None:
        """Arguments that need most come first: their temporaries are gone when the others start."""
        if node.op == "placeholder" or node in self.values:
            return
        for x in sorted(node.all_input_nodes, key=lambda x: -size[x]):
            chain = self._chain(x) if self.flipped and node.target is aten.mm.default else []
            if chain:
                self._in_branch(chain, size)
            self._visit(x, size)
        self.values[node] = self._emit(node)

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
        inner = [x for x in found if x is not node]
        only_products = all(
            user.target is aten.mm.default
            or (user.target is aten.t.default and set(user.users) <= _products(user.users))
            for user in node.users
        )
        if not only_products or any(set(x.users) - set(found) for x in inner) or node in self.flipped:
            return []
        grown = True
        while grown:  # what only the chain reads is computed with it
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
            self.values[x] = self._emit(x)
        last = self.values[chain[-1]]
        name = node_name(chain[-1])
        text = turned(last).text if is_turned(last.text) else last.text
        inside, self.lines = self.lines, outside
        self.lines += ["if length >= 0:  # always", *(f"    {line}" for line in inside)]
        self.lines += [f"    {name}_p = {inner(text)}.to(DOT)", "else:", f"    {name}_p = tl.zeros([C, C], DOT)"]
        value = replace(last, text=f"tl.trans({name}_p)" if is_turned(last.text) else f"{name}_p", raw=True)
        self.values[chain[-1]] = value

    def let(self, name: str, value: Value) -> Value:
        """Gives a value a name in the code."""
        self.lines.append(f"{name} = {value.text}")
        return replace(value, text=name)

    def _emit(self, node: Any) -> Any:
        target = node.target
        if target is aten.sym_size.int:
            return limit(node.meta["size"])
        if "size" in node.meta and not isinstance(target, str):
            raise NotEmittable(f"arithmetic on sizes ({node.format_node()}) is not there yet")
        if target is aten.full.default:
            fill = node.meta["fill"]
            boolean = node.meta["val"].dtype == torch.bool
            return self._fill(dims(node), bool(fill) if boolean else fill)
        if target in _UNARY:
            return self._unary(node)
        if target in _BINARY:
            return self._binary(node)
        special = _SPECIAL.get(target)
        if special is None:
            raise NotEmittable(f"no kernel is made of {target} yet")
        return special(self, node)

    def _fill(self, sizes: tuple[str, ...], fill: Any) -> Value:
        text = (
            f"tl.full([{', '.join(block(s) for s in sizes)}], {number(fill)}, {type_of(fill)})"
            if sizes
            else number(fill)
        )
        zero = frozenset(range(len(sizes))) if not fill else frozenset()
        return Value(text, sizes, zero)

    def _arg(self, x: Any, sizes: tuple[str, ...]) -> Value:
        """An operand of an elementwise operation whose result has `sizes`."""
        if not isinstance(x, Node):
            return Value(number(x), ())
        value = self.values[x]
        if isinstance(value, str):
            return Value(value, ())
        missing = len(sizes) - len(value.sizes)
        if value.sizes and missing == 1:
            return Value(f"{value.f32}[None, :]", ("1", *value.sizes), frozenset(a + 1 for a in value.zero), value.wild)
        return replace(value, text=value.f32, raw=False)

    def _unary(self, node: Any) -> Value:
        x = self._arg(node.args[0], dims(node))
        flip = is_turned(x.text)
        x = turned(x) if flip else x
        zero = x.zero if node.target in _KEEPS_ZERO else frozenset()
        text = _UNARY[node.target].format(inner(x.text))
        value = self.let(node_name(node), Value(text, x.sizes, zero, x.wild or node.target in _WILD))
        return turned(value) if flip else value

    def _binary(self, node: Any) -> Value:
        if node.kwargs.get("alpha", 1) != 1 or len(node.args) > 2:
            raise NotEmittable(f"{node.target} with alpha is not there yet")
        sizes = dims(node)
        a, b = (self._arg(x, sizes) for x in node.args)
        flip = len(sizes) == 2 and (node in self.flipped or any(is_turned(x.text) and not x.raw for x in (a, b)))
        if flip:
            a, b = (turned(x) if x.sizes else x for x in (a, b))
        shape = broadcast(a, b)
        zero = frozenset(
            axis for axis in range(len(shape))
            if (zero_at(a, axis) or zero_at(b, axis) if node.target in _PRODUCTS
                else zero_at(a, axis) if node.target in (aten.div.Tensor, aten.div.Scalar)
                else zero_at(a, axis) and zero_at(b, axis))
        )  # fmt: skip
        divides = node.target in (aten.div.Tensor, aten.div.Scalar) and bool(b.sizes)
        if node.target not in _ZERO_PRESERVING:
            zero = frozenset()
        wild = a.wild or b.wild or divides
        text = _BINARY[node.target].format(inner(a.text), inner(b.text))
        value = self.let(node_name(node), Value(text, shape, zero, wild))
        return turned(value) if flip else value

    # Axes

    def masked(self, x: Value, axis: int) -> Value:
        """x with zeros in the padding of an axis."""
        if axis in x.zero or x.sizes[axis] == "1" or x.sizes[axis].isdigit():
            return x
        if is_turned(x.text):
            return turned(self.masked(turned(x), 1 - axis))
        name = "keep_rows" if axis == 0 else "keep_cols"
        return replace(x, text=f"{name}({x.f32}, {limit(x.sizes[axis])})", zero=x.zero | {axis}, wild=False, raw=False)

    def full(self, x: Value, sizes: tuple[str, ...]) -> Value:
        """x with every axis laid out."""
        if x.sizes == sizes:
            return x
        text = x.f32
        if not x.sizes:
            zero: frozenset[int] = frozenset()
            return Value(f"tl.full([{', '.join(map(block, sizes))}], 0.0, tl.float32) + {text}", sizes, zero, x.wild)
        if len(x.sizes) < len(sizes):
            x = Value(f"{text}[None, :]", ("1", *x.sizes), frozenset(a + 1 for a in x.zero), x.wild)
        zero = frozenset(a for a in x.zero if x.sizes[a] == sizes[a])
        return Value(f"tl.broadcast_to({x.f32}, [{', '.join(map(block, sizes))}])", sizes, zero, x.wild)

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
        zero = frozenset(({0} if 0 in a.zero else set()) | ({1} if 1 in b.zero else set()))
        if node in self.flipped:
            a, b = turned(b), turned(a)
            zero = frozenset(1 - axis for axis in zero)
        value = self.let(node_name(node), Value(f"mm({a.text}, {b.text}, DOT, PREC)", (a.sizes[0], b.sizes[1]), zero))
        return turned(value) if node in self.flipped else value

    def flip(self, start: str) -> None:
        """Computes transposed what the state (the placeholder `start`) takes part in, and what is added to that."""
        waiting = [node for node in self.graph.nodes if node.name == start]
        while waiting:
            node = waiting.pop()
            if node in self.flipped:
                continue
            self.flipped.add(node)
            waiting += [
                user for user in node.users
                if (user.target in _BINARY and len(dims(user)) == 2)
                or (user.target is aten.mm.default and user.args[1] is node)
            ]  # fmt: skip
            if node.target in _BINARY:
                waiting += [
                    x for x in node.all_input_nodes
                    if (x.target in _BINARY or x.target is aten.mm.default) and dims(x) == dims(node)
                ]  # fmt: skip

    def _t(self, node: Any) -> Value:
        x = self.values[node.args[0]]
        if len(x.sizes) < 2:
            return x
        return turned(x)

    def _unsqueeze(self, node: Any) -> Value:
        x, at = self.values[node.args[0]], node.args[1] % len(dims(node))
        if len(dims(node)) > 2:
            raise NotEmittable("tiles of three axes are not there yet")
        if not x.sizes:
            return replace(x, text=x.f32, raw=False)
        text = f"{inner(x.f32)}[{'None, :' if at == 0 else ':, None'}]"
        sizes = ("1", *x.sizes) if at == 0 else (*x.sizes, "1")
        return Value(text, sizes, frozenset(a + 1 - at for a in x.zero), x.wild)

    def _squeeze(self, node: Any) -> Value:
        x, want = self.values[node.args[0]], dims(node)
        if len(x.sizes) <= len(want):
            return x
        gone = [axis for axis, s in enumerate(x.sizes) if s == "1"]
        if len(x.sizes) - len(gone) != len([s for s in want if s != "1"]):
            raise NotEmittable(f"{node.target} from {x.sizes} to {want} is not there yet")
        text, sizes, zero = x.f32, x.sizes, x.zero
        for axis in reversed(gone[len(gone) - (len(x.sizes) - len(want)) :]):
            added = "[None, :]" if axis == 0 else "[:, None]"
            text = text.removesuffix(added) if text.endswith(added) else f"tl.sum({text}, axis={axis})"
            zero = frozenset(a - (a > axis) for a in zero if a != axis)
            sizes = sizes[:axis] + sizes[axis + 1 :]
        return Value(text, sizes, zero, x.wild)

    def _view(self, node: Any) -> Value:
        have, want = dims(node.args[0]), dims(node)
        if [s for s in have if s != "1"] != [s for s in want if s != "1"]:
            raise NotEmittable(f"reshaping {have} to {want} is not there yet")
        if have == want:
            return self.values[node.args[0]]
        if len(have) > len(want):
            return self._squeeze(node)
        x = self.values[node.args[0]]
        if len(want) != 2 or len(x.sizes) != 1:
            return x
        return Value(f"{inner(x.f32)}[{'None, :' if want[0] == '1' else ':, None'}]", want,
                     frozenset({1} if want[0] == "1" else {0}) if x.zero else frozenset(), x.wild)  # fmt: skip

    def _sum(self, node: Any) -> Value:
        source = node.args[0]
        have = dims(source)
        axes = node.args[1] if len(node.args) > 1 and node.args[1] else list(range(len(have)))
        axes = sorted({a % len(have) for a in axes}) if have else []
        keep = len(node.args) > 2 and node.args[2]
        known = self._last_gate(node, axes, keep)
        if known is not None:
            return known
        x = self.full(self.values[source], have)
        for axis in axes:
            x = self.masked(x, axis)
        text, zero, sizes = x.f32, x.zero, list(x.sizes)
        for axis in reversed(axes):
            self.contracted.add(have[axis])
            if sizes[axis] == "1":
                text = f"tl.sum({text}, axis={axis})"
            else:
                text = f"tl.sum({text}, axis={axis})"
            del sizes[axis]
            zero = frozenset(a - (a > axis) for a in zero if a != axis)
        x = self.let(node_name(node), Value(text, tuple(sizes), zero, x.wild))
        if keep and sizes and len(have) == 2:
            first = axes[0] == 0
            return Value(f"{x.text}[{'None, :' if first else ':, None'}]", ("1", *sizes) if first else (*sizes, "1"),
                         frozenset(a + first for a in zero), x.wild)  # fmt: skip
        return x

    def _last_gate(self, node: Any, axes: list[int], keep: bool) -> Value | None:
        """The sum over a chunk whose running sum is kept in memory: its last row."""
        x = node.args[0]
        if axes != [0] or keep or node.meta.get("last") not in self.memory:
            return None
        at, sizes = self.memory[node.meta["last"]], dims(x)[1:]
        if not sizes:
            return self.let(node_name(node), Value(f"tl.load({at} + C - 1)", ()))
        size = sizes[0]
        text = f"tl.load({at} + (C - 1) * {size} + at_{size}, mask=at_{size} < {size}, other=0.0)"
        return self.let(node_name(node), Value(text, sizes, frozenset({0})))

    def _cumsum(self, node: Any) -> Value:
        reverse = node.target is reverse_cumsum
        axis = node.args[1] % len(dims(node))
        x = self.full(self.values[node.args[0]], dims(node))
        self.contracted.add(x.sizes[axis])
        x = self.masked(x, axis)  # also forward: the sum stays as it is past the chunk's length
        text = f"tl.cumsum({x.f32}, axis={axis}{', reverse=True' if reverse else ''})"
        return self.let(node_name(node), Value(text, x.sizes, x.zero - {axis}, x.wild))

    def _select(self, node: Any) -> Value:
        source, axis, index = node.args
        have = dims(source)
        axis %= len(have)
        self.contracted.add(have[axis])
        x = self.full(self.values[source], have)
        at = index_text(index, have[axis])
        text = f"{'row_of' if axis == 0 else 'col_of'}({x.f32}, {at})"
        zero = frozenset(a - (a > axis) for a in x.zero if a != axis)
        return self.let(node_name(node), Value(text, have[:axis] + have[axis + 1 :], zero, x.wild))

    def _select_backward(self, node: Any) -> Value:
        grad, _, axis, index = node.args
        want = dims(node)
        axis %= len(want)
        x = self.full(self.values[grad], dims(grad))
        at = index_text(index, want[axis])
        if not x.sizes:
            text = f"tl.where(tl.arange(0, {block(want[0])}) == {at}, {x.f32}, 0.0)"
        else:
            text = f"{'only_row' if axis == 0 else 'only_col'}({x.f32}, {at}, {block(want[axis])})"
        return self.let(
            node_name(node), Value(text, want, frozenset({axis}) | frozenset(a + (a >= axis) for a in x.zero))
        )

    def _tril(self, node: Any) -> Value:
        sizes = dims(node)
        x = self.values[node.args[0]]
        diagonal = node.args[1] if len(node.args) > 1 else 0
        C, D = block(sizes[0]), block(sizes[1])
        mask = (
            f"below({C}, {D}, {diagonal})" if node.target is aten.tril.default else f"~below({C}, {D}, {diagonal - 1})"
        )
        if node.meta["val"].dtype == torch.bool:
            everywhere = node.args[0].target is aten.full.default and node.args[0].meta["fill"]
            return self.let(node_name(node), Value(mask if everywhere else f"{mask} & ({x.text})", sizes))
        x = self.full(x, sizes)
        return self.let(node_name(node), Value(f"tl.where({mask}, {x.f32}, 0.0)", sizes, x.zero, x.wild))

    def _where(self, node: Any) -> Value:
        if node.target is aten.where.self:
            mask, yes, no = node.args
        else:
            no, mask, yes = node.args
        sizes = dims(node)
        m, y, n = (self._arg(x, sizes) for x in (mask, yes, no))
        shape = broadcast(Value("", broadcast(m, y)), n)
        zero = frozenset(a for a in range(len(shape)) if zero_at(y, a) and zero_at(n, a))
        return self.let(
            node_name(node), Value(f"tl.where({m.text}, {y.text}, {n.text})", shape, zero, y.wild or n.wild)
        )

    def _pow(self, node: Any) -> Value:
        x, p = self._arg(node.args[0], dims(node)), node.args[1]
        if isinstance(p, int) and 0 < p <= 4:
            return self.let(node_name(node), Value(" * ".join([inner(x.text)] * p), x.sizes, x.zero, x.wild))
        if p == 1:
            return x
        if isinstance(p, float) and p in (2.0, 3.0):
            return self.let(node_name(node), Value(" * ".join([inner(x.text)] * int(p)), x.sizes, x.zero, x.wild))
        if p == 0.5:
            return self.let(node_name(node), Value(f"tl.sqrt({x.text})", x.sizes, x.zero, x.wild))
        if p in (-0.5, -1, -1.0):
            text = f"tl.rsqrt({x.text})" if p == -0.5 else f"1.0 / {inner(x.text)}"
            return self.let(node_name(node), Value(text, x.sizes, frozenset(), True))
        raise NotEmittable(f"the power {p} is not there yet")

    def _threshold_backward(self, node: Any) -> Value:
        """The gradient of relu: grad where its input is above the threshold."""
        sizes = dims(node)
        grad, x = (self._arg(a, sizes) for a in node.args[:2])
        shape = broadcast(grad, x)
        text = f"tl.where({x.text} > {number(node.args[2])}, {grad.text}, 0.0)"
        return self.let(node_name(node), Value(text, shape, grad.zero if grad.sizes == shape else frozenset()))

    def _rsub(self, node: Any) -> Value:
        x = self._arg(node.args[0], dims(node))
        return self.let(
            node_name(node), Value(f"{number(node.args[1])} - {inner(x.text)}", x.sizes, frozenset(), x.wild)
        )

    def _eye(self, node: Any) -> Value:
        sizes = dims(node)
        return self.let(node_name(node), Value(f"eye({block(sizes[0])}, {block(sizes[1])})", sizes))

    def _expand(self, node: Any) -> Value:
        x, want = self.values[node.args[0]], dims(node)
        if x.sizes and len(x.sizes) < len(want):
            return Value(f"{x.f32}[None, :]", ("1", *x.sizes), frozenset(a + 1 for a in x.zero), x.wild)
        return x


def node_name(node: Any) -> str:
    """A variable for a node, with a number always, so that it hides no function."""
    return node.name if node.name[-1].isdigit() else f"{node.name}_0"


_ZERO_PRESERVING = _PRODUCTS | {
    aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.div.Scalar, aten.maximum.default, aten.minimum.default,
}  # fmt: skip

_IN_BRANCH = {*_BINARY, *_UNARY, aten.tril.default, aten.triu.default, aten.where.self, aten.masked_fill.Scalar}


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
    aten.select.int: Emitter._select,
    aten.select_backward.default: Emitter._select_backward,
    aten.tril.default: Emitter._tril,
    aten.triu.default: Emitter._tril,
    aten.where.self: Emitter._where,
    aten.masked_fill.Scalar: Emitter._where,
    aten.pow.Tensor_Scalar: Emitter._pow,
    aten.threshold_backward.default: Emitter._threshold_backward,
    aten.rsub.Scalar: Emitter._rsub,
    aten.eye.default: Emitter._eye,
    aten.expand.default: Emitter._expand,
}
