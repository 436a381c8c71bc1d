"""Retention: linear attention with a fixed decay for each head."""

from __future__ import annotations

import torch

from flexsp.comm.group import SequenceParallel, ranks_call
from flexsp.ops import _validate as check
from flexsp.ops._peers import one_dtype
from flexsp.ops._recipe import by_recipe
from flexsp.ops._segments import in_segments
from flexsp.ops.simple_gla import chunk_simple_gla
from flexsp.runtime.recipe import step

__all__ = ["chunk_retention"]


@ranks_call
@by_recipe
@in_segments("q k v", kernels=True)
@one_dtype("q k v")
def chunk_retention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    sp: SequenceParallel | bool | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """S_t = gamma_h S_{t-1} + k_t v_t^T, o_t = scale q_t S_t with gamma_h = 1 - 2^{-5-h}, h = 0..H-1.

    Sun et al. 2023, Retentive Network (arXiv 2307.08621), eq. 6 and 8. Rotary or xPos factors are the caller's and
    use GLOBAL positions: under ``sp`` a shard starts at ``sp.shard_range(T)[0]``.

    Args:
        q: [B, T, H, K], float16, bfloat16, float32 or float64, any strides; K of 1..256.
        k: [B, T, H, K] in the same dtype.
        v: [B, T, H, V] in the same dtype; V of 1..512.
        scale: factor on q; None means K**-0.5.
        initial_state: [N, H, K, V] in float32 (float64 for float64 inputs); N = B, or the number of documents.
        output_final_state: also return the state after the last token.
        cu_seqlens: packed documents, as in `chunk_simple_gla`.
        sp: the ranks, as in `chunk_simple_gla`.
        cu_seqlens_cpu: CPU copy of ``cu_seqlens``, as in `chunk_simple_gla`.

    Returns:
        o [B, T, H, V] in the inputs' dtype and the final state [N, H, K, V], or None, by the same rules as
        `chunk_simple_gla`.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument. On a GPU also B * H of more than 65535.

    Example:
        >>> q, k, v = torch.randn(3, 2, 100, 4, 64).unbind(0)
        >>> o, state = chunk_retention(q, k, v, output_final_state=True)
        >>> o2, state = chunk_retention(q, k, v, initial_state=state, output_final_state=True)
    """
    check.check_qkv(q, k, v)
    g_gamma = _log_decays(q.shape[2], check.accumulation_dtype(q), q.device)
    return chunk_simple_gla(
        q, k, v, None, g_gamma, scale, initial_state, output_final_state, cu_seqlens, sp, cu_seqlens_cpu
    )


@step
def _log_decays(H: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    head = torch.arange(H, dtype=torch.float64, device=device)
    return torch.log1p(-torch.exp2(-5.0 - head)).to(dtype)
