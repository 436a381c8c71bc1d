"""Queries and keys that `feature_map.rope` turns: a text in two calls is the text in one, for all that constructs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexsp.grammar import FlexLinearAttention, decay, feature_map, transition
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness.objectives import SHARED, TRAPEZOID, H, K, Tensors, V, draw_for, state_for
from tests.marks import quick

EXACT = 1e-11
T, CUT = 12, 8  # whole blocks of the contrastive rule
DECAYS = {
    "none": decay.none(), "fixed": decay.fixed([-0.1, -0.5]), "gated": decay.gated(),
    "a gate a channel": decay.gated(per_head=False), "steps": decay.exponential(),
    "constant": decay.exponential(data_dependent=False), "trapezoid": decay.exponential(**TRAPEZOID),
}  # fmt: skip
TRANSITIONS = {
    "one step": transition.one_step_gd(), "rows": transition.one_step_gd(mimo_rank=3), "delta": transition.delta_rule(),
    "read": transition.preconditioned_gd(eps=0.1), "write": transition.preconditioned_gd(at="write", eps=0.1),
    "read, rows": transition.preconditioned_gd(eps=0.1, mimo_rank=3),
    "write, rows": transition.preconditioned_gd(at="write", eps=0.1, mimo_rank=3),
    "difference": transition.temporal_difference(0.7), "information": transition.information(eps=0.3),
    "spectral": transition.spectral(), "contrastive": transition.contrastive(block=4),
}  # fmt: skip
MASKS: dict[str, Callable[..., Any]] = {
    "decay": lambda i, j, h: torch.where(i >= j, torch.exp(-0.1 * h[j] * 0 - 0.2 * (i - j)), 0.0) * h[j],
    "causal": lambda i, j: i >= j,
}


class Halves:
    """Each half of the channels forgets at its own rate: it knows channels by their place."""

    def chunk(self, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return (_halves(k) * (g.sum(0) - g.cumsum(0)).exp()[:, None]).T @ v

    def propagate(self, state: torch.Tensor, chunk_state: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return g.sum(0).exp() * state + chunk_state

    def output(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        b = g.cumsum(0)
        scores = (q @ _halves(k).T).tril(0) * (b[:, None] - b).exp().tril(0)
        return scores @ v + (q * b.exp()[:, None]) @ state


def _halves(k: torch.Tensor) -> torch.Tensor:
    return k * k.abs()


def _made(what: dict[str, Any]) -> FlexLinearAttention | None:
    try:
        return FlexLinearAttention(**what)
    except NotImplementedError:
        return None


def _all() -> dict[str, FlexLinearAttention]:
    ropes = {"position": feature_map.rope(), "theta": feature_map.rope(data_dependent=True)}
    rules: dict[str, dict[str, Any]] = {name: {"transition": t} for name, t in TRANSITIONS.items()}
    for (name, mask), rule in itertools.product(MASKS.items(), ("one step", "delta")):
        rules[f"{rule}, mask of {name}"] = {"transition": TRANSITIONS[rule], "custom_mask": mask}
    rules["custom"] = {"custom_transition": Halves}
    found = {}
    for (rule, r), (gate, d), (angle, f) in itertools.product(rules.items(), DECAYS.items(), ropes.items()):
        made = _made({**r, "decay": d, "features": f})
        if made is not None and not (rule == "custom" and d.vector):  # the class takes a gate a head
            found[f"{rule}; {gate}; {angle}"] = made
    return found


EVERY = _all()
QUICK = [
    "one step; fixed; position", "one step; a gate a channel; position", "one step; trapezoid; theta",
    "delta; gated; theta", "delta; a gate a channel; theta", "read, rows; trapezoid; theta",
    "write; constant; position", "difference; steps; theta", "information; gated; position",
    "contrastive; gated; theta", "custom; gated; position", "delta, mask of decay; gated; position",
]  # fmt: skip


def draw(name: str, B: int, seed: int, T: int = T) -> Tensors:
    x = draw_for(EVERY[name], B, T, seed)
    if EVERY[name].mask is not None:
        made = torch.Generator().manual_seed(seed)  # every rank draws the same
        shape: dict[str, Any] = {"size": (B, T, H), "dtype": torch.float64, "generator": made}
        x |= {key: torch.rand(**shape) for key in EVERY[name].mask.inputs}  # type: ignore[union-attr]
    return x


def part(x: Tensors, begin: int, end: int) -> Tensors:
    return {key: y if key in SHARED else y[:, begin:end] for key, y in x.items()}


@pytest.mark.parametrize("name", quick(EVERY, *QUICK))
def test_two_calls_are_one(name: str, seed: int) -> None:
    """Outputs, final states and gradients of what came first; a call without tokens changes nothing."""
    made, x = EVERY[name], draw(name, 2, seed)
    leaves = {key: y.requires_grad_() for key, y in {**x, "start": state_for(made, 2, seed)}.items()}
    start = leaves["start"]
    want, end = made(**x, initial_state=start, output_final_state=True)
    outputs, state = [], start
    for begin, stop in ((0, CUT), (CUT, CUT), (CUT, T)):
        o, state = made(**part(x, begin, stop), initial_state=state, output_final_state=True)
        outputs.append(o)
    assert relative_error(torch.cat(outputs, 1), want) < EXACT
    assert relative_error(state, end) < EXACT
    pairs = (
        torch.autograd.grad((o * o.detach()).sum() + (s * s.detach()).sum(), list(leaves.values()))
        for o, s in ((torch.cat(outputs, 1), state), (want, end))
    )
    errors = {key: relative_error(a, b) for key, a, b in zip(leaves, *pairs, strict=True)}
    assert max(errors.values()) < 1e-9, errors


def on_ranks(sp: Any, names: list[str], bounds: list[int] | None, seed: int) -> list[float]:
    """Errors of this rank's outputs with an initial state, and of its final states, against documents one by one."""
    lengths, errors = [8, 0, 4], []
    sp.set_lengths(lengths)
    begin, stop, _ = sp.shard_range(lengths[sp.rank])
    for name in names:
        made, x = EVERY[name], draw(name, 1 if bounds else 2, seed)
        start = state_for(made, len(bounds) - 1 if bounds else 2, seed)
        cu = None if bounds is None else torch.tensor(bounds)
        o, final = made(
            **part(x, begin, stop), initial_state=start if bounds or sp.is_first else None, output_final_state=True,
            cu_seqlens=cu, sp=sp,
        )  # fmt: skip
        outputs, finals = [], []
        for n, (a, b) in enumerate([(0, T)] if bounds is None else zip(bounds, bounds[1:], strict=False)):
            found = made(
                **part(x, a, b), initial_state=start if bounds is None else start[n : n + 1], output_final_state=True,
                sp=False,
            )  # fmt: skip
            outputs.append(found[0])
            finals.append(found[1] if bounds is None or (b > a and begin < b <= stop) else 0 * found[1])
        if begin < stop:
            errors.append(relative_error(o, torch.cat(outputs, 1)[:, begin:stop]))
        if final is not None and (bounds is None or begin < stop):
            errors.append(relative_error(final, torch.cat(finals)))
    return errors


@pytest.mark.parametrize("names", [QUICK, pytest.param(list(EVERY), marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize("bounds", [None, [0, 4, 12]], ids=["batch", "packed"])
def test_ranks_continue_too(names: list[str], bounds: list[int] | None, seed: int) -> None:
    errors = run_ranks(on_ranks, 3, names, bounds, seed)
    assert max(max(x) for x in errors if x) < EXACT, errors
    assert sum(map(len, errors)) >= 2 * len(names)


def test_angles_of_long_texts_are_precise(seed: int) -> None:
    """Sums of angles in float32 over 100,000 tokens: whole turns are taken off before they are rounded."""
    made, n = EVERY["one step; none; theta"], 100_000
    theta = 1 + torch.rand(1, n, 1, 1, generator=torch.Generator().manual_seed(seed))
    k, v = torch.zeros(1, n, 1, 2), torch.zeros(1, n, 1, 1)
    k[:, 0, :, 0], v[:, 0] = 1, 1
    _, state = made(k, k, v, theta=theta, output_final_state=True)
    angle = theta.double()[:, 1:].sum()  # from the token that wrote to the last one
    want = torch.stack([angle.cos(), -angle.sin()]).view(1, 1, 2, 1)
    assert state is not None and (state.double() - want).abs().max() < 1e-6


def test_the_kept_angle_is_a_column() -> None:
    made = EVERY["information; gated; theta"]
    assert made.rows_and_columns(K, V) == (K, V + 2)
    assert "last column holds the angle" in made.explain()
    assert EVERY["delta; gated; theta"].rows_and_columns(K, V) == (K, V)
