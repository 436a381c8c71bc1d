"""Entry of the diagonal engine: chooses the Triton kernels or the PyTorch reference.

The kernels are two custom operators, forward and backward, with fake kernels, so that torch.compile keeps one graph.
Under sequence parallelism they also mutate the group's `order` tensor: nothing may delete, reorder or deduplicate them,
since the neighbours wait for what they send. `order` is looked up here and is never an argument of user code. Calls of
plain tensors that nothing records do without the operators, which cost time of the host.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from flexsp.comm.derivatives import IN_PYTORCH, changed, first_only, first_only_inside, same_place, untransformed
from flexsp.comm.group import get_sp
from flexsp.kernels.diagonal.plan import NAME, make_plan

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel
    from flexsp.kernels.diagonal.launches import DiagonalCall
    from flexsp.kernels.recipe import Recipe

__all__ = ["diagonal"]

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? g_gamma, Tensor? initial"
_FORWARD = f"({_INPUTS}, Tensor? cu_seqlens, float scale, bool want_final%s) -> (Tensor, Tensor, Tensor, Tensor)"
_BACKWARD = (
    f"({_INPUTS}, Tensor final, Tensor saved, Tensor table, Tensor do, Tensor? dfinal, int docs, float scale, "
    "bool want_final, bool want_dg, bool want_dinitial%s) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_SP = ", Tensor(a!) order, int sp, str call"

_lib = torch.library.Library("flexsp", "FRAGMENT")
_lib.define("diagonal_forward" + _FORWARD % "")
_lib.define("diagonal_backward" + _BACKWARD % "")
_lib.define("diagonal_forward_sp" + _FORWARD % _SP)
_lib.define("diagonal_backward_sp" + _BACKWARD % _SP)


def _recipe(  # type: ignore[no-untyped-def]
    q, k, v, g, g_gamma, initial, docs, scale, want_final, sp, text
) -> tuple[Recipe[DiagonalCall], list[torch.Tensor]]:
    """And its inputs in order."""
    from flexsp.kernels.diagonal.dispatch import recipe_of

    gate = {"g": g} if g is not None else {"g_gamma": g_gamma.contiguous()} if g_gamma is not None else {}
    given = {"q": q, "k": k, "v": v, **gate}
    return recipe_of(given, initial, docs, scale, want_final, sp, text), [*given.values()]


def _shard(T: int, sp: int) -> tuple[int, int, int]:
    return (0, T, T) if sp < 0 else get_sp(sp).shard_range(T)


def _forward(q, k, v, g, g_gamma, initial, cu_seqlens, scale, want_final, order=None, sp=-1, call=""):  # type: ignore[no-untyped-def]
    from flexsp.kernels.recipe import table_of

    docs = 0 if cu_seqlens is None else cu_seqlens.numel() - 1
    recipe, tensors = _recipe(q, k, v, g, g_gamma, initial, docs, scale, want_final, sp, call)
    table = None if cu_seqlens is None else table_of(recipe, cu_seqlens, _shard(q.shape[1], sp))
    o, final, saved = recipe.run_forward(tensors, initial, table)
    final = q.new_empty(0, dtype=torch.float32) if final is None else final
    return o, final, saved, q.new_empty(0, dtype=torch.int32) if table is None else table


def _backward(
    q, k, v, g, g_gamma, initial, final, saved, table, do, dfinal, docs, scale, want_final, want_dg, want_dinitial,
    order=None, sp=-1, call="",
):  # type: ignore[no-untyped-def]  # fmt: skip
    """dq, dk, dv, the gate's gradient and that of initial states; the last two empty unless wanted."""
    first_only_inside(NAME, IN_PYTORCH, do, dfinal)
    recipe, tensors = _recipe(q, k, v, g, g_gamma, initial, docs, scale, want_final, sp, call)
    wanted = frozenset(("q", "k", "v", *(("g", "g_gamma") if want_dg else ())))
    grads, dinitial = recipe.run_backward(
        tensors, initial, saved, table if docs else None, do, dfinal, want_dinitial, wanted,
        final if recipe.call.facts.keeps_final else None,
    )  # fmt: skip
    empty = q.new_empty(0, dtype=torch.float32)
    dgate = grads[3].contiguous() if want_dg and grads[3] is not None else empty
    return *grads[:3], dgate, empty if dinitial is None else dinitial


def _fake_forward(q, k, v, g, g_gamma, initial, cu_seqlens, scale, want_final, order=None, sp=-1, call=""):  # type: ignore[no-untyped-def]
    from flexsp.kernels.diagonal.launches import DiagonalCall

    docs = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    p = make_plan(q, v, docs)
    gate = "g" if g is not None else "g_gamma" if g_gamma is not None else None
    found = DiagonalCall(p, q.dtype, gate, scale, initial is not None, want_final, False, call)
    return (
        v.new_empty(p.B, p.T, p.H, p.V),
        q.new_empty((docs if docs else p.B, p.H, p.K, p.V) if want_final else 0, dtype=torch.float32),
        q.new_empty(found.saved_bytes, dtype=torch.uint8),
        q.new_empty((p.n_chunks, 5) if docs else 0, dtype=torch.int32),
    )


def _fake_backward(
    q, k, v, g, g_gamma, initial, final, saved, table, do, dfinal, docs, scale, want_final, want_dg, want_dinitial,
    order=None, sp=-1, call="",
):  # type: ignore[no-untyped-def]  # fmt: skip
    B, _, H, K = q.shape
    f32 = {"dtype": torch.float32}
    gate = g if g is not None else g_gamma
    return (
        *(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)),
        q.new_empty(0, **f32) if not want_dg else torch.empty_like(gate, memory_format=torch.contiguous_format),
        q.new_empty((docs if docs else B, H, K, v.shape[-1]) if want_dinitial else 0, **f32),
    )


for _name, _real, _fake in (("forward", _forward, _fake_forward), ("backward", _backward, _fake_backward)):
    for _suffix in ("", "_sp"):
        _lib.impl(f"diagonal_{_name}{_suffix}", _real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"flexsp::diagonal_{_name}{_suffix}", _fake, lib=_lib)

_ops = torch.ops.flexsp
_TENSORS = (torch.Tensor, torch.nn.Parameter)


class _DiagonalFunction(torch.autograd.Function):
    """One call by way of the operators; `anchor` makes autograd record the node on every rank under `sp`."""

    @staticmethod
    def forward(ctx: Any, q, k, v, g, g_gamma, initial, cu_seqlens, scale, want_final, sp, call, anchor):  # type: ignore[no-untyped-def]
        inputs = (q, k, v, g, g_gamma, initial)
        o, final, saved, table = _call_forward(*inputs, cu_seqlens, scale, want_final, sp, call)
        ctx.number = 0 if sp < 0 else get_sp(sp).number()
        ctx.save_for_backward(*inputs, final if cu_seqlens is not None else saved.new_empty(0), saved, table)
        ctx.scale, ctx.sp, ctx.call, ctx.want_final = scale, sp, call, want_final
        ctx.device, ctx.dtype = q.device, q.dtype
        ctx.docs = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
        ctx.set_materialize_grads(False)
        return o, final if want_final else None

    @staticmethod
    def backward(ctx: Any, do, dfinal):  # type: ignore[no-untyped-def]
        first_only(NAME, IN_PYTORCH)  # before a checkpoint computes anything again
        q, k, v, g, g_gamma, initial, *rest = ctx.saved_tensors
        if not torch.compiler.is_compiling():
            same_place(ctx.device, q, k, v, g, g_gamma, initial, *rest)
            if (q.dtype, k.dtype, v.dtype) != (ctx.dtype,) * 3:
                changed("dtypes", [ctx.dtype] * 3, [q.dtype, k.dtype, v.dtype])
            do, dfinal = (x.detach() if x is not None and x.requires_grad else x for x in (do, dfinal))
        if do is None:
            do = torch.zeros_like(v)
        if dfinal is not None:
            dfinal = dfinal.contiguous()
        want_dg = (g is not None and ctx.needs_input_grad[3]) or (g_gamma is not None and ctx.needs_input_grad[4])
        want_dinitial = initial is not None and ctx.needs_input_grad[5]
        args = (q, k, v, g, g_gamma, initial, *rest, do, dfinal, ctx.docs, ctx.scale, ctx.want_final, want_dg,
                want_dinitial)  # fmt: skip
        if ctx.sp < 0:
            dq, dk, dv, dgate, dinitial = _ops.diagonal_backward(*args)
        else:
            group = get_sp(ctx.sp)
            with group.answering(ctx.number):
                dq, dk, dv, dgate, dinitial = _ops.diagonal_backward_sp(*args, group.order, ctx.sp, ctx.call)
        dg, dgamma = (dgate if want_dg and x is not None else None for x in (g, g_gamma))
        return dq, dk, dv, dg, dgamma, dinitial if want_dinitial else None, *[None] * 6


def _call_forward(q, k, v, g, g_gamma, initial, cu_seqlens, scale, want_final, sp, call):  # type: ignore[no-untyped-def]
    inputs = (q, k, v, g, g_gamma, initial, cu_seqlens, scale, want_final)
    return _ops.diagonal_forward(*inputs) if sp < 0 else _ops.diagonal_forward_sp(*inputs, get_sp(sp).order, sp, call)


def _plain(*tensors: torch.Tensor | None) -> bool:
    """Whether these are tensors as they lie in memory, and nothing looks at the operators of a call made now."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or torch.jit.is_tracing():
        return False
    given = [x for x in tensors if x is not None]
    return all([type(x) in _TENSORS and not x.is_neg() and not x._is_zerotensor() for x in given])


def _use_triton(q: torch.Tensor) -> bool:
    if q.dtype == torch.float64:
        return False
    return q.is_cuda or os.environ.get("FLEXSP_BACKEND") == "triton"


def diagonal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    *,
    scale: float,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    sp: SequenceParallel | None = None,
    op: str = "linear attention",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """S_t = e^{g_t} S_{t-1} + k_t v_t^T, o_t = scale q_t S_t, over [B, T, H, *] inputs already validated.

    ``op`` is the name by which ranks tell each other which call they are in.
    """
    gates = [name for name, x in (("g", g), ("g_gamma", g_gamma)) if x is not None]
    call = f"{op} on {q.dtype}, {' and '.join(gates) or 'no gate'}{', packed' if cu_seqlens is not None else ''}"
    if type(scale) is float:  # else symbolic
        call += f", scale {scale}"
    if not _use_triton(q):
        from flexsp.kernels.diagonal.reference import diagonal_reference

        if cu_seqlens is not None and cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
            call += f", boundaries {cu_seqlens.tolist()}"
        with torch.autocast(q.device.type, enabled=False):  # states stay in fp32, as in the kernels
            return diagonal_reference(
                q, k, v, g, g_gamma, scale=scale, initial_state=initial_state,
                output_final_state=output_final_state, cu_seqlens=cu_seqlens, sp=sp, call=call,
            )  # fmt: skip
    untransformed(NAME, IN_PYTORCH)
    want_final = output_final_state and (sp is None or cu_seqlens is not None or sp.rank == sp.world_size - 1)
    initial = None if initial_state is None else initial_state.contiguous()
    sp_id = -1 if sp is None else sp.id
    args = (q, k, v, g, g_gamma, initial, cu_seqlens, scale, want_final)
    if torch.is_grad_enabled():
        return _DiagonalFunction.apply(*args, sp_id, call, None if sp is None else sp.anchor)
    plain = _plain(q, k, v, g, g_gamma, initial, cu_seqlens)
    # The Function would cost time and keep tensors.
    o, final = (_forward(*args, None, sp_id, call) if plain else _call_forward(*args, sp_id, call))[:2]
    return o, final if want_final else None
