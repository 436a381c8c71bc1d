"""flexsp's own errors, and the checks of arguments that all folders share.

Bad arguments are plain ``ValueError`` "name: expected ..., got ...", raised before anything is launched.
"""

from __future__ import annotations

import math
import operator
import os
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

__all__ = [
    "BetweenRanks", "CompileError", "Fault", "FlexspError", "HeapTooSmall", "NotAvailable", "NotExact", "PeerMismatch",
    "PeerTimeout", "UncoveredWarning", "asks_for_kernels", "check_dense", "check_flag", "check_flags", "check_integer",
    "check_number", "checks_wanted", "fail", "kernels_on_cpu",
]  # fmt: skip


class FlexspError(Exception):
    """Base of all errors below."""


@dataclass(frozen=True)
class Fault:
    """Where the trouble of a group of ranks began, as its ranks agreed when they met it.

    Attributes:
        kind: "silent" (the rank did not answer), "closed" (its connection broke), "mismatch" (it made another call than
            the others), or "circle" (ranks wait for each other).
        rank: of the group, that did not answer or made another call; of two ranks between which nobody can decide, the
            later one.
        number: of the call over ranks in which it was noticed, counted on every rank from 1.
        call: what the ranks exchanged there, with the op that needed it.
        hop: ranks (from, to) of the data in question; None where all ranks send to all.
        text: all this as errors say it.
    """

    kind: str
    rank: int
    number: int
    call: str
    hop: tuple[int, int] | None
    text: str

    def __str__(self) -> str:
        return self.text


class BetweenRanks(FlexspError):
    """Base of the two errors that ranks raise about each other.

    Attributes:
        call: the exchange that this rank was in, with its number.
        fault: where the trouble began: the same on all ranks that raise; None where they could not find out.
        dumped: file with the last exchanges of this rank; empty unless FLEXSP_DUMP names a folder.
        number, word: of the exchange, of which kernels know the number or the hash; 0 where they do not.
        heard: whether another rank met it and told this one.
    """

    call = ""
    fault: Fault | None = None
    dumped = ""
    number = 0
    word = 0
    heard = False
    explained = False

    def __str__(self) -> str:
        lines = [super().__str__()]
        lines += [f"  this rank: {self.call}"] if self.call else []
        lines += [f"  first fault: {self.fault}"] if self.fault is not None else []
        lines += [f"  last exchanges: {self.dumped}"] if self.dumped else []
        return "\n".join(lines)


class PeerTimeout(BetweenRanks, RuntimeError):
    """A neighbour did not deliver in time, or its connection broke.

    Attributes (None where a transport does not know): ``rank`` and ``peer`` are ranks in the sequence-parallel group,
    ``direction`` is what the rank was doing ("recv", "send", ...), ``tile`` the tile of the state, ``expected`` and
    ``seen`` the epochs of its flag, ``detail`` what the transport said. ``peer`` is whom this rank waited for, or whom
    another rank named; ``fault`` says where the trouble began.
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
        return (type(self), fields, vars(self))


class PeerMismatch(BetweenRanks, ValueError):
    """Two ranks disagree on what to do next: a different call, call order, shape or dtype.

    ``ours`` is what ``rank`` was about to do, ``theirs`` what ``peer`` was doing. Of more than two ranks ``fault``
    names the one that the others disagree with.
    """

    def __init__(self, rank: int, peer: int | None, ours: object = None, theirs: object = None) -> None:
        self.rank, self.peer, self.ours, self.theirs = rank, peer, ours, theirs
        other = "a peer" if peer is None else f"rank {peer}"
        super().__init__(
            f"ranks disagree: rank {rank} called {ours}, {other} called {theirs}; "
            "every rank must make the same calls in the same order with matching shapes and dtypes"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.rank, self.peer, self.ours, self.theirs), vars(self))


class HeapTooSmall(FlexspError, ValueError):
    """The symmetric heap cannot hold a call's state tiles; ``needed`` and ``had`` are bytes, ``why`` is why it has not
    grown, where it would else."""

    def __init__(self, needed: int, had: int, why: str = "") -> None:
        self.needed, self.had, self.why = needed, had, why
        because = f" and did not grow, since {why}" if why else ""
        super().__init__(
            f"symmetric heap too small: needed {needed} bytes, had {had}{because}; set heap_mib of "
            f"init_sequence_parallel or FLEXSP_HEAP_MIB to {-(-needed >> 20)} or more, on all ranks"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.needed, self.had, self.why))


class CompileError(FlexspError, ValueError):
    """One of the three functions cannot be compiled; the message names the function, the line and the remedy."""

    def __init__(self, role: str, name: str, text: str) -> None:
        self.role, self.name, self.text = role, name, text
        super().__init__(f"{role} {name!r}: {text}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.role, self.name, self.text)


class NotAvailable(FlexspError, RuntimeError):
    """A transport or feature that this machine does not have; the message says what is missing."""


class UncoveredWarning(UserWarning):
    """No run of the GPU tests has covered this Triton release on this GPU.

    `flexsp.runtime.tested_versions` lists the runs.
    """


class NotExact(FlexspError, RuntimeError):
    """What `flexsp.verify` raises: cut over ranks a module gives something else. ``report`` is its Verification."""

    def __init__(self, report: object) -> None:
        self.report = report
        super().__init__(str(report))

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.report,))


def fail(name: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{name}: expected {expected}, got {got}")


def check_dense(name: str, x: Any, what: str = "a tensor") -> None:
    """ValueError unless x is a dense tensor with values. While torch.compile traces, fake tensors pass."""
    if not isinstance(x, torch.Tensor):
        fail(name, what, type(x).__name__)
    if x.is_nested or x.layout != torch.strided:
        fail(name, f"{what} that is dense", "a nested one" if x.is_nested else f"layout {x.layout}")
    if x.is_meta and type(x) in (torch.Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling():
        fail(name, f"{what} with values", "one on the meta device")


def check_flag(name: str, x: Any) -> None:
    if not isinstance(x, bool):
        fail(name, "True or False", repr(x))


def check_flags(**flags: Any) -> None:
    """`check_flag` of several arguments, by their names."""
    for name, x in flags.items():
        check_flag(name, x)


def check_integer(name: str, x: Any, least: int = 0, most: int | None = None) -> int:
    """``x`` as an integer of ``least``..``most``. Booleans and floats are refused."""
    expected = f"an integer >= {least}" if most is None else f"{least}..{most}, an integer"
    try:
        value = operator.index(x)
    except TypeError:
        fail(name, expected, repr(x))
    if isinstance(x, (bool, torch.Tensor)) or value < least or (most is not None and value > most):
        fail(name, expected, repr(x))
    return value


def check_number(name: str, x: Any, above: float | None = None) -> float:
    """``x`` as a finite float, larger than ``above`` if that is given."""
    expected = "a finite number" if above is None else f"a finite number > {above:g}"
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        fail(name, expected, f"{type(x).__name__} {x!r}")
    try:
        value = float(x)
    except OverflowError:
        fail(name, expected, f"an int of {int(x).bit_length()} bits")
    finite = -math.inf < value < math.inf  # math.isfinite takes no symbols of torch.compile
    if not finite or (above is not None and not value > above):
        fail(name, expected, repr(x))
    return value


_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _environment_flag(name: str) -> bool:
    """Whether an environment variable is on. One that is empty or not set is off."""
    given = os.environ.get(name, "")
    word = given.strip().lower()
    if word and word not in _WORDS:
        fail(name, "1, true, yes or on, 0, false, no or off, or nothing", repr(given))
    return bool(word) and _WORDS[word]


def checks_wanted() -> bool:
    """Whether FLEXSP_CHECK is on.

    Raises:
        ValueError: its value is no word for on or off.
    """
    return _environment_flag("FLEXSP_CHECK")


def kernels_on_cpu() -> bool:
    """Whether FLEXSP_BACKEND asks for Triton's kernels on CPU tensors too.

    Raises:
        ValueError: it is neither "triton" nor empty.
    """
    given = os.environ.get("FLEXSP_BACKEND", "")
    word = given.strip().lower()
    if word not in ("", "triton"):
        fail("FLEXSP_BACKEND", "triton or nothing (the kind of the tensors decides then)", repr(given))
    return word == "triton"


def asks_for_kernels(on_gpu: bool, dtype: torch.dtype) -> bool:
    """Whether kernels run tensors of such a kind: on GPUs, and on CPU where FLEXSP_BACKEND asks for the interpreter.
    They have no float64."""
    return dtype != torch.float64 and (on_gpu or kernels_on_cpu())
