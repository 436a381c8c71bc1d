"""Packed documents that end before the tokens do: the tail is zeros, outputs and gradients, and changes nothing else.

In the interpreter `torch.empty` gives NaN, so what a kernel does not write is seen.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexsp import ops
from flexsp.testing.cases import CASES, DELTA_CASES, Case, Shape
from flexsp.testing.ranks import run_ranks
from tests.interpreted import poisoned
from tests.marks import quick
from tests.op_cases import OTHER_CASES

ALL = CASES | DELTA_CASES | OTHER_CASES
ENV = {"TRITON_INTERPRET": "1", "FLEXSP_BACKEND": "triton"}
QUICK = ("gamma", "mamba2", "gated_delta_product", "gla", "hgrn", "selective_scan", "mamba3", "mlstm")


def _leaves(x: Any) -> list[torch.Tensor]:
    return [leaf for y in x for leaf in _leaves(y)] if isinstance(x, tuple) else [x] if torch.is_tensor(x) else []


def _solved(case: Case, inputs: dict[str, Any], do: torch.Tensor, cu: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Outputs, final states and every gradient, by name."""

    def leaf(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(leaf, x))
        return x.clone().requires_grad_() if torch.is_tensor(x) else x

    given = {name: leaf(x) for name, x in inputs.items()}
    o, final = case.op(**given, cu_seqlens=cu, output_final_state=True)
    finals = _leaves(final if isinstance(final, tuple) else (final,))
    loss = (o * do[:, : o.shape[1]].to(o.dtype)).sum() + sum(x.square().sum() for x in finals)
    named = [(name, x) for name, y in given.items() for x in _leaves(y if isinstance(y, tuple) else (y,))]
    grads = torch.autograd.grad(loss, [x for _, x in named])
    return [
        ("o", o.detach()), *[("final", x.detach()) for x in finals],
        *[(f"d.{name}", dx) for (name, _), dx in zip(named, grads, strict=True)],
    ]  # fmt: skip


def wrong(name: str, dtype: torch.dtype, end: int, T: int, seed: int) -> list[str]:
    """What a tail of T - end tokens changes, or leaves other than 0."""
    case, bounds = ALL[name], torch.tensor([0, 2, 2, end])
    inputs = case.inputs(Shape(B=1, T=T, H=4, K=4, V=4, states=3), seed)
    rounded = {key: tuple(y.to(dtype) for y in x) if isinstance(x, tuple) else x.to(dtype) if torch.is_tensor(x) else x
               for key, x in inputs.items()}  # fmt: skip
    short = {key: x[:, :end] if key in case.tokens else x for key, x in rounded.items()}
    width = case.op(**short, cu_seqlens=bounds)[0].shape[2:]
    do = torch.randn(1, T, *width, generator=torch.Generator().manual_seed(seed))
    found = []
    for (what, want), (_, got) in zip(_solved(case, short, do, bounds), _solved(case, rounded, do, bounds), strict=True):
        if got.shape != want.shape and not bool((got[:, end:] == 0).all()):
            found.append(f"{what} of the tail")
        got = got[:, :end] if got.shape != want.shape else got
        # The same sums; where there are more slots, zeros are among the terms.
        if not bool((got - want).abs().max() <= 8 * torch.finfo(dtype).eps * (1 + want.abs().max())):
            found.append(f"{what} by {(got - want).abs().max():.1e}")
    return found


@pytest.mark.parametrize("name", ALL)
def test_in_pytorch(name: str, seed: int) -> None:
    assert not wrong(name, torch.float64, 5, 9, seed)


def _in_kernels(sp: Any, name: str, seed: int) -> list[str]:
    with poisoned(2, 4):
        return wrong(name, torch.float32, 5, 9, seed)


@pytest.mark.parametrize("name", quick(ALL, *QUICK))
def test_in_kernels(name: str, seed: int) -> None:
    assert run_ranks(_in_kernels, 1, name, seed, env=ENV) == [[]]


def test_what_is_refused() -> None:
    x = torch.randn(1, 9, 2, 4)
    with pytest.raises(ValueError, match=r"cu_seqlens: expected a last entry of at most 9 .*, got 10"):
        ops.chunk_simple_gla(x, x, x, cu_seqlens=torch.tensor([0, 4, 10]))
