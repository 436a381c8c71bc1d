"""The Triton kernels under the interpreter against float64 token loops: one rank, and ranks over shared memory.

The kernels run in processes of their own with TRITON_INTERPRET=1, and torch fills what `empty` hands out with NaN
there. What is right in one half precision has to be in the other: each run draws which. Chunks of fp16 and fp32 have
16 tokens.
"""

from __future__ import annotations

import gc
import os
import random
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flexsp.exceptions import NotAvailable
from flexsp.testing.cases import CASES, Shape, random_documents
from flexsp.testing.compare import DRAWS, relative_error
from flexsp.testing.problems import OPS, Problem, check, draw, merge, solve_all
from flexsp.testing.ranks import run_ranks
from tests.harness.diagonal import (
    MANY_SEGMENTS,
    ONE_SEGMENT,
    SOME_SEGMENTS,
    WEIGHED,
    Run,
    check_runs,
    one_walk,
    other_strides,
)
from tests.harness.interpreted import INTERPRETED, poisoned
from tests.marks import quick, slow

Tensors = dict[str, torch.Tensor]


def half() -> torch.dtype:
    return random.choice([torch.float16, torch.bfloat16])


# One rank ------------------------------------------------------------------------------------------------------------


def heads(name: str, least: int = 1) -> int:
    return 4 if name == "mamba2_groups" else least


def documents(total: int, n: int) -> tuple[int, ...]:
    return tuple(random_documents(total, n, torch.Generator().manual_seed(random.randrange(2**31))).tolist())


NAMES = [*CASES, *WEIGHED]
QUICK = ("linear", "simple_gla", "gamma", "mamba2_groups", "write gates, simple_gla",
         "own products apart, simple_gla")
"""One of each kind of gates, one whose heads share keys, and ones with weights of tokens: to the engine the others are
one of these."""


@pytest.mark.parametrize("name", quick(NAMES, *QUICK))
def test_plain(name: str) -> None:
    """fp32 with initial states, several chunks a segment; a half precision without, one chunk, other strides."""
    K, V = random.choice([(18, 5), (5, 20), (16, 17)])
    check_runs(
        Run(name, Shape(B=2, T=53, H=heads(name), K=K, V=V, states=2), segments=SOME_SEGMENTS),
        Run(name, Shape(B=1, T=35, H=heads(name, 2), K=V, V=K), half(), strided=True),
    )


@pytest.mark.parametrize("name", quick(NAMES, *QUICK))
def test_documents(name: str) -> None:
    n = random.randrange(2, 6)
    check_runs(
        Run(
            name, Shape(B=1, T=51, H=heads(name, 2), K=18, V=5, states=n), bounds=documents(51, n), strided=True,
            segments=SOME_SEGMENTS,
        ),
        Run(name, Shape(B=1, T=37, H=heads(name), K=5, V=18), half(), bounds=documents(37, 3)),
    )  # fmt: skip


@pytest.mark.parametrize("segments", [ONE_SEGMENT, SOME_SEGMENTS, MANY_SEGMENTS])
def test_segments(segments: int) -> None:
    bounds = (0, 0, 3, 39, 39, 50, 69, 69)  # a document over several segments, empty ones at both ends and between
    check_runs(
        Run("simple_gla", Shape(B=1, T=69, H=1, K=7, V=6, states=1), segments=segments),
        Run("simple_gla", Shape(B=1, T=69, H=1, K=7, V=6, states=7), bounds=bounds, segments=segments),
        Run("linear", Shape(B=1, T=69, H=1, K=7, V=6, states=7), bounds=bounds, segments=segments),
    )


@pytest.mark.parametrize("segments", [SOME_SEGMENTS, *slow(ONE_SEGMENT, MANY_SEGMENTS)])
def test_dk_and_dv_from_one_walk(segments: int) -> None:
    shape = Shape(B=1, T=69, H=2, K=20, V=13, states=1)
    bounds = (0, 0, 3, 39, 39, 50, 69, 69)
    check_runs(
        Run("simple_gla", shape, segments=segments, one_walk=True),
        Run("simple_gla", replace(shape, states=7), bounds=bounds, segments=segments, one_walk=True),
        Run("simple_gla", shape, gates=True, segments=segments, one_walk=True),
        Run("linear", replace(shape, states=7), bounds=bounds, segments=segments, one_walk=True),
        Run("weights, linear", replace(shape, states=7), bounds=bounds, segments=segments, one_walk=True),
        Run("weights, simple_gla", shape, torch.bfloat16, segments=segments, one_walk=True),
        Run("own products apart, linear", shape, segments=segments, one_walk=True),
        Run("own products apart, simple_gla", shape, torch.bfloat16, segments=segments, one_walk=True, gates=True),
        Run("write gates, simple_gla", shape, half(), segments=segments, one_walk=True, gates=True),
    )


def test_own_products_of_one_channel() -> None:
    """Of states of one column, in every kernel that makes outputs and gradients of these."""
    shape = Shape(B=1, T=37, H=2, K=9, V=1, states=3)
    check_runs(
        Run("own products apart, simple_gla", shape, torch.bfloat16, bounds=(0, 5, 5, 37)),
        Run("own products apart, gamma", replace(shape, states=1), torch.bfloat16),
    )


def weights(sp: Any, seed: int) -> list[float]:
    """Errors where not all gradients are wanted, and what does not take weights."""
    from flexsp.kernels.diagonal.op import diagonal

    shape, found = Shape(B=1, T=20, H=2, K=5, V=6), []
    made = WEIGHED["weights, simple_gla"].inputs(shape, seed)
    made["i"] = WEIGHED["write gates, simple_gla"].inputs(shape, seed)["i"]
    for names in (["w"], ["g", "k"], ["w", "g"], ["i"], ["i", "w"]):
        exact, inputs = (
            {name: x.to(dtype, copy=True).requires_grad_(name in names) for name, x in made.items()}
            for dtype in (torch.float64, torch.float32)
        )
        do = torch.randn(1, 20, 2, 6, generator=torch.Generator().manual_seed(seed))
        with poisoned(MANY_SEGMENTS, 2):
            diagonal(**inputs, scale=0.3)[0].backward(do)
        diagonal(**exact, scale=0.3)[0].backward(do.double())
        found += [relative_error(inputs[name].grad, exact[name].grad) for name in names]
        assert all(inputs[name].grad is None for name in {*made} - {*names})
    for change in ({"v": made["v"][..., :1]}, {"q": made["q"][:, :, :1], "k": made["k"][:, :, :1]}):
        with pytest.raises(ValueError, match="w: expected queries of 2 heads and values of more than one channel; got"):
            diagonal(**(made | change), scale=0.3)
    with pytest.raises(ValueError, match="i: expected write gates beside g or g_gamma; got neither"):
        diagonal(**(made | {"g": None}), scale=0.3)
    return found


def test_weights_of_tokens(seed: int) -> None:
    (errors,) = run_ranks(weights, 1, seed, env=INTERPRETED)
    assert max(errors) < 1e-5, errors


def _gradient_at_closed_gates(sp: Any, gate: float, joint: bool) -> float:
    """Largest error of dg at nearly closed gates, in units of the float32 error of adding up the magnitudes.

    The gradient of gate p adds <q_i, k_j> <do_i, v_j> e^{b_i - b_j} over j < p <= i: K, V and at most T numbers are
    added on the way to it, and n roundings add up to about sqrt(n) eps. Pairs that the gate does not part must not
    enter: they are e^{-gate} times larger. The norm over all gates would hide these few.
    """
    from flexsp.ops import chunk_simple_gla

    q, k, v, do = torch.randn(4, 1, 64, 1, 16).unbind(0)
    g = torch.full((1, 64, 1), -1e-3)
    g[:, ::8] = gate
    found, exact = g.clone().requires_grad_(), g.double().requires_grad_()
    with one_walk() if joint else nullcontext():
        chunk_simple_gla(q, k, v, found)[0].backward(do)
    chunk_simple_gla(q.double(), k.double(), v.double(), exact)[0].backward(do.double())
    assert found.grad is not None and exact.grad is not None
    a, da = (x[0, :, 0].double().abs() @ y[0, :, 0].double().abs().T for x, y in ((q, k), (do, v)))
    b = g[0, :, 0].double().cumsum(0)
    pairs = (0.25 * a * da * (b[:, None] - b[None, :]).exp()).tril(-1)
    sums = torch.stack([pairs[p:, :p].sum() for p in range(8, 64, 8)])
    error = (found.grad - exact.grad)[0, 8::8, 0].abs() / sums
    return float(error.max() / ((16 + 16 + 64) ** 0.5 * torch.finfo(torch.float32).eps))


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("gate", [-10.0, -18.0])
def test_gradient_at_nearly_closed_gates(gate: float, joint: bool) -> None:
    (error,) = run_ranks(_gradient_at_closed_gates, 1, gate, joint, env=INTERPRETED)
    assert error < 1


def test_several_tiles() -> None:
    """More than one tile of K and of V in every kernel, some of them outside but for a few columns, or for one."""
    check_runs(
        Run("simple_gla", Shape(B=1, T=33, H=1, K=65, V=65, states=1), segments=SOME_SEGMENTS),
        Run("weights, gamma", Shape(B=1, T=20, H=1, K=70, V=67, states=2), bounds=(0, 3, 20)),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_without_remainder(dtype: torch.dtype) -> None:
    """Sizes that are multiples of all tiles, of which there are two of K."""
    check_runs(Run("simple_gla", Shape(B=1, T=17, H=1, K=128, V=64, states=1), dtype, segments=SOME_SEGMENTS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gates_from_none_to_closed(dtype: torch.dtype) -> None:
    check_runs(
        Run("simple_gla", Shape(B=2, T=61, H=1, K=7, V=6, states=2), dtype, gates=True, segments=SOME_SEGMENTS),
        Run("simple_gla", Shape(B=1, T=61, H=1, K=7, V=6, states=3), dtype, bounds=(0, 30, 30, 61), gates=True),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_token(dtype: torch.dtype) -> None:
    """In half precisions, whose bound is wide: in fp32 so few gates may round worse than the reference by chance."""
    check_runs(*[Run(name, Shape(B=1, T=1, H=heads(name), K=7, V=6, states=1), dtype) for name in CASES])


def no_tokens(sp: Any, bounds: list[int] | None) -> list[bool]:
    from flexsp.ops import chunk_simple_gla

    q, k, v = (torch.randn(1, 0, 1, n, requires_grad=True) for n in (5, 5, 3))
    g, initial = torch.zeros(1, 0, 1, requires_grad=True), torch.randn(len(bounds or [0, 0]) - 1, 1, 5, 3)
    cu = None if bounds is None else torch.tensor(bounds)
    with poisoned(MANY_SEGMENTS, 1):
        initial.requires_grad_()
        o, final = chunk_simple_gla(q, k, v, g, initial_state=initial, output_final_state=True, cu_seqlens=cu)
        cotangent = torch.randn_like(final)
        grads = torch.autograd.grad([o, final], [initial, q, k, v, g], [torch.zeros_like(o), cotangent])
    return [torch.equal(final, initial), torch.equal(grads[0], cotangent), all(x.numel() == 0 for x in (o, *grads[1:]))]


@pytest.mark.parametrize("bounds", [None, [0, 0, 0]])
def test_no_tokens(bounds: list[int] | None) -> None:
    (same,) = run_ranks(no_tokens, 1, bounds, env=INTERPRETED)
    assert all(same), same


def sums(sp: Any, seed: int, bounds: list[int] | None) -> list[bool]:
    """The gradients that sum() hands back have strides of zero; they are ones like any others. Where final states count
    for nothing, theirs are zero."""
    from flexsp.ops import chunk_simple_gla

    made = CASES["simple_gla"].inputs(Shape(B=1, T=20, H=2, K=5, V=3, states=len(bounds or [0, 0]) - 1), seed)
    inputs = {name: x.float().requires_grad_() for name, x in made.items()}
    with poisoned(MANY_SEGMENTS, 2):
        cu = None if bounds is None else torch.tensor(bounds)
        o, final = chunk_simple_gla(**inputs, output_final_state=True, cu_seqlens=cu)
        leaves = list(inputs.values())
        got = torch.autograd.grad(o.sum() + final.sum(), leaves, retain_graph=True)
        want = torch.autograd.grad([o, final], leaves, [torch.ones_like(o), torch.ones_like(final)], retain_graph=True)
        without = torch.autograd.grad(o.sum(), leaves, retain_graph=True)
        zero = torch.autograd.grad([o, final], leaves, [torch.ones_like(o), torch.zeros_like(final)])
    return [torch.equal(a, b) for a, b in zip((*got, *without), (*want, *zero), strict=True)]


@pytest.mark.parametrize("bounds", [None, [0, 11, 20]])
def test_gradients_of_sums(bounds: list[int] | None, seed: int) -> None:
    (same,) = run_ranks(sums, 1, seed, bounds, env=INTERPRETED)
    assert all(same), same


def repeated(sp: Any, seed: int) -> list[bool]:
    """Two forward passes, then the second's backward, then the first's twice: each as if it were alone."""
    from flexsp.ops import chunk_simple_gla

    def inputs(seed: int) -> dict[str, torch.Tensor]:
        made = CASES["simple_gla"].inputs(Shape(B=1, T=29, H=1, K=5, V=3, states=1), seed)
        return {name: x.float().requires_grad_() for name, x in made.items()}

    def forward(x: dict[str, Any]) -> torch.Tensor:
        o, final = chunk_simple_gla(**x, output_final_state=True)
        return o.sum() + final.square().sum()

    with poisoned(MANY_SEGMENTS, 1):
        one, two = inputs(seed), inputs(seed + 1)
        first, second = forward(one), forward(two)
        later = torch.autograd.grad(second, list(two.values()))
        earlier = torch.autograd.grad(first, list(one.values()), retain_graph=True)
        again = torch.autograd.grad(first, list(one.values()))
        alone = [torch.autograd.grad(forward(x), list(x.values())) for x in (one, one, two)]
    return [
        torch.equal(a, b)
        for got, want in zip((earlier, again, later), alone, strict=True)
        for a, b in zip(got, want, strict=True)
    ]


def test_second_backward_of_two_forwards(seed: int) -> None:
    (same,) = run_ranks(repeated, 1, seed, env=INTERPRETED)
    assert all(same), same


def remembered(sp: Any) -> dict[str, Any]:
    """Calls alike and not alike, forward and backward: how many are kept after each, and whether tensors live on."""
    from flexsp import ops
    from flexsp.kernels.diagonal.op import Diagonal

    counts, refs = [], []
    Diagonal._executables.clear()

    def call(scale: float = 1.0, turned: bool = False, initial: bool = False, do: torch.Tensor | None = None) -> None:
        q, k, v = (torch.randn(1, 40, 2, 16).requires_grad_() for _ in range(3))
        x = other_strides(q) if turned else q
        state = torch.randn(1, 2, 16, 16) if initial else None
        o, _ = ops.chunk_simple_gla(x, k, v, -torch.rand(1, 40, 2), scale=scale, initial_state=state)
        o.backward(torch.randn_like(o) if do is None else do)
        refs.extend(weakref.ref(y) for y in (q, k, v, o))
        counts.append(len(Diagonal._executables) + sum(len(x.backwards) for x in Diagonal._executables.values()))

    call()
    call()
    call(scale=2.0)
    call(turned=True)
    call(initial=True)
    call(do=torch.ones(()).expand(1, 40, 2, 16))  # copied: it lies as the first one then
    gc.collect()
    return {"counts": counts, "alive": sum(ref() is not None for ref in refs)}


def not_interpreted(sp: Any, T: int) -> str:
    from flexsp import ops

    os.environ["FLEXSP_BACKEND"] = "triton"
    try:
        ops.chunk_simple_gla(*torch.randn(3, 1, T, 2, 16))
    except NotAvailable as error:
        return str(error)
    return ""


@pytest.mark.parametrize("T", [0, 40])
def test_cpu_needs_the_interpreter(T: int) -> None:
    (message,) = run_ranks(not_interpreted, 1, T, own_processes=True)
    assert "set TRITON_INTERPRET=1" in message


def test_calls_are_worked_out_once() -> None:
    (found,) = run_ranks(remembered, 1, env=INTERPRETED)
    assert found["counts"] == [2, 2, 4, 6, 8, 8]
    assert not found["alive"]


# Ranks ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shards:
    """One op over ranks; ``documents`` are document lengths, ``how`` an entry of WAYS."""

    op: str
    lengths: tuple[int, ...]
    documents: tuple[int, ...] | None = None
    how: str = "eager"
    dtype: torch.dtype = torch.float32
    segments: int = MANY_SEGMENTS
    B: int = 1
    H: int = 1

    def problem(self) -> Problem:
        made = draw(
            self.op, B=self.B, T=sum(self.lengths), H=self.H, K=7, V=6, documents=self.documents,
            seed=random.randrange(2**31),
        )  # fmt: skip
        return made.rounded(self.dtype)


def checkpointed(call: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(call, *args, use_reentrant=False)


def compiled(call: Callable[..., Any], x: Tensors, initial: Any, common: dict[str, Any]) -> Any:
    from flexsp.ops import chunk_simple_gla

    torch._dynamo.reset()
    step = torch.compile(chunk_simple_gla, fullgraph=True, backend="aot_eager")
    return step(x["q"], x["k"], x["v"], x["g"], initial_state=initial and initial[0], **common)


WAYS: dict[str, Callable[..., Any]] = {
    "eager": lambda call, *args: call(*args),
    "checkpoint": checkpointed,
    "compile": compiled,
}


def shard(sp: Any, problem: Problem, plan: Shards) -> list[Tensors]:
    """This rank's outputs and gradients, of parameters for a few cotangents. It sees NaN instead of initial states of
    documents that do not start here."""
    start, stop = sum(plan.lengths[: sp.rank]), sum(plan.lengths[: sp.rank + 1])
    last = sp.rank == sp.world_size - 1

    def call(x: Tensors, initial: Any, common: dict[str, Any]) -> Any:
        if problem.cu_seqlens is not None:
            mine = [start <= b < stop or (last and b >= stop) for b in problem.cu_seqlens[:-1]]
            initial = tuple(
                torch.where(torch.tensor(mine).view(-1, *[1] * (s.dim() - 1)), s, float("nan")) for s in initial
            )
        return WAYS[plan.how](OPS[plan.op], x, initial, common)

    with poisoned(plan.segments, plan.B * plan.H):
        few = replace(problem, cotangents=problem.cotangents[: DRAWS if problem.params else 1])
        return solve_all(few, plan.dtype, "cpu", sp, plan.lengths, call)


def shards(sp: Any, problems: list[Problem], plans: list[Shards]) -> list[list[Tensors]]:
    from flexsp.testing.scans import fill_slots_with_nan

    if sp.heap is not None:
        fill_slots_with_nan(sp)
    found = [shard(sp, problem, plan) for problem, plan in zip(problems, plans, strict=True)]
    sp.check()
    torch.distributed.barrier(group=sp.cpu_group)
    return found


def check_shards(*plans: Shards, transport: str = "posix") -> None:
    problems = [plan.problem() for plan in plans]
    heap = 4 if transport == "posix" else None
    world = len(plans[0].lengths)
    answers = run_ranks(
        shards, world, problems, list(plans), transport=transport, heap_mib=heap, env=INTERPRETED, timeout=200
    )  # fmt: skip
    wrong = []
    for i, (problem, plan) in enumerate(zip(problems, plans, strict=True)):
        found = [merge(problem, parts) for parts in zip(*(parts[i] for parts in answers), strict=True)]
        reports = check(problem, plan.dtype, found)
        wrong += [f"{plan}: {report}" for report in reports if not report.ok]
    assert not wrong, "\n".join(wrong)


def test_uneven_shards() -> None:
    check_shards(
        Shards("simple_gla", (37, 20), B=2, segments=SOME_SEGMENTS),
        Shards("simple_gla_gamma", (5, 50), dtype=half()),
        Shards("linear_attn", (33, 16)),
        Shards("mamba2", (18, 33), H=2),
    )


def test_shards_shorter_than_a_chunk() -> None:
    check_shards(
        Shards("simple_gla", (1, 1, 1), B=2),
        Shards("simple_gla", (3, 40, 2), segments=SOME_SEGMENTS),
        Shards("linear_attn_normalized", (15, 1, 4)),
        Shards("simple_gla", (2, 15, 16), (6, 0, 20, 7)),
    )


@pytest.mark.parametrize("lengths", [(0, 20, 0), (20, 0, 19), (0, 0, 21), (21, 0, 0)])
def test_empty_shards(lengths: tuple[int, ...]) -> None:
    """A rank without tokens decays nothing, yet agrees with its neighbours on the kind of decay."""
    dtype = torch.float32 if lengths[0] else torch.bfloat16
    check_shards(
        Shards("simple_gla", lengths),
        Shards(random.choice(["simple_gla_gamma", "linear_attn"]), lengths, B=2),
        Shards("simple_gla", lengths, (sum(lengths) - 3, 0, 3)),
        Shards("mamba2", lengths, (sum(lengths) - 3, 0, 3), H=2, dtype=dtype),
    )


DOCUMENTS = [
    (40,),  # one over all ranks
    (13, 13, 14),  # boundaries between the ranks
    (0, 0, 20, 0, 20, 0),  # empty ones at both ends and between
    (12, 2, 26),
]


@pytest.mark.parametrize("lengths", [(1, 33, 6), *slow(((13, 13, 14),))])
def test_documents_across_ranks(lengths: tuple[int, ...]) -> None:
    plans = [Shards("simple_gla", lengths, each, segments=random.choice([ONE_SEGMENT, 2, 256])) for each in DOCUMENTS]
    plans.append(Shards("linear_attn", lengths, DOCUMENTS[2]))
    check_shards(*plans, Shards("mamba2", lengths, DOCUMENTS[2], H=2, dtype=torch.bfloat16))


@pytest.mark.parametrize("how", ["checkpoint", "compile"])
def test_checkpoint_and_compile(how: str) -> None:
    check_shards(Shards("simple_gla", (20, 17), how=how), Shards("simple_gla", (20, 17), (5, 0, 32), how=how))
    check_shards(Shards("simple_gla", (20, 0), how=how))


def test_over_torch_distributed() -> None:
    check_shards(
        Shards("simple_gla", (20, 17)), Shards("simple_gla", (20, 17), (30, 7)), transport="process_group"
    )  # fmt: skip
