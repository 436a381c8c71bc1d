"""Outputs and gradients are at least as exact as flash-linear-attention's, op by op, in bfloat16 and float16.

Both get the same numbers; the reference is the token loop in float64 of these. Our error, root mean square, may be the
peer's and one rounding of the result more; of sums over tokens, of gates and the like, that are few numbers and may be
right by chance, twice the peer's. Where the peer refuses its backward pass (those of gates on Hopper with some releases
of Triton), outputs alone are compared, and the test counts as skipped. Of the peer's kernels few tilings are tried: to
tune all takes minutes.
"""

from __future__ import annotations

import importlib
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
DRAWS = 4  # cotangents, whose errors are taken together: a sum over tokens may nearly vanish for one of them
DTYPES = [torch.bfloat16, torch.float16]
Tensors = dict[str, torch.Tensor]


class Op(NamedTuple):
    """`inputs` by name; `peer` is the module of flash-linear-attention and its function."""

    chunk: Callable[..., Any]
    oracle: Callable[..., Any]
    peer: tuple[str, str]
    inputs: str
    constants: dict[str, Any] = {"scale": SCALE}


def _product(num_householder: int, **given: Any) -> Any:
    return oracles.delta_rule(**given, steps=num_householder)


OPS = {
    "linear": Op(ops.chunk_linear_attn, oracles.linear_attn, ("linear_attn", "chunk_linear_attn"), "q k v",
                 {"normalize": False, "scale": SCALE}),
    "retention": Op(ops.chunk_retention, oracles.retention, ("retention", "chunk_retention"), "q k v"),
    "lightning": Op(ops.chunk_lightning_attn, oracles.lightning_attn,
                    ("lightning_attn", "chunk_lightning_attn"), "q k v",
                    {"layer_idx": 1, "num_layers": 4, "scale": SCALE}),
    "simple_gla": Op(ops.chunk_simple_gla, oracles.simple_gla, ("simple_gla", "chunk_simple_gla"), "q k v g"),
    "gla": Op(ops.chunk_gla, vector.gla, ("gla", "chunk_gla"), "q k v gk"),
    "hgrn2": Op(ops.chunk_hgrn2, vector.hgrn2, ("gla", "chunk_gla"), "q v gk"),
    "rwkv6": Op(ops.chunk_rwkv6, vector.rwkv6, ("rwkv6", "chunk_rwkv6"), "q k v gk u"),
    "rwkv7": Op(ops.chunk_rwkv7, vector.rwkv7, ("rwkv7", "chunk_rwkv7"), "q gk k v removes writes"),
    "hgrn": Op(ops.chunk_hgrn, vector.hgrn, ("hgrn", "chunk_hgrn"), "x gx", {}),
    "delta_rule": Op(ops.chunk_delta_rule, oracles.delta_rule, ("delta_rule", "chunk_delta_rule"), "q k v beta"),
    "gated_delta_rule": Op(ops.chunk_gated_delta_rule, oracles.delta_rule,
                           ("gated_delta_rule", "chunk_gated_delta_rule"), "q k v g beta"),
    "gated_delta_product": Op(ops.chunk_gated_delta_product, _product,
                              ("gated_delta_product", "chunk_gated_delta_product"), "q k2 v2 g beta2",
                              {"num_householder": 2, "scale": SCALE}),
    "kda": Op(ops.chunk_kda, oracles.delta_rule, ("kda", "chunk_kda"), "q k v gk beta"),
    "gdn2": Op(ops.chunk_gdn2, oracles.gdn2, ("gdn2", "chunk_gdn2"), "q k v gk b w"),
}  # fmt: skip
NAMES = {
    "rwkv6": {"q": "r", "gk": "w"}, "rwkv7": {"q": "r", "gk": "w", "removes": "a", "writes": "b"},
    "gated_delta_product": {"k2": "k", "v2": "v", "beta2": "beta"}, "hgrn": {"gx": "g"},
}  # fmt: skip
WIDE = ("g", "gk", "gx", "u")
GATES = ("dg", "dw", "dbeta", "db", "du")  # of which sums over tokens are compared too
DELTA = ("delta_rule", "gated_delta_rule", "gated_delta_product", "kda", "gdn2")


@pytest.fixture(autouse=True)
def _few_tilings(monkeypatch: pytest.MonkeyPatch) -> None:
    every = Autotuner.prune_configs

    def few(tuner: Any, given: dict[str, Any]) -> Any:
        found = every(tuner, given)
        return found[:: len(found) // TILINGS | 1]

    monkeypatch.setattr(Autotuner, "prune_configs", few)


def drawn(name: str, dtype: torch.dtype, strong: bool, seed: int, alike: bool = False) -> Tensors:
    """Numbers of `dtype`; gates, and a bonus, of float32. `alike`: all keys are near one, and steps near 1."""
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made)

    def gates(*channels: int) -> torch.Tensor:
        x = normal(1, T, *channels)
        return -3 * torch.sigmoid(x) if strong else logsigmoid(x + 3)

    def keys(tokens: int) -> torch.Tensor:
        one = normal(1, 1, H, K) if alike else 0.0
        return normalize(one + (0.3 if alike else 1.0) * normal(1, tokens, H, K), dim=-1)

    def steps(tokens: int) -> torch.Tensor:
        x = torch.rand(1, tokens, H, generator=made)
        return 0.9 + 0.1 * x if alike else x

    found = {"q": normal(1, T, H, K), "k": keys(T), "v": normal(1, T, H, V), "x": normal(1, T, H * K)}
    found |= {"k2": keys(2 * T), "v2": normal(1, 2 * T, H, V), "beta2": steps(2 * T), "beta": steps(T)}
    found |= {"g": gates(H), "gk": gates(H, K), "gx": gates(H * K), "u": normal(H, K)}
    found |= {"b": normal(1, T, H, K).sigmoid(), "w": normal(1, T, H, V).sigmoid()}
    removed = normalize(normal(1, T, H, K), dim=-1)
    found |= {"removes": -removed, "writes": removed * normal(1, T, H, K).sigmoid()}
    names = {"gk": "g"} | NAMES.get(name, {})
    return {
        names.get(x, x): (found[x] if x in WIDE else found[x].to(dtype)).to(CUDA) for x in OPS[name].inputs.split()
    }


def answered(
    function: Callable[..., Any], inputs: Tensors, dos: list[torch.Tensor], dtype: torch.dtype | None
) -> Tensors:
    """o, and gradients for all cotangents, with sums over tokens."""
    leaves = {key: x.to(x.dtype if dtype is None else dtype).requires_grad_() for key, x in inputs.items()}
    o = function(**leaves)[0]
    found = {"o": o.detach()}
    try:
        grads = [torch.autograd.grad(o, list(leaves.values()), do.to(o), retain_graph=True) for do in dos]
    except RuntimeError as error:
        raise _NoGradients(found, str(error)) from error
    for key, *each in zip(leaves, *grads, strict=True):
        name = f"d{key}"
        found[name] = torch.stack([*each])
        if name in GATES and found[name].dim() > 3:
            found[f"{name}, summed over tokens"] = found[name].double().sum(2)
    return found


class _NoGradients(Exception):
    def __init__(self, outputs: Tensors, why: str) -> None:
        super().__init__(f"outputs are compared, but there are no gradients of flash-linear-attention: {why}")
        self.outputs = outputs


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


def compare(name: str, inputs: Tensors, dtype: torch.dtype, seed: int) -> None:
    op, peer, none = OPS[name], peer_of(name), None
    made = torch.Generator().manual_seed(seed + 1)
    shape = inputs["x"].shape if name == "hgrn" else (1, T, H, V)
    dos = [torch.randn(shape, generator=made).to(dtype).to(CUDA) for _ in range(DRAWS)]
    want = answered(partial(op.oracle, **op.constants), inputs, dos, torch.float64)
    ours = answered(partial(op.chunk, **op.constants), inputs, dos, None)
    try:
        theirs = answered(partial(peer, **op.constants), inputs, dos, None)
    except _NoGradients as error:
        theirs, none = error.outputs, error
    over = []
    for key, x in theirs.items():
        error_of_ours, other = relative_error(ours[key], want[key]), relative_error(x, want[key])
        few = 2 if key.endswith("tokens") else 1
        bound = few * other + relative_error(want[key].to(dtype), want[key])
        if not error_of_ours <= bound:
            over.append(f"{key}: {error_of_ours:.2e}, theirs {other:.2e}, bound {bound:.2e}")
    assert not over, "\n".join(over)
    if none is not None:
        pytest.skip(str(none))


@pytest.mark.parametrize("strong", [False, True], ids=["mild", "strong"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", OPS)
def test_as_exact(name: str, dtype: torch.dtype, strong: bool, seed: int) -> None:
    if strong and not {"g", "gk", "gx"} & {*OPS[name].inputs.split()}:
        pytest.skip("it has no gates")
    compare(name, drawn(name, dtype, strong, seed), dtype, seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", DELTA)
def test_keys_that_are_alike(name: str, dtype: torch.dtype, seed: int) -> None:
    """What is written is removed again and again: of KDA dk, of the delta rule d(beta) lose most."""
    compare(name, drawn(name, dtype, False, seed, alike=True), dtype, seed)
