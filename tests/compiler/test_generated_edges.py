"""Generated kernels where an error hides: padding that is no zero, documents inside segments, who wants gradients."""

from __future__ import annotations

import functools as ft
from pathlib import Path
from typing import Any

import pytest
import torch

from flexsp.exceptions import NotAvailable
from flexsp.ops import chunk_simple_gla
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests import variants
from tests.generated_programs import DrawnProgram
from tests.harness.generated import LARGER, ONE_SEGMENT, Run, check_runs
from tests.harness.interpreted import INTERPRETED, poisoned
from tests.harness.programs import WHOLE, check_program

NOT_ZERO = [
    "(k * 0.3).exp()", "1 - k", "k.clamp(min=0.3)", "k + w", "torch.where(k > w, k, 0.5 * w)",
    "(k * k + 1).cumsum(0) * 0.1", "k * ((k * k).log().sum(-1).cumsum(0) * 0.01).sin()[:, None]",
]  # fmt: skip
"""Tiles made of k whose rows past a chunk's length are not zero, or not finite before they are summed up."""


def test_padding_that_is_not_zero(seed: int, folder: str) -> None:
    """Both operands of the products have such rows, so that one which is taken for zero shows. No two products have a
    common operand: they would become one, with the sum of the others, where one that is not zero hides another."""
    writes = " + ".join(f"({x}).T @ (v * v + {i})" for i, x in enumerate(NOT_ZERO, 1))
    reads = " + ".join(f"(q @ ({x}).T).tril() @ (v * v + {i})" for i, x in enumerate(NOT_ZERO, 1))
    source = (
        f"def chunk(k, v, w):\n    return {writes}\n\n\n"
        "def decay(prev_s, chunk_state):\n    return prev_s + chunk_state\n\n\n"
        f"def merge(q, k, v, w, chunk_state):\n    return {reads} + q @ chunk_state\n"
    )
    check_program(DrawnProgram.of_source(source, "w"), seed, folder, WHOLE)


def test_running_sums_of_pairs_whose_padding_is_not_finite(seed: int, folder: str) -> None:
    """They are -inf in the columns past a chunk's length, and multiply scores that are zero there."""
    source = (
        "def chunk(k, v):\n    return k.T @ v\n\n\n"
        "def decay(k, v, prev_s, chunk_state):\n"
        "    d = torch.outer(k[:, 0], k[:, 1]).square().log().cumsum(0) * 0.01\n"
        "    return prev_s + chunk_state + k.T @ ((d * (k @ k.T)) @ v) * 0.01\n\n\n"
        "def merge(q, k, v, scale, chunk_state):\n    return ((q @ k.T).tril() @ v + q @ chunk_state) * scale\n"
    )
    check_program(DrawnProgram.of_source(source), seed, folder, WHOLE)


def test_a_document_that_starts_inside_a_segment_between_others(folder: str) -> None:
    """What came before it must not reach the segment behind, although that segment's last chunks start no document."""
    check_runs(folder, Run("linear", T=134, H=1, K=5, V=3, chunk=16, bounds=(0, 64, 134), segments=3))


def _gradients(sp: Any, folder: str, seed: int) -> list[float]:
    """Errors of the gradient to initial states, in a call like one before whose initial states wanted none."""
    torch.manual_seed(seed)
    model = variants.load("simple_gla").make(1, 8, 4, code_dir=folder)
    shapes = {"q": (1, 9, 1, 8), "k": (1, 9, 1, 8), "v": (1, 9, 1, 4), "g": (1, 9, 1), "prev_s": (1, 1, 8, 4)}
    x = {name: -torch.rand(shape) for name, shape in shapes.items()}
    found = []
    for wanted in (False, True):
        grads = []
        for dtype in (torch.float32, torch.float64):
            leaves = {name: y.to(dtype, copy=True).requires_grad_(wanted or name != "prev_s") for name, y in x.items()}
            with poisoned(ONE_SEGMENT, 1):
                o, final = model(**leaves)
                of = [leaves["k"], *([leaves["prev_s"]] if wanted else [])]
                grads.append(torch.autograd.grad(o.sum() + final.sum(), of))
        found += [relative_error(a, b) for a, b in zip(*grads, strict=True)]
    return found


def test_initial_states_that_want_gradients_behind_some_that_do_not(tmp_path: Path, seed: int) -> None:
    (errors,) = run_ranks(_gradients, 1, str(tmp_path), seed, env=INTERPRETED)
    assert max(errors) < 1e-5, errors


def _batched_gradients(sp: Any, folder: str) -> list[str]:
    found = []
    for call in (variants.load("linear").make(2, 4, 4, code_dir=folder), ft.partial(chunk_simple_gla, g=None)):
        x = {name: torch.randn(1, 7, 2, 4, requires_grad=True) for name in ("q", "k", "v")}
        o, _ = call(**x)
        with pytest.raises(NotAvailable) as told:
            torch.autograd.grad(o, x["q"], torch.randn(2, *o.shape), is_grads_batched=True)
        found.append(str(told.value))
    return found


def test_batched_gradients_are_refused(folder: str) -> None:
    """vmap over the backward pass has no memory that kernels could read."""
    (found,) = run_ranks(_batched_gradients, 1, folder, env=INTERPRETED)
    assert len(found) == 2 and all("transforms of torch.func (vmap" in text for text in found), found


def _after_nan(sp: Any, folder: str) -> dict[str, list[bool]]:
    """With NaN in one token's key: whether outputs before it have none, and whether those from it on are NaN."""
    found = {}
    for feature in LARGER:
        program = DrawnProgram.of_features(feature)
        inputs = program.inputs(1, 37, None, torch.Generator().manual_seed(0))
        inputs["k"][:, 21] = float("nan")
        with poisoned(ONE_SEGMENT, 1):
            o, final = program.model(code_dir=folder)(**inputs)
        found[feature] = [bool(o[:, :21].isfinite().all()), bool(o[:, 21:].isnan().all()), bool(final.isnan().all())]
    return found


def test_nan_is_larger_and_smaller_than_all(folder: str) -> None:
    """As in PyTorch; a GPU's instruction gives the other number."""
    (found,) = run_ranks(_after_nan, 1, folder, env=INTERPRETED)
    assert all(all(each) for each in found.values()), found
