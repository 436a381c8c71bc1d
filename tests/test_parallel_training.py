"""DDP and FSDP2 over a (dp, sp) mesh: gradients and updates equal those of one rank with all the data."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from flexsp.comm.group import SequenceParallel
from flexsp.launch.bootstrap import init_sequence_parallel
from flexsp.nn import Mamba2, SequenceParallelLA, SimpleGLA
from flexsp.testing.ranks import run_ranks

WORLD, DP, SP, VOCABULARY, STEPS = 4, 2, 2, 11, 3
EXAMPLE = Path(__file__).parents[1] / "examples" / "fsdp_sp.py"
CUTS = {"uneven": [[3, 27], [19, 11]], "empty": [[0, 30], [30, 0]]}


class Block(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norm, self.mixer = nn.RMSNorm(32), mixer

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
        return x + self.mixer(self.norm(x), cu_seqlens)


class Model(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(VOCABULARY, 32)
        mixers = SimpleGLA(32, 2), Mamba2(32, head_dim=16, state_size=16)
        self.blocks = nn.ModuleList(Block(mixer) for mixer in mixers)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, cu_seqlens, use_reentrant=False) if self.recompute else block(x, cu_seqlens)
        return self.head(x)


def make(seed: int, dtype: torch.dtype, recompute: bool = False) -> Model:
    torch.manual_seed(seed)
    return Model(recompute).to(dtype)


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")


@contextmanager
def on_mesh() -> Iterator[tuple[Any, SequenceParallel]]:
    mesh = init_device_mesh("cpu", (DP, SP), mesh_dim_names=("dp", "sp"))
    sp = init_sequence_parallel(mesh["sp"], device="cpu")
    try:
        yield mesh, sp
    finally:
        sp.close()


def parallel(model: nn.Module, how: str, mesh: Any, sp: SequenceParallel) -> nn.Module:
    wrapped = SequenceParallelLA(model, sp)
    if how == "manual":
        return wrapped
    everyone = mesh["dp", "sp"]._flatten("dp_sp")
    if how == "ddp":
        return DistributedDataParallel(wrapped, process_group=everyone.get_group())
    # hsdp shards over sp and keeps a copy in every dp replica
    place = mesh if how == "hsdp" else everyone
    for block in wrapped.blocks:
        fully_shard(block, mesh=place)
    return fully_shard(wrapped, mesh=place)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(_: SequenceParallel, how: str, recompute: bool, cuts: list[list[int]], data: dict[str, Any]) -> Any:
    """First gradients and the parameters after a few steps, gathered."""
    with on_mesh() as (mesh, sp):
        replica = mesh["dp"].get_local_rank()
        model = make(data["seed"], data["dtype"], recompute)
        wrapped = parallel(model, how, mesh, sp)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
        sp.set_lengths(cuts[replica])
        tokens, targets, mask = (sp.shard(data[key][replica]) for key in ("tokens", "targets", "mask"))
        first = {}
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = sp.token_mean(token_losses(wrapped(tokens, data["cu"]), targets), mask.flatten())
            loss.backward()
            if how == "manual":
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= WORLD
            first = first or {name: whole(p.grad) for name, p in model.named_parameters()}
            optimizer.step()
        return loss.detach(), first, {name: whole(p) for name, p in model.named_parameters()}


def train_whole(data: dict[str, Any]) -> Any:
    model = make(data["seed"], data["dtype"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first = {}
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses = [
            token_losses(model(tokens, data["cu"]), targets)[mask.flatten()].mean()
            for tokens, targets, mask in zip(data["tokens"], data["targets"], data["mask"], strict=True)
        ]
        loss = torch.stack(losses).mean()
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    return loss.detach(), first, dict(model.named_parameters())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("how", ["ddp", "fsdp", "hsdp", "manual"])
def test_equals_one_rank(how: str, cut: str, recompute: bool) -> None:
    dtype = torch.float32 if how == "hsdp" else torch.float64
    packed = cut == "uneven"
    shape = (DP, 1 if packed else 2, 30)
    data = {
        "seed": int(torch.randint(1 << 30, ())),
        "dtype": dtype,
        "tokens": torch.randint(VOCABULARY, shape),
        "targets": torch.randint(VOCABULARY, shape),
        "mask": torch.rand(shape) < 0.7,
        "cu": torch.tensor([0, 4, 4, 21, 30]) if packed else None,
    }
    loss, gradients, parameters = train_whole(data)
    cut_runs = run_ranks(train, WORLD, how, recompute, CUTS[cut], data)
    rtol, atol = (1e-9, 1e-11) if dtype == torch.float64 else (2e-4, 2e-6)
    average = torch.stack([run[0] for run in cut_runs]).mean()
    torch.testing.assert_close(average, loss, rtol=rtol, atol=atol)
    for run in cut_runs:
        assert run[1].keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(run[1][name], gradient, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
            torch.testing.assert_close(run[2][name], parameters[name], rtol=rtol, atol=atol)


def checkpoint_names(_: SequenceParallel) -> Any:
    with on_mesh() as (mesh, sp):
        model = parallel(make(0, torch.float32), "fsdp", mesh, sp)
        optimizer = torch.optim.AdamW(model.parameters())
        names = list(get_model_state_dict(model))
        return names, sorted(get_optimizer_state_dict(model, optimizer)["state"])


def test_distributed_checkpoint_names() -> None:
    """torch.distributed.checkpoint sees the plain model's names, for parameters and optimizer state."""
    expected = list(make(0, torch.float32).state_dict())
    for names, states in run_ranks(checkpoint_names, WORLD):
        assert names == expected and states == sorted(expected)


def run_example(_: SequenceParallel, arguments: list[str]) -> None:
    runpy.run_path(str(EXAMPLE))["main"](arguments)


def test_example() -> None:
    """examples/fsdp_sp.py, which fails itself where its losses are not those of one rank."""
    run_ranks(run_example, WORLD, ["--device", "cpu", "--steps", "3", "--tokens", "64", "--batch", "1", "--uneven"])
