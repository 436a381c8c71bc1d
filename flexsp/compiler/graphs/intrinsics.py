"""Operations of a chunk that PyTorch has no operator for, each with its derivative, as operators a graph can hold.

The functions of `primitives` become these where kernels are made of them; on CPU they stay plain PyTorch. Inverses and
scores have kernels of their own, sums are scans of a tile.
"""

from __future__ import annotations

from typing import Any

import torch

from flexsp.compiler.frontend import primitives

__all__ = ["SUMS", "decayed_scores", "decayed_sums", "unit_lower_inverse"]

_lib = torch.library.Library("flexsp", "FRAGMENT")
_lib.define("unit_lower_inverse(Tensor x, *, bool exact_repeats=False) -> Tensor")
_lib.define("vector_scores(Tensor q, Tensor k, Tensor b) -> Tensor")
_lib.define("vector_scores_grad(Tensor da, Tensor q, Tensor k, Tensor b) -> (Tensor, Tensor, Tensor)")
_lib.define("decayed_sums(Tensor x, Tensor g) -> Tensor")
_lib.define("earlier_sums(Tensor x, Tensor g) -> Tensor")
_lib.define("later_sums(Tensor x, Tensor g) -> Tensor")
unit_lower_inverse = torch.ops.flexsp.unit_lower_inverse.default
_vector_scores = torch.ops.flexsp.vector_scores.default
_vector_scores_grad = torch.ops.flexsp.vector_scores_grad.default
_decayed_sums = torch.ops.flexsp.decayed_sums.default
_earlier_sums = torch.ops.flexsp.earlier_sums.default
_later_sums = torch.ops.flexsp.later_sums.default
SUMS = {_decayed_sums: "decayed_sums", _earlier_sums: "earlier_sums", _later_sums: "later_sums"}
"""What `tile_ops` calls them."""


def decayed_scores(q: torch.Tensor, k: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`primitives.decayed_scores`, an operator of its own where every channel has its gate."""
    return primitives.decayed_scores(q, k, b) if b.dim() == 1 else _vector_scores(q, k, b)


def decayed_sums(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """`primitives.decayed_sums`."""
    return _decayed_sums(x, g if g.dim() == 2 else g.unsqueeze(1).expand_as(x))


def _earlier(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """e^{g_i} h_{i-1}: what of `decayed_sums` comes from the rows before, without h_i - x_i, which cancels."""
    return g.exp() * primitives.delayed(primitives.decayed_sums(x, g), 1)


def _later(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """y_i = x_i + e^{g_{i+1}} y_{i+1}: the adjoint of `decayed_sums`."""
    return primitives.decayed_sums(x.flip(0), g.roll(-1, 0).flip(0)).flip(0)


def _scores_grad(
    da: torch.Tensor, q: torch.Tensor, k: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Those of q, k and b: the last is q dq - k dk, of which kernels take both from the same products."""
    later = torch.ones_like(da, dtype=torch.bool).tril()
    exponent = (b.unsqueeze(1) - b.unsqueeze(0)).masked_fill(~later.unsqueeze(-1), float("-inf"))
    weighed = exponent.exp() * da.unsqueeze(-1)
    dq, dk = (weighed * k.unsqueeze(0)).sum(1), (weighed * q.unsqueeze(1)).sum(0)
    return dq, dk, q * dq - k * dk


def _square(q: torch.Tensor, k: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape[0], k.shape[0])


def _like_first(x: torch.Tensor, *others: torch.Tensor, exact_repeats: bool = False) -> torch.Tensor:
    return torch.empty_like(x)


def _like_the_others(
    da: torch.Tensor, q: torch.Tensor, k: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(b)


def _inverse_backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (y,) = ctx.saved_tensors
    return -(y.mT @ (grad @ y.mT)).tril(-1)


def _scores_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(_vector_scores_grad(grad, *ctx.saved_tensors))


def _sums_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, g = ctx.saved_tensors
    dx = _later_sums(grad, g)
    return dx, dx * _earlier_sums(x, g)


def _keep_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _keep_output(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output)


for _name, _real, _fake in (
    ("unit_lower_inverse", primitives.unit_lower_inverse, _like_first),
    ("vector_scores", primitives.decayed_scores, _square),
    ("vector_scores_grad", _scores_grad, _like_the_others),
    ("decayed_sums", primitives.decayed_sums, _like_first),
    ("earlier_sums", _earlier, _like_first),
    ("later_sums", _later, _like_first),
):
    _lib.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flexsp::{_name}", _fake, lib=_lib)
torch.library.register_autograd("flexsp::unit_lower_inverse", _inverse_backward, setup_context=_keep_output, lib=_lib)
torch.library.register_autograd("flexsp::vector_scores", _scores_backward, setup_context=_keep_inputs, lib=_lib)
torch.library.register_autograd("flexsp::decayed_sums", _sums_backward, setup_context=_keep_inputs, lib=_lib)
