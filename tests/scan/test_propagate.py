"""The fused propagate kernel under the interpreter: one rank, and real processes over the POSIX heap."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from flexsp.comm import faults, signature, watchdog
from flexsp.scan import neighbours
from flexsp.scan.schedules import SCHEDULES
from flexsp.testing.ranks import run_ranks
from flexsp.testing.scans import KINDS, ScanCall, fill_slots_with_nan, random_calls, scan_error, scan_oracle
from tests.harness.interpreted import INTERPRETED
from tests.marks import slow


def local_errors(sp: Any, calls: list[ScanCall], seed: int) -> list[float]:
    return [scan_error(None, call, seed + i) for i, call in enumerate(calls)]


def chain_errors(sp: Any, calls: list[ScanCall], seed: int, slow_rank: int | None = None) -> list[float]:
    if sp.heap is not None:
        fill_slots_with_nan(sp)
    out = []
    for i, call in enumerate(calls):
        if sp.rank == slow_rank:
            time.sleep(0.15)
        out.append(scan_error(sp, call, seed + i))
    sp.check()
    torch.distributed.barrier(group=sp.cpu_group)
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_matches_float64(kind: str, seed: int) -> None:
    shapes = [(1, 2, 32, 24, 5), (2, 1, 5, 7, 3), (1, 1, 1, 1, 4), (1, 1, 100, 60, 2), (1, 1, 3, 4, 0)]
    calls = [
        ScanCall(B, H, K, V, (n,), kind, cuts, reverse)
        for (B, H, K, V, n) in shapes
        for cuts in (False, True)
        for reverse in ((False,) if kind == "max-plus" else (False, True))
    ]
    (errors,) = run_ranks(local_errors, 1, calls, seed, env=INTERPRETED)
    assert max(errors) < 1e-5, errors


def test_one_rank_with_a_dense_transition(seed: int) -> None:
    shapes = [(1, 2, 32, 24, 1), (2, 1, 5, 7, 1), (1, 1, 1, 1, 1), (1, 1, 100, 60, 1), (1, 1, 3, 4, 0)]
    shapes += [(1, 1, 256, 20, 1), (2, 1, 130, 256, 1), (1, 1, 200, 3, 0)]
    calls = [
        ScanCall(*shape[:4], (shape[4],), "dense", reverse=reverse) for shape in shapes for reverse in (False, True)
    ]
    (errors,) = run_ranks(local_errors, 1, calls, seed, env=INTERPRETED)
    assert max(errors) < 1e-5, errors


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_over_shared_memory_match_float64(world: int, seed: int) -> None:
    """Shapes, directions and decays interleaved; tiles with a small index see more epochs than the others."""
    calls = random_calls(seed, world, 10, heads=1)
    errors = run_ranks(chain_errors, world, calls, seed, transport="posix", heap_mib=4, env=INTERPRETED)
    assert max(map(max, errors)) < 1e-5, errors


@pytest.mark.parametrize("transport", ["posix", "process_group"])
def test_ranks_with_maxima_and_with_factors(transport: str, seed: int) -> None:
    calls = [
        ScanCall(B, 2, K, V, nsegs, kind, cuts)
        for B, K, V, nsegs in ((1, 20, 24, (3, 0, 2)), (2, 5, 1, (1, 5, 1)))
        for kind in ("elementwise", "max-plus")
        for cuts in (False, True)
    ]
    heap = {"heap_mib": 4} if transport == "posix" else {}
    errors = run_ranks(chain_errors, 3, calls, seed, transport=transport, env=INTERPRETED, **heap)
    assert max(map(max, errors)) < 1e-5, errors


def test_ranks_with_large_dense_transitions(seed: int) -> None:
    """A hop reads the rows of a state in several rounds."""
    calls = [ScanCall(1, 1, 256, 20, (1, 1, 0), "dense", reverse=reverse) for reverse in (False, True)]
    calls += [ScanCall(1, 1, 140, 35, (1, 0, 1), "dense", reverse=reverse) for reverse in (False, True)]
    errors = run_ranks(chain_errors, 3, calls, seed, transport="posix", heap_mib=4, env=INTERPRETED)
    assert max(map(max, errors)) < 1e-5, errors


def test_more_tiles_than_blocks(seed: int) -> None:
    """Blocks stride over the tiles; the same slots serve many tiles."""
    from flexsp.scan.tile_order import MAX_BLOCKS

    calls = [ScanCall(1, MAX_BLOCKS + 3, 2, 3, (1, 0), reverse=reverse) for reverse in (False, True)]
    errors = run_ranks(chain_errors, 2, calls, seed, transport="posix", heap_mib=16, env=INTERPRETED)
    assert max(map(max, errors)) < 1e-5, errors


@pytest.mark.parametrize("reverse", [False, True])
def test_slow_receiver_is_not_overrun(reverse: bool, seed: int) -> None:
    calls = [ScanCall(1, 1, 8, 8, (1, 1), reverse=reverse)] * 8
    errors = run_ranks(
        chain_errors, 2, calls, seed, 0 if reverse else 1, transport="posix", heap_mib=1, env=INTERPRETED, fresh_sp=True
    )
    assert max(map(max, errors)) < 1e-5, errors


@triton.jit
def _verdicts(seen, to, epoch, low, late, EXACT: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    i = tl.arange(0, 8)
    tl.store(to + i, neighbours._verdict(tl.load(seen + i), epoch, low, late, EXACT))


def verdicts(sp: Any, epochs: list[int], words: list[int]) -> list[list[int]]:
    """On flags where epoch 5 and word 77 are due; of a kernel that takes later epochs for failures, and of another."""
    seen, found = torch.tensor(epochs) << 32 | torch.tensor(words), []
    for exact in (True, False):
        to = torch.full((8,), -1, dtype=torch.int32)
        _verdicts[(1,)](seen, to, 5, 77, watchdog.TIMEOUT_READY, exact)
        found.append(to.tolist())
    return found


def test_what_flags_say() -> None:
    """A tile of a later epoch is another one, though the same was due; credit for a later one is credit."""
    poisons = [77 | signature.POISON, signature.POISON | signature.MISMATCH_BIT]
    epochs, words = [5, 4, 4, 5, 6, 6, 5, 6], [77, 77, 78, 78, 77, 78, *poisons]
    (found,) = run_ranks(verdicts, 1, epochs, words, env=INTERPRETED)
    late, other, poison = watchdog.TIMEOUT_READY, watchdog.MISMATCH, watchdog.POISON_TIMEOUT
    for later, answers in zip((other, 0), found, strict=True):
        assert answers == [0, late, late, other, later, other, poison, poison + 1]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_process_group_schedules_use_the_same_kernel(schedule: str, seed: int) -> None:
    calls = random_calls(seed, 3, 12)
    errors = run_ranks(chain_errors, 3, calls, seed, schedule=schedule, env=INTERPRETED)
    assert max(map(max, errors)) < 1e-5, errors


def test_schedule_wins_over_the_heap(seed: int) -> None:
    calls = random_calls(seed, 2, 2)
    errors = run_ranks(
        chain_errors, 2, calls, seed, transport="posix", schedule="all_gather", heap_mib=1, env=INTERPRETED
    )
    assert max(map(max, errors)) < 1e-5, errors


def without_passing(sp: Any) -> bool:
    from flexsp.scan.propagate import propagate
    from flexsp.scan.transitions import Transition

    states = torch.randn(1, 3, 1, 4, 4)
    want = scan_oracle(states[:, 1:], None, None, states[:, 0], False)
    propagate(states, Transition("none"), sp, passes=False)
    return torch.allclose(states.double(), want, atol=1e-5)


def test_passes_false_stays_on_the_rank() -> None:
    assert all(run_ranks(without_passing, 2, transport="posix", heap_mib=1, env=INTERPRETED))


# Failures ------------------------------------------------------------------------------------------------------------


def absent_rank(sp: Any, absent: int, reverse: bool, with_cut: bool = False) -> tuple[float, Any, bool]:
    """(seconds until the error, the error, whether the states of the failed call were all NaN)."""
    from flexsp.exceptions import FlexspError
    from flexsp.scan.propagate import propagate
    from flexsp.scan.transitions import Transition

    if sp.rank == absent:
        return 0.0, None, True
    start = time.monotonic()
    for _ in range(4):
        states, cut = torch.zeros(1, 3, 3, 4, 4), torch.full((1, 2), int(with_cut), dtype=torch.int32)
        try:
            propagate(states, Transition("none", None, cut), sp, reverse=reverse)
            sp.check()
        except FlexspError as error:
            return time.monotonic() - start, error, bool(states.isnan().all())
    return time.monotonic() - start, None, False


@pytest.mark.parametrize(("absent", "reverse"), [(0, False), *slow((1, False), (2, True))])
def test_absent_rank_is_reported_by_all_others(absent: int, reverse: bool) -> None:
    from flexsp.exceptions import PeerTimeout

    limit = 1.0
    answers = run_ranks(
        absent_rank,
        3,
        absent,
        reverse,
        transport="posix",
        heap_mib=1,
        env=INTERPRETED,
        sp_timeout_s=limit,
        fresh_sp=True,
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


def test_behind_a_cut_an_absent_rank_is_reported_by_the_next_call() -> None:
    """Rank 1's state does not depend on rank 0's, so rank 2 has its first tile at least. Then rank 1 tells it: it would
    wait far longer by itself."""
    from flexsp.exceptions import PeerTimeout

    answers = run_ranks(patient_last_rank, 3, True, transport="posix", heap_mib=1, env=INTERPRETED, fresh_sp=True)
    for rank, (seconds, error) in enumerate(answers[1:], 1):
        assert isinstance(error, PeerTimeout) and (error.rank, error.peer) == (rank, 0), error
        assert error.expected in (1, rank) and seconds < 20


def heedless(sp: Any) -> Any:
    """Rank 0 does not come, and rank 1's launches go on after they failed, as those of a graph do."""
    from flexsp.scan import propagate

    if sp.rank == 0:
        return None
    sp.timeout_s = 20.0 if sp.rank == 2 else 0.3
    with pytest.MonkeyPatch.context() as changed:
        for name in ("_LEAST_S", "_SHARE"):  # nobody else reports
            changed.setattr(faults, name, 0.0)
        if sp.rank == 1:
            changed.setattr(propagate.watchdog, "raise_pending", lambda sp: None)
        return goes_on(sp)


def goes_on(sp: Any) -> Any:
    from flexsp.exceptions import FlexspError
    from flexsp.scan import propagate
    from flexsp.scan.transitions import Transition

    try:
        for call in range(2 * sp.rank):
            states, cut = torch.zeros(1, 2, 1, 4, 4), torch.ones(1, 1, dtype=torch.int32)
            propagate.propagate(states, Transition("none", None, cut), sp)
            assert sp.rank == 2 or states.isnan().all()
            if sp.rank == 1 and call == 1:
                torch.distributed.send(torch.ones(1), 2)
            elif sp.rank == 2:
                if call == 0:  # rank 1 has made its second call before the next one
                    torch.distributed.recv(torch.ones(1), 1)
                sp.check()
    except FlexspError as error:
        return error
    return None


def test_behind_a_cut_launches_after_a_failure_pass_it_on() -> None:
    from flexsp.exceptions import PeerTimeout

    error = run_ranks(heedless, 3, transport="posix", heap_mib=1, env=INTERPRETED, fresh_sp=True)[2]
    assert isinstance(error, PeerTimeout) and (error.peer, error.expected) == (0, 2)


@pytest.mark.parametrize("reverse", [False, *slow(True)])
def test_behind_a_cut_no_rank_waits_for_those_before(reverse: bool) -> None:
    """The last rank has its state before the first one calls, and the rank between waits for that one."""
    options = {"transport": "posix", "heap_mib": 1, "env": INTERPRETED, "fresh_sp": True}
    ended = run_ranks(late_first_rank, 3, reverse, sp_timeout_s=60.0, **options)
    first, last = (2, 0) if reverse else (0, 2)
    assert ended[last] < ended[1] and ended[last] < ended[first], ended


def late_first_rank(sp: Any, reverse: bool) -> float:
    """When a call ended that the first rank makes behind the last one's."""
    from flexsp.scan.propagate import propagate
    from flexsp.scan.transitions import Transition

    for late in (False, True):
        states, cut = torch.full((1, 2, 1, 4, 4), sp.rank + 1.0), torch.ones(1, 1, dtype=torch.int32)
        source, target = sp.neighbours(reverse)
        torch.distributed.barrier()
        if late and source is None:
            torch.distributed.recv(torch.ones(1), 0 if reverse else 2)
        propagate(states, Transition("none", None, cut), sp, reverse=reverse)
        sp.check()
        ended = time.monotonic()
        if late and target is None:
            torch.distributed.send(torch.ones(1), 2 if reverse else 0)
        want = sp.rank + 1.0 if source is None else source + 1.0
        assert bool((states[:, -1 if reverse else 0] == want).all())
    return ended


def patient_last_rank(sp: Any, with_cut: bool) -> tuple[float, Any]:
    sp.timeout_s = 20.0 if sp.rank == 2 else 0.3
    seconds, error, _ = absent_rank(sp, 0, False, with_cut)
    return seconds, error


def test_failure_is_passed_on() -> None:
    """The last rank would wait far longer than this test may take; the rank between tells it."""
    from flexsp.exceptions import PeerTimeout

    answers = run_ranks(patient_last_rank, 3, False, transport="posix", heap_mib=1, env=INTERPRETED, fresh_sp=True)
    _, error = answers[2]
    assert isinstance(error, PeerTimeout)
    assert (error.rank, error.peer, error.detail) == (2, 0, "reported by a rank between")


def other_shape(sp: Any) -> Any:
    from flexsp.exceptions import FlexspError
    from flexsp.scan.propagate import propagate
    from flexsp.scan.transitions import Transition

    for _ in range(4):
        try:
            propagate(torch.zeros(1, 2, 1, 4, 4 + sp.rank), Transition("none"), sp)
            sp.check()
        except FlexspError as error:
            return error
    return None


def test_ranks_of_other_shapes_are_told() -> None:
    from flexsp.exceptions import PeerMismatch

    answers = run_ranks(
        other_shape, 2, transport="posix", heap_mib=1, env=INTERPRETED, sp_timeout_s=60.0, fresh_sp=True, timeout=100
    )
    assert [type(a) for a in answers] == [PeerMismatch] * 2, answers
    assert (answers[1].rank, answers[1].peer) == (1, 0)


def too_many_tiles(sp: Any) -> tuple[int, int]:
    from flexsp.exceptions import HeapTooSmall
    from flexsp.scan.propagate import propagate
    from flexsp.scan.transitions import Transition

    with pytest.raises(HeapTooSmall, match="FLEXSP_HEAP_MIB to 2 or more") as caught:
        propagate(torch.zeros(1, 2, 20, 64, 64), Transition("none"), sp)
    return caught.value.needed, caught.value.had


def test_heap_too_small_says_needed_and_had() -> None:
    for needed, had in run_ranks(too_many_tiles, 2, transport="posix", heap_mib=1, env=INTERPRETED):
        assert had == 1 << 20
        assert needed == 2 * 20 * (2 * 16384 + 128)


def grown(sp: Any, rounds: list[list[ScanCall]], seed: int) -> tuple[list[float], list[int]]:
    """Errors of calls that need larger heaps, and of those of a graph that was captured before; sizes of the heaps."""
    sp.heap.close()
    sp.heap = sp.open_heap(1 << 20)
    sizes, errors, first = [], [], None
    for calls in rounds:
        for i, call in enumerate(calls):
            errors.append(scan_error(sp, call, seed + i))
        sizes.append(sp.heap.nbytes)
        if first is None:
            first = sp.channels["propagate"]
            first.counters[15] = 7  # in the place of a failure mark, which larger heaps must know of, but unused
        assert sp.channels["propagate"].counters[15] == 7
        now, sp.channels["propagate"] = sp.channels["propagate"], first  # as the graph's launches do
        errors += [scan_error(sp, call, seed + i) for i, call in enumerate(rounds[0])]
        sp.channels["propagate"] = now
    sp.check()
    heaps = [heap for heap, _ in sp.outgrown]
    assert [heap.nbytes for heap in heaps] == sizes[:-1]
    torch.distributed.barrier(group=sp.cpu_group)
    sp.close()
    assert all(heap.nbytes == 0 for heap in heaps)
    return errors, sizes


def test_heaps_grow_with_the_states_of_calls(seed: int) -> None:
    """Into memory of their own: what was captured with a smaller one goes on there."""
    small = [ScanCall(1, 2, 64, 64, (2, 0, 1), reverse=reverse) for reverse in (False, True)]
    larger = [ScanCall(4, 5, 64, 64, (1, 2, 0), reverse=reverse) for reverse in (False, True)]
    dense = [ScanCall(4, 3, 64, 256, (1, 0, 1), "dense", reverse=reverse) for reverse in (True, False)]
    options: dict[str, Any] = {"transport": "posix", "env": INTERPRETED, "fresh_sp": True}
    for errors, sizes in run_ranks(grown, 3, [small, larger, dense], seed, **options):
        assert max(errors) < 1e-5, errors
        assert sizes == [1 << 20, 2 << 20, 4 << 20]


def grows_apart(sp: Any, heads: list[int]) -> Any:
    from flexsp.exceptions import FlexspError
    from flexsp.scan.propagate import propagate
    from flexsp.scan.transitions import Transition

    sp.heap.close()
    sp.heap = sp.open_heap(1 << 20)
    try:
        propagate(torch.zeros(1, 2, heads[sp.rank], 64, 64), Transition("none"), sp)
        sp.check()
    except FlexspError as error:
        return error
    return None


@pytest.mark.parametrize("heads", [[50, 60], *slow([50, 2])])
def test_ranks_that_do_not_grow_alike_say_so(heads: list[int]) -> None:
    from flexsp.exceptions import PeerMismatch, PeerTimeout

    options: dict[str, Any] = {"transport": "posix", "env": INTERPRETED, "sp_timeout_s": 4.0, "own_processes": True}
    answers = run_ranks(grows_apart, 2, heads, **options)
    kind = PeerMismatch if min(heads) > 15 else PeerTimeout
    assert all(isinstance(error, kind) for error in answers), answers
    if kind is PeerMismatch:
        assert "a symmetric heap of 3289600 bytes" in str(answers[0]), answers


def has_no_room(sp: Any) -> str:
    from flexsp.comm import posix
    from flexsp.exceptions import HeapTooSmall
    from flexsp.scan.propagate import propagate
    from flexsp.scan.transitions import Transition

    sp.heap.close()
    sp.heap, create = sp.open_heap(1 << 20), posix._create
    posix._create = lambda path, nbytes: create(path, nbytes if sp.rank else 1 << 50)
    try:
        with pytest.raises(HeapTooSmall) as caught:
            propagate(torch.zeros(1, 2, 20, 64, 64), Transition("none"), sp)
    finally:
        posix._create = create
    states = torch.ones(1, 2, 2, 64, 64)  # other calls go on
    propagate(states, Transition("none"), sp)
    sp.check()
    assert states[0, 1, 0, 0, 0] == 2 + sp.rank
    return str(caught.value)


def test_where_a_heap_cannot_grow_the_error_names_the_setting() -> None:
    for said in run_ranks(has_no_room, 2, transport="posix", env=INTERPRETED, fresh_sp=True):
        assert "had 1048576 and did not grow, since NotAvailable: posix heap: rank 0: " in said
        assert "FLEXSP_HEAP_MIB to 2 or more, on all ranks" in said


def bad_inputs(sp: Any) -> None:
    from flexsp.scan.propagate import propagate
    from flexsp.scan.transitions import Transition

    good, none, ints = torch.zeros(2, 4, 3, 5, 6), Transition("none"), torch.int32
    one, A = torch.zeros(2, 2, 3, 5, 6), torch.zeros(2, 1, 3, 5, 5)
    for states, transition, words in [
        (good[0], none, "states"),
        (good.double(), none, "states: expected a contiguous float32 tensor"),
        (good.half(), Transition("max-plus", good[:, 1:].half()), "states: expected a contiguous float32 or float64"),
        (good.transpose(3, 4), none, "states"),
        (torch.zeros(1, 2, 1, 65537, 1), none, "expected 1..65536 rows and 1..512 columns, got K=65537, V=1"),
        (torch.zeros(1, 2, 1, 4, 513), none, "K=4, V=513"),
        (good, Transition("scalar", torch.zeros(2, 4, 3)), r"a: .*\(2, 3, 3\).*\(2, 4, 3\)"),
        (good, Transition("scalar"), r"a: .*\(2, 3, 3\).*None"),
        (good, Transition("vector", torch.zeros(2, 3, 3, 6)), r"a: .*\(2, 3, 3, 5\)"),
        (good, Transition("elementwise", torch.zeros(2, 3, 3, 5)), r"a: .*\(2, 3, 3, 5, 6\)"),
        (good, Transition("scalar", torch.zeros(2, 3, 3).double()), "a: expected torch.float32"),
        (good, Transition("none", torch.zeros(2, 3, 3)), "a: expected shape None"),
        (good, Transition("none", None, torch.zeros(2, 4, dtype=ints)), "cut"),
        (good, Transition("none", None, torch.zeros(2, 3)), "cut"),
        (good, Transition("diagonal"), "kind: expected one of none, .*, sequential, got 'diagonal'"),
        (good, Transition("sequential"), "expected a linear one, got the kind 'sequential'"),
        (one, Transition("dense", A.double()), "a: expected torch.float32"),
        (one, Transition("dense", A, torch.zeros(2, 1, dtype=ints)), "no cut"),
        (one, Transition("dense", torch.zeros(2, 1, 3, 6, 6)), r"a: .*\(2, 1, 3, 5, 5\)"),
        (good, Transition("dense", torch.zeros(2, 3, 3, 5, 5)), "one segment at most .*, got 3"),
        (torch.zeros(1, 2, 1, 257, 4), Transition("dense", torch.zeros(1, 1, 1, 257, 257)), "1..256 rows .* got K=257"),
    ]:
        with pytest.raises(ValueError, match=words):
            propagate(states, transition)
    with pytest.raises(ValueError, match="linear one, got the kind 'max-plus'"):
        propagate(good, Transition("max-plus", good[:, 1:]), reverse=True)


def larger_than_heads(sp: Any) -> list[float]:
    from flexsp.scan.propagate import propagate
    from flexsp.scan.transitions import Transition

    errors = []
    for K, V in ((6, 257), (1000, 1)):
        states, log_a = torch.randn(1, 4, 2, K, V), -torch.rand(1, 3, 2, K)
        want = states.double()
        for i in range(3):
            want[:, i + 1] += log_a[:, i, :, :, None].double().exp() * want[:, i]
        propagate(states, Transition("vector", log_a))
        errors.append((states - want).abs().max().item())
    return errors


def test_states_larger_than_heads() -> None:
    """A column beside 256 others, and a long vector."""
    (errors,) = run_ranks(larger_than_heads, 1, env=INTERPRETED)
    assert max(errors) < 1e-5, errors


def test_bad_input() -> None:
    run_ranks(bad_inputs, 1, env=INTERPRETED)
