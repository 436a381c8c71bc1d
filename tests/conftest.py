"""Fresh random inputs in every test, and rank pools that live for the session."""

from __future__ import annotations

import os
import random

import pytest
import torch

from flexsp.testing import close_pools

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds torch and random; a failing test shows the number, FLEXSP_TEST_SEED repeats it."""
    value = int(os.environ.get("FLEXSP_TEST_SEED", random.SystemRandom().randrange(2**31)))
    print(f"FLEXSP_TEST_SEED={value}")
    torch.manual_seed(value)
    random.seed(value)
    return value


def pytest_sessionfinish() -> None:
    close_pools()
