"""Lets Triton find kernels in a cache folder that was moved.

Fault: Triton 3.6 to 3.9. For each kernel the cache has a list of its files, with their places at the time when they
were written. In a folder that was carried elsewhere none of them is found, and all kernels are compiled again.
"""

from __future__ import annotations

import functools
import json
from typing import Any

__all__ = ["find_in_moved_folders"]


@functools.cache
def find_in_moved_folders(manager: Any) -> None:
    """Where a listed file is not found, `manager`, Triton's class for folders, takes the one of its name beside the
    list."""
    listed = manager.get_group

    @functools.wraps(listed)
    def found(self: Any, filename: str) -> dict[str, str] | None:
        group: dict[str, str] | None = listed(self, filename)
        place = None if group is None or filename in group else self.get_file(f"__grp__{filename}")
        if place is None:
            return group
        with open(place) as file:
            names = json.load(file)["child_paths"]
        here = {name: self.get_file(name) for name in names}
        return here if all(here.values()) else group

    manager.get_group = found
