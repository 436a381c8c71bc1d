"""Softmax attention over ranks against one rank, by heads and by keys. Run by torchrun, not by pytest:

    PYTHONPATH=. torchrun --standalone --nproc-per-node 4 tests/gpu/ranks_attention.py [--device cpu]

Every rank draws the same problem and solves its shard; the shards together may be twice as far from float64 as one rank
is, plus a rounding. Prints one line a check on rank 0; exit status 1 if one failed.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from typing import Any

import torch
import torch.distributed as dist

from flexsp import SequenceParallel, init_sequence_parallel
from flexsp.nn.attention import scaled_dot_product_attention
from flexsp.testing.compare import relative_error

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-20, torch.float64: 2.0**-44}
Tensors = dict[str, torch.Tensor]


def solve(x: Tensors, dtype: torch.dtype, sp: SequenceParallel | bool, options: dict[str, Any]) -> Tensors:
    leaves = {name: t.to(dtype, copy=True).requires_grad_() for name, t in x.items() if name != "do"}
    o = scaled_dot_product_attention(**leaves, sp=sp, **options)
    o.backward(x["do"].to(dtype))
    return {"o": o.detach(), **{f"d{name}": t.grad for name, t in leaves.items() if t.grad is not None}}


def check(sp: SequenceParallel, dtype: torch.dtype, heads: tuple[int, int, int, int], options: dict[str, Any]) -> str:
    H, HK, K, V = heads
    lengths = [300, 0, 129, 700, 1, 64, 512, 33][: sp.world_size]
    T, made = sum(lengths), torch.Generator().manual_seed(7)
    shapes = {"q": (1, T, H, K), "k": (1, T, HK, K), "v": (1, T, HK, V), "do": (1, T, H, V)}
    x = {name: torch.randn(s, generator=made).to(dtype).double().to(sp.device) for name, s in shapes.items()}
    if options.pop("packed", False):
        options["cu_seqlens"] = torch.tensor([0, T // 7, T // 7, T // 2, T], device=sp.device)
    whole = {name: t for name, t in options.items() if name != "exchange"}
    exact, alone = solve(x, torch.float64, False, whole), solve(x, dtype, False, whole)
    sp.set_lengths(lengths)
    start, stop, _ = sp.shard_range(lengths[sp.rank])
    mine = solve({name: t[:, start:stop] for name, t in x.items()}, dtype, sp, options)
    sp.check()
    wrong = []
    for name, want in exact.items():
        error, least = relative_error(sp.gather(mine[name]), want), relative_error(alone[name], want)
        if not error <= 2 * least + ROUNDING[dtype]:
            wrong.append(f"{name}: error {error:.1e}, one rank {least:.1e}")
    return "; ".join(wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    device = parser.parse_args().device
    sp = init_sequence_parallel(device=device)
    masks = [{}, {"is_causal": False}, {"window": 70}, {"packed": True}, {"packed": True, "window": 150}]
    failed = 0
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for heads in ((8, 8, 64, 64), (8, 2, 64, 64), (16, 1, 96, 64), (7, 7, 64, 64)):
            for mask in masks:
                for exchange in ("heads", "keys"):
                    if exchange == "heads" and heads[0] % sp.world_size:
                        continue
                    try:
                        wrong = check(sp, dtype, heads, {**mask, "exchange": exchange})
                    except Exception:
                        wrong = traceback.format_exc()
                    found: list[Any] = [None] * sp.world_size
                    dist.all_gather_object(found, wrong)
                    failed += any(found)
                    if sp.rank == 0:
                        print(f"{next(filter(None, found), 'ok')}: {dtype}, {heads}, {mask}, {exchange}", flush=True)
    sp.close()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
