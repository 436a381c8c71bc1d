"""`flexsp bench model`: training steps of a whole hybrid model of transformers, one sequence cut over all ranks, or
with `--sp N` several sequences, each cut over N ranks.

Random weights, bfloat16 under FSDP2 with float32 parameters and AdamW, layers computed again in backward. On one rank
the unmodified model may be timed beside it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from flexsp.bench.record import environment, file_stem, save
from flexsp.bench.scale import under_torchrun
from flexsp.bench.timing import synchronize

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel

__all__ = ["SIZES", "run"]

Row = dict[str, Any]
_KERNELS = 40  # that a profile names
_TYPES = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
SIZES: dict[str, dict[str, Any]] = {
    "1b": {
        "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 12, "layer_types": 3 * _TYPES,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": True, "max_position_embeddings": 1 << 21,
    },
    "tiny": {
        "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 4, "layer_types": _TYPES, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Arguments of Qwen3NextConfig: three layers of the gated delta rule to one of softmax attention, and experts."""


def _make(size: str, sp: SequenceParallel, unmodified: bool) -> Any:
    """The model with the same random weights on every rank, sharded over all."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    from flexsp.integrations.transformers import parallelize

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_next", **SIZES[size])
    with sp.device:
        model = AutoModelForCausalLM.from_config(config).float().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if not unmodified:
        parallelize(model, sp)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def _step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor, sp: SequenceParallel | None) -> torch.Tensor:
    """The loss of this rank's part, after a step; `sp` None runs the unmodified model."""
    batch = {"input_ids": ids, "labels": ids}
    if sp is not None:
        from flexsp.integrations.transformers import shard

        batch = shard(batch, sp)
    loss: torch.Tensor = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _kernels(step: Callable[[], object], device: torch.device) -> list[tuple[str, float, int]]:
    """Kernels of one step on this rank by their time: name, milliseconds and calls; on the CPU its operators."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        step()
        synchronize(device)
    times = [
        (x.key, (x.self_device_time_total if on_gpu else x.self_cpu_time_total) / 1e3, x.count)
        for x in seen.key_averages()
    ]
    return sorted((x for x in times if x[1] > 0), key=lambda x: -x[1])[:_KERNELS]


def _row(args: argparse.Namespace, T: int, sp: SequenceParallel, unmodified: bool) -> Row:
    """Seconds of steps and peak memory, of the slowest and fullest rank; on one rank, the error of a sequence that does
    not fit."""
    device, world = sp.device, dist.get_world_size()
    sequences = world // sp.world_size
    row: Row = {"size": args.size, "T": T, "sequences": sequences, "world_size": world, "unmodified": unmodified}
    model = _make(args.size, sp, unmodified)
    row["parameters"] = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    own = torch.Generator().manual_seed(1 + dist.get_rank() // sp.world_size)
    ids = torch.randint(SIZES[args.size]["vocab_size"], (1, T), generator=own).to(device)
    seconds, losses = [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        for _ in range(args.warmup + args.iterations):
            synchronize(device)
            began = time.perf_counter()
            losses.append(_step(model, optimizer, ids, None if unmodified else sp))
            synchronize(device)
            seconds.append(time.perf_counter() - began)
    except torch.OutOfMemoryError as error:
        if world > 1:  # the other ranks wait for this one, until torchrun ends them
            raise
        return row | {"error": str(error).split(". ")[0]}
    if args.profile:
        row["kernels"] = _kernels(lambda: _step(model, optimizer, ids, None if unmodified else sp), device)
    loss = torch.stack(losses).double()
    worst = torch.tensor([*seconds, _peak_gib(device)], dtype=torch.float64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    dist.all_reduce(loss)
    loss /= world
    *seconds, peak = worst.tolist()
    step = statistics.median(seconds[args.warmup :])
    return row | {"step_s": step, "tokens_per_s": sequences * T / step, "peak_gib": peak, "losses": loss.tolist()}


def _peak_gib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def _open(args: argparse.Namespace) -> SequenceParallel:
    """The ranks that this one's sequence is cut over: all of them, or --sp."""
    from torch.distributed.device_mesh import init_device_mesh

    from flexsp.launch.bootstrap import init_sequence_parallel

    everyone = init_sequence_parallel(transport=args.transport, timeout_s=args.timeout)
    world = everyone.world_size
    size = world if args.sp is None else args.sp
    if args.unmodified and world > 1:
        raise ValueError(f"--unmodified: expected one rank, got {world}")
    if not 1 <= size <= world or world % size:
        raise ValueError(f"--sp: expected a divisor of the {world} ranks, got {size}")
    if size == world:
        return everyone
    mesh = init_device_mesh(everyone.device.type, (world // size, size), mesh_dim_names=("dp", "sp"))
    everyone.close()
    return init_sequence_parallel(mesh["sp"], transport=args.transport, timeout_s=args.timeout)


def run(args: argparse.Namespace) -> int:
    """A row for each length; rank 0 prints and writes. Outside torchrun, --ranks starts as many, or one.

    Raises:
        ValueError: --unmodified on several ranks, --sp that does not divide them, or transformers is not installed.
    """
    if find_spec("transformers") is None:
        raise ValueError('transformers: expected it to be installed (pip install "flexsp[transformers]"), got nothing')
    if "WORLD_SIZE" not in os.environ:
        return under_torchrun(args.ranks or [1], args.argv)
    sp = _open(args)
    where = environment(sp.device, args.argv) | {"world_size": dist.get_world_size()}
    result: Row = {"kind": "model", "environment": where, "rows": []}
    kind = "model_unmodified" if args.unmodified else "model"
    out = Path(args.out) / f"{file_stem(kind, result['environment'])}.json"
    for T in args.T:
        row = _row(args, T, sp, args.unmodified)
        result["rows"].append(row)
        if dist.get_rank() == 0:
            said = row.get("error") or f"{row['step_s']:.3f} s  {row['tokens_per_s']:.0f} tokens/s"
            said += "" if "error" in row else f"  {row['peak_gib']:.1f} GiB  losses {row['losses']}"
            what = f"{args.size} {row['sequences']} x T {T} on {row['world_size']}"
            what += " unmodified" if args.unmodified else ""
            print(f"  {what}: {said}", flush=True)
            save(out, result)
        if "error" in row:
            break
    sp.close()
    dist.destroy_process_group()
    return 0
