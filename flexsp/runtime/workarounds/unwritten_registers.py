"""Looks in assembled kernels for registers that are read before an instruction writes them.

Fault: ptxas, of which 12.8 to 13.4 were tried. In a kernel with more values than registers it may put the only
instruction that makes a constant behind the first use of that constant. Seen with `stmatrix`: one of the four registers
that it stores held a value that another kernel had left there. The results are wrong and differ from call to call, and
compute-sanitizer finds no fault. If the register held a value of the same kernel before, the only trace is a constant
that no instruction reads. Such kernels are assembled again with another limit of registers.

A kernel whose limit of registers put 82 words on the stack was wrong in eight columns of 128, in every call alike, and
neither search found why. So a limit under which a kernel spills more than without it is not kept.

`tests/runtime/test_machine_code.py` holds listings of such kernels and of good ones.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
import os
import re
import struct
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flexsp.devices import REGISTERS
from flexsp.runtime import triton_private as private

__all__ = ["assembled", "disassembled", "registers_of", "rules", "stack_of", "unread", "unwritten"]

_LEAST = 64  # registers
_STACK = 512  # words of the stack have numbers behind those of registers, 0 to 255, and of uniform ones
_NO_RESULT = ("ST", "RED.", "BAR", "BRA", "BRX", "JMP", "EXIT", "RET", "CALL", "WARPSYNC", "BSYNC", "BSSY", "R2P",
              "LDGSTS", "FCHK", "CCTL", "UTMA", "UBLK", "NANOSLEEP", "SUST")  # fmt: skip
_MERGES = ("LOP3", "PRMT", "P2R", "BFI")  # what they leave as it is of their result counts as no use
_PRODUCTS = ("HMMA", "IMMA", "QMMA", "OMMA")
_CONSTANTS = ("MOV", "IMAD.MOV", "HFMA2", "CS2R")
_ONE_EACH = {"FADD", "FMUL", "FFMA", "FSEL", "FSET", "FSETP", "FMNMX", "HADD2", "HMUL2", "HFMA2", "F2FP", "MUFU",
             "IADD3", "IMAD", "IABS", "ISETP", "LOP3", "PRMT", "SEL", "SHFL", "MOV"}  # fmt: skip
_PREDICATE = re.compile(r"!?U?P(?:\d|T)$")
_REGISTER = re.compile(r"\b(U?)R(\d+)(\.64)?")
_ON_STACK = ("LDL", "STL")
_ALL = (1 << 256) - 1
_DESCRIPTOR = re.compile(r"^desc\[UR(\d+)\]")
_TABLE = re.compile(r"\b(?:BRX|BRXU|JMX|JMXU)\b")
_LIMIT = re.compile(r"\.maxnreg\s+(\d+)")
_LONG = {"64", "U64", "S64", "TRANS64"}


@dataclass(frozen=True)
class _Instruction:
    address: str
    text: str
    predicated: bool
    operation: str
    operands: tuple[str, ...]

    @staticmethod
    def of(address: str, text: str) -> _Instruction:
        guard, rest = text.split(None, 1) if text.startswith("@") else ("", text)
        operation, _, operands = rest.partition(" ")
        split = re.split(r",(?![^\[]*\])", operands) if operands.strip() else []
        return _Instruction(address, text, guard not in ("", "@PT"), operation, tuple(x.strip() for x in split))

    @functools.cached_property
    def result(self) -> int | None:
        """The place of the operand that is written; predicates may stand before it."""
        if self.operation.startswith(_NO_RESULT) or "SETP" in self.operation:
            return None
        at = next((i for i, x in enumerate(self.operands) if not _PREDICATE.match(x)), None)
        return None if at is None or not re.match(r"U?R\d", self.operands[at]) else at

    @functools.cached_property
    def _results(self) -> tuple[int, ...]:
        at = self.result
        return () if at is None else (at, at + 1) if "ENL2" in self.operation else (at,)

    @functools.cached_property
    def writes(self) -> int:
        """A bit for each register. Rather too many than too few."""
        width = self._width() // max(1, len(self._results))
        return functools.reduce(operator.or_, (_bits(self.operands[at], width) for at in self._results), 0)

    @functools.cached_property
    def reads(self) -> int:
        """A bit for each register. Rather too few than too many; of products in tensor memory none."""
        if self.operation.startswith("UTC"):
            return 0
        found = 0
        for i, operand in enumerate(self.operands):
            if i in self._results:
                continue
            if operand.startswith("gdesc"):
                found |= _descriptors(operand, self.operands[1].startswith("R"))
                continue
            if pair := _DESCRIPTOR.match(operand):
                found |= 0b11 << int(pair[1]) + 256
            stored = self.operation.startswith("ST") and re.match(r"R\d", operand)
            found |= _bits(operand, self._stored() if stored else self._read(i))
        return found & ~self.writes if self.operation.startswith(_MERGES) else found

    @property
    def may_read(self) -> int:
        """A bit for each register. Rather too many than too few: vectors of 2 or 4 begin at multiples of that."""
        parts = self.operation.split(".")
        if parts[0] == "CALL":
            return _ALL
        one = parts[0] in _ONE_EACH and not {"WIDE", "HI", "64H", *_LONG} & {*parts}
        found = self.reads | (self.writes if self.operation.startswith(_MERGES) else 0)
        for i, operand in enumerate(self.operands):
            for uniform, number, _ in _REGISTER.findall(operand) if i not in self._results else ():
                n = int(number)
                width = 1 if one else 16 if parts[0].startswith("D") else 4 if n % 4 == 0 else 2 if n % 2 == 0 else 1
                found |= 0 if uniform else ((1 << width) - 1) << n
        return found

    @property
    def constant(self) -> bool:
        """Whether it only puts a number into registers."""
        at = self.result
        plain = self.operation.startswith(_CONSTANTS) and not self.predicated and not self.reads
        return plain and at is not None and _number(self.operands[at]) not in (None, 1)

    @property
    def moves(self) -> list[tuple[int, int]]:
        """(from, to) of what it does no more with than to copy it, between registers or from and to the stack.

        What is written is known as little as what was read, and this is no use of it.
        """
        if self.operation in ("MOV", "IMAD.MOV.U32", "UMOV"):
            found = [_number(x) for x in (self.operands[0], self.operands[-1])]
            return [(found[1], found[0])] if None not in found else []  # type: ignore[list-item]
        slot = self.slot
        if slot is None:
            return []
        loads = self.operation.startswith("LDL")
        first = _number(self.operands[not loads])
        if first is None:
            return []
        pairs = [(_STACK + slot // 4 + i, first + i) for i in range(self._width())]
        return pairs if loads else [(b, a) for a, b in pairs]

    @property
    def slot(self) -> int | None:
        """Of an access to the stack: where, if that is stated."""
        if not self.operation.startswith(_ON_STACK):
            return None
        found = re.match(r"\[R1(?:\+(0x[0-9a-f]+))?\]$", self.operands[self.operation.startswith("LDL")])
        return int(found[1] or "0", 16) if found else None

    def _width(self) -> int:
        """Registers of the result."""
        op, parts = self.operation, self.operation.split(".")
        if shape := _WARP_GROUP.match(op):
            return int(shape[1]) // (4 if shape[2] == "F16" else 2)
        if op.startswith(_PRODUCTS):
            return 2 if parts[2:3] == ["F16"] else 4
        if op.startswith("DMMA"):
            return 8 if "16x8x" in op else 4
        if op.startswith("LDTM"):
            return self._of_tensor_memory()
        if op.startswith("LDSM"):
            return (int(parts[-1]) if parts[-1].isdigit() else 1) * (2 if "MT1616" in parts else 1)
        if vector := re.search(r"\.F32x(\d)", op):
            return int(vector[1])
        return 8 if "256" in parts else 4 if "128" in parts else 2 if self._long_result(parts) else 1

    @staticmethod
    def _long_result(parts: list[str]) -> bool:
        op, types = parts[0], set(parts[1:])
        if op in ("SHF", "USHF", "MUFU"):
            return False
        if op == "F2F":
            return next((x for x in parts if re.match(r"F\d|BF", x) and x != op), "") == "F64"
        if op == "I2F":
            return "F64" in types
        if op == "CS2R":
            return "32" not in types
        pairs = op.startswith("D") or op in ("FADD2", "FMUL2", "FFMA2")
        return pairs or "WIDE" in types or bool(types & _LONG)

    def _stored(self) -> int:
        parts = self.operation.split(".")
        if parts[0] == "STSM":
            return int(parts[-1]) if parts[-1].isdigit() else 1
        if parts[0] == "STTM":
            return self._of_tensor_memory()
        return 4 if "128" in parts else 2 if "64" in parts else 1

    def _of_tensor_memory(self) -> int:
        """Registers that a load or a store moves, by rows and bits a row."""
        found = re.search(r"dp(\d+)bit\S*?\.x(\d+)", self.operation)
        return max(1, int(found[1]) // 64) * int(found[2]) if found else 1

    def _read(self, i: int) -> int:
        """Registers of operand i, where it is one, or as many of them as are looked at."""
        if not re.match(r"[-|~]*U?R\d", self.operands[i]):
            return 1
        op, parts = self.operation, self.operation.split(".")
        if _WARP_GROUP.match(op):
            in_registers = self.operands[1].startswith("R")
            return 4 if in_registers and i == 1 else self._width() if i == 2 + in_registers else 1
        if op.startswith("HMMA"):
            return self._width() if i == 3 else _HALF_PRODUCTS.get(".".join(parts[1:]), {}).get(i, 1)
        if op.startswith(("DADD", "DMUL", "DFMA", "DSETP", "DMNMX")):
            return 2
        last = next((k for k in reversed(range(len(self.operands))) if not _PREDICATE.match(self.operands[k])), -1)
        return 2 if parts[0] in ("IMAD", "UIMAD") and "WIDE" in parts and i == last else 1


_WARP_GROUP = re.compile(r"[A-Z]GMMA\.(?:SP\.)?64x(\d+)x\d+(?:\.(\w+))?")
_HALF_PRODUCTS = {  # registers of the operands
    **{f"16816.{x}": {1: 4, 2: 2} for x in ("F32", "F32.BF16", "F16")},
    **{f"1688.{x}": {1: 2, 2: 1} for x in ("F32", "F32.BF16", "F16")},
    "1688.F32.TF32": {1: 4, 2: 2},
    "1684.F32.TF32": {1: 2, 2: 1},
}


def _number(operand: str) -> int | None:
    """Of a register."""
    found = re.match(r"(U?)R(\d+)(?:\.reuse)?$", operand)
    return int(found[2]) + 256 * bool(found[1]) if found else None


@functools.lru_cache(maxsize=4096)
def _bits(operand: str, width: int) -> int:
    found = 0
    for uniform, number, wide in _REGISTER.findall(operand):
        for n in range(int(number), int(number) + max(width, 2 if wide else 1)):
            found |= 1 << (n + 256 * bool(uniform))
    return found


def _descriptors(operand: str, second: bool) -> int:
    """Of a product's operands in shared memory: two registers for the first and two for the second, or only these.

    A product that only waits for others has none.
    """
    found = re.search(r"UR(\d+)", operand)
    return (0b1100 if second else 0b1111) << int(found[1]) + 256 if found else 0


def unwritten(listing: str) -> list[str]:
    """Instructions that read registers which no instruction before them can have written, on any way to them.

    Args:
        listing: of one kernel for NVIDIA GPUs from sm_80, as nvdisasm prints it.

    Raises:
        ValueError: there is no instruction.
    """
    code, ways = _graph(listing)
    if not code:
        raise ValueError(f"listing: expected instructions as nvdisasm prints them, got {listing[:80]!r}")
    known: dict[int, int] = {0: 0b10}  # R1, the stack, is there from the beginning
    todo = [0]
    stack = [i for i, x in enumerate(code) if x.operation.startswith(_ON_STACK)]
    moved = any(x.writes >> 1 & 1 for x in code[stack[0] :]) if stack else False
    followed = not moved and all(code[i].slot is not None for i in stack)
    unfollowed = () if followed else _ON_STACK
    effects = [(x.writes, x.reads, [] if x.operation.startswith(unfollowed) else x.moves) for x in code]
    while todo:
        at = todo.pop()
        writes, _, moves = effects[at]
        after = known[at]
        for source, to in moves:
            after |= (after >> source & 1) << to
        if not moves:
            after |= writes
        for to in ways[at]:
            if after | known.get(to, 0) != known.get(to):
                known[to] = after | known.get(to, 0)
                todo.append(to)
    return [
        f"{code[at].address}: {code[at].text}"
        for at, held in sorted(known.items()) if effects[at][1] & ~held and not effects[at][2]
    ]  # fmt: skip


def unread(listing: str) -> list[str]:
    """Instructions that make a constant which no instruction reads, on any way from there: compilers leave those out,
    so that it is behind its use.

    Args:
        listing: as for `unwritten`.
    """
    code, ways = _graph(listing)
    before: list[list[int]] = [[] for _ in code]
    for at, to in enumerate(ways):
        for other in to:
            before[other].append(at)
    reads = [x.may_read for x in code]
    replaces = [0 if x.predicated else x.writes & -x.writes for x in code]
    wanted = [0] * len(code)  # of what is there before each
    todo, waits = [*range(len(code))], [True] * len(code)
    while todo:
        at = todo.pop()
        waits[at] = False
        now = reads[at] | _any(wanted, ways[at]) & ~replaces[at]
        if now != wanted[at]:
            wanted[at] = now
            todo += [x for x in before[at] if not waits[x]]
            for x in before[at]:
                waits[x] = True
    return [
        f"{x.address}: {x.text}"
        for at, x in enumerate(code) if x.constant and not x.writes & _any(wanted, ways[at])
    ]  # fmt: skip


def _any(bits: list[int], places: list[int]) -> int:
    return functools.reduce(operator.or_, (bits[at] for at in places), 0)


@functools.lru_cache(maxsize=4)
def _graph(listing: str) -> tuple[list[_Instruction], list[list[int]]]:
    """All instructions, and for each the places of those that may come next."""
    code: list[_Instruction] = []
    labels: dict[str, int] = {}
    for row in listing.splitlines():
        if label := re.match(r"\s*([.$\w]+):\s*$", row):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", row):
            code.append(_Instruction.of(found[1], found[2]))
    returns = [i + 1 for i, x in enumerate(code) if x.operation.startswith("CALL")]
    ways = [[to for to in _next(i, x, labels, returns) if to < len(code)] for i, x in enumerate(code)]
    return code, ways


def _next(at: int, it: _Instruction, labels: dict[str, int], returns: list[int]) -> Iterable[int]:
    op = it.operation
    named = [labels[x] for x in re.findall(r"[.$\w]+", it.text) if x in labels]
    conditional = it.predicated or any(_PREDICATE.match(x) for x in it.operands)
    if op.startswith("CALL"):  # what comes behind it is reached from the callee's end
        return [*named, *([at + 1] if conditional or not named else [])]
    if op.startswith("RET"):
        return [*returns, *([at + 1] if conditional else [])]
    if op.startswith(("BRX", "JMX")):
        return named or labels.values()
    if op.startswith(("BRA", "JMP")):
        conditional |= len(it.operands) > 1
        return [*named, *([at + 1] if conditional else [])]
    if op.startswith("EXIT"):
        return [at + 1] if conditional else []
    return [at + 1]


def stack_of(cubin: bytes) -> int:
    """Bytes of stack that a kernel has, which it needs when its values do not fit into registers."""
    return _largest(cubin, rb"\x11")


def registers_of(cubin: bytes) -> int:
    """Registers that a thread of a kernel has."""
    return _largest(cubin, rb"\x2f")


def _largest(cubin: bytes, attribute: bytes) -> int:
    """The largest value that an attribute has for the functions of a cubin."""
    (sections,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    table = [struct.unpack_from("<IIQQQQ", cubin, sections + i * size) for i in range(count)]
    found = [0]
    for name, _, _, _, start, length in table:
        if cubin.startswith(b".nv.info\0", table[names][4] + name):
            values = re.findall(rb"\x04" + attribute + rb"\x08\x00....(....)", cubin[start : start + length], re.DOTALL)
            found += [int.from_bytes(x, "little") for x in values]
    return max(found)


def _disassemblers() -> list[Path]:
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
    return [x for x in (private.tool("nvdisasm"), toolkit / "nvdisasm") if x.exists()]


def disassembled(cubin: bytes) -> str | None:
    """A kernel's instructions; None, with a warning, if no nvdisasm is there that can read it.

    nvdisasm finds where a jump through a table may go by an analysis that takes a third of its time, so it is asked for
    that only where there is such a jump.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        for program in _disassemblers():
            for options in (["-c", "--no-dataflow"], ["-c"]):
                with contextlib.suppress(OSError):
                    command = [str(program), *options, file.name]
                    done = subprocess.run(command, capture_output=True, text=True, check=False)
                    if done.returncode == 0 and ("--no-dataflow" not in options or not _TABLE.search(done.stdout)):
                        return done.stdout
    _unchecked("found no nvdisasm, with Triton or in CUDA_HOME, that can read them")
    return None


def _unchecked(why: str) -> None:
    warnings.warn(f"kernels that spill registers are not checked: {why}", RuntimeWarning, stacklevel=3)


def assembled(ptx: str, assemble: Callable[[str], bytes]) -> bytes:
    """What `assemble` makes of `ptx`; without its limit of registers where a kernel then needs less stack; with other
    limits as long as some are read that nothing wrote, or constants are made that nothing reads.

    Kernels without a stack are taken as they are; so, with a warning, are those that cannot be searched, and those that
    have constants too many with all limits.

    Raises:
        RuntimeError: registers are read that nothing wrote, with all limits that the assembler takes.
    """
    reports: list[str] = []
    doubtful: tuple[bytes, str] | None = None
    first = assemble(ptx)
    if stack_of(first) and (given := _LIMIT.search(ptx)):
        freed = ptx.replace(given[0], "", 1)
        other = assemble(freed)
        if stack_of(other) < stack_of(first):
            ptx, first = freed, other
    for text in (ptx, *_with_other_limits(ptx)):
        try:
            cubin = first if text is ptx else assemble(text)
        except private.PTXASError:  # too few registers for one of its instructions
            continue
        wrong, superfluous = _looked_through(cubin)
        if not wrong and not superfluous:
            return cubin
        reports += wrong
        if doubtful is None and not wrong:
            doubtful = cubin, superfluous[0]
    kernel = re.search(r"\.entry\s+(\w+)", ptx)
    told = f"{kernel[1] if kernel else 'kernel'}: expected ptxas to"
    if doubtful is None:
        raise RuntimeError(
            f"{told} write every register before it is read, got {reports[0]} with every limit of registers; please"
            " report this, and try another ptxas"
        )
    warnings.warn(
        f"{told} make no constant that nothing reads, got {doubtful[1]}, or the like, with every limit of registers;"
        " its results may be wrong: please report this, and compare them with those of another ptxas",
        RuntimeWarning, stacklevel=2,
    )  # fmt: skip
    return doubtful[0]


def rules() -> str:
    """What decides which machine code is taken: kernels in Triton's cache were searched by these rules."""
    searched = "searched" if _disassemblers() else "not searched"
    return f"{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]} {searched}"


def _looked_through(cubin: bytes) -> tuple[list[str], list[str]]:
    """`unwritten` and `unread`. A search that fails keeps nobody from using the kernel: newer assemblers may write what
    it cannot read."""
    try:
        listing = disassembled(cubin) if stack_of(cubin) else None
        return ([], []) if listing is None else (unwritten(listing), unread(listing))
    except (ArithmeticError, LookupError, OSError, TypeError, ValueError, struct.error) as error:
        _unchecked(f"the search for registers that nothing wrote failed ({type(error).__name__}: {error})")
        return [], []


def _with_other_limits(ptx: str) -> Iterator[str]:
    """First a few registers less, so that as many blocks run side by side; then many."""
    given = _LIMIT.search(ptx)
    threads = re.search(r"\.(?:req|max)ntid\s+(\d+)", ptx)
    most = min(255, REGISTERS // int(threads[1]) // 8 * 8) if threads else 255
    limit = int(given[1]) if given else most
    limits = [*(limit - 8 * i for i in range(1, 5)), 255, 240, 224, 208, 192]
    for n in dict.fromkeys(min(x, most) for x in limits):
        if n < _LEAST or n == limit:
            continue
        text = ptx if given is None else ptx.replace(given[0], "", 1)
        yield re.sub(r"(\.entry\s[^{]*?)\s*\{", rf"\1\n.maxnreg {n}\n{{", text, count=1)
