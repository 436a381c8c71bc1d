"""How states travel between ranks: one object a transport, found by its name.

Most send the tiles of a state inside the kernel; with `process_group` torch.distributed sends whole states between
kernels. docs/add-a-transport.md adds one. This file imports no Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from flexsp.comm.heap import SymmetricHeap
from flexsp.comm.process_group import compare_text
from flexsp.comm.ranks import Ranks
from flexsp.exceptions import NotAvailable

__all__ = [
    "PROCESS_GROUP", "Transport", "create_heap", "in_kernel", "open_further", "register_transport", "transport_of",
    "transports",
]  # fmt: skip

PROCESS_GROUP = "process_group"
_HEAPS = ("auto", "posix", "nvshmem", "torch_symm")


def create_heap(
    kind: str,
    nbytes: int,
    *,
    rank: int,
    global_ranks: Sequence[int],
    cpu_group: dist.ProcessGroup,
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
    if kind not in _HEAPS:
        raise ValueError(f"kind: expected one of {', '.join(_HEAPS)}, got {kind!r}")
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


class Transport:
    """A transport, by default one whose sends stand in the kernel of `flexsp.scan.propagate`.

    Every rank has an arena that its neighbours write to. The kernel waits for the flag of a tile in its own arena,
    stores the next rank's tile with `push`, which raises that rank's flag, and says with `signal` that a place in the
    arena is free again.

    Attributes:
        name: what `flexsp.init_sequence_parallel(transport=...)` takes.
        device: the type of device whose memory it moves, "cuda", "cpu", or "any" for both.
        sends_in_kernel: whether the kernel sends. If not, torch.distributed does between kernels, and `open_heap` is
            all of this class that is called.
        stages: whether `push` sends from memory of the arena, where it puts the tile first.
        of_world: whether `open_heap` is collective over the default process group, as NVSHMEM's heaps are. A group
            that is a part of it then cannot set aside more memory in a call, which other groups may not make.
    """

    name: str
    device: str
    sends_in_kernel: bool = True
    stages: bool = False
    of_world: bool = True

    def open_heap(
        self, nbytes: int, *, rank: int, global_ranks: Sequence[int], cpu_group: dist.ProcessGroup, device: torch.device
    ) -> SymmetricHeap | None:
        """The arenas, of as many bytes on every rank; None of a transport that needs none. Collective.

        Raises:
            NotAvailable: there is no such memory here.
        """
        raise NotImplementedError

    def problem(self, heap: SymmetricHeap, world_size: int) -> str:
        """Why the ranks cannot use the heap, as seen from this one; empty if they can."""
        return ""

    def arena(self, heap: SymmetricHeap, rank: int) -> torch.Tensor:
        """The memory whose addresses mean a rank's arena in `push` and `signal`, uint8."""
        return heap.peer(rank)

    def address(self, heap: SymmetricHeap, rank: int) -> int:
        """What `push` and `signal` get as ``pe``."""
        return 0

    def functions(self) -> tuple[Any, Any]:
        """(push, signal): Triton functions with the arguments of ``push_store`` and ``signal_store`` of
        flexsp/comm/device.py, and with the memory order that stands there."""
        from flexsp.comm import device

        return device.push_store, device.signal_store

    def options(self) -> dict[str, Any]:
        """Launch options that the kernel needs for these functions."""
        return {}

    def prepare(self, heap: SymmetricHeap) -> Callable[[Any], None] | None:
        """What is called with the compiled kernel, loaded, before its first launch."""
        return None


class _ProcessGroup(Transport):
    """Messages of torch.distributed: any devices on any hosts, and without Triton."""

    name, device, sends_in_kernel = PROCESS_GROUP, "any", False

    def open_heap(self, nbytes: int, **where: Any) -> None:
        return None


class _Peer(Transport):
    """Stores to the neighbour's mapped memory: GPUs of one host."""

    name, device, heap = "peer", "cuda", "auto"

    def open_heap(self, nbytes: int, **where: Any) -> SymmetricHeap:
        return create_heap(self.heap, nbytes, **where)

    def problem(self, heap: SymmetricHeap, world_size: int) -> str:
        near = all(heap.reaches(rank) for rank in range(world_size))
        return "" if near else "not every rank's memory can be mapped here: use transport='put'"


class _Posix(_Peer):
    """The same kernel under Triton's interpreter: CPU processes with shared memory."""

    name, device, heap, of_world = "posix", "cpu", "posix", False


class _Put(Transport):
    """NVSHMEM's put with signal: GPUs of several hosts. Addresses are those of this rank's own arena."""

    name, device, stages = "put", "cuda", True

    def open_heap(self, nbytes: int, **where: Any) -> SymmetricHeap:
        return create_heap("nvshmem", nbytes, **where)

    def problem(self, heap: SymmetricHeap, world_size: int) -> str:
        from flexsp.comm.nvshmem import find_device_library

        try:
            find_device_library()
        except NotAvailable as error:
            return str(error)
        return ""

    def arena(self, heap: SymmetricHeap, rank: int) -> torch.Tensor:
        return heap.local

    def address(self, heap: SymmetricHeap, rank: int) -> int:
        return heap.pe(rank)

    def functions(self) -> tuple[Any, Any]:
        from flexsp.comm import device

        return device.push_put, device.signal_put

    def options(self) -> dict[str, Any]:
        from flexsp.comm import device

        return device.nvshmem_options()

    def prepare(self, heap: SymmetricHeap) -> Callable[[Any], None] | None:
        return lambda compiled: heap.init_module(compiled.module)


_TRANSPORTS: dict[str, Transport] = {x.name: x for x in (_ProcessGroup(), _Peer(), _Put(), _Posix())}


def register_transport(transport: Transport) -> None:
    """Makes a transport known by its name, on this rank; every rank does so before `flexsp.init_sequence_parallel`.

    Raises:
        ValueError: not a Transport, a name that is taken, or a ``device`` other than "cuda", "cpu" and "any".
    """
    if not isinstance(transport, Transport):
        raise ValueError(f"transport: expected an object of a class made from Transport, got {transport!r}")
    if transport.name in (*transports(), "auto"):
        raise ValueError(f"name: expected one that no transport has, got {transport.name!r}")
    if transport.device not in ("cuda", "cpu", "any"):
        raise ValueError(f"device: expected 'cuda', 'cpu' or 'any', got {transport.device!r}")
    _TRANSPORTS[transport.name] = transport


def transports() -> tuple[str, ...]:
    """The names of all."""
    return tuple(_TRANSPORTS)


def transport_of(name: str) -> Transport:
    """The transport of a name."""
    found = _TRANSPORTS.get(name)
    if found is None:
        raise NotAvailable(f"transport {name!r} is not known on this rank: register_transport makes one known")
    return found


def open_further(sp: Ranks, transport: Transport, nbytes: int) -> SymmetricHeap | None:
    """A heap beside those that the group has. Collective over the group, and the host waits for the other ranks."""
    compare_text(sp, f"call {sp.calls + 1}: a symmetric heap of {nbytes} bytes", "setting aside symmetric memory")
    assert sp.cpu_group is not None
    return transport.open_heap(
        nbytes, rank=sp.rank, global_ranks=sp.global_ranks, cpu_group=sp.cpu_group, device=sp.device
    )


def in_kernel(sp: Ranks) -> bool:
    """Whether the kernel of `flexsp.scan.propagate` itself sends the group's states."""
    return sp.schedule == "chain" and transport_of(sp.transport).sends_in_kernel
