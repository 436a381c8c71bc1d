"""An exchange as a generator of its messages. `drive` sends them with torch.distributed; `flexsp simulate` only times
them, for more ranks than there are processes. So a generator calls nothing of torch.distributed itself, and reads no
value on the host: its tensors may be of the device "meta", which have a shape and no numbers."""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple, TypeVar

import torch

from flexsp.comm.process_group import Message, Pending, of_all_ranks, post, wait_all
from flexsp.comm.ranks import Ranks

__all__ = ["Gather", "Step", "Steps", "drive"]

_R = TypeVar("_R")


class Step(NamedTuple):
    """What a rank does next: it starts `messages`, which may proceed together, and waits until some are through.

    Attributes:
        messages: those that start now. Of two ranks, the i-th send of one meets the i-th receive of the other.
        until: those, of this step or of earlier ones, that must be through before the generator goes on.
    """

    messages: tuple[Message, ...] = ()
    until: tuple[Message, ...] = ()


class Gather(NamedTuple):
    """A collective of all ranks. The generator is sent every rank's `mine` [n], as [ranks, n]."""

    mine: torch.Tensor


Steps = Generator[Step | Gather, torch.Tensor | None, _R]


def drive(sp: Ranks, steps: Steps[_R]) -> _R:
    """Runs an exchange over torch.distributed and returns what its generator does."""
    under_way: dict[int, Pending] = {}
    answer: torch.Tensor | None = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            return end.value
        answer = None
        if isinstance(step, Gather):
            answer = of_all_ranks(sp, step.mine)
            continue
        under_way |= {id(item.message): item for item in post(sp, *step.messages)}
        wait_all(sp, [under_way.pop(id(message)) for message in step.until])
