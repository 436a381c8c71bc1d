"""Transports as objects: the registry, and what those for GPUs hand to the kernel, with a heap that only pretends."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flexsp.comm import transport as module
from flexsp.comm.transport import Transport, in_kernel, register_transport, transport_of, transports
from flexsp.exceptions import NotAvailable
from flexsp.testing.ranks import RankFailure, run_ranks
from tests.guides import save_scripts
from tests.harness.interpreted import INTERPRETED
from tests.marks import slow


class Mine(Transport):
    name, device = "mine", "cpu"


def heap(*reached: int) -> Any:
    """Of rank 0; arenas and NVSHMEM's numbers of the ranks."""
    arenas = [torch.full((8,), rank, dtype=torch.uint8) for rank in range(3)]
    return SimpleNamespace(
        local=arenas[0], peer=arenas.__getitem__, pe=lambda rank: 10 + rank, reaches=reached.__contains__,
        init_module=lambda module: ("started", module),
    )  # fmt: skip


def test_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TRANSPORTS", dict(module._TRANSPORTS))
    assert transports()[:4] == ("process_group", "peer", "put", "posix")
    mine = Mine()
    register_transport(mine)
    assert transport_of("mine") is mine and transports()[-1] == "mine"
    for taken in ("mine", "auto", "process_group", "peer"):
        mine.name = taken
        with pytest.raises(ValueError, match=f"name: expected one that no transport has, got {taken!r}"):
            register_transport(mine)
    mine.name, mine.device = "other", "tpu"
    with pytest.raises(ValueError, match="device: expected 'cuda', 'cpu' or 'any', got 'tpu'"):
        register_transport(mine)
    with pytest.raises(ValueError, match="transport: expected an object of a class made from Transport"):
        register_transport(Mine)  # type: ignore[arg-type]
    with pytest.raises(NotAvailable, match="transport 'other' is not known on this rank"):
        transport_of("other")


def test_process_group_is_one_of_them() -> None:
    """It needs no memory of its own, on any device, and its states travel between kernels."""
    found = transport_of("process_group")
    assert (found.device, found.sends_in_kernel) == ("any", False) and [*module._TRANSPORTS][0] == found.name
    where: Any = {"rank": 0, "global_ranks": [0], "cpu_group": None, "device": torch.device("cpu")}
    assert found.open_heap(1 << 20, **where) is None
    assert [x for x in transports() if not transport_of(x).sends_in_kernel] == ["process_group"]


def test_peer_maps_the_arenas_of_the_others() -> None:
    from flexsp.comm import device

    peer = transport_of("peer")
    assert [int(peer.arena(heap(), rank)[0]) for rank in range(3)] == [0, 1, 2]
    assert not peer.stages and peer.address(heap(), 2) == 0 and peer.options() == {} and peer.prepare(heap()) is None
    assert peer.functions() == (device.push_store, device.signal_store) == transport_of("posix").functions()
    assert peer.problem(heap(0, 1, 2), 3) == "" and "use transport='put'" in peer.problem(heap(0, 1), 3)


def test_put_addresses_its_own_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsp.comm import device

    put = transport_of("put")
    assert [int(put.arena(heap(), rank)[0]) for rank in range(3)] == [0, 0, 0]
    assert put.stages and [put.address(heap(), rank) for rank in range(3)] == [10, 11, 12]
    assert put.functions() == (device.push_put, device.signal_put)
    monkeypatch.setattr(device, "nvshmem_options", lambda: {"extern_libs": "linked"})
    assert put.options() == {"extern_libs": "linked"}
    prepare = put.prepare(heap())
    assert prepare is not None and prepare(SimpleNamespace(module=7)) == ("started", 7)


NO_BITCODE = "transport 'put' needs libnvshmem_device.bc"


@pytest.mark.parametrize("bitcode", [False, True])
def test_put_needs_its_device_library(bitcode: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, bitcode)
    problem = transport_of("put").problem(heap(), 3)
    assert problem == "" if bitcode else problem.startswith(NO_BITCODE)


def pretend(monkeypatch: pytest.MonkeyPatch, bitcode: bool) -> None:
    from flexsp.comm import nvshmem

    def find() -> str:
        if not bitcode:
            raise NotAvailable(NO_BITCODE)
        return "libnvshmem_device.bc"

    monkeypatch.setattr(nvshmem, "find_device_library", find)


@pytest.mark.parametrize(
    ("reached", "bitcode", "trial", "chosen"),
    [
        ((0, 1, 2), False, "lost", "peer"), ((0, 1, 2), True, "lost", "peer"), ((0, 1), True, "", "put"),
        ((0, 1), True, "lost", "process_group"), ((0, 1), False, "", "process_group"),
    ],
)  # fmt: skip
def test_what_auto_takes(
    reached: tuple[int, ...], bitcode: bool, trial: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Across hosts put, where its device library is there and a state has arrived: the first call would fail else."""
    from flexsp.launch import bootstrap

    monkeypatch.setattr(bootstrap, "_trial", lambda sp: trial)

    opened = heap(*reached)
    opened.close = lambda: setattr(opened, "closed", True)
    pretend(monkeypatch, bitcode)
    monkeypatch.setattr(type(transport_of("peer")), "open_heap", lambda self, nbytes, **where: opened)
    monkeypatch.setattr(bootstrap.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(bootstrap.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(bootstrap.dist, "all_gather_object", lambda rows, mine: rows.__setitem__(slice(3), [mine] * 3))
    sp: Any = SimpleNamespace(
        device=torch.device("cuda"), cpu_group=1, world_size=3, rank=0, global_ranks=[0, 1, 2], heap=None,
        transport="process_group", start_anew=lambda: setattr(sp, "anew", True),
    )  # fmt: skip
    if chosen == "process_group":
        why = "lost" if bitcode else NO_BITCODE
        with pytest.warns(UserWarning, match=f"no transport between these hosts but torch.distributed .rank 0: {why}"):
            bootstrap._take_transport(sp, "auto", 1)
        assert opened.closed and sp.heap is None and hasattr(sp, "anew") == bitcode
    else:
        bootstrap._take_transport(sp, "auto", 1)
        assert sp.heap is opened
    assert sp.transport == chosen


def tries(sp: Any, how: str) -> Any:
    """What a trial says on this rank; and whether the group works by torch.distributed afterwards."""
    from flexsp.launch import bootstrap
    from flexsp.scan import propagate as module

    sends = module.propagate
    if how == "lost" and sp.rank == 1:  # its messages do not arrive
        sp.rank = 0
    elif how == "wrong" and sp.rank == 1:
        module.propagate = lambda states, *args, **how: (sends(states, *args, **how), states.add_(how["reverse"]))
    try:
        answer = bootstrap._trial(sp)
    finally:
        module.propagate, sp.rank = sends, dist.get_rank()
    dist.barrier(group=sp.cpu_group)
    sp.transport = "process_group"
    sp.start_anew()
    total = sp.token_mean(torch.ones(sp.rank + 1))
    return answer, total.item(), sp.timeout_s, sp.calls


@pytest.mark.parametrize("how", ["wrong", *slow("arrives", "lost")])
def test_a_trial_of_a_transport(how: str) -> None:
    options = {"transport": "posix", "heap_mib": 1, "sp_timeout_s": 8.0, "fresh_sp": True, "env": INTERPRETED}
    answers = run_ranks(tries, 3, how, **options)
    if how == "wrong":
        assert [answer for answer, *_ in answers] == ["", "a state arrived as 4, which should be 3", ""]
    for rank, (answer, total, timeout_s, calls) in enumerate(answers):
        assert rank == 0 or how == "wrong" or bool(answer) == (how == "lost"), answers
        assert total == (rank + 1) * 3 / 6 and timeout_s == 8.0 and calls == 1


def test_who_sends() -> None:
    for transport, schedule, sends in (("peer", "chain", 1), ("peer", "serial", 0), ("process_group", "chain", 0)):
        sp: Any = SimpleNamespace(transport=transport, schedule=schedule)
        assert in_kernel(sp) == bool(sends)


@pytest.mark.parametrize("name", ["peer", "put"])
def test_memory_of_another_device_is_refused(name: str) -> None:
    with pytest.raises(RankFailure) as told:
        run_ranks(lengths, 2, transport=name)
    assert "it moves GPU memory and this rank computes on cpu; CPU ranks have 'posix'" in str(told.value)


def lengths(sp: Any) -> Any:
    return sp.lengths


@pytest.mark.parametrize(
    ("of_world", "ranks", "heap_mib", "size", "grows"),
    [(True, 3, None, 256, True), (True, 2, None, 256, False), (False, 2, None, 256, True), (False, 3, 7, 7, False)],
)
def test_which_heaps_grow(
    of_world: bool, ranks: int, heap_mib: int | None, size: int, grows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Not one whose size was given; nor one that all ranks of the world have to make, for a part of them."""
    from flexsp.launch import bootstrap

    opened: list[int] = []
    monkeypatch.setattr(module, "_TRANSPORTS", dict(module._TRANSPORTS))
    mine = Mine()
    mine.of_world, mine.open_heap = of_world, lambda nbytes, **where: opened.append(nbytes) or heap(0, 1, 2)  # type: ignore
    register_transport(mine)
    monkeypatch.setattr(bootstrap.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(bootstrap.dist, "all_gather_object", lambda rows, mine: rows.__setitem__(slice(3), [mine] * 3))
    sp: Any = SimpleNamespace(device=torch.device("cpu"), cpu_group=1, world_size=ranks, rank=0, global_ranks=[0, 1, 2])
    bootstrap._take_transport(sp, "mine", heap_mib)
    assert opened == [size << 20] and (sp.open_heap is not None) == grows


def sends_as_the_guide(sp: Any, folder: str) -> Any:
    """What the guide's transport makes of a state: on its way from rank 0, and doubled by a wrong copy of it."""
    import flexsp
    from flexsp.scan.propagate import propagate
    from flexsp.scan.transitions import Transition

    sys.path.insert(0, folder)
    found = []
    try:
        for name in ("staged", "doubled"):
            importlib.import_module(name)
            own = flexsp.init_sequence_parallel(transport=name, heap_mib=1, timeout_s=20)
            states = torch.full((1, 2, 2, 16, 16), 1.0 + sp.rank)
            propagate(states, Transition("none"), own)
            own.check()
            found.append((own.transport, states[0, 0].unique().tolist(), states[0, 1].unique().tolist()))
            own.close()
    finally:
        sys.path.remove(folder)
        for name in ("staged", "doubled"):  # other tests share these processes
            sys.modules.pop(name, None)
            module._TRANSPORTS.pop(name, None)
    return found


def test_the_transport_of_the_guide_sends(tmp_path: Path) -> None:
    """Its own program runs in tests/test_package.py."""
    save_scripts("add-a-transport.md", tmp_path)
    code = (tmp_path / "staged.py").read_text()
    for old, new in (("tl.load(stage + offsets, mask=mask)", "tile * 2"), ('name = "staged"', 'name = "doubled"')):
        assert code.count(old) == 1
        code = code.replace(old, new)
    (tmp_path / "doubled.py").write_text(code)
    first, second = run_ranks(sends_as_the_guide, 2, str(tmp_path), env=INTERPRETED)
    assert first == [(name, [1.0], [2.0]) for name in ("staged", "doubled")]
    assert second == [("staged", [2.0], [4.0]), ("doubled", [4.0], [6.0])]
