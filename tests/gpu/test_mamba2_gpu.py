"""What `mamba2_ssd` takes beside the cases of `test_ops_gpu`, against the token loop in float64."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from flexsp.ops import mamba2_ssd
from flexsp.testing.compare import relative_error
from flexsp.testing.oracles import mamba2_ssd as oracle
from tests.gpu.judge import CUDA, DTYPES

DRAWS = 6
T, H, G, N, P = 300, 4, 2, 128, 64
BOUND = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 2e-5}
ARGUMENTS = {
    "limits": {"dt_limit": (0.02, 0.06)}, "a least step": {"dt_limit": (0.05, math.inf)},
    "gates of outputs": {"z": (1, T, H, P)}, "weights of channels": {"D": (H, P)},
}  # fmt: skip


def _inputs(seed: int, more: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """In float64 on the GPU, as inputs in dtype are; parameters in float32."""
    made = torch.Generator().manual_seed(seed)

    def draw(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=made).to(kind).double().to(CUDA)

    f32 = torch.float32
    given = {
        "x": draw(1, T, H, P), "dt": draw(1, T, H), "A": -draw(H, kind=f32).abs() * 8, "B": draw(1, T, G, N),
        "C": draw(1, T, G, N), "D": draw(H, kind=f32), "dt_bias": draw(H, kind=f32) - 3, "dt_softplus": True,
    }  # fmt: skip
    for name, value in more.items():
        kind = f32 if name == "D" else dtype
        given[name] = value if name == "dt_limit" else draw(*value, kind=kind)
    return given


def _solve(op: Any, given: dict[str, Any], dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Output and gradients; parameters are in float32 where the rest is in less."""
    kinds = {"A": torch.float32, "D": torch.float32, "dt_bias": torch.float32} if dtype != torch.float64 else {}
    x = {n: t.to(kinds.get(n, dtype)) if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    leaves = {n: t.requires_grad_() for n, t in x.items() if isinstance(t, torch.Tensor)}
    y = op(**x)[0]
    do = torch.randn(y.shape, generator=torch.Generator(CUDA).manual_seed(seed), device=CUDA).to(torch.bfloat16)
    grads = torch.autograd.grad(y, [*leaves.values()], do.to(y.dtype))
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


@pytest.mark.parametrize("more", ARGUMENTS.values(), ids=ARGUMENTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.usefixtures("poisoned")
def test_arguments(dtype: torch.dtype, more: dict[str, Any]) -> None:
    given = _inputs(random.randrange(2**31), more, dtype)
    found, again, right = [], [], []
    for seed in range(DRAWS):  # together: the gradient of a parameter is a number a head, and may nearly vanish
        ways = (found, mamba2_ssd, dtype), (again, mamba2_ssd, dtype), (right, oracle, torch.float64)
        for results, op, kind in ways:
            results.append(_solve(op, {n: _copy(t) for n, t in given.items()}, kind, seed))
    assert all(torch.equal(x[name], y[name]) for x, y in zip(found, again, strict=True) for name in x)
    errors = {
        name: float(relative_error(*(torch.stack([x[name].double() for x in results]) for results in (found, right))))
        for name in right[0]
    }
    assert max(errors.values()) < BOUND[dtype], errors


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: str(x).removeprefix("torch."))
def test_indices_of_documents(dtype: torch.dtype) -> None:
    """The same bits as of packed documents, with states of rows."""
    made = _inputs(random.randrange(2**31), {"z": (1, T, H, P)}, dtype)
    given = {name: x.to(torch.float32 if x.dim() == 1 else dtype) for name, x in made.items() if name != "dt_softplus"}
    how = {"dt_softplus": True, "output_final_state": True, "state_v_first": False}
    states = torch.randn(2, H, N, P, device=CUDA)
    idx = torch.tensor([[4] * 61 + [2] + [4] * 88, [7] * 150], dtype=torch.int32, device=CUDA)
    rows = {name: x.unflatten(1, (2, 150)).squeeze(0) if x.dim() > 2 else x for name, x in given.items()}
    y, final = mamba2_ssd(**rows, **how, seq_idx=idx, initial_state=states)
    of_documents = torch.stack([states[0], *torch.zeros_like(states), states[1]])
    bounds = torch.tensor([0, 61, 62, 150, 300], device=CUDA)
    want, finals = mamba2_ssd(**given, **how, cu_seqlens=bounds, initial_state=of_documents)
    assert torch.equal(y.flatten(0, 1), want[0]) and torch.equal(final, finals[2:])


def _copy(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x
