"""On one GPU: gradients of gates, and of parameters that are sums over tokens, at 131,072 tokens.

A rounding that is carried from token to token does not show in short tests. The reference is the same call of the same
numbers in float32. Every error is at most 1 %, token by token and summed over tokens, as A_log or the bias of a
projection get it. `test_a_million_tokens` does the same at 1,048,576 tokens. Of two ranks it is in ranks_long_gates.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.gpu.judge import CUDA
from tests.harness import rope
from tests.harness.long_gates import BOUND, DRAWS, KINDS, OPS, OWN, WITH_STATE, Op, T, drawn


def errors(
    op: Op, name: str, kind: str, tokens: int, seed: int, exact: torch.dtype = torch.float32
) -> dict[str, float]:  # fmt: skip
    inputs = drawn(op, name, kind, tokens, seed, CUDA)
    errors: dict[str, list[Tensor]] = {}
    answers = []
    for dtype in (torch.bfloat16, exact):
        changed = op.tokens.split() if dtype != torch.float64 else inputs
        leaves = {n: (x.to(dtype) if n in changed else x.clone()).requires_grad_() for n, x in inputs.items()}
        answers.append((op.run(**leaves), leaves))
    made = torch.Generator(CUDA).manual_seed(seed + 1)
    (o, _), (want, _) = answers
    for part, rows in {"outputs": slice(None), "last outputs": slice(-1024, None)}.items():
        got, right = (x.detach()[:, rows].double() for x in (o, want))
        errors[part] = [torch.stack([(got - right).norm(), right.norm()])]
    for _ in range(DRAWS):
        do = torch.randn(answers[0][0].shape, generator=made, device=CUDA).bfloat16()
        low, high = (
            dict(zip(leaves, torch.autograd.grad(o, [*leaves.values()], do.to(o), retain_graph=True), strict=True))
            for o, leaves in answers
        )
        for n, x in high.items():
            parts = {n: (low[n], x)}
            if n in op.gates.split():
                parts[f"{n}, summed over tokens"] = (low[n].double().sum(1), x.double().sum(1))
            for key, (got, want) in parts.items():
                errors.setdefault(key, []).append(torch.stack([(got.double() - want).norm(), want.double().norm()]))
    del answers, low, high, o, want, got, right
    torch.cuda.empty_cache()  # other workers share the GPU
    sums = {n: torch.stack(x).square().sum(0).sqrt().tolist() for n, x in errors.items()}
    return {n: error / size for n, (error, size) in sums.items()}


def judge(found: dict[str, float]) -> None:
    over = [f"{n}: {error:.1e}" for n, error in found.items() if not error <= BOUND]
    assert not over, "; ".join(over)


CASES = [(name, kind) for name in OPS for kind in (["mild"] if name in OWN else KINDS)]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_long(name: str, kind: str, seed: int) -> None:
    judge(errors(OPS[name], name, kind, T, seed))


@pytest.mark.parametrize("name", OPS)
def test_a_million_tokens(name: str, seed: int) -> None:
    judge(errors(OPS[name], name, "mild", 8 * T, seed))


@pytest.mark.parametrize("tokens", [T, 8 * T])
@pytest.mark.parametrize("name", WITH_STATE)
def test_slow_decays(name: str, tokens: int, seed: int) -> None:
    """Of 0.9999 a token: what states lose from chunk to chunk stays in them for long. Final states are judged too."""
    judge(errors(WITH_STATE[name], name, "slow", tokens, seed))


@pytest.mark.parametrize("kind", ["mild", "strong"])
@pytest.mark.parametrize("name", ["spectral", "rope"])
def test_angles_of_widened_rows(name: str, kind: str, seed: int) -> None:
    """Both are computed in float32 whatever the dtype: beside float32 nothing of it would be seen, so beside PyTorch in
    float64."""
    judge(errors(OPS[name], name, kind, T, seed, torch.float64))


@pytest.mark.parametrize("name", ["delta", "difference", "mask", "delta rows"])
def test_theta_in_compiled_programs(name: str, seed: int) -> None:
    """Angles' gradients with gates of -1.5, against PyTorch in float64: kernels begin them anew at every chunk."""
    case = rope.Case(name, T, seed, strong=True, device=CUDA)
    of_tokens, of_sums = rope.errors(case.found()["theta"], case.found(torch.float64)["theta"])
    assert of_tokens < BOUND / 10 and of_sums < BOUND, (of_tokens, of_sums)
