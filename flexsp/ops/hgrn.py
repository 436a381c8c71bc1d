"""HGRN: a vector state with one gate a channel and token."""

from __future__ import annotations

import torch

from flexsp.comm.group import SequenceParallel, ranks_call
from flexsp.ops import _programs as programs
from flexsp.ops import _validate as check
from flexsp.ops._peers import one_dtype, recurrence_of
from flexsp.ops._recipe import by_recipe
from flexsp.ops._segments import in_segments

__all__ = ["chunk_hgrn", "recurrent_hgrn"]


@ranks_call
@by_recipe
@in_segments("x g", kernels=True)
@one_dtype("x", out="x")
def chunk_hgrn(
    x: torch.Tensor,
    g: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    sp: SequenceParallel | bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """h_t = e^{g_t} h_{t-1} + x_t, o_t = h_t, in chunks; every channel by itself.

    Qin et al. 2023, Hierarchically Gated Recurrent Network (arXiv 2311.04823), with real numbers for complex ones. As
    in flash-linear-attention the caller has multiplied the inputs by 1 - e^{g_t} already.

    Args:
        x: [B, T, D], float16, bfloat16, float32 or float64, any strides.
        g: natural-log gates [B, T, D] <= 0; x's dtype or float32. Values below -104 (-800 for float64 inputs) act as
            that, a decay of 0, and have no gradient.
        initial_state: [N, D] in float32 (float64 for float64 inputs); N = B, or the number of documents.
        output_final_state: also return the state after the last token.
        cu_seqlens: packed documents, as in `chunk_simple_gla`.
        cu_seqlens_cpu: CPU copy of ``cu_seqlens``, as in `chunk_simple_gla`.
        sp: the ranks, as in `chunk_simple_gla`.

    Returns:
        o [B, T, D] in x's dtype and the final state [N, D], or None, by the same rules as `chunk_simple_gla`.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument.
        NotAvailable: on a GPU, more than 65535 blocks of channels in all sequences; a block has as many channels as the
            largest divisor of D up to 256.

    Example:
        >>> f = torch.nn.functional.logsigmoid(torch.randn(2, 100, 256))
        >>> o, state = chunk_hgrn(-torch.expm1(f) * torch.randn(2, 100, 256), f, output_final_state=True)
    """
    check_inputs(x, g)
    call = programs.Call(initial_state, output_final_state, False, cu_seqlens, cu_seqlens_cpu, sp)
    return programs.run_vector("hgrn", x, g, call)


@recurrence_of(chunk_hgrn)
@one_dtype("x", out="x")
def recurrent_hgrn(
    x: torch.Tensor,
    g: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The recurrence of `chunk_hgrn` token by token: decoding, T = 1 a step.

    Takes and returns the same tensors. Prompts, ranks and documents are as in `recurrent_simple_gla`.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument.

    Example:
        >>> o, state = recurrent_hgrn(torch.randn(2, 1, 256), -torch.rand(2, 1, 256), output_final_state=True)
    """
    check_inputs(x, g)
    call = programs.Call(initial_state, output_final_state)
    return programs.recur_vector(x, programs.wide(x), programs.clamped(g, x), call)


def check_inputs(x: torch.Tensor, g: torch.Tensor) -> None:
    """Shapes, dtypes and device of x and gates [B, T, D], and gates <= 0."""
    check.check_first("x", x, "[B, T, D]")
    check.check_gate("g", g, tuple(x.shape), "[B, T, D]", x)
