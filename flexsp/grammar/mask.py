"""A custom mask as factors: M(i, j) = [j <= i] e^{G_i - G_j} row_i column_j, and a value of its own where i == j.

The factors are read off the traced expression; then they are compared in float64 with the expression, and the
expression with the function itself on plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from flexsp.comm.group import SequenceParallel
from flexsp.compiler import CompileError
from flexsp.grammar.symbols import ROLE, Expr, I, J, Symbols, T, evaluate, show, trace
from flexsp.ops import _validate as check
from flexsp.scan.tokens import positions, previous, running_sum

__all__ = ["Factors", "Mask", "make_mask"]

Tensors = dict[str, torch.Tensor]
_TOKENS = 6
_TOLERANCE = 1e-8
_FLOAT32 = 1e-4  # positions are integers, and functions of integers alone are float32 in PyTorch


@dataclass(frozen=True)
class Factors:
    """A call's factors, each [B, T, H] or None for 1 (`own`: 0); `per_head` [H] is a gate that all tokens share."""

    gate: torch.Tensor | None
    per_head: torch.Tensor | None
    row: torch.Tensor | None
    column: torch.Tensor | None
    own: torch.Tensor | None


@dataclass(frozen=True)
class Mask:
    """`gate` + (`total` - that of the token before) is the log gate; all are expressions in T, of one token.

    `own` is what M(t, t) has beyond row_t column_t.
    """

    name: str
    inputs: tuple[str, ...]
    params: frozenset[str]
    indexed: frozenset[str]
    sums: dict[Expr, int]
    gate: Expr
    total: Expr
    row: Expr
    column: Expr
    own: Expr

    @property
    def is_decay(self) -> bool:
        """Whether the mask consists of a gate and a factor on the values, which engines take."""
        return self.row == 1 and self.own == 0

    def explain(self) -> str:
        """The factors as text."""
        parts = {"log gate": self.gate, "running log gate": self.total, "row": self.row, "column": self.column}
        neutral = {"log gate": 0, "running log gate": 0, "row": 1, "column": 1}
        texts = [f"{what} {show(x, self.sums)}" for what, x in parts.items() if x != neutral[what]]
        texts += [f"{show(self.own, self.sums)} more where i == j"] if self.own != 0 else []
        return f"custom mask {self.name}: {', '.join(texts) or 'causal only'}"

    def check(self, given: Tensors, q: torch.Tensor) -> None:
        """Shapes and dtypes of the arrays of a call."""
        B, L, H, _ = q.shape
        for name in self.inputs:
            shape, dims = ((H,), "[H]") if name in self.params else ((B, L, H), "[B, T, H]")
            x = given[name]
            either = name not in self.params | self.indexed
            if either and isinstance(x, torch.Tensor) and x.dim() == 1:
                shape, dims = (H,), "[H]"
            check.check_tensor(name, x, shape, dims, dtypes=(q.dtype, torch.float32), device=q.device)

    def factors(
        self, given: Tensors, q: torch.Tensor, cu_seqlens: torch.Tensor | None, sp: SequenceParallel | None
    ) -> Factors:
        """The factors of a call in the accumulation dtype. Collective over ``sp`` if the mask has running sums."""
        wide = check.accumulation_dtype(q)
        place = positions(q.shape[1], q.device, cu_seqlens, sp).to(wide).view(1, -1, 1)
        whole = place.expand(q.shape[:3])
        leaf = _leaf({name: given[name].to(wide) for name in self.inputs}, place, self.sums,
                     lambda x: running_sum(x.expand(q.shape[:3]), cu_seqlens, sp))  # fmt: skip
        found = {}
        for name, neutral in (("row", 1), ("column", 1), ("own", 0)):
            expr = getattr(self, name)
            found[name] = None if expr == neutral else evaluate(expr, leaf) + torch.zeros_like(whole)
        gate = per_head = None
        if self.total == 0 and self.gate != 0 and not self.gate.has(T):
            per_head = evaluate(self.gate, leaf).expand(1, 1, q.shape[2])[0, 0]
        elif self.gate != 0 or self.total != 0:
            gate = evaluate(self.gate, leaf) + torch.zeros_like(whole)
            if self.total != 0:
                total = evaluate(self.total, leaf).expand(q.shape[:3])
                gate = gate + total - previous(total, cu_seqlens, sp)
        for x in (gate, per_head):
            if x is not None:
                decays = f"{ROLE} {self.name!r}", "a mask that decays with i, log gates <= 0"
                if check.readable(x) and bool(x.isnan().any()):
                    check.fail(*decays, "nan")
                check.check_non_positive(decays[0], x, decays[1])
        return Factors(gate, per_head, **found)


def _leaf(
    given: Tensors, place: torch.Tensor, sums: dict[Expr, int], add_up: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Expr], torch.Tensor]:
    """Values of the symbols in expressions in T: `given` arrays and parameters, positions, running sums."""
    of_number = {n: expr for expr, n in sums.items()}
    known: dict[int, torch.Tensor] = {}

    def leaf(x: Expr) -> torch.Tensor:
        if x == T:
            return place
        kind, _, name = (x.name if x.is_Symbol else x.func.__name__).partition("_")
        if kind == "in":
            return given[name]
        n = int(name)
        if n not in known:
            known[n] = add_up(evaluate(of_number[n], leaf))
        return known[n]

    return leaf


# Factoring ------------------------------------------------------------------------------------------------------------


class _Mixed(Exception):
    """A factor that depends on i and on j."""

    def __init__(self, expr: Expr) -> None:
        self.expr = expr


def make_mask(function: Callable[..., Any]) -> Mask:
    """Traces and factors a mask function; CompileError names a factor that it lacks, with i and j that show it."""
    name, arrays, symbols, cases = trace(function)
    probe = _Probe(name, arrays, symbols)
    past, own = cases["past"], cases["own"]
    if symbols.ordered and cases["future"] != 0:
        at, M, inputs = probe.largest(cases["future"], later=True)
        text = f"not causal: it asks for the order of i and j, but is {M:.4g} at i = {at[0]}, j = {at[1]} with {inputs}"
        raise CompileError(ROLE, name, f"{text}; return 0 where j > i, or do not ask (j > i is left out anyway)")
    if past == 0:
        raise CompileError(ROLE, name, "is 0 for every j < i, so no state is needed")
    try:
        row, column, exponents = _split(past)
    except _Mixed as error:
        raise CompileError(ROLE, name, _unseparable(error.expr, past, probe)) from error
    G, over_row, over_column = _matched(*exponents)
    gate, total = _gate(G, symbols.sums)
    row, column = row * sympy.exp(over_row), column * sympy.exp(over_column)
    own_too = sympy.expand(own.subs({I: T, J: T}) - row * column)
    mask = Mask(
        name, arrays, frozenset(symbols.params), frozenset(symbols.indexed), dict(symbols.sums), gate, total, row,
        column, own_too,
    )  # fmt: skip
    probe.verify(mask, function, past, own)
    return mask


def _split(expr: Expr) -> tuple[Expr, Expr, tuple[Expr, Expr]]:
    """(row factor, column factor, (exponent of i, of j)) of a product, as expressions in T."""
    culprit: _Mixed | None = None
    for form in (lambda x: x, sympy.factor_terms, sympy.factor):
        row, column, exponent = sympy.Integer(1), sympy.Integer(1), sympy.Integer(0)
        try:
            for factor in sympy.Mul.make_args(form(expr)):
                if isinstance(factor, sympy.exp):
                    exponent += factor.args[0]
                elif factor.has(I) and factor.has(J):
                    raise _Mixed(factor)
                elif factor.has(I):
                    row *= factor
                else:
                    column *= factor
            of_i, of_j = _sides(exponent)
        except _Mixed as error:
            culprit = culprit or error
        else:
            return row.subs(I, T), column.subs(J, T), (of_i.subs(I, T), of_j.subs(J, T))
    assert culprit is not None
    raise culprit


def _sides(exponent: Expr) -> tuple[Expr, Expr]:
    of_i = of_j = sympy.Integer(0)
    for term in sympy.Add.make_args(sympy.expand_mul(exponent)):
        if term.has(I) and term.has(J):
            raise _Mixed(sympy.exp(term))
        if term.has(I):
            of_i += term
        else:
            of_j += term
    return of_i, of_j


def _matched(of_i: Expr, of_j: Expr) -> tuple[Expr, Expr, Expr]:
    """(G, what is left of i, what is left of j) of exponents R_i + C_j = (G_i - G_j) + left_i + left_j."""
    rows, columns = of_i.as_coefficients_dict(), of_j.as_coefficients_dict()
    G = sympy.Integer(0)
    for term, r in rows.items():
        c = columns.get(term, 0)
        if r * c < 0 and term != 1:
            G += sympy.sign(r) * min(abs(r), abs(c)) * term
    return G, sympy.expand_mul(of_i - G), sympy.expand_mul(of_j + G)


def _gate(G: Expr, sums_of: dict[Expr, int]) -> tuple[Expr, Expr]:
    """(log gate, rest) with G_t - G_{t-1} = gate_t + rest_t - rest_{t-1}."""
    summed = {n: expr for expr, n in sums_of.items()}
    gate = total = sympy.Integer(0)
    for term in sympy.Add.make_args(G):
        sums = [x for x in term.atoms(sympy.core.function.AppliedUndef) if x.func.__name__.startswith("sum_")]
        linear = sums[0] if len(sums) == 1 else T
        rest = term.coeff(linear)
        if rest == 0 or rest.has(T):
            total += term
        else:
            gate += rest * (summed[int(linear.func.__name__.removeprefix("sum_"))] if sums else 1)
    return gate, total


# Probing --------------------------------------------------------------------------------------------------------------


def _unseparable(culprit: Expr, past: Expr, probe: _Probe) -> str:
    """Why, with two rows and two columns whose 2 x 2 minor is not 0."""
    sums = probe.symbols.sums
    text = f"does not factor into causal x decay x local: {show(culprit, sums)} depends on i and on j"
    worst, numbers, inputs = probe.minor(past)
    if worst is None:
        text += "; at random inputs its 2 x 2 minors vanish, so it does factor, but not as it is written"
    else:
        i, k, j, l = worst
        left, right = numbers
        text += (
            f". A product of a term of i and a term of j has M({i}, {j}) M({k}, {l}) = M({i}, {l}) M({k}, {j}), here "
            f"they are {left:.4g} and {right:.4g} with {inputs}"
        )
    if isinstance(culprit, sympy.exp):
        text += "; the decay is what fails: an exponent must be a sum of terms of i alone and of j alone"
    else:
        text += "; the local factor is what fails: write a product of terms of i alone and of j alone"
    return text


class _Probe:
    """Random arrays of a few tokens in float64, on which expressions of i and j are evaluated."""

    def __init__(self, name: str, arrays: tuple[str, ...], symbols: Symbols) -> None:
        self.name, self.arrays, self.symbols = name, arrays, symbols
        self.made = torch.Generator(device="cpu").manual_seed(0)

    def draw(self, sign: int) -> Tensors:
        """Arrays [n] and parameters [] that are normal (0) or of one sign."""
        found = {}
        for name in self.arrays:
            shape = [] if name in self.symbols.params else [_TOKENS]
            x = torch.randn(shape, generator=self.made, dtype=torch.float64, device="cpu") / 2
            found[name] = x if sign == 0 else sign * (x.abs() + 0.05)
        return found

    def grid(self, expr: Expr, given: Tensors) -> torch.Tensor:
        """[n, n], rows i and columns j."""
        place = torch.arange(_TOKENS, dtype=torch.float64, device="cpu")
        of_tokens = _leaf(given, place, self.symbols.sums, lambda x: x.expand(_TOKENS).cumsum(0))

        def leaf(x: Expr) -> torch.Tensor:
            if x in (I, J, T) or (not x.is_Symbol and x.args[0] in (I, J)):
                column = x == J or (not x.is_Symbol and x.args[0] == J)
                values = place if x.is_Symbol else of_tokens(x.func(T)).expand(_TOKENS)
                return values.view(1, -1) if column else values.view(-1, 1)
            return of_tokens(x)

        return evaluate(expr, leaf).expand(_TOKENS, _TOKENS)

    def finite(self, *exprs: Expr, later: bool = False) -> tuple[Tensors, list[torch.Tensor]]:
        """Arrays for which the expressions are finite where j <= i, and their values."""
        kept = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool, device="cpu")
        kept = kept.triu(1) if later else kept.tril()
        for sign in (0, 1, -1):
            given = self.draw(sign)
            values = [self.grid(x, given).masked_fill(~kept, 0.0) for x in exprs]
            if all(bool(M.isfinite().all()) for M in values):
                return given, values
        text = "is not finite, whether arrays are normal, positive or negative: at i, j ="
        i, j = divmod(int(torch.stack(values).isfinite().all(0).flatten().int().argmin()), _TOKENS)
        raise CompileError(ROLE, self.name, f"{text} {i}, {j} with {_text(given)}")

    def largest(self, expr: Expr, later: bool) -> tuple[tuple[int, int], float, str]:
        given, (M,) = self.finite(expr, later=later)
        at = int(M.abs().nan_to_num(nan=torch.inf).argmax())
        return divmod(at, _TOKENS), float(M.flatten()[at]), _text(given)

    def minor(self, past: Expr) -> tuple[tuple[int, ...] | None, tuple[float, float], str]:
        """Rows i, k and columns j, l < i, k of the largest 2 x 2 minor, None if all vanish; its two products."""
        given, (M,) = self.finite(past)
        worst, most, products = None, _TOLERANCE, (0.0, 0.0)
        for k in range(_TOKENS):
            for i in range(2, k):
                for j in range(i):
                    for l in range(j):
                        left, right = float(M[i, j] * M[k, l]), float(M[i, l] * M[k, j])
                        if abs(left - right) > most * max(abs(left), abs(right)):
                            most = abs(left - right) / max(abs(left), abs(right))
                            worst, products = (i, k, j, l), (left, right)
        return worst, products, _text(given)

    def verify(self, mask: Mask, function: Callable[..., Any], past: Expr, own: Expr) -> None:
        """CompileError if the factors or the expression differ from the values of the function."""
        given, (M, diagonal) = self.finite(past, own)
        M = M.tril(-1) + diagonal.diag().diag()
        place = torch.arange(_TOKENS, dtype=torch.float64, device="cpu")
        leaf = _leaf(given, place, self.symbols.sums, lambda x: x.expand(_TOKENS).cumsum(0))
        gate, total, row, column, more = (
            evaluate(x, leaf).expand(_TOKENS) for x in (mask.gate, mask.total, mask.row, mask.column, mask.own)
        )
        G = gate.cumsum(0) + total
        product = (row.unsqueeze(1) * column * (G.unsqueeze(1) - G).exp()).tril() + more.diag()
        self._compare("the product of its factors", product, M, given, _TOLERANCE)
        concrete = torch.zeros_like(M)
        for i in range(_TOKENS):
            for j in range(i + 1):
                try:
                    concrete[i, j] = function(torch.tensor(i), torch.tensor(j), **given)
                except Exception as error:
                    text = f"can be traced, but fails at i = {i}, j = {j} on tensors: {type(error).__name__}: {error}"
                    raise CompileError(ROLE, mask.name, text) from error
        self._compare("what it gives when it runs", concrete, M, given, _FLOAT32)

    def _compare(self, what: str, found: torch.Tensor, want: torch.Tensor, given: Tensors, bound: float) -> None:
        error = ((found - want).abs() / want.abs().max().clamp(min=1e-30)).nan_to_num(nan=torch.inf)
        if bool(error.max() > bound):
            i, j = divmod(int(error.argmax()), _TOKENS)
            text = f"its expression gives {want[i, j]:.6g} at i = {i}, j = {j}, {what} is {found[i, j]:.6g}"
            raise CompileError(ROLE, self.name, f"{text} with {_text(given)}")


def _text(given: Tensors) -> str:
    def number(x: torch.Tensor) -> str:
        values = ", ".join(f"{y:.3g}" for y in x.flatten().tolist())
        return f"[{values}]" if x.dim() else values

    return ", ".join(f"{name} = {number(x)}" for name, x in given.items()) or "no arrays"
