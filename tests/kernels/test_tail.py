"""Packed documents that end before the tokens do: the tail is zeros, outputs and gradients, and changes nothing else.

In the interpreter `torch.empty` gives NaN, so what a kernel does not write is seen.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexsp import nn, ops
from flexsp.grammar import FlexLinearAttention, decay
from flexsp.nn.attention import scaled_dot_product_attention
from flexsp.testing.cases import CASES, Case
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED, poisoned
from tests.harness.objectives import MODELS, ROPE, draw_for
from tests.harness.ops import ALL
from tests.harness.tail import wrong
from tests.marks import quick

QUICK = ("gamma", "gated_delta_product", "hgrn", "selective_scan", "mamba3")


@pytest.mark.parametrize("name", ALL)
def test_in_pytorch(name: str, seed: int) -> None:
    assert not wrong(ALL[name], torch.float64, 4, 7, seed)


def _in_kernels(sp: Any, name: str, seed: int) -> list[str]:
    with poisoned(2, 2):
        return wrong(ALL[name], torch.float32, 4, 7, seed)


@pytest.mark.parametrize("name", quick(ALL, *QUICK))
def test_in_kernels(name: str, seed: int) -> None:
    assert run_ranks(_in_kernels, 1, name, seed, env=INTERPRETED) == [[]]


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


LAYERS = {
    "SimpleGLA": {"num_heads": 2}, "Mamba2": {"head_dim": 8, "state_size": 4}, "Mamba": {"state_size": 4},
    "Mamba3": {"head_dim": 8, "state_size": 4}, "MLSTM": {"num_heads": 2}, "RWKV7": {"head_dim": 8},
    "GatedDeltaNet": {"num_heads": 2, "head_dim": 8}, "HGRN": {}, "RGLRU": {"num_heads": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers_learn_nothing_of_the_tail(name: str) -> None:
    """Parameters have the gradients of the documents alone where the loss is of these."""
    layer = getattr(nn, name)(16, **LAYERS[name]).double()
    x, bounds, found = torch.randn(1, 7, 16, dtype=torch.float64), torch.tensor([0, 2, 4]), []
    for length in (4, 7):
        layer.zero_grad()
        part = x[:, :length].clone().requires_grad_()
        y = layer(part, cu_seqlens=bounds)
        y[:, :4].square().sum().backward()
        assert part.grad is not None and not part.grad[:, 4:].any()
        found.append([y[:, :4], part.grad[:, :4], *[p.grad for p in layer.parameters() if p.grad is not None]])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


WITH_ANGLES = {
    "rope": lambda: FlexLinearAttention(decay.gated(), ROPE),
    "rope, steps": lambda: FlexLinearAttention(decay.exponential(), ROPE),
}


@pytest.mark.parametrize("name", [*MODELS, *WITH_ANGLES])
def test_objectives(name: str, seed: int) -> None:
    model = (MODELS | WITH_ANGLES)[name]()
    inputs = draw_for(model, 1, 7, seed)
    tokens = tuple(key for key, x in inputs.items() if x.dim() > 1 and x.shape[1] == 7 and key != "mimo_x")
    case = Case(model, None, lambda s, r: inputs, tokens=tokens)  # type: ignore[arg-type]
    assert not wrong(case, torch.float64, 4, 7, seed, states=0)


@pytest.mark.parametrize("name", ["spectral", *WITH_ANGLES])
def test_tails_are_not_read(name: str, seed: int) -> None:
    """Rows behind the last document may hold anything: outputs are 0 there, and gradients of rows, too."""
    model = (MODELS | WITH_ANGLES)[name]()
    inputs = draw_for(model, 1, 7, seed)
    rows = {key: inputs[key] for key in ("q", "k", "v")}
    for x in rows.values():
        x[:, 4:] = torch.nan
        x.requires_grad_()
    o, _ = model(**inputs, cu_seqlens=torch.tensor([0, 2, 4]))
    o.sum().backward()
    assert bool((o[:, 4:] == 0).all()) and all(bool((x.grad[:, 4:] == 0).all()) for x in rows.values())
