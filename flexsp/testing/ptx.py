"""PTX as a list of instructions, and what its integers are in every thread of a block.

What depends on memory, on floating point or on the block's number is not known, and is None.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Instruction", "Integers", "Ptx", "bits_of"]

Number = Any  # int64 of every thread, or None where it is not known

_LITERAL = re.compile(r"^-?(?:0x[0-9a-fA-F]+|\d+)U?$")
_FLOATS = ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2")
_COMPARE: dict[str, Callable[..., Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


@functools.cache
def bits_of(kind: str) -> int:
    """Of a type's name such as "b32"; a predicate's is 1."""
    return 1 if kind == "pred" else int(re.sub(r"\D", "", kind) or 32)


def _split(text: str) -> list[str]:
    """Operands at the commas that are in no brackets."""
    return [x.strip() for x in re.split(r",(?![^{\[]*[}\]])", text) if x.strip()]


@dataclass(frozen=True)
class Instruction:
    """One instruction: `parts` are its name's, "st.shared.v4.b32" has four; `line` is that of the Python source."""

    text: str
    line: int
    guard: str | None
    negated: bool
    parts: tuple[str, ...]
    operands: tuple[str, ...]

    @functools.cached_property
    def shared(self) -> bool:
        return any(x.startswith("shared") for x in self.parts)

    @functools.cached_property
    def known(self) -> bool:
        """Whether what it computes may be known; floating-point numbers are moved and selected at most."""
        base = self.parts[0]
        return base in _OPERATIONS and (self.parts[-1] not in _FLOATS or base in ("mov", "selp"))

    @functools.cached_property
    def results(self) -> list[str]:
        """Registers of its first operand."""
        return re.findall(r"%\w+", self.operands[0])

    @staticmethod
    def of(text: str, line: int) -> Instruction:
        found = re.match(r"(?:@(!?)(%\w+)\s+)?(\S+)\s*(.*)", text, re.DOTALL)
        assert found is not None, text
        return Instruction(
            text, line, found[2], found[1] == "!", tuple(found[3].split(".")), tuple(_split(found[4]))
        )  # fmt: skip


def _bare(text: str) -> str:
    """Without the braces around assembly that is written inline."""
    return " ".join(re.sub(r"^[\s{}]+", "", text).split())


@dataclass(frozen=True)
class Ptx:
    """A kernel: the threads of a block, its instructions, and where its labels point to."""

    threads: int
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    @staticmethod
    def of(text: str) -> Ptx:
        """From Triton's text, which has one kernel and no calls."""
        threads = int(re.findall(r"\.reqntid (\d+)", text)[0])
        body = text[text.index("{", text.index(".reqntid")) + 1 :]
        body = re.sub(r"//.*", "", body[: body.index("\n}")])
        found: list[Instruction] = []
        labels: dict[str, int] = {}
        line, text = 0, ""
        # A branch by an index names a list of labels, which stands on lines of its own: they become its operands.
        lists = {x[1]: re.sub(r"\s+", " ", x[2]) for x in re.finditer(r"(\$?\w+):\s*\.branchtargets([^;]*);", body)}
        body = re.sub(r"\$?\w+:\s*\.branchtargets[^;]*;", "", body)
        body = re.sub(r"(brx\.idx(?:\.uni)?\s+%\w+),\s*(\$?\w+);", lambda x: f"{x[1]}, {lists[x[2]]};", body)
        for row in (x.strip() for x in body.splitlines()):
            if row.startswith(".loc"):
                line = int(row.split()[2])
            elif label := re.match(r"(\$\w+):$", row):
                labels[label[1]] = len(found)
            elif not row.startswith("."):
                *ended, text = f"{text} {row}".split(";")
                found += [Instruction.of(x, line) for x in map(_bare, ended) if x and not x.startswith(".")]
                text = _bare(text)
        return Ptx(threads, tuple(found), labels)


def _wrapped(x: Any, bits: int, signed: bool) -> Any:
    if bits >= 64:
        return x
    x = x & ((1 << bits) - 1)
    return np.where(x >> (bits - 1) & 1, x - (1 << bits), x) if signed else x


class Integers:
    """Registers of every thread of a block."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.registers: dict[str, Number] = {}

    def copy(self) -> Integers:
        other = Integers(self.threads)
        other.registers = dict(self.registers)
        return other

    def value(self, operand: str) -> Number:
        found = self.registers.get(operand, self)
        if found is not self:
            return found
        if _LITERAL.match(operand):
            return np.full(self.threads, int(operand.rstrip("U"), 0), np.int64)
        if operand == "%tid.x":
            return np.arange(self.threads, dtype=np.int64)
        if operand == "global_smem":
            return np.zeros(self.threads, np.int64)
        return None

    def address(self, operand: str) -> Number:
        """Of [register + offset]."""
        base, _, offset = operand.strip("[] ").partition("+")
        at = self.value(base.strip())
        return None if at is None else at + int(offset or 0)

    def mask(self, it: Instruction) -> Number:
        """Threads that execute a guarded instruction; None if not known."""
        guard = self.value(it.guard or "")
        return None if guard is None else (guard != 0) ^ it.negated

    def forget(self, it: Instruction) -> None:
        """Its registers get what is not known."""
        for name in it.results:
            self.registers[name] = None

    def run(self, it: Instruction) -> None:
        """An instruction that touches no memory."""
        if not it.operands:
            return
        if not it.known and it.guard is None:
            return self.forget(it)
        to, result, names = it.operands[0], self._result(it), it.results
        if it.parts[0] == "mov" and len(names) == 2 and result is not None and it.guard is None:
            self.registers[names[0]], self.registers[names[1]] = result & 0xFFFFFFFF, result >> 32 & 0xFFFFFFFF
            return
        if len(names) != 1 or to.startswith("{"):
            return self.forget(it)
        if it.guard is not None:
            result = self._guarded(it, result, self.registers.get(to))
        self.registers[to] = result

    def _guarded(self, it: Instruction, new: Number, old: Number) -> Number:
        mask = self.mask(it)
        if mask is None:
            return None
        if mask.all() or not mask.any():
            return new if mask.all() else old
        return None if new is None or old is None else np.where(mask, new, old)

    def _result(self, it: Instruction) -> Number:
        base, kind = it.parts[0], it.parts[-1]
        if not it.known:
            return None
        if base == "shfl" and not ("idx" in it.parts and _LITERAL.match(it.operands[2])):
            return None
        values = [None if x.startswith("{") else self.value(x) for x in it.operands[1:]]
        if base == "mov" and it.operands[1].startswith("{"):
            halves = [self.value(x) for x in _split(it.operands[1].strip("{}"))]
            if len(halves) != 2 or any(x is None for x in halves):
                return None
            return (halves[0] & 0xFFFFFFFF) | halves[1] << 32
        if base == "selp":
            return self._selected(values)
        if base == "and" and any(x is not None and not x.any() for x in values):
            return np.zeros(self.threads, np.int64)
        if any(x is None for x in values):
            return None
        bits, signed = bits_of(kind), kind.startswith("s")
        if base == "cvt":
            return self._converted(it, values[0])
        to = 1 if base == "setp" else 2 * bits if "wide" in it.parts else bits
        return _wrapped(_OPERATIONS[base](it, values, bits, signed), to, signed)

    def _selected(self, values: Sequence[Number]) -> Number:
        a, b, which = values
        if which is None:
            return None
        if (which != 0).all() or not which.any():
            return a if which.any() else b
        return None if a is None or b is None else np.where(which != 0, a, b)

    def _converted(self, it: Instruction, x: Any) -> Number:
        to, of = it.parts[-2:]
        if to in _FLOATS or of in _FLOATS:
            return None
        return _wrapped(_wrapped(x, bits_of(of), of[0] == "s"), bits_of(to), to[0] == "s")


def _product(it: Instruction, values: Sequence[Any], bits: int, signed: bool) -> Any:
    a, b = (_wrapped(x, bits, signed) for x in values[:2]) if bits <= 32 else values[:2]
    found = a * b
    if "hi" in it.parts:
        found = found >> bits
    return found + values[2] if len(values) > 2 else found


def _shifted_right(it: Instruction, values: Sequence[Any], bits: int, signed: bool) -> Any:
    if bits == 64 and not signed:
        return (values[0].astype(np.uint64) >> values[1].astype(np.uint64)).astype(np.int64)
    return _wrapped(values[0], bits, signed) >> np.minimum(values[1], 63)


def _field(it: Instruction, values: Sequence[Any], bits: int, signed: bool) -> Any:
    field = _shifted_right(it, values, bits, signed) & ((1 << values[2]) - 1)
    highest = 1 << np.maximum(values[2] - 1, 0)
    return np.where(field & highest != 0, field - 2 * highest, field) if signed else field


def _inserted(it: Instruction, values: Sequence[Any], bits: int, signed: bool) -> Any:
    mask = ((1 << values[3]) - 1) << values[2]
    return (values[1] & ~mask) | (values[0] << values[2] & mask)


def _by_table(it: Instruction, values: Sequence[Any], bits: int, signed: bool) -> Any:
    table, found = int(values[3][0]), np.zeros_like(values[0])
    for k in range(8):
        if table >> k & 1:
            picked = [x if k & bit else ~x for x, bit in zip(values, (4, 2, 1), strict=False)]
            found |= picked[0] & picked[1] & picked[2]
    return found


def _permuted(it: Instruction, values: Sequence[Any], bits: int, signed: bool) -> Any:
    """Four of the eight bytes of two words, or the signs of them."""
    both, found = (values[0] & 0xFFFFFFFF) | (values[1] & 0xFFFFFFFF) << 32, np.zeros_like(values[0])
    for i in range(4):
        pick = values[2] >> 4 * i & 15
        byte = both >> 8 * (pick & 7) & 0xFF
        found |= np.where(pick & 8, np.where(byte & 0x80, 0xFF, 0), byte) << 8 * i
    return found


def _of_lane(it: Instruction, values: Sequence[Any], bits: int, signed: bool) -> Any:
    """What one lane, the same in all warps, has."""
    lane = int(values[1][0])
    return np.repeat(values[0].reshape(-1, 32)[:, lane], 32)


def _compared(it: Instruction, values: Sequence[Any], bits: int, signed: bool) -> Any:
    return _COMPARE[it.parts[1]](*(_wrapped(x, bits, signed) for x in values[:2])).astype(np.int64)


def _divided(f: Callable[..., Any]) -> Callable[..., Any]:
    def run(it: Instruction, values: Sequence[Any], bits: int, signed: bool) -> Any:
        a, b = (_wrapped(x, bits, signed) for x in values)
        return f(a, np.where(b == 0, 1, b)).astype(np.int64)

    return run


def _of_two(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda it, values, bits, signed: f(*(_wrapped(x, bits, signed) for x in values))


def _same(it: Instruction, values: Sequence[Any], bits: int, signed: bool) -> Any:
    return values[0]


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "mov": _same, "cvta": _same, "cvt": _same, "selp": _same, "setp": _compared, "mul": _product,
    "mad": _product, "shr": _shifted_right, "bfe": _field, "bfi": _inserted, "prmt": _permuted, "shfl": _of_lane,
    "lop3": _by_table, "add": _of_two(np.add), "sub": _of_two(np.subtract), "and": _of_two(np.bitwise_and),
    "or": _of_two(np.bitwise_or), "xor": _of_two(np.bitwise_xor), "min": _of_two(np.minimum),
    "max": _of_two(np.maximum), "rem": _divided(np.fmod), "div": _divided(lambda a, b: a / b),
    "neg": lambda it, values, *_: -values[0],
    "not": lambda it, values, bits, signed: 1 - values[0] if bits == 1 else ~values[0],
    "shl": lambda it, values, bits, signed: np.where(values[1] >= bits, 0, values[0] << np.minimum(values[1], 63)),
}  # fmt: skip
