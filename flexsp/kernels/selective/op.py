"""Entry of the selective scan: chooses the Triton kernels or PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flexsp.comm.derivatives import IN_PYTORCH, joined, untransformed
from flexsp.comm.group import get_sp
from flexsp.exceptions import kernels_on_cpu
from flexsp.kernels import functions, operators
from flexsp.kernels.functions import Like
from flexsp.kernels.operators import Asked, Kept
from flexsp.kernels.selective import in_pytorch
from flexsp.runtime.kept import keep
from flexsp.scan.sequence import without_tail

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel
    from flexsp.kernels.recipe import Recipe
    from flexsp.kernels.selective.launches import SelectiveCall

__all__ = ["NAME", "selective"]

NAME = "the kernels of flexsp.ops.selective_scan"
Optional = torch.Tensor | None
_KIND = "selective"
_CALLS = 256  # signatures that are kept

_recipes: dict[Any, Any] = {}


class _Selective:
    """Calls of u, delta, A, B, C and what else their form has. Named "form|call", the text of the call."""

    def __init__(self, name: str) -> None:
        from flexsp.kernels.selective.launches import Form

        flags, self.text = name.split("|", 1)
        self.form = Form(*(x == "1" for x in flags))

    def call(self, asked: Asked) -> SelectiveCall:
        from flexsp.kernels.selective.launches import SelectiveCall, make_plan

        u, delta, A = asked.tensors[:3]
        plan = make_plan(u, A.shape[-1], asked.docs)
        return SelectiveCall(
            plan, self.form, u.dtype, delta.dtype, asked.initial is not None, asked.want_final, self.text
        )  # fmt: skip

    def recipe(self, asked: Asked) -> Recipe[SelectiveCall]:
        sp_id, call = -1 if asked.group is None else asked.group.id, self.call(asked)
        looks = [None if x is None else (x.dtype, x.stride(), x.data_ptr() % 16 == 0)
                 for x in (*asked.tensors, asked.initial)]  # fmt: skip
        key = (call, asked.tensors[0].device, *looks, sp_id)
        found = _recipes.get(key)
        if found is None:
            group = get_sp(sp_id) if sp_id >= 0 else None
            found = _make(call, dict(zip(self.form.names, asked.tensors, strict=True)), asked.initial, group)
            keep(_recipes, key, found, _CALLS)
        return found  # type: ignore[no-any-return]

    def forward(self, asked: Asked) -> tuple[torch.Tensor, Optional, torch.Tensor, Optional]:
        return operators.outputs(self.recipe(asked), asked, _shard(asked))

    def backward(self, asked: Asked, kept: Kept, *others: Any) -> tuple[list[Optional], Optional]:
        return operators.gradients(self.recipe(asked), asked.tensors, asked.initial, kept, *others)

    def like_forward(self, asked: Asked) -> tuple[torch.Tensor, ...]:
        call, u = self.call(asked), asked.tensors[0]
        p = call.plan
        states = (asked.docs or p.batch, p.H, p.P, p.N) if asked.want_final else 0
        return (
            u.new_empty(p.batch, p.T, p.H, p.P),
            u.new_empty(states, dtype=torch.float32),
            u.new_empty(call.saved_bytes, dtype=torch.uint8),
            u.new_empty((p.n_chunks, 5) if asked.docs else 0, dtype=torch.int32),
        )


def _make(
    call: SelectiveCall, given: dict[str, torch.Tensor], initial: Optional, sp: SequenceParallel | None
) -> Recipe[SelectiveCall]:  # fmt: skip
    from flexsp.kernels.recipe import Given, Recipe

    looks = Given([name for name in given if name not in ("A", "skip", "bias")], 3, given, initial)
    return Recipe(call, looks, sp, lambda others, state, group: _make(call, others, state, group))


def _shard(asked: Asked) -> operators.Shard:
    """Which tokens of how many these are; ranks tell each other where documents are packed."""
    T = asked.tensors[0].shape[1]
    return asked.group.shard_range(T) if asked.docs and asked.group is not None else (0, T, T)


operators.define_kind(_KIND, _Selective, NAME, IN_PYTORCH)
for _tensors in range(5, 9):
    operators.serve(_tensors)


class _InPytorch:
    """The same calls where no kernels run them."""

    def run(self, how: str, asked: Asked) -> tuple[torch.Tensor, Optional]:
        flags, text = how.split("|", 1)
        zoh, softplus, *optional = (x == "1" for x in flags)
        sp, cu_seqlens, initial = asked.group, asked.cu_seqlens, asked.initial
        u, delta, A, B, C, *others = asked.tensors
        left = iter(others)
        D, z, bias = (next(left) if there else None for there in optional)
        if sp is not None:  # D and z do not lead to the exchange of states
            u, delta, A, B, C, D, z, bias, initial = joined(sp, u, delta, A, B, C, D, z, bias, initial)[1:]
        with torch.autocast(u.device.type, enabled=False):
            dt = in_pytorch.steps(delta, bias, softplus, A.dtype)
            y, last = in_pytorch.run(u, dt, A, B, C, zoh, initial, cu_seqlens, sp, text, asked.want_final)
            return without_tail(in_pytorch.gated(y, u, D, z), cu_seqlens, sp), last

    def like(self, how: str, asked: Asked) -> Like:
        u, _, A, *_ = asked.tensors
        return Like(tuple(u.shape), u.dtype, (asked.docs or u.shape[0], *A.shape), A.dtype)


functions.define(_KIND, _InPytorch())


def _use_triton(u: torch.Tensor) -> bool:
    return u.dtype != torch.float64 and (u.is_cuda or kernels_on_cpu())


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
    want_final = output_final_state and (sp is None or cu_seqlens is not None or sp.is_last)
    if not _use_triton(u):
        tensors = [u, delta, A, B, C, *(x for x in (D, z, delta_bias) if x is not None)]
        if functions.in_graph():
            name = f"{flags}|{call}"
            return functions.call(_KIND, name, tensors, initial_state, cu_seqlens, want_final=want_final, sp=sp)
        if sp is not None and cu_seqlens is not None and not cu_seqlens.is_cuda and not torch.compiler.is_compiling():
            call += f", boundaries {cu_seqlens.tolist()}"
        docs = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
        asked = Asked(tensors, initial_state, cu_seqlens, docs, 1.0, output_final_state, sp)
        return _InPytorch().run(f"{flags}|{call}", asked)
    from flexsp.kernels.selective.launches import channels_of_head

    untransformed(NAME, IN_PYTORCH)
    heads = (-1, channels_of_head(*A.shape))
    optional = [None if D is None else D.unflatten(0, heads), None if z is None else z.unflatten(2, heads),
                None if delta_bias is None else delta_bias.unflatten(0, heads)]  # fmt: skip
    tensors = [u.unflatten(2, heads), delta.unflatten(2, heads), A.unflatten(0, heads), B.unsqueeze(2), C.unsqueeze(2)]
    tensors += [x for x in optional if x is not None]
    initial = None if initial_state is None else initial_state.unflatten(1, heads).contiguous()
    name, docs = f"{flags}|{call}", 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if operators.plain(*tensors, initial, cu_seqlens):
        group = sp if sp is not None and sp.world_size > 1 else None
        asked = Asked(tensors, initial, cu_seqlens, docs, 1.0, want_final, group)
        recipe = _Selective(name).recipe(asked)
        y, last = operators.run(recipe, f"{_KIND}|{name}", tensors, initial, cu_seqlens, _shard(asked))
    else:
        y, last = operators.call(f"{_KIND}|{name}", tensors, initial, cu_seqlens, want_final=want_final, sp=sp)
    return y.flatten(2), None if last is None else last.flatten(1, 2)
