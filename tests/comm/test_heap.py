"""Symmetric heaps: POSIX shared memory between processes, what is refused and why, error records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flexsp.comm import nvshmem, posix, watchdog
from flexsp.comm.group import SequenceParallel
from flexsp.comm.transport import create_heap
from flexsp.exceptions import NotAvailable, PeerMismatch, PeerTimeout
from flexsp.testing.ranks import run_ranks

CPU = torch.device("cpu")


def make(sp: Any, nbytes: int, kind: str = "posix") -> Any:
    return create_heap(
        kind, nbytes, rank=sp.rank, global_ranks=sp.global_ranks, cpu_group=sp.cpu_group, device=sp.device
    )


def mapped_files() -> list[str]:
    """Shared-memory files of flexsp in this process, as the kernel names them."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if "/flexsp-" in line]


def exchange(sp: Any) -> list[int]:
    heap = make(sp, 5000)
    assert heap.nbytes == 8192 and heap.local.dtype == torch.uint8
    assert not heap.local.any()
    assert all(name.endswith("(deleted)") for name in mapped_files())
    dist.barrier(group=sp.cpu_group)
    for r in range(sp.world_size):
        assert heap.reaches(r)
        heap.peer(r).view(torch.int64)[sp.rank] = 10 * sp.rank + r
    dist.barrier(group=sp.cpu_group)
    got = heap.local.view(torch.int64)[: sp.world_size].tolist()
    heap.close()
    heap.close()
    return got


def test_posix_ranks_write_to_each_other() -> None:
    assert run_ranks(exchange, 2) == [[0, 10], [1, 11]]


def open_fails_on_one_rank(sp: Any, folder: str) -> str:
    original = posix._folder, posix._open
    posix._folder = lambda: Path(folder)
    if sp.rank == 1:
        posix._open = lambda path, nbytes: (_ for _ in ()).throw(OSError("no such thing"))
    try:
        with pytest.raises(NotAvailable) as caught:
            make(sp, 4096)
    finally:
        posix._folder, posix._open = original
    return str(caught.value)


def test_posix_failure_reaches_every_rank_and_leaves_no_file(tmp_path: Path) -> None:
    messages = run_ranks(open_fails_on_one_rank, 2, str(tmp_path))
    assert all("rank 1" in text and "no such thing" in text for text in messages)
    assert list(tmp_path.iterdir()) == []


def test_posix_success_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix, "_folder", lambda: tmp_path)
    heap = posix.PosixHeap.create(4096, rank=0, world_size=1, cpu_group=None)
    assert list(tmp_path.iterdir()) == []
    heap.local[3] = 7
    assert heap.peer(0)[3] == 7


def test_posix_says_when_there_is_no_room() -> None:
    with pytest.raises(NotAvailable, match="MiB free"):
        posix.PosixHeap.create(1 << 50, rank=0, world_size=1, cpu_group=None)


@pytest.mark.parametrize("kind", ["nvshmem", "torch_symm"])
def test_gpu_heaps_refuse_the_cpu(kind: str) -> None:
    with pytest.raises(NotAvailable, match="GPU memory"):
        create_heap(kind, 4096, rank=0, global_ranks=[0], cpu_group=None, device=CPU)  # type: ignore[arg-type]


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="kind"):
        create_heap("magic", 4096, rank=0, global_ranks=[0], cpu_group=None, device=CPU)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nbytes"):
        create_heap("posix", 0, rank=0, global_ranks=[0], cpu_group=None, device=CPU)  # type: ignore[arg-type]


def test_device_library_is_found_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = nvshmem.find_device_library.__wrapped__
    monkeypatch.setattr(nvshmem, "_has", lambda module: False)
    monkeypatch.delenv("NVSHMEM_HOME", raising=False)
    monkeypatch.setenv("NVSHMEM_LIB_DIR", str(tmp_path))
    with pytest.raises(NotAvailable, match="libnvshmem_device.bc"):
        find()
    (tmp_path / "libnvshmem_device.bc").touch()
    assert find() == str(tmp_path / "libnvshmem_device.bc")


@pytest.mark.parametrize("kind", range(1, 6))
def test_records_become_exceptions(kind: int) -> None:
    sp = SequenceParallel(rank=2, world_size=4)
    watchdog.raise_pending(sp)
    sp.records = watchdog.ErrorRecord(CPU)
    watchdog.raise_pending(sp)
    sp.records.tensor[:6] = torch.tensor([kind, 1, 17, 5, 4, 1])
    mismatch = kind in (watchdog.MISMATCH, watchdog.POISON_MISMATCH)
    with pytest.raises(PeerMismatch if mismatch else PeerTimeout) as caught:
        sp.check()
    error = caught.value
    assert (error.rank, error.peer) == (2, 1)
    assert "tile 17" in str(error)
    if not mismatch:
        assert "backward" in str(error)
        assert (error.tile, error.expected, error.seen) == (17, 5, 4)
    sp.records.tensor[3:5] = torch.tensor([2**62 + 1, 2**62])  # words have 64 bits
    row = sp.records.row()
    assert row is not None and (row["wanted"], row["seen"]) == (2**62 + 1, 2**62)
