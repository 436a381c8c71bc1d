"""Inputs of a variant that are others a token earlier: values, gradients, documents, ranks, kernels."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from flexsp.comm.group import SequenceParallel
from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor, decayed_scores
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED

H, K, V = 2, 16, 6
BOUNDS = [0, 0, 12, 50, 50, 75]
Tensors = dict[str, Tensor]


def chunk(v, mixed, g):
    return (mixed * (g.sum(0) - g.cumsum(0)).exp()[:, None]).T @ v


def chunk_mode(k, v, k_before, g):
    return chunk(v, k + 0.5 * k_before, g)


def decay_mode(prev_s, chunk_state, g):
    return prev_s * g.sum(0).exp() + chunk_state


def merge_mode(q, k, v, k_before, v_before, g, chunk_state):
    b = g.cumsum(0)
    pairs = decayed_scores(q, k + 0.5 * k_before, b)
    return pairs @ v + (q * b.exp()[:, None]) @ chunk_state + v_before.tanh()


def meta(**changed: Any) -> dict[str, Any]:
    h, k, v = ConstExpr("H", H), ConstExpr("K", K), ConstExpr("V", V)
    found = {"q": SymbTensor(["T", h, k]), "k": SymbTensor(["T", h, k]), "v": SymbTensor(["T", h, v])}
    found |= {"g": SymbTensor(["T", h]), "k_before": SymbTensor(["T", h, k], before="k")}
    found |= {"v_before": SymbTensor(["T", h, v], before="v"), "prev_s": SymbTensor(["NS", h, k, v])}
    return found | changed


def variant() -> LinearAttention:
    return LinearAttention(meta(), chunk_mode, decay_mode, merge_mode)


def token_loop(x: Tensors, bounds: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """Of [B, T, ...]; k_before, v_before [N, H, ...] and prev_s where they are given."""
    T, o, last = x["q"].shape[1], [], []
    for n, (begin, end) in enumerate(pairwise([0, T] if bounds is None else bounds)):
        at = slice(n, n + 1) if bounds is not None else slice(None)
        k, v, S = (x[name][at] if name in x else None for name in ("k_before", "v_before", "prev_s"))
        S = x["q"].new_zeros(x["q"].shape[0], H, K, V) if S is None else S
        k, v = (x["k"][:, 0] * 0 if k is None else k), (x["v"][:, 0] * 0 if v is None else v)
        for t in range(begin, end):
            mixed = x["k"][:, t] + 0.5 * k
            S = x["g"][:, t].exp()[..., None, None] * S + mixed[..., :, None] * x["v"][:, t][..., None, :]
            o.append((x["q"][:, t][..., None] * S).sum(-2) + v.tanh())
            k, v = x["k"][:, t], x["v"][:, t]
        last.append(S)
    return torch.stack(o, 1), torch.cat(last)


def draw(B: int, T: int, states: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensors:
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64).to(dtype)

    x = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V), "g": -normal(B, T, H).abs()}
    if states:
        x |= {"k_before": normal(states, H, K), "v_before": normal(states, H, V), "prev_s": normal(states, H, K, V)}
    return x


def leaves(x: Tensors) -> Tensors:
    return {name: y.detach().clone().requires_grad_() for name, y in x.items()}


def compare(x: Tensors, bounds: list[int] | None, bound: float) -> None:
    cu = None if bounds is None else torch.tensor(bounds)
    mine, wide = leaves(x), leaves({name: y.double() for name, y in x.items()})
    found, want = variant()(**mine, cu_seqlens=cu, sp=False), token_loop(wide, bounds)
    made = torch.Generator().manual_seed(3)
    given = [torch.randn(y.shape, generator=made, dtype=torch.float64) for y in want]
    grads = torch.autograd.grad(found, list(mine.values()), [y.to(found[0].dtype) for y in given])
    exact = torch.autograd.grad(want, list(wide.values()), given)
    names = ("o", "final", *(f"d{name}" for name in mine))
    errors = {name: relative_error(a, b) for name, a, b in zip(names, (*found, *grads), (*want, *exact), strict=True)}
    assert max(errors.values()) < bound, errors


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("bounds", [None, BOUNDS])
def test_against_a_token_loop(bounds: list[int] | None, states: bool, seed: int) -> None:
    B, N = (2, 2) if bounds is None else (1, len(BOUNDS) - 1)
    compare(draw(B, 75, N if states else 0, seed), bounds, 1e-12)


def test_without_a_batch(seed: int) -> None:
    x = draw(1, 40, 0, seed)
    o, final = variant()(**{name: y[0] for name, y in x.items()})
    want = token_loop(x)
    assert torch.allclose(o, want[0][0]) and torch.allclose(final, want[1])


def in_kernels(sp: SequenceParallel, seed: int) -> str:
    x = draw(1, 75, len(BOUNDS) - 1, seed, torch.float32)
    compare(x, BOUNDS, 1e-5)
    compare(draw(2, 75, 0, seed, torch.float32), None, 1e-5)
    return variant().runs(**{name: x[name] for name in ("q", "k", "v", "g")})


@pytest.mark.slow
def test_kernels() -> None:
    assert run_ranks(in_kernels, 1, random.randrange(2**31), env=INTERPRETED) == ["runs generated kernels"]


def over_ranks(sp: SequenceParallel, seed: int, lengths: list[int], bounds: list[int] | None) -> dict[str, Tensors]:
    """Outputs and gradients; of a loss of all, and of one of which the ranks use outputs or final states alone."""
    N = 2 if bounds is None else len(bounds) - 1
    x = draw(2 if bounds is None else 1, 75, N, seed)
    at = slice(sum(lengths[: sp.rank]), sum(lengths[: sp.rank + 1]))
    mine = leaves({name: y[:, at] if name in ("q", "k", "v", "g") else y for name, y in x.items()})
    if bounds is None and sp.rank:
        mine = {name: mine[name] for name in ("q", "k", "v", "g")}
    sp.set_lengths(lengths)
    cu, found = None if bounds is None else torch.tensor(bounds), {}
    for used in ("both", "one"):
        o, final = variant()(**mine, cu_seqlens=cu, sp=sp)
        outputs = [o] if final is None else [o, final] if used == "both" else [final] if sp.is_last else [o]
        loss = sum(y.sin().sum() for y in outputs)
        grads = torch.autograd.grad(loss, list(mine.values()), allow_unused=True)
        named = {name: g for name, g in zip(mine, grads, strict=True) if g is not None}
        found[used] = {"o": o.detach(), **named}
    return found


@pytest.mark.parametrize("bounds", [None, BOUNDS])
@pytest.mark.parametrize("lengths", [[30, 0, 45], [0, 74, 1]])
def test_ranks_equal_one_rank(lengths: list[int], bounds: list[int] | None, seed: int) -> None:
    """The second loss uses outputs on some ranks and final states on others: all exchange the same, or one waits."""
    parts = run_ranks(over_ranks, 3, seed, lengths, bounds)
    x = leaves(draw(2 if bounds is None else 1, 75, 2 if bounds is None else len(BOUNDS) - 1, seed))
    o, final = variant()(**x, cu_seqlens=None if bounds is None else torch.tensor(bounds), sp=False)
    grads = dict(zip(x, torch.autograd.grad(o.sin().sum() + final.sin().sum(), list(x.values())), strict=True))
    for name, want in ({"o": o} | grads).items():
        found = [part["both"][name] for part in parts if name in part["both"]]
        together = torch.cat(found, 1) if name in ("o", "q", "k", "v", "g") else torch.stack(found).sum(0)
        assert relative_error(together, want) < 1e-12, name


@pytest.mark.slow
def test_one_graph(seed: int) -> None:
    model, x = variant(), draw(2, 75, 2, seed)
    compiled = torch.compile(lambda **given: model(**given, sp=False), backend="aot_eager", fullgraph=True)
    for got, want in zip(compiled(**x), model(**x, sp=False), strict=True):
        assert torch.allclose(got, want)


WRONG = {
    "of no input": ({"k_before": SymbTensor(["T", ConstExpr("H", H), ConstExpr("K", K)], before="w")}, "got 'w'"),
    "of one that is earlier itself": (
        {"k_before": SymbTensor(["T", ConstExpr("H", H), ConstExpr("V", V)], before="v_before")}, "got 'v_before'"
    ),
    "of another shape": (
        {"k_before": SymbTensor(["T", ConstExpr("H", H), ConstExpr("V", V)], before="k")}, "expected the shape"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_metadata_is_named(case: str) -> None:
    changed, text = WRONG[case]
    with pytest.raises(ValueError, match=rf"input_meta\['k_before'\]: .*{text}"):
        LinearAttention(meta(**changed), chunk_mode, decay_mode, merge_mode)


def test_wrong_calls_are_named() -> None:
    model, x = variant(), draw(2, 5, 2, 0)
    for changed, text in (
        ({"k_before": x["k_before"][:1]}, r"k_before: expected what is before the first tokens of k, \(2, 2, 16\)"),
        ({"k_before": x["k_before"].float()}, "k_before: .* got .*float32"),
        ({"k_before": 3}, "k_before: expected what is before the first tokens of k, got int"),
        ({"k": x["k"].long()}, "k: expected a floating tensor"),
        ({"w": x["k"]}, r"inputs: expected \['g', 'k', 'q', 'v'\]; missing \[\], unknown \['w'\]"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens: expected batch size 1"),
    ):
        with pytest.raises(ValueError, match=text):
            model(**x | changed, sp=False)
    with pytest.raises(ValueError, match=r"missing \['k'\]"):
        model(**{name: y for name, y in x.items() if name != "k"}, sp=False)


def test_another_length_than_was_set() -> None:
    """Refused before ranks exchange anything: the other one does not exist."""
    sp = SequenceParallel(rank=0, world_size=2)
    sp.set_lengths([5, 5])
    with pytest.raises(ValueError, match=r"^rank 0: expected a shard of 5 tokens \(set_lengths\), got 6$"):
        variant()(**draw(1, 6, 0, 0), sp=sp)
