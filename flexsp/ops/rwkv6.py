"""RWKV-6: one gate a key channel and token, and a bonus for what a token wrote itself."""

from __future__ import annotations

import torch

from flexsp.comm.group import SequenceParallel, ranks_call
from flexsp.ops import _programs as programs
from flexsp.ops import _validate as check
from flexsp.ops._peers import one_dtype, recurrence_of
from flexsp.ops._recipe import by_recipe
from flexsp.ops._segments import in_segments

__all__ = ["chunk_rwkv6", "recurrent_rwkv6"]


@ranks_call
@by_recipe
@in_segments("r k v w", "u", kernels=True)
@one_dtype("r k v")
def chunk_rwkv6(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    sp: SequenceParallel | bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o_t = scale r_t (S_{t-1} + diag(u) k_t v_t^T), S_t = diag(e^{w_t}) S_{t-1} + k_t v_t^T, in chunks.

    Peng et al. 2024, Eagle and Finch (arXiv 2404.05892), the time mixing of Finch. A token reads the state before its
    own decay.

    Args:
        r: receptance [B, T, H, K], float16, bfloat16, float32 or float64, any strides; K of 1..256.
        k: [B, T, H, K] in the same dtype.
        v: [B, T, H, V] in the same dtype; V of 1..512.
        w: natural-log gates [B, T, H, K] <= 0, in the model -exp of what it calls w; r's dtype or float32. Values
            below -104 (-800 for float64 inputs) act as that, a decay of 0, and have no gradient.
            RWKV-LM hands its kernels numbers that decay by e^{-e^w}: pass -w.exp() for them.
        u: bonus [H, K]; r's dtype or float32.
        scale: factor on r; None means K**-0.5.
        initial_state: [N, H, K, V] in float32 (float64 for float64 inputs); N = B, or the number of documents.
        output_final_state: also return the state after the last token.
        cu_seqlens: packed documents, as in `chunk_simple_gla`.
        cu_seqlens_cpu: CPU copy of ``cu_seqlens``, as in `chunk_simple_gla`.
        sp: the ranks, as in `chunk_simple_gla`.

    Returns:
        o [B, T, H, V] in the inputs' dtype and the final state [N, H, K, V], or None, by the same rules as
        `chunk_simple_gla`. Under ``sp`` the gradient of u is this rank's share; their sum over ranks is the gradient.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument. On a GPU also B * H of more than 65535.
        NotAvailable: on a GPU whose blocks have too little shared memory for heads so large.

    Example:
        >>> r, k, v = torch.randn(3, 2, 100, 4, 64).unbind(0)
        >>> o, state = chunk_rwkv6(r, k, v, -torch.randn(2, 100, 4, 64).exp(), torch.randn(4, 64))
    """
    sizes = _checked(r, k, v, w, u)
    call = programs.Call(initial_state, output_final_state, False, cu_seqlens, cu_seqlens_cpu, sp)
    inputs = {"q": r, "k": k, "v": v, "g": w, "u": u}
    return programs.run_matrix("rwkv6", sizes, inputs, scale, call, first="r")


@recurrence_of(chunk_rwkv6, "r k v w")
@one_dtype("r k v")
def recurrent_rwkv6(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    reverse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The recurrence of `chunk_rwkv6` token by token: decoding, T = 1 a step.

    Takes and returns the same tensors. Prompts, ranks and documents are as in `recurrent_simple_gla`.
    ``reverse`` goes from the last token to the first one, as flash-linear-attention's op of this name does.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument.

    Example:
        >>> r, k, v = torch.randn(3, 2, 1, 4, 64).unbind(0)
        >>> o, state = recurrent_rwkv6(r, k, v, -torch.rand(2, 1, 4, 64), torch.randn(4, 64), output_final_state=True)
    """
    _checked(r, k, v, w, u)
    call = programs.Call(initial_state, output_final_state)
    return programs.recur_matrix(r, k, v, programs.clamped(w, r), scale, call, bonus=programs.wide(u, r))


def _checked(
    r: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: torch.Tensor, u: torch.Tensor
) -> tuple[int, int, int, int, int]:
    sizes = check.check_qkv(r, k, v, "rkv")
    check.check_gate("w", w, tuple(r.shape), "[B, T, H, K]", r)
    check.check_tensor("u", u, tuple(r.shape[2:]), "[H, K]", dtypes=(r.dtype, torch.float32), device=r.device)
    return sizes
