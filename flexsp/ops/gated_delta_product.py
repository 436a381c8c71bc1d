"""Gated DeltaProduct: a token takes several steps of the delta rule, after one decay."""

from __future__ import annotations

import torch

from flexsp.comm.group import SequenceParallel, ranks_call
from flexsp.ops import _delta
from flexsp.ops import _validate as check
from flexsp.ops._peers import one_dtype
from flexsp.ops._recipe import by_recipe
from flexsp.ops._segments import in_segments

__all__ = ["chunk_gated_delta_product", "recurrent_gated_delta_product"]


@ranks_call
@by_recipe
@in_segments("q k v g beta", kernels=True)
@one_dtype("q k v")
def chunk_gated_delta_product(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    sp: SequenceParallel | bool | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """S_t = e^{g_t} S_{t-1}, then S_t <- (I - beta_j k_j k_j^T) S_t + beta_j k_j v_j^T for its n steps j; o_t = scale
    q_t S_t.

    Siems et al. 2025, DeltaProduct (arXiv 2502.10297), eq. 4, with the gate of Gated DeltaNet, or with those of
    `chunk_kda`, one a key channel: diag(e^{g_t}) S_{t-1}. Step j of token t is row t n + j of k, v and beta. It runs as
    a gated delta rule of T n tokens, of which only the last of each n is read.

    Args:
        q: [B, T, H, K], float16, bfloat16, float32 or float64, any strides; K of 1..256.
        k: [B, T n, H, K] in the same dtype, of unit length unless ``use_qk_l2norm_in_kernel``.
        v: [B, T n, HV, V] in the same dtype, V as K; HV is a multiple of H, and value head h uses the key head
            h // (HV / H). On Hopper GPUs q and k are read as they are; elsewhere, and in graphs of
            torch.compile, they are repeated in memory.
        g: natural-log gates [B, T, HV] <= 0, or [B, T, HV, K], q's dtype or float32; or None, no decay. Values below
            -104 (-800 for float64 inputs) act as that, a decay of 0, and have no gradient. Gates of channels, and the
            queries beside them, are spread over the n steps in memory.
        beta: step sizes [B, T n, HV], from 0 to 1 (to 2 for negative eigenvalues); q's dtype or float32.
        num_householder: n, at least 1.
        scale: factor on q; None means K**-0.5.
        initial_state: [N, HV, K, V] in float32 (float64 for float64 inputs); N = B, or the number of documents.
        output_final_state: also return the state after the last token.
        cu_seqlens: packed documents, as in `chunk_simple_gla`; boundaries count the tokens of q.
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
        >>> q, g = torch.randn(2, 100, 4, 64), -torch.rand(2, 100, 4)
        >>> k, v = torch.randn(2, 2, 200, 4, 64).unbind(0)
        >>> o, _ = chunk_gated_delta_product(q, k, v, g, torch.rand(2, 200, 4), 2, use_qk_l2norm_in_kernel=True)
    """
    n = check.check_integer("num_householder", num_householder, least=1)
    name = _program(g)
    by_channel = name == "vector_gated_delta"
    heads, tokens = _delta.prepared(q, k, v, beta, g, use_qk_l2norm_in_kernel, by_channel=by_channel, steps=n)
    call = _delta.Call(initial_state, output_final_state, False, cu_seqlens, cu_seqlens_cpu, sp)
    return _delta.run(name, heads, tokens, scale, call, steps=n)


@one_dtype("q k v")
def recurrent_gated_delta_product(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The recurrence of `chunk_gated_delta_product` token by token: decoding, T = 1 a step.

    Takes and returns the same tensors. Prompts, ranks and documents are as in `recurrent_simple_gla`.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument.

    Example:
        >>> q, g = torch.randn(2, 1, 4, 64), -torch.rand(2, 1, 4)
        >>> k, v = torch.randn(2, 2, 3, 4, 64).unbind(0)
        >>> o, state = recurrent_gated_delta_product(q, k, v, g, torch.rand(2, 3, 4), 3, output_final_state=True)
    """
    n = check.check_integer("num_householder", num_householder, least=1)
    name = _program(g)
    by_channel = name == "vector_gated_delta"
    heads, tokens = _delta.prepared(q, k, v, beta, g, use_qk_l2norm_in_kernel, by_channel=by_channel, steps=n)
    call = _delta.Call(initial_state, output_final_state, False, cu_seqlens)
    return _delta.recurrent(name, heads, tokens, scale, call, steps=n)


def _program(g: torch.Tensor | None) -> str:
    """For gates of heads or of channels, or for none."""
    if g is None:
        return "deltanet"
    return "vector_gated_delta" if isinstance(g, torch.Tensor) and g.dim() == 4 else "gated_deltanet"
