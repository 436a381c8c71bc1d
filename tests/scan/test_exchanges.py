"""How many exchanges between ranks a pass makes, and two scans in one exchange."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from flexsp.ops import chunk_linear_attn, chunk_mlstm, chunk_simple_gla, mamba3
from flexsp.scan.transitions import Transition
from flexsp.testing.ranks import run_ranks
from flexsp.testing.scans import ScanCall, fill_slots_with_nan, scan_oracle
from tests.harness.interpreted import INTERPRETED
from tests.marks import quick, slow

KERNELS: dict[str, Any] = {"transport": "posix", "heap_mib": 1, "env": INTERPRETED}
Pairs = list[tuple[ScanCall, ScanCall]]


def both_errors(sp: Any, pairs: Pairs, seed: int) -> list[tuple[float, int]]:
    """Of each pair the largest error on this rank, and how many exchanges it took."""
    from flexsp.scan.both import Scan, propagate_both

    if sp.heap is not None:
        fill_slots_with_nan(sp)
    found = []
    for number, pair in enumerate(pairs):
        scans, wants, cut = [], [], None
        for call in pair:
            F, log_a, own_cut, initial = call.draw(seed + number)
            cut = own_cut if cut is None else cut  # documents begin in both alike
            want = scan_oracle(F, log_a, cut, initial, call.reverse, call.kind)
            begin, n = sum(call.nsegs[: sp.rank]), call.nsegs[sp.rank]
            states = torch.full((call.B, n + 1, call.H, call.K, call.V), float("nan"))
            (states[:, :n] if call.reverse else states[:, 1:]).copy_(F[:, begin : begin + n])
            if sp.neighbours(call.reverse)[0] is None:
                states[:, n if call.reverse else 0] = initial
            mine = [None if x is None else x[:, begin : begin + n] for x in (log_a, cut)]
            scans.append(Scan(states, Transition(call.kind, *mine)))
            wants.append(want[:, begin : begin + n + 1])
        before = sp.calls
        propagate_both(*scans, sp, reverse=pair[0].reverse)
        errors = [(x.states.double() - want).abs().max().item() for x, want in zip(scans, wants, strict=True)]
        found.append((max(e if e == e else float("inf") for e in errors), sp.calls - before))
    sp.check()
    return found


def pairs_of(*sizes: tuple[int, int, int, int, int, int], cuts: bool) -> Pairs:
    """Of (B, H, K, V, H2, V2): one scan has segments where the other has none; with cuts both have the same."""
    segments = [((3, 0, 2),) * 2, ((1, 2, 0),) * 2] if cuts else [((0, 2, 1), (2, 1, 1)), ((3, 0, 2), (1, 2, 0))]
    kinds = (("scalar", "scalar"), ("none", "none")), (("none", "scalar"),)
    return [
        (ScanCall(B, H, K, V, nsegs, kind, cuts, reverse), ScanCall(B, H2, K, V2, nsegs2, kind2, cuts, reverse))
        for (B, H, K, V, H2, V2), (nsegs, nsegs2), of in zip(sizes, segments, kinds, strict=True) for kind, kind2 in of
        for reverse in (False, True)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("transport", "schedule", "cuts"),
    [
        ("posix", "chain", True), ("process_group", "chain", False),
        *slow(("posix", "chain", False), ("process_group", "chain", True), ("process_group", "all_gather", False),
              ("process_group", "all_gather", True), ("posix", "hierarchical", False), ("posix", "hierarchical", True)),
    ],
)  # fmt: skip
def test_two_scans_travel_together(transport: str, schedule: str, cuts: bool, seed: int) -> None:
    pairs = pairs_of((1, 2, 20, 24, 2, 1), (2, 2, 35, 64, 2, 1), cuts=cuts)
    heap = {"heap_mib": 2} if transport == "posix" else {}
    options: dict[str, Any] = {"transport": transport, "schedule": schedule, "env": INTERPRETED}
    for found in run_ranks(both_errors, 3, pairs, seed, **options, **heap):
        assert max(error for error, _ in found) < 1e-5 and {calls for _, calls in found} == {1}, found


def refused(sp: Any) -> list[str]:
    from flexsp.scan.both import Scan, propagate_both

    said, states = [], torch.zeros(1, 2, 1, 4, 4)
    cut, factors = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1, 1, 4, 4)
    for other in (Transition("none", None, cut), Transition("elementwise", factors)):
        with pytest.raises(ValueError) as caught:
            propagate_both(Scan(states, Transition("none")), Scan(states, other), sp)
        said.append(str(caught.value))
    return said


def test_what_does_not_travel_together_is_refused() -> None:
    for cut, kind in run_ranks(refused, 2, fresh_sp=True, **KERNELS):
        assert cut == "cut: expected it in both scans or in neither"
        assert kind == "transition: expected kinds none and scalar, got ['none', 'elementwise']"


def counts(sp: Any, name: str, documents: bool, dtype: torch.dtype) -> tuple[int, int]:
    """Exchanges of a forward pass, and of the backward pass."""
    T, H, K = 16, 2, 16
    sp.set_lengths([T] * sp.world_size)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(1, T, *shape, dtype=dtype).requires_grad_()

    bounds = torch.tensor([0, 10, T * sp.world_size]) if documents else None
    before = sp.calls
    if name == "mlstm":
        given = [draw(H, K), draw(H, K), draw(H, K), draw(H), draw(H)]
        o, _ = chunk_mlstm(*given, head_first=False, cu_seqlens=bounds, sp=sp)
    elif name == "mamba3":
        x, dt, A, trap = draw(H, K), draw(H).exp(), -draw(H).exp(), draw(H)
        o, _ = mamba3(x, dt, A, draw(1, K), draw(1, K), trap, draw(H, K // 4), cu_seqlens=bounds, sp=sp)
    elif name == "linear_attn":
        o, _ = chunk_linear_attn(draw(H, K).exp(), draw(H, K).exp(), draw(H, K), cu_seqlens=bounds, sp=sp)
    else:
        o, _ = chunk_simple_gla(draw(H, K), draw(H, K), draw(H, K), -draw(H).exp(), cu_seqlens=bounds, sp=sp)
    between = sp.calls
    o.float().square().sum().backward()
    sp.check()
    return between - before, sp.calls - between


EXCHANGES = {"simple_gla": (1, 1), "linear_attn": (1, 1), "mlstm": (2, 1), "mamba3": (3, 3)}
"""Normalisers travel with the states that they belong to. Before them, of mLSTM, the maxima; of Mamba-3 weights of the
tokens behind, and angles."""
QUICK = (("mlstm", "kernels", False), ("mlstm", "pytorch", True))


@pytest.mark.parametrize(
    ("name", "how", "documents"),
    quick(itertools.product(EXCHANGES, ("kernels", "pytorch"), (False, True)), *QUICK),
)
def test_exchanges_of_a_pass(name: str, how: str, documents: bool) -> None:
    given: dict[str, Any] = KERNELS if how == "kernels" else {}
    assert run_ranks(counts, 3, name, documents, torch.float32, **given) == [EXCHANGES[name]] * 3


LENGTHS = (9, 0, 30, 17)


def of_op(
    sp: Any, name: str, dtype: torch.dtype, bounds: list[int] | None, seed: int, given_in: torch.dtype
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Outputs and gradients of inputs that are rounded to `given_in`; of ranks, joined."""
    T, H, K = sum(LENGTHS), 2, 16
    gen = torch.Generator().manual_seed(seed)
    several = sp.world_size > 1
    if several:
        sp.set_lengths(list(LENGTHS))

    def draw(*shape: int) -> torch.Tensor:
        x = torch.randn(1, *shape, T, generator=gen).movedim(-1, 1).to(given_in).to(dtype)  # not contiguous
        return (sp.shard(x) if several else x).detach().requires_grad_()

    given = {name: draw(H, K) for name in "qkv"}
    cu = None if bounds is None else torch.tensor(bounds)
    how: dict[str, Any] = {"cu_seqlens": cu, "sp": sp if several else False}
    if name == "mlstm":
        given |= {"i": draw(H), "f": draw(H)}
        o, last = chunk_mlstm(*given.values(), head_first=False, return_last_states=True, **how)
    else:
        q, k = given["q"].square() + 0.5, given["k"].square() + 0.5
        o, last = chunk_linear_attn(q, k, given["v"], output_final_state=True, **how)
    weights = torch.randn(1, T, H, K, generator=gen).to(given_in).to(dtype)
    loss = (o * (sp.shard(weights) if several else weights)).double().sum()
    for x in last or ():
        loss = loss + (x.double().sum() if x.requires_grad else 0)
    grads = torch.autograd.grad(loss, [*given.values()])
    sp.check()
    found = {"o": o, **{f"d{key}": dx for key, dx in zip(given, grads, strict=True)}}
    if several:
        found = {key: sp.gather(x) for key, x in found.items()}
    return {key: x.detach().double() for key, x in found.items()}


UNITS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize(
    ("name", "dtype", "how", "documents"),
    quick(
        itertools.product(("mlstm", "linear_attn"), UNITS, ("kernels", "pytorch"), (False, True)),
        ("mlstm", torch.float32, "kernels", True),
    ),
)
def test_states_that_travel_together_are_exact(
    name: str, dtype: torch.dtype, how: str, documents: bool, seed: int
) -> None:  # fmt: skip
    """Over shards of any length and over an empty one, against the same op in float64 on one rank."""
    given: dict[str, Any] = KERNELS if how == "kernels" else {}
    bounds = [0, 5, 20, 20, 56] if documents else None
    parts = run_ranks(of_op, len(LENGTHS), name, dtype, bounds, seed, dtype, **given)
    (whole,) = run_ranks(of_op, 1, name, torch.float64, bounds, seed, dtype)
    for part in parts:
        off = {key: ((part[key] - want).norm() / want.norm()).item() for key, want in whole.items()}
        assert max(off.values()) < UNITS[dtype], off
