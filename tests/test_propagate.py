"""The fused propagate kernel under the interpreter: one rank, and real processes over the POSIX heap."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from flexsp.testing.ranks import run_ranks

ENV = {"TRITON_INTERPRET": "1", "FLEXSP_BACKEND": "triton"}
KINDS = ("none", "scalar", "vector")


def make_problem(seed: int, B: int, H: int, K: int, V: int, nsegs: list[int], kind: str, cuts: bool, reverse: bool):
    """All ranks' segments (F [B, n, H, K, V], log_a, cut) and the state that enters at the open end."""
    gen = torch.Generator().manual_seed(seed)
    n = sum(nsegs)
    F = torch.randn(B, n, H, K, V, generator=gen)
    shape = (B, n, H) if kind == "scalar" else (B, n, H, K)
    log_a = None if kind == "none" else -3 * torch.rand(shape, generator=gen)
    cut = (torch.rand(B, n, generator=gen) < 0.3).int() if cuts else None
    initial = torch.randn(B, H, K, V, generator=gen)
    return F, log_a, cut, initial


def oracle(F, log_a, cut, initial, reverse: bool) -> torch.Tensor:
    """Float64 boundary states [B, n + 1, H, K, V] of the whole sequence."""
    B, n, H, K, V = F.shape
    out = torch.empty(B, n + 1, H, K, V, dtype=torch.float64)
    S = out[:, n if reverse else 0] = initial.double()
    for s in range(n - 1, -1, -1) if reverse else range(n):
        if log_a is not None:
            a = log_a[:, s].double().exp()
            S = S * (a[..., None, None] if a.dim() == 2 else a[..., None])
        if cut is not None:
            S = torch.where((cut[:, s] != 0)[:, None, None, None], torch.zeros_like(S), S)
        S = S + F[:, s].double()
        out[:, s if reverse else s + 1] = S
    return out


def error_against_oracle(sp: Any, seed: int, call: dict[str, Any]) -> float:
    """Runs one call on this rank's part; largest error over its boundary states, inf for NaN."""
    from flexsp.scan.propagate import propagate

    rank, world = (0, 1) if sp is None else (sp.rank, sp.world_size)
    F, log_a, cut, initial = make_problem(seed, **call)
    reverse, nsegs = call["reverse"], call["nsegs"]
    want = oracle(F, log_a, cut, initial, reverse)
    begin, count = sum(nsegs[:rank]), nsegs[rank]
    part = slice(begin, begin + count)
    B, _, H, K, V = F.shape
    states = torch.full((B, count + 1, H, K, V), float("nan"))
    (states[:, :count] if reverse else states[:, 1:]).copy_(F[:, part])
    if rank == (world - 1 if reverse else 0):
        states[:, count if reverse else 0] = initial
    mine = [None if x is None else x[:, part] for x in (log_a, cut)]
    propagate(states, *mine, sp, reverse=reverse)
    error = (states.double() - want[:, begin : begin + count + 1]).abs().max().item()
    return error if error == error else float("inf")


def local_errors(sp: Any, calls: list[dict[str, Any]]) -> list[float]:
    return [error_against_oracle(None, seed, call) for seed, call in enumerate(calls)]


def chain_errors(sp: Any, calls: list[dict[str, Any]], slow_rank: int | None = None) -> list[float]:
    if sp.heap is not None:
        # What no rank has sent must never be used. Control words stay: they are what this test relies on.
        from flexsp.scan.propagate import CHAIN_TILE, _channel

        channel = _channel(sp)
        for edge in channel.edges:
            edge.home[: 2 * channel.max_tiles * CHAIN_TILE] = float("nan")
        torch.distributed.barrier(group=sp.cpu_group)
    out = []
    for seed, call in enumerate(calls):
        if sp.rank == slow_rank:
            time.sleep(0.3)
        out.append(error_against_oracle(sp, seed, call))
    sp.check()
    torch.distributed.barrier(group=sp.cpu_group)
    return out


def call(B: int, H: int, K: int, V: int, nsegs: list[int], kind: str, cuts: bool, reverse: bool) -> dict[str, Any]:
    return {"B": B, "H": H, "K": K, "V": V, "nsegs": nsegs, "kind": kind, "cuts": cuts, "reverse": reverse}


def random_calls(seed: int, world: int, count: int) -> list[dict[str, Any]]:
    gen = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=gen))

    return [
        call(
            draw(1, 2), draw(1, 2), draw(1, 33), draw(1, 40), [draw(0, 5) for _ in range(world)],
            KINDS[draw(0, 2)], bool(draw(0, 1)), bool(draw(0, 1)),
        )
        for _ in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_matches_float64(kind: str) -> None:
    shapes = [(1, 2, 32, 48, 5), (2, 1, 5, 7, 3), (1, 1, 1, 1, 4), (1, 1, 100, 60, 2), (1, 1, 3, 4, 0)]
    calls = [
        call(B, H, K, V, [n], kind, cuts, reverse)
        for (B, H, K, V, n) in shapes
        for cuts in (False, True)
        for reverse in (False, True)
    ]
    (errors,) = run_ranks(local_errors, 1, calls, env=ENV)
    assert max(errors) < 1e-5, errors


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_over_shared_memory_match_float64(world: int, seed: int) -> None:
    """Shapes, directions and decays interleaved; tiles with a small index see more epochs than the others."""
    calls = random_calls(seed, world, 10)
    errors = run_ranks(chain_errors, world, calls, transport="posix", heap_mib=4, env=ENV)
    assert max(map(max, errors)) < 1e-5, errors


def test_more_tiles_than_blocks() -> None:
    """Blocks stride over the tiles; the same slots serve many tiles."""
    calls = [call(1, 67, 2, 3, [1, 0], "scalar", False, reverse) for reverse in (False, True)]
    errors = run_ranks(chain_errors, 2, calls, transport="posix", heap_mib=8, env=ENV)
    assert max(map(max, errors)) < 1e-5, errors


@pytest.mark.parametrize("reverse", [False, True])
def test_slow_receiver_is_not_overrun(reverse: bool) -> None:
    calls = [call(1, 1, 8, 8, [1, 1], "scalar", False, reverse)] * 8
    errors = run_ranks(
        chain_errors, 2, calls, 0 if reverse else 1, transport="posix", heap_mib=1, env=ENV, fresh_sp=True
    )
    assert max(map(max, errors)) < 1e-5, errors


@pytest.mark.parametrize("schedule", ["chain", "serial", "pipelined", "all_gather"])
def test_process_group_schedules_use_the_same_kernel(schedule: str, seed: int) -> None:
    calls = random_calls(seed, 3, 3)
    errors = run_ranks(chain_errors, 3, calls, schedule=schedule, env=ENV)
    assert max(map(max, errors)) < 1e-5, errors


def test_schedule_wins_over_the_heap(seed: int) -> None:
    calls = random_calls(seed, 2, 2)
    errors = run_ranks(chain_errors, 2, calls, transport="posix", schedule="all_gather", heap_mib=1, env=ENV)
    assert max(map(max, errors)) < 1e-5, errors


def without_passing(sp: Any, one: dict[str, Any]) -> bool:
    from flexsp.scan.propagate import propagate

    states = torch.randn(1, 3, 1, 4, 4)
    want = oracle(states[:, 1:], None, None, states[:, 0], False)
    propagate(states, None, None, sp, passes=False)
    return torch.allclose(states.double(), want, atol=1e-5)


def test_passes_false_stays_on_the_rank() -> None:
    assert all(run_ranks(without_passing, 2, {}, transport="posix", heap_mib=1, env=ENV))


# Failures ------------------------------------------------------------------------------------------------------------


def absent_rank(sp: Any, absent: int, reverse: bool) -> tuple[float, Any, bool]:
    """(seconds until the error, the error, whether the states of the failed call were all NaN)."""
    from flexsp.exceptions import FlexspError
    from flexsp.scan.propagate import propagate

    if sp.rank == absent:
        return 0.0, None, True
    start = time.monotonic()
    for _ in range(4):
        states, cut = torch.zeros(1, 3, 3, 4, 4), torch.ones(1, 2, dtype=torch.int32)
        try:
            propagate(states, None, cut, sp, reverse=reverse)
            sp.check()
        except FlexspError as error:
            return time.monotonic() - start, error, bool(states.isnan().all())
    return time.monotonic() - start, None, False


@pytest.mark.parametrize(("absent", "reverse"), [(0, False), (1, False), (2, True)])
def test_absent_rank_is_reported_by_all_others(absent: int, reverse: bool) -> None:
    from flexsp.exceptions import PeerTimeout

    limit = 4.0
    answers = run_ranks(
        absent_rank, 3, absent, reverse, transport="posix", heap_mib=1, env=ENV, sp_timeout_s=limit, fresh_sp=True
    )
    for rank, (seconds, error, poisoned) in enumerate(answers):
        if rank == absent:
            continue
        assert isinstance(error, PeerTimeout), (rank, error)
        assert error.rank == rank
        assert error.peer is not None and error.peer != rank and 0 <= error.peer < 3
        assert error.tile == 0 and error.expected == 1
        assert error.seen == 0 or error.peer == absent  # a poison carries its epoch
        assert error.direction == ("the backward scan" if reverse else "the forward scan")
        assert poisoned
        assert seconds < 2 * limit + 20  # the rest is the interpreter on a busy machine
    neighbours = [r for r in (absent - 1, absent + 1) if 0 <= r < 3]
    assert all(answers[r][1].peer == absent for r in neighbours)


def other_shape(sp: Any) -> Any:
    from flexsp.exceptions import FlexspError
    from flexsp.scan.propagate import propagate

    for _ in range(4):
        try:
            propagate(torch.zeros(1, 2, 1, 4, 4 + sp.rank), None, None, sp)
            sp.check()
        except FlexspError as error:
            return error
    return None


def test_ranks_of_other_shapes_are_told() -> None:
    from flexsp.exceptions import PeerMismatch

    answers = run_ranks(
        other_shape, 2, transport="posix", heap_mib=1, env=ENV, sp_timeout_s=60.0, fresh_sp=True, timeout=100
    )
    assert [type(a) for a in answers] == [PeerMismatch] * 2, answers
    assert (answers[1].rank, answers[1].peer) == (1, 0)


def too_many_tiles(sp: Any) -> tuple[int, int]:
    from flexsp.exceptions import HeapTooSmall
    from flexsp.scan.propagate import propagate

    with pytest.raises(HeapTooSmall, match="needed") as caught:
        propagate(torch.zeros(1, 2, 20, 64, 64), None, None, sp)
    return caught.value.needed, caught.value.had


def test_heap_too_small_says_needed_and_had() -> None:
    for needed, had in run_ranks(too_many_tiles, 2, transport="posix", heap_mib=1, env=ENV):
        assert had == 1 << 20
        assert needed == 2 * 20 * (2 * 16384 + 128)


def bad_inputs(sp: Any) -> None:
    from flexsp.scan.propagate import propagate

    good = torch.zeros(2, 4, 3, 5, 6)
    for states, log_a, cut, words in [
        (good[0], None, None, "states"),
        (good.double(), None, None, "states"),
        (good.transpose(3, 4), None, None, "states"),
        (torch.zeros(1, 2, 1, 257, 1), None, None, "256"),
        (good, torch.zeros(2, 4, 3), None, "log_a"),
        (good, torch.zeros(2, 3, 3, 6), None, "log_a"),
        (good, torch.zeros(2, 3, 3).double(), None, "log_a"),
        (good, None, torch.zeros(2, 4, dtype=torch.int32), "cut"),
        (good, None, torch.zeros(2, 3), "cut"),
    ]:
        with pytest.raises(ValueError, match=words):
            propagate(states, log_a, cut)


def test_bad_input() -> None:
    run_ranks(bad_inputs, 1, env=ENV)
