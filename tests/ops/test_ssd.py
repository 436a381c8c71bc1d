"""The kernels of Mamba-2's state-space dual, in Triton's interpreter: what `mamba2_ssd` takes beside `CASES`."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from flexsp.ops import mamba2_ssd
from flexsp.testing.compare import relative_error
from flexsp.testing.oracles import mamba2_ssd as oracle
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED, poisoned

B, T, H, G, N, P = 1, 37, 8, 2, 18, 5
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


@pytest.mark.parametrize("limits", [(0.3, 0.8), (0.5, math.inf)], ids=str)
def test_limits_of_steps(limits: tuple[float, float]) -> None:
    check({**inputs(random.randrange(2**31)), "dt_limit": limits}, TENSORS)


def test_gates_of_outputs() -> None:
    given = inputs(random.randrange(2**31))
    check({**given, "z": torch.randn(B, T, H, P, dtype=torch.float64)}, (*TENSORS, "z"))


def mixed_with_gates(sp: Any, given: dict[str, Any]) -> list[float]:
    """x, B and C in bfloat16 beside gates of outputs in float32, and the other way round."""
    right, errors = oracle(**given)[0], []
    for halves in (("x", "B", "C"), ("z",)):
        x = {
            name: t.to(torch.bfloat16 if name in halves else torch.float32) if isinstance(t, torch.Tensor) else t
            for name, t in given.items()
        }  # fmt: skip
        y, _ = mamba2_ssd(**x)
        assert y.dtype == x["x"].dtype
        errors.append(float(relative_error(y, right)))
    return errors


def test_gates_of_outputs_in_another_dtype() -> None:
    given = {**inputs(random.randrange(2**31)), "z": torch.randn(B, T, H, P, dtype=torch.float64)}
    given |= {name: given[name].bfloat16().double() for name in ("x", "B", "C", "z")}
    (errors,) = run_ranks(mixed_with_gates, 1, given, env=INTERPRETED)
    assert errors[0] < 2.0**-8 and errors[1] < 1e-5, errors


def test_steps_of_zero() -> None:
    """Tokens with dt = 0 change no state, and still have a gradient of dt."""
    given = inputs(random.randrange(2**31), "dt_bias", "dt_softplus")
    given["dt"][:, 5:12] = 0.0
    given["dt"][:, :, 1] = 0.0
    check(given, ("x", "dt", "A", "B", "C", "D"))


def of_groups(sp: Any, seed: int) -> list[float]:
    """Of B and C that are parts of wider tensors, so that calls differ in nothing but the number of groups."""
    made, found = torch.Generator().manual_seed(seed), []
    wide = [torch.randn(B, T, H, N, generator=made, dtype=torch.float64) for _ in "BC"]
    given = inputs(seed)
    for groups in (1, 2, 4, 1):
        given |= {name: x[:, :, :groups] for name, x in zip("BC", wide, strict=True)}
        right = solve(oracle, given, ("B", "C", "x"), torch.float64)
        given |= {name: x.float()[:, :, :groups] for name, x in zip("BC", wide, strict=True)}
        with poisoned(2, B * H):
            got = solve(mamba2_ssd, given, ("B", "C", "x"), torch.float32)
        found.append(max(float(relative_error(got[name], right[name])) for name in right))
    return found


def test_calls_that_differ_in_groups_alone() -> None:
    (errors,) = run_ranks(of_groups, 1, random.randrange(2**31), env=INTERPRETED)
    assert max(errors) < 1e-5, errors


def test_gates_that_are_clamped() -> None:
    """Gates below -104 have no gradient, in bfloat16 too, whatever is left of those of others."""
    given = inputs(random.randrange(2**31), "dt_bias", "dt_softplus")
    given |= {"dt": torch.full((B, T, H), 1e4, dtype=torch.float64), "A": -torch.ones(H, dtype=torch.float64)}
    (found,) = run_ranks(gradient_of_A, 1, given, env=INTERPRETED)
    assert found == [0.0] * H


def gradient_of_A(sp: Any, given: dict[str, Any]) -> list[float]:
    exact = {name: x.float() for name, x in given.items() if name in ("dt", "A", "D")}
    half = {name: x.bfloat16() for name, x in given.items() if name not in exact}
    A = exact["A"].requires_grad_()
    mamba2_ssd(**half, **exact)[0].float().sum().backward()
    return A.grad.tolist()


def test_weights_of_channels() -> None:
    """D [H, P] is added outside of the kernels, which still take the rest."""
    given = inputs(random.randrange(2**31))
    given["D"] = torch.randn(H, P, dtype=torch.float64)
    check(given, TENSORS)


@pytest.mark.parametrize("x", [2, 1], ids=["more channels", "one channel"])
def test_few_channels(x: int) -> None:
    """States of one column are summed up apart from others."""
    given = inputs(random.randrange(2**31))
    given["x"] = given["x"][..., :x].clone()
    check(given, TENSORS)
