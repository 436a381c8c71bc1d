"""Drawn programs in generated kernels, against their functions in PyTorch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from flexsp.compiler.dispatch import refusal
from flexsp.testing.compare import DRAWS, a_rounding_off, check_functions
from flexsp.testing.ranks import run_ranks
from tests.generated_programs import DrawnProgram
from tests.harness.generated import SOME_SEGMENTS, Tensors, differentiated, sums_in_float32
from tests.harness.interpreted import INTERPRETED, in_pieces, poisoned

WHOLE, PACKED = (21, None), (20, (0, 2, 2, 20))


def answers(
    model: Any, program: DrawnProgram, inputs: Tensors, bounds: Any, dtype: torch.dtype, seeds: Sequence[int],
    kernels: bool = False, pieces: int = 0,
) -> list[Tensors]:  # fmt: skip
    """Of the kernels or of PyTorch, for the cotangents of each seed."""
    cu = None if bounds is None else torch.tensor(bounds)
    shapes = [(*inputs["k"].shape[:3], inputs["prev_s"].shape[-1]), inputs["prev_s"].shape]
    drawn = [torch.Generator().manual_seed(seed) for seed in seeds]
    cotangents = [tuple(torch.randn(shape, generator=made) for shape in shapes) for made in drawn]
    leaves = {name: x.to(dtype, copy=True) for name, x in inputs.items()}
    backend = variable("FLEXSP_BACKEND", "triton" if kernels else None)
    with poisoned(SOME_SEGMENTS, program.H), in_pieces(pieces), backend:
        return differentiated(lambda given: model(**given, cu_seqlens=cu), leaves, cotangents)


@contextmanager
def variable(name: str, value: str | None) -> Iterator[None]:
    """An environment variable of another value, or none, in a process that goes on to serve other tests."""
    before = os.environ.pop(name, None)
    try:
        os.environ.update({} if value is None else {name: value})
        yield
    finally:
        os.environ.pop(name, None)
        os.environ.update({} if before is None else {name: before})


def compared(sp: Any, program: DrawnProgram, seed: int, folder: str, cases: Any, pieces: int) -> list[str]:
    """What breaks the rule of flexsp.testing.compare: kernels against the functions in float64, and in float32.

    All cotangents but the first meet inputs that are a rounding off, each its own: where a program magnifies that,
    kernels may too. Of few draws all may be lucky: of these programs one magnifies a rounding of a parameter near 0 a
    hundred times, or hardly, as it falls. In `pieces` only those whose columns do not depend on each other.
    """
    made = torch.Generator().manual_seed(seed)
    model = program.model(code_dir=folder)
    with in_pieces(pieces):
        looks = model.program.meta.looks(program.sizes, 1)
        pieces = 0 if refusal(model.kernels, program.sizes, looks, on_gpu=False) else pieces
    found = []
    for T, bounds in cases:
        inputs = program.inputs(1, T, bounds, made)
        [got] = answers(model, program, inputs, bounds, torch.float32, [seed], kernels=True, pieces=pieces)
        seeds = [seed + i for i in range(4 * DRAWS)]
        want = answers(model, program, inputs, bounds, torch.float64, seeds)
        low, of = [], inputs
        for each in seeds:
            with sums_in_float32():
                low += answers(model, program, of, bounds, torch.float32, [each])
            of = {name: a_rounding_off(x, made, torch.float32) for name, x in inputs.items()}
        try:
            check_functions([got], want, low)
        except AssertionError as error:
            found += [f"T = {T}, documents {bounds}:", str(error)]
    return found


def check_program(program: DrawnProgram, seed: int, folder: str, *cases: Any, pieces: int = 0) -> None:
    about = f"{program}, inputs of seed {seed}, pieces of {pieces}\n\n{program.source}"
    print(about)  # also where the worker does not come back
    args = program, seed, folder, cases or (WHOLE, PACKED), pieces
    (wrong,) = run_ranks(compared, 1, *args, env=INTERPRETED, timeout=250)
    assert not wrong, "\n".join([*wrong, about])
