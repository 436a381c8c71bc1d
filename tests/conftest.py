"""Fresh random inputs in every test, rank pools that live for the session, a folder of its own for generated files."""

from __future__ import annotations

import gc
import os
import random
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.jobs import LONGEST, TOOLS

# Neither torch nor flexsp is imported here: the process that deals out the tests would wait for them.


def _session_seed() -> int:
    """New in every session, but one for all the ranks of a torchrun: each of them works out what to expect."""
    if "FLEXSP_TEST_SEED" in os.environ:
        return int(os.environ["FLEXSP_TEST_SEED"])
    if "WORLD_SIZE" in os.environ:
        launch = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
        return zlib.crc32(" ".join(launch).encode())
    return random.SystemRandom().randrange(2**32)


SEED = _session_seed()
_MADE = "FLEXSP_CODE_DIR" not in os.environ  # by this process, not by the one that started it
if _MADE:
    os.environ["FLEXSP_CODE_DIR"] = tempfile.mkdtemp(prefix="flexsp-tests-")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--job", choices=("suite", "tools"), help="the files of one of the CPU's jobs alone")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of the other job are not even read: that takes a job's first ten seconds."""
    job = config.getoption("--job")
    if job is None or collection_path.name == "gpu":
        return job is not None or None
    other = (collection_path.stem in TOOLS) != (job == "tools")
    return (collection_path.suffix == ".py" and other) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, where workers take whole files. Between themselves, tests of a file stay in order."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = {name: at for at, name in enumerate(LONGEST)}
        items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_collection_finish() -> None:
    """One thread, as ranks have. The garbage collector need not look at all that was imported, again and again."""
    import torch

    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seeds torch and random for this test; a failing test shows the number, FLEXSP_TEST_SEED repeats it."""
    import torch

    print(f"FLEXSP_TEST_SEED={SEED}")
    value = zlib.crc32(request.node.nodeid.encode(), SEED)
    torch.manual_seed(value)
    random.seed(value)
    return value


@pytest.fixture(autouse=True)
def groups() -> Iterator[None]:
    """A test's groups end with it: a call without ranks warns where a group of several is open."""
    from flexsp.comm.ranks import GROUPS

    before = dict(GROUPS)
    yield
    GROUPS.clear()
    GROUPS.update(before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where kernels that tests generate are written: one for all files, since every rank derives the kernels of a
    variant once for each folder, which takes a second or two."""
    return str(tmp_path_factory.mktemp("generated"))


def pytest_sessionfinish() -> None:
    if ranks := sys.modules.get("flexsp.testing.ranks"):
        ranks.close_pools()
    if _MADE:
        shutil.rmtree(os.environ["FLEXSP_CODE_DIR"], ignore_errors=True)
