"""Lightning attention: a fixed decay for each head and layer."""

from __future__ import annotations

import torch

from flexsp.comm.group import SequenceParallel, ranks_call
from flexsp.ops import _validate as check
from flexsp.ops._peers import one_dtype
from flexsp.ops._recipe import by_recipe
from flexsp.ops._segments import in_segments
from flexsp.ops.simple_gla import chunk_simple_gla
from flexsp.runtime.recipe import step

__all__ = ["chunk_lightning_attn"]


@ranks_call
@by_recipe
@in_segments("q k v", kernels=True)
@one_dtype("q k v")
def chunk_lightning_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    sp: SequenceParallel | bool | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """S_t = e^{g_h} S_{t-1} + k_t v_t^T, o_t = scale q_t S_t with g_h = -(8 / H) h (1 - layer_idx / num_layers).

    Qin et al. 2024, Lightning Attention-2 (arXiv 2401.04658), section 3, with the slopes of TransNormerLLM
    (arXiv 2307.14995): h = 0..H-1, and deeper layers forget more slowly.

    Args:
        q: [B, T, H, K], float16, bfloat16, float32 or float64, any strides; K of 1..256.
        k: [B, T, H, K] in the same dtype.
        v: [B, T, H, V] in the same dtype; V of 1..512.
        layer_idx: place of the layer, 0..num_layers - 1.
        num_layers: number of layers of the model.
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
        >>> o, state = chunk_lightning_attn(q, k, v, layer_idx=3, num_layers=12, output_final_state=True)
        >>> state.shape  # [2, 4, 64, 64]
    """
    check.check_qkv(q, k, v)
    num_layers = check.check_integer("num_layers", num_layers, least=1)
    layer_idx = check.check_integer("layer_idx", layer_idx, most=num_layers - 1)
    slope = -8.0 / q.shape[2] * (1 - layer_idx / num_layers)
    g_gamma = _log_decays(slope, q.shape[2], check.accumulation_dtype(q), q.device)
    return chunk_simple_gla(
        q, k, v, None, g_gamma, scale, initial_state, output_final_state, cu_seqlens, sp, cu_seqlens_cpu
    )


@step
def _log_decays(slope: float, H: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return slope * torch.arange(H, dtype=dtype, device=device)
