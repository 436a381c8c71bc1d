"""Halo exchange: the last tokens before this shard, from the neighbour or, past short shards, from further left.

Each rank hands its right neighbour the last ``width`` tokens of (its own halo ++ its shard). A shard of at least
``width`` tokens can do so at once; a shorter one first waits for its halo. So no rank needs to know the others'
lengths, every message has the same shape, and a halo spans as many ranks as it must.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexsp.comm.derivatives import ON_ONE_RANK, untransformed
from flexsp.comm.group import SequenceParallel, get_sp, ranks_call
from flexsp.comm.process_group import Message, OverRanks, begin_call, define_op, post, wait_all
from flexsp.comm.signature import Signature, facts_of

__all__ = ["halo_exchange"]

_NAME = "the halo exchange of a convolution over ranks"


@ranks_call
def halo_exchange(x: torch.Tensor, width: int, sp: SequenceParallel) -> torch.Tensor:
    """The ``width`` tokens before this rank's shard, differentiable. Collective over ``sp``, point to point only.

    Args:
        x: [B, T_local, ...], this rank's shard; T_local may be anything, 0 included, and differ between ranks.
        width: number of tokens, for a causal convolution its kernel size - 1.

    Returns:
        [B, width, ...]; zeros where the sequence has not begun yet. Documents are the caller's to mask. The backward
        returns each token's gradient to the rank that owns it; it is recorded on every rank in grad mode.
    """
    if x.dim() < 2:
        raise ValueError(f"x: expected [B, T, ...], got shape {tuple(x.shape)}")
    if width < 0:
        raise ValueError(f"width: expected an integer >= 0, got {width}")
    if sp.world_size == 1 or width == 0:
        return x.new_zeros(x.shape[0], width, *x.shape[2:])
    untransformed(_NAME, ON_ONE_RANK)
    if x.is_floating_point():
        run, adjoint = (_halo, width), (_halo_adjoint, x.shape[1])
        return OverRanks.apply(x, sp.anchor, run, adjoint, sp.id, (_NAME, ON_ONE_RANK))
    return _halo(x, width, get_sp(sp.id).order, sp.id)


def _pass_on(
    sp: SequenceParallel, incoming: torch.Tensor, reverse: bool, ready: bool, outgoing: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Fill ``incoming`` from one neighbour and send ``outgoing()`` to the other, at once if ``ready``, else after."""
    source, target = sp.neighbours(reverse)
    signature = Signature("halo exchange", travels=facts_of((incoming,)), backward=reverse)
    call = begin_call(sp, signature, incoming, source, target)
    buffer = call.buffer(incoming)
    messages = [] if source is None else [Message("recv", buffer, source)]
    if ready and call.target is not None:
        messages.append(Message("send", call.sealed(outgoing()), call.target))
    wait_all(sp, post(sp, *messages))
    if source is not None:
        call.look_at(buffer, source)
        incoming.copy_(call.data(buffer, incoming))
    if not ready and call.target is not None:
        wait_all(sp, post(sp, Message("send", call.sealed(outgoing()), call.target)))
    return call.end(incoming)


def _run(x: torch.Tensor, width: int, order: torch.Tensor, sp_id: int) -> torch.Tensor:
    sp, T = get_sp(sp_id), x.shape[1]
    halo = x.new_zeros(x.shape[0], width, *x.shape[2:])

    def last_tokens() -> torch.Tensor:
        return x[:, T - width :].contiguous() if width <= T else torch.cat([halo[:, T:], x], 1)

    return _pass_on(sp, halo, False, width <= T, last_tokens)


def _run_adjoint(d_halo: torch.Tensor, T: int, order: torch.Tensor, sp_id: int) -> torch.Tensor:
    """Gradient [B, T, ...] of the shard from the gradient of the halo, by messages the other way."""
    sp, width = get_sp(sp_id), d_halo.shape[1]
    d_halo = d_halo.contiguous()
    d_sent = torch.zeros_like(d_halo)

    def of_left_tokens() -> torch.Tensor:
        if width <= T:
            return d_halo
        total = d_halo.clone()
        total[:, T:] += d_sent[:, : width - T]
        return total

    d_sent = _pass_on(sp, d_sent, True, width <= T, of_left_tokens)
    dx = d_halo.new_zeros(d_halo.shape[0], T, *d_halo.shape[2:])
    own = min(T, width)
    dx[:, T - own :] = d_sent[:, width - own :]
    return dx


def _fake(x: torch.Tensor, width: int, order: torch.Tensor, sp_id: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], width, *x.shape[2:])


_halo = define_op("halo(Tensor x, SymInt width, Tensor(o!) order, int sp_id) -> Tensor", _run, _fake)
_halo_adjoint = define_op(
    "halo_adjoint(Tensor d_halo, SymInt T, Tensor(o!) order, int sp_id) -> Tensor", _run_adjoint, _fake
)
