"""Ops of the engine for scalar decays on one problem, under the interpreter."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from flexsp.kernels.diagonal.op import diagonal
from flexsp.testing import oracles
from flexsp.testing.cases import CASES, Case, Shape
from flexsp.testing.compare import WIDE, check_op
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED, poisoned

ONE_SEGMENT, SOME_SEGMENTS, MANY_SEGMENTS = 1, 2, 256
GATES = (0.0, -1e-6, -1.0, -20.0, -103.0, -105.0, -1e3, -1e4)


def _weights(s: Shape, r: torch.Generator, of: str) -> dict[str, Any]:
    made = CASES[of].make(s, r)
    return made | {"w": torch.randn(s.B, s.T, s.H, generator=r, dtype=torch.float64)}


def _with_weights(w: torch.Tensor, v: torch.Tensor, engine: Any = oracles.token_loop, **given: Any) -> Any:
    o, final = oracles.simple_gla(v=v, engine=engine, **given)
    return (o + w.unsqueeze(-1).to(torch.promote_types(o.dtype, torch.float32)) * v).to(o.dtype), final


def weighed(of: str) -> Case:
    """The engine on the inputs of a case, with weights of tokens by which outputs have values besides."""
    return Case(partial(diagonal, scale=0.3), partial(_with_weights, scale=0.3), partial(_weights, of=of))


def _write_gates(s: Shape, r: torch.Generator, of: str) -> dict[str, Any]:
    """About every fifth token writes nothing."""
    made, shape = CASES[of].make(s, r), (s.B, s.T, s.H)
    i = -3 * torch.rand(shape, generator=r, dtype=torch.float64)
    return made | {"i": i.masked_fill(torch.rand(shape, generator=r) < 0.2, -torch.inf)}


def _with_write_gates(i: torch.Tensor, k: torch.Tensor, engine: Any = oracles.token_loop, **given: Any) -> Any:
    weights = i.to(torch.promote_types(k.dtype, torch.float32)).exp()
    return oracles.simple_gla(k=(k * weights.unsqueeze(-1)).to(k.dtype), engine=engine, **given)


def writing(of: str) -> Case:
    """The engine on the inputs of a case, with log weights of tokens by which keys are multiplied."""
    return Case(partial(diagonal, scale=0.3), partial(_with_write_gates, scale=0.3), partial(_write_gates, of=of))


def _apart(s: Shape, r: torch.Generator, of: str) -> dict[str, Any]:
    return CASES[of].make(s, r) if s.V == 1 else _weights(s, r, of)


def _without_own(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, w: torch.Tensor | None = None,
    engine: Any = oracles.token_loop, **given: Any,
) -> Any:  # fmt: skip
    o, final = oracles.simple_gla(q, k, v, scale=scale, engine=engine, **given)
    wide = torch.promote_types(o.dtype, torch.float32)
    q, k, x = (x.to(wide) for x in (q, k, v))
    more = -scale * (q * k).sum(-1, keepdim=True)
    if w is not None:
        more = more + w.unsqueeze(-1).to(wide)
    return (o.to(wide) + more * x).to(o.dtype), final


def apart(of: str) -> Case:
    """As `weighed`, where tokens do not read what they write themselves; of one channel there are no weights."""
    return Case(partial(diagonal, scale=0.3, strict=True), partial(_without_own, scale=0.3), partial(_apart, of=of))


WEIGHED = {f"weights, {name}": weighed(name) for name in ("linear", "simple_gla", "gamma")}
WEIGHED |= {f"write gates, {name}": writing(name) for name in ("simple_gla", "gamma")}
WEIGHED |= {f"own products apart, {name}": apart(name) for name in ("linear", "simple_gla", "gamma")}


@contextmanager
def one_walk(shared: Any = None) -> Iterator[None]:
    """One walk for dk and dv; `shared` tiles for gradients where heads share keys, with chunks of 32 tokens, and memory
    for the states of one piece of the tokens."""
    from flexsp.kernels.diagonal import tiles, tiling
    from flexsp.kernels.diagonal.tiles import Tile, Tiles

    whole, choose, few = Tile(64, 32, 8, 1), tiles.choose, tiles.FEW
    found = Tiles(16 if shared is None else 32, whole, whole, dq=whole, dk=whole, dv=None)
    tiles.choose, tiles.FEW = lambda *args: replace(found, shared=shared if args[5] else None), 1
    tiling.tiling_of.cache_clear()
    try:
        yield
    finally:
        tiles.choose, tiles.FEW = choose, few
        tiling.tiling_of.cache_clear()


def shared_keys(programs: int, pieces: int) -> Any:
    """Tiles of gradients where heads share keys, with several warp groups, whose sums over channels are in parts: heads
    in so many blocks that there are `programs`, tokens in `pieces`."""
    from flexsp.kernels.diagonal.tiles import SharedTiles, Tile

    return SharedTiles(Tile(16, 16, 4, 1), Tile(64, 32, 4, 1), Tile(16, 32, 8, 1), programs, pieces)


@dataclass(frozen=True)
class Run:
    """One op on one rank; ``bounds`` are document boundaries, ``gates`` takes g from GATES instead.

    ``one_walk``: tiles as bf16 has them, one walk for dk and dv, several warp groups. ``shared``: see `shared_keys`.
    """

    case: str
    shape: Shape
    dtype: torch.dtype = torch.float32
    bounds: tuple[int, ...] | None = None
    strided: bool = False
    gates: bool = False
    segments: int = MANY_SEGMENTS
    one_walk: bool = False
    shared: tuple[int, int] | None = None
    seed: int = 0


def other_strides(x: torch.Tensor) -> torch.Tensor:
    """The same values behind other strides: heads before tokens, or every second channel of a wider tensor."""
    if x.dim() == 4:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return torch.stack([x, torch.full_like(x, float("nan"))], dim=-1)[..., 0]


def failures(sp: Any, runs: list[Run]) -> list[str]:
    """Body of the worker: what is outside its bound."""
    found = []
    for run in runs:
        case = (CASES | WEIGHED)[run.case]
        inputs = case.inputs(run.shape, run.seed)
        if run.gates:
            choice = torch.randint(len(GATES), inputs["g"].shape, generator=torch.Generator().manual_seed(run.seed))
            inputs["g"] = torch.tensor(GATES, dtype=torch.float64)[choice]
        if run.bounds:
            inputs["cu_seqlens"] = torch.tensor(run.bounds, dtype=random.choice([torch.int32, torch.int64]))
        arrange = other_strides if run.strided else None
        tiles = one_walk(run.shared and shared_keys(*run.shared)) if run.one_walk or run.shared else nullcontext()
        with poisoned(run.segments, run.shape.B * run.shape.H), tiles:
            try:
                check_op(case.op, case.oracle, inputs, dtype=run.dtype, arrange=arrange, wide=(*WIDE, "w", "i"))
            except Exception as error:
                found.append(f"{run}:\n{type(error).__name__}: {error}")
    return found


def check_runs(*runs: Run) -> None:
    seeded = [replace(run, seed=random.randrange(2**31)) for run in runs]
    (found,) = run_ranks(failures, 1, seeded, env=INTERPRETED)
    assert not found, "\n".join(found)


T, H = 150, 2


def gates_of(kind: str, seed: int) -> torch.Tensor:
    """[1, T, H], float64."""
    r = torch.Generator().manual_seed(seed)
    uniform = torch.rand(1, T, H, generator=r, dtype=torch.float64)
    if kind == "none":
        return torch.zeros(1, T, H, dtype=torch.float64)
    if kind == "some tens of tokens":
        return -4.0 * uniform
    if kind == "one slow head":
        return -uniform * torch.tensor([8.0, 1e-3])
    if kind == "huge":
        return -1e4 * uniform
    if kind == "as models begin":  # A of 0..16 a head, dt log-uniform from 1e-3 to 0.1
        return -16.0 * torch.rand(H, generator=r, dtype=torch.float64) * torch.exp(uniform * 4.6 - 6.9)
    if kind == "large numbers far away":
        return torch.full((1, T, H), -0.6, dtype=torch.float64)
    assert kind == "closed here and there"
    return torch.tensor(GATES, dtype=torch.float64)[torch.randint(len(GATES), (1, T, H), generator=r)]
