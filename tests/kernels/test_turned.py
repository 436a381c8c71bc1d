"""The diagonal engine's gradients of the turns by which tokens rotate states, from both sides, against float64."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flexsp.kernels.diagonal.op import diagonal
from flexsp.kernels.rotary import rotate, turn_rows
from flexsp.scan.tokens import last, running_sum
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED, poisoned
from tests.marks import slow

BF16 = torch.bfloat16


class Case(NamedTuple):
    """S pairs of channels of keys are turned, and `values` pairs of those of values."""

    T: int = 45
    K: int = 10
    V: int = 6
    S: int = 3
    groups: int = 2
    dtype: torch.dtype = torch.float32
    bounds: tuple[int, ...] = ()
    states: bool = True
    others: tuple[str, ...] = ("g",)
    strict: bool = False
    values: int = 0


CASES = {
    "pairs": Case(),
    "no gate, no states": Case(others=(), states=False),
    "odd K, write gates": Case(K=7, others=("g", "i", "w")),
    "documents": Case(bounds=(0, 0, 17, 20, 20, 41)),
    "documents, no gate": Case(bounds=(0, 0, 17, 20, 20, 41), others=()),
    "documents, no states": Case(bounds=(0, 33, 45), states=False),
    "values in two tiles, pairs in two": Case(T=20, K=70, V=80, S=35, groups=1),
    "documents, pairs in two": Case(T=20, K=70, V=8, S=35, groups=1, bounds=(0, 7, 20)),
    "a tile that does not turn": Case(T=20, K=128, S=32),
    "a tile that turns in part": Case(T=20, K=128, S=40, groups=1),
    "shared rows": Case(groups=1, V=5, others=("g_gamma",)),
    "wide values": Case(T=17, V=270, groups=1),
    "own products apart": Case(bounds=(0, 0, 17, 20, 20, 41), strict=True),
    "own products apart, one column": Case(T=20, V=1, groups=1, strict=True),
    "columns": Case(values=3, others=("g", "i", "w")),
    "columns, no states": Case(S=1, values=2, states=False, strict=True),
    "columns, documents": Case(bounds=(0, 0, 17, 20, 20, 41), values=3),
    "columns, documents, no states": Case(bounds=(0, 33, 45), states=False, values=3, others=()),
    "columns in two programs, rows in two": Case(T=20, K=70, V=80, S=35, groups=1, values=40),
    "wide values, of which some turn": Case(T=17, V=270, groups=1, values=133),
}


def draw(case: Case, seed: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    H, N = 2, max(1, len(case.bounds) - 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, case.T, *shape, generator=made, dtype=torch.float64)

    inputs = {"q": normal(case.groups, case.K), "k": normal(case.groups, case.K), "v": normal(H, case.V)}
    inputs["turned"] = normal(case.groups, case.S)
    if case.values:
        inputs["turned_values"] = normal(H, case.values)
    if case.states:
        inputs["initial_state"] = torch.randn(N, H, case.K, case.V, generator=made, dtype=torch.float64)
    others = {"g": -0.2 * normal(H).abs(), "i": -normal(H).abs(), "w": normal(H), "g_gamma": -normal(H)[0, 0].abs()}
    return inputs | {name: others[name] for name in case.others}


def gradients(
    case: Case, inputs: dict[str, Tensor], weights: list[Tensor], dtype: torch.dtype, by_engine: bool
) -> Tensor:
    """Of the turns that tokens add, of rows and then of columns, from the engine or from rotations by their sums."""
    given = {
        name: x if name in ("g", "i", "w", "g_gamma", "initial_state") else x.to(dtype) for name, x in inputs.items()
    }
    wide = torch.promote_types(dtype, torch.float32)
    given = {name: x if x.dtype == dtype else x.to(wide) for name, x in given.items()}
    angles = [name for name in ("turned", "turned_values") if given.pop(name, None) is not None]
    leaves = {name: inputs[name].to(wide).requires_grad_() for name in angles}  # never rounded to half precision
    bounds = torch.tensor(case.bounds) if case.bounds else None
    sums = [2 * math.pi * running_sum(x, bounds, None) for x in leaves.values()]
    angle, *of_values = (x.detach() if by_engine else x for x in sums)
    for name in ("q", "k"):
        given[name] = rotate(given[name].to(wide), angle).to(dtype)
    for x in of_values:
        given["v"] = rotate(given["v"], x)
    if dtype == torch.float64:  # in PyTorch heads share no rows
        for name in ("q", "k"):
            given[name] = given[name].repeat_interleave(2 // case.groups, 2)
    how: dict[str, Any] = leaves if by_engine else {}
    if by_engine and dtype == torch.float64:
        how = how | {"turned": leaves["turned"].repeat_interleave(2 // case.groups, 2)}
    o, final = diagonal(
        **given, **how, scale=0.3, output_final_state=case.states, cu_seqlens=bounds, strict=case.strict
    )  # fmt: skip
    for x in of_values:
        o = rotate(o, -x)
    loss = (o.double() * weights[0]).sum()
    if final is not None:
        if by_engine:
            ends = last(sums[0], None, bounds, None)
            final = turn_rows(final, ends.repeat_interleave(2 // case.groups, 1))
        for x in of_values:
            final = rotate(final, -last(x, None, bounds, None).unsqueeze(-2))
        loss = loss + (final.double() * weights[1]).sum()
    found = torch.autograd.grad(loss, [*leaves.values()])
    return torch.cat([x.double().flatten(2) for x in found], -1)


def weights_of(case: Case, inputs: dict[str, Tensor], seed: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed + 1)
    of_o = torch.randn(1, case.T, *inputs["v"].shape[2:], generator=made, dtype=torch.float64)
    shape = max(1, len(case.bounds) - 1), 2, case.K, case.V
    return [of_o, torch.randn(shape, generator=made, dtype=torch.float64)]


def error(sp: Any, kind: str, seed: int) -> float:
    """Of kernels with two segments."""
    case = CASES[kind]
    inputs = draw(case, seed)
    weights = weights_of(case, inputs, seed)
    want = gradients(case, inputs, weights, torch.float64, by_engine=False)
    with poisoned(2, 2):
        found = gradients(case, inputs, weights, case.dtype, by_engine=True)
    return relative_error(found, want)


@pytest.mark.parametrize("kind", CASES)
def test_against_the_rotation(kind: str, seed: int) -> None:
    (found,) = run_ranks(error, 1, kind, seed, env=INTERPRETED)
    assert found < 2e-5, found


@pytest.mark.parametrize("kind", CASES)
def test_in_pytorch(kind: str, seed: int) -> None:
    case = CASES[kind]._replace(T=max(CASES[kind].T, 150))
    inputs = draw(case, seed)
    weights = weights_of(case, inputs, seed)
    found, want = (gradients(case, inputs, weights, torch.float64, by_engine=x) for x in (True, False))
    assert relative_error(found, want) < 1e-10


def test_angles_of_too_many_columns_are_refused(seed: int) -> None:
    inputs = draw(CASES["columns"]._replace(values=4), seed)
    with pytest.raises(ValueError, match="turned_values: expected angles of at most 3 pairs of v's 6 channels; got 4"):
        diagonal(**inputs, scale=1.0)


def errors_of_sums(sp: Any, dtype: torch.dtype, decay: float, seed: int) -> list[tuple[float, float]]:
    """In half precision, in one segment, of what every turn gets and of its sum: how far each is off float64 with the
    same rows, and how large that is. decay: of log gates, -.16 on average for 1. Tokens do not read what they write
    themselves, as in Mamba-3."""
    T = 192 if decay > 1 else 1536 if dtype == BF16 else 256  # chunks of float16 have 16 tokens, those of bfloat16 64
    case = Case(T=T, K=16, V=16, S=8, states=False, strict=True)
    inputs = draw(case, seed)
    inputs["g"] *= decay
    inputs["v"] = inputs["v"].to(dtype).double()
    weights = weights_of(case, inputs, seed)
    weights[0] = weights[0].to(dtype).double()
    turned = inputs["turned"]
    angle = 2 * math.pi * turned.float().cumsum(1)
    rows = {x: rotate(inputs[x].float(), angle).to(dtype).double() for x in ("q", "k")}
    with poisoned(1, 2):
        got = gradients(case, inputs, weights, dtype, by_engine=True)
    want = gradients(case, inputs | rows | {"turned": 0 * turned}, weights, torch.float64, by_engine=False)
    return [(float((a - b).norm()), float(b.norm())) for a, b in ((got, want), (got.sum(1), want.sum(1)))]


def of_draws(dtype: torch.dtype, decay: float, seed: int, draws: int) -> Tensor:
    """Relative errors of several draws together: what is summed up may nearly vanish in one."""
    found = [run_ranks(errors_of_sums, 1, dtype, decay, seed + n, env=INTERPRETED)[0] for n in range(draws)]
    off, size = torch.tensor(found).square().sum(0).sqrt().unbind(1)
    return off / size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_over_many_chunks(dtype: torch.dtype, seed: int) -> None:
    """In bfloat16 .004 to .005 (six draws). Where states enter products in 8 bits, or a chunk does not read what it
    writes, sums are off by .05 to .08."""
    found = of_draws(dtype, 0.5, seed, 2)
    assert found.max() < (8e-3 if dtype == BF16 else 2e-3), found


def apart_from_states(sp: Any, K: int, seed: int) -> float:
    """What the first token's gradient is off what its first state tells, <S, J dS>."""
    case = Case(T=150, K=K, V=32, S=K // 2, groups=2)
    given = draw(case, seed)
    leaves = {x: given[x].to(torch.float32 if x in ("g", "turned", "initial_state") else BF16) for x in given}
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    of_o, of_final = weights_of(case, given, seed)
    with poisoned(2, 2):
        o, final = diagonal(**leaves, scale=0.3, output_final_state=True)
        loss = (o.float() * of_o).sum() + (final * of_final).sum()
        grads = dict(zip(leaves, torch.autograd.grad(loss, [*leaves.values()]), strict=True))
    S, dS = (x.double().transpose(-1, -2) for x in (leaves["initial_state"].detach(), grads["initial_state"]))
    quarter = rotate(dS, torch.full((*dS.shape[:-1], case.S), math.pi / 2, dtype=dS.dtype))
    want = (S * quarter).sum(2).unflatten(-1, (-1, 2)).sum(-1)
    return relative_error(grads["turned"][:, 0].double(), 2 * math.pi * want)


@pytest.mark.parametrize("K", [16, 256])
def test_shards_end_as_their_states_tell(K: int, seed: int) -> None:
    """In bfloat16, to float32's digits: one rank's last state is another's first, and what lies before a token must not
    depend on which rank has it. With 256 channels walks of dq and dk have some of them each."""
    (found,) = run_ranks(apart_from_states, 1, K, seed, env=INTERPRETED)
    assert found < 1e-4, found  # 2e-5 at most of ten seeds; 1e-3 and more where a state is rounded


@pytest.mark.parametrize("decay", [5.0, *slow(20.0), 50.0])
def test_where_states_decay_at_once(decay: float, seed: int) -> None:
    """Mean log gates of -.8, -3.2 and -8 a token, by 24 draws together: sums are off by .004."""
    found = of_draws(BF16, decay, seed, 24)
    assert found.max() < 8e-3, found
