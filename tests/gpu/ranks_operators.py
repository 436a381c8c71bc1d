"""Operators as `flexsp bench` calls them over ranks, against one rank and float64. Run by torchrun, not by pytest:

    torchrun --standalone --nproc-per-node 4 tests/gpu/ranks_operators.py [--transport auto] [--only A,B]
        [--dtypes bfloat16,float32] [--device cpu]

Shards are uneven, and one is empty. Every rank draws the same problem and solves its shard; the shards together may be
twice as far from the operator in float64 as one rank is, plus a rounding. Prints one line a check on rank 0; exit
status 1 if one failed.
"""

from __future__ import annotations

import argparse
import sys
import traceback

import torch
import torch.distributed as dist

from flexsp import SequenceParallel, init_sequence_parallel
from flexsp.bench.case import Case, Inputs, Shape, make_inputs
from flexsp.bench.cases import CASES
from flexsp.testing.compare import relative_error

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}
OPERATORS = ("mamba3", "mlstm", "mamba", "hgrn", "gla", "rwkv7", "kda", "gated_delta_rule", "gated_delta_product")


def solve(case: Case, inputs: Inputs, sp: SequenceParallel | bool) -> Inputs:
    """The output and the gradients of all inputs."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items() if name != "do"}
    o = case.ours({**leaves, "do": inputs["do"]}, sp=sp)
    grads = torch.autograd.grad(o, list(leaves.values()), inputs["do"].to(o.dtype))
    return {"o": o.detach(), **dict(zip(leaves, grads, strict=True))}


def shard(x: torch.Tensor, T: int, start: int, stop: int) -> torch.Tensor:
    """The rows of some of T tokens; x itself where it has no row a token, or several."""
    rows = x.shape[1] // T if x.dim() > 2 and x.shape[0] == 1 and x.shape[1] % T == 0 else 0
    return x[:, rows * start : rows * stop] if rows else x


def joined(sp: SequenceParallel, mine: Inputs, like: Inputs, at: tuple[int, int, int]) -> Inputs:
    """All ranks' parts in one: tokens in their places, parameters summed."""
    found = {}
    for name, x in like.items():
        whole = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        shard(whole, *at).copy_(mine[name])
        dist.all_reduce(whole, group=sp.group)
        found[name] = whole
    return found


def check(sp: SequenceParallel, name: str, dtype: torch.dtype, lengths: list[int], size: int) -> str:
    case, T = CASES[name], sum(lengths)
    given = make_inputs(case, Shape(1, T, 2, size, size), dtype, sp.device, seed=T)
    exact = solve(case, {key: x.detach().double() for key, x in given.items()}, False)
    alone = solve(case, given, False)
    at = T, sum(lengths[: sp.rank]), sum(lengths[: sp.rank + 1])
    sp.set_lengths(lengths)
    found = joined(sp, solve(case, {key: shard(x.detach(), *at) for key, x in given.items()}, sp), exact, at)
    sp.check()
    worst = {key: (relative_error(found[key], x), relative_error(alone[key], x)) for key, x in exact.items()}
    bad = {key: pair for key, pair in worst.items() if not pair[0] <= 2 * pair[1] + ROUNDING[dtype]}
    assert not bad, f"(error, that of one rank): {bad}"
    return f"error {max(x for x, _ in worst.values()):.1e}, one rank {max(x for _, x in worst.values()):.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--only", default=",".join(OPERATORS), help="cases of flexsp bench, separated by commas")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--size", type=int, default=64, help="K and V")
    parser.add_argument("--device", default=None)
    options = parser.parse_args()
    device = None if options.device is None else torch.device(options.device)
    sp = init_sequence_parallel(transport=options.transport, timeout_s=30.0, device=device)
    ok, world = True, sp.world_size
    uneven = [333, 190, 64, 501, 1, 77, 128, 200][:world]
    for name in options.only.split(","):
        for dtype in (getattr(torch, x) for x in options.dtypes.split(",")):
            for lengths in (uneven, [0, *uneven[1:]], [*uneven[:-1], 0]):
                try:
                    answer = (True, check(sp, name, dtype, lengths, options.size))
                except Exception:
                    answer = (False, traceback.format_exc(limit=2))
                answers: list[tuple[bool, str]] = [answer] * world
                dist.all_gather_object(answers, answer)
                ok &= all(fine for fine, _ in answers)
                if sp.rank == 0:
                    wrong = [f"\n  rank {r}: {text}" for r, (fine, text) in enumerate(answers) if not fine]
                    what = f"{name} {str(dtype)[6:]} {lengths}"
                    print(f"{'FAILED' if wrong else 'ok    '} {what}: {answer[1]}{''.join(wrong)}", flush=True)
    if sp.rank == 0:
        print(f"ranks_operators over {sp.transport}: {'passed' if ok else 'FAILED'}")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
