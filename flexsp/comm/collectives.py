"""The few collectives outside the rank scan: gather with its exact adjoint, rows exchanged between all ranks, and a sum
of counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from flexsp.comm.derivatives import ON_ONE_RANK, untransformed
from flexsp.comm.process_group import (
    Call,
    OverRanks,
    begin_call,
    define_op,
    group_for,
    lengths_for,
    of_all_ranks,
    peer_errors,
)  # fmt: skip
from flexsp.comm.ranks import Ranks, ranks_call, ranks_of
from flexsp.comm.signature import Signature, facts_of

__all__ = ["exchange_rows", "gather", "sum_over_ranks"]

_ALONE = "compute them on one rank, where nothing has to be gathered"


@ranks_call
def gather(y: torch.Tensor, dim: int, sp: Ranks) -> torch.Tensor:
    """Every rank's ``y`` joined along ``dim``; see `SequenceParallel.gather`."""
    if not -y.dim() <= dim < y.dim():
        raise ValueError(f"dim: expected a dimension of a tensor of shape {tuple(y.shape)}, got {dim}")
    dim %= y.dim()
    untransformed("gather", _ALONE)
    lengths = lengths_for(sp, y.shape[dim])
    if not (y.is_floating_point() or y.is_complex()):
        return _gather(y, dim, lengths, ranks_of(sp.id).order, sp.id)
    run, adjoint = (_gather, dim, lengths), (_gather_adjoint, dim, lengths)
    return OverRanks.apply(y, sp.anchor, run, adjoint, sp.id, ("gather", _ALONE))


@ranks_call
def exchange_rows(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], call: str, sp: Ranks
) -> torch.Tensor:
    """Rows to every rank and from every rank (all-to-all), differentiable. Collective over ``sp``.

    Args:
        rows: [sum(sent), D], floating; those for the first rank come first.
        sent: how many rows go to each rank, 0 and this rank's own included.
        received: how many come from each rank.
        call: what the rows are, a text that ranks compare before they send anything.

    Returns:
        [sum(received), D], in the order of ranks. In the backward pass gradients go back the same way.
    """
    untransformed("calls over ranks", ON_ONE_RANK)
    to, back = list(sent), list(received)
    run, adjoint = (_rows, to, back, call, False), (_rows, back, to, call, True)
    return OverRanks.apply(rows, sp.anchor, run, adjoint, sp.id, (call, ON_ONE_RANK))


def sum_over_ranks(x: torch.Tensor, sp: Ranks) -> torch.Tensor:
    """Sum of ``x`` over the ranks, on every rank; not differentiable (for counts)."""
    return _sum(x.detach(), ranks_of(sp.id).order, sp.id)


def _begin(sp: Ranks, what: str, tensor: torch.Tensor, backward: bool = False) -> Call:
    """Compares the call first: torch.distributed would mix up the data of different ones."""
    call = begin_call(sp, Signature(what, travels=facts_of((tensor,)), backward=backward), tensor)
    call.compare_on_device(tensor.device)
    return call


def _run_sum(x: torch.Tensor, order: torch.Tensor, sp_id: int) -> torch.Tensor:
    sp = ranks_of(sp_id)
    call = _begin(sp, "sum over ranks", x)
    total = x.clone(memory_format=torch.contiguous_format)
    with peer_errors(sp, None, "all_reduce"):
        dist.all_reduce(total, group=group_for(sp, total))
    return call.end(total)


def _run_gather(y: torch.Tensor, dim: int, lengths: Sequence[int], order: torch.Tensor, sp_id: int) -> torch.Tensor:
    """All-gather of shards padded to the longest: gloo takes equal sizes only. Bytes travel, so any dtype does."""
    sp = ranks_of(sp_id)
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
    sp = ranks_of(sp_id)
    rows = d_full.movedim(dim, 0).contiguous()
    call = _begin(sp, f"gather along dim {dim}", rows, backward=True)
    received = rows.new_empty(sp.world_size, lengths[sp.rank], *rows.shape[1:])
    if rows.numel() > 0:
        _all_to_all(sp, rows, received, lengths, [lengths[sp.rank]] * sp.world_size)
    return call.end(received.sum(0).movedim(0, dim).contiguous())


def _run_rows(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], call: str, backward: bool, order: torch.Tensor,
    sp_id: int,
) -> torch.Tensor:  # fmt: skip
    sp, rows = ranks_of(sp_id), rows.contiguous()
    width = f"rows of {rows.shape[1]} {str(rows.dtype).removeprefix('torch.')}"
    begun = begin_call(sp, Signature("exchange of rows", call=call, travels=width, backward=backward), rows)
    begun.compare_on_device(rows.device)
    arrived = rows.new_empty(sum(received), rows.shape[1])
    _all_to_all(sp, rows, arrived, sent, received)
    return begun.end(arrived)


def _all_to_all(sp: Ranks, rows: torch.Tensor, to: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> None:
    """Sends to each rank the number of rows that is given for it, and receives likewise."""
    row = rows.shape[1:].numel() * rows.element_size()
    sizes = [n * row for n in received], [n * row for n in sent]
    with peer_errors(sp, None, "all_to_all"):
        dist.all_to_all_single(_bytes(to), _bytes(rows), *sizes, group=group_for(sp, rows))


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.view(-1).view(torch.uint8)


def _fake_sum(x: torch.Tensor, order: torch.Tensor, sp_id: int) -> torch.Tensor:
    return x.new_empty(x.shape)


def _fake_gather(y: torch.Tensor, dim: int, lengths: Sequence[int], order: torch.Tensor, sp_id: int) -> torch.Tensor:
    return y.new_empty(*y.shape[:dim], sum(lengths), *y.shape[dim + 1 :])


def _fake_adjoint(d: torch.Tensor, dim: int, lengths: Sequence[int], order: torch.Tensor, sp_id: int) -> torch.Tensor:
    return d.new_empty(*d.shape[:dim], lengths[ranks_of(sp_id).rank], *d.shape[dim + 1 :])


def _fake_rows(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], call: str, backward: bool, order: torch.Tensor,
    sp_id: int,
) -> torch.Tensor:  # fmt: skip
    return rows.new_empty(sum(received), rows.shape[1])


_sum = define_op("sum_over_ranks(Tensor x, Tensor(o!) order, int sp_id) -> Tensor", _run_sum, _fake_sum)
_gather = define_op(
    "gather(Tensor y, int dim, SymInt[] lengths, Tensor(o!) order, int sp_id) -> Tensor", _run_gather, _fake_gather
)
_gather_adjoint = define_op(
    "gather_adjoint(Tensor d, int dim, SymInt[] lengths, Tensor(o!) order, int sp_id) -> Tensor",
    _run_adjoint,
    _fake_adjoint,
)

_rows = define_op(
    "exchange_rows(Tensor rows, SymInt[] sent, SymInt[] received, str call, bool backward, Tensor(o!) order, "
    "int sp_id) -> Tensor",
    _run_rows,
    _fake_rows,
)
