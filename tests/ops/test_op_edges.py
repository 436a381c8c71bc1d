"""Kernels of ops at their edges, against float64 in PyTorch: strides of a later call, states and parameters that are
not contiguous, sizes that fill no tile, documents over segments. In the interpreter fresh memory is NaN."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from flexsp import ops
from flexsp.testing.cases import Shape
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED, poisoned
from tests.op_cases import OTHER_CASES

SEGMENTS = 256
BOUND = 1e-5  # of sums in float32 over some dozens of numbers

Tensors = dict[str, torch.Tensor]


def apart(x: torch.Tensor) -> torch.Tensor:
    """The same values, with NaN between any two."""
    return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]


def errors(op: Callable[..., Any], inputs: Tensors, arrange: Callable[[torch.Tensor], torch.Tensor], **how: Any) -> Any:
    """Relative errors of outputs, final states and all gradients, by name."""

    def solved(given: Tensors, lay: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
        leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
        o, state = op(**{name: lay(x) for name, x in leaves.items()}, **how)
        weight = torch.linspace(-1, 1, o.numel(), dtype=torch.float64).sin().view(o.shape)
        loss = (o * weight.to(o.dtype)).sum() + state.square().sum()
        grads = torch.autograd.grad(loss, [*leaves.values()])
        return {"o": o, "state": state} | {f"d{name}": dx for name, dx in zip(leaves, grads, strict=True)}

    want = solved(inputs, lambda x: x)
    got = solved({name: x.float() for name, x in inputs.items()}, arrange)
    return {name: error for name, x in got.items() if not (error := relative_error(x, want[name])) < BOUND}


@contextmanager
def in_heads(numbers: int) -> Iterator[None]:
    """Channels are in heads of so many numbers of the state at most, and all chunks in one segment, as in wide layers
    of long texts."""
    from flexsp.kernels import channel_tiling
    from flexsp.kernels.selective import selective_plan
    from flexsp.kernels.vector import vector_plan

    most, before = channel_tiling.MOST, (selective_plan.LIMITS, vector_plan.LIMITS)
    channel_tiling.MOST = numbers
    selective_plan.LIMITS, vector_plan.LIMITS = (x._replace(programs=1) for x in before)
    try:
        with poisoned(1, 1):
            yield
    finally:
        channel_tiling.MOST, (selective_plan.LIMITS, vector_plan.LIMITS) = most, before


def vectors(sp: Any, seed: int) -> list[Any]:
    made, found = torch.Generator().manual_seed(seed), []
    x, g, state = (torch.randn(n, generator=made, dtype=torch.float64) for n in ((2, 9, 8), (2, 9, 8), (2, 8)))
    inputs = {"x": x, "g": logsigmoid(g), "initial_state": state}
    with poisoned(SEGMENTS, 1):
        for arrange in (lambda y: y, apart):  # calls of the same sizes
            found.append(errors(ops.chunk_hgrn, inputs, arrange, output_final_state=True))
        inputs["initial_state"] = state.clone()
        only = lambda y: apart(y) if y.shape == state.shape else y  # noqa: E731
        found.append(errors(ops.chunk_hgrn, inputs, only, output_final_state=True))
    with in_heads(4):
        found.append(errors(ops.chunk_hgrn, inputs, apart, output_final_state=True))
    return found


def test_vector_states(seed: int) -> None:
    assert run_ranks(vectors, 1, seed, env=INTERPRETED) == [[{}, {}, {}, {}]]


def selective(sp: Any, seed: int) -> list[Any]:
    """Lanes that pass on sums, three numbers a channel, and documents over segments of one chunk each, and in one."""
    made, found = torch.Generator().manual_seed(seed), []

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64)

    inputs = {"u": normal(1, 21, 36), "delta": normal(1, 21, 36), "A": -normal(36, 3).abs(), "B": normal(1, 21, 3)}
    inputs |= {"C": normal(1, 21, 3), "D": normal(36), "z": normal(1, 21, 36), "delta_bias": normal(36)}
    inputs["initial_state"] = normal(2, 36, 3)
    how = {"delta_softplus": True, "return_last_state": True, "cu_seqlens": torch.tensor([0, 18, 21])}
    with poisoned(SEGMENTS, 1):
        for arrange in (lambda y: y, lambda y: apart(y) if y.dim() == 3 else y):
            found.append(errors(ops.selective_scan, inputs, arrange, **how))
    with in_heads(6):
        found.append(errors(ops.selective_scan, inputs, arrange, **how))
    return found


def test_selective_scan(seed: int) -> None:
    assert run_ranks(selective, 1, seed, env=INTERPRETED) == [[{}, {}, {}]]


def quotients(sp: Any, seed: int) -> list[float]:
    """Maxima far from 0, and normalisers that are the least one."""
    from flexsp.kernels.mlstm import in_pytorch, rows

    made = torch.Generator().manual_seed(seed)
    m = torch.tensor([-60.0, -30.0, -15.0, 0.0, 0.0, 0.0, 30.0, 60.0, 40.0], dtype=torch.float64).view(1, -1, 1)
    below = torch.tensor([3.0, -2.0, 1.0, 1.0, -1.0, 0.5, 2.0, -3.0, -3e-17]).view(1, -1, 1, 1)
    above, dy = torch.randn(2, 1, 9, 1, 4, generator=made)
    # Products of one sign within a token: the sum of them, a gradient, may not cancel, or float32 is judged by luck.
    dy = dy.abs() * above.sign() * torch.randn(1, 9, 1, 1, generator=made).sign()
    found = []
    for function, dtype in ((rows.quotients, torch.float32), (in_pytorch.quotients, torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (above, below)]
        y = function(*leaves, m, 0.0, dtype)
        found.append([y.double(), *[x.double() for x in torch.autograd.grad(y, leaves, dy.to(dtype))]])
    return [relative_error(a[:, t], b[:, t]) for a, b in zip(*found, strict=True) for t in range(9)]


def test_mlstm_quotients(seed: int) -> None:
    (found,) = run_ranks(quotients, 1, seed, env=INTERPRETED)
    assert max(found) < BOUND, found


def no_last_tokens(sp: Any, seed: int) -> Any:
    case = OTHER_CASES["mlstm"]
    inputs = {k: x.float() for k, x in case.inputs(Shape(B=1, T=5, H=2, K=4, V=4), seed).items()}
    sp.set_lengths([5, 0])
    mine = {k: x[:, :5] if sp.rank == 0 else x[:, 5:] for k, x in inputs.items()}
    given = {"head_first": False, "return_last_states": True}
    return ops.chunk_mlstm(**mine, **given, sp=sp)[1], ops.chunk_mlstm(**inputs, **given, sp=False)[1]


def test_mlstm_with_a_last_rank_without_tokens(seed: int) -> None:
    _, (got, want) = run_ranks(no_last_tokens, 2, seed, env=INTERPRETED)
    assert all(relative_error(a, b) < BOUND for a, b in zip(got, want, strict=True))


def mamba3(sp: Any, seed: int) -> Any:
    """9 heads of a group, which no program of 8 has; segments that are no multiple of a step; nothing contiguous."""
    from flexsp.kernels.mamba3 import autograd_functions as kernels

    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64)

    T, H, K, P = 11, 9, 4, 3
    inputs = {"x": normal(1, T, H, P), "dt": normal(1, T, H).abs(), "A": -normal(1, T, H).abs(), "D": normal(H)}
    inputs |= {"B": normal(1, T, 1, K), "C": normal(1, T, 1, K), "trap": normal(1, T, H)}
    inputs |= {"angles": normal(1, T, H, 2), "B_bias": normal(H, K), "C_bias": normal(H, K)}

    def op(**given: Any) -> Any:
        y, state = ops.mamba3(**given, output_final_state=True)
        return y, torch.cat([part.flatten() for part in state])

    before, kernels._SEGMENT = kernels._SEGMENT, 3
    try:
        with poisoned(SEGMENTS, 1):
            return errors(op, inputs, apart)
    finally:
        kernels._SEGMENT = before


def test_mamba3(seed: int) -> None:
    assert run_ranks(mamba3, 1, seed, env=INTERPRETED) == [{}]


def test_decoding_of_mamba3_keeps_no_whole_turns() -> None:
    inputs = OTHER_CASES["mamba3"].inputs(Shape(B=1, T=8, H=2, K=4, V=4), random.randrange(2**31))
    _, state = ops.recurrent_mamba3(**inputs | {"dt": inputs["dt"] + 20}, output_final_state=True)
    assert state is not None and state.angle.abs().max() <= math.pi
