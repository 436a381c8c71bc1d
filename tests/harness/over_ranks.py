"""Ops over ranks and on one rank: outputs, final states and every gradient, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flexsp import SequenceParallel
from flexsp.testing.cases import Case, Shape
from flexsp.testing.compare import relative_error
from tests.harness.ops import ALL

__all__ = [
    "EXACT", "Plan", "check_against_one_rank", "gradients", "leaf", "local_inputs", "own_rows", "run_plans",
    "tensors",
]  # fmt: skip

EXACT = 1e-12


@dataclass(frozen=True)
class Plan:
    """One sequence cut over ranks; ``bounds`` are document boundaries or None."""

    seed: int
    lengths: tuple[int, ...]
    bounds: tuple[int, ...] | None = None
    B: int = 2
    states: bool = True
    announce: bool = False  # lengths known beforehand (set_lengths) instead of exchanged

    @property
    def shape(self) -> Shape:
        B = 1 if self.bounds else self.B
        n = len(self.bounds) - 1 if self.bounds else B
        return Shape(B=B, T=sum(self.lengths), K=6, V=5, states=n if self.states else 0)

    def inputs(self, case: Case) -> dict[str, Any]:
        made = case.inputs(self.shape, self.seed)
        if self.bounds:
            made["cu_seqlens"] = torch.tensor(self.bounds)
        return made

    def cotangent(self, like: torch.Tensor, i: int) -> torch.Tensor:
        return torch.randn(like.shape, generator=torch.Generator().manual_seed(self.seed + i), dtype=like.dtype)


def tensors(x: Any) -> list[torch.Tensor]:
    return [t for y in x for t in tensors(y)] if isinstance(x, (tuple, list)) else [] if x is None else [x]


def leaf(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(leaf(y) for y in x)
    return x.detach().clone().requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x


def gradients(o: torch.Tensor, final: Any, plan: Plan, start: int, inputs: dict[str, Any]) -> dict[str, Any]:
    """Gradient of <o, c> + <final, c'> by name, for cotangents that depend on the plan alone."""
    whole = torch.empty(plan.shape.B, plan.shape.T, *o.shape[2:], dtype=o.dtype)
    outputs, finals = [o], [x for x in tensors(final) if x.requires_grad]
    cotangents = [plan.cotangent(whole, 1)[:, start : start + o.shape[1]]]
    cotangents += [plan.cotangent(x, 2 + i) for i, x in enumerate(finals)]
    named = {n: x for n, x in inputs.items() if [t for t in tensors(x) if torch.is_tensor(t) and t.requires_grad]}
    grads = iter(torch.autograd.grad(outputs + finals, tensors(list(named.values())), cotangents))
    return {name: [next(grads) for _ in tensors(x)] for name, x in named.items()}


def own_rows(state: torch.Tensor, plan: Plan, rank: int) -> torch.Tensor:
    """The initial states as this rank may see them: NaN for every document that does not start here."""
    start, stop = sum(plan.lengths[:rank]), sum(plan.lengths[: rank + 1])
    last = rank == len(plan.lengths) - 1
    begins = [start <= b < stop or (last and b >= stop) for b in plan.bounds[:-1]]
    return torch.where(torch.tensor(begins).view(-1, *[1] * (state.dim() - 1)), state, float("nan"))


def local_inputs(case: Case, plan: Plan, rank: int) -> dict[str, Any]:
    start, stop = sum(plan.lengths[:rank]), sum(plan.lengths[: rank + 1])
    inputs = {n: x[:, start:stop] if n in case.tokens else x for n, x in plan.inputs(case).items()}
    state = inputs.pop("initial_state", None)
    if state is not None and plan.bounds:
        pair = isinstance(state, tuple)
        inputs["initial_state"] = tuple(own_rows(x, plan, rank) for x in state) if pair else own_rows(state, plan, rank)
    elif state is not None and rank == 0:
        inputs["initial_state"] = state
    return {name: leaf(x) for name, x in inputs.items()}


def run_plans(sp: SequenceParallel, name: str, plans: list[Plan]) -> tuple[list[Plan], list[Any]]:
    case, results = ALL[name], []
    for plan in plans:
        sp.set_lengths(plan.lengths if plan.announce else None)
        inputs = local_inputs(case, plan, sp.rank)
        o, final = case.op(**inputs, output_final_state=True, sp=sp)
        assert (final is None) == (plan.bounds is None and not sp.is_last)
        results.append((o, final, gradients(o, final, plan, sum(plan.lengths[: sp.rank]), inputs)))
    return plans, results


def check_against_one_rank(case: Case, plan: Plan, ranks: list[Any]) -> None:
    inputs = {name: leaf(x) for name, x in plan.inputs(case).items()}
    o, final = case.op(**inputs, output_final_state=True, sp=False)
    want = gradients(o, final, plan, 0, inputs)
    compare = {"o": (torch.cat([r[0] for r in ranks], dim=1), o)}
    finals = [[r[1]] if not isinstance(r[1], (tuple, list)) else r[1] for r in ranks]
    for i, x in enumerate(tensors(final)):
        rows = [f[i] if f[0] is not None else torch.zeros_like(x) for f in finals]
        compare[f"final {i}"] = (sum(rows), x)
        if plan.bounds:
            filled = torch.stack([r.flatten(1).abs().amax(1) > 0 for r in rows])
            assert filled.sum(0).max() <= 1, "two ranks fill the same document's final state"
    for name, expected in want.items():
        parts = [r[2][name] for r in ranks if name in r[2]]
        for i, x in enumerate(expected):
            mine = [p[i] for p in parts]
            compare[f"d{name} {i}"] = (torch.cat(mine, dim=1) if name in case.tokens else sum(mine), x)
    wrong = {n: e for n, (a, b) in compare.items() if not (e := relative_error(a, b)) < EXACT}
    assert not wrong, f"{plan}: {wrong}"
