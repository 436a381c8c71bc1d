"""In which order a block of the chain's kernel waits, computes and sends. Needs no Triton.

`flexsp.scan.propagate` is the kernel. `block_order` says the same once more as a generator, so that `flexsp simulate`
can time it for more ranks than there are GPUs. tests/scan/test_tile_order.py compares both.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

__all__ = ["MAX_BLOCKS", "PACE", "Act", "block_order"]

# Blocks of a kernel that waits for a neighbour. There is at most one for each multiprocessor, so that all are resident.
MAX_BLOCKS = 128
# The first rank starts a full tile every PACE cycles of its multiprocessor. If it sent all tiles at once, they would
# share the link and arrive together, and every hop would wait for the whole state. At a pace the hops overlap.
PACE = 160


class Act(Enum):
    """What a block does to one tile."""

    FOLD = "fold"
    """reads the rank's segments, the matrix product's operands where the transition is dense"""
    WAIT_CREDIT = "wait_credit"
    """of the epoch before last, from the rank that it sends to"""
    WAIT_TILE = "wait_tile"
    """from the rank before"""
    APPLY = "apply"
    """the transition to what came in"""
    PACE = "pace"
    """waits for its turn, on the first rank"""
    PUSH = "push"
    """stores the tile into the next rank's memory and raises its flag"""
    CREDIT = "credit"
    """tells the rank before that the tile's place is free"""
    WRITE = "write"
    """the states that enter the segments"""


def block_order(
    block: int, blocks: int, tiles: int, *, has_in: bool, has_out: bool, dense: bool = False, cut: bool = False
) -> Iterator[tuple[Act, int]]:
    """What one of `blocks` blocks does to which of a rank's `tiles` tiles, in this order.

    Args:
        has_in: there is a rank before this one, in the direction of the scan.
        has_out: there is a rank behind it.
        dense: the transition is a matrix.
        cut: a document starts on the rank, so that what leaves it does not depend on what comes in.
    """
    early = has_in and has_out and cut and not dense
    for tile in range(block, tiles, blocks):
        if dense or has_out:
            yield Act.FOLD, tile
        if has_out:
            yield Act.WAIT_CREDIT, tile
        if early:
            yield Act.PUSH, tile
        if has_in:
            yield Act.WAIT_TILE, tile
        if dense:
            yield Act.APPLY, tile
        if has_out and not early:
            if not has_in:
                yield Act.PACE, tile
            elif not dense:
                yield Act.APPLY, tile
            yield Act.PUSH, tile
        if has_in:
            yield Act.CREDIT, tile
        if not dense:
            yield Act.WRITE, tile
