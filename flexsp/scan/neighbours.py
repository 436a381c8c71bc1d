"""How the kernel of `flexsp.scan.propagate` waits for credits and tiles of its neighbours, and tells them of failures.

That file describes a tile's control block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.comm import signature as sig
from flexsp.comm import watchdog
from flexsp.comm.device import first_failure, wait_epoch
from flexsp.scan.tiles import CHAIN_TILE

__all__ = ["CONTROL_WORDS", "control_of", "wait_credit", "wait_tile"]

# int64 numbers of a tile's control block: ready flags at 0 and 4, the credit at 8, padding at 12. Each has a sector
# of memory (32 bytes) of its own.
CONTROL_WORDS = 16

_TILE = tl.constexpr(CHAIN_TILE)
_WORDS = tl.constexpr(CONTROL_WORDS)
_POISON = tl.constexpr(sig.POISON)
_MISMATCH_BIT = tl.constexpr(sig.MISMATCH_BIT)
_RANK_BITS = tl.constexpr(sig.RANK_BITS)
_RANK_MASK = tl.constexpr((1 << sig.RANK_BITS) - 1)
_MISMATCH = tl.constexpr(watchdog.MISMATCH)
_POISON_TIMEOUT = tl.constexpr(watchdog.POISON_TIMEOUT)
_TIMEOUT_READY = tl.constexpr(watchdog.TIMEOUT_READY)
_TIMEOUT_CREDIT = tl.constexpr(watchdog.TIMEOUT_CREDIT)


@triton.jit
def _verdict(seen, epoch, low, timeout_kind, EXACT: tl.constexpr):
    """0 if a flag says what it should, else the kind of failure. EXACT: a later epoch is a failure too."""
    seen_low = seen & 0xFFFFFFFF
    kind = tl.where(seen_low == low, 0, _MISMATCH)
    if EXACT:
        kind = tl.where((seen >> 32) == epoch, kind, _MISMATCH)
    kind = tl.where((seen_low & _POISON) != 0, _POISON_TIMEOUT + ((seen_low & _MISMATCH_BIT) != 0).to(tl.int32), kind)
    return tl.where((seen >> 32) < epoch, timeout_kind, kind)


@triton.jit
def _fail(counters, record, kind, seen, epoch, low, peer, tile, rank, number, REVERSE: tl.constexpr):
    """Records a failure. Returns the low word of the poison for the neighbours, which says who reports it, about whom.

    All tiles pass on the poison of the first failure. After it the other blocks no longer wait, so what they miss says
    nothing about their peer.
    """
    poisoned = kind >= _POISON_TIMEOUT
    about = (seen & _RANK_MASK).to(tl.int32)
    about = tl.where(about == rank, ((seen >> _RANK_BITS) & _RANK_MASK).to(tl.int32), about)
    mismatch = (kind == _MISMATCH) | (kind == _POISON_TIMEOUT + 1)
    own = _POISON + tl.where(mismatch, _MISMATCH_BIT, 0).to(tl.int64) + (rank.to(tl.int64) << _RANK_BITS) + peer
    word = tl.where(poisoned, seen & 0xFFFFFFFF, own)
    wanted = tl.where(mismatch, low.to(tl.int64), epoch)
    was = tl.where(kind == _MISMATCH, seen & 0xFFFFFFFF, seen >> 32)
    peer = tl.where(poisoned, about, peer)
    before = first_failure(counters, word, record, kind, peer, tile, wanted, was, REVERSE, low, number)
    return tl.where(before == 0, word, before)


@triton.jit
def control_of(arena, max_tiles, tile, REGIONS: tl.constexpr):
    """Address of a tile's control block, as int64."""
    base = arena + max_tiles.to(tl.int64) * (REGIONS * _TILE)
    return base.to(tl.pointer_type(tl.int64)) + tile * _WORDS


@triton.jit
def wait_credit(
    home, counters, record, epoch, tile, max_tiles, timeout_ns, signature, rank, number,
    REVERSE: tl.constexpr, REGIONS: tl.constexpr, CLOCK: tl.constexpr, CHECK_EVERY: tl.constexpr,
):  # fmt: skip
    """Waits for the credit of the epoch before last, which lets this rank send. Returns 0, or the low word of a poison.

    The kernel waits for it before it waits for a tile. The credit has nearly always arrived, so its latency hides
    behind the neighbour's work.
    """
    control = control_of(home, max_tiles, tile, REGIONS)
    word = tl.full((), 0, tl.int64)
    seen = wait_epoch(control + 8, epoch - 2, counters, timeout_ns, CLOCK, CHECK_EVERY)
    kind = _verdict(seen, epoch - 2, 0, _TIMEOUT_CREDIT, False)
    if kind != 0:
        to = rank + (-1 if REVERSE else 1)
        word = _fail(counters, record, kind, seen, epoch - 2, signature, to, tile, rank, number, REVERSE)
    return word


@triton.jit
def wait_tile(
    word, home, counters, record, epoch, tile, max_tiles, timeout_ns, signature, rank, number,
    REVERSE: tl.constexpr, REGIONS: tl.constexpr, CLOCK: tl.constexpr, CHECK_EVERY: tl.constexpr,
):  # fmt: skip
    """Waits for the tile to arrive, unless `word` says that something failed. Returns `word`, or that of a poison."""
    control = control_of(home, max_tiles, tile, REGIONS)
    if word == 0:
        seen = wait_epoch(control + (epoch & 1) * 4, epoch, counters, timeout_ns, CLOCK, CHECK_EVERY)
        kind = _verdict(seen, epoch, signature, _TIMEOUT_READY, True)
        if kind != 0:
            source = rank + (1 if REVERSE else -1)
            word = _fail(counters, record, kind, seen, epoch, signature, source, tile, rank, number, REVERSE)
    return word
