"""Plans for GPUs other than an H200: what a GPU offers, configurations that fit it, refusals before launch.

Kernels are compiled offline up to where their shared memory is known; `slow` tests compile many more, and assemble the
largest. sm_86 and sm_89 lower alike. What an H200 gets is pinned: its speed was measured with these numbers.
"""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexsp.compiler.backend.exact import EXACT
from flexsp.compiler.planning.explain import describe
from flexsp.compiler.planning.model import predict
from flexsp.compiler.planning.tiling import choose_tiling
from flexsp.devices import (
    A10,
    A100,
    B200,
    H100,
    H200,
    KNOWN,
    L4,
    Device,
    check_shared,
    of_arch,
    of_device,
    of_properties,
    planned_for,
)  # fmt: skip
from flexsp.kernels.diagonal.tiles import all_configs, choose
from flexsp.kernels.diagonal.tiling import make_tiling
from tests import variants
from tests.harness.compiling import in_child
from tests.marks import slow

BF16 = torch.bfloat16
KIB = 1024

# What a GPU offers ----------------------------------------------------------------------------------------------------


def properties(name: str, capability: tuple[int, int], count: int, **more: int) -> Any:
    return SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], multi_processor_count=count, **more
    )  # fmt: skip


def test_known_gpus() -> None:
    shared = {A100: 163, A10: 99, L4: 99, H100: 227, H200: 227, B200: 227}
    assert {x: x.shared // KIB for x in KNOWN} == shared
    assert [x.arch for x in KNOWN] == [80, 86, 89, 90, 90, 100]
    assert {x.arch for x in KNOWN if x.dependent} == {x.arch for x in KNOWN if x.wide_products} == {90, 100}
    assert all(x.programs <= x.multiprocessors < x.programs + 33 for x in KNOWN)
    assert of_arch(90) == H200 and of_arch(86) == A10
    assert of_arch(120).shared == 99 * KIB and not of_arch(120).wide_products and of_arch(120).dependent
    assert of_arch(87).shared == 163 * KIB


def test_a_gpu_is_read() -> None:
    found = of_properties(
        properties("NVIDIA A100-SXM4-40GB", (8, 0), 108, shared_memory_per_block_optin=166912,
                   memory_clock_rate=1215000, memory_bus_width=5120)
    )  # fmt: skip
    assert (found.arch, found.multiprocessors, found.shared, found.programs) == (80, 108, 163 * KIB, 96)
    assert found.bandwidth == pytest.approx(0.9 * 1.555e6, rel=0.01) and found.half == A100.half
    assert of_properties(properties("NVIDIA H200", (9, 0), 132, memory_clock_rate=1)) == H200
    clock = {"memory_clock_rate": 2_619_000, "memory_bus_width": 5120}
    assert of_properties(properties("NVIDIA H100 80GB HBM3", (9, 0), 132, **clock)) == H100
    assert of_properties(properties("NVIDIA H100 80GB HBM3", (9, 0), 132)) == H100
    assert of_properties(properties("NVIDIA H100 PCIe", (9, 0), 114, **clock)) != H100
    assert of_properties(properties("NVIDIA H100 NVL", (9, 0), 132, **clock | {"memory_bus_width": 6144})) != H100
    part = of_properties(properties("NVIDIA H200 MIG 3g.71gb", (9, 0), 60))  # no clock: the bandwidth of the whole
    assert (part.programs, part.shared, part.bandwidth) == (48, H200.shared, H200.bandwidth)
    assert part.half == pytest.approx(H200.half * 60 / 132)
    later = of_properties(properties("what comes", (13, 0), 200, shared_memory_per_block_optin=300 * KIB))
    assert later.shared == 300 * KIB and later.programs == 192
    assert of_properties(properties("what comes", (13, 0), 200)).shared == 99 * KIB  # the least of all


def test_old_gpus_are_refused() -> None:
    with pytest.raises(ValueError, match=r"compute capability 8.0 or newer, got Tesla T4 of 7.5; .*sm_80, sm_86"):
        of_properties(properties("Tesla T4", (7, 5), 40, shared_memory_per_block_optin=64 * KIB))
    with pytest.raises(ValueError, match=r"got 7.0"):
        of_arch(70)


def test_planned_for() -> None:
    cpu = torch.device("cpu")
    assert of_device(cpu) == H200
    with planned_for(A100):
        assert of_device(cpu) == A100 == of_device(torch.device("meta"))
    assert of_device(cpu) == H200


def test_what_does_not_fit_is_named() -> None:
    check_shared("dkv_kernel", 99 * KIB, 86, "K = 128")
    with pytest.raises(ValueError) as raised:
        check_shared("dkv_kernel", 99 * KIB + 1, 86, "K = 128, V = 64")
    assert str(raised.value) == (
        "K = 128, V = 64: kernel `dkv_kernel` needs 100 KiB of shared memory, 1 KiB more than the 99 KiB that a block "
        "has on sm_86; use smaller K or V, or a smaller chunk_size where one was given"
    )


# What an H200 gets ----------------------------------------------------------------------------------------------------

H200_TILES = {  # chunk; rows, columns, warps, stages of summarize, output, dq, dk and, where it has its own walk, dv
    ("bfloat16", 64, 16): (64, (64, 16, 4, 4), (64, 16, 4, 3), (64, 16, 4, 3), (64, 16, 4, 3), None),
    ("bfloat16", 64, 64): (64, (64, 64, 4, 4), (64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3), None),
    ("bfloat16", 64, 128): (64, (64, 128, 4, 4), (64, 128, 8, 3), (64, 128, 8, 3), (64, 128, 8, 3), None),
    ("bfloat16", 64, 256): (64, (64, 128, 4, 4), (64, 128, 8, 3), (64, 256, 8, 2), (64, 256, 8, 2), (64, 128, 8, 2)),
    ("bfloat16", 128, 16): (64, (128, 16, 4, 4), (128, 16, 4, 3), (128, 16, 4, 3), (128, 16, 4, 3), None),
    ("bfloat16", 128, 64): (64, (128, 64, 4, 4), (128, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 3), None),
    ("bfloat16", 128, 128): (64, (128, 128, 8, 4), (128, 128, 8, 3), (128, 128, 8, 3), (128, 128, 8, 3), None),
    ("bfloat16", 128, 256):
        (64, (128, 256, 8, 3), (128, 128, 8, 3), (64, 256, 8, 2), (64, 256, 8, 2), (128, 128, 8, 2)),
    ("bfloat16", 256, 16): (64, (128, 16, 4, 4), (256, 16, 4, 2), (64, 16, 4, 2), (64, 16, 4, 2), (256, 16, 4, 2)),
    ("bfloat16", 256, 64): (64, (128, 64, 4, 4), (256, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 2), (256, 64, 8, 2)),
    ("bfloat16", 256, 128):
        (64, (128, 128, 8, 4), (256, 64, 8, 2), (128, 128, 8, 3), (128, 128, 8, 3), (256, 64, 8, 2)),
    ("bfloat16", 256, 256): (64, (128, 256, 8, 3), (256, 64, 8, 2), (64, 256, 8, 2), (64, 256, 8, 2), (256, 64, 8, 2)),
    ("float32", 64, 16): (16, (64, 16, 4, 2), (64, 16, 4, 1), (32, 16, 4, 1), (32, 16, 4, 1), (64, 16, 4, 1)),
    ("float32", 64, 64): (16, (64, 64, 4, 2), (64, 32, 4, 1), (32, 64, 4, 1), (32, 64, 4, 1), (64, 32, 4, 1)),
    ("float32", 64, 128): (16, (64, 64, 4, 2), (64, 32, 4, 1), (32, 128, 4, 1), (32, 128, 4, 1), (64, 32, 4, 1)),
    ("float32", 64, 256): (16, (64, 64, 4, 2), (64, 32, 4, 1), (32, 256, 8, 1), (32, 256, 8, 1), (64, 32, 4, 1)),
    ("float32", 128, 16): (16, (64, 16, 4, 2), (128, 16, 4, 1), (32, 16, 4, 1), (32, 16, 4, 1), (128, 16, 4, 1)),
    ("float32", 128, 64): (16, (64, 64, 4, 2), (128, 32, 4, 1), (32, 64, 4, 1), (32, 64, 4, 1), (128, 32, 4, 1)),
    ("float32", 128, 128): (16, (64, 64, 4, 2), (128, 32, 4, 1), (32, 128, 4, 1), (32, 128, 4, 1), (128, 32, 4, 1)),
    ("float32", 128, 256): (16, (64, 64, 4, 2), (128, 32, 4, 1), (32, 256, 8, 1), (32, 256, 8, 1), (128, 32, 4, 1)),
    ("float32", 256, 16): (16, (64, 16, 4, 2), (256, 16, 8, 1), (32, 16, 4, 1), (32, 16, 4, 1), (256, 16, 8, 1)),
    ("float32", 256, 64): (16, (64, 64, 4, 2), (256, 32, 8, 1), (32, 64, 4, 1), (32, 64, 4, 1), (256, 32, 8, 1)),
    ("float32", 256, 128): (16, (64, 64, 4, 2), (256, 32, 8, 1), (32, 128, 4, 1), (32, 128, 4, 1), (256, 32, 8, 1)),
    ("float32", 256, 256): (16, (64, 64, 4, 2), (256, 32, 8, 1), (32, 256, 8, 1), (32, 256, 8, 1), (256, 32, 8, 1)),
}  # fmt: skip
H200_SEGMENTS = {  # B, T, H, documents: chunks, those of a segment, segments; bf16 heads of 128
    (1, 65536, 32, 0): (1024, 128, 8),
    (1, 65536, 32, 4): (1028, 86, 12),
    (1, 32768, 80, 0): (512, 86, 6),
    (1, 4096, 32, 0): (64, 16, 4),
    (1, 4096, 32, 4): (68, 17, 4),
    (4, 1000, 3, 0): (16, 2, 8),
    (4, 1000, 3, 4): (20, 2, 10),
    (1, 16384, 16, 0): (256, 32, 8),
    (1, 16384, 16, 4): (260, 33, 8),
}
# Chunk, chunks, those of a segment, segments; columns, warps, stages, registers of walks, whole, part and small.
H200_PLANS = {
    ("simple_gla", "bfloat16", 128, 128, 32, 65536, 0, False):
        (64, 1024, 128, 8, (128, 8, 3, None), (128, 8, 1, None), (128, 4, 1, 168), (128, 2, 1, None)),
    ("simple_gla", "bfloat16", 128, 128, 32, 4096, 0, False):
        (64, 64, 16, 4, (128, 8, 3, None), (128, 8, 1, None), (128, 4, 1, 168), (128, 2, 1, None)),
    ("simple_gla", "bfloat16", 128, 128, 4, 65536, 0, True):
        (64, 1024, 32, 32, (128, 8, 3, None), (128, 8, 1, None), (128, 4, 1, 168), (128, 2, 1, None)),
    ("simple_gla", "bfloat16", 128, 128, 16, 16384, 3, False):
        (64, 259, 33, 8, (128, 8, 3, None), (128, 8, 1, None), (128, 4, 1, 168), (128, 2, 1, None)),
    ("simple_gla", "float32", 128, 128, 32, 65536, 0, False):
        (16, 4096, 128, 32, (32, 4, 1, None), (128, 8, 1, None), (128, 4, 1, None), (128, 2, 1, None)),
    ("simple_gla", "bfloat16", 64, 64, 32, 65536, 0, False):
        (64, 1024, 128, 8, (64, 4, 3, None), (64, 4, 1, None), (64, 4, 1, 168), (64, 2, 1, None)),
    ("gla", "bfloat16", 128, 128, 32, 65536, 0, False):
        (64, 1024, 128, 8, (128, 8, 3, None), (128, 8, 1, None), (128, 8, 1, None), (128, 2, 1, None)),
    ("gla", "bfloat16", 128, 128, 128, 2048, 0, False):
        (64, 32, 32, 1, (128, 8, 3, None), (128, 8, 1, None), (128, 8, 1, None), (128, 2, 1, None)),
    ("gla", "bfloat16", 64, 128, 32, 65536, 3, False):
        (64, 1027, 115, 9, (128, 4, 3, None), (128, 8, 1, None), (128, 4, 1, 168), (128, 2, 1, None)),
    ("gla", "bfloat16", 128, 256, 32, 65536, 0, False):
        (64, 1024, 128, 8, (128, 8, 3, None), (256, 8, 1, None), (256, 8, 1, None), (256, 2, 1, None)),
    ("gla", "float32", 64, 64, 32, 4096, 0, False):
        (16, 256, 128, 2, (32, 4, 1, None), (64, 4, 1, None), (64, 4, 1, None), (64, 2, 1, None)),
    ("deltanet", "bfloat16", 128, 128, 32, 65536, 0, False):
        (64, 1024, 1024, 1, (32, 4, 3, None), (128, 8, 1, None), (128, 4, 1, None), (128, 2, 1, None)),
    ("deltanet", "bfloat16", 128, 128, 128, 2048, 0, False):
        (64, 32, 32, 1, (128, 8, 2, None), (128, 8, 1, None), (128, 4, 1, None), (128, 2, 1, None)),
    ("deltanet", "bfloat16", 128, 128, 32, 65536, 0, True):
        (64, 1024, 1024, 1, (32, 4, 3, None), (128, 8, 1, None), (128, 4, 1, None), (128, 2, 1, None)),
    ("deltanet", "bfloat16", 64, 64, 4, 65536, 0, False):
        (128, 512, 512, 1, (32, 4, 2, None), (64, 4, 1, None), (64, 8, 1, None), (64, 2, 1, None)),
    ("deltanet", "float32", 128, 128, 32, 4096, 0, False):
        (16, 256, 256, 1, (32, 4, 1, None), (128, 8, 1, None), (128, 4, 1, None), (128, 2, 1, None)),
    ("gated_deltanet", "bfloat16", 128, 128, 32, 65536, 0, False):
        (64, 1024, 1024, 1, (32, 4, 3, None), (128, 8, 1, None), (128, 8, 1, None), (128, 2, 1, None)),
    ("gated_deltanet", "bfloat16", 128, 256, 32, 65536, 0, False):
        (64, 1024, 1024, 1, (64, 4, 3, None), (256, 8, 1, None), (256, 8, 1, None), (256, 2, 1, None)),
    ("gated_deltanet", "bfloat16", 128, 128, 16, 16384, 3, False):
        (64, 259, 259, 1, (32, 4, 3, None), (128, 8, 1, None), (128, 8, 1, None), (128, 2, 1, None)),
    ("vector_gated_delta", "bfloat16", 128, 128, 32, 65536, 0, False):
        (64, 1024, 1024, 1, (32, 4, 3, None), (128, 8, 1, None), (128, 8, 1, None), (128, 2, 1, None)),
    ("hgrn", "bfloat16", 128, 128, 32, 65536, 0, False):
        (128, 512, 128, 4, (32, 4, 1, None), (32, 4, 1, None), (32, 4, 1, None), (32, 2, 1, None)),
    ("hgrn", "bfloat16", 128, 128, 16, 16384, 0, True):
        (128, 128, 16, 8, (32, 4, 1, None), (32, 4, 1, None), (32, 4, 1, None), (32, 2, 1, None)),
    ("linear", "bfloat16", 128, 128, 32, 65536, 0, False):
        (64, 1024, 128, 8, (128, 8, 3, None), (128, 8, 1, None), (128, 4, 1, 168), (128, 2, 1, None)),
    ("retnet", "bfloat16", 128, 128, 32, 65536, 0, False):
        (64, 1024, 128, 8, (128, 8, 3, None), (128, 8, 1, None), (128, 4, 1, 168), (128, 2, 1, None)),
    ("gla_own_bias", "bfloat16", 128, 128, 32, 65536, 0, False):
        (64, 1024, 128, 8, (128, 8, 3, None), (128, 8, 1, None), (128, 8, 1, None), (128, 2, 1, None)),
}  # fmt: skip


@pytest.mark.parametrize("key", H200_TILES, ids=str)
def test_tiles_of_an_h200_stay(key: tuple[str, int, int]) -> None:
    name, K, V = key
    found = choose(getattr(torch, name), K, V, H200)
    tiles = (found.summarize, found.output, found.dq, found.dk, found.dv)
    assert (found.chunk, *(x and (x.bk, x.bv, x.warps, x.stages) for x in tiles)) == H200_TILES[key]


def test_segments_of_an_h200_stay() -> None:
    for (B, T, H, docs), want in H200_SEGMENTS.items():
        x = torch.empty(B, T, H, 128, dtype=BF16, device="meta")
        plan = make_tiling(x, x, docs)
        assert (plan.n_chunks, plan.per_seg, plan.n_seg) == want


@functools.lru_cache(maxsize=64)
def code_of(name: str, K: int, V: int, dtype: torch.dtype) -> Any:
    from flexsp.compiler.backend.generated_kernels import Generated

    return Generated(variants.load(name).make(32, K, V, dtype).program)


def sizes_of(code: Any, K: int, V: int) -> dict[str, int]:
    return {name: {"K": K, "V": V}[name] for name in code.layout.sizes}


def one_of_a_kind(key: Any) -> bool:
    """Its program is made for other tests here too, or is the only one in float32."""
    name, *how = key
    kinds = ("simple_gla", "gla", "deltanet", "gated_deltanet", "vector_gated_delta", "hgrn")
    return (name in kinds and how[:3] == ["bfloat16", 128, 128]) or (name, how[0]) == ("gla", "float32")


@pytest.mark.parametrize(
    "key", [pytest.param(x, marks=[] if one_of_a_kind(x) else pytest.mark.slow) for x in H200_PLANS], ids=str
)
def test_plans_of_an_h200_stay(key: Any) -> None:
    name, dtype, K, V, heads, T, docs, ranks = key
    code = code_of(name, K, V, getattr(torch, dtype))
    x = choose_tiling(code, sizes_of(code, K, V), heads, T, docs, getattr(torch, dtype), ranks, H200)
    found = [(how.cols, how.warps, how.stages, how.registers) for how in (x.walk, x.whole, x.part, x.small)]
    assert (x.chunk, x.n_chunks, x.per_seg, x.n_seg, *found) == H200_PLANS[key]


# Plans of others ------------------------------------------------------------------------------------------------------


def test_a_plan_is_of_its_gpu() -> None:
    """Segments fill its multiprocessors, tiles fit its blocks, and predicted times follow its rates."""
    code, sizes = code_of("gla", 128, 128, BF16), {"K": 128, "V": 128}
    plans = {x: choose_tiling(code, sizes, 4, 65536, 0, BF16, ranks=True, device=x) for x in KNOWN}
    assert plans[H200] == plans[H100] and plans[A100].n_seg < plans[H200].n_seg
    assert plans[A10].walk != plans[H200].walk
    us = {}
    for x, plan in plans.items():
        rows = predict(code, plan, sizes, 4, 65536, BF16, device=x)
        assert all(row.shared <= x.shared for row in rows)
        us[x] = sum(row.us for row in rows)
    assert us[B200] < us[H200] < us[H100] < us[A100] < us[A10] < us[L4]
    x = torch.empty(1, 65536, 4, 128, dtype=BF16, device="meta")
    with planned_for(A100):
        smaller = make_tiling(x, x, 0)
    assert smaller.tiles.chunk == 32 and smaller.tiles.dv is not None and smaller.n_seg < 2 * make_tiling(x, x, 0).n_seg


def test_explain_names_the_gpu() -> None:
    code = code_of("gla", 128, 128, BF16)
    text = {x: "\n".join(describe(code, {"K": 128, "V": 128}, 32, 4096, BF16, device=x)) for x in (A10, H200)}
    assert "Planned for H200 (132 SMs, 227 KiB a block, 4.3 TB/s)" in text[H200]
    assert "Planned for A10 (72 SMs, 99 KiB a block, 0.54 TB/s)" in text[A10]


# Compiled -------------------------------------------------------------------------------------------------------------

ARCHS = (80, 86, 89, 90, 100)
QUICK = {  # the kernels with the most shared memory at the largest head sizes, and those that are hardest to compile
    "diagonal bfloat16 256 256 packed": ("summarize_kernel", "output_kernel", "dq_kernel", "dkv_kernel"),
    "turned bfloat16 256 128 packed": ("dq_kernel", "dkv_kernel"),
    "deltanet bfloat16 128 128 packed": ("output", "output_backward"),
}


def meta(*size: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=kind, device="meta")


def diagonal(
    dtype: torch.dtype, K: int, V: int, packed: bool, turned: bool = False
) -> tuple[list[Any], dict[str, int]]:  # fmt: skip
    """The launches of a gated forward and backward pass; `turned`: tokens turn the state."""
    from flexsp.kernels import executable, operators
    from flexsp.testing.offline import record_launches
    from tests.harness.executables import scalar_decay_executable

    executable.propagate_step = lambda *args: lambda frame: None  # type: ignore[assignment]  # compiled in its own tests
    B, T, H, docs = 1, 32768, 32, 4 if packed else 0
    q, k, v, do = (meta(B, T, H, n, kind=dtype) for n in (K, K, V, V))
    state = meta(docs or B, H, K, V).requires_grad_()
    bounds = meta(docs + 1, kind=torch.int64) if packed else None
    given = {"q": q, "k": k, "v": v, "g": meta(B, T, H).requires_grad_()}
    given |= {"turned": meta(B, T, H, K // 2).requires_grad_()} if turned else {}
    operators.chunk_table = lambda *args: meta(9999, 5, kind=torch.int32)  # type: ignore[assignment]
    with record_launches() as launches:
        found = scalar_decay_executable(given, state, docs, 1.0)
        o, final = operators.run(found, None, [*given.values()], state, bounds, (0, T, T))
        torch.autograd.backward([o, final], [do, state.detach()])
    return launches, {}


def generated(name: str, dtype: torch.dtype, K: int, V: int, packed: bool) -> tuple[list[Any], dict[str, int]]:
    """The launches of a forward and backward pass with initial states, and the bytes of shared memory predicted."""
    from flexsp.compiler import dispatch
    from flexsp.kernels import operators
    from flexsp.testing.offline import record_launches

    operators.chunk_table = lambda *args: meta(1, kind=torch.int32)  # type: ignore[assignment]
    code, docs, sizes = code_of(name, K, V, dtype), 4 if packed else 0, {"H": 32, "K": K, "V": V}

    def made(what: Any, lead: list[int]) -> torch.Tensor:
        shape = [*lead, *(sizes[s.name] for s in what.shape[len(lead) > 0 :])]
        return meta(*shape, kind=what.dtype).requires_grad_()

    tokens = {key: made(what, [1, 4096]) for key, what in code.program.meta.tokens.items()}
    params = {key: made(what, []) for key, what in code.program.meta.params.items()}
    initial = made(code.program.meta.state, [docs or 1]).detach().float().requires_grad_()
    bounds = meta(docs + 1, kind=torch.int64) if packed else None
    with record_launches() as launches:
        executable = dispatch.executable_of(code, tokens | params, initial, bounds, None)
        given = [*tokens.values(), *params.values()]
        o, final = operators.run(executable, None, given, initial, bounds, (0, 4096, 4096))
        torch.autograd.backward([o, final], [torch.empty_like(o), torch.empty_like(final)])
    passes = [
        predict(code, executable.plan.tiling, executable.plan.sizes, 32, 4096, dtype, n_docs=docs, backward=back)
        for back in (False, True)
    ]  # fmt: skip
    rows, tail = [x for some in passes for x in some], ["tail_kernel"] if docs else []  # not of the plan: writes zeros
    assert [kernel.__name__ for kernel, *_ in launches if not kernel.__name__.startswith(EXACT)] == [
        name for some in passes for name in (*(x.kernel for x in some), *tail)
    ]
    walk = executable.plan.tiling.walk
    for kernel, _, given in launches:
        if kernel.__name__ in ("output", "output_backward", "chunk_states"):
            assert (given["num_warps"], given["num_stages"]) == (walk.warps, walk.stages), "not the plan's"
    limit = of_device(torch.device("cpu")).shared
    assert not executable.plan.tiling.sure or all(x.shared <= limit for x in rows)
    return launches, {x.kernel: x.shared for x in rows}


def compile_for(arch: int, configs: dict[str, tuple[str, ...]], assemble: bool) -> list[Any]:
    """In a child process: kernels (all where none is named) of the plans for a GPU, with their shared memory."""
    from flexsp.testing.offline import compile_launches, shared_of

    found: list[Any] = []
    if "too deep" in configs:
        launches, _ = diagonal(BF16, 128, 128, False)
        kernel, args, given = next(x for x in launches if x[0].__name__ == "summarize_kernel")
        with pytest.raises(ValueError) as raised:
            compile_launches([(kernel, args, given | {"num_stages": 7})], arch)
        return [str(raised.value)]
    for config, names in configs.items():
        engine, dtype, K, V, *packed = config.split()
        with planned_for(of_arch(arch)):
            how = (getattr(torch, dtype), int(K), int(V), bool(packed))
            by_engine = {"diagonal": diagonal, "turned": functools.partial(diagonal, turned=True)}
            launches, predicted = by_engine.get(engine, functools.partial(generated, engine))(*how)
        launches = [x for x in launches if not names or x[0].__name__ in names]
        told = [vars(x) for x in compile_launches(launches, arch)] if assemble else []
        shared = [x["shared"] for x in told] or shared_of(launches, arch)
        for i, (kernel, _, given) in enumerate(launches):
            if kernel.__name__ != "_propagate_kernel":
                tile = {key: given.get(key) for key in ("BK", "BV", "C", "num_warps", "num_stages")}
                row = {"config": config, "kernel": kernel.__name__, **tile, "shared": shared[i]}
                row |= {"predicted": predicted.get(kernel.__name__)}
                found.append(row | ({key: told[i][key] for key in ("registers", "stack")} if told else {}))
    return found


def compiled(arch: int, configs: dict[str, tuple[str, ...]], folder: Path, assemble: bool = False) -> list[Any]:
    found: list[Any] = in_child(compile_for, arch, configs, assemble, timeout=1800, FLEXSP_CODE_DIR=folder)
    return found


def table(found: list[Any]) -> str:
    return "\n".join(" ".join(f"{key}={value}" for key, value in x.items() if value is not None) for x in found)


# Backward passes that sm_86 and sm_89 have no room for. Their plans may not fit: see tests/compiler/test_dispatch.py.
REFUSED = {f"{name} bfloat16 128 256 packed" for name in ("gated_deltanet", "vector_gated_delta")}
LARGE_DENSE = ("rwkv7 bfloat16", "rwkv7 float32", "vector_gated_delta bfloat16", "vector_gated_delta float32")
REFUSED |= {f"{name} 256 256 packed" for name in LARGE_DENSE}


def assert_fits(arch: int, found: list[Any]) -> None:
    print(table(found))
    limit = of_arch(arch).shared
    refused = [x for x in found if arch in (86, 89) and x["config"] in REFUSED and (x["predicted"] or 0) > limit]
    assert not (large := [x for x in found if x["shared"] > limit and x not in refused]), table(large)
    low = [x for x in found if x["predicted"] is not None and x["predicted"] < x["shared"]]
    assert not low, f"predicted less than is needed:\n{table(low)}"


@pytest.mark.parametrize("arch", [86, *slow(100)])
def test_the_largest_kernels_fit(arch: int, tmp_path: Path) -> None:
    """Where a block has least; sm_100 has what sm_90 has, whose kernels have tests of their own."""
    found = compiled(arch, QUICK, tmp_path)
    assert {x["kernel"] for x in found} == {name for names in QUICK.values() for name in names}
    assert_fits(arch, found)
    for x in found:
        if x["config"].startswith("diagonal"):
            _, dtype, K, V, _ = x["config"].split()
            tiles = choose(getattr(torch, dtype), int(K), int(V), of_arch(arch), packed=True)
            (tile,) = {
                t for name, t in vars(tiles).items()
                if name != "chunk" and t and (t.bk, t.bv, t.warps, t.stages) == tuple(
                    x[key] for key in ("BK", "BV", "num_warps", "num_stages"))
            }  # fmt: skip
            assert x["C"] == tiles.chunk and tile


def test_what_does_not_fit_is_refused_when_it_is_compiled(tmp_path: Path) -> None:
    """Before a launch, by name: here a pipeline too deep for the GPU."""
    (message,) = compiled(86, {"too deep": ()}, tmp_path)
    found = re.fullmatch(
        r"K = 128, V = 128, BK = 128, BV = 128, C = 64: kernel `summarize_kernel` needs (\d+) KiB of shared memory, "
        r"(\d+) KiB more than the 99 KiB that a block has on sm_86; use smaller K or V, or a smaller chunk_size where "
        "one was given",
        message,
    )
    assert found and int(found[1]) - int(found[2]) == 99, message


def every_diagonal(device: Device) -> dict[str, tuple[str, ...]]:
    return {
        f"diagonal {str(dtype).removeprefix('torch.')} {K} {V}{packed}": ()
        for dtype, K, V, _ in all_configs(device) for packed in ("", " packed")
    } | {
        f"turned {dtype} {K} {V}{packed}": () for dtype in ("bfloat16", "float32")
        for K in (64, 128, 256) for V in (16, 64, 128) for packed in ("", " packed")
    }  # fmt: skip


GENERATED = {
    f"{name} {dtype} {size} packed": ()
    for name in ("simple_gla", "gla", "gla_own_bias", "deltanet", "gated_deltanet", "vector_gated_delta", "hgrn")
    for dtype, size in (("bfloat16", "128 128"), ("bfloat16", "64 64"), ("bfloat16", "128 256"), ("float32", "128 128"))
}
GENERATED |= {f"{x} 256 256 packed": () for x in ("gla bfloat16", "gla float32", *LARGE_DENSE)}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_configuration_of_the_engine_fits(arch: int, tmp_path: Path) -> None:
    assert_fits(arch, compiled(arch, every_diagonal(of_arch(arch)), tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("config", GENERATED)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_generated_kernel_fits(arch: int, config: str, tmp_path: Path) -> None:
    assert_fits(arch, compiled(arch, {config: ()}, tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", [80, 86, 89, 100])
def test_the_largest_kernels_are_assembled(arch: int, tmp_path: Path) -> None:
    """ptxas takes them; before Hopper it is told how many registers there are, else it gives 32 to those that spill."""
    found = compiled(arch, QUICK | {"diagonal bfloat16 128 128": (), "gla bfloat16 128 128": ()}, tmp_path, True)
    assert_fits(arch, found)
    assert all(x["registers"] > 32 for x in found if x["stack"]), table(found)


def test_replaced_devices_are_others() -> None:
    """Plans are kept by GPU: one that differs in anything has plans of its own."""
    x = torch.empty(1, 4096, 4, 64, dtype=BF16, device="meta")
    with planned_for(replace(H200, programs=8)):
        few = make_tiling(x, x, 0)
    assert few.n_seg == 2 and make_tiling(x, x, 0).n_seg == 32


class Symbolic(int):
    """As sizes in graphs are: without a hash."""

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("gluon", [False, True])
def test_tiles_of_symbolic_sizes(gluon: bool) -> None:
    for K, V in itertools.product((16, 64, 128, 256), repeat=2):
        symbolic = choose(torch.bfloat16, Symbolic(K), Symbolic(V), H200, gluon=gluon)
        assert symbolic == choose(torch.bfloat16, K, V, H200, gluon=gluon)
