"""Boundaries of packed documents, of the index of each token's document."""

from __future__ import annotations

import torch

from flexsp.comm.group import SequenceParallel, ranks_call, resolve_sp
from flexsp.comm.tracing import outside_graphs
from flexsp.exceptions import check_dense, fail

__all__ = ["seq_idx_to_cu_seqlens"]


@outside_graphs("the number of documents is read from seq_idx, and cu_seqlens spares that")
@ranks_call
def seq_idx_to_cu_seqlens(seq_idx: torch.Tensor, sp: SequenceParallel | bool | None = None) -> torch.Tensor:
    """``cu_seqlens`` of documents that ``seq_idx`` tells apart, as mamba_ssm and causal_conv1d take it.

    A document is a run of tokens with the same index. The indices themselves mean nothing: an index that comes again
    behind another one is that of another document. The host waits for the values, so call this once for a batch, and
    pass what it returns to all ops and layers.

    Args:
        seq_idx: int32 or int64 [B, T]. Over ranks this rank's tokens of one sequence, [1, T_local]; T_local may be 0. A
            document may go on over the edges of ranks.
        sp: the ranks, as in `flexsp.ops.chunk_simple_gla`. Collective over them.

    Returns:
        int64 [N + 1] on the device of ``seq_idx``: the boundaries of all N documents in the whole sequence. Of several
        rows they are those of the rows one after the other, where no document goes on from one row to the next.

    Raises:
        ValueError: a wrong shape or dtype, or several rows over ranks.

    Example:
        >>> seq_idx_to_cu_seqlens(torch.tensor([[0, 0, 1, 1, 1, 0]]))
        tensor([0, 2, 5, 6])
    """
    check_dense("seq_idx", seq_idx, "a tensor [B, T]")
    if seq_idx.dim() != 2 or seq_idx.dtype not in (torch.int32, torch.int64):
        fail("seq_idx", "int32 or int64 [B, T]", f"{seq_idx.dtype} {list(seq_idx.shape)}")
    group = resolve_sp(sp, keeps_bits=True)
    if group is not None and group.world_size > 1:
        if seq_idx.shape[0] != 1:
            fail("seq_idx", "batch size 1 over ranks (pack the documents along T)", seq_idx.shape[0])
        seq_idx = group.gather(seq_idx)
    B, T = seq_idx.shape
    if not T:
        return torch.zeros(B + 1, dtype=torch.int64, device=seq_idx.device)
    begins = torch.ones_like(seq_idx, dtype=torch.bool)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    starts = begins.flatten().nonzero()[:, 0]
    return torch.cat([starts, starts.new_full((1,), B * T)])
