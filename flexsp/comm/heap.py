"""Symmetric memory: one arena a rank, of the same size everywhere, that the neighbours' kernels can write to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexsp.exceptions import NotAvailable

__all__ = ["SymmetricHeap"]


class SymmetricHeap:
    """One arena of ``nbytes`` bytes on every rank of a group.

    ``local`` is this rank's arena as a uint8 tensor, zero when the heap is created; ``peer(r)`` is the same memory of
    group rank r, mapped here for loads and stores. Subclasses fill ``_peers``.
    """

    kind = "none"

    def __init__(self, local: torch.Tensor, peers: Sequence[torch.Tensor | None]) -> None:
        self.local = local
        self._peers = list(peers)

    @property
    def nbytes(self) -> int:
        return self.local.numel()

    def peer(self, group_rank: int) -> torch.Tensor:
        """uint8 view [nbytes] of that rank's arena; NotAvailable if it cannot be reached by load and store."""
        view = self._peers[group_rank]
        if view is None:
            raise NotAvailable(
                f"the arena of rank {group_rank} cannot be mapped here (another host?): use transport='put'"
            )
        return view

    def reaches(self, group_rank: int) -> bool:
        """Whether ``peer(group_rank)`` works, that is, whether plain stores reach that rank."""
        return self._peers[group_rank] is not None

    def pe(self, group_rank: int) -> int:
        """The NVSHMEM processing element of a group rank."""
        raise NotAvailable(f"a {self.kind} heap has no NVSHMEM processing elements")

    def init_module(self, module: int) -> None:
        """Prepares a loaded CUDA module whose kernels call NVSHMEM device functions."""
        raise NotAvailable(f"a {self.kind} heap has no NVSHMEM device functions")

    def close(self) -> None:
        """Gives the arena back. Collective for NVSHMEM heaps; harmless when called twice."""
        self.local = torch.empty(0, dtype=torch.uint8)
        self._peers = [None] * len(self._peers)
