"""Stage 1: each of the three functions becomes a torch.fx graph, with the line of the user's file at every node.

Casts among floating types are dropped: states, and what is added up into them, stay in the accumulation dtype, and
emission decides what a matrix product reads; casts of masks become `to_floating`. Exponents whose exponential is
multiplied by zeros above the diagonal are masked before it, since there e^d may overflow and inf * 0 is NaN.
"""

from __future__ import annotations

import inspect
import linecache
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

import torch
from torch.fx import Graph, GraphModule, Node

from flexsp.compiler.frontend.einsum import expand_einsum
from flexsp.compiler.frontend.primitives import (
    cache_result,
    decayed_scores,
    decayed_sums,
    identity,
    joined,
    matmul_out_fp32,
    part_of,
    primitive,
    to_floating,
    unit_lower_inverse,
)  # fmt: skip
from flexsp.exceptions import CompileError

__all__ = ["Traced", "location", "named", "needed_by", "trace", "user_line"]

PRIMITIVES = (
    cache_result, decayed_scores, decayed_sums, identity, joined, matmul_out_fp32, part_of, to_floating,
    unit_lower_inverse,
)  # fmt: skip
_TO_FLOATING = {"float", "double", "half", "bfloat16"}
_CASTS = {"to", "type", "type_as", "bool"} | _TO_FLOATING
_COMPARISONS = {
    "and_", "eq", "ge", "gt", "invert", "le", "logical_and", "logical_not", "logical_or", "lt", "ne", "or_",
}  # fmt: skip
_NAMES = {
    "abs", "add", "addcmul", "amax", "amin", "and_", "bmm", "cat", "clamp", "clamp_max", "clamp_min", "contiguous",
    "cos", "cumprod", "cumsum", "diag", "diagonal", "dim", "div", "dot", "einsum", "elu", "eq", "erf", "exp", "exp2",
    "expand", "expand_as", "expm1", "flatten", "flip", "floordiv", "ge", "gelu", "getattr", "getitem", "gt", "inverse",
    "invert", "le", "leaky_relu", "log", "log1p", "log2", "log_sigmoid", "log_softmax", "logical_and",
    "logical_not", "logical_or", "logsigmoid", "logsumexp", "lt", "masked_fill", "matmul", "maximum", "mean", "minimum",
    "mm", "mul", "mv", "ne", "neg", "norm", "normalize", "ones_like", "or_", "outer", "permute", "pow", "prod",
    "reciprocal", "relu", "reshape", "rsqrt", "rsub", "sigmoid", "sign", "silu", "sin", "size", "softmax", "softplus",
    "sqrt", "square", "squeeze", "stack", "sub", "sum", "t", "tanh", "transpose", "tril", "triu", "truediv", "unbind",
    "unsqueeze", "vector_norm", "view", "where", "zeros_like",
} | _CASTS  # fmt: skip


@dataclass(frozen=True)
class Traced:
    """One function: `module(**arguments)` returns (result, *cached)."""

    name: str
    arguments: tuple[str, ...]
    cached: tuple[str, ...]
    module: GraphModule

    @property
    def graph(self) -> Graph:
        return self.module.graph

    @property
    def line(self) -> str:
        """Where the result is computed, as `location` says it."""
        called = [
            node for node in self.graph.nodes
            if node.op == "call_function" and "line" in node.meta and node.target is not joined
        ]  # fmt: skip
        return location(called[-1]) if called else "an unknown line"


_SKIPPED = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


class _Tracer(torch.fx.Tracer):
    """Keeps the user's line with every node."""

    def create_node(self, *args: Any, **kwargs: Any) -> Node:
        node = super().create_node(*args, **kwargs)
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
            frame = frame.f_back
        file, line = frame.f_code.co_filename, frame.f_lineno
        node.meta["grad"] = torch.is_grad_enabled()
        node.meta["line"] = f"{file}:{line} ({linecache.getline(file, line).strip()})"
        return node


def location(node: Node) -> str:
    """ "FILE:LINE (source)" of the user's line behind a node."""
    return node.meta.get("line", "an unknown line")


def named(node: Node) -> str:
    """Name of the function or method that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def needed_by(nodes: Iterable[Any], stop: Collection[Any] = ()) -> set[Any]:
    """These nodes and all that they are computed from, but for what those in `stop` are computed from."""
    seen: set[Any] = set()
    waiting = [x for x in nodes if isinstance(x, Node)]
    while waiting:
        at = waiting.pop()
        if at not in seen:
            seen.add(at)
            waiting += at.all_input_nodes if at not in stop else []
    return seen


def trace(
    function: Callable[..., torch.Tensor], role: str, known: Collection[str] | None = None,
    numbers: Collection[str] = (),
) -> Traced:  # fmt: skip
    """Traces one function of a variant, checks its operators and applies the rewrites above.

    Args:
        function: a function, method, partial or object that can be called.
        role: "chunk_mode", "decay_mode" or "merge_mode".
        known: names that a call can give; other arguments keep their defaults. None: all.
        numbers: those of the names that are no tensors.

    Raises:
        CompileError: data-dependent control flow, mutation, or an operator that no kernel can be made of.
    """
    name = _name(function, role)
    plain, arguments = _plain(function, role, name, known)
    graph = _graph(plain, role, name)
    _expand_splits(graph, role, name)
    for node in graph.nodes:
        node.type = None  # an annotation may be text that means nothing elsewhere
        _positional(node)
        _check(node, role, name)
    cached = _take_cached(graph, role, name)
    _replace_casts(graph, role, name, numbers)
    _expand_einsums(graph)
    _mask_exponents(graph)
    _triangular_inverses(graph, role, name)
    graph.eliminate_dead_code()
    graph.lint()
    return Traced(name, arguments, tuple(cached), GraphModule(torch.nn.Module(), graph))


def _name(function: Any, role: str) -> str:
    inner = getattr(function, "func", function)
    found = getattr(inner, "__name__", None)
    return found if isinstance(found, str) else type(inner).__name__ or role


def _plain(
    function: Any, role: str, name: str, known: Collection[str] | None
) -> tuple[Callable[..., torch.Tensor], tuple[str, ...]]:
    """What the tracer can read, and its arguments: those that a call gives."""
    if isinstance(function, torch.nn.Module):
        if any(True for _ in function.parameters()) or any(True for _ in function.buffers()):
            raise CompileError(role, name, "is a module with tensors of its own; give them as inputs of input_meta")
        function = function.forward
    try:
        given = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise CompileError(role, name, f"expected a Python function, got {function!r}") from error
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in given.values()):
        raise CompileError(role, name, "takes *args or **kwargs; name every argument")
    kept = [n for n, p in given.items() if known is None or n in known or p.default is p.empty]
    if isinstance(function, FunctionType) and len(kept) == len(given):
        return function, tuple(kept)
    passed = ", ".join(n if given[n].kind is inspect.Parameter.POSITIONAL_ONLY else f"{n}={n}" for n in kept)
    return eval(f"lambda {', '.join(kept)}: _function({passed})", {"_function": function}), tuple(kept)


def _graph(function: Callable[..., torch.Tensor], role: str, name: str) -> Graph:
    try:
        with torch.enable_grad():
            return _Tracer().trace(function)
    except torch.fx.proxy.TraceError as error:
        text = f"control flow depends on a tensor's value or size; use torch.where, or a Python constant ({error})"
        raise CompileError(role, name, text) from error
    except Exception as error:
        if isinstance(error, TypeError) and "item assignment" in str(error):
            raise CompileError(role, name, "assigns to part of a tensor; build it with torch.where or cat") from error
        line = user_line(error, (*_SKIPPED, "<string>")) or "an unknown line"
        text = (
            f"cannot be traced at {line}: {type(error).__name__}: {first_line(error)}; values and sizes of "
            "tensors are not known yet, so make them with ones_like, zeros_like or identity, and no loop over a size"
        )
        raise CompileError(role, name, text) from error


def first_line(error: Exception) -> str:
    """The message, without the lists of overloads and the traces that some releases of torch append."""
    return (str(error).splitlines() or [""])[0]


def user_line(error: Exception, skipped: tuple[str, ...]) -> str:
    """ "FILE:LINE (source)" of the innermost line that raised in none of the `skipped` folders and files, or ""."""
    at, found = error.__traceback__, ""
    while at is not None:
        file = at.tb_frame.f_code.co_filename
        if not file.startswith(skipped):
            found = f"{file}:{at.tb_lineno} ({linecache.getline(file, at.tb_lineno).strip()})"
        at = at.tb_next
    return found


def _calls(node: Any) -> bool:
    return isinstance(node, Node) and node.op in ("call_method", "call_function")


def _is(node: Any, *names: str) -> bool:
    return _calls(node) and named(node) in names


def _positional(node: Node) -> None:
    """torch.exp(input=d) as torch.exp(d), x.tril(diagonal=-1) as x.tril(-1)."""
    if not _calls(node) or node.target in PRIMITIVES:
        return
    for at, keys in enumerate((("input",), ("other", "mat2", "diagonal") if _is(node, *_BINARY) else ())):
        for key in keys:
            if key in node.kwargs and len(node.args) == at:
                node.args = (*node.args, node.kwargs[key])
                node.kwargs = {name: x for name, x in node.kwargs.items() if name != key}


_BINARY = {"add", "div", "matmul", "mm", "mul", "sub", "tril", "triu", "true_divide"} | _COMPARISONS


def _check(node: Node, role: str, name: str) -> None:
    at = location(node)
    if node.op in ("placeholder", "output"):
        return
    if node.op == "get_attr":
        user = next(iter(node.users), node)
        raise CompileError(
            role, name, f"uses a tensor that is no argument at {location(user)}; give it as an input of input_meta"
        )
    if not node.meta.get("grad", True):
        raise CompileError(role, name, f"computes at {at} without gradients; every input has one")
    what = named(node)
    if what in ("setitem", "iadd", "isub", "imul") or (what.endswith("_") and what not in _NAMES and what[-2:] != "__"):
        raise CompileError(role, name, f"{what} changes a tensor in place at {at}; use the form that returns a new one")
    if node.target in PRIMITIVES or what in _NAMES:
        return
    known = ", ".join(sorted(_NAMES))
    raise CompileError(role, name, f"operator {what!r} at {at} is not supported; supported are {known}")


def _expand_einsums(graph: Graph) -> None:
    for node in list(graph.nodes):
        new = expand_einsum(node) if _is(node, "einsum") else None
        if new is not None:
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def _expand_splits(graph: Graph, role: str, name: str) -> None:
    """The parts of chunk and split as slices."""
    for node in list(graph.nodes):
        if not _is(node, "chunk", "split"):
            continue
        keys = ("input", "chunks" if named(node) == "chunk" else "split_size_or_sections", "dim")
        given = {"dim": 0, **dict(zip(keys, node.args, strict=False)), **node.kwargs}
        x, parts, dim = given["input"], given.get(keys[1], given.get("split_size")), given["dim"]
        whole = isinstance(parts, int) or (isinstance(parts, (list, tuple)) and all(isinstance(n, int) for n in parts))
        if not whole or not isinstance(dim, int) or not all(_is(user, "getitem") for user in node.users):
            text = f"{named(node)} at {location(node)}: expected numbers for parts and axis, and each part by itself"
            raise CompileError(role, name, text)
        for user in list(node.users):
            with graph.inserting_before(user):
                user.args = (x, _part(graph, named(node), x, parts, dim, user.args[1]))
        graph.erase_node(node)


def _part(graph: Graph, what: str, x: Node, parts: Any, dim: int, at: Any) -> tuple[Any, ...]:
    """The index of part ``at`` of x."""
    start: Any
    if isinstance(parts, int) and what == "split":
        start, stop = at * parts, (at + 1) * parts
    elif isinstance(parts, int):
        size = graph.call_method("size", (x, dim))
        each = graph.call_function(operator.floordiv, (graph.call_function(operator.add, (size, parts - 1)), parts))
        start, stop = (graph.call_function(operator.mul, (each, n)) for n in (at, at + 1))
    else:
        start, stop = sum(parts[:at]), sum(parts[: at + 1])
    index = slice(start, stop)
    return (*[slice(None)] * dim, index) if dim >= 0 else (Ellipsis, index, *[slice(None)] * (-dim - 1))


def _take_cached(graph: Graph, role: str, name: str) -> list[str]:
    """Cached values become further results; returns their names."""
    output = next(node for node in graph.nodes if node.op == "output")
    results: Any = output.args[0]
    if not isinstance(results, Node):
        raise CompileError(role, name, f"expected one tensor as result, got {results!r}")
    found: dict[str, Node] = {}
    for node in list(graph.nodes):
        if node.target is not cache_result:
            continue
        given = dict(zip(("x", "name"), node.args, strict=False)) | node.kwargs
        value, label = given["x"], given["name"]
        if not isinstance(value, Node):
            raise CompileError(role, name, f"cache_result at {location(node)} takes a tensor, got {value!r}")
        if not isinstance(label, str) or not label.isidentifier() or label in found:
            raise CompileError(role, name, f"cache_result at {location(node)} needs a name of its own, got {label!r}")
        found[label] = value
        node.replace_all_uses_with(value)
        graph.erase_node(node)
    output.args = ((output.args[0], *found.values()),)
    return list(found)


# Casts ----------------------------------------------------------------------------------------------------------------


def _replace_casts(graph: Graph, role: str, name: str, numbers: Collection[str]) -> None:
    like = next((x for x in graph.nodes if x.op == "placeholder" and x.target not in numbers), None)
    for node in list(graph.nodes):
        if node.op == "call_method" and node.target in _CASTS:
            value, wanted = node.args[0], _wanted(node, role, name, numbers)
            if wanted == "bool":
                node.target, node.args, node.kwargs = "to", (value, torch.bool), {}
                continue
            if wanted == "floating" and not _floating(value, numbers):
                value = _call_before(node, to_floating, (value, like))
            node.replace_all_uses_with(value)
            graph.erase_node(node)
        elif _calls(node) and _kind(node.kwargs.get("dtype"), node, role, name, numbers) == "floating":
            node.kwargs = {key: x for key, x in node.kwargs.items() if key != "dtype"}
            if not _floating(node.args[0], numbers):
                node.args = (_call_before(node, to_floating, (node.args[0], like)), *node.args[1:])


def _wanted(node: Node, role: str, name: str, numbers: Collection[str]) -> Literal["floating", "bool", "same"]:
    """The result of a cast: a floating tensor, a mask, or, for a cast to a device, its operand."""
    if node.target in _TO_FLOATING or node.target == "bool":
        return "bool" if node.target == "bool" else "floating"
    kinds = [_kind(x, node, role, name, numbers) for x in (*node.args[1:], *node.kwargs.values())]
    return next((kind for kind in kinds if kind != "same"), "same")


def _kind(x: Any, node: Node, role: str, name: str, numbers: Collection[str]) -> Literal["floating", "bool", "same"]:
    """The dtype or device that one argument of a cast names."""
    if isinstance(x, str) and "Tensor" in x:
        x = {"Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16}.get(
            x.split(".")[-1].removesuffix("Tensor"), torch.bool if "Bool" in x else torch.int64
        )
    if isinstance(x, Node):
        source = x.args[0] if _is(x, "getattr") else x
        if _is(x, "getattr") and x.args[1] != "dtype":
            return "same"
        return "floating" if _floating(source, numbers) else "bool"
    if not isinstance(x, torch.dtype):
        return "same"
    if not x.is_floating_point and x is not torch.bool:
        raise CompileError(
            role, name, f"casts to {x} at {location(node)}; tensors are floating, or masks, so that kernels can be made"
        )
    return "floating" if x.is_floating_point else "bool"


def _floating(node: Any, numbers: Collection[str]) -> bool:
    """Whether the graph shows that a value is floating for all inputs."""
    if not isinstance(node, Node):
        return isinstance(node, (list, tuple)) and any(_floating(x, numbers) for x in node)
    if node.op == "placeholder":
        return node.target not in numbers
    if not _calls(node) or _is(node, *_COMPARISONS, "size", "dim", "to"):
        return False
    if node.target is to_floating:
        return True
    sources = list(node.args)
    if _is(node, "masked_fill", "expand_as", "getattr"):
        sources = sources[:1]
    if _is(node, "where"):
        sources = sources[1:]
    return any(_floating(x, numbers) for x in (*sources, *node.kwargs.values()))


def _call_before(node: Node, function: Callable[..., Any], args: tuple[Any, ...]) -> Node:
    with node.graph.inserting_before(node):
        new = node.graph.call_function(function, args)
    new.meta = dict(node.meta)
    return new


# Exponents ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Mask:
    """Where a product is zero: above a diagonal of `like` (None: of the product itself), or where `mask` says."""

    kind: Literal["tril", "kept", "filled"]
    diagonal: int = 0
    like: Node | None = None
    factors: tuple[Node, ...] = ()
    mask: Node | None = None

    @property
    def nodes(self) -> list[Node]:
        return [x for x in (self.like, self.mask, *self.factors) if x is not None]


def _diagonal(node: Node) -> Any:
    return node.args[1] if len(node.args) > 1 else node.kwargs.get("diagonal", 0)


def _is_zero(x: Any) -> bool:
    return (isinstance(x, (int, float)) and x == 0) or _is(x, "zeros_like")


def _arguments(node: Node, *keys: str) -> list[Any]:
    given = dict(zip(keys, node.args, strict=False)) | node.kwargs
    return [given.get(key) for key in keys]


def _selects(node: Node) -> tuple[Node | None, _Mask] | None:
    """(value, mask) of where(mask, value, 0), where(mask, 0, value) and masked_fill(value, mask, 0)."""
    if _is(node, "where"):
        mask, x, y = _arguments(node, "condition", "input", "other")
        if node.op == "call_method":  # x.where(mask, y)
            x, mask, y = node.args if len(node.args) == 3 else (None, None, None)
        if isinstance(mask, Node) and _is_zero(y):
            return x, _Mask("kept", mask=mask)
        if isinstance(mask, Node) and _is_zero(x):
            return y, _Mask("filled", mask=mask)
    if _is(node, "masked_fill"):
        value, mask, fill = _arguments(node, "input", "mask", "value")
        if isinstance(mask, Node) and _is_zero(fill):
            return value, _Mask("filled", mask=mask)
    return None


def _zeros(node: Any) -> _Mask | None:
    """Where the graph shows that a factor is zero."""
    if not _calls(node):
        return None
    if _is(node, "tril") and isinstance(_diagonal(node), int):
        return _Mask("tril", _diagonal(node), like=node)
    factor = node.args[0] if node.target is to_floating else node
    if _is(factor, "to", *_COMPARISONS):  # casts that are left make masks
        return _Mask("kept", mask=factor)
    selected = _selects(node)
    if selected is not None:
        return selected[1]
    through = node.args if _is(node, "mul") else node.args[:1] if _is(node, "neg", "div", "truediv") else ()
    return next((found for x in through if (found := _zeros(x)) is not None), None)


def _zeroed(value: Node, user: Node, factors: tuple[Node, ...]) -> _Mask | None:
    """Where the result of `user` is zero, if the graph shows it and `user` is the only user of `value`."""
    if _is(user, "tril") and isinstance(_diagonal(user), int):
        return _Mask("tril", _diagonal(user), factors=factors)
    selected = _selects(user)
    if selected is not None:
        return selected[1] if selected[0] is value and selected[1].mask is not value else None
    others = [x for x in user.args if x is not value]
    if _is(user, "mul"):
        found = next((mask for x in others if (mask := _zeros(x)) is not None), None)
        if found is not None:
            return found
    elif not (_is(user, "neg") or (_is(user, "div", "truediv") and user.args[0] is value)):
        return None
    more = (*factors, *(x for x in others if isinstance(x, Node)))
    masks = {_zeroed(user, further, more) for further in user.users}
    return masks.pop() if len(masks) == 1 else None


def _mask_exponents(graph: Graph) -> None:
    for node in list(graph.nodes):
        if not _is(node, "exp", "exp2"):
            continue
        for user in list(node.users):
            mask = _zeroed(node, user, ())
            if mask is None or user in needed_by(mask.nodes):
                continue
            if mask.kind == "tril":
                args = (node.args[0], mask.diagonal, mask.like, mask.factors)
                masked = _call_before(user, _masked_exponent, args)
            else:
                masked = _call_before(user, _selected_exponent, (node.args[0], mask.mask, mask.kind == "kept"))
            with graph.inserting_after(masked):
                exponential = graph.create_node(node.op, node.target, (masked, *node.args[1:]), node.kwargs)
            exponential.meta = dict(node.meta)
            user.replace_input_with(node, exponential)
    _sort(graph)


def _sort(graph: Graph) -> None:
    """Moves nodes behind the nodes that they read, and keeps the order otherwise."""
    placed: set[Node] = set()

    def ahead(node: Node) -> Iterator[Node]:
        for x in node.all_input_nodes:
            if x not in placed:
                yield from ahead(x)
        placed.add(node)
        yield node

    order = [x for node in list(graph.nodes) if node not in placed for x in ahead(node)]
    for before, after in zip(order, order[1:], strict=False):
        before.append(after)


@primitive
def _masked_exponent(
    d: torch.Tensor, diagonal: int, like: torch.Tensor | None = None, factors: tuple[Any, ...] = ()
) -> torch.Tensor:
    """d where tril keeps it, -inf elsewhere: if d is as large as what tril acts on, `like` or d with `factors`."""
    shapes = [x.shape for x in factors if isinstance(x, torch.Tensor)]
    zeroed = torch.broadcast_shapes(d.shape, *shapes) if like is None else like.shape
    if d.dim() < 2 or d.shape[-2:] != zeroed[-2:]:
        return d
    keep = torch.ones(d.shape[-2:], dtype=torch.bool, device=d.device).tril(diagonal)
    return d.masked_fill(~keep, float("-inf"))


@primitive
def _selected_exponent(d: torch.Tensor, mask: torch.Tensor, kept: bool) -> torch.Tensor:
    """d where the mask keeps it (where it does not fill), -inf elsewhere, if d is as large as the mask."""
    if torch.broadcast_shapes(d.shape, mask.shape) != d.shape:
        return d
    return d.masked_fill(~mask if kept else mask, float("-inf"))


# Inverses -------------------------------------------------------------------------------------------------------------


def _triangular_inverses(graph: Graph, role: str, name: str) -> None:
    for node in list(graph.nodes):
        if not _is(node, "inverse"):
            continue
        argument = node.args[0]
        if not (_is(argument, "add", "sub") and _is_unit_lower(argument)):
            text = (
                f"inverse at {location(node)} is of a matrix that is not seen to be unit lower "
                "triangular; write (identity(x, n) + y.tril(-1)).inverse() or unit_lower_inverse(...)"
            )
            raise CompileError(role, name, text)
        with graph.inserting_before(node):
            new = graph.call_function(unit_lower_inverse, (argument,))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _is_unit_lower(node: Node) -> bool:
    """Whether the graph shows that a sum or difference is identity(...) and a matrix below the diagonal."""
    if len(node.args) != 2 or node.kwargs:
        return False
    first, second = node.args
    pairs = [(first, second)]
    if named(node) == "add":
        pairs.append((second, first))
    for eye, rest in pairs:
        zeros = _zeros(rest)
        if zeros is not None and zeros.kind == "tril" and zeros.diagonal < 0 and _is(eye, "identity"):
            return True
    return False
