"""Flags of unused lanes, which the code generator of Triton 3.6 trusts: taken out, in every kernel that is compiled."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("triton")
from flexsp.runtime.workarounds.vector_flags import drop_lane_flags
from tests.harness.compiling import in_child


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("%1 = shl nuw nsw <2 x i32> %0, <i32 28, i32 1>", "%1 = shl <2 x i32> %0, <i32 28, i32 1>"),
        ("%1 = or disjoint <4 x i32> %0, <i32 poison, i32 9>", "%1 = or <4 x i32> %0, <i32 poison, i32 9>"),
        ("%1 = lshr exact <2 x i32> %0, splat (i32 2)", "%1 = lshr <2 x i32> %0, splat (i32 2)"),
        ("%1 = zext nneg <2 x i32> %0 to <2 x i64>", "%1 = zext <2 x i32> %0 to <2 x i64>"),
        ("%1 = icmp samesign ult <2 x i32> %0, %2", "%1 = icmp ult <2 x i32> %0, %2"),
        ("%1 = shl nuw nsw i32 %0, 4", "%1 = shl nuw nsw i32 %0, 4"),
        ("%1 = fadd fast <2 x float> %0, %2", "%1 = fadd fast <2 x float> %0, %2"),
    ],
)
def test_only_flags_of_integer_vectors_go(line: str, want: str) -> None:
    assert drop_lane_flags(line) == want


def packed_carries(ptx: str) -> list[str]:
    """Instructions of PTX that join a 64-bit product with a number in the upper half: two 32-bit lanes, the first of
    which may run into the second."""
    wide = set(re.findall(r"mul\.wide\.[us]32\s+(%rd\d+),", ptx))
    upper = {name for name, by in re.findall(r"shl\.b64\s+(%rd\d+), %rd\d+, (\d+);", ptx) if int(by) >= 32}
    joined = re.finditer(r"or\.b64\s+%rd\d+, (%rd\d+), (%rd\d+);", ptx)
    return [x[0] for x in joined if {x[1], x[2]} & wide and {x[1], x[2]} & upper]


def compile_scores(plain: bool) -> list[str]:
    """In a child process: the packed carries of `scores_kernel` for chunks of 16 and heads of 64 in fp32."""
    import torch
    from triton.backends.compiler import GPUTarget

    from flexsp.compiler.backend.intrinsic_kernels import scores_kernel
    from flexsp.kernels.primitives import dots
    from flexsp.runtime import launch
    from flexsp.runtime.workarounds import vector_flags

    if plain:
        vector_flags.drop_lane_flags = lambda text: text
    N, C = 64, 16
    x = torch.empty(16, device="meta")
    numbers = (300 * 3 * N, 3 * N, N, 300 * 3 * N, 3 * N, N, 300, 3)
    constants = {"N": N, "BN": 64, "C": C, "LEVELS": 4, "Q_KEPT": False, "K_KEPT": False, "PACKED": False, "PDL": True}
    constants |= dots(torch.float32)
    options = {"num_warps": 4, "num_stages": 1, "launch_pdl": True}
    args = (x, x, x, x, None, *numbers)
    return packed_carries(launch.build(scores_kernel, args, constants, options, GPUTarget("cuda", 90, 32)).asm["ptx"])


def test_no_lane_runs_into_its_neighbour(tmp_path: Path) -> None:
    import triton

    assert not in_child(compile_scores, False, TRITON_CACHE_DIR=tmp_path / "dropped")
    if triton.__version__.startswith("3.6."):
        joined = in_child(compile_scores, True, TRITON_CACHE_DIR=tmp_path / "plain")
        assert joined, "with the flags, Triton 3.6 joins the two lanes"


@pytest.mark.parametrize(("by", "found"), [(31, 0), (32, 1), (40, 1)])
def test_a_product_beside_an_upper_half_is_seen(by: int, found: int) -> None:
    lines = ["mul.wide.u32 %rd1, %r1, 28;", f"shl.b64 %rd2, %rd9, {by};", "or.b64 %rd3, %rd1, %rd2;"]
    assert len(packed_carries("\n".join(lines))) == found
