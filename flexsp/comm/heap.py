"""Symmetric memory: one arena a rank, of the same size everywhere, that the neighbours' kernels can write to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from flexsp.exceptions import NotAvailable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["SymmetricHeap", "create_heap", "default_heap_bytes"]

_KINDS = ("auto", "posix", "nvshmem", "torch_symm")


def default_heap_bytes() -> int:
    """Arena size in bytes: FLEXSP_HEAP_MIB (default 256) MiB."""
    text = os.environ.get("FLEXSP_HEAP_MIB", "256")
    try:
        mib = int(text)
    except ValueError:
        mib = 0
    if mib <= 0:
        raise ValueError(f"FLEXSP_HEAP_MIB: expected a positive number of MiB, got {text!r}")
    return mib << 20


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


def create_heap(
    kind: str,
    nbytes: int,
    *,
    rank: int,
    global_ranks: Sequence[int],
    cpu_group: ProcessGroup,
    device: torch.device,
) -> SymmetricHeap:
    """Allocates the arena of every rank of a group (collective).

    Args:
        kind: "posix" (CPU processes of one host, shared memory), "nvshmem" (nvshmem4py), "torch_symm" (PyTorch's
            symmetric memory with its NVSHMEM backend), or "auto": posix on CPU, else nvshmem, else torch_symm.
        nbytes: bytes a rank. NVSHMEM kinds are collective over the default process group: every rank of the world
            calls with the same ``nbytes`` in the same order.
        rank: this rank in the group.
        global_ranks: the group's ranks in the default process group, in group order.
        cpu_group: a gloo group of these ranks.
        device: where this rank computes.

    Raises:
        NotAvailable: the machine has no such memory; the message says what is missing.
    """
    if kind not in _KINDS:
        raise ValueError(f"kind: expected one of {', '.join(_KINDS)}, got {kind!r}")
    if nbytes <= 0:
        raise ValueError(f"nbytes: expected a positive number of bytes, got {nbytes}")
    device = torch.device(device)
    nbytes = -(-nbytes // 4096) * 4096
    if kind == "posix" or (kind == "auto" and device.type == "cpu"):
        from flexsp.comm.posix import PosixHeap

        if device.type != "cpu":
            raise NotAvailable(f"the posix heap is CPU memory, and this rank computes on {device}")
        return PosixHeap.create(nbytes, rank=rank, world_size=len(global_ranks), cpu_group=cpu_group)
    if device.type != "cuda":
        raise NotAvailable(f"a heap of kind {kind!r} is GPU memory, and this rank computes on {device}")
    from flexsp.comm.nvshmem import create_nvshmem_heap

    return create_nvshmem_heap(kind, nbytes, global_ranks=global_ranks, cpu_group=cpu_group, device=device)
