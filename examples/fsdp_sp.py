"""FSDP2 and sequence parallelism together: parameters sharded over all ranks, sequences cut over `--sp` of them.

    torchrun --nproc-per-node 4 examples/fsdp_sp.py --device cpu --steps 20
    torchrun --nproc-per-node 4 examples/fsdp_sp.py --device cuda --steps 200
    python examples/fsdp_sp.py --steps 20                                         # one process

On a (dp, sp) mesh every row of sp ranks holds one batch of sequences. `SequenceParallelLA` binds the model to its row,
`fully_shard` spreads the parameters over the whole mesh and averages gradients over it, and `sp.token_mean` scales the
loss so that this average is the gradient of one rank. At the end rank 0 repeats the first steps alone, with an ordinary
model on the whole batches, and the run fails unless the losses agree.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from flexsp.comm.group import SequenceParallel
from flexsp.launch.bootstrap import init_sequence_parallel
from flexsp.nn import Mamba2, SequenceParallelLA, SimpleGLA

VOCABULARY = 64
TOLERANCE = {"float32": 5e-4, "bfloat16": 3e-2}


class Block(nn.Module):
    def __init__(self, dim: int, mixer: nn.Module) -> None:
        super().__init__()
        self.norm_mix, self.norm_mlp, self.mixer = nn.RMSNorm(dim), nn.RMSNorm(dim), mixer
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mixer(self.norm_mix(x))
        return x + self.mlp(self.norm_mlp(x))


class Model(nn.Module):
    """Simple GLA and Mamba-2 layers in turn; each block is recomputed in backward."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        mixers = (SimpleGLA(dim, dim // 64) if i % 2 == 0 else Mamba2(dim, state_size=64) for i in range(layers))
        self.blocks = nn.ModuleList(Block(dim, mixer) for mixer in mixers)
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def batches(options: argparse.Namespace, dp: int) -> Iterator[torch.Tensor]:
    """[dp, batch, tokens + 1], the same on all ranks: nine tokens of ten follow from the one before."""
    source = torch.Generator().manual_seed(options.seed)
    follows = torch.randperm(VOCABULARY, generator=source)
    while True:
        shape = (dp, options.batch, options.tokens + 1)
        text = torch.randint(VOCABULARY, shape, generator=source)
        surprise = torch.rand(shape, generator=source) < 0.1
        for t in range(1, shape[-1]):
            text[..., t] = torch.where(surprise[..., t], text[..., t], follows[text[..., t - 1]])
        yield text


def make_model(options: argparse.Namespace, device: torch.device) -> Model:
    torch.manual_seed(options.seed)
    return Model(options.dim, options.layers).to(device)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def token_losses(model: nn.Module, text: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(text).float().flatten(0, 1), targets.flatten(), reduction="none")


def train(options: argparse.Namespace, mesh: DeviceMesh, sp: SequenceParallel) -> list[float]:
    """Mean loss over all ranks' tokens, for each step."""
    model = make_model(options, sp.device)
    SequenceParallelLA(model, sp)  # in place, like fully_shard
    everyone = mesh["dp", "sp"]._flatten("dp_sp")
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, options.dtype), reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=everyone, mp_policy=policy)
    fully_shard(model, mesh=everyone, mp_policy=policy)
    optimizer = make_optimizer(model)

    cuts = torch.Generator().manual_seed(options.seed + 1)
    losses, started = [], time.monotonic()
    for step, text in zip(range(options.steps), batches(options, mesh["dp"].size()), strict=False):
        if options.uneven:  # any lengths do, also none at all
            bounds = torch.randint(options.tokens + 1, (sp.world_size - 1,), generator=cuts).sort().values.tolist()
            sp.set_lengths([b - a for a, b in zip([0, *bounds], [*bounds, options.tokens], strict=True)])
        else:
            sp.set_lengths(sp.partition(options.tokens))
        mine = text[mesh["dp"].get_local_rank()].to(sp.device)
        loss = sp.token_mean(token_losses(model, sp.shard(mine[:, :-1]), sp.shard(mine[:, 1:])))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if dist.get_rank() == 0 and (step % max(1, options.steps // 20) == 0 or step == options.steps - 1):
            speed = (step + 1) * text[..., 1:].numel() / (time.monotonic() - started)
            print(f"step {step:4d}  loss {losses[-1]:.6f}  {speed:,.0f} tokens/s", flush=True)
    return losses


def train_alone(options: argparse.Namespace, steps: int, dp: int, device: torch.device) -> list[float]:
    """The same in float32 with an ordinary model and optimizer: no ranks, no flexsp group."""
    model = make_model(options, device)
    optimizer = make_optimizer(model)
    losses = []
    for _, text in zip(range(steps), batches(options, dp), strict=False):
        rows = text.flatten(0, 1).to(device)
        loss = token_losses(model, rows[:, :-1], rows[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare(losses: list[float], alone: list[float], tolerance: float) -> bool:
    print("step   all ranks   one rank    relative difference")
    agree = True
    for step, (ours, expected) in enumerate(zip(losses, alone, strict=False)):
        difference = abs(ours - expected) / expected
        agree &= difference <= tolerance
        print(f"{step:4d}  {ours:.7f}  {expected:.7f}  {difference:.1e}")
    print("the losses agree" if agree else f"the losses DISAGREE (more than {tolerance:g})", flush=True)
    return agree


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--steps", type=int, default=200)
    add("--sp", type=int, default=2, help="ranks that share a sequence (default: 2); the others are data parallel")
    add("--tokens", type=int, default=1024, help="length of a sequence over its ranks (default: 1024)")
    add("--batch", type=int, default=2, help="sequences of a dp replica (default: 2)")
    add("--dim", type=int, default=128, help="width, a multiple of 64 (default: 128)")
    add("--layers", type=int, default=2)
    add("--dtype", choices=tuple(TOLERANCE), default="float32", help="of the sharded model's arithmetic")
    add("--uneven", action="store_true", help="cut every batch at random places, so that shards may be empty")
    add("--compare", type=int, default=5, help="steps to repeat on one rank (default: 5)")
    add("--transport", default="auto", help="see flexsp.init_sequence_parallel (default: auto)")
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


def start(options: argparse.Namespace) -> torch.device:
    if "RANK" not in os.environ and not dist.is_initialized():
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0")
    device = torch.device(options.device)
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo")
    return device


def main(argv: list[str] | None = None) -> None:
    options = parse_options(argv)
    owner = not dist.is_initialized()
    device = start(options)
    world = dist.get_world_size()
    options.sp = min(options.sp, world)
    if world % options.sp:
        raise SystemExit(f"--sp: expected a divisor of the {world} ranks, got {options.sp}")
    mesh = init_device_mesh(options.device, (world // options.sp, options.sp), mesh_dim_names=("dp", "sp"))
    sp = init_sequence_parallel(mesh["sp"], transport=options.transport, device=device)
    if dist.get_rank() == 0:
        print(f"dp {world // options.sp} x sp {options.sp} on {options.device}, {sp.transport}", flush=True)
    losses = train(options, mesh, sp)
    sp.check()
    agree = [True]
    if dist.get_rank() == 0:
        alone = train_alone(options, min(options.compare, options.steps), world // options.sp, device)
        agree = [compare(losses, alone, TOLERANCE[options.dtype])]
    dist.broadcast_object_list(agree, src=0)
    sp.close()
    if owner:
        dist.destroy_process_group()
    if not agree[0]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
