"""Kernels generated from three PyTorch functions, under the interpreter: against token loops in float64, one rank and
several, and against the functions themselves for random programs.

They run in processes of their own with TRITON_INTERPRET=1, where memory from torch.empty is NaN and a call that falls
back to PyTorch fails. What is right in one half precision has to be in the other: each run draws which.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests import variants
from tests.harness.generated import (
    KERNELS,
    MANY_SEGMENTS,
    ONE_SEGMENT,
    SOME_SEGMENTS,
    Problem,
    Run,
    Tensors,
    answer,
    check_runs,
    documents,
    half,
    hgrn_by_pairs,
    joined,
    model_of,
    problem_of,
)
from tests.harness.interpreted import INTERPRETED, poisoned
from tests.marks import quick, slow

DENSE = ("deltanet", "gated_deltanet", "vector_gated_delta")


# In the worker --------------------------------------------------------------------------------------------------------


# One rank -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", quick(variants.VARIANTS, "gla", "gated_deltanet"))
def test_batched(name: str, folder: str) -> None:
    """fp32 with several chunks a segment; a half precision with one, behind other strides."""
    check_runs(
        folder,
        Run(name, B=2, T=37, H=1),
        Run(name, T=20, dtype=half(), strided=True, segments=MANY_SEGMENTS),
    )


@pytest.mark.parametrize("name", quick(variants.VARIANTS, "simple_gla", "hgrn"))
def test_packed(name: str, folder: str) -> None:
    check_runs(
        folder,
        Run(name, T=29, H=1, bounds=documents(29, 4), strided=True),
        Run(name, T=18, H=1, bounds=(0, 0, 18), segments=ONE_SEGMENT, dtype=half()),
    )


@pytest.mark.parametrize("name", ["linear", "retnet", "gla_own_bias", "deltanet", "vector_gated_delta"])
def test_small(name: str, folder: str) -> None:
    """Those that are slow above: two chunks, whole, and of two documents in a half precision."""
    packed = Run(name, T=17, H=1, K=9, V=12, bounds=(0, 3, 17), dtype=half())
    check_runs(folder, Run(name, T=18, H=1, K=12, V=9), packed)


@pytest.mark.parametrize("name", ["gated_deltanet", *slow("simple_gla", "gla", "hgrn", "gla_outer_gates")])
def test_other_sizes(name: str, folder: str) -> None:
    """A state wider than one panel of columns, or with more rows than columns, and two heads."""
    K, V = random.choice([(40, 12), (12, 40), (33, 7), (7, 200)])
    check_runs(folder, Run(name, T=19, K=K, V=V, bounds=random.choice([None, (0, 2, 19)])))


@pytest.mark.parametrize(
    ("name", "chunk"),
    [("gla", 64), ("gated_deltanet", 128)]
    + slow(
        ("deltanet", 64), ("hgrn", 64), ("simple_gla", 64), ("deltanet", 32), ("vector_gated_delta", 64), ("rwkv7", 64),
        ("gla_own_bias", 128),
    ),
)
def test_chunk_sizes(name: str, chunk: int, folder: str) -> None:
    """Levels of inverses and of scores. The last chunk is short, and so is one document."""
    T = chunk + random.randrange(3, chunk)
    check_runs(
        folder,
        Run(name, T=T, H=1, chunk=chunk),
        Run(name, T=T, H=1, chunk=chunk, bounds=(0, 3, T), segments=MANY_SEGMENTS),
    )


@pytest.mark.parametrize("segments", [SOME_SEGMENTS, *slow(ONE_SEGMENT, MANY_SEGMENTS)])
def test_segments(segments: int, folder: str) -> None:
    bounds = (0, 0, 3, 38, 38, 50, 53, 53)  # a document over several segments, empty ones at both ends and between
    check_runs(
        folder,
        Run("gla", T=53, H=1, bounds=bounds, segments=segments),
        Run("simple_gla", T=53, H=1, segments=segments),
        Run("hgrn", T=53, H=1, K=40, bounds=bounds, segments=segments),  # two programs for a state
    )


@pytest.mark.parametrize("name", ["deltanet", "hgrn", *slow("retnet", "rwkv7", "gla_own_bias")])
def test_one_token_and_none(name: str, folder: str) -> None:
    check_runs(
        folder,
        Run(name, T=1),
        Run(name, T=0, B=2),
        Run(name, T=1, H=1, bounds=(0, 0, 1)),
        Run(name, T=0, bounds=(0, 0, 0)),
    )


@pytest.mark.parametrize("name", ["hgrn", "gated_deltanet", *slow("retnet", "simple_gla", "gla", "rwkv6", "rwkv7")])
def test_gates_from_none_to_closed(name: str, folder: str) -> None:
    H = 3 if name == "gated_deltanet" else 2 if name == "retnet" else 1  # a few numbers of one head may be unlucky
    check_runs(
        folder,
        Run(name, T=21, H=H, gates=(-1e-4, 0.0, -1.0, -20.0)),
        Run(name, T=21, H=H, gates=(0.0, -20.0), bounds=(0, 19, 21), dtype=half()),
    )


def closed(sp: Any, name: str, folder: str) -> list[str]:
    """Names of results that are not finite when gates are -1e4."""
    run = Run(name, T=37, gates=(0.0, -1e4, -105.0))
    found = answer(None, run, problem_of(run), folder)
    return [key for key, x in found.items() if not x.isfinite().all()]


@pytest.mark.parametrize("name", ["gla", "hgrn", *slow("gated_deltanet", "rwkv6", "rwkv7")])
def test_gates_far_past_underflow_are_finite(name: str, folder: str) -> None:
    (found,) = run_ranks(closed, 1, name, folder, env=INTERPRETED)
    assert not found


# Ways to call ---------------------------------------------------------------------------------------------------------


def ways(sp: Any, name: str, seed: int, folder: str) -> dict[str, bool]:
    """Whether calls agree with a plain one; the same kernels on the same numbers, so bit by bit."""
    torch.manual_seed(seed)
    run = Run(name, T=19, H=1)
    problem = problem_of(run)
    inputs = {key: x.float() for key, x in (problem.tokens | problem.params).items()} | {"prev_s": problem.initial}
    inputs["prev_s"] = inputs["prev_s"].float()
    do, dfinal = problem.do.float(), problem.dfinal.float()
    model = model_of(name, run.H, run.K, run.V, None, folder, run.lowering)

    def same(a: Sequence[Any], b: Sequence[Any]) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    def leaves(*only: str) -> Tensors:
        return {key: x.clone().requires_grad_(not only or key in only) for key, x in inputs.items()}

    found: dict[str, bool] = {}
    with poisoned(SOME_SEGMENTS, run.H):
        x, other = leaves(), leaves()
        o, final = model(**x)
        later, last = model(**{key: y * 0.5 for key, y in other.items()})
        torch.autograd.grad([later, last], list(other.values()), [do, dfinal])
        plain = torch.autograd.grad([o, final], list(x.values()), [do, dfinal], retain_graph=True)
        again = torch.autograd.grad([o, final], list(x.values()), [do, dfinal])
        all_of = list(zip(inputs, plain, strict=True))
        found["two backward passes"] = same(plain, again)

        value = "v" if "v" in inputs else "x"
        for only in ([value], ["prev_s"], [key for key in inputs if key not in ("q", "prev_s")]):
            x = leaves(*only)
            grads = torch.autograd.grad(list(model(**x)), [x[key] for key in only], [do, dfinal])
            found[f"gradients of {only}"] = same(grads, [y for key, y in all_of if key in only])

        with torch.no_grad():
            still = model(**leaves())
        found["no grad"] = same(still, (o, final)) and not any(y.requires_grad for y in still)

        x = {key: y[0] if key in problem.tokens else y for key, y in inputs.items()}
        x = {key: y.clone().requires_grad_() for key, y in x.items()}
        flat = model(**x)
        grads = torch.autograd.grad(list(flat), list(x.values()), [do[0], dfinal])
        found["no batch axis"] = same((flat[0], flat[1]), (o[0], final)) and same(
            [g.reshape(y.shape) for g, y in zip(grads, plain, strict=True)], plain
        )

        x = leaves()
        zeros = torch.autograd.grad(list(model(**x)), list(x.values()), [do, torch.zeros_like(dfinal)])
        found["outputs only"] = same(torch.autograd.grad(model(**x)[0], list(x.values()), do), zeros)
        zeros = torch.autograd.grad(list(model(**x)), list(x.values()), [torch.zeros_like(do), dfinal])
        unused = torch.autograd.grad(model(**x)[1], list(x.values()), dfinal)
        found["final states only"] = same(unused, zeros)
        ones = torch.autograd.grad(list(model(**x)), list(x.values()), [torch.ones_like(do), torch.ones_like(dfinal)])
        o, final = model(**x)
        found["gradients of sums"] = same(torch.autograd.grad(o.sum() + final.sum(), list(x.values())), ones)

        del x["prev_s"]
        o, final = model(**x)
        nothing = torch.zeros_like(inputs["prev_s"])
        found["no initial state"] = same((o, final), model(**x, prev_s=nothing))
    return found


@pytest.mark.parametrize("name", ["deltanet", *slow("simple_gla", "hgrn")])
def test_ways_to_call(name: str, seed: int, folder: str) -> None:
    (found,) = run_ranks(ways, 1, name, seed, folder, env=INTERPRETED)
    assert all(found.values()), found


def fallbacks(sp: Any, folder: str) -> dict[str, list[str]]:
    """Warnings of two calls each."""

    def told(model: Any, dtype: torch.dtype = torch.float32) -> list[str]:
        of = model.program.meta
        tokens = {
            name: -torch.rand([1, 5, *(s.choices[0] for s in what.shape[1:])], dtype=dtype)
            for name, what in of.tokens.items()
        }
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                o, final = model(**tokens)
        assert o.isfinite().all() and final.isfinite().all() and o.dtype == dtype
        return [text for x in caught if "PyTorch" in (text := str(x.message))]

    make = variants.load("linear").make
    return {
        "three axes": told(hgrn_by_pairs(code_dir=folder, fallback="pytorch")),
        "float64": told(make(2, 5, 4, code_dir=folder), torch.float64),
        "large": told(make(1, 257, 4, code_dir=folder, fallback="pytorch")),
        "chunk": told(make(2, 5, 4, chunk_size=48, code_dir=folder, fallback="pytorch")),
        "fine": told(make(2, 5, 4, code_dir=folder)),
    }


def test_what_falls_back_says_why_once(folder: str) -> None:
    (found,) = run_ranks(fallbacks, 1, folder, env=INTERPRETED)
    assert found["float64"] == found["fine"] == []
    for case, reason in (("three axes", "decayed_sums(x, g)"), ("large", "K = 257"), ("chunk", "chunk_size = 48")):
        (told,) = found[case]
        assert told.startswith("merge: runs in PyTorch, slowly: ") and reason in told, told


def in_folder(sp: Any, given: str, default: str) -> list[Any]:
    """Files of two models, the first's folder is given, the second's is not; and whether kernels that find the
    first's leave it alone."""
    make = variants.load("simple_gla").make
    x = {key: -torch.rand(1, 5, 2, *([] if key == "g" else [4])) for key in ("q", "k", "v", "g")}
    results: list[Any] = []
    first = make(2, 4, 4, code_dir=given)
    first(**x)
    results.append(sorted(p.name for p in Path(given).iterdir()))
    [file] = Path(given).iterdir()
    source = file.read_text()
    before = file.stat().st_mtime_ns
    second = type(first.kernels)(first.program, given)
    reused = hasattr(second.module, "output") and file.stat().st_mtime_ns == before
    results += [sorted(p.name for p in Path(given).iterdir()), reused]
    results.append(second.source == source and second.path == file)
    os.environ["FLEXSP_CODE_DIR"] = default
    try:
        third = make(2, 4, 4)
        third(**x)
    finally:
        del os.environ["FLEXSP_CODE_DIR"]
    results.append([p.name for p in Path(default).iterdir()] == [file.name])
    return results


def test_code_folder(tmp_path: Path) -> None:
    ((first, second, reused, equal, default),) = run_ranks(
        in_folder, 1, str(tmp_path / "given"), str(tmp_path / "default"), env=INTERPRETED
    )
    assert len(first) == 1 and first[0].startswith("merge_") and first == second
    assert reused and equal and default


def explained(sp: Any, name: str, folder: str) -> tuple[str, list[str], list[str], str]:
    model = model_of(name, 2, 20, 24, None, folder, "generated")
    code = model._generated
    return model.explain(graph=True), list(code.kernels), [x.kind for x in code.step.intrinsics], str(code.path)


@pytest.mark.parametrize("name", ["gla", "deltanet"])
def test_explain_names_every_kernel_and_the_file(name: str, folder: str) -> None:
    ((text, kernels, intrinsics, path),) = run_ranks(explained, 1, name, folder, env=INTERPRETED)
    walks = KERNELS if name in DENSE else KERNELS | {"summarize", "summarize_backward"}
    assert walks <= set(kernels)
    assert f"file: {path}" in text and path.startswith(folder)
    for kind in (*kernels, *intrinsics):
        assert any(line.strip().startswith((f"{kind}:", f"{kind} in ")) for line in text.splitlines()), kind
    assert ("inverse" in intrinsics) == (name in DENSE)
    assert ("scores" in intrinsics) == (name in ("gla", "vector_gated_delta"))


# Ranks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gla", *slow("simple_gla", "hgrn", "gla_outer_gates")])
def test_two_uneven_ranks(name: str, folder: str) -> None:
    check_runs(
        folder,
        Run(name, T=37, B=2, H=1, lengths=(17, 20)),
        Run(name, T=20, H=1, lengths=(20, 0), dtype=half()),
        Run(name, T=40, H=1, lengths=(5, 35), bounds=(0, 30, 30, 33, 40), segments=MANY_SEGMENTS),
    )


@pytest.mark.parametrize("name", ["hgrn", *slow("gla", "retnet", "gla_outer_gates")])
def test_three_ranks_with_an_empty_shard(name: str, folder: str) -> None:
    lengths = random.choice([(0, 20, 19), (20, 0, 19), (20, 19, 0)])
    check_runs(
        folder,
        *(Run(name, T=39, H=1, lengths=lengths, bounds=bounds) for bounds in (None, (0, 0, 39))),
        Run(name, T=39, H=1, lengths=(13, 3, 23), bounds=random.choice([(0, 13, 13, 39, 39), (0, 1, 38, 39), (0, 39)])),
    )


def one_and_all(sp: Any, run: Run, problem: Problem, folder: str) -> tuple[Tensors, Tensors]:
    alone = Run(**{**vars(run), "lengths": None})
    return answer(sp, alone, problem, folder), answer(sp, run, problem, folder)


@pytest.mark.parametrize("name", ["simple_gla", *slow("gla", "hgrn", "gla_outer_gates")])
def test_ranks_equal_one_rank(name: str, folder: str) -> None:
    """Where shards begin at chunks, the same sums in another order."""
    run = Run(name, T=40, H=1, lengths=(32, 8))
    problem = problem_of(run)
    parts = run_ranks(one_and_all, 2, run, problem, folder, env=INTERPRETED, timeout=200)
    alone, over = parts[0][0], joined(problem, [part[1] for part in parts])
    errors = {key: relative_error(over[key], x) for key, x in alone.items()}
    assert over.keys() == alone.keys() and max(errors.values()) < 5e-6, errors


@pytest.mark.parametrize("name", ["deltanet", *slow("gated_deltanet", "vector_gated_delta", "rwkv7")])
def test_dense_transitions_over_ranks(name: str, folder: str) -> None:
    check_runs(
        folder,
        Run(name, T=37, H=1, lengths=random.choice([(20, 17), (0, 37), (37, 0)])),
        Run(name, T=25, H=1, lengths=(9, 16), bounds=random.choice([(0, 0, 20, 25), (0, 9, 25), (0, 4, 4, 25)])),
    )
