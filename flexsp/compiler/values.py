"""Tiles as text: what generated code calls a value, and what is known of it."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, replace
from typing import Any

from flexsp.exceptions import NotAvailable

__all__ = [
    "NotEmittable", "OURS", "Value", "block", "broadcast", "index_text", "inner", "is_state", "is_turned", "limit",
    "number", "steady_at", "turned", "type_of", "zero_at",
]  # fmt: skip


class NotEmittable(NotAvailable):
    """A graph holds an operation that no kernel is made of; it runs in PyTorch."""


OURS = re.compile(r"(gates|gated|f32|grad|keep|d)_|(operand|scores|inverse|arg|sum)\d")  # names of values of our own


def is_state(name: str) -> bool:
    """Whether a placeholder is the state, its gradient, or a part of either."""
    return name.split("__")[0] in ("S", "dS")


@dataclass(frozen=True)
class Value:
    """`text` is a tile over `sizes`; an axis of size "1" has one element, and no padding.

    What is known of the padding:
        zero: axes whose padding is exactly 0, also where another axis is in its padding.
        wild: it may be inf or NaN where it is not zero. So 0 times it is not 0.
        low: the only such number is -inf, whose exponential is 0.
        steady: axes whose padding repeats what is not padding, so that its exponential overflows no sooner.

    `raw` tiles are as they were loaded, of the inputs' type; `truth` tiles are masks.
    """

    text: str
    sizes: tuple[str, ...]
    zero: frozenset[int] = frozenset()
    wild: bool = False
    raw: bool = False
    low: bool = False
    steady: frozenset[int] = frozenset()
    truth: bool = False

    def __post_init__(self) -> None:
        if self.wild and all(axis in self.zero or size == "1" for axis, size in enumerate(self.sizes)):
            object.__setattr__(self, "wild", False)

    @property
    def f32(self) -> str:
        return f"{inner(self.text)}.to(tl.float32)" if self.raw or self.truth else self.text

    def without(self, axis: int, text: str) -> Value:
        """What `text` makes of it, without one of the axes."""
        zero, steady = (frozenset(a - (a > axis) for a in of if a != axis) for of in (self.zero, self.steady))
        sizes = self.sizes[:axis] + self.sizes[axis + 1 :]
        return replace(self, text=text, sizes=sizes, zero=zero, steady=steady, raw=False, truth=False)

    def with_axis(self, axis: int) -> Value:
        """A vector as a row (axis 0) or a column (axis 1): [1, N] or [N, 1]."""
        zero, steady = (frozenset(a + (a >= axis) for a in of) for of in (self.zero, self.steady))
        sizes = self.sizes[:axis] + ("1",) + self.sizes[axis:]
        text = self.text if self.truth else self.f32
        text = f"{inner(text)}[{'None, :' if axis == 0 else ':, None'}]"
        return replace(self, text=text, sizes=sizes, zero=zero, steady=steady, raw=False)


def turned(x: Value) -> Value:
    """The transpose of a tile of two axes; of one that was computed transposed, what was computed."""
    text = x.text
    if _is_trans(text):
        text = text[len("tl.trans(") : -1]
    elif text.endswith("[:, None]"):
        text = text[: -len("[:, None]")] + "[None, :]"
    elif text.endswith("[None, :]"):
        text = text[: -len("[None, :]")] + "[:, None]"
    else:
        text = f"tl.trans({text})"
    zero, steady = (frozenset(1 - a for a in of) for of in (x.zero, x.steady))
    return replace(x, text=text, sizes=x.sizes[::-1], zero=zero, steady=steady)


def is_turned(text: str) -> bool:
    """Whether text is tl.trans(a variable)."""
    return _is_trans(text) and text[len("tl.trans(") : -1].replace("_", "").isalnum()


def _is_trans(text: str) -> bool:
    """Whether text is one call of tl.trans."""
    if not text.startswith("tl.trans("):
        return False
    depth = list(itertools.accumulate({"(": 1, ")": -1}.get(x, 0) for x in text.removeprefix("tl.trans")))
    return depth.index(0) == len(depth) - 1


def block(size: str) -> str:
    """Name of the tile size of an axis."""
    return size if size == "C" or size.isdigit() else f"B{size}"


def limit(size: str) -> str:
    """What an index of an axis is below."""
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
        raise NotEmittable("an index that is no constant")
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
