"""Generated walks that sum up a segment leave out the chunks whose part decays to nothing: exact for any gates."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from flexsp.compiler import LinearAttention
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests import variants
from tests.harness.diagonal import gates_of
from tests.harness.interpreted import INTERPRETED, poisoned
from tests.marks import slow

T, H, K, V = 150, 2, 20, 24
BOUNDS = (0, 70, 70, 90, T)
KINDS = (
    "none", "some tens of tokens", "one slow head", "huge", "as models begin", "closed here and there",
    "slow at the start", "slow at the end",
)  # fmt: skip
SEGMENTS = (2, 256)

Tensors = dict[str, torch.Tensor]


def log_gates(name: str, kind: str, seed: int) -> torch.Tensor:
    if name == "retnet":
        return {"none": torch.zeros(H), "one slow head": torch.tensor([-8.0, -1e-3])}.get(
            kind, torch.tensor([-4.0, -9.0])
        )
    if kind.startswith("slow at"):  # in each of two segments
        token = torch.arange(T) % 80
        gates = torch.where(token < 40 if kind == "slow at the start" else token >= 40, 0.0, -9.0).double()
        gates = gates.view(1, T, 1).expand(1, T, H)
        return gates if name == "simple_gla" else gates.unsqueeze(-1).expand(1, T, H, K)
    if name == "simple_gla":
        return gates_of(kind, seed)
    if kind == "one slow channel":
        gates = torch.full((1, T, H, K), -9.0, dtype=torch.float64)
        gates[..., 3] = -1e-3
        return gates
    return torch.stack([gates_of(kind, seed + i) for i in range(K)], -1)


def inputs_of(model: LinearAttention, gates: torch.Tensor, seed: int, states: int) -> tuple[Tensors, torch.Tensor]:
    r = torch.Generator().manual_seed(seed)
    meta, x = model.program.meta, {}
    for name in (*meta.tokens, *meta.params):
        width = {"v": (V,), "u": ()}.get(name, (K,))
        x[name] = torch.randn(*((1, T) if name in meta.tokens else ()), H, *width, generator=r, dtype=torch.float64)
    x["log_gamma" if "log_gamma" in x else "g"] = gates.double()
    return x, torch.randn(states, H, K, V, generator=r, dtype=torch.float64)


def results(model: LinearAttention, x: Tensors, state: torch.Tensor, bounds: Any, dtype: torch.dtype) -> Tensors:
    """Outputs, final states and every gradient."""
    leaves = {name: y.to(dtype).requires_grad_() for name, y in (x | {"prev_s": state}).items()}
    o, final = model(**leaves, cu_seqlens=bounds)  # type: ignore[arg-type]
    assert final is not None
    r = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(y.shape, generator=r, dtype=torch.float64).to(dtype) for y in (o, final)]
    grads = torch.autograd.grad([o, final], list(leaves.values()), cotangents)
    return {"o": o, "final": final} | {f"d{name}": dx for name, dx in zip(leaves, grads, strict=True)}


@functools.cache
def model_of(name: str) -> LinearAttention:
    return variants.load(name).make(H, K, V, torch.float32, chunk_size=16)


def failures(sp: Any, name: str, kinds: tuple[str, ...], seed: int) -> list[str]:
    found = []
    model = model_of(name)
    for kind in kinds:
        for bounds in (None, torch.tensor(BOUNDS)):
            x, state = inputs_of(model, log_gates(name, kind, seed), seed, 1 if bounds is None else len(BOUNDS) - 1)
            want = results(model, x, state, bounds, torch.float64)
            segments = random.Random(f"{seed} {kind} {bounds}").choice(SEGMENTS)
            segments = max(SEGMENTS) if kind == "none" and bounds is not None else segments
            segments = min(SEGMENTS) if kind.startswith("slow at") else segments
            with poisoned(segments, H):
                got = results(model, x, state, bounds, torch.float32)
            known = [at for at in got if kind != "huge" or at not in ("dg", "dlog_gamma")]
            most = 1e-2 if kind == "huge" else 2e-5  # sums of 1e5 in fp32
            errors = {at: relative_error(got[at].double(), want[at]) for at in known}
            limits = {at: max(most, 1e-3) if want[at].numel() <= H else most for at in known}  # sums that may cancel
            wrong = {at: x for at, x in errors.items() if not x < limits[at] and want[at].norm() > 1e-20}
            if wrong:
                found.append(f"{kind}, packed {bounds is not None}, segments {segments}: {wrong}")
    return found


QUICK = ("one slow head", "closed here and there", "slow at the start", "slow at the end", "one slow channel")


@pytest.mark.parametrize("name", ["gla", *slow("gla, more", "simple_gla", "retnet", "gla_own_bias")])
def test_gates_of_all_kinds(name: str, seed: int) -> None:
    """Whole and packed, with initial states and gradients of final ones."""
    kinds = (*KINDS, "one slow channel") if name.startswith("gla") else KINDS
    kinds = ("none", "one slow head", "huge") if name == "retnet" else kinds
    kinds = tuple(x for x in kinds if (x in QUICK) == (name == "gla")) if name in ("gla", "gla, more") else kinds
    (found,) = run_ranks(failures, 1, name.partition(",")[0], kinds, seed, env=INTERPRETED)
    assert not found, "\n".join(found)


def test_gates_of_a_variant_with_a_parameter(seed: int) -> None:
    kinds = "some tens of tokens", "one slow channel"
    (found,) = run_ranks(failures, 1, "gla_own_bias", kinds, seed, env=INTERPRETED)
    assert not found, "\n".join(found)


def behind(sp: Any, name: str, slow: bool, packed: bool, seed: int) -> tuple[bool, bool, float]:
    """As `_behind` in tests/kernels/test_horizon.py; `slow`: a channel or head that does not decay sees everything."""
    model = model_of(name)
    x, state = inputs_of(model, torch.zeros(()), seed, 1)
    x = {key: y.float() for key, y in x.items()}
    x["g"] = torch.full((1, T, H, *([K] if name == "gla" else [])), -4.0)
    if slow:
        x["g"][..., 1] = 0.0
    bounds, half = torch.tensor([0, T]) if packed else None, T // 2 + 32
    broken = x | {"k": x["k"].clone()}
    broken["k"][:, 0] = float("nan")
    whole = x | {"k": x["k"].clone().requires_grad_()}
    with poisoned(2, H):
        forward = model(**broken, cu_seqlens=bounds)[0][:, half:]
        o, _ = model(**whole, cu_seqlens=bounds)
        do = torch.ones_like(o)
        do[:, -1] = float("nan")
        o.backward(do)
        large = torch.full_like(state, 1e30).float()
        after = model(**x, prev_s=large, cu_seqlens=bounds)[0][:, half:]
    grad = whole["k"].grad
    assert grad is not None
    change = float((after - o[:, half:]).detach().double().norm() / after.double().norm())
    return bool(forward.isfinite().all()), bool(grad[:, : T // 2 - 16].isfinite().all()), change


@pytest.mark.parametrize(
    ("name", "packed"), [("simple_gla", False), ("gla", True), *slow(("simple_gla", True), ("gla", False))]
)
def test_what_is_behind_the_horizon_is_not_walked(name: str, packed: bool, seed: int) -> None:
    ((forward, backward, change),) = run_ranks(behind, 1, name, False, packed, seed, env=INTERPRETED)
    assert forward and backward and change < 1e-6
    ((forward, backward, change),) = run_ranks(behind, 1, name, True, packed, seed, env=INTERPRETED)
    assert not forward and not backward and change > 0.1


def far_away(sp: Any, seed: int) -> float:
    """Relative error of outputs behind a segment whose first tokens decay by e^-70 and are 1e40 times larger."""
    model = model_of("simple_gla")
    x, state = inputs_of(model, torch.full((1, T, H), -1.0), seed, 1)
    x["v"] *= torch.where(torch.arange(T) < 16, 1e20, 1e-20).view(1, T, 1, 1)
    want = model(**x, prev_s=state)[0][:, 80:96]
    with poisoned(2, H):
        got = model(**{name: y.float() for name, y in x.items()}, prev_s=state.float())[0][:, 80:96]
    return relative_error(got.double(), want)


def test_large_numbers_far_away(seed: int) -> None:
    (error,) = run_ranks(far_away, 1, seed, env=INTERPRETED)
    assert error < 1e-4


def test_which_variants_have_a_horizon() -> None:
    """Those whose decay of a chunk is a number or a row in memory."""
    found = {
        name: variants.load(name).make(H, K, V).kernels.source
        for name in ("simple_gla", "gla", "retnet", "hgrn", "linear", "gated_deltanet")
    }
    assert {name for name, source in found.items() if "<= HORIZON" in source} == {"simple_gla", "gla", "retnet"}
