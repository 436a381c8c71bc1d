"""Plans of generated kernels: what is chosen, bytes counted by hand and against the launches' tensors, shared memory
against compiled kernels, messages.

`describe` needs no GPU, and neither do the launches: tensors are meta tensors, kernels are compiled for sm_90 up to
where their shared memory is known.
"""

from __future__ import annotations

import copy
import functools
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flexsp.compiler.backend.exact import EXACT
from flexsp.compiler.backend.generated_kernels import CHUNKS, padded
from flexsp.compiler.backend.walks import WALKS
from flexsp.compiler.graphs.values import NotEmittable
from flexsp.compiler.planning.explain import describe
from flexsp.compiler.planning.generated_plan import GeneratedPlan, Tiling
from flexsp.compiler.planning.model import Predicted, predict
from flexsp.compiler.planning.tiling import candidates, choose_tiling
from flexsp.devices import H200
from flexsp.kernels.executable import Executable
from tests import variants
from tests.harness.compiling import in_child
from tests.marks import quick, slow

NAMES = ("simple_gla", "gla", "deltanet")
BF16 = torch.bfloat16


@functools.lru_cache(maxsize=16)
def made(name: str, K: int, V: int, dtype: torch.dtype) -> Any:
    from flexsp.compiler.backend.generated_kernels import Generated

    return Generated(variants.load(name).make(32, K, V, dtype).program)


def code_of(name: str, K: int = 128, V: int = 128, dtype: torch.dtype = BF16, chunk: int | None = None) -> Any:
    found = made(name, K, V, dtype)
    if chunk is not None:
        found = copy.copy(found)
        found.chunk = chunk
    return found


def chosen(name: str, heads: int, T: int, chunk: int | None = None, ranks: bool = False, n_docs: int = 0) -> Tiling:
    return choose_tiling(code_of(name, chunk=chunk), {"K": 128, "V": 128}, heads, T, n_docs, BF16, ranks)


def segmented(code: Any, sizes: dict[str, int], heads: int, T: int, chunk: int = 64) -> Tiling:
    """Its plan of many segments, whatever it is predicted to take."""
    found = (plan for plan, _ in candidates(code, sizes, heads, T, 0, BF16, ranks=True))
    return next(plan for plan in found if plan.chunk == chunk and (plan.n_seg > 1 or code.dense))


# What is chosen -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_measured_tiles_stay(name: str) -> None:
    """With 32 heads of 128 the chunk size, the panels, warps and stages are those of the published measurements."""
    wide = {"simple_gla": (128, 8, 3), "gla": (128, 8, 3), "deltanet": (32, 4, 3)}[name]
    for T in (4096, 16384, 65536):
        plan = chosen(name, 32, T)
        assert plan.chunk == 64 and (plan.walk.cols, plan.walk.warps, plan.walk.stages) == wide
        assert plan.schedule == ("fused" if name == "deltanet" else "segmented")


def test_copies_wait_for_products_of_the_next_state() -> None:
    """Nothing is copied ahead where a tile is read elementwise and by the product that makes the next state."""
    for name, alone in (("gla_own_bias", True), ("gla", False), ("rwkv6", False)):
        code = code_of(name)
        call = GeneratedPlan(code, chosen(name, 4, 65536), {"K": 128, "V": 128}, 1, 4, 65536, 0, BF16)
        stages = {x.kind: x.how.stages for x in [*call.forward(), *call.backward(False, False)] if x.kind in WALKS}
        assert (stages.pop("output") == 1) == alone and min(stages.values()) > 1, (name, stages)


def test_schedules() -> None:
    """Few heads and many tokens are cut into segments; heads that fill the GPU, or few tokens, are walked at once."""
    assert chosen("simple_gla", 4, 65536).n_seg > 8
    assert chosen("simple_gla", 128, 65536).schedule == "fused"
    assert chosen("simple_gla", 32, 256).schedule == "fused"
    for name in NAMES:
        heads, T = random.randrange(1, 300), random.randrange(1, 20000)
        for ranks in (False, True):
            plan = chosen(name, heads, T, ranks=ranks)
            assert (plan.schedule == "fused") == (plan.n_seg == 1 and not ranks), plan
            assert plan.per_seg * (plan.n_seg - 1) < plan.n_chunks <= plan.per_seg * plan.n_seg
            launched = [x.kernel for x in predict(code_of(name), plan, {"K": 128, "V": 128}, heads, T, BF16)]
            assert ("summarize" in launched) == (plan.schedule == "segmented")
        assert chosen(name, heads, 0).schedule == "segmented" and chosen(name, heads, 0).n_chunks == 0


def test_the_quickest_plan_is_taken() -> None:
    """Another chunk size than 64 only where the model says that it saves a fifth."""
    seen = set()
    for heads, T in [(1, 4096), (4, 2048), (32, 1024), (random.randrange(1, 64), random.randrange(1, 9000))]:
        plan = chosen("simple_gla", heads, T)
        found = candidates(code_of("simple_gla"), {"K": 128, "V": 128}, heads, T, 0, BF16)
        us = {x: time for x, time in found}
        assert {x.chunk for x in us} == {16, 32, 64, 128}
        least, of_64 = min(us.values()), min(time for x, time in us.items() if x.chunk == 64)
        assert us[plan] == (of_64 if plan.chunk == 64 else least)
        assert (plan.chunk == 64) == (least >= 0.8 * of_64) or us[plan] == least == of_64
        seen.add(plan.chunk)
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("name", "warps", "registers"),
    [("simple_gla", 4, 168), ("gla", 8, None), ("deltanet", 4, None), ("gated_deltanet", 8, None), ("hgrn", 4, None)],
)
def test_gradients_have_the_warps_that_were_measured_to_be_best(name: str, warps: int, registers: int | None) -> None:
    sizes = {"K": 128} if name == "hgrn" else {"K": 128, "V": 128}
    part = choose_tiling(code_of(name), sizes, 32, 16384, 0, BF16).part
    assert (part.warps, part.registers) == (warps, registers)


def test_a_dense_summary_has_programs_for_the_transition() -> None:
    plan = chosen("deltanet", 32, 16384, ranks=True)
    rows = predict(code_of("deltanet"), plan, {"K": 128, "V": 64}, 32, 16384, BF16)
    (summary,) = (x for x in rows if x.kernel == "summarize")
    assert summary.grid == (64 // plan.walk.cols + 128 // plan.walk.cols, 32, 1)
    states, A = 2 * 4 * 32 * 128 * 64, 4 * 32 * 128 * 128
    assert summary.written == states + A


def test_fp32_keeps_small_tiles() -> None:
    for K in (64, 128):
        plan = choose_tiling(code_of("deltanet", K, K, torch.float32), {"K": K, "V": K}, 8, 5000, 0, torch.float32)
        assert (plan.chunk, plan.walk.cols, plan.walk.stages) == (16, 32, 1)


def test_deterministic() -> None:
    """The same plan and the same text from kernels generated anew."""
    heads, T = random.randrange(1, 200), random.randrange(1, 100000)
    texts, plans = set(), set()
    for _ in range(2):
        made.cache_clear()
        texts.add("\n".join(describe(code_of("gla"), {"K": 128, "V": 128}, heads, T, BF16)))
        plans.add(chosen("gla", heads, T))
    assert len(texts) == len(plans) == 1


def test_more_work_takes_longer() -> None:
    def total(heads: int, T: int) -> tuple[int, float]:
        plan = segmented(code_of("gla"), {"K": 128, "V": 128}, 32, 9999)
        n_chunks = -(-T // plan.chunk)
        plan = replace(plan, n_chunks=n_chunks, n_seg=4, per_seg=-(-n_chunks // 4))
        rows = rows_of("gla", plan, heads, T)
        return sum(x.read + x.written for x in rows), sum(x.us for x in rows)

    T = random.randrange(1, 30000)
    few, more, later = total(40, T), total(80, T), total(40, T + 5000)
    assert few[0] < more[0] and few[0] < later[0]
    assert few[1] <= more[1] and few[1] < later[1]


def rows_of(name: str, plan: Tiling, heads: int, T: int, K: int = 128, V: int = 128) -> list[Predicted]:
    code, sizes = code_of(name, K, V), {"K": K, "V": V}
    return [x for backward in (False, True) for x in predict(code, plan, sizes, heads, T, BF16, backward=backward)]


# Bytes ----------------------------------------------------------------------------------------------------------------


def test_bytes_of_simple_gla() -> None:
    """6 heads of K = 64, V = 128, 1000 tokens in 16 chunks of 64, a segment each."""
    code = code_of("simple_gla", 64, 128)
    plan = segmented(code, {"K": 64, "V": 128}, 6, 1000)
    assert (plan.chunk, plan.n_chunks, plan.n_seg) == (64, 16, 16)
    k, v, g = 6 * 1000 * 64 * 2, 6 * 1000 * 128 * 2, 6 * 1000 * 4
    gates, decay = 6 * 1024 * 4, 6 * 16 * 64 * 4
    state, states = 6 * 64 * 128 * 4, 6 * 16 * 64 * 128 * 2
    want = [
        ("prepare0", g, gates),
        ("summarize", k + v + gates, 17 * state + decay),
        ("_propagate_kernel", 17 * state + decay, 17 * state),
        ("output", 2 * k + v + gates + 16 * state, v + state),
        ("summarize_backward", k + v + gates, 17 * state),
        ("_propagate_kernel", 17 * state + decay, 17 * state),
        ("chunk_states", k + v + gates + 16 * state, states),
        ("output_backward", k + v + gates + 16 * state, states),
        ("grads", 2 * k + 2 * v + gates + 2 * states, 2 * k + v + 4 * gates + 6 * 16 * 4),
        ("reduce_gate_grads", gates + 4 * g + 6 * 16 * 4, g),
    ]
    assert [(x.kernel, x.read, x.written) for x in rows_of("simple_gla", plan, 6, 1000, 64, 128)] == want
    flops = {x.kernel: x.flops for x in rows_of("simple_gla", plan, 6, 1000, 64, 128)}
    one = 2 * 64 * 64 * 128 * 6 * 16  # a product of 64 x 64 and 64 x 128 in every chunk
    assert flops["summarize"] == flops["chunk_states"] == one and flops["output"] == one // 2 + 3 * one
    assert flops["reduce_gate_grads"] == 0


def test_walks_of_gla_read_one_row_of_gates_a_chunk() -> None:
    """The running gate at a chunk's end decays the state; what gates multiply is kept as operands."""
    code = code_of("gla", 64, 128)
    plan = segmented(code, {"K": 64, "V": 128}, 6, 1000)
    rows = {x.kernel: x for x in rows_of("gla", plan, 6, 1000, 64, 128)}
    k, v, last, state = 6 * 1000 * 64 * 2, 6 * 1000 * 128 * 2, 6 * 16 * 64 * 4, 6 * 64 * 128 * 4
    assert rows["summarize"].read == k + v + last
    assert rows["chunk_states"].read == k + v + last + plan.n_seg * state
    assert rows["prepare0"].written > 6 * 1024 * 64 * 4  # the gates themselves


def test_bytes_of_deltanet() -> None:
    """6 heads of K = V = 64, 1000 tokens in 16 chunks of 64, one segment: no summary, no scan."""
    code = code_of("deltanet", 64, 64)
    plan = choose_tiling(code, {"K": 64, "V": 64}, 6, 1000, 0, BF16)
    assert (plan.chunk, plan.n_chunks, plan.n_seg, plan.schedule) == (64, 16, 1, "fused")
    q, b = 6 * 1000 * 64 * 2, 6 * 1000 * 2
    square, kept, state = 6 * 16 * 64 * 64, 6 * 1024 * 64 * 2, 6 * 64 * 64 * 4
    gain = 6 * 16 * 4  # a number a chunk: the size of its inverse
    joined = 4 * 16 * 16 + 2 * 16 * 16 + 32 * 32  # a chunk's blocks on the diagonal and below, inverted in place
    want = [
        ("prepare0", q + b, 4 * square),
        ("inverse_kernel", 4 * square, 2 * square + 6 * 16 * joined * 4 + gain),
        ("prepare1", 4 * q + b, 3 * kept),  # q, k, v and the inverse; u, w and the scores
        ("choose", gain, gain),
        ("output", 5 * q, q + state),
    ]
    found = rows_of("deltanet", plan, 6, 1000, 64, 64)
    assert [(x.kernel, x.read, x.written) for x in found[:5]] == want
    backward = ["chunk_states", "output_backward", "adjoint0", "grads", "reduce_gate_grads"]
    assert [x.kernel for x in found[5:]] == backward


def test_bytes_of_hgrn() -> None:
    """6 heads of 32 channels, 1000 tokens in 16 chunks of 64, a segment each; a state has one column."""
    code = code_of("hgrn", 32)
    plan = segmented(code, {"K": 32}, 6, 1000)
    assert (plan.chunk, plan.n_chunks, plan.n_seg) == (64, 16, 16)
    x, g, decay = 6 * 1000 * 32 * 2, 6 * 1000 * 32 * 4, 6 * 16 * 32 * 4
    state, states = 6 * 32 * 4, 6 * 16 * 32 * 2
    want = [
        ("summarize", x + g, 17 * state + decay),
        ("_propagate_kernel", 17 * state + decay, 17 * state),
        ("output", 2 * x + g + 16 * state, x + state),
        ("summarize_backward", 2 * x + g, 17 * state),
        ("_propagate_kernel", 17 * state + decay, 17 * state),
        ("chunk_states", x + g + 16 * state, states),
        ("output_backward", 2 * x + g + 16 * state, states),
        ("grads", 3 * x + g + 2 * states, 2 * x + g),
    ]
    rows = [x for back in (False, True) for x in predict(code, plan, {"K": 32}, 6, 1000, BF16, backward=back)]
    assert [(x.kernel, x.read, x.written) for x in rows] == want
    assert ", 32 of the state a program, 4 warps" in "\n".join(describe(code, {"K": 32}, 6, 1000, BF16))


def test_a_vector_state_is_spread_over_programs() -> None:
    """In every kernel, without a second read of anything."""
    code = code_of("hgrn", 128)
    plan = choose_tiling(code, {"K": 128}, 16, 65536, 0, BF16)
    assert {x.cols for x in (plan.walk, plan.whole, plan.part)} == {32}
    rows = [x for back in (False, True) for x in predict(code, plan, {"K": 128}, 16, 65536, BF16, backward=back)]
    assert all(x.grid[-1 if x.kernel == "grads" else 0] == 4 for x in rows if x.kernel != "_propagate_kernel")
    x = 16 * 65536 * 128 * 2
    assert next(row for row in rows if row.kernel == "grads").read == pytest.approx(5 * x, rel=0.02)


# Against compiled kernels ---------------------------------------------------------------------------------------------

COMPILED = {"simple_gla": (128, 128), "gla": (64, 64), "deltanet": (64, 128)}
"""Chunk size and K = V of the kernels whose shared memory is looked at."""
QUICK = {"gla": ("output", "chunk_states", "prepare1", "adjoint0")}  # to compile


def launched(name: str, every: bool) -> list[dict[str, Any]]:
    """In a child process: the launches of 4096 tokens, 32 heads: bytes of tensors (of values that a kernel reads
    a row of, one row a chunk), shared memory of every kernel or of the quickly compiled ones."""
    from triton.backends.nvidia.compiler import CUDABackend

    from flexsp.compiler import dispatch
    from flexsp.kernels import operators
    from flexsp.testing import offline

    class Known(Exception):
        pass

    def stop(self: Any, src: Any, metadata: Any, *args: Any) -> None:
        raise Known(metadata["shared"])

    CUDABackend.make_ptx = stop
    chunk, size = COMPILED[name]
    code = code_of(name, size, size, chunk=chunk)
    inputs = code.program.meta.tokens.items()
    tokens = {key: torch.empty(1, 4096, 32, *[size] * (len(x.shape) - 2), dtype=x.dtype, device="meta").requires_grad_()
              for key, x in inputs}  # fmt: skip
    with offline.record_launches() as launches:
        executable = dispatch.executable_of(code, tokens, None, None, None)
        o, _ = operators.run(executable, None, list(tokens.values()), None, None, (0, 4096, 4096))
        o.backward(torch.empty_like(o))
    found = []
    for kernel, args, kwargs in launches:
        if kernel.__name__.startswith(EXACT):  # they return at once where no keys repeat: predicted to cost nothing
            continue
        generated = code.kernels.get(kernel.__name__)
        unread = {x for x in ("entering", "leaving") if f"{x} +" not in (generated.source if generated else "")}
        rows = {f"{x}_ptr": chunk for x in (generated.by_row if generated else ())}
        named = [(key, x) for key, x in zip(kernel.arg_names, args, strict=False) if isinstance(x, torch.Tensor)]
        told: dict[str, Any] = {"kernel": kernel.__name__, "walks": kernel.__name__ in WALKS}
        told["bytes"] = sum(x.numel() * x.element_size() // rows.get(key, 1) for key, x in named if key not in unread)
        try:
            if every or kernel.__name__ in QUICK.get(name, ()):
                told["shared"] = offline.compile_launch(kernel, args, kwargs).shared  # compiled before
        except Known as known:
            told["shared"] = known.args[0]
        found.append(told)
    return found


def all_launched(every: bool) -> dict[str, list[dict[str, Any]]]:
    return {name: launched(name, every) for name in COMPILED}


@pytest.mark.compiles
@pytest.mark.parametrize("every", [False, *slow(True)])
def test_launches(every: bool, tmp_path: Path) -> None:
    """Predictions are of the kernels that are launched, in order; their bytes are those of the tensors given.

    The estimate of shared memory is never below what Triton allocates, and at most 2.3 times that; what is certain is
    never above.
    """
    told = in_child(all_launched, every, FLEXSP_CODE_DIR=tmp_path)
    compared = {name: compare_launches(name, told[name]) for name in COMPILED}
    assert all(compared[name] >= 2 for name in (COMPILED if every else QUICK)), compared


def compare_launches(name: str, found: list[dict[str, Any]]) -> int:
    """How many estimates of shared memory were compared."""
    chunk, size = COMPILED[name]
    code = code_of(name, size, size, chunk=chunk)
    plan = choose_tiling(code, {"K": size, "V": size}, 32, 4096, 0, BF16)
    rows = rows_of(name, plan, 32, 4096, size, size)
    assert [x["kernel"] for x in found] == [x.kernel for x in rows]
    compared = 0
    for told, row in zip(found, rows, strict=True):
        # The first two write in place what they read; the third has pointers that it does not use.
        if row.kernel in ("inverse_kernel", "_propagate_kernel", "choose"):
            continue
        assert row.read + row.written == pytest.approx(told["bytes"], rel=0.04 if told["walks"] else 1e-3), row
        if told.get("shared", 0) > 8192:  # below, sums over warps count
            assert told["shared"] <= row.shared <= 2.3 * told["shared"], row
            assert row.least <= told["shared"], row
            compared += 1
    return compared


TALL = {
    ("linear", 0): {"output": 184320}, ("linear", 3): {"output": 213012, "output_backward": 147456},
    ("gla", 0): {"output": 200704}, ("gla", 3): {"output": 229396, "output_backward": 147456},
}  # fmt: skip
"""Bytes that Triton 3.6 gives walks of a state of 256 x 128, by name and number of documents."""


@pytest.mark.parametrize(("name", "n_docs"), TALL)
def test_estimates_of_tall_states(name: str, n_docs: int) -> None:
    code, sizes = code_of(name), {"K": 256, "V": 128}
    plan = choose_tiling(code, sizes, 32, 65536, n_docs, BF16)
    assert (plan.walk.cols, plan.walk.stages) == (64, 2)
    given = (code, plan, sizes, 32, 65536, BF16)
    rows = {x.kernel: x for back in (False, True) for x in predict(*given, n_docs=n_docs, backward=back)}
    for kernel, shared in TALL[name, n_docs].items():
        assert shared <= rows[kernel].shared <= H200.shared, kernel


def output_of_documents(name: str, K: int, V: int) -> int:
    """In a child process: bytes of shared memory of `output`, of documents that begin with states of their own."""
    from triton.backends.nvidia.compiler import CUDABackend

    from flexsp.compiler import dispatch
    from flexsp.kernels import operators
    from flexsp.testing import offline

    class Known(Exception):
        pass

    def stop(self: Any, src: Any, metadata: Any, *args: Any) -> None:
        raise Known(metadata["shared"])

    CUDABackend.make_ptx = stop
    code, sizes, bounds = code_of(name, K, V), {"K": K, "V": V}, torch.tensor([0, 61, 61, 203])
    tokens = {
        key: torch.empty(1, 203, 3, *(sizes[size.name] for size in x.shape[2:]), dtype=x.dtype, device="meta")
        for key, x in code.program.meta.tokens.items()
    }
    initial = torch.empty(3, 3, K, V, device="meta")
    with offline.record_launches() as launches:
        executable = dispatch.executable_of(code, tokens, initial, bounds, None)
        operators.run(executable, None, list(tokens.values()), initial, bounds, (0, 203, 203))
    ((kernel, args, kwargs),) = (x for x in launches if x[0].__name__ == "output")
    try:
        return int(offline.compile_launch(kernel, args, kwargs).shared)
    except Known as known:
        return int(known.args[0])


@pytest.mark.compiles
@pytest.mark.parametrize("name", [*slow("gla", "linear"), "gla_outer_gates"])
def test_documents_with_large_states_fit(name: str, tmp_path: Path) -> None:
    taken = in_child(output_of_documents, name, 256, 128, FLEXSP_CODE_DIR=tmp_path)
    assert taken <= TALL.get((name, 3), {}).get("output", H200.shared)


def test_plans_fit() -> None:
    """All launches of a chosen plan are estimated to fit a block. With 128 heads a dense walk has too wide a tile for
    three stages."""
    for name in NAMES:
        for heads in (1, 32, 128, random.randrange(1, 400)):
            plan = chosen(name, heads, 3000)
            assert all(x.shared <= H200.shared for x in rows_of(name, plan, heads, 3000)), plan
    plan = chosen("deltanet", 128, 3000)
    deeper = replace(plan, walk=replace(plan.walk, stages=3))
    assert plan.walk.stages == 2
    assert any(x.shared > H200.shared for x in rows_of("deltanet", deeper, 128, 3000))


# Messages -------------------------------------------------------------------------------------------------------------


def test_chunk_too_large() -> None:
    with pytest.raises(ValueError) as raised:
        chosen("simple_gla", 32, 4096, chunk=256)
    assert str(raised.value) == (
        "chunk_size = 256, K = 128, V = 128: kernel `grads` needs 256 KiB of shared memory, 29 KiB more than the 227 "
        "KiB that a block has on sm_90; use chunk_size <= 128"
    )
    code = code_of("simple_gla", 64, 64, chunk=256)
    assert choose_tiling(code, {"K": 64, "V": 64}, 32, 4096, 0, BF16).chunk == 256


@pytest.mark.parametrize(("name", "K", "V"), [("gla", 128, 513), ("gla", 257, 64), ("deltanet", 300, 32)])
def test_sizes_too_large(name: str, K: int, V: int) -> None:
    most = 256 if K > 256 else 512
    with pytest.raises(NotEmittable, match=f" = {max(K, V)}: kernels are generated for sizes up to {most}"):
        choose_tiling(code_of(name), {"K": K, "V": V}, 1, 1, 0, BF16)


@pytest.mark.parametrize(
    ("name", "K", "V"),
    [("gla", 128, 256), ("gla", 256, 100), ("gla", 129, 129), ("gla", 256, 256), ("gla", 256, 512),
     ("gla", 128, 300), ("gla", 16, 512), ("deltanet", 100, 256), ("deltanet", 129, 32), *slow(("rwkv7", 256, 256))],
)  # fmt: skip
def test_large_states_are_walked_in_tiles(name: str, K: int, V: int) -> None:
    plan = choose_tiling(code_of(name), {"K": K, "V": V}, 32, 65536, 0, BF16)
    assert padded(K) * plan.walk.cols <= 128 * 128 and plan.walk.cols <= 256 and plan.chunk >= 32
    assert all(x.shared <= H200.shared for x in rows_of(name, plan, 32, 65536, K, V))
    if code_of(name).sized({"K": K, "V": V}, BF16).pieces:
        assert padded(K) * plan.part.cols <= 128 * 128 and plan.part.warps == 8


def test_kernels_in_pieces_are_those_of_large_states_alone() -> None:
    """The others are what they were: none of their sizes exceeds 128, or one of a state's two, but K of dense ones."""
    small = [(128, 128), (128, 256), (16, 256), (256, 128), (256, 16)]
    for name in ("gla", "deltanet"):
        code = code_of(name)
        for K, V in (*small, (129, 129), (256, 256), (200, 130)):
            whole = (K, V) in small and (K <= 128 or not code.dense)
            wide = whole and (not code.dense or K * V <= 128 * 128)  # in fp32
            assert [code.sized({"K": K, "V": V}, x) is code for x in (BF16, torch.float32)] == [whole, wide]
    assert code_of("hgrn").sized({"K": 4096}, BF16) is code_of("hgrn")


def test_long_vector_states() -> None:
    """Of any length, by panels of 32 numbers; the scan takes up to 65536."""
    for K in (256, 4096):
        plan = choose_tiling(code_of("hgrn"), {"K": K}, 1, 4096, 0, BF16)
        assert plan.walk.cols == plan.part.cols == 32
    with pytest.raises(NotEmittable, match="^K = 65537: kernels are generated for sizes up to 65536"):
        choose_tiling(code_of("hgrn"), {"K": 65537}, 1, 4096, 0, BF16)


@pytest.mark.parametrize("chunk", CHUNKS[:-1])
def test_given_chunk_sizes_are_kept(chunk: int) -> None:
    for name in NAMES:
        assert chosen(name, 8, 3000, chunk=chunk).chunk == chunk


def test_describe() -> None:
    lines = describe(code_of("simple_gla"), {"K": 128, "V": 128}, 32, 16384, BF16)
    text = "\n".join(lines)
    assert "schedule: segmented" in text and "chunk size: 64" in text and "128 x 128 of the state" in text
    assert all(f"{chunk}: " in text for chunk in (16, 32, 64, 128)) and "256 only where asked for" in text
    assert "decoupled" in text and "1611 MB more" in text  # 3 fp32 states of 256 chunks and 32 heads
    rows = rows_of("simple_gla", chosen("simple_gla", 32, 16384), 32, 16384)
    tables = [line.split() for line in lines if line.startswith("      ")]
    assert [line[0] for line in tables if line[0] != "total"] == [x.kernel for x in rows]
    total = sum(x.us for x in rows)
    assert float(lines[-2].split()[-1]) == pytest.approx(total, abs=0.06)
    packed = "\n".join(describe(code_of("gla"), {"K": 128, "V": 128}, 8, 999, BF16, n_docs=3, ranks=True))
    assert "3 packed documents" in packed and "over ranks" in packed and "summarize" in packed


def test_errors_of_explain() -> None:
    with pytest.raises(ValueError, match="T: expected a number of tokens, got -5"):
        variants.load("linear").make(2, 16, 16).explain(T=-5)
    with pytest.raises(ValueError, match="B: expected a number of sequences, got 1.5"):
        variants.load("linear").make(2, 16, 16).explain(B=1.5)  # type: ignore[arg-type]


# Searched for ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_the_search_finds_the_quickest(packed: bool) -> None:
    """Of plans whose times are made up: four stages and eight warps for grads are best, deeper pipelines do not fit."""
    from flexsp.compiler.autotune import tune
    from flexsp.compiler.dispatch import executable_of

    code = code_of("simple_gla", 64, 64)
    given = {
        key: torch.empty(1, 3000, 32, *[64] * (len(x.shape) - 2), dtype=x.dtype, device="meta")
        for key, x in code.program.meta.tokens.items()
    }
    bounds = torch.empty(4, dtype=torch.int64, device="meta") if packed else None
    asked = []

    def time(executable: Executable[Any], tensors: Any, initial: Any, table: Any, backward: bool) -> float:
        plan = executable.plan.tiling
        asked.append((plan, table))
        if plan.chunk == 128 and plan.walk.stages > 2:
            raise ValueError("too much")
        return 100.0 + abs(plan.chunk - 32) + 5 * abs(plan.walk.stages - 4) - plan.part.warps

    found = tune(lambda plan: executable_of(code, given, None, bounds, None, plan), [], None, lambda C: C, True, time)
    assert (found.plan.chunk, found.plan.walk.stages, found.plan.part.warps) == (32, 4, 8)
    assert found.us == 92.0 and found.predicted_us == 100.0 + 32 + 5 - 4
    assert found.tried == len(asked) == len({plan for plan, _ in asked})
    assert all(table == plan.chunk for plan, table in asked)
    assert "92 us with chunks of 32" in str(found) and "44.6% more" in str(found)


def test_plans_that_may_not_fit_are_not_compiled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """That one has no room is found out when it is timed, and is then no reason to stop."""
    from flexsp.compiler.autotune import tune
    from flexsp.compiler.dispatch import executable_of

    code = code_of("simple_gla", 64, 64)
    given = {
        key: torch.empty(1, 3000, 32, *[64] * (len(x.shape) - 2), dtype=x.dtype, device="meta")
        for key, x in code.program.meta.tokens.items()
    }
    usual = executable_of(code, given, None, None, None)
    compiled = []

    def precompile(executable: Executable[Any], *args: Any) -> list[Any]:
        compiled.append(executable.plan.tiling)
        return []

    def time(executable: Executable[Any], *args: Any) -> float:
        if not executable.plan.tiling.sure and executable.plan.tiling != unsure:
            raise ValueError("no room")
        return 50.0 if executable.plan.tiling == unsure else 100.0

    unsure = replace(usual.plan.tiling, sure=False)
    monkeypatch.setattr(Executable, "precompile", precompile)

    def make(plan: Tiling | None) -> Executable[Any]:
        return executable_of(code, given, None, None, None, plan or unsure)

    found = tune(make, [], None, lambda C: None, True, time)
    assert found.plan == unsure and found.tried > 5
    assert compiled and all(plan.sure for plan in compiled)


def test_plans_do_not_keep_programs_alive() -> None:
    """What is remembered of a program's plans goes with the program."""
    import gc
    import weakref

    from flexsp.compiler.backend.generated_kernels import Generated

    code = Generated(variants.load("linear").make(2, 64, 64, BF16).program)
    sizes = {name: 64 for name in code.layout.sizes}
    first = choose_tiling(code, sizes, 4, 1000, 0, BF16)
    assert choose_tiling(code, sizes, 4, 1000, 0, BF16) is first  # remembered
    gone = weakref.ref(code)
    del code
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("name", quick(variants.VARIANTS, "gla", "gated_deltanet"))
def test_offsets_of_chunks_have_64_bits(name: str) -> None:
    """A chunk's number times C times K passes 2^31 at 8 million tokens of K = 256. Of what a kernel computes a place in
    memory with, `row`, `h` and `start` have 64 bits; the chunk's number alone is multiplied by sizes nowhere."""
    from flexsp.compiler.backend.generated_kernels import Generated

    source = Generated(variants.load(name).make(2, 64, 64, BF16).program).source
    kept = [line for line in source.splitlines() if "row * n_chunks + c" in line]
    assert kept
    for line in source.splitlines():
        assert not re.search(r"\bc \* |_ptr \+ c\b", line), line
