"""Generated kernels of every variant over ranks, against one rank and float64. Run by torchrun, not by pytest:

    PYTHONPATH=. torchrun --standalone --nproc-per-node 4 tests/gpu/ranks_generated.py [--transport auto] [--only A,B]
        [--dtypes bfloat16] [--size 128,128] [--cut]

Every rank draws the same problem and solves its shard; the shards together may be twice as far from the functions in
float64 as one rank is, plus a rounding. Prints one line a check on rank 0; exit status 1 if one failed.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from flexsp import SequenceParallel, init_sequence_parallel
from flexsp.kernels.delta import tiling
from flexsp.testing.compare import relative_error
from tests import variants
from tests.harness.told import passes_on_all

H = 4
WIDE = (*variants.WIDE, "prev_s")
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-20}

Tensors = dict[str, torch.Tensor]


def draw(
    sp: SequenceParallel, name: str, T: int, bounds: list[int] | None, dtype: torch.dtype, size: tuple[int, int],
    seed: int,
) -> Tensors:  # fmt: skip
    """The whole problem in float64, with values that `dtype` has: the inputs, and cotangents "o" and "final"."""
    variants.H, variants.K, variants.V = H, *size
    tokens, params = variants.draw(name, 1, T, seed)
    made = torch.Generator().manual_seed(seed)
    state = (1 if bounds is None else len(bounds) - 1, H, *variants.state_sizes(name))
    values = {**tokens, **params, "prev_s": torch.randn(state, generator=made)}
    values |= {"o": torch.randn(1, T, H, size[1], generator=made), "final": torch.randn(state, generator=made)}
    wide = (*WIDE, "final")
    kept = {key: x.to(torch.float32 if key in wide else dtype) for key, x in values.items()}
    return {key: x.double().to(sp.device) for key, x in kept.items()}


def solve(
    model: Any, given: Tensors, bounds: torch.Tensor | None, dtype: torch.dtype, sp: SequenceParallel | bool
) -> Tensors:
    kinds = {key: torch.promote_types(dtype, torch.float32) if key in WIDE else dtype for key in given}
    leaves = {
        key: x.to(kinds[key], copy=True).requires_grad_() for key, x in given.items() if key not in ("o", "final")
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs in PyTorch")
        o, final = model(**leaves, cu_seqlens=bounds, sp=sp)
    ends = [(o, given["o"].to(o.dtype)), *([] if final is None else [(final, given["final"].to(final.dtype))])]
    torch.autograd.backward(*zip(*ends, strict=True))
    found = {"o": o.detach(), **({} if final is None else {"final": final.detach()})}
    return found | {f"d{key}": torch.zeros_like(x) if x.grad is None else x.grad for key, x in leaves.items()}


def joined(sp: SequenceParallel, mine: Tensors, like: Tensors, tokens: set[str], start: int, stop: int) -> Tensors:
    """All ranks' parts in one: tokens in their places, parameters and states summed."""
    found = {}
    for key, x in like.items():
        whole = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        if key in mine:
            (whole[:, start:stop] if key in tokens else whole).copy_(mine[key])
        dist.all_reduce(whole)
        found[key] = whole
    return found


def check(
    sp: SequenceParallel, name: str, dtype: torch.dtype, lengths: list[int], bounds: list[int] | None,
    size: tuple[int, int],
) -> str:  # fmt: skip
    seed = sum(map(ord, name)) + sum(lengths)
    given = draw(sp, name, sum(lengths), bounds, dtype, size, seed)
    model = variants.load(name).make(H, *size, dtype)
    cu = None if bounds is None else torch.tensor(bounds, device=sp.device)
    want, alone = (solve(model, given, cu, kind, False) for kind in (torch.float64, dtype))
    start, stop = sum(lengths[: sp.rank]), sum(lengths[: sp.rank + 1])
    tokens = {"o", *(f"d{key}" for key in model.program.meta.tokens)}
    part = {key: x[:, start:stop] if f"d{key}" in tokens or key in tokens else x for key, x in given.items()}
    if bounds is None and not sp.is_first:
        del part["prev_s"]
    sp.set_lengths(lengths)
    found = joined(sp, solve(model, part, cu, dtype, sp), want, tokens, start, stop)
    sp.check()
    worst = {key: (relative_error(found[key], x), relative_error(alone[key], x)) for key, x in want.items()}
    bad = {key: pair for key, pair in worst.items() if not pair[0] <= 2 * pair[1] + ROUNDING[dtype]}
    assert not bad, f"(error, that of one rank): {bad}"
    return (
        f"error {max(pair[0] for pair in worst.values()):.1e}, one rank {max(pair[1] for pair in worst.values()):.1e}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--only", default=",".join(variants.VARIANTS), help="variants, separated by commas")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--size", default="128,128", help="K and V, up to 256,256")
    parser.add_argument("--cut", action="store_true", help="cut short heads of delta rules into segments, too")
    options = parser.parse_args()
    if options.cut:
        tiling.LONG = tiling._LEAST = 2
    K, V = map(int, options.size.split(","))
    sp = init_sequence_parallel(transport=options.transport, timeout_s=30.0)
    ok = True
    world = sp.world_size
    uneven = [333, 190, 64, 501, 1, 77, 128, 200][:world]
    empty = [0, *uneven[1:]]
    T = sum(empty)
    for name in options.only.split(","):
        for dtype in (getattr(torch, x) for x in options.dtypes.split(",")):
            for lengths, bounds in ((uneven, None), (empty, None), (empty, [0, 5, 5, T // 2, T // 2 + 70, T])):
                what = f"{name} {str(dtype)[6:]} {lengths}{'' if bounds is None else ' packed'}"
                ok &= passes_on_all(sp, what, partial(check, sp, name, dtype, lengths, bounds, (K, V)))
    dist.barrier()
    dist.destroy_process_group()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
