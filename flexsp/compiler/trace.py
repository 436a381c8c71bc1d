"""Stage 1: each of the three functions becomes a torch.fx graph, with the line of the user's file at every node.

Casts among floating types are dropped: states, and what is added up into them, stay in the accumulation dtype, and
emission decides what a matrix product reads. `tril(x) * exp(d)` masks d before the exponential, since above the
diagonal e^d may overflow and inf * 0 is NaN.
"""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from flexsp.compiler.primitives import (
    cache_result,
    decayed_scores,
    identity,
    matmul_out_fp32,
    unit_lower_inverse,
)  # fmt: skip
from flexsp.exceptions import FlexspError

__all__ = ["CompileError", "Traced", "location", "trace"]

PRIMITIVES = (cache_result, decayed_scores, identity, matmul_out_fp32, unit_lower_inverse)
_CASTS = {"to", "type", "float", "double", "half", "bfloat16", "type_as"}
_NAMES = {
    "abs", "add", "amax", "amin", "and_", "bmm", "cat", "clamp", "clamp_max", "clamp_min", "contiguous", "cos",
    "cumsum", "diag", "diagonal", "dim", "div", "elu", "eq", "exp", "exp2", "expand", "expand_as", "flatten", "flip",
    "floordiv", "ge", "getattr", "getitem", "gt", "inverse", "invert", "le", "log", "log1p", "log2", "logical_and",
    "logical_not", "logical_or", "logsigmoid", "lt", "masked_fill", "matmul", "maximum", "mean", "minimum", "mm",
    "mul", "ne", "neg", "norm", "ones_like", "or_", "outer", "permute", "pow", "prod", "reciprocal", "relu",
    "reshape", "rsqrt", "rsub", "sigmoid", "sign", "silu", "sin", "size", "softplus", "sqrt", "square", "squeeze",
    "stack", "sub", "sum", "t", "tanh", "transpose", "tril", "triu", "truediv", "unsqueeze", "view", "where",
    "zeros_like",
} | _CASTS  # fmt: skip


class CompileError(FlexspError, ValueError):
    """One of the three functions cannot be compiled; the message names the function, the line and the remedy."""

    def __init__(self, role: str, name: str, text: str) -> None:
        self.role, self.name, self.text = role, name, text
        super().__init__(f"{role} {name!r}: {text}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.role, self.name, self.text)


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


_SKIPPED = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class _Tracer(torch.fx.Tracer):
    """Keeps the user's line with every node."""

    def create_node(self, *args: Any, **kwargs: Any) -> Node:
        node = super().create_node(*args, **kwargs)
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
            frame = frame.f_back
        file, line = frame.f_code.co_filename, frame.f_lineno
        node.meta["line"] = f"{file}:{line} ({linecache.getline(file, line).strip()})"
        return node


def location(node: Node) -> str:
    """ "FILE:LINE (source)" of the user's line behind a node."""
    return node.meta.get("line", "an unknown line")


def _named(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def trace(function: Callable[..., torch.Tensor], role: str) -> Traced:
    """Traces one function of a variant, checks its operators and applies the rewrites above.

    Raises:
        CompileError: data-dependent control flow, mutation, or an operator that no kernel can be made of.
    """
    name = getattr(function, "__name__", role)
    try:
        graph = _Tracer().trace(function)
    except torch.fx.proxy.TraceError as error:
        raise CompileError(
            role,
            name,
            f"control flow depends on a tensor's value or size; use torch.where, or a Python constant ({error})",
        ) from error
    except TypeError as error:
        if "item assignment" in str(error):
            raise CompileError(role, name, "assigns to part of a tensor; build it with torch.where or cat") from error
        raise
    for node in graph.nodes:
        _check(node, role, name)
    cached = _take_cached(graph, role, name)
    _drop_casts(graph)
    _mask_exponents(graph)
    _triangular_inverses(graph, role, name)
    graph.eliminate_dead_code()
    graph.lint()
    arguments = tuple(inspect.signature(function).parameters)
    return Traced(name, arguments, tuple(cached), GraphModule(torch.nn.Module(), graph))


def _check(node: Node, role: str, name: str) -> None:
    if node.op in ("placeholder", "output", "get_attr"):
        return
    what = _named(node)
    at = location(node)
    if what in ("setitem", "iadd", "isub", "imul") or (what.endswith("_") and what not in _NAMES and what[-2:] != "__"):
        raise CompileError(role, name, f"{what} changes a tensor in place at {at}; use the form that returns a new one")
    if node.target in PRIMITIVES or what in _NAMES:
        return
    known = ", ".join(sorted(_NAMES))
    raise CompileError(role, name, f"operator {what!r} at {at} is not supported; supported are {known}")


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
        named = dict(zip(("x", "name"), node.args, strict=False)) | node.kwargs
        value, label = named["x"], named["name"]
        assert isinstance(value, Node)
        if not isinstance(label, str) or label in found:
            raise CompileError(role, name, f"cache_result at {location(node)} needs a name of its own, got {label!r}")
        found[label] = value
        node.replace_all_uses_with(value)
        graph.erase_node(node)
    output.args = ((output.args[0], *found.values()),)
    return list(found)


def _drop_casts(graph: Graph) -> None:
    for node in list(graph.nodes):
        if node.op == "call_method" and node.target in _CASTS:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _source(node: Any, through: Sequence[str] = ("mul", "neg")) -> Node | None:
    """The tril node that zeroes what is above the diagonal of this value, if one is found."""
    if not isinstance(node, Node) or node.op not in ("call_method", "call_function"):
        return None
    if _named(node) == "tril":
        return node
    if _named(node) in through:
        return next((found for x in node.args if (found := _source(x, through)) is not None), None)
    return None


def _mask_exponents(graph: Graph) -> None:
    for node in list(graph.nodes):
        if _named(node) != "exp" or len(node.users) == 0 or node.op not in ("call_method", "call_function"):
            continue
        masks = []
        for user in node.users:
            others = [x for x in user.args if x is not node]
            masks.append(_source(others[0]) if _named(user) == "mul" and len(others) == 1 else None)
        if any(mask is None for mask in masks):
            continue
        first = masks[0]
        assert first is not None
        diagonal = first.args[1] if len(first.args) > 1 else first.kwargs.get("diagonal", 0)
        if len({str((m.args[1:], m.kwargs)) for m in masks if m is not None}) != 1:
            continue
        exponent = node.args[0]
        with graph.inserting_before(node):
            masked = graph.call_function(_masked_exponent, (exponent, diagonal))
        masked.meta = dict(node.meta)
        node.args = (masked, *node.args[1:])


def _masked_exponent(d: torch.Tensor, diagonal: int) -> torch.Tensor:
    """d where tril keeps it, -inf elsewhere."""
    keep = torch.ones(d.shape[-2:], dtype=torch.bool, device=d.device).tril(diagonal)
    return d.masked_fill(~keep, float("-inf"))


def _triangular_inverses(graph: Graph, role: str, name: str) -> None:
    for node in list(graph.nodes):
        if _named(node) != "inverse" or node.op not in ("call_method", "call_function"):
            continue
        argument = node.args[0]
        if not (isinstance(argument, Node) and _named(argument) in ("add", "sub") and _is_unit_lower(argument)):
            raise CompileError(
                role,
                name,
                f"inverse at {location(node)} is of a matrix that is not seen to be unit lower "
                "triangular; write (identity(x, n) + y.tril(-1)).inverse() or unit_lower_inverse(...)",
            )
        with graph.inserting_before(node):
            new = graph.call_function(unit_lower_inverse, (argument,))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _is_unit_lower(node: Node) -> bool:
    """Whether a sum or difference is seen to be identity(...) and something below the diagonal."""
    first, second = node.args[0], node.args[1]
    pairs = [(first, second)]
    if _named(node) == "add":
        pairs.append((second, first))
    for eye, rest in pairs:
        tril = _source(rest)
        if tril is None or not (isinstance(eye, Node) and eye.target is identity):
            continue
        diagonal = tril.args[1] if len(tril.args) > 1 else tril.kwargs.get("diagonal", 0)
        if isinstance(diagonal, int) and diagonal < 0:
            return True
    return False
