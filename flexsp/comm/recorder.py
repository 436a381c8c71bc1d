"""The last exchanges of a group on this rank, as PyTorch's flight recorder keeps those of NCCL.

A call over ranks takes tens of microseconds of the host, so taking note of one must cost next to nothing: an entry is a
short list, whose text is made only where it is read. Entries hold no tensors. Nothing here asks a device.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from time import time_ns
from typing import Any

from flexsp.comm.signature import Signature

__all__ = ["KEPT", "Entry", "Recorder", "as_text", "digest_of", "ended", "hop_of", "number_of"]

KEPT = 64

_NUMBER, _WHAT, _SOURCE, _TARGET, _BY, _BEGAN, _ENDED = range(7)
Entry = list[Any]


class Recorder:
    """A ring of the last `KEPT` exchanges."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=KEPT)

    def begin(self, number: int, what: Signature | str, source: int | None, target: int | None, by: str) -> Entry:
        """Takes note of an exchange before it starts.

        Args:
            number: of the call over ranks, the same on all of them.
            what: as ranks compare it.
            source, target: ranks of the group that send to this one and receive from it; None and None are all.
            by: "kernel", "process_group" or "cpu group". Of a kernel the host knows only that it was launched.

        Returns:
            what `ended` takes.
        """
        entry = [number, what, source, target, by, time_ns(), 0]
        self._entries.append(entry)
        return entry

    def __len__(self) -> int:
        return len(self._entries)

    def last(self) -> Entry | None:
        """The newest exchange."""
        return self._entries[-1] if self._entries else None

    def of_number(self, number: int) -> Entry | None:
        """The newest exchange of a call, if it is still kept."""
        return next((entry for entry in reversed(self._entries) if entry[_NUMBER] == number), None)

    def of_word(self, word: int) -> Entry | None:
        """The newest exchange whose signature a kernel compared as `word`."""
        for entry in reversed(self._entries):
            if isinstance(entry[_WHAT], Signature) and entry[_WHAT].word() == word:
                return entry
        return None

    def digests(self) -> list[list[Any]]:
        """[number, a few letters for what it was] of all: ranks that made the same calls have the same."""
        return [[entry[_NUMBER], digest_of(entry)] for entry in self._entries]

    def rows(self) -> Iterator[dict[str, Any]]:
        """All of them, oldest first, for a file."""
        for entry in self._entries:
            number, what, source, target, by, began, end = entry
            row = {
                "number": number, "what": _what(entry), "by": by, "source": source, "target": target,
                "began_ns": began, "ended_ns": end or None,
            }  # fmt: skip
            if isinstance(what, Signature):
                row |= {"kind": what.what, "call": what.call, "travels": what.travels, "backward": what.backward}
            yield row


def ended(entry: Entry) -> None:
    """Says that the host is done with an exchange: its data is here or, on CUDA, has been ordered."""
    entry[_ENDED] = time_ns()


def as_text(entry: Entry | None) -> str:
    return "" if entry is None else f"call {entry[_NUMBER]}, {_what(entry)}"


def hop_of(entry: Entry | None, rank: int, peer: int | None) -> tuple[int, int] | None:
    """(from, to) of the data between this rank and a peer; None where all send to all."""
    if entry is None or peer is None or peer not in (entry[_SOURCE], entry[_TARGET]):
        return None
    return (peer, rank) if peer == entry[_SOURCE] else (rank, peer)


def number_of(entry: Entry | None) -> int:
    return 0 if entry is None else entry[_NUMBER]


def digest_of(entry: Entry | None) -> str:
    """A few letters for what an exchange was."""
    return "" if entry is None else hashlib.sha256(_what(entry).encode()).hexdigest()[:8]


def _what(entry: Entry) -> str:
    what = entry[_WHAT]
    return what.text() if isinstance(what, Signature) else what
