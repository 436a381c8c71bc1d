"""Entry of the kernels of vector states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flexsp.comm.group import SequenceParallel
from flexsp.kernels.engine import Engine, neighbours, register
from flexsp.kernels.operators import Asked
from flexsp.kernels.views import flatten, unflatten

if TYPE_CHECKING:
    from flexsp.kernels.vector.vector_plan import VectorPlan

__all__ = ["Gates", "vector_state"]

Optional = torch.Tensor | None


class _Vector(Engine):
    """Calls of x and g, or of x, r, i, rates and what says where a first token has a weight of 1. The form is
    "flags|description": which of them, and what ranks compare of the call."""

    kind, title = "vector", "the kernels of vector states"
    params = frozenset(("rate", "unit"))

    def __init__(self, form: str) -> None:
        from flexsp.kernels.vector.vector_plan import Form

        flags, self.description = form.split("|", 1)
        self.form, self.inputs = form, Form(*(x == "1" for x in flags))
        self.names = self.inputs.names

    def tiling(self, asked: Asked) -> Any:
        from flexsp.kernels.channel_tiling import make_tiling
        from flexsp.kernels.vector.vector_plan import GATED, LIMITS

        return make_tiling(asked.tensors[0], 1, asked.n_docs, GATED if self.inputs.gated else LIMITS)

    def plan(self, tiling: Any, asked: Asked, dq_first: bool) -> VectorPlan:
        from flexsp.kernels.vector.vector_plan import VectorPlan

        dtypes, initial = tuple([x.dtype for x in asked.tensors]), asked.initial is not None
        return VectorPlan(
            tiling, self.inputs, dtypes, initial, asked.want_final, self.description, neighbours(asked.group)
        )


register(_Vector, [2, 4, 5])


class Gates(NamedTuple):
    """What kernels make the RG-LRU's log gates and inputs of, beside x and the recurrence gates r before their sigmoid:
    g = rate sigmoid(r), and sqrt(1 - e^{2 g}) sigmoid(entry) x in the place of x.

    Attributes:
        entry: [B, T, D].
        rate: [D] in float32, <= 0.
        unit: bool [N] that says which texts' first token has a weight of 1 in the place of the root, None if none has.
            Without documents they begin with this rank's tokens.
    """

    entry: torch.Tensor
    rate: torch.Tensor
    unit: Optional


def vector_state(
    x: torch.Tensor, g: torch.Tensor, op: str, gates: Gates | None = None, *, initial_state: Optional,
    output_final_state: bool, cu_seqlens: Optional, sp: SequenceParallel | None,
) -> tuple[torch.Tensor, Optional]:  # fmt: skip
    """h_t = e^{g_t} h_{t-1} + x_t of x and natural-log gates g [B, T, D], already validated: all h_t in x's dtype, and
    the final states [N, D]. Gates below -104 act as that, and have no gradient. With `gates`, kernels make both; g are
    the RG-LRU's r then."""
    from flexsp.kernels.channel_tiling import channels_of_head

    heads = (-1, channels_of_head(x.shape[2]))
    tensors, flags = [unflatten(x, 2, heads), unflatten(g, 2, heads)], "00"
    if gates is not None:
        tensors += [unflatten(gates.entry, 2, heads), unflatten(gates.rate, 0, heads)]
        tensors += [] if gates.unit is None else [gates.unit.to(torch.int32)]
        flags = "10" if gates.unit is None else "11"
    initial = None if initial_state is None else unflatten(initial_state, 1, heads)
    form = f"{flags}|{op} on {x.dtype}{', packed' if cu_seqlens is not None else ''}"
    o, last = _Vector.run(form, tensors, initial, cu_seqlens, output_final_state=output_final_state, sp=sp)
    return flatten(o, 2), None if last is None else flatten(last, 1)

