"""Entry of the selective scan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flexsp.kernels.selective import in_pytorch

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel

__all__ = ["selective"]

Optional = torch.Tensor | None


def selective(
    u: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, *, zoh: bool,
    initial_state: Optional = None, output_final_state: bool = False, cu_seqlens: Optional = None,
    sp: SequenceParallel | None = None,
) -> tuple[torch.Tensor, Optional]:  # fmt: skip
    """h_t = e^{dt_t A} h_{t-1} + w(dt_t, A) B_t u_t, y_t = C_t h_t, over inputs already validated.

    u, dt and y are [B, T, D], B and C [B, T, N], A [D, N]. y and states are in the dtype of dt and A.
    """
    call = f"selective_scan on {u.dtype}, {'zoh' if zoh else 'euler'}{', packed' if cu_seqlens is not None else ''}"
    if sp is not None and cu_seqlens is not None and not cu_seqlens.is_cuda and not torch.compiler.is_compiling():
        call += f", boundaries {cu_seqlens.tolist()}"
    with torch.autocast(u.device.type, enabled=False):
        return in_pytorch.run(u, dt, A, B, C, zoh, initial_state, cu_seqlens, sp, call, output_final_state)
