"""Tests of the kernels on a real GPU (`make test-gpu`); left out where there is none."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest
import torch

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", help="i/n: about every n-th test, by the hash of its name")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    which, of = (int(x) for x in config.getoption("--shard", "1/1").split("/"))
    items[:] = [x for x in items if HERE not in x.path.parents or crc32(x.nodeid.encode()) % of == which - 1]
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


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
