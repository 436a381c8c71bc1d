"""Missing barriers, waits and fences are found in PTX."""

from __future__ import annotations

import pytest

from flexsp.testing.races import races

BODY = """
.visible .entry kernel(.param .u64 x) .reqntid {threads}
{{
\t.reg .b32 %r<9>;
$L__func_begin0:
\t.loc\t1 7 3
\tmov.u32 \t%r1, %tid.x;
\tshl.b32 \t%r2, %r1, 2;
\tmov.b32 \t%r9, global_smem;
\tadd.s32 \t%r2, %r9, %r2;
\txor.b32 \t%r3, %r2, {other};
\tld.global.b32 \t{{ %r7 }}, [ %rd1 + 0 ];
\tsetp.ne.s32 \t%p1, %r7, 0;
\tcvt.u64.u32 \t%rd2, %r9;
\tshr.u64 \t%rd2, %rd2, 4;
\tor.b64 \t%rd2, %rd2, {descriptor};
{lines}
\tret;
}}
"""
# Rows of 64 bytes, 8 of them 512 bytes apart: bytes 0 to 4095.
DESCRIPTOR = (2 << 62) - (1 << 64) | (512 >> 4) << 32
PRODUCT = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1}, %rd2, %rd2, %p1, 1, 1, 0, 0;"
DONE = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
COPY = "cp.async.ca.shared.global [ %r2 + 0 ], [ %rd1 + 0 ], 4;"
ARRIVED = "cp.async.commit_group; cp.async.wait_group 0;"


def found(lines: str, other: int = 128, threads: int = 128, descriptor: int = DESCRIPTOR) -> list[str]:
    descriptor -= (descriptor >> 63) << 64 if descriptor > 0 else 0
    text = BODY.format(lines=lines, other=other, threads=threads, descriptor=descriptor)
    answer = races(text)
    assert (answer.unseen, answer.unfollowed, answer.missed) == (0, 0, 0)
    return [x.rpartition(": ")[2].partition(" (")[0] for x in answer.found]


@pytest.mark.parametrize(
    ("lines", "other", "want"),
    [
        ("st.shared.b32 [%r2], %r1; bar.sync 0; ld.shared.b32 %r4, [%r3];", 128, []),
        ("st.shared.b32 [%r2], %r1; ld.shared.b32 %r4, [%r3];", 128, ["reads what another warp writes"]),
        ("st.shared.b32 [%r2], %r1; ld.shared.b32 %r4, [%r3];", 64, []),
        ("ld.shared.b32 %r4, [%r2]; st.shared.b32 [%r3], %r1;", 128, ["overwrites what another warp reads"]),
        ("ld.shared.b32 %r4, [%r2]; bar.sync 0; st.shared.b32 [%r3], %r1;", 128, []),
        ("st.shared.b32 [%r2], %r1; st.shared.b32 [%r3], %r1;", 128, ["overwrites what another warp writes"]),
        ("st.shared.v2.b32 [%r2], {%r1, %r1}; st.shared.b32 [%r2+4], %r1;", 128,
         ["overwrites what another warp writes"]),
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r4}, [%r2]; st.shared.b32 [%r3], %r1;", 128,
         ["overwrites what another warp reads"]),
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r4}, [%r2]; st.shared.b32 [%r3], %r1;", 64, []),
    ],
)  # fmt: skip
def test_barriers(lines: str, other: int, want: list[str]) -> None:
    assert found(lines, other) == want


@pytest.mark.parametrize(
    ("lines", "want"),
    [
        (f"st.shared.b32 [%r2], %r1; fence.proxy.async.shared::cta; bar.sync 0; {PRODUCT} {DONE}", []),
        (f"st.shared.b32 [%r2], %r1; fence.proxy.async.shared::cta; {PRODUCT} {DONE}",
         ["reads what was written since the last barrier"]),
        (f"st.shared.b32 [%r2], %r1; bar.sync 0; {PRODUCT} {DONE}", ["reads what was not fenced since it was stored"]),
        (f"{COPY} {ARRIVED} fence.proxy.async.shared::cta; bar.sync 0; {PRODUCT} {DONE}", []),
        (f"{COPY} {ARRIVED} bar.sync 0; {PRODUCT} {DONE}", ["reads what was not fenced since it was copied"]),
        (f"{PRODUCT} {DONE} bar.sync 0; st.shared.b32 [%r2], %r1;", []),
        (f"{PRODUCT} {DONE} st.shared.b32 [%r2], %r1;", ["overwrites what a matrix product reads"]),
        (f"{PRODUCT} bar.sync 0; {DONE} st.shared.b32 [%r2], %r1;", ["overwrites what a matrix product reads"]),
        (f"{PRODUCT} {DONE} st.shared.b32 [%r2+4096], %r1;", []),
    ],
)  # fmt: skip
def test_matrix_products(lines: str, want: list[str]) -> None:
    assert found(lines) == want


HALF = "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%f1}, {%r4}, %rd2, %p1, 1, 1, 1;"
ACROSS = 1 << 62 | (1024 >> 4) << 32 | 64 >> 4  # the second half of 16 lines of 128 bytes
READ = ["overwrites what a matrix product reads"]


@pytest.mark.parametrize(
    ("product", "descriptor", "at", "want"),
    [
        (HALF, ACROSS, 0, []), (HALF, ACROSS, 64, READ),  # line 0 is as it is
        (HALF, ACROSS, 512, READ), (HALF, ACROSS, 576, []),  # of line 4 the halves are exchanged
        (HALF, ACROSS, 1920, READ), (HALF, ACROSS, 1984, []), (HALF, ACROSS, 2048, []),  # and of the last
        (PRODUCT, DESCRIPTOR, 0, READ), (PRODUCT, DESCRIPTOR, 4064, READ), (PRODUCT, DESCRIPTOR, 4096, []),
        (PRODUCT, DESCRIPTOR, 32, READ), (PRODUCT, 3 << 62 | (256 >> 4) << 32, 2048, []),  # lines of 32 bytes
        (PRODUCT, (128 >> 4) << 32 | (1024 >> 4) << 16, 1984, READ),  # of 16, not mixed
        (HALF, (256 >> 4) << 32 | (128 >> 4) << 16, 960, READ),
    ],
)  # fmt: skip
def test_bytes_that_matrix_products_read(product: str, descriptor: int, at: int, want: list[str]) -> None:
    """16 threads store 64 bytes, and no others count: the pieces of a line are mixed by the number of the line."""
    store = f"setp.lt.s32 %p2, %r1, 16; @%p2 st.shared.b32 [%r2+{at}], %r1;"
    assert found(f"{product} {DONE} {store}", descriptor=descriptor) == want


@pytest.mark.parametrize(
    ("lines", "want"),
    [
        (f"{COPY} {ARRIVED} bar.sync 0; ld.shared.b32 %r4, [%r3];", []),
        (f"{COPY} {ARRIVED} ld.shared.b32 %r4, [%r3];", ["reads what another warp writes"]),
        (f"{COPY} cp.async.commit_group; bar.sync 0; ld.shared.b32 %r4, [%r3];", ["reads what a copy writes"]),
        (f"{COPY} cp.async.commit_group; cp.async.wait_group 1; ld.shared.b32 %r4, [%r2];",
         ["reads what a copy writes"]),
        (f"ld.shared.b32 %r4, [%r3]; {COPY} {ARRIVED}", ["overwrites what another warp reads"]),
    ],
)  # fmt: skip
def test_copies(lines: str, want: list[str]) -> None:
    assert found(lines) == want


LOOP = """
mov.b32 %r5, 0;
$L__BB0_1:
{first}
st.shared.b32 [%r2], %r1;
bar.sync 0;
ld.shared.b32 %r4, [%r3];
add.s32 %r5, %r5, 1;
setp.lt.s32 %p2, %r5, {times};
@%p2 bra $L__BB0_1;
"""


@pytest.mark.parametrize(("times", "first", "races_"), [(1, "", 0), (2, "", 1), (2, "bar.sync 0;", 0), ("%r7", "", 1)])
def test_loops(times: object, first: str, races_: int) -> None:
    """Once around there is no race; the number of rounds may come from memory."""
    assert len(found(LOOP.format(times=times, first=first))) == races_


RARELY = """
mov.b32 %r5, 0;
$L__BB0_1:
add.s32 %r5, %r5, 1;
and.b32 %r6, %r5, 31;
setp.ne.s32 %p3, %r6, 0;
@%p3 bra $L__BB0_2;
st.shared.b32 [%r2], %r1;
{barrier}
ld.shared.b32 %r4, [%r3];
$L__BB0_2:
@%p1 bra $L__BB0_1;
"""


@pytest.mark.parametrize(("barrier", "races_"), [("", 1), ("bar.sync 0;", 0)])
def test_what_is_done_every_so_many_turns(barrier: str, races_: int) -> None:
    """The branch that comes then is known not to be taken before."""
    assert len(found(RARELY.format(barrier=barrier))) == races_


SKIPPED = """
@{which}%p1 bra $L__BB0_1;
bar.sync 0;
$L__BB0_1:
ld.shared.b32 %r4, [%r3];
"""
TAKEN = """
@{which}%p1 bra $L__BB0_1;
bra.uni $L__BB0_2;
$L__BB0_1:
bar.sync 0;
$L__BB0_2:
ld.shared.b32 %r4, [%r3];
"""


@pytest.mark.parametrize("which", ["", "!"])
@pytest.mark.parametrize("branch", [SKIPPED, TAKEN], ids=["skipped", "taken"])
def test_both_ways_of_a_branch_are_followed(branch: str, which: str) -> None:
    """The barrier stands in one of them."""
    assert found("st.shared.b32 [%r2], %r1;" + branch.format(which=which)) == ["reads what another warp writes"]


SWITCH = """
{label}: .branchtargets
	$L__BB0_1,
	$L__BB0_2;
	brx.idx 	%r7, {label};
$L__BB0_1:
bar.sync 0;
bra.uni $L__BB0_3;
$L__BB0_2:
{second}
$L__BB0_3:
ld.shared.b32 %r4, [%r3];
"""


@pytest.mark.parametrize("label", ["$L_brx_0", "JTI0_0"])
@pytest.mark.parametrize(("second", "want"), [("", 1), ("bar.sync 0;", 0)])
def test_all_ways_of_a_switch_are_followed(label: str, second: str, want: int) -> None:
    assert len(found("st.shared.b32 [%r2], %r1;" + SWITCH.format(label=label, second=second))) == want


def test_guards_count() -> None:
    """One warp stores, and all but another one load."""
    lines = "setp.lt.s32 %p2, %r1, {}; mov.b32 %r6, global_smem; @%p2 st.shared.b32 [%r6], %r1;"
    lines += "@{}%p2 ld.shared.b32 %r4, [%r6];"
    assert found(lines.format(32, "")) == []
    assert found(lines.format(32, "!")) == found(lines.format(64, "")) == ["reads what another warp writes"]


@pytest.mark.parametrize(
    "line",
    [
        "mbarrier.init.shared::cta.b64 [%r2], 1;", "bar.sync 1, 64;", "bar.arrive 0, 128;",
        "atom.shared.add.u32 %r4, [%r2], 1;", "call.uni f, (%r1);",
    ],
)  # fmt: skip
def test_what_is_not_looked_at_is_refused(line: str) -> None:
    with pytest.raises(NotImplementedError, match=line.split()[0]):
        found(line)


def test_barriers_and_fences_that_are_others() -> None:
    """A barrier of a warp and a fence that is none between proxies order nothing here."""
    assert found("st.shared.b32 [%r2], %r1; bar.warp.sync -1; ld.shared.b32 %r4, [%r3];") != []
    lines = f"st.shared.b32 [%r2], %r1; fence.acq_rel.cta; bar.sync 0; {PRODUCT} {DONE}"
    assert found(lines) == ["reads what was not fenced since it was stored"]
    assert found("st.shared.b32 [%r2], %r1; bar.sync 0, 128; ld.shared.b32 %r4, [%r3];") == []


def test_what_is_not_seen_is_counted() -> None:
    """An address from memory; instructions that nothing leads to; and more branches than are followed."""
    lines = "ld.shared.b32 %r4, [%r7];"
    answer = races(BODY.format(lines=lines, other=128, threads=128, descriptor=DESCRIPTOR))
    assert (answer.unseen, answer.unfollowed, answer.missed) == (1, 0, 0)
    lines = "bra.uni $L__BB0_1;\nld.shared.b32 %r4, [%r2];\n$L__BB0_1:"
    assert races(BODY.format(lines=lines, other=128, threads=128, descriptor=DESCRIPTOR)).missed == 1
    forks = "".join(f"@%p1 bra $L__BB0_{i};\nadd.s32 %r5, %r1, 1;\n$L__BB0_{i}:\n" for i in range(1, 99))
    answer = races(BODY.format(lines=forks, other=128, threads=128, descriptor=DESCRIPTOR))
    assert answer.unfollowed > 0
    with pytest.raises(ValueError, match="expected addresses of shared memory, got -4"):
        found("st.shared.b32 [%r2+-4], %r1;")
