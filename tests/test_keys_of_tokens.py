"""Tokens of several keys: the delta engine reads queries and gates with a row a token, under the interpreter.

It must give the same bits as one key a token, with queries, gates and gradients of outputs set between zeros.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flexsp import ops
from flexsp.devices import H200, planned_for
from flexsp.ops import _delta
from flexsp.testing.ranks import run_ranks
from tests.marks import quick

ENV = {"TRITON_INTERPRET": "1", "FLEXSP_BACKEND": "triton"}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DOCUMENTS = (0, 0, 11, 11, 47, 60)  # of 60 tokens
SHARDS = (27, 33)


def drawn(
    seed: int, T: int, n: int, gated: bool, dtype: torch.dtype, states: int, K: int = 24, V: int = 40
) -> dict[str, torch.Tensor]:
    """A sequence of one key head and two value heads; and the gradient of the outputs."""
    made = torch.Generator().manual_seed(seed)
    shapes = {"q": (1, T, 1, K), "k": (1, T * n, 1, K), "v": (1, T * n, 2, V), "do": (1, T, 2, V)}
    given = {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}
    given["k"] = F.normalize(given["k"], dim=-1)
    given["beta"] = 2.0 * torch.rand(1, T * n, 2, generator=made)
    given = {name: x.to(dtype) for name, x in given.items()}
    if gated:
        given["g"] = torch.where(torch.rand(1, T, 2, generator=made) < 0.1, -120.0, -0.1)
    return given | {"initial_state": torch.randn(states, 2, K, V, generator=made)}


def between_zeros(x: torch.Tensor, n: int, at: int) -> torch.Tensor:
    """[B, T n, ..] with the rows of x [B, T, ..] at every n-th from `at` on."""
    wide = x.new_zeros(x.shape[0], x.shape[1] * n, *x.shape[2:])
    wide[:, at::n] = x
    return wide


def passes(op: Any, given: dict[str, torch.Tensor], **options: Any) -> dict[str, torch.Tensor]:
    """Outputs, final states and gradients of all inputs and of initial states."""
    leaves = {name: x.clone().requires_grad_() for name, x in given.items() if name != "do"}
    o, final = op(**leaves, output_final_state=True, **options)
    outputs, to = [o], [given["do"]]
    if final is not None:
        outputs, to = [o, final], [given["do"], torch.ones_like(final)]
    grads = torch.autograd.grad(outputs, [*leaves.values()], to, allow_unused=True)
    found = {"o": o.detach()} | ({} if final is None else {"final": final.detach()})
    return found | {f"d{name}": dx for name, dx in zip(leaves, grads, strict=True) if dx is not None}


def unlike(
    given: dict[str, torch.Tensor], n: int, gated: bool, bounds: torch.Tensor | None, **options: Any
) -> list[str]:
    """What differs in any bit from a call with a row of queries and gates for each key."""
    gate = {} if gated else {"g": None}
    spread = _delta._by_key
    _delta._by_key = lambda *given: pytest.fail("queries were given a row a key")  # type: ignore[assignment]
    try:
        found = passes(ops.chunk_gated_delta_product, given, **gate, num_householder=n, cu_seqlens=bounds, **options)
    finally:
        _delta._by_key = spread
    wide = given | {name: between_zeros(given[name], n, n - 1) for name in ("q", "do")}
    if gated:
        wide["g"] = between_zeros(given["g"], n, 0)
    rule = ops.chunk_gated_delta_rule if gated else ops.chunk_delta_rule
    want = passes(rule, wide, cu_seqlens=None if bounds is None else bounds * n, **options)
    for name, at in (("o", n - 1), ("dq", n - 1), ("dg", 0)):
        if name in want:
            want[name] = want[name][:, at::n]
    return sorted({*want} ^ {*found}) + [x for x in found if not torch.equal(found[x], want[x])]


def differences(
    sp: Any, seed: int, n: int, gated: bool, dtype: torch.dtype, packed: bool, K: int = 24, V: int = 40,
    programs: int = H200.programs,
) -> list[str]:  # fmt: skip
    """programs: few give each so many columns of a state that it holds them transposed."""
    given = drawn(seed, 60, n, gated, dtype, len(DOCUMENTS) - 1 if packed else 1, K, V)
    options: dict[str, Any] = {}
    if sp.world_size > 1:
        first = sum(SHARDS[: sp.rank])
        rows = {name: n if name in ("k", "v", "beta") else 1 for name in given if name != "initial_state"}
        given |= {name: given[name][:, first * r : (first + SHARDS[sp.rank]) * r] for name, r in rows.items()}
        options["sp"] = sp
        if not packed and not sp.is_first:
            del given["initial_state"]
    with planned_for(replace(H200, programs=programs)):
        return unlike(given, n, gated, torch.tensor(DOCUMENTS) if packed else None, **options)


CASES = {
    "two keys": (2, True, BF16, False, 24, 72, 1), "three keys, packed": (3, True, BF16, True),
    "two keys, no gate, packed": (2, False, F32, True), "three keys, fp16": (3, True, F16, False),
    "two keys, large heads, packed": (2, True, BF16, True, 256, 192),
    "two keys, large heads": (2, True, F32, False, 192, 256),
}  # fmt: skip


@pytest.mark.parametrize("case", quick(CASES, "two keys", "three keys, packed"))
def test_as_a_row_a_key(case: str) -> None:
    assert run_ranks(differences, 1, random.randrange(2**31), *CASES[case], env=ENV) == [[]]


@pytest.mark.parametrize("case", quick(CASES, "three keys, packed"))
def test_over_ranks(case: str) -> None:
    found = run_ranks(differences, 2, random.randrange(2**31), *CASES[case], env=ENV)
    assert found == [[], []]
