"""What flexsp's own backward passes ask of autograd: first derivatives only, and the same messages on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from flexsp.comm.ranks import Ranks
from flexsp.exceptions import NotAvailable

__all__ = [
    "IN_PYTORCH", "ON_ONE_RANK", "TRANSFORMS", "by_autograd", "changed", "first_only", "first_only_inside",
    "keep_for_backward", "kept_for_backward", "same_place", "share_backward", "transformed", "untransformed",
]  # fmt: skip

TRANSFORMS = "transforms of torch.func (vmap, grad, jvp, ...)"
ON_ONE_RANK = "compute them on one rank, with the whole sequence and sp=False"
IN_PYTORCH = "float64 inputs and CPU tensors run in PyTorch, which has them"


def first_only(what: str, instead: str) -> None:
    """First statement of a backward pass that cannot be differentiated itself: NotAvailable where autograd records it.

    Autograd turns grad mode on in a backward pass under ``create_graph=True`` and only there. The gradients that come
    in tell less: they may need no gradient where the saved tensors do.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        _refuse_second(what, instead)


def first_only_inside(what: str, instead: str, *cotangents: torch.Tensor | None) -> None:
    """The same in the operator of a backward pass. Callers outside of graphs detach the gradients that come in.

    ``torch.compile(backend="eager")`` runs the operator without the function around it, and with grad mode off. There
    it drops second derivatives of every autograd.Function; what tells is a gradient that itself requires one.
    """
    if any(x is not None and x.requires_grad for x in cotangents):
        _refuse_second(what, instead)


def _refuse_second(what: str, instead: str) -> NoReturn:
    raise NotAvailable(
        f"{what}: second derivatives (create_graph=True) are not available, its backward pass is not "
        f"differentiable; {instead}"
    )


def transformed() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is under way."""
    return bool(forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active())


def untransformed(what: str, instead: str, *given: torch.Tensor | None) -> None:
    """NotAvailable inside vmap, jvp and the other transforms of torch.func, and in forward mode; and where a gradient
    in ``given`` is one of many at once (``torch.autograd.grad(..., is_grads_batched=True)``)."""
    if torch.compiler.is_compiling():
        return
    if transformed() or any([x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in given]):
        raise NotAvailable(
            f"{what}: {TRANSFORMS} and forward-mode differentiation are not available; {instead}"
        )


def changed(what: str, kept: object, got: object) -> NoReturn:
    raise ValueError(
        f"saved tensors: expected those that the forward pass kept, with {what} {kept}, but hooks "
        f"(torch.autograd.graph.saved_tensors_hooks) gave back {got}"
    )


def same_place(device: torch.device, *saved: torch.Tensor | None) -> None:
    """ValueError where hooks gave back a saved tensor on another device, which kernels would read as their own."""
    for x in saved:
        if x is not None and x.device != device:
            changed("device", device, x.device)


def keep_for_backward(ctx: Any, *tensors: torch.Tensor | None) -> None:
    """Saves them, and how they look, for `kept_for_backward`."""
    ctx.save_for_backward(*tensors)
    ctx.kept_as = [None if x is None else (x.device, x.dtype, x.stride()) for x in tensors]


def kept_for_backward(ctx: Any, what: str, *grads: torch.Tensor | None) -> list[Any]:
    """What `keep_for_backward` saved. First statement of a backward pass of kernels, from `grads`, which cannot be
    differentiated itself.

    Hooks may give a tensor back in other strides, which becomes contiguous; one on another device, or of another dtype,
    is refused, since kernels would read it as their own.
    """
    first_only(what, IN_PYTORCH)
    untransformed(what, IN_PYTORCH, *grads)
    found = []
    for x, looks in zip(ctx.saved_tensors, ctx.kept_as, strict=True):
        if x is not None:
            device, dtype, stride = looks
            same_place(device, x)
            if x.dtype != dtype:
                changed("dtypes", dtype, x.dtype)
            x = x if x.stride() == stride else x.contiguous()
        found.append(x)
    return found


def by_autograd(
    function: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Gradients of the inputs, from those of a function's results. For backward passes whose operators something looks
    at: no kernel runs them."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        pairs = [(y, dy) for y, dy in zip(function(*leaves), grads, strict=True) if dy is not None]
    return torch.autograd.grad([y for y, _ in pairs], leaves, [dy for _, dy in pairs], materialize_grads=True)


class _SharedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([x.view_as(x) for x in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return grads


def share_backward(sp: Ranks, *tensors: Any) -> tuple[Any, ...]:
    """(the group's anchor, *tensors), with every path of gradients to one of them leading to all of them.

    A backward pass runs only the nodes between the outputs that a loss used and the tensors that were asked for. A call
    whose inputs come from here, and whose outputs pass here where one does not lead to all of its exchanges, exchanges
    the same whatever each rank uses and asks for: the neighbours wait for it. What is no floating tensor comes back as
    it is. A compiled backward pass always runs whole.
    """
    if sp.world_size > 1:
        untransformed("calls over ranks", ON_ONE_RANK)
    if sp.world_size == 1 or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return (sp.anchor, *tensors)
    floating = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in tensors]
    anchor, *views = _SharedBackward.apply(sp.anchor, *[x for x, joins in zip(tensors, floating, strict=True) if joins])
    found = iter(views)
    return (anchor, *(next(found) if joins else x for x, joins in zip(tensors, floating, strict=True)))
