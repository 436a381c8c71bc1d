"""Walks of large states, whose kernel is in Gluon, on the CPU: see `tests.harness.gluon_in_torch`."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from flexsp.kernels.columns import ColumnBlocks
from flexsp.kernels.diagonal.op import diagonal
from flexsp.kernels.diagonal.tiles import choose
from flexsp.ops import mamba2_ssd
from flexsp.testing import oracles
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED, poisoned
from tests.marks import slow

Tensors = dict[str, torch.Tensor]
TOKENS = {"q", "k", "v", "g", "i", "w", "x", "dt", "B", "C"}
BF16 = TOKENS - {"g", "i", "w"}
BOUNDS = (0, 0, 61, 62, 127, 127, 150)  # of 160 tokens


def inputs(kind: str, B: int, T: int, K: int, V: int, N: int) -> Tensors:
    """Of two heads, exact in bfloat16."""

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size).bfloat16().double()

    def short(*size: int) -> torch.Tensor:
        return (torch.randn(size) / size[-1] ** 0.5).bfloat16().double()

    if kind == "mamba2":
        x = {"x": draw(B, T, 2, V), "dt": draw(B, T, 2) - 2, "A": -4 * draw(2).abs(), "B": short(B, T, 1, K)}
        x |= {"C": draw(B, T, 1, K), "D": draw(2), "dt_bias": draw(2)}
        x["dt"][:, T // 3 : T // 2] = -300.0  # steps that are 0
    else:
        x = {"q": short(B, T, 2, K), "k": draw(B, T, 2, K), "v": draw(B, T, 2, V)}
        if kind in ("gates", "weights", "write gates"):
            x["g"] = -torch.rand(B, T, 2).double()
            x["g"][:, 25::50] = -90.0
        if kind == "write gates":
            x["i"] = -3 * torch.rand(B, T, 2).double()
            x["i"][:, T // 3 : T // 2] = -torch.inf
        if kind in ("weights", "weights alone"):
            x["w"] = draw(B, T, 2)
        if kind == "a gate a head":
            x["g_gamma"] = -torch.rand(2).double()
    return x | {"initial_state": draw(N, 2, K, V)}


def oracle(cu_seqlens: torch.Tensor | None, **x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64; zeros behind the last document. Where there are weights, tokens do not read their own products."""
    first = x["x"] if "x" in x else x["v"]
    end = first.shape[1] if cu_seqlens is None else int(cu_seqlens[-1])
    w, i = x.pop("w", None), x.pop("i", None)
    x = x if i is None else x | {"k": x["k"] * i.exp().unsqueeze(-1)}
    x = {name: t[:, :end] if name in TOKENS else t for name, t in x.items()}
    if "x" in x:
        y, final = oracles.mamba2_ssd(dt_softplus=True, cu_seqlens=cu_seqlens, **x)
    else:
        y, final = oracles.simple_gla(scale=0.7, cu_seqlens=cu_seqlens, **x)
        if w is not None:
            y = y + (w[:, :end] - 0.7 * (x["q"] * x["k"]).sum(-1)).unsqueeze(-1) * x["v"]
    return torch.cat([y, first[:, end:] * 0], 1), final


def solve(op: Any, x: Tensors, wanted: tuple[str, ...], dtype: torch.dtype | None) -> Tensors:
    kinds = {name: torch.float64 if dtype is None else dtype if name in BF16 else torch.float32 for name in x}
    leaves = {name: t.to(kinds[name]).detach().requires_grad_(name in wanted) for name, t in x.items()}
    y, final = op(**leaves)
    made = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(t.shape, generator=made).bfloat16().to(t.dtype) for t in (y, final)]
    grads = torch.autograd.grad([y, final], [leaves[name] for name in wanted], cotangents)
    return {"o": y, "final": final, **dict(zip(wanted, grads, strict=True))}


def errors(sp: Any, seed: int, kind: str, B: int, T: int, K: int, V: int, packed: bool) -> dict[str, float]:
    from tests.harness.gluon_in_torch import install

    install()
    gated = kind not in ("none", "weights alone", "a gate a head")
    tiles = choose(torch.bfloat16, K, ColumnBlocks.of(V).width, gluon=True, gated=gated)
    assert tiles.hopper, "Triton walks states of these sizes"
    torch.manual_seed(seed)
    cu_seqlens = torch.tensor(BOUNDS) if packed else None
    x = inputs(kind, B, T, K, V, len(BOUNDS) - 1 if packed else B)
    if kind == "mamba2":
        options = {"dt_softplus": True, "state_v_first": False, "output_final_state": True}
    else:
        options = {"scale": 0.7, "output_final_state": True, "strict": "w" in x}
    op, found = mamba2_ssd if kind == "mamba2" else diagonal, {}
    wants = [tuple(x), tuple(name for name in x if name not in ("g", "i", "w", "dt", "A", "dt_bias", "D"))]
    for n, wanted in enumerate(wants):
        with poisoned(2, B * 2):
            got = solve(lambda **t: op(**t, **options, cu_seqlens=cu_seqlens), x, wanted, torch.bfloat16)
        right = solve(lambda **t: oracle(cu_seqlens, **t), x, wanted, None)
        found |= {f"{name} {n}": float(relative_error(got[name].double(), right[name])) for name in right}
    return found


CALLS = {
    "gates": ("gates", 1, 160, 256, 128, True), "write gates": ("write gates", 1, 80, 128, 256, False),
    "weights": ("weights", 2, 130, 128, 256, False), "128, weights": ("weights", 1, 40, 128, 128, False),
    "Mamba-2": ("mamba2", 1, 160, 256, 128, True),
    "Mamba-2, two sequences": ("mamba2", 2, 65, 256, 256, False), "no gates": ("none", 1, 160, 256, 256, True),
    "weights alone": ("weights alone", 1, 160, 256, 128, True),
    "a gate a head": ("a gate a head", 2, 63, 128, 256, False),
    "two halves": ("gates", 2, 70, 128, 512, False), "two halves, packed": ("weights", 1, 160, 256, 500, True),
    "128": ("gates", 1, 160, 128, 128, True), "128, write gates": ("write gates", 2, 70, 128, 128, False),
    "128, Mamba-2": ("mamba2", 1, 130, 128, 128, False),
    "one token": ("gates", 2, 1, 256, 256, False), "large": ("gates", 1, 160, 256, 256, True),
}  # fmt: skip


QUICK = "gates", "Mamba-2", "write gates", "two halves", "128", "128, weights"


@pytest.mark.parametrize("name", [*QUICK, *slow(*(x for x in CALLS if x not in QUICK))])
def test_against_the_token_loop(name: str) -> None:
    """Outputs, final states and all gradients, and those without gradients of gates and weights."""
    (found,) = run_ranks(errors, 1, random.randrange(2**31), *CALLS[name], env=INTERPRETED)
    bad = {name: error for name, error in found.items() if not error < 2e-2}
    assert not bad, bad
