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
    states[:, :count] if reverse else states[:, 1:]
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
def test_ranks_over_shared_memory_match_float64(world: int) -> None:
    calls = random_calls(world, world, 10)
    errors = run_ranks(chain_errors, world, calls, transport="posix", heap_mib=4, env=ENV)
    assert max(map(max, errors)) < 1e-5, errors
