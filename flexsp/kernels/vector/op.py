"""Entry of the kernels of vector states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flexsp.comm.derivatives import IN_PYTORCH, untransformed
from flexsp.comm.group import get_sp
from flexsp.exceptions import kernels_on_cpu
from flexsp.kernels import operators
from flexsp.kernels.operators import Asked, Kept
from flexsp.runtime.kept import keep

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel
    from flexsp.kernels.recipe import Recipe
    from flexsp.kernels.vector.launches import VectorCall

__all__ = ["has_kernels", "vector_state"]

Optional = torch.Tensor | None
_KIND = "vector"
_CALLS = 256  # signatures that are kept

_recipes: dict[Any, Any] = {}


class _Vector:
    """Calls of x and g. Named by the text of the call."""

    def __init__(self, text: str) -> None:
        self.text = text

    def call(self, asked: Asked) -> VectorCall:
        from flexsp.kernels.vector.launches import VectorCall, make_plan

        x, g = asked.tensors
        plan = make_plan(x, asked.docs)
        return VectorCall(plan, x.dtype, g.dtype, asked.initial is not None, asked.want_final, self.text)

    def recipe(self, asked: Asked) -> Recipe[VectorCall]:
        sp_id, call = -1 if asked.group is None else asked.group.id, self.call(asked)
        looks = [None if x is None else (x.dtype, x.stride(), x.data_ptr() % 16 == 0)
                 for x in (*asked.tensors, asked.initial)]  # fmt: skip
        key = (call, asked.tensors[0].device, *looks, sp_id)
        found = _recipes.get(key)
        if found is None:
            group = get_sp(sp_id) if sp_id >= 0 else None
            found = _make(call, dict(zip(("x", "g"), asked.tensors, strict=True)), asked.initial, group)
            keep(_recipes, key, found, _CALLS)
        return found  # type: ignore[no-any-return]

    def forward(self, asked: Asked) -> tuple[torch.Tensor, Optional, torch.Tensor, Optional]:
        return operators.outputs(self.recipe(asked), asked, _shard(asked))

    def backward(self, asked: Asked, kept: Kept, *others: Any) -> tuple[list[Optional], Optional]:
        return operators.gradients(self.recipe(asked), asked.tensors, asked.initial, kept, *others)

    def like_forward(self, asked: Asked) -> tuple[torch.Tensor, ...]:
        call, x = self.call(asked), asked.tensors[0]
        p = call.plan
        states = (asked.docs or p.batch, p.H, p.P) if asked.want_final else 0
        return (
            x.new_empty(p.batch, p.T, p.H, p.P),
            x.new_empty(states, dtype=torch.float32),
            x.new_empty(call.saved_bytes, dtype=torch.uint8),
            x.new_empty((p.n_chunks, 5) if asked.docs else 0, dtype=torch.int32),
        )


def _make(
    call: VectorCall, given: dict[str, torch.Tensor], initial: Optional, sp: SequenceParallel | None
) -> Recipe[VectorCall]:  # fmt: skip
    from flexsp.kernels.recipe import Given, Recipe

    looks = Given([*given], 3, given, initial)
    return Recipe(call, looks, sp, lambda others, state, group: _make(call, others, state, group))


def _shard(asked: Asked) -> operators.Shard:
    """Which tokens of how many these are; ranks tell each other where documents are packed."""
    T = asked.tensors[0].shape[1]
    return asked.group.shard_range(T) if asked.docs and asked.group is not None else (0, T, T)


operators.define_kind(_KIND, _Vector, "the kernels of vector states", IN_PYTORCH)
operators.serve(2)


def has_kernels(x: torch.Tensor) -> bool:
    """Whether a call of x runs kernels."""
    return x.dtype != torch.float64 and (x.is_cuda or kernels_on_cpu())


def vector_state(
    x: torch.Tensor, g: torch.Tensor, op: str, *, initial_state: Optional, output_final_state: bool,
    cu_seqlens: Optional, sp: SequenceParallel | None,
) -> tuple[torch.Tensor, Optional]:  # fmt: skip
    """h_t = e^{g_t} h_{t-1} + x_t of x and natural-log gates g [B, T, D], already validated: all h_t in x's dtype, and
    the final states [N, D]. Gates below -104 act as that, and have no gradient."""
    from flexsp.kernels.vector.launches import channels_of_head

    untransformed("the kernels of vector states", IN_PYTORCH)
    heads = (-1, channels_of_head(x.shape[2]))
    want_final = output_final_state and (sp is None or cu_seqlens is not None or sp.is_last)
    tensors = [x.unflatten(2, heads), g.unflatten(2, heads)]
    initial = None if initial_state is None else initial_state.unflatten(1, heads).contiguous()
    text = f"{op} on {x.dtype}{', packed' if cu_seqlens is not None else ''}"
    docs = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if operators.plain(*tensors, initial, cu_seqlens):
        group = sp if sp is not None and sp.world_size > 1 else None
        asked = Asked(tensors, initial, cu_seqlens, docs, 1.0, want_final, group)
        recipe = _Vector(text).recipe(asked)
        o, last = operators.run(recipe, f"{_KIND}|{text}", tensors, initial, cu_seqlens, _shard(asked))
    else:
        o, last = operators.call(f"{_KIND}|{text}", tensors, initial, cu_seqlens, want_final=want_final, sp=sp)
    return o.flatten(2), None if last is None else last.flatten(1)
