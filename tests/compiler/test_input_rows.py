"""Inputs with several rows a token, and inputs whose heads come first: values, gradients, documents, ranks, kernels."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from flexsp import ops
from flexsp.comm.group import SequenceParallel
from flexsp.compiler import (
    LinearAttention,
    SymbTensor,
)
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED
from tests.harness.rows import H, K, V, chunk, decay, h, heads_first, k, merge, meta, v

BOUNDS = [0, 0, 12, 30, 30, 45]
TOKENS = ("q", "k", "v", "beta", "g")
Tensors = dict[str, Tensor]


def product(n: int, **changed: Any) -> LinearAttention:
    return LinearAttention(meta(n, **changed), chunk, decay, merge)


def token_loop(x: Tensors, bounds: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """Of [B, T, ...] and [B, T, n, ...]; prev_s where it is given."""
    B, T, n = x["k"].shape[:3]
    o, last = [], []
    for i, (begin, end) in enumerate(pairwise([0, T] if bounds is None else bounds)):
        S = x["q"].new_zeros(B, H, K, V)
        if "prev_s" in x:
            S = x["prev_s"] if bounds is None else x["prev_s"][i : i + 1]
        for t in range(begin, end):
            S = x["g"][:, t].exp()[..., None, None] * S
            for row in range(n):
                key = x["k"][:, t, row].unsqueeze(-1)
                error = x["v"][:, t, row] - (key * S).sum(-2)
                S = S + key * (x["beta"][:, t, row].unsqueeze(-1) * error).unsqueeze(-2)
            o.append((x["q"][:, t].unsqueeze(-1) * S).sum(-2))
        last.append(S)
    return torch.stack(o, 1), torch.cat(last)


def draw(n: int, B: int, T: int, states: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensors:
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64)

    x = {"q": normal(B, T, H, K), "k": torch.nn.functional.normalize(normal(B, T, n, H, K), dim=-1)}
    x |= {"v": normal(B, T, n, H, V), "beta": normal(B, T, n, H).sigmoid(), "g": -normal(B, T, H).abs()}
    if states:
        x["prev_s"] = normal(states, H, K, V)
    return {name: y.to(dtype) for name, y in x.items()}


def leaves(x: Tensors) -> Tensors:
    return {name: y.detach().clone().requires_grad_() for name, y in x.items()}


def compare(model: LinearAttention, x: Tensors, bounds: list[int] | None, bound: float) -> None:
    cu = None if bounds is None else torch.tensor(bounds)
    mine, wide = leaves(x), leaves({name: y.double() for name, y in x.items()})
    found, want = model(**mine, cu_seqlens=cu, sp=False), token_loop(wide, bounds)
    made = torch.Generator().manual_seed(3)
    given = [torch.randn(y.shape, generator=made, dtype=torch.float64) for y in want]
    grads = torch.autograd.grad(found, list(mine.values()), [y.to(found[0].dtype) for y in given])
    exact = torch.autograd.grad(want, list(wide.values()), given)
    names = ("o", "final", *(f"d{name}" for name in mine))
    errors = {name: relative_error(a, b) for name, a, b in zip(names, (*found, *grads), (*want, *exact), strict=True)}
    assert max(errors.values()) < bound, errors


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("bounds", [None, BOUNDS])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_against_a_token_loop(n: int, bounds: list[int] | None, states: bool, seed: int) -> None:
    """45 tokens of 3 rows: chunks of 64 rows end inside tokens."""
    B, N = (2, 2) if bounds is None else (1, len(BOUNDS) - 1)
    compare(product(n), draw(n, B, 45, N if states else 0, seed), bounds, 1e-12)


@pytest.mark.parametrize("bounds", [None, BOUNDS])
@pytest.mark.parametrize("n", [2, 3])
def test_it_is_the_op(n: int, bounds: list[int] | None, seed: int) -> None:
    x = draw(n, 1, 45, 1 if bounds is None else len(BOUNDS) - 1, seed)
    cu = None if bounds is None else torch.tensor(bounds)
    rows = {name: x[name].flatten(1, 2) for name in ("k", "v", "beta")}
    want = ops.chunk_gated_delta_product(
        x["q"], **rows, g=x["g"], num_householder=n, scale=1.0, initial_state=x["prev_s"], output_final_state=True,
        cu_seqlens=cu,
    )  # fmt: skip
    for got, other in zip(product(n)(**x, cu_seqlens=cu), want, strict=True):
        assert relative_error(got, other) < 1e-12


def test_without_a_batch_and_without_tokens(seed: int) -> None:
    x = draw(2, 1, 21, 0, seed)
    o, final = product(2)(**{name: y[0] for name, y in x.items()})
    want = token_loop(x)
    assert torch.allclose(o, want[0][0]) and torch.allclose(final, want[1])
    o, final = product(2)(**{name: y[:, :0] for name, y in x.items()})
    assert o.shape == (1, 0, H, V) and not final.any()


def test_a_value_that_all_rows_have(seed: int) -> None:
    """Queries of which only a token's last row is read, and its strength as that of each of its keys."""
    x = draw(3, 2, 21, 0, seed)
    x["beta"] = x["beta"][:, :, :1].expand_as(x["beta"])
    model = product(3, q=SymbTensor(["T", h, k]), beta=SymbTensor(["T", h]))
    for got, want in zip(model(**x | {"beta": x["beta"][:, :, 0]}), product(3)(**x), strict=True):
        assert relative_error(got, want) < 1e-12


def in_kernels(sp: SequenceParallel, n: int, seed: int) -> str:
    compare(product(n), draw(n, 1, 45, len(BOUNDS) - 1, seed, torch.float32), BOUNDS, 2e-5)
    compare(product(n), draw(n, 2, 45, 0, seed, torch.float32), None, 2e-5)
    return product(n).runs(**draw(n, 1, 5, 0, seed, torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
def test_kernels(n: int) -> None:
    assert run_ranks(in_kernels, 1, n, random.randrange(2**31), env=INTERPRETED) == ["runs generated kernels"]


def over_ranks(
    sp: SequenceParallel, n: int, seed: int, lengths: list[int], bounds: list[int] | None, dtype: torch.dtype
) -> Tensors:
    N = 2 if bounds is None else len(bounds) - 1
    x = draw(n, 2 if bounds is None else 1, 45, N, seed, dtype)
    at = slice(sum(lengths[: sp.rank]), sum(lengths[: sp.rank + 1]))
    mine = leaves({name: y[:, at] if name in TOKENS else y for name, y in x.items()})
    if bounds is None and sp.rank:
        del mine["prev_s"]
    sp.set_lengths(lengths)
    o, final = product(n)(**mine, cu_seqlens=None if bounds is None else torch.tensor(bounds), sp=sp)
    loss = o.sin().sum() + (0 if final is None else final.sin().sum())
    return {"o": o.detach(), **dict(zip(mine, torch.autograd.grad(loss, list(mine.values())), strict=True))}


def check_ranks(n: int, lengths: list[int], bounds: list[int] | None, seed: int, kernels: bool) -> None:
    dtype = torch.float32 if kernels else torch.float64
    parts = run_ranks(over_ranks, 3, n, seed, lengths, bounds, dtype, env=INTERPRETED if kernels else {})
    x = leaves(draw(n, 2 if bounds is None else 1, 45, 2 if bounds is None else len(BOUNDS) - 1, seed, dtype))
    wide = leaves({name: y.double() for name, y in x.items()})
    o, final = token_loop(wide, bounds)
    loss = o.sin().sum() + final.sin().sum()
    want = {"o": o, **dict(zip(wide, torch.autograd.grad(loss, list(wide.values())), strict=True))}
    for name, y in want.items():
        found = [part[name] for part in parts if name in part]
        together = torch.cat(found, 1) if name in ("o", *TOKENS) else torch.stack(found).sum(0)
        assert relative_error(together, y) < (2e-5 if kernels else 1e-12), name


@pytest.mark.parametrize("bounds", [None, BOUNDS])
@pytest.mark.parametrize(("n", "lengths"), [(2, [20, 0, 25]), (3, [1, 13, 31])])
def test_ranks_equal_the_token_loop(n: int, lengths: list[int], bounds: list[int] | None, seed: int) -> None:
    check_ranks(n, lengths, bounds, seed, kernels=False)


@pytest.mark.slow
@pytest.mark.parametrize("bounds", [None, BOUNDS])
@pytest.mark.parametrize("n", [2, 3])
def test_kernels_over_ranks(n: int, bounds: list[int] | None, seed: int) -> None:
    check_ranks(n, [20, 0, 25], bounds, seed, kernels=True)


@pytest.mark.parametrize("n", [1, 3])
def test_a_token_earlier(n: int, seed: int) -> None:
    """Keys of a token before, all of them, and a gate of a token before at its first row."""
    changed = {
        "k_before": SymbTensor(["T", h, k], before="k", rows=n),
        "g_before": SymbTensor(["T", h], before="g", row=0),
    }

    def mixed(k, v, beta, g, k_before, g_before):
        return chunk(k + k_before, v, beta, g + g_before)

    def decays(prev_s, k, beta, g, w, chunk_state, k_before, g_before):
        return decay(prev_s, k + k_before, beta, g + g_before, w, chunk_state)

    def merged(q, k, beta, g, u, w, chunk_state, k_before, g_before):
        return merge(q, k + k_before, beta, g + g_before, u, w, chunk_state)

    x, N = draw(n, 1, 45, len(BOUNDS) - 1, seed), len(BOUNDS) - 1
    starts = {"k_before": torch.randn(N, n, H, K).double() / 4, "g_before": -torch.rand(N, H).double()}
    got = LinearAttention(meta(n, **changed), mixed, decays, merged)(**x, **starts, cu_seqlens=torch.tensor(BOUNDS))
    before = {name: torch.cat([x[name][:, :1] * 0, x[name][:, :-1]], 1) for name in ("k", "g")}
    for i, begin in enumerate(BOUNDS[:-1]):
        for name in ("k", "g") if BOUNDS[i + 1] > begin else ():
            before[name][:, begin] = starts[f"{name}_before"][i]
    for a, b in zip(got, token_loop(x | {name: x[name] + y for name, y in before.items()}, BOUNDS), strict=True):
        assert relative_error(a, b) < 1e-12


@pytest.mark.slow
def test_one_graph(seed: int) -> None:
    model, x, cu = product(2), draw(2, 1, 45, len(BOUNDS) - 1, seed), torch.tensor(BOUNDS)
    compiled = torch.compile(
        lambda **given: model(**given, cu_seqlens=cu, sp=False), backend="aot_eager", fullgraph=True
    )
    for got, want in zip(compiled(**x), model(**x, cu_seqlens=cu, sp=False), strict=True):
        assert torch.allclose(got, want)


# Heads first ----------------------------------------------------------------------------------------------------------


def turned(x: Tensors) -> Tensors:
    places = {"q": (1, 2), "k": (1, 3), "g": (1, 2)}
    return {name: y.movedim(*places[name][::-1]) if name in places else y for name, y in x.items()}


def turned_as(sp: SequenceParallel | None, seed: int, dtype: torch.dtype, bound: float) -> None:
    x = leaves(draw(2, 2, 45, 2, seed, dtype))
    y = leaves({name: z.contiguous() for name, z in turned(x).items()})
    found, want = heads_first()(**y, sp=False), product(2)(**x, sp=False)
    assert all(relative_error(a, b) <= bound for a, b in zip(found, want, strict=True))
    (sum(z.sin().sum() for z in found)).backward()  # type: ignore[union-attr]
    (sum(z.sin().sum() for z in want)).backward()  # type: ignore[union-attr]
    for name, z in turned({name: z.grad for name, z in x.items()}).items():  # type: ignore[misc]
        assert relative_error(y[name].grad, z) <= bound, name  # type: ignore[arg-type]
    o, _ = heads_first()(
        **{name: z if name == "prev_s" else z[0] for name, z in y.items()} | {"prev_s": y["prev_s"][:1]}
    )
    assert relative_error(o, found[0][0]) <= bound


def test_heads_first(seed: int) -> None:
    turned_as(None, seed, torch.float64, 1e-12)


@pytest.mark.slow
def test_heads_first_in_kernels(seed: int) -> None:
    run_ranks(turned_as, 1, seed, torch.float32, 1e-6, env=INTERPRETED)


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "what", "text"),
    [
        ("v", SymbTensor(["T", h, v], rows=3), "expected rows = 2 as of 'k', got 3"),
        ("v", SymbTensor(["T", h, v], rows=0), "expected a positive integer as rows, got 0"),
        ("v", SymbTensor(["T", h, v], rows=2, row=0), "expected rows or row"),
        ("g", SymbTensor(["T", h], row=2), "expected row from -2 to 1, got 2"),
        ("u", SymbTensor([h, k], rows=2), "expected neither rows nor row without 'T'"),
        ("u", SymbTensor([h, k], clamped=True), "expected 'T' among the sizes of clamped gates"),
        ("q", SymbTensor([h, k, "T"]), "expected 'T' as the first size, or as the second, behind the heads"),
        ("q", SymbTensor([k, "T", h]), "expected the heads .* as size 0"),
        ("k_before", SymbTensor(["T", h, k], before="k"), "expected rows = 2 of 'k', got None"),
    ],
)  # fmt: skip
def test_wrong_metadata_is_named(name: str, what: SymbTensor, text: str) -> None:
    with pytest.raises(ValueError, match=rf"input_meta\['{name}'\]: {text}"):
        product(2, **{name: what})


def test_a_row_without_rows() -> None:
    given = {name: SymbTensor(x.shape, row=x.row) if name in TOKENS else x for name, x in meta(2).items()}
    with pytest.raises(ValueError, match=r"input_meta\['q'\]: expected row beside inputs with rows only"):
        LinearAttention(given, chunk, decay, merge)


def test_wrong_calls_are_named(seed: int) -> None:
    x = draw(2, 2, 5, 2, seed)
    for changed, text in (
        ({"k": x["k"].flatten(1, 2)}, r"q|k: expected .*\[T, 2, H, K\] or \[B, T, 2, H, K\], got \[2, 10, 2, 16\]"),
        ({"v": x["v"][:, :, :1]}, r"v: expected .*\[B, T, 2, H, V\], got \[2, 5, 1, 2, 6\]"),
        ({"v": x["v"][:, :4]}, r"v: expected the 5 tokens of q in \[T, 2, H, V\], got \[2, 4, 2, 2, 6\]"),
        ({"g": x["k"]}, r"g: expected \[T, H\] or \[B, T, H\], got \[2, 5, 2, 2, 16\]"),
        ({"g": 3}, r"g: expected a tensor \[T, H\], got int"),
        ({"w": x["g"]}, r"missing \[\], unknown \['w'\]"),
    ):
        with pytest.raises(ValueError, match=text):
            product(2)(**x | changed, sp=False)
    for cu, text in (
        (torch.tensor([0, 6]), r"cu_seqlens: expected non-decreasing boundaries from 0 to 5, got \[0, 6\]"),
        (torch.tensor([0.0, 5.0]), "cu_seqlens: expected a tensor .* of int32 or int64"),
        ([0, 5], "cu_seqlens: expected a tensor .* of int32 or int64, got list"),
    ):
        with pytest.raises(ValueError, match=text):
            product(2)(**{name: y[:1] for name, y in x.items()}, cu_seqlens=cu, sp=False)
    y = turned(x)
    for name, changed in (("q", x["q"]), ("q", y["q"][0, 0]), ("g", 3)):
        with pytest.raises(ValueError, match=rf"{name}: expected .*\[H, T"):
            heads_first()(**y | {name: changed}, sp=False)


def test_another_length_than_was_set() -> None:
    sp = SequenceParallel(rank=1, world_size=2)
    sp.set_lengths([5, 5])
    with pytest.raises(ValueError, match=r"^rank 1: expected a shard of 5 tokens \(set_lengths\) of 2 rows, got 12$"):
        product(2)(**draw(2, 1, 6, 0, 0), sp=sp)
