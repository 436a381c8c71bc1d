"""Programs whose state has several parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flexsp.grammar import FlexLinearAttention
from tests.harness.generated import SOME_SEGMENTS
from tests.harness.grammar import Tensors


@dataclass(frozen=True)
class Case:
    """One call of a custom transition; ``lengths`` are the shards."""

    name: str
    B: int = 1
    T: int = 37
    bounds: tuple[int, ...] | None = None
    lengths: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    segments: int = SOME_SEGMENTS
    given: bool = True


def solved(
    model: FlexLinearAttention, case: Case, x: Tensors, initial: torch.Tensor, cotangents: list[Tensors], sp: Any
) -> list[Tensors]:
    """Outputs and gradients for each pair of cotangents, of this rank's tokens if `sp`."""
    start, stop = sp.shard_range(case.lengths[sp.rank])[:2] if sp else (0, case.T)
    leaves = {name: y[:, start:stop].clone().requires_grad_() for name, y in x.items()}
    state = initial.clone().requires_grad_() if case.given and (not sp or sp.is_first or case.bounds) else None
    cu = None if case.bounds is None else torch.tensor(case.bounds)
    given = {"initial_state": state, "cu_seqlens": cu, "sp": sp or False}
    o, final = model(**leaves, **given, output_final_state=True)
    found = []
    for each in cotangents:
        ends, do = [o], [each["o"][:, start:stop].to(o)]
        if final is not None:
            ends, do = [o, final], [*do, each["final"].to(final)]
        wanted = [*leaves.values(), *([] if state is None else [state])]
        grads = torch.autograd.grad(ends, wanted, do, retain_graph=True)
        names = [*(f"d{name}" for name in leaves), "dinitial"]
        found.append({"o": o.detach(), **dict(zip(names, grads, strict=False))})
        if final is not None:
            found[-1]["final"] = final.detach()
    return found
