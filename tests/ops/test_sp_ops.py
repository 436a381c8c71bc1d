"""Every op over several ranks equals the op on one rank: outputs, final states and every gradient, in float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flexsp
from flexsp import SequenceParallel, ops
from flexsp.exceptions import PeerMismatch
from flexsp.testing.cases import CASES, PROGRAM_CASES, random_documents, random_lengths
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import RankFailure, run_ranks
from tests.harness.ops import ALL
from tests.harness.over_ranks import (
    EXACT,
    Plan,
    check_against_one_rank,
    leaf,
    local_inputs,
    run_plans,
)
from tests.marks import by_turns
from tests.op_cases import OTHER_CASES


def random_plan(world_size: int, packed: bool, tail: bool = False) -> Plan:
    """``tail``: the documents end before the tokens."""
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    total = random.choice([150, 40, world_size])
    bounds = random_documents(total, random.randrange(1, 7), generator).tolist() if packed else None
    if packed and tail:
        end = random.randrange(total)
        bounds = [min(x, end) for x in bounds]
    return Plan(
        seed=random.randrange(2**31),
        lengths=tuple(random_lengths(total, world_size, generator)),
        bounds=tuple(bounds) if bounds else None,
        states=random.random() < 0.7,
        announce=random.random() < 0.5,
    )


def check_plans(name: str, world_size: int, plans: list[Plan]) -> None:
    answers = run_ranks(run_plans, world_size, name, plans)
    for i, plan in enumerate(answers[0][0]):  # rank 0's plans, also under torchrun
        check_against_one_rank(ALL[name], plan, [results[i] for _, results in answers])


@pytest.mark.parametrize(
    ("name", "how"),
    by_turns(CASES | PROGRAM_CASES, ["4 ranks, plain", "2 ranks, documents", "2 ranks, plain"], "4 ranks, documents"),
)
def test_random_shards(name: str, how: str) -> None:
    world_size, packed = int(how[0]), how.endswith("documents")
    check_plans(name, world_size, [random_plan(world_size, packed, tail=i == 0) for i in range(4)])


@pytest.mark.parametrize("name", OTHER_CASES)
def test_documents_that_end_before_the_tokens(name: str) -> None:
    """Inside a rank, and so that two ranks hold no document. Rows of states that a rank must not read are NaN."""
    plans = [Plan(random.randrange(2**31), (3, 4, 2), bounds) for bounds in ((0, 2, 5, 6), (0, 2, 2, 3))]
    check_plans(name, 3, plans)


@pytest.mark.parametrize("name", ["simple_gla", "normalized"])
def test_shards_that_are_easy_to_get_wrong(name: str) -> None:
    lengths = [(0, 0, 0, 70), (70, 0, 0, 0), (0, 35, 0, 35), (1, 1, 1, 1), (64, 1, 64, 65), (0, 0, 0, 0)]
    plans = [Plan(random.randrange(2**31), each) for each in lengths if sum(each) or name != "normalized"]
    check_plans(name, 4, plans)


@pytest.mark.parametrize("name", ["simple_gla", "linear"])
def test_documents_that_are_easy_to_get_wrong(name: str) -> None:
    bounds = [
        (0, 80),  # one document over all ranks
        (0, 20, 40, 60, 80),  # boundaries between the ranks
        (0, 0, 0, 40, 40, 80, 80),  # empty ones at both ends and between ranks
        (0, 19, 21, 80),
        (0, 1, 2, 3, 79, 80),
        (0, 30, 41, 41),  # no document holds the other tokens
        (0, 0),
    ]
    lengths = [(20, 20, 20, 20), (0, 40, 0, 40), (40, 40, 0, 0), (1, 2, 77, 0)]
    check_plans(name, 4, [Plan(random.randrange(2**31), n, b) for n in lengths for b in bounds])


def frozen_somewhere(sp: SequenceParallel, plan: Plan, frozen: int) -> tuple[Plan, Any]:
    case = CASES["simple_gla"]
    inputs = local_inputs(case, plan, sp.rank)
    if sp.rank == frozen:
        inputs = {name: x.detach() if torch.is_tensor(x) else x for name, x in inputs.items()}
    o, _ = case.op(**inputs, sp=sp)
    assert o.requires_grad
    o.square().sum().backward()
    return plan, inputs["k"].grad


def test_a_rank_with_nothing_to_train_still_answers() -> None:
    plan = Plan(random.randrange(2**31), (30, 20, 25), states=False)
    answers = run_ranks(frozen_somewhere, 3, plan, 1)
    inputs = {name: leaf(x) for name, x in answers[0][0].inputs(CASES["simple_gla"]).items()}
    ops.chunk_simple_gla(**inputs)[0].square().sum().backward()
    assert answers[1][1] is None
    for rank, part in ((0, slice(0, 30)), (2, slice(50, 75))):
        assert relative_error(answers[rank][1], inputs["k"].grad[:, part]) < EXACT


def in_context(sp: SequenceParallel, plan: Plan) -> Any:
    case = CASES["simple_gla"]
    inputs = local_inputs(case, plan, sp.rank)
    given = case.op(**inputs, sp=sp)[0]
    with flexsp.sequence_parallel(sp):
        ambient = case.op(**inputs)[0]
        alone = case.op(**inputs, sp=False)[0]
    with torch.no_grad():
        without_graph = case.op(**inputs, sp=sp)[0]
    plain = case.op(**inputs)[0]
    again = checkpoint(lambda: case.op(**inputs, sp=sp)[0], use_reentrant=False)
    want, got = (torch.autograd.grad(x.square().sum(), inputs["v"])[0] for x in (given, again))
    assert torch.equal(given, ambient) and torch.equal(given, without_graph) and torch.equal(alone, plain)
    assert torch.equal(given, again) and torch.equal(want, got)
    return sp.rank == 0 or relative_error(alone, given) > 1e-3


def test_argument_ambient_group_and_checkpoint() -> None:
    assert all(run_ranks(in_context, 2, Plan(random.randrange(2**31), (30, 20), states=False)))


def disagree(sp: SequenceParallel) -> None:
    sp.check_calls = True
    x = torch.randn(1, 8, 2, 4 + sp.rank)
    ops.chunk_simple_gla(x, x, x, sp=sp)


def test_ranks_that_disagree_are_told_under_flexsp_check() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(disagree, 2, fresh_sp=True)
    assert isinstance(failure.value.__cause__, PeerMismatch)


def _boundaries_that_differ(sp: SequenceParallel, differ: int) -> str:
    q, k, v = torch.randn(3, 1, 5, 1, 4).unbind(0)
    try:
        ops.chunk_simple_gla(q, k, v, cu_seqlens=torch.tensor([0, 4 + differ * sp.rank, 10]), sp=sp)
    except PeerMismatch as error:
        return str(error)
    return ""


def _lengths_that_differ(sp: SequenceParallel, differ: int) -> str:
    sp.set_lengths([5 - differ * sp.rank, 5])
    try:
        sp.shard_range(5)
    except PeerMismatch as error:
        return str(error)
    return ""


def test_ranks_must_agree_on_their_lengths() -> None:
    settings = {"env": {"FLEXSP_CHECK": "1"}, "sp_timeout_s": 30.0, "fresh_sp": True}
    assert run_ranks(_lengths_that_differ, 2, 0, **settings) == ["", ""]
    assert all("set_lengths" in said for said in run_ranks(_lengths_that_differ, 2, 1, **settings))


def test_ranks_must_agree_on_the_documents() -> None:
    settings = {"env": {"FLEXSP_CHECK": "1"}, "sp_timeout_s": 30.0, "fresh_sp": True}
    assert run_ranks(_boundaries_that_differ, 2, 0, **settings) == ["", ""]
    assert all("cu_seqlens" in said for said in run_ranks(_boundaries_that_differ, 2, 1, **settings))


def _eps_that_differs(sp: SequenceParallel, differ: bool) -> str:
    x, eps = torch.randn(5, 1, 5, 1, 4), 1e-6 * (1 + differ * sp.rank)
    sp.set_lengths([5, 5])
    try:
        ops.chunk_mlstm(*x[:3], i=x[3, ..., 0], f=x[4, ..., 0], eps=eps, head_first=False, sp=sp)
    except PeerMismatch as error:
        return str(error)
    return ""


def test_ranks_must_agree_on_the_call() -> None:
    """Whatever eps is, the same travels: the exchange alone would not tell."""
    settings = {"env": {"FLEXSP_CHECK": "1"}, "sp_timeout_s": 30.0, "fresh_sp": True}
    assert run_ranks(_eps_that_differs, 2, False, **settings) == ["", ""]
    assert all("mlstm" in said for said in run_ranks(_eps_that_differs, 2, True, **settings))
