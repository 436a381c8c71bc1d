"""Entry of the diagonal engine: chooses the Triton kernels or the PyTorch reference, and ties them into autograd.

The kernels are two custom operators, forward and backward, with fake kernels, so that torch.compile keeps one graph.
Under sequence parallelism they also mutate the group's `order` tensor: nothing may delete, reorder or deduplicate
them, since the neighbours wait for what they send. `order` is looked up here and is never an argument of user code.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from flexsp.comm.derivatives import IN_PYTORCH, changed, first_only, first_only_inside, same_place, untransformed
from flexsp.comm.group import get_sp

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel

__all__ = ["diagonal"]

_NAME = "the kernels of flexsp.ops (chunk_simple_gla and the others)"

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? g_gamma, Tensor? initial"
_SAVED = (
    "Tensor q, Tensor k, Tensor v, Tensor? initial, Tensor final, Tensor states, Tensor log_a, Tensor cut, Tensor table"
)
_FORWARD = f"({_INPUTS}, Tensor? cu_seqlens, float scale, bool want_final%s) -> " + ", ".join(["Tensor"] * 7).join("()")
_BACKWARD = (
    f"({_SAVED}, Tensor decay, Tensor do, Tensor? dfinal, int docs, float scale, bool want_dg, bool want_dinitial%s)"
    + " -> "
    + ", ".join(["Tensor"] * 5).join("()")
)
_SP = ", Tensor(a!) order, int sp, str call"

_lib = torch.library.Library("flexsp", "FRAGMENT")
_lib.define("diagonal_forward" + _FORWARD % "")
_lib.define("diagonal_backward" + _BACKWARD % "")
_lib.define("diagonal_forward_sp" + _FORWARD % _SP)
_lib.define("diagonal_backward_sp" + _BACKWARD % _SP)


def _forward(q, k, v, g, g_gamma, initial, cu_seqlens, scale, want_final, order=None, sp=-1, call=""):  # type: ignore[no-untyped-def]
    from flexsp.kernels.diagonal import triton_engine as engine

    group = get_sp(sp) if sp >= 0 else None
    return engine.forward(q, k, v, g, g_gamma, initial, cu_seqlens, group, scale, want_final, call)


def _backward(
    q, k, v, initial, final, states, log_a, cut, table, decay, do, dfinal, docs, scale,
    want_dg, want_dinitial,
    order=None, sp=-1, call="",
):  # type: ignore[no-untyped-def]  # fmt: skip
    from flexsp.kernels.diagonal import triton_engine as engine

    first_only_inside(_NAME, IN_PYTORCH, do, dfinal)
    group = get_sp(sp) if sp >= 0 else None
    saved = engine.Saved(q, k, v, initial, final, states, log_a, cut, table, decay, docs, scale)
    return engine.backward(saved, do, dfinal, group, want_dg, want_dinitial, call)


def _fake_forward(q, k, v, g, g_gamma, initial, cu_seqlens, scale, want_final, order=None, sp=-1, call=""):  # type: ignore[no-untyped-def]
    from flexsp.kernels.diagonal import plan

    docs = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    p = plan.make_plan(q, v, docs)
    f32 = {"dtype": torch.float32}
    gated = g is not None or g_gamma is not None
    state = (docs if docs else p.B, p.H, p.K, p.V)
    return (
        v.new_empty(p.B, p.T, p.H, p.V),
        q.new_empty(state if want_final else 0, **f32),
        q.new_empty(p.B, p.n_seg + 1, p.H, p.K, p.V, **f32),
        q.new_empty((p.B, p.n_seg, p.H) if gated else 0, **f32),
        q.new_empty((p.B, p.n_seg) if docs else 0, dtype=torch.int32),
        q.new_empty((p.n_chunks, 5) if docs else 0, dtype=torch.int32),
        q.new_empty((p.B, p.H, p.n_chunks * p.tiles.chunk) if gated else 0, dtype=plan.decay_dtype(q.dtype)),
    )


def _fake_backward(
    q, k, v, initial, final, states, log_a, cut, table, decay, do, dfinal, docs, scale,
    want_dg, want_dinitial,
    order=None, sp=-1, call="",
):  # type: ignore[no-untyped-def]  # fmt: skip
    B, T, H, K = q.shape
    V = v.shape[-1]
    f32 = {"dtype": torch.float32}
    return (
        q.new_empty(B, T, H, K),
        q.new_empty(B, T, H, K),
        v.new_empty(B, T, H, V),
        q.new_empty((B, H, T) if want_dg else 0, **f32),
        q.new_empty((docs if docs else B, H, K, V) if want_dinitial else 0, **f32),
    )


for _name, _real, _fake in (("forward", _forward, _fake_forward), ("backward", _backward, _fake_backward)):
    for _suffix in ("", "_sp"):
        _lib.impl(f"diagonal_{_name}{_suffix}", _real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"flexsp::diagonal_{_name}{_suffix}", _fake, lib=_lib)

_ops = torch.ops.flexsp


def _call_forward(q, k, v, g, g_gamma, initial, cu_seqlens, scale, want_final, sp, call):  # type: ignore[no-untyped-def]
    inputs = (q, k, v, g, g_gamma, initial, cu_seqlens, scale, want_final)
    return _ops.diagonal_forward(*inputs) if sp < 0 else _ops.diagonal_forward_sp(*inputs, get_sp(sp).order, sp, call)


class _DiagonalFunction(torch.autograd.Function):
    """One call of the fused engine; `anchor` makes autograd record the node on every rank under `sp`."""

    @staticmethod
    def forward(ctx: Any, q, k, v, g, g_gamma, initial, cu_seqlens, scale, want_final, sp, call, anchor):  # type: ignore[no-untyped-def]
        inputs = (q, k, v, g, g_gamma, initial)
        out = _call_forward(*inputs, cu_seqlens, scale, want_final, sp, call)
        o, final, states = out[:3]
        ctx.number = 0 if sp < 0 else get_sp(sp).number()
        ctx.save_for_backward(*inputs, final if cu_seqlens is not None else states.new_empty(0), *out[2:])
        ctx.scale, ctx.sp, ctx.call = scale, sp, call
        ctx.device, ctx.dtype = q.device, q.dtype
        ctx.docs = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
        ctx.set_materialize_grads(False)
        return o, final if want_final else None

    @staticmethod
    def backward(ctx: Any, do, dfinal):  # type: ignore[no-untyped-def]
        first_only(_NAME, IN_PYTORCH)  # before a checkpoint computes anything again
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
        args = (q, k, v, initial, *rest, do, dfinal, ctx.docs, ctx.scale, want_dg, want_dinitial)
        if ctx.sp < 0:
            dq, dk, dv, dg, dinitial = _ops.diagonal_backward(*args)
        else:
            group = get_sp(ctx.sp)
            with group.answering(ctx.number):
                dq, dk, dv, dg, dinitial = _ops.diagonal_backward_sp(*args, group.order, ctx.sp, ctx.call)
        dgate = dg.transpose(1, 2).to(g.dtype) if want_dg and g is not None else None
        dgamma = dg.sum((0, 2)).to(g_gamma.dtype) if want_dg and g_gamma is not None else None
        return dq, dk, dv, dgate, dgamma, dinitial if want_dinitial else None, *[None] * 6


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
    untransformed(_NAME, IN_PYTORCH)
    anchor = None
    want_final = output_final_state
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    if sp is not None:
        anchor = sp.anchor if torch.is_grad_enabled() else None
        if cu_seqlens is None:
            want_final = output_final_state and sp.rank == sp.world_size - 1
    args = (q, k, v, g, g_gamma, initial_state, cu_seqlens, scale, want_final, -1 if sp is None else sp.id, call)
    if not torch.is_grad_enabled():  # the Function costs the host time and keeps tensors
        o, final = _call_forward(*args)[:2]
        return o, final if want_final else None
    return _DiagonalFunction.apply(*args, anchor)
