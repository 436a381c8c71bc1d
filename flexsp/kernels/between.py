"""The place of a segment in a sequence whose segments are calls of their own (`flexsp.kernels.segments`)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

__all__ = ["Between"]


class Between:
    """What plans ask of a group of ranks, for a segment: there is one before it, and one behind it. All segments have
    this place, so that all have one plan; the first one is handed the initial state, and what the last one hands on is
    the final state."""

    constant_in_recipes: ClassVar[bool] = True
    id: ClassVar[int] = -2  # of no group
    rank: ClassVar[int] = 1
    world_size: ClassVar[int] = 3
    is_first: ClassVar[bool] = False
    is_last: ClassVar[bool] = False
    schedule: ClassVar[str] = "chain"
    transport: ClassVar[str] = "process_group"
    check_calls: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def check_shard(self, *of: Any) -> None:
        """A segment has as many tokens as it has."""
