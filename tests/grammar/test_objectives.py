"""Transitions of several steps against token loops in float64: packed, over ranks, continued; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexsp.grammar import FlexLinearAttention, decay, feature_map, transition
from flexsp.ops import mamba3
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness.grammar import gradients
from tests.harness.objectives import (
    EXACT,
    MODELS,
    QUICK,
    ROPE,
    SHARED,
    TRAPEZOID,
    K,
    R,
    Tensors,
    V,
    call_of,
    compare,
    draw,
    draw_for,
    draw_state,
    on_ranks,
    state_for,
    token_loop,
)
from tests.marks import quick

# Tests ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", [None, [0, 0, 1, 38, 38, 70]], ids=["batch", "packed"])
@pytest.mark.parametrize("name", quick(MODELS, *QUICK))
def test_against_token_loop(name: str, bounds: list[int] | None, seed: int) -> None:
    x = draw(name, 1 if bounds else 2, 70, seed)
    initial = draw_state(name, 5 if bounds else 2, seed)
    found = gradients(call_of(name, bounds), x, initial, seed)
    want = gradients(lambda values, state: token_loop(MODELS[name](), values, state, bounds), x, initial, seed)
    for each in (found, want):
        each["dinitial"][..., K:, V:] = 0  # nothing reads the corner
    errors = {key: relative_error(found[key], want[key]) for key in want}
    assert max(errors.values()) < EXACT, errors


@pytest.mark.parametrize("name", quick(MODELS, "mamba3, read"))
def test_one_call_after_another(name: str, seed: int) -> None:
    """The state of one call continues in the next."""
    made, state = MODELS[name](), draw_state(name, 2, seed)
    step = getattr(made.transition, "block", 1)
    x = draw(name, 2, 9 * step, seed)
    o, final = call_of(name)(x, state)
    for t in range(0, 9 * step, step):
        now = {key: y if key in SHARED else y[:, t : t + step] for key, y in x.items()}
        one, state = call_of(name)(now, state)
        assert relative_error(one, o[:, t : t + step]) < EXACT
    assert relative_error(state, final) < EXACT


@pytest.mark.parametrize("bounds", [None, [0, 0, 5, 20, 30, 30, 37]], ids=["batch", "packed"])
@pytest.mark.parametrize("name", quick([x for x in MODELS if x != "contrastive, large blocks"], "mamba3, read"))
def test_ranks_equal_one_rank(name: str, bounds: list[int] | None, seed: int) -> None:
    (whole,) = run_ranks(on_ranks, 1, name, [37], bounds, seed)
    blocks = "contrastive" in name
    for lengths in ([20, 0, 17], [0, 5, 32] if blocks else [0, 1, 36], [10, 15, 12] if blocks else [12, 10, 15]):
        compare(run_ranks(on_ranks, 3, name, lengths, bounds, seed), whole, EXACT)


SEED = {  # flexsp/grammar for the components of the project's first text, section 7.1
    "mamba2": lambda: FlexLinearAttention(
        decay=decay.exponential(data_dependent=True), features=feature_map.identity(),
        transition=transition.one_step_gd(),
    ),
    "gla": lambda: FlexLinearAttention(
        decay=decay.gated(per_head=True), features=feature_map.identity(), transition=transition.one_step_gd(),
    ),
    "gated_delta_net": lambda: FlexLinearAttention(
        decay=decay.gated(per_head=True), features=feature_map.identity(), transition=transition.delta_rule(),
    ),
    "mamba3": lambda: FlexLinearAttention(
        decay=decay.exponential(data_dependent=True, discretization="trapezoidal"),
        features=feature_map.rope(data_dependent=True), transition=transition.one_step_gd(mimo_rank=4),
    ),
    "preconditioned_mamba3": lambda: FlexLinearAttention(
        decay=decay.exponential(data_dependent=True, discretization="trapezoidal"),
        features=feature_map.rope(data_dependent=True),
        transition=transition.preconditioned_gd(preconditioner="diagonal", mimo_rank=4),
    ),
    "contrastive": lambda: FlexLinearAttention(
        decay=decay.gated(per_head=True), features=feature_map.identity(),
        transition=transition.contrastive(feedback="chunk_lagged"),
    ),
    "predictive_state": lambda: FlexLinearAttention(
        decay=decay.gated(per_head=True), features=feature_map.identity(),
        transition=transition.temporal_difference(),
    ),
    "delta_rope": lambda: FlexLinearAttention(
        decay=decay.gated(per_head=True), features=feature_map.rope(data_dependent=True),
        transition=transition.delta_rule(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEED)
def test_every_spelling(name: str, seed: int) -> None:
    """Constructs, runs and is right, with values of eps and blocks that nobody chose."""
    what = SEED[name]()
    x, state = draw_for(what, 2, 70, seed), state_for(what, 2, seed)

    def call(values: Tensors, state: torch.Tensor) -> Any:
        return what(**values, initial_state=state, output_final_state=True)

    found = gradients(call, x, state, seed)
    want = gradients(lambda values, state: token_loop(what, values, state, None), x, state, seed)
    for key in want:
        if not key.startswith("dinitial"):
            assert relative_error(found[key], want[key]) < EXACT, key
    assert "besides q, k and v: " + ", ".join(what.inputs) in what.explain()


@pytest.mark.parametrize("rank", [1, R])
def test_mamba3_is_the_op(rank: int, seed: int) -> None:
    what = FlexLinearAttention(decay.exponential(**TRAPEZOID), ROPE, transition.one_step_gd(mimo_rank=rank))
    x = draw_for(what, 2, 33, seed)
    o, _ = what(**x, scale=1.0)
    angles = 0.2 * x["theta"]
    given = {"B": x["k"], "C": x["q"], "trap": x["trap"], "A": x["A"].expand(x["decay"].shape)}
    given |= {"mimo_x": x["mimo_x"]} if rank > 1 else {}
    want, _ = mamba3(x["v"], x["decay"], angles=angles, **given)
    x["theta"] = torch.pi * angles.tanh() * x["decay"].unsqueeze(-1)
    o, _ = what(**x, scale=1.0)
    assert relative_error(o, want) < EXACT
