"""A layer that was made on the meta device, and had its modules reset, is the one that its constructor makes."""

from __future__ import annotations

import inspect
import zlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import flexsp.nn
from flexsp.nn import GatedRMSNorm, RMSNorm
from flexsp.testing.ranks import run_ranks
from tests.harness.layers import LAYERS
from tests.marks import quick

CASES: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    **{name: (cls, options) for name, (cls, options, _) in LAYERS.items()},
    "norm": (RMSNorm, {"dim": 8}),
    "gated-norm": (GatedRMSNorm, {"dim": 8}),
    "mlstm-biases": (LAYERS["mlstm"][0], {"hidden_size": 16, "num_heads": 2, "use_bias": True}),
    "mamba-constant": (LAYERS["mamba"][0], {"hidden_size": 16, "dt_init": "constant", "bias": True}),
    "rwkv7-later": (
        LAYERS["rwkv7"][0], {"hidden_size": 16, "head_dim": 8, "layer_idx": 1, "num_hidden_layers": 3},
    ),
}  # fmt: skip


def test_every_layer_is_here() -> None:
    public = {getattr(flexsp.nn, name) for name in flexsp.nn.__all__}
    layers = {x for x in public if inspect.isclass(x) and issubclass(x, nn.Module)}
    assert layers - {flexsp.nn.SequenceParallelLA} == {cls for cls, _ in CASES.values()}


def without_values(name: str) -> nn.Module:
    cls, options = CASES[name]
    with torch.device("meta"):
        return cls(**options)


def forget(layer: nn.Module) -> None:
    for x in layer.parameters():
        nn.init.constant_(x, float("nan"))


def reset(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def reset_each(layer: nn.Module, modules: list[tuple[str, nn.Module]]) -> dict[str, torch.Tensor]:
    """The parameters, with the same draws for a module wherever in the list it is."""
    forget(layer)
    for name, module in modules:
        torch.manual_seed(zlib.crc32(name.encode()))
        reset(module)
    return {name: x.detach().clone() for name, x in layer.named_parameters()}


@pytest.mark.parametrize("name", CASES)
def test_deferred_is_as_constructed(name: str) -> None:
    cls, options = CASES[name]
    torch.manual_seed(7)
    made = cls(**options)
    layer = without_values(name).to_empty(device="cpu")
    forget(layer)
    torch.manual_seed(7)
    layer.apply(reset)  # inner modules first, as constructors do
    torch.testing.assert_close(layer.state_dict(), made.state_dict(), rtol=0, atol=0)

    modules = list(layer.named_modules())  # outer modules first
    torch.testing.assert_close(reset_each(layer, modules), reset_each(layer, modules[::-1]), rtol=0, atol=0)


def deferred_and_cut(sp: Any, name: str) -> dict[str, torch.Tensor]:
    layer = without_values(name)
    fully_shard(layer, mesh=init_device_mesh("cpu", (sp.world_size,)))
    layer.to_empty(device="cpu")
    forget(layer)
    torch.manual_seed(sp.rank)
    for module in layer.modules():
        reset(module)
    assert all(isinstance(x, DTensor) for x in layer.parameters())
    whole = {key: x.full_tensor().detach() for key, x in layer.named_parameters()}
    y = layer(torch.randn(1, 5, LAYERS[name.partition("-later")[0]][2]))
    return {**whole, "y": y.detach()}


@pytest.mark.parametrize("name", quick(LAYERS, "mamba", "mamba2", "mlstm", "rg-lru", "rwkv7", "kda"))
def test_deferred_under_fsdp(name: str) -> None:
    """What is the same in every start is exactly that, and what is drawn is of the same size."""
    cls, options = CASES[name]
    first, second = (dict(cls(**options).named_parameters()) for _ in range(2))
    for found in run_ranks(deferred_and_cut, 2, name):
        assert found.pop("y").isfinite().all()
        for key, x in found.items():
            if torch.equal(first[key], second[key]):
                torch.testing.assert_close(x, first[key].detach(), rtol=0, atol=0)
            else:
                assert x.isfinite().all() and 0.3 < x.norm() / first[key].norm() < 3, key
        if name == "rwkv7":
            for key, gain in (("r_proj.weight", 1.0), ("k_proj.weight", 0.1), ("w_lora.lora.2.weight", 0.1 * 2**0.5)):
                square = found[key] @ found[key].T
                torch.testing.assert_close(square, gain**2 * torch.eye(len(square)), rtol=1e-5, atol=1e-5)
