"""Documents by the index of each token's document: `flexsp.seq_idx_to_cu_seqlens`, and `mamba2_ssd` as mamba_ssm."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from flexsp import seq_idx_to_cu_seqlens
from flexsp.ops import mamba2_ssd
from flexsp.testing.compare import relative_error
from flexsp.testing.oracles import mamba2_ssd as oracle
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED, poisoned
from tests.marks import slow

T, H, G, N, P = 23, 4, 2, 6, 5
TOKENS = "x", "dt", "B", "C", "z"
ROWS = torch.tensor([[3] * 4 + [7] + [3] * 10 + [-1] * 8, [5] * 23])
"""A row of four documents, two of which have the same index, and a row of one, with other boundaries."""


def inputs(B: int, seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64)

    return {
        "x": draw(B, T, H, P), "dt": draw(B, T, H).abs(), "A": -draw(H).abs(), "B": draw(B, T, G, N),
        "C": draw(B, T, G, N), "D": draw(H), "dt_bias": draw(H), "z": draw(B, T, H, P),
        "initial_state": draw(B, H, N, P),
    }  # fmt: skip


def by_documents(given: dict[str, torch.Tensor], idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One call of the token loop for each document; the first of a row begins with its state."""
    outputs, finals = [], []
    for b, row in enumerate(idx.tolist()):
        edges = [0, *(t for t in range(1, T) if row[t] != row[t - 1]), T]
        state, y = given["initial_state"][b : b + 1], []
        for start, stop in zip(edges, edges[1:], strict=False):
            part = {key: x[b : b + 1, start:stop] if key in TOKENS else x for key, x in given.items()}
            part["initial_state"] = state if start == 0 else torch.zeros_like(state)
            out, final = oracle(**part, dt_softplus=True)
            y.append(out)
        outputs.append(torch.cat(y, 1))
        finals.append(final)
    return torch.cat(outputs), torch.cat(finals)


def solve(call: Any, given: dict[str, torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    leaves = {key: x.to(dtype).requires_grad_() for key, x in given.items()}
    outputs = call(leaves)
    loss = torch.stack([x.cos().sum() for x in outputs]).sum()
    return [*(x.detach() for x in outputs), *torch.autograd.grad(loss, [*leaves.values()])]


def ours(given: dict[str, torch.Tensor], idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return mamba2_ssd(**given, dt_softplus=True, output_final_state=True, state_v_first=False, seq_idx=idx)


def in_kernels(sp: Any, given: dict[str, torch.Tensor], idx: torch.Tensor) -> list[torch.Tensor]:
    with poisoned(2, H):
        return solve(lambda x: ours(x, idx), given, torch.float32)


@pytest.mark.parametrize("B", [1, 2])
@pytest.mark.parametrize("kernels", [False, *slow(True)])
def test_runs_are_documents(B: int, kernels: bool) -> None:
    """Outputs, final states and gradients, as of one call for each document; rows have their own boundaries."""
    given, idx = inputs(B, random.randrange(2**31)), ROWS[:B].to(random.choice((torch.int32, torch.int64)))
    want = solve(lambda x: by_documents(x, idx), given, torch.float64)
    if kernels:
        (got,) = run_ranks(in_kernels, 1, given, idx, env=INTERPRETED)
    else:
        got = solve(lambda x: ours(x, idx), given, torch.float64)
    assert max(relative_error(a, b) for a, b in zip(got, want, strict=True)) < (2e-5 if kernels else 1e-12)


def test_no_tokens() -> None:
    given = {key: x[:, :0] if key in TOKENS else x for key, x in inputs(2, 1).items()}
    y, final = ours(given, ROWS[:, :0])
    assert y.shape == (2, 0, H, P) and torch.equal(final, given["initial_state"])


LENGTHS = [[9, 0, 14], [4, 1, 18], [0, 15, 8], [23, 0, 0]]  # within documents, at their edges, and without tokens


def over_ranks(sp: Any, given: dict[str, torch.Tensor], idx: torch.Tensor) -> list[Any]:
    found = []
    for lengths in LENGTHS:
        sp.set_lengths(lengths)
        here = slice(sum(lengths[: sp.rank]), sum(lengths[: sp.rank + 1]))
        leaves = {key: (x[:, here] if key in TOKENS else x).clone().requires_grad_() for key, x in given.items()}
        bounds = seq_idx_to_cu_seqlens(idx[:, here], sp)
        y, _ = mamba2_ssd(**leaves, dt_softplus=True, seq_idx=idx[:, here], sp=sp)
        grads = torch.autograd.grad(y.cos().sum(), [*leaves.values()])
        found.append((bounds, {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}))
    with pytest.raises(ValueError, match="^seq_idx: expected no initial and final states over ranks"):
        mamba2_ssd(**leaves, seq_idx=idx[:, here], sp=sp, output_final_state=True, state_v_first=True)
    with pytest.raises(ValueError, match="^seq_idx: expected batch size 1 over ranks"):
        seq_idx_to_cu_seqlens(torch.zeros(2, 3, dtype=torch.int64), sp)
    return found


def test_documents_go_on_over_the_edges_of_ranks() -> None:
    given, idx = inputs(1, random.randrange(2**31)), ROWS[:1]
    del given["initial_state"]
    leaves = {key: x.clone().requires_grad_() for key, x in given.items()}
    y, _ = mamba2_ssd(**leaves, dt_softplus=True, cu_seqlens=torch.tensor([0, 4, 5, 15, 23]))
    want = dict(zip(leaves, torch.autograd.grad(y.cos().sum(), [*leaves.values()]), strict=True)) | {"y": y.detach()}
    for parts in zip(*run_ranks(over_ranks, 3, given, idx), strict=True):
        assert all(bounds.tolist() == [0, 4, 5, 15, 23] for bounds, _ in parts)
        for key, x in want.items():
            each = [found[key] for _, found in parts]
            together = torch.cat(each, 1) if key in (*TOKENS, "y") else torch.stack(each).sum(0)
            assert relative_error(together, x) < 1e-12, key


def test_boundaries() -> None:
    assert seq_idx_to_cu_seqlens(ROWS).tolist() == [0, 4, 5, 15, 23, 46]
    assert seq_idx_to_cu_seqlens(ROWS[:, :0]).tolist() == [0, 0, 0]
    assert seq_idx_to_cu_seqlens(ROWS[1:, :1].int()).tolist() == [0, 1]
