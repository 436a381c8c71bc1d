"""What PyTorch does to tokens around the kernels of an op: nothing that reads or writes them."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from flexsp import ops
from flexsp.testing.bounds import within_tensors
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED

B, T, H, K = 2, 70, 3, 16
TENSORS = {"gla": "qkvg", "hgrn2": "qvg", "rwkv6": "qkvgu", "rwkv7": "qgkvab"}  # in the order of the op's arguments
FREE = (
    "alias", "as_strided", "detach", "empty", "new_empty", "resolve_", "select", "slice", "transpose", "unbind",
    "unsqueeze", "view",
)  # fmt: skip
"""How operators begin that read and write no numbers."""
OF_PARAMETERS = {"rwkv6": {"sum", "fill_", "to", "_to_copy", "copy_"}}  # a number a chunk and channel


def drawn(name: str, V: int, seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    shapes = {x: (B, T, H, V if x == "v" else K) for x in TENSORS[name]} | {"u": (H, K)}
    found = {x: torch.randn(shapes[x], generator=made) / 4 for x in TENSORS[name]}
    return {x: (-y.abs() if x == "g" else y).bfloat16() for x, y in found.items()}


def beside(sp: Any, name: str, V: int, seed: int) -> set[str]:
    """PyTorch's operators of a call, and of its backward pass, where kernels do nothing."""
    from flexsp.kernels import executable
    from flexsp.ops import _validate

    given = [x.requires_grad_() for x in drawn(name, V, seed).values()]
    do = torch.ones(B, T, H, V).bfloat16()
    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(executable, "run_steps"))
        # As of tensors on a GPU, which checks do not look at.
        patches.enter_context(patch.object(_validate, "readable", return_value=False))
        for _ in range(2):  # the first call works out what later ones keep
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                o, _ = getattr(ops, f"chunk_{name}")(*given)
                torch.autograd.grad(o, given, do)
    names = [x.key.removeprefix("aten::") for x in seen.key_averages() if x.key.startswith("aten::")]
    return {x for x in names if not x.startswith(FREE)}


@pytest.mark.parametrize("V", [12, 300])
@pytest.mark.parametrize("name", TENSORS)
def test_kernels_read_what_calls_bring(name: str, V: int, seed: int) -> None:
    (found,) = run_ranks(beside, 1, name, V, seed, env=INTERPRETED)
    assert found <= OF_PARAMETERS.get(name, set())


def closed(sp: Any, name: str, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Outputs and gradients with gates in bfloat16 of which some close, and with the least gates in float32."""
    given, results = drawn(name, 12, seed), []
    given["g"][:, 3::9], given["g"][:, 4::18] = -torch.inf, -1e4
    for gates in (given["g"], given["g"].float().clamp(min=-104.0)):
        leaves = [x.clone().requires_grad_() for x in (given | {"g": gates}).values()]
        with within_tensors():
            o, _ = getattr(ops, f"chunk_{name}")(*leaves)
            results.append([o, *torch.autograd.grad(o, leaves, torch.ones_like(o))])
    mine, theirs = ([x.detach() for x in found] for found in results)
    at = 1 + list(given).index("g")
    assert mine[at].dtype == torch.bfloat16 and not mine[at][given["g"] <= -104].any()
    return [(a, b.to(a.dtype)) for a, b in zip(mine, theirs, strict=True)]


@pytest.mark.parametrize("name", TENSORS)
def test_closed_gates_in_bfloat16(name: str, seed: int) -> None:
    (found,) = run_ranks(closed, 1, name, seed, env=INTERPRETED)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in found)
