"""Calls of the delta engine whose walks, inverses and gradients are in Gluon, on the CPU: see
`tests.harness.gluon_in_torch`."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flexsp import ops
from flexsp.testing import oracles
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED, poisoned
from tests.harness.keys import check_equal_entries, roundings_of_equal_entries
from tests.marks import slow

Tensors = dict[str, torch.Tensor]
BOUND, LEAST = 2e-2, -104.0  # a gate of that is closed
BOUNDS = 0, 0, 61, 62, 127, 127, 150
RULES = {
    "gated": ops.chunk_gated_delta_rule, "no gate": ops.chunk_delta_rule,
    **dict.fromkeys(
        ("product", "product, channels"), functools.partial(ops.chunk_gated_delta_product, num_householder=2)
    ),
    "channels": ops.chunk_kda, "channels, strengths": ops.chunk_gdn2,
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """Of H value heads, `group` of which share a key head, and T tokens, in about so many `segments`. norm: keys have
    any length, and the kernels divide by it. alike: half of the keys are one, and beta is near 2, so that segments are
    done token by token. parts: a backward pass has several, and segments are short."""

    rule: str = "gated"
    T: int = 150
    H: int = 2
    group: int = 2
    K: int = 64
    V: int = 64
    B: int = 1
    norm: bool = True
    packed: bool = False
    segments: int = 2
    alike: bool = False
    parts: bool = False

    @property
    def bounds(self) -> tuple[int, ...]:
        return BOUNDS if self.T else (0,) * len(BOUNDS)

    @property
    def steps(self) -> int:
        return 2 if "product" in self.rule else 1

    def inputs(self) -> Tensors:
        """Exact in bfloat16."""

        def draw(T: int, *size: int) -> torch.Tensor:
            return torch.randn(self.B, T, *size)

        T, heads = self.T * self.steps, self.H // self.group
        x = {"q": draw(self.T, heads, self.K), "k": draw(T, heads, self.K), "v": draw(T, self.H, self.V)}
        strengths = {"b": self.K, "w": self.V} if "strengths" in self.rule else {"beta": None}
        x |= {name: torch.rand(self.B, T, self.H, *([n] if n else [])) for name, n in strengths.items()}
        if self.alike:
            x["k"][:] = x["k"][:, :1] + 0.1 * x["k"]
            x |= {name: 2 - 0.05 * x[name] for name in ("beta", "b") if name in x}
        if self.norm:
            x["q"] *= torch.exp2(torch.randint(-6, 6, x["q"].shape[:3])[..., None])
            x["k"] *= torch.exp2(torch.randint(-6, 6, x["k"].shape[:3])[..., None])
            x["k"][:, 5:6] = 0.0
        else:
            x |= {name: torch.nn.functional.normalize(x[name], dim=-1) for name in "qk"}
        if self.rule != "no gate":
            channels = [self.K] if "channels" in self.rule else []
            x["g"] = -(0.02 if self.alike else 0.5) * torch.rand(self.B, self.T, self.H, *channels)
            x["g"][:, 40::50] = -0.1 if self.alike else -9.0
            (x["g"][..., :1] if channels else x["g"])[:, 7:8] = LEAST
        x["initial_state"] = torch.randn(len(BOUNDS) - 1 if self.packed else self.B, self.H, self.K, self.V)
        return {name: t.bfloat16().double() for name, t in x.items()}

    def run(self, x: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        options: dict[str, Any] = {"cu_seqlens": torch.tensor(self.bounds)} if self.packed else {}
        kinds = {name: torch.bfloat16 if name in ("q", "k", "v") else torch.float32 for name in x}
        given = {name: t.to(kinds[name]) for name, t in x.items()}
        options |= {"output_final_state": True, "use_qk_l2norm_in_kernel": self.norm}
        found: tuple[torch.Tensor, torch.Tensor] = RULES[self.rule](**given, scale=0.7, **options)
        return found

    def oracle(self, x: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """In float64; zeros behind the last document."""
        end, x = self.bounds[-1] if self.packed else self.T, dict(x)
        for name in "qk":
            if self.norm:
                x[name] = x[name] / (x[name].square().sum(-1, keepdim=True) + 1e-6).sqrt()
            x[name] = x[name].repeat_interleave(self.group, 2)
        rest = x["v"][:, : self.T - end] * 0
        x = {
            name: t if name == "initial_state" else t[:, : end * (1 if name in "qg" else self.steps)]
            for name, t in x.items()
        }
        bounds = {"cu_seqlens": torch.tensor(self.bounds)} if self.packed else {}
        if "b" in x:
            o, final = oracles.gdn2(**x, scale=0.7, **bounds)
        else:
            o, final = oracles.delta_rule(**x, scale=0.7, steps=self.steps, **bounds)
        return torch.cat([o, rest], 1), final


def solved(call: Any, x: Tensors) -> Tensors:
    leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
    o, final = call(leaves)
    made = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(t.shape, generator=made).bfloat16().to(t.dtype) for t in (o, final)]
    grads = torch.autograd.grad([o, final], [*leaves.values()], cotangents, materialize_grads=True)
    return {"o": o, "final": final, **{f"d{name}": dx for name, dx in zip(leaves, grads, strict=True)}}


def errors(sp: Any, seed: int, call: Call) -> dict[str, float]:
    import triton.language as tl

    from flexsp.kernels.delta import exact, tiling
    from tests.harness.gluon_in_torch import install_delta, launched

    install_delta()
    if not call.alike:  # what is wrong in chunks may look alike, and token by token it would be right
        exact.LIMIT = tl.constexpr(1e30)
    made, of_call = [], tiling._parts
    tiling._parts = lambda *args: made.append(of_call(*args)) or made[-1]
    if call.parts:
        tiling._LONG_SEGMENT = tiling._LEAST = 1
    torch.manual_seed(seed)
    x = call.inputs()
    with poisoned(call.segments, call.B * call.H):
        got = solved(call.run, x)
    assert launched >= {"forward", "backward", "channel_grads" if "channels" in call.rule else "grads"}, launched
    assert call.parts == (max(made, default=1) > 1) or call.steps > 1, made
    right = solved(call.oracle, x)
    assert "g" not in x or not got["dg"][x["g"] <= LEAST].any()
    return {name: float(relative_error(got[name].double(), right[name])) for name in right}


CALLS = {
    "gated": Call(), "gated, packed": Call(packed=True, H=4),
    "gated, 128": Call(T=100, K=128, V=128), "unit keys": Call(norm=False), "no gate": Call("no gate", T=130, group=1),
    "product": Call("product", T=80), "two sequences": Call(T=70, B=2, H=4),
    "one token": Call(T=1, segments=1), "no gate, unit keys": Call("no gate", T=130, norm=False),
    "parts": Call(T=300, segments=1, parts=True), "parts, packed": Call(segments=1, parts=True, packed=True),
    "product, packed": Call("product", packed=True, K=128), "alike": Call(T=100, alike=True),
    "channels": Call("channels"), "channels, alike": Call("channels", T=100, alike=True),
    "channels, packed": Call("channels", packed=True, K=128), "channels, unit keys": Call("channels", T=70, norm=False),
    "product, channels": Call("product, channels", T=80),
    "alike, packed": Call("no gate", alike=True, packed=True),
    "strengths": Call("channels, strengths", T=100), "no tokens": Call("channels, strengths", T=0, packed=True),
    "strengths, alike": Call("channels, strengths", T=80, alike=True),
    "strengths, packed": Call("channels, strengths", packed=True, K=128),
    "strengths, unit keys": Call("channels, strengths", T=70, K=128, V=128, norm=False, group=1),
    "strengths, two sequences": Call("channels, strengths", T=70, B=2, H=4),
    "96, 192": Call(T=70, H=1, group=1, K=96, V=192), "96, 192, packed": Call(H=4, K=96, V=192, packed=True),
    "96, alike": Call(K=96, alike=True), "96, 192, alike": Call(T=70, H=1, group=1, K=96, V=192, alike=True),
    "256 values": Call("no gate", T=130, group=1, K=128, V=256),
    "80, product, packed": Call("product", K=80, V=192, packed=True),
    "values in two blocks": Call(T=70, H=1, group=1, K=80, V=384), "112": Call(T=70, B=2, H=4, K=112, norm=False),
    "256": Call(T=70, H=1, group=1, K=256), "256, 512": Call(T=70, H=1, group=1, K=256, V=512),
    "256, packed": Call(K=256, V=128, packed=True), "256, alike": Call(T=70, H=1, group=1, K=256, alike=True),
    "256, no gate": Call("no gate", T=130, group=1, K=256, norm=False),
    "192, product, packed": Call("product", K=192, V=128, packed=True),
    "208, parts": Call(T=200, H=1, group=1, K=208, parts=True), "144": Call(T=70, H=1, group=1, K=144, norm=False),
}  # fmt: skip
QUICK = "gated", "parts, packed", "product", "alike", "unit keys", "channels, alike", "96, 192", "144"


@pytest.mark.parametrize("name", [*QUICK, *slow(*(x for x in CALLS if x not in QUICK))])
def test_against_the_token_loop(name: str) -> None:
    """Outputs, final states and all gradients."""
    seed = random.randrange(2**31)
    (found,) = run_ranks(errors, 1, seed, CALLS[name], own_processes=True, env=INTERPRETED)
    bad = {name: error for name, error in found.items() if not error < BOUND}
    assert not bad, bad


@pytest.mark.parametrize("name", ["inverse", "wy_inverse"])
def test_equal_entries_of_an_inverse(name: str) -> None:
    """Their roundings do not add up; few keys are told from many."""
    from tests.harness.gluon_in_torch import Kernel

    kernel, step = Kernel("delta/hopper_wy_transform.py", name), (random.randrange(180, 250) + 0.48) / 256
    check_equal_entries(roundings_of_equal_entries(None, step, name, kernel))


def of_chunks(q: torch.Tensor, k: torch.Tensor, beta: torch.Tensor, g: torch.Tensor, norm: bool) -> Tensors:
    """What `wy_inverse` leaves of one head of T tokens."""
    from tests.harness.gluon_in_torch import Kernel

    T, K = q.shape
    chunks = -(-T // 64)
    shapes = {
        "inverse": (chunks, 64, 64), "chunk_beta": (chunks, 64), "gates": (chunks, 64), "bounds": (2, chunks),
        "gain": (chunks,), "decays": (4, chunks, 64), "norms": (2, chunks, 64), "scores": (chunks, 64, 64),
    }  # fmt: skip
    half = "inverse", "scores"
    found = {x: torch.full(n, torch.nan, dtype=torch.bfloat16 if x in half else None) for x, n in shapes.items()}
    strides = [n for x in (q, k, beta, g) for n in (0, x.stride(0), 0)]
    Kernel("delta/hopper_wy_transform.py", "wy_inverse")[chunks, 1](
        q, k, beta, g, *found.values(), q, *strides, T, 1, 0.7, K=K, BK=K, C=64, GATED=1, BOUNDS=True, NORM=norm,
        PACKED=False, GROUP=1, STEPS=1, PDL=False,
    )  # fmt: skip
    return found


def test_chunks_of_any_keys_are_those_of_unit_keys() -> None:
    """And bounds are not those of long or short keys, where beta makes a state grow."""
    made = torch.Generator().manual_seed(random.randrange(2**31))
    q, k = (torch.randn(100, 64, generator=made).bfloat16() for _ in range(2))
    unit = [x.float() / (x.float().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k)]
    k = k * torch.exp2(torch.arange(100) % 16 - 8)[:, None].bfloat16()
    beta, g = 3 + torch.rand(100, generator=made), -1.5 * torch.rand(100, generator=made)
    got = of_chunks(q, k, beta, g, True)
    want = of_chunks(*(x.bfloat16() for x in unit), beta, g, False)
    assert float(relative_error(got["bounds"], want["bounds"])) < 1e-2
    for name in ("inverse", "chunk_beta", "gates", "scores"):
        assert float(relative_error(got[name].double(), want[name].double())) < 1e-2, name
    squares = (torch.nn.functional.pad(x.float().square().sum(-1), (0, 28)).view(2, 64) for x in (q, k))
    of_query, of_key = (1 / (x + 1e-6).sqrt() for x in squares)
    from_start, to_end = want["decays"][:2]
    factors = to_end * of_key, from_start * of_key, 0.7 * from_start * of_query
    for x, y in zip((*got["norms"], *got["decays"][1:]), (of_query, of_key, *factors), strict=True):
        assert float(relative_error(x, y)) < 1e-5
