"""Softmax attention over ranks: several ranks equal the token loop on the whole sequence, whatever they exchange."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flexsp.exceptions import PeerMismatch
from flexsp.nn import Attention, SequenceParallelLA, SimpleGLA
from flexsp.nn.attention import scaled_dot_product_attention
from flexsp.nn.attention.local import Sight
from flexsp.nn.attention.over_ranks import _repeats, choose_exchange, seen_keys
from flexsp.testing import run_ranks
from tests.attention_oracle import attention_token_loop
from tests.guides import ROOT, run_script

Case = dict[str, Any]
HEADS = {  # (H, HK): heads that divide by the ranks and that do not, whole groups a rank, parts of groups, and neither
    2: [(4, 2), (2, 1), (6, 3), (3, 1), (6, 2)],
    3: [(3, 3), (6, 2), (6, 1), (4, 2), (12, 4)],
    4: [(4, 2), (8, 2), (8, 8), (4, 1), (6, 2), (12, 4)],
}
WIDTH = 16  # of the hybrid model
SHARDS = ([5, 9, 2, 7], [0, 9, 0, 6], [1, 1, 13, 0], [0, 0, 8, 0], [6, 6, 6, 6])


def random_case(ranks: int, number: int) -> Case:
    H, HK = HEADS[ranks][number % len(HEADS[ranks])]
    lengths = random.sample(SHARDS[number % len(SHARDS)], ranks)
    B, T, K, V = random.choice([1, 2]), sum(lengths), *random.choice([(4, 4), (3, 6)])
    options: Case = {
        "is_causal": random.random() < 0.7, "window": random.choice([None, None, 1, 3, 8, 40]),
        "scale": random.choice([None, 0.6]),
    }  # fmt: skip
    if number % 2:
        B, inner = 1, [random.randint(0, T) for _ in range(3)]
        options["cu_seqlens"] = torch.tensor(sorted([0, *inner, inner[0], T]))
    exchange = random.choice(["auto", "keys", "heads" if H % ranks == 0 else "auto"])
    sizes = {"q": (B, T, H, K), "k": (B, T, HK, K), "v": (B, T, HK, V)}
    inputs = {name: torch.randn(size, dtype=torch.float64) for name, size in sizes.items()}
    do = torch.randn(B, T, H, V, dtype=torch.float64)
    return {
        "lengths": lengths, "known": random.random() < 0.5, "inputs": inputs, "do": do, "options": options,
        "exchange": exchange,
    }  # fmt: skip


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, with heads before tokens in memory and a gap after each row."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), torch.nan, dtype=x.dtype).transpose(1, 2).contiguous()
    return wide.transpose(1, 2)[..., : x.shape[-1]].copy_(x)


def shards(sp: Any, case: Case, arrange: Callable[[torch.Tensor], torch.Tensor]) -> tuple[dict[str, Any], torch.Tensor]:
    sp.set_lengths(case["lengths"] if case["known"] else None)
    start = sum(case["lengths"][: sp.rank])
    mine = slice(start, start + case["lengths"][sp.rank])
    return {n: arrange(x[:, mine]).detach().requires_grad_() for n, x in case["inputs"].items()}, case["do"][:, mine]


def cut(sp: Any, cases: list[Case], how: str) -> list[list[torch.Tensor]]:
    found = []
    for case in cases:
        x, do = shards(sp, case, strided if how == "strided" else torch.clone)

        def call(q: Any, k: Any, v: Any, case: Case = case) -> torch.Tensor:
            return scaled_dot_product_attention(q, k, v, sp=sp, exchange=case["exchange"], **case["options"])

        run = call
        if how == "checkpoint":
            run = lambda *x, call=call: checkpoint(call, *x, use_reentrant=False)  # noqa: E731
        if how == "compile":
            torch._dynamo.reset()
            sp.set_lengths(case["lengths"])
            run = torch.compile(call, fullgraph=True, backend="aot_eager")
        o = run(*x.values())
        grads = torch.autograd.grad(o, list(x.values()), do, retain_graph=how == "twice")
        if how == "twice":
            again = torch.autograd.grad(o, list(x.values()), 2 * do)
            assert all(torch.equal(2 * a, b) for a, b in zip(grads, again, strict=True))
        found.append([o, *grads])
    return found


def whole(case: Case) -> list[torch.Tensor]:
    x = {name: t.clone().requires_grad_() for name, t in case["inputs"].items()}
    o = attention_token_loop(**x, **case["options"])
    return [o, *torch.autograd.grad(o, list(x.values()), case["do"])]


def check(cases: list[Case], ranks: int, how: str = "") -> None:
    per_rank = run_ranks(cut, ranks, cases, how)
    for i, case in enumerate(cases):
        for name, want, *got in zip(("o", "dq", "dk", "dv"), whole(case), *(r[i] for r in per_rank), strict=True):
            where = f"{name}, {case['lengths']}, {case['exchange']}, {case['options']}"
            joined = torch.cat(got, 1)
            torch.testing.assert_close(joined, want, rtol=1e-10, atol=1e-10, msg=lambda m, w=where: f"{w}: {m}")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_equal_the_token_loop(ranks: int) -> None:
    """Output and every gradient, with uneven and empty shards, all ways to deal heads out, windows and documents."""
    check([random_case(ranks, number) for number in range(16)], ranks)


@pytest.mark.parametrize("how", ["strided", "twice", "checkpoint", "compile"])
def test_survives(how: str) -> None:
    ranks, number = (2, 2) if how == "compile" else (3, 4)
    cases = [random_case(ranks, at) for at in range(number)]
    for at, case in enumerate(cases):
        case["exchange"] = "heads" if at % 2 and case["inputs"]["q"].shape[2] % ranks == 0 else "keys"
    check(cases, ranks, how)


def _partial(sp: Any, inputs: Case, exchange: str) -> dict[str, torch.Tensor]:
    """Each rank asks for the gradient of another input, the last of none; all exchanges must take place."""
    x = {name: sp.shard(t).clone().requires_grad_(sp.rank < 3) for name, t in inputs.items()}
    before = sp.calls
    o = scaled_dot_product_attention(**x, sp=sp, exchange=exchange)
    name = ["q", "k", "v", ""][sp.rank]
    if name:
        (found,) = torch.autograd.grad(o.sum(), [x[name]])
        return {name: found}
    o.sum().backward()
    return {"calls": torch.tensor(sp.calls - before)}


def test_ranks_that_ask_for_different_gradients() -> None:
    inputs = {name: torch.randn(1, 9, 4, 3, dtype=torch.float64) for name in "qkv"}
    want = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    attention_token_loop(**want).sum().backward()
    for exchange, expected in (("heads", 4), ("keys", 3)):  # two and their reverses; one, once more, and its reverse
        got = run_ranks(_partial, 4, inputs, exchange, sp_timeout_s=90.0)
        for rank, name in enumerate("qkv"):
            start = [0, 3, 5, 7][rank]
            torch.testing.assert_close(got[rank][name], want[name].grad[:, start : start + got[rank][name].shape[1]])
        assert int(got[3]["calls"]) == expected


def _disagree(sp: Any, how: str) -> Any:
    """What this rank meets where the last rank calls with other arguments; before it sends anything."""
    odd, options = sp.is_last, {}
    B, T, H, HK, K = 1, 4, 6, 2, 8
    if how == "heads":
        HK = 6 if odd else 2
    elif how == "size":
        K = 4 if odd else 8
    elif how == "batch":
        B = 2 if odd else 1
    elif how == "dtype":
        options["q"] = torch.bfloat16 if odd else torch.float32
    else:
        values = {"window": (None, 1000), "is_causal": (True, False), "scale": (0.5, 0.25)}
        options[how] = {**values, "exchange": ("keys", "heads")}[how][odd]
    dtype = options.pop("q", torch.float32)
    q, k, v = (torch.randn(B, T, n, K, dtype=dtype) for n in (H, HK, HK))
    sp.set_lengths([T] * sp.world_size)
    try:
        scaled_dot_product_attention(q, k, v, sp=sp, **options)
        sp.check()
    except PeerMismatch as error:
        return str(error)
    return None


@pytest.mark.parametrize("how", ["heads", "size", "batch", "dtype", "window", "is_causal", "scale", "exchange"])
def test_ranks_that_disagree(how: str) -> None:
    for error in run_ranks(_disagree, 3, how, sp_timeout_s=90.0, fresh_sp=True):
        assert error is not None and "of attention" in error and "every rank must make the same calls" in error


def _refused(sp: Any) -> list[str]:
    """Errors of this rank's own arguments, before it talks to the others."""
    q, before, found = torch.randn(1, 4, 4, 8), sp.calls, []
    sp.set_lengths([4] * sp.world_size)
    for options in (
        {"exchange": "heads"}, {"backend": "sdpa", "exchange": "keys"}, {"cu_seqlens": torch.tensor([0, 13])},
        {"k": torch.randn(1, 3, 4, 8)},
    ):  # fmt: skip
        with pytest.raises(ValueError) as error:
            scaled_dot_product_attention(**{"q": q, "k": q, "v": q, "sp": sp, **options})
        found.append(str(error.value))
    assert sp.calls == before
    return found


def test_wrong_arguments_over_ranks() -> None:
    for heads, backend, bounds, shape in run_ranks(_refused, 3, fresh_sp=True):
        assert heads.startswith('exchange: expected "auto" or "keys" (4 heads do not divide by 3 ranks), got "heads"')
        assert backend.startswith('backend: expected "auto", "flex" or "blocks" where ranks exchange keys')
        assert bounds.startswith("cu_seqlens: expected a last entry of at most 12")
        assert shape.startswith("k: expected shape")


def _kept(sp: Any, exchange: str) -> int:
    """Numbers that the graph of a call keeps for its backward pass."""
    memory: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        memory[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // 8
        return x

    x = [torch.randn(1, 60 // sp.world_size, 12, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o = scaled_dot_product_attention(*x, sp=sp, exchange=exchange)
        kept = sum(memory.values())
    o.sum().backward()
    return kept


@pytest.mark.parametrize("exchange", ["heads", "keys"])
def test_memory_is_that_of_a_shard(exchange: str) -> None:
    """With twice the ranks for the same sequence half as much is kept: q, k and v of a shard, and places of queries."""
    for ranks in (2, 4):
        for kept in run_ranks(_kept, ranks, exchange):
            assert kept <= 3 * 60 // ranks * 12 * 4 + 200


def test_keys_that_ranks_see() -> None:
    lengths = [4, 0, 3, 5]
    causal, window = Sight(True, None, None, 12), Sight(True, 3, None, 12)
    assert seen_keys(causal, lengths) == [(0, 4), (0, 0), (0, 7), (0, 12)]
    assert seen_keys(window, lengths) == [(0, 4), (0, 0), (2, 7), (5, 12)]
    assert seen_keys(causal._replace(is_causal=False), lengths) == [(0, 12), (0, 0), (0, 12), (0, 12)]
    assert seen_keys(window._replace(is_causal=False), lengths) == [(0, 6), (0, 0), (2, 9), (5, 12)]


def test_what_auto_exchanges() -> None:
    assert choose_exchange(8, None, [5, 5, 5, 5]) == choose_exchange(8, 6, [5, 5, 5, 5]) == "heads"
    assert choose_exchange(6, None, [5, 5, 5, 5]) == choose_exchange(8, 5, [0, 20, 0, 0]) == "keys"


def test_how_often_key_heads_travel() -> None:
    """Whole groups on a rank once, parts of a group once for each rank, and once a query head where both cut."""
    assert [_repeats(8, 8, 4), _repeats(8, 4, 2), _repeats(8, 2, 4), _repeats(4, 1, 4), _repeats(6, 2, 3)] == [
        1,
        1,
        2,
        4,
        3,
    ]


class Block(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), mixer

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        return x + self.mixer(self.norm(x), cu_seqlens)


class Hybrid(nn.Module):
    """Linear attention and softmax attention in turn, one block checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [Block(SimpleGLA(WIDTH, 2)), Block(Attention(WIDTH, 4, 2)), Block(Attention(WIDTH, 3, 1, 6, window=4))]
        )

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        for at, block in enumerate(self.blocks):
            x = checkpoint(block, x, cu_seqlens, use_reentrant=False) if at == 1 else block(x, cu_seqlens)
        return x


def _hybrid(sp: Any, x: torch.Tensor, dy: torch.Tensor, bounds: torch.Tensor) -> tuple[torch.Tensor, Any]:
    torch.manual_seed(0)
    model = SequenceParallelLA(Hybrid().double(), sp)
    sp.set_lengths([9, 0, 2, 13] if sp.world_size == 4 else [9, 15])
    x = sp.shard(x).clone().requires_grad_()
    y = model(x, bounds)
    y.backward(sp.shard(dy))
    return y, {"x": sp.gather(x.grad), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("env", [{}, {"FLEXSP_CHECK": "1"}], ids=["", "calls compared"])
def test_a_hybrid_model(env: dict[str, str]) -> None:
    x, dy = torch.randn(2, 1, 24, WIDTH, dtype=torch.float64).unbind(0)
    bounds = torch.tensor([0, 5, 5, 17, 24])
    torch.manual_seed(0)
    model, whole = Hybrid().double(), x.clone().requires_grad_()
    y = model(whole, bounds)
    y.backward(dy)
    got = run_ranks(_hybrid, 2 if env else 4, x, dy, bounds, env=env)
    torch.testing.assert_close(torch.cat([y for y, _ in got], 1), y, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got[0][1]["x"], whole.grad, rtol=1e-10, atol=1e-10)
    for name, p in model.named_parameters():
        torch.testing.assert_close(sum(grads[name] for _, grads in got), p.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("mixers", ["delta-attention", "mlstm-mamba"])
def test_the_example(mixers: str) -> None:
    given = "--layers", "4", "--length", "60", "--steps", "10", "--mixers", mixers
    alone, cut = (run_script(ROOT / "examples" / "hybrid.py", ranks, *given) for ranks in (1, 2))
    assert alone == cut and len(alone) == 1 and float(alone[-1].split()[-1]) < 3.2
