"""Ranks of several hosts: what arrives, which messages cross between hosts, ops, and what ranks say when one fails."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

from flexsp.comm import process_group
from flexsp.comm.group import SequenceParallel
from flexsp.comm.process_group import Message
from flexsp.exceptions import FlexspError, PeerMismatch, PeerTimeout
from flexsp.launch import bootstrap
from flexsp.launch.bootstrap import _hosts, init_sequence_parallel
from flexsp.scan import hierarchical
from flexsp.scan.relay import Relay
from flexsp.scan.schedules import SCHEDULES, incoming_state
from flexsp.scan.transitions import KINDS, Transition
from flexsp.testing import RankFailure, run_ranks
from flexsp.testing.cases import random_documents, random_lengths
from tests.harness.lockstep import incoming_states
from tests.harness.ops import ALL
from tests.harness.over_ranks import Plan, check_against_one_rank, run_plans
from tests.marks import slow

Given = list[tuple[torch.Tensor, Transition]]
HOSTS = [(2, 2), (4, 4), (2, 2, 2), (3, 2), (2, 3), (1, 3), (3,), (1, 1, 1, 1, 1), (3, 2, 4, 2, 3, 2, 2), (2,) * 9]
SHAPES = [(2, 3, 4, 5), (1, 1, 2, 3), (1, 5, 8, 6), (1, 4, 3), (2, 3), (2, 1, 2, 2, 3)]
COMPOSE = [name for name, kind in KINDS.items() if kind.adjoint is not None]


def shapes_of(kind: str) -> list[tuple[int, ...]]:
    return [
        shape
        for shape in SHAPES
        if len(shape) == 4 or (kind != "dense" and len(shape) > (2 if kind == "vector" else 1))
    ]


def draw(kind: str, shape: tuple[int, ...], ranks: int) -> Given:
    """What every rank does, in float64; of some ranks documents start in it."""
    found = []
    for r in range(ranks):
        F, axes = torch.randn(shape, dtype=torch.float64), KINDS[kind].axes
        a = None if axes is None else torch.randn(shape if axes == "KV" else (*shape[:2], *shape[2:3] * len(axes)))
        if a is not None:
            a = (-a.abs() if KINDS[kind].logarithm else a).double()
        cut = torch.rand(shape[0]) < 0.3 if r % 3 == 1 else None
        found.append((F, Transition.of(F, a, cut, kind)))
    return found


def fold(given: Given, reverse: bool) -> list[torch.Tensor]:
    """The state that enters each rank, one rank after another."""
    state, entering = torch.full_like(given[0][0], given[0][1].neutral), []
    for F, through in reversed(given) if reverse else given:
        entering.append(state)
        state = (through.adjoint() if reverse else through).apply(state, F)
    return entering[::-1] if reverse else entering


def groups(hosts: tuple[int, ...], schedule: str = "hierarchical") -> list[SequenceParallel]:
    return [SequenceParallel(rank=r, world_size=sum(hosts), hosts=hosts, schedule=schedule) for r in range(sum(hosts))]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchical, "PIECE_BYTES", 100)


def check(kind: str, shape: tuple[int, ...], hosts: tuple[int, ...], schedule: str = "hierarchical") -> None:
    for reverse in (False, True) if KINDS[kind].adjoint == kind else (False,):
        given = draw(kind, shape, sum(hosts))
        got, _ = incoming_states(groups(hosts, schedule), given, reverse)
        torch.testing.assert_close(got, fold(given, reverse), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", COMPOSE)
def test_what_arrives(kind: str, small_pieces: None) -> None:
    """Over hosts of all sizes, in pieces, in both directions, in steps that wait for all of their messages."""
    shapes = shapes_of(kind)
    for i, hosts in enumerate(HOSTS):
        check(kind, shapes[i % len(shapes)], hosts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMPOSE)
@pytest.mark.parametrize("nbytes", [1, 100, 1 << 19])
def test_what_arrives_in_all_shapes(kind: str, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchical, "PIECE_BYTES", nbytes)
    for shape in shapes_of(kind):
        for hosts in HOSTS:
            check(kind, shape, hosts)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_one_step_at_a_time(schedule: str) -> None:
    for kind in COMPOSE:
        check(kind, (1, 2, 4, 6), (2, 2), schedule)


def test_what_is_not_finite_stays_before_a_cut(small_pieces: None) -> None:
    """NaN of the first rank ends at the document that starts on the second, whatever the third multiplies by."""
    for hosts in HOSTS:
        given = draw("elementwise", (1, 2, 4, 6), sum(hosts))
        cut = torch.ones(1)
        given[0][0].fill_(torch.nan)
        given[1] = (given[1][0], Transition("elementwise", given[1][1].a, cut))
        if sum(hosts) > 3:
            given[2][1].a[..., 0, 0] = torch.inf
        got, _ = incoming_states(groups(hosts), given)
        torch.testing.assert_close(got, fold(given, False), rtol=1e-11, atol=1e-11, equal_nan=True)
        assert not any(state.isnan().any() for state in got[2:])


def test_shifts_that_are_not_finite_stay_before_a_cut(small_pieces: None) -> None:
    for hosts in HOSTS[:5]:
        given = draw("max-plus", (1, 2, 4, 6), sum(hosts))
        given[0][0].fill_(torch.inf)
        given[1] = (given[1][0], Transition("max-plus", given[1][1].a, torch.ones(1)))
        given[2][1].a[..., 0, 0] = torch.inf
        got, _ = incoming_states(groups(hosts), given)
        torch.testing.assert_close(got, fold(given, False), rtol=1e-11, atol=1e-11, equal_nan=True)


# Messages -----------------------------------------------------------------------------------------------------------


Placed = tuple[int, int]  # host, place on it


def between(hosts: tuple[int, ...], sent: list[tuple[int, Message]]) -> list[tuple[Placed, Placed, int]]:
    """(from, to, bytes) of messages from host to host."""
    place = [(host, i) for host, ranks in enumerate(hosts) for i in range(ranks)]
    moved = [(place[r], place[m.peer], m.buffer.numel() * m.buffer.element_size()) for r, m in sent]
    return [row for row in moved if row[0][0] != row[1][0]]


@pytest.mark.parametrize("hosts", [(4,) * 5, (3, 2, 2, 4), (8, 8)])
def test_every_network_card_carries_its_part(hosts: tuple[int, ...]) -> None:
    """From host to host only between ranks of one place, each with its share, and from a host once a step."""
    shares = min(hosts)
    given = draw("scalar", (1, 8, 16, 32), sum(hosts))
    _, sent = incoming_states(groups(hosts), given)
    crossing, size = between(hosts, sent), 8 * 8 * 16 * 32
    assert {source[1] for source, _, _ in crossing} == {*range(shares)}
    for source, target, nbytes in crossing:
        assert source[1] == target[1] and target[0] - source[0] in (1, 2, 4, 8)
        assert nbytes <= (size + size // 32) * 1.1 / shares
    steps = (len(hosts) - 1).bit_length()
    for host in range(len(hosts)):
        for at in range(shares):
            assert sum(source == (host, at) for source, _, _ in crossing) <= steps
    from_first = [nbytes for source, _, nbytes in crossing if source[0] == 0]
    assert sum(from_first) == size * len([d for d in (1, 2, 4, 8) if d < len(hosts)])  # states alone, without A
    inside = len(sent) - len(crossing)
    assert inside == sum(2 * n * shares - 2 * shares for n in hosts) - (shares - 1)  # none to the first rank


def test_small_states_are_in_one_piece_and_large_ones_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for nbytes in (1 << 19, 4096, 1):
        monkeypatch.setattr(hierarchical, "PIECE_BYTES", nbytes)
        _, sent = incoming_states(groups((2, 2)), draw("none", (1, 8, 16, 32), 4))
        counts.append(len(between((2, 2), sent)))
    assert counts == [2, 2 * 4, 2 * hierarchical.MOST_PIECES]


def test_pieces_are_under_way_together(small_pieces: None) -> None:
    """The last piece is gathered after the first one is between hosts: each is one step behind the one before."""
    kinds = []
    _, sent = incoming_states(groups((2, 2)), draw("none", (1, 8, 16, 32), 4))
    for r, message in sent:
        if r == 1:
            kinds.append("host" if message.peer > 1 else "gather" if message.buffer.shape[-1] == 33 else "fan out")
    assert kinds[:2] == ["gather", "host"] and kinds.index("host") < len(kinds) - 1 - kinds[::-1].index("gather")


def test_no_values_are_read() -> None:
    """As `flexsp simulate` needs it: tensors may have a shape and no numbers."""
    for kind in COMPOSE:
        given = draw(kind, (1, 8, 16, 16), 6)
        bare = [(F.to("meta"), Transition(kind, None if t.a is None else t.a.to("meta"))) for F, t in given]
        for schedule in SCHEDULES:
            got, _ = incoming_states(groups((3, 3), schedule), bare)
            assert all(state.is_meta and state.shape == F.shape for state, (F, _) in zip(got, given, strict=True))


# Processes ----------------------------------------------------------------------------------------------------------


def _incoming(sp: SequenceParallel, hosts: tuple[int, ...], given: Given, reverse: bool) -> torch.Tensor:
    sp.hosts = hosts
    return incoming_state(*given[sp.rank], sp, reverse)


@pytest.mark.parametrize("hosts", [(2, 2), *slow(((3, 2),), ((2, 2, 2),), ((4, 4),))])
def test_processes(hosts: tuple[int, ...]) -> None:
    for kind in ("vector", "dense"):
        for reverse in (False, True):
            given = draw(kind, (1, 4, 6, 8), sum(hosts))
            got = run_ranks(_incoming, sum(hosts), hosts, given, reverse, schedule="hierarchical")
            torch.testing.assert_close(got, fold(given, reverse), rtol=1e-11, atol=1e-11)


def _ops(sp: SequenceParallel, hosts: tuple[int, ...], name: str, plans: list[Plan]) -> Any:
    sp.hosts = hosts
    return run_plans(sp, name, plans)


def plans_of(ranks: int) -> list[Plan]:
    """Uneven shards, empty ones, and documents."""
    seeds = iter(random.sample(range(2**31), 8))
    generator = torch.Generator().manual_seed(next(seeds))
    total = random.choice([150, 40])
    bounds = tuple(random_documents(total, 4, generator).tolist())
    lengths = [tuple(random_lengths(total, ranks, generator)) for _ in range(2)]
    empty = tuple(40 * (r % 2) for r in range(ranks))
    return [
        Plan(next(seeds), lengths[0]), Plan(next(seeds), lengths[1], bounds), Plan(next(seeds), empty),
        Plan(next(seeds), empty[::-1], (0, 15, sum(empty) - 1, sum(empty)), announce=True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "hosts"),
    [("gated_delta_rule", (2, 2)), ("mlstm", (2, 2)),
     *slow(*((name, (2, 2)) for name in ("gla", "simple_gla", "kda", "selective_scan", "hgrn", "rwkv7")),
           ("gated_delta_rule", (3, 2)), ("mlstm", (2, 2, 2)), ("gla", (1, 1, 2)))],
)  # fmt: skip
def test_ops(name: str, hosts: tuple[int, ...]) -> None:
    """Outputs, final states and all gradients are those of one rank."""
    answers = run_ranks(_ops, sum(hosts), hosts, name, plans_of(sum(hosts)), schedule="hierarchical")
    for i, plan in enumerate(answers[0][0]):
        check_against_one_rank(ALL[name], plan, [results[i] for _, results in answers])


# Failures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", range(6))
def test_a_wrong_stamp_makes_nan_behind_it(odd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where a rank among three hosts has another call: all ranks from its host on hear of it."""
    monkeypatch.setattr(process_group, "carries_stamp", lambda data: True)
    hosts = (2, 2, 2)
    given, sps = draw("none", (1, 4, 4, 4), 6), groups(hosts)
    sps[odd].abandoned = 1
    got, _ = incoming_states(sps, given)
    for sp, state in zip(sps, got, strict=True):
        if sp.rank // 2 < odd // 2:
            sp.check()
            assert state.isfinite().all()
        else:
            assert state.isnan().all()
            with pytest.raises(PeerMismatch):
                sp.check()


def _meets(sp: SequenceParallel, how: str) -> Any:
    """The error that ranks meet where rank 2 does something else."""
    sp.hosts, odd = (2, 2), sp.rank == 2
    F = torch.ones(1, 2, 3, 4 + (how == "shape" and odd))
    try:
        for _ in range(2):
            if how == "silent" and odd:
                return None
            if how == "dies" and odd:
                os._exit(1)
            incoming_state(F, Transition("none"), sp, reverse=how == "direction" and odd)
        sp.check()
    except FlexspError as error:
        if how == "dies":
            raise RuntimeError(f"told of the end of rank {error.peer}") from error  # type: ignore[attr-defined]
        return error
    return None


@pytest.mark.slow
@pytest.mark.parametrize("how", ["shape", "direction"])
def test_ranks_in_different_calls(how: str) -> None:
    answers = run_ranks(_meets, 4, how, schedule="hierarchical", sp_timeout_s=100.0, own_processes=True)
    assert all(isinstance(error, PeerMismatch) for error in answers), answers
    assert [error.peer for error in answers] == [2, 2, 0, 2]


def test_a_silent_rank() -> None:
    answers = run_ranks(_meets, 4, "silent", schedule="hierarchical", sp_timeout_s=3.0, own_processes=True)
    assert answers[2] is None
    for rank in (0, 1, 3):
        assert isinstance(answers[rank], PeerTimeout), answers
    assert (answers[1].peer, answers[3].peer) == (2, 2)


@pytest.mark.slow
def test_a_rank_that_dies() -> None:
    with pytest.raises(RankFailure, match="rank 2 failed:\nthe process ended") as caught:
        run_ranks(_meets, 4, "dies", schedule="hierarchical", sp_timeout_s=60.0, own_processes=True)
    assert "told of the end of rank 2" in str(caught.value)


# Which rank stands where --------------------------------------------------------------------------------------------


def test_hosts_of_ranks() -> None:
    assert _hosts(["a", "a", "b", "b"], None) == (2, 2)
    assert _hosts(["a", "b", "a", "a"], None) == (1, 1, 2)  # its ranks are not neighbours in the sequence
    assert _hosts(["a"] * 5, 3) == (3, 2) and _hosts(["a", "b"], 8) == (2,)
    assert SequenceParallel(world_size=3).hosts == (3,)


@pytest.mark.parametrize("word", ["0", "-1", "two", "2.5"])
def test_ranks_per_host_that_are_refused(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSP_RANKS_PER_HOST", word)
    with pytest.raises(ValueError, match=f"FLEXSP_RANKS_PER_HOST: expected an integer > 0 or nothing, got '{word}'"):
        init_sequence_parallel()


def _opened(sp: SequenceParallel, words: list[str]) -> Any:
    """Hosts as they are found here, and hosts and schedule as the variable says, or the error."""
    os.environ["FLEXSP_RANKS_PER_HOST"] = words[sp.rank]
    quicker, bootstrap.quicker = bootstrap.quicker, lambda *given: "hierarchical" if given == ((3, 1), False) else ""
    try:
        made = init_sequence_parallel(schedule="auto")
    except PeerMismatch as error:
        return sp.hosts, error
    finally:
        del os.environ["FLEXSP_RANKS_PER_HOST"]
        bootstrap.quicker = quicker
    given = draw("scalar", (1, 2, 3, 4), 4)
    made.gather(incoming_state(*given[sp.rank], made))
    made.close()
    return sp.hosts, made.hosts, made.schedule


def test_hosts_are_found_or_given() -> None:
    assert run_ranks(_opened, 4, ["3"] * 4, whole_world=True) == [((4,), (3, 1), "hierarchical")] * 4
    answers = run_ranks(_opened, 4, ["2", "2", "2", ""], whole_world=True)
    assert all(isinstance(error, PeerMismatch) for _, error in answers)
    assert [error.peer for _, error in answers] == [3, 3, 3, 0]


def test_auto_is_the_chain_on_one_rank() -> None:
    assert init_sequence_parallel(schedule="auto").schedule == "chain"


def test_a_recurrence_that_does_not_compose_is_refused() -> None:
    sp = SequenceParallel(world_size=4, hosts=(2, 2), schedule="hierarchical")
    with pytest.raises(ValueError, match="schedule: expected chain or serial for a variant .* got 'hierarchical'"):
        Relay(sp, sp.anchor)
    with pytest.raises(ValueError, match="transition: expected one that composes, got 'sequential'"):
        incoming_state(torch.zeros(1, 1, 2), Transition("sequential"), sp)
