"""Halo exchange against slices of the whole sequence, with shards shorter than the halo and empty ones."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flexsp.comm.group import SequenceParallel
from flexsp.comm.halo import halo_exchange
from flexsp.testing import run_ranks

KEEPS = torch.__version__.startswith("2.11.")  # of checkpoints in graphs, what later releases compute again


def bounds(lengths: list[int]) -> list[tuple[int, int]]:
    return [(sum(lengths[:r]), sum(lengths[: r + 1])) for r in range(len(lengths))]


def by_slicing(x: torch.Tensor, lengths: list[int], width: int) -> list[torch.Tensor]:
    padded = torch.cat([x.new_zeros(x.shape[0], width, *x.shape[2:]), x], 1)
    return [padded[:, start : start + width] for start, _ in bounds(lengths)]


def _halo(sp: SequenceParallel, x: torch.Tensor, lengths: list[int], weight: torch.Tensor, mode: str) -> tuple:
    start, stop = bounds(lengths)[sp.rank]
    mine, weight = x[:, start:stop].clone().requires_grad_(), weight[sp.rank]
    torch._dynamo.reset()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return halo_exchange(x.exp(), weight.shape[1], sp).sin()

    model = fn
    if "checkpoint" in mode:
        model = lambda x: checkpoint(fn, x, use_reentrant="reentrant" in mode)  # noqa: E731
    if "compile" in mode:
        model = torch.compile(model, fullgraph=True, backend="aot_eager")
    before = sp.calls
    halo = model(mine)
    (halo * weight).sum().backward()
    return halo, mine.grad, sp.calls - before


def check(lengths: list[int], width: int, mode: str = "eager") -> None:
    x = torch.randn(2, sum(lengths), 3, dtype=torch.float64)
    weight = torch.randn(len(lengths), 2, width, 3, dtype=torch.float64)
    got = run_ranks(_halo, len(lengths), x, lengths, weight, mode)
    whole = x.clone().requires_grad_()
    want = [halo.sin() for halo in by_slicing(whole.exp(), lengths, width)]
    sum((h * w).sum() for h, w in zip(want, weight, strict=True)).backward()
    for r, (start, stop) in enumerate(bounds(lengths)):
        context = f"rank {r} of {lengths}, width {width}"
        assert torch.equal(got[r][0], want[r]), context
        grad = whole.grad[:, start:stop]
        torch.testing.assert_close(got[r][1], grad, rtol=1e-14, atol=1e-14, msg=lambda m, c=context: f"{c}: d {m}")
        assert got[r][2] == (2 if "checkpoint" not in mode or (KEEPS and "compile" in mode) else 3)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_shards(ranks: int) -> None:
    for _ in range(12):
        check([random.choice([0, 0, 1, 2, 3, 5, 8]) for _ in range(ranks)], random.randint(1, 6))


def test_spans_several_ranks() -> None:
    for lengths in ([9, 1, 1, 1], [3, 0, 0, 2], [0, 0, 0, 4], [1, 2, 1, 0], [0, 0, 0, 0], [4, 4, 4, 4]):
        check(lengths, 4)


@pytest.mark.parametrize("mode", ["compile", "checkpoint", "checkpoint reentrant", "compile checkpoint"])
def test_survives(mode: str) -> None:
    check([5, 0, 2], 3, mode)


def _integers(sp: SequenceParallel, tokens: torch.Tensor) -> torch.Tensor:
    return halo_exchange(sp.shard(tokens), 1, sp)


def test_token_ids() -> None:
    tokens = torch.randint(100, (1, 9))
    got = run_ranks(_integers, 2, tokens)
    assert [h.tolist() for h in got] == [[[0]], [[int(tokens[0, 4])]]]


def _frozen(sp: SequenceParallel, mode: str) -> tuple:
    x = torch.zeros(1, 3, 2, requires_grad=sp.rank != 1)
    before = sp.calls
    torch._dynamo.reset()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return halo_exchange(x, 2, sp).sum() + x.exp().sum()

    model = torch.compile(fn, fullgraph=True, backend="aot_eager") if mode == "compile" else fn
    (checkpoint(fn, x, use_reentrant=False) if mode == "checkpoint" else model(x)).backward()
    return x.grad, sp.calls - before


@pytest.mark.parametrize("mode", ["eager", "compile", "checkpoint"])
def test_a_rank_where_nothing_requires_grad(mode: str) -> None:
    """Its neighbours' backward passes (a compiler sees none of it used here) and recomputes still need its part."""
    got = run_ranks(_frozen, 3, mode, sp_timeout_s=90.0)
    assert [calls for _, calls in got] == [3 if mode == "checkpoint" else 2] * 3
    assert got[1][0] is None
    assert got[0][0][0, :, 0].tolist() == [1.0, 2.0, 2.0] and got[2][0][0, :, 0].tolist() == [1.0, 1.0, 1.0]


def test_one_rank_and_bad_input() -> None:
    sp = SequenceParallel()
    assert torch.equal(halo_exchange(torch.ones(2, 3, 4), 2, sp), torch.zeros(2, 2, 4))
    with pytest.raises(ValueError, match=r"x: expected \[B, T, ...\], got shape \(3,\)"):
        halo_exchange(torch.ones(3), 2, sp)
    with pytest.raises(ValueError, match="width: expected an integer >= 0, got -1"):
        halo_exchange(torch.ones(2, 3), -1, sp)
