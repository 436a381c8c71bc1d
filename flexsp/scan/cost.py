"""How long one exchange of states over the ranks takes: a latency-bandwidth model of each schedule.

n is the bytes of a rank's state, R the number of ranks, S the segments that a rank folds and then writes, and the time
is that of the slowest rank. Every form is linear in at most seven parameters (`Cost`), which `fit` finds
from measurements:

- chain (the kernel of scan/propagate.py): launch + (R - 1)(latency + tile/be + apply S n/tile) + (n - tile)/be
  + 2 S min(n, wave)/memory. The tiles flow, so n passes once; a wave is what all blocks hold at a time, and only its
  segments are exposed: the first rank folds them before it sends, the last one writes them after the last arrival.
- serial (LASP-1), and chain over torch.distributed: launch + (R - 1)(latency + n/be) + 3 S n/memory. The segments are
  read to fold them, and read and written to apply what arrived.
- pipelined, P pieces: (R + P - 2)(latency + n/(P be)) + (R + P - 3) apply + 3 S n/memory. A rank between two others
  applies A to each piece before it passes it on, so 2 ranks pay no apply. The launch is in the many latencies.
- all_gather (LASP-2): launch + (R - 1) latency + R n/be + 3 S n/memory. The combines of the other ranks' (A, F) are in
  latency and be; hence R - 1 latencies where an all-gather by itself needs log2 R.
- hierarchical, L ranks on each of N hosts, P pieces, s = ceil(log2 N) steps between hosts: launch
  + (P - 1 + s + 2) latency + 2 n (L - 1)/(L be) + 3 S n/memory, and (P - 1 + s)(network latency + n/(L P network)).
  What composes A and F is in the latencies. A is not counted in n, as it is small where it is not dense.

Of the ranks' R - 1 hops N - 1 go from host to host in the other schedules. Such a hop takes a network latency more, and
its bytes go over the network. Of the all-gather the bytes of the other hosts do, over one card for each rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flexsp.scan.hierarchical import pieces_of
from flexsp.scan.schedules import PIECES, SCHEDULES

__all__ = ["Cost", "Fit", "Measurement", "NETWORK_LATENCY_US", "fit", "quicker"]

TILE = 16384  # bytes of a tile of the chain's kernel
BLOCKS = 128  # that it has at most


@dataclass(frozen=True)
class Cost:
    """Parameters of one schedule, in microseconds. `name` may carry a transport, as in "chain:put".

    Attributes:
        launch: of an exchange, whatever its size: kernels that start and end.
        latency: of a hop, a message or, in the all-gather, a rank.
        byte: of a byte over the link, 1/be.
        memory: of a byte of the segments, read or written on the rank itself.
        apply: chain, of one segment of one tile, a hop's wait behind a block's earlier tiles; pipelined, of one piece
            (docs/math.md, section 14). The others have none.
        network_latency: that a message between hosts takes more.
        network_byte: of a byte over a network card.
        blocks: of the chain's kernel, each of which holds a tile at a time.
        per_host: ranks on each host; None where one host has all.
    """

    name: str
    launch: float = 0.0
    latency: float = 0.0
    byte: float = 0.0
    memory: float = 0.0
    apply: float = 0.0
    network_latency: float = 0.0
    network_byte: float = 0.0
    blocks: int = BLOCKS
    per_host: int | None = None

    def us(self, nbytes: float, ranks: int, segments: int = 1) -> float:
        """Predicted microseconds of an exchange of ``nbytes`` a rank over ``ranks`` >= 2 ranks."""
        counts = _counts(self.name, nbytes, ranks, segments, self.blocks, self.per_host)
        return sum(count * getattr(self, parameter) for parameter, count in counts.items())

    @property
    def link_gb_s(self) -> float:
        """Bandwidth of the link in GB/s; infinite where a byte costs nothing."""
        return 1e-3 / self.byte if self.byte else math.inf

    @property
    def memory_gb_s(self) -> float:
        """Bandwidth of the rank's own memory in GB/s; infinite where a byte costs nothing."""
        return 1e-3 / self.memory if self.memory else math.inf


@dataclass(frozen=True)
class Measurement:
    """Microseconds of one exchange, with all ranks on one host."""

    name: str
    nbytes: int
    ranks: int
    segments: int
    us: float


@dataclass(frozen=True)
class Fit:
    """Fitted parameters and the measurements that they come from."""

    cost: Cost
    measurements: tuple[Measurement, ...]

    @property
    def residuals_us(self) -> list[float]:
        """Predicted less measured, measurement by measurement."""
        return [self.cost.us(m.nbytes, m.ranks, m.segments) - m.us for m in self.measurements]

    @property
    def worst(self) -> float:
        """The largest residual as a fraction of its measurement."""
        return max(abs(residual) / m.us for residual, m in zip(self.residuals_us, self.measurements, strict=True))


def fit(measurements: Sequence[Measurement], multiprocessors: int = BLOCKS) -> dict[str, Fit]:
    """Parameters >= 0 with the least sum of squared relative residuals, for each schedule that was measured.

    Args:
        multiprocessors: of the GPUs; the chain's kernel has no more blocks than these.

    Raises:
        ValueError: an unknown schedule, a time that is no positive number, or measurements that cannot tell the
            parameters apart: they need two world sizes, two sizes of the state and two numbers of segments.
    """
    if not measurements:
        raise ValueError("measurements: expected at least one, got none")
    of_name: dict[str, list[Measurement]] = {}
    for m in measurements:
        if not (math.isfinite(m.us) and m.us > 0):
            raise ValueError(f"measurements of {m.name}: expected positive microseconds, got {m.us}")
        of_name.setdefault(m.name, []).append(m)
    blocks = min(BLOCKS, multiprocessors)
    return {name: Fit(_fit(name, found, blocks), tuple(found)) for name, found in of_name.items()}


def _fit(name: str, measurements: Sequence[Measurement], blocks: int) -> Cost:
    counts = [_counts(name, m.nbytes, m.ranks, m.segments, blocks) for m in measurements]
    parameters = list(counts[0])  # nothing of a network
    us = torch.tensor([m.us for m in measurements], dtype=torch.float64)
    matrix = torch.tensor([list(row.values()) for row in counts], dtype=torch.float64) / us[:, None]
    size = matrix.norm(dim=0).clamp_min(1e-300)
    rank = int(torch.linalg.matrix_rank(matrix / size))
    if rank < len(parameters):
        raise ValueError(
            f"measurements of {name}: expected at least {len(parameters)} that differ in ranks, bytes and segments, to "
            f"tell {', '.join(parameters)} apart, got {len(measurements)} that determine {rank}"
        )
    found = _nonnegative(matrix / size, torch.ones_like(us)) / size
    return Cost(name, **dict(zip(parameters, found.tolist(), strict=True)), blocks=blocks)


def _nonnegative(matrix: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Least squares over x >= 0: of the solutions with some columns left out, the best that has no negative entry."""
    columns = matrix.shape[1]
    best, least = torch.zeros(columns, dtype=matrix.dtype), wanted.norm()
    for kept in itertools.product((False, True), repeat=columns):
        mask = torch.tensor(kept)
        if not mask.any():
            continue
        x = torch.zeros_like(best)
        x[mask] = torch.linalg.lstsq(matrix[:, mask], wanted[:, None]).solution[:, 0]
        error = (matrix @ x - wanted).norm()
        if (x >= 0).all() and error < least:
            best, least = x, error
    return best


def _counts(
    name: str, nbytes: float, ranks: int, segments: int, blocks: int, per_host: int | None = None
) -> dict[str, float]:
    """How often each parameter of a schedule counts in one exchange; of the network none where there is one host."""
    schedule, _, transport = name.partition(":")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {name!r}")
    if transport == "process_group" and schedule == "chain":
        schedule = "serial"
    inside = ranks if per_host is None else min(per_host, ranks)
    for argument, value, least in (("nbytes", nbytes, 1), ("ranks", ranks, 2), ("segments", segments, 1),
                                   ("per_host", inside, 1)):  # fmt: skip
        if value < least:
            raise ValueError(f"{argument}: expected at least {least}, got {value}")
    hosts, local = -(-ranks // inside), 3.0 * segments * nbytes
    if schedule == "hierarchical":
        return _of_hierarchical(nbytes, hosts, inside, local)
    hops, far = ranks - 1, hosts - 1
    counts: dict[str, float] = {"launch": 1} if schedule != "pipelined" else {}
    if schedule == "all_gather":
        counts |= {"latency": hops, "byte": ranks * nbytes, "memory": local}
        return counts | ({"network_latency": far, "network_byte": (ranks / inside - 1) * nbytes} if far else {})
    # Of one hop after another, what passes all of them alone, and what flows behind it over the slowest link.
    first = {"chain": min(TILE, nbytes), "serial": nbytes, "pipelined": nbytes / PIECES}[schedule]
    behind = nbytes - first
    counts |= {"latency": hops, "byte": (hops - far) * first + (0 if far else behind)}
    if schedule == "chain":
        counts |= {
            "memory": 2.0 * segments * min(nbytes, blocks * TILE), "apply": hops * segments * nbytes / TILE,
        }  # fmt: skip
    else:
        counts["memory"] = local
    if schedule == "pipelined":
        steps = ranks + PIECES - 2
        counts |= {"latency": steps, "apply": steps - 1 if ranks > 2 else 0}
    return counts | ({"network_latency": far, "network_byte": far * first + behind} if far else {})


def _of_hierarchical(nbytes: float, hosts: int, inside: int, local: float) -> dict[str, float]:
    pieces, steps = pieces_of(nbytes / inside), (hosts - 1).bit_length()
    between = pieces - 1 + steps if hosts > 1 else 0
    alone = 0 if inside == 1 else 2 if hosts > 1 else pieces + 1  # steps inside hosts while nothing is between them
    counts = {
        "launch": 1, "latency": alone + between, "byte": 2.0 * nbytes * (inside - 1) / inside, "memory": local,
    }  # fmt: skip
    network = {"network_latency": between, "network_byte": between * nbytes / (inside * pieces)}
    return counts | (network if hosts > 1 else {})


# Which schedule is quicker --------------------------------------------------------------------------------------------

NETWORK_LATENCY_US = 20.0
"""Of a message between hosts, beside what one inside a host takes. Assumed."""
STATE_BYTES = 2 << 20  # of 32 heads of 128 x 128
# Rounded from what was measured on H200s (flexsp/planner/measured.py): messages of torch.distributed as `serial` has
# them, their bytes where many are under way as its all-gather does. That a network card has 50 GB/s is assumed.
_NETWORK: dict[str, Any] = {"network_latency": NETWORK_LATENCY_US, "network_byte": 1 / 50e3}
_IN_KERNEL = Cost("chain", launch=5.0, latency=4.6, byte=1 / 207e3, **_NETWORK)
_MESSAGES = Cost("chain:process_group", launch=23.0, latency=42.0, byte=1 / 112e3, **_NETWORK)
_HIERARCHICAL = Cost("hierarchical", launch=23.0, latency=42.0, byte=1 / 189e3, **_NETWORK)


def quicker(hosts: Sequence[int], in_kernel: bool) -> str:
    """The schedule for states of 2 MiB over hosts of these sizes: "chain" on one, else it or "hierarchical".

    Args:
        in_kernel: whether the chain's states travel inside a kernel, not by torch.distributed.
    """
    if len(hosts) == 1:
        return "chain"
    each = -(-sum(hosts) // len(hosts))
    chain, other = (
        replace(x, per_host=each).us(STATE_BYTES, sum(hosts))
        for x in (_IN_KERNEL if in_kernel else _MESSAGES, _HIERARCHICAL)
    )
    return "chain" if chain <= other else "hierarchical"
