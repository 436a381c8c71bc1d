"""Stage 2: what the three functions do, from their graphs and by running them on small random chunks in float64.

`decay` is classified by how it acts on the state: that decides what ranks exchange. `merge` must be causal.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch.func import jvp
from torch.fx import Node

from flexsp.compiler import primitives
from flexsp.compiler.meta import CHUNK_STATE, STATE, ConstExpr, InputMeta, Part, Size
from flexsp.compiler.primitives import identity, to_floating
from flexsp.compiler.trace import CompileError, Traced, first_line, location, named

__all__ = ["Program", "Transition", "call", "check"]

Transition = Literal["none", "scalar", "vector", "elementwise", "dense", "not affine"]
Tensors = dict[str, torch.Tensor]
Values = dict[str, "torch.Tensor | float"]
_CHUNK = 6
_TOLERANCE = 1e-8
_LARGE = 1e6
_STRONG = 400.0


@dataclass(frozen=True)
class Program:
    """The three traced functions with what was found out about them."""

    meta: InputMeta
    chunk: Traced
    decay: Traced
    merge: Traced
    transition: Transition
    value_sizes: tuple[Size, ...]  # of one token's output; a number where it is the size of no input
    parts: tuple[Part, ...] = ()  # of the state besides the first, which has its sizes in `meta`

    def call_text(self, dtype: torch.dtype, packed: bool) -> str:
        """What ranks tell each other of a call, by which they notice that they are in different ones."""
        names = ", ".join(x.name for x in (self.chunk, self.decay, self.merge))
        return f"{names} on {dtype}{', packed' if packed else ''}"


def call(traced: Traced, values: Mapping[str, torch.Tensor | float]) -> tuple[torch.Tensor, Tensors]:
    """Result and cached values of one function on one chunk of one head."""
    result, *cached = traced.module(**{name: values[name] for name in traced.arguments})
    return result, dict(zip(traced.cached, cached, strict=True))


def check(meta: InputMeta, chunk: Traced, decay: Traced, merge: Traced) -> Program:
    """Arguments, shapes, causality of `merge` and the kind of `decay`; CompileError says what is wrong."""
    _check_arguments(meta, chunk, decay, merge)
    given, other = _given_sizes(meta), _other_sizes(meta)
    modes = torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False)
    with modes[0], modes[1], modes[2], modes[3]:
        if not _are_small(meta, given):
            try:
                return _Probe(meta, chunk, decay, merge, other).program(given)
            except CompileError:
                return _Probe(meta, chunk, decay, merge, given).program(other)
        return _Probe(meta, chunk, decay, merge, given).program(other)


def _shape(shape: torch.Size) -> str:
    return str(list(shape))


def _check_arguments(meta: InputMeta, chunk: Traced, decay: Traced, merge: Traced) -> None:
    inputs = {**meta.tokens, **meta.params, **meta.numbers}
    for role, traced, more in (
        ("chunk_mode", chunk, set()),
        ("decay_mode", decay, {STATE, CHUNK_STATE, *chunk.cached}),
        ("merge_mode", merge, {CHUNK_STATE, *chunk.cached}),
    ):
        for name in traced.arguments:
            if name not in inputs and name not in more:
                known = ", ".join(sorted({*inputs, *more}))
                raise CompileError(
                    role, traced.name, f"argument {name!r} is no input and no cached value; there are {known}"
                )
        if role != "chunk_mode" and traced.cached:
            raise CompileError(
                role, traced.name, f"only chunk_mode may cache results, it caches {', '.join(traced.cached)}"
            )
    if not any(name in meta.tokens for name in chunk.arguments):
        known = ", ".join(meta.tokens)
        raise CompileError("chunk_mode", chunk.name, f"expected at least one argument of the tokens, which are {known}")
    for name in chunk.cached:
        if name in inputs or name in (STATE, CHUNK_STATE):
            raise CompileError("chunk_mode", chunk.name, f"cache_result name {name!r} hides an input of the same name")
    if STATE not in decay.arguments:
        raise CompileError("decay_mode", decay.name, f"expected an argument {STATE!r}, the state that enters the chunk")


# Test sizes -----------------------------------------------------------------------------------------------------------


def _given_sizes(meta: InputMeta) -> dict[str, int]:
    """The smallest choice of each ConstExpr above 1, since at 1 one kind of transition looks like another."""
    return {name: min([n for n in choices if n > 1] or choices) for name, choices in meta.sizes().items()}


def _other_sizes(meta: InputMeta) -> dict[str, int]:
    """Small and different ones."""
    literal = {size for shape in _tails(meta) for size in shape if isinstance(size, int)}
    free = (n for n in itertools.count(3) if n != _CHUNK and n not in literal)
    names = [size.name for shape in _tails(meta) for size in shape if isinstance(size, ConstExpr)]
    return {name: next(free) for name in dict.fromkeys(names)}


def _tails(meta: InputMeta) -> list[list[Size]]:
    """Sizes behind the heads, of the state first."""
    tokens, params = meta.tokens.values(), meta.params.values()
    return [list(meta.state_sizes), *(list(x.shape[2:]) for x in tokens), *(list(x.shape[1:]) for x in params)]


def _are_small(meta: InputMeta, sizes: dict[str, int]) -> bool:
    return all(n <= 16 for shape in _tails(meta) for n in _numbers(shape, sizes))


def _numbers(shape: Sequence[Size], sizes: dict[str, int]) -> list[int]:
    return [sizes[size.name] if isinstance(size, ConstExpr) else int(size) for size in shape]


# One probe ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """Inputs of one chunk of one head, and what the functions make of them."""

    values: Values
    state: torch.Tensor
    F: torch.Tensor
    after: torch.Tensor
    o: torch.Tensor

    @property
    def finite(self) -> bool:
        return all(bool(x.isfinite().all()) for x in (self.F, self.after, self.o))


class _Probe:
    """Runs at one choice of sizes. `signs` says of each input whether it is drawn normal (0) or from one sign."""

    def __init__(self, meta: InputMeta, chunk: Traced, decay: Traced, merge: Traced, sizes: dict[str, int]) -> None:
        self.meta, self.chunk, self.decay, self.merge, self.sizes = meta, chunk, decay, merge, sizes
        self.made = torch.Generator(device="cpu").manual_seed(0)
        self.shapes = {name: [_CHUNK, *_numbers(x.shape[2:], sizes)] for name, x in meta.tokens.items()}
        self.shapes |= {name: _numbers(x.shape[1:], sizes) for name, x in meta.params.items()}
        self.shapes[STATE] = _numbers(meta.state_sizes, sizes)
        self.signs = dict.fromkeys(self.shapes, 0)

    def program(self, other: dict[str, int]) -> Program:
        """All checks; `other` are sizes to tell apart by which one the output's is."""
        base = self._first()
        if base.o.dim() != 2 or base.o.shape[0] != _CHUNK:
            got = f"expected a result [C, V], got {_shape(base.o.shape)} at {self.merge.line}"
            raise CompileError("merge_mode", self.merge.name, got)
        self._check_causal(base)
        self._check_overflow()
        kind = self._classify(base)
        program = Program(self.meta, self.chunk, self.decay, self.merge, kind, self._value_sizes(base, other))
        self._rehearse(program)
        return program

    def _number(self, shape: list[int], sign: int) -> torch.Tensor:
        if sign == 0:
            return torch.randn(shape, dtype=torch.float64, generator=self.made) / 2
        return sign * (0.01 + 0.98 * torch.rand(shape, dtype=torch.float64, generator=self.made))

    def _draw(self, signs: Mapping[str, int], scale: float = 1.0) -> tuple[Values, torch.Tensor]:
        drawn = {name: scale * self._number(shape, signs[name]) for name, shape in self.shapes.items()}
        state = drawn.pop(STATE)
        return {**self.meta.numbers, **drawn}, state

    def _run(self, values: Values, state: torch.Tensor) -> _Run:
        F, cached = _tensors(self.chunk, "chunk_mode", values)
        _expect(self.chunk, "chunk_mode", F, state.shape)
        inputs = values | cached
        after, _ = _tensors(self.decay, "decay_mode", inputs | {STATE: state, CHUNK_STATE: F})
        _expect(self.decay, "decay_mode", after, state.shape)
        o, _ = _tensors(self.merge, "merge_mode", inputs | {CHUNK_STATE: state})
        return _Run(inputs | {CHUNK_STATE: F}, state, F, after, o)

    def _first(self) -> _Run:
        """A run with finite results, which may need inputs of one sign: logarithms, roots."""
        for signs in _all_signs(list(self.shapes)):
            run = self._run(*self._draw(signs))
            if run.finite:
                self.signs = dict(signs)
                return run
        results = {"chunk_mode": run.F, "decay_mode": run.after, "merge_mode": run.o}
        role, traced = next(
            (role, traced)
            for (role, x), traced in zip(results.items(), (self.chunk, self.decay, self.merge), strict=True)
            if not x.isfinite().all()
        )
        raise CompileError(
            role,
            traced.name,
            f"results, computed at {traced.line}, are not finite, whether inputs are normal, in (0, 1) or (-1, 0); "
            "what grows, such as the exponential of a positive gate, overflows in training too",
        )

    def _check_causal(self, base: _Run) -> None:
        """New values for the tokens from j on must not change what comes out before j."""
        for name in self.meta.tokens:
            for j in range(1, _CHUNK):
                x = base.values[name]
                assert isinstance(x, torch.Tensor)
                new = torch.cat([x[:j], self._number(self.shapes[name], self.signs[name])[j:]])
                again = self._run({**base.values, name: new}, base.state).o
                if not torch.allclose(again[:j], base.o[:j], rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
                    raise CompileError(
                        "merge_mode",
                        self.merge.name,
                        f"not causal: token {j} of {name!r} changes the output of earlier tokens, computed at "
                        f"{self.merge.line}; mask the scores, for example with tril(0)",
                    )

    def _check_overflow(self) -> None:
        """Strong decay must not overflow above the diagonal, where masks come too late for gradients."""
        for name, strong in itertools.product((*self.meta.tokens, *self.meta.params), (-_STRONG, _STRONG)):
            if self.signs[name] * strong < 0:
                continue
            values, state = self._draw(self.signs)
            values[name] = torch.full(self.shapes[name], strong, dtype=torch.float64)
            leaves = [x.requires_grad_() for x in (*values.values(), state) if isinstance(x, torch.Tensor)]
            run = self._run(values, state)
            at = _overflow(self.chunk, run.values) or _overflow(self.merge, run.values | {CHUNK_STATE: state})
            if at is None:
                continue
            if run.finite and _finite_gradients(run.F.sum() + run.after.sum() + run.o.sum(), leaves):
                continue
            role, traced = ("chunk_mode", self.chunk) if at in self.chunk.graph.nodes else ("merge_mode", self.merge)
            raise CompileError(
                role,
                traced.name,
                f"results or gradients are not finite where {name!r} is {strong:g}: the exponential at {location(at)} "
                "overflows above the diagonal; use decayed_scores(q, k, b), or mask the exponent before it",
            )

    def _classify(self, base: _Run) -> Transition:
        """How decay acts on the state, S -> A S + F: from its graph, with random states as a second check."""
        flow = _Flows(self.decay, base).result()
        if flow.level == "curved":
            return "not affine"
        aligned = flow.level == "aligned" and not flow.turned
        inside = _parts(self.decay, base.state)
        elementwise = dense = by_row = True
        for run in (base, *self._further()):
            X = self._number(self.shapes[STATE], 0) * inside
            affine, is_elementwise, is_dense = _acts(self.decay, run, X, aligned, inside)
            if not affine:
                return "not affine"
            elementwise, dense = elementwise and is_elementwise, dense and is_dense
            by_row = by_row and (flow.breadth != _PARTS or _by_row(self.decay, run, inside))
        if aligned and elementwise:
            return _BREADTHS[flow.breadth] if flow.breadth != _PARTS else "vector" if by_row else "elementwise"
        if dense:
            return "dense"
        if elementwise:
            return "not affine"
        raise CompileError(
            "decay_mode",
            self.decay.name,
            f"the result, computed at {self.decay.line}, is affine in {STATE}, but neither elementwise nor a matrix "
            f"from the left (A @ {STATE}); write the state transposed if its matrix multiplies from the right",
        )

    def _further(self) -> Iterator[_Run]:
        """Other inputs, so that what is inactive for some is seen: those with finite results of moderate size."""
        for sign, scale in ((0, 1.0), (1, 1.0), (-1, 1.0), (0, 4.0)):
            try:
                run = self._run(*self._draw(dict.fromkeys(self.shapes, sign), scale))
            except CompileError:
                continue
            if run.finite and max(float(x.abs().max()) for x in (run.F, run.after)) < _LARGE:
                yield run

    def _value_sizes(self, base: _Run, other: dict[str, int]) -> tuple[Size, ...]:
        """The ConstExpr or number that the output's width is, at these sizes and at others if they work."""
        known = [size for shape in _tails(self.meta) for size in reversed(shape)]
        widths = [(self.sizes, base.o.shape[1])]
        second = _Probe(self.meta, self.chunk, self.decay, self.merge, other)
        with contextlib.suppress(CompileError):
            widths.append((other, second._run(*second._draw(self.signs)).o.shape[1]))
        fits = [size for size in known if all(_numbers([size], sizes) == [n] for sizes, n in widths)]
        return (fits[0] if fits else base.o.shape[1],)

    def _rehearse(self, program: Program) -> None:
        """The functions as a call runs them: many heads and chunks at once, chunks of several lengths."""
        from flexsp.compiler import functions

        T = 2 * _CHUNK + 1
        tokens = {
            name: self._number([2, T, 2, *shape[1:]], self.signs[name])
            for name, shape in self.shapes.items()
            if name in self.meta.tokens
        }
        params = {name: self._number([2, *self.shapes[name]], self.signs[name]) for name in self.meta.params}
        state = self._number([2, 2, *self.shapes[STATE]], self.signs[STATE])
        functions.rehearse(program, tokens, params, state, _CHUNK)


def _all_signs(names: list[str]) -> Iterator[Mapping[str, int]]:
    for sign in (0, 1, -1):
        yield dict.fromkeys(names, sign)
    if len(names) <= 8:
        for signs in itertools.product((1, -1), repeat=len(names)):
            yield dict(zip(names, signs, strict=True))


def _tensors(traced: Traced, role: str, values: Values) -> tuple[torch.Tensor, Tensors]:
    try:
        result, cached = call(traced, values)
    except Exception as error:
        shapes = ", ".join(
            f"{name} {_shape(x.shape)}" for name in traced.arguments if isinstance(x := values[name], torch.Tensor)
        )
        text = f"fails on one chunk of one head, {shapes}: {first_line(error)}"
        raise CompileError(role, traced.name, text) from error
    for name, x in {"its result": result, **cached}.items():
        if not isinstance(x, torch.Tensor):
            raise CompileError(role, traced.name, f"expected a tensor as {name}, got {x!r}")
    return result, cached


def _expect(traced: Traced, role: str, got: torch.Tensor, shape: torch.Size) -> None:
    if got.shape != shape or not got.is_floating_point():
        raise CompileError(
            role,
            traced.name,
            f"expected the shape of the state, {_shape(shape)}, got {_shape(got.shape)} ({got.dtype}) at {traced.line}",
        )


def _values_of(traced: Traced, values: Mapping[str, Any]) -> dict[Node, Any]:
    """The value of every node."""
    interpreter = torch.fx.Interpreter(traced.module, garbage_collect_values=False)
    interpreter.run(*(values[str(node.target)] for node in traced.graph.nodes if node.op == "placeholder"))
    return interpreter.env


def _overflow(traced: Traced, values: Mapping[str, Any]) -> Node | None:
    """An exponential [C, C, ...] that is infinite above the diagonal and finite elsewhere."""
    with torch.no_grad():
        for node, x in _values_of(traced, values).items():
            if node.op == "placeholder" or node.op == "output" or named(node) not in ("exp", "exp2"):
                continue
            if x.dim() < 2 or x.shape[0] != _CHUNK or x.shape[1] != _CHUNK:
                continue
            infinite = x.isinf().flatten(2).any(-1) if x.dim() > 2 else x.isinf()
            if infinite.any() and not infinite.tril().any():
                return node
    return None


def _finite_gradients(total: torch.Tensor, leaves: list[torch.Tensor]) -> bool:
    try:
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
    except RuntimeError:  # an operator without a derivative
        return True
    return all(bool(x.isfinite().all()) for x in grads if x is not None)


def _close(x: torch.Tensor, y: torch.Tensor, like: torch.Tensor) -> bool:
    scale = max(1.0, *(float(z.abs().max()) for z in (x, y, like) if z.numel()))
    return bool(((x - y).abs() <= _TOLERANCE * scale).all())


def _parts(decay: Traced, state: torch.Tensor) -> torch.Tensor:
    """Ones where a state that is made of parts has one, zeros beside them; ones everywhere else."""
    inside = torch.ones_like(state)
    for node in decay.graph.nodes:
        if node.target is primitives.joined:
            inside = torch.zeros_like(state)
            for place in node.kwargs["places"]:
                inside[place] = 1
    return inside


def _step(decay: Traced, run: _Run, S: torch.Tensor) -> torch.Tensor:
    return call(decay, run.values | {STATE: S})[0]


def _linear(decay: Traced, run: _Run) -> Callable[[torch.Tensor], torch.Tensor]:
    """The derivative of decay at a state of zeros."""
    return lambda X: jvp(partial(_step, decay, run), (torch.zeros_like(run.state),), (X,))[1]


def _by_row(decay: Traced, run: _Run, inside: torch.Tensor) -> bool:
    """Whether a row of the state has one factor, where decay is elementwise."""
    factors = _linear(decay, run)(inside)
    return factors.dim() < 2 or _close(factors, factors[:, :1] * inside, factors)


def _acts(decay: Traced, run: _Run, X: torch.Tensor, aligned: bool, inside: torch.Tensor) -> tuple[bool, bool, bool]:
    """Whether decay is affine in the state here, whether elementwise, and whether a matrix from the left.

    The last is not looked at where it is elementwise and `aligned`; only what is `inside` counts.
    """
    state, step, linear = run.state * inside, partial(_step, decay, run), _linear(decay, run)
    zero = torch.zeros_like(state)
    for S in (X, state, 3 * X - 2 * state):
        if not _close(step(S) - step(zero), linear(S), step(S)):
            return False, False, False
    elementwise = _close(linear(X), linear(torch.ones_like(state)) * X, X)
    if state.dim() != 2 or (aligned and elementwise):
        return True, elementwise, False
    eye = torch.eye(state.shape[0], dtype=state.dtype)
    A = torch.stack([linear(row.unsqueeze(1).expand_as(state))[:, 0] for row in eye], dim=1)
    return True, elementwise, _close(linear(X), (A @ X) * inside, X)


# How the state flows through decay ------------------------------------------------------------------------------------


_BREADTHS: tuple[Transition, ...] = ("none", "scalar", "vector", "elementwise")
_PARTS = 4  # a breadth for each part, each a number or one a row
_NO_VALUES = {"size", "dim", "ones_like", "zeros_like", "getattr", identity.__name__}
_ALIGNED = {"contiguous", "expand", "flatten", "reshape", "squeeze", "unsqueeze", "view", to_floating.__name__}
_TURNS = {"permute", "t", "transpose"}
_MOVES = {"cat", "cumsum", "diag", "diagonal", "flip", "getitem", "mean", "stack", "sum"}
_PRODUCTS = {"bmm", "matmul", "matmul_out_fp32", "mm", "outer"}


@dataclass(frozen=True)
class _Flow:
    """How a value depends on the state, or on a part of it: elementwise by factors of some breadth, linearly otherwise,
    or neither."""

    level: Literal["aligned", "moved", "curved"] = "aligned"
    breadth: int = 0
    turned: bool = False
    part: int | None = None


_CURVED = _Flow("curved")


def _join(flows: list[_Flow]) -> _Flow:
    levels = {flow.level for flow in flows}
    if "curved" in levels:
        return _CURVED
    moved = "moved" in levels or len({(flow.turned, flow.part) for flow in flows}) > 1
    return replace(flows[0], level="moved" if moved else "aligned", breadth=max(flow.breadth for flow in flows))


def _of_parts(flows: list[_Flow | None]) -> _Flow:
    """That of a state whose parts are made so."""
    known = [(i, flow) for i, flow in enumerate(flows) if flow is not None]
    if any(flow.level == "curved" for _, flow in known):
        return _CURVED
    if any(flow.level == "moved" or flow.turned or flow.part != i for i, flow in known):
        return _Flow("moved")
    breadth = max((flow.breadth for _, flow in known), default=1) if len(known) == len(flows) else 1
    return _Flow(breadth=_PARTS if breadth in (1, 2) else breadth)


class _Flows:
    """The flow of every value of decay_mode that the state goes into."""

    def __init__(self, decay: Traced, run: _Run) -> None:
        self.graph, self.state = decay.graph, run.state
        self.values = _values_of(decay, run.values | {STATE: run.state})
        self.flows: dict[Node, _Flow] = {}

    def result(self) -> _Flow:
        for node in self.graph.nodes:
            if node.op == "output":
                return self._of(node.args[0][0]) or _Flow(breadth=1)
            flow = _Flow() if node.op == "placeholder" and node.target == STATE else self._flow(node)
            if flow is not None:
                self.flows[node] = flow
        raise AssertionError("a graph without output")

    def _of(self, x: Any) -> _Flow | None:
        return self.flows.get(x) if isinstance(x, Node) else None

    def _flow(self, node: Node) -> _Flow | None:
        flows = [self.flows[x] for x in node.all_input_nodes if x in self.flows]
        if not flows or node.op == "placeholder":
            return None
        what, joined = named(node), _join(flows)
        first = self._of(node.args[0]) if node.args else None
        others = [x for x in (*node.args[1:], *node.kwargs.values()) if self._of(x) is not None]
        if what == "getattr" and node.args[1] in ("T", "mT"):
            return self._turned(node, joined)
        if node.target is primitives.part_of and first is not None:
            return _Flow(first.level, first.breadth, first.turned, int(str(node.args[1])))
        if node.target is primitives.joined:
            return _of_parts([self._of(x) for x in node.args])
        if what in _NO_VALUES or (what == "expand_as" and first is None):
            return None
        if what in ("add", "sub", "rsub"):
            plain = what == "add" or (what == "sub" and not others)
            return joined if plain and not node.kwargs else self._scaled(node, joined, -1)
        if what in ("mul", "div", "truediv", "where", "masked_fill"):
            return self._by_factor(node, what, first, others)
        if what in _MOVES or what in _PRODUCTS:
            bilinear = what in _PRODUCTS and first is not None and len(others) > 0
            return _CURVED if joined.level == "curved" or bilinear or (what in _MOVES and others) else _Flow("moved")
        if others or joined.level == "curved":
            return joined if what == "expand_as" and first is not None else _CURVED
        if what in ("neg", "tril", "triu"):
            return self._scaled(node, joined, -1) if what == "neg" else replace(joined, breadth=3)
        if what in _TURNS:
            return self._turned(node, joined)
        return joined if what in _ALIGNED or what == "expand_as" else _CURVED

    def _by_factor(self, node: Node, what: str, first: _Flow | None, others: list[Any]) -> _Flow:
        if what == "where":
            mask, *parts = node.args
            if node.op == "call_method":
                mask, parts = node.args[1], [node.args[0], *node.args[2:]]
            flows = [flow for x in parts if (flow := self._of(x)) is not None]
            return _CURVED if self._of(mask) or node.kwargs else self._scaled(node, _join(flows), mask)
        if node.kwargs or len(node.args) < 2 or (first is not None and others):
            return _CURVED
        if first is not None:
            return self._scaled(node, first, node.args[1])
        flow = self._of(node.args[1])
        return self._scaled(node, flow, node.args[0]) if what == "mul" and flow is not None else _CURVED

    def _scaled(self, node: Node, flow: _Flow, factor: Any) -> _Flow:
        x = self.values[factor] if isinstance(factor, Node) else factor
        breadth = 3
        sizes = list(self.state.shape)
        if not isinstance(x, torch.Tensor) or x.numel() == 1:
            breadth = 1
        elif list(self.values[node].shape) == (sizes[::-1] if flow.turned else sizes):
            at = -2 if flow.turned else -1
            if len(sizes) == 1 or (x.dim() < 2 if flow.turned else False) or x.shape[at] == 1:
                breadth = 2
        return replace(flow, breadth=max(flow.breadth, breadth))

    def _turned(self, node: Node, flow: _Flow) -> _Flow:
        """A transposition: a second one undoes it."""
        value = self.values[node]
        numbers = [n for x in node.args[1:] for n in (x if isinstance(x, (list, tuple)) else [x]) if type(n) is int]
        swap = sorted(n % 2 for n in numbers) == [0, 1] and (named(node) != "permute" or numbers[0] % 2 == 1)
        simple = named(node) in ("t", "getattr") or swap
        if value.dim() != 2 or not simple or flow.level != "aligned":
            return flow if flow.level == "curved" else _Flow("moved")
        return replace(flow, turned=not flow.turned)
