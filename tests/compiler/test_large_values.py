"""Values of more than 256 channels: in kernels (Triton's interpreter) as in PyTorch, which has no such limit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from flexsp.kernels.columns import ColumnBlocks
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED
from tests.harness.large_values import (
    LAYERS,
    OPS,
    PARAMETERS,
    STATES,
    Tensors,
    bounds,
    inputs,
    layer_of,
    outputs,
    solve,
    solve_layer,
)
from tests.marks import quick

SIZES = 19, 2, 16, 270  # T, H, K, V
QUICK = "simple_gla", "mamba2", "gated"
CUT = [x for x in OPS if x not in ("gla", "gdn2", "hgrn2", "rwkv6", "rwkv7")]
"""Ops whose kernels have columns of a head as heads of their own; the others take values of any size in pieces."""


def kernels(sp: Any, name: str, given: Tensors) -> Tensors:
    return solve(name, given, torch.float32)


def check(name: str, packed: bool) -> None:
    given = inputs(name, random.randrange(2**31), *SIZES, packed=packed)
    want = solve(name, given, torch.float64)
    (got,) = run_ranks(kernels, 1, name, given, env=INTERPRETED)
    errors = {key: relative_error(got[key], want[key]) for key in want}
    assert max(errors.values()) < 3e-5, errors


@pytest.mark.parametrize("name", quick(OPS, *QUICK))
def test_as_in_pytorch(name: str) -> None:
    check(name, False)


@pytest.mark.parametrize("name", quick(OPS, "mamba3"))
def test_documents_as_in_pytorch(name: str) -> None:
    check(name, True)


@pytest.mark.parametrize("size", [1, 256, 257, 270, 384, 512])
def test_blocks(size: int) -> None:
    blocks = ColumnBlocks.of(size)
    v, s = torch.randn(2, 3, 4, size), torch.randn(2, 4, 5, size)
    assert blocks.width <= 256 and blocks.n == -(-size // 256)
    assert blocks.values(v).shape == (2, 3, 4 * blocks.n, blocks.width)
    assert torch.equal(blocks.outputs(blocks.values(v)), v)
    assert torch.equal(blocks.joined(blocks.states(s)), s)  # type: ignore[arg-type]
    h = torch.arange(4.0).expand(2, 3, 4)
    assert torch.equal(blocks.outputs(blocks.repeated(h)[..., None].expand(-1, -1, -1, blocks.width))[..., -1], h)


def over_ranks(sp: Any, name: str, given: Tensors) -> Tensors:
    """This rank's outputs and the gradients of what it was given, and the final states that it has."""
    others, T = STATES | PARAMETERS | {"cu_seqlens"}, given["x" if "x" in given else "v"].shape[1]
    here = slice(*[(sp.rank + i) * T // sp.world_size for i in (0, 1)])
    packed = {key: x for key, x in given.items() if key == "cu_seqlens"}
    leaves = {
        key: (x if key in others else x[:, here]).float().requires_grad_() for key, x in given.items()
        if key not in packed and (packed or sp.is_first or key not in STATES)
    }  # fmt: skip
    found = dict(outputs(*OPS[name](**leaves, **packed, output_final_state=True, sp=sp)))
    loss = torch.stack([x.square().sum() for x in found.values()]).sum()
    gradients = torch.autograd.grad(loss, [*leaves.values()], materialize_grads=True)
    return {key: x.detach() for key, x in found.items()} | {
        f"d{key}": x for key, x in zip(leaves, gradients, strict=True)
    }  # fmt: skip


def together(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Of tokens one after the other; of states, those that a rank does not have are 0; of parameters sums."""
    of_tokens = name == "o" or (name[0] == "d" and name[1:] not in STATES | PARAMETERS)
    return torch.cat(parts, 1) if of_tokens else torch.stack(parts).sum(0)


RANKS = [(name, packed) for name in (*CUT, "gla", "hgrn2", "rwkv7") for packed in (False, True)]


@pytest.mark.parametrize(("name", "packed"), quick(RANKS, ("gla", False), ("delta", True)))
def test_ranks(name: str, packed: bool) -> None:
    """States of all columns travel between ranks, those of heads that are cut into several too."""
    given = inputs(name, random.randrange(2**31), *SIZES, packed=packed)
    (whole,) = run_ranks(over_ranks, 1, name, given, env=INTERPRETED)
    parts = run_ranks(over_ranks, 2, name, given, env=INTERPRETED)
    found = {key: together(key, [x[key] for x in parts if key in x]) for key in whole}
    errors = {key: relative_error(found[key], want) for key, want in whole.items()}
    assert max(errors.values()) < 3e-5, errors


def layer_in_kernels(sp: Any, layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Tensors:
    return solve_layer(layer.float(), x.float(), dy.float(), bounds(x.shape[1]))


@pytest.mark.parametrize("name", quick(LAYERS, "MLSTM"))
def test_layers(name: str) -> None:
    """Two heads of 270 values, and documents, in kernels as in PyTorch."""
    layer = layer_of(name, random.randrange(2**31))
    x, dy = torch.randn(2, 1, 19, LAYERS[name][1]["hidden_size"], dtype=torch.float64).unbind(0)
    want = solve_layer(layer, x, dy, bounds(19))
    (got,) = run_ranks(layer_in_kernels, 1, layer, x, dy, env=INTERPRETED)
    errors = {key: relative_error(got[key], want[key]) for key in want}
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.parametrize("V", [256, 257, 512])
def test_wide_values_are_taken_in_pieces(V: int) -> None:
    """Even where the state is no larger than one that is not."""
    from flexsp.compiler.backend.generated_kernels import in_pieces
    from flexsp.variants import hgrn2

    code = hgrn2.make(2, 16, V).kernels
    assert in_pieces(code.layout, code.dense, {"K": 16, "V": V}) == (V > 256)
    assert code.sized({"K": 16, "V": V}, torch.bfloat16).pieces == (V > 256)
