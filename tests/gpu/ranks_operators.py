"""Operators as `flexsp bench` calls them over ranks, against one rank and float64. Run by torchrun, not by pytest:

    torchrun --standalone --nproc-per-node 4 tests/gpu/ranks_operators.py [--transport auto] [--only A,B]
        [--dtypes bfloat16,float32] [--device cpu]

Shards are uneven, and one is empty. Every rank draws the same problem and solves its shard; the shards together may be
twice as far from the operator in float64 as one rank is, plus a rounding. mLSTM is also compared with its token loop,
by the bounds of one rank. Prints one line a check on rank 0; exit status 1 if one failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from flexsp import SequenceParallel, init_sequence_parallel
from flexsp.bench.case import Case, Inputs, Shape, make_inputs
from flexsp.bench.cases import CASES
from flexsp.testing.compare import FLOAT32_ROUNDING, check_op, relative_error
from tests.harness import mlstm
from tests.harness.told import passes_on_all

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


class _Everywhere(torch.autograd.Function):
    """Tensors on every rank, whose gradients are the sums of all ranks'. Ranks sum them up one after the other, in the
    same order."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        totals = tuple(dx.clone(memory_format=torch.contiguous_format) for dx in grads)
        for total in totals:
            dist.all_reduce(total)
        return totals


class _Joined(torch.autograd.Function):
    """The sum over ranks of x where each has its tokens in the place of `start` among T, or all of it (None)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, start: int | None, T: int) -> torch.Tensor:
        ctx.here = slice(None) if start is None else slice(start, start + x.shape[1])
        whole = torch.zeros_like(x) if start is None else x.new_zeros(x.shape[0], T, *x.shape[2:])
        whole[:, ctx.here] = x
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[Any, ...]:
        return dx[:, ctx.here], None, None


def mlstm_over_ranks(sp: SequenceParallel, output_final_state: bool, **given: Any) -> Any:
    """`chunk_mlstm` of the whole tensors that every rank has, each of which takes its shard."""
    T, cu = given["q"].shape[1], given.get("cu_seqlens")
    lengths = sp.partition(T)
    sp.set_lengths(lengths)
    start = sum(lengths[: sp.rank])
    names = [name for name in given if name != "cu_seqlens"]
    x = given | dict(zip(names, _Everywhere.apply(*[given[name] for name in names]), strict=True))
    x |= {name: x[name][:, start : start + lengths[sp.rank]] for name in mlstm.TOKENS}
    if cu is None and not sp.is_first:
        x = {name: y for name, y in x.items() if name not in mlstm.STATES}
    h, states = mlstm.chunk_mlstm(**x, return_last_states=output_final_state, sp=sp)
    if states is None:
        (B, _, H, K), V = given["q"].shape, given["v"].shape[-1]
        nothing = 0 * h.float().sum()
        states = [nothing.expand(B, H, *shape).clone() for shape in ((K, V), (K,), (1,))]
    joined = tuple(_Joined.apply(y, None, T) for y in states)
    return _Joined.apply(h, start, T), mlstm.differentiable(joined)


def check_mlstm(sp: SequenceParallel, dtype: torch.dtype, packed: bool) -> str:
    """259 tokens of two heads of 128 against the token loop: outputs, states and all gradients."""
    T, size, bounds = 259, 128, torch.tensor([0, 61, 61, 125, 126, 203, 259])
    inputs = mlstm.conditioned(mlstm.draw(1, T, len(bounds) - 1 if packed else 1, size, size, seed=int(packed)), dtype)
    inputs |= {"cu_seqlens": bounds} if packed else {}
    credit = size / 32 * FLOAT32_ROUNDING if dtype == torch.float32 else 0.0  # see tests/gpu/test_memory_gpu.py
    reports = check_op(
        partial(mlstm_over_ranks, sp), mlstm.oracle, inputs, dtype=dtype, device=sp.device, wide=mlstm.KEPT_WIDE,
        credit=credit,
    )  # fmt: skip
    return f"error {max(report.error for report in reports):.1e}"


def checks(sp: SequenceParallel, options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], str]]]:
    uneven = [333, 190, 64, 501, 1, 77, 128, 200][: sp.world_size]
    for name in options.only.split(","):
        for dtype in (getattr(torch, x) for x in options.dtypes.split(",")):
            what = f"{name} {str(dtype)[6:]}"
            for lengths in (uneven, [0, *uneven[1:]], [*uneven[:-1], 0]):
                yield f"{what} {lengths}", partial(check, sp, name, dtype, lengths, options.size)
            for packed in (False, True) if name == "mlstm" else ():
                yield f"{what}, the token loop{', packed' * packed}", partial(check_mlstm, sp, dtype, packed)


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
    ok = True
    for what, run in checks(sp, options):
        ok &= passes_on_all(sp, what, run)
    if sp.rank == 0:
        print(f"ranks_operators over {sp.transport}: {'passed' if ok else 'FAILED'}")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
