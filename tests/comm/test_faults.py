"""After a fault every rank's error names the same rank, call and hop; and the last exchanges of each are kept."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexsp.comm import faults
from flexsp.comm.faults import CIRCLE, CLOSED, MISMATCH, SILENT, trace
from flexsp.comm.group import SequenceParallel
from flexsp.comm.recorder import KEPT, Recorder, ended
from flexsp.comm.signature import Signature
from flexsp.exceptions import BetweenRanks, Fault, PeerMismatch, PeerTimeout
from flexsp.launch import cli
from flexsp.ops import chunk_simple_gla
from flexsp.testing import ranks, run_ranks
from flexsp.testing.ranks import RankFailure
from tests.harness.interpreted import INTERPRETED
from tests.marks import quick, slow

WORLD, ODD = 4, 2  # the rank that dies, is silent, or makes another call
LIMIT_S = {"posix": 6.0, "process_group": 3.0}


def train(sp: Any, how: str, backward: bool, folder: str) -> None:
    """Steps of one call each, of which rank ODD does not make the second as the others do; what this rank is told."""
    faults._LEAST_S = 20.0  # on a busy machine ranks notice at very different times
    faults._MOST_S = 20.0
    sp.set_lengths([4] * sp.world_size)
    q, k, v = (torch.randn(1, 4, 1, 16).requires_grad_() for _ in range(3))
    g = -torch.rand(1, 4, 1)
    try:
        for step in range(8):  # the first rank of a chain of kernels hears of a fault two calls later
            if step < 2:
                torch.distributed.barrier()
            odd = step == 1 and sp.rank == ODD
            if odd and not backward and _leaves(how):
                return
            o, _ = chunk_simple_gla(q, k, v, None if odd and not backward else g, sp=sp)
            if odd and backward:
                if _leaves(how):
                    return
                o, _ = chunk_simple_gla(q, k, v, sp=sp)
            if backward and not odd:
                o.sum().backward()
            sp.check()
    except BetweenRanks as error:
        Path(folder, str(sp.rank)).write_bytes(pickle.dumps(error))
        if how == "dies":  # the pool would wait for the others
            raise RuntimeError("told") from error


def _leaves(how: str) -> bool:
    if how == "dies":
        os._exit(3)
    return how == "is silent"


CASES = [
    (transport, schedule, how, backward)
    for transport, schedule in [("posix", "chain")] + [
        ("process_group", name) for name in ("chain", "serial", "pipelined", "all_gather")
    ]
    for how in ("is silent", "dies", "calls another op")
    for backward in (False, True)
]  # fmt: skip
QUICK = [
    ("posix", "chain", "calls another op", False),
    ("process_group", "chain", "dies", True),
]


def told(
    transport: str, schedule: str, how: str, backward: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[Any]:  # fmt: skip
    options: dict[str, Any] = {"own_processes": True, "env": {"FLEXSP_DUMP": str(folder / "dumps")}}
    if transport == "posix":
        options |= {"heap_mib": 1, "env": options["env"] | INTERPRETED}
    monkeypatch.setattr(ranks, "_GRACE_S", 60.0)  # for those that are told of the death of another
    with contextlib.nullcontext() if how != "dies" else pytest.raises(RankFailure):
        run_ranks(
            train, WORLD, how, backward, str(folder), transport=transport, schedule=schedule,
            sp_timeout_s=LIMIT_S[transport], **options,
        )  # fmt: skip
    files = [folder / str(rank) for rank in range(WORLD)]
    return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


@pytest.mark.parametrize(("transport", "schedule", "how", "backward"), quick(CASES, *QUICK))
def test_all_ranks_name_the_same_fault(
    transport: str, schedule: str, how: str, backward: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The table in docs/use.md."""
    errors = told(transport, schedule, how, backward, tmp_path, monkeypatch)
    leaves, kernels = how != "calls another op", transport == "posix"
    one_call = not (kernels and backward)  # kernels of the other direction do not meet: each waits for the other
    kinds = {
        "is silent": SILENT, "dies": SILENT if kernels else CLOSED,
        "calls another op": MISMATCH if one_call else CIRCLE,
    }  # fmt: skip
    fault = errors[0].fault
    assert (fault.kind, fault.rank, fault.number) == (kinds[how], ODD, 4 if backward else 2), fault
    if schedule != "all_gather":
        assert ODD in fault.hop and abs(fault.hop[0] - fault.hop[1]) == 1
        assert (fault.hop[0] > fault.hop[1]) == backward
    assert f"simple_gla on torch.float32, g, scale 0.25 ({'backward' if backward else 'forward'}" in fault.call, fault
    assert f"call {fault.number}" in fault.call or kernels, fault  # of which a rank may know the text alone
    for rank, error in enumerate(errors):
        if rank == ODD and leaves:
            assert error is None
            continue
        assert isinstance(error, PeerMismatch | PeerTimeout) and error.rank == rank, errors
        assert error.fault == fault, [error and error.fault for error in errors]
        assert f"\n  first fault: {fault}\n" in str(error) and "\n  this rank: call " in str(error)
        if abs(rank - ODD) == 1:  # at the latest one exchange later
            assert isinstance(error, PeerMismatch if how == "calls another op" and one_call else PeerTimeout), error
        file = tmp_path / "dumps" / f"rank_{rank}.json"
        assert str(file) in str(error)
        written = json.loads(file.read_text())
        (group,) = written["groups"]
        assert written["rank"] == group["rank"] == rank and group["first_fault"] == str(fault)
        assert f"first fault: {fault}" in written["error"]
        assert {row["number"] for row in group["exchanges"]} == set(range(1, 1 + group["calls"]))
        assert (group["kernel_record"] is not None) == kernels
    assert cli.main(["dump", str(tmp_path / "dumps")]) == 0
    said = capsys.readouterr().out
    assert f"first fault: {fault}" in said
    assert (f"no file of rank {ODD}" in said) == leaves


# Following reports ----------------------------------------------------------------------------------------------------


def row(rank: int, peer: int | None, number: int = 7, call: str = "op", **more: Any) -> dict[str, Any]:
    calls = [[n, "op"] for n in range(1, number)] + [[number, call]]
    hop = None if peer is None or abs(rank - peer) != 1 else [min(rank, peer), max(rank, peer)]
    return {
        "rank": rank, "peer": peer, "mismatch": False, "heard": False, "closed": False, "number": number, "call": call,
        "digest": call, "hop": hop, "abandoned": 0, "calls": calls, "theirs": "",
    } | more  # fmt: skip


def test_traces_of_ranks_that_waited() -> None:
    one = {r: row(r, p, n) for r, p, n in ((0, 1, 8), (1, 2, 7))}
    fault, certain = trace(one, 0, 4)
    assert fault is not None and (fault.kind, fault.rank, fault.number, fault.hop) == (SILENT, 2, 7, (1, 2))
    assert not certain and trace(one | {3: row(3, 2)}, 0, 4)[1]
    assert fault.text == "rank 2 did not answer rank 1 in op, hop 1 -> 2"
    fault, _ = trace(one | {1: row(1, 2, closed=True)}, 0, 4)
    assert fault is not None and fault.kind == CLOSED and "broke off its connection to rank 1" in fault.text
    # who met it says more than who heard of it, and the earliest call is where it began
    fault, _ = trace({0: row(0, 2, 5, heard=True), 1: row(1, 2, 9), 3: row(3, 2, 8)}, 0, 4)
    assert fault is not None and (fault.number, fault.hop) == (8, (2, 3))
    fault, _ = trace({0: row(0, 1, 5), 1: row(1, 2, 7)}, 0, 4)
    assert fault is not None and (fault.number, fault.hop) == (7, (1, 2))


def test_traces_from_ranks_that_do_not_know_for_whom_they_waited() -> None:
    assert trace({0: row(0, None)}, 0, 4) == (None, False)
    fault, _ = trace({0: row(0, None), 3: row(3, 2)}, 0, 4)
    assert fault is not None and (fault.rank, fault.hop) == (2, (2, 3))
    fault, certain = trace({0: row(0, None), 1: row(1, None), 3: row(3, None)}, 0, 4)
    assert fault is not None and fault.rank == 2 and certain


def test_a_verdict_stays_unless_its_rank_reports_another() -> None:
    early, _ = trace({0: row(0, 1)}, 0, 4)
    assert early is not None and early.rank == 1
    assert trace({0: row(0, 1), 3: row(3, 2)}, 1, 4, early) == (early, True)
    later, _ = trace({0: row(0, 1), 1: row(1, 2)}, 1, 4, early)
    assert later is not None and later.rank == 2
    late = {0: row(0, 1), 1: row(1, 2), 3: row(3, 2), 2: row(2, 1)}  # rank 2 came at last, and rank 1 had gone
    assert trace(late, 2, 4, later) == (later, True)


def test_traces_of_ranks_in_different_calls() -> None:
    two = {1: row(1, 2, mismatch=True), 2: row(2, 1, call="another", mismatch=True)}
    fault, certain = trace(two, 1, 2)
    assert fault is not None and (fault.kind, fault.rank) == (MISMATCH, 2)
    assert fault.text.startswith("ranks 1 and 2 made different calls: rank 1 op; rank 2 another") and certain
    for odd in (1, 2):
        calls = {r: "another" if r == odd else "op" for r in range(4)}
        rows = {r: row(r, 3 - r, call=calls[r], mismatch=True) for r in (1, 2)}
        fault, certain = trace(rows, 1, 4)
        assert fault is not None and not certain
        for third in (0, 3):
            fault, _ = trace(rows | {third: row(third, 2, 9, mismatch=True, heard=True)}, third, 4)
            assert fault is not None and (fault.rank, fault.number, fault.hop) == (odd, 7, (1, 2))
            other = 3 - odd
            assert fault.text.startswith(f"rank {odd} made another call than rank {other}: another; rank {other} op")
    gave_up = {1: row(1, 2, mismatch=True, abandoned=1), 2: row(2, 1, call="another", mismatch=True)}
    fault, _ = trace(gave_up, 2, 2)
    assert fault is not None and fault.rank == 1
    # a mismatch corrects a verdict that took its rank for a silent one
    silent, _ = trace({0: row(0, 1)}, 0, 4)
    fault, _ = trace({0: row(0, 1), **two, 3: row(3, 2)}, 1, 4, silent)
    assert fault is not None and (fault.kind, fault.rank) == (MISMATCH, 2)
    assert trace({0: row(0, 1), **two}, 2, 4, fault) == (fault, True)


def test_traces_of_ranks_that_wait_for_each_other() -> None:
    rows = {0: row(0, 1), 1: row(1, 2), 2: row(2, 1, call="another"), 3: row(3, 2)}
    silent, _ = trace({0: row(0, 1)}, 0, 4)
    for verdict, start in ((None, 0), (silent, 1)):
        fault, certain = trace(rows, start, 4, verdict)
        assert fault is not None and (fault.kind, fault.rank, fault.hop) == (CIRCLE, 2, (1, 2)) and certain
        assert fault.text == "ranks wait for each other: rank 1 for rank 2 in op; rank 2 for rank 1 in another"
    assert trace(rows, 2, 4, fault) == (fault, True)
    # the others have reported, but in different calls: the last rank may yet say for whom it waits
    assert not trace({rank: rows[rank] for rank in (0, 2, 3)}, 0, 4)[1]


# The store ------------------------------------------------------------------------------------------------------------


class Store(dict):
    """A store of one process."""

    def add(self, key: str, amount: int) -> int:
        self[key] = self.get(key, 0) + amount
        return self[key]

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> str:
        if self.get(key, "") == expected:
            self[key] = value
        return self[key]


def group(rank: int, peer: int) -> Any:
    return SimpleNamespace(rank=rank, world_size=4, store_key="key", reported=row(rank, peer), timeout_s=0.1)


def test_ranks_take_over_the_first_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = Store()
    for rank, peer in ((3, 2), (1, 2)):
        store.add("key/reports", 1)  # of a rank that died between the two
        faults._put(store, "key", row(rank, peer))
    first = faults._agreed(group(3, 2), store, 0.0)
    assert first is not None and (first.rank, first.hop) == (2, (1, 2))
    faults._put(store, "key", row(0, 1, 3))
    assert faults._agreed(group(0, 1), store, 0.0) == first
    assert faults._agreed(group(1, 2), store, 0.0) == first
    assert json.loads(store["key/verdict"])["text"] == first.text


def test_a_rank_that_was_named_too_early_corrects_the_verdict() -> None:
    store: Any = Store()
    faults._put(store, "key", row(0, 1))
    early = faults._agreed(group(0, 1), store, 0.0)
    assert early is not None and early.rank == 1
    faults._put(store, "key", row(1, 2))
    later = faults._agreed(group(1, 2), store, 0.0)
    assert later is not None and later.rank == 2 and faults._agreed(group(3, 2), store, 0.0) == later


def test_a_rank_tells_the_others_once_what_it_met(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = Store()
    monkeypatch.setattr(faults, "_store", lambda: store)
    sp = SequenceParallel(world_size=2, timeout_s=0.1)
    sp.recorder.begin(1, "an exchange", None, 1, "process_group")
    sp.failure = PeerTimeout(0, 1, direction="recv", detail="Connection closed by peer")
    for _ in range(2):
        with pytest.raises(PeerTimeout) as caught:
            sp.check()
    assert store[f"{sp.store_key}/reports"] == 1
    told = json.loads(store[f"{sp.store_key}/report/1"])
    assert (told["rank"], told["peer"], told["closed"], told["number"], told["hop"]) == (0, 1, True, 1, [0, 1])
    assert caught.value.call == "call 1, an exchange, hop 0 -> 1"


def test_a_store_that_fails_or_hangs_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise torch.distributed.DistNetworkError("gone")

    assert faults._in_time(fails, 10.0) is None
    assert faults._in_time(threading.Event().wait, 0.01) is None
    assert faults._in_time(lambda: 7, 10.0) == 7


# What is kept ---------------------------------------------------------------------------------------------------------


def test_the_last_exchanges_are_kept() -> None:
    recorder = Recorder()
    signature = Signature("state exchange", "op", "(1, 2) float32", "scalar", True, "chain")
    for number in range(1, KEPT + 6):
        entry = recorder.begin(number, signature, 3, 1, "kernel")
        if number != KEPT + 5:
            ended(entry)
    rows = [*recorder.rows()]
    assert [x["number"] for x in rows] == list(range(6, KEPT + 6)) and KEPT == 64
    assert all((x["ended_ns"] or 0) >= x["began_ns"] for x in rows[:-1]) and rows[-1]["ended_ns"] is None
    assert rows[0]["what"] == signature.text() and (rows[0]["source"], rows[0]["target"]) == (3, 1)
    assert (rows[0]["kind"], rows[0]["call"], rows[0]["travels"], rows[0]["backward"]) == (
        "state exchange", "op", "(1, 2) float32", True,
    )  # fmt: skip
    assert recorder.of_number(9)[0] == 9 and recorder.of_number(1) is None
    assert recorder.of_word(signature.word())[0] == KEPT + 5 and recorder.of_word(1) is None
    assert len({digest for _, digest in recorder.digests()}) == 1


def exchanges(sp: Any, folder: str) -> list[Any]:
    """What stands in this rank's file after two training steps, of which the second goes by recipe, and a sum."""
    sp.set_lengths([4] * sp.world_size)
    q, k, v = (torch.randn(1, 4, 1, 16).requires_grad_() for _ in range(3))
    for _ in range(2):
        chunk_simple_gla(q, k, v, -torch.rand(1, 4, 1), sp=sp)[0].sum().backward()
    sp.token_mean(torch.ones(3))
    file = sp.dump(Path(folder, "made"))
    assert file == Path(folder, "made", f"rank_{sp.rank}.json") and [*file.parent.glob(f"rank_{sp.rank}.[0-9]*")] == []
    found = next(x for x in json.loads(file.read_text())["groups"] if x["key"] == sp.store_key)
    assert found["failure"] is None and found["calls"] == 5 and all(x["ended_ns"] for x in found["exchanges"])
    return [(x["number"], x["by"], x["source"], x["target"], x["what"].split(" ")[0]) for x in found["exchanges"]]


@pytest.mark.parametrize("transport", ["posix", *slow("process_group")])
def test_a_user_writes_what_has_been_exchanged(transport: str, tmp_path: Path) -> None:
    options = {"heap_mib": 1, "env": INTERPRETED} if transport == "posix" else {}
    found = run_ranks(exchanges, 3, str(tmp_path), transport=transport, fresh_sp=True, **options)
    by = "kernel" if transport == "posix" else "process_group"
    for rank, rows in enumerate(found):
        left, right = (rank - 1 if rank else None), (rank + 1 if rank < 2 else None)
        states = [(n, by, *((left, right) if n % 2 else (right, left)), "state") for n in range(1, 5)]
        assert rows == [*states, (5, "process_group", None, None, "sum"), (5, "cpu group", None, None, "collective")]


def test_a_folder_that_cannot_be_written_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLEXSP_DUMP", str(tmp_path / "file"))
    sp = SequenceParallel(world_size=2, timeout_s=0.1)
    sp.failure = PeerTimeout(0, 1, direction="recv", detail="Connection closed by peer")
    with pytest.warns(UserWarning, match="FLEXSP_DUMP: .*file"), pytest.raises(PeerTimeout) as caught:
        sp.check()
    fault = caught.value.fault
    assert fault is not None and (fault.kind, fault.rank) == (CLOSED, 1) and caught.value.dumped == ""


WAITING = """
import ctypes, os, signal, sys, time
from flexsp.comm.group import SequenceParallel
from flexsp.launch.termination import dump_when_ended

if sys.argv[1] == "own handler":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
dump = SequenceParallel.dump
SequenceParallel.dump = lambda *args: (time.sleep(0.3), dump(*args))  # a folder that takes its time
dump_when_ended()
sp = SequenceParallel(rank=1, world_size=2)
sp.recorder.begin(3, "an exchange", 0, None, "kernel")
read, write = os.pipe()
child = os.fork()
if child == 0:
    os.write(write, b"x")
    time.sleep(100)
    os._exit(0)
os.read(read, 1)
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
print("waits", flush=True)
while True:  # again and again: a signal just before it is not seen inside
    ctypes.CDLL(None).usleep(200_000)
"""


def test_a_rank_that_torchrun_ends_writes_its_exchanges(tmp_path: Path) -> None:
    """Where the user has a handler of SIGTERM, that one decides how the process ends."""
    (tmp_path / "waiting.py").write_text(WAITING)
    started = {}
    for how, status in (("no handler", -signal.SIGTERM), ("own handler", 7)):
        env = os.environ | {"FLEXSP_DUMP": str(tmp_path / how), "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, str(tmp_path / "waiting.py"), how]
        started[how] = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True), status
    for how, (process, status) in started.items():
        with process:
            assert process.stdout is not None and process.stdout.readline() == "waits\n"
            process.terminate()
            assert process.wait(100) == status
        (group,) = json.loads((tmp_path / how / "rank_1.json").read_text())["groups"]
        assert [(x["number"], x["ended_ns"]) for x in group["exchanges"]] == [(3, None)]


def test_errors_keep_what_they_say_in_other_processes() -> None:
    for error in (PeerTimeout(0, 1, direction="recv"), PeerMismatch(0, 1, "ours", "theirs")):
        error.call, error.dumped, error.fault = "call 7", "file", Fault(SILENT, 1, 7, "op", (1, 0), "the text")
        again = pickle.loads(pickle.dumps(error))
        assert str(again) == str(error) and again.fault == error.fault
        assert str(error).splitlines()[1:] == [
            "  this rank: call 7", "  first fault: the text", "  last exchanges: file",
        ]  # fmt: skip


def test_a_folder_without_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dump", str(tmp_path)]) == 1
    assert "folder: expected files rank_N.json" in capsys.readouterr().err
