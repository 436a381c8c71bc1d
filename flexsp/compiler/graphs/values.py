"""Tiles of generated code: the text that computes a value, and what is known about its padding."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from flexsp.exceptions import NotAvailable

__all__ = [
    "NotEmittable", "Value", "block", "broadcast", "index_text", "inner", "is_state", "limit", "number",
    "operator_name", "steady_at", "type_of", "zero_at",
]  # fmt: skip


class NotEmittable(NotAvailable):
    """A graph holds an operation that no kernel is made of; it runs in PyTorch."""


def operator_name(node: Any) -> str:
    """Name of an operator as users know it."""
    schema = getattr(node.target, "_schema", None)
    return str(node.target.__name__ if schema is None else schema.name).rpartition("::")[2]


def is_state(name: str) -> bool:
    """Whether a placeholder is the state, its gradient, or a part of either."""
    return name.split("__")[0] in ("S", "dS")


@dataclass(frozen=True)
class Value:
    """A tile over `sizes`; an axis of size "1" has one element, and no padding.

    `code` is the variable or expression that holds it. `view` says how to read that: as it is, transposed, or a vector
    as a "row" [1, N] or a "column" [N, 1].

    What is known about the padding:
        zero: axes whose padding is exactly 0, also in the padding of another axis.
        wild: the padding may be inf or NaN where it is not known to be 0, so that 0 times it may not be 0.
        low: -inf is the only such number; its exponential is 0.
        steady: axes whose padding repeats numbers that are no padding, so that its exponential overflows no sooner.

    `raw` tiles are as loaded, in the inputs' dtype; `truth` tiles are masks.
    """

    code: str
    sizes: tuple[str, ...]
    zero: frozenset[int] = frozenset()
    wild: bool = False
    raw: bool = False
    low: bool = False
    steady: frozenset[int] = frozenset()
    truth: bool = False
    view: Literal["", "transposed", "row", "column"] = ""

    def __post_init__(self) -> None:
        if self.wild and all(axis in self.zero or size == "1" for axis, size in enumerate(self.sizes)):
            object.__setattr__(self, "wild", False)

    @property
    def text(self) -> str:
        """The tile in code."""
        return _VIEWS[self.view].format(inner(self.code) if self.view in ("row", "column") else self.code)

    @property
    def f32(self) -> str:
        return f"{inner(self.text)}.to(tl.float32)" if self.raw or self.truth else self.text

    @property
    def is_transposed(self) -> bool:
        """Whether the tile is the transpose of its variable."""
        return self.view == "transposed" and self.code.replace("_", "").isalnum()

    def now(self, code: str, **known: Any) -> Value:
        """A tile of the same sizes that `code` computes from this one."""
        return replace(self, code=code, **{"view": "", **known})

    def without(self, axis: int, code: str) -> Value:
        """A tile without one of the axes, which `code` computes from this one."""
        zero, steady = (frozenset(a - (a > axis) for a in of if a != axis) for of in (self.zero, self.steady))
        sizes = self.sizes[:axis] + self.sizes[axis + 1 :]
        return self.now(code, sizes=sizes, zero=zero, steady=steady, raw=False, truth=False)

    def with_axis(self, axis: int) -> Value:
        """A vector as a row (axis 0) or a column (axis 1): [1, N] or [N, 1]."""
        zero, steady = (frozenset(a + (a >= axis) for a in of) for of in (self.zero, self.steady))
        sizes = self.sizes[:axis] + ("1",) + self.sizes[axis:]
        code, view = self.text if self.truth else self.f32, "row" if axis == 0 else "column"
        return self.now(code, sizes=sizes, zero=zero, steady=steady, raw=False, view=view)

    def transposed(self) -> Value:
        """The transpose of a tile of two axes; for a tile that was computed transposed, the computed one."""
        zero, steady = (frozenset(1 - a for a in of) for of in (self.zero, self.steady))
        view = _TRANSPOSED[self.view]
        return self.now(self.code, sizes=self.sizes[::-1], zero=zero, steady=steady, view=view)


_VIEWS = {"": "{}", "transposed": "tl.trans({})", "row": "{}[None, :]", "column": "{}[:, None]"}
_TRANSPOSED = {"": "transposed", "transposed": "", "row": "column", "column": "row"}


def block(size: str) -> str:
    """Name of the tile size of an axis."""
    return size if size == "C" or size.isdigit() else f"B{size}"


def limit(size: str) -> str:
    """The text of an axis's size, which bounds its indices."""
    return "length" if size == "C" else size


def inner(text: str) -> str:
    """Text as an operand."""
    simple = text.replace("_", "").replace(".", "").isalnum()
    closed = text.endswith((")", "]")) and not any(sign in text for sign in (" + ", " - ", " / ", " * ", " & ", " | "))
    return text if simple or closed else f"({text})"


def number(x: Any) -> str:
    if isinstance(x, bool):
        return str(x)
    if isinstance(x, float) and math.isinf(x):
        return f'float("{"-" if x < 0 else ""}inf")'
    return repr(float(x))


def type_of(fill: Any) -> str:
    return "tl.int1" if isinstance(fill, bool) else "tl.float32"


def index_text(index: Any, size: str) -> str:
    if not isinstance(index, int):
        raise NotEmittable("no kernel is made of an index that is no constant yet")
    return str(index) if index >= 0 else f"{limit(size)} - {-index}"


def broadcast(a: Value, b: Value) -> tuple[str, ...]:
    if not a.sizes or not b.sizes:
        return a.sizes or b.sizes
    long, short = (a, b) if len(a.sizes) >= len(b.sizes) else (b, a)
    other = ("1",) * (len(long.sizes) - len(short.sizes)) + short.sizes
    return tuple(y if x == "1" else x for x, y in zip(long.sizes, other, strict=True))


def zero_at(x: Value, axis: int) -> bool:
    return (axis in x.zero) if x.sizes else x.text == "0.0"


def steady_at(x: Value, axis: int) -> bool:
    return not x.sizes or x.sizes[axis] == "1" or axis in x.steady
