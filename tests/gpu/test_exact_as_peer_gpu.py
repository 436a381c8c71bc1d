"""Outputs and gradients are at least as exact as flash-linear-attention's, op by op, in bfloat16 and float16.

Both get the same numbers; the reference is the token loop in float64 of these. Our error, root mean square, may be the
peer's and one rounding of the result more. Where the peer refuses its backward pass (those of gates on Hopper with some
releases of Triton), outputs alone are compared. Of the peer's kernels few tilings are tried: to tune all takes minutes.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.functional import logsigmoid, normalize

from flexsp import ops
from flexsp.testing import oracles
from flexsp.testing.compare import relative_error
from tests.gpu.judge import CUDA
from tests.harness import vector_gates as vector

pytest.importorskip("fla.ops", reason="flash-linear-attention is not installed")
Autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner

T, H, K, V = 512, 2, 128, 128
SCALE = K**-0.5
TILINGS = 4
DTYPES = [torch.bfloat16, torch.float16]
Tensors = dict[str, torch.Tensor]


class Op(NamedTuple):
    """`inputs` by name; `peer` is the module of flash-linear-attention and its function."""

    chunk: Callable[..., Any]
    oracle: Callable[..., Any]
    peer: tuple[str, str]
    inputs: str
    constants: dict[str, Any] = {}


OPS = {
    "linear": Op(ops.chunk_linear_attn, oracles.linear_attn, ("linear_attn", "chunk_linear_attn"), "q k v",
                 {"normalize": False}),
    "retention": Op(ops.chunk_retention, oracles.retention, ("retention", "chunk_retention"), "q k v"),
    "simple_gla": Op(ops.chunk_simple_gla, oracles.simple_gla, ("simple_gla", "chunk_simple_gla"), "q k v g"),
    "gla": Op(ops.chunk_gla, vector.gla, ("gla", "chunk_gla"), "q k v gk"),
    "hgrn2": Op(ops.chunk_hgrn2, vector.hgrn2, ("gla", "chunk_gla"), "q v gk"),
    "rwkv6": Op(ops.chunk_rwkv6, vector.rwkv6, ("rwkv6", "chunk_rwkv6"), "q k v gk u"),
    "delta_rule": Op(ops.chunk_delta_rule, oracles.delta_rule, ("delta_rule", "chunk_delta_rule"), "q k v beta"),
    "gated_delta_rule": Op(ops.chunk_gated_delta_rule, oracles.delta_rule,
                           ("gated_delta_rule", "chunk_gated_delta_rule"), "q k v g beta"),
    "kda": Op(ops.chunk_kda, oracles.delta_rule, ("kda", "chunk_kda"), "q k v gk beta"),
}  # fmt: skip
NAMES = {"rwkv6": {"q": "r", "gk": "w"}}


@pytest.fixture(autouse=True)
def _few_tilings(monkeypatch: pytest.MonkeyPatch) -> None:
    every = Autotuner.prune_configs

    def few(tuner: Any, given: dict[str, Any]) -> Any:
        found = every(tuner, given)
        return found[:: len(found) // TILINGS | 1]

    monkeypatch.setattr(Autotuner, "prune_configs", few)


def drawn(name: str, dtype: torch.dtype, strong: bool, seed: int) -> Tensors:
    """Numbers of `dtype`; gates, and a bonus, of float32."""
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made)

    def gates(*channels: int) -> torch.Tensor:
        x = normal(1, T, H, *channels)
        return -3 * torch.sigmoid(x) if strong else logsigmoid(x + 3)

    found = {"q": normal(1, T, H, K), "k": normalize(normal(1, T, H, K), dim=-1), "v": normal(1, T, H, V)}
    found |= {"g": gates(), "gk": gates(K), "u": normal(H, K), "beta": torch.rand(1, T, H, generator=made)}
    wide, names = ("g", "gk", "u"), {"gk": "g"} | NAMES.get(name, {})
    return {
        names.get(x, x): (found[x] if x in wide else found[x].to(dtype)).to(CUDA) for x in OPS[name].inputs.split()
    }


def answered(
    function: Callable[..., Any], inputs: Tensors, do: torch.Tensor, dtype: torch.dtype | None, may_refuse: bool = False
) -> Tensors:
    """o, and gradients unless they may be and are refused with a RuntimeError."""
    leaves = {key: x.to(x.dtype if dtype is None else dtype).requires_grad_() for key, x in inputs.items()}
    o = function(**leaves)[0]
    found = {"o": o.detach()}
    try:
        grads = torch.autograd.grad(o, list(leaves.values()), do.to(o))
    except RuntimeError as error:
        if not may_refuse:
            raise
        warnings.warn(f"no gradients of flash-linear-attention: {error}", stacklevel=2)
        return found
    return found | {f"d{key}": x for key, x in zip(leaves, grads, strict=True)}


def peer_of(name: str) -> Callable[..., Any]:
    module, function = OPS[name].peer
    try:
        call = getattr(importlib.import_module(f"fla.ops.{module}"), function)
    except (ImportError, AttributeError) as error:
        pytest.skip(f"flash-linear-attention has no {function}: {error}")
    if name != "hgrn2":
        return call

    def hgrn2(q: torch.Tensor, v: torch.Tensor, g: torch.Tensor, **given: Any) -> Any:
        return call(q=q, k=(1 - g.exp()).to(q.dtype), v=v, g=g, **given)

    return hgrn2


@pytest.mark.parametrize("strong", [False, True], ids=["mild", "strong"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", OPS)
def test_as_exact(name: str, dtype: torch.dtype, strong: bool, seed: int) -> None:
    op = OPS[name]
    if strong and not {"g", "gk"} & {*op.inputs.split()}:
        pytest.skip("it has no gates")
    peer = peer_of(name)
    inputs = drawn(name, dtype, strong, seed)
    do = torch.randn(1, T, H, V, generator=torch.Generator().manual_seed(seed + 1)).to(dtype).to(CUDA)
    want = answered(partial(op.oracle, scale=SCALE, **op.constants), inputs, do, torch.float64)
    ours = answered(partial(op.chunk, scale=SCALE, **op.constants), inputs, do, None)
    theirs = answered(partial(peer, scale=SCALE, **op.constants), inputs, do, None, may_refuse=True)
    over = []
    for key, x in theirs.items():
        error, other = relative_error(ours[key], want[key]), relative_error(x, want[key])
        bound = other + relative_error(want[key].to(dtype), want[key])
        if not error <= bound:
            over.append(f"{key}: {error:.2e}, theirs {other:.2e}, bound {bound:.2e}")
    assert not over, "\n".join(over)
