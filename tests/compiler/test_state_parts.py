"""States of several parts in generated kernels, under the interpreter; and merges that are not linear in the state."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from flexsp.compiler.dispatch import refusal
from flexsp.grammar import FlexLinearAttention, decay
from flexsp.grammar.custom import CustomTransition
from flexsp.testing.compare import DRAWS, RoundedProducts, check_functions
from flexsp.testing.ranks import run_ranks
from tests.generated_programs import NOT_LINEAR, DrawnProgram
from tests.harness.generated import MANY_SEGMENTS
from tests.harness.grammar import H, Tensors, V
from tests.harness.interpreted import INTERPRETED, poisoned
from tests.harness.programs import WHOLE, check_program, variable
from tests.harness.state_parts import Case, solved
from tests.harness.transitions import CLASSES, SIZES, Counters, draw_transition, within
from tests.marks import slow


@dataclass(frozen=True)
class Problem:
    """Inputs in float64 with values that the case's dtype has, initial states, and cotangents."""

    x: Tensors
    initial: torch.Tensor
    cotangents: list[Tensors]

    @classmethod
    def of(cls, case: Case, seed: int) -> Problem:
        x = draw_transition(case.name, case.B, case.T, seed)
        made = torch.Generator().manual_seed(seed)
        documents = case.B if case.bounds is None else len(case.bounds) - 1
        initial = torch.randn(documents, H, *SIZES[case.name], generator=made).double()
        cotangents = [
            {"o": torch.randn(case.B, case.T, H, V, generator=made).bfloat16(), "final": torch.randn(initial.shape)}
            for _ in range(DRAWS)
        ]
        cotangents = [each | {"final": within(case.name, each["final"])} for each in cotangents]
        return cls({name: y.to(case.dtype).double() for name, y in x.items()}, within(case.name, initial), cotangents)


def by_kernels(sp: Any, case: Case, problem: Problem, folder: str) -> Tensors:
    """Of this rank's tokens."""
    over = sp if case.lengths else None
    if over:
        sp.set_lengths(list(case.lengths))
    x = {name: y.to(case.dtype) for name, y in problem.x.items()}
    with poisoned(case.segments, case.B * H), variable("FLEXSP_CODE_DIR", folder):
        return solved(made_of(case.name), case, x, problem.initial.float(), problem.cotangents[:1], over)[0]


@functools.cache
def made_of(name: str) -> FlexLinearAttention:
    return FlexLinearAttention(decay.gated(), custom_transition=CLASSES[name])


def check(case: Case, folder: Path, seed: int) -> None:
    problem, model = Problem.of(case, seed), made_of(case.name)
    parts = run_ranks(by_kernels, len(case.lengths) or 1, case, problem, str(folder), env=INTERPRETED)
    want = solved(model, case, problem.x, problem.initial, problem.cotangents, None)
    with RoundedProducts(case.dtype):
        x = {name: y.to(case.dtype) for name, y in problem.x.items()}
        low = solved(model, case, x, problem.initial.float(), problem.cotangents, None)
    found = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        pieces = [part[name] for part in parts if name in part]  # states of documents are zero where they are not
        found[name] = torch.stack(pieces).sum(0) if name in ("final", "dinitial") else torch.cat(pieces, 1)
    check_functions([found], want, low)


DOCUMENTS = (0, 1, 20, 20, 37)


def half(name: str) -> Case:
    return Case(name, T=16, dtype=torch.float16, given=False, segments=1)


def packed(name: str) -> Case:
    return Case(name, bounds=DOCUMENTS, segments=MANY_SEGMENTS)


@pytest.mark.parametrize(
    "case",
    [Case("momentum", B=2), half("normalised")]
    + slow(Case("normalised", B=2), half("momentum"), packed("momentum"), packed("normalised"))
    + slow(*(f(x) for x in ("counted", "counted delta") for f in (lambda x: Case(x, B=2), half, packed))),
    ids=lambda case: case.name,
)
def test_one_rank(case: Case, tmp_path: Path, seed: int) -> None:
    """In several segments, where the transition is elementwise, and whole; fp16 without an initial state."""
    check(case, tmp_path, seed)


@pytest.mark.parametrize(
    ("name", "lengths", "bounds"),
    [("momentum", (20, 0, 17), None)]
    + slow(("normalised", (18, 19), DOCUMENTS), ("momentum", (18, 2, 17), DOCUMENTS), ("normalised", (20, 0, 17), None))
    + slow(*((x, *of) for x in ("counted", "counted delta") for of in (((18, 2, 17), DOCUMENTS), ((20, 0, 17), None)))),
)
def test_ranks(name: str, lengths: tuple[int, ...], bounds: tuple[int, ...] | None, tmp_path: Path, seed: int) -> None:
    check(Case(name, lengths=lengths, bounds=bounds), tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(), (18, 2, 17)])
@pytest.mark.parametrize("name", ["counted", "counted delta"])
def test_what_is_not_finite_stays_there(name: str, lengths: tuple[int, ...], tmp_path: Path, seed: int) -> None:
    """Tokens 1 to 20, of which the first rank has all but two."""
    case = Case(name, bounds=DOCUMENTS, lengths=lengths, segments=MANY_SEGMENTS)
    problem = Problem.of(case, seed)
    found = []
    for poison in (False, True):
        if poison:
            problem.x["k"][:, 7] = float("nan")
            problem.x["decay"][:, 9] = float("nan")
        parts = run_ranks(by_kernels, len(lengths) or 1, case, problem, str(tmp_path), env=INTERPRETED)
        found.append({key: torch.cat([part[key] for part in parts], 1) for key in ("o", *(f"d{x}" for x in problem.x))})
    for key, clean in found[0].items():
        for span in (slice(0, 1), slice(20, 37)):
            assert torch.equal(found[1][key][:, span], clean[:, span]), key
    assert found[1]["o"][:, 7:20].isnan().all()


class Apart(CLASSES["normalised"]):  # type: ignore[misc]
    """z is kept as it is: a column has another factor than the state beside it. What is added to it decays within its
    chunk, so that chunks are part of the model."""

    chunk_size = 64

    def propagate(self, state, mean, z, chunk_state, chunk_mean, chunk_z, g):  # type: ignore[no-untyped-def]
        new, mean, _ = super().propagate(state, mean, z, chunk_state, chunk_mean, chunk_z, g)
        return new, mean, z + chunk_z


@pytest.mark.parametrize(
    ("given", "kind"),
    [(CLASSES["momentum"], "dense"), (CLASSES["normalised"], "vector"), (Apart, "elementwise"),
     (Counters, "elementwise"), *slow((CLASSES["counted"], "vector"), (CLASSES["counted delta"], "dense"))],
)  # fmt: skip
def test_how_parts_act_on_each_other(given: type, kind: str) -> None:
    model = CustomTransition(given).program(2, 16, 20, 1.0, "g", False)
    assert model.program.transition == kind
    assert (kind == "elementwise") == isinstance(model._generated, str)
    assert kind != "elementwise" or "state in several parts" in str(model._generated)


class Reads(CLASSES["counted delta"]):  # type: ignore[misc]
    """The number is made of the state's first column too, as by a row of a matrix that multiplies it from the left."""

    def propagate(self, state, mean, z, n, chunk_state, chunk_mean, chunk_z, chunk_n, k, g, w):  # type: ignore[no-untyped-def]
        given = state, mean, z, n, chunk_state, chunk_mean, chunk_z, chunk_n, k, g, w
        *others, count = super().propagate(*given)
        return *others, count + (w.sum(0) @ state)[0]


@pytest.mark.slow
def test_a_number_that_reads_the_state() -> None:
    """A matrix from the left for PyTorch, over ranks too, but none that kernels hold."""
    model = CustomTransition(Reads).program(2, 16, 20, 1.0, "g", False)
    assert model.program.transition == "dense"
    assert "n: beside a state that a matrix multiplies, kernels hold numbers that" in str(model._generated)


@pytest.mark.slow
def test_parts_too_large() -> None:
    def told(name: str, K: int, V: int) -> str | None:
        sizes, meta = {"K": K, "V": V}, kernels[name].program.meta
        return refusal(kernels[name], sizes, meta.looks(sizes, 1), False)

    kernels = {name: CustomTransition(CLASSES[name]).program(2, 64, 64, 1.0, "g", False).kernels
               for name in ("momentum", "normalised")}  # fmt: skip
    assert told("normalised", 128, 128) is None and told("momentum", 128, 128) is None
    assert told("momentum", 64, 64) is None
    assert told("normalised", 128, 256) is None and told("momentum", 128, 256) is None
    reason = (
        r"kernel `summarize` would hold \[K, V\] of 256 x 256 at once, since `summarize_backward` sums over V, "
        r"at .*smaller"
    )
    assert re.fullmatch(reason, str(told("normalised", 256, 256)))
    assert "matrix of 258 x 256; kernels scan 1..256 rows and 1..512 columns" in str(told("momentum", 129, 256))


def test_a_merge_that_is_not_linear_in_the_state(tmp_path: Path, seed: int) -> None:
    check_program(DrawnProgram.of_source(NOT_LINEAR), seed, str(tmp_path), WHOLE)


def test_numbers_beside_large_states() -> None:
    """What was wrong on a GPU, and in no interpreter, is refused."""
    code = CustomTransition(CLASSES["counted"]).program(2, 128, 128, 1.0, "g", False).kernels
    for dtype, refused in ((torch.float32, True), (torch.float16, True), (torch.bfloat16, False)):
        looks = {name: (dtype, ()) for name in code.program.meta.tokens}
        said = refusal(code, {"K": 128, "V": 128}, looks, on_gpu=False)
        assert (said is not None and "gave wrong gradients on an H200" in said) == refused, said
        assert refusal(code, {"K": 128, "V": 64}, looks, on_gpu=False) is None
