"""The scan over segments and ranks as one Triton kernel, the same in both directions.

For each tile of a state a block does four things, in this order. It folds the tile over this rank's segments. It waits
for the neighbour's tile. It pushes the result to the next rank. Last it writes the state that enters each segment,
which no other rank waits for.

Where a segment has a cut, what leaves the rank does not depend on what arrives. So the tile is pushed before the wait.
If the wait then fails, the tile is gone, and the next rank hears of the failure in its next call.

Each rank has an arena, and a larger one from the first call on whose states do not fit. For each direction it holds two
slots of ``max_tiles`` tiles of 16 KiB (for the ``put`` transport a third one, the stage), and a control block of 128
bytes for each tile. A control block has the ready flags of the two slots, which the sending rank writes, and the
credit, which the receiving rank writes. Epochs are counted for each tile in local device memory, so that a captured
CUDA graph counts on when it is replayed. Epoch e of a tile uses slot e % 2. Its sender waits for the credit of
epoch e - 2, so a slow receiver is never overrun.

Import this module only where Triton is needed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from flexsp.comm import device as dev
from flexsp.comm import signature as sig
from flexsp.comm import watchdog
from flexsp.comm.device import cycles, wait_cycles
from flexsp.comm.group import SequenceParallel, ranks_call
from flexsp.comm.recorder import ended
from flexsp.comm.transport import in_kernel, transport_of
from flexsp.devices import of_device
from flexsp.exceptions import BetweenRanks, HeapTooSmall, NotAvailable
from flexsp.log import tell
from flexsp.runtime.launch import begin, launch
from flexsp.scan import segments
from flexsp.scan.dense import load_dense, through
from flexsp.scan.neighbours import CONTROL_WORDS, control_of, wait_credit, wait_tile
from flexsp.scan.segments import apply, fold, write
from flexsp.scan.tile_order import MAX_BLOCKS, PACE
from flexsp.scan.tiles import CHAIN_TILE, LOCAL_TILE, Tiles, too_large
from flexsp.scan.transitions import KINDS, Transition

__all__ = [
    "COUNTERS", "fits", "folded_here", "hop", "local_launch", "propagate", "scan_tile", "signature_of",
    "sizes_of",
]  # fmt: skip

Optional = torch.Tensor | None

COUNTERS = 16  # int64 numbers in front of the epochs: the failure mark, scratch for the time; the rest is unused

_TILE = tl.constexpr(CHAIN_TILE)
_COUNTERS = tl.constexpr(COUNTERS)


# The kernel -----------------------------------------------------------------------------------------------------------


@triton.jit
def scan_tile(
    own, tile, began, states, log_a, cut, folded, home, there_out, there_in, counters, record,
    nseg, H, max_tiles, timeout_ns, signature, rank, pe_in, pe_out, number,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, BY: tl.constexpr, DENSE: tl.constexpr, HAS_CUT: tl.constexpr, REVERSE: tl.constexpr,
    FOLD_ONLY: tl.constexpr, HAS_IN: tl.constexpr, HAS_OUT: tl.constexpr, REGIONS: tl.constexpr,
    PUSH: tl.constexpr, SIGNAL: tl.constexpr, CLOCK: tl.constexpr, CHECK_EVERY: tl.constexpr, PACE: tl.constexpr,
):  # fmt: skip
    """One tile, the ``own``-th of these states and the ``tile``-th that travels in this launch."""
    # Tiles that travel have the type of the states. Arenas are float32, so pointers into them are cast.
    NUMBER: tl.constexpr = states.dtype.element_ty
    POINTER: tl.constexpr = tl.pointer_type(NUMBER)
    TILES: tl.constexpr = (V + BV - 1) // BV if DENSE else (K + BK - 1) // BK
    bh = own // TILES
    b, h = bh // H, bh % H
    rows = (0 if DENSE else own % TILES) * BK + tl.arange(0, BK)
    cols = (own % TILES if DENSE else 0) * BV + tl.arange(0, BV)
    offsets = rows[:, None] * V + cols[None, :]
    mask = (rows < K)[:, None] & (cols < V)[None, :]
    slot = states + ((b.to(tl.int64) * (nseg + 1) + (nseg if REVERSE else 0)) * H + h) * (K * V)
    start = slot + offsets
    alive = nseg >= 0  # always true, but no constant: later it is whether the neighbour's tile has come
    if HAS_IN:
        # What arrives is not there yet. The fold starts from the unit, and arrives at F of all segments.
        S = tl.full([BK, BV], float("-inf") if BY == 2 else 0.0, NUMBER)
    else:
        S = tl.load(start, mask=mask, other=0.0)
    if DENSE:
        F, leaving, A = load_dense(states, log_a, b, h, offsets, mask, nseg, H, K, V, REVERSE)
        source, stride = slot + cols[None, :], V
    elif FOLD_ONLY or HAS_OUT:
        F, total, any_cut = fold(
            S, states, log_a, cut, b, h, rows, offsets, mask, nseg, H, K, V, DECAY, BY, HAS_CUT, REVERSE
        )
    if FOLD_ONLY:
        tl.store(folded + bh.to(tl.int64) * (K * V) + offsets, F, mask=mask)
    elif HAS_IN or HAS_OUT:
        # The epoch is read from device memory, not passed by the host: replays of a graph must count on.
        count = counters + _COUNTERS + tile
        if REVERSE:
            count += max_tiles
        epoch = tl.load(count) + 1
        place = ((epoch & 1) * max_tiles + tile) * _TILE
        packed = tl.arange(0, BK)[:, None] * BV + tl.arange(0, BV)[None, :]
        stamp = epoch << 32
        stage = (home + (2 * max_tiles.to(tl.int64) + tile) * _TILE).to(POINTER)
        nbytes = tl.full((), BK * BV * (NUMBER.primitive_bitwidth // 8), tl.int64)
        word = tl.full((), 0, tl.int64)
        # The credit was given two calls ago, so this wait is nearly always over at once. It comes before the wait
        # for the tile, so that nothing is left to wait for between a tile's arrival and its push.
        if HAS_OUT:
            ready = control_of(there_out, max_tiles, tile, REGIONS) + (epoch & 1) * 4
            word = wait_credit(
                home, counters, record, epoch, tile, max_tiles, timeout_ns, signature, rank, number,
                REVERSE, REGIONS, CLOCK, CHECK_EVERY,
            )  # fmt: skip
        pushed = nseg < 0  # false
        if HAS_IN and HAS_OUT and HAS_CUT:
            # Behind a cut F does not depend on what arrives, so the next rank need not wait for it. After a failure
            # on this rank (of this tile or an earlier one) the tile is withheld: its flag has to carry the poison.
            pushed = any_cut & (word == 0) & (tl.atomic_add(counters, 0, sem="relaxed") == 0)
            if pushed:
                PUSH(
                    (there_out + place).to(POINTER), stage, packed, F, mask, ready, stamp + signature, nbytes,
                    pe_out,
                )  # fmt: skip
        if HAS_IN:
            word = wait_tile(
                word, home, counters, record, epoch, tile, max_tiles, timeout_ns, signature, rank, number,
                REVERSE, REGIONS, CLOCK, CHECK_EVERY,
            )  # fmt: skip
        alive = word == 0
        pad = control_of(home, max_tiles, tile, REGIONS) + 12
        if HAS_IN:
            # .cg reads from L2: the slot was used two epochs ago, and L1 is not coherent with what peers write.
            # A tile that did not arrive is NaN, so that no result looks right after a failure.
            S = tl.load(
                (home + place).to(POINTER) + packed, mask=mask & alive, other=float("nan"), cache_modifier=".cg"
            )
        else:
            S = tl.where(alive, S, float("nan"))
        if DENSE:
            # A times the state needs all of its rows, which are read again from where they arrived.
            if HAS_IN:
                source, stride = home + place + tl.arange(0, BV)[None, :], BV
            F = through(A, source, stride, S, F, rows, cols, alive & (nseg > 0), K, V, BK, REVERSE)
        if HAS_OUT:
            if pushed:
                if not alive:
                    # The tile of this call has gone out as a good one. The flag that the neighbour waits for in its
                    # next call gets the poison now; this rank may never make that call.
                    later = control_of(there_out, max_tiles, tile, REGIONS) + ((epoch + 1) & 1) * 4
                    SIGNAL(later, pad, ((epoch + 1) << 32) + word, pe_out)
            else:
                if alive:
                    if PACE > 0:  # on the first rank alone: later ones send as tiles arrive
                        wait_cycles(began, tile * PACE)
                    if HAS_IN and not DENSE:
                        F = apply(S, F, total, any_cut, BY, True)
                    PUSH(
                        (there_out + place).to(POINTER), stage, packed, F, mask, ready, stamp + signature, nbytes,
                        pe_out,
                    )  # fmt: skip
                else:
                    SIGNAL(ready, pad, stamp + word, pe_out)
        if HAS_IN:
            # The credit lets the sender overwrite the slot. SIGNAL's barrier and release order it behind all loads
            # of S. It comes after the push, since the next rank is waiting and the sender is not.
            SIGNAL(control_of(there_in, max_tiles, tile, REGIONS) + 8, pad, stamp + word, pe_in)
        tl.store(count, epoch)
        if HAS_IN:
            tl.store(start, S, mask=mask)
        else:
            # The initial state is in its place. Only NaN, after a failed wait for the credit, replaces it.
            tl.store(start, S, mask=mask & (word != 0))
    elif DENSE:
        F = through(A, source, stride, S, F, rows, cols, nseg > 0, K, V, BK, REVERSE)
    if DENSE:
        tl.store(leaving, F, mask=mask & (nseg > 0))
    elif not FOLD_ONLY:
        # Segments are read a second time here. There are not enough registers to keep them since the fold.
        write(S, alive, states, log_a, cut, b, h, rows, offsets, mask, nseg, H, K, V, DECAY, BY, HAS_CUT, REVERSE)


@triton.jit(
    do_not_specialize=["nseg", "H", "n_tiles", "max_tiles", "timeout_ns", "signature", "rank", "pe_in", "pe_out",
                        "number"]
)
def _propagate_kernel(
    states, log_a, cut, folded, home, there_out, there_in, counters, record,
    nseg, H, n_tiles, max_tiles, timeout_ns, signature, rank, pe_in, pe_out, number,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, BY: tl.constexpr, DENSE: tl.constexpr, HAS_CUT: tl.constexpr, REVERSE: tl.constexpr,
    FOLD_ONLY: tl.constexpr, HAS_IN: tl.constexpr, HAS_OUT: tl.constexpr, REGIONS: tl.constexpr,
    PUSH: tl.constexpr, SIGNAL: tl.constexpr, CLOCK: tl.constexpr, CHECK_EVERY: tl.constexpr, PACE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """States [B, nseg + 1, H, K, V] in place. A block has one tile of [BK, V], or strides over several.

    DENSE: tiles are [K, BV], ``log_a`` is A, and there is one segment or none. ``log_a`` is what `Kind.function` reads.

    Neither HAS_IN nor HAS_OUT: the scan of this rank alone. FOLD_ONLY: writes F of all segments to ``folded``
    [B, H, K, V] and nothing else; it includes the initial state unless HAS_IN. Otherwise a hop of the chain.
    """
    begin(PDL)
    began = cycles() if PACE > 0 else 0
    # Blocks take tiles in ascending order on every rank, and no block waits for another block of its rank. So the tile
    # that a block waits for is always one that the rank before works on or has sent, and the chain makes progress.
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        scan_tile(
            tile, tile, began, states, log_a, cut, folded, home, there_out, there_in, counters, record,
            nseg, H, max_tiles, timeout_ns, signature, rank, pe_in, pe_out, number,
            K, V, BK, BV, DECAY, BY, DENSE, HAS_CUT, REVERSE, FOLD_ONLY, HAS_IN, HAS_OUT, REGIONS,
            PUSH, SIGNAL, CLOCK, CHECK_EVERY, PACE,
        )  # fmt: skip


# The host ------------------------------------------------------------------------------------------------------------


_INTERPRETED = not isinstance(_propagate_kernel, triton.JITFunction)
_CLOCK = dev.clock_host if _INTERPRETED else dev.clock_device
_CHECK_EVERY = 1 if _INTERPRETED else 32


@dataclass(frozen=True)
class _Edge:
    """The arenas that one direction uses, float32, from the start of its region: this rank's own, that of the rank that
    it sends to, and that of the rank that sends to it. `source` and `target` are those ranks, None at the ends."""

    home: torch.Tensor
    there_out: torch.Tensor
    there_in: torch.Tensor
    pe_out: int
    pe_in: int
    source: int | None
    target: int | None


@dataclass(frozen=True)
class _Channel:
    """What ``propagate`` makes once for a SequenceParallel and uses in all its calls."""

    max_tiles: int
    tile_bytes: int
    regions: int
    counters: torch.Tensor
    edges: tuple[_Edge, _Edge]
    push: Any
    signal: Any
    options: dict[str, Any]
    prepare: Any


def _channel(sp: SequenceParallel, tiles: int = 0) -> _Channel:
    """The one that calls use now, with room for this number of tiles."""
    channel = sp.channels.get("propagate")
    if channel is None:
        channel = sp.channels["propagate"] = _open_channel(sp)
    if tiles > channel.max_tiles:
        channel = sp.channels["propagate"] = _larger(sp, channel, tiles)
    return channel


def _larger(sp: SequenceParallel, channel: _Channel, tiles: int) -> _Channel:
    """A channel of another heap, with room for `tiles`. All ranks come here in the same call, whose states look alike.

    The heap and the channel before stay: kernels that are under way and captured graphs go on with them, on all ranks.
    Each heap is at least twice as large as the one before, so that together they are less than twice the last one.
    """
    needed, had = 2 * tiles * channel.tile_bytes, sp.heap.nbytes
    if sp.open_heap is None:
        raise HeapTooSmall(needed, had)
    if sp.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise HeapTooSmall(needed, had, "a CUDA graph is being captured, before which a call of this size lets it grow")
    try:
        heap = sp.open_heap(max(needed, 2 * had))
    except BetweenRanks:
        raise
    except Exception as error:
        raise HeapTooSmall(needed, had, f"{type(error).__name__}: {error}") from error
    sp.outgrown.append((sp.heap, channel))
    sp.heap = heap
    tell(logging.INFO, f"symmetric memory: {heap.nbytes >> 20} MiB a rank beside {had >> 20} MiB, for larger states")
    larger = _open_channel(sp)
    larger.counters[:COUNTERS].copy_(channel.counters[:COUNTERS])  # a failure that the next rank has yet to hear of
    return larger


def _open_channel(sp: SequenceParallel) -> _Channel:
    heap = sp.heap
    if heap is None:
        raise NotAvailable(f"transport {sp.transport!r} needs a symmetric heap, and this SequenceParallel has none")
    transport = transport_of(sp.transport)
    regions = 3 if transport.stages else 2
    tile_bytes = regions * CHAIN_TILE * 4 + CONTROL_WORDS * 8
    max_tiles = heap.nbytes // (2 * tile_bytes)
    if sp.records is None:
        sp.records = watchdog.ErrorRecord(sp.device)

    def edge(reverse: bool) -> _Edge:
        source, target = sp.neighbours(reverse)
        ends = [sp.rank if rank is None else rank for rank in (target, source)]
        begin = max_tiles * tile_bytes if reverse else 0
        arenas = [heap.local, *(transport.arena(heap, rank) for rank in ends)]
        views = [arena[begin : begin + max_tiles * tile_bytes].view(torch.float32) for arena in arenas]
        return _Edge(*views, *[transport.address(heap, rank) for rank in ends], source, target)

    push, signal = transport.functions()
    return _Channel(
        max_tiles=max_tiles,
        tile_bytes=tile_bytes,
        regions=regions,
        counters=torch.zeros(COUNTERS + 2 * max_tiles, dtype=torch.int64, device=sp.device),
        edges=(edge(False), edge(True)),
        push=push,
        signal=signal,
        options={"maxnreg": 232} | transport.options(),
        prepare=transport.prepare(heap),
    )


def signature_of(states: torch.Tensor, kind: str, reverse: bool, call: str = "") -> sig.Signature:
    """What both ends of a hop must agree on."""
    B, _, H, K, V = states.shape
    number = str(states.dtype).removeprefix("torch.")
    return sig.Signature("state exchange", call, f"{(B, H, K, V)} {number}", kind, reverse, "chain")


@ranks_call
def propagate(
    states: torch.Tensor,
    transition: Transition,
    sp: SequenceParallel | None = None,
    *,
    reverse: bool = False,
    passes: bool = True,
    call: str = "",
) -> None:
    """Replaces the contributions of segments by the states at their boundaries, over all ranks. In place, no autograd.

    Forward: slot s + 1 of ``states`` holds F of segment s. Slot 0 holds the initial state (zeros if none; only the
    first rank's counts). On return slot s is the state that enters segment s, and slot NSEG the one that leaves the
    rank: S_{s+1} = A_s S_s + F_s, or F_s alone where there is a cut. Of "max-plus" it is max(S_s + a_s, F_s).
    Reverse: slot s holds G of segment s. Slot NSEG holds the incoming dS (only the last rank's counts). On return slot
    s is A_s^T slot_{s+1} + G_s, or G_s alone where there is a cut, and slot NSEG what arrived from the right neighbour.

    Args:
        states: [B, NSEG + 1, H, K, V] fp32, contiguous; NSEG >= 0 and may differ between ranks; K in 1..65536
            (1..256 of a dense transition), V in 1..512. Float64 too if the kind has it in `Kind.dtypes`.
        transition: of the segments, its ``a`` [B, NSEG, H, ...] in the dtype of the states, its cut int32 [B, NSEG].
            "dense" takes one segment or none and no cut: A is zero where a document starts.
        sp: the ranks; None is one rank.
        passes: False keeps the scan on this rank although ``sp`` is given.
        call: the op that needs it, the same text on every rank.

    Raises:
        ValueError: bad shapes. HeapTooSmall: the states do not fit the arena, which cannot grow. PeerTimeout,
        PeerMismatch: an earlier call failed, or ranks that need larger arenas do not make the same call; a call that
        fails itself fills ``states`` with NaN and is reported by the next one or sp.check().
    """
    _validate(states, transition, reverse)
    chained = sp is not None and sp.world_size > 1 and passes
    if chained and sp is not None:
        watchdog.raise_pending(sp)
    if states.device.type == "cpu" and not _INTERPRETED:
        raise NotAvailable("propagate on CPU tensors needs Triton's interpreter: set TRITON_INTERPRET=1")
    if not chained or sp is None:
        _launch(states, transition, reverse)
    elif not in_kernel(sp):
        _over_process_group(states, transition, reverse, sp, call)
    else:
        _launch(states, transition, reverse, sp=sp, call=call)


def fits(B: int, H: int, K: int, V: int, kind: str, sp: SequenceParallel) -> bool:
    """Whether the arenas of ``sp`` hold such states, or grow until they do: alike on all ranks."""
    return sp.open_heap is not None or _tiles(kind, B, H, K, V, CHAIN_TILE).count <= _channel(sp).max_tiles


def _tiles(kind: str, B: int, H: int, K: int, V: int, size: int) -> Tiles:
    """Tiles of `size` numbers; of half as many where as many numbers of the transition are read beside them."""
    if kind == "dense":
        return Tiles.dense(B, H, K, V)
    return Tiles.of(B, H, K, V, size, halved=KINDS[kind].by_number)


def _validate(states: torch.Tensor, transition: Transition, reverse: bool) -> None:
    """Checks the arguments of ``propagate``."""
    if states.dim() != 5 or states.size(1) < 1:
        raise ValueError(f"states: expected [B, NSEG + 1, H, K, V], got shape {tuple(states.shape)}")
    B, slots, H, K, V = states.shape
    transition.check(2, (B, slots - 1, H, K, V))
    kind = KINDS[transition.kind]
    if states.dtype not in kind.dtypes or not states.is_contiguous():
        dtypes = " or ".join(str(dtype).removeprefix("torch.") for dtype in kind.dtypes)
        got = f"{states.dtype}, strides {states.stride()}"
        raise ValueError(f"states: expected a contiguous {dtypes} tensor, got {got}")
    if (expected := too_large(K, V, transition.kind == "dense")) is not None:
        raise ValueError(f"states: expected {expected}, got K={K}, V={V}")
    if (reverse and kind.adjoint != transition.kind) or kind.adjoint is None:
        raise ValueError(f"transition: expected a linear one, got the kind {transition.kind!r}")
    if transition.kind == "dense" and (slots > 2 or transition.cut is not None):
        raise ValueError(f"transition: expected one segment at most and no cut if dense, got {slots - 1} segments")
    for name, x, dtype in (("a", transition.a, states.dtype), ("cut", transition.cut, torch.int32)):
        if x is not None and (x.dtype != dtype or x.device != states.device):
            raise ValueError(f"{name}: expected {dtype} on {states.device}, got {x.dtype} on {x.device}")


def _launch(
    states: torch.Tensor, transition: Transition, reverse: bool, *, sp: SequenceParallel | None = None, call: str = "",
    folded: torch.Tensor | None = None, seeded: bool = True,
) -> None:  # fmt: skip
    """One launch: local without ``sp``; with ``folded``, only F_tot (with the initial state where ``seeded``)."""
    B, slots, H, K, V = states.shape
    kind, has_cut = transition.kind, transition.cut is not None
    a, cut = (None if x is None else x.contiguous() for x in (transition.a, transition.cut))
    if sp is None:
        kernel, grid, numbers, constants, options = local_launch(
            B, slots - 1, H, K, V, kind, has_cut, reverse, folded=folded is not None, has_in=not seeded
        )
        if grid[0]:
            launch(kernel, grid, (states, a, cut, folded, *[None] * 5, *numbers), constants, options)
        return
    tiles, constants = sizes_of(states, transition, reverse)
    if tiles.count:
        hop(
            sp, _propagate_kernel, (states, a, cut, None), (slots - 1, H, tiles.count), tiles.count,
            signature_of(states, kind, reverse, call), constants, tiles,
        )  # fmt: skip


def sizes_of(states: torch.Tensor, transition: Transition, reverse: bool) -> tuple[Tiles, dict[str, Any]]:
    """The tiles of states that travel, and the kernel's constants without those of the group."""
    B, _, H, K, V = states.shape
    tiles = _tiles(transition.kind, B, H, K, V, CHAIN_TILE)
    return tiles, _constants(tiles, K, V, transition.kind, transition.cut is not None, reverse)


def hop(
    sp: SequenceParallel, kernel: Any, states: tuple[Optional, ...], numbers: tuple[int, ...], count: int,
    signature: sig.Signature, constants: dict[str, Any], tiles: Tiles,
) -> None:  # fmt: skip
    """One launch of the chain.

    Args:
        states: the kernel's tensors in front of those of the group, and `numbers` those in front of the group's.
        count: of tiles that travel, all of them in calls that look alike.
        constants: without those of the group.
        tiles: of the states, or of the larger ones.
    """
    reverse, channel = signature.backward, _channel(sp, count)
    edge = channel.edges[reverse]
    has_in, has_out = edge.source is not None, edge.target is not None
    sp.calls += 1
    entry = sp.recorder.begin(sp.calls, signature, edge.source, edge.target, "kernel")
    if sp.check_calls:
        sp.check_signature((signature.text(),))
    constants = constants | {
        "HAS_IN": has_in, "HAS_OUT": has_out, "REGIONS": channel.regions, "PUSH": channel.push,
        "SIGNAL": channel.signal,
        "PACE": 0 if has_in or not has_out or _INTERPRETED else PACE * tiles.rows * tiles.cols // CHAIN_TILE,
    }  # fmt: skip
    launch(
        kernel,
        (min(count, MAX_BLOCKS, of_device(states[0].device).multiprocessors),),
        (*states, edge.home, edge.there_out, edge.there_in, channel.counters, sp.records.tensor, *numbers,
         channel.max_tiles, int(sp.timeout_s * 1e9), signature.word(sp.abandoned), sp.rank, edge.pe_in, edge.pe_out,
         sp.calls),
        constants,
        {"num_warps": tiles.warps, "num_stages": 1} | channel.options,
        channel.prepare,
    )  # fmt: skip
    ended(entry)


def _constants(tiles: Tiles, K: int, V: int, kind: str, has_cut: bool, reverse: bool) -> dict[str, Any]:
    """Constants of the kernel; those of the neighbours are for a rank that has none."""
    return {
        "K": K, "V": V, "BK": tiles.rows, "BV": tiles.cols, "DECAY": getattr(segments, KINDS[kind].function),
        "BY": KINDS[kind].by, "DENSE": kind == "dense", "HAS_CUT": has_cut, "REVERSE": reverse,
        "FOLD_ONLY": False, "HAS_IN": False, "HAS_OUT": False, "REGIONS": 2,
        "PUSH": dev.push_store, "SIGNAL": dev.signal_store, "CLOCK": _CLOCK, "CHECK_EVERY": _CHECK_EVERY, "PACE": 0,
    }  # fmt: skip


def local_launch(
    B: int, nseg: int, H: int, K: int, V: int, kind: str, has_cut: bool, reverse: bool, *, folded: bool = False,
    has_in: bool = False,
) -> tuple[Any, tuple[int], tuple[int, ...], dict[str, Any], dict[str, Any]]:  # fmt: skip
    """(kernel, grid, numbers after the nine pointers, constants, options) of the scan over this rank's segments."""
    tiles = _tiles(kind, B, H, K, V, LOCAL_TILE)
    numbers = (nseg, H, tiles.count, 0, 0, 0, 0, 0, 0, 0)
    constants = _constants(tiles, K, V, kind, has_cut, reverse) | {"FOLD_ONLY": folded, "HAS_IN": has_in}
    # Left alone, ptxas aims at more blocks on an SM than the loads in flight allow, and spills.
    options = {"num_warps": tiles.warps, "num_stages": 1, "maxnreg": 232 if kind == "dense" else 128}
    return _propagate_kernel, (tiles.count,), numbers, constants, options


def _over_process_group(
    states: torch.Tensor, transition: Transition, reverse: bool, sp: SequenceParallel, call: str
) -> None:
    """Folds here, scans over the ranks with torch.distributed, and applies here. It works on any machine, and has the
    schedules that the kernel is compared with."""
    from flexsp.scan.schedules import incoming_state

    first = sp.neighbours(reverse)[0] is None
    arrived = incoming_state(*folded_here(states, transition, reverse, first), sp, reverse, call)
    if not first:
        states[:, -1 if reverse else 0].copy_(arrived)
    _launch(states, transition, reverse)


def folded_here(
    states: torch.Tensor, transition: Transition, reverse: bool, seeded: bool
) -> tuple[torch.Tensor, Transition]:
    """What all segments do to the state that enters: F, with the initial state where `seeded`, and the transition."""
    if transition.kind != "dense":
        folded = torch.empty_like(states[:, 0])
        _launch(states, transition, reverse, folded=folded, seeded=seeded)
        return folded, transition.composed()
    entering, F = (states[:, -1], states[:, 0]) if reverse else (states[:, 0], states[:, -1])
    if states.shape[1] == 1:
        A = torch.eye(states.shape[3], device=states.device).expand(*states.shape[:1], *states.shape[2:4], -1)
        return entering if seeded else torch.zeros_like(entering), Transition("dense", A)
    whole = transition.composed()
    with torch.autocast(states.device.type, enabled=False):
        adjoint = whole.adjoint() if reverse else whole
        return adjoint.apply(entering, F) if seeded else F, whole
