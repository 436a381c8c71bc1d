"""What is said of a Triton release and a GPU that no run of the GPU tests has covered; the GPU is a pretence."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from flexsp.exceptions import UncoveredWarning
from flexsp.launch import cli, doctor
from flexsp.runtime import tested_versions
from flexsp.runtime.tested_versions import Run, uncovered, warn_if_uncovered

RUNS = (Run("3.6.0", (9, 0), "NVIDIA H200", "0123abc", 324), Run("3.9.0", (9, 0), "NVIDIA H200", "0123abc", 324))


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested_versions, "COVERED", RUNS)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device < 2 else (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100" if device < 2 else "NVIDIA A100")
    warn_if_uncovered.cache_clear()
    tested_versions._warn.cache_clear()


@pytest.mark.parametrize(
    ("triton", "capability", "expected"),
    [
        ("3.6.0", (9, 0), True),
        ("3.6.0+git1234", (9, 0), True),
        ("3.9.0", (9, 0), True),
        ("3.6.1", (9, 0), False),
        ("3.60.0", (9, 0), False),
        ("3.6.0", (8, 0), False),
        ("3.6.0", (10, 0), False),
    ],
)
def test_a_run_covers_its_release_and_capability(triton: str, capability: tuple[int, int], expected: bool) -> None:
    assert (uncovered(triton, capability, "some GPU") is None) == expected


def test_the_text_names_what_to_know() -> None:
    text = uncovered("3.8.0", (8, 6), "NVIDIA A10")
    assert text is not None
    for part in ("3.8.0 on NVIDIA A10 (sm_86)", "`make test-gpu`", "`flexsp doctor`", "Triton 3.9.0 on NVIDIA H200"):
        assert part in text


def test_a_combination_is_warned_of_once() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for triton, device in (("3.6.0", 0), ("3.6.0", 2), ("3.6.0", 2), ("3.6.0", 3), ("3.8.0", 0)):
            warn_if_uncovered(triton, device)
    assert [w.category for w in seen] == [UncoveredWarning] * 2
    assert ["A100" in str(w.message) for w in seen] == [True, False]


def test_a_warning_that_is_an_error_is_raised_each_time() -> None:
    """Who asks for errors is not let through at the second try."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncoveredWarning)
        for _ in range(2):
            with pytest.raises(UncoveredWarning, match="A100"):
                warn_if_uncovered("3.6.0", 2)


def gpu(name: str, *capability: int) -> dict[str, Any]:
    return {"name": name, "capability": [*capability], "gib": 80.0, "sms": 108}


@pytest.mark.parametrize(
    ("gpus", "triton", "levels"),
    [
        ([], "3.6.0", []),
        ([gpu("NVIDIA H200", 9, 0)] * 2, "3.6.0", ["ok"]),
        ([gpu("NVIDIA H200", 9, 0), gpu("NVIDIA A100", 8, 0)], "3.6.0", ["ok", "warn"]),
        ([gpu("NVIDIA H200", 9, 0)], "3.8.0", ["warn"]),
        ([gpu("NVIDIA H200", 9, 0)], None, []),
    ],
)
def test_the_doctor_names_them(gpus: list[dict[str, Any]], triton: str | None, levels: list[str]) -> None:
    assert [found.level for found in doctor.coverage({"gpus": gpus}, triton)] == levels


def test_the_doctor_prints_the_warning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    report = {"gpus": [gpu("NVIDIA A100", 8, 0)], "peers": [[True]], "heaps": {}, "put": None, "cuda": "13.0"}
    monkeypatch.setattr(doctor, "_inspect", lambda folder: (report, []))
    assert cli.main(["doctor", "--no-test"]) == 0
    assert "on NVIDIA A100 (sm_80)" in capsys.readouterr().out


def test_runs_are_well_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for run in tested_versions.COVERED:
        assert all(part.isdigit() for part in run.triton.split(".")) and len(run.capability) == 2
        assert run.gpu and run.passed > 0 and set(run.commit) <= set("0123456789abcdef") and len(run.commit) >= 7
