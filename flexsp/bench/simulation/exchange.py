"""Exchanges of states over simulated ranks: the messages of the schedules' own code, and how long each takes.

`flexsp.scan.schedules` yields the messages of what torch.distributed sends, here on tensors of the device "meta", of
which operators have a shape to be timed by and no numbers. `flexsp.scan.tile_order` yields what a block of the chain's
kernel does.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexsp.bench.simulation.network import Cause, Clock, Fabric, Flag, Process, path_of
from flexsp.comm.group import SequenceParallel
from flexsp.comm.process_group import Call, Message
from flexsp.comm.ranks import GROUPS
from flexsp.comm.signature import Signature
from flexsp.comm.steps import Gather
from flexsp.scan.cost import TILE
from flexsp.scan.schedules import steps_of
from flexsp.scan.tile_order import MAX_BLOCKS, PACE, Act, block_order
from flexsp.scan.transitions import KINDS, Transition

__all__ = ["CLOCK_MHZ", "Rates", "Run", "Simulation", "State", "simulate"]

CLOCK_MHZ = 1980.0
"""Of a multiprocessor of the H200s that were measured, by which the chain's first rank counts its pace."""
FEW = 64
"""More ranks than these are not all driven through an all-gather, since each of R folds up to R states in Python."""

Steps = Generator[tuple[float, str] | Flag, None, None]
KERNELS = "kernels"


@dataclass(frozen=True)
class Rates:
    """What the parts of an exchange take on one kind of GPU, in microseconds where nothing else is said.

    Of the chain's kernel:
        launch: the kernel, from its start to its first block's, and from its last block's end.
        hop: from a push to where the neighbour's block has the tile, without the bytes' time on links; so long the
            block that pushes is busy too.
        credit: of a block, to return one.
        fold, write: of a block, a segment of a tile.
        dense: of a block, the product of a dense transition and a tile.

    Of torch.distributed on GPUs:
        start: what stands around an exchange: folding, comparing and copying.
        message: of what a rank starts at once.
        kernel: of an operator of PyTorch, beside its bytes.
        message_gb_s: that a message reaches where links have more.
        gather, gather_hop, gather_gb_s: an all-gather, a rank in it, and the rate of its bytes.
    """

    launch: float = 0.0
    hop: float = 0.0
    credit: float = 0.0
    fold: float = 0.0
    write: float = 0.0
    dense: float = 0.0
    start: float = 0.0
    message: float = 0.0
    kernel: float = 0.0
    message_gb_s: float = 1e6
    gather: float = 0.0
    gather_hop: float = 0.0
    gather_gb_s: float = 1e6
    memory_gb_s: float = 1e6


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
        return max(1, -(-self.nbytes // TILE))

    def on_meta(self) -> tuple[torch.Tensor, Transition]:
        """F and A of a rank, without numbers."""
        heads, axes = (self.B, self.H), KINDS[self.kind].axes
        F = torch.empty(*heads, self.K, self.V, device="meta")
        if axes is None:
            return F, Transition(self.kind)
        shape = (*heads, self.K, self.V) if axes == "KV" else (*heads, *[self.K] * len(axes))
        return F, Transition(self.kind, torch.empty(shape, device="meta"))


class _Meter(TorchDispatchMode):
    """Microseconds of the operators that are called inside: each is a kernel, which reads and writes its tensors."""

    def __init__(self, rates: Rates) -> None:
        super().__init__()
        self.rates = rates
        self.us = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        returned = func._schema.returns
        alias = returned[0].alias_info if returned else None
        if (alias is None or alias.is_write) and not func.name().startswith(("aten::empty", "aten::new_empty")):
            moved = _bytes(out) + sum(map(_bytes, args))
            self.us += self.rates.kernel + moved / (self.rates.memory_gb_s * 1e3)
        return out


def _bytes(x: Any) -> int:
    if isinstance(x, torch.Tensor):
        return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
    return sum(map(_bytes, x)) if isinstance(x, (list, tuple)) else 0


@contextmanager
def _of_rank(rank: int, world: int, schedule: str) -> Iterator[SequenceParallel]:
    """A group as a rank sees it, of which nothing is open."""
    sp = SequenceParallel(rank=rank, world_size=world, schedule=schedule, device="meta")
    del GROUPS[sp.id]
    yield sp


class _Posted:
    """What a rank started at once, a single kernel on GPUs. It is through when all its messages are."""

    __slots__ = ("cause", "left", "through")

    def __init__(self, messages: int) -> None:
        self.left, self.through = messages, Flag()


class Simulation:
    """Exchanges of one schedule over the ranks of a fabric.

    Args:
        schedule: of `flexsp.scan.schedules`; "chain" is its kernel.
        blocks: that the chain's kernel has at most.
        pace: microseconds between tiles of the chain's first rank.
    """

    def __init__(
        self, fabric: Fabric, rates: Rates, state: State, schedule: str, *, blocks: int = MAX_BLOCKS,
        pace: float = PACE / CLOCK_MHZ,
    ) -> None:  # fmt: skip
        self.fabric, self.rates, self.state, self.schedule = fabric, rates, state, schedule
        self.blocks, self.pace = min(blocks, MAX_BLOCKS), pace
        self.clock = Clock()
        self.world = fabric.ranks
        self.sent = self.received = 0
        few = schedule == "all_gather" and self.world > FEW
        self.driven: Sequence[int] = (
            sorted({0, 1, self.world // 2, self.world - 2, self.world - 1}) if few else range(self.world)
        )
        self._tiles: dict[tuple[int, int, int], Flag] = {}  # (rank, epoch, tile), that came or is waited for
        self._credits: dict[tuple[int, int, int], Flag] = {}
        self._counts: dict[tuple[int, int, str], int] = {}
        self._meeting: dict[tuple[int, int, int], tuple[_Posted, float]] = {}
        self._gathers: list[tuple[int, list[Process], Flag]] = []
        self._joined: dict[int, int] = {}
        self._last: dict[int, Flag] = {}
        self.F, self.transition = state.on_meta()

    def exchange(self, rank: int, process: Process, epoch: int, reverse: bool, calls: int) -> Steps:
        """What a rank does in its `epoch`-th of `calls` exchanges in this direction, the first of which is 1."""
        if self.schedule == "chain":
            return self._chain(rank, process, epoch, reverse, calls)
        return self._over_process_group(rank, process, reverse)

    # The chain's kernel

    def _chain(self, rank: int, process: Process, epoch: int, reverse: bool, calls: int) -> Steps:
        yield self.rates.launch, KERNELS
        blocks = min(self.blocks, self.state.tiles)
        ended, left = Flag(), [blocks]
        for block in range(blocks):
            own = Process(process.cause)
            self.clock.start(own, self._block(own, rank, block, blocks, epoch, reverse, calls, left, ended))
        yield ended

    def _block(
        self, process: Process, rank: int, block: int, blocks: int, epoch: int, reverse: bool, calls: int,
        left: list[int], ended: Flag,
    ) -> Steps:  # fmt: skip
        rates, state, clock, began = self.rates, self.state, self.clock, self.clock.now
        step = -1 if reverse else 1
        source, target = rank - step, rank + step
        has_in, has_out = 0 <= source < self.world, 0 <= target < self.world
        dense, tiles = state.kind == "dense", state.tiles
        segments = 1 if dense else state.segments
        size = min(TILE, state.nbytes)
        away = self.fabric.route(rank, target) if has_out else None
        back = self.fabric.route(rank, source) if has_in else None
        mine, way = rank if not reverse else rank + self.world, self.world if reverse else 0
        us = 0.0
        for act, tile in block_order(block, blocks, tiles, has_in=has_in, has_out=has_out, dense=dense):
            if act is Act.FOLD:
                us += segments * rates.fold
            elif act is Act.WRITE:
                us += segments * rates.write
            elif act is Act.APPLY:
                us += rates.dense if dense else 0.0
            elif act is Act.WAIT_CREDIT:
                if epoch > 2:
                    if us:
                        yield us, KERNELS
                        us = 0.0
                    yield self._flag(self._credits, (mine, epoch - 2, tile))
                    del self._credits[mine, epoch - 2, tile]
            elif act is Act.WAIT_TILE:
                if us:
                    yield us, KERNELS
                    us = 0.0
                yield self._flag(self._tiles, (mine, epoch, tile))
                del self._tiles[mine, epoch, tile]
                self.received += 1
            elif act is Act.PACE:
                if us:
                    yield us, KERNELS
                    us = 0.0
                yield began + tile * self.pace - clock.now, "pace of the first rank"
            elif act is Act.PUSH:
                if us:
                    yield us, KERNELS
                    us = 0.0
                assert away is not None
                self.sent += 1
                flag = self._flag(self._tiles, (target + way, epoch, tile))
                away.send(clock, size, process.cause, _raising(clock, flag), rates.hop)
                us += rates.hop
            elif act is Act.CREDIT:
                us += rates.credit
                if epoch + 2 <= calls:
                    yield us, KERNELS
                    us = 0.0
                    assert back is not None
                    flag = self._flag(self._credits, (source + way, epoch, tile))
                    back.send(clock, 0, process.cause, _raising(clock, flag), rates.hop)
        if us:
            yield us, KERNELS
        left[0] -= 1
        if not left[0]:
            clock.raise_flag(ended, process.cause)

    @staticmethod
    def _flag(flags: dict[tuple[int, int, int], Flag], key: tuple[int, int, int]) -> Flag:
        found = flags.get(key)
        if found is None:
            found = flags[key] = Flag()
        return found

    # torch.distributed

    def _over_process_group(self, rank: int, process: Process, reverse: bool) -> Steps:
        """As `_over_process_group` of flexsp/scan/propagate.py: folds, exchanges, applies."""
        rates, state = self.rates, self.state
        swept = state.segments * state.nbytes / (rates.memory_gb_s * 1e3)
        yield rates.start + swept, KERNELS
        yield from self._driven(rank, process, reverse)
        yield 2 * swept, KERNELS

    def _driven(self, rank: int, process: Process, reverse: bool) -> Steps:
        """The generator of the schedule on this rank."""
        started: dict[int, _Posted] = {}
        kept: list[Any] = []  # so that no id of a message is used twice
        with _of_rank(rank, self.world, self.schedule) as sp:
            transition = self.transition.adjoint() if reverse else self.transition
            signature = Signature("state exchange", transition=transition.kind, schedule=self.schedule)
            call = Call(sp, signature, self.F, sp.neighbours(reverse)[1])
            answer: torch.Tensor | None = None
            steps: Any = None
            while True:
                with _Meter(self.rates) as meter, torch.no_grad():
                    if steps is None:
                        steps = steps_of(self.F, transition, sp, reverse, call)
                    try:
                        step = steps.send(answer)
                    except StopIteration:
                        step = None
                yield meter.us, KERNELS
                answer = None
                if step is None:
                    return
                if isinstance(step, Gather):
                    yield self._gather(rank, process, step.mine)
                    answer = torch.empty(self.world, step.mine.numel(), dtype=step.mine.dtype, device="meta")
                    continue
                if step.messages:
                    posted = self._post(rank, process, step.messages)
                    started |= {id(message): posted for message in step.messages}
                    kept.append(step)
                for message in step.until:
                    yield started[id(message)].through

    def _post(self, rank: int, process: Process, messages: Sequence[Message]) -> _Posted:
        """Starts them behind those that this rank started before, as NCCL does on one communicator."""
        posted, before = _Posted(len(messages)), self._last.get(rank)
        self._last[rank] = posted.through
        starter = Process(process.cause)

        def start() -> Steps:
            if before is not None:
                yield before
            yield self.rates.message, KERNELS
            for message in messages:
                self._meet(rank, message, posted, starter.cause)

        self.clock.start(starter, start())
        return posted

    def _meet(self, rank: int, message: Message, posted: _Posted, cause: Cause | None) -> None:
        """The i-th send of one rank to another starts once the other has come to its i-th receive."""
        sends = message.op == "send"
        source, target = (rank, message.peer) if sends else (message.peer, rank)
        count = self._counts.get((source, target, message.op), 0)
        self._counts[source, target, message.op] = count + 1
        other = self._meeting.pop((source, target, count), None)
        nbytes = message.buffer.numel() * message.buffer.element_size()
        self.sent += sends
        if other is None:
            self._meeting[source, target, count] = posted, nbytes
            return
        if other[1] != nbytes:
            raise ValueError(f"a message of {nbytes} bytes met one of {other[1]}, from rank {source} to {target}")

        def arrived(why: Cause | None) -> None:
            self.received += 1
            for one in (posted, other[0]):
                one.left -= 1
                if one.left == 0:
                    self.clock.raise_flag(one.through, why)

        route = self.fabric.route(source, target)
        route.send(self.clock, nbytes, cause, arrived, most=self.rates.message_gb_s * 1e3)

    def _gather(self, rank: int, process: Process, mine: torch.Tensor) -> Flag:
        """The all-gather of torch.distributed, which is not ours: a ring, whose bytes go over all cards of a host."""
        at = self._joined.get(rank, 0)
        self._joined[rank] = at + 1
        if at == len(self._gathers):
            self._gathers.append((0, [], Flag()))
        count, there, flag = self._gathers[at]
        self._gathers[at] = count + 1, there, flag
        if count + 1 == len(self.driven):
            self.clock.at(self.clock.now, lambda cause: self._ring(flag, cause, mine), process.cause)
        return flag

    def _ring(self, flag: Flag, cause: Cause | None, mine: torch.Tensor) -> None:
        rates, fabric, hosts = self.rates, self.fabric, -(-self.world // self.fabric.per_host)
        nbytes = mine.numel() * mine.element_size()
        card = fabric.network[0][0].rate * fabric.cards * 1e-3
        slow = hosts > 1 and card < rates.gather_gb_s
        kind = "network card" if slow else "NVLink"
        us = (self.world - 1) * nbytes / ((card if slow else rates.gather_gb_s) * 1e3)
        extra = (hosts - 1) * fabric.card_us
        for what, part in (
            (KERNELS, rates.gather), ("NVLink, latency", (self.world - 1) * rates.gather_hop),
            ("network card, latency", extra), (f"{kind}, bytes", us),
        ):  # fmt: skip
            cause = (cause, what, part)
        total = rates.gather + (self.world - 1) * rates.gather_hop + extra + us
        self.clock.at(self.clock.now + total, lambda why: self.clock.raise_flag(flag, why), cause)


def _raising(clock: Clock, flag: Flag) -> Callable[[Cause | None], None]:
    return lambda cause: clock.raise_flag(flag, cause)


@dataclass(frozen=True)
class Run:
    """What came out: microseconds of each rank that was driven, where those of the slowest went, and how long the
    busiest link of each kind had a message on it."""

    us: tuple[float, ...]
    path: dict[str, float]
    busy: dict[str, float]
    messages: int

    @property
    def slowest(self) -> float:
        return max(self.us)


Phase = tuple[float, bool | None]
"""Microseconds of computing, then an exchange: False from left to right, True from right to left, None for none."""


def simulate(simulation: Simulation, phases: Sequence[Phase]) -> Run:
    """All ranks start together and go through the phases.

    Raises:
        ValueError: a message was not received, or a rank waits for something that never comes.
    """
    clock = simulation.clock
    calls = {way: sum(reverse is way for _, reverse in phases) for way in (False, True)}
    ends: dict[int, tuple[float, Cause | None]] = {}

    def of_rank(rank: int, process: Process) -> Steps:
        done = {False: 0, True: 0}
        for us, reverse in phases:
            yield us, "computing"
            if reverse is not None:
                done[reverse] += 1
                yield from simulation.exchange(rank, process, done[reverse], reverse, calls[reverse])
        ends[rank] = clock.now, process.cause

    for rank in simulation.driven:
        process = Process()
        clock.start(process, of_rank(rank, process))
    clock.run()
    if len(ends) < len(simulation.driven):
        waiting = sorted(set(simulation.driven) - set(ends))
        raise ValueError(f"simulation: expected all ranks to end, ranks {waiting[:8]} wait for what never comes")
    if simulation.sent != simulation.received:
        raise ValueError(f"simulation: expected {simulation.sent} messages received, got {simulation.received}")
    us = tuple(ends[rank][0] for rank in simulation.driven)
    _, cause = max(ends.values(), key=lambda end: end[0])
    return Run(us, path_of(cause), simulation.fabric.busiest(), simulation.sent)
