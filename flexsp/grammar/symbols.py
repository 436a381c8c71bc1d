"""A scalar function of two token positions, run on symbols: its value as a sympy expression.

Every question about the order of i and j has one answer where j < i, where j == i and where j > i, so the function is
run once for each and its `if i < j` take the branch of the case. Everything else must be arithmetic.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import sympy
import torch

from flexsp.compiler import CompileError
from flexsp.compiler.frontend.trace import user_line

__all__ = ["ROLE", "Expr", "I", "J", "T", "Symbols", "evaluate", "show", "trace"]

Expr = Any  # a sympy expression
ROLE = "custom_mask"
I, J, T = sympy.symbols("i j t", integer=True)
Case = Literal["past", "own", "future"]

_OPAQUE: dict[str, Callable[..., torch.Tensor]] = {
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "relu": torch.relu, "abs": torch.abs, "sin": torch.sin,
    "cos": torch.cos, "log1p": torch.log1p, "expm1": torch.expm1, "softplus": torch.nn.functional.softplus,
    "logsigmoid": torch.nn.functional.logsigmoid, "silu": torch.nn.functional.silu, "maximum": torch.maximum,
    "minimum": torch.minimum, "where": lambda c, x, y: torch.where(c != 0, x, y), "lt": torch.lt, "le": torch.le,
    "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne,
}  # fmt: skip
_ALIASES = {
    "log_sigmoid": "logsigmoid", "absolute": "abs", "true_divide": "div", "multiply": "mul", "subtract": "sub",
    "negative": "neg", "divide": "div",
}  # fmt: skip
_LEVELS = {
    "bit_length", "bitwise_and", "bitwise_or", "bitwise_xor", "ceil", "floor", "floor_divide", "floordiv", "fmod",
    "log2", "lshift", "mod", "remainder", "rshift", "trunc", "xor",
}  # fmt: skip
"""Operators that split positions into levels or blocks."""
_SAME = {"float", "double", "to", "contiguous"}
_ORDERS = ("lt", "le", "gt", "ge", "eq", "ne")


class Refused(Exception):
    """The function's current line cannot be traced."""


@dataclass
class Symbols:
    """What a trace has seen: running sums, and how the arguments are used."""

    case: Case = "past"
    sums: dict[Expr, int] = field(default_factory=dict)
    params: set[str] = field(default_factory=set)
    indexed: set[str] = field(default_factory=set)
    ordered: bool = False  # whether i < j or the like was asked

    def param(self, expr: Expr) -> Expr:
        """An array used without an index: a parameter of the head."""
        for atom in expr.atoms(sympy.core.function.AppliedUndef):
            if atom.func.__name__.startswith("sum_"):
                raise Refused("a running sum is used without an index; write x.cumsum(0)[i] or [j]")
            if atom.func.__name__.startswith("in_"):
                self.params.add(atom.func.__name__.removeprefix("in_"))
                expr = expr.subs(atom, sympy.Symbol(atom.func.__name__, real=True))
        return expr


class Value:
    """A scalar made of i, j and array entries, or (`array`) one value for each token, an expression in T."""

    def __init__(self, expr: Expr, symbols: Symbols, array: bool = False) -> None:
        self.expr, self.symbols, self.array = expr, symbols, array

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(function.__name__, *args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: _call(name, self, *args, **kwargs)

    def __getitem__(self, index: Any) -> Value:
        if not self.array:
            raise Refused("what is no array is indexed")
        if not isinstance(index, Value) or index.expr not in (I, J):
            raise Refused("an array is indexed with something else than i or j alone")
        names = {atom.func.__name__ for atom in self.expr.atoms(sympy.core.function.AppliedUndef)}
        self.symbols.indexed |= {name.removeprefix("in_") for name in names if name.startswith("in_")}
        return Value(self.expr.subs(T, index.expr), self.symbols)

    def __bool__(self) -> bool:
        if self.expr.is_number:
            return bool(self.expr)
        raise Refused("control flow depends on values; use torch.where (only the order of i and j may be asked)")

    def __float__(self) -> float:
        raise Refused("a number is expected where positions and arrays are not known yet; use torch.exp for math.exp")

    __int__ = __index__ = __float__  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Any:
        raise Refused("goes through a value; write it for one i and one j")


def _method(name: str, swap: bool = False) -> Callable[..., Any]:
    return (lambda a, b: _call(name, b, a)) if swap else (lambda a, *b: _call(name, a, *b))


for _name in ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod", "xor", "lshift", "rshift"):
    setattr(Value, f"__{_name}__", _method(_name))
    setattr(Value, f"__r{_name}__", _method(_name, swap=True))
for _name in ("neg", "abs", "and", "or", "invert", *_ORDERS):
    setattr(Value, f"__{_name}__", _method(_name))


def _call(name: str, *args: Any, **kwargs: Any) -> Any:
    name = name.strip("_")
    name = _ALIASES.get(name, name)
    if name in _SAME:
        return args[0]
    if name == "cumsum":
        return _cumsum(*args, **kwargs)
    if name == "clamp":
        return _clamp(*args, **kwargs)
    if kwargs:
        raise Refused(f"{name} takes {', '.join(kwargs)}, which is not supported")
    found = [x for x in args if isinstance(x, Value)]
    symbols = found[0].symbols
    array = all(x.array for x in found)
    exprs = [_expression(x, array, symbols) for x in args]
    if name in _ORDERS:
        return Value(_compare(name, *exprs, symbols=symbols), symbols, array)
    rule = _ALGEBRA.get(name)
    if name in _LEVELS and any(x.has(I) or x.has(J) for x in exprs):
        raise Refused(
            f"{name} takes positions apart into levels or blocks. Levels, as of log-linear attention, need more "
            "states the longer the sequence is: there is no state of fixed size. Blocks may be packed as documents "
            "(cu_seqlens)"
        )
    if rule is None and name not in _OPAQUE:
        known = ", ".join(sorted(set(_OPAQUE) | set(_ALGEBRA) | {"clamp", "cumsum"}))
        raise Refused(f"operator {name!r} is not supported; supported are {known}")
    return Value(rule(*exprs) if rule else _opaque(name, *exprs), symbols, array)


def _expression(x: Any, array: bool, symbols: Symbols) -> Expr:
    if isinstance(x, Value):
        return symbols.param(x.expr) if x.array and not array else x.expr
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        what = "a tensor that is no argument" if isinstance(x, torch.Tensor) else repr(x)
        raise Refused(f"uses {what}; make it an argument, which calls give by name")
    return _number(x)


def _number(x: float) -> Expr:
    return sympy.Integer(int(x)) if float(x).is_integer() else sympy.Float(x)


def _opaque(name: str, *args: Expr) -> Expr:
    return sympy.Function(f"op_{name}", real=True)(*args)


def _power(base: Expr, exponent: Expr) -> Expr:
    if exponent.is_number:
        return base**exponent
    if base.is_number and base > 0:
        return sympy.exp(sympy.Float(math.log(base)) * exponent)
    powers = [factor.as_base_exp() for factor in sympy.Mul.make_args(base)]
    return sympy.exp(exponent * sympy.Add(*(n * sympy.log(x) for x, n in powers)))


def _where(condition: Expr, x: Expr, y: Expr) -> Expr:
    if condition.is_number:
        return x if condition else y
    return _opaque("where", condition, x, y)


_ALGEBRA: dict[str, Callable[..., Expr]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "rsub": lambda a, b: b - a,
    "div": lambda a, b: a / b, "truediv": lambda a, b: a / b, "neg": lambda a: -a, "pow": _power, "exp": sympy.exp,
    "exp2": lambda a: sympy.exp(sympy.Float(math.log(2)) * a), "log": sympy.log, "square": lambda a: a**2,
    "sqrt": lambda a: a ** sympy.Rational(1, 2), "rsqrt": lambda a: a ** sympy.Rational(-1, 2),
    "reciprocal": lambda a: 1 / a, "where": _where, "and": lambda a, b: a * b, "or": lambda a, b: a + b - a * b,
    "invert": lambda a: 1 - a, "logical_and": lambda a, b: a * b, "logical_or": lambda a, b: a + b - a * b,
    "logical_not": lambda a: 1 - a,
}  # fmt: skip


def _cumsum(x: Value, dim: int = 0) -> Value:
    if not x.array or dim not in (0, -1):
        raise Refused("cumsum is of an array, over its only dimension: x.cumsum(0)")
    n = x.symbols.sums.setdefault(x.expr, len(x.symbols.sums))
    return Value(sympy.Function(f"sum_{n}", real=True)(T), x.symbols, True)


def _clamp(x: Value, min: Any = None, max: Any = None) -> Any:
    for name, bound in (("maximum", min), ("minimum", max)):
        x = x if bound is None else _call(name, x, bound)
    return x


def _compare(name: str, a: Expr, b: Expr, *, symbols: Symbols) -> Expr:
    """1 or 0 where the order of i and j decides; else a function of its operands."""
    d = sympy.expand(a - b)
    slope = d.coeff(I)
    offset = sympy.expand(d - slope * (I - J))
    if not (d.has(I) and d.has(J)) or not (slope.is_number and offset.is_number):
        return _opaque(name, a, b)
    symbols.ordered |= name not in ("eq", "ne")
    ends = {"past": (1, sympy.oo), "own": (0, 0), "future": (-sympy.oo, -1)}[symbols.case]
    low, high = sorted(slope * end + offset for end in ends)
    if name in ("gt", "ge"):
        name, low, high = {"gt": "lt", "ge": "le"}[name], -high, -low
    if name in ("eq", "ne"):
        true, false = low == high == 0, low > 0 or high < 0
    else:
        true, false = (high < 0, low >= 0) if name == "lt" else (high <= 0, low > 0)
    if name == "ne":
        true, false = false, true
    if not (true or false):
        raise Refused(
            "the mask depends on how far i and j are apart (a band or window): no state has one size and forgets at a "
            "distance. Only i < j, i == j and the like may be asked"
        )
    return sympy.Integer(1 if true else 0)


# Tracing --------------------------------------------------------------------------------------------------------------


def trace(function: Callable[..., Any]) -> tuple[str, tuple[str, ...], Symbols, dict[Case, Expr]]:
    """(name, names of the arrays, what was met, the value in each case); CompileError says what cannot be traced."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        given = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise CompileError(ROLE, name, f"expected a function of i, j and arrays, got {function!r}") from error
    if len(given) < 2 or any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in given):
        raise CompileError(ROLE, name, "expected the arguments i, j and the names of arrays, no *args and no **kwargs")
    arrays = tuple(p.name for p in given[2:] if p.default is p.empty)
    symbols, found = Symbols(), {}
    cases: tuple[Case, ...] = ("past", "own", "future")
    for case in cases:
        symbols.case = case
        values = {n: Value(sympy.Function(f"in_{n}", real=True)(T), symbols, True) for n in arrays}
        try:
            found[case] = _result(function(Value(I, symbols), Value(J, symbols), **values), symbols)
        except Refused as error:
            raise CompileError(ROLE, name, f"{error}{_line(error)}") from error
        except Exception as error:
            text = f"cannot be traced{_line(error)}: {type(error).__name__}: {error}"
            raise CompileError(ROLE, name, text) from error
    _check_use(name, arrays, symbols, found)
    return name, arrays, symbols, found


def _result(x: Any, symbols: Symbols) -> Expr:
    if isinstance(x, (bool, int, float)):
        return _number(x)
    if not isinstance(x, Value):
        raise Refused(f"expected one number as result, got {type(x).__name__}")
    return symbols.param(x.expr) if x.array else x.expr


def _check_use(name: str, arrays: tuple[str, ...], symbols: Symbols, found: dict[Case, Expr]) -> None:
    used = symbols.params | symbols.indexed | {n for n in arrays if any(e.has(_function(n)) for e in symbols.sums)}
    for n in arrays:
        if n in symbols.params & symbols.indexed:
            text = f"argument {n!r} is used with an index, as an array of tokens, and without, as a number of the head"
            raise CompileError(ROLE, name, text + "; index it with i or j everywhere")
        if n not in used:
            raise CompileError(ROLE, name, f"argument {n!r} is not used; leave it out")
    for case, expr in found.items():
        if expr.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo):
            raise CompileError(ROLE, name, f"is not finite for {_CASES[case]}: {show(expr)}")
        if expr.has(sympy.I):
            raise CompileError(ROLE, name, f"is not a real number for {_CASES[case]}: {show(expr)}")


_CASES = {"past": "j < i", "own": "j == i", "future": "j > i"}


def _function(name: str) -> Any:
    return sympy.Function(f"in_{name}", real=True)(T)


_OWN = (str(Path(torch.__file__).parent), __file__)


def _line(error: Exception) -> str:
    """Where the user's code raised, as the end of a sentence."""
    line = user_line(error, _OWN)
    return f" at {line}" if line else ""


# Expressions ----------------------------------------------------------------------------------------------------------


def show(expr: Expr, sums: dict[Expr, int] | None = None) -> str:
    """An expression as text: a[i] for an entry of an array, cumsum(a)[i] of a running sum."""
    summed = {n: e for e, n in (sums or {}).items()}
    marks = {}
    for atom in expr.atoms(sympy.core.function.AppliedUndef):
        kind, _, name = atom.func.__name__.partition("_")
        if kind == "in":
            marks[atom] = f"{name}[{atom.args[0]}]"
        elif kind == "sum":
            inner = show(summed[int(name)], sums).replace("[t]", "") if int(name) in summed else "..."
            marks[atom] = f"cumsum({inner})[{atom.args[0]}]"
    plain = expr.xreplace({atom: sympy.Symbol(text) for atom, text in marks.items()})
    floats = {x: sympy.Float(x, 4) for x in plain.atoms(sympy.Float)}
    return str(plain.xreplace(floats)).replace("op_", "").replace("in_", "")


def evaluate(expr: Expr, leaf: Callable[[Expr], torch.Tensor]) -> torch.Tensor:
    """An expression's value; ``leaf`` gives those of symbols, entries of arrays and running sums."""
    known: dict[Expr, torch.Tensor] = {}

    def value(x: Expr) -> Any:
        if x.is_number:
            return float(x)
        if x not in known:
            known[x] = _apply(x, value, leaf)
        return known[x]

    found = value(expr)
    return found if isinstance(found, torch.Tensor) else leaf(T).new_tensor(found)


_SYMPYS = {sympy.exp: torch.exp, sympy.log: torch.log, sympy.Abs: torch.abs}  # Abs(x) is what sqrt(x**2) becomes


def _apply(x: Expr, value: Callable[[Expr], Any], leaf: Callable[[Expr], torch.Tensor]) -> Any:
    if x.is_Symbol:
        return leaf(x)
    if x.is_Add or x.is_Mul:
        total, *rest = [value(y) for y in x.args]
        for y in rest:
            total = total + y if x.is_Add else total * y
        return total
    if x.is_Pow:
        return value(x.base) ** value(x.exp)
    if x.func in _SYMPYS:
        return _SYMPYS[x.func](value(x.args[0]))
    kind, _, name = x.func.__name__.partition("_")
    if kind != "op":
        return leaf(x)
    like = leaf(T)
    args = [y if isinstance(y, torch.Tensor) else like.new_tensor(y) for y in map(value, x.args)]
    return _OPAQUE[name](*args).to(like.dtype)
