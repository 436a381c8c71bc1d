"""The kernels of gates for each key channel: under the interpreter against token loops in float64, and compiled for
sm_90."""

from __future__ import annotations

import functools
import unittest.mock
from typing import Any

import pytest
import torch

from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor
from flexsp.compiler.planning.generated_plan import GeneratedPlan
from flexsp.compiler.planning.tiling import choose_tiling
from flexsp.testing.compare import DRAWS, RoundedProducts, a_rounding_off, check_functions, relative_error
from flexsp.testing.oracles import token_loop
from flexsp.testing.ranks import run_ranks
from flexsp.variants import gla
from flexsp.variants.gated_keys import GATED_KEYS
from tests.harness.compiling import in_child, told_of
from tests.harness.generated import (
    MANY_SEGMENTS,
    Run,
    beside_generated,
    differentiated,
    documents,
    half,
)
from tests.harness.interpreted import INTERPRETED
from tests.harness.vector_gates import OPS, draw, float32_sums
from tests.marks import slow

BF16 = torch.bfloat16
SMALL = (0.0, -0.02, -0.4)
LARGE = (-0.02, -4.0, -200.0)
# Of 64 tokens with 20 channels about half the chunks have one.
BOTH = (-0.02,) * 1800 + (-90.0,)
GATES = {"small": SMALL, "large": LARGE, "both": BOTH}
OURS = functools.partial(Run, "gla", H=1, lowering="auto")
CONFIGS = {  # K, V, documents, dtype
    "usual": (128, 128, 0, "bfloat16"), "packed": (64, 40, 4, "bfloat16"), "wide keys": (256, 128, 0, "bfloat16"),
    "wide values": (128, 256, 4, "bfloat16"), "fp32": (128, 128, 4, "float32"), "fp16": (33, 17, 0, "float16"),
}  # fmt: skip


# Results --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["small", *slow("large", "both")])
def test_one_sequence(kind: str, folder: str) -> None:
    beside_generated(folder, OURS(T=150, dtype=BF16, gates=GATES[kind]))


def test_heads_and_sequences_behind_strides(folder: str) -> None:
    given = {"T": 40, "B": 2, "H": 2, "dtype": BF16, "strided": True}
    beside_generated(folder, OURS(gates=SMALL, **given), OURS(gates=LARGE, **given))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["small", "large", "both"])
def test_documents_and_strides(kind: str, folder: str) -> None:
    bounds = (0, 0, 3, 70, 70, 171, 190, 190)
    beside_generated(
        folder,
        OURS(T=190, dtype=BF16, gates=GATES[kind], bounds=bounds, strided=True),
        OURS(T=130, dtype=BF16, gates=GATES[kind], bounds=(0, 64, 128, 130), segments=MANY_SEGMENTS),
    )


@pytest.mark.slow
def test_float32_and_float16(folder: str) -> None:
    beside_generated(
        folder,
        OURS(T=37, B=2, gates=(*SMALL, *LARGE)),
        OURS(T=29, bounds=documents(29, 4), strided=True),
        OURS(T=40, dtype=torch.float16, gates=SMALL),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("K", "V"), [(130, 12), (12, 140), (7, 33)])
def test_sizes(K: int, V: int, folder: str) -> None:
    """More channels than a program holds, and more columns."""
    run = functools.partial(OURS, T=70, K=K, V=V, dtype=BF16)
    beside_generated(folder, run(gates=SMALL), run(gates=LARGE))


@pytest.mark.slow
def test_ranks(folder: str) -> None:
    beside_generated(
        folder,
        OURS(T=150, dtype=BF16, gates=BOTH, lengths=(70, 0, 80)),
        OURS(T=75, dtype=half(), bounds=(0, 12, 50, 75), lengths=(30, 41, 4)),
        OURS(T=20, lengths=(0, 0, 20)),
    )


def edges(sp: Any, dtype: torch.dtype) -> list[str]:
    """Gates of -inf and of -104, which are closed too, and NaN in two of three documents, the first of which has small
    gates elsewhere, through the kernels of any gates, two chunks a program."""
    from flexsp.ops import chunk_gla
    from flexsp.variants import gated_keys

    gated_keys._RUN = 2
    T, ends, wrong = 330, torch.tensor([0, 30, 70, 330]), []
    q, k, v, do = torch.randn(4, 1, T, 1, 16).to(dtype)
    g = -3 * torch.rand(1, T, 1, 16)
    g[:, :30] *= 0.01
    g[:, 30::14], g[:, 37::14] = -torch.inf, -104.0
    g[:, [20, 40], 0, 3] = torch.nan
    results = []
    for of in (dtype, torch.float64):
        wide = torch.float64 if of == torch.float64 else torch.float32
        leaves = [*(x.to(of).requires_grad_() for x in (q, k, v)), g.to(wide).requires_grad_()]
        o, _ = chunk_gla(*leaves, cu_seqlens=ends)
        results.append([o.detach(), *torch.autograd.grad(o, leaves, do.to(of))])
    for name, found, want in zip(("o", "dq", "dk", "dv", "dg"), *results, strict=True):
        if not found[:, 70:].isfinite().all() or relative_error(found[:, 70:].double(), want[:, 70:]) > 2e-2:
            wrong.append(name)
    closed = results[0][4][:, 72::7]
    wrong += [] if (closed == 0).all() else ["gradients of closed gates"]
    wrong += [] if all(results[0][0][:, t].isnan().any() for t in (20, 40)) else ["NaN is not seen"]
    before = [results[0][0][:, t] for t in (slice(20), slice(30, 40))]
    return wrong + ([] if all(x.isfinite().all() for x in before) else ["NaN is seen before its token"])


@pytest.mark.parametrize("dtype", [BF16, *slow(torch.float32, torch.float16)])
def test_closed_gates_and_nan(dtype: torch.dtype) -> None:
    (wrong,) = run_ranks(edges, 1, dtype, env=INTERPRETED, timeout=200)
    assert not wrong, wrong


# What runs ------------------------------------------------------------------------------------------------------------


def chunks_told(sp: Any, name: str) -> tuple[list[int], list[int]]:
    """(1 for chunks of which the quick kernel says that gates are small, 1 for those where they are)."""
    from flexsp import ops
    from flexsp.runtime import launch

    told, run = [], launch.launch

    def record(kernel: Any, grid: Any, args: Any, constants: Any, options: Any) -> None:
        run(kernel, grid, args, constants, options)
        if kernel.__name__ in ("gate_keys_small", "gate_operands_small"):
            told.append((args[kernel.arg_names.index("small_gates")].tolist(), constants["C"]))

    x = torch.nn.functional.normalize(torch.randn(5, 1, 128, 1, 16), dim=-1).to(BF16)
    gates = -1e-3 * torch.rand(1, 128, 1, 16)
    gates[0, 100, 0, 5] = -90.0
    given = [*x[:3], gates] if name == "gla" else [x[0], gates, *x[1:3], -x[3], 0.5 * x[3]]
    with unittest.mock.patch.object(launch, "launch", record):
        getattr(ops, f"chunk_{name}")(*given)
    (((found,), C),) = told
    return found, (gates.view(-1, C * 16).sum(1) > -9.0).int().tolist()


@pytest.mark.parametrize("name", ["gla", "rwkv7"])
def test_small_gates_are_told(name: str) -> None:
    """Chunks that are not told are right all the same, and take several times as long."""
    ((found, want),) = run_ranks(chunks_told, 1, name, env=INTERPRETED, timeout=100)
    assert found == want and {*want} == {0, 1}


def variant(scale: Any = 0.5, chunk_size: int | None = None, H: int = 2) -> LinearAttention:
    h, k, v = ConstExpr("H", H), ConstExpr("D", 16), ConstExpr("E", 16)
    meta = {name: SymbTensor(["T", h, v if name == "v" else k]) for name in "qkvg"}
    meta |= {"prev_s": SymbTensor(["NS", h, k, v]), "scale": scale}
    return LinearAttention(
        meta, gla.chunk, gla.decay, gla.merge, chunk_size=chunk_size, lowerings=[GATED_KEYS]
    )  # fmt: skip


def strong(sp: Any) -> float:
    """Error of gradients of gates that decay much, over what they would lose in bf16."""
    from flexsp.ops import chunk_gla

    q, k, v, do = torch.randn(4, 1, 128, 12, 64).bfloat16()
    k = torch.nn.functional.normalize(k, dim=-1)
    g = -3 * torch.rand(1, 128, 12, 64)
    found, want = (
        torch.autograd.grad(chunk_gla(*(x.to(of) for x in (q, k, v)), x)[0], x, do.to(of))[0]
        for of, x in ((BF16, g.clone().requires_grad_()), (torch.float64, g.double().requires_grad_()))
    )
    return relative_error(found, want) / relative_error(want.bfloat16(), want)


def test_strong_gates_lose_one_rounding() -> None:
    """That of what pairs of tokens share, and not those of their queries and keys too: less than half way, in
    logarithms, from one rounding to two that are independent."""
    (found,) = run_ranks(strong, 1, env=INTERPRETED, timeout=200)
    assert found < 2**0.25


def in_float32(sp: Any, seed: int) -> None:
    """Gradients of gates of -10 a token, by chunks whose sums of gates alone are in float32."""
    op, inputs = OPS["gla"], draw("gla", 1, 20, K=16, V=16, seed=seed)
    leaves = {name: x.float() for name, x in (inputs | {"g": 10 * inputs["g"]}).items()}
    made = torch.Generator().manual_seed(seed)
    ends = [(torch.randn(1, 20, 2, 16, generator=made), torch.zeros(1, 2, 16, 16)) for _ in range(DRAWS)]

    def found(call: Any, given: dict[str, Any], many: int = DRAWS) -> list[dict[str, Any]]:
        answers = differentiated(call, {name: x.clone() for name, x in given.items()}, ends[:many])
        return [{"dg": x["dg"]} for x in answers]

    got = found(lambda x: op.chunk(**x, output_final_state=True), leaves, 1)
    want = found(lambda x: op.oracle(**x, engine=token_loop), {name: x.double() for name, x in leaves.items()})
    off = {name: x if name == "g" else a_rounding_off(x, made) for name, x in leaves.items()}
    with RoundedProducts("tf32x3"):
        low = found(lambda x: op.oracle(**x, engine=float32_sums), off)
    check_functions(got, want, low)


@pytest.mark.slow
def test_strong_gates_in_float32(seed: int) -> None:
    run_ranks(in_float32, 1, seed, env=INTERPRETED, timeout=200)


def of_first_gates(sp: Any, size: float) -> float:
    """Gradients of a sequence's first gates, which decay nothing, over those of the others."""
    from flexsp.ops import chunk_gla

    q, k, v, do = torch.randn(4, 1, 64, 2, 64).bfloat16()
    g = (-size * torch.rand(1, 64, 2, 64)).requires_grad_()
    (dg,) = torch.autograd.grad(chunk_gla(q, k, v, g)[0], g, do)
    return (dg[:, 0].norm() / dg[:, 1:].square().mean(1).sum().sqrt()).item()


@pytest.mark.parametrize("size", [0.05, 3.0], ids=["small", "strong"])
def test_what_pairs_of_tokens_add_to_gates_cancels(size: float) -> None:
    """The first of a chunk has both ends of all pairs: what is left of numbers of bf16 is what sums of 64 in float32
    lose."""
    (found,) = run_ranks(of_first_gates, 1, size, env=INTERPRETED, timeout=200)
    assert found < 64 * torch.finfo(torch.float32).eps


def kinds(model: LinearAttention, dtype: torch.dtype, chunk: int | None = None) -> list[str]:
    code, sizes = model.kernels, {"D": 16, "E": 16}
    plan = choose_tiling(code, sizes, 2, 500, 0, dtype, chunk=chunk)
    call = GeneratedPlan(code, plan, sizes, 1, 2, 500, 0, dtype)
    return [x.kind for x in (*call.forward(), *call.backward(False, False))]


def test_launches() -> None:
    """Kernels for small gates in bf16 alone: e^x of a large x is not as precise as float32."""
    ours = ["gate_keys_small", "gate_keys", "key_grads_small", "key_grads"]
    found = kinds(variant(), BF16)
    assert [x for x in found if "key" in x] == ours and not {"prepare0", "adjoint0", "grads"} & {*found}
    assert [x for x in kinds(variant(), torch.float32) if "key" in x] == ["gate_keys", "key_grads"]
    assert "gate_keys" in kinds(variant(scale=1), BF16)  # programs that differ in 1 and 1.0 share kernels


def test_what_they_do_not_run() -> None:
    assert "prepare0" in kinds(variant(), BF16, chunk=128)
    model = variant(chunk_size=128)
    assert "generated kernels alone, not those of gated_keys: its chunks have up to 64 tokens" in model.explain()
    given = variant(SymbTensor([ConstExpr("H", 2)]))  # of every head its own
    assert "prepare0" in kinds(given, BF16)


def test_the_op_clamps_gates_where_no_kernel_does() -> None:
    """In PyTorch a gate of -inf would make sums of gates that are subtracted NaN."""
    from flexsp.ops import chunk_gla

    x = [torch.randn(1, 20, 2, 16) for _ in range(3)]
    g = torch.full((1, 20, 2, 16), -torch.inf).requires_grad_()
    o, _ = chunk_gla(*x, g)
    (dg,) = torch.autograd.grad(o.sum(), g)
    assert o.isfinite().all() and (dg == 0).all()


# Compiled -------------------------------------------------------------------------------------------------------------


def compile_config(K: int, V: int, n_docs: int, dtype: str) -> list[dict[str, Any]]:
    """In a child process: a forward and backward pass on meta tensors, every launch compiled."""
    from flexsp.compiler import dispatch
    from flexsp.compiler.backend.generated_kernels import Generated
    from flexsp.kernels import operators
    from flexsp.testing.offline import record_launches

    kind, T, H = getattr(torch, dtype), 4096, 32
    operators.chunk_table = lambda *args: torch.empty(1, dtype=torch.int32, device="meta")  # type: ignore[assignment]
    code = Generated(gla.make(H, K, V, kind).program)

    def meta(width: int, like: torch.dtype = kind) -> torch.Tensor:
        return torch.empty(1, T, H, width, dtype=like, device="meta", requires_grad=True)

    given = {"q": meta(K), "k": meta(K), "v": meta(V), "g": meta(K, torch.float32)}
    bounds = torch.empty(n_docs + 1, dtype=torch.int64, device="meta") if n_docs else None
    with record_launches() as launches:
        executable = dispatch.executable_of(code, given, None, bounds, None)
        o, _ = operators.run(executable, None, [*given.values()], None, bounds, (0, T, T))
        torch.autograd.backward([o], [torch.empty_like(o)])
    return told_of([x for x in launches if "key" in x[0].__name__])


@pytest.mark.compiles(always=True)
@pytest.mark.parametrize("name", [*slow(*CONFIGS)])
def test_what_the_interpreter_cannot_show(name: str) -> None:
    """The wait for the kernel before comes first; no lanes that round a sum differently, no NaN that gives way to a
    number, no missing barriers, no registers that nothing wrote; little on the stack."""
    found = in_child(compile_config, *CONFIGS[name])
    assert len(found) == (4 if CONFIGS[name][3] == "bfloat16" else 2)
    for kernel in found:
        assert kernel["waits_first"] and kernel["stack"] <= 256, kernel
        assert not any(kernel[what] for what in ("uneven_sums", "drops_nan", "races", "unwritten")), kernel
