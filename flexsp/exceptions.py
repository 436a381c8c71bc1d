"""Every error flexsp raises on its own. Bad arguments are plain ``ValueError``, raised before anything is launched."""

from __future__ import annotations

from typing import Any

__all__ = ["FlexspError", "HeapTooSmall", "NotAvailable", "PeerMismatch", "PeerTimeout"]


class FlexspError(Exception):
    """Base of all errors below."""


class PeerTimeout(FlexspError, RuntimeError):
    """A neighbour did not deliver in time, or its connection broke.

    Attributes (None where a transport does not know): ``rank`` and ``peer`` are ranks in the sequence-parallel group,
    ``direction`` is what the rank was doing ("recv", "send", ...), ``tile`` the tile of the state, ``expected`` and
    ``seen`` the epochs of its flag, ``detail`` what the transport said.
    """

    def __init__(
        self,
        rank: int,
        peer: int | None,
        tile: int | None = None,
        expected: int | None = None,
        seen: int | None = None,
        direction: str | None = None,
        detail: str = "",
    ) -> None:
        self.rank, self.peer, self.tile = rank, peer, tile
        self.expected, self.seen, self.direction, self.detail = expected, seen, direction, detail
        text = f"rank {rank}: no answer from {'any peer' if peer is None else f'rank {peer}'}"
        if direction is not None:
            text += f" in {direction}"
        if tile is not None:
            text += f", tile {tile}"
        if expected is not None:
            text += f", epoch expected {expected}, seen {seen}"
        super().__init__(text + (f" ({detail})" if detail else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self.rank, self.peer, self.tile, self.expected, self.seen, self.direction, self.detail)
        return (type(self), fields)


class PeerMismatch(FlexspError, ValueError):
    """Two ranks disagree on what to do next: a different call, call order, shape or dtype.

    ``ours`` is what ``rank`` was about to do, ``theirs`` what ``peer`` was doing.
    """

    def __init__(self, rank: int, peer: int | None, ours: object = None, theirs: object = None) -> None:
        self.rank, self.peer, self.ours, self.theirs = rank, peer, ours, theirs
        other = "a peer" if peer is None else f"rank {peer}"
        super().__init__(
            f"ranks disagree: rank {rank} called {ours}, {other} called {theirs}; "
            "every rank must make the same calls in the same order with matching shapes and dtypes"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.rank, self.peer, self.ours, self.theirs))


class HeapTooSmall(FlexspError, ValueError):
    """The symmetric heap cannot hold a call's state tiles; ``needed`` and ``had`` are bytes."""

    def __init__(self, needed: int, had: int) -> None:
        self.needed, self.had = needed, had
        super().__init__(
            f"symmetric heap too small: needed {needed} bytes ({-(-needed >> 20)} MiB), had {had}; "
            "raise heap_mib of init_sequence_parallel or FLEXSP_HEAP_MIB"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.needed, self.had))


class NotAvailable(FlexspError, RuntimeError):
    """A transport or feature that this machine does not have; the message says what is missing."""
