"""inf and NaN stay in their document, from their token's chunk on, forward and backward, over ranks and in kernels.

Every case runs twice, clean and with one number replaced; outside of what that number may reach the two are bit-equal.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from flexsp import ops
from flexsp.devices import H200, planned_for
from flexsp.grammar import FlexLinearAttention
from flexsp.testing.cases import CASES, DELTA_CASES, Shape
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests import test_grammar, test_triton_engine, variants
from tests.marks import quick, slow
from tests.test_custom_mask import MASKS
from tests.test_custom_mask import draw as draw_mask

CHUNK = 64  # the longest chunk; shorter ones start at its multiples
BOUNDS = [0, 20, 150, 150, 158, 231]
LENGTHS = [[60, 90, 81], [150, 0, 81], [7, 200, 24]]
ENV = test_triton_engine.ENV
ALL = CASES | DELTA_CASES
FLEX = ["retnet", "delta_rope", "gla, a gate a channel"]
SUBJECTS = [
    *quick(
        ALL, "linear", "normalized", "simple_gla", "gamma", "mamba2_groups", "gated_delta_rule_in_kernel",
        "kda_in_kernel", "gated_delta_product",
    ),
    *quick([f"variant {name}" for name in variants.VARIANTS], *(f"variant {name}" for name in variants.OFTEN)),
    *(f"flex {name}" for name in FLEX), "mask half",
]  # fmt: skip
WIDE = ("g", "w", "dt", "A", "A_log", "D", "dt_bias", "log_gamma", "g_gamma", "u")
OVER_RANKS = ["simple_gla", "variant gla", "variant gated_deltanet", "mask half"]

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Problem:
    """A call: tensors cut over ranks, others, the states, and what runs them."""

    tokens: Tensors
    shared: Tensors
    initial: tuple[torch.Tensor, ...]
    call: Callable[..., Any]


def draw(subject: str, bounds: list[int], seed: int, dtype: torch.dtype, device: str = "cpu") -> Problem:
    """Gates and states stay in float32 beside half precision."""
    T, N = bounds[-1], len(bounds) - 1
    made = torch.Generator().manual_seed(seed)
    kind, _, name = subject.partition(" ")
    initial: tuple[torch.Tensor, ...]
    if subject in ALL:
        case = ALL[subject]
        x = case.inputs(Shape(B=1, T=T, H=4 if "groups" in subject else 2, K=4, V=3, states=N), seed)
        state = x.pop("initial_state")
        initial = state if isinstance(state, tuple) else (state,)
        tokens, shared = {n: x[n] for n in case.tokens}, {n: x[n] for n in case.shared}

        def call(given: Tensors, states: Any, **common: Any) -> Any:
            states = states if subject == "normalized" else states[0]
            return case.op(**given, **case.constants, initial_state=states, output_final_state=True, **common)
    elif kind == "variant":
        tokens, shared = variants.draw(name, 1, T, seed)
        model = variants.load(name).make(variants.H, variants.K, variants.V, dtype)
        sizes = variants.state_sizes(name)
        initial = (torch.randn(N, variants.H, *sizes, generator=made, dtype=torch.float64),)

        def call(given: Tensors, states: Any, **common: Any) -> Any:
            return model(**given, prev_s=states[0], **common)
    else:
        flex = test_grammar.MODELS[name]() if kind == "flex" else FlexLinearAttention(custom_mask=MASKS[name][0])
        x = test_grammar.draw(name, 1, T, seed) if kind == "flex" else draw_mask(name, flex, 1, T, seed)
        tokens, shared = {n: y for n, y in x.items() if y.shape[:2] == (1, T)}, {}
        initial = (torch.randn(N, 2, 4 if kind == "flex" else 5, 3, generator=made, dtype=torch.float64),)
        if kind == "mask":
            initial = (torch.randn(N, *x["k"].shape[2:], x["v"].shape[3], generator=made, dtype=torch.float64),)

        def call(given: Tensors, states: Any, **common: Any) -> Any:
            return flex(**given, initial_state=states[0], output_final_state=True, **common)

    def cast(x: torch.Tensor, wide: bool) -> torch.Tensor:
        return x.to(device, torch.float32 if wide and dtype.itemsize < 4 else dtype)

    tokens, shared = ({n: cast(y, n in WIDE) for n, y in each.items()} for each in (tokens, shared))
    return Problem(tokens, shared, tuple(cast(x, True) for x in initial), call)


def solve(problem: Problem, bounds: list[int], sp: Any, bad: tuple[str, int, float] | None) -> Tensors:
    """Outputs and gradients; `bad` (an input or "do", token, value) replaces one number of the whole sequence."""
    T, (start, length) = bounds[-1], (0, bounds[-1])
    if sp is not None and sp.world_size > 1:
        start, length = sum(sp.lengths[: sp.rank]), sp.lengths[sp.rank]
    tokens = {name: x.clone() for name, x in problem.tokens.items()}
    made = torch.Generator().manual_seed(7)
    if bad is not None and bad[0] in tokens:
        tokens[bad[0]][0, bad[1]].flatten()[-1] = bad[2]
    leaves = {name: x[:, start : start + length].clone().requires_grad_() for name, x in tokens.items()}
    states = tuple(x.clone().requires_grad_() for x in problem.initial)
    cu = torch.tensor(bounds, device=states[0].device)
    group = sp if sp is not None and sp.world_size > 1 else False
    o, final = problem.call({**leaves, **problem.shared}, states, cu_seqlens=cu, sp=group)
    do = torch.randn(1, T, *o.shape[2:], generator=made, dtype=torch.float64).to(o)
    if bad is not None and bad[0] == "do":
        do[0, bad[1]].flatten()[-1] = bad[2]
    finals = final if isinstance(final, tuple) else (final,)
    inputs = [*leaves.values(), *states]
    dfinals = [torch.randn(x.shape, generator=made, dtype=torch.float64).to(x) for x in finals]
    torch.autograd.backward([o, *finals], [do[:, start : start + length], *dfinals])
    found = {"o": o.detach(), **{f"final{i}": x.detach() for i, x in enumerate(finals)}}
    names = [*(f"d{name}" for name in leaves), *(f"dinitial{i}" for i in range(len(states)))]
    return found | {
        name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in zip(names, inputs, strict=True)
    }


def spill(
    clean: Tensors, found: Tensors, bounds: list[int], starts: list[int], bad: tuple[str, int, float]
) -> list[str]:
    """What differs although the number cannot reach it. `starts` are the first tokens of shards."""
    name, t, _ = bad
    doc = max(n for n in range(len(bounds) - 1) if bounds[n] <= t < bounds[n + 1])
    begin = max(bounds[doc], *(s for s in starts if s <= t))
    chunk = begin + (t - begin) // CHUNK * CHUNK
    own = range(bounds[doc], bounds[doc + 1])
    later = range(chunk, bounds[doc + 1])
    # A cotangent reaches back, to the end of its chunk; what an input does to the gradients is its document's affair.
    back = range(bounds[doc], min(chunk + CHUNK, bounds[doc + 1]))
    wrong = []
    for key, x in clean.items():
        y = found[key]
        if key.startswith("final") or key.startswith("dinitial"):
            same = [n for n in range(len(bounds) - 1) if n != doc]
            ok = torch.equal(x[same], y[same])
        else:
            reach = range(0) if name == "do" and key == "o" else later if key == "o" else back if name == "do" else own
            outside = [i for i in range(bounds[-1]) if i not in reach]
            ok = torch.equal(x[:, outside], y[:, outside])
        if not ok:
            wrong.append(f"{key} with {bad}")
    if name == "do":
        reached = not all(x.isfinite().all() for x in found.values())
    else:
        after = [found["o"][:, t : bounds[doc + 1]], *(x[doc] for key, x in found.items() if key.startswith("final"))]
        at_once = name not in ("g", "dt", "theta", "w")
        reached = not all(x.isfinite().all() for x in ([found["o"][:, t]] if at_once else after))
    return wrong if reached else [*wrong, f"{bad} reached nothing"]


def bad_numbers(subject: str, problem: Problem, bounds: list[int], seed: int) -> list[tuple[str, int, float]]:
    chosen = random.Random(seed)
    long = max(range(len(bounds) - 1), key=lambda n: bounds[n + 1] - bounds[n])
    found = []
    for name in [*problem.tokens, "do"]:
        if subject.startswith("mask") and name == "g":
            continue  # a mask whose decay is not a number is refused
        value = float("nan") if name not in "qkvxBC" else chosen.choice([float("nan"), float("inf"), -float("inf")])
        found.append((name, chosen.randrange(bounds[long], bounds[long + 1]), value))
    return found


def differences(
    sp: Any, subjects: list[str], seed: int, dtype: torch.dtype, bounds: list[int], only: tuple[str, ...] = (),
    device: str = "cpu",
) -> list[str]:  # fmt: skip
    wrong = []
    for i, subject in enumerate(subjects):
        problem = draw(subject, bounds, seed, dtype, device)
        starts = [0]
        if sp is not None and sp.world_size > 1:
            sp.set_lengths(LENGTHS[i % len(LENGTHS)])
            starts = [sum(sp.lengths[:r]) for r in range(sp.world_size)]
        clean = together(sp, solve(problem, bounds, sp, None))
        for bad in bad_numbers(subject, problem, bounds, seed + i):
            if only and bad[0] not in only:
                continue
            found = together(sp, solve(problem, bounds, sp, bad))
            wrong += [f"{subject}: {text}" for text in spill(clean, found, bounds, starts, bad)]
    return wrong


def together(sp: Any, found: Tensors) -> Tensors:
    """The whole sequence's, from all ranks' parts."""
    if sp is None or sp.world_size == 1:
        return found
    of_tokens = {name for name in found if name == "o" or (name[0] == "d" and not name.startswith("dinitial"))}
    # States' rows are each filled by one rank: sums add zeros, also to what is not finite.
    rows = {name: torch.stack(list(everyone(sp, x))).sum(0) for name, x in found.items() if name not in of_tokens}
    return {name: sp.gather(found[name]) for name in found if name in of_tokens} | rows


def everyone(sp: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    lengths = sp.lengths
    sp.set_lengths([1] * sp.world_size)
    parts = sp.gather(x.unsqueeze(0), dim=0).unbind(0)
    sp.set_lengths(lengths)
    return parts


@pytest.mark.parametrize("subject", SUBJECTS)
def test_one_rank(subject: str) -> None:
    seed = random.randrange(2**31)
    assert differences(None, [subject], seed, torch.float64, BOUNDS) == []


@pytest.mark.parametrize(
    "subject",
    ["simple_gla", "variant simple_gla", "variant hgrn", *slow("linear", "variant linear", "variant deltanet")],
)
def test_many_chunks(subject: str) -> None:
    """More than one level of the scans, documents that start and end inside its groups of chunks."""
    cuts = sorted(random.sample(range(1, 64 * 40), 7))
    assert differences(None, [subject], random.randrange(2**31), torch.float64, [0, *cuts, 64 * 40]) == []


def test_ranks() -> None:
    """Documents over several ranks, uneven and empty shards."""
    for found in run_ranks(differences, 3, OVER_RANKS, random.randrange(2**31), torch.float64, BOUNDS):
        assert found == []


@pytest.mark.parametrize("schedule", ["pipelined", "all_gather"])
def test_schedules(schedule: str) -> None:
    args = (["simple_gla", "linear"], random.randrange(2**31), torch.float64, BOUNDS)
    for found in run_ranks(differences, 3, *args, schedule=schedule):
        assert found == []


@pytest.mark.parametrize(
    ("subject", "only"), [("simple_gla", ("g", "v", "do")), ("variant gla", ("g", "do")), ("variant deltanet", ("b",))]
)
def test_kernels(subject: str, only: tuple[str, ...]) -> None:
    """The same of the Triton kernels, under the interpreter."""
    args = ([subject], random.randrange(2**31), torch.float32, [0, 5, 45, 45, 52])
    (found,) = run_ranks(differences, 1, *args, only, env=ENV)
    assert found == []


def closed_gates(sp: Any, seed: int, dtype: torch.dtype) -> tuple[float, float, float]:
    """(difference from gates of -104, forward and backward; error against the token loop; the reference's error)."""
    made = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 40, 1, 16, generator=made).to(dtype) for _ in "qkv")
    g = torch.nn.functional.logsigmoid(torch.randn(1, 40, 1, generator=made) + 3)
    g[:, 3::9] = -torch.inf
    results = []
    for gate in (g, g.clamp(min=-104.0)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o, _ = ops.chunk_simple_gla(*leaves, gate)
        results.append([o.detach(), *torch.autograd.grad(o, leaves, torch.ones_like(o))])
    same = max((a - b).abs().max().item() for a, b in zip(*results, strict=True))
    want, _ = ops.recurrent_simple_gla(*(x.double() for x in (q, k, v, g)))
    other, _ = ops.recurrent_simple_gla(q, k, v, g)
    return same, relative_error(results[0][0], want), relative_error(other, want)


def test_gates_of_minus_infinity_in_kernels() -> None:
    """As gates of -104, and what follows in the chunk keeps its precision."""
    for dtype in (torch.float32, torch.float16):
        ((same, error, other),) = run_ranks(closed_gates, 1, random.randrange(2**31), dtype, env=ENV)
        assert same == 0.0 and error < 2 * other + 4 * torch.finfo(dtype).eps


OPS_WITH_GATES = ("gated_delta_rule", "kda", "gated_delta_product")


def closed_delta_gates(sp: Any, seed: int, dtype: torch.dtype, capability: int = 9) -> dict[str, float]:
    """Differences from gates of -104, over ranks where there are several: outputs, states, all gradients."""
    found, least = {}, -800.0 if dtype == torch.float64 else -104.0
    lengths = [20, 0, 25][: sp.world_size] if sp.world_size > 1 else [45]
    sp.set_lengths(lengths)
    here = slice(sum(lengths[: sp.rank]), sum(lengths[: sp.rank + 1]))
    for name in OPS_WITH_GATES:
        case = DELTA_CASES[name]
        made = case.inputs(Shape(B=1, T=45, H=2, K=capability, V=5), seed)
        made["g"][:, 3::9], made["g"][:, 4::18] = -torch.inf, -1e4
        rest = {key: x for key, x in made.items() if not isinstance(x, torch.Tensor)}
        results = []
        for g in (made["g"], made["g"].clamp(min=least)):
            x = {key: y for key, y in (made | {"g": g}).items() if key not in rest}
            x = {key: y[:, here].to(dtype).clone().requires_grad_() for key, y in x.items()}
            with planned_for(replace(H200, capability=(capability, 0))):
                o, final = case.op(**x, **rest, output_final_state=True, sp=sp)
                loss = o.square().sum() if final is None else o.square().sum() + final.square().sum()
                grads = dict(zip(x, torch.autograd.grad(loss, [*x.values()]), strict=True))
            assert all(dg.isfinite().all() for dg in grads.values())
            assert g is not made["g"] or not grads["g"][made["g"][:, here] < least].any()
            del grads["g"]  # only below the least gate is there none
            results.append([o, *grads.values(), *([] if final is None else [final])])
        found[name] = max([(a - b).abs().max().item() for a, b in zip(*results, strict=True) if a.numel()], default=0.0)
    return found


@pytest.mark.parametrize("dtype", [torch.float64, *slow(torch.float32), torch.bfloat16], ids=str)
def test_closed_gates_of_delta_rules(dtype: torch.dtype) -> None:
    """In PyTorch on one rank and over three, in kernels of the engine, and in generated ones."""
    seed = random.randrange(2**31)
    runs = [run_ranks(closed_delta_gates, n, seed, dtype) for n in (1, 3)]
    if dtype == torch.float32:
        runs += [run_ranks(closed_delta_gates, 3, seed, dtype, env=ENV)]
        runs.append(run_ranks(closed_delta_gates, 1, seed, dtype, 8, env=ENV))
    if dtype != torch.float64:
        runs.append(run_ranks(closed_delta_gates, 1, seed, dtype, env=ENV))
    assert all(difference == 0.0 for ranks in runs for found in ranks for difference in found.values()), runs
