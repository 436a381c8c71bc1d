"""mLSTM, the selective scan and Mamba-3 on one GPU against the token loops of tests/harness/."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from flexsp import ops
from flexsp.kernels.diagonal import tiles, tiling
from flexsp.testing.compare import FLOAT32_ROUNDING, check_op
from tests.harness import mamba3, mlstm, selective

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BOUNDS = torch.tensor([0, 61, 61, 125, 126, 203, 203])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("T", "K", "V"),
    [(203, 64, 128), (203, 20, 7), (203, 256, 16), (259, 128, 128), (203, 128, 300), (259, 256, 512)],
)
def test_mlstm(T: int, K: int, V: int, dtype: torch.dtype, packed: bool, seed: int) -> None:
    inputs = mlstm.conditioned(mlstm.draw(1 if packed else 2, T, 6 if packed else 2, K, V, seed), dtype)
    inputs |= {"cu_seqlens": BOUNDS * (BOUNDS < 203) + T * (BOUNDS == 203)} if packed else {}
    # Tensor cores cut sums off after each 8 products: K / 8 times half a unit of what is summed up, in the mean half of
    # the sum, where all products are positive.
    credit = K / 32 * FLOAT32_ROUNDING if dtype == torch.float32 else 0.0
    check_op(mlstm.chunk, mlstm.oracle, inputs, dtype=dtype, device="cuda", wide=mlstm.KEPT_WIDE, credit=credit)


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
    mamba3.compare(ops.mamba3, case, inputs, dtype, device="cuda")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", [1, 16, 64, 128, 150])
@pytest.mark.parametrize("K", [64, 128, 256])
def test_mamba3_of_every_size(
    K: int, values: int, dtype: torch.dtype, packed: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two chunks a segment and several segments, so that every walk starts and ends in the middle."""
    monkeypatch.setattr(mamba3, "P", values)
    monkeypatch.setitem(mamba3.CASES, "sized", (0, 1, K, K // 4, True))
    monkeypatch.setattr(tiles, "segment_length", lambda *args: 2)
    inputs = mamba3.draw("sized", 1 if packed else 2, 203, 6 if packed else 2, seed)
    inputs |= {"cu_seqlens": BOUNDS} if packed else {}
    tiling.tiling_of.cache_clear()
    try:
        mamba3.compare(ops.mamba3, "sized", inputs, dtype, device="cuda")
    finally:
        tiling.tiling_of.cache_clear()


@pytest.mark.parametrize("angles", ["of heads", "of one head", "one row"])
def test_mamba3_gives_the_same_bits_again(angles: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients of two calls, in sizes that fill the GPU."""
    monkeypatch.setattr(mamba3, "H", 32)
    monkeypatch.setattr(mamba3, "P", 64)
    monkeypatch.setitem(mamba3.CASES, "wide", (0, 1, 128, 32, True))
    narrow = ("x", "B", "C")
    inputs = mamba3.draw("wide", 1, 5000, 0, seed)
    leaves = {key: x.to("cuda", torch.bfloat16 if key in narrow else torch.float32) for key, x in inputs.items()}
    if angles != "of heads":
        leaves["angles"] = leaves["angles"][:, :, :1].expand(-1, -1, 32 if angles == "of one head" else 1, -1)
    leaves = {key: x.detach().requires_grad_() for key, x in leaves.items()}
    found = []
    for _ in range(2):
        y, _ = ops.mamba3(**leaves)
        found.append([y, *torch.autograd.grad(y, list(leaves.values()), torch.ones_like(y))])
    assert all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(*found, strict=True))


def test_mamba3_kernels_of_large_tensors() -> None:
    """More than 2^31 numbers: the last tokens have what a call of them alone has."""
    from flexsp.kernels.mamba3 import autograd_functions as op

    T, H, K, few = 2**18 + 5, 32, 256, 100
    made = torch.Generator("cuda").manual_seed(1)
    sizes = {"B": (1, T, 1, K), "C": (1, T, 1, K), "turned": (1, T, H, 1), "gamma": (1, T, H), "eta": (1, T, H)}
    inputs = {key: torch.rand(size, generator=made, device="cuda") - 0.5 for key, size in sizes.items()}
    inputs = {key: x.bfloat16() if key in ("B", "C") else x for key, x in inputs.items()}
    others = dict.fromkeys(("B_bias", "C_bias", "arrived", "until", "D"))
    found = []
    for at in (slice(None), slice(T - few, None)):
        leaves = {key: x[:, at].detach().requires_grad_() for key, x in inputs.items()}
        rows = op.rows(**leaves, **others, pairwise=True)
        wanted = [x for key, x in leaves.items() if key != "turned"]  # whose gradient the engine has
        grads = torch.autograd.grad([rows.q, rows.k], wanted, [rows.k.detach(), rows.q.detach()])
        found.append([x[:, -few:].clone() for x in (rows.q.detach(), rows.k.detach(), *grads)])
        del rows, grads, leaves
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
