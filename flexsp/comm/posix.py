"""The symmetric heap on CPU processes of one host: memory-mapped files in /dev/shm.

The files are unlinked as soon as every rank has mapped them, so nothing is left behind however a rank ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from flexsp.comm.heap import SymmetricHeap
from flexsp.exceptions import NotAvailable

__all__ = ["PosixHeap"]


def _folder() -> Path:
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def _create(path: Path, nbytes: int) -> mmap.mmap:
    """A new zero-filled file of nbytes, mapped. Pages are reserved on first touch, hence the check of free space."""
    free = os.statvfs(path.parent)
    if free.f_bavail * free.f_frsize < nbytes:
        raise NotAvailable(
            f"{path.parent} has {free.f_bavail * free.f_frsize >> 20} MiB free and the heap needs {nbytes >> 20} MiB: "
            "lower FLEXSP_HEAP_MIB or enlarge it"
        )
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(fd, nbytes)
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)


def _open(path: Path, nbytes: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)


class PosixHeap(SymmetricHeap):
    """A heap in POSIX shared memory; every rank maps every other rank's arena."""

    kind = "posix"

    @classmethod
    def create(cls, nbytes: int, *, rank: int, world_size: int, cpu_group: dist.ProcessGroup | None) -> PosixHeap:
        """Collective over ``cpu_group`` (not used, and may be None, when world_size is 1)."""
        if world_size == 1:
            token: list[str] = [secrets.token_hex(8)]
        else:
            token = [secrets.token_hex(8) if rank == 0 else ""]
            dist.broadcast_object_list(token, src=dist.get_global_rank(cpu_group, 0), group=cpu_group)  # type: ignore[arg-type]
        paths = [_folder() / f"flexsp-{token[0]}-{r}" for r in range(world_size)]
        try:
            maps = cls._map_all(paths, nbytes, rank, cpu_group)
        finally:
            # After a failure anywhere, whoever is left also removes the files of ranks that can no longer do it.
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
        views: list[torch.Tensor | None] = [torch.frombuffer(m, dtype=torch.uint8) for m in maps]
        local = views[rank]
        assert local is not None
        return cls(local, views)

    @staticmethod
    def _map_all(paths: list[Path], nbytes: int, rank: int, cpu_group: dist.ProcessGroup | None) -> list[mmap.mmap]:
        """Creates this rank's file and maps all; every rank raises if one of them failed."""
        maps: list[mmap.mmap] = []
        failure: str | None = None
        try:
            mine = _create(paths[rank], nbytes)
        except (OSError, NotAvailable) as error:
            failure = f"rank {rank}: {error}"
        failures = _all_gather(failure, len(paths), cpu_group)
        if any(failures):
            raise NotAvailable("posix heap: " + "; ".join(f for f in failures if f))
        try:
            maps = [mine if r == rank else _open(path, nbytes) for r, path in enumerate(paths)]
        except OSError as error:
            failure = f"rank {rank}: {error} (ranks on one host, in one container?)"
        failures = _all_gather(failure, len(paths), cpu_group)
        if any(failures):
            raise NotAvailable("posix heap: " + "; ".join(f for f in failures if f))
        return maps


def _all_gather(value: str | None, world_size: int, cpu_group: dist.ProcessGroup | None) -> list[str | None]:
    if world_size == 1:
        return [value]
    out: list[str | None] = [None] * world_size
    dist.all_gather_object(out, value, group=cpu_group)
    return out
