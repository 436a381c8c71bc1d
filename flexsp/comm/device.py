"""Signals, waits and pushes for Triton kernels (import only where Triton is needed).

A flag is an int64 that one rank writes and one other reads: ``epoch << 32 | low``. ``low`` is the call's signature of
31 bits. Bit 31 makes it a poison, which says whether ranks disagree, who reports it, and about whom
(comm/signature.py). A transport is a pair of functions with the arguments of ``push_store`` and ``signal_store``, which
the kernel gets as tl.constexpr.
"""

from __future__ import annotations

import time
from typing import Any

import triton
import triton.language as tl
from triton.language import core
from triton.language.extra.cuda import globaltimer

__all__ = [
    "clock_device", "clock_host", "cycles", "first_failure", "nvshmem_options", "push_put", "push_store", "signal_put",
    "signal_store", "wait_cycles", "wait_epoch",
]  # fmt: skip

SIGNAL_SET = tl.constexpr(9)  # NVSHMEM_SIGNAL_SET


@triton.jit
def clock_device():
    """Nanoseconds on the GPU."""
    return globaltimer()


@triton.jit
def clock_host():
    """Nanoseconds under the interpreter. It sleeps, since the process that this one waits for may want the core, and
    takes much longer than that for a kernel."""
    time.sleep(0.005)
    return time.monotonic_ns()


@triton.jit
def cycles():
    """Cycles of this SM."""
    return tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def wait_cycles(start, duration):
    """Returns `duration` cycles after `start`, or at once on an SM whose clock is behind.

    Each thread reads the clock for itself and may leave the loop in another round, so no barrier may be in here.
    """
    now = cycles()
    while (now >= start) & (now - start < duration):
        now = cycles()


@triton.jit
def _now(word, CLOCK: tl.constexpr):
    """The time, the same for all threads of a block.

    Threads that read the clock for themselves would leave a loop in different rounds, and barriers in it would hang. Of
    an atomic on a scalar, one thread's result is broadcast to all.
    """
    tl.atomic_max(word, CLOCK(), sem="relaxed")
    return tl.atomic_add(word, 0, sem="relaxed")


@triton.jit
def wait_epoch(flag, epoch, counters, timeout_ns, CLOCK: tl.constexpr, CHECK_EVERY: tl.constexpr):
    """Polls until the flag's epoch reaches ``epoch``, until ``timeout_ns`` have passed, or until another block of this
    rank has failed. Returns the flag as it was last seen.

    ``counters[0]`` is the failure mark, ``counters[1]`` scratch for the time. Both are looked at once in CHECK_EVERY
    polls, since each look is a round trip to L2 that would delay the next poll.

    Memory order: the atomic is an acquire at system scope by one thread. Its result reaches the other threads through
    shared memory and a bar.sync. So loads after it see what the peer stored before its release.
    """
    # An atomic that adds 0, not a load: Triton has no load with acquire order at system scope.
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    start = tl.full((), 0, tl.int64)
    waited = tl.full((), 0, tl.int64)
    polls = 0
    while ((seen >> 32) < epoch) & (waited < timeout_ns):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        polls += 1
        if polls % CHECK_EVERY == 0:
            now = _now(counters + 1, CLOCK)
            start = tl.where(start == 0, now, start)
            failed = tl.atomic_add(counters, 0, sem="relaxed")
            waited = tl.where(failed != 0, timeout_ns, now - start)
    return seen


@triton.jit
def signal_store(flag, pad, value, pe):
    """Sets a flag in a peer's mapped arena. ``pad`` and ``pe`` are for transports that need them.

    Memory order: debug_barrier orders the loads and stores of all threads before it. Then one thread's release at
    system scope publishes them. The atomic alone has no bar.sync, so it would order only its own thread's.
    """
    tl.debug_barrier()
    tl.atomic_xchg(flag, value, sem="release", scope="sys")


@triton.jit
def push_store(there, stage, offsets, tile, mask, flag, value, nbytes, pe):
    """Stores a tile to a peer's arena and raises its flag. Memory order: as in ``signal_store``."""
    tl.store(there + offsets, tile, mask=mask)
    tl.debug_barrier()
    tl.atomic_xchg(flag, value, sem="release", scope="sys")


@core.extern
def _putmem_signal_block(dst, src, nbytes, flag, value, op, pe, _semantic=None):
    i64, i32, u64 = core.dtype("int64"), core.dtype("int32"), core.dtype("uint64")
    symbol = ("nvshmemx_putmem_signal_block", i32)
    return core.extern_elementwise(
        "", "", [dst, src, nbytes, flag, value, op, pe],
        {(i64, i64, i64, i64, u64, i32, i32): symbol}, is_pure=False, _semantic=_semantic,
    )  # fmt: skip


@triton.jit
def push_put(there, stage, offsets, tile, mask, flag, value, nbytes, pe):
    """As ``push_store``, by one NVSHMEM put-with-signal of the whole block. ``there`` and ``flag`` are local addresses
    of the symmetric objects; ``stage`` is symmetric memory of the sender, from which NVSHMEM reads.

    Memory order: debug_barrier makes the staged tile visible to all threads of the block, which copy it together.
    put_signal delivers the data before the signal. On return the stage may be written again.
    """
    tl.store(stage + offsets, tile, mask=mask)
    tl.debug_barrier()
    _putmem_signal_block(
        there.to(tl.int64), stage.to(tl.int64), nbytes.to(tl.int64), flag.to(tl.int64), value.to(tl.uint64),
        SIGNAL_SET, pe,
    )  # fmt: skip


@triton.jit
def signal_put(flag, pad, value, pe):
    """As ``signal_store`` over NVSHMEM. A put of 16 bytes of padding by the block carries the signal, since
    nvshmemx_signal_op is a call of one thread, and Triton cannot single one out.

    Memory order: debug_barrier orders the block's loads before the put, which has a fence of its own.
    """
    tl.debug_barrier()
    nbytes = tl.full((), 16, tl.int64)
    _putmem_signal_block(
        pad.to(tl.int64), pad.to(tl.int64), nbytes, flag.to(tl.int64), value.to(tl.uint64), SIGNAL_SET, pe
    )


@triton.jit
def first_failure(failed, word, record, kind, peer, tile, wanted, seen, reverse, low, number):
    """Marks this rank as failed with ``word`` (not 0). The first block to do so fills the host's record.

    Returns 0 if this was the first failure, else the word of the one before.

    Memory order: the acq_rel at system scope stands between the fields and ``record[0]``, which the host reads first.
    It is on device memory, and the stores to host memory are plain, since not every machine has atomics over PCIe.
    """
    before = tl.atomic_cas(failed, tl.full((), 0, tl.int64), word)
    if before == 0:
        tl.store(record + 1, peer)
        tl.store(record + 2, tile)
        tl.store(record + 3, wanted)
        tl.store(record + 4, seen)
        tl.store(record + 5, reverse)
        tl.store(record + 6, low)
        tl.store(record + 7, number)
        tl.debug_barrier()
        tl.atomic_add(failed, 0, sem="acq_rel", scope="sys")
        tl.store(record, kind)
    return before


def nvshmem_options() -> dict[str, Any]:
    """Launch options for a kernel that calls NVSHMEM: links the bitcode. NotAvailable if it is missing."""
    from flexsp.comm.nvshmem import find_device_library

    return {"extern_libs": {"libnvshmem_device": find_device_library()}}
