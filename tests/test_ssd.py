"""The kernels of Mamba-2's state-space dual, in Triton's interpreter: what `mamba2_ssd` takes beside `CASES`."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from flexsp.ops import mamba2_ssd
from flexsp.testing.compare import relative_error
from flexsp.testing.oracles import mamba2_ssd as oracle
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED, poisoned

B, T, H, G, N, P = 1, 37, 4, 2, 18, 5
TENSORS = ("x", "dt", "A", "B", "C", "D", "dt_bias")
ALL = (*TENSORS, "dt_softplus")


def inputs(seed: int, *left_out: str) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64)

    x = {
        "x": draw(B, T, H, P), "dt": draw(B, T, H).abs(), "A": -draw(H).abs(), "B": draw(B, T, G, N),
        "C": draw(B, T, G, N), "D": draw(H), "dt_bias": draw(H).abs(), "dt_softplus": True,
    }  # fmt: skip
    return {name: t for name, t in x.items() if name not in left_out}


def solve(op: Any, given: dict[str, Any], wanted: tuple[str, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    x = {name: t.to(dtype) if isinstance(t, torch.Tensor) else t for name, t in given.items()}
    leaves = {name: x[name].requires_grad_() for name in wanted}
    y = op(**x)[0]
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = torch.autograd.grad(y, [*leaves.values()], cotangent.to(dtype))
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


def worst(sp: Any, given: dict[str, Any], wanted: tuple[str, ...]) -> dict[str, float]:
    """In kernels, float32: errors of outputs and gradients."""
    with poisoned(2, B * H):
        found = solve(mamba2_ssd, given, wanted, torch.float32)
    right = solve(oracle, given, wanted, torch.float64)
    return {name: float(relative_error(found[name], right[name])) for name in right}


def check(given: dict[str, Any], wanted: tuple[str, ...]) -> None:
    (errors,) = run_ranks(worst, 1, given, wanted, env=INTERPRETED)
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("left_out", [("D",), ("dt_bias", "dt_softplus"), ("dt_softplus", "D", "dt_bias")], ids=str)
def test_without(left_out: tuple[str, ...]) -> None:
    given = inputs(random.randrange(2**31), *left_out)
    check(given, tuple(name for name in TENSORS if name in given))


@pytest.mark.parametrize("wanted", [("D",), ("dt",), ("A", "x"), ("dt_bias", "D"), ("B",)], ids=str)
def test_some_gradients(wanted: tuple[str, ...]) -> None:
    check(inputs(random.randrange(2**31)), wanted)


def test_steps_of_zero() -> None:
    """Tokens with dt = 0 change no state, and still have a gradient of dt."""
    given = inputs(random.randrange(2**31), "dt_bias", "dt_softplus")
    given["dt"][:, 5:12] = 0.0
    given["dt"][:, :, 1] = 0.0
    check(given, ("x", "dt", "A", "B", "C", "D"))


def test_weights_of_channels() -> None:
    """D [H, P] is added outside of the kernels."""
    given = inputs(random.randrange(2**31))
    given["D"] = torch.randn(H, P, dtype=torch.float64)
    check(given, TENSORS)
