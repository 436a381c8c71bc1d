"""Races on shared memory, found in a kernel's PTX without a GPU.

The addresses of all accesses are worked out for every thread of a block. Two accesses of different warps to the same
byte, one of which writes, need a barrier between them. Matrix products read shared memory until a wait says that they
are done; the barrier has to come after it, and what they read has to be fenced after it was written. Copies from global
memory write until a wait says so. Within a warp, the order is that of the instructions; barriers of a warp are not
looked at. Nor is a store by which several warps write what they all hold to one place, as Triton lets them.

Branches whose conditions are not known are followed both ways, loops a few times around, but not in all combinations;
in the end also what a condition that is known kept from being reached.
What is not followed or not looked at is counted.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flexsp.testing.ptx import Instruction, Integers, Ptx, bits_of

__all__ = ["UNFENCED_COPY", "Races", "races"]

UNFENCED_COPY = "reads what was not fenced since it was copied"

_SIZE = 232448  # bytes of shared memory that a block may have
_TRIPS, _PATHS = 3, 64
_UPWARDS = np.arange(128)
_ELEMENT = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}
_SWIZZLE = (16, 128, 64, 32)  # bytes of a row, by the two highest bits of a matrix's descriptor
_JUMPS = ("bra", "brx", "ret", "exit", "call", "trap")
_NOT_PLAIN = (
    "bar", "barrier", "fence", "wgmma", "cp", "ldmatrix", "stmatrix", "mbarrier", "st", "red", "prefetch",
    "griddepcontrol", "membar", "nanosleep", "ld", "atom", "prefetchu", *_JUMPS,
)  # fmt: skip

Way = tuple[int, int]  # of a branch: its place, and where it goes


@dataclass(frozen=True)
class Races:
    """What was found: one line a race; of `accesses`, those `unseen` since their addresses are not known; how many
    ways of branches were not followed, and how many instructions `missed` since no way leads to them."""

    found: tuple[str, ...]
    accesses: int
    unseen: int
    unfollowed: int
    missed: int


@dataclass
class _Reads:
    """What a matrix product reads, until it is waited for."""

    by: Instruction
    at: Any


@dataclass
class _Copy:
    """What a copy from global memory writes, until it is waited for."""

    by: Instruction
    at: Any
    warps: Any


@dataclass
class _Memory:
    """Who touched each byte of shared memory since the last barrier; `epoch` counts barriers, and no byte from `top` on
    was touched."""

    epoch: int = 1
    top: int = 0
    fences: int = 0
    written: Any = field(default_factory=lambda: np.zeros(_SIZE, np.int32))  # epoch
    writer: Any = field(default_factory=lambda: np.zeros(_SIZE, np.int16))  # warp, if written
    fenced: Any = field(default_factory=lambda: np.zeros(_SIZE, np.int32))  # fences before it was written
    copied: Any = field(default_factory=lambda: np.zeros(_SIZE, bool))  # by a copy from global memory
    read: Any = field(default_factory=lambda: np.zeros(_SIZE, np.int32))  # epoch
    readers: Any = field(default_factory=lambda: np.zeros(_SIZE, np.uint32))  # a bit a warp
    copying: Any = field(default_factory=lambda: np.zeros(_SIZE, bool))  # what `pending` write
    copies: list[_Copy] = field(default_factory=list)
    copy_groups: list[list[_Copy]] = field(default_factory=list)
    products: list[_Reads] = field(default_factory=list)
    product_groups: list[list[_Reads]] = field(default_factory=list)
    done: list[_Reads] = field(default_factory=list)  # products waited for, with no barrier since

    def clone(self) -> _Memory:
        other = copy.copy(self)
        for name, x in vars(self).items():
            if isinstance(x, np.ndarray):
                setattr(other, name, np.zeros(_SIZE, x.dtype))
                getattr(other, name)[: self.top] = x[: self.top]
            elif isinstance(x, list):
                setattr(other, name, [list(y) if isinstance(y, list) else y for y in x])
        return other

    def barrier(self) -> None:
        self.epoch += 1
        self.done = []

    def pending(self) -> Iterable[_Copy]:
        return (x for group in (*self.copy_groups, self.copies) for x in group)

    def pending_at(self, at: Any) -> list[_Copy]:
        return [x for x in self.pending() if np.isin(at, x.at).any()] if self.copying[at].any() else []

    def wait_for_copies(self, but: int) -> None:
        """All groups of copies but the last `but`: what they wrote, each thread wrote now."""
        while len(self.copy_groups) > but:
            for x in self.copy_groups.pop(0):
                self._set(x.at, x.warps)
                self.copied[x.at] = True
                self.copying[x.at] = False
        for x in self.pending():
            self.copying[x.at] = True

    def wait_for_products(self, but: int) -> None:
        while len(self.product_groups) > but:
            self.done += self.product_groups.pop(0)

    def load(self, at: Any, warps: Any) -> list[str]:
        found = [] if self._same(at, warps) else ["reads what another warp writes"]
        found += [f"reads what a copy writes ({x.by.text})" for x in self.pending_at(at)]
        self.top = max(self.top, at.max(initial=-1) + 1)
        self.readers[at[self.read[at] != self.epoch]] = 0
        self.read[at] = self.epoch
        np.bitwise_or.at(self.readers, at, np.uint32(1) << warps.astype(np.uint32))
        return found

    def store(self, at: Any, warps: Any) -> list[str]:
        found = self._overwrites(at, warps)
        self._set(at, warps)
        return found

    def start_copy(self, it: Instruction, at: Any, warps: Any) -> list[str]:
        found = self._overwrites(at, warps)
        self.copies.append(_Copy(it, at, warps))
        self.copying[at] = True
        return found

    def start_product(self, it: Instruction, at: Any) -> list[str]:
        found, written = [], self.written[at]
        if (written == self.epoch).any():
            found.append("reads what was written since the last barrier")
        unfenced = (written > 0) & (self.fenced[at] >= self.fences)
        if unfenced.any():
            copied = self.copied[at]
            found += [UNFENCED_COPY] if (unfenced & copied).any() else []
            found += ["reads what was not fenced since it was stored"] if (unfenced & ~copied).any() else []
        found += [f"reads what a copy writes ({x.by.text})" for x in self.pending_at(at)]
        self.products.append(_Reads(it, at))
        return found

    def _set(self, at: Any, warps: Any) -> None:
        self.written[at], self.writer[at], self.fenced[at], self.copied[at] = self.epoch, warps, self.fences, False

    def _same(self, at: Any, warps: Any) -> bool:
        return not ((self.written[at] == self.epoch) & (self.writer[at] != warps)).any()

    def _overwrites(self, at: Any, warps: Any) -> list[str]:
        others = self.readers[at] & ~(np.uint32(1) << warps.astype(np.uint32))
        found = []
        if ((self.read[at] == self.epoch) & (others != 0)).any():
            found.append("overwrites what another warp reads")
        if not self._same(at, warps):
            found.append("overwrites what another warp writes")
        found += [f"overwrites what a copy writes ({x.by.text})" for x in self.pending_at(at)]
        groups = (self.products, *self.product_groups, self.done)
        first, last = (at.min(), at.max()) if at.size else (0, -1)
        self.top = max(self.top, last + 1)
        for x in (x for group in groups for x in group):
            if x.at.size and first <= x.at.max() and last >= x.at.min() and np.isin(at, x.at).any():
                found.append(f"overwrites what a matrix product reads ({x.by.text[:60]})")
        return found


class _Path:
    """One way through a kernel."""

    def __init__(self, threads: int) -> None:
        self.integers, self.memory = Integers(threads), _Memory()
        self.taken: dict[Way, int] = {}

    def fork(self) -> _Path:
        other = copy.copy(self)
        other.integers, other.memory, other.taken = self.integers.copy(), self.memory.clone(), dict(self.taken)
        return other


def _plain(it: Instruction) -> bool:
    """Whether it changes registers alone."""
    return it.parts[0] not in _NOT_PLAIN


class _Search:
    def __init__(self, ptx: Ptx) -> None:
        self.ptx, self.warps = ptx, np.arange(ptx.threads, dtype=np.int16) // 32
        self.plain = [_plain(it) for it in ptx.instructions]
        self.of_lanes: dict[tuple[int, int], Any] = {}
        self.found: dict[str, None] = {}
        self.accesses = self.unseen = 0

    def run(self) -> Races:
        self.todo: list[tuple[Way, _Path]] = []
        self.followed: set[Way] = set()
        self.reached: set[int] = set()
        self.left_out: dict[Way, _Path] = {}
        self._follow(0, _Path(self.ptx.threads))
        for _ in range(_PATHS):
            way, path = self._next()
            if path is None:
                break
            self._take(way, path)
            self._follow(way[1], path)
        left = {way for way, _ in self.todo} - self.followed
        missed = len(self.ptx.instructions) - len(self.reached)
        return Races(tuple(self.found), self.accesses, self.unseen, len(left), missed)

    def _next(self) -> tuple[Way, _Path | None]:
        """A way to follow: one that was not yet; one that a condition excluded, as what is done every so many turns of
        a loop; any other."""
        new = [i for i, (way, _) in enumerate(self.todo) if way not in self.followed]
        excluded = [way for way in self.left_out if way[1] not in self.reached]
        if not new and excluded:
            return excluded[0], self.left_out.pop(excluded[0])
        return self.todo.pop(new[-1] if new else -1) if self.todo else ((0, 0), None)

    def _follow(self, at: int | None, path: _Path) -> None:
        """To the end, on one way; the others of its branches are left to do."""
        while at is not None and at < len(self.ptx.instructions):
            it = self.ptx.instructions[at]
            self.reached.add(at)
            if self.plain[at]:
                path.integers.run(it)
                at += 1
            else:
                at = self._jump(it, at, path) if it.parts[0] in _JUMPS else self._step(it, at, path)

    def _take(self, way: Way, path: _Path) -> None:
        path.taken[way] = path.taken.get(way, 0) + 1
        self.followed.add(way)

    def _jump(self, it: Instruction, at: int, path: _Path) -> int | None:
        if it.parts[0] in ("call", "trap"):
            self._refuse(it)
        if it.parts[0] in ("ret", "exit"):
            return None if it.guard is None else at + 1
        by_index = it.parts[0] == "brx"
        targets = [self.ptx.labels[x] for x in it.operands[by_index:]]
        mask = path.integers.mask(it)
        if it.guard is not None:
            taken, passed = mask is None or mask.any(), mask is None or not mask.all()
            for to in [*([] if taken else targets), *([] if passed else [at + 1])]:
                if to not in self.reached and (at, to) not in self.left_out:
                    self.left_out[(at, to)] = path.fork()
            targets = [*(targets if taken else []), *([at + 1] if passed else [])]
        ways = [(at, to) for to in dict.fromkeys(targets) if len(targets) == 1 or path.taken.get((at, to), 0) < _TRIPS]
        if not ways:
            return None
        wanted = [x for x in ways[1:] if x not in self.followed or len(self.todo) < _PATHS]
        self.todo += [(way, path.fork()) for way in wanted]
        if len(targets) > 1:
            self._take(ways[0], path)
        return ways[0][1]

    def _step(self, it: Instruction, at: int, path: _Path) -> int:
        """One instruction that is neither plain nor a jump."""
        base, parts, memory = it.parts[0], it.parts, path.memory
        if base in ("bar", "barrier"):
            self._barrier(it, memory)
        elif base == "fence":
            memory.fences += "proxy" in parts
        elif base == "wgmma":
            self._matrix(it, path)
        elif base == "cp":
            self._copied(it, path)
        elif base in ("ldmatrix", "stmatrix") or (base in ("ld", "st") and it.shared):
            self._access(it, path)
        elif base == "mbarrier" or (base in ("atom", "red") and it.shared):
            self._refuse(it)
        elif base in ("ld", "atom"):
            path.integers.forget(it)
        return at + 1

    def _refuse(self, it: Instruction) -> None:
        raise NotImplementedError(f"{it.text}: not looked at by this search for races")

    def _barrier(self, it: Instruction, memory: _Memory) -> None:
        """Of all threads; those of a warp change nothing here, and others are refused."""
        if "warp" in it.parts:
            return
        if not {"sync", "red"} & set(it.parts) or it.operands not in (("0",), ("0", str(self.ptx.threads))):
            self._refuse(it)
        memory.barrier()

    def _tell(self, it: Instruction, found: Iterable[str]) -> None:
        for text in found:
            self.found[f"line {it.line}: {it.text[:70]}: {text}"] = None

    def _bytes(self, it: Instruction, path: _Path, operand: str, width: int, lanes: int = 32) -> Any:
        """(addresses, warps) of the bytes of an access, `width` a thread, by the first `lanes` of each warp."""
        self.accesses += 1
        start = path.integers.address(operand)
        if start is None:
            self.unseen += 1
            return None
        known = path.integers.mask(it) if it.guard is not None else None
        if known is None:
            mask, warps = self._lanes(width, lanes)
        else:
            mask = self._lanes(width, lanes)[0] & known
            warps = np.repeat(self.warps[mask], width)
        start = start[mask]
        if start.size and not 0 <= start.min() <= start.max() <= _SIZE - width:
            raise ValueError(f"{it.text}: expected addresses of shared memory, got {start.min()} to {start.max()}")
        return (start[:, None] + _UPWARDS[:width]).ravel(), warps

    def _lanes(self, width: int, lanes: int) -> Any:
        """(the first lanes of each warp, the warps of their bytes)."""
        found = self.of_lanes.get((width, lanes))
        if found is None:
            mask = np.arange(self.ptx.threads) % 32 < lanes
            found = self.of_lanes[width, lanes] = mask, np.repeat(self.warps[mask], width)
        return found

    def _access(self, it: Instruction, path: _Path) -> None:
        stores = it.parts[0] in ("st", "stmatrix")
        if "matrix" in it.parts[0]:
            count = next(int(x[1:]) for x in it.parts if re.match(r"x\d$", x))
            width, lanes = 16, 8 * count
        else:
            count = next((int(x[1:]) for x in it.parts if re.match(r"v\d$", x)), 1)
            width, lanes = bits_of(it.parts[-1]) // 8 * count, 32
        touched = self._bytes(it, path, it.operands[0 if stores else 1], width, lanes)
        if touched is not None:
            self._tell(it, (path.memory.store if stores else path.memory.load)(*touched))
        if not stores:
            path.integers.forget(it)

    def _copied(self, it: Instruction, path: _Path) -> None:
        memory = path.memory
        if "commit_group" in it.parts or "wait_all" in it.parts:
            memory.copy_groups.append(memory.copies)
            memory.copies = []
        if "wait_group" in it.parts or "wait_all" in it.parts:
            memory.wait_for_copies(int(it.operands[0]) if it.operands else 0)
        elif "commit_group" in it.parts:
            return
        elif "bulk" in it.parts:
            self._refuse(it)
        else:
            touched = self._bytes(it, path, it.operands[0], int(it.operands[2], 0))
            if touched is not None:
                self._tell(it, memory.start_copy(it, *touched))

    def _matrix(self, it: Instruction, path: _Path) -> None:
        memory = path.memory
        if "commit_group" in it.parts:
            memory.product_groups.append(memory.products)
            memory.products = []
        elif "wait_group" in it.parts:
            memory.wait_for_products(int(it.operands[0]))
        elif "mma_async" in it.parts:
            self._tell(it, memory.start_product(it, self._operands(it, path)))

    def _operands(self, it: Instruction, path: _Path) -> Any:
        """Addresses of the bytes that a matrix product reads: from its descriptors in shared memory."""
        columns, depth = next((int(x[1]), int(x[2])) for p in it.parts if (x := re.match(r"m64n(\d+)k(\d+)", p)))
        size = _ELEMENT[it.parts[-1]]
        numbers = [int(x) for x in it.operands[3:] if re.match(r"-?\d+$", x)]
        in_registers = it.operands[1].startswith("{")
        turned = [0, *numbers[-1:]] if in_registers else numbers[-2:]
        found = [np.zeros(0, np.int64)]
        for operand, rows, across in zip(it.operands[1:3], (64, columns), turned if size == 2 else (0, 0), strict=True):
            if operand.startswith("{"):
                continue
            self.accesses += 1
            descriptor = path.integers.value(operand)
            if descriptor is None:
                self.unseen += 1
                continue
            found += [_matrix_at(int(x), rows, depth, size, bool(across)) for x in np.unique(descriptor)]
        return np.concatenate(found)


@functools.lru_cache(maxsize=4096)
def _matrix_at(descriptor: int, rows: int, depth: int, size: int, across: bool) -> Any:
    """Addresses of the bytes of a matrix [rows, depth] with elements of `size` bytes, as PTX lays it out for matrix
    products of a warp group; `across`: rows lie along memory, not the depth.

    It is made of blocks of 8 lines, one after the other. A line has one, two, four or eight pieces of 16 bytes, and
    the number of the line within eight of 128 bytes is mixed into that of the piece.
    """
    start, leading = (descriptor & 0x3FFF) << 4, (descriptor >> 16 & 0x3FFF) << 4
    stride, line = (descriptor >> 32 & 0x3FFF) << 4, _SWIZZLE[descriptor >> 62 & 3]
    along, lines = (rows, depth) if across else (depth, rows)
    piece, other = np.arange(along * size // 16)[:, None], np.arange(lines)[None, :]
    in_line, to_block = piece * 16 % line, piece * 16 // line
    if line == 16 and across:
        leading, stride = stride, leading
    at = start + to_block * leading + in_line + other // 8 * stride + other % 8 * line
    at ^= (at >> 7 & line // 16 - 1) << 4
    return (at.ravel()[:, None] + np.arange(16)).ravel()


def races(ptx: str) -> Races:
    """Of a kernel's PTX as Triton writes it, with one warp group or more."""
    return _Search(Ptx.of(ptx)).run()
