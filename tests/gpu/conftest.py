"""Tests of the kernels on a real GPU (`make test-gpu`); left out where there is none."""

from __future__ import annotations

import fcntl
import os
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

from flexsp.ops import _recipe
from flexsp.testing.compare import Report
from tests.tested import Recorder

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", help="i/n: about every n-th test, by the hash of its name")
    parser.addoption("--tested", metavar="FOLDER", help="where to record what passed (tests/tested.py)")


def pytest_configure(config: pytest.Config) -> None:
    """Deals pytest-xdist's workers out over the GPUs, before CUDA is initialised. The first process records."""
    folder = config.getoption("--tested", None)
    if folder and not hasattr(config, "workerinput"):
        recorder = Recorder(Path(folder), config.getoption("--shard"))
        signal.signal(signal.SIGTERM, recorder.stop)  # when time is up, what ran is recorded
        config.pluginmanager.register(recorder)
    worker, gpus = os.environ.get("PYTEST_XDIST_WORKER", ""), torch.cuda.device_count()
    if worker.startswith("gw") and gpus > 1:
        names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = names[int(worker[2:]) % gpus]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    which, of = (int(x) for x in config.getoption("--shard", "1/1").split("/"))
    items[:] = [x for x in items if HERE not in x.path.parents or crc32(x.nodeid.encode()) % of == which - 1]
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _closest(monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Keeps which tensor of a test came closest to its bound, so that a bound is seen before it is missed."""
    seen: dict[str, float] = {}
    judged = Report.ok.fget  # type: ignore[attr-defined]

    def ok(report: Report) -> bool:
        seen[report.name] = max(seen.get(report.name, 0.0), report.error / report.bound)
        return bool(judged(report))

    monkeypatch.setattr(Report, "ok", property(ok))
    yield
    if seen:
        record_property("closest", max((share, name) for name, share in seen.items()))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    found = [
        (*value, report.nodeid)
        for report in terminalreporter.stats.get("", ()) if getattr(report, "when", "") == "teardown"
        for key, value in report.user_properties if key == "closest"
    ]  # fmt: skip
    if found:
        terminalreporter.section("closest to their bounds")
        for share, name, test in sorted(found, reverse=True)[:10]:
            terminalreporter.write_line(f"{share:.2f} of its bound: {name} in {test}")


@pytest.fixture(autouse=True)
def _planned_anew() -> None:
    """Other tests may have changed what plans are made of."""
    _recipe.forget()


@pytest.fixture(autouse=True)
def _memory_for_others() -> Iterator[None]:
    """What a test leaves unused goes back: many processes share a GPU."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture
def much_memory() -> Iterator[None]:
    """One of the processes that share a GPU at a time: a token loop keeps every state, of many heads over 10 GiB."""
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").replace(",", "-")
    with (Path(tempfile.gettempdir()) / f"flexsp-much-memory-{device}").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory from torch.empty is full of NaN, so that an element that no kernel wrote is noticed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.empty(8, device="cuda").isnan().all()
        yield
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where generated kernels are written."""
    return tmp_path_factory.mktemp("generated")
