"""Tests of the kernels on a real GPU (`make test-gpu`); left out where there is none."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
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
