"""Exchanges of any number of ranks in one process, from the generators of their messages."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import torch

from flexsp.comm.process_group import Call, Message
from flexsp.comm.signature import Signature
from flexsp.comm.steps import Gather, Step, Steps
from flexsp.scan.schedules import steps_of
from flexsp.scan.transitions import Transition

__all__ = ["incoming_states", "run_in_step"]


def run_in_step(ranks: list[Steps[Any]]) -> tuple[list[Any], list[tuple[int, Message]]]:
    """What the generators return, and all that was sent: (sender, message).

    A rank's step ends when all of its messages have been met, as a group of NCCL's calls does that buffers nothing.
    AssertionError where nobody can go on, or where what is sent does not fit the buffer that it meets.
    """
    results: list[Any] = [None] * len(ranks)
    current: dict[int, Step | Gather] = {}
    waits: dict[int, set[int]] = {}  # for which messages of its step, by their id
    posted: dict[tuple[int, int], tuple[deque, deque]] = defaultdict(lambda: (deque(), deque()))
    sent: list[tuple[int, Message]] = []

    def advance(r: int, answer: torch.Tensor | None) -> None:
        current.pop(r, None)
        try:
            step = ranks[r].send(answer)
        except StopIteration as end:
            results[r] = end.value
            return
        current[r], waits[r] = step, set()
        for message in step.messages if isinstance(step, Step) else ():
            waits[r].add(id(message))
            pair = (r, message.peer) if message.op == "send" else (message.peer, r)
            posted[pair][message.op == "recv"].append(message)
            sent.extend([(r, message)] if message.op == "send" else [])

    for r in range(len(ranks)):
        advance(r, None)
    while current:
        for (source, target), (leaving, arriving) in posted.items():
            while leaving and arriving:
                here, there = leaving.popleft(), arriving.popleft()
                assert (here.buffer.shape, here.buffer.dtype) == (there.buffer.shape, there.buffer.dtype)
                there.buffer.copy_(here.buffer)
                waits[source].discard(id(here))
                waits[target].discard(id(there))
        ready = [r for r, step in current.items() if isinstance(step, Step) and not waits[r]]
        if not ready and all(isinstance(step, Gather) for step in current.values()) and len(current) == len(ranks):
            everyone = torch.stack([current[r].mine for r in range(len(ranks))])
            for r in range(len(ranks)):
                advance(r, everyone)
            continue
        assert ready, f"ranks wait for each other: {current}"
        for r in ready:
            advance(r, None)
    return results, sent


def incoming_states(
    groups: list[Any], given: list[tuple[torch.Tensor, Transition]], reverse: bool = False
) -> tuple[list[torch.Tensor], list[tuple[int, Message]]]:
    """`incoming_state` of every rank, by the groups that each of them would have, and what was sent."""
    ranks = []
    for sp, (F, transition) in zip(groups, given, strict=True):
        call = Call(sp, Signature("state exchange"), F, sp.neighbours(reverse)[1])
        ranks.append(steps_of(F, transition.adjoint() if reverse else transition, sp, reverse, call))
    return run_in_step(ranks)
