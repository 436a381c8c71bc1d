"""Layers over ranks against one rank, and the FSDP2 example for 200 steps. Run by torchrun, not by pytest:

    torchrun --standalone --nproc-per-node 4 tests/gpu/ranks_layers.py [--steps 200] [--device cpu]

Prints one line a check; exit status 1 if one failed on any rank.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from flexsp import SequenceParallel, init_sequence_parallel
from flexsp.nn import Mamba2, SequenceParallelLA, SimpleGLA
from flexsp.testing.compare import FEW, assert_close, relative_error

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp_sp.py"
DIM = 128
Results = dict[str, torch.Tensor]


class Model(nn.Module):
    """Layers that are recomputed in backward: on CUDA on another thread, outside the wrapper's context."""

    def __init__(self) -> None:
        super().__init__()
        self.mixers = nn.ModuleList([SimpleGLA(DIM, 2), Mamba2(DIM, head_dim=64, state_size=64, n_groups=2)])

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        for mixer in self.mixers:
            x = x + checkpoint(mixer, x, cu_seqlens, use_reentrant=False)
        return x


def make(dtype: torch.dtype, device: torch.device, exact: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = Model().to(device, dtype)
    return model.double() if exact else model


def results(model: nn.Module, x: torch.Tensor, dy: torch.Tensor, cu: torch.Tensor | None) -> Results:
    x = x.detach().clone().requires_grad_()
    y = model(x, cu)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


def cut_equals_whole(sp: SequenceParallel, dtype: torch.dtype, packed: bool, lengths: list[int]) -> None:
    """Error against float64 at most twice that of one rank in the same dtype, plus a rounding.

    Several draws are compared together: the gradient of one or two numbers may cancel by chance in one of them.
    """
    draws = [_three_ways(sp, dtype, packed, lengths, seed) for seed in range(8)]
    cut, low, oracle = (
        {name: torch.cat([draw[way][name].flatten() for draw in draws]) for name in draws[0][way]} for way in range(3)
    )
    worst = max(relative_error(low[name], oracle[name]) for name in oracle)
    for name in oracle:
        least = worst if oracle[name].numel() < FEW else 0.0
        # A gradient is summed over shards in another order, and each part is rounded.
        least = max(least, torch.finfo(dtype).eps)
        assert_close(name, cut[name].to(dtype), oracle[name], low[name], least)


def _three_ways(
    sp: SequenceParallel, dtype: torch.dtype, packed: bool, lengths: list[int], seed: int
) -> tuple[Results, Results, Results]:
    """Outputs and gradients of one draw: over the ranks, on one, and on one in float64."""
    total = sum(lengths)
    generator = torch.Generator().manual_seed(1000 * total + seed)
    x, dy = torch.randn(2, 1 if packed else 2, total, DIM, generator=generator).to(sp.device, dtype).unbind(0)
    third = total // 3
    cu = torch.tensor([0, third, third, max(third, total - 5), total], device=sp.device) if packed else None
    sp.set_lengths(lengths)
    model = SequenceParallelLA(make(dtype, sp.device), sp)
    cut = results(model, sp.shard(x), sp.shard(dy), cu)
    for name, value in cut.items():
        if name in ("y", "dx"):
            cut[name] = sp.gather(value)
        else:
            cut[name] = value.float()
            dist.all_reduce(cut[name], group=sp.group)
    low = results(make(dtype, sp.device), x, dy, cu)
    oracle = results(make(dtype, sp.device, exact=True), x.double(), dy.double(), cu)
    return cut, low, oracle


def the_host_never_waits(sp: SequenceParallel) -> None:
    sp.set_lengths([96] * sp.world_size)
    x = torch.randn(1, 96, DIM, device=sp.device)
    cu = torch.tensor([0, 50, 96 * sp.world_size], device=sp.device)
    model = SequenceParallelLA(make(torch.float32, sp.device), sp)
    results(model, x, x, cu)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(model, x, x, cu)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def fsdp_example(sp: SequenceParallel, arguments: list[str]) -> None:
    runpy.run_path(str(EXAMPLE))["main"](["--device", sp.device.type, *arguments])


def checks(sp: SequenceParallel, steps: int) -> dict[str, Callable[[SequenceParallel], Any]]:
    ranks = range(sp.world_size)
    shapes = {
        "uneven": [40 + 67 * ((r * 7) % 5) for r in ranks],
        "shorter than the convolution": [1 + r % 3 for r in ranks],
        "empty": [130 * (r % 2) for r in ranks],
    }
    found: dict[str, Callable[[SequenceParallel], Any]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for label, lengths in shapes.items():
            for packed in (False, True):
                name = f"{label}{', documents' * packed}, {str(dtype).removeprefix('torch.')}"
                found[name] = partial(cut_equals_whole, dtype=dtype, packed=packed, lengths=lengths)
    if sp.device.type == "cuda":
        found["the host never waits"] = the_host_never_waits
    found["FSDP2 example"] = partial(fsdp_example, arguments=["--steps", str(steps)])
    found["FSDP2 example, uneven, bfloat16"] = partial(
        fsdp_example, arguments=["--steps", str(max(2, steps // 10)), "--uneven", "--dtype", "bfloat16"]
    )
    return found


def run_check(sp: SequenceParallel, name: str, function: Callable[[SequenceParallel], Any]) -> bool:
    began, problem = time.monotonic(), ""
    try:
        function(sp)
        sp.check()
    except (Exception, SystemExit) as error:
        problem = f"{type(error).__name__}: {error}"
        if os.environ.get("FLEXSP_TEST_TRACEBACK"):
            traceback.print_exc()
    problems: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if sp.rank == 0:
        print(f"  {'FAIL' if any(problems) else 'ok  '} {name:50s}{time.monotonic() - began:6.1f} s", flush=True)
        for rank, text in enumerate(problems):
            if text:
                print(f"       rank {rank}: {text[:900]}", flush=True)
    return not any(problems)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--only", default="", help="checks whose name contains this")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing to test")
        return 0
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if options.device == "cpu" else "cpu:gloo,cuda:nccl")
    sp = init_sequence_parallel(transport=options.transport, device=device)
    chosen = {name: check for name, check in checks(sp, options.steps).items() if options.only in name}
    passed = [run_check(sp, name, check) for name, check in chosen.items()]
    if sp.rank == 0:
        print(f"ranks_layers over {sp.transport}: {passed.count(True)} of {len(passed)} passed")
    sp.close()
    dist.destroy_process_group()
    return int(not all(passed) or not passed)


if __name__ == "__main__":
    sys.exit(main())
