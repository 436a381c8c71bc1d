"""On one GPU: packed documents that end before the tokens do, in every op. Fresh memory is NaN."""

from __future__ import annotations

import pytest
import torch

from tests.harness.ops import ALL
from tests.harness.tail import wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.usefixtures("poisoned")
def test_the_tail(name: str, dtype: torch.dtype, seed: int) -> None:
    for end, T in ((150, 300), (2, 70), (63, 64)):
        assert not wrong(ALL[name], dtype, end, T, seed, size=64, device="cuda")
