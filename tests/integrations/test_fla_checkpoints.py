"""A state_dict goes both ways between layers of flash-linear-attention and of flexsp, which then compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flexsp import nn as layers
from tests.fla_models import LAYERS, D, make_layer, run_layer
from tests.transformers_models import Found, assert_exact, gradients, precision

pytest.importorskip("fla")
_SAME = {
    "DeltaNet", "GatedDeltaNet", "GatedDeltaNet2", "KimiDeltaAttention", "GatedDeltaProduct", "GatedLinearAttention",
    "HGRN2Attention",
}  # fmt: skip
_OURS = {"HGRN2Attention": "HGRN2"}  # where the names differ
_OPTIONS = {"window_size": "window"}  # theirs: ours
_LACKING = {"mamba, other"}  # options that the layer of flexsp does not have
PAIRS = [name for name in LAYERS if LAYERS[name][0] in _SAME | {"Mamba2", "Attention"} and name not in _LACKING]


def make_ours(name: str, **changes: Any) -> nn.Module:
    kind, options = LAYERS[name]
    given = {_OPTIONS.get(key, key): x for key, x in {**options, **changes}.items()}
    return getattr(layers, _OURS.get(kind, kind))(D, **given).double()


def run_ours(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Found:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad, **gradients(layer)}


@pytest.mark.parametrize("name", PAIRS)
def test_both_ways(name: str) -> None:
    """Outputs and gradients, of theirs loaded into ours, and of ours loaded into theirs."""
    theirs, (x, dy) = make_layer(name), torch.randn(2, 2, 11, D, dtype=torch.float64)
    if hasattr(theirs, "rotary"):  # its frequencies, in the precision that ours have
        with precision(torch.float64):
            theirs.rotary.reset_parameters()
    ours = make_ours(name)
    own = {key: value.clone() for key, value in ours.state_dict().items()}
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert_exact(run_ours(ours, x, dy), run_layer(theirs, x, dy), "theirs in ours")
    theirs.load_state_dict(own, strict=True)
    ours.load_state_dict(own, strict=True)
    assert_exact(run_layer(theirs, x, dy), run_ours(ours, x, dy), "ours in theirs")


def test_groups_of_mamba_load() -> None:
    theirs, ours = make_layer("mamba", n_groups=2), make_ours("mamba", n_groups=2)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)


def test_there_are_pairs() -> None:
    assert {LAYERS[name][0] for name in PAIRS} == _SAME | {"Mamba2", "Attention"} and len(PAIRS) == 19
