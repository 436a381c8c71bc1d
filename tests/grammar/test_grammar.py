"""Variants from components against token loops in float64, on one rank and on several; and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import elu

from flexsp.compiler import CompileError
from flexsp.grammar import FlexLinearAttention, decay, feature_map, transition
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness.grammar import EXACT, MODELS, H, K, Tensors, V, angles, draw, gradients, model, rotated

SMALL = ("mamba2", "gla, a gate a channel", "delta_rope", "retnet")


def token_loop(name: str, x: Tensors, initial: torch.Tensor, bounds: list[int] | None) -> tuple[Any, Any]:
    what = MODELS[name]()
    q, k = x["q"], x["k"]
    T = q.shape[1]
    spans = [(0, T)] if bounds is None else list(zip(bounds, bounds[1:], strict=False))
    if what.features.kind in ("elu", "relu"):
        q, k = ((elu(y) + 1 if what.features.kind == "elu" else y.clamp(min=0)) for y in (q, k))
    if what.features.kind == "rope":
        angle = torch.cat([angles(x, begin, end)[:, : end - begin] for begin, end in spans], 1)
        q, k = rotated(q, angle), rotated(k, angle)
    constants = what.decay.log_decay or [math.log1p(-(2.0 ** (-5 - h))) for h in range(H)]
    fixed = torch.tensor(constants, dtype=torch.float64)
    outputs, finals = [], []
    for begin, end in spans:
        S = initial[len(finals)].unsqueeze(0) if bounds else initial
        for t in range(begin, end):
            S = token_step(what, {key: y if key == "A" else y[:, t] for key, y in x.items()}, k[:, t], fixed, S)
            outputs.append(K**-0.5 * (q[:, t].unsqueeze(-1) * S).sum(-2))
        if what.features.kind == "rope":  # seen from the token behind, whose angles begin at 0
            back = -angles(x, begin, end)[:, -1].unsqueeze(-2)
            S = rotated(S.mT, back.expand(*S.mT.shape[:-1], K // 2)).mT
        finals.append(S)
    return torch.stack(outputs, 1), torch.cat(finals)


def token_step(
    what: FlexLinearAttention, x: Tensors, k: torch.Tensor, fixed: torch.Tensor, S: torch.Tensor
) -> torch.Tensor:
    v = x["v"]
    if what.decay.kind == "fixed":
        S = fixed.exp().view(1, H, 1, 1) * S
    elif what.decay.kind == "gated":
        S = x["decay"].exp().view(-1, H, K if what.decay.vector else 1, 1) * S
    elif what.decay.kind == "exponential":
        dt = x.get("decay", torch.ones(S.shape[0], H, dtype=torch.float64))
        S, v = (dt * x["A"]).exp().view(-1, H, 1, 1) * S, dt.unsqueeze(-1) * v
    if what.transition.kind == "delta_rule":
        v = x["beta"].unsqueeze(-1) * (v - (k.unsqueeze(-1) * S).sum(-2))
    return S + k.unsqueeze(-1) * v.unsqueeze(-2)


@pytest.mark.parametrize("bounds", [None, [0, 1, 38, 70]], ids=["batch", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_against_token_loop(name: str, bounds: list[int] | None, seed: int) -> None:
    x = draw(name, 1 if bounds else 2, 70, seed)
    made_state = torch.Generator().manual_seed(seed)
    initial = torch.randn(3 if bounds else 2, H, K, V, dtype=torch.float64, generator=made_state)
    cu = torch.tensor(bounds) if bounds else None
    made = MODELS[name]()

    def call(values: Tensors, state: torch.Tensor) -> Any:
        return made(**values, initial_state=state, output_final_state=True, cu_seqlens=cu)

    found = gradients(call, x, initial, seed)
    want = gradients(lambda values, state: token_loop(name, values, state, bounds), x, initial, seed)
    errors = {key: relative_error(found[key], want[key]) for key in want}
    assert max(errors.values()) < EXACT, errors


@pytest.mark.parametrize("name", MODELS)
def test_explain_says_what_runs(name: str) -> None:
    text = MODELS[name]().explain()
    others = {"gla, a gate a channel", "kda", "fixed delta", "exponential delta", "gated_delta_net", "delta_net"}
    assert ("diagonal engine" in text) == (name not in others | {"delta_rope"})


def on_ranks(sp: Any, name: str, lengths: list[int], seed: int) -> list[float]:
    x = draw(name, 2, sum(lengths), seed)
    cotangent = torch.randn(2, sum(lengths), H, V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    sp.set_lengths(lengths)
    start, stop, _ = sp.shard_range(lengths[sp.rank])
    made = MODELS[name]()

    def run(part: slice, ranks: Any) -> tuple[torch.Tensor, Tensors]:
        leaves = {key: (y if key == "A" else y[:, part]).clone().requires_grad_() for key, y in x.items()}
        o, _ = made(**leaves, sp=ranks)
        (o * cotangent[:, part]).sum().backward()
        return o.detach(), {key: y.grad for key, y in leaves.items() if y.grad is not None}

    o, mine = run(slice(start, stop), sp)
    want, whole = run(slice(0, sum(lengths)), False)
    if start == stop:
        return [0.0]
    pairs = [(o, want[:, start:stop])] + [(mine[key], whole[key][:, start:stop]) for key in mine if key != "A"]
    return [relative_error(a, b) for a, b in pairs]


@pytest.mark.parametrize("name", SMALL)
def test_ranks_equal_one_rank(name: str, seed: int) -> None:
    answers = run_ranks(on_ranks, 3, name, [20, 0, 17], seed)
    assert max(max(errors) for errors in answers) < EXACT, answers


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gla", {"decay": None}, r"expected \['decay'\] besides q, k and v, got \[\]"),
        ("gla", {"beta": torch.ones(1, 5, H)}, r"got \['beta', 'decay'\]"),
        ("gla", {"decay": torch.zeros(1, 5, H, K)}, r"decay: expected shape \[B, T, H\] = \[1, 5, 2\]"),
        ("kda", {"beta": torch.ones(1, 5)}, r"beta: expected shape \[B, T, H\] = \[1, 5, 2\]"),
        ("gla", {"k": torch.ones(1, 4, H, K, dtype=torch.float64)}, "q, k, v: expected"),
        ("gla", {"decay": torch.ones(1, 5, H, dtype=torch.float64)}, "decay: expected natural-log gates <= 0"),
        ("gated_delta_net", {"decay": torch.ones(1, 5, H, dtype=torch.float64)}, "decay: expected natural-log gates"),
        ("kda", {"decay": torch.ones(1, 5, H, K, dtype=torch.float64)}, "decay: expected natural-log gates <= 0"),
        ("exponential delta", {"A": torch.ones(H, dtype=torch.float64)}, "A: expected values <= 0"),
        ("exponential delta", {"decay": -torch.ones(1, 5, H, dtype=torch.float64)}, "decay: expected step sizes >= 0"),
        ("kda", {"beta": torch.ones(1, 5, H, dtype=torch.int64)}, "beta: expected dtype"),
        ("kda", {"beta": 1.0}, r"beta: expected a tensor \[B, T, H\], got float"),
        ("kda", {"v": torch.ones(1, 5, H, V)}, "v: expected dtype float64, got torch.float32"),
        ("kda", {"q": torch.ones(1, 5, H, K, dtype=torch.int64)}, "q: expected dtype"),
        ("kda", {"initial_state": torch.ones(2, H, K, V, dtype=torch.float64)}, "initial_state: expected shape"),
        ("kda", {"initial_state": torch.ones(1, H, K, V)}, "initial_state: expected dtype float64"),
    ],
)
def test_errors_of_a_call(name: str, changes: dict[str, Any], message: str) -> None:
    x = {key: value for key, value in (draw(name, 1, 5, 0) | changes).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        MODELS[name]()(**x)


def test_beta_must_be_a_tensor() -> None:
    x = draw("kda", 1, 5, 0) | {"beta": None}
    with pytest.raises(ValueError, match="beta: expected a tensor"):
        MODELS["kda"]()(**x)  # type: ignore[arg-type]


@pytest.mark.parametrize("strength", [-1e3, -1e6, -math.inf])
@pytest.mark.parametrize("name", ["gla, a gate a channel", "kda", "gated_delta_net"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_closed_gate_starts_anew(name: str, strength: float, dtype: torch.dtype, seed: int) -> None:
    """What follows is as without what was before, in the same chunk too."""
    x = {key: y.to(dtype) for key, y in draw(name, 1, 16, seed).items()}
    x["decay"][:, 6] = strength
    leaves = {key: y.clone().requires_grad_() for key, y in x.items()}
    o, _ = MODELS[name]()(**leaves)
    o.sum().backward()
    after, _ = MODELS[name]()(**{key: y[:, 6:] for key, y in x.items()})
    assert relative_error(o[:, 6:], after) < 1e3 * torch.finfo(dtype).eps
    assert all(y.grad is not None and y.grad.isfinite().all() for y in leaves.values())


def test_a_fixed_decay_of_zero(seed: int) -> None:
    x = draw("fixed delta", 1, 9, seed)
    o, _ = model(decay.fixed([-math.inf] * H), t=transition.delta_rule())(**x)
    alone = x["beta"].unsqueeze(-1) * (x["q"] * x["k"]).sum(-1, keepdim=True) * x["v"] * K**-0.5
    assert relative_error(o, alone) < EXACT


@pytest.mark.parametrize("name", ["gla, a gate a channel", "exponential delta"])
def test_half_precision_inputs_are_rounded_once(name: str, seed: int) -> None:
    """Neither the scaled queries nor the values times dt: the error is that of rounding the output."""
    x = {key: y.bfloat16() for key, y in draw(name, 1, 400, seed).items()}
    want, _ = MODELS[name]()(**{key: y.double() for key, y in x.items()}, scale=0.3)
    o, _ = MODELS[name]()(**x, scale=0.3)
    assert o.dtype == torch.bfloat16
    beyond = (o.double() - want).abs() - 0.5 * torch.finfo(torch.bfloat16).eps * want.abs()
    assert beyond.max() < 1e-4 * want.abs().max()


def test_errors_of_components() -> None:
    with pytest.raises(ValueError, match="decay: expected a component"):
        model("gated")
    with pytest.raises(ValueError, match="log_decay: expected natural logarithms"):
        decay.fixed([0.5])
    with pytest.raises(ValueError, match="expected 2 values, one a head, got 1"):
        model(decay.fixed([-1.0]))(*(torch.randn(1, 3, H, n) for n in (K, K, V)))
    with pytest.raises(ValueError, match="even K"):
        model(decay.none(), feature_map.rope())(*(torch.randn(1, 3, H, n) for n in (3, 3, V)))
    assert issubclass(CompileError, ValueError)
