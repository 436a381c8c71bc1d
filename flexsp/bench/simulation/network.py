"""Events in the order of their times, processes that cause them, and the links that messages share.

Times are microseconds, rates bytes a microsecond (1 GB/s is 1000 of them).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from heapq import heappop, heappush
from typing import Any

__all__ = ["Cause", "Clock", "Fabric", "Flag", "Link", "Process", "Route", "path_of"]

Cause = tuple[Any, str, float]
"""(cause of what was before, what the time went into, microseconds), down to None: why something happened then."""


def path_of(cause: Cause | None) -> dict[str, float]:
    """Microseconds of each kind on the way of causes that led to an event; they add up to its time."""
    found: dict[str, float] = {}
    while cause is not None:
        cause, what, us = cause
        found[what] = found.get(what, 0.0) + us
    return found


class Flag:
    """Something that happens once, and which processes may wait for."""

    __slots__ = ("cause", "is_set", "waiting")

    def __init__(self) -> None:
        self.is_set = False
        self.cause: Cause | None = None
        self.waiting: tuple[Process, ...] = ()


class Process:
    """A generator that yields (microseconds, what they go into), or a `Flag` to wait for.

    Attributes:
        cause: why it is where it is now.
    """

    __slots__ = ("cause", "steps")

    def __init__(self, cause: Cause | None = None) -> None:
        self.cause = cause
        self.steps: Generator[tuple[float, str] | Flag, None, None] | None = None


class Clock:
    """Runs what is due, in the order of time, and at one time in the order in which it was asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked = 0
        self._due: list[tuple[float, int, Callable[..., None], Any]] = []

    def at(self, time: float, action: Callable[..., None], argument: Any) -> None:
        self.asked += 1
        heappush(self._due, (time, self.asked, action, argument))

    def run(self) -> None:
        """Until nothing is due any more."""
        due = self._due
        while due:
            self.now, _, action, argument = heappop(due)
            action(argument)

    def start(self, process: Process, steps: Generator[tuple[float, str] | Flag, None, None]) -> None:
        process.steps = steps
        self.go_on(process)

    def go_on(self, process: Process) -> None:
        """The process runs until it has to wait."""
        steps = process.steps
        assert steps is not None
        for step in steps:
            if type(step) is tuple:
                us, what = step
                if us > 0.0:
                    process.cause = (process.cause, what, us)
                    self.at(self.now + us, self.go_on, process)
                    return
            elif not step.is_set:  # type: ignore[union-attr]
                step.waiting += (process,)  # type: ignore[union-attr]
                return

    def raise_flag(self, flag: Flag, cause: Cause | None) -> None:
        """Now; `cause` explains why now."""
        flag.is_set, flag.cause = True, cause
        for process in flag.waiting:
            process.cause = cause
            self.go_on(process)


class Link:
    """A way that messages share: n of them at once have an n-th of its rate each.

    Attributes:
        kind: of links that are reported together.
        rate: bytes a microsecond; infinite where it limits nothing.
        carried: bytes so far.
        busy: microseconds with a message on it.
    """

    __slots__ = ("_done", "_on", "_since", "_version", "busy", "carried", "kind", "rate")

    def __init__(self, kind: str, rate: float) -> None:
        self.kind, self.rate = kind, rate
        self.carried = self.busy = 0.0
        # Bytes that each message has sent that was there all the time: one that comes now, of n bytes, has left once
        # they are n more.
        self._done = 0.0
        self._on: list[tuple[float, int, _Transfer]] = []
        self._since = 0.0
        self._version = 0

    def take(self, clock: Clock, transfer: _Transfer) -> None:
        """A message starts here."""
        self._go_to(clock.now)
        self.carried += transfer.nbytes
        clock.asked += 1
        heappush(self._on, (self._done + transfer.nbytes, clock.asked, transfer))
        self._plan(clock)

    def _go_to(self, now: float) -> None:
        if self._on:
            self._done += (now - self._since) * self.rate / len(self._on)
            self.busy += now - self._since
        else:
            self._done = 0.0  # no difference of large numbers later
        self._since = now

    def _plan(self, clock: Clock) -> None:
        """The first message that is through, if none comes before. Each that comes makes the plan void."""
        self._version += 1
        if self._on:
            left = max(0.0, self._on[0][0] - self._done)
            clock.at(clock.now + left * len(self._on) / self.rate, self._leave, (clock, self._version))

    def _leave(self, planned: tuple[Clock, int]) -> None:
        clock, version = planned
        if version != self._version:
            return
        self._go_to(clock.now)
        through = self._done = max(self._done, self._on[0][0])
        left = []
        while self._on and self._on[0][0] <= through * (1 + 1e-12):
            left.append(heappop(self._on)[2])
        self._plan(clock)
        for transfer in left:
            transfer.left(clock)


class _Transfer:
    """A message that is on one or several links at once. It arrives some time after it has left the last of them."""

    __slots__ = ("_after", "_arrived", "_cause", "_least", "_links", "_sent", "_started", "nbytes", "route")

    def __init__(
        self, route: Route, nbytes: float, most: float, after: float, sent: float, cause: Cause | None,
        arrived: Callable[[Cause | None], None],
    ) -> None:  # fmt: skip
        self.route, self.nbytes = route, nbytes
        self._least, self._after, self._sent = nbytes / most, after, sent
        self._cause, self._arrived = cause, arrived

    def start(self, clock: Clock) -> None:
        links = self.route.limits if self.nbytes > 0 else []
        self._links, self._started = len(links), clock.now
        for link in links:
            link.take(clock, self)
        if not links:
            self.left(clock)

    def left(self, clock: Clock) -> None:
        self._links -= 1
        if self._links <= 0:
            end = max(self._started + self._least, clock.now)
            what, other = self.route.what
            cause = ((self._cause, what, end - self._sent), other, self._after)
            clock.at(end + self._after, self._arrived, cause)
            self.route.next(clock)


class Route:
    """From one rank to another: the links that a message takes at once, and microseconds that it takes besides.

    Args:
        in_order: messages start one after the other, as those of a queue pair of a network card.
    """

    __slots__ = ("_queue", "kind", "latency", "limits", "links", "what")

    def __init__(self, links: Sequence[Link], latency: float, in_order: bool = False) -> None:
        self.links, self.latency = tuple(links), latency
        self.kind = self.links[0].kind
        self.limits = [link for link in self.links if link.rate < math.inf]
        self.what = f"{self.kind}, bytes", f"{self.kind}, latency"
        self._queue: deque[_Transfer] | None = deque() if in_order else None

    def send(
        self, clock: Clock, nbytes: float, cause: Cause | None, arrived: Callable[[Cause | None], None],
        latency: float = 0.0, most: float = math.inf,
    ) -> None:  # fmt: skip
        """Starts a message now; `arrived` is called with the cause when it is there.

        Args:
            latency: microseconds beside the route's.
            most: bytes a microsecond that a message reaches on links that have more.
        """
        transfer = _Transfer(self, nbytes, most, self.latency + latency, clock.now, cause, arrived)
        if self._queue is not None:
            self._queue.append(transfer)
            if len(self._queue) > 1:
                return
        transfer.start(clock)

    def next(self, clock: Clock) -> None:
        """The first message has left."""
        if self._queue is not None:
            self._queue.popleft()
            if self._queue:
                self._queue[0].start(clock)


class Fabric:
    """Hosts of consecutive ranks. Inside, every rank has a port into a switch, where all reach all; between hosts a
    message takes a card of the sender's host and one of the receiver's, and the network between cards limits nothing.

    Args:
        ranks, per_host: in all, and of a host.
        port_gb_s, port_us: rate of a port, in each direction, and latency inside a host.
        card_gb_s, card_us: the same of a card, and between hosts, beside that inside.
        cards: of a host; None: one for each rank. Ranks that are neighbours share one.
    """

    def __init__(
        self, ranks: int, per_host: int, *, port_gb_s: float, card_gb_s: float, port_us: float = 0.0,
        card_us: float = 0.0, cards: int | None = None,
    ) -> None:  # fmt: skip
        self.ranks, self.per_host = ranks, per_host
        self.cards = per_host if cards is None else cards
        self.port_us, self.card_us = port_us, card_us
        hosts = -(-ranks // per_host)
        self.ports = [(Link("NVLink", port_gb_s * 1e3), Link("NVLink", port_gb_s * 1e3)) for _ in range(ranks)]
        self.network = [
            (Link("network card", card_gb_s * 1e3), Link("network card", card_gb_s * 1e3))
            for _ in range(hosts * self.cards)
        ]
        self._routes: dict[tuple[int, int], Route] = {}

    def card_of(self, rank: int) -> int:
        host, place = divmod(rank, self.per_host)
        return host * self.cards + place * self.cards // self.per_host

    def route(self, source: int, target: int) -> Route:
        """The way of a message between two ranks."""
        found = self._routes.get((source, target))
        if found is None:
            inside = source // self.per_host == target // self.per_host
            if inside:
                links, us = (self.ports[source][0], self.ports[target][1]), self.port_us
            else:
                links = self.network[self.card_of(source)][0], self.network[self.card_of(target)][1]
                us = self.port_us + self.card_us
            found = self._routes[source, target] = Route(links, us, in_order=not inside)
        return found

    def busiest(self) -> dict[str, float]:
        """Microseconds that the link of each kind that was busy for longest had a message on it."""
        of: dict[str, float] = {}
        for link in (link for pair in (*self.ports, *self.network) for link in pair):
            of[link.kind] = max(of.get(link.kind, 0.0), link.busy)
        return of
