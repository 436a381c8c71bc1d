"""Walks of large states in Gluon, which no interpreter runs, against float64: every use of theirs, and long texts."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from flexsp.kernels.diagonal import tiles as table
from flexsp.kernels.diagonal import tiling
from flexsp.ops import chunk_simple_gla, mamba2_ssd
from flexsp.testing.compare import relative_error
from flexsp.testing.problems import check, draw, solve_all
from tests.gpu.judge import CUDA

SIZES = [(256, 256), (256, 128), (128, 256), (128, 128)]
DOCUMENTS = (61, 0, 64, 1, 260, 77, 0)
BF16 = torch.bfloat16


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize(("K", "V"), SIZES)
@pytest.mark.parametrize("op", ["simple_gla", "linear_attn", "retention", "mamba2"])
@pytest.mark.usefixtures("poisoned")
def test_walks(monkeypatch: pytest.MonkeyPatch, op: str, K: int, V: int, packed: bool) -> None:
    """With and without gates, gradients of gates, states and documents, over several segments; three calls are alike.

    Heads of simple GLA and Mamba-2 have gates whose gradients are wanted, those of the others have not.
    """
    monkeypatch.setattr(table, "segment_length", lambda *args: 3)
    tiling.tiling_of.cache_clear()
    problem = draw(op, T=sum(DOCUMENTS), H=4, K=K, V=V, documents=DOCUMENTS if packed else None).rounded(BF16)
    try:
        first, *others = (solve_all(problem, BF16, CUDA) for _ in range(3))
        reports = check(problem, BF16, first)
    finally:
        tiling.tiling_of.cache_clear()
    assert all(torch.equal(x, y) for found in others for a, b in zip(first, found, strict=True)
               for x, y in zip(a.values(), b.values(), strict=True))  # fmt: skip
    bad = [str(report) for report in reports if not report.ok]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("T", [1, 63, 65, 200])
@pytest.mark.parametrize(("K", "V"), SIZES)
@pytest.mark.parametrize("op", ["simple_gla", "mamba2"])
@pytest.mark.usefixtures("poisoned")
def test_short_texts(op: str, K: int, V: int, T: int) -> None:
    """Of three sequences."""
    problem = draw(op, B=3, T=T, H=4, K=K, V=V).rounded(BF16)
    bad = [str(report) for report in check(problem, BF16, solve_all(problem, BF16, CUDA)) if not report.ok]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(("K", "V"), SIZES)
@pytest.mark.parametrize("shift", [1, 8], ids=["bytes", "strides"])
def test_rows_that_do_not_lie_in_vectors(K: int, V: int, shift: int) -> None:
    """Inputs and gradients that begin between two vectors, or whose rows do, are copied first."""

    def draw_rows(width: int) -> torch.Tensor:
        return torch.randn(1, 200, 2, width + shift, device=CUDA).to(BF16)[..., shift % 8 : width + shift % 8]

    q, k, v, do = draw_rows(K), draw_rows(K), draw_rows(V), draw_rows(V)
    g = F.logsigmoid(torch.randn(1, 200, 2, device=CUDA) + 3)
    found = []
    for copy in (False, True):
        leaves = [(x.contiguous() if copy else x).detach().requires_grad_() for x in (q, k, v)]
        o, _ = chunk_simple_gla(*leaves, g)
        found.append([o, *torch.autograd.grad(o, leaves, do.contiguous() if copy else do)])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("T", [2048, 65536])
@pytest.mark.parametrize(("K", "V"), SIZES)
def test_gates_of_long_texts(K: int, V: int, T: int) -> None:
    """Gradients of gates, token by token and summed up, do not get worse with the length: in bf16 beside float32."""
    made, H = torch.Generator(CUDA).manual_seed(random.randrange(2**31)), 4

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=made, device=CUDA)

    q, k = (F.normalize(normal(1, T, H, K), dim=-1).to(BF16) for _ in range(2))
    v, g = normal(1, T, H, V).to(BF16), F.logsigmoid(normal(1, T, H) + 3)
    dos = [normal(1, T, H, V).to(BF16) for _ in range(4)]  # for one a head's sum over tokens may nearly vanish

    def solve(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [*(x.to(dtype).requires_grad_() for x in (q, k, v)), g.clone().requires_grad_()]
        o, _ = chunk_simple_gla(*leaves)
        grads = [torch.autograd.grad(o, leaves, do.to(dtype), retain_graph=True) for do in dos]
        *others, dg = (torch.stack(x) for x in zip(*grads, strict=True))
        return [o, *others, dg, dg.double().sum(2)]

    found, right = solve(BF16), solve(torch.float32)
    errors = [float(relative_error(x.double(), y.double())) for x, y in zip(found, right, strict=True)]
    assert max(errors[:-1]) < 4e-3, errors
    assert errors[-1] < 1e-2, errors


@pytest.mark.parametrize("T", [2048, 65536])
def test_parameters_of_mamba2(T: int) -> None:
    """Of Falcon-H1's sizes: dA, dD and d(dt_bias) are sums over all tokens. In bf16 beside float32."""
    made, (H, P, N, G) = torch.Generator(CUDA).manual_seed(random.randrange(2**31)), (8, 128, 256, 2)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=made, device=CUDA)

    rows = {"x": normal(1, T, H, P), "dt": normal(1, T, H), "B": normal(1, T, G, N), "C": normal(1, T, G, N)}
    rows = {name: x.to(BF16) for name, x in rows.items()}
    params = {"A": -(1 + 15 * normal(H).sigmoid()), "D": normal(H), "dt_bias": normal(H) - 4}
    do = normal(1, T, H, P).to(BF16)

    def solve(dtype: torch.dtype) -> list[torch.Tensor]:
        given = {name: x.to(dtype).requires_grad_() for name, x in rows.items()}
        given |= {name: x.clone().requires_grad_() for name, x in params.items()}
        y, _ = mamba2_ssd(**given, dt_softplus=True)
        return [y, *torch.autograd.grad(y, [*given.values()], do.to(dtype))]

    errors = [
        float(relative_error(x.double(), y.double())) for x, y in zip(solve(BF16), solve(torch.float32), strict=True)
    ]
    assert max(errors) < 2e-2, errors
