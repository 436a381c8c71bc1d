"""Every operator and every variant at every head size, dtype and layout on one GPU: outputs and all gradients against a
float64 token loop, and the same bits in three calls.

A kernel can be right at one size or dtype and wrong at the next, where another instruction is chosen. Small T: what
counts is that every kernel runs at every size. `--shard 1/2` takes about every second test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flexsp.testing.problems import OPS, check, draw, solve, solve_all
from tests import variants
from tests.gpu.judge import CUDA, DTYPES, assert_same, check_variant

SIZES = (16, 32, 48, 64, 96, 128, 256)
DOCUMENTS = (61, 0, 64, 1, 77)
LAYOUTS = ("whole", "packed")
CALLS = 3


def _name(value: Any) -> str | None:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=_name)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.usefixtures("poisoned")
def test_ops(op: str, size: int, dtype: torch.dtype, layout: str) -> None:
    shape: dict[str, Any] = {"T": sum(DOCUMENTS), "H": 3, "K": size, "V": size}
    shape |= {"B": 1, "documents": DOCUMENTS} if layout == "packed" else {"B": 2}
    problem = draw(op, **shape).rounded(dtype)
    found = solve_all(problem, dtype, CUDA)
    assert_same([found[0], *(solve(problem, dtype, CUDA) for _ in range(CALLS - 1))])
    reports = check(problem, dtype, found, device=CUDA, oracle_device=CUDA)
    bad = [str(report) for report in reports if not report.ok]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=_name)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", variants.VARIANTS)
@pytest.mark.usefixtures("poisoned")
def test_variants(folder: Path, seed: int, name: str, size: int, dtype: torch.dtype, layout: str) -> None:
    documents = DOCUMENTS if layout == "packed" else None
    check_variant(name, size, size, dtype, folder, seed, documents, calls=CALLS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=_name)
@pytest.mark.parametrize("size", [(256, 128), (128, 256), (200, 150), (256, 40)], ids=str)
@pytest.mark.parametrize("name", [name for name, x in variants.VARIANTS.items() if len(x.state) == 2])
@pytest.mark.usefixtures("poisoned")
def test_large_states(
    folder: Path, seed: int, name: str, size: tuple[int, int], dtype: torch.dtype, layout: str
) -> None:  # fmt: skip
    """The largest ones beside those of 256 x 256 above: of whole tiles, and of pieces that are not all full."""
    documents = DOCUMENTS if layout == "packed" else None
    check_variant(name, *size, dtype, folder, seed, documents, calls=CALLS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=_name)
@pytest.mark.parametrize("size", [300, 1024])
@pytest.mark.parametrize("name", [name for name, x in variants.VARIANTS.items() if len(x.state) == 1])
@pytest.mark.usefixtures("poisoned")
def test_long_vectors(folder: Path, seed: int, name: str, size: int, dtype: torch.dtype, layout: str) -> None:
    documents = DOCUMENTS if layout == "packed" else None
    check_variant(name, size, size, dtype, folder, seed, documents, calls=CALLS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=_name)
@pytest.mark.parametrize("size", (16, 64, 128, 256))
@pytest.mark.parametrize("name", ["linear", "simple_gla", "retnet"])
@pytest.mark.usefixtures("poisoned")
def test_variants_that_an_engine_runs(
    folder: Path, seed: int, name: str, size: int, dtype: torch.dtype, layout: str
) -> None:  # fmt: skip
    documents = DOCUMENTS if layout == "packed" else None
    check_variant(name, size, size, dtype, folder, seed, documents, calls=CALLS, lowering="auto")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=_name)
@pytest.mark.parametrize("size", [(16, 16), (64, 64), (128, 128), (40, 128), (128, 40), (256, 256)], ids=str)
@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet", "vector_gated_delta"])
@pytest.mark.usefixtures("poisoned")
def test_variants_that_the_delta_engine_runs(
    folder: Path, seed: int, name: str, size: tuple[int, int], dtype: torch.dtype, layout: str
) -> None:  # fmt: skip
    documents = DOCUMENTS if layout == "packed" else None
    check_variant(name, *size, dtype, folder, seed, documents, calls=CALLS, lowering="auto")
