"""Packed documents that end before the tokens do: the tail is zeros, outputs and gradients, and changes nothing else.

In the interpreter `torch.empty` gives NaN, so what a kernel does not write is seen.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexsp import ops
from flexsp.nn.attention import scaled_dot_product_attention
from flexsp.testing.cases import CASES, DELTA_CASES, Case, Shape
from flexsp.testing.ranks import run_ranks
from tests.interpreted import poisoned
from tests.marks import quick
from tests.op_cases import OTHER_CASES

ALL = CASES | DELTA_CASES | OTHER_CASES
ENV = {"TRITON_INTERPRET": "1", "FLEXSP_BACKEND": "triton"}
QUICK = ("gamma", "gated_delta_product", "hgrn", "selective_scan", "mamba3")


def _leaves(x: Any) -> list[torch.Tensor]:
    return [leaf for y in x for leaf in _leaves(y)] if isinstance(x, tuple) else [x] if torch.is_tensor(x) else []


def _solved(case: Case, inputs: dict[str, Any], cu: torch.Tensor, seed: int) -> list[tuple[str, torch.Tensor]]:
    """Outputs, final states and every gradient, by name; cotangents of tokens are the same for any number of them."""

    def leaf(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(leaf, x))
        return x.clone().requires_grad_() if torch.is_tensor(x) else x

    given = {name: leaf(x) for name, x in inputs.items()}
    o, final = case.op(**given, cu_seqlens=cu, output_final_state=True)
    finals = _leaves(final if isinstance(final, tuple) else (final,))
    do = torch.randn(16, *o.shape[2:], generator=torch.Generator().manual_seed(seed))[: o.shape[1]]
    loss = (o * do.to(o.dtype)).sum() + sum(x.square().sum() for x in finals)
    named = [(name, x) for name, y in given.items() for x in _leaves(y if isinstance(y, tuple) else (y,))]
    grads = torch.autograd.grad(loss, [x for _, x in named])
    return [
        ("o", o.detach()), *[("final", x.detach()) for x in finals],
        *[(f"d.{name}", dx) for (name, _), dx in zip(named, grads, strict=True)],
    ]  # fmt: skip


def wrong(case: Case, dtype: torch.dtype, end: int, T: int, seed: int, states: int = 3) -> list[str]:
    """What a tail of T - end tokens changes, or leaves other than 0."""
    bounds = torch.tensor([0, 2, 2, end])
    heads = 4 if case is CASES["mamba2_groups"] else 2
    inputs = case.inputs(Shape(B=1, T=T, H=heads, K=4, V=4, states=states), seed)
    rounded = {key: tuple(y.to(dtype) for y in x) if isinstance(x, tuple) else x.to(dtype) if torch.is_tensor(x) else x
               for key, x in inputs.items()}  # fmt: skip
    short = {key: x[:, :end] if key in case.tokens else x for key, x in rounded.items()}
    found = []
    for (what, want), (_, got) in zip(*(_solved(case, x, bounds, seed) for x in (short, rounded)), strict=True):
        if got.shape != want.shape and not bool((got[:, end:] == 0).all()):
            found.append(f"{what} of the tail")
        got = got[:, :end] if got.shape != want.shape else got
        # The same sums; where there are more slots, zeros are among the terms.
        if not bool((got - want).abs().max() <= 8 * torch.finfo(dtype).eps * (1 + want.abs().max())):
            found.append(f"{what} by {(got - want).abs().max():.1e}")
    return found


@pytest.mark.parametrize("name", ALL)
def test_in_pytorch(name: str, seed: int) -> None:
    assert not wrong(ALL[name], torch.float64, 4, 7, seed)


def _in_kernels(sp: Any, name: str, seed: int) -> list[str]:
    with poisoned(2, 2):
        return wrong(ALL[name], torch.float32, 4, 7, seed)


@pytest.mark.parametrize("name", quick(ALL, *QUICK))
def test_in_kernels(name: str, seed: int) -> None:
    assert run_ranks(_in_kernels, 1, name, seed, env=ENV) == [[]]


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("is_causal", [True, False])
def test_attention(is_causal: bool, window: int | None, seed: int) -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, **_: Any) -> Any:
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal, window=window, cu_seqlens=cu_seqlens), None

    case = Case(call, None, CASES["linear"].make)  # type: ignore[arg-type]
    assert not wrong(case, torch.float64, 4, 7, seed, states=0)


def test_what_is_refused() -> None:
    x = torch.randn(1, 9, 2, 4)
    with pytest.raises(ValueError, match=r"cu_seqlens: expected a last entry of at most 9 .*, got 10"):
        ops.chunk_simple_gla(x, x, x, cu_seqlens=torch.tensor([0, 4, 10]))
