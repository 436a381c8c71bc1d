"""Programs whose states are maxima, S' = max(S + a, F): against token loops, over documents and ranks, with ties."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor
from flexsp.scan.maxima import maxima_of
from flexsp.testing.ranks import run_ranks
from tests.marks import slow

H, K, V, C = 2, 3, 4, 8
BOUNDS = [0, 0, 5, 26, 26, 37]
Tensors = dict[str, Tensor]


def chunk(k: Any, v: Any, f: Any) -> Any:
    return ((k + f.sum(0) - f.cumsum(0))[:, :, None] + v[:, None, :]).amax(0)


def decay(prev_s: Any, chunk_state: Any, f: Any) -> Any:
    return torch.maximum(prev_s + f.sum(0)[:, None], chunk_state)


def merge(q: Any, k: Any, v: Any, f: Any, chunk_state: Any) -> Any:
    b = f.cumsum(0)
    pairs = ((q + b)[:, None, :] + (k - b)[None, :, :]).amax(2)
    later = torch.ones_like(pairs).triu(1) > 0
    inside = (pairs.masked_fill(later, -torch.inf)[:, :, None] + v[None, :, :]).amax(1)
    return torch.maximum(inside, ((q + b)[:, :, None] + chunk_state[None, :, :]).amax(1))


def meta() -> dict[str, Any]:
    h, k, v = ConstExpr("H", H), ConstExpr("K", K), ConstExpr("V", V)
    found = {name: SymbTensor(["T", h, v if name == "v" else k]) for name in "qkvf"}
    return found | {"prev_s": SymbTensor(["NS", h, k, v])}


def tropical(**options: Any) -> LinearAttention:
    """Linear attention with sums for products and maxima for sums."""
    return LinearAttention(meta(), chunk, decay, merge, chunk_size=C, **options)


def token_loop(x: Tensors, initial: Tensor, bounds: list[int] | None = None) -> tuple[Tensor, Tensor]:
    T, o, last = x["q"].shape[1], [], []
    for n, (begin, end) in enumerate(pairwise([0, T] if bounds is None else bounds)):
        S = initial if bounds is None else initial[n : n + 1]
        for t in range(begin, end):
            q, k, v, f = (x[name][:, t] for name in "qkvf")
            S = torch.maximum(S + f[..., None], k[..., None] + v[..., None, :])
            o.append((q[..., None] + S).amax(-2))
        last.append(S)
    return torch.stack(o, 1), torch.cat(last)


def draw(B: int, T: int, states: int, seed: int) -> tuple[Tensors, Tensor]:
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64)

    x = {name: normal(B, T, H, V if name == "v" else K) for name in "qkv"}
    x["f"] = -normal(B, T, H, K).square() / 4
    return x, 2 * normal(states, H, K, V)


def differentiated(call: Any, x: Tensors, initial: Tensor, seed: int) -> Tensors:
    """Outputs, final states if there are any, and gradients."""
    leaves = {name: y.clone().requires_grad_() for name, y in (x | {"initial": initial}).items()}
    results = [y for y in call({name: leaves[name] for name in x}, leaves["initial"]) if y is not None]
    made = torch.Generator().manual_seed(seed)
    cotangents = [torch.randn(y.shape, generator=made, dtype=torch.float64) for y in results]
    grads = torch.autograd.grad(results, list(leaves.values()), cotangents, materialize_grads=True)
    return {**{str(i): y.detach() for i, y in enumerate(results)}, **dict(zip(leaves, grads, strict=True))}


def compared(got: Tensors, want: Tensors) -> list[str]:
    return [name for name, x in want.items() if not torch.allclose(got[name], x, rtol=1e-9, atol=1e-9)]


@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["whole", "packed"])
def test_against_the_token_loop(bounds: list[int] | None, seed: int) -> None:
    model, N = tropical(), 2 if bounds is None else len(bounds) - 1
    assert model.program.transition == "max-plus" and "transition: max-plus (" in model.explain()
    x, initial = draw(1 if bounds else 2, 37, N, seed)
    cu = None if bounds is None else torch.tensor(bounds)
    want = differentiated(lambda y, S: token_loop(y, S, bounds), x, initial, seed)
    got = differentiated(lambda y, S: model(**y, prev_s=S, cu_seqlens=cu), x, initial, seed)
    assert not compared(got, want)
    o, final = model(**x, cu_seqlens=cu)
    zeros = token_loop(x, torch.zeros_like(initial), bounds)
    assert torch.allclose(o, zeros[0]) and torch.allclose(final, zeros[1])


def test_a_maximum_over_nothing(seed: int) -> None:
    """Begins at -inf, where it is given so, and what is not yet there has no gradient."""
    model, (x, initial) = tropical(), draw(1, 21, 1, seed)
    x["k"][:, :10, :, 0] = -torch.inf
    initial[:] = -torch.inf
    want = differentiated(token_loop, x, initial, seed)
    got = differentiated(lambda y, S: model(**y, prev_s=S), x, initial, seed)
    assert want["0"].isfinite().all() and not compared(got, want)


def by_chunk(x: Tensors, S: Tensor) -> tuple[Tensor, Tensor]:
    """The functions as they are, one chunk after the other."""
    o = []
    for t in range(0, x["q"].shape[1], C):
        outputs, states = [], []
        for h in range(H):
            values = {name: y[0, t : t + C, h] for name, y in x.items()}

            def call(function: Any, given: Tensors) -> Tensor:
                return function(**{name: given[name] for name in inspect.signature(function).parameters})

            F = call(chunk, values)
            outputs.append(call(merge, values | {"chunk_state": S[0, h]}))
            states.append(call(decay, values | {"prev_s": S[0, h], "chunk_state": F}))
        o.append(torch.stack(outputs, 1))
        S = torch.stack(states)[None]
    return torch.cat(o)[None], S


def test_equal_numbers_share_gradients_as_in_a_loop(seed: int) -> None:
    """By halves, chunk after chunk, however chunks are grouped."""
    x, initial = draw(1, 40 * C + 3, 1, seed)
    x, initial = {name: y.round() for name, y in x.items()}, initial.round()
    want = differentiated(by_chunk, x, initial, seed)
    assert not compared(differentiated(lambda y, S: tropical()(**y, prev_s=S), x, initial, seed), want)


def test_what_is_not_finite_stays_in_its_document(seed: int) -> None:
    model, (x, initial) = tropical(), draw(1, 37, len(BOUNDS) - 1, seed)
    x["k"][:, 9, 1] = torch.nan
    leaves = {name: y.requires_grad_() for name, y in x.items()}
    o, final = model(**leaves, prev_s=initial, cu_seqlens=torch.tensor(BOUNDS))
    where = torch.zeros(37, H, dtype=torch.bool)
    where[9:26, 1] = True
    assert torch.equal(o[0].isnan().any(-1), where)
    assert final.isnan().flatten(1).any(1).tolist() == [n == 2 for n in range(5)]
    others = [*range(5), *range(26, 37)]
    for name, dx in zip(leaves, torch.autograd.grad(o[0, others].sum(), leaves.values()), strict=True):
        assert dx[:, others].isfinite().all(), name


def test_nothing_enters_from_before_the_documents() -> None:
    """Chunks of a document that began before them are given what enters by other ranks alone."""
    a, F = torch.zeros(1, 1, 2, 1), torch.full((1, 1, 2, 1), -3.0)
    begun, first = torch.tensor([-torch.inf, 4.0]).view(1, 1, 2, 1), torch.tensor([False, True])
    found = maxima_of(a, F, torch.full((1, 1, 1), 5.0), begun, first, None)
    assert found.before.flatten().tolist() == [-torch.inf, 4.0]
    assert found.around.flatten().tolist() == [-torch.inf, -3.0, 4.0]


def on_ranks(sp: Any, lengths: list[int], bounds: list[int] | None, seed: int) -> Tensors:
    """This rank's part."""
    sp.set_lengths(lengths)
    x, initial = draw(1, sum(lengths), 1 if bounds is None else len(bounds) - 1, seed)
    start, stop, _ = sp.shard_range(lengths[sp.rank])
    made = torch.Generator().manual_seed(seed)
    do = torch.randn(1, sum(lengths), H, V, generator=made, dtype=torch.float64)[:, start:stop]
    leaves = {name: y[:, start:stop].clone().requires_grad_() for name, y in x.items()}
    state = initial.clone().requires_grad_() if bounds is not None or sp.is_first else None
    cu = None if bounds is None else torch.tensor(bounds)
    o, final = tropical()(**leaves, prev_s=state, cu_seqlens=cu, sp=sp)
    ends, cotangents = [o], [do]
    if final is not None:
        ends, cotangents = [o, final], [do, torch.ones_like(final)]
    wanted = [*leaves.values(), *([] if state is None else [state])]
    grads = torch.autograd.grad(ends, wanted, cotangents, materialize_grads=True)
    found = {"o": o.detach(), **dict(zip([*leaves, "initial"], grads, strict=False))}
    return found if final is None else found | {"final": final.detach()}


@pytest.mark.parametrize(
    ("lengths", "bounds", "schedule"),
    [([13, 0, 24], None, "all_gather"), ([6, 2, 29], BOUNDS, None)]
    + slow(([0, 20, 17], None, None), ([37, 0, 0], None, None), ([1, 11, 25], BOUNDS, "all_gather"),
           ([0, 37, 0], BOUNDS, None)),
)  # fmt: skip
def test_ranks(lengths: list[int], bounds: list[int] | None, schedule: str | None, seed: int) -> None:
    """Side by side: no schedule but these two hands on what depends on what came before it."""
    parts = run_ranks(on_ranks, len(lengths), lengths, bounds, seed, schedule=schedule)
    (want,) = run_ranks(on_ranks, 1, [sum(lengths)], bounds, seed)
    for name, x in want.items():
        pieces = [part[name] for part in parts if name in part]
        got = torch.stack(pieces).sum(0) if name in ("initial", "final") else torch.cat(pieces, 1)
        assert torch.allclose(got, x, rtol=1e-9, atol=1e-9), name


OTHERS = {
    "two of the state": (lambda prev_s, chunk_state, f: torch.maximum(prev_s + 1, prev_s - f.sum(0)[:, None]), True),
    "the other way round": (lambda prev_s, chunk_state, f: torch.maximum(chunk_state, f[0][:, None] + prev_s), True),
    "more than the chunk's": (
        lambda prev_s, chunk_state, f: torch.maximum(chunk_state, prev_s).clamp_min(-1) - f.square().sum(), True,
    ),
    "a factor": (lambda prev_s, chunk_state, f: torch.maximum(prev_s * 0.5, chunk_state), False),
    "a sum": (lambda prev_s, chunk_state, f: torch.maximum(prev_s + prev_s.sum(), chunk_state), False),
    "a minimum": (lambda prev_s, chunk_state, f: torch.minimum(prev_s + f.sum(), chunk_state), False),
    "more after it": (lambda prev_s, chunk_state, f: torch.maximum(prev_s, chunk_state).tanh(), False),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_a_maximum(name: str, seed: int) -> None:
    """In PyTorch it is computed as written, whichever it is."""
    function, is_one = OTHERS[name]
    model = LinearAttention(meta(), chunk, function, merge, chunk_size=C)
    assert (model.program.transition == "max-plus") == is_one
    x, initial = draw(1, 3 * C, 1, seed)
    _, final = model(**x, prev_s=initial)
    S = initial[0]
    for t in range(0, 3 * C, C):
        given = [{key: y[0, t : t + C, h] for key, y in x.items()} for h in range(H)]
        F = [chunk(y["k"], y["v"], y["f"]) for y in given]
        S = torch.stack([function(S[h], F[h], given[h]["f"]) for h in range(H)])
    assert torch.allclose(final[0], S)
