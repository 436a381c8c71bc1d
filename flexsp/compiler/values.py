"""Tiles as text: what generated code calls a value, and what is known of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from flexsp.exceptions import NotAvailable

__all__ = [
    "NotEmittable", "Value", "block", "broadcast", "index_text", "inner", "is_turned", "limit", "number", "turned",
    "type_of", "zero_at",
]  # fmt: skip


class NotEmittable(NotAvailable):
    """A graph holds an operation that no kernel is made of; it runs in PyTorch."""


@dataclass(frozen=True)
class Value:
    """`text` is a tile over `sizes`; an axis of size "1" has one element. `zero` are the axes whose padding is 0.

    `wild` values may be inf or NaN in their padding. `raw` ones are as they were loaded, of the inputs' type.
    """

    text: str
    sizes: tuple[str, ...]
    zero: frozenset[int] = frozenset()
    wild: bool = False
    raw: bool = False

    @property
    def f32(self) -> str:
        return f"{self.text}.to(tl.float32)" if self.raw else self.text


def turned(x: Value) -> Value:
    """The transpose of a tile of two axes; of one that was computed transposed, what was computed."""
    text = x.text
    if is_turned(text):
        text = text[len("tl.trans(") : -1]
    elif text.endswith("[:, None]"):
        text = text[: -len("[:, None]")] + "[None, :]"
    elif text.endswith("[None, :]"):
        text = text[: -len("[None, :]")] + "[:, None]"
    else:
        text = f"tl.trans({text})"
    return replace(x, text=text, sizes=x.sizes[::-1], zero=frozenset(1 - a for a in x.zero))


def is_turned(text: str) -> bool:
    """Whether text is tl.trans(a variable)."""
    inner = text.removeprefix("tl.trans(")
    return inner != text and inner.endswith(")") and inner[:-1].replace("_", "").isalnum()


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
