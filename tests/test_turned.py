"""The diagonal engine's gradient of the angles by which q and k were turned, against float64."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flexsp.kernels.diagonal.op import diagonal
from flexsp.kernels.rotary import rotate
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED, poisoned

BF16 = torch.bfloat16


class Case(NamedTuple):
    T: int = 45
    K: int = 10
    V: int = 6
    S: int = 3
    groups: int = 2
    dtype: torch.dtype = torch.float32
    pairwise: bool = True
    bounds: tuple[int, ...] = ()
    states: bool = True
    others: tuple[str, ...] = ("g",)


CASES = {
    "pairs": Case(),
    "halves, no gate, no states": Case(pairwise=False, others=(), states=False),
    "odd K, write gates": Case(K=7, others=("g", "i", "w")),
    "documents": Case(bounds=(0, 0, 17, 20, 20, 41)),
    "documents, halves, no states": Case(bounds=(0, 33, 45), pairwise=False, states=False),
    "values in two tiles, pairs in two": Case(T=20, K=70, V=80, S=35, groups=1),
    "shared rows": Case(groups=1, V=5, others=("g_gamma",)),
    "wide values": Case(T=17, V=270, groups=1),
}


def draw(case: Case, seed: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    H, N = 2, max(1, len(case.bounds) - 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, case.T, *shape, generator=made, dtype=torch.float64)

    inputs = {"q": normal(case.groups, case.K), "k": normal(case.groups, case.K), "v": normal(H, case.V)}
    inputs["turned"] = normal(case.groups, case.S)
    if case.states:
        inputs["initial_state"] = torch.randn(N, H, case.K, case.V, generator=made, dtype=torch.float64)
    others = {"g": -0.2 * normal(H).abs(), "i": -normal(H).abs(), "w": normal(H), "g_gamma": -normal(H)[0, 0].abs()}
    return inputs | {name: others[name] for name in case.others}


def gradients(
    case: Case, inputs: dict[str, Tensor], weights: list[Tensor], dtype: torch.dtype, by_engine: bool
) -> Tensor:
    """Of `turned`, from the engine or from the rotation."""
    given = {
        name: x if name in ("g", "i", "w", "g_gamma", "initial_state") else x.to(dtype) for name, x in inputs.items()
    }
    wide = torch.promote_types(dtype, torch.float32)
    given = {name: x if x.dtype == dtype else x.to(wide) for name, x in given.items()}
    turned = inputs["turned"].to(wide).requires_grad_()
    angle = 2 * math.pi * (turned.detach() if by_engine else turned)
    for name in ("q", "k"):
        given[name] = rotate(given[name].to(wide), angle, case.pairwise).to(dtype)
    given["turned"] = turned if by_engine else None
    if dtype == torch.float64:  # in PyTorch heads share no rows
        for name in ("q", "k", "turned"):
            given[name] = None if given[name] is None else given[name].repeat_interleave(2 // case.groups, 2)
    bounds = torch.tensor(case.bounds) if case.bounds else None
    o, final = diagonal(
        **given, scale=0.3, output_final_state=case.states, cu_seqlens=bounds, pairwise=case.pairwise
    )  # fmt: skip
    loss = (o.double() * weights[0]).sum()
    if final is not None:
        loss = loss + (final.double() * weights[1]).sum()
    (found,) = torch.autograd.grad(loss, turned)
    return found.double()


def weights_of(case: Case, inputs: dict[str, Tensor], seed: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed + 1)
    of_o = torch.randn(1, case.T, *inputs["v"].shape[2:], generator=made, dtype=torch.float64)
    shape = max(1, len(case.bounds) - 1), 2, case.K, case.V
    return [of_o, torch.randn(shape, generator=made, dtype=torch.float64)]


def errors(sp: Any, kind: str, seed: int) -> tuple[float, float]:
    """Of the engine in PyTorch, and of kernels with two segments whose states do not fit in memory at once."""
    from flexsp.kernels.diagonal import turned_plan

    case = CASES[kind]
    inputs = draw(case, seed)
    weights = weights_of(case, inputs, seed)
    want = gradients(case, inputs, weights, torch.float64, by_engine=False)
    by_pytorch = gradients(case, inputs, weights, torch.float64, by_engine=True)
    before = turned_plan.FEW, turned_plan._PROGRAMS
    turned_plan.FEW = turned_plan._PROGRAMS = 1
    try:
        with poisoned(2, 2):
            by_kernels = gradients(case, inputs, weights, case.dtype, by_engine=True)
    finally:
        turned_plan.FEW, turned_plan._PROGRAMS = before
    return relative_error(by_pytorch, want), relative_error(by_kernels, want)


@pytest.mark.parametrize("kind", CASES)
def test_against_the_rotation(kind: str, seed: int) -> None:
    ((by_pytorch, by_kernels),) = run_ranks(errors, 1, kind, seed, env=INTERPRETED)
    assert by_pytorch < 1e-12 and by_kernels < 2e-5, (by_pytorch, by_kernels)


def errors_of_sums(sp: Any, dtype: torch.dtype, decay: float, seed: int) -> list[float]:
    """In half precision, of what angles in front of chunks get, of what every angle gets, and of its sum: against
    float64 with the same rows. decay: of log gates, -.16 on average for 1."""
    T = 192 if decay > 1 else 768 if dtype == BF16 else 256  # chunks of float16 have 16 tokens, those of bfloat16 64
    case = Case(T=T, K=16, V=16, S=8, groups=1 if decay < 1 else 2, states=decay < 1)
    inputs = draw(case, seed)
    inputs["g"] *= decay
    inputs["v"] = inputs["v"].to(dtype).double()
    weights = weights_of(case, inputs, seed)
    weights[0] = weights[0].to(dtype).double()
    turned = inputs["turned"]
    rows = {x: rotate(inputs[x].float(), 2 * math.pi * turned.float()).to(dtype).double() for x in ("q", "k")}
    narrow = gradients(case, inputs, weights, dtype, by_engine=True)
    exact = gradients(case, inputs | rows | {"turned": 0 * turned}, weights, torch.float64, by_engine=True)
    got, want = (x.flip(1).cumsum(1).flip(1) for x in (narrow, exact))
    pairs = (got[:, ::64], want[:, ::64]), (got, want), (got.sum(1), want.sum(1))
    return [relative_error(*pair) for pair in pairs]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_over_many_chunks(dtype: torch.dtype, seed: int) -> None:
    """In bfloat16, without what makes chunks add up to what states tell, .010 to .014 in front of chunks and .011 to
    .021 of sums (five seeds); with it .003 to .006."""
    draws = [run_ranks(errors_of_sums, 1, dtype, 0.1, seed + n, env=INTERPRETED)[0] for n in range(3)]
    found = torch.tensor(draws).square().mean(0).sqrt()  # sums of one draw may nearly vanish
    assert found.max() < (8e-3 if dtype == BF16 else 2e-3), draws


def test_digits_that_are_lost_where_states_decay_at_once(seed: int) -> None:
    """What `flexsp.ops.mamba3` says of log gates of -1 to -8 a token, by three seeds together; once gradients of rows
    keep more digits, it should say less."""
    for decay, least, most in ((6.0, 0.008, 0.025), (50.0, 0.02, 0.06)):
        found = [run_ranks(errors_of_sums, 1, BF16, decay, seed + n, env=INTERPRETED)[0][1] for n in range(3)]
        assert least < sum(found) / 3 < most, (decay, found)
