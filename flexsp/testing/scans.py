"""Random problems for ``scan.propagate`` on any number of ranks, and their float64 answer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel

__all__ = ["ScanCall", "fill_slots_with_nan", "random_calls", "scan_error", "scan_oracle"]

KINDS = ("none", "scalar", "vector", "elementwise", "max-plus")


@dataclass(frozen=True)
class ScanCall:
    """One call of propagate on all ranks. ``nsegs``: segments of each rank; ``kind``: of decay, or "dense"."""

    B: int
    H: int
    K: int
    V: int
    nsegs: tuple[int, ...]
    kind: str = "scalar"
    cuts: bool = False
    reverse: bool = False

    def draw(
        self, seed: int, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
        """All ranks' segments: F [B, n, H, K, V], log_a (or A or factors), cut, and the state that enters first.

        Ranks on devices of one kind draw alike.
        """
        gen = torch.Generator(device).manual_seed(seed)
        normal, uniform = (partial(f, generator=gen, device=device) for f in (torch.randn, torch.rand))
        n = sum(self.nsegs)
        F = normal(self.B, n, self.H, self.K, self.V)
        if self.kind == "dense":
            A = normal(self.B, n, self.H, self.K, self.K) / self.K**0.5
            return F, A, None, normal(self.B, self.H, self.K, self.V)
        shape = (self.B, n, self.H) if self.kind == "scalar" else (self.B, n, self.H, self.K)
        log_a = None if self.kind == "none" else -3 * uniform(shape)
        if self.kind == "elementwise":  # factors; some are 0
            log_a = (2 * uniform(F.shape) - 1).masked_fill(uniform(F.shape) < 0.1, 0.0)
        if self.kind == "max-plus":  # shifts
            log_a = normal(*F.shape)
        cut = (uniform(self.B, n) < 0.3).int() if self.cuts else None
        return F, log_a, cut, normal(self.B, self.H, self.K, self.V)


def random_calls(
    seed: int, world: int, count: int, *, heads: int = 2, size: int = 40, segments: int = 5
) -> list[ScanCall]:
    """Calls of random shapes, transitions and directions; ranks may have no segment at all."""
    gen = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=gen))

    calls = []
    for i in range(count):
        kind = "dense" if i % 4 == 3 else KINDS[pick(0, len(KINDS) - 1)]
        most = 1 if kind == "dense" else segments
        K = pick(1, size)
        nsegs = tuple(pick(0, most) for _ in range(world))
        calls.append(
            ScanCall(
                pick(1, 2), pick(1, heads), K, pick(1, size), nsegs, kind, bool(pick(0, 1)),
                bool(pick(0, 1)) and kind != "max-plus",
            )  # fmt: skip
        )
    return calls


def scan_oracle(
    F: torch.Tensor, log_a: torch.Tensor | None, cut: torch.Tensor | None, initial: torch.Tensor, reverse: bool,
    kind: str = "",
) -> torch.Tensor:  # fmt: skip
    """Boundary states [B, n + 1, H, K, V] of the whole sequence in float64. ``log_a`` as `ScanCall.draw` gives it for
    the ``kind``."""
    B, n, H, K, V = F.shape
    out = F.new_empty(B, n + 1, H, K, V, dtype=torch.float64)
    S = out[:, n if reverse else 0] = initial.double()
    for s in range(n - 1, -1, -1) if reverse else range(n):
        if log_a is not None and kind == "max-plus":
            dropped = S.new_zeros(B, dtype=torch.bool) if cut is None else cut[:, s] != 0
            S = (S + log_a[:, s].double()).masked_fill(dropped[:, None, None, None], float("-inf"))
            out[:, s + 1] = S = torch.maximum(S, F[:, s].double())
            continue
        if log_a is not None and kind == "elementwise":
            S = log_a[:, s].double() * S
        elif log_a is not None and kind == "dense":
            A = log_a[:, s].double()
            S = (A.mT if reverse else A) @ S
        elif log_a is not None:
            a = log_a[:, s].double().exp()
            S = S * (a[..., None, None] if a.dim() == 2 else a[..., None])
        if cut is not None:
            S = torch.where((cut[:, s] != 0)[:, None, None, None], torch.zeros_like(S), S)
        S = S + F[:, s].double()
        out[:, s if reverse else s + 1] = S
    return out


def scan_error(sp: SequenceParallel | None, call: ScanCall, seed: int, device: torch.device | str = "cpu") -> float:
    """Runs this rank's part of a call; largest absolute error over its boundary states, inf if one is NaN.

    The slot that the neighbour's state goes to is NaN before.
    """
    from flexsp.scan.propagate import propagate
    from flexsp.scan.transitions import Transition

    rank, world = (0, 1) if sp is None else (sp.rank, sp.world_size)
    F, log_a, cut, initial = call.draw(seed, device)
    want = scan_oracle(F, log_a, cut, initial, call.reverse, call.kind)
    begin, count = sum(call.nsegs[:rank]), call.nsegs[rank]
    part = slice(begin, begin + count)
    states = torch.full((call.B, count + 1, call.H, call.K, call.V), float("nan"), device=device)
    (states[:, :count] if call.reverse else states[:, 1:]).copy_(F[:, part])
    if rank == (world - 1 if call.reverse else 0):
        states[:, count if call.reverse else 0] = initial
    mine = [None if x is None else x[:, part] for x in (log_a, cut)]
    propagate(states, Transition(call.kind, *mine), sp, reverse=call.reverse)
    error = (states.double() - want[:, begin : begin + count + 1]).abs().max().item()
    return error if error == error else float("inf")


def fill_slots_with_nan(sp: SequenceParallel) -> None:
    """What no rank has sent must never be used: NaN in all tile slots of this rank's arena. Collective."""
    from flexsp.scan.propagate import CHAIN_TILE, _channel

    channel = _channel(sp)
    for edge in channel.edges:
        edge.home[: 2 * channel.max_tiles * CHAIN_TILE] = float("nan")
    if sp.device.type == "cuda":
        torch.cuda.synchronize(sp.device)
    torch.distributed.barrier(group=sp.cpu_group)
