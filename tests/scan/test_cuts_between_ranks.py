"""What passes a rank in the middle: the decays of all its segments, and nothing where a document starts in one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexsp.scan.exchange import exchange
from flexsp.scan.transitions import Transition
from flexsp.testing.ranks import run_ranks
from flexsp.testing.scans import scan_oracle
from tests import variants
from tests.harness.functions import assert_ranks
from tests.harness.interpreted import INTERPRETED

SEGMENTS = 5


def _through_the_middle(sp: Any, at: int, cuts: bool, seed: int) -> float:
    """Error of the states of three ranks; of the middle one's segments one alone cuts, or decays."""
    from flexsp.scan.propagate import propagate

    made = torch.Generator().manual_seed(seed)
    counts, begin = (1, SEGMENTS, 1), (0, 1, 1 + SEGMENTS)[sp.rank]
    n = sum(counts)
    F, initial = torch.randn(1, n, 1, 2, 3, generator=made), torch.randn(1, 1, 2, 3, generator=made)
    log_a, cut = torch.zeros(1, n, 1), torch.zeros(1, n, dtype=torch.int32)
    if cuts:
        cut[0, 1 + at] = 1
    else:
        log_a[0, 1 + at] = -1.0
    part, worst = slice(begin, begin + counts[sp.rank]), 0.0
    for reverse in (False, True):
        want = scan_oracle(F, log_a, cut, initial, reverse)[:, begin : begin + counts[sp.rank] + 1]
        states = torch.zeros(want.shape)
        (states[:, :-1] if reverse else states[:, 1:]).copy_(F[:, part])
        if sp.rank == (2 if reverse else 0):
            states[:, -1 if reverse else 0] = initial
        propagate(states, Transition("scalar", log_a[:, part], cut[:, part] if cuts else None), sp, reverse=reverse)
        worst = max(worst, (states.double() - want).abs().max().item())
    return worst


@pytest.mark.parametrize("transport", ["posix", "process_group"])
@pytest.mark.parametrize("cuts", [False, True], ids=["decay", "cut"])
def test_every_segment_of_a_rank_in_the_middle_counts(cuts: bool, transport: str, seed: int) -> None:
    heap = 1 if transport == "posix" else None
    for at in range(SEGMENTS):
        errors = run_ranks(_through_the_middle, 3, at, cuts, seed, transport=transport, heap_mib=heap, env=INTERPRETED)
        assert max(errors) < 1e-5, (at, errors)


def _gradient_of_a_decay(sp: Any, seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    F = torch.randn(3, 2, 1, 2, 3, generator=made, dtype=torch.float64)[sp.rank]
    log_a = torch.full((2, 1), -0.5, dtype=torch.float64, requires_grad=True)
    cut = torch.tensor([sp.rank == 1, False])
    exchange(F, Transition.of(F, log_a, cut), sp).square().sum().backward()
    assert log_a.grad is not None
    return log_a.grad


def test_the_decay_of_a_rank_that_cuts_has_no_gradient(seed: int) -> None:
    grads = run_ranks(_gradient_of_a_decay, 3, seed)
    assert grads[1][0].item() == 0.0
    assert grads[1][1].item() != 0.0


@pytest.mark.parametrize("name", ["linear", "gla", "deltanet", "hgrn"])
def test_a_document_that_starts_in_the_middle_rank_and_ends_behind_it(name: str, seed: int) -> None:
    assert_ranks(name, [11, 4, 25], [0, 0, 7, 11, 30, 30, 40], seed)


def _gradients_of_parameters(sp: Any, name: str, lengths: list[int]) -> list[float | None]:
    sp.set_lengths(lengths)
    tokens, params = variants.draw(name, 1, sum(lengths), 0)
    leaves = [x.clone().requires_grad_() for x in params.values()]
    variant = variants.load(name).make(variants.H, variants.K, variants.V)
    given = {key: sp.shard(x).clone().requires_grad_() for key, x in tokens.items()}
    o, _ = variant(**given, **dict(zip(params, leaves, strict=True)), sp=sp)
    found = torch.autograd.grad(o.square().sum(), leaves)
    return [float(x.norm()) for x in found]


@pytest.mark.parametrize("name", ["retnet", "gla_own_bias"])
def test_parameters_have_gradients_on_a_rank_without_tokens(name: str) -> None:
    """FSDP reduces what every rank has: a parameter without a gradient on one of them would end the job."""
    found = run_ranks(_gradients_of_parameters, 3, name, [9, 0, 7])
    assert all(norms == [0.0] * len(norms) and norms for norms in found[1:2])
    assert all(norm > 0 for norms in (found[0], found[2]) for norm in norms)
