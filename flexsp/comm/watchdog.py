"""What the device leaves behind where it gave up on a neighbour, and the exception the host makes of it.

The record is int64[16] in mapped host memory (pinned on CUDA; the kernel gets its address), so that the host reads it
without a synchronisation. Kernels write the fields first and ``KIND`` last; the first block to fail wins.

field  | content
------ | ---------------------------------------------------------------------------------------------------
KIND   | 0 nothing, else one of TIMEOUT_READY, TIMEOUT_CREDIT, MISMATCH, POISON_TIMEOUT, POISON_MISMATCH
PEER   | group rank that the failure is about (with a poison: the rank that it is about or, if this one, its reporter)
TILE   | tile index, -1 where there are none
WANTED | epoch expected (for mismatches this rank's signature)
SEEN   | epoch seen (the signature that came for MISMATCH)
REVERSE| 1 if the call ran right to left
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from flexsp.comm.signature import MISMATCH_BIT, POISON, RANK_BITS, described
from flexsp.exceptions import PeerMismatch, PeerTimeout

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel

__all__ = ["ErrorRecord", "note_stamps", "raise_pending"]

KIND, PEER, TILE, WANTED, SEEN, REVERSE = range(6)
FIELDS = 16
TIMEOUT_READY, TIMEOUT_CREDIT, MISMATCH, POISON_TIMEOUT, POISON_MISMATCH = range(1, 6)


class ErrorRecord:
    """The record of one SequenceParallel. Once written it stays: the ranks no longer agree on what was sent."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros(FIELDS, dtype=torch.int64, pin_memory=torch.device(device).type == "cuda")
        self._fields = self.tensor.numpy()

    def error(self, rank: int) -> PeerTimeout | PeerMismatch | None:
        """The pending failure of group rank ``rank`` as an exception, or None."""
        kind = int(self._fields[KIND])
        if kind == 0:
            return None
        _, peer, tile, wanted, seen, reverse = self._fields[:6].tolist()
        direction = "the backward scan" if reverse else "the forward scan"
        at = f", tile {tile}" if tile >= 0 else ""
        if kind == MISMATCH:
            theirs = described(seen) if seen != wanted else "the same, but later than here"
            return PeerMismatch(rank, peer, described(wanted) + at, theirs)
        if kind == POISON_MISMATCH:
            return PeerMismatch(rank, peer, described(wanted) + at, "another exchange, as another rank found")
        detail = {
            TIMEOUT_READY: "its state did not arrive",
            TIMEOUT_CREDIT: "it did not take the state sent two calls before",
            POISON_TIMEOUT: "reported by a rank between",
        }[kind]
        return PeerTimeout(rank, peer, tile, wanted, seen, direction, detail)


def note_stamps(
    sp: SequenceParallel, seen: torch.Tensor, peers: Sequence[int], word: int, reverse: bool
) -> torch.Tensor:
    """Whether one of the stamps ``seen`` [n] of ``peers`` is not ``word``, as a tensor; the first such goes into the
    record of the group. In stream order, without a synchronisation."""
    key = ("peers of stamps", tuple(peers))
    if key not in sp.channels:
        sp.channels[key] = torch.tensor(list(peers), device=seen.device)
        sp.channels.setdefault("stamps", torch.zeros(6, dtype=torch.int64, device=seen.device))
    bad = seen.ne(word)
    at = bad.to(torch.int8).argmax().view(1)
    stamp, peer = seen.index_select(0, at), sp.channels[key].index_select(0, at)
    low = (1 << RANK_BITS) - 1
    about = stamp.bitwise_and(low)
    about = torch.where(about.eq(sp.rank), stamp.bitwise_right_shift(RANK_BITS).bitwise_and(low), about)
    poisoned = stamp.bitwise_and(POISON | MISMATCH_BIT).eq(POISON | MISMATCH_BIT)
    kind = torch.where(poisoned, POISON_MISMATCH, torch.full_like(stamp, MISMATCH))
    of_call = [torch.full_like(stamp, x) for x in (-1, word)]
    row = torch.cat([kind, torch.where(poisoned, about, peer), *of_call, stamp, torch.full_like(stamp, int(reverse))])
    kept = sp.channels["stamps"]
    kept.copy_(torch.where(bad.any() & kept[:1].eq(0), row, kept))
    sp.records.tensor[:6].copy_(kept, non_blocking=True)
    return bad.any()


def raise_pending(sp: SequenceParallel) -> None:
    """Raises PeerTimeout or PeerMismatch if a kernel of this group has failed. Does not synchronise with the device."""
    if sp.records is not None:
        error = sp.records.error(sp.rank)
        if error is not None:
            raise error
