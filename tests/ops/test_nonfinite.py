"""inf and NaN stay in their document, from their token's chunk on, forward and backward, over ranks and in kernels.

Every case runs twice, clean and with one number replaced; outside of what that number may reach the two are bit-equal.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from flexsp import ops
from flexsp.devices import H200, planned_for
from flexsp.testing.cases import PROGRAM_CASES, Shape
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests import variants
from tests.harness.interpreted import INTERPRETED
from tests.harness.nonfinite import ALL, BOUNDS, differences
from tests.marks import quick, slow

FLEX = ["retnet", "delta_rope", "gla, a gate a channel"]
SUBJECTS = [
    *quick(
        ALL, "linear", "normalized", "simple_gla", "gamma", "mamba2_groups", "gated_delta_rule_in_kernel",
        "kda_in_kernel", "gated_delta_product",
    ),
    *quick([f"variant {name}" for name in variants.VARIANTS], *(f"variant {name}" for name in variants.OFTEN)),
    *(f"flex {name}" for name in FLEX), "mask half",
]  # fmt: skip
OVER_RANKS = ["simple_gla", "variant gla", "variant gated_deltanet", "mask half"]


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
    (found,) = run_ranks(differences, 1, *args, only, env=INTERPRETED)
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
        ((same, error, other),) = run_ranks(closed_gates, 1, random.randrange(2**31), dtype, env=INTERPRETED)
        assert same == 0.0 and error < 2 * other + 4 * torch.finfo(dtype).eps


OPS_WITH_GATES = ("gated_delta_rule", "kda", "gated_delta_product")


def closed_delta_gates(sp: Any, seed: int, dtype: torch.dtype, capability: int = 9) -> dict[str, float]:
    """Differences from gates of -104, over ranks where there are several: outputs, states, all gradients."""
    found, least = {}, -800.0 if dtype == torch.float64 else -104.0
    lengths = [20, 0, 25][: sp.world_size] if sp.world_size > 1 else [45]
    sp.set_lengths(lengths)
    here = slice(sum(lengths[: sp.rank]), sum(lengths[: sp.rank + 1]))
    for name in OPS_WITH_GATES:
        case = PROGRAM_CASES[name]
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
            assert g is not made["g"] or not grads["g"][made["g"][:, here] <= least].any()
            results.append([o, *grads.values(), *([] if final is None else [final])])
        found[name] = max([(a - b).abs().max().item() for a, b in zip(*results, strict=True) if a.numel()], default=0.0)
    return found


@pytest.mark.parametrize("dtype", [torch.float64, *slow(torch.float32), torch.bfloat16], ids=str)
def test_closed_gates_of_delta_rules(dtype: torch.dtype) -> None:
    """In PyTorch on one rank and over three, in kernels of the engine, and in generated ones."""
    seed = random.randrange(2**31)
    runs = [run_ranks(closed_delta_gates, n, seed, dtype) for n in (1, 3)]
    if dtype == torch.float32:
        runs += [run_ranks(closed_delta_gates, 3, seed, dtype, env=INTERPRETED)]
        runs.append(run_ranks(closed_delta_gates, 1, seed, dtype, 8, env=INTERPRETED))
    if dtype != torch.float64:
        runs.append(run_ranks(closed_delta_gates, 1, seed, dtype, env=INTERPRETED))
    assert all(difference == 0.0 for ranks in runs for found in ranks for difference in found.values()), runs
