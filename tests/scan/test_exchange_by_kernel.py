"""Exchanges that the kernel of propagate sends: what the other road gives, and ranks that differ or do not come."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flexsp.exceptions import FlexspError, PeerMismatch, PeerTimeout
from flexsp.nn import SequenceParallelLA, ShortConvolution
from flexsp.scan.by_kernel import goes_by_kernel
from flexsp.scan.exchange import exchange
from flexsp.scan.tokens import following, last, previous, tokens_before
from flexsp.scan.transitions import Transition
from flexsp.testing.ranks import run_ranks
from flexsp.testing.scans import fill_slots_with_nan
from tests.harness.exchanges import blocks, by_torch, one_process
from tests.harness.interpreted import INTERPRETED
from tests.marks import slow

POSIX: dict[str, Any] = {"transport": "posix", "heap_mib": 1, "env": INTERPRETED}
KINDS = ("none", "scalar", "vector", "dense", "elementwise")
SHAPES = ((1, 2, 3, 5), (2, 3, 1, 1), (1, 1, 17, 70))


def element(kind: str, shape: tuple[int, ...], rank: int, seed: int, dtype: torch.dtype) -> tuple:
    """F and the transition of a rank; odd ranks of a diagonal kind have cuts."""
    made = torch.Generator().manual_seed(97 * seed + rank)
    F = torch.randn(shape, generator=made, dtype=torch.float64)
    cut = (torch.rand(shape[0], generator=made) < 0.5).int() if rank % 2 else None
    B, H, K, V = shape
    if kind in ("dense", "elementwise"):
        A = torch.randn(B, H, K, K if kind == "dense" else V, generator=made, dtype=torch.float64) / K**0.5
        return F.to(dtype), Transition.of(F, A.to(dtype), kind=kind)
    decay = {"none": None, "scalar": (B, H), "vector": (B, H, K)}[kind]
    log_a = None if decay is None else -torch.rand(decay, generator=made, dtype=torch.float64).to(dtype)
    return F.to(dtype), Transition.of(F, log_a, cut)


def answers(sp: Any, given: tuple, reverse: bool) -> list[torch.Tensor]:
    """What arrives, and gradients of F and of the transition."""
    F, through = given
    leaves = [x.requires_grad_() for x in (F, through.a) if x is not None]
    state = exchange(F, through, sp, "a test", reverse=reverse)
    return [state.detach(), *torch.autograd.grad((state + 0.5 * F).sin().sum(), leaves)]


def both_roads(sp: Any, seed: int) -> list[tuple]:
    """(kind, by the kernel, largest error) of many calls in a row; the other road in float64."""
    fill_slots_with_nan(sp)
    found = []
    for number, (shape, kind) in enumerate((shape, kind) for shape in SHAPES for kind in KINDS):
        for reverse in (False, True):
            wide, narrow = (element(kind, shape, sp.rank, seed + number, x) for x in (torch.float64, torch.float32))
            roads = tuple(goes_by_kernel(*given, sp) for given in (wide, narrow))
            pairs = zip(answers(sp, wide, reverse), answers(sp, narrow, reverse), strict=True)
            found.append((kind, roads, max((x - y).abs().max().item() for x, y in pairs)))
    sp.check()
    return found


@pytest.mark.parametrize("ranks", [2, *slow(3)])
def test_both_roads_agree(ranks: int, seed: int) -> None:
    """States, their gradients and those of transitions, in both directions."""
    for found in run_ranks(both_roads, ranks, seed, **POSIX):
        for kind, roads, error in found:
            assert roads == (False, kind != "elementwise")
            assert error < 2e-5, (kind, error)


def reversed_answers(sp: Any, kind: str, seed: int) -> list[torch.Tensor]:
    return answers(sp, element(kind, SHAPES[0], sp.rank, seed, torch.float64), True)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_reverse(kind: str, seed: int) -> None:
    """In float64 over torch.distributed, against autograd in one process."""
    elements = [element(kind, SHAPES[0], rank, seed, torch.float64) for rank in range(3)]
    leaves = [[x.requires_grad_() for x in (F, t.a) if x is not None] for F, t in elements]
    state, loss, entered = torch.zeros_like(elements[0][0]), torch.zeros(()), []
    for F, through in reversed(elements):
        entered.append(state.detach())
        loss = loss + (state + 0.5 * F).sin().sum()
        state = through.adjoint().apply(state, F)
    grads = torch.autograd.grad(loss, sum(leaves, []), allow_unused=True, materialize_grads=True)
    got = run_ranks(reversed_answers, 3, kind, seed)
    for rank, (arrived, *found) in enumerate(got):
        torch.testing.assert_close(arrived, entered[2 - rank])
        n = len(leaves[rank])
        for x, y in zip(found, grads[n * rank : n * rank + n], strict=True):
            torch.testing.assert_close(x, y)


def odd_calls(sp: Any) -> None:
    """The values that sums of ranks have, exactly."""
    fill_slots_with_nan(sp)
    first, last_one = sp.rank == 0, sp.rank == sp.world_size - 1
    # Sizes that fill no tile, one and several; F of other strides; several batch rows.
    for shape in ((1, 1, 1, 1), (1, 3, 1, 257), (2, 5, 4, 128), (1, 2, 1, 4096), (3, 2, 7)):
        F = torch.arange(float(torch.Size(shape).numel())).view(shape).transpose(0, -1).contiguous().transpose(0, -1)
        for reverse in (False, True):
            got = exchange(F * (sp.rank + 1), Transition("none"), sp, reverse=reverse)
            before = range(sp.rank + 1, sp.world_size) if reverse else range(sp.rank)
            assert torch.equal(got, F * sum(r + 1 for r in before)) and got.is_contiguous()
    # What is not finite does not pass a cut, and ends there.
    F = torch.full((2, 1, 2, 3), float("nan") if first else 1.0)
    for kind, log_a in (("none", None), ("scalar", torch.zeros(2, 1)), ("vector", torch.zeros(2, 1, 2))):
        cut = torch.tensor([sp.rank == 1, False])
        got = exchange(F, Transition(kind, log_a, cut), sp)
        assert torch.equal(got[0], torch.full_like(got[0], [0.0, float("nan"), 1.0][sp.rank])) or sp.rank == 1
        assert bool(got[1].isnan().all()) != first
    # Documents of A = 0, for which there is no flag.
    A = torch.zeros(2, 1, 2, 2) if sp.rank == 1 else torch.eye(2).expand(2, 1, 2, 2)
    got = exchange(F, Transition.of(F, A, kind="dense"), sp)
    assert bool(got.eq(1.0).all()) == last_one
    sp.check()


def test_values() -> None:
    run_ranks(odd_calls, 3, **POSIX)


def neighbouring_tokens(sp: Any, x: torch.Tensor, lengths: list[int], bounds: list[int] | None) -> tuple:
    sp.set_lengths(lengths)
    mine = sp.shard(x).clone().requires_grad_()
    cu = None if bounds is None else torch.tensor(bounds)
    before, (behind, first), end = previous(mine, cu, sp), following(mine, cu, sp), last(mine, None, cu, sp)
    loss = (2 * before * mine + behind * mine.square()).sum() + 3 * end.sin().sum() * (cu is not None or sp.is_last)
    loss.backward()
    return before, behind, first, mine.grad


@pytest.mark.parametrize("how", [POSIX, {}], ids=["posix", "process_group"])
def test_tokens_before_and_behind(how: dict[str, Any]) -> None:
    """Over uneven and empty shards and documents across them what one process gives, gradients too."""
    alone = ([3, 0, 4], [2, 3, 2], [0, 1, 2])
    packed = (([2, 0, 5], [0, 1, 1, 4, 7]), ([0, 7, 0], [0, 7]))
    for lengths, bounds in (*((lengths, None) for lengths in alone), *packed):
        x = torch.randn(1 if bounds else 2, sum(lengths), 3, 2)
        whole, cu = x.clone().requires_grad_(), None if bounds is None else torch.tensor(bounds)
        before, (behind, _), end = previous(whole, cu, None), following(whole, cu, None), last(whole, None, cu, None)
        ((2 * before * whole + behind * whole.square()).sum() + 3 * end.sin().sum()).backward()
        got = list(zip(*run_ranks(neighbouring_tokens, 3, x, lengths, bounds, **how), strict=True))
        for want, parts in ((before, got[0]), (behind, got[1]), (whole.grad, got[3])):
            torch.testing.assert_close(torch.cat(parts, 1), want.detach())


def shards_before(sp: Any, x: torch.Tensor, width: int, lengths: list[int], known: bool, mode: str) -> tuple:
    """What comes before, gradients, and the messages that went over torch.distributed."""
    sp.set_lengths(lengths)
    mine, calls = sp.shard(x).clone().requires_grad_(), sp.calls
    sp.set_lengths(lengths if known else None)

    def run(x: torch.Tensor) -> torch.Tensor:
        return tokens_before(x, width, sp)

    if mode == "compile":
        torch._dynamo.reset()
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    got = run(mine)
    got.float().sin().sum().backward()
    sp.check()
    return got, mine.grad, by_torch(sp, calls)


@pytest.mark.parametrize("mode", ["eager", *slow("compile")])
def test_tokens_before(mode: str) -> None:
    """By the kernel where it sends such numbers and lengths are known to suffice, else by messages."""
    cases = [(3, [3, 4, 7], True, 0), (3, [3, 4, 7], False, 2), (3, [3, 2, 7], True, 2), (1, [0, 2, 0], False, 0),
             (1, [2, 0, 3], True, 0)]  # fmt: skip
    chosen = [(case, torch.bfloat16) for case in cases] + [(cases[0], x) for x in (torch.float32, torch.float64)]
    for (width, lengths, known, calls), dtype in chosen:
        x = torch.randn(2, sum(lengths), 2, 3).to(dtype)
        got = run_ranks(shards_before, 3, x, width, lengths, known, mode, **POSIX)
        whole, at = x.clone().requires_grad_(), [sum(lengths[:r]) for r in range(3)]
        padded = torch.cat([whole.new_zeros(2, width, 2, 3), whole], 1)
        want = [padded[:, start : start + width] for start in at]
        sum(y.float().sin().sum() for y in want).backward()
        for r, (before, grad, made) in enumerate(got):
            assert torch.equal(before, want[r]) and before.dtype == dtype
            bound = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
            torch.testing.assert_close(grad, whole.grad[:, at[r] : at[r] + lengths[r]], **bound)
            assert made == (2 if dtype == torch.float64 else calls)


def shorter(sp: Any) -> None:
    sp.set_lengths([3] * sp.world_size)
    with pytest.raises(ValueError, match=r"expected a shard of 3 tokens \(set_lengths\), got 2"):
        tokens_before(torch.zeros(1, 2, 4), 3, sp)


def test_fewer_tokens_than_lengths_say() -> None:
    run_ranks(shorter, 2, fresh_sp=True, **POSIX)


@pytest.mark.parametrize("mode", ["eager", "checkpoint", *slow("compile", "compile checkpoint", "compile inductor")])
def test_layers_with_an_empty_shard(mode: str) -> None:
    """Two exchanges in a row, computed again or in graphs."""
    xs = [0.3 * torch.randn(T, 3) for T in (5, 0, 4)]
    got, (ys, grads) = run_ranks(blocks, 3, xs, mode, True, sp_timeout_s=90.0, **POSIX), one_process(xs)
    for r in range(3):
        torch.testing.assert_close(got[r][0], ys[r].detach())
        torch.testing.assert_close(got[r][1], grads[r])
        assert got[r][2] == (0, 0)  # none over torch.distributed


def other_roads(sp: Any) -> list[bool]:
    F = torch.ones(1, 1, 2, 2)
    state = exchange(F, Transition("none"), sp)
    assert bool((state == sp.rank).all())
    roads = [goes_by_kernel(x, Transition("none"), sp) for x in (F, F.double(), F.bfloat16())]
    scaled = Transition("scalar", torch.zeros(1, 1))
    return roads + [goes_by_kernel(torch.ones(1, 1, *shape), scaled, sp) for shape in ((257, 2), (2, 257), (256, 2))]


def test_who_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    in_pytorch = {"transport": "posix", "heap_mib": 1}
    for how, sends in ((POSIX, True), (POSIX | {"schedule": "serial"}, False), ({"env": INTERPRETED}, False)):
        assert run_ranks(other_roads, 2, **how) == [[sends, *[False] * 4, sends]] * 2
    assert run_ranks(other_roads, 2, **in_pytorch) == [[False] * 6] * 2
    monkeypatch.setenv("FLEXSP_BACKEND", "triton")
    sp: Any = type("Group", (), {"schedule": "chain", "transport": "posix", "device": torch.device("cuda")})
    assert not goes_by_kernel(torch.ones(1, 1, 2, 2), Transition("none"), sp)


def convolved(sp: Any, layer: torch.nn.Module, x: torch.Tensor, lengths: list[int], bounds: list[int] | None) -> tuple:
    sp.set_lengths(lengths)
    layer, mine = SequenceParallelLA(layer, sp), sp.shard(x).clone().requires_grad_()
    calls, cu = sp.calls, None if bounds is None else torch.tensor(bounds)
    y = checkpoint(lambda x: layer(x, cu_seqlens=cu), mine, use_reentrant=False)
    y.square().sum().backward()
    return y, mine.grad, sum(p.grad for p in layer.parameters() if p.dim() == 3), by_torch(sp, calls)


def test_convolutions() -> None:
    """Of a layer computed again in the backward pass: nothing goes over torch.distributed."""
    layer, lengths = ShortConvolution(5), [3, 6, 4]
    for bounds in (None, [0, 5, 5, 13]):
        x = torch.randn(1, sum(lengths), 5, requires_grad=True)
        y = layer(x, cu_seqlens=None if bounds is None else torch.tensor(bounds))
        dx, dweight = torch.autograd.grad(y.square().sum(), (x, layer.weight))
        found = list(zip(*run_ranks(convolved, 3, layer, x.detach(), lengths, bounds, **POSIX), strict=True))
        for want, parts in ((y.detach(), found[0]), (dx, found[1])):
            torch.testing.assert_close(torch.cat(parts, 1), want)
        torch.testing.assert_close(sum(found[2]), dweight)
        assert found[3] == (0, 0, 0)


# Failures ------------------------------------------------------------------------------------------------------------


def different(sp: Any, how: str) -> Any:
    """The error of ranks whose calls differ."""
    odd = sp.rank == 1
    F = torch.ones(1, 2, 1, 3 + (odd and how == "shape"))
    through = Transition("scalar", torch.zeros(1, 2)) if odd and how == "kind" else Transition("none")
    try:
        for _ in range(4):
            exchange(F, through, sp, "another op" if odd and how == "call" else "an op")
            sp.check()
    except FlexspError as error:
        return error
    return None


@pytest.mark.parametrize("how", ["shape", "kind", "call"])
def test_ranks_in_different_calls(how: str) -> None:
    found = run_ranks(different, 2, how, sp_timeout_s=60.0, fresh_sp=True, **POSIX)
    for rank, error in enumerate(found):
        assert isinstance(error, PeerMismatch), found
        assert (error.rank, error.peer) == (rank, 1 - rank) and "state exchange of an" in str(error.ours)


def different_behind_a_cut(sp: Any) -> Any:
    """Rank 0 is in another call; what leaves rank 1 does not depend on it."""
    try:
        for _ in range(4):
            F, through = torch.ones(1, 1, 1, 3), Transition("none", None, torch.ones(1, dtype=torch.int32))
            exchange(F, through, sp, "another op" if sp.rank == 0 else "an op")
            sp.check()
    except FlexspError as error:
        return error
    return None


def test_behind_a_cut_all_ranks_hear_of_different_calls() -> None:
    for error in run_ranks(different_behind_a_cut, 3, sp_timeout_s=60.0, fresh_sp=True, **POSIX):
        assert isinstance(error, PeerMismatch) and error.peer in (0, 1), error


def what_no_arena_holds(sp: Any) -> list[bool]:
    """Small states of more heads and rows than there are tiles, and one that is too large, go the other way."""
    roads = []
    for shape, kind in (((8, 8, 1, 1), "scalar"), ((64, 1, 1, 3), "none"), ((1, 1, 1, 200_000), "none")):
        F = torch.full(shape, sp.rank + 1.0)
        through = Transition("none") if kind == "none" else Transition("scalar", torch.zeros(shape[:2]))
        roads.append(goes_by_kernel(F, through, sp))
        assert bool((exchange(F, through, sp, "an op") == sp.rank).all())
    return roads


def test_states_that_arenas_do_not_hold() -> None:
    assert run_ranks(what_no_arena_holds, 2, **POSIX) == [[False] * 3] * 2


def no_sequences(sp: Any) -> None:
    """Batches without a sequence, and rows without a number."""
    sp.set_lengths([3, 3])
    for x in (torch.zeros(0, 3, 4), torch.zeros(2, 3, 0)):
        x.requires_grad_()
        found = [tokens_before(x, 2, sp), previous(x, None, sp), *following(x, None, sp)]
        sum(y.sum() for y in found).backward()
        assert x.grad is not None and x.grad.shape == x.shape and found[0].shape == (len(x), 2, x.shape[2])


def first_token_alone(sp: Any) -> torch.Tensor:
    sp.set_lengths([0, 2])
    x = torch.ones(1, 2 * sp.rank, 3, requires_grad=True)
    following(x, None, sp)[1].sum().backward()
    return x.grad


def test_calls_without_sequences_and_of_first_tokens_alone() -> None:
    run_ranks(no_sequences, 2, **POSIX)
    _, grad = run_ranks(first_token_alone, 2, sp_timeout_s=10.0, **POSIX)
    assert grad.tolist() == [[[2.0] * 3, [0.0] * 3]]  # of both ranks' sums


def test_check_mode_compares_before_the_launch() -> None:
    env = INTERPRETED | {"FLEXSP_CHECK": "1"}
    for error in run_ranks(different, 2, "shape", sp_timeout_s=30.0, fresh_sp=True, **POSIX | {"env": env}):
        assert isinstance(error, PeerMismatch) and "(1, 2, 1, 4)" in str(error)


def absent(sp: Any) -> Any:
    if sp.rank == 1:
        return None
    start = time.monotonic()
    try:
        for _ in range(4):
            state = exchange(torch.ones(1, 1, 2, 2), Transition("none"), sp)
            assert sp.rank == 0 or state.isnan().all()
            sp.check()
    except PeerTimeout as error:
        return error, time.monotonic() - start
    return None


def test_a_rank_that_does_not_come() -> None:
    for rank, told in enumerate(run_ranks(absent, 3, sp_timeout_s=1.0, fresh_sp=True, **POSIX)):
        if rank != 1:
            error, seconds = told
            assert (error.rank, error.peer) == (rank, 1) and 1 <= seconds < 60
