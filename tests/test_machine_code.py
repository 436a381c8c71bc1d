"""Registers that are read before anything wrote them are found in machine code, and such kernels are not used."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from flexsp.runtime import machine_code
from flexsp.runtime.machine_code import assembled, unwritten


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
    (["CALL.REL.NOINC `($f)", "FADD R4, R5, R5", "EXIT", "$f:", "MOV R5, RZ", "RET.REL.NODEC R1 `(kernel)"], []),
    (["CALL.REL.NOINC `($f)", "FADD R4, R5, R5", "EXIT", "$f:", "MOV R6, RZ", "RET.REL.NODEC R1 `(kernel)"], [1]),
]


@pytest.mark.parametrize(("rows", "want"), WAYS)
def test_ways(rows: list[str], want: list[int]) -> None:
    """A register counts as written where it may have been."""
    assert places(*rows) == want


@pytest.mark.parametrize("zero", ["RZ", "URZ", "PT", "0x1", ""])
def test_every_form_is_read(zero: str) -> None:
    """Any operand of any instruction may be zero, a constant or not there."""
    rows = {row for each in (READS, STACK, PRODUCTS, WAYS) for rows, _ in each for row in rows}
    for row in rows:
        for found in re.finditer(r"\bU?R\d+", row):
            row_of_zero = row[: found.start()] + zero + row[found.end() :]
            unwritten(listing(row_of_zero, ".L_x_1:", ".L_x_2:", "$f:"))


def test_no_instructions() -> None:
    with pytest.raises(ValueError, match="listing: expected instructions"):
        unwritten("nvdisasm warning")


PTX = ".visible .entry walk(\n)\n.reqntid 128\n{limit}{{\n}}\n"
BAD, GOOD = listing("FADD R4, R5, R5"), listing("EXIT")


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str], list[str]]:
    """Has the first so many cubins of kernels with a stack read a register that nothing wrote."""

    def make(times: int, limit: str) -> list[str]:
        seen: list[str] = []

        def assemble(ptx: str) -> bytes:
            seen.append(ptx.replace(PTX.format(limit="@").split("@")[0], "").split("{")[0].strip())
            return str(len(seen)).encode()

        monkeypatch.setattr(machine_code, "stack_of", lambda cubin: 8)
        monkeypatch.setattr(machine_code, "disassembled", lambda cubin: BAD if int(cubin) <= times else GOOD)
        assert assembled(PTX.format(limit=limit), assemble) == str(times + 1).encode()
        return seen

    return make


@pytest.mark.parametrize(
    ("limit", "times", "want"),
    [
        (".maxnreg 168\n", 0, [".maxnreg 168"]),
        (".maxnreg 168\n", 1, [".maxnreg 168", ".maxnreg 160"]),
        (".maxnreg 168\n", 5, [f".maxnreg {n}" for n in (168, 160, 152, 144, 136, 255)]),
        ("", 2, ["", ".maxnreg 247", ".maxnreg 239"]),
    ],
)
def test_other_limits_are_tried(
    wrong: Callable[[int, str], list[str]], limit: str, times: int, want: list[str]
) -> None:  # fmt: skip
    assert wrong(times, limit) == want


def test_no_limit_helps(wrong: Callable[[int, str], list[str]]) -> None:
    with pytest.raises(RuntimeError, match=r"walk: expected ptxas to write every register.*got 0000: FADD R4, R5, R5"):
        wrong(99, "")


@pytest.mark.parametrize("program", [None, "false"])
def test_without_a_disassembler(monkeypatch: pytest.MonkeyPatch, program: str | None) -> None:
    """Kernels with a stack are taken as they are, with a warning."""
    monkeypatch.setattr(machine_code, "_disassemblers", lambda: [] if program is None else [program])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(machine_code, "stack_of", lambda cubin: 0)
        assert assembled(PTX, lambda ptx: b"cubin") == b"cubin"
    monkeypatch.setattr(machine_code, "stack_of", lambda cubin: 8)
    with pytest.warns(RuntimeWarning, match="found no nvdisasm"):
        assert assembled(PTX, lambda ptx: b"cubin") == b"cubin"


def test_what_cannot_be_read_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a warning: an instruction of a newer assembler must not keep anybody from using a kernel."""
    monkeypatch.setattr(machine_code, "stack_of", lambda cubin: 8)
    monkeypatch.setattr(machine_code, "disassembled", lambda cubin: listing("LDL R4"))
    with pytest.warns(RuntimeWarning, match=r"not checked: the search .* failed \(IndexError"):
        assert assembled(PTX, lambda ptx: b"cubin") == b"cubin"
    monkeypatch.setattr(machine_code, "disassembled", lambda cubin: "")
    with pytest.warns(RuntimeWarning, match=r"failed \(ValueError: listing: expected instructions"):
        assert assembled(PTX, lambda ptx: b"cubin") == b"cubin"


def test_not_to_be_able_to_look_fails_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this suite the warning is an error, in every thread that compiles."""
    monkeypatch.setattr(machine_code, "stack_of", lambda cubin: 8)
    monkeypatch.setattr(machine_code, "disassembled", lambda cubin: "")
    with ThreadPoolExecutor() as pool, pytest.raises(RuntimeWarning, match="not checked"):
        pool.submit(assembled, PTX, lambda ptx: b"cubin").result()
