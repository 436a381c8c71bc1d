"""Gradients of gates, and sums of them, of 131,072 tokens cut over ranks. Run by torchrun, not by pytest:

    torchrun --standalone --nproc-per-node 2 tests/gpu/ranks_long_gates.py [--transport auto] [--only A,B]
        [--tokens 131072] [--kinds mild,strong,closed] [--device cpu]

The ops and numbers of test_long_gates_gpu.py: in bfloat16 over uneven shards, beside the same call in float32 on one
rank. Every error is at most 1 %: token by token, summed over the tokens of all ranks, and of parameters, whose
gradients ranks add up. Prints one line a check on rank 0; exit status 1 if one failed.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from flexsp import SequenceParallel, init_sequence_parallel, sequence_parallel
from tests.harness.long_gates import BOUND, DRAWS, OPS, OWN, T, drawn
from tests.harness.told import passes_on_all

LEFT_OUT = ("convolution", "norm")  # layers, which ranks_layers.py has


def shard(x: Tensor, tokens: int, start: int, stop: int) -> Tensor:
    """The rows of some of the tokens; x itself if it is a parameter."""
    if x.dim() < 3:
        return x
    rows = x.shape[1] // tokens
    return x[:, rows * start : rows * stop]


def added(sp: SequenceParallel, x: Tensor) -> Tensor:
    x = x.double()
    dist.all_reduce(x, group=sp.group)
    return x


def errors(sp: SequenceParallel, name: str, kind: str, tokens: int, seed: int) -> dict[str, float]:
    op = OPS[name]
    inputs = drawn(op, name, kind, tokens, seed, sp.device)
    lengths = sp.partition(tokens)
    moved = lengths[-1] // 3
    lengths[0], lengths[-1] = lengths[0] + moved, lengths[-1] - moved
    at = tokens, sum(lengths[: sp.rank]), sum(lengths[: sp.rank + 1])
    rows, gates = op.tokens.split(), op.gates.split()
    wide = {n: x.float().requires_grad_() for n, x in inputs.items()}
    mine = {n: shard(x, *at).clone().requires_grad_() for n, x in inputs.items()}
    with sequence_parallel(None):
        want = op.run(**wide)
    sp.set_lengths(lengths)
    found: dict[str, list[Tensor]] = {}
    made = torch.Generator(sp.device).manual_seed(seed + 1)
    with sequence_parallel(sp):
        got = op.run(**mine)
        for _ in range(DRAWS):
            do = torch.randn(want.shape, generator=made, device=sp.device).bfloat16()
            exact = torch.autograd.grad(want, [*wide.values()], do.to(want), retain_graph=True)
            low = torch.autograd.grad(got, [*mine.values()], shard(do, *at).to(got), retain_graph=True)
            for n, x, y in zip(wide, low, exact, strict=True):
                pairs: dict[str, tuple[Tensor, Tensor]] = {}
                if n not in rows and n not in gates:
                    pairs[n] = added(sp, x), y.double()
                else:
                    part = shard(y, *at).double()
                    off, size = (added(sp, z.square().sum()).sqrt() for z in (x.double() - part, part))
                    found.setdefault(n, []).append(torch.stack([off, size]))
                if n in gates:
                    pairs[f"{n}, summed over tokens"] = added(sp, x.double().sum(1)), y.double().sum(1)
                for key, (a, b) in pairs.items():
                    found.setdefault(key, []).append(torch.stack([(a - b).norm(), b.norm()]))
    sp.set_lengths(None)
    sums = {n: torch.stack(x).square().sum(0).sqrt().tolist() for n, x in found.items()}
    return {n: off / size for n, (off, size) in sums.items()}


def check(sp: SequenceParallel, name: str, kind: str, tokens: int) -> str:
    result = errors(sp, name, kind, tokens, seed=len(name) + tokens)
    over = [f"{n}: {error:.1e}" for n, error in result.items() if not error <= BOUND]
    if over:
        raise AssertionError("; ".join(over))
    return f"at most {max(result.values()):.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--only", default=",".join(OPS), help="ops, separated by commas")
    parser.add_argument("--tokens", type=int, default=T)
    parser.add_argument("--kinds", default="mild", help="of gates, separated by commas")
    parser.add_argument("--device", default=None)
    options = parser.parse_args()
    device = None if options.device is None else torch.device(options.device)
    sp = init_sequence_parallel(transport=options.transport, timeout_s=60.0, device=device)
    ok = True
    for name in options.only.split(","):
        if name in LEFT_OUT:
            continue
        for kind in ("mild",) if name in OWN else options.kinds.split(","):
            ok &= passes_on_all(sp, f"{name} {kind}", partial(check, sp, name, kind, options.tokens))
    if sp.rank == 0:
        print(f"ranks_long_gates over {sp.transport}: {'passed' if ok else 'FAILED'}")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
