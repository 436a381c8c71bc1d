"""What went over the ranks of a group, counted; and two layers in miniature that exchange states."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from flexsp.comm.group import SequenceParallel
from flexsp.scan.exchange import exchange
from flexsp.scan.transitions import Transition
from tests.harness.schedules import fold

__all__ = ["Block", "blocks", "by_torch", "one_process"]

Tensors = list[torch.Tensor]


def by_torch(sp: Any, since: int) -> int:
    """Exchanges by torch.distributed, of the last 64 of all kinds, that were begun after call `since`."""
    return sum(row["by"] == "process_group" and row["number"] > since for row in sp.recorder.rows())


class Block(torch.nn.Module):
    """A layer in miniature: tokens [T, 3] -> F, the state that arrives, tokens [T, 3] that read it."""

    def __init__(self, sp: SequenceParallel, read: bool = True) -> None:
        super().__init__()
        self.sp, self.read = sp, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        F = torch.einsum("tk,tv->kv", x, x.cos())[None, None]
        log_a = -x.square().sum()[None, None]
        state = exchange(F, Transition.of(F, log_a), self.sp)
        return x.sin() + x @ state[0, 0] if self.read else x.sin()


def blocks(sp: SequenceParallel, xs: Tensors, mode: str, read: bool) -> tuple:
    """Two layers; the middle rank's shard may be empty. Returns output, gradient and how many calls torch.distributed
    made."""
    x = xs[sp.rank].requires_grad_()
    layers = [Block(sp, read), Block(sp, read)]
    torch._dynamo.reset()

    def model(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            if "checkpoint" in mode:
                x = checkpoint(layer, x, use_reentrant="reentrant" in mode)
            else:
                x = layer(x)
        return x

    if "compile" in mode:
        model = torch.compile(model, fullgraph=True, backend="inductor" if "inductor" in mode else "aot_eager")
    before = sp.calls
    y = model(x)
    forward_calls = by_torch(sp, before)
    y.square().sum().backward()
    return y, x.grad, (forward_calls, by_torch(sp, before))


def one_process(xs: Tensors) -> tuple[Tensors, Tensors]:
    xs = [x.clone().requires_grad_() for x in xs]
    ys = xs
    for _ in range(2):
        Fs = [torch.einsum("tk,tv->kv", y, y.cos())[None, None] for y in ys]
        elements = [(F, -y.square().sum()[None, None], None) for F, y in zip(Fs, ys, strict=True)]
        ys = [y.sin() + y @ state[0, 0] for y, state in zip(ys, fold(elements), strict=True)]
    sum(y.square().sum() for y in ys).backward()
    return ys, [x.grad for x in xs]
