"""Registers that are read before anything wrote them are found in machine code, and such kernels are not used."""

from __future__ import annotations

import itertools
import re
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexsp.runtime import launch
from flexsp.runtime import triton_private as private
from flexsp.runtime.workarounds import unwritten_registers
from flexsp.runtime.workarounds.unwritten_registers import assembled, unread, unwritten


def listing(*rows: str) -> str:
    """As nvdisasm writes it: rows that end in a colon are labels."""
    return "\n".join(
        x if x.endswith(":") else f"        /*{16 * i:04x}*/              {x} ;" for i, x in enumerate(rows)
    )


def places(*rows: str) -> list[int]:
    return [int(x.split(":")[0], 16) // 16 for x in unwritten(listing(*rows))]


FOUR = ["MOV R4, RZ", "MOV R5, RZ", "MOV R7, RZ"]


READS: list[tuple[list[str], list[int]]] = [
    (["MOV R4, 0x1", "IADD3 R5, R4, R4, RZ"], []),
    (["IADD3 R5, R4, RZ, RZ"], [0]),
    ([*FOUR, "STSM.16.M88.4 [R1], R4", "MOV R6, 0x80008000"], [3]),  # what ptxas does
    ([*FOUR, "MOV R6, 0x80008000", "STSM.16.M88.4 [R1], R4"], []),
    ([*FOUR, "STSM.16.M88.2 [R1], R4"], []),
    ([*FOUR, "STS.128 [R1], R4"], [3]),
    ([*FOUR, "STG.E.64 desc[UR4][R4.64], R4"], [3]),  # UR4
    (["ULDC.64 UR4, c[0x0][0x208]", "LDG.E.128 R8, desc[UR4][R2.64]"], [1]),
    (["CS2R R2, SRZ", "ULDC.64 UR4, c[0x0][0x208]", "LDG.E.128 R8, desc[UR4][R2.64]", "FADD R3, R11, R8"], []),
    (["LDSM.16.MT88.4 R4, [R1+UR7]"], [0]),
    (["LDSM.16.MT88.4 R4, [R1]", "FADD R8, R7, -|R4|"], []),
    (["LDSM.16.MT88.2 R4, [R1]", "FADD R8, R6, R4.reuse"], [1]),
    (["IMAD.WIDE.U32 R2, R1, 0x4, RZ", "FADD R8, R3, R2"], []),
    (["ISETP.GE.AND P0, PT, R3, RZ, PT"], [0]),
    (["LOP3.LUT P0, R3, R1, 0x7f, RZ, 0xc0, !PT", "FADD R4, R3, R3"], []),
    (["SHFL.BFLY PT, R3, R1, 0x2, 0x1f", "FADD R4, R3, R3"], []),
    (["PRMT R3, RZ, 0x7610, R3", "FADD R4, R3, R3"], []),
    (["@P0 MOV R3, 0x1", "FADD R4, R3, R3"], []),
    (["MOV R3, R4", "EXIT"], []),
    (["MOV R3, R4", "IMAD.MOV.U32 R5, RZ, RZ, R3", "FADD R6, R5, R5"], [2]),
    (["MOV R4, RZ", "MOV R3, R4", "FADD R6, R3, R3"], []),
    (["MOV R4, RZ", "HFMA2 R5, -RZ, RZ, 0, 0", "STS.128 [R1], R4", "MOV R7, RZ"], [2]),
    (["HFMA2 R5, -RZ, RZ, 0, 0", "FADD R7, R6, R5"], [1]),
    (["CS2R.32 R4, SR_CLOCKLO", "FADD R7, R4, R5"], [1]),
    (["SHF.R.U64 R4, RZ, 0x2, RZ", "FADD R7, R4, R5"], [1]),
    (["FADD2 R4, RZ, RZ", "FADD R7, R4, R5"], []),
    (["F2F.F32.F64 R4, RZ", "FADD R7, R4, R5"], [1]),
    (["F2F.F64.F32 R4, RZ", "FADD R7, R4, R5"], []),
    (["I2F.F64 R4, RZ", "FADD R7, R4, R5"], []),
    (["I2F.U64 R4, RZ", "FADD R7, R4, R5"], [1]),
    (["F2I.S64.F64.TRUNC R4, RZ", "FADD R7, R4, R5"], []),
    (["MUFU.RCP64H R4, RZ", "FADD R7, R4, R5"], [1]),
    (["MOV R4, RZ", "DADD R6, R4, R4"], [1]),
    (["MOV R4, RZ", "MOV R5, RZ", "DFMA R6, R4, -R4, |R4|", "DADD R8, R6, R6"], []),
    (["MOV R4, RZ", "IMAD.WIDE R6, R4, 0x4, R4"], [1]),
    (["MOV R4, RZ", "IMAD.WIDE R6, R4, 0x4, RZ"], []),
    (["UMOV UR4, URZ", "LDG.E R8, desc[UR4][UR4]"], [1]),
    (["CS2R R4, SRZ", "UMOV UR4, URZ", "UMOV UR5, URZ", "LDG.E.ENL2.256 R8, R12, desc[UR4][R4.64]",
      "FADD R1, R11, R15"], []),
    (["CS2R R4, SRZ", "ATOMG.E.ADD.F32x4.RN.STRONG.GPU PT, R12, [R4.64], RZ", "FADD R1, R12, R15"], []),
    (["UMOV UR6, URZ", "SYNCS.ARRIVE.TRANS64.A1T0 R4, [UR6], RZ", "IADD3 R6, R4, R5, RZ"], []),
    (["SYNCS.EXCH.64 URZ, [UR6], UR8"], [0]),
    (["LDSM.8.MT1616.2 R8, [R1]", "FADD R1, R8, R11"], []),
]


@pytest.mark.parametrize(("rows", "want"), READS)
def test_what_is_read(rows: list[str], want: list[int]) -> None:
    assert places(*rows) == want


STACK: list[tuple[list[str], list[int]]] = [
    (["MOV R4, RZ", "STL [R1+0x8], R4", "LDL R5, [R1+0x8]", "FADD R6, R5, R5"], []),
    (["MOV R4, RZ", "STL [R1+0x8], R4", "LDL.LU R5, [R1+0xc]", "FADD R6, R5, R5"], [3]),
    (["STL [R1], R4", "LDL R5, [R1]", "EXIT"], []),
    (["STL [R1], R4", "LDL R5, [R1]", "FADD R6, R5, R5"], [2]),
    (["MOV R5, RZ", "STL.64 [R1], R4", "LDL R6, [R1+0x4]", "FADD R6, R6, R6"], []),
    (["MOV R5, RZ", "STL.64 [R1], R4", "LDL.128 R8, [R1]", "FADD R6, R9, R9", "FADD R6, R8, R8"], [4]),
    (["MOV R2, RZ", "STL [R2], R2", "LDL R5, [R1+0x8]", "FADD R6, R5, R5"], []),  # anywhere
    (["MOV R2, RZ", "STL [R1], R2", "IADD3 R1, R1, -0x8, RZ", "LDL R5, [R1+0x8]", "FADD R6, R5, R5"], []),
    (["IADD3 R1, R1, -0x8, RZ", "MOV R2, RZ", "STL [R1], R2", "LDL R5, [R1+0x8]", "FADD R6, R5, R5"], [4]),
]


@pytest.mark.parametrize(("rows", "want"), STACK)
def test_the_stack(rows: list[str], want: list[int]) -> None:
    assert places(*rows) == want


ZEROS = [f"MOV R{n}, RZ" for n in range(24, 28)]
DESCRIPTORS = [f"UMOV UR{n}, URZ" for n in range(4, 8)]
FIRST = "HGMMA.64x8x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT"


PRODUCTS: list[tuple[list[str], list[int]]] = [
    (["HGMMA.64x8x16.F16 RZ, gdesc[URZ], RZ, !UPT, gsb0"], []),  # it only waits for others
    ([*DESCRIPTORS, FIRST, "HGMMA.64x8x16.F32.BF16 R24, gdesc[UR4], R24, gsb0", "FADD R1, R24, R27"], []),
    ([*DESCRIPTORS[1:], FIRST], [3]),
    ([*ZEROS, *DESCRIPTORS[2:], "HGMMA.64x8x16.F32.BF16 R32, R24, gdesc[UR4], RZ, !UPT"], []),
    ([*ZEROS[:3], *DESCRIPTORS[2:], "HGMMA.64x8x16.F32.BF16 R32, R24, gdesc[UR4], RZ, !UPT"], [5]),
    ([*ZEROS, *DESCRIPTORS[2:], "HGMMA.64x8x16.F32.BF16 R32, R24, gdesc[UR4], R32"], [6]),
    (["UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], !UPT"], []),
    ([*ZEROS[:2], "STTM.16dp32bit_t0_t15.x2 tmem[UR14], R24"], [2]),  # UR14
    ([*ZEROS[:2], "UMOV UR14, URZ", "STTM.16dp32bit_t0_t15.x2 tmem[UR14], R24"], []),
    ([*ZEROS[:2], "UMOV UR14, URZ", "STTM.16dp32bit_t0_t15.x4 tmem[UR14+0x10], R24"], [3]),
    (["UMOV UR14, URZ", "LDTM.16dp32bit_t0_t15.x16 R20, tmem[UR14]", "FADD R1, R35, R20"], []),
    ([*ZEROS, "HMMA.16816.F32.BF16 R4, R24, R26, RZ", "FADD R1, R7, R4"], []),
    ([*ZEROS[:3], "HMMA.16816.F32.BF16 R4, R24, R24, RZ"], [3]),
    ([*ZEROS[:1], "HMMA.16816.F32.BF16 R4, RZ, R24, RZ"], [1]),
    ([*ZEROS[:3], "HMMA.16816.F32.BF16 R4, RZ, RZ, R24"], [3]),
    ([*ZEROS[:2], "HMMA.1688.F32.BF16 R4, R24, R24, RZ"], []),
    ([*ZEROS[:2], "HMMA.1688.F32.TF32 R4, R24, R24, RZ"], [2]),
    ([*ZEROS[:2], "HMMA.1684.F32.TF32 R4, R24, R24, RZ", "FADD R1, R7, R4"], []),
    (["HMMA.16816.F16 R4, RZ, RZ, RZ", "FADD R1, R5, R4", "FADD R1, R6, R4"], [2]),
    (["DMMA.16x8x16 R96, RZ, RZ, RZ", "FADD R1, R103, R96"], []),
    (["DMMA.8x8x4 R96, RZ, RZ, RZ", "FADD R1, R99, R96", "FADD R1, R100, R96"], [2]),
    ([*DESCRIPTORS, "QGMMA.64x16x32.F32.E5M2.E5M2 R24, gdesc[UR4], RZ, !UPT, gsb0", "FADD R1, R24, R31"], []),
    ([*DESCRIPTORS, "HGMMA.64x16x16.F16 R24, gdesc[UR4], RZ, !UPT, gsb0", "FADD R1, R24, R28"], [5]),
    ([*ZEROS[:3], *DESCRIPTORS, "HGMMA.64x8x16.F32.BF16 R24, gdesc[UR4], R24"], [7]),
    (["UMOV UR14, URZ", "LDTM.16dp256bit.x1 R20, tmem[UR14]", "FADD R1, R23, R20", "FADD R1, R24, R20"], [3]),
    (["UMOV UR14, URZ", *ZEROS[:3], "STTM.16dp256bit.x1 tmem[UR14], R24"], [4]),
]


@pytest.mark.parametrize(("rows", "want"), PRODUCTS)
def test_matrix_products(rows: list[str], want: list[int]) -> None:
    assert places(*rows) == want


WAYS: list[tuple[list[str], list[int]]] = [
    (["@P0 BRA `(.L_x_1)", "MOV R3, RZ", ".L_x_1:", "FADD R4, R3, R3"], []),
    (["BRA `(.L_x_1)", "MOV R3, RZ", ".L_x_1:", "FADD R4, R3, R3"], [3]),
    ([".L_x_1:", "@P0 FADD R4, R3, R3", "MOV R3, RZ", "@P1 BRA `(.L_x_1)"], []),
    (["@P0 EXIT", "MOV R3, RZ", "EXIT", "FADD R4, R5, R5"], []),
    (["@P0 EXIT", "FADD R4, R5, R5"], [1]),
    (["BRA.U UP0, `(.L_x_1)", "FADD R4, R5, R5", ".L_x_1:", "EXIT"], [1]),
    (['BRX R1 -0x10  (*"BRANCH_TARGETS .L_x_1,.L_x_2"*)', ".L_x_1:", "EXIT", ".L_x_2:", "FADD R4, R5, R5"], [4]),
    (["BRA.DIV ~URZ, `(.L_x_1)", "FADD R4, R3, R3", ".L_x_1:", "EXIT"], [1]),
    (["@P0 CALL.REL.NOINC `($f)", "FADD R4, R5, R5", "EXIT", "$f:", "EXIT"], [1]),
    (["CALL.REL.NOINC `($f)", "FADD R4, R5, R5", "EXIT", "$f:", "EXIT"], []),
    (["CALL.REL.NOINC `($f)", "FADD R4, R5, R5", "EXIT", "$f:", "MOV R5, RZ", "RET.REL.NODEC R1 `(kernel)"], []),
    (["CALL.REL.NOINC `($f)", "FADD R4, R5, R5", "EXIT", "$f:", "MOV R6, RZ", "RET.REL.NODEC R1 `(kernel)"], [1]),
]


@pytest.mark.parametrize(("rows", "want"), WAYS)
def test_ways(rows: list[str], want: list[int]) -> None:
    """A register counts as written where it may have been."""
    assert places(*rows) == want


@pytest.mark.parametrize(
    ("rows", "want"),
    [
        (["FADD R6, R4, R4", "MOV R4, 0x1", "EXIT"], [1]),
        (["MOV R4, 0x1", "FADD R6, R4, R4"], []),
        (["MOV R4, 0x1", "MOV R5, 0x1", "FADD R6, R4, R4"], [1]),
        (["MOV R4, 0x1", "@P0 FADD R6, R4, R4"], []),
        (["MOV R4, 0x1", "MOV R4, 0x2", "FADD R6, R4, R4"], [0]),
        (["MOV R4, 0x1", "@P0 MOV R4, 0x2", "FADD R6, R4, R4"], []),
        (["@P0 MOV R4, 0x1", "EXIT"], []),
        (["MOV R4, R7", "UMOV UR4, URZ", "IADD3 R9, R8, 0x1, RZ", "MOV R1, 0x1"], []),
        (["HFMA2 R4, -RZ, RZ, 0, 0", "IMAD.MOV.U32 R5, RZ, RZ, 0x1", "CS2R R6, SRZ"], [0, 1, 2]),
        (["CS2R R6, SRZ", "FADD R8, R7, R7"], []),
        ([".L_x_1:", "FADD R6, R4, R4", "MOV R4, 0x1", "@P0 BRA `(.L_x_1)"], []),
        ([".L_x_1:", "MOV R4, 0x2", "FADD R6, R4, R4", "MOV R4, 0x1", "@P0 BRA `(.L_x_1)"], [3]),
        (["MOV R4, 0x1", "@P0 BRA `(.L_x_1)", "EXIT", ".L_x_1:", "FADD R6, R4, R4"], []),
        (["MOV R7, 0x1", "STS.128 [R1], R4"], []),
        (["MOV R7, 0x1", "STSM.16.M88.4 [R8], R6"], []),
        (["STSM.16.M88.4 [R8], R4", "MOV R6, 0x80008000", "EXIT"], [1]),
        (["MOV R7, 0x1", "LDG.E R8, [R6]"], []),  # may be an address of 64 bits
        (["MOV R7, 0x1", "ISETP.LE.U64 P0, PT, R6, R8, PT"], []),
        (["MOV R7, 0x1", "ISETP.LE P0, PT, R6, R8, PT"], [0]),
        (["MOV R7, 0x1", "DMMA.16x8x16 R32, R4, R24, RZ"], []),
        (["MOV R7, 0x1", "PRMT R7, RZ, 0x7610, R8", "FADD R6, R7, R7"], []),
        (["MOV R27, 0x1", "HGMMA.64x8x16.F32.BF16 R24, gdesc[UR4], R24, gsb0"], []),
        (["MOV R7, 0x1", "CALL.ABS.NOINC R8"], []),
        (["MOV R7, 0x1", "CALL.REL.NOINC `($f)", "EXIT", "$f:", "EXIT"], []),
    ],
)
def test_constants_that_nothing_reads(rows: list[str], want: list[int]) -> None:
    assert [int(x.split(":")[0], 16) // 16 for x in unread(listing(*rows))] == want


@pytest.mark.parametrize("zero", ["RZ", "URZ", "PT", "0x1", ""])
def test_every_form_is_read(zero: str) -> None:
    """Any operand of any instruction may be zero, a constant or not there."""
    rows = {row for each in (READS, STACK, PRODUCTS, WAYS) for rows, _ in each for row in rows}
    for row in rows:
        for found in re.finditer(r"\bU?R\d+", row):
            row_of_zero = row[: found.start()] + zero + row[found.end() :]
            for search in (unwritten, unread):
                search(listing(row_of_zero, ".L_x_1:", ".L_x_2:", "$f:", "EXIT"))


def test_no_instructions() -> None:
    with pytest.raises(ValueError, match="listing: expected instructions"):
        unwritten("nvdisasm warning")


PTX = ".visible .entry walk(\n\t.param .u64 x\n)\n.reqntid {threads}\n{limit}{{\n\tret;\n}}\n"
BAD, GOOD = listing("FADD R4, R5, R5"), listing("EXIT")


def limit_of(ptx: str) -> int | None:
    """The limit of registers in a kernel as it is expected to be but for that."""
    kept = r"\.visible \.entry walk\(\n\t\.param \.u64 x\n\)\n\.reqntid \d+\n"
    found = re.fullmatch(kept + r"\n?(?:\.maxnreg (\d+)\n)?\{\n\tret;\n\}\n", ptx)
    assert found, ptx
    return None if found[1] is None else int(found[1])


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int | None]]:
    """Has the first so many cubins of kernels with a stack read a register that nothing wrote."""

    def make(times: int, limit: str, threads: int = 128) -> list[int | None]:
        seen: list[int | None] = []

        def assemble(ptx: str) -> bytes:
            if limit and limit_of(ptx) is None:
                return b"freed"
            seen.append(limit_of(ptx))
            if seen[-1] in (144, 136):
                raise private.PTXASError("Insufficient registers (144) to compile instruction")
            return str(len(seen)).encode()

        # without the limit too, which therefore stays
        monkeypatch.setattr(unwritten_registers, "stack_of", lambda cubin: 8)
        monkeypatch.setattr(unwritten_registers, "disassembled", lambda cubin: BAD if int(cubin) <= times else GOOD)
        assert assembled(PTX.format(limit=limit, threads=threads), assemble) == str(len(seen)).encode()
        return seen

    return make


@pytest.mark.parametrize(
    ("limit", "threads", "times", "want"),
    [
        (".maxnreg 168\n", 128, 0, [168]),
        (".maxnreg 168\n", 128, 1, [168, 160]),
        (".maxnreg 168\n", 128, 5, [168, 160, 152, 144, 136, 255]),
        ("", 128, 2, [None, 247, 239]),
        ("", 128, 7, [None, 247, 239, 231, 223, 240, 224, 208]),
        ("", 512, 1, [None, 120]),
        (".maxnreg 120\n", 512, 5, [120, 112, 104, 96, 88, 128]),
        (".maxnreg 128\n", 512, 4, [128, 120, 112, 104, 96]),
    ],
)
def test_other_limits_are_tried(
    wrong: Callable[..., list[int | None]], limit: str, threads: int, times: int, want: list[int | None]
) -> None:  # fmt: skip
    """One with which ptxas has too few registers is passed over; a block's threads have theirs with all."""
    assert wrong(times, limit, threads) == want


@pytest.mark.parametrize(
    ("stacks", "want"),
    [({168: 0}, [168]), ({168: 8, None: 0}, [168, None]), ({168: 16, None: 8}, [168, None]), ({None: 8}, [None])],
)
def test_a_limit_that_makes_it_spill_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, stacks: dict[int | None, int], want: list[int | None]
) -> None:
    """The last of what is assembled is taken, without a search of what has no stack."""
    seen: list[int | None] = []

    def assemble(ptx: str) -> bytes:
        seen.append(limit_of(ptx))
        return str(seen[-1]).encode()

    monkeypatch.setattr(unwritten_registers, "stack_of", lambda cubin: stacks[None if cubin == b"None" else int(cubin)])
    monkeypatch.setattr(unwritten_registers, "disassembled", lambda cubin: GOOD)
    limit = ".maxnreg 168\n" if 168 in stacks else ""
    assert assembled(PTX.format(limit=limit, threads=128), assemble) == str(want[-1]).encode()
    assert seen == want


def test_no_text_is_assembled_twice() -> None:
    text = PTX.format(limit=".maxnreg 128\n", threads=512)
    seen = [limit_of(x) for x in unwritten_registers._with_other_limits(text)]
    assert seen == [120, 112, 104, 96]


def test_no_limit_helps(wrong: Callable[..., list[int | None]]) -> None:
    with pytest.raises(RuntimeError, match=r"walk: expected ptxas to write every register.*got 0000: FADD R4, R5, R5"):
        wrong(99, "")


def test_constants_too_many_with_all_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first kernel that reads nothing unwritten is taken, with a warning; one without any is taken before."""
    found = {1: BAD, 2: BAD, 3: listing("MOV R4, 0x1", "EXIT"), 4: listing("MOV R5, 0x1", "EXIT")}
    monkeypatch.setattr(unwritten_registers, "stack_of", lambda cubin: 8)
    monkeypatch.setattr(unwritten_registers, "disassembled", lambda cubin: found.get(int(cubin), BAD))
    count = itertools.count(1)
    with pytest.warns(RuntimeWarning, match=r"walk: expected ptxas to make no constant .* got 0000: MOV R4"):
        assert assembled(PTX.format(limit="", threads=128), lambda ptx: str(next(count)).encode()) == b"3"
    found[7] = GOOD
    count = itertools.count(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert assembled(PTX.format(limit="", threads=128), lambda ptx: str(next(count)).encode()) == b"7"


@pytest.mark.parametrize("program", [None, "false"])
def test_without_a_disassembler(monkeypatch: pytest.MonkeyPatch, program: str | None) -> None:
    """Kernels with a stack are taken as they are, with a warning."""
    monkeypatch.setattr(unwritten_registers, "_disassemblers", lambda: [] if program is None else [program])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(unwritten_registers, "stack_of", lambda cubin: 0)
        assert assembled(PTX, lambda ptx: b"cubin") == b"cubin"
    monkeypatch.setattr(unwritten_registers, "stack_of", lambda cubin: 8)
    with pytest.warns(RuntimeWarning, match="found no nvdisasm"):
        assert assembled(PTX, lambda ptx: b"cubin") == b"cubin"


def test_what_cannot_be_read_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a warning: an instruction of a newer assembler must not keep anybody from using a kernel."""
    monkeypatch.setattr(unwritten_registers, "stack_of", lambda cubin: 8)
    monkeypatch.setattr(unwritten_registers, "disassembled", lambda cubin: listing("LDL R4"))
    with pytest.warns(RuntimeWarning, match=r"not checked: the search .* failed \(IndexError"):
        assert assembled(PTX, lambda ptx: b"cubin") == b"cubin"
    monkeypatch.setattr(unwritten_registers, "disassembled", lambda cubin: "")
    with pytest.warns(RuntimeWarning, match=r"failed \(ValueError: listing: expected instructions"):
        assert assembled(PTX, lambda ptx: b"cubin") == b"cubin"


def test_not_to_be_able_to_look_fails_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this suite the warning is an error, in every thread that compiles."""
    monkeypatch.setattr(unwritten_registers, "stack_of", lambda cubin: 8)
    monkeypatch.setattr(unwritten_registers, "disassembled", lambda cubin: "")
    with ThreadPoolExecutor() as pool, pytest.raises(RuntimeWarning, match="not checked"):
        pool.submit(assembled, PTX, lambda ptx: b"cubin").result()


@pytest.mark.parametrize("content", [b"#!/nowhere/at/all\n", b"\x7fELF of another machine"])
def test_a_disassembler_that_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:  # fmt: skip
    program = tmp_path / "nvdisasm"
    program.write_bytes(content)
    monkeypatch.setattr(unwritten_registers, "stack_of", lambda cubin: 8)
    for mode in (0o644, 0o755):
        program.chmod(mode)
        monkeypatch.setattr(unwritten_registers, "_disassemblers", lambda: [program])
        with pytest.warns(RuntimeWarning, match="found no nvdisasm"):
            assert assembled(PTX, lambda ptx: b"cubin") == b"cubin"


@pytest.mark.parametrize("jump", ["BRX R4 -0x15f0 ;", "BRA `(.L_x_1) ;"])
def test_jumps_through_tables_have_their_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: str) -> None:
    """Which nvdisasm says only after an analysis, that nothing else needs."""
    program = tmp_path / "nvdisasm"
    program.write_text(f"#!/bin/sh\ncase $2 in --no-dataflow) echo '{jump}';; *) echo analysed;; esac\n")
    program.chmod(0o755)
    monkeypatch.setattr(unwritten_registers, "_disassemblers", lambda: [program])
    assert unwritten_registers.disassembled(b"cubin") == ("analysed" if "BRX" in jump else jump) + "\n"


def test_a_search_is_not_slow() -> None:
    """Of a kernel with thousands of accesses to the stack, one of them anywhere."""
    rows = [x for i in range(6000) for x in (f"STL [R1+{hex(4 * i)}], R1", f"LDL R4, [R1+{hex(4 * i)}]")]
    begin = time.monotonic()
    text = listing("LDL R6, [R1+R1]", *rows)
    assert unwritten(text) == [] and unread(text) == []
    assert time.monotonic() - begin < 8


def test_kernels_in_the_cache_were_searched_by_these_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = unwritten_registers.rules()
    assert searched == unwritten_registers.rules()
    monkeypatch.setattr(unwritten_registers, "_disassemblers", lambda: [])
    assert unwritten_registers.rules() != searched


def test_the_rules_are_part_of_a_kernels_key(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, str]] = []

    def compile_kernel(*args: Any) -> Any:
        told.append(args[-1])
        return SimpleNamespace(metadata=SimpleNamespace(shared=0))

    monkeypatch.setattr(private, "parameters", lambda kernel: [])
    monkeypatch.setattr(private, "compile_kernel", compile_kernel)
    kernel = SimpleNamespace(arg_names=[], __name__="walk")
    launch.build(kernel, (), {}, {}, private.gpu_target(90))
    monkeypatch.setattr(unwritten_registers, "rules", lambda: "other rules")
    launch.build(kernel, (), {}, {}, private.gpu_target(90))
    assert told[0] != told[1] and "other rules" in told[1].values()
