"""Tokens of several keys: the delta engine reads queries and gates with a row a token, under the interpreter.

It must give the same bits as one key a token, with queries, gates and gradients of outputs set between zeros.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from flexsp.devices import H200, planned_for
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED
from tests.harness.keys import drawn, unlike
from tests.marks import quick

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DOCUMENTS = (0, 0, 11, 11, 47, 60)  # of 60 tokens
SHARDS = (27, 33)


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
    assert run_ranks(differences, 1, random.randrange(2**31), *CASES[case], env=INTERPRETED) == [[]]


@pytest.mark.parametrize("case", quick(CASES, "three keys, packed"))
def test_over_ranks(case: str) -> None:
    found = run_ranks(differences, 2, random.randrange(2**31), *CASES[case], env=INTERPRETED)
    assert found == [[], []]
