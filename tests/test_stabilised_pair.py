"""mLSTM as two programs, one whose state is the stabiliser, and one that takes it a token earlier too: like the op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor, decayed_scores
from flexsp.ops import chunk_mlstm
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests.interpreted import poisoned
from tests.marks import slow
from tests.test_generated import ENV, SOME_SEGMENTS

H, K, V, C = 2, 5, 4, 16
BOUNDS = [0, 0, 5, 26, 26, 37]
Tensors = dict[str, Tensor]


def largest(i: Any, f: Any) -> Any:
    return (i + f.sum(0) - f.cumsum(0)).amax(0)


def larger(prev_s: Any, chunk_state: Any, f: Any) -> Any:
    return torch.maximum(prev_s + f.sum(0), chunk_state)


def maxima(i: Any, f: Any, chunk_state: Any) -> Any:
    b = f.cumsum(0)
    later = torch.ones_like(b @ b.T).triu(1)
    before = ((i - b)[:, 0] + 0 * later).masked_fill(later > 0, -torch.inf).amax(1)
    return b + torch.maximum(before[:, None], chunk_state)


def chunk(k: Any, v: Any, i: Any, f: Any, m: Any, m_before: Any) -> Any:
    g = f + m_before - m
    return (k * (i - m + g.sum(0) - g.cumsum(0)).exp()[:, None]).T @ v


def decay(prev_s: Any, chunk_state: Any, f: Any, m: Any, m_before: Any) -> Any:
    return prev_s * (f + m_before - m).sum(0).exp() + chunk_state


def merge(q: Any, k: Any, v: Any, i: Any, f: Any, m: Any, m_before: Any, chunk_state: Any) -> Any:
    b = (f + m_before - m).cumsum(0)
    return decayed_scores(q, k * (i - m).exp()[:, None], b) @ v + (q * b.exp()[:, None]) @ chunk_state


def stabiliser(**options: Any) -> LinearAttention:
    """m_t = max(m_{t-1} + f_t, i_t)."""
    h, one = ConstExpr("H", H), ConstExpr("N", 1)
    meta = {name: SymbTensor(["T", h, one]) for name in ("i", "f")} | {"prev_s": SymbTensor(["NS", h, one])}
    return LinearAttention(meta, largest, larger, maxima, chunk_size=C, **options)


def memory(**options: Any) -> LinearAttention:
    """C and, as the last column, n."""
    h, k, v = ConstExpr("H", H), ConstExpr("K", K), ConstExpr("V", V + 1)
    meta: dict[str, Any] = {name: SymbTensor(["T", h, v if name == "v" else k]) for name in "qkv"}
    meta |= {name: SymbTensor(["T", h]) for name in "ifm"} | {"m_before": SymbTensor(["T", h], before="m")}
    return LinearAttention(meta | {"prev_s": SymbTensor(["NS", h, k, v])}, chunk, decay, merge, chunk_size=C, **options)


def mlstm(x: Tensors, cu: Tensor | None, sp: Any, **options: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """h, final C with n, and final m."""
    q, k, v, i, f = (x[name] for name in "qkvif")
    f = torch.nn.functional.logsigmoid(f)
    m, last = stabiliser(**options)(i=i.unsqueeze(-1), f=f.unsqueeze(-1), cu_seqlens=cu, sp=sp)
    m, augmented = m.squeeze(-1), torch.cat([v, torch.ones_like(v[..., :1])], -1)
    given = {"q": q * K**-0.5, "k": k, "v": augmented, "i": i, "f": f, "m": m}
    read, state = memory(**options)(**given, cu_seqlens=cu, sp=sp)
    h = read[..., :V] / torch.maximum(read[..., V].abs(), (-m).exp()).unsqueeze(-1)
    return h, state, last


def by_op(x: Tensors, cu: Tensor | None, sp: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    h, states = chunk_mlstm(**x, return_last_states=True, cu_seqlens=cu, sp=sp, head_first=False)
    if states is None:
        return h, None, None
    return h, torch.cat([states[0], states[1].unsqueeze(-1)], -1), states[2]


def draw(T: int, seed: int) -> Tensors:
    made = torch.Generator().manual_seed(seed)
    sizes = {"q": (K,), "k": (K,), "v": (V,), "i": (), "f": ()}
    x = {name: torch.randn(1, T, H, *size, generator=made).double() for name, size in sizes.items()}
    x |= {name: x[name].abs() for name in "qk"}  # no sum of weights is near 0
    return x | {"i": 6 * x["i"], "f": 3 * x["f"] + 2}


def answer(
    sp: Any, pair: bool, lengths: list[int], bounds: list[int] | None, seed: int, kind: torch.dtype = torch.float64
) -> Tensors:  # fmt: skip
    """This rank's part: outputs, final states and gradients."""
    x, made = draw(sum(lengths), seed), torch.Generator().manual_seed(seed + 1)
    do = torch.randn(1, sum(lengths), H, V, generator=made).double()
    sp.set_lengths(lengths)
    start, stop, _ = sp.shard_range(lengths[sp.rank])
    leaves = {name: y[:, start:stop].to(kind, copy=True).requires_grad_() for name, y in x.items()}
    cu = None if bounds is None else torch.tensor(bounds)
    h, state, m = (mlstm if pair else by_op)(leaves, cu, sp)
    grads = torch.autograd.grad(h, list(leaves.values()), do[:, start:stop].to(kind), materialize_grads=True)
    finals = {} if state is None or m is None else {"state": state.detach(), "m": m.detach()}
    return {"h": h.detach(), **dict(zip(leaves, grads, strict=True)), **finals}


@pytest.mark.parametrize(
    ("lengths", "bounds"),
    slow(([6, 2, 29], BOUNDS), ([37], None), ([37], BOUNDS), ([13, 0, 24], None), ([0, 20, 17], None)),
)
def test_against_the_op(lengths: list[int], bounds: list[int] | None, seed: int) -> None:
    """The gradient that goes through the maxima is zero, as the op has it: h does not depend on them."""
    parts = run_ranks(answer, len(lengths), True, lengths, bounds, seed)
    (want,) = run_ranks(answer, 1, False, [sum(lengths)], bounds, seed)
    for name, x in want.items():
        pieces = [part[name] for part in parts if name in part]
        got = torch.stack(pieces).sum(0) if name in ("state", "m") else torch.cat(pieces, 1)
        assert torch.allclose(got, x, rtol=1e-8, atol=1e-8), name


def by_kernels(sp: Any, *given: Any) -> Tensors:
    with poisoned(SOME_SEGMENTS, H):
        return answer(sp, True, *given, torch.float32)


@pytest.mark.parametrize(
    ("lengths", "bounds", "transport"),
    slow(
        ([13, 0, 24], None, "posix"),
        ([37], None, "posix"),
        ([6, 2, 29], BOUNDS, "posix"),
        ([0, 20, 17], None, "process_group"),
    ),
)
def test_kernels_of_both(lengths: list[int], bounds: list[int] | None, transport: str, seed: int) -> None:
    heap = {"heap_mib": 4} if transport == "posix" else {}
    parts = run_ranks(by_kernels, len(lengths), lengths, bounds, seed, env=ENV, transport=transport, **heap)
    (want,) = run_ranks(answer, 1, False, [sum(lengths)], bounds, seed)
    errors = {}
    for name, x in want.items():
        pieces = [part[name] for part in parts if name in part]
        got = torch.stack(pieces).sum(0) if name in ("state", "m") else torch.cat(pieces, 1)
        errors[name] = relative_error(got, x)
    assert max(errors.values()) < 2e-5, errors


def test_the_kinds() -> None:
    assert stabiliser().program.transition == "max-plus" and memory().program.transition == "scalar"
