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
from tests.harness.large_values import OPS, Tensors, inputs, solve
from tests.marks import quick

SIZES = 19, 2, 16, 270  # T, H, K, V


def kernels(sp: Any, name: str, given: Tensors) -> Tensors:
    return solve(name, given, torch.float32)


@pytest.mark.parametrize("name", quick(OPS, "simple_gla", "mamba2", "gated"))
def test_as_in_pytorch(name: str) -> None:
    given = inputs(name, random.randrange(2**31), *SIZES)
    want = solve(name, given, torch.float64)
    (got,) = run_ranks(kernels, 1, name, given, env=INTERPRETED)
    errors = {key: relative_error(got[key], want[key]) for key in want}
    assert max(errors.values()) < 3e-5, errors


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


def over_ranks(sp: Any, name: str, given: Tensors) -> list[torch.Tensor]:
    """This rank's outputs and gradients of tokens, and the final states on the last rank."""
    here = slice(*[(sp.rank + i) * given["v"].shape[1] // sp.world_size for i in (0, 1)])
    leaves = {key: x[:, here].float().requires_grad_() for key, x in given.items() if key != "initial_state"}
    state = {"initial_state": given["initial_state"].float()} if sp.is_first else {}
    o, final = OPS[name](**leaves, **state, output_final_state=True, sp=sp)
    loss = o.square().sum() if final is None else o.square().sum() + final.square().sum()
    return [o.detach(), *torch.autograd.grad(loss, [*leaves.values()])]


@pytest.mark.parametrize("name", quick(("gla", "hgrn2", "rwkv7"), "gla"))
def test_ranks(name: str) -> None:
    """Values that kernels take whole travel between ranks as states of all their columns."""
    given = inputs(name, random.randrange(2**31), *SIZES)
    (whole,) = run_ranks(over_ranks, 1, name, given, env=INTERPRETED)
    parts = run_ranks(over_ranks, 2, name, given, env=INTERPRETED)
    for want, *both in zip(whole, *parts, strict=True):
        assert relative_error(torch.cat(both, 1), want) < 3e-5


@pytest.mark.parametrize("V", [256, 257, 512])
def test_wide_values_are_taken_in_pieces(V: int) -> None:
    """Even where the state is no larger than one that is not."""
    from flexsp.compiler.backend.generated_kernels import in_pieces
    from flexsp.variants import hgrn2

    code = hgrn2.make(2, 16, V).kernels
    assert in_pieces(code.layout, code.dense, {"K": 16, "V": V}) == (V > 256)
    assert code.sized({"K": 16, "V": V}).pieces == (V > 256)
