"""Functions that the three functions of a variant may call besides PyTorch, each on one chunk of one head.

Under the tracer each leaves one node, however it was imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

__all__ = [
    "cache_result", "decayed_scores", "decayed_sums", "identity", "matmul_out_fp32", "primitive", "joined", "part_of",
    "to_floating", "unit_lower_inverse",
]  # fmt: skip


def primitive(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Makes a function one node under a tracer."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()):
            if isinstance(x, torch.fx.Proxy):
                return x.tracer.create_proxy("call_function", call, args, kwargs)
        return function(*args, **kwargs)

    return call


@primitive
def identity(like: torch.Tensor, n: int) -> torch.Tensor:
    """The unit matrix [n, n] in the dtype and on the device of ``like``."""
    return torch.eye(n, dtype=like.dtype, device=like.device)


@primitive
def matmul_out_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, accumulated and returned in float32 (float64 for float64 operands)."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return a.to(wide) @ b.to(wide)


@primitive
def cache_result(x: torch.Tensor, name: str) -> torch.Tensor:
    """Returns x of chunk_mode, and passes it to decay_mode and merge_mode as their argument ``name``."""
    return x


@primitive
def decayed_scores(q: torch.Tensor, k: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """sum_d q_id k_jd e^{b_id - b_jd} for j <= i and 0 elsewhere, without overflow (docs/math.md, section 1).

    Args:
        q: [C, K].
        k: [C, K].
        b: cumulative log decay (natural logarithm, non-increasing along the chunk), [C] or [C, K]. It may be float64
            beside float32: differences of strong decays are then exact.

    Returns:
        [C, C]. The exponent is masked before the exponential, so strong decay gives 0, never inf or NaN.
    """
    later = torch.ones(b.shape[0], b.shape[0], dtype=torch.bool, device=b.device).tril()
    exponent = b.unsqueeze(1) - b.unsqueeze(0)
    if exponent.dtype == torch.float64:
        exponent = exponent.to(torch.promote_types(q.dtype, torch.float32))
    if b.dim() == 1:
        return (q @ k.transpose(0, 1)) * exponent.masked_fill(~later, float("-inf")).exp()
    decay = exponent.masked_fill(~later.unsqueeze(-1), float("-inf")).exp()
    return (q.unsqueeze(1) * k.unsqueeze(0) * decay).sum(-1)


@primitive
def decayed_sums(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """h_i = e^{g_i} h_{i-1} + x_i, a channel by itself: sum_{j <= i} e^{b_i - b_j} x_j with b = g.cumsum(0).

    Args:
        x: [C, N].
        g: log gates (natural logarithm, not positive, not summed up), [C, N] or [C].

    Returns:
        [C, N]. Gates are multiplied, their logarithms never subtracted, so strong ones neither overflow nor cancel.
    """
    if x.dim() != 2 or g.shape not in (x.shape, x.shape[:1]):
        raise ValueError(
            f"decayed_sums: expected x [C, N] and log gates [C, N] or [C], got {list(x.shape)} and {list(g.shape)}"
        )
    h, a, step = x, g.exp() if g.dim() == 2 else g.exp().unsqueeze(1), 1
    while step < x.shape[0]:
        h, a = h + a * delayed(h, step), a * delayed(a, step)
        step *= 2
    return h


def delayed(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x moved down by a number of rows, with zeros above."""
    return torch.cat([torch.zeros_like(x[:rows]), x[:-rows]])


@primitive
def unit_lower_inverse(x: torch.Tensor, *, exact_repeats: bool = False) -> torch.Tensor:
    """Inverse of a lower triangular [C, C] with ones on the diagonal; only entries below the diagonal are read.

    In bfloat16 kernels do segments token by token in float32 where the inverse is so large that errors grow. With
    ``exact_repeats`` they do so, too, where keys are nearly the same, whatever the inverse's size: where the squares
    of entries below the diagonal add up to more than C / 4 a token, in chunks with half of a segment's tokens or more.
    Chunks lose some percent there, and this is slow.
    """
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return torch.linalg.solve_triangular(x, eye, upper=False, unitriangular=True)


@primitive
def to_floating(x: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """x if it is floating, else x in the dtype of ``like`` (float32 if None). Casts of masks become this."""
    if x.is_floating_point():
        return x
    return x.to(torch.float32 if like is None else like.dtype)


@primitive
def part_of(x: torch.Tensor, part: int, place: tuple[Any, Any]) -> torch.Tensor:
    """Part number ``part`` of a state that is one matrix; ``place`` are its rows and columns, a slice or a number."""
    return x[place]


@primitive
def joined(*parts: torch.Tensor, places: tuple[tuple[Any, Any], ...]) -> torch.Tensor:
    """The matrix with parts at ``places``, the first one in its upper left corner, and zeros elsewhere."""
    V, rows, columns = parts[0].shape[1], [], []
    for i, (x, (row, column)) in enumerate(zip(parts[1:], places[1:], strict=True), 2):
        if isinstance(row, int) and isinstance(column, int):
            if x.dim():
                raise ValueError(f"result {i}: expected a number, of shape [], got {list(x.shape)}")
            rows.append(torch.nn.functional.pad(x.reshape(1, 1), (0, V - 1)))
        elif (column if isinstance(column, int) else column.start) >= V:
            columns.append(x.unsqueeze(1) if isinstance(column, int) else x)
        else:
            rows.append(x.unsqueeze(0) if isinstance(row, int) else x)
    top = torch.cat([parts[0], *columns], 1)
    if not rows:
        return top
    bottom = torch.cat(rows, 0)
    return torch.cat([top, torch.nn.functional.pad(bottom, (0, top.shape[1] - V))], 0)
