"""Values of more than 256 channels, and sizes that are no power of two, of the ops against themselves in float64."""

from __future__ import annotations

import random

import pytest
import torch

from flexsp.testing.compare import relative_error
from tests.gpu.judge import CUDA, DTYPES
from tests.harness.large_values import (
    LAYERS,
    OPS,
    Tensors,
    bounds,
    inputs,
    layer_of,
    solve,
    solve_layer,
)

DRAWS = 6
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-16}


def _errors(name: str, given: Tensors, dtype: torch.dtype) -> dict[str, float]:
    """Of some cotangents together: the gradient of a parameter is a number a head, and may nearly vanish."""
    given = {
        key: x.to(CUDA) if key == "cu_seqlens" else x.to(dtype).double().to(CUDA) for key, x in given.items()
    }  # fmt: skip
    got, again, want = (
        [solve(name, given, kind, seed) for seed in range(DRAWS)] for kind in (dtype, dtype, torch.float64)
    )
    assert all(torch.equal(x[key], y[key]) for x, y in zip(got, again, strict=True) for key in x)
    return {key: relative_error(*(torch.stack([x[key] for x in found]) for found in (got, want))) for key in want[0]}


def _check(name: str, dtype: torch.dtype, K: int, V: int, packed: bool) -> None:
    seed = random.randrange(2**31)
    errors = _errors(name, inputs(name, seed, 333, 2, K, V, packed), dtype)
    half = _errors(name, inputs(name, seed, 333, 2, K, V // 2, packed), dtype)
    bad = {key: (x, half[key]) for key, x in errors.items() if not x <= 2 * half[key] + ROUNDING[dtype]}
    assert not bad, bad


OF_DTYPES = pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: str(x).removeprefix("torch."))


@pytest.mark.parametrize("size", [(256, 512), (96, 192), (128, 300)], ids=str)
@OF_DTYPES
@pytest.mark.parametrize("name", OPS)
@pytest.mark.usefixtures("poisoned")
def test_against_float64(name: str, dtype: torch.dtype, size: tuple[int, int]) -> None:
    """At most twice as far as heads of half as many columns are, plus a rounding; two calls give the same bits."""
    _check(name, dtype, *size, packed=False)


@OF_DTYPES
@pytest.mark.parametrize("name", OPS)
@pytest.mark.usefixtures("poisoned")
def test_documents_against_float64(name: str, dtype: torch.dtype) -> None:
    """The same where documents are packed, some of them empty, and one token is in none."""
    _check(name, dtype, 64, 300, packed=True)


@OF_DTYPES
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, dtype: torch.dtype) -> None:
    """Two heads of 270 values, on packed documents: no further from float64 than twice what PyTorch is in the same
    dtype on a CPU, plus a rounding of each of the steps that a layer takes between its inputs and the op."""
    layer = layer_of(name, random.randrange(2**31)).to(dtype)
    x, dy = torch.randn(2, 1, 333, LAYERS[name][1]["hidden_size"]).to(dtype).unbind(0)
    cu = bounds(333)
    plain = solve_layer(layer, x, dy, cu)
    got = solve_layer(layer.to(CUDA), x.to(CUDA), dy.to(CUDA), cu.to(CUDA))
    want = solve_layer(layer.double(), x.double().to(CUDA), dy.double().to(CUDA), cu.to(CUDA))
    low, high = ({key: relative_error(y[key].cpu(), want[key].cpu()) for key in want} for y in (plain, got))
    bad = {key: (error, low[key]) for key, error in high.items() if not error <= 2 * low[key] + 4 * ROUNDING[dtype]}
    assert not bad, bad
