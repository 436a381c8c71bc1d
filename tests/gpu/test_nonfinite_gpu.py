"""inf and NaN stay in their document, and are seen from their token on, in kernels on one GPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from flexsp.testing.cases import CASES
from tests import variants
from tests.generated_programs import DrawnProgram
from tests.gpu.judge import CUDA, DTYPES
from tests.harness.generated import LARGER
from tests.harness.nonfinite import BOUNDS, differences


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("subject", [*CASES, *(f"variant {name}" for name in variants.VARIANTS)])
@pytest.mark.usefixtures("poisoned")
def test_stays_in_its_document(
    folder: Path, monkeypatch: pytest.MonkeyPatch, subject: str, dtype: torch.dtype
) -> None:
    monkeypatch.setenv("FLEXSP_CODE_DIR", str(folder))
    assert differences(None, [subject], random.randrange(2**31), dtype, BOUNDS, device="cuda") == []


@pytest.mark.parametrize("feature", LARGER)
def test_nan_is_larger_and_smaller_than_all(folder: Path, seed: int, feature: str) -> None:
    program, token = DrawnProgram.of_features(feature), 21
    inputs = program.inputs(1, 37, None, torch.Generator().manual_seed(seed))
    inputs["k"][:, token] = float("nan")
    o, final = program.model(code_dir=str(folder))(**{name: x.to(CUDA) for name, x in inputs.items()}, sp=False)
    assert o[:, :token].isfinite().all() and o[:, token:].isnan().all() and final.isnan().all()
