"""The (A, F) algebra and the rank scan without autograd: every schedule, both directions, against a plain fold."""

from __future__ import annotations

import pytest
import torch

from flexsp.comm.group import SequenceParallel
from flexsp.scan.exchange import exchange
from flexsp.scan.schedules import SCHEDULES, incoming_state
from flexsp.scan.transitions import Transition
from flexsp.testing import run_ranks
from tests.harness.schedules import KINDS, fold, random_elements


def _incoming(sp: SequenceParallel, elements: list[tuple], reverse: bool) -> torch.Tensor:
    F, log_a, cut = elements[sp.rank]
    return incoming_state(F, Transition.of(F, log_a, cut), sp, reverse)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_incoming_state(ranks: int, schedule: str) -> None:
    for kind in KINDS:
        for reverse in (False, True):
            elements = random_elements(kind, ranks)
            got = run_ranks(_incoming, ranks, elements, reverse, schedule=schedule)
            for r, want in enumerate(fold(elements, reverse)):
                torch.testing.assert_close(got[r], want, rtol=1e-14, atol=1e-14, msg=lambda m, r=r: f"rank {r}: {m}")


def test_pieces_do_not_have_to_divide_the_rows() -> None:
    elements = random_elements("vector", 3, B=1, H=1, K=11, V=3)
    got = run_ranks(_incoming, 3, elements, False, schedule="pipelined")
    torch.testing.assert_close(got, fold(elements), rtol=1e-14, atol=1e-14)


def _incoming_strided(sp: SequenceParallel, elements: list[tuple]) -> torch.Tensor:
    F, log_a, cut = elements[sp.rank]
    return incoming_state(F.transpose(0, 1).contiguous().transpose(0, 1), Transition.of(F, log_a, cut), sp)


def test_strided_input() -> None:
    elements = random_elements("scalar", 2)
    torch.testing.assert_close(run_ranks(_incoming_strided, 2, elements), fold(elements), rtol=1e-14, atol=1e-14)


def _linear(sp: SequenceParallel, F: torch.Tensor, A: torch.Tensor, kind: str, reverse: bool) -> torch.Tensor:
    return incoming_state(F[sp.rank], Transition.of(F[sp.rank], A[sp.rank], kind=kind), sp, reverse)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_transitions_that_are_matrices_or_come_as_numbers(schedule: str) -> None:
    """Over every schedule what one process gives, in both directions; states may be vectors where A is elementwise."""
    ranks = 3
    for shape, dense in (((2, 1, 4, 5), True), ((1, 2, 3, 17), True), ((2, 1, 4, 5), False), ((1, 2, 4), False)):
        F = torch.randn(ranks, *shape, dtype=torch.float64)
        A = torch.randn(ranks, *shape[:-1], shape[-2], dtype=torch.float64) if dense else torch.randn_like(F)
        A[1, 0] = 0.0  # a document starts there
        for reverse in (False, True):
            want, state = [], torch.zeros_like(F[0])
            for r in range(ranks - 1, -1, -1) if reverse else range(ranks):
                want.append(state)
                a = A[r].mT if dense and reverse else A[r]
                state = (a @ state if dense else a * state) + F[r]
            kind = "dense" if dense else "elementwise"
            got = run_ranks(_linear, ranks, F, A, kind, reverse, schedule=schedule)
            torch.testing.assert_close(got, want[::-1] if reverse else want, rtol=1e-13, atol=1e-13)


def test_nothing_passes_a_cut() -> None:
    transition = Transition.of(torch.ones(1, 1, 1, 1), torch.zeros(1, 1), torch.tensor([1]))
    assert transition.apply(torch.ones(1, 1, 1, 1)).item() == 0.0


def _under_autocast(sp: SequenceParallel, F: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return _linear(sp, F, A, "dense", False)


@pytest.mark.parametrize("schedule", ["chain", "all_gather"])
def test_autocast_does_not_round_states(schedule: str) -> None:
    F, A = torch.randn(3, 1, 1, 4, 4), torch.randn(3, 1, 1, 4, 4)
    got = run_ranks(_under_autocast, 3, F, A, schedule=schedule)[2]
    torch.testing.assert_close(got, A[1] @ F[0] + F[1])


@pytest.mark.parametrize("kind", [*KINDS, "dense"])
def test_transpose_is_the_adjoint(kind: str) -> None:
    F, log_a, cut = random_elements("none" if kind == "dense" else kind, 2)[1]
    transition, x, y = Transition.of(F, log_a, cut), torch.randn_like(F), torch.randn_like(F)
    if kind == "dense":
        transition = Transition.of(F, torch.randn(*F.shape[:3], F.shape[2], dtype=F.dtype), kind="dense")
    torch.testing.assert_close((transition.apply(x) * y).sum(), (x * transition.adjoint().apply(y)).sum())


def test_bad_shapes() -> None:
    F = torch.zeros(2, 3, 4, 5)
    for a, cut, kind, words in [
        (torch.zeros(3, 2), None, None, r"a: expected shape \(2, 3\) for the kind 'scalar', got \(3, 2\)"),
        (torch.zeros(2, 3, 5), None, None, r"a: expected shape \(2, 3, 4\) for the kind 'vector', got \(2, 3, 5\)"),
        (None, torch.zeros(3), None, r"cut: expected shape \(2,\), got \(3,\)"),
        (torch.zeros(2, 3, 5, 5), None, "dense", r"a: expected shape \(2, 3, 4, 4\) .*, got \(2, 3, 5, 5\)"),
        (torch.zeros(2, 3, 4), None, "elementwise", r"a: expected shape \(2, 3, 4, 5\) .*, got \(2, 3, 4\)"),
        (None, None, "max-plus", r"a: expected shape \(2, 3, 4, 5\) .*, got None"),
        (F, None, "sequential", "a: expected shape None"),
        (None, None, "affine", "kind: expected one of none, .*, got 'affine'"),
    ]:
        with pytest.raises(ValueError, match=words):
            Transition.of(F, a, cut, kind)
    with pytest.raises(ValueError, match=r"state: expected \[B, H, \*state\], got shape \(5,\)"):
        Transition.of(torch.zeros(5))


@pytest.mark.parametrize("reverse", [False, True])
def test_what_no_schedule_runs(reverse: bool) -> None:
    """A map of unknown kind is no state that is kept, and a maximum has no adjoint."""
    two = SequenceParallel(world_size=2)
    for kind in ("sequential", *(["max-plus"] if reverse else [])):
        with pytest.raises(ValueError, match=f"got .*'{kind}'"):
            incoming_state(torch.zeros(1, 1, 2), Transition(kind, torch.zeros(1, 1, 2)), two, reverse)


def _maxima(sp: SequenceParallel, given: list[tuple], anchored: bool) -> torch.Tensor:
    F, a, cut = given[sp.rank]
    through = Transition.of(F, a, cut, "max-plus")
    return exchange(F.requires_grad_(), through, sp) if anchored else incoming_state(F, through, sp)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_maxima(schedule: str) -> None:
    """Of states of any shape, over cuts and NaN before them; no maximum is 0 where there is none."""
    for shape in ((2, 1, 4, 5), (2, 3), (2, 1, 17)):
        given = [(torch.randn(shape) * 9, torch.randn(shape) - 0.5, None) for _ in range(4)]
        given[1] = (*given[1][:2], torch.tensor([1, 0]))
        given[0][0][0].fill_(torch.nan)
        want, state = [], torch.full(shape, -torch.inf)
        for F, a, cut in given:
            want.append(state)
            passed = (
                a + state
                if cut is None
                else (a + state).masked_fill(cut.bool().view(-1, *[1] * (a.dim() - 1)), -torch.inf)
            )
            state = torch.maximum(passed, F)
        for anchored in (False, True):
            got = run_ranks(_maxima, 4, given, anchored, schedule=schedule)
            rounding = 1e-5 if schedule == "hierarchical" else 0  # it adds shifts up
            torch.testing.assert_close(got, want, rtol=rounding, atol=rounding, equal_nan=True)
            assert not any(x.requires_grad for x in got)
