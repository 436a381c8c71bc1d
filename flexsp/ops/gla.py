"""Gated linear attention: one gate a key channel and token."""

from __future__ import annotations

import torch

from flexsp.comm.group import SequenceParallel, ranks_call
from flexsp.ops import _programs as programs
from flexsp.ops import _validate as check
from flexsp.ops._peers import one_dtype, recurrence_of
from flexsp.ops._recipe import by_recipe
from flexsp.ops._segments import in_segments

__all__ = ["chunk_gla", "recurrent_gla"]


@ranks_call
@by_recipe
@in_segments("q k v g", kernels=True)
@one_dtype("q k v")
def chunk_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    sp: SequenceParallel | bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T, o_t = scale q_t S_t, in chunks.

    Yang et al. 2023, Gated Linear Attention (arXiv 2312.06635), eq. 3 with a gate for each key channel.

    In half precision gates of later tokens in the same chunk may change an output by some roundings: kernels choose a
    method for each chunk by the size of its gates.

    Args:
        q: [B, T, H, K], float16, bfloat16, float32 or float64, any strides; K of 1..256.
        k: [B, T, H, K] in the same dtype.
        v: [B, T, H, V] in the same dtype; V of 1..512.
        g: natural-log gates [B, T, H, K] <= 0; q's dtype or float32. Values below -104 (-800 for float64 inputs) act
            as that, a decay of 0, and have no gradient.
        scale: factor on q; None means K**-0.5.
        initial_state: [N, H, K, V] in float32 (float64 for float64 inputs); N = B, or the number of documents.
        output_final_state: also return the state after the last token.
        state_v_first: states are [N, H, V, K].
        cu_seqlens: packed documents, as in `chunk_simple_gla`.
        cu_seqlens_cpu: CPU copy of ``cu_seqlens``, as in `chunk_simple_gla`.
        sp: the ranks, as in `chunk_simple_gla`.

    Returns:
        o [B, T, H, V] in the inputs' dtype and the final state, or None, by the same rules as `chunk_simple_gla`.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument. On a GPU also B * H of more than 65535.
        NotAvailable: on a GPU whose blocks have too little shared memory for heads so large.

    Example:
        >>> q, k, v = torch.randn(3, 2, 100, 4, 64).unbind(0)
        >>> g = torch.nn.functional.logsigmoid(torch.randn(2, 100, 4, 64)) / 16
        >>> o, state = chunk_gla(q, k, v, g, output_final_state=True)
    """
    sizes = check.check_qkv(q, k, v)
    check.check_gate("g", g, tuple(q.shape), "[B, T, H, K]", q)
    call = programs.Call(initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu, sp)
    return programs.run_matrix("gla", sizes, {"q": q, "k": k, "v": v, "g": g}, scale, call)


@recurrence_of(chunk_gla, "q k v g gv")
@one_dtype("q k v")
def recurrent_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    reverse: bool = False,
    gv: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The recurrence of `chunk_gla` token by token: decoding, T = 1 a step.

    Takes and returns the same tensors. Prompts, ranks and documents are as in `recurrent_simple_gla`.
    ``reverse`` goes from the last token to the first one, as flash-linear-attention's op of this name does.
    ``gv`` [B, T, H, V] are natural-log gates of the columns of the state, as in that library:
    S_t = diag(e^{g_t}) S_{t-1} diag(e^{gv_t}) + k_t v_t^T. The chunked op has none.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument.

    Example:
        >>> q, k, v = torch.randn(3, 2, 1, 4, 64).unbind(0)
        >>> o, state = recurrent_gla(q, k, v, -torch.rand(2, 1, 4, 64), output_final_state=True)
    """
    check.check_qkv(q, k, v)
    check.check_gate("g", g, tuple(q.shape), "[B, T, H, K]", q)
    if gv is not None:
        check.check_gate("gv", gv, tuple(v.shape), "[B, T, H, V]", q)
    call = programs.Call(initial_state, output_final_state, state_v_first)
    columns = None if gv is None else programs.clamped(gv, q).exp()
    return programs.recur_matrix(q, k, v, programs.clamped(g, q), scale, call, columns=columns)
