"""mLSTM, the selective scan and Mamba-3 on one GPU against the token loops of their tests on CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from flexsp.testing.compare import check_op
from tests import test_mamba3 as mamba3
from tests import test_mlstm as mlstm
from tests import test_selective_scan as selective

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BOUNDS = torch.tensor([0, 61, 61, 125, 126, 203, 203])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("K", "V"), [(64, 128), (20, 7), (256, 16)])
def test_mlstm(K: int, V: int, dtype: torch.dtype, packed: bool, seed: int) -> None:
    inputs = mlstm.conditioned(mlstm.draw(1 if packed else 2, 203, 6 if packed else 2, K, V, seed), dtype)
    inputs |= {"cu_seqlens": BOUNDS} if packed else {}
    check_op(mlstm.chunk, mlstm.oracle, inputs, dtype=dtype, device="cuda", wide=mlstm.KEPT_WIDE)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "N"), [(96, 16), (45, 5), (7, 130)])
@pytest.mark.parametrize("how", [selective.HOW, selective.ZOH])
def test_selective_scan(how: dict[str, Any], width: int, N: int, dtype: torch.dtype, packed: bool, seed: int) -> None:
    inputs = selective.draw(1 if packed else 2, 203, 6 if packed else 2, width, N, seed)
    inputs |= {"cu_seqlens": BOUNDS} if packed else {}
    check_op(
        partial(selective.scan, **how), partial(selective.oracle, **how), inputs, dtype=dtype, device="cuda",
        wide=selective.KEPT_WIDE,
    )  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*mamba3.CASES, "wide", "wide halves"])
def test_mamba3(case: str, dtype: torch.dtype, packed: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.startswith("wide"):
        monkeypatch.setattr(mamba3, "P", 64)
        monkeypatch.setitem(mamba3.CASES, case, (0, 1, 128, 32, case == "wide"))
    inputs = mamba3.draw(case, 1 if packed else 2, 203, 6 if packed else 2, seed)
    inputs |= {"cu_seqlens": BOUNDS} if packed else {}
    mamba3.compare(mamba3.mamba3, case, inputs, dtype, device="cuda")
