"""Variants over ranks, by their functions in PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests.variants import VARIANTS, H, K, V, draw, load

EXACT = 1e-10


def on_ranks(sp: Any, name: str, lengths: list[int], bounds: list[int] | None, seed: int) -> dict[str, torch.Tensor]:
    tokens, params = draw(name, 1 if bounds else 2, sum(lengths), seed)
    n = len(bounds) - 1 if bounds else 2
    generator = torch.Generator().manual_seed(seed)
    initial = torch.randn(n, H, *VARIANTS[name].state, dtype=torch.float64, generator=generator)
    cotangents = [
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in ((len(next(iter(tokens.values()))), sum(lengths), H, V if "v" in tokens else K), initial.shape)
    ]
    sp.set_lengths(lengths)
    start, stop, _ = sp.shard_range(lengths[sp.rank])
    model = load(name).make(H, K, V, chunk_size=8)
    cu = None if bounds is None else torch.tensor(bounds)

    def run(part: slice, ranks: Any, owns: bool) -> dict[str, torch.Tensor]:
        leaves = {key: x[:, part].clone().requires_grad_() for key, x in tokens.items()}
        leaves |= {key: x.clone().requires_grad_() for key, x in params.items()}
        state = initial.clone().requires_grad_()
        o, final = model(**leaves, prev_s=state if owns else None, cu_seqlens=cu, sp=ranks)
        loss = (o * cotangents[0][:, part]).sum()
        if final is not None:
            loss = loss + (final * cotangents[1]).sum()
        loss.backward()
        found = {f"d{key}": x.grad for key, x in leaves.items() if x.grad is not None}
        found["dinitial"] = torch.zeros_like(state) if state.grad is None else state.grad
        found["o"] = o.detach()
        found["final"] = torch.zeros_like(initial) if final is None else final.detach()
        return found

    mine = run(slice(start, stop), sp, sp.is_first or bounds is not None)
    whole = run(slice(0, sum(lengths)), False, True)
    worst = {}
    for key, want in whole.items():
        got = mine.get(key)
        if key == "o" or key.removeprefix("d") in tokens:
            assert got is not None
            worst[key] = relative_error(got, want[:, start:stop]) if stop > start else 0.0
        else:
            worst[key] = torch.zeros_like(want) if got is None else got
    return worst | {f"want {key}": whole[key] for key in worst if isinstance(worst[key], torch.Tensor)}


def assert_ranks(name: str, lengths: list[int], bounds: list[int] | None, seed: int) -> None:
    answers = run_ranks(on_ranks, len(lengths), name, lengths, bounds, seed)
    for key, value in answers[0].items():
        if key.startswith("want "):
            continue
        if isinstance(value, torch.Tensor):
            total = torch.stack([answer[key] for answer in answers]).sum(0)
            assert relative_error(total, answers[0][f"want {key}"]) < EXACT, key
        else:
            assert max(answer[key] for answer in answers) < EXACT, (key, [answer[key] for answer in answers])
