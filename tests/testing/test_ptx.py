"""Integers of every thread, from PTX."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from flexsp.testing.ptx import Instruction, Integers

BIG = 0x9ABCDEF0


def run(*lines: str) -> Integers:
    """%r1 is the thread's number, %r2 is BIG + thread, %r8 is not known."""
    integers = Integers(64)
    for line in ("mov.u32 %r1, %tid.x", f"mov.b32 %r3, {BIG}", "add.s32 %r2, %r3, %r1", *lines):
        integers.run(Instruction.of(line, 0))
    return integers


def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("add.s32 %r9, %r2, 0x7fffffff", lambda t: BIG + t + 0x7FFFFFFF),
        ("sub.s32 %r9, %r1, 7", lambda t: t - 7),
        ("mul.lo.s32 %r9, %r2, %r2", lambda t: (BIG + t) ** 2),
        ("mul.hi.u32 %r9, %r2, %r2", lambda t: (BIG + t) ** 2 >> 32),
        ("mul.hi.s32 %r9, %r2, %r2", lambda t: signed(BIG + t) ** 2 >> 32),
        ("mad.lo.s32 %r9, %r1, 6, %r2", lambda t: 6 * t + BIG + t),
        ("shl.b32 %r9, %r2, 3", lambda t: BIG + t << 3),
        ("shl.b32 %r9, %r2, 32", lambda t: 0),
        ("shr.u32 %r9, %r2, 5", lambda t: BIG + t >> 5),
        ("shr.s32 %r9, %r2, 5", lambda t: signed(BIG + t) >> 5),
        ("and.b32 %r9, %r2, 56", lambda t: BIG + t & 56),
        ("or.b32 %r9, %r2, 7", lambda t: BIG + t | 7),
        ("xor.b32 %r9, %r2, %r1", lambda t: BIG + t ^ t),
        ("not.b32 %r9, %r1", lambda t: ~t),
        ("neg.s32 %r9, %r1", lambda t: -t),
        ("min.s32 %r9, %r1, %r2", lambda t: signed(BIG + t)),
        ("min.u32 %r9, %r1, %r2", lambda t: t),
        ("max.s32 %r9, %r1, 9", lambda t: max(t, 9)),
        ("rem.u32 %r9, %r1, 7", lambda t: t % 7),
        ("div.u32 %r9, %r2, 7", lambda t: (BIG + t) // 7),
        ("bfe.u32 %r9, %r2, 4, 8", lambda t: BIG + t >> 4 & 255),
        ("bfe.s32 %r9, %r1, 3, 1", lambda t: -(t >> 3 & 1)),
        ("bfe.s32 %r9, %r2, 4, 8", lambda t: signed((BIG + t) >> 4, 8)),
        ("bfe.s32 %r9, %r2, 28, 8", lambda t: signed(BIG + t) >> 28),
        ("bfe.s32 %r9, %r2, 28, 0", lambda t: 0),
        ("bfi.b32 %r9, %r1, %r2, 8, 4", lambda t: (BIG + t) & ~0xF00 | (t & 15) << 8),
        ("lop3.b32 %r9, %r1, %r2, 12, 0xf8", lambda t: t | (BIG + t & 12)),
        ("prmt.b32 %r9, %r2, 0x11223344, 0x7610U", lambda t: 0x11220000 | (BIG + t & 0xFFFF)),
        ("prmt.b32 %r9, %r2, 0, 0xbbbbU", lambda t: 0xFFFFFFFF),
        ("shfl.sync.idx.b32 %r9, %r1, 3, 31, -1", lambda t: t // 32 * 32 + 3),
        ("cvt.u32.u16 %r9, %r2", lambda t: BIG + t & 0xFFFF),
        ("cvt.s32.s16 %r9, %r2", lambda t: signed(BIG + t, 16)),
        ("mov.b32 %r9, %r2", lambda t: BIG + t),
        ("and.b32 %r9, %r8, 0", lambda t: 0),
    ],
)  # fmt: skip
def test_results(line: str, want: Callable[[int], int]) -> None:
    found = run(line).registers["%r9"]
    assert [int(x) & 0xFFFFFFFF for x in found] == [want(t) & 0xFFFFFFFF for t in range(64)]


@pytest.mark.parametrize(
    ("lines", "want"),
    [
        (["mul.wide.u32 %rd9, %r2, %r2"], lambda t: (BIG + t) ** 2),
        (["mul.wide.s32 %rd9, %r2, 4"], lambda t: 4 * signed(BIG + t)),
        (["mad.wide.u32 %rd9, %r2, 4, %rd1"], lambda t: 4 * (BIG + t) + t),
        (["cvt.s64.s32 %rd9, %r2"], lambda t: signed(BIG + t)),
        (["mov.b64 %rd9, {%r1, %r2}"], lambda t: t | BIG + t << 32),
        (["mov.b64 %rd2, {%r1, %r2}", "mov.b64 {%r4, %r5}, %rd2", "cvt.u64.u32 %rd9, %r5"], lambda t: BIG + t),
        (["mov.b64 %rd2, {%r1, %r2}", "shr.u64 %rd9, %rd2, 4"], lambda t: (t | BIG + t << 32) >> 4),
    ],
)
def test_wide_results(lines: list[str], want: Callable[[int], int]) -> None:
    found = run("cvt.u64.u32 %rd1, %r1", *lines).registers["%rd9"]
    assert [int(x) & (1 << 64) - 1 for x in found] == [want(t) & (1 << 64) - 1 for t in range(64)]


@pytest.mark.parametrize(
    ("how", "holds"),
    [("lt.s32", False), ("lt.u32", True), ("eq.s32", False), ("ne.s32", True), ("ge.s32", True), ("hi.u32", False)],
)
def test_choices(how: str, holds: bool) -> None:
    """BIG + t is less than t as a number with a sign, and greater without one."""
    found = run(f"setp.{how} %p1, %r1, %r2", "selp.b32 %r9, 1, 2, %p1").registers["%r9"]
    assert found.tolist() == [1 if holds else 2] * 64


def test_guards_and_what_is_not_known() -> None:
    integers = run("setp.lt.s32 %p1, %r1, 32", "mov.b32 %r9, 5", "@%p1 mov.b32 %r9, 6", "@!%p1 add.s32 %r9, %r9, 1")
    assert integers.registers["%r9"].tolist() == [6] * 64
    for line in ("add.s32 %r9, %r1, %r8", "add.f32 %r9, %r1, %r1", "shfl.sync.bfly.b32 %r9, %r1, 1, 31, -1",
                 "cvt.rn.f32.s32 %r9, %r1", "popc.b32 %r9, %r1", "@%p8 mov.b32 %r9, 1"):  # fmt: skip
        assert run("mov.b32 %r9, 5", line).registers["%r9"] is None, line


def test_addresses() -> None:
    integers = run("mov.b32 %r4, global_smem")
    assert np.array_equal(integers.address("[%r1+16]"), np.arange(64) + 16)
    assert np.array_equal(integers.address("[ %r4 + 0 ]"), np.zeros(64)) and integers.address("[%r8]") is None
