"""The walk of a segment begins at the first chunk that still counts at its end: exact for any gates, and shorter."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from flexsp.testing.cases import CASES, Shape
from flexsp.testing.compare import check_op
from flexsp.testing.ranks import run_ranks
from tests.harness.diagonal import ONE_SEGMENT, SOME_SEGMENTS, H, T, gates_of
from tests.harness.interpreted import INTERPRETED, poisoned

BOUNDS = (0, 70, 70, 90, T)


KINDS = (
    "none", "some tens of tokens", "one slow head", "huge", "as models begin", "closed here and there",
    "large numbers far away",
)  # fmt: skip


def failures(sp: Any, seed: int) -> list[str]:
    found = []
    for kind in KINDS:
        for packed, segments in ((False, ONE_SEGMENT), (True, SOME_SEGMENTS)):
            case, r = CASES["simple_gla"], random.Random(seed)
            inputs = case.inputs(Shape(B=1, T=T, H=H, K=5, V=3, states=4 if packed else 1), r.randrange(2**31))
            inputs["g"] = gates_of(kind, seed)
            if kind == "large numbers far away":  # they count at the other end, where a decay of e^-40 is reached
                inputs["v"][:, :16] *= 1e33
                inputs["q"][:, -16:] *= 1e33
            if packed:
                inputs["cu_seqlens"] = torch.tensor(BOUNDS)
            with poisoned(segments, H):
                try:
                    check_op(case.op, case.oracle, inputs, dtype=torch.float32)
                except Exception as error:
                    found.append(f"{kind}, packed {packed}, segments {segments}: {error}")
    return found


@pytest.mark.slow
def test_gates_of_all_kinds(seed: int) -> None:
    """Outputs, final states and every gradient, whole and packed, with initial states."""
    (found,) = run_ranks(failures, 1, seed, env=INTERPRETED)
    assert not found, "\n".join(found)


def _behind(sp: Any, seed: int, packed: bool) -> tuple[bool, bool, float]:
    """In two segments: with NaN in the first token, whether outputs of the second one have none; with NaN in the last
    output's gradient, whether gradients of the first one have none; the relative change of the last outputs that a
    state of 1e30 at the beginning makes."""
    from flexsp.ops import chunk_simple_gla

    torch.manual_seed(seed)
    q, k, v = torch.randn(3, 1, T, H, 16).unbind(0)
    g = torch.full((1, T, H), -4.0)
    bounds = torch.tensor([0, T]) if packed else None
    broken, whole, half = k.clone(), k.clone().requires_grad_(), T // 2 + 32
    broken[:, 0] = float("nan")
    with poisoned(SOME_SEGMENTS, H):
        forward = chunk_simple_gla(q, broken, v, g, cu_seqlens=bounds)[0][:, half:]
        o, _ = chunk_simple_gla(q, whole, v, g, cu_seqlens=bounds)
        do = torch.ones_like(o)
        do[:, -1] = float("nan")
        o.backward(do)
        large = torch.full((1, H, 16, 16), 1e30)
        after = chunk_simple_gla(q, k, v, g, initial_state=large, cu_seqlens=bounds)[0][:, half:]
    assert whole.grad is not None
    change = float((after - o[:, half:]).norm() / after.norm())
    return bool(forward.isfinite().all()), bool(whole.grad[:, : T // 2 - 16].isfinite().all()), change


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_behind_the_horizon_is_not_walked(packed: bool, seed: int) -> None:
    ((forward, backward, change),) = run_ranks(_behind, 1, seed, packed, env=INTERPRETED)
    assert forward and backward
    assert change < 1e-6
