"""`make sanitize` without a GPU: how its processes share the cases, and what its summary makes of what they print."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch

from flexsp.runtime import launch
from flexsp.runtime.workarounds import unwritten_registers
from tests.gpu import sanitize


def test_every_case_is_taken_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[int] = []

    def refused() -> None:
        raise ValueError("K: expected at most 256, got 512")

    cases = [(f"case {i}", lambda i=i: ran.append(i)) for i in range(3)]
    monkeypatch.setattr(sanitize, "cases", lambda: iter([*cases, ("wide case", refused), ("other", lambda: None)]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(launch, "_compiled", {})
    (tmp_path / "1").mkdir()  # another process has it
    for _ in range(2):
        sanitize.work(tmp_path, "case")
    first = capsys.readouterr().out
    found = sanitize.summary(None, [(first, None)])
    assert ran == [0, 2]
    assert found["calls"] == 3
    assert found["failed"] == ["wide case: ValueError: K: expected at most 256, got 512"]
    assert set(found["slowest"]) == {"case 0", "case 2", "wide case"}


def test_a_process_without_a_case_uses_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """compute-sanitizer fails where a process uses none."""
    used: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: used.append(1))
    monkeypatch.setattr(launch, "_compiled", {})
    sanitize.work(tmp_path, "no such case")
    assert used


def test_machine_code_that_the_tools_would_disturb_is_turned_down() -> None:
    """A wgmma must not write where their own code is at work, and outside `make sanitize` it may."""
    before = unwritten_registers.unwritten, unwritten_registers.rules, unwritten_registers.rules()
    text = """
        .section .text.grads,"ax",@progbits
        /*0000*/ HGMMA.64x64x16.F32.BF16 R{0}, gdesc[UR4].tnspB, RZ, !UPT, gsb0 ;
        /*0010*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0020*/ EXIT ;
    """
    with sanitize.registers_left() as names:
        assert unwritten_registers.rules() != before[2]
        for register, taken in ((24, True), (4, False), (23, False), (152, True), (20, False)):
            found = [x for x in unwritten_registers.unwritten(text.format(register)) if x.startswith("/*0000*/ HGMMA")]
            assert bool(found) != taken, register
    assert names == ["grads"] * 3
    assert (unwritten_registers.unwritten, unwritten_registers.rules) == before[:2]
    assert len(unwritten_registers.unwritten(text.format(4))) == len(unwritten_registers.unwritten(text.format(24)))


def test_only_that_fits_no_case(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "--only", "gated_delta_net"])
    monkeypatch.setattr(shutil, "which", lambda name: name)
    with pytest.raises(SystemExit):
        sanitize.main()
    assert "--only: expected to find it in a case's name, such as 'linear_attn 64x16" in capsys.readouterr().err


def test_errors_of_all_processes_are_added() -> None:
    report = "========= Invalid __global__ read of size 4 bytes."
    clean = sanitize._line(calls=4, kernels=["a", "b"], failed=[], turned_down=["a"])
    clean += "\n========= ERROR SUMMARY: 0 errors\n"
    wrong = (
        "\n".join([sanitize._line(begin="gla 64"), "========= COMPUTE-SANITIZER", *[report, "=========     at f"] * 2])
        + "\n"
        + sanitize._line(calls=3, kernels=["b", "c"], failed=[], turned_down=["a", "c"])
        + "\n========= ERROR SUMMARY: 2 errors\n"
    )
    found = sanitize.summary("memcheck", [(clean, None), (wrong, None)])
    assert (found["calls"], found["kernels"], found["errors"], found["failed"]) == (7, 3, 2, [])
    assert found["kinds"] == {"Invalid __global__ read of size 4 bytes. In gla 64.": 2}
    assert found["turned_down"] == {"a": 2, "c": 1}
    assert report in found["findings"]
    races = sanitize._line(calls=1, kernels=[], failed=[], turned_down=[])
    races += "\n========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)\n"
    assert sanitize.summary("racecheck", [(races, None)])["errors"] == 2


def test_a_tool_that_prints_no_summary_counts_as_failed() -> None:
    text = sanitize._line(calls=1, kernels=[], failed=[], turned_down=[])
    assert "synccheck printed no summary" in sanitize.summary("synccheck", [(text, None)])["failed"][0]
    assert sanitize.summary(None, [(text, None)])["failed"] == []


def test_a_process_that_hangs_is_stopped_with_its_children_and_names_its_case() -> None:
    begun, ended = sanitize._line(begin="gla 64"), sanitize._line(end="gla 64", seconds=0.1)
    hangs = sanitize._line(begin="gla 128")
    lines = "\n".join([begun, ended, hangs])
    begin = time.monotonic()
    text, bad = sanitize.child(["sh", "-c", f"echo '{lines}'; sleep 600; true"], dict(os.environ), 2.0)
    assert time.monotonic() - begin < 300, "the grandchild kept it waiting"
    (failure,) = sanitize.summary(None, [(text, bad)])["failed"]
    assert failure.startswith("a process was stopped after 2 s, at ['gla 128']")


def test_a_process_that_breaks_off_counts_as_failed() -> None:
    text, bad = sanitize.child([sys.executable, "-c", "raise SystemExit(3)"], {}, 60.0)
    assert bad == "a process ended with 3"
    assert sanitize.summary(None, [(text, bad)])["failed"][0].startswith("a process ended with 3, at no case")


def test_tools_that_run_one_at_a_time_end_in_one_file(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    here = {"commit": "0123abc", "device": "NVIDIA H200", "date": "today", "command": "--tools racecheck"}
    assert sanitize.earlier(None, here) == sanitize.earlier(out, here) == {}
    out.write_text(json.dumps({"environment": here, "tools": {"racecheck": {"calls": 4}}}))
    assert sanitize.earlier(out, here | {"date": "tomorrow", "command": ""}) == {"racecheck": {"calls": 4}}
    assert sanitize.earlier(out, here | {"commit": "4567def"}) == {}


def test_a_process_that_crashes_at_once_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its first case; the case is taken again, and a crash later on stays a failure."""
    fresh = sanitize._line(begin="gla 64", index=3)
    later = "\n".join([sanitize._line(begin="gla 32", index=2), sanitize._line(end="gla 32", seconds=0.1), fresh])
    ended = sanitize._line(calls=1, kernels=["a"], failed=[], turned_down=[]) + "\n========= ERROR SUMMARY: 0 errors"
    answers = [(fresh, "a process ended with -11"), (ended, None)]
    claims: list[list[str]] = []

    def child(command: list[str], env: dict[str, str], limit_s: float) -> tuple[str, str | None]:
        folder = Path(command[command.index("--work") + 1])
        claims.append([x.name for x in folder.iterdir()])
        (folder / "3").mkdir(exist_ok=True)
        return answers.pop(0)

    monkeypatch.setattr(sanitize, "child", child)
    found = sanitize.run("memcheck", 1, "", 60.0)
    assert claims == [[], []] and found["failed"] == [] and found["calls"] == 1
    assert found["restarted"][0].startswith("a process ended with -11, at gla 64")
    answers += [(fresh, "a process ended with -11"), (fresh, "a process ended with -11")]
    assert "at ['gla 64']" in sanitize.run("memcheck", 1, "", 60.0)["failed"][0]
    answers.append((fresh, "a process ended with -11"))
    plainly = sanitize.run(None, 1, "", 60.0)
    assert not plainly["restarted"] and plainly["failed"], "a crash without a tool is ours"
    assert sanitize.crashes([(later, "a process ended with -11"), (fresh, "a process was stopped after 5 s")]) == []
