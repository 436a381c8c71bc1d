"""States on one GPU whose numbers have a factor each, and states that are maxima: random and given programs against
their functions in float64, and mLSTM as two programs against the op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flexsp.testing.compare import relative_error
from tests.generated_programs import MAXIMA, OF_EACH_NUMBER, DrawnProgram, _Draw, draw_program
from tests.harness import stabilised as pair

PROGRAMS = {name: DrawnProgram.of_source(*source) for name, source in OF_EACH_NUMBER.items()} | MAXIMA
KINDS = ("outer", "matrix parameter", "maximum")
RANDOM = [seed for seed in range(400) if _Draw(seed).gate in KINDS][:40]
BOUNDS = (0, 0, 3, 700, 701, 1500)
Tensors = dict[str, torch.Tensor]


def results(call: Callable[[Tensors], Any], x: Tensors, seed: int) -> Tensors:
    """Outputs, final states and gradients."""
    leaves = {name: y.clone().requires_grad_() for name, y in x.items()}
    ends = [y for y in call(leaves) if y is not None]
    made = torch.Generator().manual_seed(seed)
    cotangents = [torch.randn(y.shape, generator=made, dtype=torch.float64).to(y) for y in ends]
    grads = torch.autograd.grad(ends, list(leaves.values()), cotangents, materialize_grads=True)
    return {**{str(i): y.detach() for i, y in enumerate(ends)}, **dict(zip(leaves, grads, strict=True))}


def check(program: DrawnProgram, folder: Path, seed: int, bounds: tuple[int, ...] | None) -> None:
    model = program.model(code_dir=str(folder))
    x = program.inputs(1, 1500, bounds, torch.Generator().manual_seed(seed))
    if "A.relu()" in program.source:  # states that grow overflow
        x["A"].clamp_(max=1)
    if "maximum(" in program.source:  # so that sums are exact: a rounding off, another one of two would be the larger
        x = {name: (8 * y).round() / 8 for name, y in x.items()}
    cu = None if bounds is None else torch.tensor(bounds)
    want = results(lambda y: model(**y, cu_seqlens=cu), {name: y.double() for name, y in x.items()}, seed)
    cu = None if cu is None else cu.cuda()
    found = results(lambda y: model(**y, cu_seqlens=cu), {name: y.cuda() for name, y in x.items()}, seed)
    errors = {name: relative_error(found[name].cpu(), y) for name, y in want.items()}
    assert max(errors.values()) < 3e-4, (errors, program.source)


@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["whole", "packed"])
@pytest.mark.parametrize("case", PROGRAMS)
@pytest.mark.usefixtures("poisoned")
def test_programs(folder: Path, case: str, seed: int, bounds: tuple[int, ...] | None) -> None:
    check(PROGRAMS[case], folder, seed, bounds)


@pytest.mark.parametrize("case", [name for name, x in PROGRAMS.items() if not x.vector])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.usefixtures("poisoned")
def test_large_states(folder: Path, case: str, size: int, seed: int) -> None:
    if case != "a triangle":
        check(replace(PROGRAMS[case], K=size, V=size), folder, seed, BOUNDS)


@pytest.mark.parametrize("drawn", RANDOM)
@pytest.mark.usefixtures("poisoned")
def test_random_programs(folder: Path, drawn: int, seed: int) -> None:
    check(draw_program(drawn), folder, seed, (BOUNDS, None)[drawn % 2])


@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["whole", "packed"])
@pytest.mark.usefixtures("poisoned")
def test_mlstm_as_a_pair(seed: int, bounds: tuple[int, ...] | None) -> None:
    x = pair.draw(1500, seed)
    cu = None if bounds is None else torch.tensor(bounds)
    want = results(lambda y: pair.by_op(y, cu, False)[:1], x, seed)
    cu = None if cu is None else cu.cuda()
    given = {name: y.float().cuda() for name, y in x.items()}
    found = results(lambda y: pair.mlstm(y, cu, False)[:1], given, seed)
    errors = {name: relative_error(found[name].cpu(), want[name]) for name in ("0", *x)}
    assert max(errors.values()) < 1e-3, errors
