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
WORD   | this rank's signature
NUMBER | number of the call on this rank, 0 if it is not known
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexsp.comm.ranks import Ranks
from flexsp.comm.signature import MISMATCH_BIT, POISON, RANK_BITS, described
from flexsp.exceptions import PeerMismatch, PeerTimeout

__all__ = ["ErrorRecord", "note_stamps", "raise_pending"]

KIND, PEER, TILE, WANTED, SEEN, REVERSE, WORD, NUMBER = range(8)
FIELDS = 16
TIMEOUT_READY, TIMEOUT_CREDIT, MISMATCH, POISON_TIMEOUT, POISON_MISMATCH = range(1, 6)


class ErrorRecord:
    """The record of one SequenceParallel. Once written it stays: the ranks no longer agree on what was sent."""

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):  # later calls write to it, in and outside of that mode
            self.tensor = torch.zeros(FIELDS, dtype=torch.int64, pin_memory=torch.device(device).type == "cuda")
        self._fields = self.tensor.numpy()

    def error(self, rank: int) -> PeerTimeout | PeerMismatch | None:
        """The pending failure of group rank ``rank`` as an exception, or None."""
        if int(self._fields[KIND]) == 0:
            return None
        kind, peer, tile, wanted, seen, reverse, word, number = self._fields[:8].tolist()
        if kind == MISMATCH and seen & (POISON | MISMATCH_BIT) == POISON | MISMATCH_BIT:  # noted as it came
            low = (1 << RANK_BITS) - 1
            kind, peer = POISON_MISMATCH, seen & low
            peer = seen >> RANK_BITS & low if peer == rank else peer
        error = _exception(rank, kind, peer, tile, wanted, seen, "backward" if reverse else "forward")
        error.heard = kind in (POISON_TIMEOUT, POISON_MISMATCH)
        error.number = number
        error.word = word or (wanted if isinstance(error, PeerMismatch) else 0)
        return error

    def row(self) -> dict[str, int] | None:
        """The record for a file; None where there is no failure."""
        names = ("kind", "peer", "tile", "wanted", "seen", "reverse", "word", "number")
        return dict(zip(names, self._fields[:8].tolist(), strict=True)) if int(self._fields[KIND]) else None


def _exception(
    rank: int, kind: int, peer: int, tile: int, wanted: int, seen: int, direction: str
) -> PeerTimeout | PeerMismatch:
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
    return PeerTimeout(rank, peer, tile, wanted, seen, f"the {direction} scan", detail)


def note_stamps(
    sp: Ranks, bad: torch.Tensor, seen: torch.Tensor, peers: Sequence[int], word: int, reverse: bool
) -> None:
    """Puts the first of the stamps ``seen`` [n] of ``peers`` that is not ``word`` into the record of the group, where
    ``bad`` [] says that there is one. In stream order, without a synchronisation; the host makes sense of it."""
    key = ("stamps", tuple(peers), reverse)
    if key not in sp.channels:
        rows = [[MISMATCH, peer, -1, 0, 0, int(reverse)] for peer in peers]
        with torch.inference_mode(False):
            sp.channels[key] = torch.tensor(rows, dtype=torch.int64, device=seen.device)
            sp.channels.setdefault("stamps", torch.zeros(6, dtype=torch.int64, device=seen.device))
    row, kept = sp.channels[key][:1], sp.channels["stamps"]
    if len(peers) > 1:
        at = seen.ne(word).to(torch.int8).argmax().view(1)
        row, seen = sp.channels[key].index_select(0, at), seen.index_select(0, at)
    row = torch.cat([row[0, :WANTED], torch.full_like(seen, word), seen, row[0, SEEN + 1 :]])
    torch.where(bad & kept[0].eq(0), row, kept, out=kept)
    sp.records.tensor[:6].copy_(kept, non_blocking=True)


def raise_pending(sp: Ranks) -> None:
    """Raises PeerTimeout or PeerMismatch if a kernel of this group has failed. Does not synchronise with the device."""
    if sp.records is not None and sp.records.error(sp.rank) is not None:
        sp.check()
