"""`input_meta` of a variant: symbolic shapes, dtypes and constants of its inputs, by name."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

__all__ = ["ConstExpr", "InputMeta", "KERNELS_OWN", "OURS", "Part", "SymbTensor"]

STATE, CHUNK_STATE = "prev_s", "chunk_state"
RESERVED = ("cu_seqlens", "self", "sp")
KERNELS_OWN = ("B", "C", "S", "T", "dS", "do", "o")
"""Names of the code of kernels: sizes, the state, the outputs, and gradients of both."""
OURS = re.compile(r"(gates|gated|f32|grad|keep|d|d?S_)_|(operand|scores|inverse|arg|sum)\d")
"""How names of values begin that flexsp computes."""


@dataclass(frozen=True)
class ConstExpr:
    """A size that kernels specialise on, with the value or values it may take: ``ConstExpr("K", [64, 128])``."""

    name: str
    values: int | Sequence[int]

    @property
    def choices(self) -> tuple[int, ...]:
        return (self.values,) if isinstance(self.values, int) else tuple(self.values)

    def __post_init__(self) -> None:
        if not self.choices or any(type(n) is not int or n < 1 for n in self.choices):
            raise ValueError(f"ConstExpr {self.name!r}: expected positive integers, got {self.values!r}")


Size = str | int | ConstExpr


@dataclass(frozen=True)
class SymbTensor:
    """Shape and dtype of one input. Sizes are ConstExprs, integers or names of sizes that vary ("T", "NS", "NC").

    Tokens are ["T", heads, ...], or [heads, "T", ...] where calls bring heads first; the functions get [C, ...].

    before: makes this a shifted input: its values are those of the named input one token earlier, across ranks too,
        and zeros where a sequence or a document begins. Calls leave it out, or give the values [N, H, ...] that stand
        before the first tokens, by the rules of initial states.
    rows: the number of rows of each token, the same in all inputs that have rows. Calls give [T, rows, H, ...] or
        [H, T, rows, ...]. The functions then work on rows as they otherwise work on tokens, the rows of a token one
        after the other. A chunk of C rows may end inside a token. The output of a token is that of its last row.
    row: for an input without rows beside inputs with rows: the row, from 0 or backwards from -1, at which a token has
        this value; its other rows have zeros. None gives all rows of a token the value.
    clamped: these are log gates <= 0. The functions get those whose decay is 0 as the lowest one that lets sums keep
        their digits (`flexsp.kernels.gates`), and they have no gradient. Kernels clamp them as they read them.
    """

    shape: Sequence[Size]
    dtype: torch.dtype = torch.float32
    before: str | None = None
    rows: int | None = None
    row: int | None = None
    clamped: bool = False


@dataclass(frozen=True)
class Extent:
    """A sum of sizes by name and of numbers, such as K + 1."""

    terms: tuple[str, ...]

    def __str__(self) -> str:
        """As a factor in code."""
        return self.sum if len(self.terms) == 1 else f"({self.sum})"

    @property
    def sum(self) -> str:
        return " + ".join(self.terms)

    def number(self, sizes: Mapping[str, int]) -> int:
        return sum(int(x) if x.isdigit() else sizes[x] for x in self.terms)


@dataclass(frozen=True)
class Part:
    """A part of a state that is stored in one matrix with the others.

    `sizes` are names: [K, V] for a matrix, [V] for a row, [K] for a column, [] for a number. `first` is the first row
    of the part in the stored matrix; for a column it is the column.
    """

    name: str
    sizes: tuple[str, ...]
    first: Extent


@dataclass(frozen=True)
class InputMeta:
    """`input_meta` sorted by role: `tokens` [T, H, ...], `params` [H, ...], numbers, and the state [NS, H, ...].

    earlier: the shifted inputs, with the inputs whose values they have one token earlier.
    heads_first: inputs that calls give as [H, T, ...]; in `tokens` they are [T, H, ...].
    rows: the number of rows of a token; None if no input has rows.
    """

    tokens: dict[str, SymbTensor]
    params: dict[str, SymbTensor]
    numbers: dict[str, float]
    state: SymbTensor
    earlier: dict[str, str]
    heads_first: tuple[str, ...] = ()
    rows: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> InputMeta:
        """Sorts a user's `input_meta`; ValueError names the entry that does not fit."""
        tokens: dict[str, SymbTensor] = {}
        params: dict[str, SymbTensor] = {}
        numbers: dict[str, float] = {}
        heads_first = []
        for name, what in given.items():
            if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
                raise ValueError(f"input_meta: expected names that arguments can have, got {name!r}")
            if name in RESERVED:
                raise ValueError(f"input_meta[{name!r}]: expected another name, calls have an argument of this one")
            if isinstance(what, (int, float)) and not isinstance(what, bool):
                numbers[name] = what
            elif not isinstance(what, SymbTensor):
                raise ValueError(f"input_meta[{name!r}]: expected a SymbTensor or a number, got {what!r}")
            elif name in (STATE, CHUNK_STATE):
                continue
            elif "T" in what.shape[:1]:
                tokens[name] = what
            elif "T" in what.shape[1:2]:
                heads_first.append(name)
                tokens[name] = replace(what, shape=["T", what.shape[0], *what.shape[2:]])
            elif "T" in what.shape:
                raise ValueError(
                    f"input_meta[{name!r}]: expected 'T' as the first size, or as the second, behind the heads, got "
                    f"{what.shape!r}"
                )
            elif what.clamped:
                raise ValueError(f"input_meta[{name!r}]: expected 'T' among the sizes of clamped gates")
            else:
                params[name] = what
        state = given.get(STATE)
        if not isinstance(state, SymbTensor) or len(state.shape) not in (3, 4):
            raise ValueError(
                f"input_meta[{STATE!r}]: expected SymbTensor([NS, H, K, V]) or ([NS, H, K]), got {state!r}"
            )
        if not tokens:
            raise ValueError("input_meta: expected at least one SymbTensor with 'T' as its first size, got none")
        other = given.get(CHUNK_STATE, state)
        if not isinstance(other, SymbTensor) or list(other.shape[1:]) != list(state.shape[1:]):
            raise ValueError(f"input_meta[{CHUNK_STATE!r}]: expected sizes {list(state.shape[1:])} after the first")
        heads = state.shape[1]
        for name, what in (tokens | params).items():
            at = 1 if name in tokens else 0
            if len(what.shape) <= at or what.shape[at] != heads:
                size, got = 0 if name in heads_first else at, given[name].shape
                raise ValueError(f"input_meta[{name!r}]: expected the heads {heads!r} as size {size}, got {got!r}")
            _check_sizes(name, what.shape[at + 1 :], heads)
            _check_before(name, what, tokens)
        _check_sizes(STATE, state.shape[2:], heads)
        earlier = {name: what.before for name, what in tokens.items() if what.before is not None}
        return cls(tokens, params, numbers, state, earlier, tuple(heads_first), _rows_of(tokens, params))

    @property
    def clamped(self) -> frozenset[str]:
        """Log gates that are clamped."""
        return frozenset(name for name, what in self.tokens.items() if what.clamped)

    def dims(self, name: str) -> int:
        """Dimensions of an input of tokens in a call without a batch."""
        return len(self.tokens[name].shape) + (self.tokens[name].rows is not None)

    @property
    def state_sizes(self) -> tuple[Size, ...]:
        """Sizes of one head's state: (K, V) or (K,)."""
        return tuple(self.state.shape[2:])

    def looks(self, sizes: Mapping[str, int], T: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each input of T tokens, at these sizes by name; heads that are not given are 32."""
        found = {}
        for name, what in (self.tokens | self.params).items():
            names = [x.name if isinstance(x, ConstExpr) else x for x in what.shape]
            shape = [x if isinstance(x, int) else T if x == "T" else sizes.get(x, 32) for x in names]
            found[name] = what.dtype, tuple(shape)
        return found

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Every ConstExpr with its choices; ValueError where one name has two different lists."""
        found: dict[str, tuple[int, ...]] = {}
        for what in (*self.tokens.values(), *self.params.values(), self.state):
            for size in what.shape:
                if isinstance(size, ConstExpr) and found.setdefault(size.name, size.choices) != size.choices:
                    raise ValueError(
                        f"ConstExpr {size.name!r}: two lists of values, {found[size.name]} and {size.choices}"
                    )
        return found


def _check_before(name: str, what: SymbTensor, tokens: Mapping[str, SymbTensor]) -> None:
    if what.before is None:
        return
    if name not in tokens or what.before not in tokens or tokens[what.before].before is not None:
        own = [x for x, other in tokens.items() if other.before is None]
        raise ValueError(
            f"input_meta[{name!r}]: expected tokens, and as before one of the tokens {own}, got {what.before!r}"
        )
    shape, rows = tokens[what.before].shape, tokens[what.before].rows
    if list(what.shape) != list(shape):
        raise ValueError(f"input_meta[{name!r}]: expected the shape {shape!r} of {what.before!r}, got {what.shape!r}")
    if what.rows != rows:
        raise ValueError(f"input_meta[{name!r}]: expected rows = {rows} of {what.before!r}, got {what.rows}")


def _rows_of(tokens: Mapping[str, SymbTensor], params: Mapping[str, SymbTensor]) -> int | None:
    """Rows of a token, None where no input has rows; ValueError where inputs disagree."""
    found: tuple[str, int] | None = None
    for name, what in {**tokens, **params}.items():
        if name in params and (what.rows is not None or what.row is not None):
            raise ValueError(f"input_meta[{name!r}]: expected neither rows nor row without 'T' among its sizes")
        if what.rows is None:
            continue
        if type(what.rows) is not int or what.rows < 1:
            raise ValueError(f"input_meta[{name!r}]: expected a positive integer as rows, got {what.rows!r}")
        if what.row is not None:
            raise ValueError(f"input_meta[{name!r}]: expected rows or row, got rows = {what.rows} and row = {what.row}")
        if found is not None and found[1] != what.rows:
            raise ValueError(f"input_meta[{name!r}]: expected rows = {found[1]} as of {found[0]!r}, got {what.rows}")
        found = name, what.rows
    for name, what in tokens.items():
        if what.row is None:
            continue
        if found is None:
            raise ValueError(f"input_meta[{name!r}]: expected row beside inputs with rows only, and none has rows")
        n = found[1]
        if type(what.row) is not int or not -n <= what.row < n:
            raise ValueError(f"input_meta[{name!r}]: expected row from {-n} to {n - 1}, got {what.row!r}")
    return None if found is None else found[1]


def _check_sizes(name: str, sizes: Sequence[Size], heads: Size) -> None:
    taken = {"B": "sequences", "T": "tokens", getattr(heads, "name", heads): "heads"}
    for size in sizes:
        if isinstance(size, ConstExpr) and size.name in taken:
            raise ValueError(
                f"input_meta[{name!r}]: expected another name for a size than {size.name!r}, which are the "
                f"{taken[size.name]}"
            )
        if not isinstance(size, ConstExpr) and (type(size) is not int or size < 1):
            raise ValueError(
                f"input_meta[{name!r}]: expected ConstExprs or positive integers as sizes after the heads, got {size!r}"
            )
