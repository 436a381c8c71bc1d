"""Entry of the kernels of vector states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flexsp.comm.group import SequenceParallel
from flexsp.kernels.engine import Engine, register
from flexsp.kernels.operators import Asked

if TYPE_CHECKING:
    from flexsp.kernels.vector.vector_plan import VectorPlan

__all__ = ["vector_state"]

Optional = torch.Tensor | None


class _Vector(Engine):
    """Calls of x and g. The form is what ranks compare of the call."""

    kind, title = "vector", "the kernels of vector states"
    names = ("x", "g")

    def __init__(self, form: str) -> None:
        self.form = form

    def tiling(self, asked: Asked) -> Any:
        from flexsp.kernels.channel_tiling import make_tiling
        from flexsp.kernels.vector.vector_plan import LIMITS

        return make_tiling(asked.tensors[0], 1, asked.n_docs, LIMITS)

    def plan(self, tiling: Any, asked: Asked, dq_first: bool) -> VectorPlan:
        from flexsp.kernels.vector.vector_plan import VectorPlan

        x, g = asked.tensors
        return VectorPlan(tiling, x.dtype, g.dtype, asked.initial is not None, asked.want_final, self.form)


register(_Vector, [2])


def vector_state(
    x: torch.Tensor, g: torch.Tensor, op: str, *, initial_state: Optional, output_final_state: bool,
    cu_seqlens: Optional, sp: SequenceParallel | None,
) -> tuple[torch.Tensor, Optional]:  # fmt: skip
    """h_t = e^{g_t} h_{t-1} + x_t of x and natural-log gates g [B, T, D], already validated: all h_t in x's dtype, and
    the final states [N, D]. Gates below -104 act as that, and have no gradient."""
    from flexsp.kernels.channel_tiling import channels_of_head

    heads = (-1, channels_of_head(x.shape[2]))
    tensors = [x.unflatten(2, heads), g.unflatten(2, heads)]
    initial = None if initial_state is None else initial_state.unflatten(1, heads)
    form = f"{op} on {x.dtype}{', packed' if cu_seqlens is not None else ''}"
    o, last = _Vector.run(form, tensors, initial, cu_seqlens, output_final_state=output_final_state, sp=sp)
    return o.flatten(2), None if last is None else last.flatten(1)
