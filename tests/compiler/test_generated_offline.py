"""Generated kernels compiled for sm_90 without a GPU, and their source as text.

Bf16 heads of 128: shared memory, stack, the wait before memory is touched, and the ptxas. A stack frame (bytes a
thread) beyond those stated is a failure, and so is one that became half of what is stated: the table must say so then.
Stacks differ between releases of Triton, which bring their own LLVM and ptxas. Where none is stated for a release, the
test of it is skipped.

`FLEXSP_RENEW_GOLDEN=1` writes tests/golden/gla.py anew.
"""

from __future__ import annotations

import functools as ft
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl

from flexsp.compiler.backend.tile_ops import sum_over
from flexsp.runtime.launch import begin
from flexsp.runtime.triton_private import RELEASE
from tests.harness.compiling import described, in_child
from tests.marks import slow

pytestmark = pytest.mark.compiles

SHARED_LIMIT = 227 * 1024
GOLDEN = Path(__file__).parents[1] / "golden" / "gla.py"
CONFIGS = [
    ("hgrn", "whole"),
    *slow(
        ("gla", "whole"),
        ("deltanet", "ranks"),
        ("simple_gla", "packed"),
        ("simple_gla", "whole"),
        ("deltanet", "whole"),
        ("hgrn", "packed"),
        ("gated_deltanet", "whole"),
        ("gated_deltanet", "ranks"),
        ("rwkv7", "whole"),
        ("rwkv7", "ranks"),
        ("gdn2", "whole"),
    ),
]
Stacks = dict[tuple[str, str], dict[str, int]]
STACK: dict[tuple[int, ...], Stacks] = {  # of a release, bytes a thread; 0 if not here
    (3, 6): {
        ("gla", "whole"): {},
        ("simple_gla", "whole"): {"grads": 64},
        ("simple_gla", "packed"): {"output": 80, "grads": 72},
        ("deltanet", "whole"): {"grads": 568},
        ("deltanet", "ranks"): {"grads": 568},
        ("hgrn", "whole"): {},
        ("hgrn", "packed"): {},
        ("gated_deltanet", "whole"): {"output_backward": 48, "grads": 336},
        ("gated_deltanet", "ranks"): {"summarize_backward": 48, "grads": 336},
        ("rwkv7", "whole"): {"prepare0": 56, "grads": 992},
        ("rwkv7", "ranks"): {"prepare0": 56, "grads": 992},
        ("gdn2", "whole"): {"grads": 240},
    },
    (3, 7): {
        ("gla", "whole"): {"scores_grad_kernel": 24, "grads": 128},
        ("deltanet", "ranks"): {"summarize_backward": 24, "output_backward": 40, "grads": 656},
    },
    (3, 8): {
        ("gla", "whole"): {"scores_grad_kernel": 120, "grads": 128},
        ("deltanet", "ranks"): {"summarize_backward": 24, "output_backward": 32, "grads": 1008},
    },
    (3, 9): {
        ("gla", "whole"): {"scores_grad_kernel": 112, "grads": 128},
        ("deltanet", "ranks"): {"summarize_backward": 48, "output_backward": 8, "grads": 856},
    },
}
# Where a release of ptxas takes more.
STACK_OF_PTXAS = {
    (131, "deltanet", "ranks"): {"output_backward": 56},
    (133, "deltanet", "ranks"): {"output_backward": 48},
    (133, "gla", "whole"): {"prepare0": 8},
    (134, "deltanet", "ranks"): {"summarize_backward": 56},
}
WALKS = ("summarize", "output", "chunk_states", "summarize_backward", "output_backward")


def compile_variant(
    name: str, how: str, K: int = 128, V: int = 128, dtype: str = "bfloat16"
) -> list[dict[str, Any]]:  # fmt: skip
    """In a child process: a forward and backward pass on meta tensors, every launch compiled."""
    import torch

    from flexsp.comm.group import SequenceParallel
    from flexsp.comm.heap import SymmetricHeap
    from flexsp.compiler import dispatch
    from flexsp.compiler.backend.generated_kernels import Generated
    from flexsp.kernels import operators
    from flexsp.testing import offline
    from tests import variants

    operators.chunk_table = lambda *args: torch.empty(1, dtype=torch.int32, device="meta")  # type: ignore[assignment]
    sizes = {"H": 32, "K": K, "V": V}
    program = variants.load(name).make(*sizes.values(), getattr(torch, dtype)).program
    code = Generated(program)

    def made(what: Any, lead: list[int]) -> torch.Tensor:
        shape = [*lead, *(sizes[s.name] for s in what.shape[len(lead) > 0 :])]
        return torch.empty(shape, dtype=what.dtype, device="meta").requires_grad_()

    tokens = {key: made(what, [1, 4096]) for key, what in program.meta.tokens.items()}
    params = {key: made(what, []) for key, what in program.meta.params.items()}
    bounds = torch.empty(5, dtype=torch.int64, device="meta") if how == "packed" else None
    initial = made(program.meta.state, [4 if how == "packed" else 1])
    sp = None
    if how == "ranks":  # the last one, which returns a final state
        arena = torch.empty(64 << 20, dtype=torch.uint8, device="meta")
        heap = SymmetricHeap(arena, [arena] * 3)
        sp = SequenceParallel(rank=2, world_size=3, device="meta", transport="peer", heap=heap)
        initial = None
    with offline.record_launches() as launches:
        executable = dispatch.executable_of(code, tokens | params, initial, bounds, sp)
        given = [*tokens.values(), *params.values()]
        o, final = operators.run(executable, None, given, initial, bounds, (0, 4096, 4096))
        torch.autograd.backward([o, final], [torch.empty_like(o), torch.empty_like(final)])
    results = []
    for found in offline.compile_launches(launches):
        told = {"waits_first": found.waits_first, "wgmma": found.ptx.count("wgmma.mma_async")}
        told |= {"uneven_sums": len(found.uneven_sums), "drops_nan": found.drops_nan, "races": found.races}
        limit = re.search(r"\.maxnreg\s+(\d+)", found.ptx)
        told["limit"] = int(limit[1]) if limit else 0
        if found.name == "grads":
            told["unnoticed"] = unnoticed_barriers(found.ptx)
        results.append({key: value for key, value in vars(found).items() if key != "ptx"} | told)
    return results


def unnoticed_barriers(ptx: str) -> float:
    """The share of some barriers without which no race is found."""
    from flexsp.testing.races import races

    barriers = [x.span() for x in re.finditer(r"\tbar\.sync[^;]*;", ptx)]
    some = barriers[:: max(1, len(barriers) // 8)]
    return sum(not races(ptx[:a] + ptx[b:]).found for a, b in some) / len(some)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[dict[str, Any]]]:
    """The kernels of a variant, compiled once."""
    return ft.cache(
        lambda name, how: in_child(compile_variant, name, how, FLEXSP_CODE_DIR=tmp_path_factory.mktemp(name))
    )


@pytest.mark.parametrize(("name", "how"), CONFIGS)
def test_resources(compiled: Callable[[str, str], list[dict[str, Any]]], name: str, how: str) -> None:
    found = compiled(name, how)
    told = described(found)
    names = {kernel["name"] for kernel in found}
    assert {"output", "chunk_states", "output_backward", "grads"} <= names, told
    assert all(kernel["shared"] <= SHARED_LIMIT for kernel in found), told
    assert all(kernel["waits_first"] for kernel in found), told
    products = name != "hgrn"
    assert all((kernel["wgmma"] > 0) == products for kernel in found if kernel["name"] in WALKS), told
    wrong = ("uneven_sums", "drops_nan", "races", "unwritten")
    assert not any(kernel[what] for kernel in found for what in wrong), told
    assert all(kernel["assembler"] >= 129 for kernel in found), "ptxas 12.8 miscompiles some of these"


@pytest.mark.parametrize(
    ("name", "how", "K", "V"),
    slow(
        ("rwkv6", "whole", 128, 256), ("rwkv6", "packed", 64, 64), ("gla", "whole", 64, 64),
        ("gla", "packed", 256, 128), ("hgrn2", "whole", 128, 256), ("gla_own_bias", "whole", 128, 128),
        ("vector_gated_delta", "whole", 64, 64), ("gla_outer_gates", "whole", 128, 128),
    ),
)  # fmt: skip
def test_other_sizes(tmp_path: Path, name: str, how: str, K: int, V: int) -> None:
    """No races, no registers that nothing wrote; and no limit of registers that puts values on the stack."""
    found = in_child(compile_variant, name, how, K, V, FLEXSP_CODE_DIR=tmp_path)
    told = described(found)
    assert not any(kernel[what] for kernel in found for what in ("races", "unwritten")), told
    assert not [x for x in found if x["limit"] and x["stack"] and x["registers"] <= x["limit"]], told


LARGE = [  # one of each kind of transition has both sizes in each dtype
    *((name, how, 256, 256, "bfloat16") for name, how in (
        ("gla", "packed"), ("rwkv6", "whole"), ("rwkv7", "packed"), ("simple_gla", "whole"), ("deltanet", "ranks"),
        ("gated_deltanet", "packed"), ("vector_gated_delta", "whole"), ("gla_own_bias", "whole"), ("gdn2", "packed"),
    )),
    *((name, "packed", 256, 256, "float32") for name in ("gla", "simple_gla", "rwkv7", "gated_deltanet")),
    ("deltanet", "ranks", 256, 128, "bfloat16"), ("rwkv7", "whole", 256, 128, "float32"),
    ("rwkv7", "whole", 256, 128, "float16"), ("hgrn", "packed", 600, 0, "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "how", "K", "V", "dtype"), slow(*LARGE))
def test_large_states(tmp_path: Path, name: str, how: str, K: int, V: int, dtype: str) -> None:
    """Kernels that take columns in pieces: all fit, and spill what four warps of whole tiles would many times over."""
    found = in_child(compile_variant, name, how, K, V, dtype, FLEXSP_CODE_DIR=tmp_path)
    told = described(found)
    assert all(kernel["shared"] <= SHARED_LIMIT and kernel["waits_first"] for kernel in found), told
    assert not any(kernel[what] for kernel in found for what in ("races", "unwritten", "drops_nan")), told
    assert max(kernel["stack"] for kernel in found) <= 6 * 1024, told


@pytest.mark.parametrize(("name", "how"), CONFIGS)
def test_a_barrier_less_is_a_race(compiled: Callable[[str, str], list[dict[str, Any]]], name: str, how: str) -> None:
    """Else the search for races would show nothing; a few barriers of Triton's are not needed."""
    found = next(x for x in compiled(name, how) if x["name"] == "grads")
    assert found["unnoticed"] <= 0.25, found


@pytest.mark.parametrize(("name", "how"), CONFIGS)
def test_stack(compiled: Callable[[str, str], list[dict[str, Any]]], name: str, how: str) -> None:
    allowed = STACK.get(RELEASE, {}).get((name, how))
    if allowed is None:
        pytest.skip(f"no stack is stated for this variant under Triton {triton.__version__}")
    found = compiled(name, how)
    allowed = allowed | STACK_OF_PTXAS.get((max(x["assembler"] for x in found), name, how), {})
    stack = {name: max(x["stack"] for x in found if x["name"] == name) for name in {x["name"] for x in found}}
    more = {kernel: n for kernel, n in stack.items() if n > allowed.get(kernel, 0)}
    assert not more, f"stack of {more}, allowed {allowed}\n{described(found)}"
    less = {kernel: stack.get(kernel) for kernel, n in allowed.items() if 2 * stack.get(kernel, 0) < n}
    assert not less, f"the table allows more than is needed: {less} of {allowed}"


# Sums -----------------------------------------------------------------------------------------------------------------


@triton.jit
def sums_of_products(  # type: ignore[no-untyped-def]
    x, y, to, R: tl.constexpr, S: tl.constexpr, AXIS: tl.constexpr, OURS: tl.constexpr, PDL: tl.constexpr
):
    """The sum of x * y, tiles [R, S] or, where S is 0, [R]."""
    begin(PDL)
    at = tl.arange(0, R)
    if S > 0:
        at = at[:, None] * S + tl.arange(0, S)[None, :]
    found = tl.load(x + at) * tl.load(y + at)
    found = sum_over(found, AXIS) if OURS else tl.sum(found, axis=AXIS)
    if S > 0:
        tl.store(to + tl.arange(0, S if AXIS == 0 else R), found)
    else:
        tl.store(to, found)


def compile_sums() -> dict[str, list[int]]:
    """How many sums in which lanes round differently, by tile: with `sum_over`, and with Triton's sum alone."""
    import torch

    from flexsp.testing import offline

    numbers = torch.empty(128 * 128, device="meta")
    tiles = [(64, 0, 0), (256, 0, 0), (16, 32, 0), (16, 32, 1), (16, 64, 0), (16, 128, 0), (32, 32, 1), (64, 64, 0)]
    kinds = [*((*tile, warps) for tile in tiles for warps in (2, 8)), (32, 64, 0, 16)]
    launches = [
        (sums_of_products, (numbers,) * 3, {"R": R, "S": S, "AXIS": axis, "OURS": ours, "num_warps": warps})
        for R, S, axis, warps in kinds for ours in (True, False)
    ]  # fmt: skip
    found = [len(offline.uneven_sums(ptx)) for ptx in offline.ptx_of(launches)]
    return {str(kind): found[2 * i : 2 * i + 2] for i, kind in enumerate(kinds)}


def test_llvm_workaround_of_a_sum_round_alike() -> None:
    found = in_child(compile_sums)
    assert not any(ours for ours, _ in found.values()), found
    assert sum(plain > 0 for _, plain in found.values()) >= 3, f"nothing is shown by this: {found}"


# Registers that nothing wrote ----------------------------------------------------------------------------------------


def compile_twice() -> dict[str, list[int]]:
    """Registers of a kernel that does not spill, of one that does by its limit, and of one of which that is said with
    any limit, and how often each was looked at, where the first look finds a register that nothing wrote."""
    import torch

    from flexsp.runtime.launch import build
    from flexsp.runtime.triton_private import gpu_target
    from flexsp.runtime.workarounds import unwritten_registers

    looked: list[str] = []
    unwritten_registers.unwritten = lambda listing: looked.append(listing) or ["here"] * (len(looked) == 1)  # type: ignore
    x, found = torch.empty(64 * 64, device="meta"), {}
    for name, limit in (("none", 255), ("by its limit", 24), ("always", 32)):
        looked.clear()
        if name == "always":
            unwritten_registers.stack_of = lambda cubin: 8
        tile = {"R": 64, "S": 64, "AXIS": 0, "OURS": True, "PDL": False}
        made = build(sums_of_products, (x, x, x), tile, {"num_warps": 1, "maxnreg": limit}, gpu_target(90))
        registers = re.findall(r"REG:(\d+)", usage(made.asm["cubin"]))
        found[name] = [int(registers[0]), len(looked)]
    return found


def usage(cubin: bytes) -> str:
    from flexsp.runtime.triton_private import tool

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool("cuobjdump"), "-res-usage", file.name], capture_output=True, text=True).stdout


def test_kernels_with_a_stack_are_looked_at(tmp_path: Path) -> None:
    """And assembled again with other limits of registers; a limit that makes a kernel spill is dropped before."""
    found = in_child(compile_twice, TRITON_CACHE_DIR=tmp_path)
    assert found["none"][1] == 0 and found["by its limit"][1] == 0, found
    assert found["by its limit"][0] > 24, found
    assert found["always"][1] == 2 and found["always"][0] > 32, found


# Golden source --------------------------------------------------------------------------------------------------------


def source_of(name: str) -> str:
    """The generated file for heads of 64 in bf16, without the line that names Triton's version."""
    import torch

    from flexsp.compiler.backend.generated_kernels import Generated
    from tests import variants

    source = Generated(variants.load(name).make(4, 64, 64, torch.bfloat16).program).source
    return re.sub(r"\nTriton \S+, \w+\.\n", "\n", source)


def test_golden_source(tmp_path: Path) -> None:
    found = in_child(source_of, GOLDEN.stem, FLEXSP_CODE_DIR=tmp_path)
    if os.environ.get("FLEXSP_RENEW_GOLDEN") == "1":
        GOLDEN.write_text(found)
    assert found.splitlines() == GOLDEN.read_text().splitlines(), "FLEXSP_RENEW_GOLDEN=1 writes the file anew"
