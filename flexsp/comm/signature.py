"""What ranks compare before they exchange anything: one definition, from which the stamp of every transport is made.

Transports that can send text send it (`Signature.text`). Kernels compare 31 bits of its hash (`Signature.word`); the
host remembers which texts it has hashed, so that most errors can name both sides.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch

__all__ = ["MISMATCH_BIT", "POISON", "RANK_BITS", "Signature", "described", "digest", "facts_of", "poison", "raised"]

POISON = 1 << 31  # bit of a stamp that reports a failure instead; the next one is set where ranks disagree
MISMATCH_BIT = 1 << 30
RANK_BITS = 15
_KEPT = 4096
_texts: dict[int, str] = {}


@dataclass(frozen=True)
class Signature:
    """One exchange as every rank of the group must see it.

    Attributes:
        what: what is exchanged, such as "state exchange" or "halo exchange".
        call: the op that needs it, with those of its inputs' properties that decide how the data is to be read.
        travels: shapes and dtypes of the tensors that travel, as `facts_of` gives them.
        transition: the kind of A where states are scanned, else "".
        backward: whether it runs from right to left.
        schedule: of the scan, else "".
    """

    what: str
    call: str = ""
    travels: str = ""
    transition: str = ""
    backward: bool = False
    schedule: str = ""

    def text(self) -> str:
        """The signature as errors show it; equal exactly where signatures are."""
        how = ["backward" if self.backward else "forward", self.schedule]
        how += [f"transition {self.transition}"] if self.transition else []
        of = f" of {self.call}" if self.call else ""
        return f"{self.what}{of} ({', '.join(x for x in how if x)}) {self.travels}"

    def word(self, abandoned: int = 0) -> int:
        """31 bits, not zero, that kernels compare. `abandoned`: calls that this rank gave up before (see
        `SequenceParallel.abandoned`)."""
        return _word(self, abandoned)


@functools.lru_cache(maxsize=_KEPT)
def _word(signature: Signature, abandoned: int) -> int:
    text = signature.text() + raised(abandoned)
    word = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") & 0x7FFFFFFF or 1
    if len(_texts) >= _KEPT:
        _texts.clear()
    _texts[word] = text
    return word


def poison(reporter: int, about: int) -> int:
    """The stamp by which rank `reporter` says that rank `about` disagrees with it."""
    return POISON | MISMATCH_BIT | reporter << RANK_BITS | about


def raised(abandoned: int) -> str:
    """How texts say that a rank gave up calls."""
    return f", after {abandoned} call{'s' * (abandoned > 1)} that raised on this rank" if abandoned else ""


def described(word: int) -> str:
    """The text that was hashed to `word` on this rank, else the number."""
    return _texts.get(word, f"another exchange (signature {word:#x})")


def digest(text: str) -> int:
    """63 bits of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def facts_of(tensors: Iterable[torch.Tensor | None]) -> str:
    """Shapes and dtypes as text."""
    return ", ".join("-" if t is None else f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)
