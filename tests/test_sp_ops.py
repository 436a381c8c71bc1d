"""Every op over several ranks equals the op on one rank: outputs, final states and every gradient, in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flexsp
from flexsp import SequenceParallel, ops
from flexsp.exceptions import PeerMismatch
from flexsp.testing.cases import CASES, PROGRAM_CASES, Case, Shape, random_documents, random_lengths
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import RankFailure, run_ranks
from tests.harness.ops import ALL
from tests.marks import by_turns
from tests.op_cases import OTHER_CASES

EXACT = 1e-12


@dataclass(frozen=True)
class Plan:
    """One sequence cut over ranks; ``bounds`` are document boundaries or None."""

    seed: int
    lengths: tuple[int, ...]
    bounds: tuple[int, ...] | None = None
    B: int = 2
    states: bool = True
    announce: bool = False  # lengths known beforehand (set_lengths) instead of exchanged

    @property
    def shape(self) -> Shape:
        B = 1 if self.bounds else self.B
        n = len(self.bounds) - 1 if self.bounds else B
        return Shape(B=B, T=sum(self.lengths), K=6, V=5, states=n if self.states else 0)

    def inputs(self, case: Case) -> dict[str, Any]:
        made = case.inputs(self.shape, self.seed)
        if self.bounds:
            made["cu_seqlens"] = torch.tensor(self.bounds)
        return made

    def cotangent(self, like: torch.Tensor, i: int) -> torch.Tensor:
        return torch.randn(like.shape, generator=torch.Generator().manual_seed(self.seed + i), dtype=like.dtype)


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


def tensors(x: Any) -> list[torch.Tensor]:
    return [t for y in x for t in tensors(y)] if isinstance(x, (tuple, list)) else [] if x is None else [x]


def leaf(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(leaf(y) for y in x)
    return x.detach().clone().requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x


def gradients(o: torch.Tensor, final: Any, plan: Plan, start: int, inputs: dict[str, Any]) -> dict[str, Any]:
    """Gradient of <o, c> + <final, c'> by name, for cotangents that depend on the plan alone."""
    whole = torch.empty(plan.shape.B, plan.shape.T, *o.shape[2:], dtype=o.dtype)
    outputs, finals = [o], [x for x in tensors(final) if x.requires_grad]
    cotangents = [plan.cotangent(whole, 1)[:, start : start + o.shape[1]]]
    cotangents += [plan.cotangent(x, 2 + i) for i, x in enumerate(finals)]
    named = {n: x for n, x in inputs.items() if [t for t in tensors(x) if torch.is_tensor(t) and t.requires_grad]}
    grads = iter(torch.autograd.grad(outputs + finals, tensors(list(named.values())), cotangents))
    return {name: [next(grads) for _ in tensors(x)] for name, x in named.items()}


def own_rows(state: torch.Tensor, plan: Plan, rank: int) -> torch.Tensor:
    """The initial states as this rank may see them: NaN for every document that does not start here."""
    start, stop = sum(plan.lengths[:rank]), sum(plan.lengths[: rank + 1])
    last = rank == len(plan.lengths) - 1
    begins = [start <= b < stop or (last and b >= stop) for b in plan.bounds[:-1]]
    return torch.where(torch.tensor(begins).view(-1, *[1] * (state.dim() - 1)), state, float("nan"))


def local_inputs(case: Case, plan: Plan, rank: int) -> dict[str, Any]:
    start, stop = sum(plan.lengths[:rank]), sum(plan.lengths[: rank + 1])
    inputs = {n: x[:, start:stop] if n in case.tokens else x for n, x in plan.inputs(case).items()}
    state = inputs.pop("initial_state", None)
    if state is not None and plan.bounds:
        pair = isinstance(state, tuple)
        inputs["initial_state"] = tuple(own_rows(x, plan, rank) for x in state) if pair else own_rows(state, plan, rank)
    elif state is not None and rank == 0:
        inputs["initial_state"] = state
    return {name: leaf(x) for name, x in inputs.items()}


def run_plans(sp: SequenceParallel, name: str, plans: list[Plan]) -> tuple[list[Plan], list[Any]]:
    case, results = ALL[name], []
    for plan in plans:
        sp.set_lengths(plan.lengths if plan.announce else None)
        inputs = local_inputs(case, plan, sp.rank)
        o, final = case.op(**inputs, output_final_state=True, sp=sp)
        assert (final is None) == (plan.bounds is None and not sp.is_last)
        results.append((o, final, gradients(o, final, plan, sum(plan.lengths[: sp.rank]), inputs)))
    return plans, results


def check_against_one_rank(case: Case, plan: Plan, ranks: list[Any]) -> None:
    inputs = {name: leaf(x) for name, x in plan.inputs(case).items()}
    o, final = case.op(**inputs, output_final_state=True, sp=False)
    want = gradients(o, final, plan, 0, inputs)
    compare = {"o": (torch.cat([r[0] for r in ranks], dim=1), o)}
    finals = [[r[1]] if not isinstance(r[1], (tuple, list)) else r[1] for r in ranks]
    for i, x in enumerate(tensors(final)):
        rows = [f[i] if f[0] is not None else torch.zeros_like(x) for f in finals]
        compare[f"final {i}"] = (sum(rows), x)
        if plan.bounds:
            filled = torch.stack([r.flatten(1).abs().amax(1) > 0 for r in rows])
            assert filled.sum(0).max() <= 1, "two ranks fill the same document's final state"
    for name, expected in want.items():
        parts = [r[2][name] for r in ranks if name in r[2]]
        for i, x in enumerate(expected):
            mine = [p[i] for p in parts]
            compare[f"d{name} {i}"] = (torch.cat(mine, dim=1) if name in case.tokens else sum(mine), x)
    wrong = {n: e for n, (a, b) in compare.items() if not (e := relative_error(a, b)) < EXACT}
    assert not wrong, f"{plan}: {wrong}"


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
