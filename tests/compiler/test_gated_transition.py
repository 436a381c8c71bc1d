"""The kernels of gates for each key channel and a transition of rank one: under the interpreter against token loops in
float64, and compiled for sm_90."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from flexsp.compiler.planning.generated_plan import GeneratedPlan
from flexsp.compiler.planning.tiling import choose_tiling
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from flexsp.variants import rwkv7
from tests.harness.compiling import in_child, told_of
from tests.harness.generated import MANY_SEGMENTS, Run, beside_generated
from tests.harness.interpreted import INTERPRETED
from tests.marks import slow

BF16 = torch.bfloat16
SMALL = (0.0, -0.02, -0.6)
LARGE = (-0.02, -4.0, -200.0)
BOTH = (-0.02,) * 1800 + (-90.0,)  # of 64 tokens with 20 channels about half the chunks have one
GATES = {"small": SMALL, "large": LARGE, "both": BOTH}
OURS = functools.partial(Run, "rwkv7", H=1, dtype=BF16, lowering="auto")


@pytest.mark.parametrize("kind", ["small", "large", *slow("both")])
def test_one_sequence(kind: str, folder: str) -> None:
    beside_generated(folder, OURS(T=100, gates=GATES[kind]))


def test_documents_and_strides(folder: str) -> None:
    """Chunks of one token and of two, whose rows of `a` are read one earlier."""
    run = OURS(T=80, B=1, H=2, strided=True, bounds=(0, 0, 1, 3, 70, 80))
    beside_generated(folder, replace(run, gates=random.choice((SMALL, LARGE))))


@pytest.mark.slow
@pytest.mark.parametrize(("K", "V"), [(130, 12), (12, 140), (7, 33)])
def test_sizes(K: int, V: int, folder: str) -> None:
    """More channels than a program holds, and more columns."""
    beside_generated(folder, OURS(T=70, K=K, V=V, gates=SMALL), OURS(T=70, B=2, K=K, V=V, gates=LARGE))


@pytest.mark.slow
def test_ranks_and_segments(folder: str) -> None:
    beside_generated(folder, OURS(T=130, gates=BOTH, bounds=(0, 64, 128, 130), segments=MANY_SEGMENTS))
    beside_generated(folder, OURS(T=150, gates=BOTH, lengths=(70, 0, 80)))


def edges(sp: Any) -> list[str]:
    """Gates of -inf, and NaN in two of three documents, the first of which has small gates elsewhere."""
    from flexsp.ops import chunk_rwkv7

    ends, wrong = torch.tensor([0, 30, 70, 200]), []
    r, k, v, x, do = torch.randn(5, 1, 200, 1, 16).to(BF16)
    x = torch.nn.functional.normalize(x.float(), dim=-1).to(BF16)
    w = -3 * torch.rand(1, 200, 1, 16)
    w[:, :30] *= 0.01
    w[:, 30::7] = -torch.inf
    w[:, [20, 40], 0, 3] = torch.nan
    results = []
    for of in (BF16, torch.float64):
        leaves = [y.to(of).requires_grad_() for y in (r, k, v, -x, 0.7 * x)]
        leaves.insert(1, w.to(torch.float64 if of == torch.float64 else torch.float32).requires_grad_())
        o, _ = chunk_rwkv7(*leaves, cu_seqlens=ends)
        results.append([o.detach(), *torch.autograd.grad(o, leaves, do.to(of))])
    for name, found, want in zip(("o", "dr", "dw", "dk", "dv", "da", "db"), *results, strict=True):
        if not found[:, 70:].isfinite().all() or relative_error(found[:, 70:].double(), want[:, 70:]) > 2e-2:
            wrong.append(name)
    wrong += [] if (results[0][2][:, 72::7] == 0).all() else ["gradients of closed gates"]
    return wrong + ([] if all(results[0][0][:, t].isnan().any() for t in (20, 40)) else ["NaN is not seen"])


def test_closed_gates_and_nan() -> None:
    (wrong,) = run_ranks(edges, 1, env=INTERPRETED, timeout=200)
    assert not wrong, wrong


def of_first_gates(sp: Any, size: float) -> float:
    """Gradients of a sequence's first gates, which decay nothing, over those of the others."""
    from flexsp.ops import chunk_rwkv7

    r, k, v, x, do = torch.randn(5, 1, 64, 2, 64).bfloat16()
    x = torch.nn.functional.normalize(x.float(), dim=-1).bfloat16()
    w = (-size * torch.rand(1, 64, 2, 64)).requires_grad_()
    (dw,) = torch.autograd.grad(chunk_rwkv7(r, w, k, v, -x, 0.5 * x)[0], w, do)
    return (dw[:, 0].norm() / dw[:, 1:].square().mean(1).sum().sqrt()).item()


@pytest.mark.parametrize("size", [0.05, 3.0], ids=["small", "strong"])
def test_what_pairs_of_tokens_add_to_gates_cancels(size: float) -> None:
    """The first of a chunk has both ends of all pairs: what is left of numbers of bf16 is what sums of 64 in float32
    lose."""
    (found,) = run_ranks(of_first_gates, 1, size, env=INTERPRETED, timeout=200)
    assert found < 64 * torch.finfo(torch.float32).eps


def kinds(dtype: torch.dtype, chunk: int | None = None) -> list[str]:
    sizes = {"K": 16, "V": 16}
    code = rwkv7.make(2, 16, 16, dtype).kernels
    plan = choose_tiling(code, sizes, 2, 500, 0, dtype, chunk=chunk)
    call = GeneratedPlan(code, plan, sizes, 1, 2, 500, 0, dtype)
    return [x.kind for x in (*call.forward(), *call.backward(False, False))]


def test_launches() -> None:
    """All four scores and their gradients at once in bf16, by generated kernels elsewhere."""
    found = kinds(BF16, 64)
    ours = ["gate_operands_small", "gate_operands", "solve_chunks", "value_grads", "operand_grads_small"]
    ours.append("operand_grads")
    assert [x for x in found if x in ours] == ours
    assert not {"prepare0", "scores_kernel", "prepare2", "adjoint0", "scores_grad_kernel", "grads"} & {*found}
    assert "inverse_kernel" in found and "exact_grads" in found
    for others in (kinds(torch.float32), kinds(BF16, 128)):
        assert others.count("scores_kernel") == 4 and not {*ours} & {*others}


CONFIGS = {  # K, V, documents
    "usual": (64, 64, 0), "packed": (40, 24, 4), "large": (128, 128, 0), "wide keys": (256, 64, 4),
}  # fmt: skip


def compile_config(K: int, V: int, n_docs: int) -> list[dict[str, Any]]:
    """In a child process: a forward and backward pass on meta tensors, every launch compiled."""
    from flexsp.compiler import dispatch
    from flexsp.compiler.backend.generated_kernels import Generated
    from flexsp.kernels import operators
    from flexsp.testing.offline import record_launches

    T, H = 4096, 40
    operators.chunk_table = lambda *args: torch.empty(1, dtype=torch.int32, device="meta")  # type: ignore[assignment]
    code = Generated(rwkv7.make(H, K, V, BF16).program)

    def meta(width: int, like: torch.dtype = BF16) -> torch.Tensor:
        return torch.empty(1, T, H, width, dtype=like, device="meta", requires_grad=True)

    given = {name: meta(V if name == "v" else K) for name in "qkvab"} | {"g": meta(K, torch.float32)}
    bounds = torch.empty(n_docs + 1, dtype=torch.int64, device="meta") if n_docs else None
    with record_launches() as launches:
        executable = dispatch.executable_of(code, given, None, bounds, None)
        o, _ = operators.run(executable, None, [*given.values()], None, bounds, (0, T, T))
        torch.autograd.backward([o], [torch.empty_like(o)])
    return told_of([x for x in launches if "gated_transition" in x[0].fn.__module__])


@pytest.mark.compiles(always=True)
@pytest.mark.parametrize("name", [*slow(*CONFIGS)])
def test_what_the_interpreter_cannot_show(name: str) -> None:
    """The wait for the kernel before comes first; no lanes that round a sum differently, no NaN that gives way to a
    number, no missing barriers, no registers that nothing wrote; little on the stack."""
    found = in_child(compile_config, *CONFIGS[name])
    assert len(found) == 6
    for kernel in found:
        assert kernel["waits_first"] and kernel["stack"] <= 512, kernel
        assert not any(kernel[what] for what in ("uneven_sums", "drops_nan", "races", "unwritten")), kernel
