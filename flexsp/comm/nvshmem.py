"""The symmetric heap on GPUs: NVSHMEM, through nvshmem4py or through PyTorch's symmetric memory.

NVSHMEM's world is the default process group, so everything here is collective over it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flexsp.comm.heap import SymmetricHeap
from flexsp.exceptions import NotAvailable

__all__ = ["NvshmemHeap", "TorchSymmHeap", "create_nvshmem_heap", "find_device_library", "why_not"]


def why_not(kind: str) -> str | None:
    """None if heaps of this kind ("nvshmem" or "torch_symm") can be made here, else the reason."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if kind == "nvshmem":
        for module in ("nvshmem", "cuda.core"):
            if not _has(module):
                return f"the Python package {module} is not installed (pip install nvshmem4py-cu12 or -cu13)"
        return None
    try:
        from torch.distributed import _symmetric_memory as symm

        available = symm.is_nvshmem_available()
    except Exception as error:  # private API: any change of it means "not here"
        return f"torch.distributed._symmetric_memory: {error}"
    return None if available else "this PyTorch has no NVSHMEM backend (libtorch_nvshmem.so)"


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@functools.cache
def find_device_library() -> str:
    """Path of libnvshmem_device.bc, the bitcode that Triton links into kernels of the ``put`` transport.

    Looks in NVSHMEM_LIB_DIR, NVSHMEM_HOME/lib and the nvidia-nvshmem wheel; NotAvailable if there is none.
    """
    folders = []
    if os.environ.get("NVSHMEM_LIB_DIR"):
        folders.append(Path(os.environ["NVSHMEM_LIB_DIR"]))
    if os.environ.get("NVSHMEM_HOME"):
        folders.append(Path(os.environ["NVSHMEM_HOME"]) / "lib")
    spec = importlib.util.find_spec("nvidia") if _has("nvidia") else None
    if spec is not None:
        folders += [Path(root) / "nvshmem" / "lib" for root in spec.submodule_search_locations or []]
    for folder in folders:
        if (folder / "libnvshmem_device.bc").is_file():
            return str(folder / "libnvshmem_device.bc")
    raise NotAvailable(
        "transport 'put' needs libnvshmem_device.bc: pip install nvidia-nvshmem-cu12 or -cu13, or set NVSHMEM_LIB_DIR "
        f"(looked in {', '.join(map(str, folders)) or 'no folder'})"
    )


def _set_environment() -> None:
    """Defaults NVSHMEM reads when it starts; whatever the user has set wins."""
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    local = os.environ.get("LOCAL_WORLD_SIZE")
    if local is not None and int(local) == dist.get_world_size():
        os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")


def create_nvshmem_heap(
    kind: str, nbytes: int, *, global_ranks: Sequence[int], cpu_group: dist.ProcessGroup, device: torch.device
) -> SymmetricHeap:
    """A zeroed heap of kind "nvshmem", "torch_symm" or "auto" (the first that works here on every rank)."""
    kinds = ("nvshmem", "torch_symm") if kind == "auto" else (kind,)
    makers: dict[str, Callable[..., SymmetricHeap]] = {"nvshmem": NvshmemHeap, "torch_symm": TorchSymmHeap}
    reasons = []
    for candidate in kinds:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, why_not(candidate))
        refused = sorted({str(reason) for reason in found if reason is not None})
        if refused:
            reasons.append(f"{candidate}: {'; '.join(refused)}")
            continue
        _set_environment()
        with torch.cuda.device(device):
            heap = makers[candidate](nbytes, global_ranks, device)
            heap.local.zero_()
            torch.cuda.synchronize(device)
        dist.barrier(group=cpu_group)  # nobody writes into an arena that is not yet zeroed
        return heap
    raise NotAvailable("no symmetric GPU memory here. " + ". ".join(reasons))


class NvshmemHeap(SymmetricHeap):
    """A heap from nvshmem4py (``nvshmem.core``). An NVSHMEM that is already initialised is reused."""

    kind = "nvshmem"

    def __init__(self, nbytes: int, global_ranks: Sequence[int], device: torch.device) -> None:
        import nvshmem.core

        _init_nvshmem4py(device)
        pes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pes, int(nvshmem.core.my_pe()))
        self._pes = [pes[r] for r in global_ranks]
        local = nvshmem.core.tensor((nbytes,), dtype=torch.uint8, except_on_del=False)
        self._allocation: torch.Tensor | None = local
        super().__init__(local, [_peer_or_none(local, pe) for pe in self._pes])

    def pe(self, group_rank: int) -> int:
        return self._pes[group_rank]

    def init_module(self, module: int) -> None:
        from nvshmem.bindings import nvshmem as bindings

        bindings.cumodule_init(module)

    def close(self) -> None:
        import nvshmem.core

        allocation, self._allocation = self._allocation, None
        super().close()
        if allocation is not None:
            nvshmem.core.free_tensor(allocation)  # the peer views go with it


def _init_nvshmem4py(device: torch.device) -> None:
    """Starts NVSHMEM with a unique id broadcast over the default group, unless nvshmem4py has started it already."""
    import nvshmem.core
    from cuda.core import Device
    from nvshmem.core._internal_tracking import InternalInitStatus, _is_initialized

    if _is_initialized["status"] == InternalInitStatus.INITIALIZED:
        return
    card = Device(device.index if device.index is not None else torch.cuda.current_device())
    card.set_current()
    uid = nvshmem.core.get_unique_id(empty=dist.get_rank() != 0)
    raw = uid._data.view("uint8")
    message = [bytes(raw.tobytes())]
    dist.broadcast_object_list(message, src=0)
    raw[...] = torch.frombuffer(bytearray(message[0]), dtype=torch.uint8).numpy().reshape(raw.shape)
    nvshmem.core.init(
        device=card, uid=uid, rank=dist.get_rank(), nranks=dist.get_world_size(), initializer_method="uid"
    )


def _peer_or_none(local: torch.Tensor, pe: int) -> torch.Tensor | None:
    """The peer's arena, or None where nvshmem_ptr says that it cannot be reached by load and store."""
    import nvshmem.core
    from nvshmem.core.nvshmem_types import NvshmemError, NvshmemInvalid

    if pe == int(nvshmem.core.my_pe()):
        return local
    try:
        return nvshmem.core.get_peer_tensor(local, pe)
    except (NvshmemError, NvshmemInvalid):
        return None


class TorchSymmHeap(SymmetricHeap):
    """A heap from ``torch.distributed._symmetric_memory`` with its NVSHMEM backend."""

    kind = "torch_symm"

    def __init__(self, nbytes: int, global_ranks: Sequence[int], device: torch.device) -> None:
        from torch.distributed import _symmetric_memory as symm

        if symm.get_backend(device) != "NVSHMEM":
            symm.set_backend("NVSHMEM")
        world = dist.group.WORLD
        assert world is not None
        local = symm.empty(nbytes, dtype=torch.uint8, device=device)
        self._handle = symm.rendezvous(local, world)
        self._pes = list(global_ranks)
        super().__init__(local, [self._view(local, r, nbytes) for r in global_ranks])

    def _view(self, local: torch.Tensor, global_rank: int, nbytes: int) -> torch.Tensor | None:
        if global_rank == dist.get_rank():
            return local
        if int(self._handle.buffer_ptrs[global_rank]) == 0:
            return None
        return self._handle.get_buffer(global_rank, (nbytes,), torch.uint8)

    def pe(self, group_rank: int) -> int:
        return self._pes[group_rank]

    def init_module(self, module: int) -> None:
        from torch._C._distributed_c10d import _nvshmemx_cumodule_init

        _nvshmemx_cumodule_init(module)
