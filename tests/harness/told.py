"""How scripts that run under torchrun report a check: one line, with what each rank says that it fails on."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch.distributed as dist

from flexsp.comm.group import SequenceParallel

__all__ = ["passes_on_all"]


def passes_on_all(sp: SequenceParallel, what: str, check: Callable[[], str]) -> bool:
    """Whether `check` raises nothing on any rank; it returns what to print then. Collective over all ranks."""
    try:
        answer = (True, check())
    except Exception as error:
        said = isinstance(error, AssertionError) and str(error)
        answer = (False, said or traceback.format_exc(limit=-3))
    answers: list[tuple[bool, str]] = [answer] * sp.world_size
    dist.all_gather_object(answers, answer)
    wrong = [f"\n  rank {r}: {text}" for r, (fine, text) in enumerate(answers) if not fine]
    if sp.rank == 0:
        print(f"{'FAILED' if wrong else 'ok    '} {what}: {''.join(wrong) or answer[1]}", flush=True)
    return not wrong
