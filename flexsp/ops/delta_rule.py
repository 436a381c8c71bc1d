"""The delta rule (DeltaNet): what a key holds is replaced, not added to."""

from __future__ import annotations

import torch

from flexsp.comm.group import SequenceParallel, ranks_call
from flexsp.ops import _delta
from flexsp.ops._peers import one_dtype
from flexsp.ops._recipe import by_recipe
from flexsp.ops._segments import in_segments

__all__ = ["chunk_delta_rule", "recurrent_delta_rule"]


@ranks_call
@by_recipe
@in_segments("q k v beta", kernels=True)
@one_dtype("q k v")
def chunk_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    sp: SequenceParallel | bool | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, o_t = scale q_t S_t, in chunks.

    Yang et al. 2024, Parallelizing Linear Transformers with the Delta Rule (arXiv 2406.06484), eq. 4.

    In bfloat16 with equal or nearly equal keys and beta beyond 1, chunks would round too much. Such segments run token
    by token in float32, 20 to 30 times slower: on an H100 a gated rule with 65,536 tokens and 32 heads of 128 x 128
    takes 39 ms instead of 2, and 230 ms instead of 8 with its gradients. With unit keys and beta up to 1 this never
    happens, since no step enlarges a rounding.

    Args:
        q: [B, T, H, K], float16, bfloat16, float32 or float64, any strides; K of 1..256.
        k: [B, T, H, K] in the same dtype, of unit length unless ``use_qk_l2norm_in_kernel``: longer keys make the
            state grow.
        v: [B, T, HV, V] in the same dtype, V as K; HV is a multiple of H, and value head h uses the key head
            h // (HV / H). On Hopper GPUs q and k are read as they are; elsewhere, and in graphs of
            torch.compile, they are repeated in memory.
        beta: step sizes [B, T, HV], from 0 to 1 (to 2 for negative eigenvalues); q's dtype or float32.
        scale: factor on q; None means K**-0.5.
        initial_state: [N, HV, K, V] in float32 (float64 for float64 inputs); N = B, or the number of documents.
        output_final_state: also return the state after the last token.
        cu_seqlens: packed documents, as in `chunk_simple_gla`.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum of squares + 1e-6) first.
        sp: the ranks, as in `chunk_simple_gla`.
        cu_seqlens_cpu: CPU copy of ``cu_seqlens``, as in `chunk_simple_gla`.

    Returns:
        o [B, T, HV, V] in the inputs' dtype and the final state [N, HV, K, V], or None, by the same rules as
        `chunk_simple_gla`.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument. On a GPU also B * HV of more than 65535.
        NotAvailable: on a GPU other than Hopper, whose blocks have too little shared memory for heads so large.

    Example:
        >>> q, k, v = torch.randn(3, 2, 100, 4, 64).unbind(0)
        >>> o, state = chunk_delta_rule(q, k, v, torch.rand(2, 100, 4), use_qk_l2norm_in_kernel=True)
    """
    heads, tokens = _delta.prepared(q, k, v, beta, None, use_qk_l2norm_in_kernel)
    call = _delta.Call(initial_state, output_final_state, False, cu_seqlens, cu_seqlens_cpu, sp)
    return _delta.run("deltanet", heads, tokens, scale, call)


@one_dtype("q k v")
def recurrent_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The recurrence of `chunk_delta_rule` token by token: decoding, T = 1 a step.

    Takes and returns the same tensors. Prompts, ranks and documents are as in `recurrent_simple_gla`.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument.

    Example:
        >>> q, k, v = torch.nn.functional.normalize(torch.randn(3, 2, 100, 4, 64), dim=-1).unbind(0)
        >>> beta = torch.rand(2, 100, 4)
        >>> o, state = chunk_delta_rule(q, k, v, beta, output_final_state=True)
        >>> q1, k1, v1, beta1 = (x[:, -1:] for x in (q, k, v, beta))  # the next token's
        >>> o1, state = recurrent_delta_rule(q1, k1, v1, beta1, initial_state=state, output_final_state=True)
    """
    heads, tokens = _delta.prepared(q, k, v, beta, None, use_qk_l2norm_in_kernel)
    call = _delta.Call(initial_state, output_final_state, False, cu_seqlens)
    return _delta.recurrent("deltanet", heads, tokens, scale, call)
