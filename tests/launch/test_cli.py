"""The `flexsp` command: its flags, and what the doctor says and does when a test fails or hangs."""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexsp.comm import transport
from flexsp.comm.transport import transports
from flexsp.launch import cli, doctor

ROOT = Path(__file__).resolve().parents[2]

FLAGS = {
    "doctor": ["--no-test", "--ranks"],
    "dump": [],
    "plan": [
        "--model", "--tokens", "--gpus", "--gpus-per-host", "--gpu", "--gpu-memory", "--sequences", "--parameters",
        "--optimizer", "--no-checkpointing", "--network", "--json",
    ],
    "simulate": [
        "--ranks", "--per-host", "--nic", "--nic-latency", "--nics", "--nvlink", "--T-local", "--case", "--schedules",
        "--kernel-us", "--check", "--out", "--plot",
    ],
    "bench op": [
        "--B", "--H", "--K", "--V", "--dtype", "--warmup", "--iterations", "--out", "--strict", "--gates", "--variant",
        "--ops", "--T", "--device", "--no-baseline", "--baseline-ops", "--baseline-T", "--cold", "--cold-baseline",
        "--cold-timeout", "--repeats", "--add", "--time-limit", "--bandwidth",
    ],
    "compile": [
        "--layer", "--variant", "--H", "--K", "--V", "--gates", "--tokens", "--B", "--packed", "--dtype", "--ranks",
        "--schedule", "--transport", "--register", "--heap", "--gpu", "--cuda", "--out", "--jobs", "--check",
    ],
    "bench scale": [
        "--B", "--H", "--K", "--V", "--dtype", "--warmup", "--iterations", "--out", "--strict", "--gates", "--variant",
        "--case", "--T-local", "--schedules", "--transport", "--register", "--peers", "--ranks", "--timeout",
        "--no-states", "--state-batches", "--state-segments",
    ],
    "bench models": [
        "--only", "--lengths", "--B", "--gates", "--peers", "--naive", "--check", "--device", "--dtype", "--warmup",
        "--iterations", "--out", "--repeats", "--add", "--time-limit", "--bandwidth",
    ],
    "bench host": [
        "--B", "--H", "--K", "--V", "--dtype", "--warmup", "--iterations", "--out", "--strict", "--ops", "--T",
        "--repeats", "--child",
    ],
    "bench model": [
        "--size", "--T", "--sp", "--unmodified", "--profile", "--transport", "--register", "--ranks", "--warmup",
        "--iterations", "--timeout", "--out",
    ],
    "bench traffic": [
        "--B", "--H", "--K", "--V", "--dtype", "--warmup", "--iterations", "--out", "--strict", "--op", "--T",
        "--timeout", "--child",
    ],
    "bench table": [],
    "bench document": [],
    "bench plot": ["--case", "--out"],
    "bench predict": ["--ranks", "--case"],
}  # fmt: skip


def _commands(parser: argparse.ArgumentParser, prefix: str = "") -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    nested = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    for action in nested:
        for name, child in action.choices.items():
            found |= _commands(child, f"{prefix} {name}".strip())
    if not nested:
        found[prefix] = [a.option_strings[-1] for a in parser._actions if a.option_strings and a.dest != "help"]
    return found


def test_flags_are_frozen() -> None:
    assert _commands(cli.parser()) == FLAGS


def test_names_agree_with_what_they_run() -> None:
    from flexsp.bench.cases import CASES, GATES
    from flexsp.bench.ranks import SCHEDULES
    from flexsp.bench.simulation.calibrate import KINDS_OF
    from flexsp.comm.transport import transports
    from flexsp.scan import schedules

    assert set(cli.OPS) == set(CASES) and tuple(KINDS_OF) == cli.SIMULATED
    assert cli.SCHEDULES == SCHEDULES and set(SCHEDULES) == set(schedules.SCHEDULES)
    scale = cli.parser().parse_args(["bench", "scale", "--transport", "put"])
    assert scale.schedules == list(SCHEDULES) and scale.transport in ("auto", *transports())
    assert scale.case == ["simple_gla"] and scale.ranks is None
    several = cli.parser().parse_args(["bench", "scale", "--case", "all", "--ranks", "1,2,4"])
    assert several.case == list(CASES) and several.ranks == [1, 2, 4]
    assert [cli.parser().parse_args(["bench", "op", "--gates", x]).gates for x in cli.GATES] == list(GATES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "op", "--ops", "glass"], "expected some of simple_gla"),
        (["bench", "scale", "--schedules", "ring"], "expected some of chain"),
        (["bench", "scale", "--case", "glass"], "expected some of simple_gla"),
        (["bench", "scale", "--ranks", "two"], "invalid comma-separated list"),
        (["bench", "op", "--T", "long"], "invalid comma-separated list"),
        (["bench"], "required: bench"),
        ([], "required: command"),
    ],
)
def test_bad_words_are_explained(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_registered_transports_have_names_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    monkeypatch.setattr(transport, "_TRANSPORTS", dict(transport._TRANSPORTS))
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: SimpleNamespace(run=lambda args: args.transport))
    words = ["bench", "scale", "--transport", "a_file_made_me", "--schedules", "chain:a_file_made_me"]
    with pytest.raises(SystemExit):
        cli.main(words)
    assert "choose from" in capsys.readouterr().err
    (tmp_path / "some_transport.py").write_text(
        "from flexsp.comm.transport import Transport, register_transport\n"
        "class Mine(Transport):\n    name, device = 'a_file_made_me', 'cuda'\n"
        "register_transport(Mine())\n"
    )
    words += ["--register", str(tmp_path / "some_transport.py")]
    for command in (words, ["bench", "model", *words[2:4], *words[6:]], ["compile", *words[2:4], *words[6:]]):
        transport._TRANSPORTS.pop("a_file_made_me", None)
        assert cli.main(command) == "a_file_made_me" and sys.modules.pop("some_transport").Mine
    assert cli.main(["bench", "scale", "--register", str(tmp_path / "none.py")]) == 1
    assert "--register: expected a Python file that exists" in capsys.readouterr().err


def test_help_needs_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\nfrom flexsp.launch.cli import main; main(['bench', 'op', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and "--baseline-ops" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("triton", "numpy", "hopper", "wanted", "levels"),
    [
        (None, "2.3.5", False, None, {"triton": "warn"}),
        ("3.3.1", "2.3.5", True, None, {"triton": "ok"}),
        ("3.4.0", "2.3.5", True, None, {"triton": "warn"}),
        ("3.6.0", "2.3.5", False, None, {"triton": "info"}),
        ("3.6.0", "2.5.2", True, "3.6.0", {"triton": "warn", "numpy": "warn"}),
        ("3.7.0", "2.5.2", True, "3.6.0", {"triton": "warn", "torch and triton": "warn"}),
        ("3.7.1", "2.5.2", True, "3.7.1", {"triton": "ok"}),
    ],
)
def test_known_bad_tritons(
    triton: str | None, numpy: str, hopper: bool, wanted: str | None, levels: dict[str, str]
) -> None:
    assert {f.name: f.level for f in doctor.triton_advice(triton, numpy, hopper, wanted)} == levels


def _report(gpus: int, reach: bool = True, **missing: Any) -> dict[str, Any]:
    heaps = {"nvshmem": missing.get("nvshmem"), "torch_symm": missing.get("torch_symm")}
    gpu = {"name": "GPU", "capability": [9, 0], "gib": 139.0, "sms": 132}
    peers = [[i == j or reach for j in range(gpus)] for i in range(gpus)]
    return {"gpus": [gpu] * gpus, "peers": peers, "heaps": heaps, "put": missing.get("put"), "cuda": "13.0"}


@pytest.mark.parametrize(
    ("report", "levels"),
    [
        ({"gpus": [], "peers": []}, {"process_group": "ok", "peer, put": "info"}),
        (_report(1), {"process_group": "ok", "peer, put": "info"}),
        (_report(4), {"process_group": "ok", "peer": "ok", "put": "ok"}),
        (_report(4, nvshmem="no nvshmem4py", put="no bitcode"), {"process_group": "ok", "peer": "ok", "put": "info"}),
        (_report(2, nvshmem="no", torch_symm="no", put="no"), {"process_group": "ok", "peer": "warn", "put": "info"}),
        (_report(2, reach=False), {"process_group": "ok", "peer": "warn", "put": "ok"}),
    ],
)
def test_transports_by_what_is_there(report: dict[str, Any], levels: dict[str, str]) -> None:
    assert {f.name: f.level for f in doctor.transports(report) if f.name != "posix"} == levels


def test_every_transport_has_a_line() -> None:
    assert sorted(f.name for f in doctor.transports(_report(2))) == sorted(transports())


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules the doctor's children can run."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "good.py").write_text('print(\'noise\')\nprint(\'[["ok", "good", "fine"]]\')\n')
    (tmp_path / "bad.py").write_text("raise SystemExit('it broke')\n")
    (tmp_path / "late.py").write_text(
        "import os, subprocess, sys, time\n"
        "if os.environ.get('RANK') != '1':\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "    print(child.pid, 'noise', 'waiting', sep='\\n', flush=True)\n"
        "    time.sleep(600)\n"
        'print(\'[["ok", "late", "fine"]]\')\n'
    )
    return tmp_path


def test_children_report_fail_and_never_hang(scripts: Path) -> None:
    (good,) = doctor.Child("good", ["good"], ranks=2, timeout_s=100).start(scripts).collect()
    assert (good.level, good.detail) == ("ok", "fine")
    (bad,) = doctor.Child("bad", ["bad"], timeout_s=100).start(scripts).collect()
    assert bad.level == "fail" and "exit status 1: it broke" in bad.detail
    began = time.monotonic()
    late = doctor.Child("late", ["late"], ranks=2, timeout_s=3)
    (finding,) = late.start(scripts).collect()
    assert time.monotonic() - began < 100  # its children sleep for ten minutes
    assert finding.level == "fail" and finding.name == "late, rank 0"
    assert "no answer within 3 s; last words: ['waiting']" in finding.detail
    grandchild = int(late.lines(0)[0])
    status = Path(f"/proc/{grandchild}/status")
    while alive(status) and time.monotonic() - began < 100:
        time.sleep(0.1)
    assert not alive(status)


def test_ranks_that_run_at_once_meet_at_ports_of_their_own() -> None:
    with socket.socket() as taken:
        port = doctor._free_port()
        taken.bind(("127.0.0.1", port))
        assert doctor._free_port() != port


@pytest.mark.parametrize(
    ("gpus", "asked", "world"), [(0, None, 0), (1, None, 0), (2, None, 2), (8, None, 4), (8, 3, 3)]
)
def test_ranks_of_the_self_test(
    gpus: int, asked: int | None, world: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On GPUs, over what is there, where there are two and more; on the CPU always."""

    class Started:
        def __init__(self, title: str, arguments: list[str], ranks: int = 1, **others: Any) -> None:
            self.told = (arguments[-1], title, ranks)

        def start(self, folder: Path) -> Started:
            return self

        def collect(self) -> list[Any]:
            return [self.told] if self.told[2] > 1 or "ranks" in self.told[1] else []

    there = [doctor.Finding(level, name, "") for level, name in (("ok", "peer"), ("warn", "put"))]
    monkeypatch.setattr(doctor, "transports", lambda report: there)
    monkeypatch.setattr(doctor, "Child", Started)
    found = doctor.self_test({"gpus": [{}] * gpus}, asked, tmp_path)
    want = [("process_group", "2 CPU ranks", 2), ("peer", f"{world} GPU ranks, peer", world)]
    assert found == want[: 2 if world else 1]


def alive(status: Path) -> bool:
    try:
        return "zombie" not in status.read_text()
    except OSError:
        return False


def test_a_failed_test_is_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "_inspect", lambda folder: ({"gpus": [], "peers": []}, []))
    for level, status in (("ok", 0), ("warn", 0), ("fail", 1)):
        monkeypatch.setattr(doctor, "self_test", lambda *a, level=level: [doctor.Finding(level, "ops", "text")])
        assert cli.main(["doctor"]) == status
        assert ("1 failed" in capsys.readouterr().out) == (level == "fail")


def test_the_self_test_notices_a_wrong_op(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsp import ops
    from flexsp.testing import selftest

    monkeypatch.setattr(selftest, "OPS", ["simple_gla"])
    assert [level for level, _, _ in selftest.ops("cpu", "float32")] == ["ok"]
    right = ops.chunk_simple_gla

    def wrong(q: Any, *args: Any, **named: Any) -> Any:
        o, state = right(q, *args, **named)
        return o * (1 + 1e-4), state

    monkeypatch.setattr(ops, "chunk_simple_gla", wrong)
    assert [level for level, _, _ in selftest.ops("cpu", "float32")] == ["fail"]
