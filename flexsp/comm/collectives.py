"""The few collectives outside the rank scan: gather with its exact adjoint, and a sum of counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from flexsp.comm.derivatives import first_only, untransformed
from flexsp.comm.group import SequenceParallel, get_sp, ranks_call
from flexsp.comm.process_group import Call, begin_call, define_op, group_for, of_all_ranks, peer_errors
from flexsp.comm.signature import Signature, facts_of

__all__ = ["gather", "sum_over_ranks"]

_ALONE = "compute them on one rank, where nothing has to be gathered"


@ranks_call
def gather(y: torch.Tensor, dim: int, sp: SequenceParallel) -> torch.Tensor:
    """Every rank's ``y`` joined along ``dim``; see `SequenceParallel.gather`."""
    if not -y.dim() <= dim < y.dim():
        raise ValueError(f"dim: expected a dimension of a tensor of shape {tuple(y.shape)}, got {dim}")
    dim %= y.dim()
    untransformed("gather", _ALONE)
    lengths = sp.lengths_for(y.shape[dim])
    if not (y.is_floating_point() or y.is_complex()):
        return _gather(y, dim, lengths, get_sp(sp.id).order, sp.id)
    return _GatherFunction.apply(y, sp.anchor, dim, lengths, sp.id)


def sum_over_ranks(x: torch.Tensor, sp: SequenceParallel) -> torch.Tensor:
    """Sum of ``x`` over the ranks, on every rank; not differentiable (for counts)."""
    return _sum(x.detach(), get_sp(sp.id).order, sp.id)


def _begin(sp: SequenceParallel, what: str, tensor: torch.Tensor, backward: bool = False) -> Call:
    """Compares the call first: torch.distributed would mix up the data of different ones."""
    call = begin_call(sp, Signature(what, travels=facts_of((tensor,)), backward=backward), tensor)
    call.compare_on_device(tensor.device)
    return call


def _run_sum(x: torch.Tensor, order: torch.Tensor, sp_id: int) -> torch.Tensor:
    sp = get_sp(sp_id)
    call = _begin(sp, "sum over ranks", x)
    total = x.clone(memory_format=torch.contiguous_format)
    with peer_errors(sp, None, "all_reduce"):
        dist.all_reduce(total, group=group_for(sp, total))
    return call.end(total)


def _run_gather(y: torch.Tensor, dim: int, lengths: Sequence[int], order: torch.Tensor, sp_id: int) -> torch.Tensor:
    """All-gather of shards padded to the longest: gloo takes equal sizes only. Bytes travel, so any dtype does."""
    sp = get_sp(sp_id)
    rows = y.movedim(dim, 0)
    longest = max(lengths)
    mine = y.new_zeros(longest, *rows.shape[1:])
    mine[: rows.shape[0]] = rows
    call = _begin(sp, f"gather along dim {dim}", mine)
    shape = len(lengths), *mine.shape
    everyone = of_all_ranks(sp, _bytes(mine)).view(mine.dtype).view(shape) if mine.numel() else mine.new_empty(shape)
    full = torch.cat([shard[:length] for shard, length in zip(everyone, lengths, strict=True)])
    return call.end(full.movedim(0, dim).contiguous())


def _run_adjoint(
    d_full: torch.Tensor, dim: int, lengths: Sequence[int], order: torch.Tensor, sp_id: int
) -> torch.Tensor:
    """Reduce-scatter: every rank receives all ranks' gradients of its slice and adds them in rank order."""
    sp = get_sp(sp_id)
    rows = d_full.movedim(dim, 0).contiguous()
    call = _begin(sp, f"gather along dim {dim}", rows, backward=True)
    received = rows.new_empty(sp.world_size, lengths[sp.rank], *rows.shape[1:])
    row = rows.shape[1:].numel() * rows.element_size()
    if rows.numel() > 0:
        with peer_errors(sp, None, "all_to_all"):
            dist.all_to_all_single(
                _bytes(received),
                _bytes(rows),
                output_split_sizes=[lengths[sp.rank] * row] * sp.world_size,
                input_split_sizes=[length * row for length in lengths],
                group=group_for(sp, rows),
            )
    return call.end(received.sum(0).movedim(0, dim).contiguous())


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.view(-1).view(torch.uint8)


def _fake_sum(x: torch.Tensor, order: torch.Tensor, sp_id: int) -> torch.Tensor:
    return x.new_empty(x.shape)


def _fake_gather(y: torch.Tensor, dim: int, lengths: Sequence[int], order: torch.Tensor, sp_id: int) -> torch.Tensor:
    return y.new_empty(*y.shape[:dim], sum(lengths), *y.shape[dim + 1 :])


def _fake_adjoint(d: torch.Tensor, dim: int, lengths: Sequence[int], order: torch.Tensor, sp_id: int) -> torch.Tensor:
    return d.new_empty(*d.shape[:dim], lengths[get_sp(sp_id).rank], *d.shape[dim + 1 :])


_sum = define_op("sum_over_ranks(Tensor x, Tensor(o!) order, int sp_id) -> Tensor", _run_sum, _fake_sum)
_gather = define_op(
    "gather(Tensor y, int dim, SymInt[] lengths, Tensor(o!) order, int sp_id) -> Tensor", _run_gather, _fake_gather
)
_gather_adjoint = define_op(
    "gather_adjoint(Tensor d, int dim, SymInt[] lengths, Tensor(o!) order, int sp_id) -> Tensor",
    _run_adjoint,
    _fake_adjoint,
)


class _GatherFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, anchor: torch.Tensor, dim: int, lengths: list[int], sp_id: int
    ) -> torch.Tensor:
        ctx.dim, ctx.lengths, ctx.sp_id = dim, lengths, sp_id
        ctx.save_for_backward(anchor)  # for checkpointing, as in comm/halo.py
        full = _gather(y, dim, lengths, get_sp(sp_id).order, sp_id)
        ctx.number = get_sp(sp_id).number()
        return full

    @staticmethod
    def backward(ctx: Any, d_full: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        first_only("gather", _ALONE)
        (_,) = ctx.saved_tensors
        sp = get_sp(ctx.sp_id)
        with sp.answering(ctx.number):
            d = _gather_adjoint(d_full, ctx.dim, ctx.lengths, sp.order, ctx.sp_id)
        return d, None, None, None, None
