"""Gradients where heads share keys, chunk by chunk over heads, in Triton's interpreter."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from flexsp.testing.cases import Shape
from flexsp.testing.compare import DRAWS, check_functions, low_precision
from flexsp.testing.ranks import run_ranks
from tests.harness.diagonal import MANY_SEGMENTS, SOME_SEGMENTS, Run, check_runs, one_walk, shared_keys
from tests.harness.interpreted import INTERPRETED, poisoned
from tests.marks import slow

FEW_PROGRAMS, MANY_PROGRAMS = 1, 1000  # all heads of a group in one program, and each in one of its own
BOUNDS = (0, 0, 3, 39, 39, 50, 69, 69)


@pytest.mark.parametrize(
    ("programs", "pieces"), [(FEW_PROGRAMS, 1), (MANY_PROGRAMS, 3), *slow((FEW_PROGRAMS, 3), (MANY_PROGRAMS, 1))]
)
def test_of_mamba2(programs: int, pieces: int) -> None:
    """Chunks and pieces that are not whole, more than one sequence, documents, half precision, other strides."""
    K, V = random.choice([(18, 5), (5, 20), (16, 17)])
    segments = random.choice([SOME_SEGMENTS, MANY_SEGMENTS])
    run, how = Run("mamba2_groups", Shape(B=2, T=73, H=4, K=K, V=V, states=2)), {"shared": (programs, pieces)}
    check_runs(
        Run("mamba2_groups", run.shape, segments=segments, **how),
        Run("mamba2_groups", Shape(B=1, T=69, H=4, K=V, V=K, states=7), bounds=BOUNDS, segments=segments, **how),
        Run("mamba2_groups", Shape(B=1, T=45, H=4, K=K, V=V), torch.bfloat16, strided=True, **how),
        Run("mamba2", Shape(B=1, T=45, H=3, K=K, V=V), torch.float16, bounds=(0, 20, 45), **how),
        Run("mamba2_groups", Shape(B=1, T=39, H=16, K=K, V=1, states=4), bounds=(0, 0, 3, 36, 39), **how),
    )


def by_gates(sp: Any, seed: int, pieces: int) -> dict[str, str]:
    """Which gradients are outside their bounds, beside those with a key for each head in float64, by gate."""
    from flexsp.kernels.diagonal.op import diagonal

    made, found = torch.Generator().manual_seed(seed), {}
    shapes = {"q": (1, 150, 2, 18), "k": (1, 150, 2, 18), "v": (1, 150, 6, 7), "g": (1, 150, 6), "g_gamma": (6,)}
    shapes["i"] = (1, 150, 6)
    drawn = {name: torch.randn(shape, generator=made, dtype=torch.float64) for name, shape in shapes.items()}
    drawn |= {name: -drawn[name].abs() for name in ("g", "g_gamma", "i")}
    drawn["i"][:, 20:150:7] = -torch.inf
    cotangents = torch.randn(DRAWS, 1, 150, 6, 7, generator=made, dtype=torch.float64)

    def gradients(run: Any, dtype: torch.dtype, draws: int) -> list[dict[str, torch.Tensor]]:
        given = {name: drawn[name].to(dtype).requires_grad_(name in wanted) for name in names}
        o, leaves = run(**given, scale=0.3)[0], [given[name] for name in wanted]
        grads = [torch.autograd.grad(o, leaves, do.to(dtype), retain_graph=True) for do in cotangents[:draws]]
        return [dict(zip(wanted, each, strict=True)) for each in grads]

    def own_keys(run: Any) -> Any:
        return lambda q, k, **rest: run(q.repeat_interleave(3, 2), k.repeat_interleave(3, 2), **rest)

    def rounded(q: Any, k: Any, v: Any, g: Any = None, g_gamma: Any = None, i: Any = None, *, scale: float) -> Any:
        k = k if i is None else k * i.exp().unsqueeze(-1)
        return low_precision(q, k, v, g if g_gamma is None else g_gamma.expand(1, 150, 6), scale=scale)

    for gate in ("", "g", "g_gamma", "g i", "g i alone"):
        names = ["q", "k", "v", *(x for x in gate.split() if x != "alone")]
        wanted = ["i"] if "alone" in gate else names
        want = gradients(own_keys(diagonal), torch.float64, DRAWS)
        low = gradients(own_keys(rounded), torch.float32, DRAWS)
        with one_walk(shared_keys(MANY_PROGRAMS, pieces)), poisoned(SOME_SEGMENTS, 6):
            got = gradients(diagonal, torch.float32, 1)
        try:
            check_functions(got, want, low)
        except AssertionError as error:
            found[gate] = str(error)
    return found


@pytest.mark.parametrize("pieces", [1, 2])
def test_of_other_gates(pieces: int) -> None:
    """No decay, gates of tokens, gates of heads, gates of tokens and of what they write, whose gradients may be the
    only ones."""
    (found,) = run_ranks(by_gates, 1, random.randrange(2**31), pieces, env=INTERPRETED)
    assert not found, "\n".join(f"gate {gate!r}: {why}" for gate, why in found.items())
