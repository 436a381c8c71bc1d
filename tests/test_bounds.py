"""Accesses outside of a kernel's tensors are seen under the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from flexsp.testing.bounds import within_tensors
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED


@triton.jit
def copy_kernel(x, y, n, stride, FROM: tl.constexpr, TO: tl.constexpr):
    """Elements FROM to n - 1 of x, in y."""
    i = tl.arange(0, 16) + FROM
    tl.store(y + i, tl.load(x + i * stride, mask=i < n), mask=i < TO)


def _copied(sp: Any, size: int, n: int, first: int, to: int, stride: int) -> str:
    memory = torch.zeros(64)
    x, y = memory[8 : 8 + size * stride : stride], memory[40 : 40 + size]
    with within_tensors():
        try:
            copy_kernel[(1,)](x, y, n, stride, FROM=first, TO=to)
        except Exception as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("size", "n", "first", "to", "stride", "said"),
    [
        (12, 12, 0, 12, 1, ""), (12, 12, 0, 12, 2, ""), (12, 13, 0, 12, 1, "1 of 13 elements of a load"),
        (8, 9, 0, 8, 2, "1 of 9 elements of a load"), (12, 12, 0, 16, 1, "4 of 16 elements of a store"),
        (12, 12, -2, 12, 1, "2 of 14 elements of a load"),
    ],
)  # fmt: skip
def test_accesses_beside_tensors_are_seen(size: int, n: int, first: int, to: int, stride: int, said: str) -> None:
    (found,) = run_ranks(_copied, 1, size, n, first, to, stride, env=INTERPRETED)
    assert said in found and bool(found) == bool(said), found
