"""Exchanges of states over simulated ranks: what each schedule's own code does, and how long that takes.

`flexsp.bench.simulation.trace` has the messages of what torch.distributed sends; `flexsp.scan.tile_order` yields what a
block of the chain's kernel does.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from flexsp.bench.simulation.network import Cause, Clock, Fabric, Flag, Process, path_of
from flexsp.bench.simulation.trace import Collective, Posts, State, Work, trace_of
from flexsp.scan.cost import TILE
from flexsp.scan.tile_order import MAX_BLOCKS, PACE, Act, block_order

__all__ = ["CLOCK_MHZ", "COMPUTING", "Ended", "Phase", "Rates", "Run", "Simulation", "simulate"]

CLOCK_MHZ = 1980.0
"""Of a multiprocessor of the H200s that were measured, by which the chain's first rank counts its pace."""
FEW = 16
"""More ranks than these are not all driven through an all-gather, where each of R folds up to R states."""

Steps = Generator[tuple[float, str] | Flag, None, None]
KERNELS, COMPUTING = "kernels", "computing"


@dataclass(frozen=True)
class Rates:
    """What the parts of an exchange take on one kind of GPU, in microseconds where nothing else is said.

    Of the chain's kernel:
        launch: the kernel, from its start to its first block's, and from its last block's end.
        hop: from a push to where the neighbour's block has the tile, without the bytes' time on links.
        credit: of a block, to return one.
        fold, write: of a block, a segment of a tile.
        dense: of a block, the product of a dense transition and a tile.

    Of torch.distributed on GPUs:
        start: what stands around an exchange: folding, comparing and copying.
        message: of what a rank starts at once.
        kernel: of an operator of PyTorch, beside its bytes.
        message_gb_s: that a message reaches where links have more.
        gather, gather_gb_s: an all-gather, and the rate of its bytes.
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
    gather_gb_s: float = 1e6
    memory_gb_s: float = 1e6


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
        as_measured: as `trace_of` takes it.
    """

    def __init__(
        self, fabric: Fabric, rates: Rates, state: State, schedule: str, *, blocks: int = MAX_BLOCKS,
        pace: float = PACE / CLOCK_MHZ, as_measured: bool = False,
    ) -> None:  # fmt: skip
        self.fabric, self.rates, self.state, self.schedule = fabric, rates, state, schedule
        self.blocks, self.pace, self.as_measured = min(blocks, MAX_BLOCKS), pace, as_measured
        self.clock = Clock()
        self.world = fabric.ranks
        self.sent = self.received = 0
        few = schedule == "all_gather" and self.world > FEW
        self.driven: Sequence[int] = (
            (0, self.world - 1) if few else range(self.world)  # of which one folds all others in either direction
        )
        self._tiles: dict[tuple[int, int, int], Flag] = {}  # (rank, epoch, tile), that came or is waited for
        self._credits: dict[tuple[int, int, int], Flag] = {}
        self._counts: dict[tuple[int, int, bool], int] = {}
        self._meeting: dict[tuple[int, int, int], tuple[_Posted, int]] = {}
        self._gathers: list[tuple[int, list[Process], Flag]] = []
        self._joined: dict[int, int] = {}
        self._last: dict[int, Flag] = {}

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
        segments = 0 if dense else state.segments
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
        posts: list[_Posted] = []
        at = state, self.schedule, self.world, self.fabric.per_host, rank, reverse
        for deed in trace_of(*at, self.as_measured):
            if isinstance(deed, Work):
                yield deed.kernels * rates.kernel + deed.nbytes / (rates.memory_gb_s * 1e3), KERNELS
            elif isinstance(deed, Collective):
                yield self._gather(rank, process, deed.nbytes)
            else:
                if deed.messages:
                    posts.append(self._post(rank, process, deed))
                for i in deed.until:
                    yield posts[i].through
        yield 2 * swept, KERNELS

    def _post(self, rank: int, process: Process, posts: Posts) -> _Posted:
        """Starts them behind those that this rank started before, as NCCL does on one communicator."""
        posted, before = _Posted(len(posts.messages)), self._last.get(rank)
        self._last[rank] = posted.through
        starter = Process(process.cause)

        def start() -> Steps:
            if before is not None:
                yield before
            yield self.rates.message, KERNELS
            for sends, peer, nbytes in posts.messages:
                self._meet(rank, sends, peer, nbytes, posted, starter.cause)

        self.clock.start(starter, start())
        return posted

    def _meet(self, rank: int, sends: bool, peer: int, nbytes: int, posted: _Posted, cause: Cause | None) -> None:
        """The i-th send of one rank to another starts once the other has come to its i-th receive."""
        source, target = (rank, peer) if sends else (peer, rank)
        count = self._counts.get((source, target, sends), 0)
        self._counts[source, target, sends] = count + 1
        other = self._meeting.pop((source, target, count), None)
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

    def _gather(self, rank: int, process: Process, nbytes: int) -> Flag:
        """The all-gather of torch.distributed, which is not ours: a ring, whose bytes go over all cards of a host."""
        at = self._joined.get(rank, 0)
        self._joined[rank] = at + 1
        if at == len(self._gathers):
            self._gathers.append((0, [], Flag()))
        count, there, flag = self._gathers[at]
        self._gathers[at] = count + 1, there, flag
        if count + 1 == len(self.driven):
            self.clock.at(self.clock.now, lambda cause: self._ring(flag, cause, nbytes), process.cause)
        return flag

    def _ring(self, flag: Flag, cause: Cause | None, nbytes: int) -> None:
        rates, fabric, hosts = self.rates, self.fabric, -(-self.world // self.fabric.per_host)
        card = fabric.network[0][0].rate * fabric.cards * 1e-3
        slow = hosts > 1 and card < rates.gather_gb_s
        kind = "network card" if slow else "NVLink"
        parts = (
            (KERNELS, rates.gather), ("network card, latency", (hosts - 1) * fabric.card_us),
            (f"{kind}, bytes", (self.world - 1) * nbytes / ((card if slow else rates.gather_gb_s) * 1e3)),
        )  # fmt: skip
        total = 0.0
        for what, us in parts:
            cause, total = (cause, what, us), total + us
        self.clock.at(self.clock.now + total, lambda why: self.clock.raise_flag(flag, why), cause)


def _raising(clock: Clock, flag: Flag) -> Callable[[Cause | None], None]:
    return lambda cause: clock.raise_flag(flag, cause)


@dataclass(frozen=True)
class Phase:
    """Microseconds of computing, and then an exchange, from right to left if `reverse`."""

    computing: float = 0.0
    reverse: bool = False


@dataclass(frozen=True)
class Ended:
    """A phase of all ranks: at how many microseconds each rank that was driven ended it, and what the time of the
    slowest went into."""

    us: tuple[float, ...]
    path: dict[str, float]

    @property
    def slowest(self) -> float:
        return max(self.us)


@dataclass(frozen=True)
class Run:
    """What came out of each phase, how long the busiest link of each kind had a message on it, and the messages."""

    phases: tuple[Ended, ...]
    busy: dict[str, float]
    messages: int


def simulate(simulation: Simulation, phases: Sequence[Phase] = (Phase(),)) -> Run:
    """All ranks start together and go through the phases.

    Raises:
        ValueError: a message was not received, or a rank waits for something that never comes.
    """
    clock = simulation.clock
    calls = {way: sum(phase.reverse is way for phase in phases) for way in (False, True)}
    ends: list[list[tuple[float, Cause | None]]] = [[] for _ in phases]

    def of_rank(rank: int, process: Process) -> Steps:
        done = {False: 0, True: 0}
        for phase, ended in zip(phases, ends, strict=True):
            yield phase.computing, COMPUTING
            done[phase.reverse] += 1
            yield from simulation.exchange(rank, process, done[phase.reverse], phase.reverse, calls[phase.reverse])
            ended.append((clock.now, process.cause))
            by_rank[rank].append(clock.now)

    by_rank: dict[int, list[float]] = {rank: [] for rank in simulation.driven}
    collects = gc.isenabled()
    gc.disable()  # it would look through all causes again and again
    try:
        for rank in simulation.driven:
            process = Process()
            clock.start(process, of_rank(rank, process))
        clock.run()
    finally:
        if collects:
            gc.enable()
    waiting = [rank for rank, times in by_rank.items() if len(times) < len(phases)]
    if waiting:
        raise ValueError(f"simulation: expected all ranks to end, ranks {waiting[:8]} wait for what never comes")
    if simulation.sent != simulation.received:
        raise ValueError(f"simulation: expected {simulation.sent} messages received, got {simulation.received}")
    found = []
    for i, ended in enumerate(ends):
        _, cause = max(ended, key=lambda end: end[0])
        found.append(Ended(tuple(times[i] for times in by_rank.values()), path_of(cause)))
    return Run(tuple(found), simulation.fabric.busiest(), simulation.sent)
