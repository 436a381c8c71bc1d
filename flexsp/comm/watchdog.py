"""What a kernel that gave up on a neighbour leaves behind, and the exception the host makes of it.

The record is int64[16] in mapped host memory (pinned on CUDA; the kernel gets its address), so that the host reads it
without a synchronisation. Kernels write the fields first and ``KIND`` last; the first block to fail wins.

field  | content
------ | ---------------------------------------------------------------------------------------------------
KIND   | 0 nothing, else one of TIMEOUT_READY, TIMEOUT_CREDIT, MISMATCH, POISON_TIMEOUT, POISON_MISMATCH
PEER   | group rank that the failure is about (with a poison: the rank that the sender of it was missing)
TILE   | tile index
WANTED | epoch expected (signature for mismatches)
SEEN   | epoch seen (signature for mismatches)
REVERSE| 1 if the call ran right to left
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flexsp.exceptions import PeerMismatch, PeerTimeout

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel

__all__ = ["ErrorRecord", "raise_pending"]

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
        if kind == MISMATCH:
            return PeerMismatch(
                rank, peer, f"a state of signature {wanted:#x} in {direction}, tile {tile}", f"signature {seen:#x}"
            )
        if kind == POISON_MISMATCH:
            return PeerMismatch(
                rank, peer, f"{direction}, tile {tile}", "a state of another shape, as another rank found"
            )
        detail = {
            TIMEOUT_READY: "its state did not arrive",
            TIMEOUT_CREDIT: "it did not take the state sent two calls before",
            POISON_TIMEOUT: "reported by a rank between",
        }[kind]
        return PeerTimeout(rank, peer, tile, wanted, seen, direction, detail)


def raise_pending(sp: SequenceParallel) -> None:
    """Raises PeerTimeout or PeerMismatch if a kernel of this group has failed. Does not synchronise with the device."""
    if sp.records is not None:
        error = sp.records.error(sp.rank)
        if error is not None:
            raise error
