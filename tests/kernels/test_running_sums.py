"""Running sums and the token before, over ranks and documents, against a loop over tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from flexsp.scan.tokens import previous, running_sum
from flexsp.testing.ranks import run_ranks

LENGTHS = (3, 0, 4, 5)
BOUNDS = (
    (0, 3, 3, 5, 12),  # a document begins with a shard, behind an empty one
    (0, 1, 7, 12),
    (0, 12),
)


def by_tokens(x: torch.Tensor, bounds: tuple[int, ...]) -> list[torch.Tensor]:
    sums, before = torch.zeros_like(x), torch.zeros_like(x)
    for begin, end in zip(bounds, bounds[1:], strict=False):
        sums[:, begin:end] = x[:, begin:end].cumsum(1)
        before[:, begin + 1 : end] = x[:, begin : max(begin, end - 1)]
    return [sums, before]


def of_rank(sp: Any, x: torch.Tensor, bounds: tuple[int, ...], packed: bool) -> list[torch.Tensor]:
    sp.set_lengths(list(LENGTHS))
    cu = torch.tensor(bounds) if packed else None
    return [f(sp.shard(x), cu, sp) for f in (running_sum, previous)]


def test_over_ranks_and_documents() -> None:
    for bounds in BOUNDS:
        x = torch.randn(1, sum(LENGTHS), 2, dtype=torch.float64)
        parts = run_ranks(of_rank, len(LENGTHS), x, bounds, len(bounds) > 2 or random.random() < 0.5)
        for which, want in enumerate(by_tokens(x, bounds)):
            got = torch.cat([part[which] for part in parts], 1)
            torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


def test_on_one_rank() -> None:
    for bounds in BOUNDS:
        x = torch.randn(1, sum(LENGTHS), 2, 3, dtype=torch.float64)
        cu = torch.tensor(bounds)
        for f, want in zip((running_sum, previous), by_tokens(x, bounds), strict=True):
            torch.testing.assert_close(f(x, cu, None), want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("T", [0, 1, 256, 257, 511, 513, 66_000])
def test_long_texts(T: int) -> None:
    """Of blocks of tokens, and blocks of these; and their gradients."""
    x = torch.randn(2, T, 3, dtype=torch.float64, requires_grad=True)
    got, want = running_sum(x, None, None), x.cumsum(1)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-10)
    do = torch.randn_like(x)
    (dx,), (expected,) = (torch.autograd.grad(y, x, do) for y in (got, want))
    torch.testing.assert_close(dx, expected, rtol=1e-12, atol=1e-10)
