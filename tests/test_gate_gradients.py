"""Gradients of gates in bfloat16, of every op that has them: token by token, and summed over tokens, which is what a
bias, a projection or A_log gets.

The first head's gates are small, the second's strong, the third's small but for one that is closed, behind which values
are a hundred times as large: what happens there cannot depend on gates before it. Kernels run in Triton's interpreter.
The reference is the token loop in float64. The bound comes from the same loop of numbers that were rounded to bfloat16
once more: twice its error, of the worst head. Of one gate a head, sums over tokens are few numbers, any of which may be
off by chance: the loop is rounded more often, and then those for more cotangents count together.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flexsp import ops
from flexsp.devices import H200, planned_for
from flexsp.testing import oracles
from flexsp.testing.bounds import within_tensors
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness import mlstm as mlstm_calls
from tests.harness import vector_gates as vector
from tests.harness.interpreted import INTERPRETED
from tests.marks import slow

BF16 = torch.bfloat16
T, CLOSED, K, V = 130, 71, 16, 16
CHANNELS = ("gla", "rwkv6", "hgrn2", "kda")
ROUNDED = ("q", "r", "k", "v", "x", "B", "C")
DRAWS, DRAWS_OF_HEADS, COTANGENTS, MORE = 3, 8, 2, 12
LONG_DRAWS = 8
Tensors = dict[str, Tensor]


class Op(NamedTuple):
    chunk: Callable[..., Any]
    oracle: Callable[..., Any]
    gates: tuple[str, ...] = ("g",)


_NORM = {"use_qk_l2norm_in_kernel": True}
OPS = {
    "simple_gla": Op(ops.chunk_simple_gla, oracles.simple_gla),
    "mamba2": Op(ops.mamba2_ssd, oracles.mamba2_ssd, ("dt", "A")),
    "mamba2, one group": Op(ops.mamba2_ssd, oracles.mamba2_ssd, ("dt", "A")),
    "gla": Op(ops.chunk_gla, vector.gla),
    "hgrn2": Op(ops.chunk_hgrn2, vector.hgrn2),
    "rwkv6": Op(ops.chunk_rwkv6, vector.rwkv6, ("w",)),
    "gated_delta_rule": Op(partial(ops.chunk_gated_delta_rule, **_NORM), partial(oracles.delta_rule, **_NORM)),
    "kda": Op(partial(ops.chunk_kda, **_NORM), partial(oracles.delta_rule, **_NORM)),
    "mlstm": Op(partial(ops.chunk_mlstm, head_first=False), mlstm_calls.oracle, ("f", "i")),
}


def inputs_of(name: str, made: torch.Generator) -> Tensors:
    """Numbers of bfloat16, and of float32 for gates and the like, in float64."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64)

    raw = normal(1, T, 3, *([K] if name in CHANNELS else []))
    g = torch.nn.functional.logsigmoid(raw + 3)
    g[:, :, 1] = -3 * torch.sigmoid(raw[:, :, 1])
    g[:, CLOSED, 2] = -1e4
    q, k, v = normal(1, T, 3, K), normal(1, T, 3, K), normal(1, T, 3, V)
    v[:, CLOSED + 1 :, 2] *= 100
    found = {"q": q, "k": k, "v": v, "g": g}
    if name in ("gated_delta_rule", "kda"):
        found["beta"] = torch.rand(1, T, 3, generator=made, dtype=torch.float64)
    elif name == "hgrn2":
        del found["k"]
    elif name == "rwkv6":
        found = {"r": q, "k": k, "v": v, "w": g, "u": normal(3, K)}
    elif name == "mlstm":
        found["f"], found["i"] = torch.special.logit(found.pop("g").exp()).clamp(min=-1e4), normal(1, T, 3)
    elif name.startswith("mamba2"):
        if "group" in name:
            q, k = q[:, :, :1], k[:, :, :1]
        v[:, CLOSED, 2] /= 1e4  # it is written with the size of its gate
        found = {"x": v, "dt": -g, "A": -torch.ones(3, dtype=torch.float64), "B": k, "C": q}
    return {key: (x.to(BF16) if key in ROUNDED else x.float()).double() for key, x in found.items()}


def rounded_again(x: Tensor, made: torch.Generator, times: int = 1) -> Tensor:
    """x to as many digits as bfloat16 has, but other ones."""
    for _ in range(times):
        factor = 1 + torch.rand((), generator=made, dtype=torch.float64)
        x = (x * factor).to(BF16).double() / factor
    return x


def gradients(op: Callable[..., Any], inputs: Tensors, gates: tuple[str, ...], dos: list[Tensor], low: bool) -> Tensors:
    """Of gates, for all cotangents of the outputs; `low`: of inputs in bfloat16 and gates in float32, one by one."""
    kinds = {key: (BF16 if key in ROUNDED else torch.float32) if low else torch.float64 for key in inputs}
    leaves = {key: x.to(kinds[key]).requires_grad_() for key, x in inputs.items()}
    o, _ = op(**leaves)
    wanted = [leaves[x] for x in gates]
    if not low:
        return dict(zip(gates, torch.autograd.grad(o, wanted, torch.stack(dos), is_grads_batched=True), strict=True))
    found = [torch.autograd.grad(o, wanted, do.to(o), retain_graph=True) for do in dos]
    return {x: torch.stack([each[n] for each in found]).double() for n, x in enumerate(gates)}


def in_parts(found: Tensors) -> Tensors:
    """By tokens and summed over them, of each head and, of the third, on both sides of the closed gate."""
    parts = {}
    for name, x in found.items():
        if x.dim() < 4:  # a parameter
            parts |= {f"d{name} of head {h}": x[..., h] for h in range(3)}
            continue
        heads = {"small": x[:, 0, :, 0], "strong": x[:, 0, :, 1], "before a closed gate": x[:, 0, :CLOSED, 2],
                 "behind a closed gate": x[:, 0, CLOSED + 1 :, 2]}  # fmt: skip
        parts |= {f"d{name}, {kind}": y for kind, y in heads.items()}
        parts |= {f"d{name}, {kind}, summed over tokens": y.sum(1) for kind, y in heads.items()}
    return parts


def near_the_least_denominator(inputs: Tensors) -> Tensor:
    """Tokens where mLSTM's denominator, max(|q n|, 1), changes its branch when q n is rounded: gradients jump there.

    With values of 1 and half the scale the outputs are half of q n, up to |q n| = 2.
    """
    half = mlstm_calls.oracle(**inputs | {"v": torch.ones_like(inputs["v"])}, scale=0.5 * K**-0.5)[0]
    return ((2 * half).abs() - 1).abs() < 0.1


def errors(sp: Any, name: str, seed: int, cotangents: int = COTANGENTS) -> dict[str, tuple[float, float]]:
    """Of each part that of the op, and what it may be, of so many cotangents."""
    made, op = torch.Generator().manual_seed(seed), OPS[name]
    inputs = inputs_of(name, made)
    dos = [torch.randn(1, T, 3, V, generator=made, dtype=torch.float64).to(BF16).double() for _ in range(MORE)]
    if name == "mlstm":
        dos = [do.masked_fill(near_the_least_denominator(inputs), 0.0) for do in dos]
    want = in_parts(gradients(op.oracle, inputs, op.gates, dos, False))
    # A sum over tokens may nearly vanish for some cotangents: its size is that for all of them.
    sizes = {key: x.norm().item() * (cotangents / MORE) ** 0.5 for key, x in want.items()}
    want, dos = {key: x[:cotangents] for key, x in want.items()}, dos[:cotangents]
    with within_tensors():
        found = in_parts(gradients(op.chunk, inputs, op.gates, dos, True))
    drawn, times = [], 2 if "beta" in inputs else 1  # delta rules round U, W and the inverse too
    for _ in range(DRAWS if name in CHANNELS else DRAWS_OF_HEADS):
        off = {key: rounded_again(x, made, times) if key in ROUNDED else x for key, x in inputs.items()}
        low = in_parts(gradients(op.oracle, off, op.gates, [rounded_again(do, made, times) for do in dos], False))
        drawn.append({key: relative_error(low[key], x, sizes[key]) for key, x in want.items()})
    bounds = {
        kind: 2 * max(error for each in drawn for key, error in each.items() if key.endswith("tokens") == kind)
        for kind in {key.endswith("tokens") for key in want}
    }
    return {key: (relative_error(found[key], x, sizes[key]), bounds[key.endswith("tokens")]) for key, x in want.items()}


@pytest.mark.parametrize("name", OPS)
def test_gates(name: str) -> None:
    seed = random.randrange(2**31)
    for cotangents in (COTANGENTS,) if name in CHANNELS else (COTANGENTS, MORE):
        (found,) = run_ranks(errors, 1, name, seed, cotangents, env=INTERPRETED, timeout=200)
        over = [f"{key}: {e:.1e}, at most {bound:.1e}" for key, (e, bound) in found.items() if not e <= bound]
        if not over:
            break
    assert not over, "\n".join(over)


def long_errors(sp: Any, segments: int, packed: bool, seed: int) -> dict[str, tuple[float, float]]:
    """Of 32 chunks in few segments, whose edges alone have exact states: what chunks hand on adds up.

    `packed`: as a document whose last state is read too.
    """
    made, size = torch.Generator().manual_seed(seed), (1, 32 * 64, 2)
    q, k, v, do = (torch.randn(*size, 16, generator=made, dtype=torch.float64).to(BF16) for _ in range(4))
    k = torch.nn.functional.normalize(k.float(), dim=-1).to(BF16)
    g = torch.nn.functional.logsigmoid(torch.randn(size, generator=made) + 3)

    dfinal = 10 * torch.randn(1, 2, 16, 16, generator=made) if packed else torch.zeros(1, 2, 16, 16)
    document = {"cu_seqlens": torch.tensor([0, size[1]])} if packed else {}

    def gradient(op: Callable[..., Any], *inputs: Tensor, **more: Any) -> Tensor:
        gates = inputs[-1].requires_grad_()
        o, final = op(*inputs, **document, **more)
        (found,) = torch.autograd.grad([o, final], gates, [do.to(o).expand_as(o), dfinal.to(final).expand_as(final)])
        return found.double()

    want = gradient(oracles.simple_gla, *(x.double() for x in (q, k, v, g)))
    # A sum over tokens is one number a head: one draw would be near it by luck.
    lows = [torch.cat([rounded_again(x.double(), made) for _ in range(LONG_DRAWS)]) for x in (q, k, v)]
    low = gradient(oracles.simple_gla, *lows, g.double().repeat(LONG_DRAWS, 1, 1)).split(1)
    with planned_for(replace(H200, programs=segments * size[2])):
        found = gradient(ops.chunk_simple_gla, q, k, v, g, output_final_state=True)
    sizes = {"token by token": want.norm(), "summed over tokens": want.pow(2).sum(1).sqrt().norm()}
    return {
        name: (
            relative_error(of(found), of(want), size.item()),
            2 * max(relative_error(of(x), of(want), size.item()) for x in low),
        )
        for (name, size), of in zip(sizes.items(), (lambda x: x, lambda x: x.sum(1)), strict=True)
    }


@pytest.mark.parametrize(("segments", "packed"), [(1, False), (4, False), (1, True)], ids=["1", "4", "packed"])
def test_nothing_is_carried_over_chunks_in_bfloat16(segments: int, packed: bool) -> None:
    (found,) = run_ranks(long_errors, 1, segments, packed, random.randrange(2**31), env=INTERPRETED, timeout=200)
    over = [f"{key}: {error:.1e}, at most {bound:.1e}" for key, (error, bound) in found.items() if not error <= bound]
    assert not over, "\n".join(over)


def errors_of_states(sp: Any, K: int, V: int, seed: int) -> list[float]:
    """Of gates that only sums over chunks tell of, with states that all round down by 0.4 % in bfloat16.

    First of what tokens wrote for a last state: nothing of it was there before the first token, whose gate has a
    gradient of 0; its error is relative to what they wrote. Then of what tokens read in the second of two chunks.
    """
    if K >= 128:
        from tests.harness.gluon_in_torch import install

        install()
    made = torch.Generator().manual_seed(seed)
    off = torch.full((1, 1, K, V), 1.0038)

    def draw(T: int, n: int) -> Tensor:
        return torch.rand(1, T, 1, n, generator=made).to(BF16)

    def gradient(op: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, do: Tensor, S: Tensor, dS: Tensor) -> Tensor:
        kind = torch.float64 if op is oracles.simple_gla else torch.float32
        g = torch.full(q.shape[:3], -0.02, dtype=kind).requires_grad_()
        x = [t.double() if kind == torch.float64 else t for t in (q, k, v)]
        last = {} if op is oracles.simple_gla else {"output_final_state": True}
        o, final = op(*x, g, initial_state=S.to(kind), scale=0.1, **last)
        (found,) = torch.autograd.grad([o, final], g, [do.to(o), dS.to(final)])
        return found.double().flatten()

    k, v, zero = draw(64, K), draw(64, V), torch.zeros(1, 64, 1, K).to(BF16)
    wrote = gradient(ops.chunk_simple_gla, zero, k, v, torch.zeros_like(v), 0 * off, off)
    far = gradient(oracles.simple_gla, zero, k, v, torch.zeros_like(v), 0 * off, off).abs().max()
    q, k, do = draw(128, K), torch.zeros(1, 128, 1, K).to(BF16), draw(128, V)
    do[:, :64] = 0.0
    read, want = (
        gradient(op, q, k, torch.zeros_like(do), do, off, 0 * off) for op in (ops.chunk_simple_gla, oracles.simple_gla)
    )
    return [(wrote[0].abs() / far).item(), ((read - want)[:64].abs().max() / want[0].abs()).item()]


@pytest.mark.parametrize(("K", "V"), [(16, 16), (128, 128), *slow((128, 256), (256, 256))])
def test_sums_over_chunks_take_states_in_full(K: int, V: int) -> None:
    (found,) = run_ranks(errors_of_states, 1, K, V, random.randrange(2**31), env=INTERPRETED, timeout=200)
    assert max(found) < 4e-4, found  # a tenth of what the states lose; all else is rounded at random, or in float32
