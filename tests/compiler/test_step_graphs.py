"""The derived graph of a chunk's step, run in float64 in PyTorch, against autograd through the three functions.

No kernel is involved, so this looks at the derivation and at the rewrites alone: every output, also from parts of the
graph that read kept values, and with products joined as walks have them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from flexsp.compiler.frontend.meta import CHUNK_STATE, STATE, ConstExpr
from flexsp.compiler.frontend.program import Program, call
from flexsp.compiler.graphs.differentiate import Step, cut, differentiate
from flexsp.compiler.graphs.rewrite import dims
from flexsp.variants import deltanet, rwkv7
from tests import variants
from tests.generated_programs import OPERATORS, PADDED_STATES, SCORES_OF_SCORES, SUMS, DrawnProgram, draw_program
from tests.harness.graphs import Tensors, run_graph


def drawn(program: Program, sizes: dict[str, int]) -> Tensors:
    """Inputs, the state, and gradients of outputs and of the state that leaves, of one chunk of one head."""
    meta = program.meta

    def normal(shape: Any) -> torch.Tensor:
        return torch.randn([sizes[s.name] if isinstance(s, ConstExpr) else sizes[s] for s in shape]).double()

    found = {name: normal(["C", *x.shape[2:]]) for name, x in meta.tokens.items()}
    found |= {name: normal(x.shape[1:]) for name, x in meta.params.items()}
    for name in {"g", "gk", "gv", "log_gamma"} & found.keys():
        found[name] = -found[name].abs()
    for name in {"b", "beta", "f"} & found.keys():
        found[name] = found[name].sigmoid()
    found["S"] = normal(meta.state_sizes)
    return found | {"dS": torch.randn_like(found["S"])}


def by_autograd(program: Program, values: Tensors) -> Tensors:
    """The outputs of a step, from the functions."""
    leaves = {name: x.clone().requires_grad_() for name, x in values.items() if name not in ("do", "dS")}
    S = leaves["S"]
    inputs: dict[str, Any] = {**program.meta.numbers, **{name: x for name, x in leaves.items() if name != "S"}}
    F, cached = call(program.chunk, inputs)
    inputs |= cached
    S_new, _ = call(program.decay, inputs | {STATE: S, CHUNK_STATE: F})
    o, _ = call(program.merge, inputs | {CHUNK_STATE: S})
    values["do"] = torch.randn_like(o)
    found = {"o": o, "S": S_new} | {f"keep_{name}": x for name, x in cached.items()}
    if program.transition in ("none", "scalar", "vector", "elementwise", "max-plus"):
        (found["A"],) = torch.autograd.grad(S_new.sum(), S, retain_graph=True, materialize_grads=True)
    wanted = [*leaves.values(), *cached.values()]
    grads = torch.autograd.grad([o, S_new], wanted, [values["do"], values["dS"]], materialize_grads=True)
    names = [*(f"d_{name}" for name in leaves), *(f"keep_grad_{name}" for name in cached)]
    return {name: x.detach() for name, x in (found | dict(zip(names, grads, strict=True))).items()}


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.allclose(got.expand(want.shape), want, rtol=1e-9, atol=1e-9 * max(1.0, float(want.abs().max())))


def check_step(program: Program) -> None:
    step = differentiate(program)
    given = program.meta.sizes()
    free = iter((7, 5, 3, 11, 13))
    sizes = {name: choices[0] if name in ("H",) else next(free) for name, choices in given.items()}
    parts: list[Part] = []
    for C in (6, 1):
        values = drawn(program, sizes | {"C": C})
        want = by_autograd(program, values)
        parts = parts or [*parts_of(step, want)]
        check_parts(step, parts, sizes | {"C": C}, values, want)


Part = tuple[str, Any, Any]  # what it is, its graph, and its outputs by name


def parts_of(step: Step, names: Iterable[str]) -> Iterator[Part]:
    """The whole graph, and parts of it that read kept values."""
    yield "whole", *cut(step, step.outputs)
    walks = [["S"], ["o", "S"], ["d_S"], [name for name in step.outputs if name.startswith("d_")]]
    for outputs in [*walks, *([name] for name in names)]:
        for join in (False, True):
            yield f"{outputs}, join {join}", *cut(step, outputs, step.kept, join)


def as_kept(name: str, x: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Cached results whose last axis is tokens are kept transposed."""
    return x.mT if name.startswith("keep_") and x.dim() == 2 and x.shape != found.shape == x.mT.shape else x


def check_parts(step: Step, parts: list[Part], sizes: dict[str, int], values: Tensors, want: Tensors) -> None:
    (_, graph, named), *others = parts
    found = dict(zip(named, run_graph(graph, sizes, values), strict=True))
    assert want.keys() <= found.keys()
    kept = {name: found[f"keep_{name}"] for name in step.kept}
    want = {name: as_kept(name, x, found[name]) for name, x in want.items()}
    wrong = [name for name, x in want.items() if not close(found[name], x)]
    for part, graph, named in others:
        got = run_graph(graph, sizes, values | kept)
        wrong += [f"{name} of {part}" for name, x in zip(named, got, strict=True)
                  if name in want and not close(x, want[name])]  # fmt: skip
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", variants.USUAL)
def test_variants(name: str) -> None:
    check_step(variants.load(name).make(2, 8, 8).program)


# Sums and differences of products with common operands, of either sign and on either side, and constants in all places
# from which they can move.
SIGNS = (
    "def chunk(k, v, w, g):\n"
    "    b = g.cumsum(0)\n"
    "    x, y = k * w, v * 0.5\n"
    "    return (k * (b[-1] - b).exp()[:, None]).T @ y - (-x).T @ (-v) + (0.3 * k).T @ v - (k.T @ (v - y)) * 2\n\n\n"
    "def decay(prev_s, chunk_state, k, g):\n"
    "    p = k * 0.1\n"
    "    moved = prev_s * g.sum(0).exp() - p.T @ (k @ prev_s) + p.T @ (p @ prev_s) - (-k).T @ (p @ prev_s)\n"
    "    return (chunk_state - (-moved)) * 0.5 + (-chunk_state)\n\n\n"
    "def merge(q, k, v, w, g, chunk_state):\n"
    "    b = g.cumsum(0)\n"
    "    seen = torch.ones_like(q @ k.T, dtype=torch.bool).tril()\n"
    "    d = (b[:, None] - b[None, :]).masked_fill(~seen, -torch.inf).exp()\n"
    "    a = (q @ k.T).tril() * d * 0.5 - ((q * w) @ (-k).T).tril(-1) * 2 * d\n"
    "    o = (a @ v) * 0.25 - (-(q @ chunk_state)) * b.exp()[:, None] + (q @ k.T).tril() @ (v * 3)\n"
    "    r = (q * k).sum(-1)\n"
    "    r = r.cumsum(0) + (r * r).cumsum(0) - (g + 1).cumsum(0)\n"
    "    r = r * b[0] * torch.ones_like(b) + torch.zeros_like(b) - torch.outer(w, w).mean() * r\n"
    "    return -(o - r[:, None] * v) + (-o) * 2 - 0.5 * (-v) * (-r.exp() / (1 + r.exp()))[:, None]\n"
)


def test_signs_and_constants() -> None:
    check_step(DrawnProgram(SIGNS, ("q", "k", "v", "w", "g"), 1, 8, 8, 16).model().program)


def test_identity_minus_a_product() -> None:
    """Of which the product with the state is formed first."""
    source = (
        "def chunk(k, v):\n    return k.T @ v\n\n\n"
        "def decay(prev_s, chunk_state, k):\n"
        "    return (identity(k, k.size(1)) - (k * 0.1).T @ k) @ prev_s + chunk_state\n\n\n"
        "def merge(q, k, v, chunk_state):\n    return (q @ k.T).tril() @ v + q @ chunk_state\n"
    )
    check_step(DrawnProgram.of_source(source).model().program)


@pytest.mark.parametrize("make", [rwkv7.make, deltanet.make])
def test_adjoint_of_an_inverse(make: Any) -> None:
    """Sums over pairs of tokens, which nearly cancel where keys are alike, are not multiplied by the inverse."""
    graph = differentiate(make(1, 24, 16, torch.bfloat16).program).graph
    of_inverse = {x for x in graph.nodes if "inverse" in str(x.target)}
    of_inverse |= {x for x in graph.nodes if x.target is torch.ops.aten.t.default and x.args[0] in of_inverse}
    products = [x for x in graph.nodes if x.target is torch.ops.aten.mm.default and of_inverse & {*x.args}]
    assert products and all(dims(x) != ("C", "C") for x in products)


@pytest.mark.parametrize("program", [*SUMS.values(), DrawnProgram.of_source(SCORES_OF_SCORES, "gk")],
                         ids=[*SUMS, "scores of scores"])  # fmt: skip
def test_intrinsics(program: DrawnProgram) -> None:
    check_step(program.model().program)


@pytest.mark.parametrize("group", OPERATORS)
def test_operators(group: str) -> None:
    more = ["torch.clamp(k, max=w)", "torch.clamp(k, w, w + 1)"] if group == "extrema" else []
    check_step(DrawnProgram.of_features(*OPERATORS[group], *more).model().program)


def test_padded_states() -> None:
    for source in PADDED_STATES.values():
        check_step(DrawnProgram.of_source(source).model().program)


def test_random_programs() -> None:
    for _ in range(3):
        seed = random.randrange(2**31)
        print(f"draw_program({seed})")
        check_step(draw_program(seed).model().program)
