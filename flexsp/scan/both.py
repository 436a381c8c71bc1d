"""Two scans over segments and ranks whose states travel in one hop, so that an op with two states makes one exchange.

Each has sizes, segments and transitions of its own. Import this module only where Triton is needed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flexsp.comm import watchdog
from flexsp.comm.device import cycles
from flexsp.comm.group import SequenceParallel, ranks_call
from flexsp.comm.signature import Signature
from flexsp.comm.transport import in_kernel
from flexsp.runtime.launch import begin
from flexsp.scan.propagate import folded_here, hop, propagate, scan_tile, signature_of, sizes_of
from flexsp.scan.transitions import Transition

__all__ = ["Scan", "propagate_both"]


@triton.jit(
    do_not_specialize=["nseg", "H", "n_tiles", "nseg2", "H2", "n_tiles2", "max_tiles", "timeout_ns", "signature",
                        "rank", "pe_in", "pe_out", "number"]
)
def _propagate_both_kernel(
    states, log_a, cut, states2, log_a2, cut2, home, there_out, there_in, counters, record,
    nseg, H, n_tiles, nseg2, H2, n_tiles2, max_tiles, timeout_ns, signature, rank, pe_in, pe_out, number,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    K2: tl.constexpr, V2: tl.constexpr, BK2: tl.constexpr, BV2: tl.constexpr,
    DECAY: tl.constexpr, BY: tl.constexpr, DECAY2: tl.constexpr, BY2: tl.constexpr,
    HAS_CUT: tl.constexpr, REVERSE: tl.constexpr, HAS_IN: tl.constexpr, HAS_OUT: tl.constexpr, REGIONS: tl.constexpr,
    PUSH: tl.constexpr, SIGNAL: tl.constexpr, CLOCK: tl.constexpr, CHECK_EVERY: tl.constexpr, PACE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Two scans in one hop of the chain: the tiles of ``states2`` follow those of ``states``. Neither is dense."""
    begin(PDL)
    began = cycles() if PACE > 0 else 0
    for tile in range(tl.program_id(0), n_tiles + n_tiles2, tl.num_programs(0)):
        if tile < n_tiles:
            scan_tile(
                tile, tile, began, states, log_a, cut, None, home, there_out, there_in, counters, record,
                nseg, H, max_tiles, timeout_ns, signature, rank, pe_in, pe_out, number,
                K, V, BK, BV, DECAY, BY, False, HAS_CUT, REVERSE, False, HAS_IN, HAS_OUT, REGIONS,
                PUSH, SIGNAL, CLOCK, CHECK_EVERY, PACE,
            )  # fmt: skip
        else:
            scan_tile(
                tile - n_tiles, tile, began, states2, log_a2, cut2, None, home, there_out, there_in, counters, record,
                nseg2, H2, max_tiles, timeout_ns, signature, rank, pe_in, pe_out, number,
                K2, V2, BK2, BV2, DECAY2, BY2, False, HAS_CUT, REVERSE, False, HAS_IN, HAS_OUT, REGIONS,
                PUSH, SIGNAL, CLOCK, CHECK_EVERY, PACE,
            )  # fmt: skip


class Scan(NamedTuple):
    """Arguments of `propagate`."""

    states: torch.Tensor
    transition: Transition


@ranks_call
def propagate_both(first: Scan, second: Scan, sp: SequenceParallel, *, reverse: bool = False, call: str = "") -> None:
    """Does `propagate` with both, and ranks exchange their states together.

    Args:
        first: its tiles travel before those of the second.
        second: of as many sequences; both have transitions of the kinds "none" and "scalar", and cuts or none. Where
            one has a cut on this rank the other has one too, since they are of the same tokens.
        call: the op that needs them, the same text on every rank.
    """
    scans = first, second
    if any(x.transition.kind not in ("none", "scalar") for x in scans):
        raise ValueError(f"transition: expected kinds none and scalar, got {[x.transition.kind for x in scans]}")
    if len({x.transition.cut is None for x in scans}) > 1:
        raise ValueError("cut: expected it in both scans or in neither")
    if in_kernel(sp):
        watchdog.raise_pending(sp)
        _launch_both(first, second, reverse, sp, call)
        return
    _over_process_group(first, second, reverse, sp, call)


def _signature(first: Scan, second: Scan, reverse: bool, call: str) -> Signature:
    of = [signature_of(x.states, x.transition.kind, reverse, call) for x in (first, second)]
    return Signature(
        "state exchange", call, " and ".join(x.travels for x in of), " and ".join(x.transition for x in of), reverse,
        "chain",
    )  # fmt: skip


def _launch_both(first: Scan, second: Scan, reverse: bool, sp: SequenceParallel, call: str) -> None:
    (tiles, one), (tiles2, two) = (sizes_of(*x, reverse) for x in (first, second))
    count = tiles.count + tiles2.count
    if not count:
        return
    constants = one | {f"{name}2": two[name] for name in ("K", "V", "BK", "BV", "DECAY", "BY")}
    del constants["DENSE"], constants["FOLD_ONLY"]
    given, numbers = [], []
    for (states, transition), each in ((first, tiles), (second, tiles2)):
        given += [states, *(None if x is None else x.contiguous() for x in (transition.a, transition.cut))]
        numbers += [states.shape[1] - 1, states.shape[2], each.count]
    signature = _signature(first, second, reverse, call)
    hop(sp, _propagate_both_kernel, tuple(given), tuple(numbers), count, signature, constants, tiles)


def _over_process_group(first: Scan, second: Scan, reverse: bool, sp: SequenceParallel, call: str) -> None:
    """As `propagate` does. Rows of both are cut into pieces of one length, which are heads with a decay."""
    from flexsp.scan.schedules import incoming_state

    seeded = sp.neighbours(reverse)[0] is None
    found = [folded_here(*x, reverse, seeded) for x in (first, second)]
    piece = math.gcd(*(F.shape[2:].numel() for F, _ in found))
    pieces, decays = [], []
    for F, transition in found:
        pieces.append(F.reshape(F.shape[0], -1, piece, 1))
        a = F.new_zeros(F.shape[:2]) if transition.a is None else transition.a
        decays.append(a.repeat_interleave(F.shape[2:].numel() // piece, 1))
    together = Transition("scalar", torch.cat(decays, 1), found[0][1].cut)
    arrived = incoming_state(torch.cat(pieces, 1), together, sp, reverse, call)
    parts = arrived.split([x.shape[1] for x in pieces], 1)
    for (states, transition), part in zip((first, second), parts, strict=True):
        if not seeded:
            slot = states[:, -1 if reverse else 0]
            slot.copy_(part.reshape(slot.shape))
        propagate(states, transition, reverse=reverse)
