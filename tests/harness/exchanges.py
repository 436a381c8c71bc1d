"""What went over the ranks of a group, counted."""

from __future__ import annotations

from typing import Any

__all__ = ["by_torch"]


def by_torch(sp: Any, since: int) -> int:
    """Exchanges by torch.distributed, of the last 64 of all kinds, that were begun after call `since`."""
    return sum(row["by"] == "process_group" and row["number"] > since for row in sp.recorder.rows())
