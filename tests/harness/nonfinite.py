"""Numbers that are not finite, and where they may show."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flexsp.grammar import FlexLinearAttention
from flexsp.testing.cases import CASES, PROGRAM_CASES, Shape
from tests import variants
from tests.harness import grammar
from tests.harness.masks import MASKS
from tests.harness.masks import draw as draw_mask

CHUNK = 64  # the longest chunk; shorter ones start at its multiples
BOUNDS = [0, 20, 150, 150, 158, 231]
LENGTHS = [[60, 90, 81], [150, 0, 81], [7, 200, 24]]
ALL = CASES | PROGRAM_CASES
WIDE = ("g", "w", "dt", "A", "A_log", "D", "dt_bias", "log_gamma", "g_gamma", "u")
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
        flex = grammar.MODELS[name]() if kind == "flex" else FlexLinearAttention(custom_mask=MASKS[name][0])
        x = grammar.draw(name, 1, T, seed) if kind == "flex" else draw_mask(name, flex, 1, T, seed)
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
