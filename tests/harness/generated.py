"""Variants on one problem: under the interpreter, over ranks, and what a token loop in float64 makes of it."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from flexsp.compiler import LinearAttention
from flexsp.compiler.frontend import program
from flexsp.testing.compare import DRAWS, RoundedProducts, a_rounding_off, check_functions
from flexsp.testing.ranks import run_ranks
from tests import variants
from tests.harness.interpreted import INTERPRETED, in_pieces, poisoned

ONE_SEGMENT, SOME_SEGMENTS, MANY_SEGMENTS = 1, 2, 256
KERNELS = {"output", "chunk_states", "output_backward", "grads"}
Tensors = dict[str, torch.Tensor]
Cotangents = list[tuple[torch.Tensor, ...]]  # of outputs and final states


def half() -> torch.dtype:
    return random.choice([torch.float16, torch.bfloat16])


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
    return name in variants.WIDE


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


@functools.lru_cache(maxsize=512)
def model_of(
    name: str, H: int, K: int, V: int, chunk: int | None, folder: str, lowering: str, pieces: int = 0
) -> Any:  # fmt: skip
    """As long as a model lives, others of the same variant have its kernels."""
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


@functools.lru_cache(maxsize=512)
def functions_of(name: str, H: int, K: int, V: int, chunk: int | None) -> Any:
    return variants.load(name).make(H, K, V, chunk_size=chunk)


@contextmanager
def sums_in_float32() -> Iterator[None]:
    """Functions in PyTorch add gates up as kernels do, which is what these are held to. Else sums are float64."""
    plain = program.with_wide_sums
    program.with_wide_sums = lambda module: module
    try:
        yield
    finally:
        program.with_wide_sums = plain


def of_functions(run: Run, problem: Problem, cotangents: Cotangents) -> list[Tensors]:
    """What the functions give in PyTorch, products of matrices with operands in the run's dtype. All cotangents but the
    first meet inputs that are a rounding off: where a variant magnifies that, kernels may too.

    Heads know nothing of each other, so one call answers all: each pair of cotangents has heads of its own.
    """
    made, n = torch.Generator().manual_seed(random.randrange(2**31)), len(cotangents)
    axes = {"o": 2, "final": 1, "prev_s": 1} | dict.fromkeys(problem.tokens, 2) | dict.fromkeys(problem.params, 0)
    given = problem.tokens | problem.params
    leaves = {name: x.to(torch.float32 if wide(name) else run.dtype, copy=True) for name, x in given.items()}
    leaves["prev_s"] = problem.initial.float()
    leaves = {
        name: torch.cat([x, *(a_rounding_off(x, made, torch.float32) for _ in range(1, n))], axes[name])
        for name, x in leaves.items()
    }
    do, dfinal = (torch.cat([each[i] for each in cotangents], axes[x]) for i, x in enumerate(("o", "final")))
    model = functions_of(run.name, n * run.H, run.K, run.V, run.chunk)
    cu = None if run.bounds is None else torch.tensor(run.bounds)
    # operands of float32 are as they are, and looking at every operator takes longer than the operators
    with nullcontext() if run.dtype == torch.float32 else RoundedProducts(run.dtype), sums_in_float32():
        (found,) = differentiated(lambda given: model(**given, cu_seqlens=cu, sp=False), leaves, [(do, dfinal)])
    axes |= {f"d{name}": axis for name, axis in axes.items()} | {"dinitial": 1}
    parts = {name: x.chunk(n, axes[name]) for name, x in found.items()}
    return [{name: x[i] for name, x in parts.items()} for i in range(n)]


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


def beside_generated(folder: str, *runs: Run) -> None:
    """Runs of kernels beside generated ones, by the rule of `check_runs`.

    The reference of runs in bf16 are the generated kernels, which round the operands of as many products: in PyTorch
    the functions make scores, and so gradients of gates, of none.
    """
    others = [run for run in runs if run.dtype != torch.bfloat16]
    if others:
        check_runs(folder, *others)
    rounded = [run for run in runs if run.dtype == torch.bfloat16]
    problems = [problem_of(run) for run in rounded]
    plain = [replace(run, lowering="generated") for run in rounded]
    found, low = (answered(folder, of, problems) if of else [] for of in (rounded, plain))
    for run, problem, mine, theirs in zip(rounded, problems, found, low, strict=True):
        check_functions([mine], wanted(run, problem, [(problem.do, problem.dfinal)]), [theirs])


def answered(folder: str, runs: Sequence[Run], problems: list[Problem]) -> list[Tensors]:
    world = len(runs[0].lengths or (0,))
    parts = run_ranks(answers, world, list(runs), problems, folder, env=INTERPRETED, timeout=200)
    return [joined(problem, [part[i] for part in parts]) for i, problem in enumerate(problems)]


def documents(total: int, n: int) -> tuple[int, ...]:
    """Boundaries of n documents, one of them empty and one of one token."""
    lengths = [0, 1, *[0] * (n - 2)]
    for _ in range(total - 1):
        lengths[random.randrange(2, n)] += 1
    random.shuffle(lengths)
    return tuple(sum(lengths[:i]) for i in range(n + 1))


def hgrn_by_pairs(**options: Any) -> LinearAttention:
    meta, by = variants.load("hgrn").make(variants.H, variants.K).program.meta, variants.HGRNByPairs
    return LinearAttention(meta.tokens | {"prev_s": meta.state}, by.chunk, by.decay, by.merge, **options)


LARGER = [
    "k.relu()", "k.clamp(-1, 1)", "k.clamp_min(0.1)", "k.clamp_max(0.1)", "torch.maximum(k, w + 0 * k)",
    "torch.minimum(w + 0 * k, k)", "k - k.amax(-1, keepdim=True)", "k - k.amin(-1, keepdim=True)",
]  # fmt: skip
