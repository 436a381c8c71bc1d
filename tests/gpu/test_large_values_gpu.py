"""Values of more than 256 channels, and sizes that are no power of two, of the ops against themselves in float64."""

from __future__ import annotations

import random

import pytest
import torch

from flexsp.testing.compare import relative_error
from tests.gpu.judge import CUDA, DTYPES
from tests.test_large_values import OPS, Tensors, inputs, solve

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-16}


def _errors(name: str, given: Tensors, dtype: torch.dtype) -> dict[str, float]:
    given = {key: x.to(dtype).double().to(CUDA) for key, x in given.items()}
    got, again, want = solve(name, given, dtype), solve(name, given, dtype), solve(name, given, torch.float64)
    assert all(torch.equal(got[key], again[key]) for key in got)
    return {key: relative_error(got[key], want[key]) for key in want}


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
