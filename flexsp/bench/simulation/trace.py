"""What a rank does in an exchange over torch.distributed: the schedules' own code, run on tensors without numbers.

`flexsp.scan.schedules` yields its messages. On tensors of the device "meta" its operators have shapes, by which their
time can be told, and nothing is computed or sent.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexsp.comm.group import SequenceParallel
from flexsp.comm.process_group import Call
from flexsp.comm.ranks import GROUPS
from flexsp.comm.signature import Signature
from flexsp.comm.steps import Gather
from flexsp.scan import schedules
from flexsp.scan.cost import TILE
from flexsp.scan.transitions import KINDS, Transition

__all__ = ["Collective", "Deed", "Posts", "State", "Work", "alike", "driven", "trace_of"]


@dataclass(frozen=True)
class State:
    """A rank's state [B, H, K, V] in float32, the kind of transition, and the segments that a rank folds."""

    B: int
    H: int
    K: int
    V: int
    kind: str = "scalar"
    segments: int = 1

    @property
    def nbytes(self) -> int:
        return 4 * self.B * self.H * self.K * self.V

    @property
    def tiles(self) -> int:
        """Of the chain's kernel, where they are whole."""
        return max(1, -(-self.nbytes // TILE))

    def on_meta(self) -> tuple[torch.Tensor, Transition]:
        """F and A of a rank, without numbers."""
        heads, axes = (self.B, self.H), KINDS[self.kind].axes
        F = torch.empty(*heads, self.K, self.V, device="meta")
        if axes is None:
            return F, Transition(self.kind)
        shape = (*heads, self.K, self.V) if axes == "KV" else (*heads, *[self.K] * len(axes))
        return F, Transition(self.kind, torch.empty(shape, device="meta"))


class Work(NamedTuple):
    """Kernels one after the other, and the bytes that they read and write."""

    kernels: int
    nbytes: int


class Posts(NamedTuple):
    """Messages that start together, each (whether it is sent, the other rank, bytes), and then a wait.

    ``until``: which posts of this exchange, from 0, must be through before anything else.
    """

    messages: tuple[tuple[bool, int, int], ...]
    until: tuple[int, ...]


class Collective(NamedTuple):
    """An all-gather of this number of bytes from every rank."""

    nbytes: int


Deed = Work | Posts | Collective


@functools.lru_cache(maxsize=1024)
def _is_kernel(func: Any) -> bool:
    """Whether an operator computes, and does not only look at a tensor in another way or set memory aside."""
    returned = func._schema.returns
    alias = returned[0].alias_info if returned else None
    view = alias is not None and not alias.is_write
    return not view and not func.name().startswith(("aten::empty", "aten::new_empty"))


class _Meter(TorchDispatchMode):
    """Counts the operators that are called inside: each is a kernel, which reads and writes its tensors."""

    results: ClassVar[dict[Any, tuple[Any, ...]]] = {}
    """Size, strides and dtype by the operator and what it is given: working them out again takes ten times as long."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_kernel(func):
            return func(*args, **(kwargs or {}))
        key = None if kwargs else (func, _looks(args))
        like = self.results.get(key)
        if like is not None:
            size, strides, dtype = like
            out = torch.empty_strided(size, strides, dtype=dtype, device="meta")
        else:
            out = func(*args, **(kwargs or {}))
            if key is not None and isinstance(out, torch.Tensor) and func._schema.returns[0].alias_info is None:
                self.results[key] = tuple(out.shape), out.stride(), out.dtype
        self.kernels += 1
        self.nbytes += _bytes(out) + sum(map(_bytes, args))
        return out


def _looks(x: Any) -> Any:
    """What an operator's result looks like depends on this of an argument."""
    if isinstance(x, torch.Tensor):
        return tuple(x.shape), x.stride(), x.dtype
    return tuple(map(_looks, x)) if isinstance(x, (list, tuple)) else x


def _bytes(x: Any) -> int:
    if isinstance(x, torch.Tensor):  # of one that is expanded, what it has in memory
        return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
    return sum(map(_bytes, x)) if isinstance(x, (list, tuple)) else 0


def _group_of(rank: int, world: int, per_host: int, schedule: str) -> SequenceParallel:
    """A group as a rank sees it, of which nothing is open."""
    hosts = [min(per_host, world - first) for first in range(0, world, per_host)]
    sp = SequenceParallel(rank=rank, world_size=world, schedule=schedule, device="meta", hosts=hosts)
    del GROUPS[sp.id]
    sp.records = SimpleNamespace(tensor=torch.empty(6, dtype=torch.int64, device="meta"))
    return sp


def trace_of(
    state: State, schedule: str, world: int, per_host: int, rank: int, reverse: bool, as_measured: bool = False
) -> tuple[Deed, ...]:
    """What `steps_of` has this rank do, one after the other; of ranks that are `alike` it is asked for one alone.

    as_measured: as when the files of benchmarks/results were made. Operators of PyTorch, not one kernel, then applied
    what an all-gather had brought.
    """
    like = alike(schedule, world, per_host, rank)
    deeds = driven(state, schedule, world, per_host, like, reverse, as_measured)
    if like == rank:
        return deeds
    moved: list[Deed] = []
    for deed in deeds:
        if isinstance(deed, Posts):
            messages = tuple((sends, peer + rank - like, nbytes) for sends, peer, nbytes in deed.messages)
            deed = Posts(messages, deed.until)
        moved.append(deed)
    return tuple(moved)


def alike(schedule: str, world: int, per_host: int, rank: int) -> int:
    """A rank that does the same with ranks that stand to it as those of `rank` do.

    Where hosts are alike, schedules know of a rank's host only whether it is at least a power of two hosts from the
    first one and from the last, and otherwise of its place in the host. tests/bench/test_simulate.py asks all ranks.
    """
    unit = per_host if schedule == "hierarchical" else 1
    if schedule == "all_gather" or world % unit:
        return rank
    at, place = divmod(rank, unit)
    last = world // unit - 1
    before, behind = at.bit_length(), (last - at).bit_length()
    return max((1 << before) >> 1, last - (1 << behind) + 1) * unit + place


@contextmanager
def _applied_by_operators(really: bool) -> Iterator[None]:
    now = schedules.applied
    try:
        if really:
            vars(schedules)["applied"] = Transition.apply_packed
        yield
    finally:
        vars(schedules)["applied"] = now


@functools.lru_cache(maxsize=8192)
def driven(
    state: State, schedule: str, world: int, per_host: int, rank: int, reverse: bool, as_measured: bool = False
) -> tuple[Deed, ...]:
    """`trace_of`, from the generator of this very rank."""
    sp, (F, transition) = _group_of(rank, world, per_host, schedule), state.on_meta()
    transition = transition.adjoint() if reverse else transition
    signature = Signature("state exchange", transition=transition.kind, backward=reverse, schedule=schedule)
    call = Call(sp, signature, F, sp.neighbours(reverse)[1])
    call.stamped = True  # as on GPUs, whose kernels for stamps count
    deeds: list[Deed] = []
    started: dict[int, int] = {}
    kept: list[Any] = []  # so that no id of a message is used twice
    answer: torch.Tensor | None = None
    with torch.no_grad(), _applied_by_operators(as_measured), _Meter() as meter:
        steps = schedules.steps_of(F, transition, sp, reverse, call)
        while True:
            meter.kernels = meter.nbytes = 0
            try:
                step = steps.send(answer)
            except StopIteration:
                step = None
            answer = None
            if meter.kernels:
                deeds.append(Work(meter.kernels, meter.nbytes))
            if step is None:
                return tuple(deeds)
            if isinstance(step, Gather):
                deeds.append(Collective(_bytes(step.mine)))
                answer = torch.empty(world, step.mine.numel(), dtype=step.mine.dtype, device="meta")
                continue
            if step.messages:
                started |= dict.fromkeys(map(id, step.messages), len(kept))
                kept.append(step.messages)
            messages = tuple((message.op == "send", message.peer, _bytes(message.buffer)) for message in step.messages)
            deeds.append(Posts(messages, tuple(dict.fromkeys(started[id(message)] for message in step.until))))
