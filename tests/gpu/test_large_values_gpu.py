"""Values of more than 256 channels, and sizes that are no power of two, of the ops against themselves in float64."""

from __future__ import annotations

import random

import pytest
import torch

from flexsp.testing.compare import relative_error
from tests.gpu.judge import CUDA, DTYPES
from tests.harness.large_values import OPS, Tensors, inputs, solve

DRAWS = 6
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-16}


def _errors(name: str, given: Tensors, dtype: torch.dtype) -> dict[str, float]:
    """Of some cotangents together: the gradient of a parameter is a number a head, and may nearly vanish."""
    given = {key: x.to(dtype).double().to(CUDA) for key, x in given.items()}
    got, again, want = (
        [solve(name, given, kind, seed) for seed in range(DRAWS)] for kind in (dtype, dtype, torch.float64)
    )
    assert all(torch.equal(x[key], y[key]) for x, y in zip(got, again, strict=True) for key in x)
    return {key: relative_error(*(torch.stack([x[key] for x in found]) for found in (got, want))) for key in want[0]}


@pytest.mark.parametrize("size", [(256, 512), (96, 192), (128, 300)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("name", OPS)
@pytest.mark.usefixtures("poisoned")
def test_against_float64(name: str, dtype: torch.dtype, size: tuple[int, int]) -> None:
    """At most twice as far as heads of half as many columns are, plus a rounding; two calls give the same bits."""
    seed, (K, V) = random.randrange(2**31), size
    errors = _errors(name, inputs(name, seed, 333, 2, K, V), dtype)
    half = _errors(name, inputs(name, seed, 333, 2, K, V // 2), dtype)
    bad = {key: (x, half[key]) for key, x in errors.items() if not x <= 2 * half[key] + ROUNDING[dtype]}
    assert not bad, bad
