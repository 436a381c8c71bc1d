"""How generated kernels are judged on a GPU: against a float64 oracle, by the error of their functions in PyTorch.

The yardstick is the three functions in PyTorch, on data that is a rounding off, with products of operands as the
kernels round them: what kernels keep in memory between them has the inputs' dtype, states included.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton

from flexsp.compiler.graphs.values import NotEmittable
from flexsp.testing.compare import (
    DRAWS,
    FLOAT32_ROUNDING,
    RoundedProducts,
    a_rounding_off,
    check_functions,
    described_difference,
)  # fmt: skip
from tests import variants
from tests.harness.generated import Run, differentiated, problem_of, sizes, wide

CUDA = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# What the yardstick does not do on the CPU: a GPU makes running sums as trees. Past a document's end such a sum of
# gates repeats its last value only up to a rounding of the sum, and a final state carries that as a factor.
GPU_ROUNDINGS = 4 * FLOAT32_ROUNDING
Tensors = dict[str, torch.Tensor]
Call = Callable[[Tensors], Any]


class Sums(NamedTuple):
    """Parameters of gates, whose gradients are sums over all tokens of those of gates.

    In float32 kernels add gates up in float32, and functions in PyTorch in float64. What the former loses is next to
    nothing in a gate's gradient, but tokens share it, so that it is most of the error of a sum over tokens.

    names: of the parameters, or of gates so strong that a sum's rounding shows. functions: a yardstick that adds gates
    up in float32. draws: cotangents that it answers.
    """

    names: tuple[str, ...]
    functions: Call
    draws: int


def assert_same(calls: list[Tensors]) -> None:
    """The same bits every time."""
    first, *others = calls
    changed = [
        f"{key} of call {i} and of the first{described_difference(other[key], x)}"
        for i, other in enumerate(others, 1) for key, x in first.items() if not torch.equal(x, other[key])
    ]  # fmt: skip
    assert not changed, "\n".join(changed)


def assert_right(
    kernels: Call, oracle: Call, functions: Call, leaves: Tensors, do: torch.Tensor, dfinal: torch.Tensor,
    dtype: torch.dtype, seed: int, calls: int = 3, sums: Sums | None = None,
) -> None:  # fmt: skip
    """Outputs, final states and gradients of `kernels` on CUDA are those of `oracle` in float64 on CUDA.

    Args:
        functions: the yardstick, on the CPU.
        leaves: inputs on the CPU in the dtypes that the kernels take; those wider than `dtype` keep their values.
        do, dfinal: cotangents with values that `dtype` has.
        sums: the parameters that are judged by a yardstick of their own.
    """
    cotangents, draws = [(do, dfinal)], DRAWS if sums is None else sums.draws
    cotangents += [tuple(torch.randn(x.shape).bfloat16().double() for x in (do, dfinal)) for _ in range(1, draws)]
    on_gpu = [tuple(x.to(CUDA) for x in each) for each in cotangents]

    def run(given: Tensors) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*runs in PyTorch")
            return kernels(given)

    found = [differentiated(run, _to(CUDA, leaves), [each])[0] for each in on_gpu[:DRAWS]]  # one by one: no batch
    again = [differentiated(run, _to(CUDA, leaves), on_gpu[:1])[0] for _ in range(1, calls)]
    assert_same([found[0], *again])
    want = differentiated(oracle, {key: x.double() for key, x in _to(CUDA, leaves).items()}, on_gpu)
    made = torch.Generator().manual_seed(seed)
    off = {key: x if wide(key) else a_rounding_off(x, made, dtype) for key, x in leaves.items()}
    cotangents = [tuple(a_rounding_off(x, made, dtype) for x in each) for each in cotangents]
    with RoundedProducts("tf32x3" if dtype == torch.float32 else dtype):
        low = differentiated(functions, off, cotangents[:DRAWS])
        of_sums = [] if sums is None else differentiated(sums.functions, off, cotangents)
    found, want = ([_to("cpu", x) for x in answers] for answers in (found, want))
    apart = () if sums is None else tuple(f"d{name}" for name in sums.names)
    check_functions(*(_without(apart, answers) for answers in (found, want[:DRAWS], low)), GPU_ROUNDINGS)
    if sums is not None:
        check_functions(*(_only(apart, answers) for answers in (found, want, of_sums)), GPU_ROUNDINGS)


def check_variant(
    name: str, K: int, V: int, dtype: torch.dtype, folder: Path, seed: int, documents: tuple[int, ...] | None = None,
    B: int = 2, T: int = 202, H: int = 3, chunk: int | None = None, calls: int = 3, lowering: str = "generated",
    gates: torch.Tensor | None = None, lie: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, x: x,
) -> None:  # fmt: skip
    """A variant's kernels against its token loop.

    Args:
        gates: log gates of tokens [T], or of tokens and channels [T, K], the same for all heads.
        lie: gives an input the kernels are given, or "do", other strides.
    """
    bounds = None
    if documents is not None:
        B, T, bounds = 1, sum(documents), (0, *accumulate(documents))
    run = Run(name, T=T, B=B, H=H, K=K, V=V, dtype=dtype, bounds=bounds, chunk=chunk)
    problem = problem_of(run)
    model = variants.load(name).make(H, K, V, dtype, chunk_size=chunk, code_dir=str(folder), lowering=lowering)
    functions = variants.load(name).make(H, K, V, chunk_size=chunk)
    leaves = {key: x.to(torch.float32 if wide(key) else dtype) for key, x in (problem.tokens | problem.params).items()}
    leaves["prev_s"] = problem.initial.float()
    if gates is not None:
        shape = 1, T, 1, *[gates.shape[1] if gates.dim() == 2 else 1] * (leaves["g"].dim() - 3)
        leaves["g"] = gates.view(shape).expand_as(leaves["g"]).clone()
    cu = None if bounds is None else torch.tensor(bounds)
    cu_gpu = None if cu is None else cu.to(CUDA)

    def loop(given: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, params = ({key: given[key] for key in of} for of in (problem.tokens, problem.params))
        with sizes(run):
            return variants.token_loop(name, tokens, params, given["prev_s"], bounds)

    padded = triton.next_power_of_2(K) * triton.next_power_of_2(V)
    if variants.VARIANTS[name].transition == "elementwise" and padded > 128 * 256:
        with pytest.raises(NotEmittable, match="take one factor for each head or each row"):
            model(**{key: x.to(CUDA) for key, x in leaves.items()}, cu_seqlens=cu_gpu, sp=False)
        return
    assert_right(
        lambda given: model(**{key: lie(key, x) for key, x in given.items()}, cu_seqlens=cu_gpu, sp=False), loop,
        lambda given: functions(**given, cu_seqlens=cu, sp=False),
        leaves, problem.do, problem.dfinal, dtype, seed, calls,
    )  # fmt: skip


def _only(names: tuple[str, ...], answers: list[Tensors]) -> list[Tensors]:
    return [{name: answer[name] for name in names} for answer in answers]


def _without(names: tuple[str, ...], answers: list[Tensors]) -> list[Tensors]:
    return [{name: x for name, x in answer.items() if name not in names} for answer in answers]


def _to(device: torch.device | str, tensors: Tensors) -> Tensors:
    return {key: x.detach().to(device, copy=True) for key, x in tensors.items()}
