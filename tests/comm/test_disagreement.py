"""Ranks that are in different calls find out, on every transport, before they use each other's states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flexsp
from flexsp.comm import faults, process_group
from flexsp.comm.halo import halo_exchange
from flexsp.comm.process_group import Call
from flexsp.comm.signature import MISMATCH_BIT, POISON, Signature, poison
from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor
from flexsp.exceptions import FlexspError, PeerMismatch, PeerTimeout
from flexsp.nn import SequenceParallelLA
from flexsp.ops import chunk_linear_attn, chunk_retention, chunk_simple_gla, mamba2_ssd
from flexsp.scan.schedules import SCHEDULES, incoming_state
from flexsp.scan.transitions import Transition
from flexsp.testing import run_ranks
from tests.harness.interpreted import INTERPRETED
from tests.harness.schedules import fold, random_elements
from tests.marks import by_turns

CHECK = {"FLEXSP_CHECK": "1"}
PATIENCE = 100.0  # seconds: only a mismatch that nobody notices lasts so long, or a machine that is very busy
ODD = 1  # the rank that does something else
Calls = list[Callable[[], Any]]


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    q, k, v = (torch.randn(1, 4, 1, 16).to(dtype).requires_grad_() for _ in range(3))
    return q, k, v, -torch.rand(1, 4, 1).to(dtype)


def _chunk(k, v):  # type: ignore[no-untyped-def]
    return k.T @ v


def _add(prev_s, chunk_state):  # type: ignore[no-untyped-def]
    return prev_s + chunk_state


def _halve(prev_s, chunk_state):  # type: ignore[no-untyped-def]
    return 0.5 * prev_s + chunk_state


def _read(q, k, v, chunk_state):  # type: ignore[no-untyped-def]
    return (q @ k.T).tril(0) @ v + q @ chunk_state


def _variant(decay: Callable[..., torch.Tensor], folder: str | None = None) -> LinearAttention:
    H, K, V = ConstExpr("H", 1), ConstExpr("K", 16), ConstExpr("V", 16)
    meta = {"q": SymbTensor(["T", H, K]), "k": SymbTensor(["T", H, K]), "v": SymbTensor(["T", H, V])}
    meta["prev_s"] = SymbTensor(["NS", H, K, V])
    model = LinearAttention(meta, _chunk, decay, _read, code_dir=folder, chunk_size=16)
    model.program = replace(model.program, disagrees=None)  # what ranks say of each other's calls is tested
    return model


def _calls(sp: Any, how: str) -> Calls:
    """What this rank calls; rank ODD differs by what `how` says. States have one shape in all of them."""
    odd = sp.rank == ODD
    q, k, v, g = _inputs(torch.bfloat16 if how == "dtype" and odd else torch.float32)
    gated = lambda: chunk_simple_gla(q, k, v, g, sp=sp)  # noqa: E731
    plain = lambda: chunk_simple_gla(q, k, v, sp=sp)  # noqa: E731
    if how == "order":
        return [plain, gated] if odd else [gated, plain]
    if how == "gates":
        return [plain] if odd else [gated]
    if how == "kind of gate":
        return [lambda: chunk_retention(q, k, v, sp=sp)] if odd else [gated]
    if how == "op":
        return [lambda: mamba2_ssd(v, -g, g.new_full((1,), -1.0), k, q, sp=sp)] if odd else [gated]
    if how == "packed":
        bounds = torch.tensor([0, 4 * sp.world_size])
        return [lambda: chunk_simple_gla(q, k, v, cu_seqlens=bounds, sp=sp)] if odd else [plain]
    if how == "schedule":
        sp.schedule = "serial" if odd else sp.schedule
    if how == "all_gather":
        sp.schedule = "serial" if odd else "all_gather"
    if how == "generated":
        variant = _variant(_halve if odd else _add)
        return [lambda: variant(q=q[0], k=k[0], v=v[0], sp=sp)]
    if how == "raised" and odd:
        return [lambda: chunk_simple_gla(q, k[..., :3], v, sp=sp), gated]
    if how == "raised":
        return [gated, gated]
    return [gated]


def _errors(sp: Any, how: str) -> Any:
    """The FlexspError that this rank meets, or None. ValueErrors of its own it passes over."""
    sp.set_lengths([4] * sp.world_size)
    try:
        for attempt in range(8):  # the first rank of a chain of kernels hears of a mismatch two calls later
            for call in _calls(sp, how)[: 2 if attempt == 0 else None]:
                try:
                    call()
                except FlexspError:
                    raise
                except ValueError:
                    continue
                sp.check()
            if how == "raised" and attempt == 0 and sp.transport == "process_group":
                break
    except FlexspError as error:
        return error
    return None


HOW = ["order", "dtype", "gates", "kind of gate", "op", "packed", "generated"]


@pytest.mark.parametrize("how", [*HOW, "schedule", "all_gather"])
def test_process_group(how: str) -> None:
    """Both neighbours of a mismatch see it at once, and who waits to the right of it is told."""
    options = {"sp_timeout_s": PATIENCE, "own_processes": True}
    answers = run_ranks(_errors, 3, how, **options)
    for error in answers:
        assert isinstance(error, PeerMismatch), answers
        assert error.peer != error.rank and error.ours != error.theirs
    assert [error.peer for error in answers[:2]] == [1, 0]
    assert str(answers[0].ours) in str(answers[1].theirs)


@pytest.mark.parametrize("how", HOW)
def test_kernels_over_shared_memory(how: str) -> None:
    options = {"transport": "posix", "heap_mib": 1, "sp_timeout_s": PATIENCE, "fresh_sp": True, "env": INTERPRETED}
    answers = run_ranks(_errors, 2, how, **options)
    for rank, error in enumerate(answers):
        assert isinstance(error, PeerMismatch), answers
        assert (error.rank, error.peer) == (rank, 1 - rank)
        assert error.ours != error.theirs and "state exchange" in str(error.ours)
    if how == "order":
        assert "no gate" in str(answers[ODD].ours)


def _raised(sp: Any) -> tuple[Any, int]:
    """Rank ODD gives up its first call for an argument of its own, and goes on."""
    return _errors(sp, "raised"), sp.abandoned


@pytest.mark.parametrize("transport", ["process_group", "posix"])
def test_a_rank_that_went_on_after_an_error(transport: str) -> None:
    """It must not take what its neighbours sent in the call before for an answer to the next one."""
    options = {"heap_mib": 1, "env": INTERPRETED} if transport == "posix" else {}
    answers = run_ranks(_raised, 2, transport=transport, sp_timeout_s=PATIENCE, fresh_sp=True, **options)
    assert answers[ODD][1] > answers[0][1]
    for error, _ in answers:
        assert isinstance(error, PeerMismatch), answers
    assert "after 1 call that raised" in str(answers[ODD][0].ours)


def _all_raise(sp: Any) -> torch.Tensor:
    """Every rank meets the same error: nothing is out of step."""
    q, k, v, g = _inputs()
    sp.set_lengths([4] * sp.world_size)
    with pytest.raises(ValueError, match="k: expected"):
        chunk_simple_gla(q, k[..., :3], v, g, sp=sp)
    with pytest.raises(ValueError, match="width: expected"):
        halo_exchange(q, -1, sp)
    return chunk_simple_gla(q, k, v, g, sp=sp)[0]


def test_an_error_on_all_ranks_leaves_them_in_step() -> None:
    assert all(o.isfinite().all() for o in run_ranks(_all_raise, 2))


def _forward_meets_backward(sp: Any, limit: float = PATIENCE) -> Any:
    """Rank ODD goes on to the next forward pass while the others wait for it in the backward pass, with this limit."""
    q, k, v, g = _inputs()
    sp.set_lengths([4] * sp.world_size)
    try:
        for _ in range(2):
            o, _ = chunk_simple_gla(q, k, v, g, sp=sp)
            sp.timeout_s = limit
            if sp.rank != ODD:
                o.sum().backward()
        sp.check()
    except FlexspError as error:
        return error
    return None


def test_forward_meets_backward() -> None:
    answers = run_ranks(_forward_meets_backward, 3, sp_timeout_s=PATIENCE, fresh_sp=True)
    assert all(isinstance(error, PeerMismatch) for error in answers), answers
    assert "backward" in str(answers[0].ours) and "forward" in str(answers[0].theirs)


def test_forward_meets_backward_over_shared_memory() -> None:
    """Directions have flags of their own, so that neither sees the other's: both give up in time."""
    options = {"transport": "posix", "heap_mib": 1, "fresh_sp": True, "env": INTERPRETED}
    answers = run_ranks(_forward_meets_backward, 2, 1.0, **options)
    assert all(isinstance(error, PeerMismatch | PeerTimeout) for error in answers), answers


def _collectives(sp: Any, how: str) -> Any:
    x = torch.randn(2, 4, dtype=torch.float64)
    odd = sp.rank == ODD
    sp.set_lengths([4] * sp.world_size)
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "gather and sum": (lambda: sp.gather(x), lambda: sp.token_mean(x)),
        "gather and halo": (lambda: sp.gather(x), lambda: halo_exchange(x, 2, sp)),
        "halos": (lambda: halo_exchange(x, 2, sp), lambda: halo_exchange(x, 3, sp)),
        "lengths and halo": (lambda: _ask_lengths(sp), lambda: halo_exchange(x, 2, sp)),
    }
    try:
        calls[how][odd]()
    except FlexspError as error:
        return error
    return None


def _ask_lengths(sp: Any) -> None:
    sp.set_lengths(None)
    sp.lengths_for(4)


@pytest.mark.parametrize("how", ["gather and sum", "gather and halo", "halos", "lengths and halo"])
def test_collectives_and_halos(how: str) -> None:
    answers = run_ranks(_collectives, 3, how, sp_timeout_s=PATIENCE, own_processes=True)
    assert all(isinstance(error, PeerMismatch) for error in answers), answers


def _flags(sp: Any) -> list[int]:
    """Rank 2: low words of the ready flags that rank 1, which disagrees with rank 0, raised here."""
    from flexsp.scan.propagate import CHAIN_TILE, CONTROL_WORDS, _channel, propagate

    for _ in range(4):
        try:
            propagate(torch.zeros(1, 2, 3, 4, 4 + (sp.rank > 0)), Transition("none"), sp)
            sp.check()
        except FlexspError as error:
            channel = _channel(sp)
            start = channel.max_tiles * channel.regions * CHAIN_TILE * 4
            control = sp.heap.local[start : start + 3 * CONTROL_WORDS * 8].view(torch.int64).view(3, -1)
            torch.distributed.barrier(group=sp.cpu_group)
            return [type(error).__name__, error.peer, *(control[:, 4] & 0xFFFFFFFF).tolist()]
    return []


def test_every_tile_says_that_ranks_disagree() -> None:
    """Tiles after the first do not report a silent peer, and no rank is told that it is missing itself."""
    options = {"transport": "posix", "heap_mib": 1, "sp_timeout_s": PATIENCE, "fresh_sp": True, "env": INTERPRETED}
    answers = run_ranks(_flags, 3, **options)
    assert [answer[:2] for answer in answers] == [["PeerMismatch", 1], ["PeerMismatch", 0], ["PeerMismatch", 0]]
    for word in answers[2][2:]:
        assert word & POISON and word & MISMATCH_BIT, answers


# Stamps in front of the data, as on CUDA ----------------------------------------------------------------------------


def _stamped(sp: Any, elements: list[tuple], reverse: bool, odd: int | None) -> tuple[torch.Tensor, Any]:
    carries, process_group.carries_stamp = process_group.carries_stamp, lambda data: True
    try:
        F, log_a, cut = elements[sp.rank]
        through = Transition.of(F, log_a if odd in (None, sp.rank) else None, cut)
        state = incoming_state(F, through, sp, reverse)
        if odd is None:
            halo = elements[sp.rank - 1][0][:, -1:] if sp.rank else torch.zeros_like(F[:, :1])
            torch.testing.assert_close(halo_exchange(F, 1, sp), halo)
            torch.testing.assert_close(sp.gather(F), torch.cat([e[0] for e in elements], 1))
        sp.check()
    except FlexspError as error:
        return state, error
    finally:
        process_group.carries_stamp = carries
    return state, None


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stamps_travel_with_the_data(schedule: str) -> None:
    elements = random_elements("vector", 3)
    for reverse in (False, True):
        answers = run_ranks(_stamped, 3, elements, reverse, None, schedule=schedule)
        assert [error for _, error in answers] == [None] * 3
        torch.testing.assert_close([x for x, _ in answers], fold(elements, reverse), rtol=1e-14, atol=1e-14)


def _evaluated_first(sp: Any) -> torch.Tensor:
    carries, process_group.carries_stamp = process_group.carries_stamp, lambda data: True
    try:
        x = torch.arange(3.0).view(1, 3, 1).requires_grad_()
        for mode in (True, False):
            with torch.inference_mode(mode):
                full, halo = sp.gather(x, 1), halo_exchange(x, 2, sp)
                incoming_state(torch.ones(1, 1, 2, 2), Transition("none"), sp)
            sp.check()
        (full.sum() + halo.sum()).backward()
        return x.grad
    finally:
        process_group.carries_stamp = carries


def test_exchanges_in_inference_mode_leave_later_ones_working() -> None:
    grads = run_ranks(_evaluated_first, 2, own_processes=True)
    assert [x.flatten().tolist() for x in grads] == [[2, 3, 3], [2, 2, 2]]


def _stamped_otherwise(sp: Any, elements: list[tuple], odd: int) -> tuple[torch.Tensor, Any]:
    faults._LEAST_S, faults._SHARE = 0.2, 0.0  # a rank that meets no error makes no report
    return _stamped(sp, elements, False, odd)


@pytest.mark.parametrize(("schedule", "odd"), by_turns(SCHEDULES, (0, 1)))
def test_another_stamp_makes_nan_and_is_reported(schedule: str, odd: int) -> None:
    """One rank with gates among ranks without: same shapes, another transition. Ranks that agree with their neighbour
    hear of it from there."""
    answers = run_ranks(
        _stamped_otherwise, 3, random_elements("scalar", 3), odd, schedule=schedule, own_processes=True
    )  # fmt: skip
    for rank, (state, error) in enumerate(answers):
        if rank or schedule == "all_gather":
            assert state.isnan().all() and isinstance(error, PeerMismatch), answers
    if odd or schedule == "all_gather":
        assert "transition scalar" in str(answers[odd][1].ours)


@pytest.mark.parametrize("report", [(), (1, 0), (1, 2)])  # none, or rank 1 about rank 0, or about this one
@pytest.mark.parametrize("wrong", range(3))
@pytest.mark.parametrize("together", [False, True])
def test_one_wrong_stamp_of_many_is_enough(
    together: bool, wrong: int, report: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of pieces from rank 3, each of which is sent on before the next one comes, or of ranks 3, 4 and 5 at a time."""
    monkeypatch.setattr(process_group, "carries_stamp", lambda data: True)
    sp: Any = SimpleNamespace(rank=2, abandoned=0, channels={}, records=None, device=torch.device("cpu"))
    data = torch.randn(3, 5)
    call = Call(sp, Signature("state exchange"), data, None)
    arriving = [call.sealed(data) for _ in range(3)]
    arriving[wrong][:8].view(torch.int64)[0] = poison(*report) if report else 99
    for i, message in enumerate(arriving):
        assert torch.equal(call.data(message, data), data) and message.numel() % 16 == 0
        call.look_at(message, 3 + i * together)
        if not together:
            leaving = call.sealed(data)[:8].view(torch.int64).item()
            assert leaving == (poison(2, 3) if wrong <= i else call.word)
    assert call.end(data).isnan().all()
    error = sp.records.error(2)
    about = (1 if report == (1, 2) else 0) if report else 3 + wrong * together
    assert isinstance(error, PeerMismatch) and error.peer == about
    later = Call(sp, Signature("halo exchange"), data, None)
    later.look_at(later.sealed(data), 1)
    assert torch.equal(later.end(data), data) and sp.records.error(2).peer == error.peer


def test_messages_of_tensors_that_lie_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "carries_stamp", lambda data: True)
    sp: Any = SimpleNamespace(rank=2, abandoned=0)
    for x in (torch._neg_view(torch.randn(3, 5)), torch.randn(5, 3).T, torch.randn(2, dtype=torch.complex64).conj(),
              torch.randn(7).bfloat16(), torch.zeros(0, 4), torch.ones(()), torch.arange(4)[::2] > 1):  # fmt: skip
        call = Call(sp, Signature("state exchange"), x, None)
        assert torch.equal(call.data(call.sealed(x), x), x)


def test_a_gathered_buffer_begins_without_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a rank sends less than it should, no stamp of an earlier call is read."""
    name = "all_gather_single" if hasattr(torch.distributed, "all_gather_single") else "all_gather_into_tensor"
    monkeypatch.setattr(torch.distributed, name, lambda everyone, mine, group: None)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, n: self.new_full((n,), 255))
    sp: Any = SimpleNamespace(world_size=3, device=torch.device("cpu"), group=None)
    found = process_group.of_all_ranks(sp, torch.zeros(48, dtype=torch.uint8))
    assert found.shape == (3, 48) and not found[:, :16].any() and (found[:, 16:] == 255).all()


def test_a_signature_tells_apart_what_it_names() -> None:
    one = Signature("state exchange", "op", "(1, 2) float32", "scalar", False, "chain")
    others = [
        Signature("halo exchange", "op", "(1, 2) float32", "scalar", False, "chain"),
        Signature("state exchange", "other", "(1, 2) float32", "scalar", False, "chain"),
        Signature("state exchange", "op", "(1, 2) float64", "scalar", False, "chain"),
        Signature("state exchange", "op", "(1, 2) float32", "none", False, "chain"),
        Signature("state exchange", "op", "(1, 2) float32", "scalar", True, "chain"),
        Signature("state exchange", "op", "(1, 2) float32", "scalar", False, "serial"),
    ]
    words = {x.word() for x in (one, *others)} | {one.word(1), one.word(2)}
    assert len(words) == 9 and all(0 < word < POISON for word in words)
    assert one.word() == Signature("state exchange", "op", "(1, 2) float32", "scalar", False, "chain").word()


# FLEXSP_CHECK=1 ------------------------------------------------------------------------------------------------------


def _checked(sp: Any, folder: str, how: str) -> Any:
    """A generated variant under FLEXSP_CHECK=1; what this rank's call raises, and the calls it has launched."""
    k, v = -torch.rand(4, 1, 16), torch.randn(4, 1, 16)
    sp.set_lengths([4] * sp.world_size)
    model = _variant(_by_keys if how == "negative" else _halve if sp.rank == ODD and how == "decay" else _add, folder)
    dtype = torch.float16 if sp.rank == ODD and how == "dtype" else torch.float32
    try:
        model(q=v.to(dtype), k=k.to(dtype), v=v.to(dtype), sp=sp)
    except ValueError as error:  # PeerMismatch is one
        return error, len(sp.channels)
    return None, len(sp.channels)


def _by_keys(prev_s, k, chunk_state):  # type: ignore[no-untyped-def]
    return prev_s * k.sum() + chunk_state


@pytest.mark.parametrize("how", ["decay", "dtype"])
def test_check_mode_compares_generated_kernels_before_they_start(how: str, tmp_path: Path) -> None:
    options = {"transport": "posix", "heap_mib": 1, "fresh_sp": True, "env": INTERPRETED | {"FLEXSP_CHECK": "1"}}
    answers = run_ranks(_checked, 2, str(tmp_path), how, sp_timeout_s=PATIENCE, **options)
    for rank, (error, channels) in enumerate(answers):
        assert isinstance(error, PeerMismatch), answers
        assert (error.rank, error.peer, channels) == (rank, 1 - rank, 0)
        assert "_read on torch.float" in str(error.ours)


def test_check_mode_looks_at_decays_of_generated_kernels(tmp_path: Path) -> None:
    """The functions take any factor; kernels carry its logarithm, so one below 0 makes NaN, which is said."""
    options = {"transport": "posix", "heap_mib": 1, "fresh_sp": True, "env": INTERPRETED | {"FLEXSP_CHECK": "1"}}
    for error, _ in run_ranks(_checked, 2, str(tmp_path), "negative", sp_timeout_s=PATIENCE, **options):
        assert type(error) is ValueError and "_by_keys: expected to multiply" in str(error), error


def _backward_in_another_order(sp: Any) -> Any:
    """Two alike calls; rank ODD runs the backward pass of the second one first."""
    sp.set_lengths([4] * sp.world_size)
    first, second = _inputs()[:3], _inputs()[:3]
    losses = [chunk_linear_attn(*x, normalize=False, sp=sp)[0].sum() for x in (first, second)]
    try:
        for loss in losses[::-1] if sp.rank == ODD else losses:
            loss.backward()
        sp.check()
    except FlexspError as error:
        return type(error), str(error)
    return None


@pytest.mark.parametrize("transport", ["process_group", "posix"])
def test_check_mode_tells_backward_passes_in_another_order(transport: str) -> None:
    options = {"heap_mib": 1, "env": {**INTERPRETED, **CHECK}} if transport == "posix" else {"env": CHECK}
    found = run_ranks(_backward_in_another_order, 3, transport=transport, fresh_sp=True, timeout=200, **options)
    for kind, text in found:
        assert kind is PeerMismatch
        assert "of the backward pass of exchange" in text


class _Odd(torch.nn.Module):
    """Raises on rank ODD in the second batch, where the user's own code stands between two ops."""

    def __init__(self, sp: Any) -> None:
        super().__init__()
        self.odd, self.batch = sp.rank == ODD, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = chunk_linear_attn(x, x, x, normalize=False)[0]
        self.batch += 1
        if self.odd and self.batch == 2:
            raise MemoryError("of this rank")
        return chunk_linear_attn(x, x, x, normalize=False)[0]


@torch.no_grad()
def _goes_on(sp: Any) -> list[Any]:
    sp.set_lengths([4] * sp.world_size)
    made = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4 * sp.world_size, 1, 16, generator=made)
    with flexsp.sequence_parallel(None):
        want = sp.shard(_Odd(sp)(x))
    model, found = SequenceParallelLA(_Odd(sp), sp), []
    for _ in range(4):
        try:
            y = model(sp.shard(x))
            sp.check()
            found.append(torch.allclose(y, want, rtol=1e-3, atol=1e-3))
        except (MemoryError, FlexspError) as error:
            found.append(type(error))
    return found


@pytest.mark.parametrize("transport", ["process_group", "posix"])
def test_a_rank_that_raises_in_the_users_code_and_goes_on(transport: str) -> None:
    """No rank gets an output of what the others made of another batch."""
    options = {"heap_mib": 1, "env": INTERPRETED} if transport == "posix" else {}
    found = run_ranks(_goes_on, 3, transport=transport, sp_timeout_s=PATIENCE, fresh_sp=True, timeout=300, **options)
    for rank, batches in enumerate(found):
        assert batches[0] is True
        assert False not in batches, found
        assert MemoryError in batches or rank != ODD
        assert rank == 0 or PeerMismatch in batches, found


def _other_values(sp: Any, how: str) -> Any:
    odd, (q, k, v, g) = sp.rank == ODD, _inputs()
    sp.set_lengths([3, 4, 5] if odd and how == "lengths" else [4, 4, 4])
    bounds = torch.tensor([0, 7 if odd and how == "boundaries" else 5, 12]) if how != "scale" else None
    scale = 0.5 if odd and how == "scale" else 0.25
    try:
        for _ in range(4):  # the first rank of a chain of kernels hears of a mismatch later
            chunk_simple_gla(q, k, v, g, scale=scale, cu_seqlens=bounds, sp=sp)
            sp.check()
    except (FlexspError, ValueError) as error:
        return type(error), str(error)
    return None


@pytest.mark.parametrize("how", ["scale", "boundaries", "lengths"])
def test_values_that_all_ranks_must_agree_on(how: str) -> None:
    found = run_ranks(_other_values, 3, how, fresh_sp=True, sp_timeout_s=PATIENCE, timeout=200)
    assert [kind for kind, _ in found] == [PeerMismatch] * 3, found


def test_kernels_tell_another_scale() -> None:
    options = {"transport": "posix", "heap_mib": 1, "sp_timeout_s": PATIENCE, "fresh_sp": True, "env": INTERPRETED}
    found = run_ranks(_other_values, 3, "scale", timeout=200, **options)
    assert [kind for kind, _ in found] == [PeerMismatch] * 3, found
