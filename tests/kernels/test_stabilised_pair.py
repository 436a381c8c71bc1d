"""mLSTM as two programs, one whose state is the stabiliser, and one that takes it a token earlier too: like the op."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness.generated import SOME_SEGMENTS
from tests.harness.interpreted import INTERPRETED, poisoned
from tests.harness.stabilised import H, Tensors, V, by_op, draw, memory, mlstm, stabiliser
from tests.marks import slow

BOUNDS = [0, 0, 5, 26, 26, 37]


def answer(
    sp: Any, pair: bool, lengths: list[int], bounds: list[int] | None, seed: int, kind: torch.dtype = torch.float64
) -> Tensors:  # fmt: skip
    """This rank's part: outputs, final states and gradients."""
    x, made = draw(sum(lengths), seed), torch.Generator().manual_seed(seed + 1)
    do = torch.randn(1, sum(lengths), H, V, generator=made).double()
    sp.set_lengths(lengths)
    start, stop, _ = sp.shard_range(lengths[sp.rank])
    leaves = {name: y[:, start:stop].to(kind, copy=True).requires_grad_() for name, y in x.items()}
    cu = None if bounds is None else torch.tensor(bounds)
    h, state, m = (mlstm if pair else by_op)(leaves, cu, sp)
    grads = torch.autograd.grad(h, list(leaves.values()), do[:, start:stop].to(kind), materialize_grads=True)
    finals = {} if state is None or m is None else {"state": state.detach(), "m": m.detach()}
    return {"h": h.detach(), **dict(zip(leaves, grads, strict=True)), **finals}


@pytest.mark.parametrize(
    ("lengths", "bounds"),
    slow(([6, 2, 29], BOUNDS), ([37], None), ([37], BOUNDS), ([13, 0, 24], None), ([0, 20, 17], None)),
)
def test_against_the_op(lengths: list[int], bounds: list[int] | None, seed: int) -> None:
    """The gradient that goes through the maxima is zero, as the op has it: h does not depend on them."""
    parts = run_ranks(answer, len(lengths), True, lengths, bounds, seed)
    (want,) = run_ranks(answer, 1, False, [sum(lengths)], bounds, seed)
    for name, x in want.items():
        pieces = [part[name] for part in parts if name in part]
        got = torch.stack(pieces).sum(0) if name in ("state", "m") else torch.cat(pieces, 1)
        assert torch.allclose(got, x, rtol=1e-8, atol=1e-8), name


def by_kernels(sp: Any, *given: Any) -> Tensors:
    with poisoned(SOME_SEGMENTS, H):
        return answer(sp, True, *given, torch.float32)


@pytest.mark.parametrize(
    ("lengths", "bounds", "transport"),
    slow(
        ([13, 0, 24], None, "posix"),
        ([37], None, "posix"),
        ([6, 2, 29], BOUNDS, "posix"),
        ([0, 20, 17], None, "process_group"),
    ),
)
def test_kernels_of_both(lengths: list[int], bounds: list[int] | None, transport: str, seed: int) -> None:
    heap = {"heap_mib": 4} if transport == "posix" else {}
    parts = run_ranks(by_kernels, len(lengths), lengths, bounds, seed, env=INTERPRETED, transport=transport, **heap)
    (want,) = run_ranks(answer, 1, False, [sum(lengths)], bounds, seed)
    errors = {}
    for name, x in want.items():
        pieces = [part[name] for part in parts if name in part]
        got = torch.stack(pieces).sum(0) if name in ("state", "m") else torch.cat(pieces, 1)
        errors[name] = relative_error(got, x)
    assert max(errors.values()) < 2e-5, errors


def test_the_kinds() -> None:
    assert stabiliser().program.transition == "max-plus" and memory().program.transition == "scalar"
