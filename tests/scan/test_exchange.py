"""The differentiable rank scan: gradients against one process; compile, checkpointing, silent and disagreeing ranks."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flexsp.comm.group import SequenceParallel
from flexsp.exceptions import PeerMismatch, PeerTimeout
from flexsp.scan.exchange import exchange
from flexsp.scan.schedules import SCHEDULES
from flexsp.scan.transitions import Transition
from flexsp.testing import RankFailure, run_ranks
from tests.harness.exchanges import Block, blocks, one_process
from tests.harness.schedules import KINDS, fold, random_elements
from tests.marks import slow

Tensors = list[torch.Tensor]

KEEPS = torch.__version__.startswith("2.11.")  # of checkpoints in graphs, what later releases compute again


def leaves(elements: list[tuple]) -> list[tuple]:
    for F, log_a, _ in elements:
        F.requires_grad_()
        if log_a is not None:
            log_a.requires_grad_()
    return elements


def objective(state: torch.Tensor, F: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Nonlinear in what arrives, so that a wrong incoming state also shows in the gradients."""
    return ((state + 0.5 * F).sin() * weight).sum()


def reference(elements: list[tuple], weight: torch.Tensor) -> list[tuple]:
    """(S_in, dF, dlog_a) of every rank from one process and plain autograd."""
    elements = leaves([tuple(None if t is None else t.detach().clone() for t in e) for e in elements])
    states = fold(elements)
    sum(objective(s, e[0], w) for s, e, w in zip(states, elements, weight, strict=True)).backward()
    return [(s.detach(), F.grad, None if a is None else a.grad) for s, (F, a, _) in zip(states, elements, strict=True)]


def run_once(sp: SequenceParallel, elements: list[tuple], weight: torch.Tensor) -> tuple:
    (F, log_a, cut), weight = leaves([elements[sp.rank]])[0], weight[sp.rank]
    state = exchange(F, Transition.of(F, log_a, cut), sp)
    objective(state, F, weight).backward()
    return state, F.grad, None if log_a is None else log_a.grad


def compare(got: list[tuple], want: list[tuple]) -> None:
    for r, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        for name, x, y in zip(("S_in", "dF", "dlog_a"), mine, theirs, strict=True):
            if x is None:
                assert y is None
                continue
            y = torch.zeros_like(x) if y is None else y  # plain autograd's None: nobody reads it
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12, msg=lambda m, r=r, n=name: f"rank {r} {n}: {m}")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients(ranks: int, schedule: str) -> None:
    for kind in KINDS:
        elements = random_elements(kind, ranks)
        weight = torch.randn(ranks, *elements[0][0].shape, dtype=torch.float64)
        compare(run_ranks(run_once, ranks, elements, weight, schedule=schedule), reference(elements, weight))


def _frozen(sp: SequenceParallel, F: torch.Tensor, mode: str) -> Any:
    mine = F[sp.rank].requires_grad_(sp.rank != 1)
    torch._dynamo.reset()

    def fn(F: torch.Tensor) -> torch.Tensor:
        return exchange(F, Transition.of(F, None), sp).square().sum() + F.exp().sum()

    model = torch.compile(fn, fullgraph=True, backend="aot_eager") if mode == "compile" else fn
    (checkpoint(fn, mine, use_reentrant=False) if mode == "checkpoint" else model(mine)).backward()
    with torch.no_grad():
        assert not exchange(mine, Transition.of(mine, None), sp).requires_grad
    return mine.grad


@pytest.mark.parametrize("mode", ["eager", "compile", "checkpoint"])
def test_a_rank_where_nothing_requires_grad(mode: str) -> None:
    """Its neighbours' backward passes still need its answer."""
    F = torch.randn(3, 1, 2, 3, 3, dtype=torch.float64)
    grads = run_ranks(_frozen, 3, F, mode, sp_timeout_s=90.0)
    assert grads[1] is None
    torch.testing.assert_close(grads[0], F[0].exp() + 2 * F[0] + 2 * (F[0] + F[1]))


@pytest.mark.parametrize(
    "mode",
    ["eager", "compile", "checkpoint", "checkpoint reentrant", "compile checkpoint", *slow("compile inductor")],
)
def test_layers_with_an_empty_shard(mode: str) -> None:
    xs = [0.3 * torch.randn(T, 3, dtype=torch.float64) for T in (5, 0, 4)]
    got = run_ranks(blocks, 3, xs, mode, True, sp_timeout_s=90.0)
    ys, grads = one_process(xs)
    recomputed = 0 if "checkpoint" not in mode or (KEEPS and "compile" in mode) else 2
    for r in range(3):
        torch.testing.assert_close(got[r][0], ys[r].detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got[r][1], grads[r], rtol=1e-12, atol=1e-12)
        assert got[r][2] == (2, 4 + recomputed)


def _unread(sp: SequenceParallel, xs: Tensors, mode: str) -> tuple:
    layer, before = Block(sp, read=sp.rank == 0), sp.calls
    torch._dynamo.reset()

    def model(x: torch.Tensor) -> torch.Tensor:
        return layer(layer(x))

    if mode == "compile":
        model = torch.compile(model, fullgraph=True, backend="aot_eager")
    elif mode == "compile inductor" and sp.rank == 1:  # where the code is dead; the other rank need not take its time
        model = torch.compile(model, fullgraph=True, backend="inductor")
    with torch.no_grad():
        return model(xs[sp.rank]), sp.calls - before


@pytest.mark.parametrize("mode", ["eager", "compile", *slow("compile inductor")])
def test_an_unread_state_still_communicates(mode: str) -> None:
    """Rank 1 does not read what arrives, so a compiler there sees dead code; its neighbour waits all the same."""
    xs = [0.3 * torch.randn(T, 3, dtype=torch.float64) for T in (2, 3)]
    for r, (y, calls) in enumerate(run_ranks(_unread, 2, xs, mode)):
        torch.testing.assert_close(y, xs[r].sin().sin())
        assert calls == 2


def _absent(sp: SequenceParallel) -> Any:
    if sp.rank == 1:
        return None
    start = time.monotonic()
    F = torch.ones(1, 1, 2, 2)
    try:
        exchange(F, Transition.of(F, None), sp)
    except PeerTimeout as error:
        with pytest.raises(PeerTimeout):  # and it stays known
            sp.check()
        return error, time.monotonic() - start
    return "no error"


@pytest.mark.parametrize("schedule", ["serial", *slow("pipelined", "all_gather")])
def test_a_rank_that_never_arrives(schedule: str) -> None:
    options = {"own_processes": True, "sp_timeout_s": 3.0, "schedule": schedule}
    results = run_ranks(_absent, 3, **options)
    assert results[1] is None
    for r in (0, 2):
        error, seconds = results[r]
        assert isinstance(error, PeerTimeout), error
        assert error.rank == r
        assert error.peer == 1
        assert 3 <= seconds < 60  # far below the default, with time for a busy machine


def _dies(sp: SequenceParallel) -> Any:
    if sp.rank == 0:
        os._exit(1)
    try:
        exchange(torch.ones(1, 1, 2, 2), Transition("none"), sp)
    except PeerTimeout as error:
        raise RuntimeError(f"told of the death of rank {error.peer}") from error


def test_a_rank_that_dies() -> None:
    with pytest.raises(RankFailure, match="rank 0 failed:\nthe process ended") as caught:
        run_ranks(_dies, 2, own_processes=True, sp_timeout_s=60.0)
    assert "told of the death of rank 0" in str(caught.value)


def _disagree(sp: SequenceParallel, how: str) -> Any:
    F = torch.ones(1, 2, 3, 4 + (sp.rank if how == "shape" else 0))
    if how == "dtype" and sp.rank:
        F = F.double()
    if how == "order" and sp.rank:
        exchange_or = sp.gather
    else:
        exchange_or = lambda x: exchange(x, Transition("none"), sp)  # noqa: E731
    try:
        exchange_or(F)
    except (PeerMismatch, PeerTimeout) as error:
        return error
    return None


@pytest.mark.parametrize("how", ["shape", "dtype"])
def test_ranks_that_disagree(how: str) -> None:
    """Without FLEXSP_CHECK the receiving rank finds out from the text before the data."""
    options = {"sp_timeout_s": 8.0, "own_processes": True}
    results = run_ranks(_disagree, 2, how, **options)
    assert isinstance(results[1], PeerMismatch), results
    assert (results[1].rank, results[1].peer) == (1, 0)
    assert "float32" in str(results[1].theirs) and "state exchange" in str(results[1].ours)


@pytest.mark.parametrize("how", ["shape", "dtype", "order"])
def test_check_mode_tells_every_rank(how: str) -> None:
    results = run_ranks(_disagree, 2, how, env={"FLEXSP_CHECK": "1"}, sp_timeout_s=30.0, fresh_sp=True)
    for r, error in enumerate(results):
        assert isinstance(error, PeerMismatch), results
        assert (error.rank, error.peer) == (r, 1 - r)
    assert results[0].ours == results[1].theirs


def test_one_rank() -> None:
    sp = SequenceParallel()
    assert torch.equal(exchange(torch.ones(1, 2, 3, 4), Transition("none"), sp), torch.zeros(1, 2, 3, 4))
