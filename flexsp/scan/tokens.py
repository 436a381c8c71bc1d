"""Positions of this rank's tokens in the whole sequence, and what they need of the tokens before and behind them.

Sums and positions go on from rank to rank (``sp``) and start anew with every document (``cu_seqlens``). Tokens behind
the last document are treated as one more document. All functions are collective over ``sp``; `positions`, `begins`,
`read_here` and `without_tail` only if `set_lengths` was not called.

Values of whole sequences, [N, H, ...], follow the rules of the ops' states. Without documents the first rank gives
initial values and the last rank has final ones. With documents every rank has a row for each document. It reads the
rows of those that start in its shard, and fills the rows of those that end there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flexsp.comm.group import SequenceParallel, ranks_call
from flexsp.comm.halo import halo_exchange
from flexsp.scan.by_kernel import sends
from flexsp.scan.exchange import add_backward_dependency, exchange
from flexsp.scan.transitions import Transition

__all__ = [
    "Arrived", "arriving", "begins", "ended", "following", "last", "last_of_ended", "positions", "previous",
    "read_here", "running_sum", "tokens_before", "without_tail",
]  # fmt: skip

Ranks = SequenceParallel | None
_BLOCK = 256  # tokens
_IN_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)  # dtypes whose numbers it holds exactly


def _places(
    T: int, device: torch.device, cu_seqlens: torch.Tensor | None, sp: Ranks
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(place in the whole sequence, place where the document starts) [T] of every token here; place of the first."""
    start = 0 if sp is None else sp.shard_range(T)[0]
    place = torch.arange(start, start + T, device=device)
    if cu_seqlens is None:
        return place, torch.zeros_like(place), start
    return place, cu_seqlens[torch.searchsorted(cu_seqlens, place, right=True) - 1].to(place.dtype), start


def positions(T: int, device: torch.device, cu_seqlens: torch.Tensor | None, sp: Ranks) -> torch.Tensor:
    """Positions [T] of this rank's T tokens, from 0 at the start of the sequence, of each document where packed."""
    place, begin, _ = _places(T, device, cu_seqlens, sp)
    return place - begin


def read_here(
    states: torch.Tensor | None, T: int, cu_seqlens: torch.Tensor | None, sp: Ranks
) -> torch.Tensor | None:  # fmt: skip
    """Initial states [N, ...] with zeros in the rows of documents that start on another rank.

    Those rows may hold anything, NaN too. Code that computes with all rows would give them gradients of 0 times NaN.
    """
    if states is None or cu_seqlens is None or sp is None or sp.world_size == 1:
        return states
    start, stop, _ = sp.shard_range(T)
    begin = cu_seqlens[:-1]
    here = (begin >= start) & ((begin < stop) | sp.is_last)
    return states.masked_fill(~here.view(-1, *[1] * (states.dim() - 1)), 0.0)


def without_tail(x: torch.Tensor, cu_seqlens: torch.Tensor | None, sp: Ranks) -> torch.Tensor:
    """x [B, T, ...] with zeros behind the last document, and with a gradient of zeros there."""
    if cu_seqlens is None:
        return x
    return _where(_places(x.shape[1], x.device, None, sp)[0] < cu_seqlens[-1], x)


def running_sum(
    x: torch.Tensor, cu_seqlens: torch.Tensor | None, sp: Ranks, initial: torch.Tensor | None = None,
    wrapped: bool = False, unit: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """x [B, T, H, ...] summed up from the start of the sequence or document to each token, itself included.

    The result is float32, or float64 for float64; sums are made in float64. What is not finite stays in its document.

    Args:
        initial: [N, H, ...], what sums begin with.
        wrapped: take whole numbers off, which leaves -1/2..1/2. That is done before sums are rounded to float32, so
            that those of long sequences are as precise as those of short ones.
        unit: what sums are counted in. x is divided by it in float64: one rounding of the unit would add up over all
            tokens.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    T = x.shape[1]
    total, first = x.to(torch.float64) / unit, None if initial is None else initial.to(torch.float64)
    if cu_seqlens is None:
        total = _sums(total)
        total = total if first is None else total + first.unsqueeze(1)
    else:
        place, begin, start = _places(T, x.device, cu_seqlens, sp)
        total = _sums_of_documents(total, place - begin)
        total = total if first is None else total + _initial(first, cu_seqlens, place, begin >= start)
    if wrapped:
        total = _fraction(total)
    total = total.to(wide)
    mine = total[:, -1] if T else total.sum(1)
    arrived = arriving(mine, T, cu_seqlens, sp, initial)
    return total if arrived is None else arrived.onto(total, arrived.tokens, wrapped)


class Arrived(NamedTuple):
    """What sums over the ranks before add to those of this one.

    Attributes:
        sum: [B, 1, H, ...].
        tokens: which tokens go on from it, [T]; None for all.
        documents: which documents do, [N]; None for all.
    """

    sum: torch.Tensor
    tokens: torch.Tensor | None
    documents: torch.Tensor | None

    def onto(self, x: torch.Tensor, going_on: torch.Tensor | None, wrapped: bool) -> torch.Tensor:
        """x [B, *, H, ...] with the sum, where ``going_on`` [*] holds; ``wrapped`` as in `running_sum`."""
        found = x + (self.sum if going_on is None else _where(going_on, self.sum.expand_as(x)))
        return _fraction(found) if wrapped else found


def arriving(
    mine: torch.Tensor, T: int, cu_seqlens: torch.Tensor | None, sp: Ranks, initial: torch.Tensor | None = None
) -> Arrived | None:
    """What the ranks before add to running sums of this rank's T tokens; None on one rank.

    Args:
        mine: [B, H, ...], the sum at this rank's last token, 0 if it has none.
        initial: as in `running_sum`.
    """
    if sp is None or sp.world_size == 1:
        return None
    if initial is not None and cu_seqlens is None and not T:
        mine = initial.to(mine.dtype)
    if cu_seqlens is None:
        return Arrived(_arrived(mine, None, sp, "a running sum"), None, None)
    _, begin, start = _places(T, mine.device, cu_seqlens, sp)
    starts = cu_seqlens[:-1]
    cut = ((starts >= start) & (starts < start + T)).any().to(torch.int32).expand(mine.shape[0])
    return Arrived(_arrived(mine, cut, sp, "a running sum"), begin < start, starts < start)


def begins(T: int, cu_seqlens: torch.Tensor, sp: Ranks) -> torch.Tensor:
    """The document that begins with each token of this rank, or -1: int32 [T]. The first token behind the last document
    has N."""
    place, begin, _ = _places(T, cu_seqlens.device, cu_seqlens, sp)
    document = torch.searchsorted(cu_seqlens, place, right=True) - 1
    return torch.where(place == begin, document, -1).to(torch.int32)


def _initial(
    initial: torch.Tensor, cu_seqlens: torch.Tensor, place: torch.Tensor, here: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """``initial`` [N, H, ...] of each token's document where ``here`` [T] holds, else 0."""
    document = torch.searchsorted(cu_seqlens, place, right=True) - 1
    known = document < initial.shape[0]
    return _where(here & known, initial.index_select(0, document.clamp(max=initial.shape[0] - 1)).unsqueeze(0))


def _fraction(x: torch.Tensor) -> torch.Tensor:
    return x - x.detach().round()


def previous(
    x: torch.Tensor, cu_seqlens: torch.Tensor | None, sp: Ranks, initial: torch.Tensor | None = None
) -> torch.Tensor:
    """x [B, T, H, ...] of the token before; ``initial`` [N, H, ...] or 0 at the start of the sequence or document."""
    T = x.shape[1]
    if sp is None or sp.world_size == 1:
        first = x.new_zeros(x.shape[0], 1, *x.shape[2:])
    else:
        mine = x[:, -1] if T else x.sum(1)  # zeros, with a gradient
        if initial is not None and cu_seqlens is None and not T:
            mine = initial
        first = _arrived(mine, _any_token(x, T), sp, "the token before")
    if cu_seqlens is None:
        return torch.cat([first if initial is None else first + initial.unsqueeze(1), x], 1)[:, :T]
    place, begin, _ = _places(T, x.device, cu_seqlens, sp)
    before = _where(place > begin, torch.cat([first, x], 1)[:, :T])
    return before if initial is None else before + _initial(initial, cu_seqlens, place, place == begin)


@ranks_call
def tokens_before(x: torch.Tensor, width: int, sp: SequenceParallel) -> torch.Tensor:
    """The ``width`` tokens [B, width, ...] before this rank's x [B, T, ...], 0 before the sequence. Differentiable.

    The kernel of `flexsp.scan.propagate` sends them in float32 if the group has it (`sends`) and every shard is known
    to have at least ``width`` tokens (`SequenceParallel.set_lengths`). One token needs no lengths: a rank without
    tokens passes on what it gets. In all other cases `halo_exchange` sends them, which needs no lengths.

    Raises:
        ValueError: x has another number of tokens than `set_lengths` says.
    """
    T, lengths = x.shape[1], sp.lengths
    sp.check_shard(T)
    enough = width == 1 or (width > 1 and lengths is not None and min(lengths) >= width)
    # The kernel adds what arrives to zeros, which makes 0 of -0.
    if sp.segment or not (enough and x.dtype in _IN_FLOAT32 and sends(sp, x.device, torch.float32)):
        return halo_exchange(x, width, sp)
    mine = (x[:, T - width :] if T else x.sum(1, keepdim=True)).float()
    return _arrived(mine, _any_token(x, T), sp, f"the {width} tokens before").squeeze(1).to(x.dtype)


def following(x: torch.Tensor, cu_seqlens: torch.Tensor | None, sp: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
    """(x of the next token [B, T, H, ...], x of first tokens [N, H, ...]) for x [B, T, H, ...].

    The next token of the last one of a sequence or document is 0. The first token of a document without tokens, or of
    one that starts on another rank, is 0 too.
    """
    T = x.shape[1]
    head, rest = x.split([1, T - 1], 1) if T else (x.sum(1, keepdim=True), x)  # zeros, with a gradient
    if sp is None or sp.world_size == 1:
        end = torch.zeros_like(head)
    else:
        end = _arrived(head.squeeze(1), _any_token(x, T), sp, "the token behind", reverse=True)
        head = add_backward_dependency(head, end) if T else head
    first, behind = head if T else end, torch.cat([rest, end], 1)
    behind = behind if T else behind[:, :0]
    if cu_seqlens is None:
        return behind, first.squeeze(1)
    place, _, start = _places(T, x.device, cu_seqlens, sp)
    stop = cu_seqlens[torch.searchsorted(cu_seqlens, place, right=True).clamp(max=len(cu_seqlens) - 1)]
    begin = cu_seqlens[:-1] - start
    here = (begin >= 0) & (begin < T) & (cu_seqlens[1:] > cu_seqlens[:-1])
    of_documents = torch.cat([first, behind], 1)[0].index_select(0, begin.clamp(0, max(T - 1, 0)))
    return _where(place + 1 < stop, behind), _where(here, of_documents.unsqueeze(0))[0]


def ended(cu_seqlens: torch.Tensor | None, sp: Ranks, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The last token of each x [B, T, H, ...]: [B, 1 or 0, H, ...] of this rank, or [1, N, H, ...] of documents.

    A document that ends on another rank has some token of this rank instead, which the caller leaves out.
    """
    if cu_seqlens is None:
        return [x[:, -1:] for x in tensors]
    T = tensors[0].shape[1]
    start = 0 if sp is None else sp.shard_range(T)[0]
    at = (cu_seqlens[1:] - 1 - start).clamp(0, max(T - 1, 0))
    filled = tensors if T else [x.sum(1, keepdim=True) for x in tensors]  # zeros, with a gradient
    return [x.index_select(1, at) for x in filled]


def last(
    x: torch.Tensor, initial: torch.Tensor | None, cu_seqlens: torch.Tensor | None, sp: Ranks
) -> torch.Tensor:  # fmt: skip
    """x [B, T, H, ...] of last tokens, [N, H, ...]; ``initial`` [N, H, ...] of sequences without tokens, or 0."""
    return last_of_ended(ended(cu_seqlens, sp, x)[0], x.shape[1], initial, cu_seqlens, sp)


def last_of_ended(
    x: torch.Tensor, T: int, initial: torch.Tensor | None, cu_seqlens: torch.Tensor | None, sp: Ranks
) -> torch.Tensor:  # fmt: skip
    """What `last` gives, of what `ended` gives of this rank's T tokens."""
    if cu_seqlens is None:
        mine = x[:, -1] if T else x.sum(1) if initial is None else initial
        if sp is None or sp.world_size == 1:
            return mine
        arrived = _arrived(mine, _any_token(x, T), sp, "the last token")
        needed = torch.full((1,), T == 0, device=x.device)  # the backward pass answers on every rank
        return mine + _where(needed, arrived).squeeze(1)
    start, stop, _ = (0, T, T) if sp is None else sp.shard_range(T)
    begin, end = cu_seqlens[:-1], cu_seqlens[1:]
    at = end - 1 - start
    found = _where((begin < end) & (at >= 0) & (at < T), x)
    if initial is not None:
        here = (begin == end) & (begin >= start)
        if sp is not None and not sp.is_last:
            here = here & (begin < stop)
        found = found + _where(here, initial.unsqueeze(0))
    return found[0]


def _arrived(
    mine: torch.Tensor, cut: torch.Tensor | None, sp: SequenceParallel, what: str, reverse: bool = False
) -> torch.Tensor:  # fmt: skip
    """[B, 1, H, ...]: the sum of `mine` [B, H, ...] over the ranks before (in ``reverse`` behind), back to the last one
    with a cut."""
    states = mine.reshape(*mine.shape[:2], 1, mine.shape[2:].numel())
    transition = Transition.of(states, None, cut)
    return exchange(states, transition, sp, what, reverse=reverse).view(mine.shape).unsqueeze(1)


def _any_token(x: torch.Tensor, T: int) -> torch.Tensor:
    """[B], of x [B, ...]: the cut of a rank with T tokens whose neighbours need but one of them, if there is one."""
    return torch.full((x.shape[0],), int(T > 0), dtype=torch.int32, device=x.device)


def _sums(x: torch.Tensor) -> torch.Tensor:
    """Running sums of x [B, T, ...], by blocks of tokens: along an axis that is not the last one torch's cumsum has one
    thread add up all of a column."""
    T = x.shape[1]
    if T <= _BLOCK:
        return x.cumsum(1)
    n = -(-T // _BLOCK)
    rest = x.new_zeros(x.shape[0], n * _BLOCK - T, *x.shape[2:])
    inside = torch.cat([x, rest], 1).unflatten(1, (n, _BLOCK)).cumsum(2)
    ends = _sums(inside[:, :-1, -1])
    before = torch.cat([torch.zeros_like(inside[:, :1, -1]), ends], 1)
    return (inside + before.unsqueeze(2)).flatten(1, 2)[:, :T]


def _sums_of_documents(x: torch.Tensor, since: torch.Tensor) -> torch.Tensor:
    """Running sums of x [B, T, ...] that never meet a document's neighbours; ``since`` [T] precede each in its own."""
    step = 1
    while step < x.shape[1]:
        before = torch.cat([torch.zeros_like(x[:, :step]), x[:, :-step]], 1)
        x = x + _where(since >= step, before)
        step *= 2
    return x


def _where(keep: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x [B, T, ...] where ``keep`` [T] holds, else 0, whatever stands there."""
    return x.masked_fill(~keep.view(1, -1, *[1] * (x.dim() - 2)), 0.0)
