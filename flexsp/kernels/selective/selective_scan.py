"""The selective scan: its kernels, or PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flexsp.comm.derivatives import share_backward
from flexsp.comm.group import SequenceParallel
from flexsp.exceptions import asks_for_kernels
from flexsp.kernels import functions
from flexsp.kernels.engine import Engine, neighbours, register
from flexsp.kernels.functions import Like
from flexsp.kernels.operators import Asked
from flexsp.kernels.selective import in_pytorch
from flexsp.kernels.views import flatten, unflatten, unsqueeze
from flexsp.scan.tokens import without_tail

if TYPE_CHECKING:
    from flexsp.kernels.selective.selective_plan import SelectivePlan

__all__ = ["NAME", "selective"]

NAME = "the kernels of flexsp.ops.selective_scan"
Optional = torch.Tensor | None


class _Selective(Engine):
    """Calls of u, delta, A, B, C and what else they have. The form is "flags|description": what is computed, and what
    ranks compare of the call."""

    kind, title = "selective", NAME
    params = frozenset(("A", "skip", "bias"))

    def __init__(self, form: str) -> None:
        from flexsp.kernels.selective.selective_plan import Form

        flags, self.description = form.split("|", 1)
        self.form, self.computes = form, Form(*(x == "1" for x in flags))
        self.names = self.computes.names

    def tiling(self, asked: Asked) -> Any:
        from flexsp.kernels.channel_tiling import make_tiling
        from flexsp.kernels.selective.selective_plan import LIMITS

        return make_tiling(asked.tensors[0], asked.tensors[2].shape[-1], asked.n_docs, LIMITS)

    def plan(self, tiling: Any, asked: Asked, dq_first: bool) -> SelectivePlan:
        from flexsp.kernels.selective.selective_plan import SelectivePlan

        u, delta, *_ = asked.tensors
        initial = asked.initial is not None
        return SelectivePlan(
            tiling, self.computes, u.dtype, delta.dtype, initial, asked.want_final, self.description,
            neighbours(asked.group),
        )  # fmt: skip


register(_Selective, range(5, 9))


class _InPytorch:
    """The same calls where no kernels run them."""

    def run(self, how: str, asked: Asked) -> tuple[torch.Tensor, Optional]:
        flags, description = how.split("|", 1)
        zoh, softplus, *optional = (x == "1" for x in flags)
        sp, cu_seqlens, initial = asked.group, asked.cu_seqlens, asked.initial
        u, delta, A, B, C, *others = asked.tensors
        left = iter(others)
        D, z, bias = (next(left) if there else None for there in optional)
        if sp is not None:  # D and z do not lead to the exchange of states
            u, delta, A, B, C, D, z, bias, initial = share_backward(sp, u, delta, A, B, C, D, z, bias, initial)[1:]
        dt = in_pytorch.steps(delta, bias, softplus, A.dtype)
        y, last = in_pytorch.run(u, dt, A, B, C, zoh, initial, cu_seqlens, sp, description, asked.want_final)
        return without_tail(in_pytorch.gated(y, u, D, z), cu_seqlens, sp), last

    def like(self, how: str, asked: Asked) -> Like:
        u, _, A, *_ = asked.tensors
        return Like(tuple(u.shape), u.dtype, (asked.n_docs or u.shape[0], *A.shape), A.dtype)


functions.define(_Selective.kind, _InPytorch())


def selective(
    u: torch.Tensor, delta: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: Optional, z: Optional,
    delta_bias: Optional, *, softplus: bool, zoh: bool, initial_state: Optional = None,
    output_final_state: bool = False, cu_seqlens: Optional = None, sp: SequenceParallel | None = None,
) -> tuple[torch.Tensor, Optional]:  # fmt: skip
    """`flexsp.ops.selective_scan` of arguments already validated; A, D and delta_bias in the dtype of states.

    y is in u's dtype.
    """
    how = [word for word, used in (("softplus", softplus), ("bias", delta_bias is not None), ("skip", D is not None),
                                   ("gate", z is not None), ("packed", cu_seqlens is not None)) if used]  # fmt: skip
    call = f"selective_scan on {u.dtype}, {', '.join(['zoh' if zoh else 'euler', *how])}"
    flags = "".join(str(int(x)) for x in (zoh, softplus, *(x is not None for x in (D, z, delta_bias))))
    if not asks_for_kernels(u.is_cuda, u.dtype):
        tensors = [u, delta, A, B, C, *(x for x in (D, z, delta_bias) if x is not None)]
        return functions.run(
            _Selective.kind, f"{flags}|{call}", tensors, initial_state, cu_seqlens,
            output_final_state=output_final_state, sp=sp,
        )  # fmt: skip
    from flexsp.kernels.channel_tiling import channels_of_head

    heads = (-1, channels_of_head(*A.shape))
    optional = [None if D is None else unflatten(D, 0, heads), None if z is None else unflatten(z, 2, heads),
                None if delta_bias is None else unflatten(delta_bias, 0, heads)]  # fmt: skip
    tensors = [unflatten(u, 2, heads), unflatten(delta, 2, heads), unflatten(A, 0, heads)]
    tensors += [unsqueeze(B, 2), unsqueeze(C, 2), *(x for x in optional if x is not None)]
    initial = None if initial_state is None else unflatten(initial_state, 1, heads)
    y, last = _Selective.run(
        f"{flags}|{call}", tensors, initial, cu_seqlens, output_final_state=output_final_state, sp=sp
    )  # fmt: skip
    return flatten(y, 2), None if last is None else flatten(last, 1, 2)
