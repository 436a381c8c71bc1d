"""Rewrites of a step's graph that keep its value: they remove aliases and transposes, and move constants to where they
cost least."""

# fx types the arguments of a node as a union of all there can be.
# mypy: disable-error-code="union-attr,index,operator,arg-type,assignment,misc,return-value"
from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from flexsp.compiler.graphs.values import is_state

__all__ = ["DIMS", "cheapen", "common", "dims", "reverse_cumsum", "row_scaled", "simplify"]

aten = torch.ops.aten
DIMS = "flexsp_dims"


def dims(node: Any) -> tuple[str, ...]:
    """Names of a node's sizes: "C", the ConstExprs' names, or numbers. Empty for a number."""
    found: tuple[str, ...] = node.meta.get(DIMS, ())
    return found


def simplify(graph: Graph) -> None:
    """Removes nodes without an effect, and computes each expression once."""
    _free_fills(graph)
    _until_done(graph, _simpler)
    common(graph)


def cheapen(graph: Graph, join: bool) -> None:
    """Rewrites for the graph of one kernel, which depend on the readers of a value.

    `join`: products with a common operand become one. It saves work in walks; the kernels of gradients would hold the
    joined operand, a tile, where each product reads its own from memory.
    """
    _until_done(graph, _cheaper)
    if join:
        _until_done(graph, _joins)
        _until_done(graph, _cheaper)
    _until_done(graph, _simpler)
    common(graph)


def _until_done(graph: Graph, rule: Callable[[Graph, Any], Node | None]) -> None:
    changed = True
    while changed:
        changed = False
        for node in list(graph.nodes):
            if node.op != "call_function" or not node.users:
                continue
            new = rule(graph, node)
            if new is not None:
                node.replace_all_uses_with(new)
                graph.erase_node(node)
                changed = True
        graph.eliminate_dead_code()


_LIKE = {aten.ones_like.default: 1.0, aten.zeros_like.default: 0.0, aten.new_zeros.default: 0.0}


def _free_fills(graph: Graph) -> None:
    """Constants and sizes depend on nothing: their sizes are known by name."""
    for node in graph.nodes:
        if node.target in (aten.full.default, aten.full_like.default):
            node.meta["fill"] = node.args[1]
        if node.target in (*_LIKE, aten.ones.default, aten.zeros.default, aten.full.default, aten.full_like.default):
            node.meta.setdefault("fill", _LIKE.get(node.target, 1.0 if node.target is aten.ones.default else 0.0))
            node.target, node.args, node.kwargs = aten.full.default, (), {}
        elif node.target is aten.scalar_tensor.default:
            node.meta["fill"] = node.args[0]
            node.target, node.args, node.kwargs = aten.full.default, (), {}
        elif node.target is aten.sym_size.int:
            node.meta["sizes"], node.args = (node.meta["size"],), ()
        elif node.target is aten.sym_numel.default:
            node.meta["sizes"], node.args = dims(node.args[0]), ()
        elif node.target is aten.eye.default:
            node.args, node.kwargs = (), {}
    graph.eliminate_dead_code()


_ALIASES = (aten.detach.default, aten.alias.default, aten.clone.default, aten.contiguous.default)
_TRANSPOSES = (aten.t.default, aten.permute.default, aten.transpose.int)


def reverse_cumsum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Running sum from the end."""
    return x.flip(dim).cumsum(dim).flip(dim)


def _simpler(graph: Graph, node: Any) -> Any:
    first = node.args[0] if node.args else None
    if not isinstance(first, Node):
        return None
    if node.target in _ALIASES:
        return first
    if node.target in _TRANSPOSES:
        if node.target is not aten.t.default:
            if not _swaps(node):
                return first if len(dims(node)) < 2 else None
            return _insert(graph, node, aten.t.default, (first,))
        return first.args[0] if first.target is aten.t.default else None
    if node.target is aten.sum.dim_IntList and len(node.args[1]) == 1:
        return _sum_over(graph, node, first)
    if node.target is aten.mm.default and "1" in (*dims(first), *dims(node.args[1])):
        return _thin_product(graph, node)
    if node.target is aten.squeeze.dim and first.target is aten.unsqueeze.default and len(dims(first)) == 2:
        return first.args[0] if node.args[1] % 2 == first.args[1] % 2 else None
    if node.target in _ELEMENTWISE and len(dims(node)) == 2 and "1" in dims(node):
        return _of_vectors(graph, node)
    if node.target in (aten.slice.Tensor, aten.slice_backward.default) and dims(node) == dims(first):
        return first
    if node.target in (aten.exp.default, aten.neg.default) and first.target is aten.unsqueeze.default:
        inner = _insert(graph, node, node.target, (first.args[0],))
        inner.meta = dict(first.args[0].meta)
        return _insert(graph, node, aten.unsqueeze.default, (inner, first.args[1]))
    if _hoists(node):
        return _hoist(graph, node)
    if node.target is aten.flip.default and first.target is aten.cumsum.default:
        inner = first.args[0]
        if inner.target is aten.flip.default and list(inner.args[1]) == list(node.args[1]) == [first.args[1]]:
            return _insert(graph, node, reverse_cumsum, (inner.args[0], first.args[1]))
    last = node.target is aten.select.int and node.args[1:] == (0, -1)
    if last and first.target is aten.cumsum.default and first.args[1] == 0:
        return _insert(graph, node, aten.sum.dim_IntList, (first.args[0], [0]))
    if node.target is aten.mul.Tensor:
        for one, other in ((first, node.args[1]), (node.args[1], first)):
            if _filled(one, 1) and isinstance(other, Node):
                return other if dims(other) == dims(node) else _insert(graph, node, aten.expand.default, (other, []))
    return None


_ELEMENTWISE = {
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.neg.default, aten.exp.default,
    aten.mul.Scalar, aten.add.Scalar, aten.div.Scalar,
}  # fmt: skip


def _hoists(node: Any) -> bool:
    """Whether an elementwise operation reads transposed tiles, and its other operands are as easily transposed."""
    if node.target not in _ELEMENTWISE or len(dims(node)) != 2:
        return False
    nodes = [x for x in node.args if isinstance(x, Node)]
    tiles = [x for x in nodes if x.target is aten.t.default and dims(x) == dims(node)]
    others = [x for x in nodes if x not in tiles]
    return bool(tiles) and all(
        isinstance(x.meta.get("val"), torch.Tensor) and (len(dims(x)) < 1 or x.target is aten.unsqueeze.default)
        for x in others
    )


def _hoist(graph: Graph, node: Any) -> Any:
    """op(x^T, y) = op(x, y^T)^T."""
    args = []
    for x in node.args:
        if not isinstance(x, Node) or not dims(x):
            args.append(x)
        elif x.target is aten.t.default:
            args.append(x.args[0])
        else:
            new = _insert(graph, node, aten.unsqueeze.default, (x.args[0], 1 - x.args[1] % 2))
            new.meta = {"val": x.meta["val"].mT, DIMS: dims(x)[::-1]}
            args.append(new)
    inner = _insert(graph, node, node.target, tuple(args))
    inner.meta = {"val": node.meta["val"].mT, DIMS: dims(node)[::-1]}
    inner.kwargs = node.kwargs
    return _insert(graph, node, aten.t.default, (inner,))


def _sum_over(graph: Graph, node: Any, x: Any) -> Any:
    """Sums without the axis they leave, of tiles as they are."""
    [axis] = node.args[1]
    axis %= len(dims(x))
    if node.args[2:] == (True,) and len(dims(x)) == 2:
        inner = _insert(graph, node, aten.sum.dim_IntList, (x, [axis]))
        inner.meta = {"val": node.meta["val"].squeeze(axis), DIMS: (dims(x)[1 - axis],)}
        return _insert(graph, node, aten.unsqueeze.default, (inner, axis))
    if x.target is aten.t.default:
        return _insert(graph, node, aten.sum.dim_IntList, (x.args[0], [1 - axis]))
    if x.target is aten.unsqueeze.default and x.args[1] % 2 == axis and len(dims(x)) == 2:
        return x.args[0]
    return None


def _of_vectors(graph: Graph, node: Any) -> Any:
    """op(x[:, None], y[:, None]) = op(x, y)[:, None]."""
    nodes = [x for x in node.args if isinstance(x, Node) and dims(x)]
    axes = {x.args[1] % 2 if x.target is aten.unsqueeze.default else None for x in nodes}
    if len(axes) != 1 or axes == {None} or any(len(dims(x)) != 2 for x in nodes):
        return None
    [axis] = axes
    args = tuple(x.args[0] if x in nodes else x for x in node.args)
    inner = _insert(graph, node, node.target, args)
    inner.meta = {"val": node.meta["val"].squeeze(axis), DIMS: tuple(s for s in dims(node) if s != "1")}
    inner.kwargs = node.kwargs
    if len(dims(inner)) != 1:
        graph.erase_node(inner)
        return None
    return _insert(graph, node, aten.unsqueeze.default, (inner, axis))


def _swaps(node: Any) -> bool:
    order = node.args[1] if node.target is aten.permute.default else sorted(n % 2 for n in node.args[1:])
    n = len(dims(node))
    return n == 2 and [d % 2 for d in order] == ([1, 0] if node.target is aten.permute.default else [0, 1])


def _filled(node: Any, value: float) -> bool:
    return isinstance(node, Node) and node.target is aten.full.default and node.meta["fill"] == value


def _insert(graph: Graph, before: Any, target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with graph.inserting_before(before):
        new = graph.call_function(target, args)
    new.meta = dict(before.meta)
    return new


def _thin_product(graph: Graph, node: Any) -> Any:
    """A product with a row or a column as elementwise products, summed up."""
    a, b = node.args
    along, n = dims(b)
    if along == "1":
        return _insert(graph, node, aten.mul.Tensor, (a, b))
    wide, thin, axis = (a, b, 1) if n == "1" else (b, a, 0)
    turned = _insert(graph, node, aten.t.default, (thin,))
    turned.meta = thin.meta | {DIMS: dims(thin)[::-1]}
    product = _insert(graph, node, aten.mul.Tensor, (wide, turned))
    product.meta = node.meta | {DIMS: dims(wide)}
    return _insert(graph, node, aten.sum.dim_IntList, (product, [axis], True))


def _key(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_key(x) for x in value)
    return (type(value).__name__, value)


def common(graph: Graph) -> None:
    """Computes each expression once."""
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in (aten.full.default, aten.eye.default):
            extra = (dims(node), node.meta.get("fill"), node.meta["val"].dtype)
        else:
            extra = (node.meta.get("sizes"),)
        key = (node.target, extra, _key(node.args), _key(sorted(node.kwargs.items(), key=str)))
        other = seen.setdefault(key, node)
        if other is not node:
            node.replace_all_uses_with(other)
            graph.erase_node(node)


# What costs least -----------------------------------------------------------------------------------------------------


def _cheaper(graph: Graph, node: Any) -> Any:
    """Constants, signs and factors of rows leave the operands of products, that loads may feed them as they are; then
    constants go into the smallest tile that they multiply. Masks that another one implies are dropped, and running
    sums that are added become one."""
    if node.target is aten.mm.default:
        return _out_of_product(graph, node)
    if node.target is aten.mul.Tensor and isinstance(node.args[1], (int, float)):
        return _sink(graph, node)
    if node.target is aten.mul.Tensor:
        for x, y in (node.args, node.args[::-1]):
            new = _implied(graph, node, x, y) or _regroup(graph, node, x, y)
            if new is not None:
                return new
    if node.target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs:
        return _signed(graph, node) or _one_running_sum(graph, node)
    if node.target is aten.tril.default and _above(node.args[0]) <= _diagonal(node):
        return node.args[0]
    if node.target is aten.masked_fill.Scalar and node.args[2] == 0 and _above(node.args[0]) <= _masked(node.args[1]):
        return node.args[0]
    return None


def _signed(graph: Graph, node: Any) -> Any:
    """x + (-y) = x - y, (-x) + y = y - x, x - (-y) = x + y."""
    x, y = node.args
    adds = node.target is aten.add.Tensor
    if isinstance(y, Node) and y.target is aten.neg.default:
        return _insert(graph, node, aten.sub.Tensor if adds else aten.add.Tensor, (x, y.args[0]))
    if adds and isinstance(x, Node) and x.target is aten.neg.default and isinstance(y, Node):
        return _insert(graph, node, aten.sub.Tensor, (y, x.args[0]))
    return None


def _one_running_sum(graph: Graph, node: Any) -> Any:
    """cumsum(x) + cumsum(y) = cumsum(x + y), also where something else was added to one of them before."""
    if node.target is not aten.add.Tensor:
        return None
    for one, other in (node.args, node.args[::-1]):
        if not _sums_up(one, node):
            continue
        if _sums_up(other, one):
            return _joined(graph, node, one, other)
        if isinstance(other, Node) and other.target is aten.add.Tensor and len(other.users) == 1 and not other.kwargs:
            for mine, rest in (other.args, other.args[::-1]):
                if _sums_up(mine, one):
                    return _insert(graph, node, aten.add.Tensor, (_joined(graph, node, one, mine), rest))
    return None


def _sums_up(x: Any, like: Any) -> bool:
    """Whether x is a running sum that nothing else reads, of the sizes of `like`, and of its kind if that is one."""
    kinds = (aten.cumsum.default, reverse_cumsum)
    if not isinstance(x, Node) or x.target not in kinds or len(x.users) > 1 or dims(x) != dims(like):
        return False
    return like.target not in kinds or (like.target is x.target and like.args[1] == x.args[1])


def _joined(graph: Graph, before: Any, x: Any, y: Any) -> Any:
    both = _insert(graph, before, aten.add.Tensor, (x.args[0], y.args[0]))
    both.meta = dict(x.args[0].meta)
    return _insert(graph, before, x.target, (both, x.args[1]))


def _joins(graph: Graph, node: Any) -> Any:
    return _one_product(graph, node) if node.target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs else None


def _one_product(graph: Graph, node: Any) -> Any:
    """S - A X + A Y = S + A (Y - X), and so with a common right operand: one product instead of two."""
    terms = _terms(node)
    for one, other in itertools.combinations(terms, 2):
        both = _factored(graph, node, one, other)
        if both is not None:
            rest = [x for x in terms if x not in (one, other)]
            return _total(graph, node, sorted([*rest, both], key=lambda term: -term[0]))
    return None


def _terms(node: Any) -> list[tuple[int, Any]]:
    """(sign, term) of a sum, and of the sums in it that nothing else reads."""
    found: list[tuple[int, Any]] = []
    for sign, x in zip((1, 1 if node.target is aten.add.Tensor else -1), node.args, strict=True):
        inner = isinstance(x, Node) and x.target in (aten.add.Tensor, aten.sub.Tensor) and not x.kwargs
        if inner and len(x.users) == 1 and dims(x) == dims(node):
            found += [(sign, x.args[0]), (sign if x.target is aten.add.Tensor else -sign, x.args[1])]
        else:
            found.append((sign, x))
    return found


def _factored(graph: Graph, before: Any, one: tuple[int, Any], other: tuple[int, Any]) -> tuple[int, Any] | None:
    """Two terms that are products with a common operand, as one."""
    (sign, x), (sign_y, y) = one, other
    for p in (x, y):
        if not isinstance(p, Node) or p.target is not aten.mm.default or len(p.users) > 1 or dims(p) != dims(before):
            return None
    for side in (0, 1):
        common, in_y = x.args[side], y.args[side]
        turned = common.target is aten.t.default and in_y.target is aten.t.default
        if common is not in_y and not (turned and common.args[0] is in_y.args[0]):
            continue
        left, right = (x.args[1 - side], y.args[1 - side])[:: 1 if sign >= sign_y else -1]
        how = aten.add.Tensor if sign == sign_y else aten.sub.Tensor
        inner = _insert(graph, before, how, (left, right))
        inner.meta = dict(left.meta)
        args = (common, inner) if side == 0 else (inner, common)
        return max(sign, sign_y), _insert(graph, before, aten.mm.default, args)
    return None


def _total(graph: Graph, before: Any, terms: list[tuple[int, Any]]) -> Any:
    """The sum of terms, those to add first; there is one, since the first term of a sum is added."""
    total = terms[0][1]
    for sign, x in terms[1:]:
        total = _insert(graph, before, aten.add.Tensor if sign > 0 else aten.sub.Tensor, (total, x))
    return total


def _implied(graph: Graph, node: Any, x: Any, y: Any) -> Any:
    """tril(x) y = x y and (z tril(x)) y = (z x) y where y is zero above the diagonal, and x finite."""

    def implies(low: Any) -> bool:
        triangle = isinstance(low, Node) and low.target is aten.tril.default
        return triangle and _above(y) <= _diagonal(low) and _finite(low.args[0], _above(y))

    if not isinstance(x, Node):
        return None
    if implies(x):
        return _insert(graph, node, aten.mul.Tensor, (x.args[0], y))
    if x.target is aten.mul.Tensor:
        for low, z in (x.args, x.args[::-1]):
            if implies(low):
                inner = _insert(graph, node, aten.mul.Tensor, (low.args[0], z))
                inner.meta = dict(x.meta)
                return _insert(graph, node, aten.mul.Tensor, (inner, y))
    return None


def _regroup(graph: Graph, node: Any, x: Any, y: Any) -> Any:
    """(c x) y = x (c y) for y smaller than x."""
    if not (isinstance(x, Node) and x.target is aten.mul.Tensor and isinstance(y, Node) and _small(y, x)):
        return None
    if not isinstance(x.args[1], (int, float)) or dims(x) != dims(node):
        return None
    scaled = _insert(graph, node, aten.mul.Tensor, (y, x.args[1]))
    scaled.meta = dict(y.meta)
    return _insert(graph, node, aten.mul.Tensor, (x.args[0], scaled))


def _diagonal(node: Any) -> int:
    return node.args[1] if len(node.args) > 1 else 0


def _masked(mask: Any) -> float:
    """The diagonal above which a mask is true, as ~tril(ones) is; -inf if it is not seen to be one."""
    if isinstance(mask, Node) and mask.target in (aten.bitwise_not.default, aten.logical_not.default):
        inner = mask.args[0]
        if isinstance(inner, Node) and inner.target is aten.tril.default and _filled(inner.args[0], 1):
            return _diagonal(inner)
    return float("-inf")


def _above(x: Any) -> float:
    """A diagonal above which x is zero; inf if none is known."""
    if not isinstance(x, Node):
        return float("inf")
    if x.target is aten.tril.default:
        return min(_diagonal(x), _above(x.args[0]))
    if x.target is aten.exp.default:
        inner = x.args[0]
        if isinstance(inner, Node) and inner.target is aten.masked_fill.Scalar and inner.args[2] == float("-inf"):
            found = _masked(inner.args[1])
            return found if found != float("-inf") else float("inf")
    if x.target is aten.masked_fill.Scalar and x.args[2] == 0:
        found = _masked(x.args[1])
        return min(found, _above(x.args[0])) if found != float("-inf") else _above(x.args[0])
    if x.target is aten.mul.Tensor:
        pairs = ((_above(y), other) for y, other in (x.args, x.args[::-1]))
        return min(above if _finite(other, above) else float("inf") for above, other in pairs)
    return _above(x.args[0]) if x.target is aten.neg.default else float("inf")


_KEEPS_FINITE = {
    aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.mul.Tensor, aten.mul.Scalar,
    aten.div.Scalar, aten.neg.default, aten.t.default, aten.unsqueeze.default, aten.expand.default, aten.full.default,
    aten.abs.default, aten.sigmoid.default, aten.tanh.default, aten.sin.default, aten.cos.default, aten.relu.default,
}  # fmt: skip


def _finite(x: Any, diagonal: float) -> bool:
    """Whether x is finite above a diagonal if it is finite on and below it, so that zero times x is zero.

    Products of matrices and factors of rows or columns are no more finite above than below.
    """
    seen: set[Any] = set()
    waiting = [x]
    while waiting:
        at = waiting.pop()
        if not isinstance(at, Node) or at in seen or at.op == "placeholder" or at.target is aten.mm.default:
            continue
        seen.add(at)
        if (diagonal >= 0 and _count(dims(at)) < 2) or _above(at) <= diagonal:
            continue
        if at.target not in _KEEPS_FINITE:
            return False
        waiting += at.args
    return True


def row_scaled(x: Any) -> bool:
    """Whether x is a load times a number or a factor a row."""
    if not isinstance(x, Node) or x.target is not aten.mul.Tensor:
        return False
    loaded, factor = x.args
    small = isinstance(factor, (int, float)) or dims(factor)[1:] in ((), ("1",))
    return isinstance(loaded, Node) and loaded.op == "placeholder" and dims(loaded) == dims(x) and small


def _out_of_product(graph: Graph, node: Any) -> Any:
    """(-X) Y = -(X Y) and X (-Y) = -(X Y); where X and Y are loads, (c X) Y = c (X Y), X (c Y) = c (X Y) and, with r
    [C, 1], (r X) Y = r (X Y)."""
    for side in (0, 1):
        x = node.args[side]
        turned = isinstance(x, Node) and x.target is aten.t.default
        inner = x.args[0] if turned else x
        if isinstance(inner, Node) and inner.target is aten.neg.default:
            return _insert(graph, node, aten.neg.default, (_with_operand(graph, node, side, x, inner.args[0]),))
        if not isinstance(inner, Node) or inner.target is not aten.mul.Tensor:
            continue
        loaded, factor = inner.args
        if not isinstance(loaded, Node) or loaded.op != "placeholder" or is_state(loaded.name):
            continue
        if dims(loaded) != dims(inner):
            continue
        rows = side == 0 and not turned and isinstance(factor, Node) and dims(factor)[1:] == ("1",)
        if isinstance(factor, Node) and dims(factor) and not rows:
            continue
        return _insert(graph, node, aten.mul.Tensor, (_with_operand(graph, node, side, x, loaded), factor))
    return None


def _with_operand(graph: Graph, product: Any, side: int, old: Any, plain: Any) -> Any:
    """The product with another operand, transposed as the old one was."""
    if old.target is aten.t.default:
        plain = _insert(graph, product, aten.t.default, (plain,))
        plain.meta = dict(old.meta)
    args = (plain, product.args[1]) if side == 0 else (product.args[0], plain)
    return _insert(graph, product, aten.mm.default, args)


def _sink(graph: Graph, node: Any) -> Any:
    """c x with c moved into a smaller factor of x."""
    x, c = node.args
    if not isinstance(x, Node) or len(x.users) > 1 or not _takes(x):
        return None
    return _times(graph, node, x, c)


def _takes(x: Any) -> bool:
    """Whether a constant factor of x can move into a smaller factor of x."""
    if not isinstance(x, Node) or len(x.users) > 1:
        return False
    if x.target in (aten.add.Tensor, aten.sub.Tensor) and not x.kwargs:
        return all(_takes(y) for y in x.args)
    if x.target is aten.mul.Tensor:
        return any(_small(y, x) for y in x.args)
    if x.target is aten.mm.default:
        return _is_scores(x.args[0])
    return False


def _small(y: Any, x: Any) -> bool:
    return isinstance(y, (int, float)) or (isinstance(y, Node) and _count(dims(y)) < _count(dims(x)))


def _is_scores(y: Any) -> bool:
    return isinstance(y, Node) and y.target is aten.mul.Tensor and dims(y) == ("C", "C") and len(y.users) == 1


def _count(sizes: tuple[str, ...]) -> int:
    return len([s for s in sizes if s != "1"])


def _times(graph: Graph, before: Any, x: Any, c: float) -> Any:
    if x.target in (aten.add.Tensor, aten.sub.Tensor):
        args = tuple(_times(graph, before, y, c) for y in x.args)
    elif x.target is aten.mm.default:
        scores = _insert(graph, before, aten.mul.Tensor, (x.args[0], c))
        scores.meta = dict(x.args[0].meta)
        args = (scores, x.args[1])
    else:
        small = next(y for y in x.args if _small(y, x))
        other = x.args[1] if x.args[0] is small else x.args[0]
        if isinstance(small, (int, float)):
            args = (other, small * c)
        else:
            scaled = _insert(graph, before, aten.mul.Tensor, (small, c))
            scaled.meta = dict(small.meta)
            args = (other, scaled)
    new = _insert(graph, before, x.target, args)
    new.meta = dict(x.meta)
    return new
