"""The recipe of a call of the diagonal engine's kernels, worked out once for calls that look alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flexsp.comm.group import get_sp
from flexsp.comm.transport import in_kernel
from flexsp.kernels.diagonal.launches import DiagonalCall
from flexsp.kernels.diagonal.plan import Plan, make_plan
from flexsp.kernels.recipe import Given, Recipe
from flexsp.runtime.kept import keep

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel

__all__ = ["recipe_of", "waited_for_by_nobody"]

Tensors = dict[str, torch.Tensor]
Optional = torch.Tensor | None
_CALLS = 256  # signatures that are kept

_recipes: dict[Any, Recipe[DiagonalCall]] = {}


def recipe_of(
    given: Tensors, initial: Optional, docs: int, scale: float, want_final: bool, sp_id: int, text: str
) -> Recipe[DiagonalCall]:
    """How calls with such inputs run.

    Args:
        given: q, k, v and, where the state decays, "g" [B, T, H] or "g_gamma" [H], by name.
        docs: packed documents, 0 if not packed.
        sp_id: the group of ranks, -1 for none.
        text: what ranks compare of the call.
    """
    plan = make_plan(given["q"], given["v"], docs)
    sp = get_sp(sp_id) if sp_id >= 0 else None
    early = waited_for_by_nobody(sp)
    looks = [None if x is None else (x.dtype, x.stride(), x.data_ptr() % 16 == 0) for x in (*given.values(), initial)]
    # Plans count by identity: what is kept holds its own.
    key = (id(plan), given["q"].device, *given, *looks, scale, want_final, sp_id, early, text)
    found = _recipes.get(key)
    if found is None:
        found = _make(plan, given, initial, scale, want_final, early, sp, text)
        keep(_recipes, key, found, _CALLS)
    return found


def _make(
    plan: Plan, given: Tensors, initial: Optional, scale: float, want_final: bool, early: bool,
    sp: SequenceParallel | None, text: str,
) -> Recipe[DiagonalCall]:  # fmt: skip
    gate = next((name for name in ("g", "g_gamma") if name in given), None)
    looks = Given([name for name in given if name != "g_gamma"], 3, given, initial)
    call = DiagonalCall(plan, looks.dtype, gate, scale, initial is not None, want_final, early, text, given["v"].dtype)

    def remake(others: Tensors, state: Optional, group: SequenceParallel | None) -> Recipe[DiagonalCall]:
        return _make(plan, others, state, scale, want_final, early, group, text)

    return Recipe(call, looks, sp, remake)


def waited_for_by_nobody(sp: SequenceParallel | None) -> bool:
    """True on the end of the backward chain: it may walk dq, which needs no dS, before it waits for its neighbour."""
    return sp is not None and sp.rank == 0 and in_kernel(sp)
