"""Kernels generated from three PyTorch functions, under the interpreter: against token loops in float64, one rank and
several, and against the functions themselves for random programs.

They run in processes of their own with TRITON_INTERPRET=1, where memory from torch.empty is NaN and a call that falls
back to PyTorch fails. What is right in one half precision has to be in the other: each run draws which.
"""

from __future__ import annotations

import functools
import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flexsp.compiler import LinearAttention
from flexsp.testing.compare import DRAWS, RoundedProducts, a_rounding_off, check_functions, relative_error
from flexsp.testing.ranks import run_ranks
from tests import variants
from tests.interpreted import in_pieces, poisoned
from tests.marks import quick, slow

ENV = {"TRITON_INTERPRET": "1", "FLEXSP_BACKEND": "triton"}
ONE_SEGMENT, SOME_SEGMENTS, MANY_SEGMENTS = 1, 2, 256
DENSE = ("deltanet", "gated_deltanet", "vector_gated_delta")
KERNELS = {"output", "states", "back", "grads"}

Tensors = dict[str, torch.Tensor]
Cotangents = list[tuple[torch.Tensor, ...]]  # of outputs and final states


def half() -> torch.dtype:
    return random.choice([torch.float16, torch.bfloat16])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("generated"))


# Problems and their answers -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One variant on one problem; `bounds` are document boundaries, `gates` what log decays are drawn from.

    `lengths` are shard lengths, if it runs over ranks; `segments` about how many each head's tokens are cut into;
    `pieces` columns that chunkwise kernels take at a time, 0 for what is usual.
    """

    name: str
    T: int
    B: int = 1
    H: int = 2
    K: int = 20
    V: int = 24
    dtype: torch.dtype = torch.float32
    bounds: tuple[int, ...] | None = None
    chunk: int | None = None
    segments: int = SOME_SEGMENTS
    strided: bool = False
    gates: tuple[float, ...] | None = None
    lengths: tuple[int, ...] | None = None
    lowering: str = "generated"
    pieces: int = 0


@dataclass(frozen=True)
class Problem:
    """Inputs and cotangents in float64, with values that the run's dtype has."""

    tokens: Tensors
    params: Tensors
    initial: torch.Tensor
    do: torch.Tensor
    dfinal: torch.Tensor


@contextmanager
def sizes(run: Run) -> Iterator[None]:
    """The sizes of tests.variants, which its token loops read."""
    before = variants.H, variants.K, variants.V
    variants.H, variants.K, variants.V = run.H, run.K, run.V
    try:
        yield
    finally:
        variants.H, variants.K, variants.V = before


def wide(name: str) -> bool:
    """Whether an input stays float32 in half precision."""
    return name in ("g", "w", "log_gamma", "u")


def problem_of(run: Run) -> Problem:
    with sizes(run):
        tokens, params = variants.draw(run.name, run.B, run.T, random.randrange(2**31))
        state = variants.state_sizes(run.name)
    if run.gates is not None:
        for of in (tokens, params):
            for name in {"g", "log_gamma"} & of.keys():
                of[name] = torch.tensor(run.gates, dtype=torch.float64)[torch.randint(len(run.gates), of[name].shape)]
                of[name].view(-1)[0] = run.gates[0]  # the gradient of a parameter that is closed everywhere vanishes
    tokens, params = (
        {name: x.to(torch.float32 if wide(name) else run.dtype).double() for name, x in each.items()}
        for each in (tokens, params)
    )
    n = run.B if run.bounds is None else len(run.bounds) - 1
    drawn = [(run.B, run.T, run.H, state[-1]), *[(n, run.H, *state)] * 2]
    do, initial, dfinal = (torch.randn(shape).bfloat16().double() for shape in drawn)
    return Problem(tokens, params, initial, do, dfinal)


def wanted(run: Run, problem: Problem, cotangents: Cotangents) -> list[Tensors]:
    """Of the token loop in float64, for each pair of cotangents."""
    leaves = {name: x.clone() for name, x in (problem.tokens | problem.params).items()}
    if run.T == 0:
        nothing = {f"d{name}": torch.zeros_like(x) for name, x in leaves.items()}
        return [{"o": do, "final": problem.initial, **nothing, "dinitial": dfinal} for do, dfinal in cotangents]

    def loop(given: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        of_tokens, of_heads = ({name: given[name] for name in of} for of in (problem.tokens, problem.params))
        return variants.token_loop(run.name, of_tokens, of_heads, given["prev_s"], run.bounds)

    with sizes(run):
        return differentiated(loop, leaves | {"prev_s": problem.initial.clone()}, cotangents)


def differentiated(call: Callable[[Tensors], Any], leaves: Tensors, cotangents: Cotangents) -> list[Tensors]:
    """Outputs and gradients of `call`, for each pair of cotangents."""
    o, final = call({name: x.requires_grad_() for name, x in leaves.items()})
    names = ["dinitial" if name == "prev_s" else f"d{name}" for name in leaves]
    do, dfinal = (torch.stack([each[i].to(y) for each in cotangents]) for i, y in enumerate((o, final)))
    together = len(cotangents) > 1
    grads = torch.autograd.grad(
        [o, final], [*leaves.values()], [do, dfinal] if together else [do[0], dfinal[0]], allow_unused=True,
        is_grads_batched=together,
    )
    found = []
    for i in range(len(cotangents)):
        each = [torch.zeros_like(x) if dx is None else dx[i] if together else dx
                for x, dx in zip(leaves.values(), grads, strict=True)]  # fmt: skip
        found.append({"o": o.detach(), "final": final.detach(), **dict(zip(names, each, strict=True))})
    return found


# In the worker --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def model_of(
    name: str, H: int, K: int, V: int, chunk: int | None, folder: str, lowering: str, pieces: int = 0
) -> Any:  # fmt: skip
    return variants.load(name).make(H, K, V, chunk_size=chunk, code_dir=folder, lowering=lowering)


def other_strides(x: torch.Tensor) -> torch.Tensor:
    """The same values behind other strides: heads before tokens, or every second channel of a wider tensor."""
    if x.dim() == 4 and random.random() < 0.5:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return torch.stack([x, torch.full_like(x, float("nan"))], dim=-1)[..., 0]


def answer(sp: Any, run: Run, problem: Problem, folder: str) -> Tensors:
    """The generated kernels' outputs and gradients; this rank's part of them if `run` has lengths."""
    packed, ranks = run.bounds is not None, run.lengths is not None
    start, stop = 0, run.T
    initial = problem.initial.float()
    if run.lengths is not None:
        sp.set_lengths(list(run.lengths))
        start, stop = sum(run.lengths[: sp.rank]), sum(run.lengths[: sp.rank + 1])
        last = sp.rank == sp.world_size - 1
        if packed:  # what no rank but a document's first may read is NaN
            mine = torch.tensor([start <= b < stop or (last and b >= stop) for b in run.bounds[:-1]])
            initial = torch.where(mine.view(-1, *[1] * (initial.dim() - 1)), initial, float("nan"))
    cut = slice(start, stop)
    arrange: Callable[[torch.Tensor], torch.Tensor] = other_strides if run.strided else torch.clone
    leaves = {
        name: arrange((x[:, cut] if name in problem.tokens else x).to(torch.float32 if wide(name) else run.dtype))
        for name, x in (problem.tokens | problem.params).items()
    }
    if not ranks or packed or sp.rank == 0:
        leaves["prev_s"] = arrange(initial)
    for x in leaves.values():
        x.requires_grad_()
    cu = None if run.bounds is None else torch.tensor(run.bounds, dtype=random.choice([torch.int32, torch.int64]))
    model = model_of(run.name, run.H, run.K, run.V, run.chunk, folder, run.lowering, run.pieces)
    with poisoned(run.segments, run.B * run.H), in_pieces(run.pieces):
        o, final = model(**leaves, cu_seqlens=cu, sp=sp if ranks else False)
        assert o.dtype == run.dtype and (final is None) == (ranks and not packed and sp.rank < sp.world_size - 1)
        results = [(o, arrange(problem.do[:, cut].to(run.dtype)))]
        if final is not None:
            assert final.dtype == torch.float32
            results.append((final, arrange(problem.dfinal.float())))
        torch.autograd.backward(*zip(*results, strict=True))
    found = {"o": o.detach()} | ({} if final is None else {"final": final.detach()})
    assert all(x.grad is None or x.grad.dtype == x.dtype for x in leaves.values())
    grads = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
    return found | {"dinitial" if name == "prev_s" else f"d{name}": x for name, x in grads.items()}


def answers(sp: Any, runs: list[Run], problems: list[Problem], folder: str) -> list[Tensors]:
    return [answer(sp, run, problem, folder) for run, problem in zip(runs, problems, strict=True)]


def joined(problem: Problem, parts: Sequence[Tensors]) -> Tensors:
    """One rank's answer from the parts of all ranks: tokens joined, parameters and states summed."""
    cut = {"o", *(f"d{name}" for name in problem.tokens)}
    found = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        pieces = [part[name] for part in parts if name in part]
        found[name] = torch.cat(pieces, dim=1) if name in cut else torch.stack(pieces).sum(0)
    return found


def of_functions(run: Run, problem: Problem, cotangents: Cotangents) -> list[Tensors]:
    """What the functions give in PyTorch, products of matrices with operands in the run's dtype. All cotangents but the
    first meet inputs that are a rounding off: where a variant magnifies that, kernels may too."""
    given, made = problem.tokens | problem.params, torch.Generator().manual_seed(random.randrange(2**31))
    leaves = {name: x.to(torch.float32 if wide(name) else run.dtype, copy=True) for name, x in given.items()}
    leaves["prev_s"] = problem.initial.float()
    model = variants.load(run.name).make(run.H, run.K, run.V, chunk_size=run.chunk)
    cu = None if run.bounds is None else torch.tensor(run.bounds)
    found, of = [], leaves
    with RoundedProducts(run.dtype):
        for each in cotangents:
            found += differentiated(lambda given: model(**given, cu_seqlens=cu, sp=False), of, [each])
            of = {name: a_rounding_off(x.detach(), made, torch.float32) for name, x in leaves.items()}
    return found


def cotangents_of(run: Run, problem: Problem) -> Cotangents:
    """The problem's own first. Few pairs of tokens count where gates close."""
    found = [(problem.do, problem.dfinal)]
    for _ in range(1, DRAWS if run.gates is None else 4 * DRAWS):
        found.append(tuple(torch.randn(x.shape).bfloat16().double() for x in found[0]))
    return found


def check_runs(folder: str, *runs: Run, credit: Callable[[Run], dict[str, float]] = lambda run: {}) -> None:
    """The runs, all over as many ranks, against the token loop by the rule of flexsp.testing.compare.

    Of gradients of few numbers one answer in a hundred of a right kernel is outside its bound, since errors differ
    from cotangent to cotangent. Then the kernels answer `DRAWS` of them, and the errors are averaged. `credit`: errors
    that the functions in PyTorch are credited with, by name.
    """
    problems = [problem_of(run) for run in runs]
    first = answered(folder, runs, problems)
    wrong: list[str] = []
    for run, problem, found in zip(runs, problems, first, strict=True):
        cotangents = cotangents_of(run, problem)
        want, low = wanted(run, problem, cotangents), of_functions(run, problem, cotangents)
        try:
            check_functions([found], want, low, credit(run))
        except AssertionError:
            others = [replace(problem, do=do, dfinal=dfinal) for do, dfinal in cotangents[1:DRAWS]]
            try:
                check_functions([found, *answered(folder, [run] * len(others), others)], want, low, credit(run))
            except AssertionError as error:
                wrong += [f"{run}:", str(error)]
    assert not wrong, "\n".join(wrong)


def answered(folder: str, runs: Sequence[Run], problems: list[Problem]) -> list[Tensors]:
    world = len(runs[0].lengths or (0,))
    parts = run_ranks(answers, world, list(runs), problems, folder, env=ENV, timeout=200)
    return [joined(problem, [part[i] for part in parts]) for i, problem in enumerate(problems)]


def documents(total: int, n: int) -> tuple[int, ...]:
    """Boundaries of n documents, one of them empty and one of one token."""
    lengths = [0, 1, *[0] * (n - 2)]
    for _ in range(total - 1):
        lengths[random.randrange(2, n)] += 1
    random.shuffle(lengths)
    return tuple(sum(lengths[:i]) for i in range(n + 1))


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
    H = 2 if name == "retnet" else 1
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
    (found,) = run_ranks(closed, 1, name, folder, env=ENV)
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
    (found,) = run_ranks(ways, 1, name, seed, folder, env=ENV)
    assert all(found.values()), found


def hgrn_by_pairs(**options: Any) -> LinearAttention:
    meta, by = variants.load("hgrn").make(variants.H, variants.K).program.meta, variants.HGRNByPairs
    return LinearAttention(meta.tokens | {"prev_s": meta.state}, by.chunk, by.decay, by.merge, **options)


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
    (found,) = run_ranks(fallbacks, 1, folder, env=ENV)
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
        in_folder, 1, str(tmp_path / "given"), str(tmp_path / "default"), env=ENV
    )
    assert len(first) == 1 and first[0].startswith("merge_") and first == second
    assert reused and equal and default


def explained(sp: Any, name: str, folder: str) -> tuple[str, list[str], list[str], str]:
    model = model_of(name, 2, 20, 24, None, folder, "generated")
    code = model._generated
    return model.explain(), list(code.kernels), [x.kind for x in code.step.intrinsics], str(code.path)


@pytest.mark.parametrize("name", ["gla", "deltanet"])
def test_explain_names_every_kernel_and_the_file(name: str, folder: str) -> None:
    ((text, kernels, intrinsics, path),) = run_ranks(explained, 1, name, folder, env=ENV)
    walks = KERNELS if name in DENSE else KERNELS | {"summarize", "collect"}
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
    parts = run_ranks(one_and_all, 2, run, problem, folder, env=ENV, timeout=200)
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
