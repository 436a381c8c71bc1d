"""Jobs of torchrun in which a rank fails: which one torchrun names, and how soon the job ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexsp.comm import faults, root_cause
from flexsp.comm.group import SequenceParallel
from flexsp.comm.root_cause import record_root_cause
from flexsp.exceptions import Fault, PeerTimeout
from tests.marks import quick

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, sys, time
import torch
import flexsp
from flexsp.ops import chunk_linear_attn
{record}
def main():
    sp = flexsp.init_sequence_parallel(device="cpu", timeout_s=3)
    sp.set_lengths([4, 4])
    q = torch.randn(1, 4, 1, 16)
    chunk_linear_attn(q, q, q, sp=sp)
    if sp.rank == {odd}:
        {fails}
    try:
        chunk_linear_attn(q, q, q, sp=sp)
        sp.check()
        time.sleep(60)  # a rank that only sends is not told
    except flexsp.PeerTimeout as error:
        print("first error at", time.time() - (3 if "imed out" in str(error) else 0), flush=True)
        raise
main()
"""
RECORD = "from torch.distributed.elastic.multiprocessing.errors import record\n@record"
FAILS = {
    "hangs": "time.sleep(600)",
    "slow to end": "import atexit; atexit.register(time.sleep, 2); raise ValueError('of its own')",
    "other call": "chunk_linear_attn(q[..., :8], q[..., :8], q, sp=sp); sp.check(); time.sleep(60)",
}
"""What the odd rank does in place of its second call."""


def run(folder: Path, how: str, record: bool) -> tuple[str, float]:
    """What a job of two ranks prints, and the seconds from the first PeerTimeout to its end."""
    script = folder / "job.py"
    script.write_text(SCRIPT.format(record=RECORD if record else "", odd=1, fails=FAILS[how]))
    kept = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT")}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        env=kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    ended, said = time.time(), done.stdout + done.stderr
    assert done.returncode != 0, said
    times = [float(x) for x in re.findall(r"first error at ([\d.]+)", said)]
    return said, ended - min(times, default=ended)


CASES = [(how, record) for how in ("hangs", "slow to end", "other call") for record in (False, True)]


@pytest.mark.parametrize(("how", "record"), quick(CASES, ("hangs", True)))
def test_torchrun_names_the_rank_at_fault(how: str, record: bool, tmp_path: Path) -> None:
    said, seconds = run(tmp_path, how, record)
    cause = said.partition("Root Cause (first observed failure):")[2]
    assert re.search(r"^\s*rank +: 1 \(local_rank: 1\)", cause, flags=re.MULTILINE), said
    assert seconds < 10 or how == "other call", said
    if how == "hangs":
        assert "rank 1, as rank 0 tells: rank 1 did not answer rank 0 in call 2, state exchange" in cause
    if how == "slow to end" and record:
        assert "ValueError: of its own" in cause  # what it wrote itself


# The files


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Those of ranks 4 to 6 of the world, of which rank 5 is this process."""
    for place in range(3):
        (tmp_path / str(place)).mkdir()
    here = {"RANK": 5, "LOCAL_RANK": 1, "TORCHELASTIC_ERROR_FILE": tmp_path / "1" / "error.json"}
    for name, value in here.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(root_cause, "_LATER_S", 0.0)
    return tmp_path


def error_about(rank: int | None) -> Any:
    error = PeerTimeout(1, 0)
    error.fault = None if rank is None else Fault("silent", rank, 2, "a call", None, f"rank {rank} did not answer")
    return error


def written(folder: Path) -> dict[int, tuple[str, int]]:
    """Message and time of each local rank that has a file."""
    found = {}
    for path in sorted(folder.glob("*/*")):
        assert path.name == "error.json"
        row = json.loads(path.read_text())["message"]
        found[int(path.parent.name)] = row["extraInfo"]["py_callstack"], int(row["extraInfo"]["timestamp"])
    return found


GROUP = SimpleNamespace(rank=1, global_ranks=[3, 5, 6, 7])  # of which 3 and 7 are on other hosts


def test_the_rank_at_fault_is_told_of_as_earlier(files: Path) -> None:
    record_root_cause(GROUP, error_about(2))
    found = written(files)
    assert found.keys() == {1, 2}
    assert found[2][0] == "rank 6, as rank 5 tells: rank 2 did not answer" and found[2][1] < found[1][1]
    assert found[1][0].startswith("PeerTimeout: rank 1: no answer") and "rank 2 did not answer" in found[1][0]
    assert abs(found[1][1] - time.time()) < 60


@pytest.mark.parametrize("rank", [0, 3])
def test_ranks_of_other_hosts_are_named_in_the_own_file(rank: int, files: Path) -> None:
    record_root_cause(GROUP, error_about(rank))
    found = written(files)
    assert found.keys() == {1} and f"first fault: rank {rank} did not answer" in found[1][0]


def test_what_a_rank_wrote_itself_only_becomes_earlier(files: Path) -> None:
    now = int(time.time())
    for when, kept in ((now + 100, False), (now - 100, True)):
        own = {"message": {"message": "mine", "extraInfo": {"py_callstack": "mine", "timestamp": str(when)}}}
        (files / "2" / "error.json").write_text(json.dumps(own))
        record_root_cause(GROUP, error_about(2))
        text, found = written(files)[2]
        assert text == "mine" and (found == when) == kept and found < now + 60


def test_a_rank_at_fault_says_so_itself(files: Path) -> None:
    record_root_cause(GROUP, error_about(1))
    found = written(files)
    assert found.keys() == {1} and found[1][0] == "rank 5: rank 1 did not answer" and found[1][1] < time.time() - 1


@pytest.mark.parametrize("what", ["no torchrun", "not found out", "elsewhere", "broken", "no folder"])
def test_without_files_nothing_happens(what: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "no torchrun":
        monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    if what == "elsewhere":  # of another launcher, whose folders are not those of ranks
        monkeypatch.setenv("LOCAL_RANK", "0")
    if what == "broken":
        (files / "2" / "error.json").write_text("{")
    if what == "no folder":
        (files / "2").rmdir()
    record_root_cause(GROUP, error_about(None if what == "not found out" else 2))
    (files / "2" / "error.json").unlink(missing_ok=True)
    mine = {place: text[:11] for place, (text, _) in written(files).items()}
    assert mine == ({1: "PeerTimeout"} if what in ("elsewhere", "no folder") else {})


def test_a_healthy_rank_lets_a_second_pass(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(root_cause, "_LATER_S", 1.1)
    monkeypatch.setattr(root_cause.time, "sleep", slept.append)
    for rank in (2, 1, None):
        record_root_cause(GROUP, error_about(rank))
    assert slept == [1.1]


@pytest.mark.parametrize("answers", [True, False])
def test_no_rank_waits_long_for_the_reports_of_others(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the timeout is; and not at all where the store has not taken its own report."""
    asked: list[float] = []
    monkeypatch.setattr(faults, "_store", lambda: "a store")
    monkeypatch.setattr(faults, "_put", lambda *what: answers or None)
    monkeypatch.setattr(faults, "_agreed", lambda sp, store, patience: asked.append(patience))
    for seconds in (2.0, 16.0, 3600.0):
        group = SequenceParallel(rank=0, world_size=3, timeout_s=seconds)
        error = faults.explained(group, PeerTimeout(0, 1))
        assert error.fault is not None and error.fault.rank == 1
    assert asked == ([3.0, 4.0, 5.0] if answers else [])
