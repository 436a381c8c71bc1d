"""Generated kernels of states too large for one tile, whose columns chunkwise kernels take in pieces, in the
interpreter. tests/compiler/test_generated_offline.py compiles them for sm_90.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from flexsp.compiler.backend.tile_ops import add_product, product
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests import variants
from tests.harness.generated import MANY_SEGMENTS, Run, answered, check_runs, documents, half, problem_of
from tests.harness.interpreted import INTERPRETED
from tests.marks import quick, slow

MATRICES = [name for name, x in variants.VARIANTS.items() if len(x.state) == 2]
DENSE = [name for name in MATRICES if variants.VARIANTS[name].transition == "dense"]
VECTORS = [name for name in variants.VARIANTS if name not in MATRICES]


@pytest.mark.parametrize("name", quick(MATRICES, "gla"))
def test_both_sizes(name: str, folder: str) -> None:
    """Up to 256 rows and columns, of which the last piece need not be full, in several segments."""
    check_runs(folder, Run(name, T=19, H=1, K=random.choice([129, 256]), V=random.choice([150, 200, 256])))


@pytest.mark.parametrize("name", quick(MATRICES, "gla_own_bias"))
def test_pieces_give_what_whole_tiles_give(name: str, folder: str) -> None:
    """On small states, but for the order of sums: three pieces against one tile."""
    of = {"name": name, "H": 1, "V": 40, "chunk": 16}
    for run in (
        Run(T=37, B=2, **of),
        Run(T=20, dtype=half(), strided=True, segments=MANY_SEGMENTS, **of),
        Run(T=29, bounds=documents(29, 4), dtype=half(), **of),
    ):
        problem, pieces = problem_of(run), replace(run, pieces=16)
        whole, found = answered(folder, [run, pieces], [problem, problem])
        off = {key: relative_error(found[key], x) for key, x in whole.items()}
        least = 1e-5 if run.dtype == torch.float32 else 4e-3  # sums that round to the other side
        assert max(off.values()) < least, (pieces, off)


def credit(run: Run) -> dict[str, float]:
    """The gradient of gates has differences of sums over the states and their gradients, which kernels keep rounded."""
    return {"dg": 0.0 if run.dtype == torch.float32 else 2**-9}


@pytest.mark.parametrize("name", slow(*MATRICES))
def test_packed(name: str, folder: str) -> None:
    """In a half precision with K no power of 4, whose root the functions that bounds come from do not round."""
    check_runs(
        folder,
        Run(name, T=41, H=1, K=256, V=256, bounds=documents(41, 4), segments=MANY_SEGMENTS),
        Run(name, T=18, H=1, K=200, V=256, bounds=(0, 3, 18), dtype=half(), strided=True),
        credit=credit,
    )


@pytest.mark.parametrize("name", slow(*DENSE))
def test_dense_transitions_of_many_rows(name: str, folder: str) -> None:
    check_runs(folder, Run(name, T=37, H=1, K=256, V=random.choice([16, 33, 128])))


@pytest.mark.parametrize("name", slow("gla", "rwkv7", "gla_own_bias"))
def test_larger_chunks(name: str, folder: str) -> None:
    check_runs(folder, Run(name, T=40, H=1, K=200, V=256, chunk=32, bounds=(0, 0, 3, 40)))


@pytest.mark.parametrize("name", slow(*MATRICES))
def test_ranks(name: str, folder: str) -> None:
    given = {"T": 40, "H": 1, "K": 256, "V": 200, "lengths": (23, 0, 17)}
    check_runs(folder, Run(name, **given), Run(name, bounds=documents(40, 4), **given))


@pytest.mark.parametrize("name", quick(VECTORS, "hgrn"))
def test_vectors(name: str, folder: str) -> None:
    """Of more numbers than the scan has columns."""
    K = random.choice([257, 600])
    packed = Run(name, T=21, H=1, K=K, bounds=documents(21, 4), segments=MANY_SEGMENTS)
    check_runs(folder, Run(name, T=19, H=1, K=K, dtype=half()), packed)


@pytest.mark.parametrize("name", slow(*VECTORS))
def test_vectors_over_ranks(name: str, folder: str) -> None:
    check_runs(folder, Run(name, T=40, K=300, lengths=(23, 0, 17)))


@triton.jit
def _products(x, a, b, to, DOT: tl.constexpr, APART: tl.constexpr, SUM: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x, a, b = tl.load(x + at), tl.load(a + at), tl.load(b + at)
    if SUM:
        x = add_product(x, a, b, 16, DOT, "ieee", APART)
    else:
        x += product(a, b, 16, DOT, "ieee", APART)
    tl.store(to + at, x)


def products(sp: Any) -> float:
    x, a, b = torch.randn(3, 16, 16)
    want, worst = x.double() + a.bfloat16().double() @ b.bfloat16().double(), 0.0
    for apart in (False, True):
        for of_sum in (False, True):
            for given in ((a, b), (a.bfloat16(), b), (a, b.bfloat16())):
                to = torch.full((16, 16), float("nan"))
                _products[(1,)](x, *given, to, tl.bfloat16, apart, of_sum)
                worst = max(worst, relative_error(to, want))
    return worst


def test_operands_of_products_are_rounded_alike() -> None:
    """One in float32 beside one in bfloat16 too, and in the branch that kernels of eight warps take."""
    (worst,) = run_ranks(products, 1, env=INTERPRETED)
    assert worst < 1e-6
