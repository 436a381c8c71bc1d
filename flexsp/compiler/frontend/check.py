"""Stage 2: checks the three functions, from their graphs and by runs on small random chunks in float64.

It classifies how `decay` acts on the state, which decides what ranks exchange, checks that `merge` is causal and that
results do not depend on where chunks end, and reports what it measured.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.fx import Node

from flexsp.comm.derivatives import untransformed
from flexsp.compiler.frontend import functions, primitives
from flexsp.compiler.frontend.flows import PARTS, Flows, values_of
from flexsp.compiler.frontend.max_plus import shifted
from flexsp.compiler.frontend.meta import CHUNK_STATE, KERNELS_OWN, OURS, STATE, ConstExpr, InputMeta, Size
from flexsp.compiler.frontend.program import Functions, Program, call, has_parts
from flexsp.compiler.frontend.report import NEUTRAL, CheckReport, Measured
from flexsp.compiler.frontend.trace import Traced, first_line, location, named, trace
from flexsp.exceptions import CompileError, check_integer, fail
from flexsp.runtime.clean_thread import one_at_a_time

__all__ = ["SECOND_MATRIX", "check", "functions_of"]

Tensors = dict[str, torch.Tensor]
Values = dict[str, "torch.Tensor | float"]
_CHUNK = 6
_TOLERANCE = 1e-8
_LARGE = 1e6
_STRONG = 400.0
_CUT, _LONG = 3, 8  # tokens: one chunk of 8 must equal a chunk of 3 and one of 5
_BREADTHS: tuple[str, ...] = ("none", "scalar", "vector", "elementwise")


def functions_of(meta: InputMeta, fixed_chunks: bool, *modes: Callable[..., torch.Tensor]) -> Functions:
    """Traces the three functions. With ``fixed_chunks``, results may depend on where chunks end."""
    inputs = {*meta.tokens, *meta.params, *meta.numbers}
    for name in (*meta.tokens, *meta.params):
        if reserved := _reserved(name, meta):
            raise CompileError("input_meta", name, f"expected another name: {reserved}")
    untransformed("making a variant", "make it, or call what makes it, once before")

    def make() -> Functions:
        chunk = trace(modes[0], "chunk_mode", inputs, meta.numbers)
        after_chunk = {*inputs, CHUNK_STATE, *chunk.cached}
        decay = trace(modes[1], "decay_mode", {*after_chunk, STATE}, meta.numbers)
        return Functions(meta, chunk, decay, trace(modes[2], "merge_mode", after_chunk, meta.numbers), fixed_chunks)

    return one_at_a_time(make, getattr(modes[2], "__name__", "merge"))


class _Made(Protocol):
    """A `LinearAttention`."""

    @property
    def program(self) -> Program: ...


def check(program: _Made | Functions, seed: int = 0) -> CheckReport:
    """Runs a program's three functions on small random chunks in float64 and says what it measured.

    The constructor of `LinearAttention` calls this function with ``seed`` 0 and keeps the report as ``report``. A test
    of one's own may call it with other seeds. It computes on the CPU, for less than a second, and makes no
    kernels. It checks arguments and shapes; that outputs do not depend on later tokens; that one chunk gives what the
    same tokens in two chunks give; how the state's update depends on the state, which decides what ranks exchange; and
    that exponentials do not overflow above the diagonal where an input is -400 or 400. That ``chunk_mode`` and
    ``merge_mode`` say what one means, only a comparison with a loop over tokens shows.

    Args:
        program: a `LinearAttention`.
        seed: of the random chunks.

    Raises:
        CompileError: what the constructor raises; names function, line and remedy.
        ValueError: ``program`` is no `LinearAttention`, or ``seed`` no number of 0 or more.
    """
    given = getattr(program, "program", program)
    if not isinstance(given, Functions):
        fail("program", "a flexsp.compiler.LinearAttention", type(program).__name__)
    first = check_integer("seed", seed, least=0)
    return one_at_a_time(lambda: _checked(given, first), given.merge.name)


def _checked(given: Functions, seed: int) -> CheckReport:
    _check_arguments(given)
    small, other = _given_sizes(given.meta), _other_sizes(given.meta)
    modes = torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False)
    with modes[0], modes[1], modes[2], modes[3]:
        if not _are_small(given.meta, small):
            try:
                return _Probe(given, other, seed).report(small)
            except CompileError:
                return _Probe(given, small, seed).report(other)
        return _Probe(given, small, seed).report(other)


def _shape(shape: torch.Size) -> str:
    return str(list(shape))


def _check_arguments(given: Functions) -> None:
    meta, chunk, decay, merge = given.meta, given.chunk, given.decay, given.merge
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
        if reserved := _reserved(name, meta):
            raise CompileError("chunk_mode", chunk.name, f"cache_result name {name!r}: expected another: {reserved}")
    if STATE not in decay.arguments:
        raise CompileError("decay_mode", decay.name, f"expected an argument {STATE!r}, the state that enters the chunk")


def _reserved(name: str, meta: InputMeta) -> str | None:
    """Which names inputs and cached results cannot have, if `name` is one of them."""
    own = {*KERNELS_OWN, *(size.name for size in meta.state_sizes if isinstance(size, ConstExpr))}
    if name not in own and not OURS.match(name):
        return None
    return (
        f"kernels have variables {', '.join(sorted(own))}, names that begin with d_, grad_, keep_, gates_, gated_, "
        "f32_, S__ or dS__, and with arg, sum, scores, inverse or operand before a digit"
    )


# Test sizes -----------------------------------------------------------------------------------------------------------


def _given_sizes(meta: InputMeta) -> dict[str, int]:
    """The smallest choice above 1 of each ConstExpr, since at size 1 the kinds of transitions cannot be told apart."""
    return {name: min([n for n in choices if n > 1] or choices) for name, choices in meta.sizes().items()}


def _other_sizes(meta: InputMeta) -> dict[str, int]:
    """Small sizes that differ from each other."""
    literal = {size for shape in _tails(meta) for size in shape if isinstance(size, int)}
    free = (n for n in itertools.count(3) if n != _CHUNK and n not in literal)
    names = [size.name for shape in _tails(meta) for size in shape if isinstance(size, ConstExpr)]
    return {name: next(free) for name in dict.fromkeys(names)}


def _tails(meta: InputMeta) -> list[list[Size]]:
    """Sizes after the heads, those of the state first."""
    tokens, params = meta.tokens.values(), meta.params.values()
    return [list(meta.state_sizes), *(list(x.shape[2:]) for x in tokens), *(list(x.shape[1:]) for x in params)]


def _are_small(meta: InputMeta, sizes: dict[str, int]) -> bool:
    return all(n <= 16 for shape in _tails(meta) for n in _numbers(shape, sizes))


def _numbers(shape: Sequence[Size], sizes: dict[str, int]) -> list[int]:
    return [sizes[size.name] if isinstance(size, ConstExpr) else int(size) for size in shape]


# One probe ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """Inputs of one chunk of one head, and the results of the functions."""

    values: Values
    state: torch.Tensor
    F: torch.Tensor
    after: torch.Tensor
    o: torch.Tensor

    @property
    def finite(self) -> bool:
        return all(bool(x.isfinite().all()) for x in (self.F, self.after, self.o))


class _Probe:
    """Runs the functions at one choice of sizes. `signs`: 0 draws normal numbers for an input, 1 and -1 of one sign."""

    def __init__(self, given: Functions, sizes: dict[str, int], seed: int = 0) -> None:
        self.given, self.sizes, self.seed = given, sizes, seed
        self.meta, self.chunk, self.decay, self.merge = given.meta, given.chunk, given.decay, given.merge
        self.made = torch.Generator(device="cpu").manual_seed(seed)
        self.shapes = {name: [_CHUNK, *_numbers(x.shape[2:], sizes)] for name, x in self.meta.tokens.items()}
        self.shapes |= {name: _numbers(x.shape[1:], sizes) for name, x in self.meta.params.items()}
        self.shapes[STATE] = _numbers(self.meta.state_sizes, sizes)
        self.signs = dict.fromkeys(self.shapes, 0)
        self.measured = Measured()

    def report(self, other: dict[str, int]) -> CheckReport:
        """Runs all checks. `other` are second sizes, which tell which of the sizes the output has."""
        base = self._first()
        if base.o.dim() != 2 or base.o.shape[0] != _CHUNK:
            got = f"expected a result [C, V], got {_shape(base.o.shape)} at {self.merge.line}"
            raise CompileError("merge_mode", self.merge.name, got)
        self._check_causal(base)
        self._check_overflow()
        kind, linear = self._classify(base)
        error = self._disagreement(kind)
        if error is not None and not self.given.fixed_chunks:
            raise error
        sizes, text = self._value_sizes(base, other), None if error is None else str(error)
        program = Program(
            self.meta, self.chunk, self.decay, self.merge, self.given.fixed_chunks, kind, linear, sizes, disagrees=text
        )
        self._rehearse(program)
        self._add_zeros()
        found, affine = self.measured, kind not in ("max-plus", "sequential")
        return CheckReport(
            (self.chunk.name, self.decay.name, self.merge.name), kind, True, found.leak, text is None, found.cuts,
            affine, found.affine if affine else None, None if found.zeros is None else found.zeros <= NEUTRAL,
            found.grows, dict(self.sizes), self.seed, program,
        )  # fmt: skip

    def _number(self, shape: list[int], sign: int) -> torch.Tensor:
        if sign == 0:
            return torch.randn(shape, dtype=torch.float64, generator=self.made) / 2
        return sign * (0.01 + 0.98 * torch.rand(shape, dtype=torch.float64, generator=self.made))

    def _draw(
        self, signs: Mapping[str, int], scale: float = 1.0, tokens: int = _CHUNK
    ) -> tuple[Values, torch.Tensor]:  # fmt: skip
        shapes = {name: [tokens, *x[1:]] if name in self.meta.tokens else x for name, x in self.shapes.items()}
        drawn = {name: scale * self._number(shape, signs[name]) for name, shape in shapes.items()}
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
        """A run with finite results. Logarithms and roots need inputs of one sign."""
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
        text = (
            f"results, computed at {traced.line}, are not finite, whether inputs are normal, in (0, 1) or (-1, 0); "
            "what grows, such as the exponential of a positive gate, overflows in training too"
        )
        raise CompileError(role, traced.name, text)

    def _check_causal(self, base: _Run) -> None:
        """New values of the tokens from j on must not change outputs before j."""
        for name in self.meta.tokens:
            for j in range(1, _CHUNK):
                x = base.values[name]
                assert isinstance(x, torch.Tensor)
                new = torch.cat([x[:j], self._number(self.shapes[name], self.signs[name])[j:]])
                again = self._run({**base.values, name: new}, base.state).o
                self.measured.leak = max(self.measured.leak, float((again[:j] - base.o[:j]).abs().max()))
                if not torch.allclose(again[:j], base.o[:j], rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
                    text = (
                        f"not causal: token {j} of {name!r} changes the output of earlier tokens, computed at "
                        f"{self.merge.line}; mask the scores, for example with tril(0)"
                    )
                    raise CompileError("merge_mode", self.merge.name, text)

    def _check_overflow(self) -> None:
        """Strong decay must not overflow above the diagonal: a mask after the exponential is too late for gradients."""
        for name, strong in itertools.product((*self.meta.tokens, *self.meta.params), (-_STRONG, _STRONG)):
            if self.signs[name] * strong < 0:
                continue
            values, state = self._draw(self.signs)
            values[name] = torch.full(self.shapes[name], strong, dtype=torch.float64)
            leaves = [x.requires_grad_() for x in (*values.values(), state) if isinstance(x, torch.Tensor)]
            run = self._run(values, state)
            if run.finite and _finite_gradients(run.F.sum() + run.after.sum() + run.o.sum(), leaves):
                continue
            at = _overflow(self.chunk, run.values) or _overflow(self.merge, run.values | {CHUNK_STATE: state})
            if at is None:  # it grows there, as by a positive gate: no mistake of the functions
                self.measured.grows += ((name, strong),)
                continue
            role, traced = ("chunk_mode", self.chunk) if at in self.chunk.graph.nodes else ("merge_mode", self.merge)
            text = (
                f"results or gradients are not finite where {name!r} is {strong:g}: the exponential at {location(at)} "
                "overflows above the diagonal; use decayed_scores(q, k, b), or mask the exponent before it"
            )
            raise CompileError(role, traced.name, text)

    def _classify(self, base: _Run) -> tuple[str, Traced | None]:
        """The kind of transition, and A of S -> A S + F: read from the graph of decay and checked on random states."""
        flows = Flows(self.decay, base.values, base.state)
        flow = flows.result()
        if flow.level == "curved":
            return self._maxima(base)
        linear, aligned = flows.linear(), flow.level == "aligned" and not flow.turned
        inside = _parts(self.decay, base.state)
        elementwise = dense = by_row = True
        for run in (base, *self._further()):
            X = self._number(self.shapes[STATE], 0) * inside
            apart, is_elementwise, is_dense = _acts(self.decay, linear, run, X, aligned, inside)
            if not apart <= _TOLERANCE:
                return "sequential", None
            self.measured.affine = max(self.measured.affine, apart)
            elementwise, dense = elementwise and is_elementwise, dense and is_dense
            by_row = by_row and (flow.breadth != PARTS or _by_row(linear, run, inside))
        if aligned and elementwise:
            most = base.state.dim() + 1  # a vector's numbers are its rows
            if flow.breadth != PARTS:
                return _BREADTHS[min(flow.breadth, most)], linear
            return "vector" if by_row else "elementwise", linear
        if dense:
            return "dense", linear
        if elementwise:
            return "sequential", None
        text = (
            f"the result, computed at {self.decay.line}, is affine in {STATE}, but neither elementwise nor a matrix "
            f"from the left (A @ {STATE}); {_other_way(self.decay)}"
        )
        raise CompileError("decay_mode", self.decay.name, text)

    def _maxima(self, base: _Run) -> tuple[str, Traced | None]:
        """The kind "max-plus" and S + a if decay is S -> max(S + a, F), else "sequential"."""
        shift = shifted(self.decay, base.values, base.state)
        if shift is None:
            return "sequential", None
        for run in (base, *self._further()):
            for scale in (0.0, 1.0, 4.0):
                X = scale * self._number(self.shapes[STATE], 0)
                moved, least = _step(shift, run, X), _step(self.decay, run, torch.full_like(X, -torch.inf))
                if not _close(moved, X + _step(shift, run, torch.zeros_like(X)), X):
                    return "sequential", None
                if not _close(_step(self.decay, run, X), torch.maximum(moved, least), X):
                    return "sequential", None
        return "max-plus", shift

    def _further(self) -> Iterator[_Run]:
        """Runs on other inputs, where other branches are active; only those with finite results of moderate size."""
        for sign, scale in ((0, 1.0), (1, 1.0), (-1, 1.0), (0, 4.0)):
            try:
                run = self._run(*self._draw(dict.fromkeys(self.shapes, sign), scale))
            except CompileError:
                continue
            if run.finite and max(float(x.abs().max()) for x in (run.F, run.after)) < _LARGE:
                yield run

    def _disagreement(self, kind: str) -> CompileError | None:
        """An error that names the function if one chunk and the same tokens in two chunks give different results."""
        for _ in range(2):
            values, state = self._draw(self.signs, tokens=_LONG)
            state = state * _parts(self.decay, state)
            whole = self._run(values, state)
            first = self._run(self._part(values, 0, _CUT), state)
            second = self._run(self._part(values, _CUT, _LONG), first.after)
            if not (whole.finite and first.finite and second.finite):
                continue
            o = torch.cat([first.o, second.o])
            for x, y in ((second.after, whole.after), (o, whole.o)):
                self.measured.cuts = max(self.measured.cuts or 0.0, _relative(x, y))
            apart = _difference(second.after, whole.after)
            if apart:
                of_chunk = kind != "sequential" and self._factors_agree(whole, first, second)
                role, traced = ("chunk_mode", self.chunk) if of_chunk else ("decay_mode", self.decay)
                return CompileError(role, traced.name, _ABOUT_CUTS.format("the state", apart, traced.line))
            apart = _difference(o, whole.o)
            if apart:
                text = _ABOUT_CUTS.format("outputs", apart, self.merge.line)
                return CompileError("merge_mode", self.merge.name, text)
        return None

    def _add_zeros(self) -> None:
        """Measures what tokens of zeros, as batches are padded with, do to the state."""
        values, state = self._draw(self.signs, tokens=_LONG)
        state = state * _parts(self.decay, state)
        padded = {name: x for name, x in values.items() if name not in self.meta.tokens}
        for name in self.meta.tokens:
            x = values[name]
            assert isinstance(x, torch.Tensor)
            padded[name] = torch.cat([x[:_CUT], torch.zeros_like(x[_CUT:])])
        without, with_zeros = (self._run(x, state).after for x in (self._part(values, 0, _CUT), padded))
        if bool(without.isfinite().all() and with_zeros.isfinite().all()):
            self.measured.zeros = _relative(with_zeros, without)

    def _part(self, values: Values, begin: int, end: int) -> Values:
        return {name: x[begin:end] if name in self.meta.tokens else x for name, x in values.items()}  # type: ignore[index]

    def _factors_agree(self, whole: _Run, first: _Run, second: _Run) -> bool:
        """Whether the part of decay that is linear in the state is independent of where chunks end."""
        X = whole.state + 1
        left = _step(self.decay, second, _step(self.decay, first, X)) - second.after
        return not _difference(left, _step(self.decay, whole, X) - whole.after)

    def _value_sizes(self, base: _Run, other: dict[str, int]) -> tuple[Size, ...]:
        """The ConstExpr that the output's width equals at both choices of sizes, else the width as a number."""
        known = [size for shape in _tails(self.meta) for size in reversed(shape)]
        widths = [(self.sizes, base.o.shape[1])]
        second = _Probe(self.given, other)
        with contextlib.suppress(CompileError):
            widths.append((other, second._run(*second._draw(self.signs)).o.shape[1]))
        fits = [size for size in known if all(_numbers([size], sizes) == [n] for sizes, n in widths)]
        return (fits[0] if fits else base.o.shape[1],)

    def _rehearse(self, program: Program) -> None:
        """Runs the functions as a call does: many heads and chunks at once, with chunks of several lengths."""
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
        got_shape = f"got {_shape(got.shape)} ({got.dtype}) at {traced.line}"
        text = f"expected the shape of the state, {_shape(shape)}, {got_shape}"
        more = got.dim() == len(shape) and any(n > m for n, m in zip(got.shape, shape, strict=True))
        raise CompileError(role, traced.name, f"{text}{SECOND_MATRIX if more else ''}")


def _overflow(traced: Traced, values: Mapping[str, Any]) -> Node | None:
    """An exponential [C, C, ...] that is infinite above the diagonal and finite elsewhere."""
    with torch.no_grad():
        for node, x in values_of(traced, values).items():
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


def _apart(x: torch.Tensor, y: torch.Tensor, like: torch.Tensor) -> float:
    """The largest difference, relative to the largest number of the three if that is above 1."""
    scale = max(1.0, *(float(z.abs().max()) for z in (x, y, like) if z.numel()))
    return float((x - y).abs().max()) / scale if x.numel() else 0.0


def _close(x: torch.Tensor, y: torch.Tensor, like: torch.Tensor) -> bool:
    return _apart(x, y, like) <= _TOLERANCE


_ABOUT_CUTS = (
    "the three functions disagree about where a chunk ends: {} after one chunk of 8 tokens, and after the same tokens "
    "in chunks of 3 and 5, differ by {:.1e} of the largest number, computed at {}. Results would depend on how many "
    "ranks there are. If chunks are part of the model, give chunk_size; shards must then start on edges of chunks"
)


def _relative(x: torch.Tensor, y: torch.Tensor) -> float:
    """The largest difference, relative to the largest number."""
    most = max(float(x.abs().max()), float(y.abs().max())) if x.numel() else 0.0
    return float((x - y).abs().max()) / most if most else 0.0


def _difference(x: torch.Tensor, y: torch.Tensor) -> float:
    """`_relative`; 0 if rounding explains it."""
    most = max(float(x.abs().max()), float(y.abs().max())) if x.numel() else 0.0
    return _relative(x, y) if most and _relative(x, y) * most > _TOLERANCE * most + 1e-12 else 0.0


SECOND_MATRIX = (
    ". A second matrix is no part of the first one's columns or rows: give it as extra_state of a custom_transition "
    "(docs/write-a-variant.md)"
)


def _parts(decay: Traced, state: torch.Tensor) -> torch.Tensor:
    """A mask of the state: ones, but zeros where a state of several parts has none of them."""
    inside = torch.ones_like(state)
    for node in decay.graph.nodes:
        if node.target is primitives.joined:
            inside = torch.zeros_like(state)
            for place in node.kwargs["places"]:
                inside[place] = 1
    return inside


def _other_way(decay: Traced) -> str:
    """The remedy for a decay that no matrix from the left describes."""
    if has_parts(decay):
        return "the parts of a state are rows and columns of one matrix, and are made of each other by such an A alone"
    return (
        "if its matrix multiplies from the right, write the state transposed; kernels then run it where outputs are as "
        "wide as the last size of that state, else only PyTorch does"
    )


def _step(decay: Traced, run: _Run, S: torch.Tensor) -> torch.Tensor:
    return call(decay, run.values | {STATE: S})[0]


def _by_row(linear: Traced, run: _Run, inside: torch.Tensor) -> bool:
    """Whether each row of the state has a single factor, for an elementwise decay."""
    factors = _step(linear, run, inside)
    return factors.dim() < 2 or _close(factors, factors[:, :1] * inside, factors)


def _acts(
    decay: Traced, linear_part: Traced, run: _Run, X: torch.Tensor, aligned: bool, inside: torch.Tensor
) -> tuple[float, bool, bool]:
    """How far decay is from affine in the state, whether it is elementwise, and whether it is a matrix from the left.

    The third is not computed if decay is elementwise and `aligned`. Only numbers `inside` a part count.
    """
    state, step, linear = run.state * inside, partial(_step, decay, run), partial(_step, linear_part, run)
    zero, most = torch.zeros_like(state), 0.0
    for S in (X, state, 3 * X - 2 * state):
        apart = _apart(step(S) - step(zero), linear(S), step(S))
        if not apart <= _TOLERANCE:
            return apart, False, False
        most = max(most, apart)
    elementwise = _close(linear(X), linear(torch.ones_like(state)) * X, X)
    if state.dim() != 2 or (aligned and elementwise):
        return most, elementwise, False
    eye = torch.eye(state.shape[0], dtype=state.dtype)
    A = torch.stack([linear(row.unsqueeze(1).expand_as(state))[:, 0] for row in eye], dim=1)
    return most, elementwise, _close(linear(X), (A @ X) * inside, X)
