"""States between chunks against a plain loop: every kind of transition, cuts, numbers of chunks, gradients."""

from __future__ import annotations

import itertools

import pytest
import torch

from flexsp.kernels.rotary import rotate
from flexsp.scan.chunks import Turned, states_between

COUNTS = (0, 1, 5, 31, 32, 33, 48, 300, 16 * 16 * 2 + 3)
B, H, K, V = 2, 3, 3, 2


def plainly(
    A: torch.Tensor | None, F: torch.Tensor, start: torch.Tensor, cut: torch.Tensor | None, dense: bool,
    angles: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    S = start
    states = [S]
    for c in range(F.shape[2]):
        if cut is not None and cut[c]:
            S = torch.zeros_like(S)
        if A is not None:
            S = A[:, :, c] @ S if dense else A[:, :, c] * S
        S = S if angles is None else turn(S, angles[:, :, c])
        S = S + F[:, :, c]
        states.append(S)
    return torch.stack(states, 2)


def turn(S: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rows 0 and 1."""
    return rotate(S.transpose(-1, -2), angles.unsqueeze(-2)).transpose(-1, -2)


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize(
    ("state", "factor"),
    [((K, V), None), ((K, V), (1, 1)), ((K, V), (K, 1)), ((K, V), (K, V)), ((K,), (K,)), ((K, V), (K, K))],
    ids=["none", "scalar", "vector", "elementwise", "vector state", "dense"],
)
def test_states_between(state: tuple[int, ...], factor: tuple[int, ...] | None, cuts: bool) -> None:
    dense = factor == (K, K)
    for n in COUNTS:
        F = torch.randn(B, H, n, *state, dtype=torch.float64)
        start = torch.randn(B, H, *state, dtype=torch.float64)
        cut = torch.rand(n) < 0.05 if cuts else None
        A = None
        if factor is not None:
            A = torch.randn(B, H, n, *factor, dtype=torch.float64) / 2
            A[torch.rand(B, H, n) < 0.02] = 0.0  # without a cut, its gradient is not 0
        leaves = [x.requires_grad_() for x in (A, F, start) if x is not None]
        both = states_between(A, F, start, cut, dense), plainly(A, F, start, cut, dense)
        torch.testing.assert_close(both[0], both[1], rtol=1e-12, atol=1e-12)
        weight = torch.randn_like(both[0])
        grads = [torch.autograd.grad(x, leaves, weight, materialize_grads=True) for x in both]
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("decays", [False, True])
def test_states_that_chunks_turn(decays: bool, cuts: bool) -> None:
    for n in COUNTS:
        F, start = (torch.randn(B, H, *shape, K, V, dtype=torch.float64) for shape in ((n,), ()))
        cut = torch.rand(n) < 0.05 if cuts else None
        A = torch.rand(B, H, n, 1, 1, dtype=torch.float64) if decays else None
        angles = torch.randn(B, H, n, 1, dtype=torch.float64)
        leaves = [x.requires_grad_() for x in (A, F, start, angles) if x is not None]
        both = (
            states_between(A, F, start, cut, turned=Turned(angles, turn)), plainly(A, F, start, cut, False, angles)
        )  # fmt: skip
        torch.testing.assert_close(both[0], both[1], rtol=1e-12, atol=1e-12)
        weight = torch.randn_like(both[0])
        grads = [torch.autograd.grad(x, leaves, weight, materialize_grads=True) for x in both]
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("n", [7, 100])
def test_nothing_turns_what_is_before_a_cut(n: int) -> None:
    """Nor does a gradient that is not finite get there, in groups of chunks or not."""
    for at in (1, n // 2, n - 2):
        angles = torch.zeros(1, 1, n, 1, requires_grad=True)
        cut = torch.zeros(n, dtype=torch.bool)
        cut[at] = True
        F, start = torch.randn(1, 1, n, K, V), torch.randn(1, 1, K, V)
        found = states_between(None, F, start, cut, turned=Turned(angles, turn))
        (grad,) = torch.autograd.grad(found[:, :, at + 1 :].sum() * torch.nan, angles)
        assert not grad[:, :, :at].any() and grad[:, :, at + 1 : n].isnan().any(), (at, grad.flatten())


@pytest.mark.parametrize("n", [7, 100])
def test_nothing_passes_passes_a_cut(n: int) -> None:
    """Neither a state that is not finite, nor a gradient."""
    for kind, at in itertools.product(("none", "scalar", "dense"), (1, n // 2, n - 1)):
        factor = {"none": None, "scalar": (1, 1), "dense": (K, K)}[kind]
        A = None if factor is None else (torch.rand(1, 1, n, *factor) / 2).requires_grad_()
        F, start = torch.randn(1, 1, n, K, V), torch.full((1, 1, K, V), float("nan")).requires_grad_()
        cut = torch.zeros(n, dtype=torch.bool)
        cut[at] = True
        F.requires_grad_()
        found = states_between(A, F, start, cut, kind == "dense")
        assert found[:, :, : at + 1].isnan().all() and found[:, :, at + 1 :].isfinite().all(), (kind, at)
        found[:, :, at + 1 :].sum().backward()
        assert F.grad.isfinite().all() and not F.grad[:, :, :at].any() and not start.grad.any(), (kind, at)
        if A is not None:  # those of chunks that the state passes are its document's affair
            assert A.grad[:, :, at:].isfinite().all() and not A.grad[:, :, at].any(), (kind, at)
